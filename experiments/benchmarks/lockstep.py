"""Milliseconds of a decode step, and tokens a second of whole replies, against transformers and PEFT.

    python experiments/benchmarks/lockstep.py --base smollm2 --policies 4 --batch 8 --branch-layers 10

A step starts from a cache of `--context` tokens and ends with sampled ids, the mixture included. For transformers the
fastest of its attention kernels and caches is taken. No step keeps what it wrote, so every repetition does the same.

Shape legend: K policies, B rows, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import DTYPES, interleaved, model_of, parser, pool_of, prepare, report
from transformers import DynamicCache, StaticCache
from transformers.utils import logging

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import PolicyPool
from bupo.policies.stacks import Stacks
from bupo.records import Proposal
from bupo.rollout.engine import Decoding, Session, Speaker, choose, compiled_forward, draw, forward, stepped

NEW_TOKENS = 64
ATTENTION, CACHES = ("sdpa", "eager"), ("dynamic", "static")


class Reference:
    """Decode steps through transformers: the base alone, one adapter, several in turn, or a mixed batch."""

    def __init__(self, pool: PolicyPool, options: argparse.Namespace, model: Any = None) -> None:
        self.model = pool.model if model is None else model
        self.names = list(pool.names)
        self.context = options.context
        self.device = options.device
        config = self.model.config
        generator = torch.Generator().manual_seed(1)
        self.ids_BT = torch.randint(5, config.vocab_size, (options.batch, options.context + 1), generator=generator)
        self.ids_BT = self.ids_BT.to(options.device)
        self.uniform_B = torch.rand(options.batch, device=options.device)

    def cache(self, kind: str) -> Any:
        """An empty cache with room for one token more than the context."""
        if kind == "static":
            return StaticCache(config=self.model.config, max_cache_len=self.context + 1)
        return DynamicCache(config=self.model.config)

    def opened(self, kind: str, copies: int = 1, **how: Any) -> Any:
        """A cache that holds the context."""
        cache = self.cache(kind)
        self._forward(self.ids_BT[:, :-1].repeat(copies, 1), cache, **how)
        return cache

    def _forward(self, ids: torch.Tensor, cache: Any, **how: Any) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(ids, cache=cache, use_cache=True, logits_to_keep=1, **how).logits[:, -1]

    def _step(self, cache: Any, copies: int = 1, **how: Any) -> torch.Tensor:
        logits = self._forward(self.ids_BT[:, -1:].repeat(copies, 1), cache, **how)
        cache.crop(-1)
        return logits

    def _draw(self, logp_BV: torch.Tensor) -> list[int]:
        return draw(logp_BV, self.uniform_B).tolist()

    def single(self, cache: Any) -> list[int]:
        """One step of the active adapter."""
        return self._draw(torch.log_softmax(self._step(cache).float(), -1))

    def _mixed(self, logits_KBV: torch.Tensor) -> list[int]:
        return self._draw(torch.log_softmax(logits_KBV.float(), -1).exp().mean(0).log())

    def sequential(self, caches: list[Any]) -> list[int]:
        """K passes, one adapter after another, then the mixture."""
        logits = []
        for name, cache in zip(self.names, caches, strict=True):
            self.model.set_adapter(name)
            logits.append(self._step(cache))
        return self._mixed(torch.stack(logits))

    def mixed(self, cache: Any) -> list[int]:
        """One pass over K copies of the rows with `adapter_names`, then the mixture."""
        logits = self._step(cache, len(self.names), adapter_names=self.row_names())
        return self._mixed(logits.view(len(self.names), len(self.ids_BT), -1))

    def row_names(self) -> list[str]:
        """The adapter of each row of a mixed batch."""
        return [name for name in self.names for _ in range(len(self.ids_BT))]


def fastest(pool: PolicyPool, options: argparse.Namespace) -> tuple[str, str]:
    """Attention and cache with which one adapter decodes fastest through transformers."""
    reference = Reference(pool, options)
    pool.model.set_adapter(pool.names[0])
    times = {}
    for attention, kind in itertools.product(ATTENTION, CACHES):
        pool.base.model.set_attn_implementation(attention)
        cache = reference.opened(kind)
        step = lambda cache=cache: reference.single(cache)  # noqa: E731
        times[attention, kind] = interleaved({"step": step}, 3, options.device)["step"]
    return min(times, key=times.__getitem__)


def ours(
    lockstep: Lockstep, stacks: Stacks, ids_BT: torch.Tensor, *, shortcut: bool = False, compiled: bool = False
) -> Callable[[], list[int]]:
    """A decode step of the lockstep engine; with the shortcut a token comes from the head of one policy a row."""
    run = compiled_forward(ids_BT.device.type) if compiled else forward
    rows, width = ids_BT.shape
    device = ids_BT.device
    coordinator = build_coordinator(CoordinatorConfig(), len(stacks)).to(device)
    cache = lockstep.new_cache([rows], [len(stacks)], stepped(width))
    positions_BT = torch.arange(width, device=device).expand(rows, -1)
    uniform_B = torch.rand(rows, device=device)
    none_B = torch.zeros(rows, dtype=torch.long, device=device)

    count_B = none_B + 1

    @torch.inference_mode()
    def step() -> list[int]:
        where = positions_BT[:, width - 1 : width]
        used = stepped(width) if compiled else width
        h_KBD = run(lockstep, [stacks], ids_BT[:, width - 1 : width], where, cache, used, none_B, count_B)[0]
        if shortcut:
            chosen_B, rest_B = choose(coordinator.gate(rows), uniform_B)
            h_BD = h_KBD[chosen_B, torch.arange(rows, device=device)]
            return draw(lockstep.logp(h_BD), rest_B).tolist()
        logp_KBV = lockstep.logp(h_KBD)
        return draw(coordinator.combine(Proposal(logp_KNV=logp_KBV)).logp_NV, uniform_B).tolist()

    with torch.inference_mode():
        prompt = slice(0, width - 1)
        forward(
            lockstep, [stacks], ids_BT[:, prompt], positions_BT[:, prompt], cache, width - 1, none_B, none_B + width - 1
        )
    return step


def replies(
    lockstep: Lockstep, stacks: Stacks, pool: PolicyPool, ids_BT: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Whole replies of one policy: prefill and 64 new tokens, by our engine and by transformers' `generate`."""
    prompts = ids_BT[:, :-1]
    decoding = Decoding(temperature=1.0, max_tokens=NEW_TOKENS, stop_ids=())
    coordinator = build_coordinator(CoordinatorConfig(), 1)

    def rollout() -> None:
        streams = [np.random.default_rng([3, row]) for row in range(len(prompts))]
        session = Session(lockstep, [Speaker(stacks=stacks, coordinator=coordinator, streams=streams)], decoding)
        session.speak(range(len(prompts)), prompts.tolist())

    def generate() -> None:
        with torch.inference_mode():
            pool.model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )

    return {"rollout": rollout, "generate": generate}


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--compile", action="store_true", help="time a compiled step as well (minutes to compile)")
    options = arguments.parse_args()
    prepare(options)
    logging.set_verbosity_error()
    theirs, mine = pool_of(options, options.policies), pool_of(options, options.policies)
    reference = Reference(theirs, options)
    attention, kind = fastest(theirs, options)
    theirs.base.model.set_attn_implementation(attention)
    lockstep = Lockstep(mine)
    every, first = lockstep.stacks(), lockstep.stacks(mine.names[:1])

    caches = []
    for name in theirs.names:
        theirs.model.set_adapter(name)
        caches.append(reference.opened(kind))
    spread = reference.opened(kind, options.policies, adapter_names=reference.row_names())
    # A model of its own: switching adapters off and on again takes longer than an adapter does.
    alone = Reference(theirs, options, model_of(options.base, DTYPES[options.dtype], options.device))
    alone.model.set_attn_implementation(attention)
    plain = alone.opened(kind)

    def single() -> None:
        theirs.model.set_adapter(theirs.names[0])
        reference.single(caches[0])

    steps: dict[str, Callable[[], object]] = {
        "base": lambda: alone.single(plain),
        "single": single,
        "sequential": lambda: reference.sequential(caches),
        "peft_mixed": lambda: reference.mixed(spread),
        "lockstep": ours(lockstep, every, reference.ids_BT),
        "lockstep_shortcut": ours(lockstep, every, reference.ids_BT, shortcut=True),
        "lockstep_k1": ours(lockstep, first, reference.ids_BT),
    }
    if options.compile:
        steps["lockstep_compiled"] = ours(lockstep, every, reference.ids_BT, compiled=True)
    times = interleaved(steps, options.repeats, options.device)
    theirs.model.set_adapter(theirs.names[0])
    whole = interleaved(
        replies(lockstep, first, theirs, reference.ids_BT), max(options.repeats // 3, 1), options.device
    )

    rows = {
        f"{name}_ms": (1e3 * seconds, f"{seconds / times['single']:.2f} x single") for name, seconds in times.items()
    }
    tokens = options.batch * NEW_TOKENS
    rows["generate_tps"] = (tokens / whole["generate"], "tokens/s, one policy, prefill counted")
    rows["rollout_tps"] = (tokens / whole["rollout"], f"{whole['generate'] / whole['rollout']:.2f} x generate")
    report(
        f"decode step, {options.base}, K = {options.policies}, B = {options.batch}, top {options.branch_layers}",
        rows,
        vars(options) | {"transformers_attention": attention, "transformers_cache": kind},
    )


if __name__ == "__main__":
    main()
