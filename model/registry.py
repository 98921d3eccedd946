"""The published Decision 3.0 checkpoints: which revision we mean, what they need, what we do with them.

Nothing here decides how a package is read: that is in its own files. A folder or any other Hub id works too.
"""

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["bfloat16", "float8", "int4", "nvfp4"]


@dataclass(frozen=True)
class Published:
    """One published package.

    `revision` is a commit, or the first digits of one (then it is looked up in the repository's history);
    None means that no revision has been recorded, so the newest is taken.
    `memory_gib` is the least device memory for weights and a working cache. `validated_length` is the longest
    prompt, in tokens, that its makers have tried; longer ones belong to the offline lane. `refusal` says why
    a package cannot be served here, if so; it is known before anything is downloaded.
    """

    repository: str
    revision: str | None
    weights: WeightFormat
    attention_mode: str
    memory_gib: int
    validated_length: int | None = None
    refusal: str | None = None


NO_PUBLIC_LAYOUT = (
    "this prompt layout has no public description, so we cannot render it faithfully; "
    "D3SERVE_TRUST_REMOTE_CODE=true lets the package's own d3_format.py do it"
)
NO_FP4 = "NVFP4 weights need an NVIDIA Blackwell GPU and kernels that this version does not have"
WHOLE, SHARED = "noncausal_full_attention", "prefix_bidir"

PUBLISHED: tuple[Published, ...] = (
    Published("vllm-sr/d3-turbo", "689b3af1", "bfloat16", SHARED, 72, 32_768),
    Published("vllm-sr/d3-ultra", "52ba9e7a", "bfloat16", SHARED, 72, refusal=NO_PUBLIC_LAYOUT),
    Published("vllm-sr/d3", "cbff3a3c", "bfloat16", WHOLE, 72),
    Published("vllm-sr/d3-flash", "521525ef", "bfloat16", WHOLE, 32),
    Published("vllm-sr/d3-mini", "a475367d", "bfloat16", WHOLE, 16),
    Published("vllm-sr/d3-nano", "462efc36", "bfloat16", WHOLE, 8),
    Published("vllm-sr/d3-lite", "a8d25a91", "bfloat16", WHOLE, 4),
    Published("vllm-sr/d3-edge", "18d61df7", "bfloat16", WHOLE, 4),
    Published("vllm-sr/d3-turbo-FP8", None, "float8", SHARED, 48, 32_768),
    Published("vllm-sr/d3-turbo-INT4", None, "int4", SHARED, 24, 32_768),
    Published("vllm-sr/d3-ultra-FP8", None, "float8", SHARED, 48, refusal=NO_PUBLIC_LAYOUT),
    Published("vllm-sr/d3-ultra-INT4", None, "int4", SHARED, 24, refusal=NO_PUBLIC_LAYOUT),
    Published("vllm-sr/d3-ultra-NVFP4", None, "nvfp4", SHARED, 48, refusal=NO_FP4),
    Published("vllm-sr/d3-FP8", None, "float8", WHOLE, 48),
    Published("vllm-sr/d3-W4A16-AWQ", None, "int4", WHOLE, 24),
)


def find(repository: str) -> Published | None:
    """Return what is known about a Hub id; None for one that is not listed."""
    return next((each for each in PUBLISHED if each.repository == repository), None)
