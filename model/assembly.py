"""The parts of an engine: weights, pools sized to the device, the state cache, and what is said of the model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from d3serve.errors import InvalidSettings
from d3serve.model.backbone import Pools, row_bytes, slot_bytes
from d3serve.model.checkpoint import Quantization, load_weights
from d3serve.model.config import DecisionConfig, Geometry
from d3serve.model.host_tier import HostTier
from d3serve.model.hub import Package
from d3serve.model.memory import MLP_ROWS, MemoryPlan, divide_pools, plan_memory
from d3serve.model.random_weights import random_weights
from d3serve.model.state_cache import StateCache
from d3serve.model.weights import Weights, to_float8
from d3serve.schemas import ModelInfo

CPU_CACHE_BYTES = 256 * 2**20


def read_or_draw_weights(
    folder: Path,
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["safetensors", "random"],
    quantization: Quantization | None,
) -> Weights:
    """The package's weights on the device, or made-up ones of the same shapes."""
    if load_format == "random":
        drawn = random_weights(geometry, device, dtype)[0]
        return to_float8(drawn) if quantization == "fp8" else drawn
    return load_weights(folder, geometry, device, dtype, quantization)


def describe(
    package: Package,
    config: DecisionConfig,
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    read_as: Sequence[str],
) -> ModelInfo:
    """What is served; the identity covers `read_as` too, on which answers depend as well."""
    max_length = config.max_length or geometry.max_positions
    identity = ":".join((package.identity, *read_as))
    return ModelInfo(
        name=package.name,
        revision=package.revision,
        identity=hashlib.sha256(identity.encode()).hexdigest()[:32],
        attention_mode=config.attention_mode,
        prompt_layout=config.prompt_layout,
        validated_length=config.validated_length or max_length,
        max_length=max_length,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )


def size_pools(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int | None,
    *,
    shares_state: bool,
) -> MemoryPlan:
    """Size the pools and the longest pass: on a GPU by what the weights leave, on a CPU by a fixed budget.

    Raises:
        InvalidSettings: not even the shortest pass fits, or `pool_bytes` are too few for one row.
    """
    if device.type != "cuda":
        budget, free = CPU_CACHE_BYTES if pool_bytes is None else pool_bytes, 0
        plan = divide_pools(geometry, dtype, budget, shares_state=shares_state)
    else:
        free, _ = torch.cuda.mem_get_info(device)
        plan = plan_memory(
            geometry, dtype, free, mlp_rows=MLP_ROWS, shares_state=shares_state, pool_bytes=pool_bytes
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


def make_state_cache(geometry: Geometry, plan: MemoryPlan, pools: Pools, host_bytes: int) -> StateCache:
    """The bookkeeping of `pools`, with host memory behind it if there is any."""
    return StateCache(
        rows=plan.rows,
        slots=plan.slots,
        row_bytes=row_bytes(geometry, pools.k.dtype),
        slot_bytes=slot_bytes(geometry, pools.k.dtype),
        tier=HostTier(pools, host_bytes) if host_bytes else None,
    )
