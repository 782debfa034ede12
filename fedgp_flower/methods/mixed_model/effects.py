"""Random effects of the groups of a site, integrated out.

With u ~ N(0, I) and b = Λ(θ) u, rows have linear predictors η = Xβ + offset + Z Λ u. Effects of the factor with most
levels are independent between its groups, so that the precision of u given the rows is an arrow,

    H = [[I + Λ_aᵀ A Λ_a, Λ_aᵀ B Λ_d], [·, I + Λ_dᵀ C Λ_d]],    A = Z_aᵀ W Z_a by group, B = Z_aᵀ W Z_d, C = Z_dᵀ W Z_d,

a block for each group and one for the levels of all other factors, the site among them. W are weights of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad_and_value, jacfwd, vmap

from fedgp_flower.errors import DataError, NumericsError
from fedgp_flower.methods.mixed_model.smooth import NONE, Smooths
from fedgp_flower.typing import Scalar

NODES = {1: 25, 2: 11, 3: 7}
"""Nodes of the adaptive Gauss–Hermite rule along each of so many effects of a group; of more, and of several factors,
the one of Laplace."""
MOST = 30_000_000
"""Most entries of the blocks between groups of one factor and levels of the others; and of a sheet of rows by nodes."""
MODE_STEPS, SETTLED = 100, 1e-10
STRIDE = 1e-4
"""Of differences along a direction."""
TOGETHER = 8
"""Trials at once, fewer where there are many rows."""
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Family:
    """A likelihood: log p(y | η), its slope ∂/∂η, and the weight −∂²/∂η²; all of y and η."""

    log_density: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, Tensor], Tensor]
    started: Callable[[Tensor, Tensor], Tensor]
    """A rough η of every row, from y and the offset."""


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
    """Counts with mean μ = e^η and variance μ + μ²/r; the dispersion is 1/r."""
    log_r = -log_dispersion[0]
    r = log_r.exp()

    def log_density(y: Tensor, eta: Tensor) -> Tensor:
        moved = eta - log_r
        ways = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
        return ways + y * moved - (y + r) * torch.nn.functional.softplus(moved)

    return Family(
        log_density,
        lambda y, eta: y - (y + r) * torch.sigmoid(eta - log_r),
        lambda y, eta: (y + r) * torch.sigmoid(eta - log_r) * torch.sigmoid(log_r - eta),
        POISSON.started,
    )


FAMILIES: dict[str, Callable[[Tensor], Family]] = {
    "gaussian": lambda shape: GAUSSIAN,
    "bernoulli": lambda shape: BERNOULLI,
    "poisson": lambda shape: POISSON,
    "negative-binomial": overdispersed,
}
"""By ``model.likelihood``, from its shape parameters."""
SHAPES = {"negative-binomial": (math.log(0.3),)}
"""Where those that have shape parameters start them."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A grouping of a site's rows."""

    level: Int[Tensor, " N"]
    """The group of each row, from 0."""
    count: int
    effects: Float[Tensor, "N q"]
    terms: tuple[int, ...]
    """The terms of the formula whose effects these are."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How θ fills the Cholesky factors of the terms: lower triangles row by row, one after the other."""

    widths: tuple[int, ...]
    """Effects of each term."""

    @property
    def count(self) -> int:
        """The length of θ."""
        return sum(q * (q + 1) // 2 for q in self.widths)

    def factors(self, theta: Float[Tensor, " T"]) -> list[Tensor]:
        """The Cholesky factor of each term's covariance, whitened."""
        found = []
        for q, part in zip(self.widths, theta.split([q * (q + 1) // 2 for q in self.widths]), strict=True):
            rows, columns = torch.tril_indices(q, q)
            spread = torch.zeros(q * q, len(part)).to(theta)
            spread[rows * q + columns, torch.arange(len(part))] = 1.0
            found.append((spread @ part).reshape(q, q))
        return found

    @property
    def first(self) -> Tensor:
        """Every effect with a standard deviation of 1, whitened."""
        return torch.cat(
            [torch.eye(q)[tuple(torch.tril_indices(q, q))] for q in self.widths] or [torch.zeros(0)]
        ).double()


class Arrow:
    """The Cholesky factor of H."""

    def __init__(self, blocks: Tensor, across: Tensor, rest: Tensor, outer: tuple[Tensor, Tensor]) -> None:
        self.outer = outer  # Λ_a, Λ_d
        inner, dense = outer
        self.blocks = torch.linalg.cholesky(torch.eye(len(inner)).to(inner) + inner.mT @ blocks @ inner)
        self.across = torch.linalg.solve_triangular(self.blocks, inner.mT @ across @ dense, upper=False)
        schur = (
            torch.eye(len(dense)).to(dense)
            + dense.mT @ rest @ dense
            - torch.einsum("gqd,gqe->de", self.across, self.across)
        )
        self.dense = torch.linalg.cholesky(schur)

    @property
    def log_determinant(self) -> Scalar:
        """Log |H|."""
        return 2 * (self._log(self.blocks).sum() + self._log(self.dense).sum())

    @staticmethod
    def _log(factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).log()

    def half(self, blocks: Float[Tensor, "G q m"], rest: Float[Tensor, "D m"]) -> tuple[Tensor, Tensor]:
        """The whitened right-hand sides C⁻¹ Λᵀ v, with C Cᵀ = H."""
        inner, dense = self.outer
        first = torch.linalg.solve_triangular(self.blocks, inner.mT @ blocks, upper=False)
        left = dense.mT @ rest - torch.einsum("gqd,gqm->dm", self.across, first)
        return first, torch.linalg.solve_triangular(self.dense, left, upper=False)

    def back(self, first: Float[Tensor, "G q m"], second: Float[Tensor, "D m"]) -> tuple[Tensor, Tensor]:
        """C⁻ᵀ of whitened sides: u."""
        rest = torch.linalg.solve_triangular(self.dense.mT, second, upper=True)
        return torch.linalg.solve_triangular(self.blocks.mT, first - self.across @ rest, upper=True), rest


class Crossed:
    """Rows of a site, their whitened fixed columns and targets, and the factors that group them."""

    def __init__(
        self,
        terms: Terms,
        fixed: Float[Tensor, "N E"],
        offset: Float[Tensor, " N"],
        y: Float[Tensor, " N"],
        factors: Sequence[Factor],
    ) -> None:
        self.terms, self.fixed, self.offset, self.y = terms, fixed, offset, y
        none = Factor(torch.zeros(len(y), dtype=torch.int64), 0, fixed[:, :0], ())
        self.order = sorted(range(len(factors)), key=lambda k: -factors[k].count)
        """Of the factors, that with most levels first."""
        ordered = [factors[k] for k in self.order]
        self.inner, self.others = (ordered or [none])[0], ordered[1:]
        width = sum(factor.count * factor.effects.shape[1] for factor in self.others)
        if (
            self.inner.count * max(1, self.inner.effects.shape[1]) * (width + fixed.shape[1] + 1) > MOST
            or len(y) * width > MOST
        ):
            raise DataError(f"`formula`: {self.inner.count} groups crossed with {width} effects of others are too many")

    @cached_property
    def dense(self) -> Float[Tensor, "N D"]:
        """Z_d: the effects of all factors but the inner one, a column for each of each level."""
        parts = [
            (torch.nn.functional.one_hot(f.level, f.count).to(self.y)[:, :, None] * f.effects[:, None]).flatten(1)
            for f in self.others
        ]
        return torch.cat([self.fixed[:, :0], *parts], dim=1)

    def outer(self, theta: Float[Tensor, " T"]) -> tuple[Tensor, Tensor]:
        """Λ_a and Λ_d."""
        factors = self.terms.factors(theta)
        inner = torch.block_diag(*(factors[k] for k in self.inner.terms)) if self.inner.terms else theta.new_zeros(0, 0)
        parts = [
            torch.kron(torch.eye(f.count).to(theta), torch.block_diag(*(factors[k] for k in f.terms)))
            for f in self.others
        ]
        return inner, torch.block_diag(*parts) if parts else theta.new_zeros(0, 0)

    def by_group(self, rows: Tensor) -> Tensor:
        """Sums of rows [N, …] over each group of the inner factor."""
        return rows.new_zeros(self.inner.count, *rows.shape[1:]).index_add(0, self.inner.level[: len(rows)], rows)

    def sides(self, rows: Float[Tensor, "N m"]) -> tuple[Tensor, Tensor]:
        """Z_aᵀ of rows by group [G, q, m], and Z_dᵀ of them [D, m]."""
        return self.by_group(self.inner.effects[:, :, None] * rows[:, None]) if self.inner.terms else rows.new_zeros(
            0, 0, rows.shape[1]
        ), self.dense.mT @ rows

    def arrow(self, weight: Float[Tensor, " N"], outer: tuple[Tensor, Tensor]) -> Arrow:
        """H with weights of rows."""
        scaled = weight[:, None] * self.dense
        blocks, _ = self.sides(weight[:, None] * self.inner.effects)
        across, rest = self.sides(scaled)
        return Arrow(blocks, across, rest, outer)

    def predictor(self, outer: tuple[Tensor, Tensor], u: tuple[Tensor, Tensor]) -> Float[Tensor, " N"]:
        """Z Λ u."""
        inner = (self.inner.effects * (u[0] @ outer[0].mT)[self.inner.level]).sum(1) if self.inner.terms else 0.0
        return inner + self.dense @ (outer[1] @ u[1])


def no_features(log_lengthscales: Tensor) -> list[Tensor]:
    """Of a formula without smooth terms."""
    return []


def restricted_sums(
    rows: Crossed, theta: Float[Tensor, " T"], features: Callable[[Tensor], list[Tensor]] = no_features
) -> tuple[Tensor, Tensor, Tensor]:
    """Log |V|, the lower entries of [Φ X y]ᵀ V⁻¹ [Φ X y] with V = I + ZΛΛᵀZᵀ, and what each Φ leaves, [Q].

    And derivatives by Λ and log ℓ, [T, Q] and [T, T, Q]. Φ are features of smooth terms at lengthscales ℓ.
    """
    blocks, _ = rows.sides(rows.inner.effects)
    across, rest = rows.sides(rows.dense)

    def at(point: Float[Tensor, " T"]) -> Float[Tensor, " Q"]:
        parts = features(point[rows.terms.count :])
        whole = torch.cat([*parts, rows.fixed, (rows.y - rows.offset)[:, None]], dim=1)
        arrow = Arrow(blocks, across, rest, rows.outer(point[: rows.terms.count]))
        lower = torch.tril_indices(whole.shape[1], whole.shape[1])
        first, second = arrow.half(*rows.sides(whole))
        products = whole.mT @ whole - torch.einsum("gqm,gqn->mn", first, first) - second.mT @ second
        left = [(1 - part.square().sum(1)).sum()[None] for part in parts]
        return torch.cat([arrow.log_determinant[None], products[lower[0], lower[1]], *left])

    if not len(theta):
        value = at(theta)
        return value, value.new_zeros(0, len(value)), value.new_zeros(0, 0, len(value))

    def slopes(point: Float[Tensor, " T"]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, value = jacfwd(lambda near: (at(near),) * 2, has_aux=True)(point)
        return found, (value, found)

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
    """Log p(y | v, β, θ, log ℓ, a, shape), its gradients and Hessians at points; v weigh features a φ of smooth terms.

    And by differences along turns, those of STRIDE's length in one half and their opposites: first, then second
    derivatives of the lower entries of Hessians by v.
    """
    size, lost = sum(smooth.widths), len(rows.y)
    sizes = [size, rows.fixed.shape[1], rows.terms.count, sum(smooth.lengths), len(smooth.terms)]
    sizes.append(points.shape[1] - sum(sizes))

    def parts(point: Float[Tensor, " P"]) -> tuple[Marginal, Tensor, Tensor, Tensor]:
        v, beta, theta, lengths, amplitudes, shape = point.split(sizes)
        fixed, left = rows.offset + rows.fixed @ beta, point.new_zeros(lost)
        for phi, a, weights in zip(smooth.features(inputs, lengths), amplitudes, v.split(smooth.widths), strict=True):
            fixed, left = fixed + a * (phi @ weights), left + a**2 * (1 - phi.square().sum(1))
        return Marginal(rows, family(shape)), fixed, theta, left

    centres = [parts(point)[:3] for point in points]
    modes = [torch.stack(part) for part in zip(*(one.mode(*where) for one, *where in centres), strict=True)]
    turns = points[:0] if turns is None else turns
    near = points[:, None] + torch.cat([turns.new_zeros(1, points.shape[1]), turns])

    def at(point: Float[Tensor, " P"], *mode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def value(near: Float[Tensor, " P"]) -> Scalar:
            one, fixed, theta, left = parts(near)
            return one.log_evidence(fixed, theta, (mode[0], mode[1]), left)

        def slope(near: Float[Tensor, " P"]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            found, height = grad_and_value(value)(near)
            return found, (height, found)

        hessian, (height, gradient) = jacfwd(slope, has_aux=True)(point)
        return height, gradient, hessian

    width = rows.inner.effects.shape[1]
    entries = len(rows.y) * NODES.get(width, 1) ** width * points.shape[1]
    each = vmap(at, chunk_size=min(TOGETHER, 1 + MOST // entries))
    found = each(near.flatten(0, 1), *(mode.repeat_interleave(1 + len(turns), dim=0) for mode in modes))
    values, gradients, hessians = (part.unflatten(0, near.shape[:2]) for part in found)
    lower = torch.tril_indices(size, size)
    middle, up, down = hessians[:, :, lower[0], lower[1]].split([1, len(turns) // 2, len(turns) // 2], dim=1)
    bends = torch.cat([(up - down) / (2 * STRIDE), (up + down - 2 * middle) / STRIDE**2], dim=1)
    return values[:, 0], gradients[:, 0], hessians[:, 0], bends


class Marginal:
    """The marginal likelihood of the rows of a site whose observations are not Gaussian."""

    def __init__(self, rows: Crossed, family: Family) -> None:
        self.rows, self.family = rows, family

    def joint(self, fixed: Tensor, outer: tuple[Tensor, Tensor], u: tuple[Tensor, Tensor]) -> Scalar:
        """Log p(y | u) − ½|u|²."""
        eta = fixed + self.rows.predictor(outer, u)
        return self.family.log_density(self.rows.y, eta).sum() - 0.5 * sum(part.square().sum() for part in u)

    def newton(
        self, fixed: Tensor, outer: tuple[Tensor, Tensor], u: tuple[Tensor, Tensor]
    ) -> tuple[Arrow, tuple[Tensor, Tensor]]:
        """H at u, and Newton's step from there."""
        rows, eta = self.rows, fixed + self.rows.predictor(outer, u)
        arrow = rows.arrow(self.family.weight(rows.y, eta), outer)
        blocks, rest = rows.sides(self.family.slope(rows.y, eta)[:, None])
        # The gradient is Λᵀ Zᵀ r − u, and `half` multiplies by Λᵀ: u is whitened beside it.
        first, second = arrow.half(blocks, rest)
        prior = torch.linalg.solve_triangular(arrow.blocks, u[0][:, :, None], upper=False)
        left = u[1][:, None] - torch.einsum("gqd,gqm->dm", arrow.across, prior)
        other = torch.linalg.solve_triangular(arrow.dense, left, upper=False)
        step = arrow.back(first - prior, second - other)
        return arrow, (step[0][:, :, 0], step[1][:, 0])

    @torch.no_grad()
    def mode(self, fixed: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The u that maximises the joint density, by Newton's method with halved steps."""
        rows, outer = self.rows, self.rows.outer(theta)
        u = fixed.new_zeros(rows.inner.count, len(outer[0])), fixed.new_zeros(len(outer[1]))
        value = self.joint(fixed, outer, u)
        for _ in range(MODE_STEPS):
            _, step = self.newton(fixed, outer, u)
            for halving in range(30):
                tried = u[0] + 0.5**halving * step[0], u[1] + 0.5**halving * step[1]
                found = self.joint(fixed, outer, tried)
                if found >= value - 1e-9 * (1 + abs(value)):
                    break
            else:
                raise NumericsError("the mode of random effects was not found: numbers too large, or separated classes")
            u, value = tried, found
            if max((float(part.abs().max()) if part.numel() else 0.0) for part in step) < SETTLED:
                break
        return u

    def log_evidence(self, fixed: Tensor, theta: Tensor, mode: tuple[Tensor, Tensor], left: Tensor) -> Scalar:
        """By adaptive Gauss–Hermite quadrature (Pinheiro and Bates 1995), or Laplace's approximation.

        Two more Newton steps from the mode carry its first and second derivatives by (β, θ). Variance that is left of
        each row lowers the expected log density to first order, exactly where noise is Gaussian.
        """
        rows, outer, u = self.rows, self.rows.outer(theta), mode
        for _ in range(2):
            _, step = self.newton(fixed, outer, u)
            u = u[0] + step[0], u[1] + step[1]
        arrow, _ = self.newton(fixed, outer, u)
        total = -0.5 * left @ self.family.weight(rows.y, fixed + rows.predictor(outer, u))
        nodes = 1 if rows.others else NODES.get(len(outer[0]), 1)
        if nodes == 1:
            return total + self.joint(fixed, outer, u) - 0.5 * arrow.log_determinant
        points, weights = rule(nodes, len(outer[0]))
        for groups in sheets(rows, len(points)):
            total = total + self._quadrature(fixed, outer, (u[0], arrow.blocks), (points, weights), groups)
        return total

    def _quadrature(
        self,
        fixed: Tensor,
        outer: tuple[Tensor, Tensor],
        around: tuple[Tensor, Tensor],
        rule: tuple[Tensor, Tensor],
        groups: tuple[int, int],
    ) -> Scalar:
        """Log ∫ p(y | u) N(u | 0, I) du of some groups, summed: nodes u + L⁻ᵀ x, with LLᵀ = H."""
        rows, (points, weights), (low, high) = self.rows, rule, groups
        mode, factor = around[0][low:high], around[1][low:high]
        spread = torch.linalg.solve_triangular(factor.mT, points.mT.expand(high - low, -1, -1), upper=True)
        u = mode[:, None] + spread.mT  # [G, K, q]
        chosen = torch.nonzero((rows.inner.level >= low) & (rows.inner.level < high))[:, 0]
        level = rows.inner.level[chosen] - low
        eta = fixed[chosen, None] + torch.einsum("nq,nkq->nk", rows.inner.effects[chosen], (u @ outer[0].mT)[level])
        fit = self.family.log_density(rows.y[chosen, None], eta)
        by_group = fit.new_zeros(high - low, len(weights)).index_add(0, level, fit)
        joint = by_group - 0.5 * u.square().sum(2) + 0.5 * points.square().sum(1) + weights
        return joint.logsumexp(1).sum() - factor.diagonal(dim1=1, dim2=2).log().sum()


def rule(nodes: int, width: int) -> tuple[Tensor, Tensor]:
    """Nodes [K, q] and logarithms of weights [K] of the product rule for N(0, I)."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.tensor(list(itertools.product(x, repeat=width)))
    weights = torch.tensor(list(itertools.product(np.log(w / math.sqrt(2 * math.pi)), repeat=width)))
    return points, weights.sum(1)


def sheets(rows: Crossed, nodes: int) -> list[tuple[int, int]]:
    """Ranges of groups whose rows by nodes fit into memory."""
    each = max(1, MOST // 10 * rows.inner.count // max(1, len(rows.y) * nodes))
    return [(low, min(low + each, rows.inner.count)) for low in range(0, rows.inner.count, each)]


class Conditional:
    """Random effects of a site given its rows and θ: u ~ N(û(β), H⁻¹), and how û moves with β."""

    def __init__(self, marginal: Marginal, beta: Float[Tensor, " E"], theta: Float[Tensor, " T"]) -> None:
        rows = marginal.rows
        self.rows, self.outer, self.beta = rows, rows.outer(theta), beta
        fixed = rows.offset + rows.fixed @ beta
        self.mode = marginal.mode(fixed, theta)
        self.arrow, _ = marginal.newton(fixed, self.outer, self.mode)
        weight = marginal.family.weight(rows.y, fixed + rows.predictor(self.outer, self.mode))
        self.slopes = self.arrow.back(*self.arrow.half(*rows.sides(-weight[:, None] * rows.fixed)))

    def linear(
        self,
        fixed: Float[Tensor, "N E"],
        inner: Factor,
        others: Sequence[Factor],
        covariance: Float[Tensor, "E E"],
        noise: float,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Mean and variance of Xβ + Zb at other rows, in groups of the site or (level −1) in new ones.

        ``covariance`` is that of the estimates of β; ``noise`` is what covariances of random effects are relative to.
        """
        a, known = inner.effects @ self.outer[0], inner.level >= 0
        level = inner.level.clamp(min=0)
        dense, unknown, at = [fixed[:, :0]], [a[~known].square().sum(1)], 0
        extra = fixed.new_zeros(len(fixed)).index_put((torch.nonzero(~known)[:, 0],), unknown[0])
        for factor in others:
            width = factor.effects.shape[1]
            root = self.outer[1][at : at + width, at : at + width]
            there = factor.level >= 0
            hot = torch.nn.functional.one_hot(factor.level.clamp(min=0), factor.count).to(a) * there[:, None]
            dense.append((hot[:, :, None] * (factor.effects @ root)[:, None]).flatten(1))
            extra = extra + (~there) * (factor.effects @ root).square().sum(1)
            at += factor.count * width
        d, a = torch.cat(dense, dim=1), a * known[:, None]
        first = (
            torch.linalg.solve_triangular(self.arrow.blocks[level], a[:, :, None], upper=False)
            if inner.count
            else a[:, :, None]
        )
        pulled = torch.einsum("nqd,nqm->nd", self.arrow.across[level], first) if inner.count else torch.zeros_like(d)
        second = torch.linalg.solve_triangular(self.arrow.dense, (d - pulled).mT, upper=False)
        spread = first.square().sum((1, 2)) + second.square().sum(0)
        mean, sensitivity = fixed @ self.beta + d @ self.mode[1], fixed + d @ self.slopes[1]
        if inner.count:
            mean = mean + (a * self.mode[0][level]).sum(1)
            sensitivity = sensitivity + torch.einsum("nq,nqe->ne", a, self.slopes[0][level])
        return mean, noise * (spread + extra) + torch.einsum("ne,ef,nf->n", sensitivity, covariance, sensitivity)
