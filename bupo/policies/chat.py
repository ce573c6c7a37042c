"""Dialogues as token ids through a tokenizer's own chat template, extended turn by turn.

A dialogue's ids only grow at the end: what was sampled stays as sampled (tokens in, tokens out). `ChatFormat` asks the
template once for the pieces around a reply and checks that the template is prefix-stable, which continuing a KV cache
needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

_PROBE = ("probe one", "probe two")


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
        closing = self._between(_PROBE[1])
        stop = self._ids(closing)[0]
        self.stop_ids: tuple[int, ...] = tuple({stop, tokenizer.eos_token_id} - {None})
        self._stop_texts = tuple(str(tokenizer.decode([stop_id])) for stop_id in self.stop_ids)
        self.stop_id = stop

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _between(self, user: str) -> str:
        """The text from the end of a reply to the start of the next one."""
        first = [{"role": "user", "content": _PROBE[0]}]
        head = self._render(first)
        reply = "probe reply"
        whole = self._render([*first, {"role": "assistant", "content": reply}, {"role": "user", "content": user}])
        if not whole.startswith(head + reply):
            raise ChatTemplateError(
                "the chat template changes earlier turns when a new one is added (not prefix-stable), so a dialogue "
                "cannot continue its own cache; use a base with a plain template such as ChatML"
            )
        return whole[len(head) + len(reply) :]

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
        text = self._between(self.clean(user))
        if last_id in self.stop_ids:
            for stop in self._stop_texts:
                text = text.removeprefix(stop)
        return self._ids(text)

    def reply(self, text: str) -> list[int]:
        """Ids of an assistant reply, end of turn included."""
        return [*self._ids(text), self.stop_id]

    def text(self, ids: Sequence[int]) -> str:
        """The words of a sampled reply, without control tokens."""
        return self.clean(str(self.tokenizer.decode(list(ids), skip_special_tokens=True))).strip()
