"""Seconds and peak memory of PPO epochs over the same tokens: adapters in turn, PEFT's mixed batch, lockstep.

    python experiments/benchmarks/update.py --base smollm2 --policies 4 --batch 8 --branch-layers 10 --epochs 2

All variants compute the same joint loss (clipped ratio of the mixture, KL to the reference, KL of each policy to its
old self) from the same old policies, with logits at action positions only, in equal micro-batches, and step the
adapters by Adam. Memory is the peak of one process a variant. Rows share no beginning here: dialogues of one group gain
more.

Shape legend: K policies, B rows, T tokens, N action tokens, V vocabulary, D width.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from common import DTYPES, interleaved, parser, pool_of, prepare, report
from transformers.utils import logging

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn.objectives import clipped_surrogate, kl
from bupo.learn.optimizer import PolicyOptimizer
from bupo.learn.ppo import PPOConfig, update
from bupo.learn.scoring import keep_trunk, token_batch
from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import REFERENCE, PolicyPool, lora_weights
from bupo.records import Proposal, TokenBatch

VARIANTS = ("sequential", "peft_mixed", "lockstep")
LR, KL_REFERENCE, KL_OLD, CLIP, ATTENTION = 1e-5, 0.1, 0.1, 0.2, "sdpa"


def rows_of(options: argparse.Namespace, vocabulary: int) -> TokenBatch:
    """Random rows whose tokens are own in runs of ten, in the proportion asked for."""
    generator = torch.Generator().manual_seed(1)
    period = round(10 / options.action_fraction)
    rows = []
    for _ in range(options.batch):
        ids = torch.randint(5, vocabulary, (options.context,), generator=generator).tolist()
        action = [position % period >= period - 10 for position in range(options.context)]
        rows.append((ids, action, [0.0] * options.context))
    return token_batch(rows, torch.randn(options.batch, generator=generator).tolist())


def config_of(options: argparse.Namespace) -> PPOConfig:
    """The lockstep update's settings: the loss below, one minibatch an epoch."""
    return PPOConfig(
        lr=LR,
        epochs=options.epochs,
        minibatches=1,
        micro_tokens=options.micro_rows * options.context,
        logit_tokens=options.logit_tokens,
        kl_reference=KL_REFERENCE,
        kl_old=KL_OLD,
        diversity=0.0,
        clip=CLIP,
        temperature=1.0,
    )


def ours(pool: PolicyPool, options: argparse.Namespace) -> Callable[[], None]:
    """The lockstep update with its trunk computed once."""
    lockstep, config = Lockstep(pool), config_of(options)
    batch = rows_of(options, pool.base.model.config.vocab_size)
    coordinator = build_coordinator(CoordinatorConfig(), len(pool.names)).to(lockstep.device)
    optimizer = PolicyOptimizer(pool, config.max_grad_norm)

    def run() -> None:
        kept = keep_trunk(lockstep, batch, config.micro_tokens, config.trunk_mb)
        update(lockstep, coordinator, optimizer, kept, config, learning_rate=LR, generator=torch.Generator())

    return run


