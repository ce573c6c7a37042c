"""What a finished dialogue is worth to a seat (definitions and the abuse each part invites: docs/reward.md).

total = .5 economic + .3 relationship + .1 efficiency + .1 creativity for a rational deal; less without one, less still
for a deal below the reservation, least for a refused message that ended the talk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from bupo.config import at_least, in_range, raise_problems
from bupo.negotiation.scenario import Profile, Scenario
from bupo.records import Episode, Turn

PARTS = ("economic", "relationship", "efficiency", "creativity")

_COURTEOUS = re.compile(
    r"\b(thanks?|thank you|please|apprecia\w+|glad\w*|happy|understand|together|fair|welcome|sorry|pleased?|respect"
    r"|look forward|wonderful|excellent|hope)\b",
    re.IGNORECASE,
)
_HOSTILE = re.compile(
    r"\b(or we leave|take it or leave it|like it or not|waste|joke|ridiculous|nonsense|competitors?|ultimatum|or else"
    r"|enough|no choice|nothing less|losing patience|not serious|push us|stupid|insult\w*|threat\w*|done with you)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Weights of the parts and the order of bad endings.

    Attributes:
        economic: Weight of the own surplus.
        relationship: Weight of how the talk was conducted.
        efficiency: Weight of the rounds saved.
        creativity: Weight of new packages that trade across issues.
        no_deal: Total without a deal, whoever broke it off: time spent and a relationship worse than before.
        irrational: Total of a deal at the reservation's edge from below; it falls further with the loss.
        invalid: Total for the seat whose refused messages ended the talk.
        refused: Taken off the total for each refused message, also when the retry was fine.
    """

    economic: float = 0.5
    relationship: float = 0.3
    efficiency: float = 0.1
    creativity: float = 0.1
    no_deal: float = -0.4
    irrational: float = -0.5
    invalid: float = -0.8
    refused: float = 0.05

    def __post_init__(self) -> None:
        """Checks the weights and the order."""
        raise_problems(
            [
                *(at_least(part, getattr(self, part), 0) for part in PARTS),
                in_range("no_deal", self.no_deal, -1, 0),
                in_range("irrational", self.irrational, -2, self.no_deal, include_high=False),
                in_range("invalid", self.invalid, -3, self.irrational - 0.2),
                at_least("refused", self.refused, 0),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A seat's reward.

    Attributes:
        economic: Own surplus share of the deal, in [0, 1].
        relationship: Conduct, in [0, 1].
        efficiency: Share of rounds saved by a deal, in [0, 1].
        creativity: Share of own counter-offers that were new trades, if a deal came of it, in [0, 1].
        total: What PPO maximises.
    """

    economic: float
    relationship: float
    efficiency: float
    creativity: float
    total: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for records."""
        return asdict(self)


def tone(text: str) -> float:
    """1 for a courteous message, 0 for a hostile one, .5 else. More courteous words change nothing."""
    if _HOSTILE.search(text):
        return 0.0
    return 1.0 if _COURTEOUS.search(text) else 0.5


def _offers(turns: Sequence[Turn], seat: int) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (index, turn.action.outcome)
        for index, turn in enumerate(turns)
        if turn.seat == seat and turn.action.outcome is not None
    ]


def good_faith(turns: Sequence[Turn], seat: int, profile: Profile) -> float:
    """1 less the share of own counter-offers that take back what the offer before gave (regressive bargaining).

    Taking back means asking for more in the seat's own utility; standing firm is not bad faith. 1 without
    counter-offers.
    """
    asked = [profile.score(outcome) for _, outcome in _offers(turns, seat)]
    pairs = list(pairwise(asked))
    return 1 - sum(after > before for before, after in pairs) / len(pairs) if pairs else 1.0


def constructive(turns: Sequence[Turn], seat: int) -> float:
    """1 less the share of own counter-offers that merely repeat the previous one (stalling)."""
    offers = [outcome for _, outcome in _offers(turns, seat)]
    pairs = list(pairwise(offers))
    return 1 - sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def fairness(other_utility: float, other_reservation: float) -> float:
    """1 if the deal leaves the other side no worse than no deal, else 1 less what it loses by it, in own utility.

    The other side's gain counts only up to this minimum, so nothing is earned by giving away more.
    """
    return 1.0 + min(0.0, other_utility - other_reservation)


def conduct(scenario: Scenario, episode: Episode, seat: int) -> float:
    """How a seat led the talk: .45 tone + .4 good faith + .1 no stalling + .05 fairness, in [0, 1].

    No part falls because a seat concedes late or little; only repeating the same offer costs, as stalling.
    """
    own = [turn for turn in episode.turns if turn.seat == seat]
    mean_tone = sum(tone(turn.text) for turn in own) / len(own) if own else 0.5
    fair = fairness(episode.utilities[1 - seat], scenario.profiles[1 - seat].reservation)
    honest = good_faith(episode.turns, seat, scenario.profiles[seat])
    return 0.45 * mean_tone + 0.4 * honest + 0.1 * constructive(episode.turns, seat) + 0.05 * fair


def creativity(scenario: Scenario, episode: Episode, seat: int) -> float:
    """Share of own counter-offers that are new to the table and trade: give on one issue, take on another.

    0 without a deal, and without own counter-offers: taking what is offered is not a new solution.
    """
    if episode.deal is None:
        return 0.0
    points, seen, last = scenario.profiles[seat].points, set(), None
    trades = counters = 0
    for turn in episode.turns:
        outcome = turn.action.outcome
        if outcome is None:
            continue
        if turn.seat == seat:
            if last is not None:
                counters += 1
                moves = [table[new] - table[old] for table, new, old in zip(points, outcome, last, strict=True)]
                trades += outcome not in seen and min(moves) < 0 < max(moves)
            last = outcome
        seen.add(outcome)
    return trades / counters if counters else 0.0


def reward(config: RewardConfig, scenario: Scenario, episode: Episode, seat: int) -> Reward:
    """The reward of one seat.

    Args:
        config: Weights.
        scenario: The problem, with both private profiles: the environment knows them, the players do not.
        episode: The finished dialogue.
        seat: Whose reward.

    Returns:
        The four parts, each in [0, 1], and the total.
    """
    deal = episode.deal is not None
    surplus = episode.surplus[seat]
    rational = deal and surplus >= 0
    economic = min(max(surplus, 0.0), 1.0) if deal else 0.0
    relationship = conduct(scenario, episode, seat) if deal else 0.0
    efficiency = 1 - episode.rounds / scenario.rounds if rational else 0.0
    new = creativity(scenario, episode, seat) if rational else 0.0
    if episode.status == "invalid" and episode.blame == seat:
        total = config.invalid
    elif not deal:
        total = config.no_deal
    elif not rational:
        total = config.irrational + 0.2 * max(surplus, -1.0)
    else:
        total = (
            config.economic * economic
            + config.relationship * relationship
            + config.efficiency * efficiency
            + config.creativity * new
        )
    refused = sum(turn.seat == seat and turn.action.kind == "invalid" for turn in episode.turns)
    total -= config.refused * refused
    return Reward(economic=economic, relationship=relationship, efficiency=efficiency, creativity=new, total=total)
