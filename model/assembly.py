"""From a model's name to the parts of an engine: a package opened and loaded, pools sized to the device."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch

from d3serve.errors import InvalidSettings
from d3serve.kernels.operations import LinearRule
from d3serve.kernels.segments import LongAttention
from d3serve.model.backbone import Backbone, Pools, row_bytes, slot_bytes
from d3serve.model.capacity import MemoryPlan, divide_pools, plan_memory
from d3serve.model.checkpoint import (
    free_bytes,
    load_tower,
    load_weights,
    require_memory,
    require_tower_memory,
)
from d3serve.model.config import DecisionConfig, Geometry
from d3serve.model.device_faults import watched
from d3serve.model.disk_tier import DiskTier, own_folder
from d3serve.model.host_tier import HostTier
from d3serve.model.hub import LocatedPackage, locate
from d3serve.model.media import MediaKind
from d3serve.model.package import Package, open_package
from d3serve.model.placement import (
    Device,
    Dtype,
    Quantization,
    choose_linear_rule,
    choose_long_attention,
    default_dtype,
    place,
)
from d3serve.model.prompt import PromptFormat
from d3serve.model.random_weights import random_tower, random_weights
from d3serve.model.remote_format import choose_format
from d3serve.model.shards import hold_tower
from d3serve.model.state_cache import StateCache
from d3serve.model.tokenizer import SpecialTokens
from d3serve.model.vision import VisionTower, tower_activation_bytes
from d3serve.model.vision_config import VisionGeometry
from d3serve.model.weights import Weights, to_float8
from d3serve.schemas import ModelInfo

CPU_CACHE_BYTES = 256 * 2**20
STATE_TTL_S = 86_400.0  # as long as a result is kept, unless said otherwise

log = logging.getLogger(__name__)

LoadFormat = Literal["safetensors", "random"]


class LoadOptions(TypedDict, total=False):
    """How to load a package; what is left out, or None, is chosen here."""

    revision: str | None  # of the Hub; None means the pinned one
    device: Device | None  # None takes a GPU if there is one
    dtype: Dtype | None  # None means what the device is fast at, for a model of that width
    state_cache_bytes: int | None  # memory of the pools; None takes a share of what the weights leave
    state_cache_host_bytes: int  # pinned host memory for states that the pools had to let go; 0 means none
    state_cache_dir: (
        Path | None
    )  # folder of files of long states, which outlive this process; None keeps none
    state_ttl_s: float  # how long such a file stays after the last question about its state
    special_tokens_in_text: SpecialTokens  # how control tokens inside user text are read; `plain` unless said
    load_format: LoadFormat  # `random` draws the weights instead of reading them
    quantization: (
        Quantization | None
    )  # `fp8` quantizes plain matrices, as published; `fp8-all` also linear inputs
    linear_rule: LinearRule | None  # whose gated delta rule a GPU runs; None lets the card decide
    attention: LongAttention | None  # who attends to long states; None takes the fastest that keeps BF16
    pass_tokens: int | None  # token budget of a pass; None means what the device holds
    pass_questions: int | None  # most questions in a pass; None means any number
    trust_remote_code: bool  # let the package's own `d3_format.py` render layouts that we do not know


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    info: ModelInfo
    config: DecisionConfig
    format: PromptFormat
    backbone: Backbone
    cache: StateCache
    plan: MemoryPlan
    pass_tokens: int | None = None
    pass_questions: int | None = None


class Kernels(TypedDict):
    """Who does what on a GPU, where more than one can."""

    linear_rule: LinearRule
    long_attention: LongAttention


def assemble(model: str, options: LoadOptions) -> EngineParts:
    """Find, open and load a package, a local folder or Hub id, and allocate its pools.

    Raises:
        InvalidCheckpoint: the package is incomplete, inconsistent, of an unknown kind, or too large here.
        InvalidSettings, DeviceError: an option asks for what is not there; the accelerator failed.
    """
    quantization, special_tokens = options.get("quantization"), options.get("special_tokens_in_text", "plain")
    load_format: LoadFormat = options.get("load_format", "safetensors")
    with_code = options.get("trust_remote_code", False)
    device, dtype = place(options.get("device"), options.get("dtype"), quantization)
    kernels = kernels_of(options, device, dtype)
    located = locate(model, options.get("revision"), with_code=with_code)
    package = open_package(located.folder, any_layout=with_code)
    if options.get("dtype") is None:
        dtype = default_dtype(device, package.geometry.hidden)
    vision = tower_of(package, load_format)
    prompt_format = choose_format(package, special_tokens, vision.tokens if vision else None)
    geometry, shares_state = package.geometry, package.decision.shares_state
    if folder := options.get("state_cache_dir"):
        own_folder(folder)  # what is wrong with it is told before minutes of reading weights
    with watched(device):
        tower = read_or_draw_tower(package, vision, device, dtype, load_format) if vision else None
        weights = read_or_draw_weights(package, device, dtype, load_format, quantization)
        plan = size_pools(
            geometry,
            dtype,
            device,
            options.get("state_cache_bytes"),
            shares_state=shares_state,
            tower_bytes=tower_activation_bytes(vision, dtype) if vision else 0,
            unpacked_bytes=weights.unpacked_bytes,
        )
        pools = Pools.allocate(geometry, rows=plan.rows, slots=plan.slots, device=device, dtype=dtype)
    kinds = vision.kinds if vision else ()
    rounding = (str(each) for each in kernels.values() if each != "ours")
    read_as = (str(dtype), load_format, str(quantization), special_tokens, *rounding)
    return EngineParts(
        info=describe(located, package, device, dtype, weights.format, read_as, kinds),
        config=package.decision,
        format=prompt_format,
        backbone=Backbone(geometry, weights, pools, mlp_rows=plan.mlp_rows, tower=tower, **kernels),
        cache=make_state_cache(geometry, plan, pools, options),
        plan=plan,
        pass_tokens=options.get("pass_tokens"),
        pass_questions=options.get("pass_questions"),
    )


def kernels_of(options: LoadOptions, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose kernels; a log says which, since it may be the card that decides, or what is installed."""
    rule = choose_linear_rule(options.get("linear_rule"), device, dtype)
    attention = choose_long_attention(options.get("attention"), device, dtype)
    rules = {"ours": "our rule", "fla": "flash-linear-attention's rule"}
    readers = {"ours": "cuDNN and ours", "fa3": "FlashAttention-3", "fp8": "FlashAttention-3 in FP8"}
    log.info("linear layers: %s on %s", rules[rule], device)
    log.info("long states: %s on %s", readers[attention], device)
    return {"linear_rule": rule, "long_attention": attention}


