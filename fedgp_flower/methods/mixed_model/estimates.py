"""Estimates from totals: the restricted likelihood of Gaussian models, and the table that is quoted.

At a trial θ the totals of log|V| and S = rᵀV⁻¹r, r = [X y], are known with their first and second derivatives. With
them, ρ² = S_yy − S_yx S_xx⁻¹ S_xy and E fixed effects, the restricted log likelihood at its best σ² = ρ² / (N − E) is

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
from scipy.special import ndtr, ndtri
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.methods.mixed_model.effects import LOG_2PI, Terms
from fedgp_flower.methods.mixed_model.smooth import Smooths
from fedgp_flower.typing import Array, Facts, Json, Scalar

Z95 = float(ndtri(0.975))
Function: TypeAlias = Callable[[Tensor], Scalar]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A log likelihood to second order at a point."""

    value: float
    gradient: Array  # [B]
    hessian: Array  # [B, B]

    def expansion(self) -> Expansion:
        """Itself."""
        return self

    def deviance(self, centre: Array, row: Array | None) -> Function:
        """−2 log likelihood as a function of all parameters, known around the centre."""
        del row
        middle, slope, curvature = map(torch.tensor, (centre, self.gradient, self.hessian))

        def value(point: Float[Tensor, " B"]) -> Scalar:
            step = point - middle
            return -2 * (self.value + slope @ step + 0.5 * step @ curvature @ step)

        return value


class Totals:
    """log|V| and S around a trial, to second order in θ; with the prior aσu of smooth terms' weights, u ~ N(0, I).

    θ are covariances of random effects, log ℓ, and amplitudes a, which no sum depends on.
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
        size = len(slopes)
        rows, columns = torch.tril_indices(size, size)
        whole = torch.zeros(size, size, len(values), dtype=torch.float64)
        whole[rows, columns] = whole[columns, rows] = torch.tensor(curvatures)
        self.curvatures, self.size = whole, int((math.sqrt(8 * (len(values) - len(widths)) - 7) - 1) / 2)

    def whole(self, step: Float[Tensor, " B"]) -> tuple[Scalar, Float[Tensor, "R R"], Float[Tensor, " M"]]:
        """log|V| + Σ a² R, the Cholesky factor of S + I on the rows of u, and a for each of these, a step away."""
        step, raised = step[: len(self.slopes)], self.amplitudes + step[len(self.slopes) :]
        entries = self.values + step @ self.slopes + 0.5 * torch.einsum("i,j,ijq->q", step, step, self.curvatures)
        rows, columns = torch.tril_indices(self.size, self.size)
        end = 1 + len(rows)
        matrix = entries.new_zeros(self.size, self.size).index_put((rows, columns), entries[1:end])
        of_features = raised.repeat_interleave(self.widths)
        scales = torch.cat([of_features, entries.new_ones(self.size - len(of_features))])
        prior = torch.diag((torch.arange(self.size) < len(of_features)).to(entries))
        matrix = scales[:, None] * (matrix + matrix.tril(-1).mT) * scales + prior
        factor = cholesky(matrix, of="[X y]ᵀ V⁻¹ [X y]")
        return entries[0] + raised.square() @ entries[end:], factor, of_features

    def at(self, step: Float[Tensor, " B"]) -> tuple[Scalar, Float[Tensor, "R R"]]:
        """log|V| and the Cholesky factor of S a step away; weights of smooth terms integrated out."""
        log_v, factor, of_features = self.whole(step)
        size = len(of_features)
        return log_v + 2 * factor.diagonal()[:size].log().sum(), factor[size:, size:]

    @property
    def freedom(self) -> float:
        """N − E."""
        return self.count - self.size + 1 + float(self.widths.sum())

    def profiled(self, step: Float[Tensor, " T"]) -> Scalar:
        """The restricted log likelihood at the best σ, a step away."""
        return self.restricted(step, self.log_noise(step))

    def log_noise(self, step: Float[Tensor, " T"]) -> Scalar:
        """The logarithm of the best σ."""
        return self.at(step)[1][-1, -1].log() - 0.5 * math.log(self.freedom)

    def restricted(self, step: Float[Tensor, " T"], log_noise: Scalar) -> Scalar:
        """The restricted log likelihood at a σ."""
        log_v, factor = self.at(step)
        free = self.freedom
        fit = factor[-1, -1].square() * (-2 * log_noise).exp() + free * (2 * log_noise + LOG_2PI)
        return -0.5 * (log_v + 2 * factor.diagonal()[:-1].log().sum() + fit)

    def deviance(self, centre: Array, row: Array | None) -> Function:
        """The function d of :mod:`profile` around θ, fixed effects at their best but that of ``row``."""
        size, middle = len(centre), torch.tensor(centre)

        def value(point: Float[Tensor, " P"]) -> Scalar:
            log_v, factor = self.at(point[:size] - middle)
            rest, log_noise = factor[-1, -1].square(), point[size]
            if row is not None:
                best, variance = effect(factor, row)
                rest = rest + (point[-1] - best).square() / variance
            return log_v + self.count * (2 * log_noise + LOG_2PI) + rest * (-2 * log_noise).exp()

        return value

    def expansion(self) -> Expansion:
        """The profiled restricted likelihood at the trial."""
        return expanded(self.profiled, torch.zeros(len(self.slopes) + len(self.widths), dtype=torch.float64))


def effect(factor: Float[Tensor, "R R"], row: Array) -> tuple[Scalar, Scalar]:
    """The best value of a fixed effect and its variance, in units of σ²."""
    seen = torch.linalg.solve_triangular(factor[:-1, :-1], torch.tensor(row)[:, None], upper=False)[:, 0]
    return seen @ factor[-1, :-1], seen.square().sum()


def expanded(function: Callable[[Tensor], Scalar], point: Tensor) -> Expansion:
    """Value, gradient and Hessian of a function."""
    point = point.clone().requires_grad_()
    value = function(point)
    gradient = torch.autograd.grad(value, point)[0] if len(point) else point.detach()
    hessian = torch.autograd.functional.hessian(function, point.detach()) if len(point) else point.new_zeros(0, 0)
    return Expansion(float(value.detach()), gradient.numpy(), np.asarray(hessian.detach()))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Whitened estimates: (v, β) and its covariance; θ in units of σ; log σ, and the covariance of θ and it."""

    beta: Array  # [M + E], the weights v = a u of features first
    covariance: Array  # [M + E, M + E]
    theta: Array  # [T]
    log_noise: float
    spread: Array  # [T + 1, T + 1], of (θ, log σ)
    log_likelihood: float
    shape: Array = field(default_factory=lambda: np.empty(0))
    """Shape parameters of the likelihood, and their standard errors."""
    shape_errors: Array = field(default_factory=lambda: np.empty(0))


