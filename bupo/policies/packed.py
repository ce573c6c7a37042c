"""Frozen linear layers in oneDNN's own layout, for the few rows of a decode step on a CPU.

torch multiplies fp32 matrices on CPUs by a general routine that reads a wide weight at a third of the memory's speed
when there are few rows. oneDNN's kernels, on a weight that was laid out for them beforehand, read it one and a half to
three times as fast for up to about a hundred rows, and no faster beyond (docs/performance.md). The copy takes as much
memory as the weight, so there is a limit on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

MOST_ROWS = 128
LEAST_WEIGHTS = 2**16
"""Below, a call costs more than the layout saves."""


@dataclass
class _Copy:
    """A weight in oneDNN's layout, and what the weight was then."""

    packed: torch.Tensor
    version: tuple[int, int]


class PackedLinears:
    """Linear layers whose weights do not change while they decode."""

    def __init__(self, most_mb: float) -> None:
        """Opens an empty set.

        Args:
            most_mb: Most megabytes of copies; layers beyond that stay as they are.
        """
        self.left = most_mb * 2**20
        self.copies: dict[nn.Linear, _Copy] = {}

    def take_over(self, linear: nn.Linear) -> None:
        """Replaces a layer's forward; the copy is made when a few rows first come without gradients."""
        if type(linear) is nn.Linear:
            linear.forward = lambda input: self._forward(linear, input)

    def _forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight = linear.weight
        few = x.numel() <= MOST_ROWS * x.shape[-1] and weight.numel() >= LEAST_WEIGHTS
        plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
        if few and plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            copy = self._copy(linear)
            if copy is not None:
                return torch.ops.mkldnn._linear_pointwise(x, copy.packed, linear.bias, "none", [], "")
        return F.linear(x, weight, linear.bias)

    def _copy(self, linear: nn.Linear) -> _Copy | None:
        weight = linear.weight
        version, size = (weight.data_ptr(), weight._version), weight.numel() * weight.element_size()
        copy = self.copies.get(linear)
        if copy is not None and copy.version == version:
            return copy
        if copy is None:
            if size > self.left or not torch.backends.mkldnn.is_available():
                return None
            self.left -= size
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.copies[linear] = _Copy(packed=packed, version=version)
        return self.copies[linear]
