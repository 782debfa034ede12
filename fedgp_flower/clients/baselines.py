"""Baselines of every method: a GP of one site's rows, and a GP or boosting of the rows of all sites."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.clients.boosting import LOSSES, boosted
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp import fitc, priors
from fedgp_flower.gp.error_law import SCALE_POINTS, with_law
from fedgp_flower.gp.likelihoods.classes import best_temperature, tempered
from fedgp_flower.gp.models import (
    CONSTANT,
    HYPER,
    LOCATIONS,
    ExactGP,
    LatentGP,
    SparseGP,
    WhitenedPosterior,
    WiredModel,
    shared_divergence,
)
from fedgp_flower.gp.optimisers import FREE, LOGARITHM, maximise
from fedgp_flower.gp.placement import Placement, to_array
from fedgp_flower.gp.sparse import pooled_bound, pooled_sums
from fedgp_flower.options import CLASSIFICATION
from fedgp_flower.scores import Prediction, Scores, TargetUnits, split_target
from fedgp_flower.typing import NamedArrays

MOST_POINTS = 100
"""Largest number of inducing points while a baseline fits its hyperparameters."""
EXACT_ROWS, POOLED_ROWS = 400, 3000
"""Largest number of rows of one site, and of all sites, for an exact GP."""
STARTS, START_ROWS = (0.0, 1.0, 2.0), 300
"""Shifts of log ℓ at the starts of a fit of all rows, and the number of rows that select the start."""
LAST_EVALUATIONS = 40
"""Largest number of evaluations of the selected start with more than :data:`EXACT_ROWS` rows."""
LEAST_BOOSTED = 100
"""Smallest number of rows for gradient boosting."""


def log_prior(model: WiredModel) -> Tensor:
    """Log density, up to a constant, of LN(0, 1) priors of lengthscales, √outputscale and noise standard deviation."""
    variances = ("outputscale", "variance", "noise")
    logs = [(name, value) for name, value in model.wire_parameters().items() if ".log_" in name]
    terms = [(value / 2 if any(part in name for part in variances) else value).square().sum() for name, value in logs]
    return -0.5 * torch.stack(terms).sum()


def weak_prior(model: ExactGP | SparseGP) -> Tensor:
    """The log prior of :mod:`fedgp_flower.gp.priors`."""
    rows = model.inputs if isinstance(model, ExactGP) else model.inducing_points
    return priors.log_prior(model.wire_parameters(), priors.hyperpriors(model.kernel, rows.shape[1]))


SETTLING, CYCLES, A_CYCLE = 5, 20, 10
"""Natural-gradient steps of q(v) in a cycle, number of cycles, and evaluations of all parameters in a cycle."""
PRIORS: dict[str, Callable[[Any], Tensor]] = {
    "none": lambda model: torch.zeros(()),
    "log-normal": log_prior,
    "weak": weak_prior,
}
"""Log densities of hyperparameters, up to a constant, by :attr:`MethodOptions.hyperprior`."""


def scores(rows: SiteData, config: RunConfig, units: TargetUnits, pooled: int) -> Scores:
    """Scores of a GP of ``rows`` at the mode of its hyperparameters: exact for few rows, else sparse.

    With ``pooled`` = 0 the rows are of one site. Otherwise they are of all sites: the fit has several starts, the
    hyperprior of the method, and ``pooled`` inducing points. A constant target keeps the initial hyperparameters.
    """
    if not len(rows.y_test):
        return no_scores(units)
    prior = PRIORS[config.options.hyperprior] if pooled else log_prior
    rng = np.random.default_rng([config.seed, *(b"pooled" if pooled else b"local")])
    if config.model.likelihood != "gaussian":
        points = _subset(rows, min(config.model.num_inducing, MOST_POINTS), rng).x
        return _variational(rows, config, units, torch.from_numpy(points))
    if len(rows.x) > (POOLED_ROWS if pooled else EXACT_ROWS):
        return _sparse(rows, config, units, rng, prior, pooled)
    model = _exact(rows, config, prior, rng) if pooled else _fitted(rows, config, prior)
    points = _subset(rows, SCALE_POINTS, rng).x
    of_scale = SparseGP.from_arrays(config.model, {**model.to_arrays(), LOCATIONS: points})
    predicted = model.predict(Placement.of(config).tensor(rows.x_test))
    return _with_errors(rows, config, units, of_scale, model.left_out(), predicted)


def no_scores(units: TargetUnits) -> Scores:
    """The scores of zero rows."""
    return units.gaussian_scores(Prediction(np.empty(0), np.empty(0)), np.empty(0))


def boosting(rows: SiteData, config: RunConfig, units: TargetUnits) -> Scores:
    """Scores of gradient boosting of all rows; no scores if rows are too few or no loss suits the likelihood."""
    likelihood = config.model.likelihood
    few = len(rows.y) < LEAST_BOOSTED or likelihood not in LOSSES
    rare = likelihood in CLASSIFICATION and np.unique(rows.y, return_counts=True)[1].min() < 2  # folds need each class
    if few or rare or rows.y.ndim > 1 or np.ptp(rows.y) == 0 or not len(rows.y_test):
        return no_scores(units)
    return boosted(rows.x, rows.y, likelihood, config.seed).scores(rows, likelihood, units)


def _fitted(
    rows: SiteData, config: RunConfig, prior: Callable[[WiredModel], Tensor], start: NamedArrays | None = None
) -> ExactGP:
    """An exact GP near a mode of its hyperparameters; with many rows after a few evaluations only."""
    model = Placement.of(config).module(ExactGP(config.model, torch.from_numpy(rows.x), torch.from_numpy(rows.y)))
    model.load(start or model.to_arrays())
    most = config.baselines.max_evaluations
    most = most if len(rows.y) <= EXACT_ROWS else min(LAST_EVALUATIONS, most)
    _maximise(model, lambda: model.log_evidence() + prior(model) / len(rows.y), rows, most)
    return model


def _exact(
    rows: SiteData, config: RunConfig, prior: Callable[[WiredModel], Tensor], rng: np.random.Generator
) -> ExactGP:
    """An exact GP of all rows; a subset of the rows selects the best of several starts."""
    few = _subset(rows, START_ROWS, rng)
    initial = ExactGP(config.model, torch.from_numpy(rows.x[:1]), torch.from_numpy(rows.y[:1])).to_arrays()
    starts = [{n: a + by if "lengthscale" in n else a for n, a in initial.items()} for by in STARTS]
    fits = [_fitted(few, config, prior, start) for start in starts]
    with torch.no_grad():
        heights = [float(model.log_evidence() + prior(model) / len(few.y)) for model in fits]
    return _fitted(rows, config, prior, fits[int(np.nanargmax(heights))].to_arrays())


def _subset(rows: SiteData, count: int, rng: np.random.Generator) -> SiteData:
    """The rows with a random subset of ``count`` training rows."""
    chosen = np.sort(rng.permutation(len(rows.x))[:count])
    return rows._replace(x=rows.x[chosen], y=rows.y[chosen])


def all_rows(config: RunConfig, partitions: int, preparation: Preparation) -> SiteData:
    """The encoded rows of all simulated sites."""
    encoded = [site.encode(preparation) for site in load_all_sites(config, partitions)]
    return SiteData(*map(np.concatenate, zip(*encoded, strict=True)))


def _maximise(
    model: WiredModel,
    objective: Callable[[], Tensor],
    rows: SiteData,
    most: int,
    *more: Tensor,
    fixed: Collection[str] = (),
) -> None:
    """Maximise an objective over the model's parameters, with bounds of logarithms, and over ``more`` tensors.

    All parameters are fixed where the likelihood would rise without end: one class, no event, or no failed trial.
    """
    target, second = split_target(rows.y)
    told = np.ptp(target) and second.any() and (target != second).any()
    named = {name: value for name, value in model.wire_parameters().items() if told and name not in fixed}
    bounds = [LOGARITHM if ".log_" in name else FREE for name in named]
    if leaves := [*named.values(), *more]:
        maximise(objective, leaves, max_evaluations=most, bounds=[*bounds, *(FREE for _ in more)])


def _sparse(
    rows: SiteData,
    config: RunConfig,
    units: TargetUnits,
    rng: np.random.Generator,
    prior: Callable[[WiredModel], Tensor],
    pooled: int,
) -> Scores:
    """Scores of a sparse GP at the mode by Titsias' bound, or by the FITC evidence for the rows of all sites."""
    place = Placement.of(config)
    inputs, targets = place.tensor(rows.x), place.tensor(rows.y)
    points = torch.from_numpy(_subset(rows, min(config.model.num_inducing, MOST_POINTS), rng).x)
    model, height = place.module(SparseGP(config.model, points)), fitc.log_evidence if pooled else pooled_bound
    if pooled:
        start = _exact(_subset(rows, START_ROWS, rng), config, prior, rng).to_arrays()
        model.load({**start, LOCATIONS: points.numpy()})
    _maximise(
        model,
        lambda: (height(model, inputs, targets) + prior(model)) / len(targets),
        rows,
        config.baselines.max_evaluations,
    )
    if pooled:
        arrays = {**model.to_arrays(), LOCATIONS: _subset(rows, pooled, rng).x}
        model = place.module(SparseGP.from_arrays(config.model, arrays))
        q = fitc.weighted_sums(model, inputs, targets).posterior()
    else:
        q = pooled_sums(model, inputs, targets).posterior(float(model.noise.detach()))
    with torch.no_grad():
        predicted = model.predict(place.tensor(rows.x_test), q)
    return _with_errors(rows, config, units, model, fitc.left_out(model, inputs, targets, q), predicted)


