"""The collapsed bound of all rows and its posterior, computed from totals over sites; shared by the sparse methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp import error_law
from fedgp_flower.gp.error_law import SCALE, TAILS
from fedgp_flower.gp.models import CONSTANT, LOCATIONS, LOG_NOISE, SparseGP
from fedgp_flower.gp.optimisers import outlook
from fedgp_flower.gp.sparse import Whitener
from fedgp_flower.gp.sums import Evidence, SparseSums, at_best, contradicting
from fedgp_flower.messages import weighted
from fedgp_flower.methods.sgpr.messages import ErrorSums, PooledPosterior, SparseStatistics
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.questions import Asking, Doubt, Roster, Summed, Total

COMPARED_POINTS = 500
"""Sites are compared at this many inducing points, the first, because a comparison costs O(M³) for each site."""
ROWS_PER_POINT = 3
"""With fewer rows per inducing point, sums nearly reveal the rows."""
RECENT_ROUNDS, FORECAST_EXCHANGES = 5, 20
"""Number of recent rounds whose gains forecast the gain of this many more exchanges."""
MEANINGS = {
    LOCATIONS: "Z, inducing inputs",
    "inducing.mean": "m, mean of v = L⁻¹ f(Z)",
    "inducing.covariance": "S, covariance of v = L⁻¹ f(Z)",
    "kernel.lengthscale": "lengthscale per input",
    "kernel.warp": "e^ω of each input in `warp(k)`, k(g(x), g(z)), g of Yeo and Johnson (2000) with power 1 + ω",
    "kernel.outputscale": "prior variance of f",
    "kernel.step": "a, variance of a step of each input that has steps; Z has a row for each, 2⁴⁰ for other inputs",
    "likelihood.noise": "σ², noise variance of an observation",
    SCALE: "b, coefficients of the log scale of errors",
    TAILS: "κ and p, factors of the standard deviation and shares of the normals in a prediction",
    CONSTANT: "c, mean of f",
    "likelihood.parameters": "p, parameters of p(y | f)",
}
GAUSSIAN = (
    "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): y(x) ~ N(aᵀm, k(x, x) − aᵀa + aᵀS a + σ²), "
    "x and y standardised by input.mean, input.scale, target.mean, target.scale."
)
LAW = {
    SCALE: (
        " The variance is multiplied by exp(φᵀb), b = errors.scale, φ = (1, aᵀm, (aᵀm)² − 1, R⁻¹r(Z, x)). Here Z are"
        " only the first 256 inducing inputs, r is the correlation k(z/2, x/2)/√(k(z/2, z/2) k(x/2, x/2)), and"
        " R Rᵀ = r(Z, Z) + jitter · I."
    ),
    TAILS: (
        " y(x) has this mean and variance; its distribution is the mixture of normals with that mean and κ² times that"
        " variance in shares p, the rows of errors.mixture."
    ),
}
"""Sentences on the law of errors, by the array that holds it."""
OBSERVED = (
    "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): f(x) ~ N(c + aᵀm, k(x, x) + jitter · k(z, z) − aᵀa"
    " + aᵀS a), each of several functions with its own c, m and S. Given f, {}. x is standardised by input.mean and"
    " input.scale, a number y with noise by target.mean and target.scale; p = likelihood.parameters."
)
OBSERVATIONS = {
    "gaussian": "y ~ N(f, p²)",
    "bernoulli": "P(y = 1) = Φ(f)",
    "poisson": "y is Poisson with mean e^f per unit of exposure",
    "negative-binomial": "y is negative binomial with mean μ = e^f per unit of exposure and variance μ + p μ²",
    "binomial": "each trial succeeds with probability 1 / (1 + e^−f)",
    "student-t": "(y − f) / p₂ is Student-t with 2.5 + p₁ / (1 + p₁ / 17.5) degrees of freedom",
    "heteroscedastic": "y ~ N(f₁, e^f₂)",
    "categorical": "P(y = c) = e^f_c / Σ_d e^f_d; predictions are means over f to the power 1/p, normalised",
    "ordinal": "P(y ≤ k) = Φ((p₁ + … + p_k − f₁) / (g + √(1 + g²))), k = 0, 1, …, with g = f₂ / 3",
    "time-to-event": "P(T > t) = exp(−e^z), z = (log t − f) / p",
    "log-logistic": "P(T > t) = 1 / (1 + e^z), z = (log t − f) / p",
    "log-normal": "P(T > t) = Φ(−z), z = (log t − f) / p",
}
"""The distribution of an observation given f, by likelihood."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The constants of a run that maximises a bound or an evidence."""

    model: ModelSection
    seed: int = 0
    exchanges: int = 20
    """Largest number of exchanges with every site, those before training included."""
    target: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the training target: ``share`` of the second class, ``mean`` of counts."""
    small_sites: str = "warn"
    """The policy for sites with few rows: ``warn``, ``cap`` or ``masks``."""
    minimum_gain: float = 0.0
    """Training ends when a step promises, or the latest steps gained, less than this, in nats per row."""
    megabytes: int = 0
    """Size of the largest message after training; 0: the user has fixed the number of inducing points."""


def inducing_points(wanted: int, roster: Roster, small_sites: str) -> int:
    """Return M, at most the number of all rows; the policy ``cap`` limits it to a third of the smallest site's rows.

    Raise ConfigError under the policy ``masks`` if a site is smaller than that and the server sees its sums.
    """
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


def disclosure_by_total(points: int, rows: Mapping[str, int]) -> list[str]:
    """Return a warning if even the total over sites nearly reveals rows, at this number of inducing points."""
    count = sum(rows.values())
    if count >= ROWS_PER_POINT * points:
        return []
    return [
        f"with {count} rows and sums at {points} inducing points, this model can reveal whether a row was in the data;"
        f" `model.num-inducing` = {max(1, count // ROWS_PER_POINT)} or less lowers this risk (docs/privacy.md)"
    ]


def disclosure_by_sites(points: int, rows: Mapping[str, int], called: Callable[[Sequence[str]], str]) -> list[str]:
    """Return a warning if the sums of single sites nearly reveal rows; ``called`` returns the sites' display names."""
    small = [site for site, number in rows.items() if number < ROWS_PER_POINT * points]
    if not small:
        return []
    return [
        f"the sums of {called(small)} nearly reveal their rows to the server: these sites have fewer than"
        f" {ROWS_PER_POINT} rows for each of {points} inducing points; `privacy.secure-aggregation` = true hides the"
        " sums (docs/privacy.md)"
    ]


