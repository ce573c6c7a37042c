"""Many dialogues at once: all seats that wait for a model act together, whatever pool they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bupo.coordinators.base import GameCoordinator
from bupo.negotiation.dialogue import Dialogue, Talker
from bupo.negotiation.opponents import seat_player
from bupo.negotiation.scenario import Scenario
from bupo.policies.chat import ChatFormat
from bupo.policies.lockstep import Lockstep
from bupo.policies.stacks import Stacks
from bupo.records import Episode
from bupo.rollout.engine import Decoding, Session, Speaker


@dataclass(frozen=True, kw_only=True)
class Seating:
    """Who plays what.

    Attributes:
        scenario: The problem.
        players: Name in each seat: a key of the pools that are passed along, or a scripted player.
        seed: Seeds scripted players.
        learner: Which seats the learner plays; their tokens are trained on.
    """

    scenario: Scenario
    players: tuple[str, str]
    seed: int
    learner: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, kw_only=True)
class Table:
    """What dialogues are played with.

    Attributes:
        lockstep: The forward.
        chat: Renders turns as ids.
        decoding: How messages are sampled.
        retries: Refused messages in a row that a seat may repeat.
    """

    lockstep: Lockstep
    chat: ChatFormat
    decoding: Decoding
    retries: int


@dataclass
class _Seat:
    """One model-played seat: a row of the session."""

    row: int
    started: bool = False


def play_dialogues(
    table: Table,
    seatings: Sequence[Seating],
    pools: Mapping[str, tuple[Stacks, GameCoordinator]],
    seed: int,
    on_done: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Plays dialogues to their end, all that wait for a model in one batch.

    Args:
        table: What to play with.
        seatings: Who plays what; names that are not in `pools` are scripted players.
        pools: Name -> the weights that speak and the coordinator that mixes them.
        seed: Seeds sampling; what a dialogue draws depends on it, its place in the list and the seat.
        on_done: Told the number of dialogues finished so far, after each tick.

    Returns:
        One episode a seating, in order.
    """
    dialogues = [Dialogue(s.scenario, s.players, table.retries) for s in seatings]
    scripts: dict[tuple[int, int], Talker] = {}
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in pools}
    for index, seating in enumerate(seatings):
        rng = np.random.default_rng([seating.seed, 0x5C])
        for seat, name in enumerate(seating.players):
            if name in pools:
                places[name].append((index, seat))
            else:
                scripts[index, seat] = seat_player(name, seating.scenario, seat, rng)
    speakers = [
        Speaker(
            stacks=stacks, coordinator=coordinator, streams=[np.random.default_rng([seed, *p]) for p in places[name]]
        )
        for name, (stacks, coordinator) in pools.items()
        if places[name]
    ]
    every = [place for name in pools for place in places[name]]
    seats = {place: _Seat(row) for row, place in enumerate(every)}
    session = Session(table.lockstep, speakers, table.decoding)
    while True:
        for index, dialogue in enumerate(dialogues):
            while not dialogue.done and (script := scripts.get((index, dialogue.seat))) is not None:
                dialogue.take(script.speak(dialogue.mechanism.view()))
        waiting = [index for index, dialogue in enumerate(dialogues) if not dialogue.done]
        if on_done is not None:
            on_done(len(dialogues) - len(waiting))
        if not waiting:
            return [dialogue.episode() for dialogue in dialogues]
        _act(table, session, waiting, dialogues, seats)


def _act(
    table: Table,
    session: Session,
    indices: Sequence[int],
    dialogues: Sequence[Dialogue],
    seats: Mapping[tuple[int, int], _Seat],
) -> None:
    """One message of each waiting dialogue."""
    rows, context = [], []
    for index in indices:
        dialogue = dialogues[index]
        seat = seats[index, dialogue.seat]
        prompt = dialogue.prompt()
        if seat.started:
            last = session.last_id(seat.row)
            assert last is not None
            context.append(table.chat.extend(prompt, last))
        else:
            context.append(table.chat.open(dialogue.system(dialogue.seat), prompt))
            seat.started = True
        rows.append(seat.row)
    for index, span in zip(indices, session.speak(rows, context), strict=True):
        dialogues[index].take(table.chat.text(span.action_ids), span)
