"""A site's local update: maximise the local free energy over its factor of u and its shares of q(Z) and q(β).

References:
    Federated learning of sparse Gaussian processes, Algorithms 1 and 2, Eq. 7 with weight α on the KL of Z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import GaussianNoise
from fedgp_flower.gp.optimisers import AdamSettings, Trace, adam, maximise
from fedgp_flower.methods.pvi.factors import Factor, InducingFactor, PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import (
    Data,
    Draws,
    Latent,
    Latents,
    Point,
    SparseModel,
    local_free_energy,
    location_scale,
    standard_normal,
)
from fedgp_flower.methods.pvi.options import Form
from fedgp_flower.methods.pvi.pseudo_points import microaggregate

FIRST_VISIT_SCALE = 0.1
"""Standard deviation of q(Z) that a first visit starts from: wide samples of Z would hide its mean."""
SCALE_SPEED = 4.0
"""Log-precisions travel several units, means a fraction of one: Adam's step is this much longer for them."""


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """Everything a local update conditions on."""

    model: SparseModel
    data: Data
    others: Sequence[Factor]
    """Factors of the other sites."""
    cavity: Latents
    """Cavities of Z and β; a :class:`Point` where the latent is not a distribution."""
    alpha: float = 0.1
    """Weight of KL(q(Z) ‖ q_\\k(Z))."""
    num_samples: int = 4
    batch_size: int = 0
    """Rows of a mini-batch; 0 takes all rows."""
    learn_inducing: bool = False
    """Optimise Z where it is a point (FedAvg of Z) instead of keeping it; a point β is never the site's to move."""


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """A site's answer."""

    own: Factor
    latents: Latents
    """q_k(Z) and q_k(β); divided by the cavity they are the site's factors."""
    free_energy: float
    """Nats. Adam: mean objective over the last tenth of the steps; L-BFGS: the objective at what is returned."""
    trace: Trace


class TrainableLatent:
    """A latent being learned: mean free, precision = cavity + positive, so every cavity stays proper."""

    def __init__(self, cavity: Latent, start: Latent, *, learn_point: bool = False) -> None:
        self._cavity = cavity
        if isinstance(cavity, DiagonalGaussian):
            if not isinstance(start, DiagonalGaussian):
                raise NumericsError("a latent with a cavity distribution needs a distribution to start from")
            mean, variance = start.moments()
            excess = 1.0 / variance - cavity.precision
            floor = 1e-2 * cavity.precision  # the logarithm needs a start above zero
            self.location = mean.clone().requires_grad_()
            self._raw_excess = (torch.maximum(excess, floor).log() / SCALE_SPEED).requires_grad_()
            self.parameters = [self.location, self._raw_excess]
        else:
            value = start.value if isinstance(start, Point) else start.mean()
            self.location = value.clone().requires_grad_(learn_point)
            self.parameters = [self.location] if learn_point else []

    def sample(self, epsilon: Tensor) -> Tensor:
        """Samples m + ε/√λ, [S, L]."""
        if isinstance(self._cavity, Point):
            return self.location.expand(len(epsilon), -1)
        return self.location + epsilon * self._precision().rsqrt()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variances of a distribution."""
        return self.location, 1.0 / self._precision()

    def kl(self) -> Tensor:
        """KL(q ‖ cavity), zero for a point."""
        return self.location.new_zeros(()) if isinstance(self._cavity, Point) else self._density().kl(self._cavity)

    def result(self) -> Latent:
        """The latent as learned, without a graph."""
        if isinstance(self._cavity, Point):
            return Point(self.location.detach().clone())
        density = self._density()
        return DiagonalGaussian(density.eta1.detach(), density.eta2.detach())

    def _precision(self) -> Tensor:
        assert isinstance(self._cavity, DiagonalGaussian)
        return self._cavity.precision + (SCALE_SPEED * self._raw_excess).exp()

    def _density(self) -> DiagonalGaussian:
        precision = self._precision()
        return DiagonalGaussian(precision * self.location, -0.5 * precision)


class TrainableFactor:
    """A site's factor being learned: V, m, and positive noise; or R and r of a CPO factor."""

    def __init__(self, start: Factor) -> None:
        self._start = start
        if isinstance(start, PseudoObservations):
            parts = [start.inputs, start.targets, _unconstrained(start.root)]
        else:
            root = _root(start.natural.precision)
            parts = [root, torch.linalg.lstsq(root, start.natural.eta1[:, None]).solution[:, 0]]
        self.parameters = [p.detach().clone().requires_grad_() for p in parts]

    def factor(self) -> Factor:
        """The factor at the current parameters."""
        if isinstance(self._start, PseudoObservations):
            inputs, targets, raw = self.parameters
            return replace(self._start, inputs=inputs, targets=targets, root=_constrained(raw))
        root, values = self.parameters
        return InducingFactor(NaturalGaussian(root @ values, -0.5 * root @ root.mT))

    def result(self) -> Factor:
        """The factor as learned, without a graph."""
        factor = self.factor()
        if isinstance(factor, InducingFactor):
            return InducingFactor(NaturalGaussian(factor.natural.eta1.detach(), factor.natural.eta2.detach()))
        fields = {name: getattr(factor, name).detach() for name in ("inputs", "targets", "root")}
        return replace(factor, **fields)


