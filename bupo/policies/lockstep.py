"""The lockstep forward: the trunk once a row, then all sub-policies and the reference as one batch.

Adapters sit on the top M layers. Below them every sub-policy computes the same, so those layers (the trunk) run once a
row; above, hidden states are [K, B, T, D] folded into rows, and each linear layer adds its stacked LoRA product
x A^T B^T by one batched product over K, or, on small bases, multiplies by K merged weights. `Stacks` holds the stacked
weights: built inside the graph for an update, once and detached for a rollout, a frozen old policy, or the past pool of
an opponent.

Shape legend: K sub-policies (the reference, where asked for, is one row more), B rows, T tokens, D width, V
vocabulary, N selected positions, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from bupo.policies.cache import DialogueCache
from bupo.policies.families import FAMILIES, family_of
from bupo.policies.family import Step
from bupo.policies.packed import PackedLinears
from bupo.policies.packing import Packing
from bupo.policies.pool import REFERENCE, PolicyPool, lora_weights
from bupo.policies.stacks import Stacks
from bupo.policies.whole import Whole


class Lockstep:
    """Runs a pool's base for all sub-policies at once. One forward serves rollout and update."""

    def __init__(self, pool: PolicyPool) -> None:
        """Takes over the forward of the pool's LoRA layers.

        Args:
            pool: The pool; its PEFT model keeps working as such while no lockstep forward runs.

        Raises:
            ValueError: The base's layers do not do for each policy what PEFT's forward does with that policy alone.
        """
        self.pool = pool
        self.family = family_of(pool.base.model)(pool.base.model)
        self.first_branch = pool.first_branch
        self.layers = pool.layers
        self._active: tuple[tuple[Stacks, int], ...] = ()
        self._modules = pool.modules()
        for key, module in self._modules.items():
            module.forward = self._forward_of(key, module)
        packed = PackedLinears(pool.config.packed_mb)
        for name, module in pool.base.model.named_modules():
            if isinstance(module, nn.Linear) and ".lora_" not in name:
                packed.take_over(module)
        if isinstance(self.family, Whole):
            self._verify()

    @torch.no_grad()
    def _verify(self) -> None:
        """Compares rows with PEFT, for a base whose inside is not known: experts or scaled logits would go wrong."""
        names = self.pool.names[:2]
        ids_BT = torch.arange(8, device=self.device).view(2, 4) + 1
        positions_BT = torch.arange(4, device=self.device).expand(2, 4)
        h_KBTD = self.branches(self.trunk(ids_BT, positions_BT), positions_BT, self.stacks(names, reference=True))
        for name, ours in zip((*names, REFERENCE), self.logits(h_KBTD), strict=True):
            self.pool.model.set_adapter(name)
            alone = self.pool.model(input_ids=ids_BT).logits.to(ours.dtype)
            error = float((ours - alone).abs().max() / alone.abs().max().clamp_min(1e-6))
            if not error < 2e-2:
                kind = self.pool.base.model.config.model_type
                raise ValueError(
                    f"the base is a {kind} model, on which {name} in lockstep differs from PEFT's own forward by "
                    f"{error:.1%} of the largest logit; take a base of another family: {', '.join(FAMILIES)}"
                )
        self.pool.settle()

    @property
    def device(self) -> torch.device:
        """Where the base lives."""
        return self.family.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the base."""
        return self.family.head.weight.dtype

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that carry adapters."""
        return tuple(self._modules)

    def _forward_of(self, key: str, module: LoraLinear) -> Callable[..., torch.Tensor]:
        alone = module.forward
        base = cast(nn.Linear, module.base_layer)

        def of(stacks: Stacks, x: torch.Tensor) -> torch.Tensor:
            x_KND = x.reshape(len(stacks), -1, x.shape[-1])
            if key in stacks.merged:
                mixed_KND = torch.bmm(x_KND, stacks.merged[key])
                mixed_KND = mixed_KND if base.bias is None else mixed_KND + base.bias
            else:
                a_KDR, b_KRD = stacks.weights[key]
                y_KND = base(x).reshape(*x_KND.shape[:2], -1)
                mixed_KND = torch.baddbmm(y_KND, torch.bmm(x_KND, a_KDR), b_KRD)
            return mixed_KND.view(*x.shape[:-1], -1)

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not self._active:
                return alone(x, *args, **kwargs)
            if len(self._active) == 1:
                return of(self._active[0][0], x)
            parts = x.split([len(stacks) * rows for stacks, rows in self._active])
            return torch.cat([of(stacks, part) for (stacks, _), part in zip(self._active, parts, strict=True)])

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
            return self.merge(Stacks(names=tuple(names), weights=weights))

    def merge(self, stacks: Stacks) -> Stacks:
        """Adds the merged weights W + B A of each policy where they are small (`pool.merge_mb`).

        One product then does what three do otherwise, and rank-R products run far below the speed of wide ones. In half
        precision the sum would lose what the adapter adds, so there nothing is merged.

        Args:
            stacks: LoRA weights on the base's device.

        Returns:
            The stacks, with merged weights or as they are.
        """
        layers = {key: self._modules[key].base_layer for key in stacks.weights}
        linear = {key: layer.weight for key, layer in layers.items() if isinstance(layer, nn.Linear)}
        size = len(stacks) * sum(weight.numel() for weight in linear.values()) * self.dtype.itemsize
        if self.dtype.itemsize < 4 or size > self.pool.config.merge_mb * 2**20:
            return stacks
        merged = {key: torch.baddbmm(weight.T, *stacks.weights[key]) for key, weight in linear.items()}
        return replace(stacks, merged=merged)

    def new_cache(self, rows: Sequence[int], policies: Sequence[int], slots: int) -> DialogueCache:
        """Preallocates the cache of dialogues of at most `slots` tokens, given rows and policies of each pool."""
        branch_rows = sum(count * size for count, size in zip(rows, policies, strict=True))
        return DialogueCache(
            self.family.new_cache(range(self.first_branch), sum(rows), slots),
            self.family.new_cache(range(self.first_branch, self.layers), branch_rows, slots),
            policies,
            rows,
        )

    def _run(
        self,
        layers: range,
        hidden: torch.Tensor,
        step: Step,
        pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        groups = self._active
        shared = self.family.prepare(hidden, step)

        def whole(index: int, hidden: torch.Tensor) -> torch.Tensor:
            # With checkpoints it runs once more in the backward pass, when no forward is active.
            before, self._active = self._active, groups
            try:
                return self.family.layer(index, hidden, shared, None)
            finally:
                self._active = before

        for index in layers:
            if pick is not None and index == layers[-1]:
                hidden = self.family.layer(index, hidden, shared, pick)
            else:
                hidden = recompute(whole, index, hidden, use_reentrant=False) if checkpoint else whole(index, hidden)
        return hidden

    @torch.no_grad()
    def trunk(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        cache: DialogueCache | None = None,
        used: int = 0,
        count_B: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Runs the shared lower layers once a row.

        Args:
            ids_BT: Token ids, right-padded.
            positions_BT: Position of each token in its row.
            cache: Where to continue; None for whole sequences.
            used: With a cache, the highest position plus one.
            count_B: With a cache, the real tokens of each row; None if all are.
            packing: Given where the batch is one row of packed tokens, [1, N].

        Returns:
            Hidden states h_BTD that all sub-policies share.
        """
        hidden = self.family.embed(ids_BT)
        if self.first_branch == 0:
            return hidden
        step = Step(
            positions_RT=positions_BT,
            cache=None if cache is None else cache.trunk,
            used=used,
            count_R=count_B,
            packing=packing,
        )
        return self._run(range(self.first_branch), hidden, step)

    def branches(
        self,
        h_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        stacks: Stacks,
        select: tuple[torch.Tensor, torch.Tensor] | None = None,
        packing: Packing | None = None,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        """Runs the upper layers on whole sequences for all policies of a stack as one batch.

        Args:
            h_BTD: The trunk's output.
            positions_BT: Position of each token in its row.
            stacks: The policies.
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

        step = Step(positions_RT=positions, packing=packing)
        normed = self._branches(hidden, step, ((stacks, rows),), None if select is None else pick, checkpoint)
        return normed if select is not None else normed.view(policies, rows, steps, width)

    def branches_by_pool(
        self,
        h_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        pools: Sequence[Stacks],
        cache: DialogueCache,
        used: int,
        last_B: torch.Tensor,
        count_B: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Continues dialogues of several pools on a cache as one batch, each for the policies of its own pool.

        Args:
            h_BTD: The trunk's output, rows grouped by pool as in the cache.
            positions_BT: Position of each token in its row.
            pools: The policies of each pool.
            cache: Where to continue.
            used: The highest position plus one.
            last_B: Column of each row's last real token, whose state is wanted.
            count_B: Real tokens of each row.

        Returns:
            Final normed hidden states of each pool's rows, [K, its rows, D].
        """
        groups = tuple((stacks, rows) for stacks, rows in zip(pools, cache.rows, strict=True) if rows)
        owners = torch.arange(len(h_BTD), device=h_BTD.device).split(cache.rows)
        folded_R = torch.cat([part.repeat(len(stacks)) for part, stacks in zip(owners, pools, strict=True)])
        last_R = last_B[folded_R]
        step = Step(
            positions_RT=positions_BT[folded_R],
            cache=cache.branches,
            used=used,
            count_R=count_B[folded_R],
        )

        def pick(hidden: torch.Tensor) -> torch.Tensor:
            return hidden[torch.arange(len(last_R), device=last_R.device), last_R]

        normed_RD = self._branches(h_BTD[folded_R], step, groups, pick)
        shapes = [(len(stacks), rows) for stacks, rows in zip(pools, cache.rows, strict=True)]
        parts = normed_RD.split([policies * rows for policies, rows in shapes])
        return [part.view(*shape, part.shape[1]) for part, shape in zip(parts, shapes, strict=True)]

    def _branches(
        self,
        hidden: torch.Tensor,
        step: Step,
        groups: tuple[tuple[Stacks, int], ...],
        pick: Callable[[torch.Tensor], torch.Tensor] | None,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        self._active = groups
        try:
            hidden = self._run(range(self.first_branch, self.layers), hidden, step, pick, checkpoint)
        finally:
            self._active = ()
        return self.family.norm(hidden)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Logits of final normed hidden states, at least fp32."""
        return self.family.logits(h)

    def logp(self, h_KND: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Proposals at selected positions: log-softmax of logits / temperature, fp32 or wider, [K, N, V]."""
        return torch.log_softmax(self.logits(h_KND) / temperature, dim=-1)


def freeze(model: nn.Module) -> None:
    """Switches dropout off and gradients of the base off."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