@torch.no_grad()
def _with_errors(
    rows: SiteData,
    config: RunConfig,
    units: TargetUnits,
    model: SparseGP,
    left_out: Tensor,
    predicted: tuple[Tensor, Tensor],
) -> Scores:
    """Scores of predictions with the law of errors z at means μ, ``left_out`` [2, N]; ``model`` has the features."""
    place = Placement.of(config)
    pairs = (rows.x, left_out[1]), (rows.x_test, predicted[0])
    known, new = (to_array(place.module(model).scale_features(place.tensor(x), mean)) for x, mean in pairs)
    found = with_law(Prediction(*map(to_array, predicted)), to_array(left_out[0]), units, (known, new))
    return units.gaussian_scores(found, rows.y_test)


def _settled(model: LatentGP, inputs: Tensor, targets: Tensor, q: WhitenedPosterior) -> WhitenedPosterior:
    """q(v) after natural-gradient steps of size ½, which fit f to the rows before the noise explains them."""
    with torch.no_grad():
        cross, prior = model.project(inputs), model.kernel(inputs, diag=True)
    eye = torch.eye(q.mean.shape[-1]).to(cross)
    for _ in range(SETTLING):
        mean, covariance = q.mean.requires_grad_(), q.covariance.requires_grad_()
        fit = model.observed.expected(targets, *model.moments(cross, prior, q)[:2], model.hyper.detach()).sum()
        slope, curvature = torch.autograd.grad(fit, (mean, covariance))
        mean, precision, fisher = mean.detach(), torch.cholesky_inverse(q.root.detach()), -curvature - curvature.mT
        factor, failed = torch.linalg.cholesky_ex(torch.lerp(precision, eye + fisher, 0.5))
        if failed.any():  # the log density is not concave near outliers
            break
        shift = torch.lerp(precision @ mean[..., None], slope[..., None] + fisher @ mean[..., None], 0.5)
        q = WhitenedPosterior(torch.cholesky_solve(shift, factor)[..., 0], torch.cholesky_inverse(factor))
    return WhitenedPosterior(q.mean.detach(), q.covariance.detach())


