"""Tensors read through pinned memory are those of the file, whatever their size, place and type."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3serve.errors import InvalidCheckpoint
from d3serve.model import shards
from d3serve.model.checkpoint import load_weights
from d3serve.model.package import open_package
from d3serve.model.shards import named_tensors, staged_tensors, text_name
from d3serve.model.staging import Staging

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device(request.param)


@pytest.fixture
def file(tmp_path):
    """Every type that a package stores, an empty tensor and a scalar."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{number} {kind}": torch.randint(0, 100, (7, 5), generator=generator).to(dtype)
        for number, (kind, dtype) in enumerate(shards.TYPES.items())
    }
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.mark.parametrize("chunk", [1, 3, 64, 140, 4096])
def test_tensors_are_those_of_the_file(chunk, file, device, monkeypatch):
    monkeypatch.setattr(Staging.__init__, "__defaults__", (chunk,))
    wanted = load_file(file)
    names = sorted(wanted)
    for name, tensor in zip(names, staged_tensors(file, names, device), strict=True):
        assert tensor.device.type == device.type
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor.cpu().view(-1).view(torch.uint8), wanted[name].view(-1).view(torch.uint8))
        assert tensor.shape == wanted[name].shape


def test_shares_of_a_file_are_all_of_it(file):
    shared = [
        stored for share in range(3) for stored, _, _ in named_tensors(file, CPU, share=share, shares=3)
    ]
    assert sorted(shared) == sorted(load_file(file))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(file):
    with Staging(file, CPU) as open_file, pytest.raises(EOFError, match="ends at byte"):
        open_file.read(0, file.stat().st_size + 1)


def test_a_type_that_no_package_holds_is_refused(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "file.safetensors")
    with pytest.raises(
        InvalidCheckpoint, match=r"file\.safetensors: tensor a is F64, which no package holds"
    ):
        list(staged_tensors(tmp_path / "file.safetensors", ["a"], CPU))


def test_weights_through_pinned_memory_are_those_of_the_file(tiny_checkpoint, monkeypatch):
    package = open_package(tiny_checkpoint)
    mapped = load_weights(package, CPU, torch.bfloat16)

    def staged(path, device, name_of=text_name, *, share=0, shares=1):
        for stored, name, _ in list(named_tensors(path, device, name_of, share=share, shares=shares)):
            (tensor,) = staged_tensors(path, [stored], device)
            yield stored, name, tensor

    monkeypatch.setattr("d3serve.model.checkpoint.named_tensors", staged)
    through = load_weights(package, CPU, torch.bfloat16)
    assert torch.equal(mapped.embedding, through.embedding)
    for a, b in zip(mapped.layers, through.layers, strict=True):
        assert torch.equal(a.down, b.down)
        assert torch.equal(a.gate_up, b.gate_up)
        assert torch.equal(a.input_norm, b.input_norm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gets_the_weights_that_a_cpu_gets(tiny_checkpoint):
    package = open_package(tiny_checkpoint)
    ours, wanted = (load_weights(package, torch.device(where), torch.bfloat16) for where in ("cuda", "cpu"))
    assert torch.equal(ours.embedding.cpu(), wanted.embedding)
    for a, b in zip(ours.layers, wanted.layers, strict=True):
        for mine, theirs in (
            (a.first, b.first),
            (a.mixer.out, b.mixer.out),
            (a.gate_up, b.gate_up),
            (a.down, b.down),
        ):
            assert torch.equal(mine.cpu(), theirs)
