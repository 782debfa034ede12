"""The common parts of both Strategies of FedMGP: start values, predictions and warnings.

Units are smoothed, scaled views of shared latent functions g; a unit's own parameters φ_m never leave it. Functions
whose first argument is a Strategy are methods of both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from fedgp_flower import outcome
from fedgp_flower.agreement import Agreement, squares_about
from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import INPUT_EDGES, covering
from fedgp_flower.messages import encode
from fedgp_flower.methods.fedmgp import messages
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior, latents_at, posterior
from fedgp_flower.methods.fedmgp.messages import FirstLook, FirstStatistics
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import best_lead
from fedgp_flower.shared_messages import oversized
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.questions import Asking, Each, Predicted, Roster, Summed, Total
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

if TYPE_CHECKING:
    from strategies.fedmgp import PseudoState
    from strategies.fedmgp_exact import ExactState

    SharedState: TypeAlias = PseudoState | ExactState

logger = logging.getLogger("fedgp")

EVERYONE = ""
"""Id of the total of all units; no site has this id."""
LEADS = 20
"""Number of units, those with most rows, that send first statistics; pairs of them are compared."""
LEAST_SIDE = 3
"""Minimum number of grid points along an input."""
COLLAPSED = 0.95
"""Held-out RMSE, over the root mean square of the targets, at which g explains almost nothing."""


def sizes(latents: LatentFunctions) -> dict[str, int]:
    """Return the lengths of statistics: I latent functions, L whitened values."""
    return {"I": len(latents.amplitudes), "L": latents.size}


def first_inducing(config: RunConfig, roster: Roster) -> Asking[Array]:
    """Return W [J, D] from pooled histograms: a grid of at least three points along each input, or scattered points."""
    shape, count = (yield from shape_of_inputs(roster)), config.model.num_inducing
    histogram = shape.histogram
    if histogram[:, [0, -1]].any():
        logger.warning(
            "some inputs are more than %g standard deviations from their mean; pseudo-inputs end there. Transform them",
            INPUT_EDGES[-1],
        )
    side = round(count ** (1 / len(histogram)))
    side -= side ** len(histogram) > count
    if side < LEAST_SIDE:
        logger.info("%d pseudo-inputs are too few for a grid over %d inputs; they are scattered", count, len(histogram))
        return initial_locations(shape, config.model, config.seed)
    axes = [covering(counts, side) for counts in histogram]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(histogram))


def first_look(config: RunConfig, roster: Roster) -> Asking[tuple[LatentFunctions, LatentPosterior]]:
    """Return latents with lengthscales from the spacing of pseudo-inputs, and q(u) of the unit most similar to others.

    This unit is found from statistics of single units. Under masks, the first eigenvector d of Σ m mᵀ is the direction
    that most units share; the sum does not depend on the sign of g, which a unit cannot identify. Each unit then
    answers for y or −y, depending on the sign of mᵀd, and q(u) follows from the mean of these statistics.
    """
    inducing = yield from first_inducing(config, roster)
    latents = latents_at(inducing, cast(FedMGPOptions, config.options).multiples, config.model.jitter)
    lengths, statistics = sizes(latents), "statistics to start from"
    if not roster.totals_only:
        asked = sorted(roster.sites, key=lambda site: -roster.rows[site])[:LEADS]
        requests = dict.fromkeys(asked, FirstLook(latents))
        answers: Mapping[str, FirstStatistics] = yield Each(FirstStatistics, requests, retries=1, sizes=lengths)
        if not answers:
            raise RunError(f"no site sent {statistics}")
        starts = {site: answer.statistics for site, answer in answers.items()}
        return latents, posterior(starts[best_lead(starts)])
    pointed: Summed[messages.Directions] = yield Total(messages.Directions, latents, sizes=lengths)
    direction = np.linalg.eigh(pointed.required(statistics).outer)[1][:, -1]
    direction = direction * math.copysign(1.0, direction[np.abs(direction).argmax()])
    summed: Summed[FirstStatistics] = yield Total(FirstStatistics, FirstLook(latents, direction), sizes=lengths)
    total, units = summed.required(statistics).statistics, len(summed.sites) - summed.silent
    return latents, posterior(replace(total, precision=total.precision / units, shift=total.shift / units))


EQUATION = (
    "g_i ~ GP(0, a_i² exp(−½ (w − w')ᵀ S_i⁻¹ (w − w'))) with values a_i L_i u_i at the pseudo-inputs W, where "
    "L_i L_iᵀ = exp(−½ (W − W')ᵀ S_i⁻¹ (W − W')) + jitter · I, and u = (u_1, …, u_I) ~ N(posterior.mean, "
    "posterior.covariance). latents.mean and latents.covariance are those of the values. A unit's output is "
    "Σ_i s_i (g_i smoothed by N(0, R_i)) + noise; s, R and the noise stay at the unit. Inputs and targets are "
    "standardised by input.mean, input.scale, target.mean, target.scale."
)
MEANINGS = {
    "latents.inducing": "W, pseudo-inputs",
    "latents.scales": "S, squared lengthscales of each latent function",
    "latents.amplitudes": "a, amplitude of each latent function",
    "latents.mean": "mean of g at the pseudo-inputs, function by function",
    "latents.covariance": "covariance of g at the pseudo-inputs",
    "posterior.mean": "m, mean of the whitened values u",
    "posterior.covariance": "V, covariance of the whitened values u",
}


def scaled_targets(strategy: FederatedStrategy[Any], preparation: Agreement) -> Agreement:
    """Divide targets by their root mean square without centring: units scale g and would scale an offset too.

    Units whose mean square dwarfs that of the others, perhaps in other units, are left out of this scale.
    """
    arrays, rows = preparation.arrays, preparation.rows
    if strategy.config.model.likelihood not in ("gaussian", "student-t"):
        return preparation
    power = math.hypot(float(arrays["target.mean"]), float(arrays["target.scale"]))
    squares = {site: float(squares_about(rows[site], sums, np.zeros(1))[-1]) for site, sums in preparation.sums.items()}
    if far := oversized(squares, rows, "mean square", float):
        kept = squares.keys() - far.keys()
        power = math.sqrt(math.fsum(squares[site] for site in kept) / sum(rows[site] for site in kept))
    return replace(preparation, arrays={**arrays, "target.mean": np.array(0.0), "target.scale": np.array(power)})


def pseudo_inputs(strategy: FederatedStrategy[Any], state: SharedState) -> NamedArrays:
    """Return the pseudo-inputs for the pooled baseline of a simulation, or nothing."""
    wanted = strategy.preparation.simulated and strategy.config.baselines.pooled
    return {messages.PSEUDO_INPUTS: state.view(EVERYONE).latents.inducing} if wanted else {}


def predicted(strategy: FederatedStrategy[Any], state: SharedState, roster: Roster) -> Asking[Predicted]:
    """Return each unit's view and the posterior of g, which predicts a unit only with the unit's own parameters."""
    yield from ()
    view, prepared = state.view(EVERYONE), strategy.preparation
    request = view if roster.totals_only else {s: replace(view, known=state.known(s)) for s in roster.all_sites}
    mean, covariance = view.posterior.of_latents(view.latents)
    arrays = {f"latents.{name}": array for name, array in encode(view.latents).items()}
    arrays |= {f"posterior.{name}": array for name, array in encode(view.posterior).items()}
    arrays |= {"latents.mean": mean, "latents.covariance": covariance}
    arrays = {name: arrays[name] for name in MEANINGS}
    coordinates = {name: "whitened" if name.startswith("posterior.") else "standardised" for name in arrays}
    known_of: dict[str, dict[str, object]] = {}  # which φ_m a unit predicts with
    for site in prepared.rows:
        known = state.known(site)
        known_of[site] = {"report": known.report, **vars(known.move), "offset": known.move.offset.tolist()}
    model = {"family": "shared-latents", "kernel": "rbf", "jitter": view.latents.jitter, "known": known_of}
    saved = outcome.Posterior(arrays, MEANINGS, coordinates, EQUATION, model)
    scales = (np.sqrt(view.latents.scales) * prepared.arrays["input.scale"]).tolist()
    return Predicted(request, saved, {"lengthscales": scales, "counted": list(state.counted)})


def collapse(strategy: FederatedStrategy[Any]) -> list[str]:
    """Return a warning if held-out errors are as large as the signal or larger than those of local models."""
    found, alone = strategy.evaluation, strategy.scoring.local_only
    if found is None or "rmse" not in found["test"]:
        return []
    worse = alone is not None and found["test"]["rmse"] > alone["rmse"]
    if not worse and found["test_standardised"]["rmse"] <= COLLAPSED:
        return []
    return [
        f"{outcome.COLLAPSE}: held-out errors are as large as the signal, or larger than those of units that fit a GP"
        " alone. Units whose curves differ in shape need deviations: `method` = 'hierarchical-gp'; or try more"
        " `fedmgp.latents`"
    ]
