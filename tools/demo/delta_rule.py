"""The gated delta rule in chunks, in plain PyTorch with autograd, for many short sequences at once.

Within a chunk of C tokens the rule is a triangular system (Yang et al., "Gated Delta Networks", 2024, section
3.3); from chunk to chunk only the recurrent state S [K, V] is carried.
"""

import torch
from torch import Tensor

CHUNK = 32


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [M, T, H, V] and the final state [M, H, K, V], in FP32.

    Args:
        q: [M, T, H, K] scaled; T is a multiple of CHUNK.
        k: [M, T, H, K] of unit length.
        v: [M, T, H, V].
        decay: [M, T, H] logarithm of each step's decay; 0 on padding.
        beta: [M, T, H] how much of each value is written; 0 on padding.
        initial: [M, H, K, V], or None for zeros.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
        decay, beta = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
        return _chunks(q, k, v, decay, beta[..., None], initial)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    grown, left = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    weighted = k * beta
    system = (weighted @ k.transpose(-1, -2)) * between
    solved = _inverse(system)
    new, erased = solved @ (v * beta), solved @ (weighted * grown)
    scores, seen, kept, last = (q @ k.transpose(-1, -2)) * between, q * grown, k * left, grown[..., -1:, :]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial is None else initial
    outputs = []
    for index in range(q.shape[2]):
        written = new[:, :, index] - erased[:, :, index] @ state
        outputs.append(seen[:, :, index] @ state + scores[:, :, index] @ written)
        state = state * last[:, :, index] + kept[:, :, index].transpose(-1, -2) @ written
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2), state


def _inverse(system: Tensor) -> Tensor:
    """Inverse of 1 + the strict lower triangle of `system`, by doubling the size of inverted diagonal blocks.

    With X the inverse of the diagonal blocks [[A, 0], [C, B]] without their C, the next is X - X·C·X. Unlike a
    product of powers this never forms large numbers that cancel.
    """
    rows = torch.arange(CHUNK, device=system.device)
    inverse = torch.eye(CHUNK, device=system.device).expand_as(system)
    size = 1
    while size < CHUNK:
        same = rows[:, None] // (2 * size) == rows // (2 * size)
        below = same & (rows[:, None] // size > rows // size)
        inverse = inverse - inverse @ (system * below) @ inverse
        size *= 2
    return inverse
