"""The policy pool: K named LoRA sub-policies on one frozen base, kept as ordinary PEFT adapters.

Names are p00, p01, ... and never reused: fixed width, since PEFT matches some names by prefix.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import PreTrainedModel

from bupo.config import at_least, one_of, positive, raise_problems
from bupo.policies.bases import NANO, Base
from bupo.policies.families import check_branches, target_modules

# PEFT 0.21 asks transformers 5.24 by an old name; nothing that a user of ours could change.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)

REFERENCE = "sft"
TARGETS = ("all-linear", "attention")


def default_perturbation(base_name: str) -> float:
    """`perturbation` where none is asked for: .3 on nano, .01 on a public base.

    Deeper and better trained bases bear less: at .3 SmolLM2 speaks gibberish, at .01 it lies .02 nats/token from its
    reference.
    """
    return 0.3 if base_name == NANO else 0.01


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The sub-policies.

    Attributes:
        size: Number of sub-policies K.
        rank: LoRA rank.
        alpha: LoRA scale numerator; the update is alpha / rank * B A.
        targets: Which linear layers carry adapters: `all-linear` or `attention`.
        branch_layers: Adapters sit on this many top layers: a number, a fraction in (0, 1), or `all`.
        perturbation: Scale of the initial differences: RMS of the added weight change over the RMS of the weight; 0 for
            what suits the kind of base (`default_perturbation`).
        merge_mb: Forwards multiply by W + B A of each policy where these weights take at most so many megabytes and the
            base is fp32; larger ones add LoRA products, which read less. Differs in rounding alone.
        packed_mb: Decode steps on a CPU in fp32 use copies of the base's wide layers in oneDNN's layout
            (bupo/policies/packed.py), at most so many megabytes of them. Differs in rounding alone.
    """

    size: int = 4
    rank: int = 8
    alpha: float = 16.0
    targets: str = "all-linear"
    branch_layers: int | float | str = 0.5
    perturbation: float = 0.0
    merge_mb: float = 64.0
    packed_mb: float = 1024.0

    def __post_init__(self) -> None:
        """Checks the values."""
        branch, problem = self.branch_layers, None
        if isinstance(branch, str):
            problem = one_of("branch_layers", branch, ["all"])
        elif isinstance(branch, float) and not 0 < branch < 1:
            problem = f"branch_layers: {branch} is not a fraction; allowed are 0 < x < 1, a whole number, or 'all'"
        elif isinstance(branch, int):
            problem = at_least("branch_layers", branch, 1)
        raise_problems(
            [
                at_least("size", self.size, 1),
                at_least("rank", self.rank, 1),
                positive("alpha", self.alpha),
                one_of("targets", self.targets, TARGETS),
                problem,
                at_least("perturbation", self.perturbation, 0),
                at_least("merge_mb", self.merge_mb, 0),
                at_least("packed_mb", self.packed_mb, 0),
            ]
        )

    def branches(self, layers: int) -> int:
        """Number of branch layers M for a base of `layers` layers.

        Raises:
            ValueError: More branch layers than layers.
        """
        if self.branch_layers == "all":
            return layers
        if isinstance(self.branch_layers, float):
            return max(round(self.branch_layers * layers), 1)
        count = int(self.branch_layers)
        if count > layers:
            raise ValueError(
                f"pool.branch_layers: {count} is more than the {layers} layers of the base; allowed are 1 to {layers}, "
                "a fraction in (0, 1), or 'all'"
            )
        return count


def lora_config(config: PoolConfig, model: PreTrainedModel) -> LoraConfig:
    """PEFT's configuration of one adapter on the top layers of a base."""
    layers, names = model.config.num_hidden_layers, list(target_modules(model, config.targets))
    branches = config.branches(layers)
    check_branches(model, branches)
    everywhere = names == ["all-linear"]
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=0.0,
        target_modules="all-linear" if everywhere else names,
        layers_to_transform=None if everywhere else list(range(layers - branches, layers)),
        layers_pattern=None if everywhere else "layers",
        task_type="CAUSAL_LM",
    )


