"""The FP32 reference in our own backbone: TF32 off, plain PyTorch, layers widened one at a time as they are read."""

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import parity
import torch
from engine import Bench
from rounding import RoundedOperations, widened
from split_products import SplitOperations, split_linear
from torch import Tensor

from d3serve.model import backbone as passes
from d3serve.model.backbone import Backbone, PassInputs, Pools
from d3serve.model.capacity import MLP_ROWS
from d3serve.model.passes import PreparedJob
from d3serve.model.plan import QuestionRows, StatePlace, StateRows, plan_rows

PASS_ROWS = 12_000  # rows of short prompts in one pass


@torch.inference_mode()
def exact(
    bench: Bench, jobs: Sequence[PreparedJob], points: Set[str] = frozenset(), *, split: bool = False
) -> Tensor:
    """Probabilities [questions, OPTIONS] in FP32, but for tensors rounded at `points`, all jobs in one pass.

    With `split`, products are those of `split_products`, several times faster.
    """
    g, states, questions, row = bench.geometry, [], [], 0
    for slot, job in enumerate(jobs):
        place = StatePlace(row, len(job.state), slot)
        states.append(StateRows(job.state, place))
        questions += [QuestionRows(block, place) for block in job.blocks]
        row += len(job.state)
    planned = plan_rows(states, questions, scratch_start=row)
    pools = Pools.allocate(
        g, rows=len(planned.tokens), slots=len(jobs), device=bench.device, dtype=torch.float32
    )
    backbone = Backbone(g, bench.weights if split else widened(bench.weights), pools, mlp_rows=MLP_ROWS)
    operations = SplitOperations if split else RoundedOperations
    backbone.ops = operations(points, len(g.layer_types))
    shape = backbone.attention_shape(causal=False)
    cut = backbone.ops.cut_attention(planned.segments, shape)
    inputs = PassInputs.build(backbone.ops, planned, cut, shape)
    with patch.object(passes, "linear", split_linear) if split else nullcontext():
        hidden = backbone.forward(inputs)[: len(planned.readout_rows)]
    return parity.probabilities(hidden.double() @ bench.weights.readout.double().T)


def in_passes(jobs: Sequence[PreparedJob]) -> list[list[PreparedJob]]:
    """Jobs grouped so that a pass of the reference stays small enough to be cheap in memory."""
    groups: list[list[PreparedJob]] = []
    rows = PASS_ROWS
    for job in jobs:
        size = len(job.state) + sum(map(len, job.blocks))
        if rows + size > PASS_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(job)
        rows += size
    return groups


def exact_while(
    bench: Bench, jobs: Sequence[PreparedJob], points: Set[str], has_time: Callable[[], bool]
) -> Tensor:
    """The answers to the first jobs, as many as there `has_time` for: at least one pass of them."""
    found: list[Tensor] = []
    for group in in_passes(jobs):
        if found and not has_time():
            break
        found.append(exact(bench, group, points))
    return torch.cat(found)


def kept(file: Path | None, measure: Callable[[], Tensor]) -> Tensor:
    """What `measure` found, now or when it wrote `file`: the jobs of a row are the same in every run."""
    if file and file.exists():
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]
    found = measure()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, file)
    return found
