"""Four-bit weights: packed and unpacked exactly, multiplied as the plain definition does, in one order of sums."""

import pytest
import torch
import torch.nn.functional as F

from d3serve.kernels import cards, int4, reference
from d3serve.kernels.matrix import (
    Int4Matrix,
    StackedMatrix,
    pack_int4,
    quantize_int4,
    sum_rows_alike,
    unpack_int4,
)
from d3serve.kernels.operations import linear

CPU = torch.device("cpu")
PRODUCTS_27B = [(14_336, 5_120), (16_384, 5_120), (5_120, 6_144), (34_816, 5_120), (5_120, 17_408)]
FEW_SUMS = {torch.float32: 1e-6, torch.bfloat16: 5e-4}  # of few sums one may round the other way
# On both sides of every bound: of tiles, and of what is unpacked.
COUNTS = (1, 31, 32, 33, 64, 90, 100, 180, 250, 320, 512, 513, 1_430, 1_536, 1_537, 4_096)


def needs_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


@pytest.fixture
def dtype(device):
    """The interpreter multiplies the bits of BF16 as if they were integers, and cuts where a card rounds."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def drawn(rows, columns, device=CPU, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device)


def parts_of(rows, groups, group, seed=0):
    """Values, scales and zero points at random; the first rows hold what is at the ends."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, groups * group), generator=generator)
    scale = torch.rand(rows, groups, generator=generator).bfloat16() + 2**-7
    zero = torch.randint(0, 16, (rows, groups), generator=generator)
    q[0], q[1], zero[0], zero[1] = 0, 15, 15, 0
    zero[2], zero[3] = 0, 15
    return q, scale, zero


def weight_of(rows, groups=2, group=128, seed=0, device=CPU):
    packed = pack_int4(*parts_of(rows, groups, group, seed))
    return Int4Matrix(*(each.to(device) for each in vars(packed).values()))


def error(ours, wanted):
    """The relative error of a product."""
    return float((ours.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("rows", "groups"), [(4, 1), (5, 3), (70, 2)])
def test_packing_loses_nothing(rows, groups, group):
    q, scale, zero = parts_of(rows, groups, group)
    weight = pack_int4(q, scale, zero)
    wanted = (q.view(rows, groups, group) - zero[:, :, None]).double() * scale.double()[:, :, None]
    assert torch.equal(unpack_int4(weight).double(), wanted.flatten(1))
    assert weight.shape == q.shape
    assert weight.group == group
    assert weight.nbytes == q.numel() // 2 + 3 * scale.numel()
    assert torch.equal(unpack_int4(weight[1:3]).double(), wanted.flatten(1)[1:3])


@pytest.mark.parametrize(("columns", "groups"), [(200, 1), (200, 2), (100, 1), (16, 1), (130, 0)])
def test_columns_that_are_no_whole_groups_are_refused_by_name(columns, groups):
    with pytest.raises(ValueError, match=f"{columns} columns are not whole groups of"):
        pack_int4(torch.zeros(4, columns), torch.ones(4, groups), torch.zeros(4, groups))
    with pytest.raises(ValueError, match=f"{columns} columns are not whole groups of 128"):
        quantize_int4(torch.zeros(4, columns))


def test_quantizing_keeps_a_weight_within_half_a_step():
    weight = drawn(6, 256).bfloat16()
    weight[1] = 0
    weight[2] = weight[2].abs() + 3  # zero stays among the values, so that an absent weight is absent
    packed = quantize_int4(weight)
    step = packed.scale.float().T.repeat_interleave(128, dim=1)
    moved = (unpack_int4(packed) - weight.float()).abs()
    assert (moved <= 0.52 * step + 0.04 * weight.float().abs()).all()  # the scale itself is rounded to BF16
    assert (unpack_int4(packed)[1] == 0).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_kernel_unpacks_the_same_numbers(group, rounded, dtype, device):
    weight, dtype = weight_of(70, 3, group, device=device), dtype if rounded else torch.float32
    wanted = unpack_int4(weight).to(dtype)
    assert torch.equal(int4.unpack(weight, dtype), wanted)
    assert torch.equal(int4.unpack(weight[3:69], dtype), wanted[3:69])


@pytest.mark.parametrize(("rows", "tokens"), [(4, 1), (70, 3), (65, 33), (130, 40)])
@pytest.mark.parametrize("group", [32, 128])
def test_the_product_of_packed_weights_equals_the_definition(rows, tokens, group, dtype, device):
    weight = weight_of(rows, 3, group, device=device)
    x = drawn(tokens, 3 * group + 8, device).to(dtype)[:, : 3 * group]  # rows may be strided
    exact = x.double() @ unpack_int4(weight).double().T
    ours, theirs = int4.multiply_packed(x, weight), reference.int4_linear(x, weight)
    assert error(ours, exact) <= 1.01 * error(theirs, exact) + FEW_SUMS[dtype]
    wide = torch.full((tokens + 2, rows + 5), 7.0, dtype=x.dtype, device=device)
    int4.multiply_packed(x, weight, wide[1:-1, 3:-2])
    assert torch.equal(wide[1:-1, 3:-2], ours)
    assert (wide[[0, -1]] == 7).all()
    assert (wide[:, :3] == 7).all()
    assert (wide[:, -2:] == 7).all()


@pytest.mark.usefixtures("ordered_products")
def test_a_row_has_the_same_bits_in_any_company(dtype, device):
    weight, x = weight_of(70, 2, device=device), drawn(70, 256, device, seed=1).to(dtype)
    whole = int4.multiply_packed(x, weight)
    for count in (1, 3, 32, 33, 64):
        assert torch.equal(int4.multiply_packed(x[:count], weight), whole[:count])
        assert torch.equal(int4.multiply_packed(x[-count:], weight), whole[-count:])
    assert torch.equal(int4.multiply_packed(x, weight[5:]), whole[:, 5:])


@pytest.mark.usefixtures("ordered_products")
def test_sums_run_over_the_columns_in_their_order(device):
    """As those of the library's product do, so that a row has the same bits whichever way its pass takes."""
    if device.type == "cuda":
        pytest.skip("the order within an instruction is the card's: the test of full sizes asks it there")
    weight, x = weight_of(5, 2, 32), drawn(3, 64, seed=1)
    unpacked, total = unpack_int4(weight), torch.zeros(3, 5)
    for column in range(64):
        total += x[:, column, None] * unpacked[None, :, column]
    assert torch.equal(int4.multiply_packed(x, weight), total)


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("alike", [True, False])
def test_either_way_takes_and_gives_the_same(tokens, alike, monkeypatch, device):
    monkeypatch.setattr(int4, "sums_alike", lambda *_: alike)
    if device.type != "cuda":  # what the interpreter does with BF16 is no product
        monkeypatch.setattr(int4, "multiply_packed", reference.int4_linear)
    weight, x = weight_of(40, 2, device=device), drawn(tokens, 256, device).bfloat16()
    exact = x.float() @ unpack_int4(weight).T
    ours = int4.int4_linear(x, weight)
    assert ours.shape == (tokens, 40)
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=1.0)
    into = torch.empty_like(ours)
    int4.int4_linear(x, weight, into)
    assert torch.equal(into, ours)


