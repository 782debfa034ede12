"""Scores of predictions on a site's held-out rows, as sums that add over rows and over sites.

A site never sends a row: it sends the sums below, in the original units of the target, and two small histograms. For a
predictive distribution F with density f and an outcome y:

* ``nll`` = −log f(y), the negative log predictive density of a noisy observation, in nats;
* ``crps`` = ∫ (F(t) − 1[t ≥ y])² dt = E|X − y| − ½ E|X − X'|, in units of y (Gneiting & Raftery 2007, Eq. 20–21);
* ``inside-95`` = 1 when y lies in the central 95 % interval, that is |F(y) − ½| ≤ 0.475;
* PIT = F(y), uniform on [0, 1] when the predictions are calibrated (Dawid 1984).

A predictive distribution is a Gaussian, an even mixture of Gaussians, either of them for a transformed target, a
mixture of Poisson distributions for counts, or the probabilities of classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedgp_flower.errors import NumericsError
from fedgp_flower.lazy import Lazy, special
from fedgp_flower.privacy.disclosure import merged_cells, merged_classes
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    import torch

    from fedgp_flower.gp import likelihoods
else:
    torch, likelihoods = Lazy("torch"), Lazy("fedgp_flower.gp.likelihoods")

LEVELS = (50, 90, 95)
"""Central intervals that are counted, in percent."""
PIT_BINS = 20
"""Equal bins of [0, 1] in which the PIT is counted."""
RELIABILITY_BINS = 10
"""Equal bins of [0, 1] in which a predicted probability is counted."""
RANK_BINS, RANK_REACH = 80, 8.0
"""Equal bins of log odds, and how far they reach from even odds: predictions that differ by less count as ties."""
REGRESSION_SUMS = (
    *("count", "squared-error", "absolute-error", "nll", "crps"),
    *("inside-50", "inside-90", "inside-95"),
)
CLASSIFICATION_SUMS = ("count", "correct", "nll", "brier")
"""Names of the sums, by kind of task."""
NODES, WEIGHTS = np.polynomial.legendre.leggauss(160)
REACH = 9.0
"""How far integrals over a transformed target go, in standard deviations."""
RATE_NODES, FEWER_RATE_NODES, RATE_REACH = 241, 49, 6.5
"""Steps of a log rate for a density and, for the many values of F in a CRPS, fewer; how far they go in sd."""
COUNT_STEPS = 400
"""Integers at which the CRPS of a count looks at F, at equal ratios; every integer where these are denser."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums over rows (``sums``) and histograms over rows (``arrays``), which add over pieces of the rows."""

    sums: dict[str, float]
    arrays: NamedArrays

    def flat(self) -> dict[str, float | list[float]]:
        """As metrics of a reply: sums as numbers, histograms as flat lists."""
        return self.sums | {name: [float(value) for value in array.ravel()] for name, array in self.arrays.items()}

    def coarse(self, least: int) -> Scores:
        """The same with histograms in which small cells have joined a neighbour."""
        merged = {"evaluation.ranks": merged_classes}
        arrays = {name: merged.get(name, merged_cells)(array, least) for name, array in self.arrays.items()}
        return Scores(self.sums, arrays)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictive mean and variance of noisy observations, standardised, each [N]."""

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


def gaussian_scores(mean: ArrayLike, sd: ArrayLike, target: ArrayLike) -> Scores:
    """Scores of Gaussian predictions N(mean, sd²) [n], with the closed-form CRPS σ[z(2Φ(z) − 1) + 2φ(z) − π^(−½)]."""
    m, s, y = _checked(mean, sd, target, ndim=1)
    z = (y - m) / s
    nll = 0.5 * z**2 + np.log(s) + 0.5 * math.log(2 * math.pi)
    crps = s * (z * (2 * special.ndtr(z) - 1) + 2 * _density(z) - 1 / math.sqrt(math.pi))
    inside = {level: np.abs(z) <= special.ndtri(0.5 + level / 200) for level in LEVELS}
    return _regression(m - y, nll, crps, inside, _bins(special.ndtr(z)))


def mixture_scores(means: ArrayLike, sds: ArrayLike, target: ArrayLike) -> Scores:
    """Scores of equal-weight Gaussian mixtures (1/S) Σ_s N(means_s, sds_s²), such as predictions averaged over samples.

    The point prediction is the mixture mean. Intervals are central in probability (through the PIT). With
    A(μ, σ²) = E|N(μ, σ²)| = 2σφ(μ/σ) + μ(2Φ(μ/σ) − 1), the CRPS is (Grimit et al. 2006)
    mean_s A(y − m_s, σ_s²) − ½ mean_{s,t} A(m_s − m_t, σ_s² + σ_t²). ``means`` and ``sds`` are [S, n], ``target`` is
    [n]. Time O(S² n), memory O(S n).
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
    log_odds = np.clip(special.logit(p), -RANK_REACH, RANK_REACH)
    ranks = [np.histogram(log_odds[y == c], RANK_BINS, (-RANK_REACH, RANK_REACH))[0].astype(float) for c in (0, 1)]
    return Scores(sums, {"evaluation.reliability": _reliability(p, y), "evaluation.ranks": np.stack(ranks, axis=1)})