class _Objective:
    """E_q[local free energy] − α KL(q(Z)) − KL(q(β)) as a function of trainable parts."""

    def __init__(self, problem: LocalProblem, own: Factor, start: Latents, generator: Generator) -> None:
        self.problem = problem
        self.generator = generator
        self.own = TrainableFactor(own)
        learn = problem.learn_inducing
        self.inducing = TrainableLatent(problem.cavity.inducing, start.inducing, learn_point=learn)
        self.hyper = TrainableLatent(problem.cavity.hyper, start.hyper)
        self.parameters = [*self.own.parameters, *self.inducing.parameters, *self.hyper.parameters]

    def noise(self) -> tuple[Tensor, Tensor]:
        samples = self.problem.num_samples
        sizes = (len(self.inducing.location), len(self.hyper.location))
        return standard_normal(samples, sizes[0], self.generator), standard_normal(samples, sizes[1], self.generator)

    def batch(self) -> tuple[Data, float]:
        data, size = self.problem.data, self.problem.batch_size
        if not 0 < size < len(data):
            return data, 1.0
        return data.subset(torch.randperm(len(data), generator=self.generator)[:size]), len(data) / size

    def value(self, epsilon: tuple[Tensor, Tensor], data: Data, weight: float) -> Tensor:
        problem = self.problem
        inducing = self.inducing.sample(epsilon[0]).unflatten(-1, (-1, problem.model.num_inputs))
        draws = Draws(inducing, self.hyper.sample(epsilon[1]))
        local = local_free_energy(problem.model, draws, problem.others, self.own.factor(), data, weight=weight)
        return local.mean() - problem.alpha * self.inducing.kl() - self.hyper.kl()

    def update(self, trace: Trace, num_last: int) -> LocalUpdate:
        tail = trace.values[-num_last:]
        latents = Latents(self.inducing.result(), self.hyper.result())
        return LocalUpdate(self.own.result(), latents, sum(tail) / len(tail), trace)


