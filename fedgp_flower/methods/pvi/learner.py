"""A site's local update by any of the optimisers of ``pvi.local-update``, as functions of what the site is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Generator

from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.optimisers import AdamSettings, Trace
from fedgp_flower.methods.pvi.factors import Factor, PseudoObservations, WhitenedFactor
from fedgp_flower.methods.pvi.hierarchical import Data, Latent, Latents, Point, SparseModel, location_scale
from fedgp_flower.methods.pvi.linear import (
    analytic_factor,
    fixed_point_update,
    gradient_update,
    linear_site,
    local_free_energy,
)
from fedgp_flower.methods.pvi.options import LINEAR, PVIOptions
from fedgp_flower.methods.pvi.pseudo_points import microaggregate
from fedgp_flower.methods.pvi.replay import Replay, ReplaySettings, distil, refit, replay_update
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update, first_factor, first_latents, lbfgs_update


@dataclass(frozen=True, slots=True)
class Site:
    """What a local update works with, besides what the site is sent."""

    model: SparseModel
    data: Data
    options: PVIOptions
    generator: Generator
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """What a site is sent, as tensors."""

    latents: Latents
    """q(Z), q(β) now."""
    cavity: Latents
    """Their cavities; what they are themselves where they are not in the product."""
    others: Sequence[Factor] = ()
    """Factors of the other sites; of all sites, for a refit."""
    own: Factor | None = None
    """The site's own factor; None on its first visit."""
    context: NaturalGaussian | None = None
    """What multiplies the site's factor of v, with the prior; only while Z and β are fixed."""
    posterior: NaturalGaussian | None = None
    """q(v); only while Z and β are fixed."""
    known: float = 1.0
    """Share of all rows that the sites visited so far and this one hold."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a local update ends with."""

    own: Factor | None
    """None where only the latents were fitted."""
    latents: Latents | None
    """None where they stayed as they were."""
    objective: float
    """Local free energy, in nats per row."""
    evaluations: int
    rejected: int = 0
    """Trial points of line searches at which a matrix lost positive definiteness."""
    halvings: int = 0
    """Steps of a fixed-point iteration shortened because the posterior would have been improper."""


def prior_of(options: PVIOptions, latents: Latents) -> Latents:
    """p̃(Z) = N(0, I) and p(β) = LN(0, 1); a point where a latent is fixed."""

    def one(latent: Latent, kind: str) -> Latent:
        location = location_scale(latent)[0]
        return Point(location) if kind == "fixed" else DiagonalGaussian.standard(len(location))

    return Latents(one(latents.inducing, options.inducing), one(latents.hyper, options.hyper))


def optimised(site: Site, given: Situation) -> Update:
    """Adam or L-BFGS on the local free energy."""
    model, data, options, own = site.model, site.data, site.options, given.own
    average = options.inducing == "average"
    problem = LocalProblem(
        model, data, given.others, given.cavity, options.alpha, options.samples, site.batch_size, average
    )
    if own is None:
        points, floor = options.num_points(len(data)), options.min_rows_per_pseudo_point
        own = first_factor(model, data, given.latents, options.factor, num_points=points, min_rows=floor)
    if options.local_update == "lbfgs":
        budget = options.evaluations
        update = lbfgs_update(problem, own, given.latents, max_evaluations=budget, generator=site.generator)
    else:
        steps = AdamSettings(options.first_steps if given.own is None else options.steps, options.learning_rate)
        update = adam_update(problem, own, given.latents, steps, site.generator)
    return Update(update.own, update.latents, update.free_energy / len(data), *_tally([update.trace]))


def alone(site: Site, num_inducing: int) -> Update:
    """Variational inference on these rows by Adam, whatever the likelihood: the first visit of the only site.

    It may have a pseudo-observation per row, up to the cap of the options.
    """
    model, size = site.model, num_inducing * site.model.num_inputs
    prior = Latents(DiagonalGaussian.standard(size), DiagonalGaussian.standard(model.num_hyper))
    usual = {"local_update": "adam", "factor": "tied", "inducing": "distribution"}
    options = site.options.model_copy(update=usual | {"points_fraction": 1.0, "min_rows_per_pseudo_point": 1})
    start = first_latents(LocalProblem(model, site.data, [], prior), num_inducing, site.generator)
    return optimised(replace(site, options=options), Situation(start, prior))


