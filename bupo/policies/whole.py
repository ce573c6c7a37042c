"""Any other decoder as one opaque layer: exact, but nothing is shared by sub-policies or remembered between tokens.

Shape legend: R rows (policies folded into rows), T tokens, D width.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from bupo.policies.family import Family, Pick, Step


class History:
    """The input embeddings of the rows so far, from which every step starts anew."""

    def __init__(self, rows: int, slots: int, width: int, like: torch.Tensor) -> None:
        """Allocates room for `slots` tokens a row."""
        self.inputs_RTD = like.new_zeros((rows, slots, width))

    def at(self, positions_NT: torch.Tensor, used: int, count_N: torch.Tensor | None = None) -> History:
        """Needs nothing set."""
        return self

    def take(self, rows: torch.Tensor, used: int, slots: int) -> History:
        """A compact copy of some rows with room for `slots` tokens, the first `used` of them filled."""
        taken = History(len(rows), slots, self.inputs_RTD.shape[2], self.inputs_RTD)
        taken.inputs_RTD[:, :used] = self.inputs_RTD[rows, :used]
        return taken

    def put(self, rows: torch.Tensor, other: History, used: int) -> None:
        """Writes the first `used` tokens of a compact copy back to its rows."""
        self.inputs_RTD[rows, :used] = other.inputs_RTD[:, :used]


class Whole(Family):
    """A decoder that is only known from outside: its embeddings, its body and its head."""

    # PEFT's own word for all linear layers but the head.
    targets: ClassVar[dict[str, tuple[str, ...]]] = {"all-linear": ("all-linear",)}

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes the model as it is."""
        self.config = model.config
        self.body: nn.Module = model.base_model
        self.embeddings = cast(nn.Module, model.get_input_embeddings())
        self.head = cast(nn.Linear, model.get_output_embeddings())
        self.softcap = None

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Input embeddings, [B, T, D]."""
        return self.embeddings(ids_BT)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nothing: the body ends with its own norm."""
        return hidden

    def prepare(self, hidden_RTD: torch.Tensor, step: Step) -> dict[str, Any]:
        """The step itself."""
        return {"step": step}

    def layer(self, index: int, hidden_RTD: torch.Tensor, shared: dict[str, Any], pick: Pick | None) -> torch.Tensor:
        """The whole body in place of the first layer, nothing in place of the others."""
        if index == 0:
            hidden_RTD = self._run(hidden_RTD, shared["step"])
        return hidden_RTD if pick is None else pick(hidden_RTD)

    def _run(self, inputs_RTD: torch.Tensor, step: Step) -> torch.Tensor:
        if step.packing is not None:
            # As padded rows; right padding is harmless in a causal model.
            dense_RTD = inputs_RTD[:, step.packing.place_BT].flatten(0, 1)
            hidden_RTD = self.body(inputs_embeds=dense_RTD, use_cache=False).last_hidden_state
            return hidden_RTD.view(len(inputs_RTD), -1, hidden_RTD.shape[-1])[:, step.packing.source_N]
        if step.cache is None:
            return self.body(inputs_embeds=inputs_RTD, use_cache=False).last_hidden_state
        past = cast(History, step.cache)
        row_R1 = torch.arange(len(inputs_RTD), device=inputs_RTD.device)[:, None]
        past.inputs_RTD[row_R1, step.positions_RT] = inputs_RTD
        hidden = self.body(inputs_embeds=past.inputs_RTD[:, : step.used], use_cache=False).last_hidden_state
        return hidden[row_R1, step.positions_RT]

    def new_cache(self, layers: range, rows: int, slots: int) -> History:
        """Preallocates the inputs of all rows."""
        weight = cast(torch.Tensor, self.embeddings.weight).detach()
        return History(rows, slots, weight.shape[1] if layers else 0, weight)
