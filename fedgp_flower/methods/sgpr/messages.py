"""The messages of sgpr, svgp, sgpr-private and fsgp: the server needs only sums over sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.error_law import BEFORE, PRECISION, SCALE, by_strength, left_out_scale, log_squares
from fedgp_flower.gp.fitc import WeightedSums
from fedgp_flower.gp.models import WhitenedPosterior
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.messages import leaves, message
from fedgp_flower.privacy.disclosure import merged_cells
from fedgp_flower.shared_messages import Described, Parameters, max_abs, outlying_variances, oversized, quadratic_forms
from fedgp_flower.typing import AnyShape, Array

SLACK, SINGLE_SLACK = 1e-6, 1e-5
"""Tolerated rounding as a share of the largest entry: of sums, and of expectations, which may be in float32."""


@message("query.statistics", summand=True, counts="M")
class SparseStatistics(SparseSums):
    """Sums over a site's rows at given kernel and inducing points (Guo et al. 2022, Eqs. 14-15, whitened)."""

    @staticmethod
    def outliers(answers: Mapping[str, SparseStatistics], rows: Mapping[str, int]) -> dict[str, str]:
        """Return the sites whose prior variance per row differs from that of most sites, with the reason."""
        return outlying_variances({site: float(answer.prior_variance) / rows[site] for site, answer in answers.items()})

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, described: Described) -> str | None:
        """Return why the sums cannot come from the described rows, or None.

        Sums of rows have A = W Wᵀ positive semi-definite, tr A ≤ Σ k(x, x), and bᵀ A⁻¹ b ≤ yᵀ y.
        """
        if reason := described.squares_mismatch("target_squares", self.target_squares, described.target_square):
            return reason
        if reason := described.rows_mismatch("count", self.count):
            return reason
        size = max(float(self.gram.max()), -float(self.gram.min()), 1e-300)  # scaled first: false entries may be huge
        if (np.diagonal(self.gram) / size).sum() > float(self.prior_variance) / size * (1 + SLACK):
            return "`gram` explains more than the prior variance of the rows"
        return gram_refusal(self.gram, self.projection, float(self.target_squares), added=described.added)


@message("query.sketch", summand=True)
class Sketch:
    """Sums over cells of at least five rows of a site.

    The values of each single input form other cells, so that a value of many rows is known exactly.
    """

    rows: Float[ndarray, " C"] = leaves("rows of the cells at each anchor")
    first: Float[ndarray, "C D"] = leaves("Σ x of these rows, standardised")
    second: Float[ndarray, "C D"] = leaves("Σ x² of these rows, standardised")
    value_rows: Float[ndarray, "D B"] = leaves("of each input, rows with values at each quantile")
    value_sums: Float[ndarray, "D B"] = leaves("Σ of these values, standardised")
    repeats: Float[ndarray, "2 256"] = leaves("Σ of random signs, equal for equal targets; then for equal rows")

    def num_parameters(self) -> int:
        """Return the number of cells with rows."""
        return int(np.count_nonzero(self.rows))

    def refusal(self, described: Described) -> str | None:
        """Return why the sketch cannot come from the described rows, or None: no count or variance is negative."""
        rows = described.rows
        if reason := described.rows_mismatch("rows", self.rows.sum()):
            return reason
        slack = 1e-6 * max(float(self.second.max(initial=0.0)), 1e-300)
        if (self.rows < 0).any() or (self.second * self.rows[:, None] + slack * rows < self.first**2).any():
            return f"its cells cannot come from {rows} rows"
        return f"`repeats` are not sums of {rows} signs" if (np.abs(self.repeats) > rows).any() else None


@message("query.pairs", summand=True)
class PairCounts:
    """How many rows have each pair of common values of two inputs."""

    counts: Float[ndarray, "P V V"] = leaves("of each two inputs, rows with each pair of values; fewer than three as 0")

    def num_parameters(self) -> int:
        """Return the largest number of pairs of values of two inputs."""
        return int(np.count_nonzero(self.counts, axis=(1, 2)).max(initial=0))

    def refusal(self, described: Described) -> str | None:
        """Return why the counts cannot come from the described rows, or None."""
        possible = (self.counts >= 0).all() and (self.counts.sum((1, 2)) <= described.rows).all()
        return None if possible else f"`counts` cannot come from {described.rows} rows"


