"""Adam over a pool whose members come and go."""

from __future__ import annotations

import torch

from bupo.policies.pool import PolicyPool


class PolicyOptimizer:
    """Adam over the pool, one parameter group a sub-policy, so that policies come and go without touching others."""

    def __init__(self, pool: PolicyPool, max_grad_norm: float) -> None:
        """Builds the optimizer for the pool's present members.

        Args:
            pool: The pool whose members it trains.
            max_grad_norm: Largest gradient norm of one sub-policy.
        """
        self.pool = pool
        self.max_grad_norm = max_grad_norm
        groups = [{"params": pool.parameters(name), "name": name} for name in pool.names]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.95))

    def sync(self) -> None:
        """Follows the pool: drops removed or reloaded policies with their state, adds new ones with fresh state."""
        kept = []
        for group in self.adam.param_groups:
            name = group["name"]
            # By identity: a pool that was loaded holds other tensors under the same names.
            present = self.pool.parameters(name) if name in self.pool.names else []
            if [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in present]:
                kept.append(group)
                continue
            for parameter in group["params"]:
                self.adam.state.pop(parameter, None)
        self.adam.param_groups[:] = kept
        have = {group["name"] for group in kept}
        for name in self.pool.names:
            if name not in have:
                self.adam.add_param_group({"params": self.pool.parameters(name), "name": name})

    def step(self, learning_rate: float) -> dict[str, float]:
        """Clips each policy's gradient, steps, clears gradients.

        Returns:
            Gradient norm of each policy before clipping.

        Raises:
            FloatingPointError: A gradient is not finite.
        """
        norms = {}
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
            norm = torch.nn.utils.clip_grad_norm_(group["params"], self.max_grad_norm)
            norms[group["name"]] = float(norm)
            if not torch.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient of {group['name']} is not finite; lower ppo.lr or check the reward"
                )
            if norm == 0:  # no part in this step: momentum must not move it
                for parameter in group["params"]:
                    parameter.grad = None
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norms

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Adam state by `name/index` of the parameter."""
        state = {}
        for group in self.adam.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter in self.adam.state:
                    state[f"{group['name']}/{index}"] = dict(self.adam.state[parameter])
        return state

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restores what `state_dict` gave."""
        for group in self.adam.param_groups:
            for index, parameter in enumerate(group["params"]):
                if (saved := state.get(f"{group['name']}/{index}")) is not None:
                    self.adam.state[parameter] = {key: value.clone() for key, value in saved.items()}
