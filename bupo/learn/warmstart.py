"""Initialise: supervised fine-tuning on dialogues between scripted players, cached by everything that shapes it.

A nano base is trained from scratch (tokenizer included) and becomes the frozen base itself. A public base gets a LoRA
adapter that becomes the frozen `sft` reference. Both run through TRL's SFTTrainer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bupo.config import at_least, in_range, positive, raise_problems, to_dict
from bupo.learn.demonstrations import all_numbers, all_texts, examples, scripted_dialogues
from bupo.learn.muon import MuonAdamW
from bupo.negotiation.scenario import ScenarioConfig
from bupo.policies.bases import NANO, Base, load_pretrained
from bupo.policies.chat import ChatFormat
from bupo.policies.nano import NanoConfig, build_nano, train_tokenizer
from bupo.policies.pool import REFERENCE, PoolConfig, lora_config
from bupo.tracking import Tracker

FORMAT = 10
"""Raised when prompts, phrases or players change, so that cached bases of older code are not taken."""
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, kw_only=True)
class WarmstartConfig:
    """SFT before any reinforcement learning.

    Attributes:
        dialogues: Scripted dialogues to learn from when a nano base is trained; each gives one or two examples.
        lr: Peak learning rate for a nano base (Muon and AdamW alike).
        public_dialogues: Scripted dialogues for a public base.
        public_lr: Peak learning rate of a public base's LoRA.
        public_batch: Seats in one optimizer step of a public base: few examples, so many steps.
        batch: Seats in one optimizer step.
        reworded: Share of the other side's messages whose words are random in a nano base's data, so that it reads
            offers whatever the wording.
        seed: Seeds data and weights; apart from the run's seed, so that runs share a cached base.
    """

    dialogues: int = 4600
    lr: float = 4e-3
    public_dialogues: int = 40
    public_lr: float = 1e-3
    public_batch: int = 1
    batch: int = 4
    reworded: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the values."""
        raise_problems(
            [
                at_least("dialogues", self.dialogues, 1),
                positive("lr", self.lr),
                at_least("public_dialogues", self.public_dialogues, 1),
                positive("public_lr", self.public_lr),
                at_least("public_batch", self.public_batch, 1),
                at_least("batch", self.batch, 1),
                in_range("reworded", self.reworded, 0, 1),
                in_range("seed", self.seed, 0, 2**31),
            ]
        )


