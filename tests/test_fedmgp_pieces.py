"""The pure pieces of FedMGP's server, and whole rounds of exact q(g) against units that are plain objects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_exact_q import grid, signals

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import is_summand
from fedgp_flower.methods.fedmgp.latents import (
    LatentFunctions,
    LatentPosterior,
    from_parameters,
    latents_at,
    posterior,
)
from fedgp_flower.methods.fedmgp.messages import (
    Broadcast,
    Directions,
    FirstLook,
    FirstStatistics,
    PseudoGradient,
    TrialMoves,
    TrialStatistics,
)
from fedgp_flower.methods.fedmgp.unit import (
    LocalSteps,
    UnitData,
    natural_steps,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.run.registry import parse_config
from fedgp_flower.shared_messages import Shape
from strategies import fedmgp, fedmgp_exact
from strategies.fedmgp_exact import ExactState
from strategies.fedmgp_shared import EVERYONE, first_inducing
from strategies.server.questions import Roster, Total, drive

GRID = np.linspace(-1, 1, 6)[:, None]


ROWS = dict.fromkeys("012", 50)


def shared(count: int = 1) -> tuple[LatentFunctions, LatentPosterior]:
    rng = np.random.default_rng(count)
    latents = LatentFunctions(GRID, rng.uniform(0.1, 0.4, (count, 1)), np.ones(count))
    factor = rng.standard_normal((latents.size, latents.size))
    return latents, LatentPosterior(rng.standard_normal(latents.size), factor @ factor.T + np.eye(latents.size))


def placed(x: np.ndarray) -> np.ndarray:
    """Pseudo-inputs, nine at most, for the rows of one site."""
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    running = first_inducing(config, Roster({"a": len(x)}, ("a",), (), 0))
    next(running)
    arrays = input_shape(x)
    with pytest.raises(StopIteration) as end:
        running.send({"a": Shape(arrays["input.histogram"], arrays["input.products"], np.zeros(()), {})})
    return end.value.value


def test_pseudo_inputs_cover_the_inputs_and_a_little_more() -> None:
    x = np.linspace(-1.73, 1.73, 50)[:, None]
    W = placed(x)
    assert W.shape == (9, 1)
    np.testing.assert_allclose(np.diff(W[:, 0]), np.diff(W[:, 0])[0])
    width = INPUT_EDGES[1] - INPUT_EDGES[0]
    assert -1.73 - 1.5 * width < W[0, 0] < -1.73
    assert 1.73 < W[-1, 0] < 1.73 + 1.5 * width
    square = np.column_stack([x[:, 0], x[::-1, 0] / 2])
    two = placed(square)
    assert two.shape == (9, 2)
    assert np.ptp(two[:, 0]) > 1.7 * np.ptp(two[:, 1])
    many = np.repeat(x, 4, axis=1)
    assert placed(many).shape == (9, 4)


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value: float) -> None:
    state = fedmgp.begin(*shared(), gaussian=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    bad = {**zeros, "kernel.raw_scales": np.full((1, 1), value)}
    with pytest.raises(NumericsError, match="far too much"):
        fedmgp.step(state, {"a": bad}, parse_config({"method": "fedmgp"}).options)


class Unit:
    """A unit that knows no Flower."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y, self.memory, self.round = x, y, None, 0

    def data(self, latents: LatentFunctions) -> UnitData:
        return UnitData.build(self.x, self.y, latents.inducing)

    def first(self, request: FirstLook) -> FirstStatistics:
        data, latents = self.data(request.latents), request.latents
        found = statistics(data, latents, starting_parameters(data, latents))
        away = request.direction is not None and posterior(found).mean @ request.direction < 0
        return FirstStatistics(replace(found, shift=-found.shift) if away else found)

    def directions(self, request: LatentFunctions) -> Directions:
        mean = posterior(self.first(FirstLook(request)).statistics).mean
        return Directions(np.outer(mean, mean))

    def exact(self, request: TrialMoves) -> TrialStatistics:
        self.round += 1
        sent = request.view
        data = self.data(sent.latents)
        phi = None if self.memory is None else self.memory.agreed(data, sent.known)
        state, answers = respond(data, sent.latents, sent.posterior, request.moves, phi)
        self.memory = replace(state, round=self.round, based_on=sent.known.report)
        return TrialStatistics.of(answers)

    def train(self, request: Broadcast) -> PseudoGradient:
        theta = request.parameters
        latents, _ = from_parameters(theta, request.inducing, 1e-8)
        data = self.data(latents)
        steps = LocalSteps(3, request.learning_rate, 0.1, request.share, lambda: None)
        after, _ = natural_steps(theta, data, latents, starting_parameters(data, latents), steps)
        return PseudoGradient({name: theta[name] - after[name] for name in after}, -1.0, float(len(self.y)))


def exact_rounds(*, totals: bool) -> tuple[list[ExactState], dict]:
    """States after each exact round, and the units."""
    sites = {str(index): Unit(*rows) for index, rows in enumerate(signals(1, num_units=3))}
    config = parse_config({"method": "fedmgp-exact"})
    states = [drive(fedmgp_exact.first_state(grid(1), Roster(ROWS, tuple(sites), (), 0), config), sites)]
    for number in range(1, 6):
        here = Roster(ROWS, tuple(sites), (), number, totals)
        states.append(drive(fedmgp_exact.one_round(states[-1], here, config, ROWS), sites)[0])
    return states, sites


def test_rounds_of_the_sum_alone_are_rounds_of_the_individuals() -> None:
    """With all units present; the server then asks nothing but totals, and keeps nothing of one unit."""
    (summed, _), (individual, _) = exact_rounds(totals=True), exact_rounds(totals=False)
    for one, other in zip(summed, individual, strict=True):
        np.testing.assert_allclose(one.posterior.mean, other.posterior.mean, rtol=1e-7, atol=1e-9)
    assert list(summed[-1].reports) == [EVERYONE]
    assert summed[-1].counted == ("0", "1", "2")
    config = parse_config({"method": "fedmgp-exact"})
    question = next(fedmgp_exact.one_round(summed[-1], Roster(ROWS, tuple("012"), (), 6, True), config, ROWS))
    assert isinstance(question, Total)
    assert is_summand(question.answer)
    assert question.request.view.known.report == 5


def test_a_mean_pseudo_gradient_is_the_mean_of_pseudo_gradients() -> None:
    """A round of natural parameters from a total, as under masks, is the round of the individuals."""
    sites = {str(index): Unit(*rows) for index, rows in enumerate(signals(1, num_units=3))}
    config, latents = parse_config({"method": "fedmgp"}), latents_at(grid(1), [1.0], 1e-8)
    q = posterior(sites["0"].first(FirstLook(latents)).statistics)
    state, found = fedmgp.begin(latents, q, gaussian=True), []
    for totals in (False, True):
        here = Roster(ROWS, tuple(sites), (), 1, totals)
        found.append(drive(fedmgp.one_round(state, here, config, 3, 10), sites))
    (one, figures), (other, of_total) = found
    assert figures["objective"] == pytest.approx(of_total["objective"], rel=1e-12)
    for name, array in one.parameters.items():
        assert not np.array_equal(array, state.parameters[name])
        np.testing.assert_allclose(array, other.parameters[name], rtol=1e-10, atol=1e-12)