def initial_hyperparameters(section: ModelSection, num_inputs: int) -> NamedArrays:
    """Return the configured log hyperparameters by wire name."""
    arrays = SparseGP(section, torch.zeros(1, num_inputs)).to_arrays()
    return {name: array for name, array in arrays.items() if name != LOCATIONS}


def noise_of(parameters: Mapping[str, ndarray]) -> float:
    """Return the noise variance σ² of the standardised target."""
    return math.exp(float(parameters[LOG_NOISE][0]))


def total_statistics(
    parameters: Mapping[str, ndarray], section: ModelSection, sites: tuple[str, ...] | None = None
) -> Asking[SparseStatistics]:
    """Return the sums of all rows of the sites that answer; raise RunError if no site answers."""
    sizes = {"M": len(parameters[LOCATIONS])}
    summed: Summed[SparseStatistics] = yield Total(SparseStatistics, Parameters(parameters), sites, sizes=sizes)
    total = summed.required("usable sums")
    yield Doubt(contradictions(summed.parts, unit_function(compared(parameters, section))))
    return total


def compared(parameters: Mapping[str, ndarray], section: ModelSection) -> SparseGP:
    """Return the model at the inducing points at which sites are compared."""
    return SparseGP.from_arrays(section, {**parameters, LOCATIONS: parameters[LOCATIONS][:COMPARED_POINTS]})


@torch.no_grad()
def unit_function(model: SparseGP) -> Array:
    """Return v = L⁻¹ 1 [*C, M], the whitened inducing values of a function that is 1 at all inducing points."""
    factor = Whitener(model).factor
    ones = model.ones[:, None].expand(*factor.shape[:-1], 1)
    return torch.linalg.solve_triangular(factor, ones, upper=False)[..., 0].numpy()