def class_scores(probabilities: ArrayLike, label: ArrayLike) -> Scores:
    """Scores of probabilities [n, C] of C classes: NLL, Brier Σ_c (p_c − 1[label = c])², correct where p is largest.

    Reliability is that of the likeliest class: its probability, and whether it came true (Guo et al. 2017).
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
    hit = (p.argmax(axis=1) == y).astype(float)
    return Scores(sums, {"evaluation.reliability": _reliability(p.max(axis=1), hit)})


def _reliability(probability: Array, outcome: Array) -> Array:
    """Rows, probabilities and outcomes, summed by bins of the probability, [B, 3]."""
    weights = (np.ones_like(probability), probability, outcome)
    return np.stack([np.histogram(probability, RELIABILITY_BINS, (0, 1), weights=w)[0] for w in weights], axis=1)


def regression_scores(error: Array, nll: Array, crps: Array, pit: Array) -> Scores:
    """Sums of scores that were computed row by row; intervals are central in probability, |PIT − ½| ≤ ½ level."""
    inside = {level: np.abs(pit - 0.5) <= level / 200 for level in LEVELS}
    return _regression(error, nll, crps, inside, _bins(pit))


def _bins(pit: Array) -> NDArray[np.int64]:
    return np.histogram(pit, PIT_BINS, (0, 1))[0].astype(np.int64)


def _regression(
    error: Array, nll: Array, crps: Array, inside: dict[int, NDArray[np.bool_]], pit: NDArray[np.generic]
) -> Scores:
    sums = {
        "count": float(error.size),
        "squared-error": float(np.sum(error**2)),
        "absolute-error": float(np.sum(np.abs(error))),
        "nll": float(np.sum(nll)),
        "crps": float(np.sum(crps)),
    }
    sums |= {f"inside-{level}": float(np.sum(hit)) for level, hit in inside.items()}
    return Scores(sums, {"evaluation.pit": pit})


@dataclass(frozen=True, slots=True)
class TargetUnits:
    """The units of the target: y = shift + scale · t of a standardised t, or a transformation's inverse of that."""

    shift: float
    scale: float
    transform: Transform | None = None

    def gaussian_scores(self, prediction: Prediction, target: Array) -> Scores:
        """Scores of Gaussian predictions of a standardised target."""
        if self.transform is None:
            return gaussian_scores(*self.original(prediction, target))
        return self.mixture_scores(prediction.mean[None], prediction.variance[None], target)

    def mixture_scores(self, means: Array, variances: Array, target: Array) -> Scores:
        """Scores of even mixtures of Gaussians [S, N] of a standardised target [N]."""
        goal, moments = target * self.scale + self.shift, self._unscaled(means, variances)
        if self.transform is None:
            return mixture_scores(*moments, goal)
        return transformed_scores(*moments, goal, self.transform)

    def original(self, prediction: Prediction, target: Array) -> tuple[Array, Array, Array]:
        """Mean, standard deviation and target in the units of the data."""
        moments, goal = self._unscaled(prediction.mean, prediction.variance), target * self.scale + self.shift
        if self.transform is None:
            return *moments, goal
        return *transformed_moments(*moments, self.transform), self.transform.inverse(goal)

    def quantiles(self, prediction: Prediction, levels: Sequence[float]) -> Array:
        """Quantiles [levels, N] of a transformed target."""
        assert self.transform is not None
        return transformed_quantiles(*self._unscaled(prediction.mean, prediction.variance), levels, self.transform)

    def _unscaled(self, mean: Array, variance: Array) -> tuple[Array, Array]:
        """Mean and standard deviation in units of the target, or of the transformed target."""
        return mean * self.scale + self.shift, np.sqrt(variance) * self.scale


