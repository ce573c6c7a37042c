"""Muon for weight matrices, AdamW for all else: what a base trained from scratch learns with.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") orthogonalises the momentum of each
matrix by a Newton-Schulz iteration; scaled to the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982, section
2.2) it takes AdamW's learning rate. torch's own Muon iterates in bfloat16, one matrix at a time: on a CPU without
bfloat16 units that costs more than the model, so here matrices of one shape go together in their own type.

Shape legend: M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic; with them singular values end between about .7 and 1.2 within five iterations."""


def orthogonalise(x_MRC: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """U V^T, nearly, of matrices U S V^T: every singular value is brought close to 1.

    Args:
        x_MRC: The matrices.
        iterations: Newton-Schulz iterations.

    Returns:
        The orthogonalised matrices; zero where the input is zero.
    """
    a, b, c = COEFFICIENTS
    tall = x_MRC.shape[1] > x_MRC.shape[2]
    x = x_MRC.mT if tall else x_MRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW(torch.optim.AdamW):
    """One optimizer: Muon for the matrices inside decoder layers, AdamW for embeddings, norms and the head."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        """Sorts a model's parameters.

        Args:
            model: The model.
            lr: Learning rate of both.
            betas: AdamW's.
            weight_decay: Decoupled weight decay of both.
            momentum: Muon's (Nesterov).
        """
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        outer = {id(layer.weight) for layer in ends if layer is not None}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in outer]
        inner = {id(p) for p in matrices}
        groups = [
            {"params": [p for p in trained if id(p) not in inner], "muon": False},
            {"params": matrices, "muon": True},
        ]
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both; gradients of the matrices are used up."""
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        # AdamW passes over parameters without a gradient: the matrices have none any more.
        return super().step(closure)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                shapes[parameter.shape].append(parameter)
        for shape, parameters in shapes.items():
            ahead = []
            for parameter in parameters:
                assert parameter.grad is not None
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - self.momentum)
                ahead.append(parameter.grad.lerp(state["momentum"], self.momentum))
            scale = 0.2 * max(shape) ** 0.5 * group["lr"]
            for parameter, update in zip(parameters, orthogonalise(torch.stack(ahead)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)
                parameter.grad = None
