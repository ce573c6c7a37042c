"""A run: its configuration, its collaborators and counters, how it is built, saved and restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from bupo.balancer import BalancerConfig
from bupo.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from bupo.config import at_least, dump, in_range, one_of, raise_problems
from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.coordinators.base import GameCoordinator
from bupo.devices import PRECISIONS, compute_dtype, keep_memory, use_threads
from bupo.evaluate import EvaluationConfig
from bupo.evaluator import DynamicEvaluator, EvaluatorConfig
from bupo.learn.critic import TurnCritic
from bupo.learn.optimizer import PolicyOptimizer
from bupo.learn.ppo import PPOConfig
from bupo.learn.warmstart import WarmstartConfig, prepare_base
from bupo.negotiation.rewards import RewardConfig
from bupo.negotiation.scenario import ScenarioConfig
from bupo.negotiation.states import design, situation
from bupo.policies.bases import NANO, SMOLLM2, Base
from bupo.policies.lockstep import Lockstep, freeze
from bupo.policies.nano import NanoConfig
from bupo.policies.pool import REFERENCE, PolicyPool, PoolConfig, default_perturbation
from bupo.records import Credit, Scorecard
from bupo.rollout.dialogues import Table
from bupo.rollout.engine import Decoding
from bupo.selfplay.league import League
from bupo.selfplay.matchmaking import InteractConfig
from bupo.tracking import Tracker, prepare_run_folder

AUTO = "auto"
NANO_LR, PUBLIC_LR = 5e-3, 3e-4
TRACKERS = ("none", "tensorboard", "wandb", "trackio")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A negotiation run.

    Attributes:
        base: `nano`, `smollm2`, a hub id or a local folder; `auto` is nano, or smollm2 where there is a GPU.
        iterations: Iterations of interact, update, balance.
        seed: Seeds everything but the base's SFT.
        output_dir: The run folder.
        resume: Whether to continue the run in `output_dir` from its last checkpoint.
        precision: Compute type of the base: `fp32`, `bf16`, or `auto`. Adapters are always fp32.
        threads: CPU threads; 0 for all cores.
        tracker: An accelerate tracker that metrics go to as well: `none`, `tensorboard`, `wandb`, `trackio`.
        trust_remote_code: Whether code shipped with a hub model may run.
        nano: Size of the nano base.
        sft: Supervised fine-tuning before reinforcement learning.
        pool: The sub-policies.
        coordinator: How proposals are mixed.
        scenarios: The negotiation problems.
        interact: Who plays whom.
        reward: What a dialogue is worth.
        ppo: The update.
        evaluator: The dynamic evaluator.
        balancer: Culling and injection.
        evaluation: Evaluation before and after.
    """

    base: str = AUTO
    iterations: int = 36
    seed: int = 0
    output_dir: str = "runs/negotiation"
    resume: bool = False
    precision: str = "auto"
    threads: int = 0
    tracker: str = "none"
    trust_remote_code: bool = False
    nano: NanoConfig = field(default_factory=NanoConfig)
    sft: WarmstartConfig = field(default_factory=WarmstartConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    scenarios: ScenarioConfig = field(default_factory=ScenarioConfig)
    interact: InteractConfig = field(default_factory=InteractConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Checks values that concern more than one section."""
        weights, branch = self.coordinator.weights, self.pool.branch_layers
        too_many = self.base == NANO and type(branch) is int and branch > self.nano.layers
        raise_problems(
            [
                None if self.base.strip() else f"base: give {NANO}, {SMOLLM2}, a hub id or a folder",
                at_least("iterations", self.iterations, 0),
                in_range("seed", self.seed, 0, 2**31),
                one_of("precision", self.precision, PRECISIONS),
                at_least("threads", self.threads, 0),
                one_of("tracker", self.tracker, TRACKERS),
                f"coordinator.weights: {len(weights)} numbers for pool.size = {self.pool.size}; give one each or none"
                if weights and len(weights) != self.pool.size
                else None,
                f"pool.branch_layers: {branch} is more than the {self.nano.layers} layers of nano"
                if too_many
                else None,
                "interact.group_size: group advantages need at least 2 copies; or take --ppo.advantage role"
                if self.ppo.advantage != "role" and self.interact.group_size < 2
                else None,
            ]
        )


@dataclass(kw_only=True)
class Run:
    """A run's collaborators and its counters."""

    config: Config
    folder: Path
    accelerator: Accelerator
    tracker: Tracker
    base: Base
    pool: PolicyPool
    lockstep: Lockstep
    coordinator: GameCoordinator
    optimizer: PolicyOptimizer
    critic: TurnCritic
    league: League
    evaluator: DynamicEvaluator
    table: Table
    rng: np.random.Generator
    shuffler: torch.Generator
    iteration: int = 0
    tokens_trained: int = 0
    baselines: dict[str, float] = field(default_factory=dict)
    cards: list[Scorecard] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Torch generators by name."""
        return {"shuffler": self.shuffler}


def completed(config: Config, name: str, device: torch.device, tracker: Tracker) -> Config:
    """Fills in what was left to us by the kind of base; a public base on a CPU gets small sizes, and says so."""
    public = name != NANO
    slow = public and device.type == "cpu"
    dialogues = config.interact.dialogues or (16 if slow else 152)
    scenarios = config.evaluation.scenarios or (8 if slow else 0)
    if slow and (dialogues, scenarios) != (config.interact.dialogues, config.evaluation.scenarios):
        tracker.say(
            f"a public base on a CPU: {dialogues} dialogues an iteration, {scenarios} evaluation scenarios "
            "(--interact.dialogues 152 --evaluation.scenarios 60 for the sizes of a GPU)"
        )
    return replace(
        config,
        base=name,
        pool=replace(config.pool, perturbation=config.pool.perturbation or default_perturbation(name)),
        interact=replace(config.interact, dialogues=dialogues),
        ppo=replace(config.ppo, lr=config.ppo.lr or (PUBLIC_LR if public else NANO_LR)),
        evaluation=replace(config.evaluation, scenarios=scenarios),
    )


def initialise(config: Config) -> Run:
    """Phase 1: the SFT base, K perturbed sub-policies, and everything that plays and learns with them."""
    keep_memory()
    accelerator = Accelerator(
        log_with=None if config.tracker == "none" else config.tracker, project_dir=config.output_dir
    )
    if accelerator.num_processes != 1:
        raise SystemExit(
            f"{accelerator.num_processes} processes were started; this version trains in one. "
            "Launch with: accelerate launch --num_processes 1 recipes/negotiation.py"
        )
    use_threads(config.threads, accelerator.num_processes)
    folder = prepare_run_folder(config.output_dir, config.resume)
    forward = None
    if config.tracker != "none":
        accelerator.init_trackers("bupo")
        forward = accelerator.log
    tracker = Tracker(folder, is_main=accelerator.is_main_process, forward=forward)

    device = accelerator.device
    name = (SMOLLM2 if device.type == "cuda" else NANO) if config.base == AUTO else config.base
    config = completed(config, name, device, tracker)
    (folder / "config.yaml").write_text(dump(config))
    started = time.perf_counter()
    base = prepare_base(
        name,
        config=config.sft,
        nano=config.nano,
        pool=config.pool,
        scenarios=config.scenarios,
        dtype=compute_dtype(config.precision, device, small=name == NANO),
        trust_remote_code=config.trust_remote_code,
        tracker=tracker,
    )
    freeze(base.model.to(device))  # pyright: ignore[reportArgumentType]
    pool = PolicyPool(base, config.pool)
    noise = torch.Generator().manual_seed(config.seed)
    for _ in range(config.pool.size):
        pool.add_perturbed(REFERENCE, generator=noise)
    lockstep = Lockstep(pool)
    coordinator = build_coordinator(config.coordinator, config.pool.size).to(device)
    decoding = Decoding(
        temperature=config.ppo.temperature,
        max_tokens=config.interact.max_message_tokens,
        stop_ids=base.chat.stop_ids,
        compiled=config.interact.compile,
    )
    run = Run(
        config=config,
        folder=folder,
        accelerator=accelerator,
        tracker=tracker,
        base=base,
        pool=pool,
        lockstep=lockstep,
        coordinator=coordinator,
        optimizer=PolicyOptimizer(pool, config.ppo.max_grad_norm),
        critic=TurnCritic(design=design, situation=situation, window=config.ppo.critic_window),
        league=League(config.interact.league_size),
        evaluator=DynamicEvaluator(config.evaluator, config.ppo.micro_tokens, config.ppo.temperature),
        table=Table(
            lockstep=lockstep,
            chat=base.chat,
            decoding=decoding,
            retries=config.interact.retries,
        ),
        rng=np.random.default_rng(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
    )
    run.seconds["initialise"] = time.perf_counter() - started
    if config.resume:
        restore(run)
    return run


def save(run: Run) -> None:
    """Writes a checkpoint after the finished iterations."""
    state = {
        "tokens_trained": run.tokens_trained,
        "baselines": run.baselines,
        "seconds": run.seconds,
        "cards": [asdict(card) for card in run.cards],
    }
    save_checkpoint(
        run.folder,
        run.iteration,
        pool=run.pool,
        optimizer=run.optimizer,
        critic=run.critic,
        league=run.league,
        state=state,
        rng=run.rng,
        generators=run.generators,
    )


def restore(run: Run) -> None:
    """Continues from the newest checkpoint; metrics and transcripts after it are cut off."""
    newest = checkpoints(run.folder)[-1]
    run.iteration, state = load_checkpoint(
        newest,
        pool=run.pool,
        optimizer=run.optimizer,
        critic=run.critic,
        league=run.league,
        lockstep=run.lockstep,
        rng=run.rng,
        generators=run.generators,
    )
    run.tokens_trained = state["tokens_trained"]
    run.baselines = state["baselines"]
    run.seconds = state["seconds"]
    run.cards = [_card(saved) for saved in state["cards"]]
    run.tracker.cut_back(run.iteration)
    run.tracker.say(f"resumed after {run.iteration} iterations from {newest.name}")


def _card(saved: dict[str, Any]) -> Scorecard:
    credits = {name: None if c is None else Credit(**c) for name, c in saved["relative_advantage"].items()}
    pairs = tuple(tuple(row) for row in saved["pairwise_kl"])
    return Scorecard(**saved | {"names": tuple(saved["names"]), "pairwise_kl": pairs, "relative_advantage": credits})
