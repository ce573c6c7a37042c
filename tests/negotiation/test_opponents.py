"""bupo.negotiation.opponents: tactics against their formulas, rationality and manners in simulated talks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bupo.negotiation.dialogue import play
from bupo.negotiation.opponents import (
    EVALUATION_OPPONENTS,
    TRAINING_OPPONENTS,
    Boulware,
    Conceder,
    Eager,
    Firm,
    Linear,
    Micro,
    Random,
    ScriptedPlayer,
    TitForTat,
    Tough,
    seat_player,
)
from bupo.negotiation.phrases import TRAINING_PHRASES
from bupo.negotiation.protocol import View
from bupo.negotiation.scenario import Issue, Profile, Scenario, ScenarioConfig, procurement

EVERYONE = [*TRAINING_OPPONENTS, *EVALUATION_OPPONENTS]

# One issue of 11 values: the buyer's utility is 1, .9, ... 0, the supplier's 0, .1, ... 1; both limits .4.
LINE = Scenario(
    name="line",
    issues=(Issue(name="price", label="price", unit="USD", values=tuple(range(11))),),
    profiles=(
        Profile(points=(tuple(range(100, -1, -10)),), limit=40, company="B"),
        Profile(points=(tuple(range(0, 101, 10)),), limit=40, company="S"),
    ),
    rounds=5,
    opener=0,
)


def view(number, standing=None, own_last=None, rounds=5, last_word=False, second=False):
    return View(
        seat=0,
        round=number,
        rounds=rounds,
        other_text=None,
        standing=standing,
        own_last=own_last,
        answerable=0 if last_word else rounds - number + (not second),
        refusal=None,
    )


def buyer(kind):
    return kind(LINE, 0, np.random.default_rng(0), TRAINING_PHRASES)


def play_pair(names, seed, scenario=None):
    scenario = scenario or procurement(ScenarioConfig(), seed)
    rng = np.random.default_rng(seed)
    talkers = tuple(seat_player(name, scenario, seat, rng) for seat, name in enumerate(names))
    return scenario, play(scenario, names, talkers).episode()


@pytest.fixture(scope="module")
def hundred_talks():
    """100 talks of random pairs, every player in both seats, on 100 scenarios (every fourth without a ZOPA)."""
    rng = np.random.default_rng(7)
    pairs = [tuple(str(n) for n in rng.choice(EVERYONE, 2)) for _ in range(100)]
    talks = [
        (names, *play_pair(names, seed, procurement(ScenarioConfig(), seed, zopa=seed % 4 > 0)))
        for seed, names in enumerate(pairs)
    ]
    for seat in (0, 1):
        assert {names[seat] for names, *_ in talks} == set(EVERYONE)
    return talks


@pytest.mark.parametrize(
    ("kind", "quarter", "end"),
    # t/T = 1/4 in round 2 of 5: 1 - .6 t^e with t^e = 1/256, 1/4, .70711, 1/16, 1/2. The training tactics end .12 of
    # their surplus range above the limit of .4: at .472, 1 - .528 t^e.
    [
        (Boulware, 0.99765625, 0.4),
        (Linear, 0.85, 0.4),
        (Conceder, 0.5757359, 0.4),
        (Firm, 0.967, 0.472),
        (Eager, 0.736, 0.472),
    ],
)
def test_time_dependent_aspiration_by_hand(kind, quarter, end):
    player = buyer(kind)
    assert player.target(view(1)) == pytest.approx(1.0)
    assert player.target(view(2)) == pytest.approx(quarter)
    assert player.target(view(5)) == pytest.approx(end)


@pytest.mark.parametrize("kind", [Boulware, Linear, Conceder, Firm, Eager])
def test_time_dependent_aspiration_never_rises(kind):
    player = buyer(kind)
    targets = [player.target(view(number, rounds=9)) for number in range(1, 10)]
    assert all(before > after for before, after in itertools.pairwise(targets))


@pytest.mark.parametrize("kind", [Firm, Eager])
def test_training_tactics_that_do_not_open_end_with_the_last_offer_that_can_be_answered(kind):
    first, second = buyer(kind), buyer(kind)
    # Five rounds after the other side opened are four offers that count, as the four rounds of an opener.
    ends = [second.target(view(n, rounds=5, second=True)) for n in (1, 2, 3, 4, 5)]
    assert ends[:4] == pytest.approx([first.target(view(n, rounds=4)) for n in (1, 2, 3, 4)])
    assert ends[3] == ends[4] == pytest.approx(0.472)
    evaluated = buyer(Linear)
    assert evaluated.target(view(4, rounds=5, second=True)) == pytest.approx(1 - 0.6 * 0.75)


def test_a_two_round_deadline_runs_from_the_ideal_to_the_limit():
    assert buyer(Linear).target(view(1, rounds=2)) == 1
    assert buyer(Linear).target(view(2, rounds=2)) == pytest.approx(0.4)


def test_tit_for_tat_gives_back_what_it_was_given():
    # The supplier's offers are worth 0, .2, .2, .1 and .3 to the buyer: gifts of .2, 0, 0 (a withdrawal) and .2.
    player = buyer(TitForTat)
    for number, standing in enumerate([(10,), (8,), (8,), (9,), (7,)], start=1):
        player.speak(view(number, standing, rounds=9))
    assert player.asked == pytest.approx([1.0, 0.8, 0.8, 0.8, 0.6])


def test_tit_for_tat_accepts_rather_than_ask_for_less():
    player = buyer(TitForTat)
    texts = [player.speak(view(n, s, rounds=9)) for n, s in enumerate([(10,), (8,), (8,), (4,)], start=1)]
    assert ["[Accept]" in text for text in texts] == [False, False, False, True]


def test_micro_asks_for_one_new_outcome_for_each_new_offer():
    player = buyer(Micro)
    # New offers: 10, 9, then 9 again (not new), then 8.
    for number, standing in enumerate([(10,), (9,), (9,), (8,)], start=1):
        player.speak(view(number, standing, rounds=9))
    assert player.asked == pytest.approx([1.0, 0.9, 0.9, 0.8])


def test_micro_stops_at_its_limit():
    player = buyer(Micro)
    targets = [player.target(view(1, (10 - i,), rounds=9)) for i in range(10)]
    assert targets == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("rounds", "offers", "places"),
    [
        # Seven rational outcomes, worth 1 to .4: six places in rounds - 1 bands, a half to the even place.
        (2, [10, 5], [0, 6]),
        (4, [10, 7, 5, 3], [0, 2, 4, 6]),
        (6, [10, 8, 7, 5, 4, 3], [0, 1, 2, 4, 5, 6]),
    ],
)
def test_micro_arrives_at_its_limit_by_a_short_deadline_if_each_offer_is_in_a_new_band(rounds, offers, places):
    player = buyer(Micro)
    targets = [player.target(view(n, (offer,), rounds=rounds)) for n, offer in enumerate(offers, 1)]
    assert targets == pytest.approx([1 - place / 10 for place in places])


def test_micro_gives_nothing_by_a_short_deadline_for_what_is_not_in_a_new_band():
    player = buyer(Micro)
    # Bands of two outcomes: 10 alone, 9 and 8, 7 and 6.
    offers = [(10,), (10,), (9,), (8,), (6,)]
    targets = [player.target(view(n, standing, rounds=4)) for n, standing in enumerate(offers, 1)]
    assert targets == pytest.approx([1.0, 1.0, 0.8, 0.8, 0.6])


def test_random_asks_only_for_rational_outcomes_and_for_all_of_them():
    player = buyer(Random)
    seen = {player.propose(view(1), player.target(view(1)))[0] for _ in range(300)}
    assert seen == set(range(6))  # worth 1 ... .5: .4, its limit, is within the margin that it keeps


# Steps cost the buyer 10 points on price, 4 on days; its ideal is (0, 0), worth 100, its limit 20.
STEPS = Scenario(
    name="steps",
    issues=(
        Issue(name="price", label="price", unit="USD", values=tuple(range(7))),
        Issue(name="days", label="days", unit="days", values=tuple(range(11))),
    ),
    profiles=(
        Profile(points=(tuple(range(60, -1, -10)), tuple(range(40, -1, -4))), limit=20, company="B"),
        Profile(points=(tuple(range(0, 61, 10)), tuple(range(0, 41, 4))), limit=20, company="S"),
    ),
    rounds=5,
    opener=0,
)


@pytest.mark.parametrize(
    ("own", "standing", "target", "expected"),
    [
        ((0, 0), (6, 10), 0.95, (0, 1)),  # 5 points to spare: one step of days
        ((0, 0), (6, 10), 0.80, (0, 5)),  # 20: five steps of days
        ((0, 0), (6, 3), 0.75, (1, 3)),  # 25: days only as far as theirs (12), then a step of price
        ((0, 0), (6, 10), 0.97, (0, 0)),  # 3: not a step
        ((1, 5), (6, 0), 0.40, (6, 0)),  # their days are better than its own: from 70 to 90, then five steps of price
        ((0, 5), (6, 10), 0.10, (3, 10)),  # never below limit and margin, .2 + .12 * .8 = .296: from 80 down to 30
    ],
)
def test_a_stepwise_player_moves_its_last_offer_on_the_cheapest_issue_first(own, standing, target, expected):
    player = Firm(STEPS, 0, np.random.default_rng(0), TRAINING_PHRASES)
    assert player.propose(view(3, standing, own), target) == expected


def test_a_proposal_is_the_good_enough_outcome_nearest_to_the_standing_offer():
    scenario = procurement(ScenarioConfig(), 4)
    player = Linear(scenario, 0, np.random.default_rng(0), TRAINING_PHRASES)
    profile = scenario.profiles[0]
    standing = (8, 0, 4)
    grid = [o for o in itertools.product(range(9), range(5), range(5)) if profile.score(o) >= 75]

    def distance(outcome):
        steps = zip(outcome, standing, (8, 4, 4), strict=True)
        return sum(abs(a - b) / span for a, b, span in steps) + profile.score(outcome) / 200

    proposed = player.propose(view(3, standing), 0.75)
    assert proposed in grid
    assert distance(proposed) == pytest.approx(min(map(distance, grid)))
    # Without a standing offer: the least that meets the target.
    assert profile.score(player.propose(view(3), 0.75)) == min(map(profile.score, grid))


def test_nobody_offers_or_accepts_below_its_own_reservation(hundred_talks):
    offers = deals = 0
    for _, scenario, episode in hundred_talks:
        for turn in episode.turns:
            profile = scenario.profiles[turn.seat]
            if turn.action.outcome is not None:
                offers += 1
                assert profile.score(turn.action.outcome) >= profile.limit
        if episode.deal is not None:
            deals += 1
            assert all(profile.score(episode.deal) >= profile.limit for profile in scenario.profiles)
    assert offers > 500 and deals > 30


def test_every_scripted_message_is_valid(hundred_talks):
    for _, _, episode in hundred_talks:
        assert all(turn.action.kind != "invalid" for turn in episode.turns)
        assert episode.status in ("deal", "walk", "timeout")


def test_tough_never_concedes():
    asked = 0
    for seed in range(60):
        other = EVERYONE[seed % len(EVERYONE)]
        seat = seed // len(EVERYONE) % 2
        scenario, episode = play_pair((other, "tough") if seat else ("tough", other), seed)
        profile = scenario.profiles[seat]
        high = profile.limit + 0.9 * (100 - profile.limit)
        for turn in episode.turns:
            if turn.seat == seat and turn.action.outcome is not None:
                asked += 1
                assert profile.score(turn.action.outcome) >= high - 1e-9
        if episode.deal is not None:
            assert profile.score(episode.deal) >= high - 1e-9
    assert asked > 200


def test_tough_does_not_give_in_on_its_last_message():
    player = buyer(Tough)  # target .4 + .9 * .6 = .94: only the best value will do
    assert "[Walk]" in player.speak(view(5, (1,), last_word=True))
    assert "[Accept]" in buyer(Tough).speak(view(2, (0,)))


class Jumping(Firm):
    """The same aspirations, offers chosen afresh each time as evaluation players choose theirs."""

    propose = ScriptedPlayer.propose


def test_moving_the_last_offer_changes_fewer_issues_at_a_time_than_choosing_afresh():
    """Mean number of issues that differ between a player's successive offers, against the same opponent."""
    changes = {}
    for kind in (Firm, Jumping):
        counts = []
        for seed in range(60):
            scenario = procurement(ScenarioConfig(), seed)
            rng = np.random.default_rng(seed)
            talkers = (kind(scenario, 0, rng, TRAINING_PHRASES), seat_player("random", scenario, 1, rng))
            episode = play(scenario, ("x", "random"), talkers).episode()
            own = [t.action.outcome for t in episode.turns if t.seat == 0 and t.action.outcome is not None]
            counts += [
                sum(a != b for a, b in zip(*pair, strict=True))
                for pair in itertools.pairwise(own)
                if len(set(pair)) > 1
            ]
        changes[kind] = np.mean(counts)
    assert changes[Firm] < 0.9 * changes[Jumping]


