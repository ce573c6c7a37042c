"""The lockstep forward: the trunk once a row, then all sub-policies and the reference as one batch.

Adapters sit on the top M layers. Below them every sub-policy computes the same, so those layers (the trunk) run once a
row; above, hidden states are [K, B, T, D] folded into rows, and each linear layer adds its stacked LoRA product
x A^T B^T by one batched product over K. `Stacks` holds the stacked weights: built inside the graph for an update, once
and detached for a rollout, a frozen old policy, or the past pool of an opponent.

Shape legend: K sub-policies (the reference, where asked for, is one row more), B rows, T tokens, D width, V
vocabulary, N selected positions, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from bupo.policies.attention import NAME, LayerCache
from bupo.policies.packing import Packing
from bupo.policies.pool import REFERENCE, PolicyPool, lora_weights

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """LoRA weights of several policies, stacked by layer.

    Attributes:
        names: Policy of each row of the stack.
        weights: Layer name -> (A^T [K, D, R], scaled B^T [K, R, D']).
    """

    names: tuple[str, ...]
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def __len__(self) -> int:
        """Number of policies."""
        return len(self.names)

    def select(self, names: Sequence[str]) -> Stacks:
        """The sub-stack of these policies, in this order."""
        index = [self.names.index(name) for name in names]
        return Stacks(names=tuple(names), weights={key: (a[index], b[index]) for key, (a, b) in self.weights.items()})

    def offload(self) -> Stacks:
        """A copy in CPU memory."""
        return Stacks(
            names=self.names, weights={key: (a.cpu().clone(), b.cpu().clone()) for key, (a, b) in self.weights.items()}
        )

    def to(self, device: torch.device) -> Stacks:
        """The stack on a device."""
        return Stacks(
            names=self.names, weights={key: (a.to(device), b.to(device)) for key, (a, b) in self.weights.items()}
        )


class DialogueCache:
    """Trunk and branch caches of the same dialogues: the trunk holds a row once, the branches K times."""

    def __init__(self, trunk: LayerCache, branches: LayerCache, policies: int) -> None:
        """Joins the two.

        Args:
            trunk: Cache of the trunk layers, [B, ...].
            branches: Cache of the branch layers, [K * B, ...].
            policies: K.
        """
        self.trunk = trunk
        self.branches = branches
        self.policies = policies

    def _branch_rows(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        offsets = torch.arange(self.policies, device=rows.device)[:, None] * total
        return (offsets + rows[None]).reshape(-1)

    def take(self, rows: torch.Tensor, total: int, used: int, slots: int) -> DialogueCache:
        """A compact copy of some of `total` dialogues with room for `slots` tokens."""
        branch_rows = self._branch_rows(rows, total)
        return DialogueCache(
            self.trunk.take(rows, used, slots), self.branches.take(branch_rows, used, slots), self.policies
        )

    def put(self, rows: torch.Tensor, total: int, other: DialogueCache, used: int) -> None:
        """Writes a compact copy back."""
        self.trunk.put(rows, other.trunk, used)
        self.branches.put(self._branch_rows(rows, total), other.branches, used)


class Lockstep:
    """Runs a pool's base for all sub-policies at once. One forward serves rollout and update."""

    def __init__(self, pool: PolicyPool) -> None:
        """Takes over the forward of the pool's LoRA layers.

        Args:
            pool: The pool; its PEFT model keeps working as such while no lockstep forward runs.

        Raises:
            ValueError: The base belongs to a family that cannot be run layer by layer here.
        """
        self.pool = pool
        model = pool.base.model
        config = model.config
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        if config.model_type not in FAMILIES or windowed:
            what = f"{config.model_type} with a sliding window" if windowed else config.model_type
            raise ValueError(
                f"the base is a {what} model; the lockstep forward knows {', '.join(FAMILIES)} with full attention"
            )
        model.set_attn_implementation(NAME)
        self.decoder = model.model
        self.head = model.lm_head
        self.heads = config.num_key_value_heads
        self.head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.first_branch = pool.first_branch
        self.layers = pool.layers
        self._active: Stacks | None = None
        self._modules = pool.modules()
        for key, module in self._modules.items():
            module.forward = self._forward_of(key, module)

    @property
    def device(self) -> torch.device:
        """Where the base lives."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the base."""
        return self.head.weight.dtype

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that carry adapters."""
        return tuple(self._modules)

    def _forward_of(self, key: str, module: LoraLinear) -> Callable[..., torch.Tensor]:
        alone = module.forward
        base = module.base_layer

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._active is None:
                return alone(x, *args, **kwargs)
            a_KDR, b_KRD = self._active.weights[key]
            x_KND = x.reshape(a_KDR.shape[0], -1, x.shape[-1])
            y = base(x)
            delta = torch.bmm(x_KND, a_KDR)
            return torch.baddbmm(y.view(a_KDR.shape[0], -1, y.shape[-1]), delta, b_KRD).view_as(y)

        return forward

    def stacks(self, names: Sequence[str] | None = None, *, reference: bool = False, grad: bool = False) -> Stacks:
        """Stacks the weights of some sub-policies.

        Args:
            names: The sub-policies; all of the pool by default.
            reference: Whether the reference (zero adapter or `sft`) is added as the last row.
            grad: Whether gradients flow back to each adapter's own parameters.

        Returns:
            The stacks in the base's compute type.
        """
        names = [*(self.pool.names if names is None else names), *([REFERENCE] if reference else [])]
        weights = {}
        with torch.set_grad_enabled(grad):
            for key, module in self._modules.items():
                pairs = [lora_weights(module, name) for name in names]
                a = torch.stack([a.T for a, _ in pairs])
                b = torch.stack([b.T * module.scaling[name] for name, (_, b) in zip(names, pairs, strict=True)])
                weights[key] = (a.to(self.dtype), b.to(self.dtype))
        return Stacks(names=tuple(names), weights=weights)

    def new_cache(self, rows: int, policies: int, slots: int) -> DialogueCache:
        """Preallocates the cache of `rows` dialogues of at most `slots` tokens under `policies` policies."""
        like, shape = self.head.weight.detach(), (slots, self.heads, self.head_width)
        return DialogueCache(
            LayerCache(range(self.first_branch), rows, *shape, like),
            LayerCache(range(self.first_branch, self.layers), rows * policies, *shape, like),
            policies,
        )

    def _run(
        self,
        layers: range,
        hidden: torch.Tensor,
        positions_BT: torch.Tensor,
        cache: LayerCache | None,
        used: int,
        keep: Callable[[torch.Tensor], torch.Tensor] | None = None,
        packing: Packing | None = None,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        stacks = self._active
        rotary = self.decoder.rotary_emb(hidden, position_ids=positions_BT)
        mask = None
        if cache is not None:
            cache.at(positions_BT, used)
            later = torch.arange(used, device=hidden.device)[None, None] > positions_BT[:, :, None]
            mask = torch.zeros(later.shape, dtype=hidden.dtype, device=hidden.device)
            mask = mask.masked_fill_(later, torch.finfo(hidden.dtype).min).unsqueeze(1)
        arguments = {
            "attention_mask": mask,
            "position_ids": positions_BT,
            "cache": cache,
            "use_cache": cache is not None,
            "position_embeddings": rotary,
            "packing": packing,
        }

        def whole(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            # With checkpoints it runs once more in the backward pass, when no forward is active.
            before, self._active = self._active, stacks
            try:
                return layer(hidden, **arguments)
            finally:
                self._active = before

        for index in layers:
            layer = self.decoder.layers[index]
            if keep is None or index != layers[-1]:
                hidden = recompute(whole, layer, hidden, use_reentrant=False) if checkpoint else whole(layer, hidden)
            else:
                # After the last attention positions are independent: only those that are asked for need the rest.
                attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **arguments)
                hidden = keep(hidden + attended)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden

    @torch.no_grad()
    def trunk(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        cache: DialogueCache | None = None,
        used: int = 0,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Runs the shared lower layers once a row.

        Args:
            ids_BT: Token ids, right-padded.
            positions_BT: Position of each token in its row.
            cache: Where to continue; None for whole sequences.
            used: With a cache, the highest position plus one.
            packing: Given where the batch is one row of packed tokens, [1, N].

        Returns:
            Hidden states h_BTD that all sub-policies share.
        """
        hidden = self.decoder.embed_tokens(ids_BT)
        if self.first_branch == 0:
            return hidden
        return self._run(range(self.first_branch), hidden, positions_BT, cache and cache.trunk, used, packing=packing)

    def branches(
        self,
        h_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        stacks: Stacks,
        cache: DialogueCache | None = None,
        used: int = 0,
        select: tuple[torch.Tensor, torch.Tensor] | None = None,
        packing: Packing | None = None,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        """Runs the upper layers for all policies of a stack as one batch.

        Args:
            h_BTD: The trunk's output.
            positions_BT: Position of each token in its row.
            stacks: The policies.
            cache: Where to continue; None for whole sequences.
            used: With a cache, the highest position plus one.
            select: Rows and columns of N positions; the others are left out of the last feed-forward layer.
            packing: Given where the batch is one row of packed tokens.
            checkpoint: Whether all branch layers but the last are computed again in the backward pass, not kept.

        Returns:
            Final normed hidden states: h_KBTD, or h_KND at the selected positions.
        """
        policies, (rows, steps, width) = len(stacks), h_BTD.shape
        hidden = h_BTD.expand(policies, -1, -1, -1).reshape(policies * rows, steps, width)
        positions = positions_BT.expand(policies, -1, -1).reshape(policies * rows, steps)

        def pick(hidden: torch.Tensor) -> torch.Tensor:
            assert select is not None
            return hidden.view(policies, rows, steps, width)[:, select[0], select[1]]

        keep = None if select is None else pick
        self._active = stacks
        try:
            branch_cache = None if cache is None else cache.branches
            layers = range(self.first_branch, self.layers)
            hidden = self._run(layers, hidden, positions, branch_cache, used, keep, packing, checkpoint)
        finally:
            self._active = None
        normed = self.decoder.norm(hidden)
        return normed if select is not None else normed.view(policies, rows, steps, width)

    def logp(self, h_KND: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Proposals at selected positions: log-softmax of logits / temperature, fp32 or wider, [K, N, V]."""
        logits_KNV = self.head(h_KND)
        return torch.log_softmax(logits_KNV.to(torch.promote_types(self.dtype, torch.float32)) / temperature, dim=-1)


def freeze(model: nn.Module) -> None:
    """Switches dropout off and gradients of the base off."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
