"""Weights of several policies as one tensor a layer: what the branches multiply by.

Shape legend: K policies, D width in, D' width out, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """LoRA weights of several policies, stacked by layer.

    Attributes:
        names: Policy of each row of the stack.
        weights: Layer name -> (A^T [K, D, R], scaled B^T [K, R, D']).
        merged: Layer name -> the layer's own weight with the product of the two added, [K, D, D'], where that is small.
    """

    names: tuple[str, ...]
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    merged: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of policies."""
        return len(self.names)

    def select(self, names: Sequence[str]) -> Stacks:
        """The sub-stack of these policies, in this order."""
        index = [self.names.index(name) for name in names]
        return Stacks(
            names=tuple(names),
            weights={key: (a[index], b[index]) for key, (a, b) in self.weights.items()},
            merged={key: weight[index] for key, weight in self.merged.items()},
        )

    def offload(self) -> Stacks:
        """A copy in CPU memory, as LoRA weights alone."""
        return Stacks(
            names=self.names, weights={key: (a.cpu().clone(), b.cpu().clone()) for key, (a, b) in self.weights.items()}
        )

    def to(self, device: torch.device) -> Stacks:
        """The LoRA weights on a device."""
        return Stacks(
            names=self.names, weights={key: (a.to(device), b.to(device)) for key, (a, b) in self.weights.items()}
        )