def adam_update(
    problem: LocalProblem, own: Factor, start: Latents, settings: AdamSettings, generator: Generator
) -> LocalUpdate:
    """Local update by Adam from ``own`` and ``start``, on reparameterised antithetic samples, fresh at every step."""
    objective = _Objective(problem, own, start, generator)
    trace = adam(
        lambda: objective.value(objective.noise(), *objective.batch()),
        objective.parameters,
        settings,
        len(problem.data),
    )
    return objective.update(trace, max(1, len(trace.values) // 10))


def lbfgs_update(
    problem: LocalProblem, own: Factor, start: Latents, *, max_evaluations: int, generator: Generator
) -> LocalUpdate:
    """Local update by L-BFGS on samples that stay fixed: deterministic, for few samples and points."""
    objective = _Objective(problem, own, start, generator)
    epsilon = objective.noise()
    trace = maximise(
        lambda: objective.value(epsilon, problem.data, 1.0),
        objective.parameters,
        max_evaluations=max_evaluations,
        tolerance=1e-6,
        gradient_tolerance=1e-5,
    )
    return objective.update(trace, 1)


def first_latents(problem: LocalProblem, num_inducing: int, generator: Generator) -> Latents:
    """Where a first visit starts: q(Z) narrow around perturbed rows of the site, q(β) at the model's initial values.

    All-equal means are a saddle point: inducing points would never separate.
    """
    data, cavity = problem.data, problem.cavity
    inducing, hyper = cavity.inducing, cavity.hyper
    if isinstance(inducing, DiagonalGaussian):
        rows = torch.randint(len(data), (num_inducing,), generator=generator)
        jitter = torch.randn(num_inducing, data.inputs.shape[1], generator=generator, dtype=torch.float64)
        mean = (data.inputs[rows] + 0.3 * jitter).flatten()
        inducing = DiagonalGaussian.from_moments(mean, torch.full_like(mean, FIRST_VISIT_SCALE**2))
    if isinstance(hyper, DiagonalGaussian):
        mean = problem.model.initial_hyper()
        hyper = DiagonalGaussian.from_moments(mean, torch.full_like(mean, FIRST_VISIT_SCALE**2))
    return Latents(inducing, hyper)


def first_factor(
    model: SparseModel, data: Data, start: Latents, form: Form, *, num_points: int, min_rows: int
) -> Factor:
    """A factor that is close to the site's likelihood when q(Z) and q(β) are at the means of ``start``.

    Pseudo-observations are at most ``num_points``, each the average of at least ``min_rows`` rows.
    """
    if form == "cpo":
        return _at_the_optimum(model, data, start)
    gaussian = isinstance(model.likelihood, GaussianNoise)
    tied = microaggregate(data, num_points, min_rows)
    if not gaussian:
        values, precision = model.likelihood.as_function(tied.targets)
        tied = replace(
            tied, targets=values, root=precision.sqrt() * tied.root, residual=torch.zeros_like(tied.residual)
        )
    if form == "tied":
        return tied
    deviation = location_scale(start.hyper)[0][-1].exp() if gaussian else 1.0
    root = tied.root / deviation
    return PseudoObservations(tied.inputs, tied.targets, root.diag() if form == "full" else root, False, tied.count)


def _at_the_optimum(model: SparseModel, data: Data, start: Latents) -> InducingFactor:
    """Λ = L⁻ᵀAWAᵀL⁻¹ and η = L⁻ᵀAWy with W = 1/σ², Titsias' optimum at the means.

    Without a Gaussian likelihood y and W are what :meth:`PointLikelihood.as_function` makes of the targets.
    """
    inducing, hyper = (location_scale(latent)[0] for latent in (start.inducing, start.hyper))
    with torch.no_grad():
        geometry = model.geometry(Draws(inducing.reshape(1, -1, model.num_inputs), hyper[None]))
        values, precision = model.likelihood.as_function(data.targets)
        root = precision.sqrt() * geometry.noise.rsqrt()
        projection = geometry.project(data.inputs)[0] * root
        columns = torch.linalg.solve_triangular(geometry.chol[0].mT, projection, upper=True)  # L⁻ᵀAW^½
        eta1 = columns @ (precision.sqrt() * values) * geometry.noise.rsqrt()
        return InducingFactor(NaturalGaussian(eta1, -0.5 * columns @ columns.mT))


def _unconstrained(root: Tensor) -> Tensor:
    if root.ndim == 1:
        return root.log()
    return root.tril(-1) + root.diagonal().log().diag()


def _constrained(raw: Tensor) -> Tensor:
    return raw.exp() if raw.ndim == 1 else raw.tril(-1) + raw.diagonal().exp().diag()


def _root(precision: Tensor) -> Tensor:
    """R with R Rᵀ = Λ ⪰ 0, of full size so that it can grow where Λ is singular."""
    values, vectors = torch.linalg.eigh(precision)
    floor = 1e-6 * values[-1].clamp_min(1.0)
    root: Tensor = vectors * values.clamp_min(floor).sqrt()
    return root
