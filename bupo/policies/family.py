"""What the lockstep forward asks of a base: a decoder whose layers can be run one by one.

Shape legend: R rows (policies folded into rows), T tokens, D width, B rows of one policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from bupo.policies.cache import Cache
from bupo.policies.packing import Packing

Pick = Callable[[torch.Tensor], torch.Tensor]
"""Chooses positions of hidden states, [R, T, D] -> what is wanted of them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all layers of one forward are told.

    Attributes:
        positions_RT: Position of each token in its row.
        cache: Where to continue; None for whole sequences.
        used: With a cache, the highest position plus one.
        count_R: With a cache, the real tokens of each row, which come first; None where all are real.
        packing: Given where the batch is one row of packed tokens.
    """

    positions_RT: torch.Tensor
    cache: Cache | None = None
    used: int = 0
    count_R: torch.Tensor | None = None
    packing: Packing | None = None


class Family(ABC):
    """The decoder of a base as layers that can be run one by one."""

    targets: ClassVar[dict[str, tuple[str, ...]]]
    """Names of the linear layers that carry adapters, by `pool.targets`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes a model apart.

        Args:
            model: A causal language model of this family.
        """
        self.config = model.config
        self.head = cast(nn.Linear, model.lm_head)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)

    @property
    def width(self) -> int:
        """Width D of hidden states."""
        return self.config.hidden_size

    @property
    def stream_dtype(self) -> torch.dtype:
        """Type of hidden states between layers."""
        return self.head.weight.dtype

    @abstractmethod
    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Input of the first layer, [B, T, D]."""

    @abstractmethod
    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm after the last layer."""

    @abstractmethod
    def prepare(self, hidden_RTD: torch.Tensor, step: Step) -> dict[str, Any]:
        """What is computed once a forward for all layers."""

    @abstractmethod
    def layer(self, index: int, hidden_RTD: torch.Tensor, shared: dict[str, Any], pick: Pick | None) -> torch.Tensor:
        """One layer.

        Args:
            index: Which.
            hidden_RTD: Its input.
            shared: What `prepare` gave.
            pick: In the last layer, which positions are wanted: the others are left out as early as may be.
        """

    @abstractmethod
    def new_cache(self, layers: range, rows: int, slots: int) -> Cache:
        """Preallocates the cache of some layers for `rows` rows of at most `slots` tokens."""

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """The head on final normed hidden states, at least fp32."""
        logits = self.head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
