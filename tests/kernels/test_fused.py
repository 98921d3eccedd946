"""Each fused step against the reference, on strided rows, with poisoned outputs."""

import pytest
import torch

from d3serve.kernels import fused, reference

ATOL = 1e-5  # float32 in another order of summation
ROWS = [1, 7, 8, 9]
EPS = 1e-6


def strided(rows, columns, device, seed=0):
    """A slice of a wider projection whose other columns hold NaN."""
    wide = torch.full((rows, columns + 48), float("nan"))
    wide[:, 16 : 16 + columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return wide.to(device)[:, 16 : 16 + columns]


def gain(size, device):
    return torch.randn(size, generator=torch.Generator().manual_seed(7)).to(device)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=ATOL)


@pytest.mark.parametrize("tokens", [[], [2], [6, 0, 6, 3]])
@pytest.mark.parametrize("h", [16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_takes_rows_wherever_their_table_stands(tokens, h, dtype, device):
    table = torch.randn(7, h, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    found = [fused.embed(ids, table.to(device))]
    if device.type == "cuda":
        found.append(fused.embed(ids, table.pin_memory()))
    for each in found:
        assert each.device == ids.device
        assert torch.equal(each.cpu(), table[tokens])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("h", [16, 80])
@pytest.mark.parametrize("first", [True, False])
def test_add_rms_norm(rows, h, first, device):
    x = strided(rows, h, device)
    residual = None if first else strided(rows, h, device, seed=1).contiguous()
    copy = None if first else residual.clone()
    actual = fused.add_rms_norm(x, residual, gain(h, device), EPS)
    for mine, expected in zip(actual, reference.add_rms_norm(x, copy, gain(h, device), EPS), strict=True):
        assert_same(mine, expected)
    assert first or actual[1] is residual


def test_the_residual_stream_of_a_bfloat16_pass_is_not_rounded(device):
    """128 sums in BF16 would lose more than everything else in the pass together."""
    x, residual = (strided(3, 80, device, seed=seed).contiguous().bfloat16() for seed in (0, 1))
    for module in (fused, reference):
        normed, stream = module.add_rms_norm(x, residual, gain(80, device), EPS)
        assert normed.dtype == torch.bfloat16
        assert torch.equal(stream, x.float() + residual.float())
        _, stream = module.add_rms_norm(x, stream, gain(80, device), EPS)
        assert torch.equal(stream, x.float() + residual.float() + x.float())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(3, 1, 32, 8), (4, 2, 16, 16), (0, 2, 16, 4)]
)
def test_qk_norm_rope_store(rows, heads, kv_heads, dim, rotary, device):
    qkv = strided(rows, (2 * heads + 2 * kv_heads) * dim, device)
    angles = strided(rows, rotary, device, seed=2).contiguous()
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(3))[:rows].to(device)
    arguments = (qkv, gain(dim, device), gain(dim, device) + 1, angles.cos(), angles.sin())
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "eps": EPS}
    pools = [torch.full((rows + 3, kv_heads, dim), float("nan"), device=device) for _ in range(4)]
    q = fused.qk_norm_rope_store(*arguments, *pools[:2], slots, **shape)
    assert_same(q, reference.qk_norm_rope_store(*arguments, *pools[2:], slots, **shape))
    torch.testing.assert_close(pools[0], pools[2], rtol=1e-5, atol=ATOL, equal_nan=True)
    assert torch.equal(pools[1][slots], pools[3][slots])
    assert int(pools[1].isnan().any(dim=-1).any(dim=-1).sum()) == 3  # rows that nobody owns stay untouched


def test_rows_without_a_slot_write_nothing(device):
    qkv = strided(3, 6 * 16, device)
    pools = [torch.full((2, 1, 16), float("nan"), device=device) for _ in range(2)]
    angles = torch.zeros(3, 8, device=device)
    slots = torch.tensor([-1, 1, -1], device=device)
    fused.qk_norm_rope_store(
        qkv, gain(16, device), gain(16, device), angles.cos(), angles.sin(), *pools, slots,
        heads=2, kv_heads=1, head_dim=16, eps=EPS,
    )  # fmt: skip
    for pool in pools:
        assert pool[0].isnan().all()
        assert pool[1].isfinite().all()


def test_pools_of_another_type_are_refused(device):
    qkv, angles = strided(1, 6 * 16, device), torch.zeros(1, 8, device=device)
    pool = torch.zeros(1, 1, 16, device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        fused.qk_norm_rope_store(
            qkv, gain(16, device), gain(16, device), angles, angles, pool, pool,
            torch.zeros(1, dtype=torch.int64, device=device), heads=2, kv_heads=1, head_dim=16, eps=EPS,
        )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (1, 24)])
def test_sigmoid_gate(rows, heads, dim, device):
    attn = strided(rows, heads * dim, device).contiguous().view(rows, heads, dim)
    qkv = strided(rows, (2 * heads + 2) * dim, device, seed=1)
    assert_same(fused.sigmoid_gate(attn, qkv), reference.sigmoid_gate(attn, qkv))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (1, 24)])
def test_gated_rms_norm(rows, heads, dim, device):
    x = strided(rows, heads * dim, device).contiguous().view(rows, heads, dim)
    z = strided(rows, heads * dim, device, seed=1)
    assert_same(
        fused.gated_rms_norm(x, z, gain(dim, device), EPS),
        reference.gated_rms_norm(x, z, gain(dim, device), EPS),
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [8, 1024, 1030])
def test_silu_mul(rows, columns, device):
    gate_up = strided(rows, 2 * columns, device)
    assert_same(fused.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_a_norm_without_its_gain_is_noticed(device):
    """Sabotage: the comparison must tell `1 + weight` from `weight`."""
    x = strided(2, 16, device)
    mine, _ = fused.add_rms_norm(x, None, gain(16, device) - 1, EPS)
    with pytest.raises(AssertionError):
        assert_same(mine, reference.add_rms_norm(x, None, gain(16, device), EPS)[0])
