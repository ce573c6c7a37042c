"""SFT data: dialogues between scripted training players, as ids and labels, tokenised exactly as in a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bupo.negotiation.dialogue import Dialogue, play
from bupo.negotiation.opponents import seat_player
from bupo.negotiation.phrases import chatter
from bupo.negotiation.scenario import ScenarioConfig, procurement
from bupo.policies.chat import ChatFormat
from bupo.policies.packing import common_length

SFT_SEEDS = 500_000
"""First scenario seed of SFT data: held-out scenarios come before it, training scenarios from 1,000,000 on."""
SFT_SPAN = 400_000
"""Number of SFT scenario seeds."""

IMITATED = {"firm": 0.5, "eager": 0.5}
"""Shares of the players that SFT imitates: those that close nearly every deal worth closing. Which of them is better is
for reinforcement learning to find out."""
HEARD = {"firm": 0.42, "eager": 0.38, "random": 0.08, "micro": 0.07, "tough": 0.05}
"""Shares of the players on the other side, whose messages are imitated only where they are in `IMITATED`."""


def scripted_dialogues(count: int, scenarios: ScenarioConfig, seed: int) -> list[Dialogue]:
    """Dialogues between training players, at least one of them to be imitated."""
    dialogues = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        scenario = procurement(scenarios, SFT_SEEDS + (seed * 104_729 + index) % SFT_SPAN)
        own, other = (str(rng.choice(list(shares), p=list(shares.values()))) for shares in (IMITATED, HEARD))
        pair = (own, other) if rng.random() < 0.5 else (other, own)
        talkers = (seat_player(pair[0], scenario, 0, rng), seat_player(pair[1], scenario, 1, rng))
        dialogues.append(play(scenario, pair, talkers))
    return dialogues


def _reworded(prompt: str, rng: np.random.Generator) -> str:
    """The same prompt with the other side's words replaced by chatter; offer and note stay."""
    words, bracket, rest = prompt.partition("[")
    return f"{chatter(rng)} {bracket}{rest}" if bracket and "\n" not in words else prompt


def seat_example(
    chat: ChatFormat, dialogue: Dialogue, seat: int, *, notes: bool, reworded: float, rng: np.random.Generator
) -> dict[str, list[int]] | None:
    """One seat's view of a dialogue as ids and labels, tokenised piece by piece exactly as in a rollout.

    Args:
        chat: The chat format.
        dialogue: A finished dialogue.
        seat: Whose view.
        notes: Whether the notes in user messages are learnt too: that is how a base trained from scratch learns what
            offers are worth. A public base learns its own messages only.
        reworded: Share of the other side's messages whose words are replaced by chatter.
        rng: Draws the chatter.

    Returns:
        `input_ids` and `labels` (-100 where nothing is learnt), None if the seat never spoke.
    """
    exchanges = dialogue.exchanges[seat]
    if not exchanges:
        return None
    ids: list[int] = []
    labels: list[int] = []
    for exchange in exchanges:
        prompt = _reworded(exchange.prompt, rng) if rng.random() < reworded else exchange.prompt
        words = prompt.partition("\n")[0]
        if ids:
            more, heard = chat.extend(prompt, ids[-1]), chat.extend(words, ids[-1])
        else:
            more, heard = (chat.open(dialogue.system(seat), text) for text in (prompt, words))
        ids += more
        # The scenario's numbers and the other side's words are not the model's to predict, the note is.
        unlearnt = common_length(more, heard) if notes else len(more)
        labels += [-100] * unlearnt + more[unlearnt:]
        reply = chat.reply(exchange.reply)
        ids += reply
        labels += reply if exchange.valid else [-100] * len(reply)
    return {"input_ids": ids, "labels": labels}


def examples(
    chat: ChatFormat, dialogues: Sequence[Dialogue], *, notes: bool, reworded: float, seed: int
) -> list[dict[str, list[int]]]:
    """All seats of these dialogues that are to be imitated."""
    rng = np.random.default_rng([seed, 0xC4])
    found = (
        seat_example(chat, dialogue, seat, notes=notes, reworded=reworded, rng=rng)
        for dialogue in dialogues
        for seat in (0, 1)
        if dialogue.players[seat] in IMITATED
    )
    return [example for example in found if example is not None]


def all_texts(dialogues: Sequence[Dialogue], *, reworded: float, seed: int) -> list[str]:
    """All that is said in some dialogues, and chatter in proportion, for the tokenizer."""
    rng = np.random.default_rng([seed, 0x70])
    texts = []
    for dialogue in dialogues:
        for seat in (0, 1):
            texts.append(dialogue.system(seat))
            for exchange in dialogue.exchanges[seat]:
                texts += [exchange.prompt, exchange.reply]
                if rng.random() < reworded:
                    texts.append(chatter(rng))
    return texts


def all_numbers(dialogues: Sequence[Dialogue]) -> list[int]:
    """Issue values of these dialogues, and 0 to 100 for points."""
    values = {value for d in dialogues for issue in d.scenario.issues for value in issue.values}
    return sorted(values | set(range(101)))
