"""Where and how numbers are computed: device, compute type, threads, and a C allocator that keeps its memory."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

PRECISIONS = ("auto", "fp32", "bf16")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def compute_dtype(precision: str, device: torch.device, *, small: bool) -> torch.dtype:
    """The compute type for `auto`, `fp32` or `bf16`.

    Args:
        precision: What was asked for.
        device: Where the base runs.
        small: Whether the base is a nano, for which CPU bf16 saves little.

    Returns:
        For `auto`: bf16 on a GPU and, for larger bases, on CPUs with bf16 units (others emulate it a hundred times
        slower than fp32); fp32 else.
    """
    if precision == "fp32":
        return torch.float32
    if precision == "bf16" or device.type == "cuda":
        return torch.bfloat16
    native = torch.cpu.get_capabilities().get("avx512_bf16") if hasattr(torch.cpu, "get_capabilities") else False
    return torch.bfloat16 if native and not small else torch.float32


def use_threads(threads: int, processes: int) -> int:
    """Sets torch's threads: `threads`, or for 0 this process's share of the cores.

    `accelerate launch` sets OMP_NUM_THREADS=1 unless told otherwise, which would leave all cores but one idle.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or max(cores // processes, 1)
    torch.set_num_threads(count)
    return count


def keep_memory() -> None:
    """Tells glibc not to give freed memory back: on CPUs a third of an update can go into page faults otherwise."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 256 * 2**20)
