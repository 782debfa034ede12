"""FSGP: federated averaging of a sparse GP, with an exact posterior of all rows from sums.

Guo et al., *Federated sparse Gaussian processes* (2022), Algorithms 1-2. Sampled sites take a few steps on their own
bound per row from w = {β, Z}; the server averages. After training sums over sites give the optimal q(u) of all rows at
w (Eqs. 14-15), whatever the partition. :mod:`strategies.fsgp_exact` trains by sums too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import collapsed_bound_value, exact_posterior
from fedgp_flower.messages import encode
from fedgp_flower.methods.fsgp.messages import PooledPosterior, Statistics
from fedgp_flower.methods.fsgp.options import FSGPOptions
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import NamedArrays
from strategies.server.fedavg import AveragingPlan, AveragingState, averaging_round, first_state
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Figures, Roster, Total
from strategies.server.shapes import initial_hyperparameters, initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

LOG_NOISE = "likelihood.log_noise"
ROWS_PER_POINT = 3
"""Fewer rows for each inducing point are nearly told by their sums."""


def told_by_total(points: int, rows: Mapping[str, int], chosen_from: int = 1) -> list[str]:
    """What to say where sums at so many points nearly tell which rows of all sites are in their total; or nothing.

    Masks hide who has a row, and not that it is there: measured in ``simulations/results/methods.md``.

    Args:
        points: At which sums are formed.
        rows: Of each site.
        chosen_from: How many of these points there are for each inducing point.
    """
    count = sum(rows.values())
    if count >= ROWS_PER_POINT * points:
        return []
    return [
        f"{count} rows of all sites are fewer than {ROWS_PER_POINT} for each of {points} points that their sums are at:"
        " even the total over sites, under masks too, tells whoever holds it whether a row is among them;"
        f" `model.num-inducing` = {max(1, count // (chosen_from * ROWS_PER_POINT))} or less hides that better"
    ]


def initial_parameters(roster: Roster, model: ModelSection, seed: int) -> Asking[NamedArrays]:
    """The first w = {β, Z}: inducing points from federated statistics, hyperparameters where the configuration says."""
    answers = yield from shapes_of_inputs(roster)
    locations = initial_locations(answers, model, seed)
    return {"inducing.locations": locations, **initial_hyperparameters(answers)}


def noise_of(parameters: Mapping[str, np.ndarray]) -> float:
    """Noise variance of the standardised target."""
    return math.exp(float(parameters[LOG_NOISE][0]))


def pooled(parameters: Mapping[str, np.ndarray], sites: tuple[str, ...] | None = None) -> Asking[Statistics]:
    """The sums of all rows of all sites that answer.

    Raises:
        RunError: nobody answered.
    """
    summed = yield Total(Statistics, Parameters(parameters), sites)
    if summed.total is None:
        raise RunError("no site sent usable sums; see the failures above")
    return summed.total


def posterior_at(parameters: Mapping[str, np.ndarray], totals: Statistics) -> PooledPosterior:
    """q(v) of all rows behind the totals: the optimum at w (Eqs. 14-15)."""
    whitened = exact_posterior(totals.sums(), noise_of(parameters))
    return PooledPosterior(parameters, whitened.mean.numpy(), whitened.covariance.numpy())


class FSGPAveraging(FederatedStrategy[AveragingState]):
    """Federated averaging of w, then the exact posterior at it."""

    method = "fsgp"
    options_class = FSGPOptions
    state_class = AveragingState
    watched = "objective"
    options: FSGPOptions
    implied: ClassVar[Mapping[str, Any]] = {"objective": "average"}

    def initialise(self, roster: Roster) -> Asking[AveragingState]:
        """The first parameters; no moments."""
        return first_state((yield from initial_parameters(roster, self.config.model, self.config.seed)))

    def one_round(self, state: AveragingState, roster: Roster) -> Asking[tuple[AveragingState, Figures]]:
        """Algorithm 1 of the paper."""
        options = self.options
        plan = AveragingPlan.of(self.config, options.fraction, options.server_optimizer, options.server_learning_rate)
        state, figures = yield from averaging_round(state, roster, plan)
        return state, figures and {**figures, "noise": noise_of(state.parameters)}

    def predictive(self, state: AveragingState, roster: Roster) -> Asking[PooledPosterior]:
        """Parameters and the exact posterior at them, from one query for sums."""
        totals = yield from pooled(state.parameters, roster.everyone)
        self.last = (posterior_at(state.parameters, totals), totals)
        return self.last[0]

    def public(self, state: AveragingState) -> NamedArrays:
        """The parameters."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: AveragingState, arrays: NamedArrays) -> AveragingState:
        """Other parameters, the same moments."""
        return AveragingState({name.removeprefix("values."): array for name, array in arrays.items()}, state.moments)

    def posterior_of(self, state: AveragingState) -> Posterior:
        """Parameters in natural units, q of whitened inducing values."""
        return saved(self.last[0], self.config.model)

    def details_of(self, state: AveragingState) -> dict[str, Any]:
        """The pooled bound at the end, in nats, and the noise level."""
        return facts(*self.last)


def facts(posterior: PooledPosterior, totals: Statistics) -> dict[str, float]:
    """The pooled bound in nats, and the noise level."""
    noise = noise_of(posterior.values)
    return {"bound": collapsed_bound_value(totals.sums(), noise), "noise_sd_standardised": math.sqrt(noise)}


def saved(posterior: PooledPosterior, model: ModelSection) -> Posterior:
    """Arrays, meanings and the equation of prediction for a sparse GP with whitened q(v)."""
    arrays: NamedArrays = {
        "inducing.locations": posterior.values["inducing.locations"],
        "inducing.mean": posterior.mean,
        "inducing.covariance": posterior.covariance,
    }
    for name, array in posterior.values.items():
        if ".log_" in name:
            arrays[name.replace(".log_", ".", 1)] = np.exp(array)
    meanings = {
        "inducing.locations": "Z, inducing inputs",
        "inducing.mean": "m, mean of v = L⁻¹ f(Z)",
        "inducing.covariance": "S, covariance of v = L⁻¹ f(Z)",
        "kernel.lengthscale": "lengthscale per input",
        "kernel.outputscale": "prior variance of f",
        "likelihood.noise": "σ², noise variance of an observation",
    }
    whitened = dict.fromkeys(("inducing.mean", "inducing.covariance"), "whitened")
    equation = (
        "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): y(x) ~ N(aᵀm, k(x, x) − aᵀa + aᵀS a + σ²), "
        "x and y standardised by input.mean, input.scale, target.mean, target.scale."
    )
    facts_of_model = {"family": "sparse", "kernel": model.kernel, "ard": model.ard, "jitter": model.jitter}
    coordinates = dict.fromkeys(arrays, "standardised") | whitened
    return Posterior(
        arrays, {n: meanings.get(n, "hyperparameter") for n in arrays}, coordinates, equation, facts_of_model
    )
