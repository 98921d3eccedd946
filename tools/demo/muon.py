"""Muon for many small matrices: those of one shape are orthogonalised together, so a step is few launches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MOMENTUM, STEPS = 0.95, 5
# Jordan et al., "Muon", 2024: pulls singular values into about [0.7, 1.2].
QUINTIC = (3.4445, -4.7750, 2.0315)
SCALE = 0.2  # of AdamW's root mean square update, so that one rate serves both: Liu et al., 2025


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised Nesterov momentum, with decoupled weight decay."""

    def __init__(self, matrices: Iterable[Parameter], *, lr: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every matrix by `lr` along its update."""
        if closure is not None:
            raise ValueError("this optimizer never evaluates the loss again")
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [p.grad for p in parameters]
            momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # noqa: SLF001 - as torch.optim does
            updates = orthogonalise(torch.stack(ahead))
            size = SCALE * max(parameters[0].shape) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * size)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [n, rows, columns], roughly, by Newton-Schulz steps."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x.mT if (tall := x.shape[1] > x.shape[2]) else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()
