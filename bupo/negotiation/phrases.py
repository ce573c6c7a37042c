"""Words for scripted players. Two separate banks: what SFT and training hear, and what evaluation opponents say.

A message is a lead (by situation and tone), now and then a reason, and the action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

TONES = ("warm", "plain", "hard")


@dataclass(frozen=True, kw_only=True)
class PhraseBank:
    """Sentences by situation and tone.

    Attributes:
        leads: situation -> tone -> sentences. Situations: open, concede, hold, accept, walk.
        reasons: Role-neutral reasons that may follow the lead of an offer.
        reason_share: How often an offer carries a reason.
    """

    leads: Mapping[str, Mapping[str, tuple[str, ...]]]
    reasons: tuple[str, ...]
    reason_share: float = 0.3

    def say(self, rng: np.random.Generator, situation: str, tone: str, action: str) -> str:
        """One message: lead, perhaps a reason, action."""
        leads = self.leads[situation][tone]
        parts = [leads[rng.integers(len(leads))]]
        if situation in ("open", "concede", "hold") and rng.random() < self.reason_share:
            parts.append(self.reasons[rng.integers(len(self.reasons))])
        return " ".join([*parts, action])


TRAINING_PHRASES = PhraseBank(
    leads={
        "open": {
            "warm": ("Thank you for meeting us, here is our opening.", "Glad to talk, this would work for us."),
            "plain": ("This is our opening.", "Let us start here."),
            "hard": ("These are our terms, like it or not.", "Do not waste our time, here are our terms."),
        },
        "concede": {
            "warm": (
                "Thank you, we can move a little for you.",
                "We appreciate your offer and come closer.",
                "We understand, let us meet in the middle.",
                "Happy to make a step together.",
            ),
            "plain": ("We can move to this.", "Here is a new offer.", "We change the terms."),
            "hard": ("You push us, this is too much already.", "Last step, or we leave."),
        },
        "hold": {
            "warm": ("Thank you, please look at this again.", "We appreciate your view, please consider this."),
            "plain": ("We stay with this.", "Our offer stands."),
            "hard": ("Take it or leave it.", "We will not move, your offer is a joke."),
        },
        "accept": {
            "warm": ("Thank you, we gladly agree.", "That is fair, we look forward to working together."),
            "plain": ("We agree.", "Done."),
            "hard": ("Fine, enough of this.", "We take it, you gave us no choice."),
        },
        "walk": {
            "warm": ("Thank you for your time, we must stop here.", "We are sorry, this does not work for us."),
            "plain": ("We stop here.", "No contract this time."),
            "hard": ("This was a waste of time.", "Enough, we go to your competitor."),
        },
    },
    reasons=(
        "Freight is up this year.",
        "Our volumes are steady.",
        "Cash flow matters to us.",
        "Storage is tight.",
        "The market is soft.",
        "We plan for the long run.",
    ),
)

_WORDS = (
    "a able about after again all also always and any are as at back bad be because been before best better "
    "between big board both bring business but buy by call can case change check city clear close come company "
    "contract cost could customer day deal demand did different do down each early easy end even every factory "
    "far few final find first for from full get give go good great growth had hard has have he help here high how "
    "i idea if important in into is issue it its just keep key kind know large last late law less let like line "
    "little long look low made main make many margin market may me mean meet might money month more most move "
    "much must my near need never new next no not note now of off offer old on one only open or order other our "
    "out over own part partner pay people percent place plan plant point possible price problem product proposal "
    "quality question quick quite ready real reason report right risk said same say season see sell serious she "
    "short should side simple small so some soon start still stock strong such supply sure table take talk team "
    "tell term than that the their them then there these they thing think this time to today too trade truck try "
    "two under until up us use value very view volume want was way we week well were what when where which while "
    "who why will with without word work world would year yes you your"
)
_LEXICON = tuple(_WORDS.split())


def chatter(rng: np.random.Generator) -> str:
    """A random string of common words, with punctuation.

    In SFT data it stands now and then for the other side's words, so that a small base learns to read the offer and
    the note whatever the wording; nobody says it as an own message.
    """
    sentences = []
    for _ in range(int(rng.integers(1, 3))):
        words = rng.choice(_LEXICON, size=int(rng.integers(1, 7)))
        sentences.append(" ".join(words).capitalize() + str(rng.choice([".", ".", ".", "!", "?", ":", ","])))
    return " ".join(sentences)


EVALUATION_PHRASES = PhraseBank(
    leads={
        "open": {
            "warm": ("It is good to sit down with you; may I propose the following?", "Welcome! Here is a first idea."),
            "plain": ("Our proposal to begin with:", "To begin, consider these conditions."),
            "hard": ("Here is what we want, nothing less.", "I will be blunt: sign this."),
        },
        "concede": {
            "warm": ("I hear you, so let me improve the package.", "Good progress; we can give some ground."),
            "plain": ("Revised proposal below.", "We adjust our position.", "What about this instead?"),
            "hard": ("You are squeezing us. This much and no more.", "Against my better judgement:"),
        },
        "hold": {
            "warm": ("With respect, this remains the best we can do today.", "I hope you will see the merit of this."),
            "plain": ("We keep our position.", "No change on our side."),
            "hard": ("I am losing patience.", "That is not serious. Ours is the only way."),
        },
        "accept": {
            "warm": ("Wonderful, you have a deal!", "Excellent, I am pleased with this outcome."),
            "plain": ("Agreed.", "That works."),
            "hard": ("Very well. Send the papers.", "All right, have it your way."),
        },
        "walk": {
            "warm": ("A pity that we could not find common ground.", "Perhaps another time."),
            "plain": ("We end the talks.", "We have no agreement."),
            "hard": ("We are done with you.", "Talks are over."),
        },
    },
    reasons=(
        "Energy prices have climbed.",
        "Our plant runs at capacity.",
        "The board watches our budget.",
        "Interest rates weigh on us.",
        "Demand looks stable.",
    ),
)
