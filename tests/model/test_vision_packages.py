"""What packages say about their vision towers: read, or of text alone, or refused with the field."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from published import SIZES
from safetensors.torch import load_file, save_file

from d3serve.errors import InvalidCheckpoint, UnsupportedModality
from d3serve.model.checkpoint import require_tower_memory
from d3serve.model.engine import DecisionEngine
from d3serve.model.media import Medium
from d3serve.model.vision_config import VisionGeometry, VisionTokens
from d3serve.model.vision_weights import VisionAllocator
from d3serve.schemas.questions import NoulQuestion

QUESTIONS = {"q": NoulQuestion(type="noul", instructions="Is it red?")}
IMAGE = Medium("image", "a" * 64, np.full((1, 3, 64, 64), 200, dtype=np.uint8))
VIDEO = Medium("video", "a" * 64, np.full((2, 3, 64, 64), 200, dtype=np.uint8), (0.5,))


@pytest.fixture
def package(tmp_path, checkpoint_tool):
    """A package with a tower, to change."""
    return checkpoint_tool.write_checkpoint(tmp_path / "package", checkpoint_tool.Variant(extras=True))


def load(package, **options):
    return DecisionEngine.load(str(package), device="cpu", state_cache_bytes=2**24, **options)


def change(package, name, *path, **values):
    """Set fields of a JSON file, within the objects along `path`."""
    whole = json.loads((package / name).read_text())
    part = whole
    for each in path:
        part = part[each]
    part.update(values)
    (package / name).write_text(json.dumps(whole))


def without_tower(package):
    weights = package / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if not k.startswith("visual.")}, weights)


def test_a_package_with_a_tower_takes_images_and_videos(package):
    engine = load(package)
    assert engine.info.modalities == ("text", "image", "video")
    engine.decide([engine.prepare("x", QUESTIONS, media=(IMAGE, VIDEO))])


TEXT_ALONE = {
    "no weights of a tower": without_tower,
    "no processor files": lambda package: [
        path.unlink() for path in package.glob("*preprocessor_config.json")
    ],
    "no configuration of a tower": lambda package: change(package, "config.json", vision_config=None),
}


@pytest.mark.parametrize("made", TEXT_ALONE)
def test_a_package_without_what_media_need_is_of_text_alone_and_answers_texts_alike(package, made):
    asked = load(package).prepare("x", QUESTIONS)
    TEXT_ALONE[made](package)
    engine = load(package)
    assert engine.info.modalities == ("text",)
    assert engine.backbone.tower is None
    for medium in (IMAGE, VIDEO):
        with pytest.raises(
            UnsupportedModality, match=f"reads text; the state has a {medium.kind}"
        ) as refused:
            engine.prepare("x", QUESTIONS, media=(medium,))
        assert refused.value.field == f"{medium.kind}s"
    assert np.array_equal(engine.prepare("x", QUESTIONS).state, asked.state)


def test_a_package_that_prepares_images_alone_takes_no_videos(package):
    (package / "video_preprocessor_config.json").unlink()
    engine = load(package)
    assert engine.info.modalities == ("text", "image")
    engine.prepare("x", QUESTIONS, media=(IMAGE,))
    with pytest.raises(UnsupportedModality, match="reads text and image; the state has a video"):
        engine.prepare("x", QUESTIONS, media=(IMAGE, VIDEO))


def test_made_up_weights_have_a_tower_where_the_configuration_has_one(package):
    without_tower(package)
    engine = load(package, load_format="random")
    assert engine.info.modalities == ("text", "image", "video")
    (decided,) = engine.decide([engine.prepare("x", QUESTIONS, media=(IMAGE, VIDEO))])
    assert 0 < decided.answers["q"].noul < 1


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_act", "gelu", "gelu_pytorch_tanh"),
        ("patch_size", 14, "expected 16"),
        ("temporal_patch_size", 1, "expected 2"),
        ("spatial_merge_size", 4, "expected 2"),
        ("in_channels", 1, "expected 3"),
        ("out_hidden_size", 96, "expected 128"),
        ("num_position_embeddings", 24, "expected a square"),
        ("num_heads", 5, "multiple of four times num_heads"),
        ("depth", 0, "integer"),
        ("depth", True, "integer"),
        ("depth", 2**30, "its sizes make"),
        ("hidden_size", 2**30, "its sizes make"),
        ("depth", 3, "is missing"),
        ("depth", 1, "is not part of this geometry"),
        ("intermediate_size", 96, "has shape"),
        ("deepstack_visual_indexes", [1], "expected none"),
        ("rope_parameters", {"rope_type": "yarn"}, "axial"),
        ("model_type", "siglip", "qwen3_5_vision"),
    ],
)
def test_a_tower_that_we_do_not_compute_is_refused(package, field, value, told):
    change(package, "config.json", "vision_config", **{field: value})
    with pytest.raises(InvalidCheckpoint, match=re.escape(told)):
        load(package)
    without_tower(package)
    assert load(package).info.modalities == ("text",), "what is not there cannot be wrong"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("preprocessor_config.json", "patch_size", 14),
        ("preprocessor_config.json", "image_mean", [0.48, 0.46, 0.41]),
        ("preprocessor_config.json", "do_normalize", False),
        ("preprocessor_config.json", "rescale_factor", 1),
        ("video_preprocessor_config.json", "merge_size", 1),
        ("video_preprocessor_config.json", "resample", 2),
    ],
)
def test_a_preparation_that_is_not_ours_is_refused(package, name, field, value):
    change(package, name, **{field: value})
    with pytest.raises(InvalidCheckpoint, match=rf"^{re.escape(name)}: {field} is "):
        load(package)


def test_the_published_words_for_our_preparation_are_taken(package):
    ours = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5]}
    ours |= {"image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255, "do_resize": True, "resample": 3}
    ours |= {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        change(package, name, **ours)
    rope = {"rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0}}
    change(package, "config.json", "vision_config", in_channels=3, hidden_act="gelu_pytorch_tanh", **rope)
    assert load(package).info.modalities == ("text", "image", "video")


@pytest.mark.parametrize(
    "field", ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
)
def test_control_tokens_that_the_tokenizer_does_not_know_by_this_number_are_refused(package, field):
    change(package, "config.json", **{field: 7})
    with pytest.raises(InvalidCheckpoint, match="is 7; the tokenizer gives"):
        load(package)


def test_an_incomplete_tower_is_refused_with_what_is_missing(package):
    weights = load_file(package / "model.safetensors")
    del weights["visual.merger.norm.bias"]
    save_file(weights, package / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"merger\.norm\.bias is missing"):
        load(package)


def test_names_of_every_prefix_are_taken(package):
    weights = load_file(package / "model.safetensors")
    expected = load(package).backbone.tower.encode(IMAGE)
    for prefix in ("model.visual.", "language_model.visual.", "model.language_model.visual."):
        named = {name.replace("visual.", prefix): tensor for name, tensor in weights.items()}
        save_file(named, package / "model.safetensors")
        assert torch.equal(load(package).backbone.tower.encode(IMAGE), expected), prefix


# --- sizes -----------------------------------------------------------------------------------------


def published(name: str) -> VisionGeometry:
    size = SIZES[name]
    depth, hidden, ffn, heads = size.vision
    tokens = VisionTokens(248_056, 248_057, 248_053, 248_054)
    return VisionGeometry(depth, hidden, ffn, heads, 48, size.hidden, 1e4, (11, 11, 10), tokens, ("image",))


@pytest.mark.parametrize("name", SIZES)
def test_a_tower_is_counted_to_the_last_parameter(name):
    geometry = published(name)
    allocator = VisionAllocator(geometry, torch.device("meta"), torch.bfloat16)
    allocator.weights()
    assert geometry.parameters == sum(target.numel() for target in allocator.targets.values())


def test_the_tower_of_the_27b_has_its_published_size():
    geometry = published("d3, d3-turbo, d3-ultra")
    assert (geometry.parameters, geometry.head_dim) == (460_730_096, 72)
    with pytest.raises(InvalidCheckpoint, match=r"vision tower needs 0\.9 GB .* 0\.5 GB are free"):
        require_tower_memory(geometry, torch.bfloat16, free_bytes=500_000_000)
    require_tower_memory(geometry, torch.bfloat16, free_bytes=1_000_000_000)


# --- what a state is told by -----------------------------------------------------------------------


def test_states_differ_by_their_media_their_order_and_their_kind(package):
    engine = load(package)
    other = Medium("image", "b" * 64, IMAGE.frames)  # the same pixels of another file
    shown = [(), (IMAGE,), (other,), (IMAGE, other), (other, IMAGE), (IMAGE, IMAGE), (VIDEO,), (IMAGE, VIDEO)]
    keys = [engine.prepare("x", QUESTIONS, media=media).state_key for media in shown]
    assert len(set(keys)) == len(shown)
    assert keys[-1] == engine.prepare("x", QUESTIONS, media=(VIDEO, IMAGE)).state_key, "images are read first"
    assert keys[1] != engine.prepare("x", QUESTIONS, media=(IMAGE,), salt="other").state_key


def test_the_key_of_a_text_is_what_it_was_before_there_were_media(package):
    engine = load(package)
    job = engine.prepare("x", QUESTIONS, salt="salt")
    parts = "".join(f"{len(part)}:{part}" for part in (engine.info.identity, "salt"))
    assert job.state_key == hashlib.sha256(parts.encode() + job.state.tobytes()).hexdigest()


def test_what_media_take_is_in_the_usage(package):
    engine = load(package)
    bare, showing = (engine.prepare("x", QUESTIONS, media=media) for media in ((), (IMAGE,)))
    for state_cached in (False, True):
        (first,), (second,) = engine.decide([bare]), engine.decide([showing])
        assert (first.usage.media_tokens, second.usage.media_tokens) == (0, 2 + 4)
        assert second.usage.state_tokens == first.usage.state_tokens + 6
        assert second.usage.input_tokens == first.usage.input_tokens + 6
        assert second.usage.state_cached is state_cached
