"""Scores of predictions on a site's held-out rows, as sums that add over rows and over sites.

A site never sends a row: it sends the sums below, in the original units of the target, and two small histograms. For a
predictive distribution F with density f and an outcome y:

* ``nll`` = −log f(y), the negative log predictive density of a noisy observation, in nats;
* ``crps`` = ∫ (F(t) − 1[t ≥ y])² dt = E|X − y| − ½ E|X − X'|, in units of y (Gneiting & Raftery 2007, Eq. 20–21);
* ``inside-95`` = 1 when y lies in the central 95 % interval, that is |F(y) − ½| ≤ 0.475;
* PIT = F(y), uniform on [0, 1] when the predictions are calibrated (Dawid 1984).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedgp_flower.errors import NumericsError
from fedgp_flower.lazy import special
from fedgp_flower.typing import Array, NamedArrays

LEVELS = (50, 90, 95)
"""Central intervals that are counted, in percent."""

PIT_BINS = 20
"""Equal bins of [0, 1] the PIT is counted in."""

RELIABILITY_BINS = 10
"""Equal bins of [0, 1] a predicted probability is counted in."""

RANK_BINS, RANK_REACH = 80, 8.0
"""Equal bins of log odds, and how far they reach from even odds: predictions that differ by less count as ties."""

REGRESSION_SUMS = (
    *("count", "squared-error", "absolute-error", "nll", "crps"),
    *("inside-50", "inside-90", "inside-95"),
)
CLASSIFICATION_SUMS = ("count", "correct", "nll", "brier")
"""Names of the sums, by kind of task."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums over rows (``sums``) and histograms over rows (``arrays``), which add over pieces of the rows."""

    sums: dict[str, float]
    arrays: NamedArrays

    def flat(self) -> dict[str, float | list[float]]:
        """As metrics of a reply: sums as numbers, histograms as flat lists."""
        return self.sums | {name: [float(value) for value in array.ravel()] for name, array in self.arrays.items()}


def gaussian_scores(mean: ArrayLike, sd: ArrayLike, target: ArrayLike) -> Scores:
    """Scores of Gaussian predictions N(mean, sd²) [n], with the closed-form CRPS σ[z(2Φ(z) − 1) + 2φ(z) − π^(−½)].

    Raises:
        NumericsError: for unequal shapes, values that are not finite, or a standard deviation that is not positive.
    """
    m, s, y = _checked(mean, sd, target, ndim=1)
    z = (y - m) / s
    nll = 0.5 * z**2 + np.log(s) + 0.5 * math.log(2 * math.pi)
    crps = s * (z * (2 * special.ndtr(z) - 1) + 2 * _density(z) - 1 / math.sqrt(math.pi))
    inside = {level: np.abs(z) <= special.ndtri(0.5 + level / 200) for level in LEVELS}
    return _regression(m - y, nll, crps, inside, special.ndtr(z))


def mixture_scores(means: ArrayLike, sds: ArrayLike, target: ArrayLike) -> Scores:
    """Scores of equal-weight Gaussian mixtures (1/S) Σ_s N(means_s, sds_s²), such as predictions averaged over samples.

    The point prediction is the mixture mean. Intervals are central in probability (through the PIT). With
    A(μ, σ²) = E|N(μ, σ²)| = 2σφ(μ/σ) + μ(2Φ(μ/σ) − 1), the CRPS is (Grimit et al. 2006)
    mean_s A(y − m_s, σ_s²) − ½ mean_{s,t} A(m_s − m_t, σ_s² + σ_t²). ``means`` and ``sds`` are [S, n], ``target`` is
    [n]. Time O(S² n), memory O(S n).

    Raises:
        NumericsError: for unequal shapes, values that are not finite, or a standard deviation that is not positive.
    """
    m, s, y = _checked(means, sds, target, ndim=2)
    z = (y - m) / s
    log_parts = -0.5 * z**2 - np.log(s) - 0.5 * math.log(2 * math.pi)
    nll = math.log(len(m)) - special.logsumexp(log_parts, axis=0)
    crps = _mean_absolute(y - m, s).mean(axis=0) - 0.5 * _mean_absolute_difference(m, s)
    return regression_scores(m.mean(axis=0) - y, np.asarray(nll), crps, special.ndtr(z).mean(axis=0))


