"""Dialogues as token ids through a tokenizer's own chat template, extended turn by turn.

A dialogue's ids only grow at the end: what was sampled stays as sampled (tokens in, tokens out). `ChatFormat` asks the
template once for the pieces around a reply and checks that the template is prefix-stable, which continuing a KV cache
needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase


class ChatTemplateError(ValueError):
    """A tokenizer's chat template cannot carry a dialogue that grows turn by turn."""


class ChatFormat:
    """Renders system, user and assistant turns as ids for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Reads the pieces of the template.

        Args:
            tokenizer: A tokenizer with a chat template.

        Raises:
            ChatTemplateError: There is no template, or it rewrites earlier turns.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template; take an instruction-tuned base, or set tokenizer.chat_template "
                "and save it with the model"
            )
        self.tokenizer = tokenizer
        self._specials = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
        try:
            self._render([{"role": "system", "content": "probe"}, {"role": "user", "content": "probe"}])
            self.has_system = True
        except TemplateError:
            self.has_system = False
        self._before, self._after = self._around_user()
        stop = self._ids(self._before)[0]
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = (stop, eos) if isinstance(eos, int) and eos != stop else (stop,)
        self._stop_texts = tuple(str(tokenizer.decode([stop_id])) for stop_id in self.stop_ids)
        self.stop_id = stop

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        # The wrapper around a fast tokenizer costs ten times what the tokenizer itself does.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _around_user(self) -> tuple[str, str]:
        """The template's text between a reply and the next user message, and from there to the next reply."""
        first, reply = [{"role": "user", "content": "probe one"}], "probe reply"
        head = self._render(first)
        pieces = set()
        for probe in ("probe two", "another probe"):
            turns = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": probe}]
            whole = self._render(turns)
            if not whole.startswith(head + reply) or whole.count(probe) != 1:
                raise ChatTemplateError(
                    "the chat template changes earlier turns when a new one is added (not prefix-stable), so a "
                    "dialogue cannot continue its own cache; use a base with a plain template such as ChatML"
                )
            before, _, after = whole[len(head) + len(reply) :].partition(probe)
            pieces.add((before, after))
        if len(pieces) != 1:
            raise ChatTemplateError("the chat template's control text depends on the message; use a plain template")
        return pieces.pop()

    def clean(self, text: str) -> str:
        """Removes control tokens from text that came from a model, a player or a file."""
        for special in self._specials:
            text = text.replace(special, " ")
        return text

    def open(self, system: str, user: str) -> list[int]:
        """Ids of a new dialogue up to the start of the first reply."""
        user = self.clean(user)
        if self.has_system:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        else:
            messages = [{"role": "user", "content": f"{system}\n\n{user}"}]
        return self._ids(self._render(messages))

    def extend(self, user: str, last_id: int) -> list[int]:
        """Ids from the end of a reply to the start of the next one.

        Args:
            user: The new user message.
            last_id: Last id of the reply; the template's end-of-turn text is left out where the reply sampled it.
        """
        before = self._before
        if last_id in self.stop_ids:
            for stop in self._stop_texts:
                before = before.removeprefix(stop)
        return self._ids(before + self.clean(user) + self._after)

    def reply(self, text: str) -> list[int]:
        """Ids of an assistant reply, end of turn included."""
        return [*self._ids(text), self.stop_id]

    def text(self, ids: Sequence[int]) -> str:
        """The words of a sampled reply, without control tokens."""
        return self.clean(str(self.tokenizer.decode(list(ids), skip_special_tokens=True))).strip()
