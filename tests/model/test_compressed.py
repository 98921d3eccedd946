"""Quantized packages: unpacked bit by bit as the compressed-tensors library does, or refused with the reason."""

import json
import re
from statistics import median

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from quantize_checkpoint import compress, compressor, library_scheme, quantize
from quantized import CASES, dense, drawn, refusal, write_quantized
from safetensors.torch import load_file, save_file

from d3serve.kernels import cards
from d3serve.kernels.matrix import Float8Matrix, quantize_rows
from d3serve.kernels.reference import float8_linear
from d3serve.model import placement
from d3serve.model.checkpoint import load_weights, quantizable
from d3serve.model.compressed import dequantize, repack
from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package
from d3serve.model.package import open_package
from d3serve.model.weights import FullAttention, to_float8


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(16, 128), (17, 256), (9, 384), (40, 1024)])
def test_unpacking_is_exact(case, shape):
    parts, ours = compress(drawn(*shape), case), CASES[case]
    assert set(parts) == ours.parts
    expected = compressor(case).decompress(parts, library_scheme(case))["weight"]
    assert torch.equal(dequantize(parts, ours).bfloat16(), expected)
    assert (expected - drawn(*shape)).abs().max() < 0.5, "and it is the weight that was packed"


@pytest.fixture(params=CASES)
def quantized(request, tiny_checkpoint, tmp_path):
    """The tiny checkpoint with the published set of modules quantized, and the same weights unpacked."""
    return write_quantized(request.param, tiny_checkpoint, tmp_path)