@message("query.common_values", summand=True)
class ValueCounts:
    """How many rows have each common value of an input."""

    rows: Float[ndarray, "D B"] = leaves("of each input, rows in each bin whose value at least three rows share")
    sums: Float[ndarray, "D B"] = leaves("Σ of these values, standardised")

    def num_parameters(self) -> int:
        """Return the largest number of values of an input."""
        return int(np.count_nonzero(self.rows, axis=1).max(initial=0))

    def refusal(self, described: Described) -> str | None:
        """Return why the counts cannot come from the described rows, or None."""
        possible = (self.rows >= 0).all() and (self.rows.sum(1) <= described.rows).all()
        return None if possible else f"`rows` cannot come from {described.rows} rows"


@message()
class Candidates:
    """Several parameters."""

    each: tuple[Parameters, ...]


@message("query.trials", summand=True, counts="M")
class TrialSums:
    """:class:`WeightedSums` at each of several parameters."""

    grams: Float[ndarray, "T M M"] = leaves(
        "A = Σ w wᵀ/λ, w = L⁻¹ k(Z, x), at each candidate", symmetric=True, rank="counts"
    )
    projections: Float[ndarray, "T M"] = leaves("b = Σ w y/λ, λ = σ² + k(x, x) − |w|²")
    weighted_squares: Float[ndarray, " T"] = leaves("s = Σ y²/λ")
    log_variances: Float[ndarray, " T"] = leaves("ℓ = Σ log λ")
    target_squares: Float[ndarray, " T"] = leaves("Σ y²")
    counts: Float[ndarray, " T"] = leaves("number of rows")

    @staticmethod
    def of(each: Sequence[WeightedSums]) -> TrialSums:
        """Return the message with the sums at each candidate."""
        return TrialSums(*map(np.stack, zip(*(vars(sums).values() for sums in each), strict=True)))

    def each(self) -> list[WeightedSums]:
        """Return the sums at each candidate."""
        return [WeightedSums(*map(np.asarray, sums)) for sums in zip(*vars(self).values(), strict=True)]

    @staticmethod
    def outliers(answers: Mapping[str, TrialSums], rows: Mapping[str, int]) -> dict[str, str]:
        """Return the sites whose sums per row far exceed the median, with the reason."""
        sizes = {site: (max_abs(each.grams), max_abs(each.weighted_squares)) for site, each in answers.items()}
        found = oversized(sizes, rows, "`grams`", lambda pair: pair[0])
        return found | oversized(sizes, rows, "`weighted_squares`", lambda pair: pair[1])

    def refusal(self, described: Described) -> str | None:
        """Return why the sums cannot come from the described rows, or None; see :func:`gram_refusal`."""
        if reason := described.squares_mismatch("target_squares", self.target_squares, described.target_square):
            return reason
        if reason := next(filter(None, (described.rows_mismatch("counts", count) for count in self.counts)), None):
            return reason
        projected = zip(self.grams, self.projections, self.weighted_squares.tolist(), strict=True)
        return next(filter(None, (gram_refusal(*part, added=described.added) for part in projected)), None)


