"""A site's local update: maximise the local free energy over its factor of u and its shares of q(Z) and q(β), by Adam.

Ashman et al. (2022), Algorithm 1, step 2, as in *Federated learning of sparse Gaussian processes*, Algorithms 1 and 2,
Eq. 7 with weight α on the KL of Z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import GaussianNoise
from fedgp_flower.gp.optimisers import AdamSettings, Trace, adam
from fedgp_flower.methods.pvi.model import (
    ALPHA,
    Data,
    Draws,
    Factor,
    InducingFactor,
    Latent,
    Latents,
    Point,
    PseudoObservations,
    SparseModel,
    local_free_energy,
    location_scale,
    standard_normal,
)
from fedgp_flower.methods.pvi.options import Form
from fedgp_flower.typing import Array

SCALE_SPEED = 4.0
"""Log-precisions travel several units, means a fraction of one: Adam's step is this much longer for them."""
SAMPLES = 4
"""Antithetic draws of (Z, β) in an evaluation."""
MOST_POINTS, ROWS_PER_POINT = 500, 5
"""Pseudo-observations of a site, at most, and the rows that each begins as the average of, at least: averages are not
rows."""
ADAM_STEPS, ADAM_RATE = 150, 0.03
"""Where ``pvi.steps`` and ``pvi.learning-rate`` are 0."""


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """Everything a local update by optimisation conditions on."""

    model: SparseModel
    data: Data
    others: Sequence[Factor]
    """Factors of the other sites."""
    cavity: Latents
    """Cavities of Z and β; a :class:`Point` where the latent is not a distribution."""
    alpha: float = ALPHA
    num_samples: int = SAMPLES
    batch_size: int = 0
    """Rows of a mini-batch; 0 takes all rows."""
    learn_inducing: bool = False
    """Optimise Z where it is a point (federated averaging of Z) instead of keeping it."""


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """A site's answer."""

    factor: Factor
    latents: Latents
    """q_k(Z) and q_k(β); divided by the cavity they are the site's factors."""
    free_energy: float
    """Mean objective over the last tenth of the steps, in nats."""
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
            parts = [start.inputs, start.targets, start.root.log()]
        else:
            root = _root(start.natural.precision)
            parts = [root, torch.linalg.lstsq(root, start.natural.eta1[:, None]).solution[:, 0]]
        self.parameters = [p.detach().clone().requires_grad_() for p in parts]

    def factor(self) -> Factor:
        """The factor at the current parameters."""
        if isinstance(self._start, PseudoObservations):
            inputs, targets, log_root = self.parameters
            return replace(self._start, inputs=inputs, targets=targets, root=log_root.exp())
        root, values = self.parameters
        return InducingFactor(NaturalGaussian(root @ values, -0.5 * root @ root.mT))

    def result(self) -> Factor:
        """The factor as learned, without a graph."""
        factor = self.factor()
        if isinstance(factor, InducingFactor):
            return InducingFactor(NaturalGaussian(factor.natural.eta1.detach(), factor.natural.eta2.detach()))
        fields = {name: getattr(factor, name).detach() for name in ("inputs", "targets", "root")}
        return replace(factor, **fields)


def adam_update(
    problem: LocalProblem, before: Factor, start: Latents, settings: AdamSettings, generator: Generator
) -> LocalUpdate:
    """Local update by Adam from ``before`` and ``start``, on reparameterised antithetic samples, new at every step."""
    model, data, size = problem.model, problem.data, problem.batch_size
    factor = TrainableFactor(before)
    inducing = TrainableLatent(problem.cavity.inducing, start.inducing, learn_point=problem.learn_inducing)
    hyper = TrainableLatent(problem.cavity.hyper, start.hyper)

    def objective() -> Tensor:
        noise = [standard_normal(problem.num_samples, len(q.location), generator) for q in (inducing, hyper)]
        rows, weight = data, 1.0
        if 0 < size < len(data):
            rows = data.subset(torch.randperm(len(data), generator=generator)[:size])
            weight = len(data) / size
        z = inducing.sample(noise[0]).unflatten(-1, (-1, model.num_inputs))
        draws = Draws(z, hyper.sample(noise[1]))
        fit = local_free_energy(model, draws, problem.others, factor.factor(), rows, weight=weight).mean()
        return fit - problem.alpha * inducing.kl() - hyper.kl()

    trace = adam(objective, [*factor.parameters, *inducing.parameters, *hyper.parameters], settings, len(data))
    tail = trace.values[-max(1, len(trace.values) // 10) :]
    return LocalUpdate(factor.result(), Latents(inducing.result(), hyper.result()), sum(tail) / len(tail), trace)


def first_factor(
    model: SparseModel, data: Data, start: Latents, form: Form, *, most: int = MOST_POINTS, least: int = ROWS_PER_POINT
) -> Factor:
    """A factor that is close to the site's likelihood when q(Z) and q(β) are at the means of ``start``.

    There are at most ``most`` pseudo-observations, each the average of at least ``least`` rows.
    """
    if form == "cpo":
        return _at_the_optimum(model, data, start)
    points = averages(data, max(1, min(most, len(data) // least)))
    gaussian = isinstance(model.likelihood, GaussianNoise)
    if not gaussian:
        values, precision = model.likelihood.as_function(points.targets)
        points = replace(points, targets=values, root=precision.sqrt() * points.root)
    if form == "tied":
        return points
    deviation = location_scale(start.hyper)[0][-1].exp() if gaussian else 1.0
    return replace(points, root=points.root / deviation, tied=False)


def averages(data: Data, number: int) -> PseudoObservations:
    """Tied pseudo-observations at averages of disjoint groups of rows; the mean of n rows has noise σ²/n, so w = n."""
    groups = torch.as_tensor(_groups(data.inputs.numpy(), number))
    sizes = torch.bincount(groups).double()
    centres = torch.zeros(len(sizes), data.inputs.shape[1], dtype=torch.float64).index_add_(0, groups, data.inputs)
    means = torch.zeros_like(sizes).index_add_(0, groups, data.targets) / sizes
    return PseudoObservations(centres / sizes[:, None], means, sizes.sqrt())


def _groups(inputs: Array, number: int) -> NDArray[np.int64]:
    """Cut along the widest direction, rows in proportion to groups, until every part is one group: labels [N]."""
    labels = np.empty(len(inputs), dtype=np.int64)
    queue = [(np.arange(len(inputs)), number)]
    label = 0
    while queue:
        rows, groups = queue.pop()
        if groups == 1:
            labels[rows] = label
            label += 1
            continue
        centred = inputs[rows] - inputs[rows].mean(0)
        direction = np.linalg.svd(centred, full_matrices=False)[2][0]
        order = rows[np.argsort(centred @ direction, kind="stable")]
        cut = len(rows) * (groups // 2) // groups  # rows per group never fall below the floor on either side
        queue += [(order[:cut], groups // 2), (order[cut:], groups - groups // 2)]
    return labels


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


def _root(precision: Tensor) -> Tensor:
    """R with R Rᵀ = Λ ⪰ 0, of full size so that it can grow where Λ is singular."""
    values, vectors = torch.linalg.eigh(precision)
    floor = 1e-6 * values[-1].clamp_min(1.0)
    root: Tensor = vectors * values.clamp_min(floor).sqrt()
    return root
