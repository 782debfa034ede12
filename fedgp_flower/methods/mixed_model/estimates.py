"""The restricted likelihood from sums over all sites, estimates at its maximum, and the tables of effects.

At a trial θ the sites' sums give log|V| and S = rᵀV⁻¹r, r = [X y], with their first and second derivatives. For E fixed
effects and ρ² = S_yy − S_yx S_xx⁻¹ S_xy, the restricted log likelihood is maximal at σ² = ρ² / (N − E), where

    −2 ℓ(θ) = log|V| + log|S_xx| + (N − E) (1 + log(2π ρ² / (N − E)))

(Bates et al., Fitting linear mixed-effects models using lme4, 2015, Eq. 42).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtr, ndtri
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.messages import message, unpacked
from fedgp_flower.methods.mixed_model.effects import LOG_2PI, Terms
from fedgp_flower.methods.mixed_model.smooth import Smooths
from fedgp_flower.typing import Array, Facts, Json, Scalar

Z95 = float(ndtri(0.975))
UNBOUNDED = 100.0
"""Standard error, per effect that changes η by 1, above which an estimate counts as infinite."""
Function: TypeAlias = Callable[[Tensor], Scalar]


@message()
class Expansion:
    """The second-order Taylor expansion of a log likelihood at a point."""

    value: float
    gradient: Float[ndarray, " B"]
    hessian: Float[ndarray, "B B"]

    def expansion(self) -> Expansion:
        """This expansion, as :meth:`Totals.expansion` for other likelihoods."""
        return self

    def deviance(self, centre: Array, row: Array | None) -> Function:
        """−2 log likelihood as a function of all parameters, by the expansion around ``centre``."""
        origin, slope, curvature = map(torch.tensor, (centre, self.gradient, self.hessian))

        def value(point: Float[Tensor, " B"]) -> Scalar:
            step = point - origin
            return -2 * (self.value + slope @ step + 0.5 * step @ curvature @ step)

        return value


class Totals:
    """log|V| and S around a trial, to second order in θ: relative covariances, log ℓ, and amplitudes a.

    The weights of smooth terms are a σ u with u ~ N(0, I). The sums do not depend on a.
    """

    def __init__(
        self,
        values: Array,
        slopes: Array,
        curvatures: Array,
        count: float,
        amplitudes: Sequence[float] | Array = (),
        widths: Sequence[int] = (),
    ) -> None:
        self.values, self.slopes, self.count = torch.tensor(values), torch.tensor(slopes), count
        self.widths = torch.tensor(widths, dtype=torch.int64)
        self.amplitudes = torch.tensor(amplitudes, dtype=torch.float64)
        self.curvatures = torch.tensor(unpacked(curvatures.T, len(slopes)))  # [Q, T, T]
        self.size = int((math.sqrt(8 * (len(values) - len(widths)) - 7) - 1) / 2)

    def joint(self, step: Float[Tensor, " B"]) -> tuple[Scalar, Float[Tensor, "R R"], Float[Tensor, " M"]]:
        """After a step: log|V| + Σ a² R, the Cholesky factor of S for (u, X, y) with the prior of u, and a by u."""
        step, amplitudes = step[: len(self.slopes)], self.amplitudes + step[len(self.slopes) :]
        entries = self.values + step @ self.slopes + 0.5 * torch.einsum("i,j,qij->q", step, step, self.curvatures)
        rows, columns = torch.tril_indices(self.size, self.size)
        end = 1 + len(rows)
        matrix = entries.new_zeros(self.size, self.size).index_put((rows, columns), entries[1:end])
        feature_scales = amplitudes.repeat_interleave(self.widths)
        scales = torch.cat([feature_scales, entries.new_ones(self.size - len(feature_scales))])
        prior = torch.diag((torch.arange(self.size) < len(feature_scales)).to(entries))
        matrix = scales[:, None] * (matrix + matrix.tril(-1).mT) * scales + prior
        factor = cholesky(matrix, of="[X y]ᵀ V⁻¹ [X y]")
        return entries[0] + amplitudes.square() @ entries[end:], factor, feature_scales

    def at(self, step: Float[Tensor, " B"]) -> tuple[Scalar, Float[Tensor, "R R"]]:
        """log|V| and the Cholesky factor of S after a step, with the weights of smooth terms integrated out."""
        log_v, factor, feature_scales = self.joint(step)
        size = len(feature_scales)
        return log_v + 2 * factor.diagonal()[:size].log().sum(), factor[size:, size:]

    @property
    def freedom(self) -> float:
        """The residual degrees of freedom N − E."""
        return self.count - self.size + 1 + float(self.widths.sum())

    def profiled(self, step: Float[Tensor, " T"]) -> Scalar:
        """The restricted log likelihood after a step, maximised over σ."""
        return self.restricted(step, self.log_noise(step))

    def log_noise(self, step: Float[Tensor, " T"]) -> Scalar:
        """The log σ that maximises the restricted likelihood after a step."""
        return self.at(step)[1][-1, -1].log() - 0.5 * math.log(self.freedom)

    def restricted(self, step: Float[Tensor, " T"], log_noise: Scalar) -> Scalar:
        """The restricted log likelihood after a step, at a given log σ."""
        log_v, factor = self.at(step)
        free = self.freedom
        fit = factor[-1, -1].square() * (-2 * log_noise).exp() + free * (2 * log_noise + LOG_2PI)
        return -0.5 * (log_v + 2 * factor.diagonal()[:-1].log().sum() + fit)

    def deviance(self, centre: Array, row: Array | None) -> Function:
        """The deviance d of :mod:`profile` around θ = ``centre``, minimised over all fixed effects but ``row``."""
        size, origin = len(centre), torch.tensor(centre)

        def value(point: Float[Tensor, " P"]) -> Scalar:
            log_v, factor = self.at(point[:size] - origin)
            residual, log_noise = factor[-1, -1].square(), point[size]
            if row is not None:
                estimate, variance = effect(factor, row)
                residual = residual + (point[-1] - estimate).square() / variance
            return log_v + self.count * (2 * log_noise + LOG_2PI) + residual * (-2 * log_noise).exp()

        return value

    def expansion(self) -> Expansion:
        """The expansion of :meth:`profiled` at the trial."""
        return expanded(self.profiled, torch.zeros(len(self.slopes) + len(self.widths), dtype=torch.float64))


def effect(factor: Float[Tensor, "R R"], row: Array) -> tuple[Scalar, Scalar]:
    """The estimate of the fixed effect ``row`` ᵀβ and its variance in units of σ², from the Cholesky factor of S."""
    solved = torch.linalg.solve_triangular(factor[:-1, :-1], torch.tensor(row)[:, None], upper=False)[:, 0]
    return solved @ factor[-1, :-1], solved.square().sum()


def expanded(function: Callable[[Tensor], Scalar], point: Tensor) -> Expansion:
    """Value, gradient and Hessian of a function at a point."""
    point = point.clone().requires_grad_()
    value = function(point)
    gradient = torch.autograd.grad(value, point, create_graph=True)[0] if len(point) else point.detach()
    hessian = torch.zeros(len(point), len(point), dtype=torch.float64)
    if gradient.requires_grad:  # it is constant if the function is linear
        directions = torch.eye(len(point), dtype=torch.float64)
        hessian = torch.autograd.grad(gradient, point, directions, is_grads_batched=True, materialize_grads=True)[0]
    return Expansion(float(value.detach()), gradient.detach().numpy(), hessian.detach().numpy())


@dataclass(frozen=True, slots=True)
class Estimates:
    """Whitened estimates. Weights of features v = a u come before fixed effects; θ is in units of σ."""

    beta: Array  # (v, β)  [M + E]
    covariance: Array  # of (v, β)  [M + E, M + E]
    theta: Array  # [T]
    log_noise: float
    spread: Array  # covariance of (θ, log σ)  [T + 1, T + 1]
    log_likelihood: float
    shape: Array = field(default_factory=lambda: np.empty(0))
    """Shape parameters of the likelihood."""
    shape_errors: Array = field(default_factory=lambda: np.empty(0))
    """Standard errors of the shape parameters."""


def of_restricted(totals: Totals, theta: Array, step: Array) -> Estimates:
    """Estimates of a Gaussian model at θ + step."""
    last = torch.tensor(step)
    _, factor, feature_scales = totals.joint(last)
    inner, log_noise = factor[:-1, :-1], totals.log_noise(last)
    scales = torch.cat([feature_scales, feature_scales.new_ones(len(inner) - len(feature_scales))])
    beta = scales * torch.linalg.solve_triangular(inner.mT, factor[-1, :-1, None], upper=True)[:, 0]
    covariance = torch.cholesky_inverse(inner) * (2 * log_noise).exp()  # the covariance is the inverse itself
    covariance = scales[:, None] * covariance * scales
    around = expanded(lambda at: totals.restricted(at[:-1], at[-1]), torch.cat([last, log_noise[None]]))
    return Estimates(
        beta.numpy(), covariance.numpy(), theta + step, float(log_noise), inverse(-around.hessian), around.value
    )


def laplace(conditional: Expansion, point: Array, bends: Array, size: int, fixed: int) -> Expansion:
    """The Laplace approximation over feature weights v ~ N(0, I): log p(y | ψ) ≈ F(v̂, ψ) − ½ log|A|.

    F = log p(y | v, ψ) − ½ |v|², and A = −∂²F/∂v² at the mode v̂(ψ). The first ``size`` parameters are v, the others ψ,
    and the first ``fixed`` of ψ are β. ``conditional`` expands log p(y | v, ψ). ``bends`` are derivatives of its
    Hessian by v, and empty until v reaches the mode. A Newton step with the result leads to the maximum. The result
    omits the second derivatives of log|A| between β and the other parameters. Its value is −∞ where A is not positive
    definite, far from the maximum: the variance that features do not explain makes log p(y | v, ψ) convex there.
    """
    if not size:
        return conditional
    gradient, hessian, count = conditional.gradient.copy(), conditional.hessian.copy(), len(point) - size
    gradient[:size] -= point[:size]
    hessian[:size, :size] -= np.eye(size)
    if np.linalg.eigvalsh(hessian[:size, :size])[-1] >= 0:
        return Expansion(-math.inf, gradient, hessian)
    factor = np.linalg.cholesky(-hessian[:size, :size])
    value = conditional.value - 0.5 * float(point[:size] @ point[:size]) - float(np.log(factor.diagonal()).sum())
    if not len(bends):
        return Expansion(value, gradient, hessian)
    first, second = np.split(np.linalg.solve(factor, np.linalg.solve(factor, unpacked(bends, size)).mT), 2)
    along, twice = (0.5 * part.trace(axis1=1, axis2=2) for part in (first, second))
    gradient[size:] += along[:count]
    bend = 0.5 * np.einsum("iab,jab->ij", first[:count], first[:count]) + np.diag(twice[:count])
    for (i, j), both in zip(itertools.combinations(range(fixed, count), 2), twice[count:], strict=True):
        bend[[i, j], [j, i]] += 0.5 * (both - twice[i] - twice[j])
    hessian[size:, size:] += bend
    return Expansion(value, gradient, hessian)


def of_marginal(point: Array, around: Expansion, step: Array, smooth: Smooths, ends: tuple[int, int]) -> Estimates:
    """Estimates at (v, β, θ, log ℓ, a, shape) = point + step; ``ends`` are the ends of β and of θ in the point.

    The covariance of (v, β) is conditional on log ℓ and a; also on θ and the shape at a point where the likelihood is
    convex in these, which a search may reach that ends early.
    """
    best, inverted, (fixed, covariances) = point + step, inverse(-around.hessian), ends
    end = covariances + sum(smooth.lengths) + len(smooth.terms)
    free = np.r_[:covariances, end : len(best)]
    scales = np.append(
        np.repeat(best[end - len(smooth.terms) : end], smooth.widths), np.ones(fixed - sum(smooth.widths))
    )
    covariance = inverse(-around.hessian[np.ix_(free, free)])[:fixed, :fixed]
    if not np.isfinite(covariance).all():
        covariance = inverse(-around.hessian[:fixed, :fixed])
    covariance = scales[:, None] * covariance * scales
    value = around.value + 0.5 * float(around.gradient @ step)
    spread, shape = np.pad(inverted[fixed:end, fixed:end], (0, 1)), (best[end:], inverted.diagonal()[end:] ** 0.5)
    return Estimates(scales * best[:fixed], covariance, best[fixed:end], 0.0, spread, value, *shape)


def inverse(information: Array) -> Array:
    """The covariance of an information matrix; NaN for parameters in directions without information."""
    values, vectors = np.linalg.eigh(information)
    flat = values <= 1e-10 * max(float(np.abs(values).max(initial=0.0)), 1e-300)
    covariance = (vectors[:, ~flat] / values[~flat]) @ vectors[:, ~flat].T
    unknown = (np.abs(vectors[:, flat]) > 1e-6).any(axis=1)
    return np.where(unknown[:, None] | unknown, np.nan, covariance)


def spreads(
    terms: Terms, bases: Sequence[Array], scale: float, smooth: Smooths, *, gaussian: bool
) -> Callable[[Tensor], Tensor]:
    """The function of (θ, log σ) that returns the transformed parameters of :func:`random_rows`, in units of the table.

    It returns log standard deviations and inverse hyperbolic tangents of correlations of each random term, log σ if the
    noise is Gaussian, and the log standard deviation and log lengthscales of each smooth term.
    """
    log_units, places = torch.tensor([*map(math.log, smooth.units)]), np.cumsum([terms.count, *smooth.lengths])
    units = [torch.tensor(base) for base in bases]

    def transformed(at: Tensor) -> Tensor:
        parts = [at[:0]]
        for unit, factor in zip(units, terms.factors(at[: terms.count]), strict=True):
            root = scale * torch.linalg.solve_triangular(unit, factor, upper=True)
            covariance = root @ root.mT
            log_sd = 0.5 * covariance.diagonal().log()
            rows, columns = torch.tril_indices(len(root), len(root), -1)
            correlation = covariance[rows, columns] / (log_sd[rows] + log_sd[columns]).exp()
            parts += [log_sd + at[-1], correlation.clamp(-1, 1).atanh()]
        parts += [at[-1:] + math.log(scale)] * gaussian
        lengths = at[terms.count : places[-1]] + log_units
        for amplitude, part in zip(at[places[-1] : -1], lengths.split(smooth.lengths), strict=True):
            parts += [amplitude.abs().log()[None] + at[-1] + math.log(scale), part]
        return torch.cat(parts)

    return transformed


def fixed_table(names: Sequence[str], mean: Array, covariance: Array, family: str) -> list[Json]:
    """The table of fixed effects in units of the table: Wald intervals and p-values; odds or rate ratios."""
    rows = []
    for name, value, error in zip(names, mean, np.sqrt(covariance.diagonal()), strict=True):
        low, high = value - Z95 * error, value + Z95 * error
        row = {"effect": name, "estimate": value, "se": error, "low": low, "high": high}
        row |= {"p": 2 * float(ndtr(-abs(value) / error))}
        if family != "gaussian":
            with np.errstate(over="ignore"):
                row |= {"ratio": np.exp(value), "ratio_low": np.exp(low), "ratio_high": np.exp(high)}
        rows.append({key: item if isinstance(item, str) else float(item) for key, item in row.items()})
    return rows


def separated(names: Sequence[str], mean: Array, covariance: Array, lengths: Array) -> list[str]:
    """A sentence if effects have no finite estimate, as the likelihood rises without end along them.

    ``lengths`` are the sizes of the effects that change η by 1 in the mean square of the rows. A search without a
    maximum stops at a large estimate, where the information is almost 0.
    """
    errors = np.sqrt(covariance.diagonal())
    endless = (errors > UNBOUNDED * lengths) | (np.isnan(errors) & (np.abs(mean) > lengths))
    found = ", ".join(f"`{name}`" for name, without in zip(names, endless, strict=True) if without)
    advice = "no finite estimate exists; leave the effect out, or merge its level with another"
    return [f"the rows separate the outcomes along {found}: {advice}"] if found else []


def random_rows(
    groups: Sequence[str], names: Sequence[Sequence[str]], smooth: Smooths, *, gaussian: bool
) -> list[Json]:
    """Group, effect and kind of each parameter that :func:`spreads` returns."""
    rows: list[Json] = []
    for group, effects in zip(groups, names, strict=True):
        pairs = [f"{second}, {first}" for i, first in enumerate(effects) for second in effects[:i]]
        rows += [{"group": group, "effect": name, "kind": "sd"} for name in effects]
        rows += [{"group": group, "effect": pair, "kind": "correlation"} for pair in pairs]
    rows += [{"group": "residual", "effect": "", "kind": "sd"}] * gaussian
    for term in smooth.terms:
        rows.append({"group": term.called, "effect": "", "kind": "sd"})
        rows += [{"group": term.called, "effect": name, "kind": "lengthscale"} for name in term.inputs]
    return rows


def random_table(rows: Sequence[Json], function: Callable[[Tensor], Tensor], at: Estimates) -> list[Json]:
    """The table of random effects: ``rows`` with estimates and 95 % intervals by the delta method."""
    if not rows:
        return []
    point = torch.tensor(np.append(at.theta, at.log_noise))
    jacobian = torch.autograd.functional.jacobian(function, point).numpy()
    values = function(point).numpy()
    errors = np.sqrt(np.einsum("ij,jk,ik->i", jacobian, np.nan_to_num(at.spread, nan=0.0), jacobian))
    unknown = (np.abs(jacobian) > 0) @ np.isnan(at.spread.diagonal()) > 0
    errors = np.where(unknown, np.nan, errors)
    ends = zip(values, values - Z95 * errors, values + Z95 * errors, strict=True)
    inverses = {"correlation": np.tanh}
    return [row | _interval(inverses.get(row["kind"], np.exp), *end) for row, end in zip(rows, ends, strict=True)]


def alike(groups: Sequence[str], rows: Sequence[Facts]) -> list[str]:
    """A sentence for each grouping factor with parameters in directions without information."""
    unknown = {row["group"] for row in rows if np.isnan(row["low"])}
    words = "these rows cannot tell some parameters of the random effects of"
    advice = "apart: they have no interval; leave out an effect that is constant within groups"
    return [f"{words} `{group}` {advice}" for group in dict.fromkeys(groups) if group in unknown]


def shape_rows(at: Estimates) -> list[Json]:
    """The row of the dispersion of negative binomial counts; none for other likelihoods."""
    row = {"group": "residual", "effect": "", "kind": "dispersion"}
    half = Z95 * at.shape_errors
    return [row | _interval(np.exp, *ends) for ends in zip(at.shape, at.shape - half, at.shape + half, strict=True)]


def _interval(function: Callable[[float], float], value: float, low: float, high: float) -> Json:
    with np.errstate(over="ignore"):
        return {"estimate": float(function(value)), "low": float(function(low)), "high": float(function(high))}


def shares(rows: Sequence[Facts], family: str) -> dict[str, float]:
    """Intraclass correlations: the variance of each random intercept divided by the total variance.

    Columns with random slopes are 0 there; elsewhere the correlation differs.
    The residual variance of two classes is π²/3 on the logit scale. Counts have no intraclass correlation.
    """
    noise = [row["estimate"] ** 2 for row in rows if row["group"] == "residual"]
    residual = {"gaussian": noise, "bernoulli": [math.pi**2 / 3]}
    rows = [row for row in rows if row["kind"] == "sd" and row["effect"] == "intercept"]
    intercepts = {str(row["group"]): row["estimate"] ** 2 for row in rows}
    if family not in residual:
        return {}
    total = sum(intercepts.values()) + sum(residual[family])
    return {group: value / total for group, value in intercepts.items()}
