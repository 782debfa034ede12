"""Replay: a site treats the other sites' pseudo-observations as likelihoods, refits q(Z), q(β), then distils its rows.

Step 1 (refit) maximises the collapsed bound of [pseudo-observations of the others + own rows] over q(Z) and q(β): first
at a point by L-BFGS, then their spreads by Adam. Step 2 (distil) maximises the local free energy over (V_k, m_k,
w_k) averaged over a few draws of (Z, β). Step 3 keeps in c_k what the pseudo-observations do not say about the noise.
Gaussian likelihood and tied diagonal pseudo-noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.gp.optimisers import FREE, AdamSettings, Trace, adam, maximise
from fedgp_flower.methods.pvi.factors import PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import (
    Cavity,
    Data,
    Draws,
    Latent,
    Latents,
    Point,
    SparseModel,
    collapsed_evidence,
    location_scale,
    standard_normal,
)
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.updates import TrainableLatent


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Budgets of one replay update."""

    refit_evaluations: int = 200
    """L-BFGS evaluations of the point refit."""
    adam: AdamSettings = field(default_factory=lambda: AdamSettings(steps=20, learning_rate=0.01, window=20))
    """The refit over distributions; 0 steps keep the point."""
    distil_evaluations: int = 400
    num_samples: int = 4
    spread: tuple[float, float] = (0.05, 0.05)
    """Least standard deviations of Z and β among the draws that distillation averages over."""
    start_scale: tuple[float, float] = (0.003, 0.03)
    """Standard deviations that q(Z) and q(β) start from after the first point refit; later visits go on from theirs."""
    alpha: float = 0.01
    """Weight of KL(q(Z) ‖ p̃(Z))."""

    @staticmethod
    def of(options: PVIOptions) -> ReplaySettings:
        """From the method's table."""
        usual = ReplaySettings()
        return replace(
            usual,
            refit_evaluations=options.refit_evaluations,
            adam=replace(usual.adam, steps=options.refit_steps),
            distil_evaluations=options.evaluations,
            num_samples=options.samples,
            alpha=options.alpha,
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What a refit and a distillation condition on."""

    model: SparseModel
    """Kernel and Gaussian likelihood."""
    others: Sequence[PseudoObservations]
    """Of the other sites; of all sites where nobody's rows are read."""
    data: Data | None
    """The site's own rows."""
    prior: Latents
    """p̃(Z) and p(β); a point keeps that latent fixed where it starts."""
    settings: ReplaySettings = field(default_factory=ReplaySettings)
    known: float = 1.0
    """Share of all rows behind q(Z) and q(β); see :func:`withhold`."""


@dataclass(frozen=True, slots=True)
class Refit:
    """q(Z), q(β) given everything known, and the bound they reach."""

    latents: Latents
    bound: float
    traces: tuple[Trace, ...]


def refit(problem: Replay, start: Latents, generator: Generator) -> Refit:
    """Maximise E_q[collapsed evidence] − α KL(q(Z) ‖ p̃(Z)) − KL(q(β) ‖ p(β)) over q(Z) and q(β)."""
    prior, settings, model = problem.prior, problem.settings, problem.model
    point, first = _refit_point(problem, start)
    scales = settings.start_scale
    parts = [
        TrainableLatent(prior.inducing, _start(point.inducing, prior.inducing, start.inducing, scales[0])),
        TrainableLatent(prior.hyper, _start(point.hyper, prior.hyper, start.hyper, scales[1])),
    ]
    # The means stay at the mode: noisy steps along them cost more than the asymmetry of the posterior is worth.
    parameters = [q for part in parts for q in part.parameters if q is not part.location]
    if settings.adam.steps == 0 or not parameters:
        return Refit(point, first.values[-1], (first,))

    def objective() -> Tensor:
        draws = _draws(parts, settings.num_samples, model.num_inputs, generator)
        evidence = collapsed_evidence(model, draws, problem.others, problem.data).mean()
        return evidence - settings.alpha * parts[0].kl() - parts[1].kl()

    rows = int(sum(f.count for f in problem.others)) + (0 if problem.data is None else len(problem.data))
    second = adam(objective, parameters, settings.adam, rows)
    tail = second.values[-10:]
    return Refit(Latents(parts[0].result(), parts[1].result()), sum(tail) / len(tail), (first, second))


def distil(
    problem: Replay, own: PseudoObservations, latents: Latents, generator: Generator
) -> tuple[PseudoObservations, Trace]:
    """The (V, m, w) that maximise the local free energy averaged over draws around ``latents``, and their c.

    It starts from ``own``, whose size stays. w_j ≤ N_k: about a value of f, N_k rows say at most what N_k observations
    of it would. Without this bound a few draws can be served by a near-equality that no other (Z, β) can meet.
    """
    model, data = problem.model, problem.data
    assert data is not None
    draws = _spread_draws(latents, problem.settings, model.num_inputs, generator)
    inputs, targets, log_root = (p.detach().clone().requires_grad_() for p in (own.inputs, own.targets, own.root.log()))

    def factor() -> PseudoObservations:
        return PseudoObservations(inputs, targets, log_root.exp(), True, float(len(data)))

    with torch.no_grad():
        cavity = Cavity.at(model, draws, problem.others, data)
    trace = maximise(
        lambda: cavity.free_energy(model, draws, factor(), data).mean(),
        [inputs, targets, log_root],
        max_evaluations=problem.settings.distil_evaluations,
        bounds=(FREE, FREE, (None, 0.5 * math.log(len(data)))),
        tolerance=1e-6,
        gradient_tolerance=1e-5,
    )
    with torch.no_grad():
        return _with_residual(factor(), cavity, data, latents, problem.known), trace


def _with_residual(
    own: PseudoObservations, cavity: Cavity, data: Data, latents: Latents, known: float
) -> PseudoObservations:
    """The factor as learned, without a graph, and with its c."""
    points = {name: getattr(own, name).detach() for name in ("inputs", "targets", "root")}
    noise = (2.0 * location_scale(latents.hyper)[0][-1]).exp()
    return withhold(replace(own, **points, residual=noise_residual(cavity, own, data)), noise, known)


def withhold(own: PseudoObservations, noise: Tensor, known: float) -> PseudoObservations:
    """Weigh what only c says about the noise by how mature the function is that it was judged by.

    c/σ² rows speak through c alone: squares left by a function that was fitted to the share ``known`` of all rows, and
    that later sites will improve. Of their squares and of their number, the share ``known`` is kept: the slope of the
    evidence in log σ² at the present σ² stays as it was, and a smaller σ² remains possible. No fewer rows are counted
    than there are pseudo-observations.
    """
    rows = max(own.count - (1.0 - known) * float(own.residual / noise), float(len(own.targets)))
    return replace(own, residual=known * own.residual, count=rows)


def noise_residual(cavity: Cavity, own: PseudoObservations, data: Data) -> Tensor:
    """Squares the factor does not carry: c = max(0, E|y − f(X)|² − E Σ_j w_j (m_j − f(V_j))²), a scalar.

    A negative c would make the bound on the evidence grow without limit as σ → 0, hence the maximum.
    """
    posterior, geometry = cavity.times(own), cavity.geometry
    points = (geometry.project(own.inputs), geometry.prior_variance(own.inputs))
    totals = []
    for seen, targets, weight in (
        ((cavity.rows, cavity.prior_variance), data.targets, torch.ones_like(data.targets)),
        (points, own.targets, own.root.square()),
    ):
        mean, variance = posterior.predict(*seen)
        totals.append((((targets - mean).square() + variance) * weight).sum(-1).mean())
    return (totals[0] - totals[1]).clamp_min(0.0)


def replay_update(
    problem: Replay, own: PseudoObservations, start: Latents, generator: Generator
) -> tuple[PseudoObservations, Refit, Trace]:
    """One sequential communication: refit, then distil. Returns the new factor, the refit, and what distilling did."""
    fitted = refit(problem, start, generator)
    factor, trace = distil(problem, own, fitted.latents, generator)
    return factor, fitted, trace


def _refit_point(problem: Replay, start: Latents) -> tuple[Latents, Trace]:
    """The limit of vanishing variances: maximise evidence + α log p̃(Z) + log p(β) over a single (Z, β)."""
    model, prior, settings = problem.model, problem.prior, problem.settings
    values = [location_scale(s)[0].detach().clone() for s in (start.inducing, start.hyper)]
    learned = [isinstance(p, DiagonalGaussian) for p in (prior.inducing, prior.hyper)]
    for value, learn in zip(values, learned, strict=True):
        value.requires_grad_(learn)

    def objective() -> Tensor:
        draws = Draws(values[0].reshape(1, -1, model.num_inputs), values[1][None])
        total = collapsed_evidence(model, draws, problem.others, problem.data).sum()
        for value, p, weight in zip(values, (prior.inducing, prior.hyper), (settings.alpha, 1.0), strict=True):
            if isinstance(p, DiagonalGaussian):
                total = total + weight * (p.eta1 @ value + p.eta2 @ value.square())
        return total

    parameters = [v for v, learn in zip(values, learned, strict=True) if learn]
    if not parameters:
        with torch.no_grad():
            return Latents(Point(values[0]), Point(values[1])), Trace((float(objective()),), "converged")
    budget = settings.refit_evaluations
    trace = maximise(objective, parameters, max_evaluations=budget, tolerance=1e-6, gradient_tolerance=1e-5)
    return Latents(*(Point(v.detach()) for v in values)), trace


def _start(mean: Latent, prior: Latent, start: Latent, scale: float) -> Latent:
    """Where the refit over distributions starts: the point found, with the variance it had before, if any."""
    if not isinstance(prior, DiagonalGaussian):
        return mean
    location = location_scale(mean)[0]
    before = start.moments()[1] if isinstance(start, DiagonalGaussian) else torch.full_like(location, scale**2)
    return DiagonalGaussian.from_moments(location, before)


def _draws(parts: Sequence[TrainableLatent], num_samples: int, num_inputs: int, generator: Generator) -> Draws:
    z, b = (p.sample(standard_normal(num_samples, len(p.location), generator)) for p in parts)
    return Draws(z.unflatten(-1, (-1, num_inputs)), b)


def _spread_draws(latents: Latents, settings: ReplaySettings, num_inputs: int, generator: Generator) -> Draws:
    parts = []
    for latent, least in zip((latents.inducing, latents.hyper), settings.spread, strict=True):
        mean, scale = location_scale(latent)
        epsilon = standard_normal(settings.num_samples, len(mean), generator)
        parts.append(mean + scale.clamp_min(least) * epsilon)
    return Draws(parts[0].reshape(settings.num_samples, -1, num_inputs), parts[1])