def cache_dir() -> Path:
    """Where prepared bases are kept: BUPO_CACHE_DIR, else the user's cache folder."""
    if root := os.environ.get("BUPO_CACHE_DIR"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bupo"


def _key(*parts: Any) -> str:
    text = json.dumps([FORMAT, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bucketed(lengths: Sequence[int], batch: int, seed: int, span: int = 64) -> list[int]:
    """An order of examples in which each batch holds similar lengths, and batches come in random order.

    transformers' own grouping by length lets batches run from long to short time and again, and ends on short ones.

    Args:
        lengths: Tokens of each example.
        batch: Examples a step.
        seed: Seeds the order.
        span: Batches that are sorted together.

    Returns:
        A permutation of the indices, to be cut into batches from the start; what fills no batch comes last.
    """
    rng = np.random.default_rng([seed, 0xB7])
    shuffled = rng.permutation(len(lengths))
    whole = len(shuffled) - len(shuffled) % batch
    ordered: list[int] = []
    for start in range(0, whole, span * batch):
        block = sorted(shuffled[start : min(start + span * batch, whole)].tolist(), key=lambda index: lengths[index])
        for first in rng.permutation(np.arange(0, len(block), batch)):
            ordered += block[first : first + batch]
    return [*ordered, *shuffled[whole:].tolist()]


def train_sft(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[dict[str, list[int]]],
    *,
    lr: float,
    batch: int,
    seed: int,
    tracker: Tracker,
    scratch_base: bool = False,
) -> float:
    """One epoch of TRL's SFTTrainer over tokenised examples, with progress.

    Args:
        model: The model to train in place (a PeftModel trains its active adapter).
        tokenizer: For padding.
        data: Examples with `input_ids` and `labels`.
        lr: Peak learning rate; linear warm-up over 2% and decay to zero.
        batch: Examples a step.
        seed: Order of the data.
        tracker: Shows progress.
        scratch_base: Whether a whole base is trained from scratch: its matrices learn by Muon, about twice as fast in
            steps; otherwise all by AdamW.

    Returns:
        Mean loss over the last tenth of the steps, nats per token.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    data = [data[index] for index in bucketed([len(example["input_ids"]) for example in data], batch, seed)]
    losses: list[float] = []
    steps = -(-len(data) // batch)
    with tempfile.TemporaryDirectory() as scratch, tracker.progress("sft", steps, "steps") as bar:

        class Progress(TrainerCallback):
            """Feeds the progress bar."""

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    losses.append(float(logs["loss"]))

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                bar.update(advance=1, note=f"loss {losses[-1]:.3f}" if losses else None)

        settings = SFTConfig(
            output_dir=scratch,
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=lr,
            lr_scheduler_type="linear",
            warmup_steps=max(steps // 50, 1),
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            max_length=None,
            activation_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=seed,
        )
        muon = MuonAdamW(model, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY) if scratch_base else None
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[Progress()],
            optimizers=(muon, None),
        )
        trainer.remove_callback(_console_callback())
        trainer.train()
    tail = losses[-max(len(losses) // 10, 1) :]
    return sum(tail) / len(tail) if tail else float("nan")


def _console_callback() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def _store(folder: Path, write: Any) -> None:
    """Fills a cache folder whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def nano_folder(config: WarmstartConfig, nano: NanoConfig, scenarios: ScenarioConfig) -> Path:
    """Where the nano base of these settings is kept; the settings of public bases do not matter to it."""
    own = {key: value for key, value in to_dict(config).items() if not key.startswith("public_")}
    return cache_dir() / f"nano-{_key(own, to_dict(nano), to_dict(scenarios))}"


def prepare_nano(config: WarmstartConfig, nano: NanoConfig, scenarios: ScenarioConfig, tracker: Tracker) -> Path:
    """The folder of a trained nano base; trains it if it is not cached."""
    folder = nano_folder(config, nano, scenarios)
    if (folder / "config.json").is_file():
        tracker.say(f"nano base from the cache: {folder}")
        return folder
    started = time.monotonic()
    tracker.say("training the nano base (once; later runs take it from the cache)")
    dialogues = scripted_dialogues(config.dialogues, scenarios, config.seed)
    torch.manual_seed(config.seed)
    texts = all_texts(dialogues[:1000], reworded=config.reworded, seed=config.seed)
    tokenizer = train_tokenizer(texts, nano.vocab, all_numbers(dialogues))
    model = build_nano(nano, tokenizer)
    data = examples(ChatFormat(tokenizer), dialogues, notes=True, reworded=config.reworded, seed=config.seed)
    loss = train_sft(
        model,
        tokenizer,
        data,
        lr=config.lr,
        batch=config.batch,
        seed=config.seed,
        tracker=tracker,
        scratch_base=True,
    )

    def write(scratch: Path) -> None:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)

    _store(folder, write)
    tracker.say(f"nano base ready: loss {loss:.3f} nats/token, {time.monotonic() - started:.0f} s")
    return folder


def prepare_adapter(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: WarmstartConfig,
    pool: PoolConfig,
    scenarios: ScenarioConfig,
    tracker: Tracker,
) -> Path:
    """The folder of a public base's `sft` LoRA; trains it if it is not cached."""
    shape = [pool.rank, pool.alpha, pool.targets, pool.branches(model.config.num_hidden_layers)]
    folder = cache_dir() / f"sft-{_key(name, model.config.to_dict(), to_dict(config), shape, to_dict(scenarios))}"
    if (folder / "adapter_config.json").is_file():
        tracker.say(f"sft adapter from the cache: {folder}")
        return folder
    started = time.monotonic()
    dialogues = scripted_dialogues(config.public_dialogues, scenarios, config.seed)
    torch.manual_seed(config.seed)
    data = examples(ChatFormat(tokenizer), dialogues, notes=False, reworded=0.0, seed=config.seed)
    peft_model = get_peft_model(model, lora_config(pool, model), adapter_name=REFERENCE)
    loss = train_sft(
        peft_model, tokenizer, data, lr=config.public_lr, batch=config.public_batch, seed=config.seed, tracker=tracker
    )

    def write(scratch: Path) -> None:
        peft_model.save_pretrained(str(scratch), selected_adapters=[REFERENCE], save_embedding_layers=False)
        for file in (scratch / REFERENCE).iterdir():
            file.rename(scratch / file.name)

    _store(folder, write)
    peft_model.unload()
    tracker.say(f"sft adapter ready: loss {loss:.3f} nats/token, {time.monotonic() - started:.0f} s")
    return folder


def prepare_base(
    name: str,
    *,
    config: WarmstartConfig,
    nano: NanoConfig,
    pool: PoolConfig,
    scenarios: ScenarioConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    tracker: Tracker,
) -> Base:
    """Loads a base and makes sure that it has had its SFT.

    Args:
        name: `nano`, `smollm2`, a hub id or a folder.
        config: SFT settings.
        nano: Size of a nano base.
        pool: Shape of the adapters.
        scenarios: What the SFT dialogues are about.
        dtype: Compute type.
        trust_remote_code: Whether code shipped with a hub model may run.
        tracker: Shows progress.

    Returns:
        The frozen base.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if name == NANO:
        folder = prepare_nano(config, nano, scenarios, tracker)
        model, tokenizer = load_pretrained(str(folder), dtype)
        return Base(name=name, model=model, tokenizer=tokenizer, chat=ChatFormat(tokenizer))
    model, tokenizer = load_pretrained(name, dtype, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    adapter = prepare_adapter(name, model, tokenizer, config, pool, scenarios, tracker)
    return Base(name=name, model=model, tokenizer=tokenizer, chat=ChatFormat(tokenizer), sft_adapter=adapter)