def lora_weights(module: LoraLinear, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A [R, D] and B [D', R] of one adapter in one layer."""
    a, b = cast(nn.Linear, module.lora_A[name]), cast(nn.Linear, module.lora_B[name])
    return cast(nn.Parameter, a.weight), cast(nn.Parameter, b.weight)


class PolicyPool:
    """K named sub-policies that can be perturbed, removed, saved and loaded one by one."""

    def __init__(self, base: Base, config: PoolConfig) -> None:
        """Attaches an empty pool to a base; where the base brings an `sft` adapter, that is the reference row.

        Args:
            base: The frozen base.
            config: The pool's shape.
        """
        self.base = base
        self.config = config
        self.perturbation = config.perturbation or default_perturbation(base.name)
        self.layers = base.model.config.num_hidden_layers
        self.first_branch = self.layers - config.branches(self.layers)
        self.names: tuple[str, ...] = ()
        self.born: dict[str, int] = {}
        self.parents: dict[str, str] = {}
        self._next = 0
        if base.sft_adapter is not None:
            self.model = PeftModel.from_pretrained(
                base.model, str(base.sft_adapter), adapter_name=REFERENCE, is_trainable=False
            )
            self._check_reference()
        else:
            # PEFT wants one adapter to wrap a model: this one is the zero adapter, i.e. the base itself.
            self.model = get_peft_model(base.model, lora_config(self.config, base.model), adapter_name=REFERENCE)
        self.settle()

    def _check_reference(self) -> None:
        have, want = self.model.peft_config[REFERENCE], lora_config(self.config, self.base.model)
        for field in ("r", "lora_alpha", "target_modules", "layers_to_transform"):
            got, wanted = getattr(have, field), getattr(want, field)
            if wanted == "all-linear":  # which PEFT replaces by the names that it found
                continue
            if (set(got) if isinstance(got, (list, set)) else got) != (
                set(wanted) if isinstance(wanted, (list, set)) else wanted
            ):
                raise ValueError(
                    f"the sft adapter in {self.base.sft_adapter} has {field} = {got}, the pool asks for {wanted}; "
                    "give pool.* the adapter's shape, or delete that folder to train a new one"
                )

    def settle(self) -> None:
        """Restores what PEFT's own bookkeeping flips: all members train, the reference does not."""
        self.model.eval()
        for name in (REFERENCE, *self.names):
            for parameter in self._parameters(name):
                parameter.requires_grad_(name != REFERENCE)

    def modules(self) -> dict[str, LoraLinear]:
        """The LoRA layers by module name, in forward order."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, LoraLinear)}

    def _parameters(self, name: str) -> Iterator[nn.Parameter]:
        for module in self.modules().values():
            yield from lora_weights(module, name)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The trainable tensors of one sub-policy: A and B of each LoRA layer, fp32."""
        return list(self._parameters(name))

    def _new(self) -> str:
        name = f"p{self._next:02d}"
        self._next += 1
        self.model.add_adapter(name, lora_config(self.config, self.base.model))
        for parameter in self._parameters(name):
            parameter.data = parameter.data.float()
        return name

    def add_perturbed(self, parent: str = REFERENCE, *, generator: torch.Generator, iteration: int = 0) -> str:
        """Adds a sub-policy that is a parent plus noise whose effect has a set size.

        The change of a weight W is scaling * N A with Gaussian N, so that RMS(change) = perturbation * RMS(W). Noise
        on A alone would change nothing where B = 0.

        Args:
            parent: The sub-policy (or the reference) to start from.
            generator: Randomness of the noise.
            iteration: When it is born, for the lineage.

        Returns:
            The new name.
        """
        name = self._new()
        for module in self.modules().values():
            a, b = lora_weights(module, name)
            parent_a, parent_b = lora_weights(module, parent)
            with torch.no_grad():
                if parent_b.any():
                    a.copy_(parent_a)
                    b.copy_(parent_b)
                else:
                    # The zero adapter has no direction to inherit: a fresh A gives the policy a subspace of its own.
                    a.copy_(torch.randn(a.shape, generator=generator) / a.shape[1] ** 0.5)
                    b.zero_()
                weight_rms = cast(nn.Linear, module.base_layer).weight.float().pow(2).mean().sqrt()
                noise = torch.randn(b.shape, generator=generator)
                size = self.perturbation * weight_rms / (module.scaling[name] * a.pow(2).sum().div(a.shape[1]).sqrt())
                b.add_(noise.to(b) * size)
        self.names = (*self.names, name)
        self.settle()
        self.born[name] = iteration
        self.parents[name] = parent
        return name

    def remove(self, name: str) -> None:
        """Removes a sub-policy for good; its name is not used again.

        Raises:
            KeyError: No such sub-policy.
        """
        if name not in self.names:
            raise KeyError(f"no sub-policy {name!r}; there are {', '.join(self.names) or 'none'}")
        self.model.delete_adapter(name)
        self.names = tuple(other for other in self.names if other != name)
        self.born.pop(name)
        self.parents.pop(name)
        self.settle()

    def save(self, folder: Path) -> None:
        """Writes one PEFT folder a sub-policy and a manifest; any of them loads with `PeftModel.from_pretrained`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(
            str(folder), selected_adapters=list(self.names), safe_serialization=True, save_embedding_layers=False
        )
        manifest = {"names": self.names, "next": self._next, "born": self.born, "parents": self.parents}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    def load(self, folder: Path) -> None:
        """Replaces the pool by the saved one.

        Raises:
            FileNotFoundError: The folder holds no saved pool.
        """
        path = folder / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no saved pool (manifest.json is missing)")
        manifest = json.loads(path.read_text())
        for name in self.names:
            self.model.delete_adapter(name)
        for name in manifest["names"]:
            self.model.load_adapter(str(folder / name), adapter_name=name, is_trainable=True)
            for parameter in self._parameters(name):
                parameter.data = parameter.data.float()
        self.names = tuple(manifest["names"])
        self.born, self.parents, self._next = manifest["born"], manifest["parents"], manifest["next"]
        self.settle()
