"""SGPR with differential privacy: the exact posterior from noisy sums, with hyperparameters within the budget.

Inducing points are drawn in the box of the public ranges. A round asks for noisy sums at one lengthscale; amplitude and
noise are optimised for these sums at no privacy cost. The centralised method is Honkela and Melkas, *Gaussian processes
with differential privacy* (2021); the mechanism is :mod:`fedgp_flower.methods.sgpr.private`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedgp_flower.errors import RunError
from fedgp_flower.gp.kernels import amplitude_names
from fedgp_flower.gp.models import LOCATIONS, LOG_NOISE
from fedgp_flower.gp.sums import SparseSums, profiled, scaled
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.sgpr.messages import PrivateRequest, PrivateSums
from fedgp_flower.methods.sgpr.options import PrivateSGPROptions
from fedgp_flower.methods.sgpr.private import EDGE, Budget, cleaned
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies import pooled_bound
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

AMPLITUDE = "kernel.log_outputscale"


@message()
class Tried:
    """Parameters with the amplitude and noise that maximise the bound of the noisy sums."""

    values: Mapping[str, AnyShape]
    totals: SparseSums
    """Cleaned, at these amplitudes."""
    height: float
    """The bound, nats."""
    left_out: int
    """Number of directions that noise dominates."""


@message()
class PrivateState:
    """The lengthscales tried so far."""

    start: Mapping[str, AnyShape]
    """Z, and hyperparameters at unit amplitude."""
    tried: tuple[Tried, ...] = ()

    @property
    def best(self) -> Tried:
        """The lengthscale with the highest bound."""
        return max(self.tried, key=lambda tried: tried.height)


def evaluated(
    values: Mapping[str, np.ndarray], noisy: PrivateSums, rows: int, noise: float, section: ModelSection
) -> Tried:
    """Clean the noisy sums and maximise the bound; ``noise`` is the sd of the noise in the total, in its units."""
    sums, left_out = cleaned(noisy, rows, noise)
    best = profiled(sums)
    names = amplitude_names(section, values[LOCATIONS].shape[1])
    amplitudes = {name: np.asarray(values[name] + math.log(best.amplitude)) for name in names}
    at_best = {**values, **amplitudes, LOG_NOISE: np.full_like(values[LOG_NOISE], math.log(best.noise))}
    return Tried(at_best, scaled(sums, best.amplitude), best.value, left_out)


class PrivateSGPR(FederatedStrategy[PrivateState]):
    """Noisy sums at a few lengthscales, then the exact posterior at the best one."""

    method = "sgpr-private"
    options_class = PrivateSGPROptions
    state_class = PrivateState
    options: PrivateSGPROptions

    @property
    def budget(self) -> Budget:
        """The privacy budget of all rounds."""
        return Budget.of(self.config)

    def initialise(self, roster: Roster) -> Asking[PrivateState]:
        """Return Z drawn in the box of the public ranges, and configured parameters at unit amplitude."""
        yield from ()
        model, inputs = self.config.model, self.preparation.num_inputs
        draw = np.random.default_rng([self.config.seed, *b"inducing"])
        start = pooled_bound.initial_hyperparameters(model, inputs)
        locations = draw.uniform(-EDGE, EDGE, (model.num_inducing, inputs))
        return PrivateState(start | {LOCATIONS: locations, AMPLITUDE: np.zeros_like(start[AMPLITUDE])})

    def one_round(self, state: PrivateState, roster: Roster) -> Asking[tuple[PrivateState, Figures]]:
        """Ask for noisy sums at the next lengthscale, by factors of two around the configured one."""
        by = (len(state.tried) - (self.options.trials - 1) / 2) * math.log(2)
        values = {n: array + by if n.endswith("log_lengthscale") else array for n, array in state.start.items()}
        sizes, sharing = {"M": len(values[LOCATIONS])}, len(roster.sites) if roster.totals_only else 1
        summed: Summed[PrivateSums] = yield Total(
            PrivateSums, PrivateRequest(values, sharing), roster.sites, retries=0, sizes=sizes
        )
        if summed.total is None:
            raise RunError("no site sent noisy sums, so the run has no result")
        if summed.silent:
            raise RunError("some sites added zero to the noisy sums; another answer would exceed the privacy budget")
        rows = sum(roster.rows[site] for site in summed.sites)
        noise = self.budget.noise * math.sqrt(len(summed.sites) / sharing)
        found = evaluated(values, summed.total, rows, noise, self.config.model)
        figures = {"objective": found.height / rows, "noise": pooled_bound.noise_of(found.values)}
        return replace(state, tried=(*state.tried, found)), figures

    def finished(self, state: PrivateState) -> bool:
        """Whether the budget is spent."""
        return len(state.tried) >= self.options.trials

    def predictive(self, state: PrivateState, roster: Roster) -> Asking[Predicted]:
        """Return the exact posterior of the cleaned sums; no site is asked."""
        yield from ()
        found = pooled_bound.posterior_at(state.best.values, state.best.totals)
        budget, done = self.budget, len(state.tried)
        spent = {
            "epsilon": budget.spent(done),
            "delta": budget.delta,
            "releases": done,
            "neighbours": "one training row replaced by any other",
            "noise": "of every site's sums" if self.session.masking is None else "of the total alone",
            "noise_sd": budget.noise,
        }
        left = {"directions_left_out": state.best.left_out, "num_inducing": len(state.start[LOCATIONS])}
        return Predicted(found, pooled_bound.saved(found, self.config.model), {"differential_privacy": spent, **left})

    def public(self, state: PrivateState) -> NamedArrays:
        """Return the parameters with the best bound, or the first ones."""
        return encode(Parameters(state.best.values if state.tried else state.start))

    def warnings(self) -> list[str]:
        """Return the privacy guarantee for the report."""
        budget = self.budget
        noise = (
            "the noise is split among sites, so the guarantee holds for totals, if no sites collude"
            if self.session.masking is not None
            else "each site adds the full noise to its sums, which the server sees"
        )
        return [
            *super().warnings(),
            "Differential privacy for a training row, replaced by any other:"
            f" ε = {budget.spent(len(self.current.tried)):.3g} at δ = {budget.delta:g}; {noise}."
            " Numbers of rows, ranges and scores of held-out rows are not covered.",
        ]
