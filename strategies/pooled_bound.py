"""The bound of all rows, from totals alone: its posterior, height, derivatives and curvature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.cells import explaining
from fedgp_flower.gp.linalg import laplace_deviations, symmetric
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.gp.sparse import inducing_gradient
from fedgp_flower.gp.sums import (
    PENALTY,
    BoundGradient,
    SparseSums,
    bound_gradient,
    collapsed_bound,
    exact_posterior,
    profiled,
    restricted,
    scaled,
)
from fedgp_flower.methods.sgpr.messages import (
    PooledPosterior,
    Statistics,
    TrialAdjoints,
    TrialGradients,
    Trials,
    TrialSums,
    apart,
    numbered,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.questions import Asking, Summed, Total

LOG_NOISE = "likelihood.log_noise"
LOCATIONS = "inducing.locations"
ROWS_PER_POINT = 3
"""With fewer rows for each inducing point, sums nearly reveal the rows."""
CURVATURE = "the curvature of the bound at its end (Laplace's approximation at fixed inducing points)"
STEP = 1e-3
"""Step of the logarithms, for their curvature."""


def sizes_at(count: int) -> dict[str, int]:
    """Sizes of answers about so many inducing points."""
    return {"M": count, "Q": count * (count + 1) // 2}


def told_by_total(points: int, rows: Mapping[str, int], chosen_from: int = 1) -> list[str]:
    """A warning where even the total over sites nearly reveals rows; see ``simulations/results/methods.md``.

    Args:
        points: Number of points at which sums are formed.
        rows: Rows of each site.
        chosen_from: How many of these points there are for each inducing point.
    """
    count = sum(rows.values())
    if count >= ROWS_PER_POINT * points:
        return []
    return [
        f"{count} rows of all sites are fewer than {ROWS_PER_POINT} for each of {points} points that their sums are at:"
        " even the total over sites, under masks too, can reveal whether a row is among them;"
        f" `model.num-inducing` = {max(1, count // (chosen_from * ROWS_PER_POINT))} or less hides that better"
    ]


def noise_of(parameters: Mapping[str, ndarray]) -> float:
    """Noise variance of the standardised target."""
    return math.exp(float(parameters[LOG_NOISE][0]))


def pooled(parameters: Mapping[str, ndarray], sites: tuple[str, ...] | None = None) -> Asking[Statistics]:
    """The sums of all rows of all sites that answer.

    Raises:
        RunError: nobody answered.
    """
    sizes = sizes_at(len(parameters[LOCATIONS]))
    summed: Summed[Statistics] = yield Total(Statistics, Parameters(parameters), sites, sizes=sizes)
    if summed.total is None:
        raise RunError("no site sent usable sums; see the failures above")
    return summed.total


def posterior_at(parameters: Mapping[str, ndarray], totals: SparseSums) -> PooledPosterior:
    """q(v) of all rows behind the totals: the optimum at these parameters (Guo et al. 2022, Eqs. 14-15)."""
    whitened = exact_posterior(totals, noise_of(parameters))
    return PooledPosterior(parameters, whitened.mean.numpy(), whitened.covariance.numpy())


def facts(parameters: Mapping[str, ndarray], totals: SparseSums) -> dict[str, float]:
    """The pooled bound in nats, and the noise level."""
    noise = noise_of(parameters)
    return {"bound": collapsed_bound(totals, noise), "noise_sd_standardised": math.sqrt(noise)}


def saved(posterior: PooledPosterior, model: ModelSection) -> Posterior:
    """Arrays, meanings and the equation of prediction for a sparse GP with whitened q(v)."""
    arrays: NamedArrays = {
        LOCATIONS: posterior.values[LOCATIONS],
        "inducing.mean": posterior.mean,
        "inducing.covariance": posterior.covariance,
    }
    for name, array in posterior.values.items():
        if ".log_" in name:
            arrays[name.replace(".log_", ".", 1)] = np.exp(array)
    meanings = {
        LOCATIONS: "Z, inducing inputs",
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


# The bound at its best over amplitude and noise.


def objective(values: Mapping[str, ndarray], totals: SparseSums) -> float:
    """J, in nats: the bound at its best amplitude and noise, with the penalty on lengthscales."""
    logs = [array for name, array in values.items() if name.endswith("log_lengthscale")]
    return profiled(totals).value - PENALTY * sum(float(np.square(array - 1).sum()) for array in logs)


def adjoints_at(values: Mapping[str, ndarray], totals: SparseSums) -> BoundGradient:
    """Derivatives of the bound by the totals."""
    return bound_gradient(totals, float(values[LOG_NOISE][0]))


def through_inducing_points(
    parameters: Mapping[str, ndarray], totals: SparseSums, adjoints: BoundGradient, model: ModelSection
) -> NamedArrays:
    """The part of the gradient that no site needs to send: through K_zz, it follows from the totals."""
    return inducing_gradient(SparseGP.from_arrays(model, parameters), totals, adjoints)


def folded(values: Mapping[str, ndarray], totals: SparseSums, section: ModelSection) -> tuple[NamedArrays, SparseSums]:
    """Parameters with the best amplitude and noise for these totals, and the totals there."""
    best = profiled(totals)
    names = SparseGP.from_arrays(section, values).amplitude_names
    louder = {name: np.asarray(values[name] + math.log(best.amplitude)) for name in names}
    noise = {LOG_NOISE: np.full_like(values[LOG_NOISE], math.log(best.noise))}
    return {**values, **louder, **noise}, scaled(totals, best.amplitude)


@torch.no_grad()
def thinned(
    values: Mapping[str, ndarray], totals: SparseSums, count: int, section: ModelSection
) -> tuple[NamedArrays, SparseSums]:
    """Parameters and totals at the inducing points, at most ``count``, that explain most of the rows."""
    places = values[LOCATIONS]
    if not 0 < count < len(places):
        return dict(values), totals
    factor = SparseGP.from_arrays(section, values).factor()
    products = symmetric(factor @ torch.as_tensor(totals.gram) @ factor.mT)  # G = L A Lᵀ
    taken = explaining((factor @ factor.mT).numpy(), products.numpy(), count)
    few = {**values, LOCATIONS: places[taken]}
    return few, restricted(totals, factor, taken, SparseGP.from_arrays(section, few).factor())


def known_lengthscales(
    values: Mapping[str, ndarray], sites: tuple[str, ...], section: ModelSection
) -> Asking[NamedArrays | None]:
    """Standard deviations of log ℓ under Laplace's approximation at the maximum of J, in two exchanges.

    The covariance is (−∂²J)⁻¹ at fixed inducing points, with the best amplitude and noise at every point. It comes from
    the slopes at the parameters and at a small step along each logarithm. With few inducing points the bound curves
    more than the evidence. None where sites left in between.
    """
    logs = {name: array for name, array in values.items() if name.endswith("log_lengthscale")}
    if not logs:  # a linear kernel
        return None
    sizes, centre = sizes_at(len(values[LOCATIONS])), pack(logs)
    tried = [{**values, **unpack(centre + step, logs)} for step in STEP * np.eye(centre.size + 1, centre.size, -1)]
    sums: Summed[TrialSums] = yield Total(TrialSums, Trials(numbered(tried)), sites, sizes=sizes)
    if sums.total is None:
        return None
    best = [folded(at, totals, section) for at, totals in zip(tried, sums.total.each(), strict=True)]
    asked = [adjoints_at(at, totals) for at, totals in best]
    shares: Summed[TrialGradients] = yield Total(
        TrialGradients, TrialAdjoints.of([at for at, _ in best], asked), sums.sites, sizes=sizes
    )
    if shares.total is None or (shares.sites, shares.silent) != (sums.sites, sums.silent):
        return None
    slopes = []
    for share, (at, totals), adjoints in zip(apart(shares.total.values), best, asked, strict=True):
        through = through_inducing_points(at, totals, adjoints, section)
        slopes.append(pack({name: share[name] + through[name] for name in logs}))
    found = (slopes[0] - np.array(slopes[1:])) / STEP
    return unpack(laplace_deviations(found / 2 + found.T / 2, prior=2 * PENALTY), logs)


def lengthscales(values: Mapping[str, ndarray]) -> Array:
    """A lengthscale for each input [D]: the kernel's first, or 1 where it has none."""
    shape = values[LOCATIONS].shape[1]
    found = [np.exp(values[name].ravel()) for name in sorted(values) if name.endswith("log_lengthscale")]
    return np.broadcast_to(found[0], shape).copy() if found else np.ones(shape)


def detail_of_progress(exchanges: int, gains: Array, more: float | None, forecast: int, rows: float) -> dict[str, Any]:
    """Facts about how far an ascent came: exchanges, the latest gain, and what ``forecast`` more would add."""
    return {
        "exchanges": exchanges,
        "latest_gain_per_row": float(gains[-1]) if gains.size else None,
        "forecast_exchanges": forecast,
        "forecast_rise": None if more is None else more * rows,
    }
