"""What a state shows, read on a GPU: as near to transformers as on a CPU, with the same bits in any company."""

import gc

import numpy as np
import pytest
import torch
from media_states import QUESTIONS, SHOWN, TEXT, image, video
from oracle import Oracle, patch_rows_by_hand, probabilities_of
from published import SIZES
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from d3serve.kernels.matrix import sum_rows_alike
from d3serve.model.engine import DecisionEngine
from d3serve.model.media import Medium
from d3serve.model.random_weights import random_tower
from d3serve.model.vision import VisionTower, tower_activation_bytes
from d3serve.model.vision_config import VisionGeometry, VisionTokens

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
FP32 = 1e-4
TWO_SIZES = ("d3, d3-turbo, d3-ultra", "d3-mini")
TURN = [(TEXT, ()), *SHOWN.values()]


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


def load(folder, dtype, **options):
    return DecisionEngine.load(
        str(folder), device=DEVICE.type, dtype=dtype, **{"state_cache_bytes": 256 * 2**20, **options}
    )


def probabilities(engine, jobs) -> torch.Tensor:
    """Of each job's questions, in a row a job."""
    decided = engine.decide([engine.prepare(state, QUESTIONS, media=media) for state, media in jobs])
    found = [[p for answer in each.answers.values() for p in probabilities_of(answer)] for each in decided]
    return torch.tensor(found, dtype=torch.float64)


def expected(oracle, jobs) -> torch.Tensor:
    found = [
        [p for question in QUESTIONS.values() for p in oracle.probabilities(state, question, media)]
        for state, media in jobs
    ]
    return torch.tensor(found, dtype=torch.float64)


def rms(differences: torch.Tensor) -> torch.Tensor:
    return differences.float().square().mean().sqrt()


def forget_all(engine) -> None:
    for key in engine.cached_state_keys():
        engine.cache.forget(key)


@pytest.mark.parametrize("mode", ["prefix_bidir", "causal", "noncausal_full_attention"])
def test_a_gpu_answers_as_transformers_does(mode, seeing):
    engine, exact = load(seeing(mode), "float32"), expected(Oracle(seeing(mode)), TURN)
    for _ in ("read", "cached"):
        assert (probabilities(engine, TURN) - exact).abs().max() < FP32


def test_bfloat16_is_as_near_to_float32_as_in_transformers(seeing):
    folder = seeing("prefix_bidir")
    exact, theirs = (expected(Oracle(folder, dtype), TURN) for dtype in (torch.float32, torch.bfloat16))
    ours = probabilities(load(folder, "bfloat16"), TURN)
    assert rms(ours - exact) < 2 * rms(theirs - exact)


def test_a_state_read_and_cached_alone_and_in_company_has_the_same_bits(seeing):
    engine = load(seeing("prefix_bidir"), "bfloat16")
    among = probabilities(engine, TURN)
    assert all(torch.equal(probabilities(engine, TURN), among) for _ in range(4)), "cached"
    for number, job in enumerate(TURN):
        forget_all(engine)
        alone = probabilities(engine, [job])
        assert torch.equal(alone[0], among[number]), job[0]
        assert torch.equal(probabilities(engine, [job]), alone), "cached, and by a graph in the end"


# --- the tower at its published sizes --------------------------------------------------------------


def geometry_of(name: str) -> VisionGeometry:
    size = SIZES[name]
    depth, hidden, ffn, heads = size.vision
    tokens = VisionTokens(248_056, 248_057, 248_053, 248_054)
    return VisionGeometry(depth, hidden, ffn, heads, 48, size.hidden, 1e4, (11, 11, 10), tokens, ("image",))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


PHOTO = Medium("image", "photo", noise(1, 3, 640, 480))
MEDIA = (PHOTO, image(1, 256, 256), video(2, 3, 128, 320), image(3, 1280, 1280))


@pytest.fixture(scope="module", params=TWO_SIZES)
def tower(request):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    sum_rows_alike()
    geometry = geometry_of(request.param)
    weights, named = random_tower(geometry, DEVICE, torch.bfloat16)
    yield VisionTower(geometry, weights), named
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def test_features_have_the_same_bits_whatever_ran_before(tower):
    first = [tower[0].encode(medium) for medium in MEDIA]
    for medium, features in list(zip(MEDIA, first, strict=True))[::-1] * 2:
        assert torch.equal(tower[0].encode(medium), features), medium
        assert features.isfinite().all()


@torch.inference_mode()
def test_features_in_bfloat16_are_as_near_to_float32_as_transformers(tower):
    """All of transformers' own model, in both types, on the same weights."""
    ours, named = tower
    g = ours.geometry
    config = Qwen3_5VisionConfig(
        depth=g.depth, hidden_size=g.hidden, intermediate_size=g.ffn, num_heads=g.heads,
        out_hidden_size=g.out_hidden, num_position_embeddings=g.side**2, attn_implementation="sdpa",
    )  # fmt: skip
    with DEVICE:
        theirs = Qwen3_5VisionModel(config).eval()
    theirs.load_state_dict(named)
    rows, grid = torch.from_numpy(patch_rows_by_hand(PHOTO.frames)).to(DEVICE), torch.tensor([PHOTO.grid])
    exact, rounded = (
        theirs.to(dtype)(rows, grid_thw=grid.to(DEVICE)).pooler_output
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rms(ours.encode(PHOTO) - exact) < 2 * rms(rounded - exact)


@torch.inference_mode()
def test_the_largest_media_take_no_more_memory_than_is_kept_for_them(tower):
    ours = tower[0]
    kept = tower_activation_bytes(ours.geometry, torch.bfloat16)
    for medium in (image(3, 1280, 1280), video(4, 16, 448, 448)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours.encode(medium)
        taken = torch.cuda.max_memory_allocated() - before
        assert kept / 4 < taken < kept, medium