class Theirs:
    """The same update with PEFT and transformers alone: adapters in turn, or one mixed batch."""

    def __init__(self, pool: PolicyPool, options: argparse.Namespace, *, mixed: bool) -> None:
        self.model, self.names, self.options, self.mixed = pool.model, list(pool.names), options, mixed
        self.model.set_attn_implementation(ATTENTION)
        self.batch = rows_of(options, pool.base.model.config.vocab_size)
        self.coordinator = build_coordinator(CoordinatorConfig(), len(self.names))
        self.pool = pool
        self.old = [f"old{index:02d}" for index in range(len(self.names))]
        for name in self.old:
            self.model.add_adapter(name, self.model.peft_config[self.names[0]])
        self.model.eval()
        self._train_all()
        self.optimizer = PolicyOptimizer(pool, 1.0)

    def _weights(self, name: str) -> Iterator[torch.nn.Parameter]:
        for module in self.pool.modules().values():
            yield from lora_weights(module, name)

    def _train_all(self) -> None:
        for name in (*self.names, *self.old, REFERENCE):
            for weight in self._weights(name):
                weight.requires_grad_(name in self.names)

    def _final(self, ids_BT: torch.Tensor, **how: object) -> torch.Tensor:
        return self.model.get_base_model().model(ids_BT, use_cache=False, **how).last_hidden_state

    def hidden(self, names: list[str], ids_BT: torch.Tensor, rows_N: torch.Tensor, columns_N: torch.Tensor):
        """States that predict the action tokens under each adapter, [K, N, D]."""
        if not self.mixed:
            found = []
            for name in names:
                self.model.set_adapter(name)
                self._train_all()  # set_adapter freezes the others, whose graphs wait for the backward pass
                found.append(self._final(ids_BT)[rows_N, columns_N - 1])
            return torch.stack(found)
        spread = [name for name in names for _ in range(len(ids_BT))]
        # The mixed forward is PEFT's own: it installs its hooks around the whole model.
        with self.model.base_model._enable_peft_forward_hooks(adapter_names=spread):
            h_KBTD = self._final(ids_BT.repeat(len(names), 1)).view(len(names), *ids_BT.shape, -1)
        return h_KBTD[:, rows_N, columns_N - 1]

    def run(self) -> None:
        """The epochs."""
        with torch.no_grad():
            for old, name in zip(self.old, self.names, strict=True):
                for target, value in zip(self._weights(old), self._weights(name), strict=True):
                    target.copy_(value)
        for _ in range(self.options.epochs):
            total = int(self.batch.action_BT.sum())
            for start in range(0, len(self.batch), self.options.micro_rows):
                self._piece(
                    self.batch.rows(torch.arange(start, min(start + self.options.micro_rows, len(self.batch)))), total
                )
            self.optimizer.step(LR)

    def _piece(self, piece: TokenBatch, total: int) -> None:
        device = self.model.device
        rows_N, columns_N = (index.to(device) for index in piece.action_BT.nonzero(as_tuple=True))
        ids_BT = piece.ids_BT.to(device)
        ids_N, advantage_N = ids_BT[rows_N, columns_N], piece.advantage_BT.to(device)[rows_N, columns_N]
        with torch.no_grad():
            before_KND = self.hidden([*self.old, REFERENCE], ids_BT, rows_N, columns_N)
        now_KND = self.hidden(self.names, ids_BT, rows_N, columns_N)
        leaf_KND = now_KND.detach().requires_grad_()
        head = self.model.get_base_model().lm_head
        for start in range(0, len(ids_N), self.options.logit_tokens):
            some = slice(start, start + self.options.logit_tokens)
            old_KNV = torch.log_softmax(head(before_KND[:, some]).float(), -1)
            now_KNV = torch.log_softmax(head(leaf_KND[:, some]).float(), -1)
            before_NV = self.coordinator.combine(Proposal(logp_KNV=old_KNV[:-1])).logp_NV
            mixture_NV = self.coordinator.combine(Proposal(logp_KNV=now_KNV)).logp_NV
            chosen = ids_N[some, None]
            logp_N, old_N = mixture_NV.gather(1, chosen)[:, 0], before_NV.gather(1, chosen)[:, 0]
            loss_N, _ = clipped_surrogate(logp_N, old_N, advantage_N[some], CLIP)
            loss_N = loss_N + KL_REFERENCE * kl(mixture_NV, old_KNV[-1]) + KL_OLD * kl(old_KNV[:-1], now_KNV).mean(0)
            (loss_N.sum() / total).backward()
        now_KND.backward(leaf_KND.grad)


def variant(name: str, options: argparse.Namespace) -> Callable[[], None]:
    """What one variant runs."""
    pool = pool_of(options, options.policies)
    return ours(pool, options) if name == "lockstep" else Theirs(pool, options, mixed=name == "peft_mixed").run


def forget_peak() -> None:
    """Lets the peak start at what is in use now: loading a base may take more than learning."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def own_peak_mb(device: str) -> float:
    """Peak memory of this process.

    Linux hands `ru_maxrss` on from a parent through exec, so where there is a status file its high-water mark is taken.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return float(found[1]) / 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_memory_mb(name: str, arguments: list[str]) -> float:
    """Peak memory of a process that runs one variant once."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--alone", name], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["peak_memory_mb"])


def main() -> None:
    """Measures and prints."""
    options_of = parser(__doc__ or "")
    options_of.add_argument("--action-fraction", type=float, default=0.33, help="share of own tokens")
    options_of.add_argument("--epochs", type=int, default=2, help="PPO epochs")
    options_of.add_argument("--micro-rows", type=int, default=4, help="rows in one forward")
    options_of.add_argument("--logit-tokens", type=int, default=128, help="action tokens whose logits exist at once")
    options_of.add_argument("--alone", choices=VARIANTS, help="run one variant once and print its peak memory")
    options = options_of.parse_args()
    prepare(options, keep=options.alone is None)
    logging.set_verbosity_error()
    if options.alone:
        run = variant(options.alone, options)
        forget_peak()
        run()
        print(json.dumps({"peak_memory_mb": own_peak_mb(options.device)}))
        return
    times = interleaved({name: variant(name, options) for name in VARIANTS}, options.repeats, options.device)
    rows = {f"{name}_s": (took, f"{times['sequential'] / took:.2f} x sequential") for name, took in times.items()}
    memory = {name: peak_memory_mb(name, sys.argv[1:]) for name in VARIANTS}
    rows |= {f"{name}_peak_memory_mb": (used, "") for name, used in memory.items()}
    facts = vars(options) | {"bytes_per_weight": DTYPES[options.dtype].itemsize}
    report(
        f"{options.epochs} PPO epochs, {options.base}, K = {options.policies}, top {options.branch_layers}", rows, facts
    )


if __name__ == "__main__":
    main()
