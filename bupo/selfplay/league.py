"""The league: past versions of the whole pool, kept on the CPU as stacked LoRA weights and on disk as safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bupo.policies.lockstep import Lockstep
from bupo.policies.stacks import Stacks


class League:
    """Snapshots of the pool by the iteration that they were taken at; the oldest goes when there is no room."""

    def __init__(self, capacity: int) -> None:
        """Opens an empty league.

        Args:
            capacity: Most snapshots kept.
        """
        self.capacity = capacity
        self.members: dict[str, Stacks] = {}

    def add(self, iteration: int, stacks: Stacks) -> None:
        """Takes a snapshot."""
        self.members[f"past{iteration:04d}"] = stacks.offload()
        while len(self.members) > self.capacity:
            self.members.pop(next(iter(self.members)))

    def save(self, folder: Path) -> None:
        """Writes one safetensors file a snapshot."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, stacks in self.members.items():
            tensors: dict[str, torch.Tensor] = {}
            for key, (a, b) in stacks.weights.items():
                tensors[f"{key}|A"], tensors[f"{key}|B"] = a.contiguous(), b.contiguous()
            save_file(tensors, folder / f"{name}.safetensors", metadata={"names": ",".join(stacks.names)})

    def load(self, folder: Path, lockstep: Lockstep) -> None:
        """Reads the snapshots of a saved league.

        Args:
            folder: Where `save` wrote.
            lockstep: Tells which layers must be there.

        Raises:
            ValueError: A snapshot has other layers than the pool.
        """
        from safetensors import safe_open

        self.members = {}
        layers = set(lockstep.layer_names)
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = tuple(file.metadata()["names"].split(","))
            tensors = load_file(path)
            weights = {key: (tensors[f"{key}|A"], tensors[f"{key}|B"]) for key in layers if f"{key}|A" in tensors}
            if set(weights) != layers or len(tensors) != 2 * len(layers):
                raise ValueError(f"{path} holds other layers than the pool; it belongs to another base or pool shape")
            self.members[path.stem] = Stacks(names=names, weights=weights)