@np.errstate(over="ignore", invalid="ignore")
def gram_refusal(gram: ndarray, projection: ndarray, squares: float, *, added: bool) -> str | None:
    """Return why A [M, M], b [M] and s cannot be sums over rows, or None: A = W Wᵀ implies A ⪰ 0 and bᵀ A⁻¹ b ≤ s.

    ``added`` sums are checked in O(M²) only: |A_ij| ≤ max A_ii, and vᵀ A v ≥ 0 and (bᵀv)² ≤ s vᵀAv for some v.
    """
    size = max(float(gram.max()), -float(gram.min()), 1e-300)  # scaled first: false entries may be huge
    length = math.sqrt(max(squares, 0.0)) * (1 + SLACK)
    projection = projection / math.sqrt(size)
    if added:
        units, forms = quadratic_forms(gram, projection)
        forms = forms / size + SLACK
        if not (forms >= 0).all() or np.diagonal(gram).max() < (1 - SLACK) * size:
            return "`gram` is not a Gram matrix"
        explained = float(np.max(np.abs(units.T @ projection) / np.maximum(np.sqrt(forms), 1e-300)))
    else:
        scaled = torch.from_numpy(gram / size)
        scaled.diagonal().add_(SLACK)
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if failed:
            return "`gram` is not a Gram matrix"
        whitened = torch.linalg.solve_triangular(factor, torch.from_numpy(projection)[:, None], upper=False)
        explained = float(whitened.norm())
    return None if explained <= length else "`projection` is larger than the targets allow"


@message("train.gradients", summand=True, counts="H")
class EvidenceGradient:
    """A site's share of the gradient of the log evidence, at the posterior of all rows.

    A false gradient can only cost time, since a step is accepted only if the sums show a higher evidence.
    """

    gradient: Float[ndarray, " H"] = leaves("Σ ∂ E_q log N(y | wᵀv, λ) by each logarithm, in the order of their names")


@message("query.errors", summand=True, counts="P")
class ErrorSums:
    """Sums over errors z of predictions of rows from all other rows; see :mod:`fedgp_flower.gp.error_law`."""

    products: Float[ndarray, "P P"] = leaves("Σ φφᵀ, φ = 1, μ, μ² − 1 and whitened k(Z, x)", symmetric=True)
    moment: Float[ndarray, " P"] = leaves("Σ φ t, t an estimate of log z², z the error of a row")
    square: Float[ndarray, ""] = leaves("Σ t²")
    counts: Float[ndarray, "K B"] = leaves("rows by |z| e^−η/2, their error in sds, at each strength of the scale η")
    logs: Float[ndarray, " K"] = leaves("Σ ½η at each strength")

    @staticmethod
    def of(z: Array, features: Array, law: Mapping[str, ndarray]) -> ErrorSums:
        """Return the sums of the next regression from errors [N] and φ [N, P], and histograms under the latest one."""
        b, before, precision = (law[name] for name in (SCALE, BEFORE, PRECISION))
        scale = left_out_scale(features, b, precision, log_squares(z, features @ before))
        t = log_squares(z, features @ b)
        return ErrorSums(features.T @ features, features.T @ t, np.asarray(t @ t), *by_strength(z, scale))

    def coarse(self, least: int) -> ErrorSums:
        """Merge cells with fewer than ``least`` rows."""
        return replace(self, counts=np.stack([merged_cells(each, least) for each in self.counts]))

    def refusal(self, described: Described) -> str | None:
        """Return why the sums cannot come from the described rows, or None."""
        rows = {"products[0, 0]": round(float(self.products[0, 0])), "counts": self.counts.sum(axis=1)}
        mismatches = (described.rows_mismatch(name, each) for name, found in rows.items() for each in np.ravel(found))
        reason = next(filter(None, mismatches), None) or ("`counts` are negative" if (self.counts < 0).any() else None)
        return reason or gram_refusal(self.products, self.moment, float(self.square), added=described.added)


