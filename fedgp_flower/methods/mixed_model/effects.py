"""The marginal likelihood of a site's rows, with the random effects integrated out.

With u ~ N(0, I) and random effects b = Λ(θ) u, the linear predictors are η = Xβ + offset + Z Λ u. The inner factor is
the one with the most levels. Given the other factors, its groups are independent, so the conditional precision of u is
an arrow matrix,

    H = [[I + Λ_aᵀ A Λ_a, Λ_aᵀ B Λ_d], [·, I + Λ_dᵀ C Λ_d]],    A = Z_aᵀ W Z_a by group, B = Z_aᵀ W Z_d, C = Z_dᵀ W Z_d,

with one block for each group of the inner factor (a) and one dense block for the levels of all other factors (d). W is
the diagonal matrix of the weights of the rows, −∂² log p(y | η)/∂η².
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad, grad_and_value, jacfwd, jacrev, vmap

from fedgp_flower.errors import DataError, NumericsError
from fedgp_flower.gp.likelihoods.integrals import hermite_rule
from fedgp_flower.methods.mixed_model.smooth import NONE, Smooths
from fedgp_flower.typing import Scalar

NODES = {1: 25, 2: 11, 3: 7}
"""Gauss–Hermite nodes in each dimension, by the number of random effects of a group.