MISFITS = {
    "a shape of": ("int4", {"weight_shape": torch.tensor(16)}),
    "numbers, torch.float32": ("int4", {"weight_shape": torch.tensor([16.0, 128.0])}),
    "a shape of [3]": ("int4", {"weight_shape": torch.tensor([16, 128, 1])}),
    "for a weight of [16, 100]": ("int4", {"weight_shape": torch.tensor([16, 100])}),
    "packs no 16 rows of 128": ("int4", {"weight_packed": torch.zeros(16, 15, dtype=torch.int32)}),
    "torch.int64": ("int4", {"weight_packed": torch.zeros(16, 16, dtype=torch.int64)}),
    "[256] packs": ("int4", {"weight_packed": torch.zeros(256, dtype=torch.int32)}),
    "packs no 1 rows of 16": ("int4", {"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}),
    "scales [2, 128]": ("int4-symmetric", {"weight_scale": torch.ones(2, 128)}),
    "with scales [16]": ("fp8", {"weight_scale": torch.ones(16)}),
    "torch.int8": ("fp8", {"weight": torch.zeros(16, 128, dtype=torch.int8)}),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_parts_that_do_not_belong_together_are_refused(reason):
    case, odd = MISFITS[reason]
    for read in (dequantize, repack) if case != "fp8" else (dequantize,):
        with pytest.raises(ValueError, match=re.escape(reason)):
            read(compress(drawn(16, 128), case) | odd, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_zeros_stay_zero(case):
    assert torch.equal(
        dequantize(compress(torch.zeros(16, 128).bfloat16(), case), CASES[case]), torch.zeros(16, 128)
    )


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_sibling_is_a_package_of_its_format(case, tiny_checkpoint, tmp_path):
    report = check_package(quantize(tiny_checkpoint, tmp_path / "sibling", case))
    assert (report.problems, report.weights) == ((), CASES[case].kind)


def test_a_quantized_package_holds_its_unpacked_weights(quantized):
    cpu = torch.device("cpu")
    ours, plain = (load_weights(open_package(each), cpu, torch.bfloat16) for each in quantized)
    for a, b in zip(ours.layers, plain.layers, strict=True):
        for part in ("gate_up", "down"):
            assert torch.equal(dense(getattr(a, part)).bfloat16(), getattr(b, part))
        assert torch.equal(dense(a.mixer.out).bfloat16(), b.mixer.out)
        if isinstance(
            a.mixer, FullAttention
        ):  # one of its three parts is quantized: unpacked beside the others
            assert torch.equal(a.mixer.qkv, b.mixer.qkv)


def test_published_float8_weights_stay_float8(tiny_checkpoint, tmp_path):
    packed, _ = write_quantized("fp8", tiny_checkpoint, tmp_path)
    weights = load_weights(open_package(packed), torch.device("cpu"), torch.bfloat16)
    stored = load_file(packed / "model.safetensors")["language_model.layers.0.mlp.down_proj.weight"]
    kept = weights.layers[0].down
    assert isinstance(kept, Float8Matrix)
    assert torch.equal(kept.values.view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("case", ["int4-symmetric", "int4"])
def test_an_int4_package_answers_as_its_unpacked_weights(case, tiny_checkpoint, tmp_path, questions):
    answers = []
    for package in write_quantized(case, tiny_checkpoint, tmp_path):
        engine = DecisionEngine.load(str(package), device="cpu", dtype="bfloat16")
        answers.append(engine.decide([engine.prepare("a state", questions)])[0].answers)
    assert answers[0] == answers[1]


def test_a_float8_package_answers_as_transformers_with_float8_products(
    checkpoint_tool, tmp_path, questions, oracle_of, compare
):
    """Every quantized Linear of the oracle gets its input rounded to FP8 row by row, as the packages ask.

    Two layers: in six, noise of 2e-7 in the embeddings already flips roundings that move an answer by 0.1.
    """
    two = checkpoint_tool.write_checkpoint(
        tmp_path / "two", checkpoint_tool.Variant(layers=("linear", "full"))
    )
    packed, plain = write_quantized("fp8", two, tmp_path)
    oracle = oracle_of(plain)

    def rounded(_module, inputs):
        x = inputs[0]
        scale = x.abs().amax(dim=-1, keepdim=True) / 448
        return ((x / scale).to(torch.float8_e4m3fn).float() * scale,)

    stored = load_file(packed / "model.safetensors")
    for name, module in oracle.model.named_modules():
        if f"{name}.weight_scale" in stored:
            module.weight.data = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
            if not name.endswith("q_proj"):  # unpacked beside plain k and v, so its inputs are not rounded
                module.register_forward_pre_hook(rounded)
    engine = DecisionEngine.load(str(packed), device="cpu", dtype="float32")
    for state in ("", "the customer was charged twice " * 5):
        (decided,) = engine.decide([engine.prepare(state, questions)])
        for name, question in questions.items():
            assert compare(decided.answers[name], oracle.probabilities(state, question)) < 1e-4
    unrounded = oracle_of(plain).probabilities("", questions["urgent"])
    (decided,) = engine.decide([engine.prepare("", questions)])
    assert compare(decided.answers["urgent"], unrounded) > 1e-2, "and the rounding is seen"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_float8_tensor_cores_answer_as_the_reference(checkpoint_tool, tmp_path, questions):
    """On weights so strong that rounding to BF16 before FP8 moves p by 0.027 rms on one device alone."""
    two = checkpoint_tool.write_checkpoint(
        tmp_path / "two", checkpoint_tool.Variant(layers=("linear", "full"))
    )
    packed = quantize(two, tmp_path / "packed", "fp8")
    found = []
    for device in ("cuda", "cpu"):
        engine = DecisionEngine.load(str(packed), device=device, dtype="bfloat16", state_cache_bytes=2**26)
        assert isinstance(engine.backbone.weights.layers[1].mixer.qkv, Float8Matrix)
        jobs = [
            engine.prepare(state, questions) for state in (None, "a state", "charged twice", "word " * 30)
        ]
        found.append(
            [
                probability
                for job in engine.decide(jobs)
                for answer in job.answers.values()
                for probability in ([answer.noul] if answer.type == "noul" else answer.probabilities.values())
            ]
        )
    moved = torch.tensor(found[0]) - torch.tensor(found[1])
    assert moved.square().mean().sqrt() < 0.06


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "multiplies"),
    [
        ("cpu", torch.float32, None, True),
        ("cuda", torch.bfloat16, (9, 0), True),
        ("cuda", torch.bfloat16, (8, 9), True),
        ("cuda", torch.bfloat16, (8, 0), False),
        ("cuda", torch.float32, (9, 0), False),
    ],
)
def test_where_float8_weights_are_kept(device, dtype, capability, multiplies, monkeypatch):
    monkeypatch.setattr(cards, "card", lambda _: cards.Card(capability, 0, 0))
    monkeypatch.setattr(placement, "_has_float8_product", lambda _: True)
    assert placement.multiplies_float8(torch.device(device), dtype) == multiplies


def test_plain_weights_are_quantized_on_request_as_the_published_packages_are(tiny_checkpoint):
    cpu, package = torch.device("cpu"), open_package(tiny_checkpoint)
    plain = load_weights(package, cpu, torch.bfloat16)
    quantized = load_weights(package, cpu, torch.bfloat16, "fp8")
    assert torch.equal(plain.embedding, quantized.embedding)
    for a, b in zip(plain.layers, quantized.layers, strict=True):
        values, scale = quantize_rows(a.gate_up)
        assert torch.equal(b.gate_up.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(b.gate_up.scale, scale)
        assert isinstance(b.mixer.out, Float8Matrix)
        if isinstance(a.mixer, FullAttention):
            assert torch.equal(
                b.mixer.qkv.values.view(torch.uint8), quantize_rows(a.mixer.qkv)[0].view(torch.uint8)
            )
        else:
            assert torch.equal(a.mixer.inputs, b.mixer.inputs), "inputs of linear layers stay plain"
    for a, b in zip(to_float8(plain).layers, quantized.layers, strict=True):
        for mine, loaded in (
            (a.first, b.first),
            (a.mixer.out, b.mixer.out),
            (a.gate_up, b.gate_up),
            (a.down, b.down),
        ):
            assert torch.equal(dense(mine), dense(loaded)), "in memory as while loading"
            assert type(mine) is type(loaded)


def test_the_inputs_of_linear_layers_are_quantized_on_request_but_for_what_a_head_forgets(tiny_checkpoint):
    cpu, package = torch.device("cpu"), open_package(tiny_checkpoint)
    plain = load_weights(package, cpu, torch.bfloat16)
    everything = load_weights(package, cpu, torch.bfloat16, "fp8-all")
    linear = [
        pair for pair in zip(plain.layers, everything.layers, strict=True) if hasattr(pair[0].mixer, "A_log")
    ]
    assert linear
    for a, b in linear:
        inputs, gates = b.mixer.inputs.parts
        values, scale = quantize_rows(a.mixer.inputs[: len(inputs.values)])
        assert torch.equal(inputs.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(inputs.scale, scale)
        assert torch.equal(gates, a.mixer.inputs[-2 * len(a.mixer.A_log) :])
    for a, b in zip(to_float8(plain, inputs=True).layers, everything.layers, strict=True):
        assert torch.equal(dense(a.first), dense(b.first)), "in memory as while loading"
        assert torch.equal(dense(a.down), dense(b.down))


def test_all_in_float8_answers_as_transformers_with_float8_products(
    checkpoint_tool, tmp_path, questions, oracle_of, compare
):
    """Every Linear of the oracle but b and a gets FP8 weights, and its input rounded to FP8 row by row."""
    two = checkpoint_tool.write_checkpoint(
        tmp_path / "two", checkpoint_tool.Variant(layers=("linear", "full"))
    )
    engines = {
        kind: DecisionEngine.load(str(two), device="cpu", dtype="float32", quantization=kind)
        for kind in ("fp8", "fp8-all")
    }
    oracle = oracle_of(two)

    def unpacked(x):
        values, scale = quantize_rows(x)
        return values.float() * scale

    names = quantizable(open_package(two).geometry, inputs=True)
    for name in names:
        module = oracle.model.get_submodule("language_model." + name.removesuffix(".weight"))
        module.weight.data = unpacked(module.weight.data)
        module.register_forward_pre_hook(
            lambda _, inputs: (unpacked(inputs[0].flatten(0, 1)).view_as(inputs[0]),)
        )
    apart = {kind: [] for kind in engines}
    for state in ("", "the customer was charged twice " * 5, "a", "b", "late", "x y z", "again and again"):
        wanted = {name: oracle.probabilities(state, question) for name, question in questions.items()}
        for kind, engine in engines.items():
            (decided,) = engine.decide([engine.prepare(state, questions)])
            apart[kind] += [compare(decided.answers[name], each) for name, each in wanted.items()]
    assert median(apart["fp8-all"]) < 1e-4, "but where a sum in another order flips a rounding"
    assert median(apart["fp8"]) > 1e-2, "and the rounding is seen"


@pytest.mark.parametrize("seed", range(3))
def test_float8_products_err_no_more_than_the_librarys_own_run(seed):
    """Against the unpacked weights in FP32: ours in FP32 sums, theirs unpacked to BF16 and run in BF16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 512, generator=generator).bfloat16()
    parts = compress(drawn(256, 512), "fp8")
    scheme = library_scheme("fp8")
    exact = x.float() @ dequantize(parts, CASES["fp8"]).T
    scale, zero = compute_dynamic_scales_and_zp(x, scheme.input_activations, torch.nn.Module())
    theirs_x = fake_quantize(x, scale, zero, scheme.input_activations)
    theirs = torch.nn.functional.linear(theirs_x, compressor("fp8").decompress(parts, scheme)["weight"])
    product = float8_linear(x, Float8Matrix(parts["weight"], parts["weight_scale"].float()))
    errors = [(each.float() - exact).square().mean().sqrt() for each in (product, theirs)]
    assert errors[0] <= 1.01 * errors[1]


def test_parts_of_one_module_may_lie_in_different_files(quantized):
    packed, plain = quantized
    tensors = load_file(packed / "model.safetensors")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = sorted(tensors, key=lambda name: (name.split(".")[-1], name))
    weight_map = {name: files[index >= len(names) // 2] for index, name in enumerate(names)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, packed / file)
    (packed / "model.safetensors").unlink()
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    cpu = torch.device("cpu")
    ours, theirs = (load_weights(open_package(each), cpu, torch.bfloat16) for each in (packed, plain))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(dense(a.gate_up).bfloat16(), b.gate_up)


def test_a_missing_part_is_a_missing_tensor(quantized):
    packed, _ = quantized
    tensors = load_file(packed / "model.safetensors")
    del tensors["language_model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, packed / "model.safetensors")
    message = refusal(packed)
    assert "layers.0.mlp.up_proj.weight" in message
    assert "is missing, or a part of it" in message


@pytest.mark.parametrize("module", ["layers.9.mlp.up_proj", "layers.0.mlp.other_proj", "lm_head"])
def test_parts_of_a_module_that_we_do_not_know_are_refused(module, quantized):
    packed, _ = quantized
    tensors = load_file(packed / "model.safetensors")
    tensors |= {
        name.replace("layers.0.mlp.up_proj", module): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.0.mlp.up_proj" in name
    }
    save_file(tensors, packed / "model.safetensors")
    assert "is not part of this geometry" in refusal(packed)


def test_scales_of_another_shape_are_refused(quantized):
    packed, _ = quantized
    tensors = load_file(packed / "model.safetensors")
    tensors["language_model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(3, 1)
    save_file(tensors, packed / "model.safetensors")
    message = refusal(packed)
    assert "layers.0.mlp.up_proj.weight" in message
    assert "is packed inconsistently" in message or "has shape [3, 1]" in message


def test_quantized_tensors_without_a_declaration_are_refused(quantized):
    packed, _ = quantized
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    assert "model.safetensors: tensor language_model.layers." in refusal(packed)
