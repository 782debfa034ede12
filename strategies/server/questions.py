"""What an algorithm may ask, what it is answered, and with what it predicts; an algorithm knows no Flower.

Two rules. *Everything that changes a state stands in the algorithm's file*: a round is a generator that yields
questions, is sent answers, and returns the next state. *That file knows nothing of who is on the line*: who failed, and
how often a question was asked again, is the driver's business (:mod:`strategies.server.strategy`)::

    def one_round(state, sites):
        totals = yield Total(Statistics, state.parameters)        # Statistics, summed over the sites that answered
        answers = yield Each(Refined, {site: cavity})             # {site: Refined}, without the sites that failed
        site, answer = yield First(Refined, {site: cavity})       # the next of all outstanding answers; None if lost
        yield Refuse("north", "its precision is not positive")    # an answer cannot be used: the site's failure
        yield Doubt("south", "its sums contradict the others'")   # it can be used, and the run names the site
        return next_state, {"objective": 1.0}                     # and the figures of the round for the history
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from fedgp_flower.messages import add, kind_of
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import Facts, Json

A = TypeVar("A")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Each(Generic[A]):
    """Ask every named site a question of its kind; the answer is ``{site: A}``, without the sites that failed."""

    answer: type[A]
    requests: Mapping[str, object]
    """Site → request message; the sites asked are its keys."""
    retries: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the answer's dimensions that are not those of the run: ``{"M": 300}``."""


@dataclass(frozen=True, slots=True)
class Total(Generic[A]):
    """Ask the same of several sites; the answer is a :class:`Summed`. ``A`` must be a summand."""

    answer: type[A]
    request: object
    sites: tuple[str, ...] | None = None
    """Who is asked; None: every healthy site."""
    retries: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summed(Generic[A]):
    """A total over sites, and whose it is. ``total`` is None where nobody answered."""

    total: A | None
    sites: tuple[str, ...]
    silent: int = 0
    """How many of these sites added nothing; no message says which."""
    parts: Mapping[str, A] = field(default_factory=dict)
    """What each site added; nothing under masks."""


@dataclass(frozen=True, slots=True)
class First(Generic[A]):
    """Ask more sites, and wait for the first of *all* outstanding answers: ``(site, A | None)``."""

    answer: type[A]
    requests: Mapping[str, object]
    """New questions; earlier ones stay outstanding. At least one question must be."""
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refuse:
    """An answer that no honest site gives: counted as the site's failure. The answer to this is None."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """An answer that some rows could give, and that contradicts the others': it counts, and the run names the site."""

    site: str
    reason: str


Several: TypeAlias = Each[Any] | Total[Any]
Question: TypeAlias = Several | First[Any] | Refuse | Doubt
Figures: TypeAlias = dict[str, float]
Asking: TypeAlias = Generator[Question, Any, S]
"""A computation that asks; it returns an ``S``."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The sites of a round."""

    rows: Mapping[str, int]
    """Training rows of every healthy site, in the one order that results may depend on."""
    everyone: tuple[str, ...]
    """Every site known, also those that fail."""
    busy: tuple[str, ...]
    """Sites with a :class:`First` question that is not answered yet."""
    round: int
    totals_only: bool = False
    """Whether sites answer no question but a :class:`Total`; who asks :class:`Each` otherwise, asks a total then."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The healthy sites."""
        return tuple(self.rows)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a state predicts with: the value that ``predictive`` returns."""

    request: Any
    """The message with which every site predicts; ``{site: message}`` where each has a different one."""
    posterior: Posterior | None = None
    """What is saved to predict without any site; None for a personal method."""
    details: Facts = field(default_factory=dict)

    def at(self, site: str) -> object:
        """The message with which this site predicts."""
        return self.request[site] if isinstance(self.request, Mapping) else self.request


def requests_of(question: Several | First[Any], everyone: tuple[str, ...]) -> Mapping[str, object]:
    """Who is asked what."""
    match question:
        case Total(_, request, sites):
            return dict.fromkeys(everyone if sites is None else sites, request)
        case Each() | First():
            return question.requests


def lengthscale_facts(logs: Mapping[str, np.ndarray], spread: Mapping[str, np.ndarray] | None, how: str = "") -> Json:
    """By part of the model, lengthscales and the standard deviations of their logarithms; ``how`` says where from."""
    return {
        re.sub(r"theta\.|kernels\.|\.log_lengthscale$", "", name): {
            "value": np.exp(log).ravel().tolist(),
            "log_sd": None if spread is None else np.ravel(spread[name]).tolist(),
            "how": "" if spread is None else how,
        }
        for name, log in logs.items()
        if name.endswith("lengthscale")
    }


def answered_by(asking: Asking[S], answer: Callable[[Question], Any]) -> S:
    """Run a computation to its end, with a function that answers what it asks."""
    reply = None
    while True:
        try:
            question = asking.send(reply)
        except StopIteration as done:
            return done.value
        reply = answer(question)


def drive(asking: Asking[S], sites: Mapping[str, object]) -> S:
    """Run a computation against plain objects: their ``statistics(request)`` answers ``query.statistics``."""
    outstanding: list[tuple[str, object]] = []

    def answer(question: Question) -> object:
        if isinstance(question, Refuse):
            raise AssertionError(f"site {question.site} was refused: {question.reason}")
        if isinstance(question, Doubt):
            return None
        handler = kind_of(question.answer).rpartition(".")[2]
        asked = requests_of(question, tuple(sites))
        answers = {site: getattr(sites[site], handler)(request) for site, request in asked.items()}
        match question:
            case Total():
                return Summed(add(answers.values()), tuple(answers))
            case Each():
                return answers
        outstanding.extend(answers.items())
        return outstanding.pop(0)

    return answered_by(asking, answer)
