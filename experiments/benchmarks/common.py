"""What the benchmarks share: options, bases, pools, and timing of variants in turn.

Variants are timed in turn within each repetition, so that a machine that slows down slows all of them; medians are
compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bupo.devices import keep_memory, use_threads
from bupo.policies.bases import NANO, Base, load_pretrained
from bupo.policies.chat import ChatFormat
from bupo.policies.lockstep import freeze
from bupo.policies.nano import NanoConfig, build_nano, train_tokenizer
from bupo.policies.pool import PolicyPool, PoolConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_WIDTH, RANDOM_VOCAB = 64, 32_000


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--base", default="smollm2", help="nano, smollm2, random:<hidden>x<layers>, hub id, folder")
    options.add_argument("--policies", type=int, default=4, help="sub-policies K")
    options.add_argument("--batch", type=int, default=8, help="dialogues")
    options.add_argument("--branch-layers", default="10", help="adapters on so many top layers, or all")
    options.add_argument("--context", type=int, default=200, help="tokens of a dialogue so far")
    options.add_argument("--rank", type=int, default=16, help="LoRA rank")
    options.add_argument("--targets", default="all-linear", help="all-linear or attention")
    options.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="compute type")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--repeats", type=int, default=9, help="repetitions, of which the median is taken")
    options.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for all cores")
    return options


def prepare(options: argparse.Namespace, *, keep: bool = True) -> None:
    """Threads, seed, and an allocator that keeps freed memory, except where memory is what is measured."""
    if keep:
        keep_memory()
    use_threads(options.threads, 1)
    torch.manual_seed(0)


def model_of(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A base for timing; nano and random ones have random weights, which cost as much as trained ones."""
    sizes = re.fullmatch(r"random:(\d+)x(\d+)", name)
    if sizes:
        hidden, layers = map(int, sizes.groups())
        model: PreTrainedModel = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=RANDOM_VOCAB,
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=hidden // HEAD_WIDTH,
                num_key_value_heads=max(hidden // HEAD_WIDTH // 4, 1),
                intermediate_size=(hidden * 8 // 3 + 63) // 64 * 64,
                tie_word_embeddings=True,
            )
        )
    elif name == NANO:
        model = build_nano(NanoConfig(), _tokenizer())
    else:
        model, _ = load_pretrained(name, dtype)
    model = model.to(device=device, dtype=dtype)  # pyright: ignore[reportArgumentType]
    freeze(model)
    return model


def _tokenizer() -> Any:
    return train_tokenizer(["Words for a tokenizer that no timing depends on."], 512)


def pool_of(options: argparse.Namespace, policies: int) -> PolicyPool:
    """A pool of perturbed sub-policies on a fresh copy of the base."""
    model = model_of(options.base, DTYPES[options.dtype], options.device)
    words = _tokenizer()
    base = Base(name=options.base, model=model, tokenizer=words, chat=ChatFormat(words))
    branch = options.branch_layers if options.branch_layers == "all" else int(options.branch_layers)
    pool = PolicyPool(
        base,
        PoolConfig(
            size=policies,
            rank=options.rank,
            targets=options.targets,
            branch_layers=branch,
            perturbation=0.01,
        ),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(policies):
        pool.add_perturbed(generator=generator)
    return pool


def interleaved(variants: Mapping[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each variant, run in turn; the first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in track(range(repeats + 1), description="timing", console=Console(stderr=True), transient=True):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return {name: float(np.median(times[1:])) for name, times in seconds.items()}


def report(title: str, rows: Mapping[str, tuple[float, str]], facts: dict[str, Any]) -> None:
    """Prints a table of measured values and, last, one line of JSON."""
    table = Table(title=title)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("")
    for name, (value, note) in rows.items():
        table.add_row(name, f"{value:.4g}", note)
    Console().print(table)
    print(json.dumps(facts | {name: value for name, (value, _) in rows.items()} | machine()))


def machine() -> dict[str, Any]:
    """Where it was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
