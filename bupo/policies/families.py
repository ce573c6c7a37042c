"""The decoder families that are known layer by layer, and the choice of one for a base.

Shape legend: R rows (policies folded into rows), T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from bupo.policies.attention import NAME, LayerCache
from bupo.policies.family import Family, Pick, Step
from bupo.policies.statespace import StateCache, mix, mix_packed
from bupo.policies.whole import Whole


class Transformer(Family):
    """Norm, attention, norm, feed-forward: Llama, Mistral, Qwen 2 and 3, Gemma 1."""

    targets: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "all-linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes a model apart and gives it our attention."""
        super().__init__(model)
        if getattr(self.config, "use_bidirectional_attention", False):
            raise ValueError("the base attends to later tokens (use_bidirectional_attention); a policy must not")
        model.set_attn_implementation(NAME)
        self.decoder: Any = model.model
        self.heads: int = self.config.num_key_value_heads
        self.head_width: int = (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        )

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Input of the first layer, [B, T, D]."""
        return self.decoder.embed_tokens(ids_BT)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm after the last layer."""
        return self.decoder.norm(hidden)

    def rotary(self, hidden_RTD: torch.Tensor, positions_RT: torch.Tensor) -> list[Any]:
        """Rotary embedding for each layer."""
        return [self.decoder.rotary_emb(hidden_RTD, position_ids=positions_RT)] * len(self.decoder.layers)

    def prepare(self, hidden_RTD: torch.Tensor, step: Step) -> dict[str, Any]:
        """Rotary embeddings, and the mask of cached decoding."""
        mask = None
        if step.cache is not None:
            step.cache.at(step.positions_RT, step.used)
            later = torch.arange(step.used, device=hidden_RTD.device)[None, None] > step.positions_RT[:, :, None]
            mask = torch.zeros(later.shape, dtype=hidden_RTD.dtype, device=hidden_RTD.device)
            mask = mask.masked_fill_(later, torch.finfo(hidden_RTD.dtype).min).unsqueeze(1)
        return {
            "attention_mask": mask,
            "position_ids": step.positions_RT,
            "cache": step.cache,
            "use_cache": step.cache is not None,
            "packing": step.packing,
            "rotary": self.rotary(hidden_RTD, step.positions_RT),
        }

    def layer(self, index: int, hidden_RTD: torch.Tensor, shared: dict[str, Any], pick: Pick | None) -> torch.Tensor:
        """One layer; after the last attention positions are independent, so only those asked for need the rest."""
        layer = self.decoder.layers[index]
        arguments = {key: value for key, value in shared.items() if key != "rotary"}
        arguments["position_embeddings"] = shared["rotary"][index]
        if pick is None:
            return layer(hidden_RTD, **arguments)
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_RTD), **arguments)
        return self.feed(layer, pick(self.join(layer, hidden_RTD, attended)))

    def join(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Hidden states after attention."""
        return hidden + attended

    def feed(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the feed-forward layer."""
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def new_cache(self, layers: range, rows: int, slots: int) -> LayerCache:
        """Preallocates keys and values."""
        return LayerCache(layers, rows, slots, self.heads, self.head_width, self.head.weight.detach())


class Gemma2(Transformer):
    """Norms before and after both parts, capped scores and logits, a window in some layers."""

    def join(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Hidden states after attention."""
        return hidden + layer.post_attention_layernorm(attended)

    def feed(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the feed-forward layer."""
        return hidden + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(hidden)))


class Gemma3(Gemma2):
    """As Gemma 2, with another rotary embedding for layers with a window."""

    def rotary(self, hidden_RTD: torch.Tensor, positions_RT: torch.Tensor) -> list[Any]:
        """Rotary embedding for each layer."""
        kinds: Iterable[str] = self.config.layer_types
        made = {kind: self.decoder.rotary_emb(hidden_RTD, positions_RT, kind) for kind in set(kinds)}
        return [made[kind] for kind in kinds]


class Mamba(Family):
    """Norm and selective state space (arXiv 2312.00752)."""

    # Adapters on out_proj and dt_proj get no gradient in transformers' fused paths, so PEFT leaves them alone.
    targets: ClassVar[dict[str, tuple[str, ...]]] = {"all-linear": ("in_proj", "x_proj")}

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes a model apart."""
        super().__init__(model)
        self.decoder: Any = model.backbone

    @property
    def stream_dtype(self) -> torch.dtype:
        """Type of hidden states between layers."""
        own = super().stream_dtype
        return torch.promote_types(own, torch.float32) if self.config.residual_in_fp32 else own

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Input of the first layer, [B, T, D]."""
        return self.decoder.embeddings(ids_BT).to(self.stream_dtype)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm after the last layer."""
        return self.decoder.norm_f(hidden.to(self.head.weight.dtype))

    def prepare(self, hidden_RTD: torch.Tensor, step: Step) -> dict[str, Any]:
        """Nothing but the step: a state space knows no positions."""
        if step.cache is not None:
            step.cache.at(step.positions_RT, step.used, step.count_R)
        return {"cache": step.cache, "packing": step.packing}

    def layer(self, index: int, hidden_RTD: torch.Tensor, shared: dict[str, Any], pick: Pick | None) -> torch.Tensor:
        """One layer."""
        block = self.decoder.layers[index]
        x_RTD = block.norm(hidden_RTD.to(self.head.weight.dtype))
        if shared["packing"] is not None:
            mixed_RTD = mix_packed(block.mixer, x_RTD, shared["packing"])
        else:
            mixed_RTD = mix(block.mixer, x_RTD, shared["cache"], index)
        hidden_RTD = hidden_RTD + mixed_RTD
        return hidden_RTD if pick is None else pick(hidden_RTD)

    def new_cache(self, layers: range, rows: int, slots: int) -> StateCache:
        """Preallocates states, whose size does not depend on the number of tokens."""
        config = self.config
        sizes = (config.intermediate_size, config.conv_kernel - 1, config.state_size)
        return StateCache(layers, rows, *sizes, self.head.weight.detach())


FAMILIES: dict[str, type[Family]] = {
    "llama": Transformer,
    "mistral": Transformer,
    "qwen2": Transformer,
    "qwen3": Transformer,
    "gemma": Transformer,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "mamba": Mamba,
}


def family_of(model: PreTrainedModel) -> type[Family]:
    """The family of a base; `Whole` for one that is not known layer by layer."""
    return FAMILIES.get(model.config.model_type, Whole)


def target_modules(model: PreTrainedModel, targets: str) -> tuple[str, ...]:
    """Names of the linear layers of a base that carry adapters.

    Raises:
        ValueError: The family has no such layers.
    """
    found = family_of(model).targets
    if targets not in found:
        raise ValueError(
            f"pool.targets: {targets} on a {model.config.model_type} base, which has none; allowed: {', '.join(found)}"
        )
    return found[targets]


def check_branches(model: PreTrainedModel, branches: int) -> None:
    """Refuses a trunk where layers cannot be run one by one.

    Raises:
        ValueError: The base is of none of the known families and not all layers are branches.
    """
    if family_of(model) is Whole and branches < model.config.num_hidden_layers:
        raise ValueError(
            f"the base is a {model.config.model_type} model, whose layers cannot be run one by one; it works with "
            f"--pool.branch_layers all, slowly: nothing is shared or remembered. Those of {', '.join(FAMILIES)} take "
            "any number of branch layers"
        )
