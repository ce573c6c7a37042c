"""Tiny random bases of every family and pools on them: three layers, width 64, made in milliseconds."""

from __future__ import annotations

import copy
from functools import cache, partial

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bupo.learn.scoring import token_batch
from bupo.negotiation.scenario import Issue, Profile, Scenario
from bupo.policies.bases import Base
from bupo.policies.chat import ChatFormat
from bupo.policies.lockstep import Lockstep, freeze
from bupo.policies.nano import train_tokenizer
from bupo.policies.pool import PolicyPool, PoolConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mamba")
WINDOW = 8
LAYERS = 3
TEXTS = (
    "I can offer a price of 880 with payment in 30 days. [Accept]",
    "That is too much for us. Let us meet at 900 and 45 days. [Walk]",
    "We buy one million units a year and ask for a fair contract.",
)

# Points of (buyer, supplier): (0,0) 60/50, (0,1) 100/0, (1,0) 30/75, (1,1) 70/25, (2,0) 0/100, (2,1) 40/50.
# (2,1) is dominated by (0,0). At or above both limits: (0,0), the Nash point, gains .2 and .2, and (2,1), 0 and .2.
HAND = Scenario(
    name="hand",
    issues=(
        Issue(name="price", label="price", unit="USD", values=(10, 20, 30)),
        Issue(name="days", label="days", unit="days", values=(1, 2)),
    ),
    profiles=(
        Profile(points=((60, 30, 0), (0, 40)), limit=40, company="B"),
        Profile(points=((0, 25, 50), (50, 0)), limit=30, company="S"),
    ),
    rounds=8,
    opener=1,
)


@cache
def _tokenizer():
    return train_tokenizer(TEXTS, 320, range(0, 1000, 50))


def tokenizer():
    """A tokenizer trained on a few sentences; a copy, so that a test may change its template."""
    return copy.deepcopy(_tokenizer())


def model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A frozen random model; equal seeds give equal weights.

    transformers computes norms and eager softmax in fp32 whatever the weights: in float64 the norms are replaced by the
    same formula without casts, attention and the Mamba mixer by plain ones, so that comparisons to 1e-9 mean something.

    Windows are shorter than the sequences of the tests, and scores are capped where they matter.
    """
    wide = dtype == torch.float64
    extra = {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    if family == "mamba":
        extra = {"state_size": 4, "conv_kernel": 4, "expand": 2, "time_step_rank": 8}
        extra["residual_in_fp32"] = not wide
    config = AutoConfig.for_model(
        family,
        vocab_size=len(_tokenizer()),
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=family == "llama",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **{key: value for key, value in extra.items() if family in ("mistral", "gemma2", "gemma3_text", "mamba")},
    )
    if family == "gemma3_text":
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="wide" if wide else "eager").to(dtype)
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:  # initialised to constants, which would hide a forgotten term
                parameter.data += 0.2 * torch.randn_like(parameter)
    if wide:
        for module in made.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_rms_norm, module)
            if type(module).__name__ == "MambaMixer":
                module.forward = partial(_mamba_mixer, module)
        if family == "mamba":
            made.forward = partial(_mamba_logits, made)
    freeze(made)
    return made


def _rms_norm(module, x):
    gemma = "Gemma" in type(module).__name__
    epsilon = module.eps if gemma else module.variance_epsilon
    return (module.weight + gemma) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def _wide_attention(module, query, key, value, attention_mask, scaling, softcap=None, **kwargs):
    """Attention as the papers write it, keys repeated, in the type of its input."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (torch.softmax(scores + attention_mask, -1) @ value).transpose(1, 2), None


def _mamba_logits(model, input_ids, **kwargs):
    """Logits in the type of the weights: transformers' Mamba gives fp32 whatever they are."""
    return CausalLMOutput(logits=model.lm_head(model.backbone(input_ids, use_cache=False).last_hidden_state))


