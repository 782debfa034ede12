"""Rounds of partitioned variational inference against sites that are plain functions: no Flower, milliseconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from test_pvi_exact import Problem, assert_same

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.pvi.linear import LinearRows
from fedgp_flower.methods.pvi.messages import NaturalParameters, Refined, Visit
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.pvi_weights.glm import optimum
from strategies.pvi import one_round
from strategies.pvi_state import PVIState, forget, posterior
from strategies.pvi_updates import local_optimum
from strategies.server.questions import Asking, First, Refuse, Roster, drive

LINEAR = local_optimum("weights")


def first() -> PVIState:
    """N(0, I) of v."""
    return PVIState({"weights": NaturalParameters(np.zeros(8), -0.5 * np.eye(8))})


@dataclass
class Rows:
    """Rows whose factor of v is known in closed form, or at its optimum."""

    rows: LinearRows

    def train(self, request: Visit) -> Refined:
        """The factor at the optimum of the local free energy."""
        context = request.context["weights"].gaussian
        return Refined(0.0, 1, weights=NaturalParameters.of(optimum(self.rows, context, context)[0].factor))


def sites_of(problem: Problem, likelihood: str = "gaussian") -> dict[str, Rows]:
    return {str(k): Rows(problem.site(k, likelihood)) for k in range(len(problem.rows))}


def roster_of(problem: Problem, number: int, busy: tuple[str, ...] = ()) -> Roster:
    rows = {str(k): len(own) for k, own in enumerate(problem.rows)}
    return Roster(rows, tuple(rows), busy, number)


def trained(problem: Problem, plan: Plan, rounds: int, sites: Mapping[str, Any] | None = None) -> PVIState:
    state = first()
    for number in range(1, rounds + 1):
        asking = one_round(state, roster_of(problem, number), plan, LINEAR)
        state, _ = drive(asking, sites or sites_of(problem))
    return state


def q_of(state: PVIState) -> NaturalGaussian:
    found = posterior(state)["weights"]
    assert isinstance(found, NaturalGaussian)
    return found


def test_an_answer_of_another_size_is_refused_and_the_others_are_merged() -> None:
    problem = Problem(3)
    state = trained(problem, Plan(), 1)
    asking = one_round(state, roster_of(problem, 2), Plan("synchronous", damping=1.0), LINEAR)
    question = next(asking)
    answers = {name: site.train(question.requests[name]) for name, site in sites_of(problem).items()}
    answers["1"] = Refined(0.0, 1, weights=NaturalParameters(np.zeros(3), -np.eye(3)))
    refusal = asking.send(answers)
    assert isinstance(refusal, Refuse)
    assert (refusal.site, "3 entries" in refusal.reason) == ("1", True)
    with pytest.raises(StopIteration) as done:
        asking.send(None)
    merged, figures = done.value.value
    assert set(merged.sites) == {"0", "2"}
    assert figures["visits"] == 3


# Asynchronous.


@dataclass
class Line:
    """Answers that arrive in an order that a test chooses."""

    sites: Mapping[str, Rows]
    waiting: dict[str, Refined] = field(default_factory=dict)

    def arrive(self, asking: Asking[Any], which: str | None, *, lost: bool = False) -> Any:
        """Put the questions of a round, and let the answer of one site arrive, or get lost."""
        question = next(asking)
        assert isinstance(question, First)
        self.waiting |= {name: self.sites[name].train(request) for name, request in question.requests.items()}
        site = which or next(iter(self.waiting))
        answer = self.waiting.pop(site)
        with pytest.raises(StopIteration) as done:
            asking.send((site, None if lost else answer))
        return done.value.value


def test_staleness_counts_merges_the_site_did_not_see() -> None:
    problem, plan = Problem(3), Plan("asynchronous", damping=1.0)
    line, state = Line(sites_of(problem)), first()
    seen = []
    for number, site in enumerate(["1", "0", "1", "2"], 1):
        roster = roster_of(problem, number, tuple(line.waiting))
        state, figures = line.arrive(one_round(state, roster, plan, LINEAR), site)
        seen.append(figures["staleness"])
    assert seen == [0, 1, 1, 3]
    assert state.record.staleness == {"1": 1, "0": 1, "2": 3}
    assert_same(problem.unwhitened(q_of(state)), problem.titsias())


def test_asynchronous_one_at_a_time_is_sequential() -> None:
    problem = Problem(3)
    sites, line = sites_of(problem, "bernoulli"), Line(sites_of(problem, "bernoulli"))
    expected = trained(problem, Plan(damping=1.0), 6, sites)
    state, plan = first(), Plan("asynchronous", damping=1.0, concurrency=1)
    for number in range(1, 7):
        state, figures = line.arrive(one_round(state, roster_of(problem, number), plan, LINEAR), None)
        assert figures["staleness"] == 0
    assert torch.equal(q_of(state).eta1, q_of(expected).eta1)
    assert torch.equal(q_of(state).eta2, q_of(expected).eta2)


def test_a_lost_answer_moves_nothing_and_its_site_is_asked_again() -> None:
    problem, plan = Problem(3), Plan("asynchronous")
    line, state = Line(sites_of(problem)), first()
    after, figures = line.arrive(one_round(state, roster_of(problem, 1), plan, LINEAR), "0", lost=True)
    assert (after.version, figures, dict(after.sent)) == (0, {}, {"1": 0, "2": 0})
    question = next(one_round(after, roster_of(problem, 2, ("1", "2")), plan, LINEAR))
    assert set(question.requests) == {"0"}


def test_a_resumed_run_asks_again_what_was_under_way() -> None:
    problem, plan = Problem(3), Plan("asynchronous")
    line = Line(sites_of(problem))
    state, _ = line.arrive(one_round(first(), roster_of(problem, 1), plan, LINEAR), "1")
    question = next(one_round(decode(PVIState, encode(state)), roster_of(problem, 2), plan, LINEAR))
    assert set(question.requests) == {"0", "1", "2"}


# Kills.


def test_a_site_without_a_factor_that_is_forgotten_is_named() -> None:
    problem = Problem(2)
    for site, words in (("1", "no factor in this posterior; sites that have one: 0"), ("0", "only one")):
        with pytest.raises(NumericsError, match=words):
            forget(trained(problem, Plan(), 1), site)