More effects, and several factors, use one node: the Laplace approximation.
"""
MOST = 30_000_000
"""Largest number of entries of an array: of the blocks of H, and of the batches of trials and of quadrature nodes."""
MODE_STEPS, SETTLED = 100, 1e-10
STRIDE = 1e-4
"""Step of finite differences along a direction."""
TOGETHER = 8
"""Largest number of trials in one batch."""
LOG_2PI = math.log(2 * math.pi)
Parts: TypeAlias = tuple[Tensor, Tensor]
"""The part of the inner factor, often [G, q, …], and the part of all other factors [D, …]."""


@dataclass(frozen=True, slots=True)
class Family:
    """A likelihood as functions of y and η: log p(y | η), the slope ∂/∂η and the weight −∂²/∂η²."""

    log_density: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, Tensor], Tensor]
    initial: Callable[[Tensor, Tensor], Tensor]
    """An initial η of each row from y and the offset."""


GAUSSIAN = Family(
    lambda y, eta: -0.5 * (y - eta).square(),
    lambda y, eta: y - eta,
    lambda y, eta: torch.ones_like(eta),
    lambda y, offset: y - offset,
)
BERNOULLI = Family(
    lambda y, eta: y * eta - torch.nn.functional.softplus(eta),
    lambda y, eta: y - torch.sigmoid(eta),
    lambda y, eta: torch.sigmoid(eta) * torch.sigmoid(-eta),
    lambda y, offset: 4 * y - 2 - offset,
)
POISSON = Family(
    lambda y, eta: y * eta - eta.exp() - torch.lgamma(y + 1),
    lambda y, eta: y - eta.exp(),
    lambda y, eta: eta.exp(),
    lambda y, offset: (y + 0.5).log() - offset,
)


def overdispersed(log_dispersion: Float[Tensor, " 1"]) -> Family:
    """Negative binomial counts with mean μ = e^η, variance μ + μ²/r and dispersion 1/r."""
    log_r = -log_dispersion[0]
    r = log_r.exp()

    def log_density(y: Tensor, eta: Tensor) -> Tensor:
        log_odds = eta - log_r
        log_binomial = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
        return log_binomial + y * log_odds - (y + r) * torch.nn.functional.softplus(log_odds)

    return Family(
        log_density,
        lambda y, eta: y - (y + r) * torch.sigmoid(eta - log_r),
        lambda y, eta: (y + r) * torch.sigmoid(eta - log_r) * torch.sigmoid(log_r - eta),
        POISSON.initial,
    )


FAMILIES: dict[str, Callable[[Tensor], Family]] = {
    "gaussian": lambda shape: GAUSSIAN,
    "bernoulli": lambda shape: BERNOULLI,
    "poisson": lambda shape: POISSON,
    "negative-binomial": overdispersed,
}
"""Families by ``model.likelihood``, as functions of the shape parameters."""
SHAPES = {"negative-binomial": (math.log(0.3),)}
"""Initial shape parameters by ``model.likelihood``; other likelihoods have none."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A grouping factor of N rows, with the columns of its random effects."""

    level: Int[Tensor, " N"]
    """The group of each row, from 0; −1 for a new group."""
    count: int
    """The number of groups."""
    effects: Float[Tensor, "N q"]
    terms: tuple[int, ...]
    """The random terms of the formula that have this factor."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The layout of θ: the lower triangle of the Cholesky factor of each random term, row by row."""

    widths: tuple[int, ...]
    """The number of random effects of each term."""

    @property
    def count(self) -> int:
        """The length of θ."""
        return sum(q * (q + 1) // 2 for q in self.widths)

    @property
    def alone(self) -> list[int]:
        """The positions in θ of the terms with one effect."""
        starts = itertools.accumulate((q * (q + 1) // 2 for q in self.widths), initial=0)
        return [start for q, start in zip(self.widths, starts, strict=False) if q == 1]

    def factors(self, theta: Float[Tensor, " T"]) -> list[Tensor]:
        """The Cholesky factor [q, q] of the whitened relative covariance of each term."""
        factors = []
        for q, part in zip(self.widths, theta.split([q * (q + 1) // 2 for q in self.widths]), strict=True):
            rows, columns = torch.tril_indices(q, q)
            factors.append(part.new_zeros(q, q).index_put((rows, columns), part))
        return factors

    @property
    def first(self) -> Tensor:
        """The θ of identity covariances."""
        return torch.cat(
            [torch.eye(q)[tuple(torch.tril_indices(q, q))] for q in self.widths] or [torch.zeros(0)]
        ).double()


class Arrow:
    """The Cholesky factor C of H, from A [G, q, q], B [G, q, D], C [D, D] and (Λ_a, Λ_d)."""

    def __init__(self, blocks: Tensor, across: Tensor, rest: Tensor, scales: Parts) -> None:
        inner, dense = scales  # Λ_a, Λ_d
        self.blocks = torch.linalg.cholesky(torch.eye(len(inner)).to(inner) + inner.mT @ blocks @ inner)
        self.across = torch.linalg.solve_triangular(self.blocks, inner.mT @ across @ dense, upper=False)
        whole = torch.eye(len(dense)).to(dense) + dense.mT @ rest @ dense
        self.dense = torch.linalg.cholesky(whole - torch.einsum("gqd,gqe->de", self.across, self.across))

    @property
    def log_determinant(self) -> Scalar:
        """Log |H|."""
        return 2 * sum(part.diagonal(dim1=-2, dim2=-1).log().sum() for part in (self.blocks, self.dense))

    def whitened(self, blocks: Float[Tensor, "G q m"], rest: Float[Tensor, "D m"]) -> Parts:
        """C⁻¹ v with C Cᵀ = H."""
        first = torch.linalg.solve_triangular(self.blocks, blocks, upper=False)
        remainder = rest - torch.einsum("gqd,gqm->dm", self.across, first)
        return first, torch.linalg.solve_triangular(self.dense, remainder, upper=False)

    def solved(self, first: Float[Tensor, "G q m"], second: Float[Tensor, "D m"]) -> Parts:
        """C⁻ᵀ w, which is H⁻¹ v for w = C⁻¹ v."""
        rest = torch.linalg.solve_triangular(self.dense.mT, second, upper=True)
        return torch.linalg.solve_triangular(self.blocks.mT, first - self.across @ rest, upper=True), rest


class Crossed:
    """Rows of a site: whitened fixed effects [N, E], offset [N], targets [N] and grouping factors.

    Raises DataError if the crossed factors need arrays of more than :data:`MOST` entries.
    """

    def __init__(
        self,
        terms: Terms,
        fixed: Float[Tensor, "N E"],
        offset: Float[Tensor, " N"],
        y: Float[Tensor, " N"],
        factors: Sequence[Factor],
    ) -> None:
        self.terms, self.fixed, self.offset, self.y = terms, fixed, offset, y
        self.order = sorted(range(len(factors)), key=lambda k: -factors[k].count)
        """The factors in decreasing order of their number of groups."""
        ordered = [factors[k] for k in self.order]
        self.inner, self.others = (ordered or [no_factor(fixed)])[0], ordered[1:]
        width = sum(factor.count * factor.effects.shape[1] for factor in self.others)
        of_blocks = self.inner.count * max(1, self.inner.effects.shape[1]) * (width + fixed.shape[1] + 1)
        if max(of_blocks, len(y) * width) > MOST:
            raise DataError(
                f"`formula`: {self.inner.count} groups crossed with {width} random effects need too much memory"
            )

    @cached_property
    def dense(self) -> Float[Tensor, "N D"]:
        """Z_d of the factors other than the inner one."""
        return indicators(self.others, self.fixed)

    def root(self, factor: Factor, theta: Float[Tensor, " T"]) -> Float[Tensor, "q q"]:
        """The Cholesky factor of the relative covariance of the effects of a group."""
        roots = self.terms.factors(theta)
        return torch.block_diag(*(roots[k] for k in factor.terms)) if factor.terms else theta.new_zeros(0, 0)

    def scales(self, theta: Float[Tensor, " T"]) -> Parts:
        """Λ_a and Λ_d."""
        parts = [torch.kron(torch.eye(f.count).to(theta), self.root(f, theta)) for f in self.others]
        return self.root(self.inner, theta), torch.block_diag(*parts) if parts else theta.new_zeros(0, 0)

    def by_group(self, rows: Tensor) -> Tensor:
        """The sum of rows [N, …] over each group of the inner factor [G, …]."""
        return rows.new_zeros(self.inner.count, *rows.shape[1:]).index_add(0, self.inner.level[: len(rows)], rows)

    def sides(self, rows: Float[Tensor, "N m"]) -> Parts:
        """Z_aᵀ rows by group [G, q, m], and Z_dᵀ rows [D, m]."""
        empty = rows.new_zeros(0, 0, rows.shape[1])
        inner = self.by_group(self.inner.effects[:, :, None] * rows[:, None]) if self.inner.terms else empty
        return inner, self.dense.mT @ rows

    def scaled_sides(self, rows: Float[Tensor, "N m"], scales: Parts) -> Parts:
        """Λᵀ Zᵀ rows."""
        blocks, rest = self.sides(rows)
        return scales[0].mT @ blocks, scales[1].mT @ rest

    def arrow(self, weight: Float[Tensor, " N"], scales: Parts) -> Arrow:
        """The Cholesky factor of H for the weights of the rows."""
        blocks, _ = self.sides(weight[:, None] * self.inner.effects)
        return Arrow(blocks, *self.sides(weight[:, None] * self.dense), scales)

    def predictor(self, scales: Parts, u: Parts) -> Float[Tensor, " N"]:
        """Z Λ u."""
        inner = (self.inner.effects * (u[0] @ scales[0].mT)[self.inner.level]).sum(1) if self.inner.terms else 0.0
        return inner + self.dense @ (scales[1] @ u[1])


def no_factor(rows: Float[Tensor, "N _"]) -> Factor:
    """A factor without groups."""
    return Factor(torch.zeros(len(rows), dtype=torch.int64), 0, rows[:, :0], ())


def indicators(factors: Sequence[Factor], rows: Float[Tensor, "N _"]) -> Float[Tensor, "N D"]:
    """A column for each random effect of each group of some factors; new groups have zeros."""
    levels = [torch.nn.functional.one_hot(f.level + 1, f.count + 1)[:, 1:].to(rows) for f in factors]
    parts = [(level[:, :, None] * f.effects[:, None]).flatten(1) for f, level in zip(factors, levels, strict=True)]
    return torch.cat([rows[:, :0], *parts], dim=1)


def restricted_sums(
    rows: Crossed, theta: Float[Tensor, " T"], features: Callable[[Tensor], list[Tensor]] = lambda lengths: []
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [Q] of the restricted likelihood, and their derivatives [T, Q] and [T, T, Q] by θ and log ℓ.

    The sums are log|V| with V = I + ZΛΛᵀZᵀ, the lower triangle of [Φ X y]ᵀ V⁻¹ [Φ X y], and R = Σ_n 1 − |φ_n|² of each
    smooth term. Φ are the features of smooth terms at lengthscales ℓ.
    """
    blocks, _ = rows.sides(rows.inner.effects)
    across, rest = rows.sides(rows.dense)

    def at(point: Float[Tensor, " T"]) -> Float[Tensor, " Q"]:
        parts = features(point[rows.terms.count :])
        r = torch.cat([*parts, rows.fixed, (rows.y - rows.offset)[:, None]], dim=1)
        scales = rows.scales(point[: rows.terms.count])
        arrow = Arrow(blocks, across, rest, scales)
        lower = torch.tril_indices(r.shape[1], r.shape[1])
        first, second = arrow.whitened(*rows.scaled_sides(r, scales))
        products = r.mT @ r - torch.einsum("gqm,gqn->mn", first, first) - second.mT @ second
        unexplained = [(1 - part.square().sum(1)).sum()[None] for part in parts]
        return torch.cat([arrow.log_determinant[None], products[lower[0], lower[1]], *unexplained])

    if not len(theta):
        value = at(theta)
        return value, value.new_zeros(0, len(value)), value.new_zeros(0, 0, len(value))

    def slopes(point: Float[Tensor, " T"]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        slope, value = jacfwd(lambda near: (at(near),) * 2, has_aux=True)(point)
        return slope, (value, slope)

    curvature, (value, slope) = jacfwd(slopes, has_aux=True)(theta)
    return value, slope.mT, curvature.permute(1, 2, 0)


def derivatives(
    rows: Crossed,
    family: Callable[[Tensor], Family],
    points: Float[Tensor, "K P"],
    smooth: Smooths = NONE,
    inputs: Sequence[Tensor] = (),
    turns: Float[Tensor, "D P"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "K D Q"]]:
    """Log p(y | ψ) [K], gradients [K, P], Hessians [K, P, P], and derivatives of the Hessian by v, at points ψ [K, P].

    ψ = (v, β, θ, log ℓ, a, shape), with v the weights of the features a φ of smooth terms. ``turns`` are D/2
    displacements, then their negatives. Finite differences give the last result: first, then second derivatives of the
    lower triangle of the Hessian by v along each displacement, per step :data:`STRIDE`.
    """
    parts = partial(split, rows, family, smooth, inputs)

    def at(point: Float[Tensor, " P"], *mode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def value(near: Float[Tensor, " P"]) -> Scalar:
            marginal, fixed, theta, unexplained, _ = parts(near)
            return marginal.log_evidence(fixed, theta, (mode[0], mode[1]), unexplained)

        def slope(near: Float[Tensor, " P"]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, evidence = grad_and_value(value)(near)
            return gradient, (evidence, gradient)

        curvature, (evidence, gradient) = jacrev(slope, has_aux=True)(point)  # forward mode is slow on small arrays
        return evidence, gradient, curvature

    def by_weights(point: Float[Tensor, " P"], *mode: Tensor) -> Float[Tensor, "V V"]:
        marginal, fixed, theta, unexplained, weighted = parts(point)

        def value(change: Float[Tensor, " V"]) -> Scalar:
            return marginal.log_evidence(fixed + weighted @ change, theta, (mode[0], mode[1]), unexplained)

        return jacrev(grad(value))(point.new_zeros(weighted.shape[1]))

    centres = [parts(point)[:3] for point in points]
    modes = [torch.stack(part) for part in zip(*(one.mode(fixed, theta) for one, fixed, theta in centres), strict=True)]
    width = rows.inner.effects.shape[1]
    entries = len(rows.y) * NODES.get(width, 1) ** width * points.shape[1]
    batched = partial(vmap, chunk_size=min(TOGETHER, 1 + MOST // entries))
    values, gradients, hessians = batched(at)(points, *modes)
    lower = torch.tril_indices(sum(smooth.widths), sum(smooth.widths))
    if turns is None or not len(turns):
        return values, gradients, hessians, points.new_zeros(len(points), 0, lower.shape[1])
    near = points[:, None] + torch.cat([turns.new_zeros(1, points.shape[1]), turns])
    found = batched(by_weights)(near.flatten(0, 1), *(mode.repeat_interleave(1 + len(turns), dim=0) for mode in modes))
    triangles = found[:, lower[0], lower[1]].unflatten(0, near.shape[:2])
    middle, up, down = triangles.split([1, len(turns) // 2, len(turns) // 2], dim=1)
    bends = torch.cat([(up - down) / (2 * STRIDE), (up + down - 2 * middle) / STRIDE**2], dim=1)
    return values, gradients, hessians, bends


def split(
    rows: Crossed,
    family: Callable[[Tensor], Family],
    smooth: Smooths,
    inputs: Sequence[Tensor],
    point: Float[Tensor, " P"],
) -> tuple[Marginal, Tensor, Tensor, Tensor, Float[Tensor, "N V"]]:
    """The parts of the log likelihood at ψ, the last of which are the features a φ of all smooth terms.

    The others are the arguments of :meth:`Marginal.log_evidence` except the mode.
    """
    sizes = [sum(smooth.widths), rows.fixed.shape[1], rows.terms.count, sum(smooth.lengths), len(smooth.terms)]
    v, beta, theta, lengths, amplitudes, shape = point.split([*sizes, len(point) - sum(sizes)])
    features = smooth.features(inputs, lengths)
    weighted = [a * phi for a, phi in zip(amplitudes, features, strict=True)]
    matrix = torch.cat([rows.fixed[:, :0], *weighted], dim=1)
    fixed = rows.offset + rows.fixed @ beta + matrix @ v
    return Marginal(rows, family(shape)), fixed, theta, smooth.unexplained(features, amplitudes, len(fixed)), matrix


class Marginal:
    """The marginal likelihood of a site's rows, log ∫ p(y | η) N(u | 0, I) du."""

    def __init__(self, rows: Crossed, family: Family) -> None:
        self.rows, self.family = rows, family

    def joint(self, fixed: Tensor, scales: Parts, u: Parts) -> Scalar:
        """Log p(y | u) − ½|u|², with ``fixed`` = Xβ + offset [N]."""
        eta = fixed + self.rows.predictor(scales, u)
        return self.family.log_density(self.rows.y, eta).sum() - 0.5 * sum(part.square().sum() for part in u)

    def newton(self, fixed: Tensor, scales: Parts, u: Parts) -> tuple[Arrow, Parts]:
        """The Cholesky factor of H at u, and the Newton step from u, with the gradient Λᵀ Zᵀ r − u."""
        rows, eta = self.rows, fixed + self.rows.predictor(scales, u)
        arrow = rows.arrow(self.family.weight(rows.y, eta), scales)
        blocks, rest = rows.scaled_sides(self.family.slope(rows.y, eta)[:, None], scales)
        step = arrow.solved(*arrow.whitened(blocks - u[0][..., None], rest - u[1][..., None]))
        return arrow, (step[0][..., 0], step[1][..., 0])

    @torch.no_grad()
    def mode(self, fixed: Tensor, theta: Tensor) -> Parts:
        """The u that maximises :meth:`joint`, by Newton's method with step halving; NumericsError if it fails."""
        rows, scales = self.rows, self.rows.scales(theta)
        u = fixed.new_zeros(rows.inner.count, len(scales[0])), fixed.new_zeros(len(scales[1]))
        value = self.joint(fixed, scales, u)
        for _ in range(MODE_STEPS):
            _, step = self.newton(fixed, scales, u)
            for halving in range(30):
                trial = u[0] + 0.5**halving * step[0], u[1] + 0.5**halving * step[1]
                joint = self.joint(fixed, scales, trial)
                if joint >= value - 1e-9 * (1 + abs(value)):
                    break
            else:
                raise NumericsError(
                    "Newton's method found no mode of the random effects: the targets are too large, or a fixed effect"
                    " separates the classes"
                )
            u, value = trial, joint
            if max((float(part.abs().max()) if part.numel() else 0.0) for part in step) < SETTLED:
                break
        return u

    def log_evidence(self, fixed: Tensor, theta: Tensor, mode: Parts, unexplained: Tensor) -> Scalar:
        """Log p(y), by adaptive Gauss–Hermite quadrature (Pinheiro and Bates 1995) or the Laplace approximation.

        Two more Newton steps from ``mode`` make u carry the first and second derivatives of the mode by (β, θ).
        ``unexplained`` [N] is the prior variance of smooth terms that the features leave out. It lowers the expected
        log density by half the variance times the weight, which is exact for Gaussian noise.
        """
        rows, scales, u = self.rows, self.rows.scales(theta), mode
        for _ in range(2):
            _, step = self.newton(fixed, scales, u)
            u = u[0] + step[0], u[1] + step[1]
        arrow, _ = self.newton(fixed, scales, u)
        total = -0.5 * unexplained @ self.family.weight(rows.y, fixed + rows.predictor(scales, u))
        nodes = 1 if rows.others else NODES.get(len(scales[0]), 1)
        if nodes == 1:
            return total + self.joint(fixed, scales, u) - 0.5 * arrow.log_determinant
        points, weights = hermite_rule(nodes, len(scales[0]))
        size = max(1, MOST // 10 * rows.inner.count // max(1, len(rows.y) * len(points)))
        for low in range(0, rows.inner.count, size):
            groups = low, min(low + size, rows.inner.count)
            total = total + self._quadrature(fixed, scales, (u[0], arrow.blocks), (points, weights), groups)
        return total

    def _quadrature(
        self,
        fixed: Tensor,
        scales: Parts,
        mode_and_factor: tuple[Tensor, Tensor],
        rule: tuple[Tensor, Tensor],
        groups: tuple[int, int],
    ) -> Scalar:
        """Σ log ∫ p(y | u) N(u | 0, I) du over a range of groups, with nodes û + L⁻ᵀ x and LLᵀ = H."""
        rows, (points, weights), (low, high) = self.rows, rule, groups
        mode, factor = (part[low:high] for part in mode_and_factor)
        spread = torch.linalg.solve_triangular(factor.mT, points.mT.expand(high - low, -1, -1), upper=True)
        u = mode[:, None] + spread.mT  # [G, K, q]
        members = torch.nonzero((rows.inner.level >= low) & (rows.inner.level < high))[:, 0]
        level = rows.inner.level[members] - low
        eta = fixed[members, None] + torch.einsum("nq,nkq->nk", rows.inner.effects[members], (u @ scales[0].mT)[level])
        fit = self.family.log_density(rows.y[members, None], eta)
        by_group = fit.new_zeros(high - low, len(weights)).index_add(0, level, fit)
        joint = by_group - 0.5 * u.square().sum(2) + 0.5 * points.square().sum(1) + weights
        return joint.logsumexp(1).sum() - factor.diagonal(dim1=1, dim2=2).log().sum()

    def conditional(
        self, beta: Float[Tensor, " E"], theta: Tensor, fixed: Float[Tensor, "N E"], factors: Sequence[Factor]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, "N E"]]:
        """Xβ + Zb at other rows, in groups of the site or in new groups (level −1), given the rows of the site.

        Mean [N] and variance [N], relative to the noise, at known β with u ~ N(û(β), H⁻¹), and the derivative of the
        mean by β [N, E].
        """
        rows, scales = self.rows, self.rows.scales(theta)
        centre = rows.offset + rows.fixed @ beta
        mode = self.mode(centre, theta)
        arrow, _ = self.newton(centre, scales, mode)
        weight = self.family.weight(rows.y, centre + rows.predictor(scales, mode))
        slopes = arrow.solved(*arrow.whitened(*rows.scaled_sides(-weight[:, None] * rows.fixed, scales)))
        ordered = [factors[k] for k in rows.order]
        inner, others = (ordered or [no_factor(fixed)])[0], ordered[1:]
        a, known = inner.effects @ scales[0], inner.level >= 0
        level = inner.level.clamp(min=0)
        prior = ~known * a.square().sum(1)  # variance of the effects of new groups
        for factor in others:
            prior = prior + (factor.level < 0) * (factor.effects @ rows.root(factor, theta)).square().sum(1)
        d, a = indicators(others, fixed) @ scales[1], a * known[:, None]
        mean, sensitivity = fixed @ beta + d @ mode[1], fixed + d @ slopes[1]
        if inner.count:
            first = torch.linalg.solve_triangular(arrow.blocks[level], a[:, :, None], upper=False)
            d = d - torch.einsum("nqd,nqm->nd", arrow.across[level], first)
            prior = prior + first.square().sum((1, 2))
            mean = mean + (a * mode[0][level]).sum(1)
            sensitivity = sensitivity + torch.einsum("nq,nqe->ne", a, slopes[0][level])
        second = torch.linalg.solve_triangular(arrow.dense, d.mT, upper=False)
        return mean, prior + second.square().sum(0), sensitivity