def test_few_rows_stay_packed_where_both_ways_give_the_same_bits(monkeypatch):
    ways = []
    monkeypatch.setattr(int4, "multiply_packed", lambda *_: ways.append("packed"))
    monkeypatch.setattr(
        int4, "unpack", lambda _, dtype: ways.append("unpacked") or torch.zeros(40, 256, dtype=dtype)
    )
    weight = weight_of(40, 2)
    for alike in (False, True):
        monkeypatch.setattr(int4, "sums_alike", lambda *_, its=alike: its)
        for tokens in (1, int4.PACKED_ROWS, int4.PACKED_ROWS + 1):
            int4.int4_linear(torch.zeros(tokens, 256).bfloat16(), weight)
        int4.int4_linear(torch.zeros(1, 256), weight)  # FP32 has no packed product
    assert ways == ["unpacked"] * 4 + ["packed"] * 2 + ["unpacked"] * 2


@pytest.mark.parametrize(("moved", "rows"), [(0.0, 0), (2**-7, 32), (2**-7, 128), (2**-7, 150)])
def test_one_sum_that_differs_is_enough_to_take_the_librarys_way(moved, rows, monkeypatch):
    """In whichever launch shape."""

    def library(x, weight):
        return (x.float()[:, None] * weight.float()).sum(-1).to(x.dtype)

    def multiply(x, weight):
        out = library(x, unpack_int4(weight).to(x.dtype))
        out[-1, -1] += moved * out[-1, -1].abs() * (len(x) == rows)
        return out

    monkeypatch.setattr(int4, "PACKED_ROWS", 150)
    monkeypatch.setattr(int4, "multiply_packed", multiply)
    monkeypatch.setattr(int4, "unpack", lambda weight, dtype: unpack_int4(weight).to(dtype))
    monkeypatch.setattr(int4.F, "linear", library)
    assert int4.sums_alike.__wrapped__(CPU, 5, 64, 32) == (not moved)


def test_other_columns_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"rows of 128 by INT4 of \[40, 256\]"):
        int4.int4_linear(torch.zeros(3, 128).bfloat16(), weight_of(40, 2))


def test_a_stack_multiplies_each_part_its_own_way():
    above, below = weight_of(40, 2), drawn(6, 256, seed=1).bfloat16()
    stack, x = StackedMatrix((above, below)), drawn(3, 256, seed=2).bfloat16()
    wanted = torch.cat((linear(x, above), linear(x, below)), dim=1)
    assert stack.shape == (46, 256)
    assert stack.nbytes == above.nbytes + below.nbytes
    assert torch.equal(linear(x, stack), wanted)
    into = torch.empty_like(wanted)
    assert linear(x, stack, into).data_ptr() == into.data_ptr()
    assert torch.equal(into, wanted)
    for rows in (slice(10, None), slice(40, None), slice(38, 43), slice(0, 40), slice(45, 46)):
        assert torch.equal(linear(x, stack[rows]), wanted[:, rows])


