"""The bound of all rows, from totals alone: its posterior and height."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.gp.kernels import amplitude_names
from fedgp_flower.gp.models import CONSTANT, SparseGP
from fedgp_flower.gp.optimisers import outlook
from fedgp_flower.gp.sparse import Whitener
from fedgp_flower.gp.sums import (
    Evidence,
    SparseSums,
    at_best,
    collapsed_bound,
    contradicting,
    exact_posterior,
    profiled,
    scaled,
)
from fedgp_flower.methods.sgpr.messages import PooledPosterior, SparseStatistics
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.questions import Asking, Doubt, Roster, Summed, Total

LOG_NOISE = "likelihood.log_noise"
LOCATIONS = "inducing.locations"
ROWS_PER_POINT = 3
"""With fewer rows for each inducing point, sums nearly reveal the rows."""
SMOOTHED, MORE = 5, 20
"""Rounds whose gains say what so many more exchanges would bring."""
MEANINGS = {
    LOCATIONS: "Z, inducing inputs",
    "inducing.mean": "m, mean of v = L⁻¹ f(Z)",
    "inducing.covariance": "S, covariance of v = L⁻¹ f(Z)",
    "kernel.lengthscale": "lengthscale per input",
    "kernel.warp": "e^ω of each input in `warp(k)`, k(g(x), g(z)), g of Yeo and Johnson (2000) with power 1 + ω",
    "kernel.outputscale": "prior variance of f",
    "likelihood.noise": "σ², noise variance of an observation",
    CONSTANT: "c, mean of f",
    "likelihood.parameters": "of p(y | f); student-t: κ of the degrees of freedom 2.5 + κ / (1 + κ / 17.5), and scale",
}
GAUSSIAN = (
    "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): y(x) ~ N(aᵀm, k(x, x) − aᵀa + aᵀS a + σ²), "
    "x and y standardised by input.mean, input.scale, target.mean, target.scale."
)
OBSERVED = (
    "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): f(x) ~ N(c + aᵀm, k(x, x) − aᵀa + aᵀS a), and "
    "y(x) ~ ∫ p(y | f) df with p(y = 1) = Φ(f), a Poisson rate eᶠ, Student-t noise, or noise variance e^g with g as f; "
    "x standardised by input.mean and input.scale, numbers y by target.mean and target.scale."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What stays the same during a run that maximises a bound."""

    model: ModelSection
    seed: int = 0
    exchanges: int = 20
    """Most exchanges with every site, those before training among them."""
    target: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the training target: ``share`` of the second class, ``mean`` of counts."""
    small_sites: str = "warn"
    """The policy for sites with few rows: ``warn``, ``cap`` or ``masks``."""
    worth: float = 0.0
    """Nats a row that a few more exchanges must promise, or training ends."""
    megabytes: int = 0
    """Of a message of sums at more inducing points after training; 0: there are none."""


def inducing_points(wanted: int, roster: Roster, small_sites: str) -> int:
    """P: at most the number of rows, and by the policy ``sgpr.small-sites`` at most what the smallest site bears."""
    most = min(wanted, sum(roster.rows.values()))
    small = [site for site, rows in roster.rows.items() if rows < ROWS_PER_POINT * most]
    if roster.totals_only or not small or small_sites == "warn":
        return most
    if small_sites == "cap":
        return max(1, min(roster.rows.values()) // ROWS_PER_POINT)
    raise ConfigError(
        f"`sgpr.small-sites` = 'masks': site(s) {', '.join(small[:5])} have fewer than {ROWS_PER_POINT} rows for"
        f" each of {most} inducing points; set `privacy.secure-aggregation` to true, or lower `model.num-inducing`"
    )


def told_by_total(points: int, rows: Mapping[str, int]) -> list[str]:
    """A warning where even a total at so many points nearly reveals rows."""
    count = sum(rows.values())
    if count >= ROWS_PER_POINT * points:
        return []
    return [
        f"with {count} rows and sums at {points} points this model can reveal whether a row was in the data;"
        f" `model.num-inducing` = {max(1, count // ROWS_PER_POINT)} or less hides that better (docs/privacy.md)"
    ]


def told_by_sites(points: int, rows: Mapping[str, int], called: Callable[[Sequence[str]], str]) -> list[str]:
    """A warning where the sums of single sites nearly reveal rows; ``called`` names sites for people."""
    small = [site for site, number in rows.items() if number < ROWS_PER_POINT * points]
    if not small:
        return []
    return [
        f"sums of {called(small)} nearly show their rows to the server, with fewer than {ROWS_PER_POINT} rows for each"
        f" of {points} points; `privacy.secure-aggregation` = true hides them (docs/privacy.md)"
    ]


def empty_model(section: ModelSection, num_inputs: int) -> NamedArrays:
    """The model's hyperparameters as configured, by name in the order of the sketch."""
    arrays = SparseGP(section, torch.zeros(1, num_inputs)).to_arrays()
    return {name: array for name, array in arrays.items() if name != LOCATIONS}