def of_restricted(totals: Totals, theta: Array, step: Array) -> Estimates:
    """Estimates a last step away from the trial θ."""
    last = torch.tensor(step)
    _, factor, of_features = totals.whole(last)
    inner, log_noise = factor[:-1, :-1], totals.log_noise(last)
    scales = torch.cat([of_features, of_features.new_ones(len(inner) - len(of_features))])
    beta = scales * torch.linalg.solve_triangular(inner.mT, factor[-1, :-1, None], upper=True)[:, 0]
    covariance = torch.cholesky_inverse(inner) * (2 * log_noise).exp()  # the inverse is the answer here
    covariance = scales[:, None] * covariance * scales

    def value(at: Float[Tensor, " T1"]) -> Scalar:
        return totals.restricted(at[:-1], at[-1])

    around = expanded(value, torch.cat([last, log_noise[None]]))
    return Estimates(
        beta.numpy(), covariance.numpy(), theta + step, float(log_noise), inverse(-around.hessian), around.value
    )


def laplace(told: Expansion, point: Array, bends: Array, size: int, fixed: int) -> Expansion:
    """Features' weights v ~ N(0, I) integrated out: log p(y | ψ) ≈ F(v̂, ψ) − ½ log|A|, F = log p(y | v, ψ) − ½ |v|².

    A = −∂²F/∂v² at the mode v̂(ψ). ψ are all parameters but the first ``size``, v. Newton's step with what is returned
    leads to v̂ and to the best ψ; of A's curvature only the part between β, ``fixed`` long, and others is left out.
    """
    if not size:
        return told
    gradient, hessian, count = told.gradient.copy(), told.hessian.copy(), len(point) - size
    gradient[:size] -= point[:size]
    hessian[:size, :size] -= np.eye(size)
    factor = np.linalg.cholesky(-hessian[:size, :size])
    value = told.value - 0.5 * float(point[:size] @ point[:size]) - float(np.log(factor.diagonal()).sum())
    if not len(bends):  # the mode is not reached
        return Expansion(value, gradient, hessian)
    lower, whole = np.tril_indices(size), np.zeros((len(bends), size, size))
    whole[:, *lower] = whole[:, *lower[::-1]] = bends
    first, second = np.split(np.linalg.solve(factor, np.linalg.solve(factor, whole).mT), 2)
    along, twice = (0.5 * part.trace(axis1=1, axis2=2) for part in (first, second))
    gradient[size:] += along[:count]
    bend = 0.5 * np.einsum("iab,jab->ij", first[:count], first[:count]) + np.diag(twice[:count])
    for (i, j), both in zip(itertools.combinations(range(fixed, count), 2), twice[count:], strict=True):
        bend[[i, j], [j, i]] += 0.5 * (both - twice[i] - twice[j])
    hessian[size:, size:] += bend
    return Expansion(value, gradient, hessian)