def tower_of(package: Package, load_format: LoadFormat) -> VisionGeometry | None:
    """The vision tower to load; None for a package of text alone.

    That is one without such weights, or without a word on how media are prepared, or in a layout in which nobody has
    described where they stand.

    Raises:
        InvalidCheckpoint: there is a tower, of a kind that we do not compute.
    """
    if package.decision.prompt_layout is not None:
        return None
    if load_format != "random" and not hold_tower(package.weight_files):
        return None
    return package.vision()


def read_or_draw_tower(
    package: Package,
    vision: VisionGeometry,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat,
) -> VisionTower:
    """The package's vision tower on the device, or a made-up one of the same shapes."""
    if load_format == "random":
        require_tower_memory(vision, dtype, free_bytes=free_bytes(device))
        return VisionTower(vision, random_tower(vision, device, dtype)[0])
    return VisionTower(vision, load_tower(package, vision, device, dtype))


def read_or_draw_weights(
    package: Package,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat,
    quantization: Quantization | None,
) -> Weights:
    """The package's weights on the device, or made-up ones of the same shapes."""
    if load_format == "random":
        require_memory(package.geometry, dtype, free_bytes=free_bytes(device))
        drawn = random_weights(package.geometry, device, dtype)[0]
        return to_float8(drawn, inputs=quantization == "fp8-all") if quantization else drawn
    return load_weights(package, device, dtype, quantization)


def describe(
    located: LocatedPackage,
    package: Package,
    device: torch.device,
    dtype: torch.dtype,
    weights: str,
    read_as: Sequence[str],
    media: Sequence[MediaKind] = (),
) -> ModelInfo:
    """What is served; the identity covers `read_as` too, on which answers depend as well."""
    config = package.decision
    max_length = config.max_length or package.geometry.max_positions
    identity = ":".join((located.identity, *read_as))
    return ModelInfo(
        name=located.name,
        revision=located.revision,
        identity=hashlib.sha256(identity.encode()).hexdigest()[:32],
        attention_mode=config.attention_mode,
        prompt_layout=config.prompt_layout,
        validated_length=config.validated_length or max_length,
        max_length=max_length,
        dtype=str(dtype).removeprefix("torch."),
        weights=weights,
        device=str(device),
        modalities=("text", *media),
    )


def size_pools(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int | None,
    *,
    shares_state: bool,
    tower_bytes: int = 0,
    unpacked_bytes: int = 0,
) -> MemoryPlan:
    """Size the pools and the longest pass: on a GPU by what the weights leave, on a CPU by a fixed budget.

    `tower_bytes` stay free for a vision tower's activations, `unpacked_bytes` for an INT4 matrix in use.

    Raises:
        InvalidSettings: not even the shortest pass fits, or `pool_bytes` are too few for one row.
    """
    if device.type != "cuda":
        budget, free = CPU_CACHE_BYTES if pool_bytes is None else pool_bytes, 0
        plan = divide_pools(geometry, dtype, budget, shares_state=shares_state)
    else:
        free = torch.cuda.mem_get_info(device)[0] - tower_bytes
        plan = plan_memory(
            geometry,
            dtype,
            free,
            shares_state=shares_state,
            pool_bytes=pool_bytes,
            unpacked_bytes=unpacked_bytes,
        )
    if pool_bytes is not None and not plan.rows:
        raise InvalidSettings(
            f"state_cache_bytes is {pool_bytes}, too little for one row: a state takes {slot_bytes(geometry, dtype)} "
            f"bytes and {row_bytes(geometry, dtype)} for each row",
            field="state_cache_bytes",
        )
    if not plan.pass_rows:
        raise InvalidSettings(
            f"the weights leave {free / 1e9:.1f} GB of device memory, too little for a pass beside a state cache of "
            f"{'any size' if pool_bytes is None else f'{pool_bytes / 1e9:.1f} GB'}",
            field="state_cache_bytes",
        )
    return plan


def make_state_cache(geometry: Geometry, plan: MemoryPlan, pools: Pools, options: LoadOptions) -> StateCache:
    """The bookkeeping of `pools`, with host memory and a folder behind it where they are asked for."""
    host_bytes, folder = options.get("state_cache_host_bytes", 0), options.get("state_cache_dir")
    return StateCache(
        rows=plan.rows,
        slots=plan.slots,
        row_bytes=row_bytes(geometry, pools.k.dtype),
        slot_bytes=slot_bytes(geometry, pools.k.dtype),
        tier=HostTier(pools, host_bytes) if host_bytes else None,
        disk=DiskTier(pools, folder, options.get("state_ttl_s", STATE_TTL_S)) if folder else None,
    )
