"""Who gets a long block and in which steps; and E4M3 around a library that plain PyTorch stands in for."""

import pytest
import torch

from d3serve.kernels import attention_dense, cards
from d3serve.kernels.attention_dense import FLOAT8_PIECE, PIECES_BYTES, dense_blocks, flash3_fault
from d3serve.kernels.attention_tiles import DENSE_ROWS, DENSE_TILE_ROWS, FLASH3_ROWS, FLOAT8_ROWS
from d3serve.kernels.matrix import LARGEST
from d3serve.kernels.prefix_bidir import cut_attention
from d3serve.kernels.segments import AttentionShape, Segment

HOPPER = cards.Card((9, 0), 232_448, 132)
WAVE = DENSE_TILE_ROWS * HOPPER.processors // 24


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(cards, "card", lambda _: HOPPER)


def shape(long, *, causal=False, heads=24, kv_heads=4, head_dim=256, device="cuda"):
    return AttentionShape(causal, heads, kv_heads, head_dim, torch.bfloat16, torch.device(device), long)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("long", ["fa3", "fp8"])
def test_flash_attention_3_takes_shorter_and_longer_states_than_cudnn(long):
    for length in (FLASH3_ROWS.start, DENSE_ROWS.start, DENSE_ROWS.stop, 131_072):
        (block,) = dense_blocks([Segment(0, length, 0)], shape(long))
        eight_bits = long == "fp8" and length >= FLOAT8_ROWS.start
        assert (block.length, block.attention) == (length, "fp8" if eight_bits else "fa3")
        assert bool(dense_blocks([Segment(0, length, 0)], shape("ours"))) == (length in DENSE_ROWS)
    assert dense_blocks([Segment(0, FLASH3_ROWS.start - 1, 0)], shape(long)) == ()
    assert dense_blocks([Segment(0, 50_000, 9, 0, 8)], shape(long)) == (), "a question has a prefix"
    assert dense_blocks([Segment(0, 50_000, 0)], shape(long, causal=True)) == ()


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("long", ["ours", "fa3", "fp8"])
def test_a_step_is_whole_waves_and_what_waits_to_be_joined_is_bounded(long):
    for length in (20_000, 65_536, 97_000):
        (block,) = dense_blocks([Segment(0, length, 0)], shape(long))
        assert block.step_rows % WAVE == 0
        assert WAVE <= block.step_rows <= attention_dense.STEP_PAIRS // length
        if block.attention == "fp8":
            pieces = -(-length // FLOAT8_PIECE)
            assert pieces * block.step_rows * 24 * 256 * 4 <= PIECES_BYTES


def stand_in(calls):
    """FlashAttention-3's function on E4M3 operands, in FP32; it notes what it was asked."""

    def attend(
        q, k, v, *, softmax_scale, num_splits, pack_gqa, q_descale=None, k_descale=None, v_descale=None
    ):
        calls.append((len(k[0]), q.dtype, num_splits))
        assert not pack_gqa
        group = q.shape[2] // k.shape[2]
        scales = [torch.ones(1, k.shape[2]) if x is None else x for x in (q_descale, k_descale, v_descale)]
        assert [tuple(each.shape) for each in scales] == [(1, k.shape[2])] * 3
        q, k, v = (
            x[0].float() * each[0].repeat_interleave(n)[:, None]
            for x, each, n in zip((q, k, v), scales, (group, 1, 1), strict=True)
        )
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * softmax_scale
        return (scores.softmax(-1) @ v).transpose(0, 1)[None].bfloat16()

    return attend


def exact(q, k, v, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    return ((q.double().transpose(0, 1) @ k.transpose(1, 2) * scale).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(("long", "allowed"), [("fa3", 0.005), ("fp8", 0.03)])
def test_heads_whose_keys_and_values_lie_about_large_means_are_attended_to(long, allowed, monkeypatch):
    """Rounded with their means, K and V of the second head would keep a bit or two of what tells keys apart."""
    calls, rows = [], 300
    monkeypatch.setattr(attention_dense, "_flash3", lambda: stand_in(calls))
    monkeypatch.setattr(attention_dense, "FLOAT8_PIECE", 128)
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, heads, 64) for heads in (4, 2, 2))
    k[:, 1, ::7] += 20
    v[:, 1] -= 4
    q[:, 2:] *= 0.4
    q, k, v = (x.bfloat16() for x in (q, k, v))
    block = attention_dense.DenseBlock(0, rows, 0, 128, long)
    out = torch.full_like(q, float("nan"))
    pairs = list(attention_dense.attend_dense(q, k, v, out, block, 0.125))
    assert pairs == [128 * rows, 128 * rows, 44 * rows]
    wanted = exact(q, k, v, 0.125)
    spread = (wanted - v.double().mean(0).repeat_interleave(2, 0)).norm(dim=(0, 2))
    assert (out.double() - wanted)[:, :2].norm() < 3 * allowed * wanted[:, :2].norm()
    assert ((out.double() - wanted).norm(dim=(0, 2)) < 0.6 * spread).all(), (
        "no head lost what tells rows apart"
    )
    eight_bits = (torch.float8_e4m3fn, 3) if long == "fp8" else (torch.bfloat16, 1)
    assert calls == [(rows, *eight_bits)] * 3


def test_numbers_beyond_the_range_are_held_within_it():
    x = torch.tensor([[[-1000.0, 1000.0]], [[1000.0, -1000.0]]])
    values, scale, mean = attention_dense._centred(x)
    assert values.float().abs().max() == LARGEST
    torch.testing.assert_close(values.float() * scale[:, None] + mean, x)
    zeros, scale, _ = attention_dense._centred(torch.full((5, 2, 4), 3.0))
    assert not zeros.float().any()
    assert scale.isfinite().all()


@pytest.mark.usefixtures("_hopper")
def test_a_plan_hands_the_block_over_and_keeps_the_questions():
    """The question behind the state reads K and V as they are in the pool, whoever read the state."""
    rows = FLASH3_ROWS.start
    segments = [Segment(0, rows, 0), Segment(rows, 30, rows, 0, rows)]
    cut = cut_attention(segments, shape("fp8"))
    assert [block.length for block in cut.dense] == [rows]
    assert int(cut.tiles.rows.sum()) == 30


def test_a_wheel_that_is_missing_or_does_not_load_is_told(monkeypatch):
    monkeypatch.setattr(attention_dense, "find_spec", lambda _: None)
    assert "pip install 'd3serve[fa3]'" in flash3_fault()
    monkeypatch.setattr(attention_dense, "find_spec", lambda _: object())

    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(attention_dense, "_flash3", broken)
    assert flash3_fault() == "fa3-fwd does not load: libcudart.so.13: cannot open shared object file"
    monkeypatch.setattr(attention_dense, "_flash3", lambda: print)
    assert flash3_fault() is None
