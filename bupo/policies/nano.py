"""The nano base: a small Llama with its own tokenizer, made from text in minutes on a CPU.

Numbers are single tokens, and merges may run across words (superword BPE, Liu et al. 2025, arXiv 2503.13423), so a
message costs about ten tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bupo.config import at_least, raise_problems

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MAX_POSITIONS = 2048
HEAD_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class NanoConfig:
    """Size of the nano base.

    Attributes:
        hidden: Width of the residual stream; a multiple of 32 (the width of a head).
        layers: Number of decoder layers.
        ffn: Width of the feed-forward layers.
        vocab: Vocabulary size of its tokenizer, at least 512.
    """

    hidden: int = 128
    layers: int = 4
    ffn: int = 352
    vocab: int = 1280

    def __post_init__(self) -> None:
        """Checks the sizes."""
        raise_problems(
            [
                at_least("hidden", self.hidden, HEAD_WIDTH),
                f"hidden: {self.hidden} is not a multiple of {HEAD_WIDTH}" if self.hidden % HEAD_WIDTH else None,
                at_least("layers", self.layers, 1),
                at_least("ffn", self.ffn, 16),
                at_least("vocab", self.vocab, 512),
            ]
        )


def train_tokenizer(texts: Iterable[str], vocab: int, numbers: Iterable[int] = ()) -> PreTrainedTokenizerFast:
    """Trains the tokenizer: byte-level BPE over whole phrases, numbers apart.

    Args:
        texts: Text to learn from.
        vocab: Vocabulary size.
        numbers: Numbers that must become single tokens.

    Returns:
        A tokenizer with the nano chat template; it encodes any text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+"), "isolated"),
            pre_tokenizers.Split(Regex(r"[\[\n]"), "merged_with_next"),
            pre_tokenizers.Split(Regex(r"\]|[.!?] "), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=48,
    )
    corpus = list(texts)
    # Enough copies that the merges which build a number come before rare phrases.
    corpus += [str(number) for number in numbers for _ in range(max(len(corpus) // 20, 1))]
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIALS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_nano(config: NanoConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialised nano model for this tokenizer."""
    heads = config.hidden // HEAD_WIDTH
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=heads,
            num_key_value_heads=1,
            head_dim=HEAD_WIDTH,
            intermediate_size=config.ffn,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=SPECIALS.index("<|end|>"),
            pad_token_id=SPECIALS.index("<|pad|>"),
        )
    )
