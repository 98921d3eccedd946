"""What answers are measured against: the reference's operations in FP32, and their products by BF16 parts."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from d3serve.kernels import reference
from d3serve.kernels.matrix import StackedMatrix
from d3serve.kernels.operations import Operations
from d3serve.kernels.segments import AttentionShape, Segment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H, HK, D = 6, 2, 16


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("rounding")
    sys.modules.pop("rounding")


@pytest.fixture
def split_products(rounding):  # noqa: ARG001 - which it imports
    yield importlib.import_module("split_products")
    sys.modules.pop("split_products")


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_the_rounded_reference_has_every_operation_of_a_pass(rounding):
    asked = {name for name in vars(Operations) if not name.startswith("_")} - {"int4_linear"}
    assert "embed" in asked
    assert asked <= set(dir(rounding.RoundedOperations)), "but that of INT4 weights, which it is never given"


def test_three_parts_are_the_number_itself(split_products):
    x = torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    assert torch.equal(sum(part.double() for part in split_products.split(x, 3)), x.double())


@pytest.mark.parametrize("rows", [1, 70], ids=["one row", "several steps"])
def test_products_with_bfloat16_weights_err_as_float32_does(split_products, monkeypatch, rows):
    monkeypatch.setattr(split_products, "STEP_ROWS", 32)
    x, weight = torch.randn(rows, 96), torch.randn(40, 96).bfloat16()
    wanted = x.double() @ weight.double().T
    assert relative(split_products.split_linear(x, weight), wanted) < 1e-6
    apart, out = StackedMatrix((weight[:24], weight[24:])), torch.empty(rows, 40)
    assert split_products.split_linear(x, apart, out=out) is out
    assert relative(out, wanted) < 1e-6


def test_a_weight_that_is_no_bfloat16_is_refused(split_products):
    with pytest.raises(TypeError, match="BF16 weights"):
        split_products.split_linear(torch.randn(2, 8), torch.randn(4, 8))


@pytest.mark.parametrize("scores", [2**20, 300], ids=["one step", "several"])
def test_attention_by_parts_is_the_references(split_products, monkeypatch, scores):
    monkeypatch.setattr(split_products, "SCORES", scores)
    segments = (
        Segment(0, 50, 0),
        Segment(50, 20, 50),
        Segment(70, 7, 70, 0, 50),
        Segment(77, 9, 77, 0, 50),
        Segment(86, 5, 86, 50, 20),
    )
    q, k, v = (torch.randn(91, heads, D) for heads in (H, HK, HK))
    plan, out = reference.Plan(segments), torch.full_like(q, float("nan"))
    operations = split_products.SplitOperations(frozenset(), 1)
    cut = operations.cut_attention(segments, AttentionShape(False, H, HK, D, q.dtype, q.device))
    pairs = sum(operations.attention_steps(q, k, v, out, cut, softmax_scale=0.25))
    wanted = reference.prefix_bidir_attention(q, k, v, plan, softmax_scale=0.25)
    assert relative(out, wanted) < 2e-5  # BF16 operands: 2e-3
    assert pairs == plan.pairs