def transformed_scores(means: Array, sds: Array, target: Array, transform: Transform) -> Scores:
    """Scores in units of y of the mixture (1/S) Σ_s N(means_s, sds_s²) of t, [S, n], at t = ``target`` [n]."""
    mixture = _TransformedMixture(means, sds, transform)
    y = transform.inverse(target)
    nll = -mixture.log_density(target) - transform.log_slope(y)
    return regression_scores(mixture.moments()[0] - y, nll, mixture.crps(target), mixture.distribution(target))


def transformed_moments(mean: Array, sd: Array, transform: Transform) -> tuple[Array, Array]:
    """Mean and standard deviation of y [n] for t ~ N(mean, sd²)."""
    return _TransformedMixture(mean[None], sd[None], transform).moments()


def transformed_quantiles(mean: Array, sd: Array, levels: Sequence[float], transform: Transform) -> Array:
    """Quantiles of y [levels, n] for t ~ N(mean, sd²)."""
    below = special.ndtr((transform.floor - mean) / sd)
    share = np.array(levels)[:, None]
    return transform.inverse(mean + sd * special.ndtri(below + share * (1 - below)))


class _TransformedMixture:
    """Predictions of y = g⁻¹(t) where t is an even mixture of Gaussians; see :mod:`fedgp_flower.transforms`.

    Where t ends at a floor c, as that of a square root at 0, its distribution is the Gaussian given t > c. Means and
    CRPS are integrals over t by the rule of Gauss and Legendre, with dy = dt / g'(y):

        E y = ∫ y(t) p(t) dt,    CRPS = ∫_{t < t₀} F(t)² dy + ∫_{t > t₀} (1 − F(t))² dy.
    """

    def __init__(self, means: Array, sds: Array, transform: Transform) -> None:
        self.means, self.sds, self.transform = means, sds, transform
        self.low = np.maximum((means - REACH * sds).min(axis=0), transform.floor)
        self.high = (means + REACH * sds).max(axis=0)
        self.below = self._cumulative(np.full(means.shape[1], transform.floor))

    def _cumulative(self, t: Array) -> Array:
        total = np.zeros_like(t)
        for mean, sd in zip(self.means, self.sds, strict=True):
            total += special.ndtr((t - mean) / sd)
        return total / len(self.means)

    def distribution(self, t: Array) -> Array:
        """F(t), for t that broadcasts with [n]."""
        return (self._cumulative(t) - self.below) / (1 - self.below)

    def log_density(self, t: Array) -> Array:
        """Log p(t) [n]."""
        z = (t - self.means) / self.sds
        parts = -0.5 * z**2 - np.log(self.sds) - 0.5 * math.log(2 * math.pi)
        return np.asarray(special.logsumexp(parts, axis=0)) - math.log(len(parts)) - np.log1p(-self.below)

    def moments(self) -> tuple[Array, Array]:
        """Mean and standard deviation of y [n]: each component's integral goes over that component's reach."""
        first, second = np.zeros(self.means.shape[1]), np.zeros(self.means.shape[1])
        for mean, sd in zip(self.means, self.sds, strict=True):
            t, weights = _rule(np.maximum(mean - REACH * sd, self.transform.floor), mean + REACH * sd)
            weights = weights * np.exp(-0.5 * ((t - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
            y = self.transform.inverse(t)
            first, second = first + (weights * y).sum(axis=0), second + (weights * y**2).sum(axis=0)
        share = len(self.means) * (1 - self.below)
        centre = first / share
        return centre, np.sqrt(np.maximum(second / share - centre**2, 0.0))

    def crps(self, target: Array) -> Array:
        """In units of y [n]."""
        middle = np.clip(target, self.low, self.high)
        total = np.abs(self.transform.inverse(target) - self.transform.inverse(middle))
        for (start, end), above in (((self.low, middle), 0.0), ((middle, self.high), 1.0)):
            t, weights = _rule(start, end)
            lengths = weights * np.exp(-self.transform.log_slope(self.transform.inverse(t)))
            total = total + (lengths * (self.distribution(t) - above) ** 2).sum(axis=0)
        return total


def _rule(low: Array, high: Array) -> tuple[Array, Array]:
    """Nodes and weights [Q, n] of integrals from ``low`` to ``high`` [n]."""
    half = (high - low) / 2
    return low + half * (NODES[:, None] + 1), half * WEIGHTS[:, None]


def count_scores(mean: Array, variance: Array, target: Array) -> Scores:
    """Scores of counts y | f ~ Poisson(e^f), f ~ N(m, v), [n], with the point prediction E y = exp(m + ½ v).

    The mixture is taken at equal steps of f, where the trapezoidal rule converges faster than any power. y lies in the
    central interval where F(y) and 1 − F(y − 1) both exceed its tails, and the PIT of a row is spread evenly over
    [F(y − 1), F(y)] (Czado, Gneiting & Held 2009).
    """
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all()):
        raise NumericsError("moments of a predicted log rate are not finite, or a variance is negative")
    if not ((target >= 0) & (target == np.rint(target))).all():
        raise NumericsError("a target is not a count: `model.likelihood` = 'poisson' needs whole numbers from 0 on")
    log_rates, share = _rates(mean, variance, RATE_NODES)
    log_parts = target * log_rates - np.exp(log_rates) - special.gammaln(target + 1)
    error = np.exp(mean + variance / 2) - target
    upper = _count_distribution(target, log_rates, share)
    lower = np.where(target > 0, _count_distribution(np.maximum(target - 1, 0), log_rates, share), 0.0)
    nll = -np.asarray(special.logsumexp(log_parts, axis=0, b=share[:, None]))
    crps = _count_crps(target, *_rates(mean, variance, FEWER_RATE_NODES))
    tails = {level: 0.5 - level / 200 for level in LEVELS}
    inside = {level: (upper >= tail) & (lower <= 1 - tail) for level, tail in tails.items()}
    return _regression(error, nll, crps, inside, _spread(lower, upper))


def count_quantiles(mean: Array, sd: Array, levels: Sequence[float]) -> Array:
    """The least counts k with F(k) ≥ level, [levels, n], of the mixture whose counts have these moments [n].

    A log-normal rate e^f has E y = r = exp(m + ½ v) and var y = r + r² (e^v − 1), so that m and v can be read off.
    """
    spread = np.maximum(sd**2 - mean, 0.0) / mean**2  # e^v − 1 is below zero by rounding alone
    variance = np.log1p(spread)
    log_rates, share = _rates(np.log(mean) - variance / 2, variance, RATE_NODES)
    found = np.empty((len(levels), len(mean)))
    for row, level in zip(found, levels, strict=True):
        low, high = np.full(len(mean), -1.0), np.maximum(np.ceil(mean), 1.0)
        while (short := _count_distribution(high, log_rates, share) < level).any():
            low[short], high[short] = high[short], 2 * high[short]
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            enough = _count_distribution(np.maximum(middle, 0.0), log_rates, share) >= level
            settled = high - low <= 1
            high = np.where(enough & ~settled, middle, high)
            low = np.where(enough | settled, low, middle)
        row[:] = high
    return found


def central(mean: Array, sd: Array, counts: bool) -> tuple[Array, Array]:
    """Ends of the 95 % interval of an observation with these moments: of a Gaussian, or of a count."""
    if counts:
        low, high = count_quantiles(mean, sd, (0.025, 0.975))
        return low, high
    half = float(special.ndtri(0.975)) * sd
    return mean - half, mean + half


def _rates(mean: Array, variance: Array, count: int) -> tuple[Array, Array]:
    """Log rates [Q, n] and their shares [Q]."""
    nodes = np.linspace(-RATE_REACH, RATE_REACH, count)
    weights = np.exp(-0.5 * nodes**2)
    return mean + np.sqrt(variance) * nodes[:, None], weights / weights.sum()


def _count_distribution(count: Array, log_rates: Array, share: Array) -> Array:
    """F(count) of the mixture, for counts that broadcast with [n]."""
    total = np.zeros(np.broadcast_shapes(np.shape(count), log_rates.shape[1:]))
    for log_rate, weight in zip(log_rates, share, strict=True):
        total += weight * special.pdtr(count, np.exp(log_rate))
    return total


def _count_crps(target: Array, log_rates: Array, share: Array) -> Array:
    """Σ_k (F(k) − 1[k ≥ y])², with F constant between the integers that are looked at."""
    rate = float(np.exp(log_rates.max(initial=0.0)))
    end = max(rate + RATE_REACH * np.sqrt(rate) + 10, float(target.max(initial=0.0)) + 1)
    steps = np.rint(np.expm1(np.linspace(0, np.log1p(end), COUNT_STEPS)))
    edges = np.unique(np.concatenate([steps, target]))
    middle, length = np.floor((edges[:-1] + edges[1:] - 1) / 2), np.diff(edges)
    gap = _count_distribution(middle[:, None], log_rates, share) - (edges[:-1, None] >= target)
    return np.asarray(length @ gap**2)


def _spread(lower: Array, upper: Array) -> Array:
    """Rows by bin of the PIT, each spread over [lower, upper] [n]."""
    edges = np.linspace(0, 1, PIT_BINS + 1)[:, None]
    width = np.maximum(upper - lower, np.finfo(float).tiny)
    below = np.clip((edges - lower) / width, 0.0, 1.0)  # share of each row's mass to the left of an edge
    below[-1] = 1.0
    return np.asarray(np.diff(below, axis=0).sum(axis=1))


def latent_scores(
    observed: likelihoods.PointLikelihood,
    parameter: torch.Tensor,
    mean: Array,
    variance: Array,
    target: Array,
    scale: float,
) -> Scores:
    """Classes by their probability, counts as mixtures of Poisson distributions, heavy-tailed numbers by density.

    Intervals and CRPS of the last are those of a Gaussian with the same two moments.

    Args:
        observed: How targets are observed.
        parameter: Of the likelihood.
        mean: Of f [n], standardised.
        variance: Of f [n].
        target: Standardised [n].
        scale: Of the target, in original units.
    """
    parameter = parameter.detach().double().cpu()
    moments = torch.from_numpy(mean), torch.from_numpy(variance)
    if isinstance(observed, likelihoods.Counts):
        return count_scores(mean, variance, target)
    centre, spread = (part.numpy() for part in observed.moments(*moments, parameter))
    if isinstance(observed, likelihoods.Probit):
        return bernoulli_scores(centre, target)
    scores = gaussian_scores(scale * centre, scale * spread**0.5, scale * target)
    density = observed.log_predictive(torch.from_numpy(target), *moments, parameter)
    return Scores(scores.sums | {"nll": len(target) * math.log(scale) - float(density.sum())}, scores.arrays)


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