def bernoulli_scores(probability: ArrayLike, label: ArrayLike) -> Scores:
    """Scores of class probabilities p = P(label = 1): NLL, Brier score (p − label)², correct at threshold ½.

    Ranks need all sites' rows at once: two histograms of the log odds, one for each class, stand in for them.

    A probability of exactly 0 or 1 that is wrong has an infinite NLL; it is reported as such.

    Raises:
        NumericsError: for unequal shapes, probabilities outside [0, 1], or labels other than 0 and 1.
    """
    p, y = np.asarray(probability, dtype=np.float64), np.asarray(label, dtype=np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise NumericsError(f"expected `probability` and `label` of one shape [n], found {p.shape} and {y.shape}")
    if not np.all((p >= 0) & (p <= 1)):
        raise NumericsError("a predicted probability is not in [0, 1]; look for non-finite latent values")
    if not np.all((y == 0) | (y == 1)):
        raise NumericsError("a label is neither 0 nor 1; labels are indices into the two agreed levels")
    sums = {
        "count": float(y.size),
        "correct": float(np.sum((p >= 0.5) == (y == 1))),
        "nll": float(-np.sum(special.xlogy(y, p) + special.xlog1py(1 - y, -p))),
        "brier": float(np.sum((p - y) ** 2)),
    }
    weights = (np.ones_like(p), p, y)
    bins = [np.histogram(p, RELIABILITY_BINS, (0, 1), weights=weight)[0] for weight in weights]
    log_odds = np.clip(special.logit(p), -RANK_REACH, RANK_REACH)
    ranks = [np.histogram(log_odds[y == c], RANK_BINS, (-RANK_REACH, RANK_REACH))[0].astype(float) for c in (0, 1)]
    return Scores(sums, {"evaluation.reliability": np.stack(bins, axis=1), "evaluation.ranks": np.stack(ranks, axis=1)})


def class_scores(probabilities: ArrayLike, label: ArrayLike) -> Scores:
    """Scores of probabilities [n, C] of C classes: NLL, Brier Σ_c (p_c − 1[label = c])², correct where p is largest.

    Reliability is that of the likeliest class: its probability, and whether it came true (Guo et al. 2017).

    Raises:
        NumericsError: for unequal lengths, rows that are no probabilities, or labels that are no classes.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(label, dtype=np.float64)
    if p.ndim != 2 or p.shape[:1] != y.shape:
        raise NumericsError(f"expected `probabilities` [n, C] and `label` [n], found {p.shape} and {y.shape}")
    if not np.all(p >= 0) or not np.allclose(p.sum(axis=1), 1.0, atol=1e-6):
        raise NumericsError("a row of predicted probabilities does not sum to one; look for non-finite latent values")
    if not np.isin(y, np.arange(p.shape[1])).all():
        raise NumericsError(f"a label is not one of the {p.shape[1]} classes 0 to {p.shape[1] - 1}")
    observed = y[:, None] == np.arange(p.shape[1])
    sums = {
        "count": float(y.size),
        "correct": float(np.sum(p.argmax(axis=1) == y)),
        "nll": float(-np.sum(special.xlogy(observed, p))),
        "brier": float(np.sum((p - observed) ** 2)),
    }
    largest, hit = p.max(axis=1), p.argmax(axis=1) == y
    weights = (np.ones_like(largest), largest, hit.astype(float))
    bins = [np.histogram(largest, RELIABILITY_BINS, (0, 1), weights=weight)[0] for weight in weights]
    return Scores(sums, {"evaluation.reliability": np.stack(bins, axis=1)})


def regression_scores(error: Array, nll: Array, crps: Array, pit: Array) -> Scores:
    """Sums of scores that were computed row by row; intervals are central in probability, |PIT − ½| ≤ ½ level."""
    inside = {level: np.abs(pit - 0.5) <= level / 200 for level in LEVELS}
    return _regression(error, nll, crps, inside, pit)


def _regression(error: Array, nll: Array, crps: Array, inside: dict[int, NDArray[np.bool_]], pit: Array) -> Scores:
    sums = {
        "count": float(error.size),
        "squared-error": float(np.sum(error**2)),
        "absolute-error": float(np.sum(np.abs(error))),
        "nll": float(np.sum(nll)),
        "crps": float(np.sum(crps)),
    }
    sums |= {f"inside-{level}": float(np.sum(hit)) for level, hit in inside.items()}
    return Scores(sums, {"evaluation.pit": np.histogram(pit, PIT_BINS, (0, 1))[0].astype(np.int64)})


def _checked(mean: ArrayLike, sd: ArrayLike, target: ArrayLike, ndim: int) -> tuple[Array, Array, Array]:
    m, s, y = (np.asarray(values, dtype=np.float64) for values in (mean, sd, target))
    if m.ndim != ndim or m.shape != s.shape or m.shape[-1:] != y.shape or 0 in m.shape[:-1]:
        expected = "[n], [n], [n]" if ndim == 1 else "[S, n], [S, n], [n]"
        raise NumericsError(f"expected mean, sd and target of shapes {expected}; found {m.shape}, {s.shape}, {y.shape}")
    for name, values in (("mean", m), ("sd", s), ("target", y)):
        if not np.all(np.isfinite(values)):
            raise NumericsError(f"`{name}` of a prediction is not finite in {np.sum(~np.isfinite(values))} places")
    if not np.all(s > 0):
        raise NumericsError(
            f"`sd` of a prediction is not positive in {np.sum(s <= 0)} places; lower `model.num-inducing`"
        )
    return m, s, y


def _density(z: Array) -> Array:
    return np.asarray(np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))


def _mean_absolute(mean: Array, sd: Array) -> Array:
    """E|N(mean, sd²)|."""
    z = mean / sd
    return 2 * sd * _density(z) + mean * (2 * special.ndtr(z) - 1)


def _mean_absolute_difference(means: Array, sds: Array) -> Array:
    """E|X − X'| of two independent draws from the mixture [n]: the diagonal once, every other pair twice."""
    total = (2 * sds / math.sqrt(math.pi)).sum(axis=0)
    for s in range(1, len(means)):
        total += 2 * _mean_absolute(means[s] - means[:s], np.hypot(sds[s], sds[:s])).sum(axis=0)
    return np.asarray(total / len(means) ** 2)
