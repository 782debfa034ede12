"""A site's local update (Ashman et al. 2022, Algorithm 1, step 2).

By Adam or L-BFGS it maximises the local free energy over the site's factor of u and its shares of q(Z) and q(β), as in
*Federated learning of sparse Gaussian processes*, Algorithms 1 and 2, Eq. 7 with weight α on the KL of Z.

If f = Φθ with Gaussian θ (weights, or v = L⁻¹u at fixed Z and β), an update returns the factor that multiplies the
site's *context* (cavity, or prior). With α = ∂/∂m and β = −2 ∂/∂v of E log p(y_n | f_n), f_n ~ N(m_n, v_n), the factor
at a stationary q is ∇_μ E_q log p(y | θ), μ the mean parameters of q:
Λ = Φᵀ diag(β) Φ and η = Φᵀα + Λ E θ (Khan & Lin 2017; Ashman et al., Properties 2.2, 3.1-3.3, Eq. 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.cells import LEAST_ROWS, grouped
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.likelihoods import PointLikelihood
from fedgp_flower.gp.optimisers import adam, maximise
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
ADAM_STEPS, ADAM_RATE, LBFGS_EVALUATIONS = 150, 0.03, 400
"""Defaults of ``pvi.steps`` and ``pvi.learning-rate``."""
TOLERANCE, MOST_ITERATIONS = 1e-10, 500
"""Fixed-point iterations stop at this relative change of the factor, or after this number."""


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
    """Result of a local update; its free energy is the mean of Adam's last steps, or the final value of L-BFGS."""

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
    rows = len(problem.data)
    return _update(problem, before, start, generator, lambda f, x: adam(f, x, rows, steps, learning_rate))


def lbfgs_update(
    problem: LocalProblem, before: Factor, start: Marginals, evaluations: int, generator: Generator
) -> LocalUpdate:
    """Local update by L-BFGS on fixed samples, for few samples and pseudo-observations."""
    state = generator.get_state()

    def optimise(objective: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[float]:
        def value() -> Tensor:
            generator.set_state(state)
            return objective()

        return maximise(value, parameters, max_evaluations=evaluations, tolerance=1e-6, gradient_tolerance=1e-5)

    done = _update(problem, before, start, generator, optimise)
    return replace(done, free_energy=done.values[-1])


def _update(
    problem: LocalProblem,
    before: Factor,
    start: Marginals,
    generator: Generator,
    optimise: Callable[[Callable[[], Tensor], Sequence[Tensor]], list[float]],
) -> LocalUpdate:
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

    values = optimise(objective, [*free, *inducing.parameters, *hyper.parameters])
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


# ---- Linear functions of θ ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearRows:
    """A site's rows with f = Φθ."""

    design: Float[Tensor, "N M"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""
    extra: Float[Tensor, " N"] | float = 0.0
    """Variance of f given θ."""

    def marginals(self, q: Gaussian) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Means and variances of f."""
        mean, covariance = q.moments()
        phi = self.design
        spread = (phi @ covariance * phi).sum(-1) if q.full else phi.square() @ covariance
        return phi @ mean, spread + self.extra

    def fit(self, q: Gaussian) -> Tensor:
        """E_q log p(y | f), in nats."""
        return self.likelihood.expected(self.targets, *self.marginals(q), self.hyper).sum()

    def free_energy(self, q: Gaussian, context: Gaussian) -> Tensor:
        """F_k(q) = E_q log p(y_k | f) − KL(q ‖ context), in nats (Eq. 2 with a normalised cavity)."""
        return self.fit(q) - q.kl(context)

    def expansion(self, q: Gaussian) -> tuple[Tensor, Gaussian, Float[Tensor, "M M"]]:
        """E_q log p(y | f); ∇_μ of it, the factor at a fixed point (Eq. 4); and Φᵀ diag(β) Φ."""
        fit, alpha, beta, _ = self.likelihood.slopes(self.targets, *self.marginals(q), self.hyper)
        curvature, mean = self.design.mT @ (beta[:, None] * self.design), q.mean()
        factor = Gaussian.around(mean, curvature if q.full else curvature.diagonal())
        return fit, replace(factor, eta1=self.design.mT @ alpha + factor.eta1), curvature


def whitened_rows(model: SparseModel, data: Data, q: Marginals) -> LinearRows:
    """The site's rows as functions of v, at the means of Z and β."""
    draws = model.at_means(q)
    with torch.no_grad():
        projection = draws.project(data.inputs)[0]
        extra = draws.prior_variance(data.inputs)[0] - projection.square().sum(0)
        return LinearRows(projection.mT, data.targets, model.likelihood, draws.likelihood_hyper[0], extra)


def fixed_point(rows: LinearRows, context: Gaussian, start: Gaussian, *, step: float = 1.0) -> tuple[Gaussian, int]:
    """Natural-gradient ascent t ← t^(1−ρ) (∇_μ E_q log p(y_k | v))^ρ with q = context · t; and the number of steps."""
    factor, iterations, change, size = start, 0, float("inf"), 1.0
    while change >= TOLERANCE * size and iterations < MOST_ITERATIONS:
        iterations += 1
        target, rho = rows.expansion(context * factor)[1], step
        while not (context * (new := factor ** (1.0 - rho) * target**rho)).is_proper():
            rho *= 0.5
            if rho < 1e-10:
                raise NumericsError("every fixed-point step gives an improper posterior. Lower the step.")
        change = max(float((new.eta1 - factor.eta1).abs().max()), float((new.eta2 - factor.eta2).abs().max()))
        size, factor = max(float(new.eta1.abs().max()), float(new.eta2.abs().max())), new
    return factor, iterations


def gradient_step(rows: LinearRows, q: Gaussian, context: Gaussian, start: Gaussian, *, step: float) -> Gaussian:
    """η_k ← η_k + ρ dF_k/dη at q (Property 3.1); all sites together make one pooled step."""
    with torch.enable_grad():
        eta1, eta2 = (part.detach().requires_grad_() for part in (q.eta1, q.eta2))
        energy = rows.free_energy(Gaussian(eta1, eta2), context)
        slope1, slope2 = torch.autograd.grad(energy, (eta1, eta2))
    return start * Gaussian(step * slope1, 0.5 * step * (slope2 + slope2.mT))
