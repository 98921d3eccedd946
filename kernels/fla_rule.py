"""The gated delta rule of flash-linear-attention (fla), a second implementation behind our plans and pools.

fla takes sequences that stand side by side, each from a state of its own, in one call. So a pass becomes *calls*:
runs of segments none of which starts from a slot that another of the same call fills. A call holds CALL_CHUNKS chunks
at most; a longer segment is cut between two chunks and goes on from the state, in FP32, that it had there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from d3serve.kernels import recurrence_plan
from d3serve.kernels.recurrence_plan import CHUNK, NOWHERE, RecurrenceSizes
from d3serve.kernels.segments import Segment
from d3serve.kernels.tables import upload

# fla keeps a state for each chunk and copies one for each sequence: half a gigabyte at the 27B's 48 value heads, about
# what our own rule takes.
CALL_CHUNKS = 64
CARRIED = NOWHERE - 1  # instead of a slot number: from one call to the next


class FlaPiece(NamedTuple):
    """A segment, or the rows of one that fall into a call."""

    start: int
    length: int
    initial: int  # slot, NOWHERE for zeros, or CARRIED
    final: int  # slot, NOWHERE or CARRIED

    @property
    def chunks(self) -> int:
        """Chunks of it, the last of which may be short."""
        return -(-self.length // CHUNK)


@dataclass(frozen=True)
class FlaCall:
    """What fla is given beside rows `[first, end)`; int64 on the device."""

    first: int
    end: int
    boundaries: Tensor  # [pieces + 1], counted from `first`
    chunks: Tensor  # [chunks, 2]: piece, chunk inside it
    initial: Tensor  # [pieces]: slot, or any where the piece does not start from one
    from_zero: Tensor  # [pieces, 1, 1, 1], 1 or 0
    kept: Tensor  # [n]: pieces whose final states go
    slots: Tensor  # [n]: to these slots
    all_from_zero: bool
    is_cut: bool  # the last piece goes on in the next call


@dataclass(frozen=True)
class FlaPlan:
    """A pass: tiles for our convolution, calls for fla's rule."""

    tiles: Tensor
    calls: tuple[FlaCall, ...]


def plan_recurrence(
    segments: Sequence[Segment],
    *,
    device: torch.device | str,
    sizes: RecurrenceSizes | None = None,
    call_chunks: int = CALL_CHUNKS,
) -> FlaPlan:
    """Lay a pass's linear layers out for fla, at most `call_chunks` chunks a call.

    Raises:
        ValueError: as `recurrence_plan.plan_recurrence`; rows do not stand side by side, a segment stands before the
            one that fills its slot, or `sizes` ask for padding: fla's launches depend on what a pass holds.
    """
    if sizes is not None:
        raise ValueError("a pass for fla cannot be padded")
    tiles = recurrence_plan.plan_recurrence(segments, device=device).tiles
    return FlaPlan(tiles, tuple(_call(pieces, device) for pieces in _runs(segments, call_chunks)))


def _runs(segments: Sequence[Segment], call_chunks: int) -> Iterator[list[FlaPiece]]:
    """The pieces of each call."""
    pieces: list[FlaPiece] = []
    row, left = segments[0].start, call_chunks
    unfilled = {segment.final_slot for segment in segments} - {NOWHERE}
    for segment in segments:
        initial, final = segment.initial_slot, segment.final_slot
        if segment.start != row:
            raise ValueError(f"segments must stand side by side: row {segment.start} follows row {row}")
        if initial in unfilled:
            raise ValueError(f"a segment stands before the one that fills its slot {initial}")
        row += segment.length
        whole = FlaPiece(segment.start, segment.length, initial, final)
        if not left or (initial != NOWHERE and any(piece.final == initial for piece in pieces)):
            yield pieces
            pieces, left = [], call_chunks
        while whole.chunks > left:
            rows = left * CHUNK
            yield [*pieces, whole._replace(length=rows, final=CARRIED)]
            whole = whole._replace(start=whole.start + rows, length=whole.length - rows, initial=CARRIED)
            pieces, left = [], call_chunks
        pieces.append(whole)
        left -= whole.chunks
        unfilled.discard(final)
    yield pieces


def _call(pieces: Sequence[FlaPiece], device: torch.device | str) -> FlaCall:
    """The tables of one call, in one copy to `device`."""
    start, length, initial, final = np.array(pieces, dtype=np.int64).T
    counts = -(-length // CHUNK)
    owner = np.repeat(np.arange(len(pieces)), counts)
    inside = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    kept = np.flatnonzero(final >= 0)
    lists = (
        np.concatenate(([0], np.cumsum(length))),
        np.stack((owner, inside), axis=1),
        np.maximum(initial, 0),
        (initial == NOWHERE).reshape(-1, 1, 1, 1),
        kept,
        final[kept],
    )
    _, views = upload(lists, torch.int64, device)
    boundaries, chunks, slots_from, from_zero, kept_pieces, slots_to = views
    return FlaCall(
        first=int(start[0]),
        end=int(start[-1] + length[-1]),
        boundaries=boundaries,
        chunks=chunks,
        initial=slots_from,
        from_zero=from_zero,
        kept=kept_pieces,
        slots=slots_to,
        all_from_zero=bool((initial == NOWHERE).all()),
        is_cut=pieces[-1].final == CARRIED,
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_states: Tensor,
    plan: FlaPlan,
    *,
    scale: float,
) -> Tensor:
    """Run fla's chunked rule over every segment of the pass, each from its own initial slot.

    Arguments and result are those of `gated_delta.gated_delta_rule`: q and k come normalised, g is the log of the
    decay, states are FP32. fla tunes its kernels by timing them at their first call, so two processes may round
    differently.
    """
    out = torch.empty_like(v)
    carried = None
    for call in plan.calls:
        rows = slice(call.first, call.end)
        attended, states = chunk_gated_delta_rule(
            *(each[None, rows] for each in (q, k, v, g, beta)),
            scale=scale,
            initial_state=_initial_states(recurrent_states, call, carried),
            output_final_state=call.is_cut or len(call.slots) > 0,
            cu_seqlens=call.boundaries,
            chunk_indices=call.chunks,  # or fla waits for the device to count them
        )
        out[rows] = attended[0]
        if len(call.slots):
            recurrent_states.index_copy_(0, call.slots, states.index_select(0, call.kept))
        carried = states[-1] if call.is_cut else None
    return out


def _initial_states(recurrent_states: Tensor, call: FlaCall, carried: Tensor | None) -> Tensor | None:
    """The state of each piece [pieces, HV, K, V]; None: zeros for all. A slot that nobody owns may hold anything."""
    if call.all_from_zero:
        return None
    states = recurrent_states.index_select(0, call.initial).masked_fill_(call.from_zero.bool(), 0.0)
    if carried is not None:
        states[0] = carried
    return states
