"""Checkpoints: everything that makes a resumed run equal an uninterrupted one, without the frozen base.

A checkpoint is written beside its place and renamed, so a killed run never leaves half of one. Only safetensors and
JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bupo.learn.critic import TurnCritic
from bupo.learn.optimizer import PolicyOptimizer
from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import PolicyPool
from bupo.selfplay.league import League
from bupo.tracking import CHECKPOINTS

KEPT = 2


def save_checkpoint(
    run_dir: Path,
    iteration: int,
    *,
    pool: PolicyPool,
    optimizer: PolicyOptimizer,
    critic: TurnCritic,
    league: League,
    state: dict[str, Any],
    rng: np.random.Generator,
    generators: dict[str, torch.Generator],
) -> Path:
    """Writes the state after `iteration` finished iterations and drops all but the newest checkpoints.

    Args:
        run_dir: The run folder.
        iteration: Number of finished iterations.
        pool: The sub-policies.
        optimizer: Their Adam state.
        critic: The rows that it remembers.
        league: Past selves.
        state: Plain JSON: counters, baselines, scorecards.
        rng: NumPy's generator.
        generators: Torch's generators by name.

    Returns:
        The checkpoint's folder.
    """
    root = run_dir / CHECKPOINTS
    folder, scratch = root / f"iteration{iteration:05d}", root / f".iteration{iteration:05d}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    pool.save(scratch / "policies")
    league.save(scratch / "league")
    tensors = {
        f"adam|{parameter}|{key}": value.contiguous() if value.dim() else value.reshape(1)
        for parameter, entry in optimizer.state_dict().items()
        for key, value in entry.items()
    }
    tensors |= {f"generator|{name}": generator.get_state() for name, generator in generators.items()}
    tensors |= {f"critic|{key}": torch.from_numpy(array) for key, array in critic.state().items()}
    save_file(tensors, scratch / "state.safetensors")
    (scratch / "state.json").write_text(
        json.dumps({"iteration": iteration, "rng": rng.bit_generator.state, "state": state})
    )
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
    for old in checkpoints(run_dir)[:-KEPT]:
        shutil.rmtree(old)
    return folder


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("iteration*"))


def load_checkpoint(
    folder: Path,
    *,
    pool: PolicyPool,
    optimizer: PolicyOptimizer,
    critic: TurnCritic,
    league: League,
    lockstep: Lockstep,
    rng: np.random.Generator,
    generators: dict[str, torch.Generator],
) -> tuple[int, dict[str, Any]]:
    """Restores a checkpoint in place.

    Returns:
        The number of finished iterations and the JSON state.
    """
    saved = json.loads((folder / "state.json").read_text())
    pool.load(folder / "policies")
    optimizer.sync()
    league.load(folder / "league", lockstep)
    tensors = load_file(folder / "state.safetensors")
    adam: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("adam|"):
            _, parameter, entry = key.split("|")
            adam.setdefault(parameter, {})[entry] = value.reshape(()) if entry == "step" else value.to(lockstep.device)
    optimizer.load_state_dict(adam)
    critic.restore(
        {key.partition("|")[2]: value.numpy() for key, value in tensors.items() if key.startswith("critic|")}
    )
    for name, generator in generators.items():
        generator.set_state(tensors[f"generator|{name}"])
    rng.bit_generator.state = saved["rng"]
    return saved["iteration"], saved["state"]
