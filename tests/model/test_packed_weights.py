"""INT4 packages whose weights stay packed: exactly theirs, nothing lost, the answers of unpacked ones, or refused."""

import pytest
import torch
from quantize_checkpoint import compress, quantize
from quantized import CASES, dense, drawn, listed, refusal, write_quantized
from safetensors.torch import load_file, save_file

from d3serve.kernels.matrix import Int4Matrix, unpack_int4
from d3serve.model import checkpoint, placement
from d3serve.model.checkpoint import load_weights
from d3serve.model.compressed import dequantize, repack
from d3serve.model.engine import DecisionEngine
from d3serve.model.package import open_package
from d3serve.model.weights import FullAttention


@pytest.fixture
def kept_packed(monkeypatch):
    """Let a CPU hold four-bit weights as a GPU does; it multiplies them by the plain definition."""
    monkeypatch.setattr(checkpoint, "multiplies_int4", lambda _: True)


@pytest.mark.parametrize(("device", "multiplies"), [("cuda", True), ("cpu", False)])
def test_where_int4_weights_are_kept(device, multiplies):
    assert placement.multiplies_int4(torch.device(device)) == multiplies


@pytest.mark.parametrize("case", ["int4-symmetric", "int4"])
@pytest.mark.parametrize("shape", [(16, 128), (17, 256), (9, 384), (40, 1024)])
def test_repacking_loses_nothing(case, shape):
    parts, scheme = compress(drawn(*shape), case), CASES[case]
    packed = repack(parts, scheme)
    assert packed.shape == shape
    assert torch.equal(unpack_int4(packed), dequantize(parts, scheme))
    ends = parts | {
        "weight_packed": torch.where(torch.arange(shape[1] // 8) % 2 == 0, 0, -1).int().repeat(shape[0], 1)
    }
    assert torch.equal(unpack_int4(repack(ends, scheme)), dequantize(ends, scheme)), "all bits clear, all set"


@pytest.mark.usefixtures("kept_packed")
@pytest.mark.parametrize("case", ["int4-symmetric", "int4"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_exactly_the_modules_that_a_package_quantizes_stay_packed(
    case, quantization, tiny_checkpoint, tmp_path
):
    """Also beside plain ones in one projection; `fp8` is for plain ones."""
    packed, plain = write_quantized(case, tiny_checkpoint, tmp_path)
    ours = load_weights(open_package(packed), torch.device("cpu"), torch.bfloat16, quantization)
    theirs = load_weights(open_package(plain), torch.device("cpu"), torch.bfloat16)
    assert (ours.format, theirs.format) == ("int4", "bfloat16")
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for mine, wanted in ((a.gate_up, b.gate_up), (a.down, b.down), (a.mixer.out, b.mixer.out)):
            assert isinstance(mine, Int4Matrix)
            assert torch.equal(dense(mine).bfloat16(), wanted)
        if isinstance(a.mixer, FullAttention):
            q, kv = a.mixer.qkv.parts
            assert (type(q), type(kv)) == (Int4Matrix, torch.Tensor)
            assert torch.equal(dense(a.mixer.qkv).bfloat16(), b.mixer.qkv)
        else:
            assert torch.equal(a.mixer.inputs, b.mixer.inputs)
    packed_sizes = [each.shape.numel() for each in ours.matrices() if isinstance(each, Int4Matrix)]
    assert len(packed_sizes) == 4 * len(ours.layers) - sum(
        not isinstance(each.mixer, FullAttention) for each in ours.layers
    )
    assert ours.unpacked_bytes == 2 * max(packed_sizes)
    assert theirs.unpacked_bytes == 0


@pytest.mark.parametrize("case", ["int4-symmetric", "int4"])
def test_packed_weights_answer_as_unpacked_ones(case, tiny_checkpoint, tmp_path, questions, monkeypatch):
    package, _ = write_quantized(case, tiny_checkpoint, tmp_path)
    found = []
    for packed in (True, False):
        monkeypatch.setattr(checkpoint, "multiplies_int4", lambda _, packed=packed: packed)
        engine = DecisionEngine.load(str(package), device="cpu", dtype="float32")
        assert engine.info.weights == ("int4" if packed else "float32")
        jobs = [engine.prepare(state, questions) for state in ("a state", "charged twice " * 30, "a state")]
        found.append(torch.tensor([p for job in engine.decide(jobs) for p in listed(job.answers)]))
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.usefixtures("kept_packed")
def test_scales_that_products_do_not_read_are_unpacked(tiny_checkpoint, tmp_path):
    package = quantize(tiny_checkpoint, tmp_path / "packed", "int4")
    tensors = load_file(package / "model.safetensors")
    name = "language_model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].half()
    save_file(tensors, package / "model.safetensors")
    first, second = load_weights(open_package(package), torch.device("cpu"), torch.bfloat16).layers[:2]
    assert isinstance(first.down, torch.Tensor)
    assert isinstance(second.down, Int4Matrix)


@pytest.mark.usefixtures("kept_packed")
@pytest.mark.parametrize(
    ("part", "odd", "reason"),
    [
        ("weight_zero_point", None, "is missing, or a part of it"),
        ("weight_packed", torch.zeros(3, 16, dtype=torch.int32), "is packed inconsistently"),
        ("weight_shape", torch.tensor([8, 128]), "is packed inconsistently"),
    ],
)
def test_packed_parts_that_do_not_fit_are_refused(part, odd, reason, tiny_checkpoint, tmp_path):
    package = quantize(tiny_checkpoint, tmp_path / "packed", "int4")
    tensors = load_file(package / "model.safetensors")
    name = f"language_model.layers.0.mlp.up_proj.{part}"
    del tensors[name]
    save_file(tensors | ({} if odd is None else {name: odd}), package / "model.safetensors")
    message = refusal(package)
    assert "layers.0.mlp.up_proj.weight" in message
    assert reason in message


@pytest.mark.usefixtures("kept_packed")
def test_a_packed_weight_of_another_size_than_the_geometry_says_is_refused(tiny_checkpoint, tmp_path):
    package = quantize(tiny_checkpoint, tmp_path / "packed", "int4")
    tensors, module = load_file(package / "model.safetensors"), "language_model.layers.0.mlp.up_proj."
    tensors |= {module + part: tensor for part, tensor in compress(drawn(8, 128), "int4").items()}
    save_file(tensors, package / "model.safetensors")
    assert "has shape [8, 128]; config.json says [" in refusal(package)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_packed_weights_give_the_bits_of_unpacked_ones(
    tiny_checkpoint, tmp_path, questions, monkeypatch
):
    """Alone, in company and on a cached state: also where one pass takes few rows and another takes many."""
    package = quantize(tiny_checkpoint, tmp_path / "packed", "int4")
    found = []
    for packed in (True, False):
        monkeypatch.setattr(checkpoint, "multiplies_int4", lambda _, packed=packed: packed)
        engine = DecisionEngine.load(str(package), device="cuda", dtype="bfloat16", state_cache_bytes=2**26)
        states = ("a state", "charged twice", "word " * 700)
        for turn in ((0,), (0, 1, 2), (0,), (1, 0), (2,)):
            jobs = [engine.prepare(states[index], questions) for index in turn]
            found.append([listed(job.answers) for job in engine.decide(jobs)])
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    (alone,), among = found[0], found[1][0]
    assert alone == among