def contradictions(
    parts: Mapping[str, SparseSums], unit_function: Array, evidence: Evidence = at_best
) -> dict[str, str]:
    """Return the sites whose sums contradict those of the others; under masks there are no parts to compare."""
    leading = {site: sums.leading(COMPARED_POINTS) for site, sums in parts.items()}
    why = (
        "its sums run against the prediction from the other sites' rows. The sums may be false, or the data of the site"
        " follow another relation"
    )
    return dict.fromkeys(contradicting(leading, unit_function[:COMPARED_POINTS], evidence), why)


def posterior_at(parameters: Mapping[str, ndarray], totals: SparseSums) -> PooledPosterior:
    """Return the parameters with the optimal q(v) of all rows in the totals (Guo et al. 2022, Eqs. 14-15)."""
    return PooledPosterior.of(parameters, totals.posterior(noise_of(parameters)))


def progress(exchanges: int, gains: Array, per_round: int, rows: float) -> dict[str, float | None]:
    """Return the exchanges so far, the latest gain [nats per row], and the forecast gain of more exchanges [nats].

    ``gains`` [R] are those of the recent rounds, each of ``per_round`` exchanges.
    """
    forecast = outlook(gains, FORECAST_EXCHANGES // per_round)
    return {
        "exchanges": exchanges,
        "latest_gain_per_row": float(gains[-1]) if gains.size else None,
        "forecast_exchanges": FORECAST_EXCHANGES,
        "forecast_rise": None if forecast is None else forecast * rows,
    }


def law_of_errors(
    request: Callable[[NamedArrays], object], sites: tuple[str, ...], points: int, weight: float = 1.0
) -> Asking[tuple[Array, Array | None]]:
    """Return b [P] of the log scale of errors, zero for a constant scale, and their mixture; None for normal errors.

    ``request`` makes the question from b, from b of the regression before, and from A; the features are those of
    ``points`` inducing points.
    """
    count = error_law.FIXED_FEATURES + min(error_law.SCALE_POINTS, points)
    sizes = {"P": count, "K": len(error_law.STRENGTHS), "B": len(error_law.EDGES)}
    b = next_b = np.zeros(count)
    precision = np.eye(count) / np.finfo(float).eps  # b = 0 for certain
    for _ in range(error_law.REGRESSIONS + 1):
        before, b = b, next_b
        asked = request({SCALE: b, error_law.BEFORE: before, error_law.PRECISION: precision})
        answer: Summed[ErrorSums] = yield Total(ErrorSums, asked, sites, sizes=sizes)
        if answer.total is None:
            return np.zeros(count), None
        sums = weighted(answer.total, weight)
        next_b, precision = error_law.regression(sums.products, sums.moment, float(sums.square))
    strength, mixture = error_law.best_strength(sums.counts, sums.logs)
    return strength * b, mixture


def saved(posterior: PooledPosterior, model: ModelSection) -> Posterior:
    """Return the saved posterior of a sparse GP: its arrays, their meanings, and the equation of prediction."""
    values, q = posterior.values, {"inducing.mean": posterior.mean, "inducing.covariance": posterior.covariance}
    natural = {name.replace(".log_", ".", 1): np.exp(array) for name, array in values.items() if ".log_" in name}
    constant = {name: array for name, array in values.items() if name == CONSTANT}
    errors = {name: values[name] for name in (SCALE, TAILS) if name in values}
    arrays: NamedArrays = {LOCATIONS: values[LOCATIONS], **q, **natural, **constant, **errors}
    coordinates = dict.fromkeys(arrays, "standardised") | dict.fromkeys(q, "whitened")
    meanings = {name: MEANINGS.get(name, "hyperparameter") for name in arrays}
    described = {"family": "sparse", "kernel": model.kernel, "ard": model.ard, "jitter": model.jitter}
    if not constant:
        return Posterior(arrays, meanings, coordinates, GAUSSIAN + "".join(LAW[name] for name in errors), described)
    described |= {"likelihood": model.likelihood}
    equation = OBSERVED.format(OBSERVATIONS[model.likelihood])
    return Posterior(arrays, meanings, coordinates | dict.fromkeys(constant, "latent"), equation, described)