@message()
class PooledPosterior:
    """Parameters and q(v) = N(m, S) of the whitened inducing values v = L⁻¹ f(Z), which together predict."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    mean: Float[ndarray, "*C M"] = leaves("m; of each function, if several")
    covariance: Float[ndarray, "*C M M"] = leaves("S", symmetric=True)

    @staticmethod
    def of(values: Mapping[str, ndarray], q: WhitenedPosterior) -> PooledPosterior:
        """Return the parameters with a q(v)."""
        return PooledPosterior(values, q.mean.numpy(), q.covariance.numpy())

    def whitened(self) -> WhitenedPosterior:
        """Return q(v) as tensors."""
        return WhitenedPosterior(torch.as_tensor(self.mean), torch.as_tensor(self.covariance))


@message("train.expectations", summand=True, counts="values")
class Expectations:
    """The expected log likelihood of rows under q(v) and its derivatives, for the bound, its gradient and a step."""

    values: Mapping[str, AnyShape] = leaves("Σ ∂/∂w E log p(y | f) at fixed L and q, by parameter", as_sent=True)
    fit: Float[ndarray, ""] = leaves("Σ E log p(y | f), nats")
    slope: Float[ndarray, "*C M"] = leaves("W α, α = ∂/∂m of E log p(y | f), f ~ N(m, s); of each function, if several")
    curvature: Float[ndarray, "*C M M"] = leaves(
        "B̄ = W diag(β) Wᵀ, β = −2 ∂/∂s of the same", symmetric=True, rank="count"
    )
    count: Float[ndarray, ""] = leaves("number of rows")

    @staticmethod
    def dwarfing(answers: Mapping[str, Expectations], rows: Mapping[str, int]) -> dict[str, str]:
        """Return the sites whose curvature or slope per row far exceeds the median, with the reason."""
        curvatures = oversized(answers, rows, "curvature", lambda answer: max_abs(answer.curvature))
        return curvatures | oversized(answers, rows, "slope", lambda answer: max_abs(answer.slope))

    def refusal(self, described: Described) -> str | None:
        """Return why this cannot come from the described rows, or None: log p(y | f) ≤ 0, and it is concave in f.

        Neither holds for likelihoods with parameters, as Student-t, or for the noise of grades. The density of a
        real-valued target with a function for its noise may exceed 1. Masked summands are checked in O(M²) only.
        """
        if reason := described.rows_mismatch("count", self.count):
            return reason
        if any(name.startswith(("likelihood.", "kernel.grade.")) for name in self.values):
            return None
        real = any(name.startswith("kernel.noise.") for name in self.values)
        if not real and float(self.fit) > SINGLE_SLACK * described.rows:
            return f"`fit` is {float(self.fit):g}: no probability is above 1"
        each = self.curvature.reshape(-1, *self.curvature.shape[-2:])
        slack = SINGLE_SLACK * np.abs(np.trace(each, axis1=1, axis2=2))
        if described.added:
            concave = all((quadratic_forms(one)[1] >= -least).all() for one, least in zip(each, slack, strict=True))
        else:
            slack = np.maximum(slack, np.finfo(float).tiny)[:, None, None] * np.eye(each.shape[-1])
            concave = not torch.linalg.cholesky_ex(torch.from_numpy(each + slack)).info.any()
        return None if concave else "`curvature` is not that of a log-concave likelihood"


@message("query.tempered", summand=True, counts="G")
class TemperedScores:
    """The log scores of a site's rows, each predicted from all others, by the temperature of predictions."""

    values: Float[ndarray, " G"] = leaves("Σ log p_y at each temperature, nats")

    def refusal(self, described: Described) -> str | None:
        """Return why these are no log probabilities, or None."""
        return "`values` are above zero: no probability is above 1" if (self.values > 0).any() else None


@message()
class PrivateRequest:
    """A request for noisy sums."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    sharing: int = leaves("number of sites that share the noise of a total; 1 if the server sees the sums of each site")


@message("query.private", summand=True, counts="M")
class PrivateSums:
    """Sums over clipped rows with Gaussian noise; see :mod:`fedgp_flower.methods.sgpr.private`."""

    gram: Float[ndarray, "M M"] = leaves("A = W Wᵀ and noise, W = L⁻¹ k(Z, X)", symmetric=True)
    projection: Float[ndarray, " M"] = leaves("b = W y and noise")
    target_squares: Float[ndarray, ""] = leaves("s = yᵀ y and noise")

    @staticmethod
    def outliers(answers: Mapping[str, PrivateSums], rows: Mapping[str, int]) -> dict[str, str]:
        """Return the sites with far larger sums than the median; the noise weighs as many rows as the median site."""
        median = float(np.median([rows[site] for site in answers] or [0]))
        weights = {site: rows[site] + median for site in answers}
        return oversized(answers, weights, "largest entry", lambda answer: max_abs(*vars(answer).values()))