def test_others_take_a_rational_offer_on_their_last_message_and_walk_from_a_worse_one():
    for kind in (Boulware, Linear, Firm, TitForTat, Micro, Random):
        assert "[Accept]" in buyer(kind).speak(view(5, (6,), last_word=True))  # worth .4, the limit
        assert "[Walk]" in buyer(kind).speak(view(5, (7,), last_word=True))  # worth .3


class TrainingLinear(Linear):
    """Linear concession in training words."""


@pytest.mark.parametrize("name", EVALUATION_OPPONENTS)
def test_each_evaluation_opponent_can_be_dealt_with_by_steady_concession(name):
    deals = 0
    for seed in range(40):
        scenario = procurement(ScenarioConfig(), seed)
        rng = np.random.default_rng(seed)
        seat = seed % 2
        players = [seat_player(name, scenario, 0, rng), seat_player(name, scenario, 1, rng)]
        players[seat] = TrainingLinear(scenario, seat, rng, TRAINING_PHRASES)
        deals += play(scenario, ("x", "y"), tuple(players)).episode().deal is not None
    assert deals >= 20


def test_conceding_early_costs_payoff_in_the_known_order():
    """Own payoff against the same training player: Boulware above Linear above Conceder (facts: .605, .559, .458)."""
    mean = {}
    for name in ("boulware", "linear", "conceder"):
        payoffs = []
        for seed in range(60):
            _, episode = play_pair((name, "eager") if seed % 2 else ("eager", name), seed)
            payoffs.append(episode.utilities[0 if seed % 2 else 1])
        mean[name] = np.mean(payoffs)
    assert mean["boulware"] > mean["linear"] > mean["conceder"]


@pytest.mark.parametrize("name", EVERYONE)
def test_a_player_never_uses_the_other_sides_private_numbers(name):
    scenario = procurement(ScenarioConfig(), 9)
    own, other = scenario.profiles
    changed = replace(scenario, profiles=(own, replace(other, points=tuple(t[::-1] for t in other.points), limit=66)))
    views = [view(n, (8 - n, n % 5, 4), rounds=scenario.rounds) for n in range(1, 6)]
    said = [
        [player.speak(v) for v in views]
        for player in (seat_player(name, s, 0, np.random.default_rng(3)) for s in (scenario, changed))
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", EVERYONE)
def test_equal_seeds_give_equal_talks(name):
    assert play_pair((name, "eager"), 5) == play_pair((name, "eager"), 5)


def test_an_unknown_player_is_refused_with_the_names_there_are():
    with pytest.raises(KeyError, match=r"'bulware'.*firm.*boulware"):
        seat_player("bulware", LINE, 0, np.random.default_rng(0))