def _variational(rows: SiteData, config: RunConfig, units: TargetUnits, points: Tensor) -> Scores:
    """Scores of a sparse variational GP (Hensman et al. 2015) with the configured likelihood and q(v) = N(m, R Rᵀ)."""
    place = Placement.of(config)
    inputs, targets = place.tensor(rows.x), place.tensor(rows.y)
    (y, second), count = split_target(rows.y), len(rows.y)
    fixed: tuple[str, ...] = ()
    statistics = {"mean": (y.sum() + 0.5) / count, "share": (y.sum() + 0.5) / (count + 1)}  # positive if all y are zero
    if units.classes > 2:
        counts = np.bincount(y.astype(int), minlength=units.classes) + 0.5
        statistics = dict(zip(map(str, range(units.classes)), (counts / counts.sum()).tolist(), strict=True))
        fixed = (CONSTANT, HYPER) if counts.min() < 1 else ()  # a class without rows would become impossible
    latent = LatentGP(config.model, points).begin(statistics, (second.sum() + 1) / count)
    model, size = place.module(latent), (*latent.constant.shape[:-1], len(points))
    first = place.tensor(np.zeros(size)), place.tensor(np.tile(np.eye(size[-1]), (*size[:-1], 1, 1)))
    q = WhitenedPosterior(*first)
    mean, root = (torch.empty_like(part) for part in first)

    def posterior() -> WhitenedPosterior:
        return WhitenedPosterior(mean, root.tril() @ root.tril().mT)

    def objective() -> Tensor:
        cross, prior = model.project(inputs), model.kernel(inputs, diag=True)
        fit = model.observed.expected(targets, *model.moments(cross, prior, posterior())[:2], model.hyper).sum()
        scales = root.diagonal(dim1=-2, dim2=-1).abs().log()
        divergence = 0.5 * (root.tril().square().sum() + mean.square().sum() - mean.numel()) - scales.sum()
        if model.observed.relative:
            divergence = divergence - shared_divergence(posterior(), torch.cholesky_inverse(root.tril()))
        return (fit - divergence + model.log_prior()) / len(targets)

    several = "mean" in model.observed.functions  # else the noise may explain a number before its mean does
    for most in (*[A_CYCLE] * CYCLES * several, config.baselines.max_evaluations):
        q = _settled(model, inputs, targets, q) if several else q
        mean, root = q.mean.requires_grad_(), q.root.detach().requires_grad_()
        _maximise(model, objective, rows, most, mean, root, fixed=fixed)
        q = WhitenedPosterior(mean.detach(), posterior().covariance.detach())
    centre, spread = model.latent(place.tensor(rows.x_test), q)
    hyper: Tensor = model.hyper
    if model.observed.relative:
        scores = tempered(model.observed, targets, *model.left_out(inputs, targets, q))
        hyper = torch.from_numpy(best_temperature(to_array(scores)))
    return model.observed.scores(to_array(centre), to_array(spread), rows.y_test, hyper, units)
