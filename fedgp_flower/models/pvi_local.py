"""A site's local update by any of the optimisers of ``pvi.local-update``, as one function of what the site is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator

from fedgp_flower.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.models.factors import Factor, PseudoObservations, WhitenedFactor
from fedgp_flower.models.first_factors import Form, first_factor
from fedgp_flower.models.hierarchical import Data, Draws, Latent, Latents, Point, SparseModel, location_scale
from fedgp_flower.models.likelihoods import GaussianNoise
from fedgp_flower.models.linear_pvi import (
    LinearSite,
    analytic_factor,
    fixed_point_update,
    gradient_update,
    local_free_energy,
)
from fedgp_flower.models.optimise import AdamSettings, Trace
from fedgp_flower.models.pseudo_points import microaggregate
from fedgp_flower.models.pvi_updates import LocalProblem, adam_update, first_latents, lbfgs_update
from fedgp_flower.models.replay import ReplaySettings, distil, refit, replay_update


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """The part of the table ``pvi.*`` that a site needs."""

    local_update: str
    form: Form
    fixed_inducing: bool
    """Z stays where it is."""
    average_inducing: bool
    """Z is a point that every site moves and the server averages."""
    fixed_hyper: bool
    alpha: float
    num_samples: int
    points_fraction: float
    max_points: int
    min_rows: int
    step: float
    evaluations: int
    adam: AdamSettings
    first_adam: AdamSettings
    batch_size: int
    replay: ReplaySettings

    @classmethod
    def of(cls, options: Any, batch_size: int) -> LocalSettings:
        """Read the method's table."""
        rate = options.learning_rate
        refit_adam = replace(ReplaySettings().adam, steps=options.refit_steps)
        return cls(
            options.local_update,
            options.factor,
            options.inducing == "fixed",
            options.inducing == "average",
            options.hyper == "fixed",
            options.alpha,
            options.samples,
            options.points_fraction,
            options.max_points,
            options.min_rows_per_pseudo_point,
            options.step,
            options.evaluations,
            AdamSettings(options.steps, rate),
            AdamSettings(options.first_steps, rate),
            batch_size,
            ReplaySettings(
                options.refit_evaluations,
                refit_adam,
                options.evaluations,
                options.samples,
                alpha=options.alpha,
            ),
        )

    def num_points(self, rows: int) -> int:
        """M_k = min(fraction · N_k, cap); the floor of rows per pseudo-observation is applied when they are formed."""
        return max(1, min(int(self.points_fraction * rows), self.max_points))


@dataclass(frozen=True, slots=True)
class Situation:
    """What the server tells a site it visits."""

    latents: Latents
    """q(Z), q(β) now."""
    cavity: Latents
    """Their cavities; a point where the latent is one."""
    others: Sequence[Factor]
    """Factors of the other sites."""
    own: Factor | None
    """The site's own factor; None on its first visit."""
    context: NaturalGaussian | None = None
    """What multiplies the site's factor of v, with the prior; only while Z and β are fixed."""
    posterior: NaturalGaussian | None = None
    """q(v); only while Z and β are fixed."""
    known: float = 1.0
    """Share of all rows that the sites visited so far and this one hold."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A site's answer."""

    own: Factor
    latents: Latents
    objective: float
    """Local free energy, in nats per row."""
    evaluations: int
    rejected: int = 0
    """Trial points of line searches at which a matrix lost positive definiteness."""
    halvings: int = 0
    """Steps of a fixed-point iteration shortened because the posterior would have been improper."""


def prior_of(settings: LocalSettings, latents: Latents) -> Latents:
    """p̃(Z) = N(0, I) and p(β) = LN(0, 1); a point where a latent is fixed."""

    def one(latent: Latent, fixed: bool) -> Latent:
        location = location_scale(latent)[0]
        return Point(location) if fixed else DiagonalGaussian.standard(len(location))

    return Latents(one(latents.inducing, settings.fixed_inducing), one(latents.hyper, settings.fixed_hyper))


def local_update(
    model: SparseModel, data: Data, told: Situation, settings: LocalSettings, generator: Generator
) -> Outcome:
    """The update of ``pvi.local-update`` (Ashman et al. 2022, Algorithm 1, step 2)."""
    if settings.local_update == "replay":
        return _replay(model, data, told, settings, generator)
    if settings.local_update in {"adam", "lbfgs"}:
        return _optimised(model, data, told, settings, generator)
    return _linear(model, data, told, settings)


def merge_rows(data: Data, settings: LocalSettings) -> PseudoObservations:
    """Averages of rows: where pseudo-observations start."""
    return microaggregate(data, settings.num_points(len(data)), settings.min_rows)


def distil_only(
    model: SparseModel, data: Data, told: Situation, settings: LocalSettings, generator: Generator
) -> Outcome:
    """The site's half of parallel replay; on the first visit, where q knows nothing yet, only averages of rows."""
    if not isinstance(told.own, PseudoObservations):
        return Outcome(merge_rows(data, settings), told.latents, 0.0, 0)
    others = _points(told.others)
    factor, trace = distil(model, others, data, told.own, told.latents, settings.replay, generator, told.known)
    return Outcome(factor, told.latents, trace.values[-1] / len(data), len(trace.values), trace.rejected)