def noise_of(parameters: Mapping[str, ndarray]) -> float:
    """Noise variance of the standardised target."""
    return math.exp(float(parameters[LOG_NOISE][0]))


def log_lengthscales(values: Mapping[str, ndarray]) -> NamedArrays:
    """Log ℓ of every part of the kernel that has them."""
    return {name: values[name] for name in sorted(values) if name.endswith("log_lengthscale")}


def lengthscales(values: Mapping[str, ndarray]) -> Array:
    """A lengthscale for each input [D]: the kernel's first, or 1 where it has none."""
    first = next(iter(log_lengthscales(values).values()), np.zeros(1))
    return np.broadcast_to(np.exp(first.ravel()), values[LOCATIONS].shape[1]).copy()


def pooled(
    parameters: Mapping[str, ndarray], section: ModelSection, sites: tuple[str, ...] | None = None
) -> Asking[SparseStatistics]:
    """The sums of all rows of all sites that answer."""
    sizes = {"M": len(parameters[LOCATIONS])}
    summed: Summed[SparseStatistics] = yield Total(SparseStatistics, Parameters(parameters), sites, sizes=sizes)
    if summed.total is None:
        raise RunError("no site sent usable sums; see the failures above")
    yield from doubts(summed.parts, level_of(SparseGP.from_arrays(section, parameters)))
    return summed.total


@torch.no_grad()
def level_of(model: SparseGP) -> Array:
    """The whitened inducing values u [*C, M] of a function that is 1 at all inducing points."""
    factor = Whitener(model).factor
    return torch.linalg.solve_triangular(factor, torch.ones_like(factor[..., :1]), upper=False)[..., 0].numpy()


def doubts(parts: Mapping[str, SparseSums], level: Array, evidence: Evidence = at_best) -> Asking[None]:
    """Name the sites whose sums contradict the others'; under masks there are no parts, and nobody is named."""
    for site, (every, others) in contradicting(parts, level, evidence).items():
        yield Doubt(
            site,
            "what their rows predict for it runs against its sums. These may be false, or another relation holds"
            f" there. The evidence is {every:.3g} nats per row with it and {others:.3g} without it",
        )


def folded(values: Mapping[str, ndarray], totals: SparseSums, section: ModelSection) -> tuple[NamedArrays, SparseSums]:
    """Parameters with the best amplitude and noise for these totals, and the totals there."""
    best = profiled(totals)
    names = amplitude_names(section, values[LOCATIONS].shape[1])
    louder = {name: np.asarray(values[name] + math.log(best.amplitude)) for name in names}
    noise = {LOG_NOISE: np.full_like(values[LOG_NOISE], math.log(best.noise))}
    return {**values, **louder, **noise}, scaled(totals, best.amplitude)


def posterior_at(parameters: Mapping[str, ndarray], totals: SparseSums) -> PooledPosterior:
    """q(v) of all rows behind the totals: the optimum at these parameters (Guo et al. 2022, Eqs. 14-15)."""
    whitened = exact_posterior(totals, noise_of(parameters))
    return PooledPosterior(parameters, whitened.mean.numpy(), whitened.covariance.numpy())


def facts(parameters: Mapping[str, ndarray], totals: SparseSums) -> dict[str, float]:
    """The pooled bound in nats, and the noise level."""
    noise = noise_of(parameters)
    return {"bound": collapsed_bound(totals, noise), "noise_sd_standardised": math.sqrt(noise)}


def progress(exchanges: int, gains: Array, a_round: int, rows: float) -> dict[str, float | None]:
    """Facts about how far an ascent came: exchanges, the latest gain per row, and what some more would add."""
    more = outlook(gains, MORE // a_round)
    return {
        "exchanges": exchanges,
        "latest_gain_per_row": float(gains[-1]) if gains.size else None,
        "forecast_exchanges": MORE,
        "forecast_rise": None if more is None else more * rows,
    }


def saved(posterior: PooledPosterior, model: ModelSection) -> Posterior:
    """Arrays, meanings and the equation of prediction for a sparse GP with whitened q(v)."""
    values, q = posterior.values, {"inducing.mean": posterior.mean, "inducing.covariance": posterior.covariance}
    natural = {name.replace(".log_", ".", 1): np.exp(array) for name, array in values.items() if ".log_" in name}
    constant = {name: array for name, array in values.items() if name == CONSTANT}
    arrays: NamedArrays = {LOCATIONS: values[LOCATIONS], **q, **natural, **constant}
    coordinates = dict.fromkeys(arrays, "standardised") | dict.fromkeys(q, "whitened")
    meanings = {name: MEANINGS.get(name, "hyperparameter") for name in arrays}
    described = {
        "family": "sparse",
        "kernel": model.kernel,
        "ard": model.ard,
        "jitter": model.jitter,
    }
    if not constant:
        return Posterior(arrays, meanings, coordinates, GAUSSIAN, described)
    described |= {"likelihood": model.likelihood}
    return Posterior(arrays, meanings, coordinates | dict.fromkeys(constant, "latent"), OBSERVED, described)