ALL_ATTENTION_FUNCTIONS.register("wide", _wide_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("wide", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _mamba_mixer(mixer, x, **kwargs):
    """The recurrence of Mamba as the paper writes it, token by token, in the type of its input."""
    u, gate = mixer.in_proj(x).chunk(2, dim=-1)
    steps, kernel = x.shape[1], mixer.conv_kernel_size
    padded = F.pad(u, (0, 0, kernel - 1, 0))
    u = F.silu(sum(padded[:, j : j + steps] * mixer.conv1d.weight[:, 0, j] for j in range(kernel)) + mixer.conv1d.bias)
    rate, b, c = mixer.x_proj(u).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    rate = F.softplus(mixer.dt_proj(rate))
    state, out = 0, []
    for t in range(steps):
        kept = torch.exp(-rate[:, t, :, None] * mixer.A_log.exp()) * state
        state = kept + (rate * u)[:, t, :, None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(-1) + mixer.D * u[:, t])
    return mixer.out_proj(torch.stack(out, 1) * F.silu(gate))


def base(family: str = "llama", dtype: torch.dtype = torch.float32) -> Base:
    """A base around the model."""
    words = tokenizer()
    return Base(name=family, model=model(family, dtype), tokenizer=words, chat=ChatFormat(words))


def widen(pool: PolicyPool) -> None:
    """Turns the adapters into float64, for comparisons to 1e-10."""
    for name in (*pool.names, "sft"):
        for parameter in pool.parameters(name):
            parameter.data = parameter.data.double()


@cache
def _pool(family, dtype, size, branch_layers, perturbation, settings) -> PolicyPool:
    made = PolicyPool(
        base(family, dtype),
        PoolConfig(size=size, branch_layers=branch_layers, perturbation=perturbation, **dict(settings)),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(size):
        made.add_perturbed(generator=generator)
    if dtype == torch.float64:
        widen(made)
    return made


def pool(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    size: int = 3,
    branch_layers: int | float | str = 2,
    perturbation: float = 0.3,
    **settings,
) -> PolicyPool:
    """A pool of clearly different sub-policies; a copy of a cached one, since PEFT takes long to build it.

    Nothing is merged unless asked for: models this small would never add LoRA products.
    """
    settings = {"rank": 4, "merge_mb": 0.0, **settings}
    return copy.deepcopy(_pool(family, dtype, size, branch_layers, perturbation, tuple(sorted(settings.items()))))


def lockstep(*args, **kwargs) -> Lockstep:
    """The lockstep forward of such a pool."""
    return Lockstep(pool(*args, **kwargs))


def peft_twin(source: PolicyPool, family: str = "llama", dtype: torch.dtype = torch.float32) -> PeftModel:
    """The same adapters in PEFT alone on a fresh copy of the base and transformers' attention: no code of ours runs."""
    first = source.layers - source.config.branches(source.layers)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names += ["gate_proj", "up_proj", "down_proj"] if source.config.targets == "all-linear" else []
    names = ["in_proj", "x_proj"] if family == "mamba" else names
    config = LoraConfig(
        r=source.config.rank,
        lora_alpha=source.config.alpha,
        target_modules=names,
        layers_to_transform=list(range(first, source.layers)),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    twin = get_peft_model(model(family, dtype), config, adapter_name=source.names[0])
    for name in source.names[1:]:
        twin.add_adapter(name, config)
    for name in source.names:
        twin.set_adapter(name)
        mine = [p for n, p in twin.named_parameters() if f".{name}." in n]
        for target, value in zip(mine, source.parameters(name), strict=True):
            target.data = value.detach().clone()
    return twin.eval()


def adapter_parameters(twin: PeftModel, name: str) -> list[torch.nn.Parameter]:
    """A and B of each layer of one adapter of a PEFT model, in forward order."""
    return [parameter for key, parameter in twin.named_parameters() if f".{name}." in key]


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary token ids, no control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, len(_tokenizer()), (count,), generator=generator).tolist()


def batch(lengths=(17, 9, 23, 12, 30, 7), advantages=(1.0, -0.5, 0.75, -1.25, 0.5, 2.0), seed: int = 3):
    """A ragged batch: rows of given lengths in which two stretches are own tokens, the last token among them."""
    rows = []
    for index, length in enumerate(lengths):
        ids = random_ids(length, 100 * seed + index)
        action = [2 <= position < 4 or position >= length - 3 for position in range(length)]
        rows.append((ids, action, [0.0] * length))
    return token_batch(rows, advantages[: len(rows)])
