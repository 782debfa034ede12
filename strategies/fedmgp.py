"""FedMGP by pseudo-gradients: Algorithm 2 of Chung and Al Kontar, Technometrics 66 (2024), for any likelihood.

θ = {S, q(u)} is shared. In a round, sampled units take local steps on (θ, φ_m) and send Δ_m = θ − θ_m; the server
merges these by a rule of :mod:`strategies.fedmgp_rules` and steps: θ ← θ − Δ. For Gaussian noise q(u) has natural
parameters, a precision λ and a shift h: their average over units is a step on the pooled bound, unlike that of means
and Cholesky factors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import ConfigError, NumericsError, RunError
from fedgp_flower.messages import message
from fedgp_flower.methods.fedmgp import latents as shared
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, LatentFunctions, LatentPosterior, Move
from fedgp_flower.methods.fedmgp.messages import Broadcast, Known, PseudoGradient, View
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies.fedmgp_rules import RULES, least_sites, merge_natural, merged
from strategies.fedmgp_shared import EVERYONE, collapse, first_look, predicted, pseudo_inputs, scaled_targets
from strategies.server.fedavg import sampled
from strategies.server.questions import Asking, Each, Figures, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

FINAL_RATE = 0.005
"""Last learning rate of local steps over the first; it falls by the same factor in every round."""
WATCHED = math.log(0.1) / math.log(FINAL_RATE)
"""Share of the rounds after which the learning rate is a tenth of the first and the objective hardly rises."""


@message()
class PseudoState:
    """θ, and the latest round of each unit."""

    parameters: Mapping[str, AnyShape]
    inducing: Float[ndarray, "J D"]
    jitter: float
    reports: Mapping[str, int]
    """The latest round in which a unit answered."""
    counted: tuple[str, ...] = ()

    def known(self, site: str) -> Known:
        """Return the unit's latest round, without a move; under masks the same for all units."""
        round_of_report = self.reports.get(EVERYONE) or self.reports.get(site, 0)
        return Known(round_of_report, Move(np.zeros_like(self.parameters[SCALES])))

    def view(self, site: str) -> View:
        """Return latent functions and q(u) at θ."""
        return View(*shared.from_parameters(self.parameters, self.inducing, self.jitter), self.known(site))


def begin(latents: LatentFunctions, q: LatentPosterior, *, gaussian: bool) -> PseudoState:
    """Return θ at latent functions of unit amplitude; a joint q(u) becomes the nearest product over functions."""
    parameters = {SCALES: np.log(latents.scales)}
    natural = shared.to_natural(q, len(latents.scales))
    if gaussian:
        parameters |= zip((PRECISION, shared.SHIFT), natural, strict=True)
    else:
        parameters |= zip((shared.MEAN, shared.FACTOR), shared.from_natural(*natural), strict=True)
    return PseudoState(parameters, latents.inducing, latents.jitter, {})


def learning_rate(config: RunConfig, server_round: int, rounds: int) -> float:
    """Return the rate of local steps; it falls to :data:`FINAL_RATE` of ``optimizer.learning-rate`` over ``rounds``."""
    first = config.optimizer.learning_rate * config.optimizer.decay ** (server_round - 1)
    return float(first * FINAL_RATE ** min((server_round - 1) / max(rounds - 1, 1), 1.0))


def step(state: PseudoState, updates: Mapping[str, NamedArrays], options: FedMGPOptions) -> PseudoState:
    """θ ← θ − Δ with the merged pseudo-gradient; raise NumericsError if the result is not finite and positive."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if PRECISION in state.parameters:
            delta, counted = merge_natural(options, state.parameters, updates)
        else:
            delta, counted = merged(RULES[options.aggregation], options, list(updates.values())), tuple(updates)
        theta = {name: p - delta[name] for name, p in state.parameters.items()}
        latents, q = shared.from_parameters(theta, state.inducing, state.jitter)
        usable = [*theta.values(), latents.scales, q.covariance]
        if not (all(np.isfinite(array).all() for array in usable) and np.all(latents.scales > 0)):
            raise NumericsError(
                "the merged pseudo-gradient leads to parameters that are not finite: a unit sent far too large values."
                " Set `fedmgp.aggregation` to a rule that bounds each unit, such as 'norm-clipped'"
            )
    return replace(state, parameters=theta, counted=counted)


class FedMGP(FederatedStrategy[PseudoState]):
    """Algorithm 2 of the paper, for any likelihood and mini-batches."""

    method = "fedmgp"
    options_class = FedMGPOptions
    state_class = PseudoState
    watched, anneals = "objective", WATCHED
    options: FedMGPOptions
    adjusted, constants, predictive, warnings = scaled_targets, pseudo_inputs, predicted, collapse

    def initialise(self, roster: Roster) -> Asking[PseudoState]:
        """Return pseudo-inputs from histograms, lengthscales from their spacing, and q(u) of one unit."""
        latents, q = yield from first_look(self.config, roster)
        return begin(latents, q, gaussian=self.config.model.likelihood == "gaussian")

    def one_round(self, state: PseudoState, roster: Roster) -> Asking[tuple[PseudoState, Figures]]:
        """A round of Algorithm 2 with max(⌈ρM⌉, 1) units; under masks the mean of Δ_m counts as one unit."""
        options, config = self.options, self.config
        chosen, least = sampled(roster, config.averaging.fraction, config.seed), least_sites(options)
        if len(chosen) < least:
            raise RunError(
                f"`fedmgp.aggregation` = {options.aggregation!r} with `fedmgp.malicious` = {options.malicious} needs "
                f"{least} units in a round (2f + 3), but only {len(chosen)} are available. Lower `fedmgp.malicious`, "
                "raise `averaging.fraction`, or choose another rule"
            )
        rate, share = learning_rate(config, roster.round, self.horizon()), 1 / len(self.preparation.rows)
        requests = {
            site: Broadcast(state.parameters, state.inducing, state.known(site), rate, share)
            for site in ((EVERYONE,) if roster.totals_only else chosen)
        }
        answers: Mapping[str, PseudoGradient] = {}
        sites: tuple[str, ...] = ()
        if roster.totals_only:
            summed: Summed[PseudoGradient] = yield Total(PseudoGradient, requests[EVERYONE], tuple(chosen))
            if summed.total is not None:
                count = len(summed.sites) - summed.silent
                mean = {name: np.asarray(array / count) for name, array in summed.total.parameters.items()}
                answers, sites = {EVERYONE: replace(summed.total, parameters=mean)}, summed.sites
        else:
            answers = yield Each(PseudoGradient, requests)
        if not answers:
            return state, {}
        try:
            state = step(state, {site: dict(answer.parameters) for site, answer in answers.items()}, options)
        except (ConfigError, NumericsError) as error:
            logger.warning("the round changes nothing: %s", error)
        reports = {**state.reports, **dict.fromkeys(answers, roster.round)}
        state = replace(state, reports=reports, counted=sites if EVERYONE in state.counted else state.counted)
        rows = sum(answer.rows for answer in answers.values())
        return state, {"objective": sum(answer.fit for answer in answers.values()) / rows}