def refit_all(model: SparseModel, told: Situation, settings: LocalSettings, generator: Generator) -> Outcome:
    """The server's half of parallel replay, done by a site: q(Z), q(β) from all pseudo-observations, and no rows."""
    factors = _points(told.others)
    start, prior = told.latents, prior_of(settings, told.latents)
    found = refit(model, factors, None, prior, start, settings.replay, generator)
    rows = sum(factor.count for factor in factors)
    return Outcome(factors[0], found.latents, found.bound / rows, *_tally(found.traces))


def alone(model: SparseModel, data: Data, settings: LocalSettings, num_inducing: int, generator: Generator) -> Outcome:
    """Variational inference on these rows by Adam, whatever the likelihood: the first visit of the only site.

    It may have a pseudo-observation per row, up to the cap of ``settings``.
    """
    size = num_inducing * model.num_inputs
    prior = Latents(DiagonalGaussian.standard(size), DiagonalGaussian.standard(model.num_hyper))
    own = replace(settings, local_update="adam", form="tied", average_inducing=False, points_fraction=1.0, min_rows=1)
    start = first_latents(LocalProblem(model, data, [], prior), num_inducing, generator)
    return _optimised(model, data, Situation(start, prior, [], None), own, generator)


def _replay(model: SparseModel, data: Data, told: Situation, settings: LocalSettings, generator: Generator) -> Outcome:
    own = told.own if isinstance(told.own, PseudoObservations) else merge_rows(data, settings)
    others, prior = _points(told.others), prior_of(settings, told.latents)
    factor, fitted, distilled = replay_update(
        model, others, data, own, prior, told.latents, settings.replay, generator, told.known
    )
    rows = len(data) + sum(other.count for other in others)
    return Outcome(factor, fitted.latents, fitted.bound / rows, *_tally([*fitted.traces, distilled]))


def _optimised(
    model: SparseModel, data: Data, told: Situation, settings: LocalSettings, generator: Generator
) -> Outcome:
    problem = LocalProblem(
        model,
        data,
        told.others,
        told.cavity,
        settings.alpha,
        settings.num_samples,
        settings.batch_size,
        learn_inducing=settings.average_inducing,
    )
    own = told.own
    if own is None:
        points = settings.num_points(len(data))
        own = first_factor(model, data, told.latents, settings.form, num_points=points, min_rows=settings.min_rows)
    if settings.local_update == "lbfgs":
        budget = settings.evaluations
        update = lbfgs_update(problem, own, told.latents, max_evaluations=budget, generator=generator)
    else:
        steps = settings.first_adam if told.own is None else settings.adam
        update = adam_update(problem, own, told.latents, steps, generator)
    return Outcome(update.own, update.latents, update.free_energy / len(data), *_tally([update.trace]))


def _linear(model: SparseModel, data: Data, told: Situation, settings: LocalSettings) -> Outcome:
    """Z and β are fixed: f = Aᵀv + noise, and the factor of v is conjugate, a fixed point, or moved by one gradient."""
    site = linear_site(model, data, told.latents)
    context, q = told.context, told.posterior
    assert context is not None
    assert q is not None
    start = told.own.natural if isinstance(told.own, WhitenedFactor) else context.flat()
    evaluations, halvings = 1, 0
    if settings.local_update == "analytic":
        assert isinstance(model.likelihood, GaussianNoise)
        factor = analytic_factor(site, (2.0 * site.hyper[-1]).exp())
    elif settings.local_update == "gradient":
        factor = gradient_update(site, q, context, start, step=settings.step)
    else:
        found = fixed_point_update(site, context, start, step=settings.step)
        evaluations, halvings = found.iterations, found.halvings
        assert isinstance(found.factor, NaturalGaussian)
        factor = found.factor
    objective = float(local_free_energy(site, context * factor, context)) / len(data)
    return Outcome(WhitenedFactor(factor), told.latents, objective, evaluations, halvings=halvings)


def linear_site(model: SparseModel, data: Data, latents: Latents) -> LinearSite:
    """The site's rows as linear functions of v = L⁻¹u at the means of Z and β."""
    inducing, hyper = (location_scale(latent)[0] for latent in (latents.inducing, latents.hyper))
    draws = Draws(inducing.reshape(1, -1, model.num_inputs), hyper[None])
    with torch.no_grad():
        geometry = model.geometry(draws)
        projection = geometry.project(data.inputs)[0]
        extra = geometry.prior_variance(data.inputs)[0] - projection.square().sum(0)
        return LinearSite(projection.mT, data.targets, model.likelihood, model.own_hyper(draws)[0], extra)


def _tally(traces: Sequence[Trace]) -> tuple[int, int]:
    """Evaluations, and rejected trial points, of several optimisations."""
    return sum(len(trace.values) for trace in traces), sum(trace.rejected for trace in traces)


def _points(factors: Sequence[Factor]) -> list[PseudoObservations]:
    return [factor for factor in factors if isinstance(factor, PseudoObservations)]