def linear(site: Site, given: Situation) -> Update:
    """Z and β are fixed: f = Aᵀv + noise, and the factor of v is conjugate, a fixed point, or moved by one gradient."""
    rows, context, q = linear_site(site.model, site.data, given.latents), given.context, given.posterior
    assert context is not None
    assert q is not None
    start = given.own.natural if isinstance(given.own, WhitenedFactor) else context.flat()
    evaluations, halvings = 1, 0
    if site.options.local_update == "analytic":
        factor = analytic_factor(rows, (2.0 * rows.hyper[-1]).exp())
    elif site.options.local_update == "gradient":
        factor = gradient_update(rows, q, context, start, step=site.options.step)
    else:
        fixed_point = fixed_point_update(rows, context, start, step=site.options.step)
        evaluations, halvings = fixed_point.iterations, fixed_point.halvings
        assert isinstance(fixed_point.factor, NaturalGaussian)
        factor = fixed_point.factor
    objective = float(local_free_energy(rows, context * factor, context)) / len(site.data)
    return Update(WhitenedFactor(factor), given.latents, objective, evaluations, halvings=halvings)


def replayed(site: Site, given: Situation) -> Update:
    """Refit q(Z), q(β) on the others' pseudo-observations and these rows, then distil the rows."""
    problem = _replay(site, given, site.data)
    own = given.own if isinstance(given.own, PseudoObservations) else _merged_rows(site)
    factor, fitted, trace = replay_update(problem, own, given.latents, site.generator)
    rows = len(site.data) + sum(other.count for other in problem.others)
    return Update(factor, fitted.latents, fitted.bound / rows, *_tally([*fitted.traces, trace]))


def distilled(site: Site, given: Situation) -> Update:
    """The site's half of parallel replay; on the first visit, where q knows nothing yet, only averages of rows."""
    if not isinstance(given.own, PseudoObservations):
        return Update(_merged_rows(site), None, 0.0, 0)
    factor, trace = distil(_replay(site, given, site.data), given.own, given.latents, site.generator)
    return Update(factor, None, trace.values[-1] / len(site.data), *_tally([trace]))


def refitted(site: Site, given: Situation) -> Update:
    """The server's half of parallel replay, done by a site: q(Z), q(β) from all pseudo-observations, and no rows."""
    problem = _replay(site, given, None)
    fitted = refit(problem, given.latents, site.generator)
    rows = sum(factor.count for factor in problem.others)
    return Update(None, fitted.latents, fitted.bound / rows, *_tally(fitted.traces))


UPDATES: Mapping[str, Callable[[Site, Situation], Update]] = {
    "replay": replayed,
    **dict.fromkeys(("adam", "lbfgs"), optimised),
    **dict.fromkeys(LINEAR, linear),
}
"""The update of ``pvi.local-update`` (Ashman et al. 2022, Algorithm 1, step 2)."""


def _merged_rows(site: Site) -> PseudoObservations:
    """Averages of rows: where pseudo-observations start."""
    return microaggregate(site.data, site.options.num_points(len(site.data)), site.options.min_rows_per_pseudo_point)


def _replay(site: Site, given: Situation, data: Data | None) -> Replay:
    others = [factor for factor in given.others if isinstance(factor, PseudoObservations)]
    prior, settings = prior_of(site.options, given.latents), ReplaySettings.of(site.options)
    return Replay(site.model, others, data, prior, settings, given.known)


def _tally(traces: Sequence[Trace]) -> tuple[int, int]:
    """Evaluations, and rejected trial points, of several optimisations."""
    return sum(len(trace.values) for trace in traces), sum(trace.rejected for trace in traces)
