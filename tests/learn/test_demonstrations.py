"""bupo.learn.demonstrations: what SFT imitates, and that its tokens are those of a rollout."""

import numpy as np
import tiny

from bupo.learn.demonstrations import IMITATED, examples, scripted_dialogues, seat_example
from bupo.negotiation.dialogue import Dialogue
from bupo.negotiation.scenario import ScenarioConfig
from bupo.policies.chat import ChatFormat

DIALOGUES = scripted_dialogues(60, ScenarioConfig(), 0)
CHAT = ChatFormat(tiny.tokenizer())


def example(dialogue, seat, *, notes=False, reworded=0.0, seed=0):
    return seat_example(CHAT, dialogue, seat, notes=notes, reworded=reworded, rng=np.random.default_rng(seed))


def learnt(found):
    """The text of each run of learnt tokens."""
    runs, run = [], []
    for token, label in zip(found["input_ids"], found["labels"], strict=True):
        if label == -100:
            runs, run = ([*runs, run] if run else runs), []
        else:
            assert label == token
            run.append(token)
    return [CHAT.tokenizer.decode(ids) for ids in ([*runs, run] if run else runs)]


def test_every_dialogue_seats_a_player_to_imitate_and_both_seats_are_drawn():
    seats = [[name in IMITATED for name in dialogue.players] for dialogue in DIALOGUES]
    assert all(map(any, seats))
    assert {seat.index(True) for seat in seats if sum(seat) == 1} == {0, 1}


def test_only_seats_to_imitate_become_examples():
    expected = sum(
        name in IMITATED and len(dialogue.exchanges[seat]) > 0
        for dialogue in DIALOGUES
        for seat, name in enumerate(dialogue.players)
    )
    assert len(examples(CHAT, DIALOGUES, notes=False, reworded=0.0, seed=0)) == expected
    assert expected < 2 * len(DIALOGUES)


def test_ids_are_those_that_a_rollout_feeds_and_labels_are_the_own_messages():
    for dialogue in DIALOGUES[:8]:
        for seat in (0, 1):
            ids = []
            for exchange in dialogue.exchanges[seat]:
                opening = CHAT.open(dialogue.system(seat), exchange.prompt)
                more = CHAT.extend(exchange.prompt, ids[-1]) if ids else opening
                ids += [*more, *CHAT.reply(exchange.reply)]
            found = example(dialogue, seat)
            assert found["input_ids"] == ids
            assert learnt(found) == [f"{exchange.reply}<|end|>" for exchange in dialogue.exchanges[seat]]


def test_notes_are_learnt_where_asked_and_what_the_other_side_said_never_is():
    dialogue = DIALOGUES[0]
    runs = learnt(example(dialogue, 0, notes=True))
    for run, exchange in zip(runs, dialogue.exchanges[0], strict=True):
        words, _, note = exchange.prompt.partition("\n")
        assert note in run and exchange.reply in run
        assert words not in run


def test_rewording_keeps_every_offer_and_note():
    dialogue = DIALOGUES[0]
    plain = CHAT.tokenizer.decode(example(dialogue, 0)["input_ids"])
    changed = CHAT.tokenizer.decode(example(dialogue, 0, reworded=1.0)["input_ids"])
    assert plain != changed
    for exchange in dialogue.exchanges[0]:
        words, bracket, rest = exchange.prompt.partition("[")
        if bracket and "\n" not in words:
            assert f"{bracket}{rest}" in changed and f"<|user|>{words}" not in changed
        assert exchange.reply in changed


def test_a_refused_message_is_not_learnt():
    dialogue = Dialogue(DIALOGUES[0].scenario, ("firm", "eager"))
    texts = ["Nonsense.", DIALOGUES[0].turns[0].text, "[Accept]"]
    for text in texts:
        dialogue.take(text)
    opener = dialogue.scenario.opener
    assert learnt(example(dialogue, opener)) == [f"{texts[1]}<|end|>"]
    assert "Nonsense." in CHAT.tokenizer.decode(example(dialogue, opener)["input_ids"])


def test_a_seat_that_never_spoke_gives_no_example():
    dialogue = Dialogue(DIALOGUES[0].scenario, ("firm", "eager"))
    dialogue.take("[Walk]")
    assert example(dialogue, 1 - dialogue.scenario.opener) is None