@needs_a_gpu
@pytest.mark.parametrize(("rows", "columns"), PRODUCTS_27B)
def test_a_row_has_the_same_bits_packed_and_unpacked_at_full_size(rows, columns):
    """In any company, whether the packed way is taken or not."""
    sum_rows_alike()
    device = torch.device("cuda")
    weight = quantize_int4(drawn(rows, columns, device, seed=1))
    unpacked = int4.unpack(weight, torch.bfloat16)
    x = drawn(COUNTS[-1], columns, device, seed=2).bfloat16()
    whole = F.linear(x, unpacked)

    def beside_others(x, weight):
        """As a part of a stack, into some of the columns."""
        wide = torch.empty(len(x), rows + 96, dtype=x.dtype, device=device)
        return int4.int4_linear(x, weight, wide[:, :rows])

    products = {"chosen": int4.int4_linear, "stacked": beside_others}
    changed = [
        (count, name)
        for count in COUNTS
        for part in (slice(count), slice(-count, None))
        for name, product in products.items()
        if not torch.equal(product(x[part], weight), whole[part])
    ]
    assert not changed


@needs_a_gpu
@pytest.mark.parametrize(("rows", "columns"), PRODUCTS_27B)
def test_the_packed_way_is_taken_at_full_size(rows, columns):
    """Where this fails answers are right, and small passes pay for unpacking: the card's library sums otherwise."""
    sum_rows_alike()
    assert int4.sums_alike(torch.device("cuda"), rows, columns, 128)


@needs_a_gpu
@pytest.mark.parametrize(("rows", "columns"), [(70, 384), (5_120, 6_144), (34_816, 5_120)])
def test_hoppers_kernel_gives_the_bits_of_the_one_for_any_card(rows, columns, monkeypatch):
    """On rows that fill no tile, too, and into some columns of a wider output."""
    device = torch.device("cuda")
    if not cards.card(device).is_hopper:
        pytest.skip("no Hopper here")
    from d3serve.kernels import int4_hopper

    weight, x = (
        quantize_int4(drawn(rows + 8, columns, device, seed=1))[8:],
        drawn(700, columns, device).bfloat16(),
    )
    assert int4_hopper.multiplies(x, weight)
    counts = (
        1,
        32,
        33,
        64,
        65,
        96,
        97,
        128,
        129,
        180,
        192,
        250,
        256,
        300,
        400,
        700,
    )  # the last without rows beyond it
    ours = {}
    for count in counts:
        wide = torch.full((count, rows + 24), 7.0, dtype=x.dtype, device=device)
        ours[count] = int4.multiply_packed(x[:count], weight, wide[:, 8 : 8 + rows])
        assert (wide[:, :8] == 7).all()
        assert (wide[:, 8 + rows :] == 7).all()
    monkeypatch.setattr(int4_hopper, "multiplies", lambda *_: False)
    theirs = int4.multiply_packed(x, weight)
    assert [count for count in counts if not torch.equal(ours[count], theirs[:count])] == []


@needs_a_gpu
def test_the_plain_rows_of_a_stack_have_the_same_bits_in_any_company():
    """Few rows over many columns: what a library is most tempted to split."""
    sum_rows_alike()
    weight, x = drawn(96, 5_120, "cuda").bfloat16(), drawn(8_192, 5_120, "cuda", seed=1).bfloat16()
    out = torch.empty(8_192, 16_480, dtype=x.dtype, device="cuda")
    whole = linear(x, StackedMatrix((weight,)), out[:, 16_384:]).clone()
    for count in COUNTS:
        small = torch.empty(count, 16_480, dtype=x.dtype, device="cuda")
        assert torch.equal(torch.mm(x[:count], weight.T, out=small[:, 16_384:]), whole[:count]), count


@needs_a_gpu
@pytest.mark.parametrize(("rows", "columns"), PRODUCTS_27B)
@pytest.mark.parametrize("tokens", [1, 250, 1_430])
def test_the_product_errs_no_more_than_bf16s_own(rows, columns, tokens):
    device = torch.device("cuda")
    weight = quantize_int4(drawn(rows, columns, device, seed=1))
    x = drawn(tokens, columns, device, seed=2).bfloat16()
    exact = x.double() @ unpack_int4(weight).double().T
    theirs = F.linear(x, int4.unpack(weight, torch.bfloat16))
    assert error(int4.multiply_packed(x, weight), exact) <= 1.01 * error(theirs, exact)


@needs_a_gpu
@pytest.mark.parametrize("tokens", [250, 2_000])
def test_a_captured_product_equals_an_eager_one(tokens):
    device = torch.device("cuda")
    weight = quantize_int4(drawn(512, 1_024, device, seed=1))
    x = drawn(tokens, 1_024, device, seed=2).bfloat16()
    eager = int4.int4_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int4.int4_linear(x, weight)
    x.copy_(drawn(tokens, 1_024, device, seed=3))
    graph.replay()
    assert torch.equal(captured, int4.int4_linear(x, weight))
    assert not torch.equal(captured, eager)