def of_marginal(point: Array, around: Expansion, step: Array, smooth: Smooths, ends: tuple[int, int]) -> Estimates:
    """Estimates a last step away from the trial (v, β, θ, log ℓ, a, shape), β and θ ending at ``ends``.

    The covariance of weights and β is that at the best log ℓ and a.
    """
    best, whole, (fixed, middle) = point + step, inverse(-around.hessian), ends
    end = middle + sum(smooth.lengths) + len(smooth.terms)
    kept = np.r_[:middle, end : len(best)]
    scales = np.append(
        np.repeat(best[end - len(smooth.terms) : end], smooth.widths), np.ones(fixed - sum(smooth.widths))
    )
    covariance = scales[:, None] * inverse(-around.hessian[np.ix_(kept, kept)])[:fixed, :fixed] * scales
    value = around.value + 0.5 * float(around.gradient @ step)
    spread, shape = np.pad(whole[fixed:end, fixed:end], (0, 1)), (best[end:], whole.diagonal()[end:] ** 0.5)
    return Estimates(scales * best[:fixed], covariance, best[fixed:end], 0.0, spread, value, *shape)


def inverse(information: Array) -> Array:
    """Covariance from an information matrix; directions it says nothing about are NaN in no entry but theirs."""
    values, vectors = np.linalg.eigh(information)
    flat = values <= 1e-10 * max(float(np.abs(values).max(initial=0.0)), 1e-300)
    found = (vectors[:, ~flat] / values[~flat]) @ vectors[:, ~flat].T
    touched = (np.abs(vectors[:, flat]) > 1e-6).any(axis=1)
    return np.where(touched[:, None] | touched, np.nan, found)


def spreads(
    terms: Terms, bases: Sequence[Array], scale: float, smooth: Smooths, *, gaussian: bool
) -> Callable[[Tensor], Tensor]:
    """Log standard deviations and inverse hyperbolic tangents of correlations of all terms, as (θ, log σ) goes.

    Then, where noise is Gaussian, log σ; of every smooth term the logarithms of its standard deviation and its
    lengthscales, units of the table.
    """
    log_units, places = torch.tensor([*map(math.log, smooth.units)]), np.cumsum([terms.count, *smooth.lengths])
    units = [torch.tensor(base) for base in bases]

    def found(at: Tensor) -> Tensor:
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

    return found


def fixed_table(names: Sequence[str], mean: Array, covariance: Array, family: str) -> list[Json]:
    """A row for each fixed effect, in units of the table: Wald intervals; ratios of odds or rates."""
    rows = []
    for name, value, error in zip(names, mean, np.sqrt(covariance.diagonal()), strict=True):
        low, high = value - Z95 * error, value + Z95 * error
        row = {"effect": name, "estimate": value, "se": error, "low": low, "high": high}
        row |= {"p": 2 * float(ndtr(-abs(value) / error))}
        if family != "gaussian":
            row |= {"ratio": math.exp(value), "ratio_low": math.exp(low), "ratio_high": math.exp(high)}
        rows.append({key: item if isinstance(item, str) else float(item) for key, item in row.items()})
    return rows


def random_rows(
    groups: Sequence[str], names: Sequence[Sequence[str]], smooth: Smooths, *, gaussian: bool
) -> list[Json]:
    """What :func:`spreads` are of, row by row."""
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
    """The rows with estimates, and intervals by the delta method."""
    if not rows:
        return []
    point = torch.tensor(np.append(at.theta, at.log_noise))
    jacobian = torch.autograd.functional.jacobian(function, point).numpy()
    values = function(point).numpy()
    errors = np.sqrt(np.einsum("ij,jk,ik->i", jacobian, np.nan_to_num(at.spread, nan=0.0), jacobian))
    lost = (np.abs(jacobian) > 0) @ np.isnan(at.spread.diagonal()) > 0
    errors = np.where(lost, np.nan, errors)
    ends = zip(values, values - Z95 * errors, values + Z95 * errors, strict=True)
    back = {"correlation": np.tanh}
    return [row | _ends(back.get(row["kind"], np.exp), *end) for row, end in zip(rows, ends, strict=True)]


def shape_rows(at: Estimates) -> list[Json]:
    """The dispersion of counts."""
    row = {"group": "residual", "effect": "", "kind": "dispersion"}
    reach = Z95 * at.shape_errors
    return [row | _ends(np.exp, *ends) for ends in zip(at.shape, at.shape - reach, at.shape + reach, strict=True)]


def _ends(function: Callable[[float], float], value: float, low: float, high: float) -> Json:
    with np.errstate(over="ignore"):
        return {"estimate": float(function(value)), "low": float(function(low)), "high": float(function(high))}


def shares(rows: Sequence[Facts], family: str) -> dict[str, float]:
    """Intraclass correlations: the share of each group's random intercept in the variance of an observation.

    On the scale of the logit a class has variance π²/3; of counts there is none without their mean.
    """
    noise = [row["estimate"] ** 2 for row in rows if row["group"] == "residual"]
    ends = {"gaussian": noise, "bernoulli": [math.pi**2 / 3]}
    alone = [row for row in rows if row["kind"] == "sd" and row["effect"] == "intercept"]
    intercepts = {str(row["group"]): row["estimate"] ** 2 for row in alone}
    if family not in ends:
        return {}
    total = sum(intercepts.values()) + sum(ends[family])
    return {group: value / total for group, value in intercepts.items()}
