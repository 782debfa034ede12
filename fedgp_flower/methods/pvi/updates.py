"""A site's local update by Adam (Ashman et al. 2022, Algorithm 1, step 2).

It maximises the local free energy over the site's factor of u and its shares of q(Z) and q(β), as in *Federated
learning of sparse Gaussian processes*, Algorithms 1 and 2, Eq. 7 with weight α on the KL of Z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgp_flower.gp.cells import LEAST_ROWS, grouped
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.optimisers import adam
from fedgp_flower.methods.pvi.messages import LATENTS, LatentFactor, Marginals
from fedgp_flower.methods.pvi.model import (
    ALPHA,
    Data,
    Draws,
    Factor,
    PseudoObservations,
    SparseModel,
    local_free_energy,
    standard_normal,
)
from fedgp_flower.methods.pvi.options import Form

SCALE_SPEED = 4.0
"""Factor of Adam's step for log-precisions, which move by several units, while means move by a fraction of one."""
SAMPLES = 4
"""Antithetic draws of (Z, β) in an evaluation."""
ADAM_STEPS, ADAM_RATE = 150, 0.03
"""Defaults of ``pvi.steps`` and ``pvi.learning-rate``."""


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """Model, data and cavity of a local update by optimisation."""

    model: SparseModel
    data: Data
    others: Sequence[Factor]
    """Factors of the other sites."""
    cavity: Mapping[str, Gaussian]
    """Cavities of Z and β by name; a latent without one is a point."""
    alpha: float = ALPHA
    num_samples: int = SAMPLES
    batch_size: int = 0
    """Rows of a mini-batch; 0 takes all rows."""
    learn_inducing: bool = False
    """Whether to optimise a point Z, which the server averages."""


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """Result of a local update; its free energy is the mean of the last steps."""

    factor: Factor
    latents: Mapping[str, TrainableLatent]
    free_energy: float
    values: list[float]
    """The objective in each evaluation."""


class TrainableLatent:
    """A latent in optimisation: free mean, precision above that of the cavity; without a cavity a point."""

    def __init__(self, cavity: Gaussian | None, mean: Tensor, variance: Tensor, *, learned: bool = True) -> None:
        self.cavity = cavity
        self.location = mean.clone().requires_grad_(learned)
        self.parameters = [self.location] if learned else []
        if cavity is not None:
            excess = 1.0 / variance - cavity.precision
            floor = 1e-2 * cavity.precision  # the logarithm needs a positive start
            self.parameters.append((torch.maximum(excess, floor).log() / SCALE_SPEED).requires_grad_())

    def density(self) -> Gaussian:
        """The distribution at the current parameters."""
        assert self.cavity is not None
        precision = self.cavity.precision + (SCALE_SPEED * self.parameters[1]).exp()
        return Gaussian.around(self.location, precision)

    def sample(self, epsilon: Tensor) -> Tensor:
        """Samples m + ε/√λ, [S, L]."""
        if self.cavity is None:
            return self.location.expand(len(epsilon), -1)
        return self.location + epsilon * self.density().precision.rsqrt()

    def kl(self) -> Tensor:
        """KL(q ‖ cavity), zero for a point."""
        return self.location.new_zeros(()) if self.cavity is None else self.density().kl(self.cavity)

    def answer(self) -> LatentFactor | None:
        """The factor q / cavity, the learned point, or None for a fixed point."""
        if self.cavity is not None:
            return LatentFactor.of(self.density() / self.cavity)
        return LatentFactor(value=self.location.detach().numpy().copy()) if self.parameters else None


def late_mean(values: Sequence[float]) -> float:
    """The mean objective over the last tenth of the steps."""
    tail = values[-max(1, len(values) // 10) :]
    return sum(tail) / len(tail)


def adam_update(
    problem: LocalProblem,
    before: Factor,
    start: Marginals,
    steps: int,
    generator: Generator,
    learning_rate: float = ADAM_RATE,
) -> LocalUpdate:
    """Local update by Adam from ``before`` and ``start``, with new antithetic samples at every step."""
    model, data, size = problem.model, problem.data, problem.batch_size
    free = [parameter.detach().clone().requires_grad_() for parameter in before.free()]
    latents = {}
    for name, q in zip(LATENTS, (start.inducing, start.hyper), strict=True):
        cavity = problem.cavity.get(name)
        learned = cavity is not None or (name == "inducing" and problem.learn_inducing)
        latents[name] = TrainableLatent(cavity, *q.moments(), learned=learned)
    inducing, hyper = latents.values()

    def objective() -> Tensor:
        noise = [standard_normal(problem.num_samples, len(q.location), generator) for q in (inducing, hyper)]
        rows, weight = data, 1.0
        if 0 < size < len(data):
            chosen = torch.randperm(len(data), generator=generator)[:size]
            rows, weight = Data(data.inputs[chosen], data.targets[chosen]), len(data) / size
        z = inducing.sample(noise[0]).unflatten(-1, (-1, model.num_inputs))
        draws = Draws(model, z, hyper.sample(noise[1]))
        fit = local_free_energy(draws, problem.others, before.at(free), rows, weight=weight).mean()
        return fit - problem.alpha * inducing.kl() - hyper.kl()

    parameters = [*free, *inducing.parameters, *hyper.parameters]
    values = adam(objective, parameters, len(data), steps, learning_rate)
    return LocalUpdate(before.at(free), latents, late_mean(values), values)


def first_factor(model: SparseModel, data: Data, start: Marginals, form: Form, least: int = LEAST_ROWS) -> Factor:
    """Initial factor at the means of q(Z) and q(β): averages of rows, or Titsias' optimum for ``cpo``."""
    with torch.no_grad():
        draws = model.at_means(start)
        points = PseudoObservations(data.inputs, data.targets, torch.ones_like(data.targets))
        if form != "cpo":
            points = averages(data, least)
        values, precision = model.likelihood.as_function(points.targets)
        points = replace(points, targets=values, root=precision.sqrt() * points.root)
        if form == "cpo":
            return points.unwhitened(draws)
        return points if form == "tied" else replace(points, root=points.root * draws.noise.rsqrt(), tied=False)


def averages(data: Data, least: int) -> PseudoObservations:
    """Tied pseudo-observations at averages of :func:`grouped` rows; the mean of n rows has noise σ²/n, so w = n."""
    groups = torch.from_numpy(grouped(data.inputs.numpy(), least))
    sizes = torch.bincount(groups).double()
    centres = torch.zeros(len(sizes), data.inputs.shape[1], dtype=torch.float64).index_add_(0, groups, data.inputs)
    means = torch.zeros_like(sizes).index_add_(0, groups, data.targets) / sizes
    return PseudoObservations(centres / sizes[:, None], means, sizes.sqrt())
