"""The questions of an algorithm, their answers, and its predictions; algorithms do not depend on Flower.

An algorithm changes the state: a round is a generator that yields questions, receives answers and returns the next
state. The driver (:mod:`strategies.server.strategy`) handles communication, failures and retries::

    def one_round(state, sites):
        totals = yield Total(Statistics, state.parameters)        # Statistics, summed over the sites that answered
        answers = yield Each(Refined, {site: cavity})             # {site: Refined}, without the sites that failed
        site, answer = yield First(Refined, {site: cavity})       # the next outstanding answer; None if it was lost
        yield Refuse("north", "its precision is not positive")    # the answer is unusable and counts as a failure
        yield Doubt({"south": "its sums contradict others"})      # no answer is refused; the report names the site
        return next_state, {"objective": 1.0}                     # the state and the round's figures for the history
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from fedgp_flower.errors import ProtocolError, RunError
from fedgp_flower.messages import add, kind_of
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import Facts, Json

A = TypeVar("A")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Each(Generic[A]):
    """Ask each named site for an ``A``; the answer is ``{site: A}``, without the sites that failed."""

    answer: type[A]
    requests: Mapping[str, object]
    """Request message by site; only these sites are asked."""
    retries: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Dimensions of the answer that differ from the run's: ``{"M": 300}``."""


@dataclass(frozen=True, slots=True)
class Total(Generic[A]):
    """Ask several sites for terms of a sum; the answer is a :class:`Summed`. ``A`` must be a summand."""

    answer: type[A]
    request: object
    sites: tuple[str, ...] | None = None
    """The sites to ask; None: every healthy site."""
    retries: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summed(Generic[A]):
    """A total and the sites in it; ``total`` is None if no site answered."""

    total: A | None
    sites: tuple[str, ...]
    silent: int = 0
    """Number of these sites that added zero; the server cannot tell which."""
    parts: Mapping[str, A] = field(default_factory=dict)
    """The summand of each site; empty under masks."""

    def required(self, what: str) -> A:
        """Return the total; raise RunError if no site sent ``what``."""
        if self.total is None:
            raise RunError(f"no site sent {what}")
        return self.total


@dataclass(frozen=True, slots=True)
class First(Generic[A]):
    """Ask more sites and wait for the first of *all* outstanding answers: ``(site, A | None)``."""

    answer: type[A]
    requests: Mapping[str, object]
    """New requests; earlier ones stay outstanding. At least one request must be outstanding."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    retries: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reject an answer that no honest site gives; the site has failed. The answer to this question is None."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Report sites whose answers are possible but contradict those of the others. The algorithm may use them."""

    reasons: Mapping[str, str]
    """By site, what was found in the latest comparison; sites that are no longer in it are cleared."""


Synchronous: TypeAlias = Each[Any] | Total[Any]
Question: TypeAlias = Synchronous | First[Any] | Refuse | Doubt
Figures: TypeAlias = dict[str, float]
Asking: TypeAlias = Generator[Question, Any, S]
"""A generator that yields questions and returns an ``S``."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The sites of a round."""

    rows: Mapping[str, int]
    """Training rows of each healthy site, in natural order."""
    all_sites: tuple[str, ...]
    """All known sites, including those that fail."""
    pending: tuple[str, ...]
    """Sites that have not answered a :class:`First` question yet."""
    round: int
    totals_only: bool = False
    """Whether sites answer only :class:`Total`, as under masks."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The healthy sites."""
        return tuple(self.rows)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The return value of ``predictive``."""

    request: Any
    """The message from which sites predict; ``{site: message}`` if it differs by site."""
    posterior: Posterior | None = None
    """The posterior that a run saves; None for a personal method."""
    details: Facts = field(default_factory=dict)

    def at(self, site: str) -> object:
        """Return the message from which this site predicts."""
        return self.request[site] if isinstance(self.request, Mapping) else self.request


def requests_of(question: Synchronous | First[Any], all_sites: tuple[str, ...]) -> Mapping[str, object]:
    """Return the request of each site that is asked."""
    match question:
        case Total(_, request, sites):
            return dict.fromkeys(all_sites if sites is None else sites, request)
        case Each() | First():
            return question.requests
    raise ProtocolError(f"yielded {type(question).__name__}, which is no question of {__name__}")


def lengthscale_facts(logs: Mapping[str, np.ndarray], spread: Mapping[str, np.ndarray] | None, how: str = "") -> Json:
    """Return lengthscales and sds of their logarithms by part of the model; ``how`` names the method for the sds."""
    return {
        re.sub(r"theta\.|kernels\.|\.log_lengthscale$", "", name): {
            "value": np.exp(log).ravel().tolist(),
            "log_sd": None if spread is None else np.ravel(spread[name]).tolist(),
            "how": "" if spread is None else how,
        }
        for name, log in logs.items()
        if name.endswith("lengthscale")
    }


def started(asking: Asking[S]) -> Asking[S]:
    """Return the generator; raise ProtocolError for the value of a function without ``yield``."""
    if not hasattr(asking, "send"):
        found = f"expected a generator, got {type(asking).__name__}"
        raise ProtocolError(f"{found}: begin a function that asks nothing with `yield from ()`")
    return asking


def answered_by(asking: Asking[S], answer: Callable[[Question], Any]) -> S:
    """Run a generator to its end and answer its questions by the function ``answer``."""
    reply, running = None, started(asking)
    while True:
        try:
            question = running.send(reply)
        except StopIteration as done:
            return done.value
        reply = answer(question)


def drive(asking: Asking[S], sites: Mapping[str, object]) -> S:
    """Run a generator against plain objects: their ``statistics(request)`` answers ``query.statistics``."""
    outstanding: list[tuple[str, object]] = []

    def answer(question: Question) -> object:
        match question:
            case Refuse(site, reason):
                raise AssertionError(f"site {site} was refused: {reason}")
            case Doubt():
                return None
        handler = kind_of(question.answer).rpartition(".")[2]
        asked = requests_of(question, tuple(sites))
        answers = {site: getattr(sites[site], handler)(request) for site, request in asked.items()}
        match question:
            case Total():
                return Summed(add(answers.values()), tuple(answers), parts=answers)
            case Each():
                return answers
        outstanding.extend(answers.items())
        return outstanding.pop(0)

    return answered_by(asking, answer)
