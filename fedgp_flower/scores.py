"""Scores of predictions on held-out rows, in units of the target, as sums over rows that add over sites.

For a predictive distribution F with density f and an outcome y:

* ``nll`` = −log f(y), in nats;
* ``crps`` = ∫ (F(t) − 1[t ≥ y])² dt = E|X − y| − ½ E|X − X'| (Gneiting & Raftery 2007, Eq. 20–21);
* ``inside-95`` = 1 when y lies in the central 95 % interval, that is |F(y) − ½| ≤ 0.475;
* PIT = F(y), uniform on [0, 1] when the predictions are calibrated (Dawid 1984).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.follow_up import QUARTILES, FollowUp
from fedgp_flower.lazy import special
from fedgp_flower.privacy.disclosure import merged_cells, merged_classes
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array, NamedArrays

T = TypeVar("T", Array, Tensor)

LEVELS = (50, 90, 95)
"""Nominal coverage of the central intervals, in percent."""
PIT_BINS, RELIABILITY_BINS = 20, 10
"""Numbers of equal bins of [0, 1] for the PIT and for predicted probabilities."""
RANK_BINS, RANK_REACH = 80, 8.0
"""Number of equal bins of log odds, and their range on each side of 0; predictions in one bin count as ties."""
REGRESSION_SUMS = ("count", "squared-error", "absolute-error", "nll", "crps", *(f"inside-{level}" for level in LEVELS))
CLASSIFICATION_SUMS = ("count", "correct", "nll", "brier")
TIME_SUMS = ("count", "events", "nll", "ibs", "concordant", "comparable", *(f"inside-{level}" for level in LEVELS))
TASK_SUMS = (REGRESSION_SUMS, CLASSIFICATION_SUMS, TIME_SUMS)
"""Names of the sums, by kind of task."""
HISTOGRAM_SHAPES = {
    "evaluation.pit": (PIT_BINS,),
    "evaluation.reliability": (RELIABILITY_BINS, 3),
    "evaluation.ranks": (RANK_BINS, 2),
    "evaluation.survival": (len(QUARTILES), RELIABILITY_BINS, 3),
}
"""Shapes of the histograms of an evaluation."""
PAIR_BLOCK = 1000
"""Number of rows that are compared with all others at once."""
MUCH, MUCH_A_ROW = 3.0, 0.05
"""Gains of a much better prediction on held-out rows, in nats: in total and per row."""
NODES, WEIGHTS = np.polynomial.legendre.leggauss(160)
REACH = 9.0
"""Range of integrals over a transformed target on each side of the mean, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums (``sums``) and histograms (``arrays``) over rows; both add over subsets of the rows."""

    sums: dict[str, float]
    arrays: NamedArrays

    def flat(self) -> dict[str, float | list[float]]:
        """Return the metrics of a reply: sums as numbers, histograms as flat lists."""
        return self.sums | {name: [float(value) for value in array.ravel()] for name, array in self.arrays.items()}

    def coarse(self, least: int) -> Scores:
        """Merge histogram cells with fewer than ``least`` rows into their neighbours."""
        merged = {"evaluation.ranks": merged_classes}
        arrays = {name: merged.get(name, merged_cells)(array, least) for name, array in self.arrays.items()}
        return Scores(self.sums, arrays)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictive mean and variance of standardised noisy observations, each [N]."""

    mean: Array
    variance: Array
    tails: Array | None = None
    """Factors κ and shares p [2, J] of a mixture of normals N(mean, κ² variance), Σ p κ² = 1; None for a normal."""


def split_target(targets: T) -> tuple[T, T]:
    """Return the target [N] and its second column: exposure, trials or event; ones if there is none."""
    return (targets, targets**0) if targets.ndim == 1 else (targets[:, 0], targets[:, 1])


def shares_of(target: Mapping[str, float]) -> Array:
    """Return the shares of the classes [C] from a summary of the target."""
    return np.array([1 - target["share"], target["share"]] if "share" in target else [*target.values()])


def much_better(nll: float, other: float, rows: float) -> bool:
    """Return whether ``nll`` is much lower than ``other``, both summed over held-out rows, in nats."""
    return other - nll > max(MUCH, MUCH_A_ROW * rows)


def gaussian_scores(mean: ArrayLike, sd: ArrayLike, target: ArrayLike) -> Scores:
    """Score Gaussian predictions N(mean, sd²) [n]."""
    return mixture_scores(np.asarray(mean)[None], np.asarray(sd)[None], target)


def mixture_scores(means: ArrayLike, sds: ArrayLike, target: ArrayLike, shares: Array | None = None) -> Scores:
    """Score mixtures Σ_s p_s N(m_s, σ_s²), [S, n], with their mean as point prediction; p_s = 1/S without shares.

    CRPS (Grimit et al. 2006) = Σ_s p_s A(y − m_s, σ_s²) − ½ Σ_{s,t} p_s p_t A(m_s − m_t, σ_s² + σ_t²), A = E|N(μ, σ²)|.
    """
    m, s, y = (np.asarray(values, dtype=np.float64) for values in (means, sds, target))
    p = np.full(len(m), 1 / len(m)) if shares is None else shares / shares.sum()
    for name, values in (("mean", m), ("sd", s), ("target", y)):
        if not np.isfinite(values).all():
            raise NumericsError(f"`{name}` of a prediction is not finite in {np.sum(~np.isfinite(values))} places")
    if not (s > 0).all():
        raise NumericsError(
            f"`sd` of a prediction is not positive in {np.sum(s <= 0)} places; lower `model.num-inducing`"
        )
    crps = p @ _mean_absolute(y - m, s) - 0.5 * _mean_absolute_difference(m, s, p)
    pit = _cumulative(y, m, s, p)
    return regression_scores(p @ m - y, -_log_density(y, m, s, p), crps, pit, pit)


def regression_scores(error: Array, nll: Array, crps: Array, below: Array, pit: Array) -> Scores:
    """Sum scores over rows; ``below`` = F(y⁻) differs from ``pit`` = F(y) only for counts.

    The PIT of a row is uniform over [F(y⁻), F(y)] (Czado, Gneiting & Held 2009). Coverage counts the same fractions of
    rows, because no interval of whole numbers has a coverage of exactly 95 %.
    """

    def share(edge: float | Array) -> Array:
        """Return the fraction of each row's PIT below an edge: 0 or 1 unless y is a count."""
        with np.errstate(over="ignore"):
            return np.clip((edge - below) / np.maximum(pit - below, np.finfo(float).tiny), 0.0, 1.0)

    columns = [np.ones_like(error), error**2, np.abs(error), nll, crps]
    columns += [share(0.5 + level / 200) - share(0.5 - level / 200) for level in LEVELS]
    sums = {name: float(np.sum(column)) for name, column in zip(REGRESSION_SUMS, columns, strict=True)}
    left = share(np.linspace(0, 1, PIT_BINS + 1)[:, None])
    left[-1] = 1.0
    return Scores(sums, {"evaluation.pit": np.diff(left, axis=0).sum(axis=1)})


def time_scores(
    order: Array,
    reached: Array,
    nll: Array,
    target: Array,
    follow_up: FollowUp,
    survival: Callable[[Array], Array],
) -> Scores:
    """Score times to an event; ``reached`` = F(t), and a larger ``order`` predicts a later event.

    ``survival`` returns P(T > t) of each row at times [*, 1]; ``target`` holds times and event indicators [n, 2].

    The PIT of a row that is censored at t is uniform over [F(t), 1] (Haider, Hoehn, Davis & Greiner 2020). Two rows
    of a site are comparable if the shorter time is an event; Harrell's concordance is the share of comparable pairs in
    the predicted order, with ties as ½. The Brier score, a mean over times, and the observed survival at the quartiles
    of time are weighted by 1/P(C > t), and events at t by 1/P(C ≥ t), with C the censoring time (Graf et al. 1999).
    """
    (time, seen), grid = split_target(target), follow_up.grid[:, None]
    none, last = np.zeros_like(time), np.where(seen == 1, reached, 1.0)
    found = regression_scores(none, nll, none, reached, last)
    concordant, comparable = 0.0, 0.0
    for start in range(0, len(time), PAIR_BLOCK):
        block = slice(start, start + PAIR_BLOCK)
        first = (seen[block, None] == 1) & ((time[block, None] < time) | ((time[block, None] == time) & (seen == 0)))
        earlier = np.sign(order - order[block, None]) / 2 + 0.5
        concordant, comparable = concordant + float(earlier[first].sum()), comparable + float(first.sum())
    late = np.where(time > grid, 1 / follow_up.followed(grid), 0.0)
    early = np.where((time <= grid) & (seen == 1), 1 / follow_up.still_followed(np.minimum(time, grid[-1])), 0.0)
    predicted = survival(grid)
    ibs = float((early * predicted**2 + late * (1 - predicted) ** 2).mean(axis=0).sum())
    sums = found.sums | {"events": float(seen.sum()), "concordant": concordant, "comparable": comparable, "ibs": ibs}
    ends = follow_up.quartiles[:, None]
    table = zip(survival(ends), (time > ends) / follow_up.followed(ends), strict=True)
    calibrated = np.stack([_by_probability(*pair) for pair in table])
    return Scores({name: sums[name] for name in TIME_SUMS}, found.arrays | {"evaluation.survival": calibrated})


def mixture_quantiles(means: Array, sds: Array, levels: Sequence[float], shares: Array) -> Array:
    """Return quantiles [levels, n] of mixtures of Gaussians [S, n], by bisection between those of the components."""
    found = []
    for level in levels:
        ends = means + sds * special.ndtri(level)
        low, high = ends.min(axis=0), ends.max(axis=0)
        for _ in range(60):
            middle = (low + high) / 2
            short = _cumulative(middle, means, sds, shares / shares.sum()) < level
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        found.append((low + high) / 2)
    return np.stack(found)


def _log_density(target: Array, means: Array, sds: Array, shares: Array) -> Array:
    """Return the log density [n] of mixtures of Gaussians [S, n] with weights ``shares`` [S]."""
    z = (target - means) / sds
    parts = -0.5 * z**2 - np.log(sds) - 0.5 * math.log(2 * math.pi)
    return np.asarray(special.logsumexp(parts, axis=0, b=shares[:, None]))


def _cumulative(t: Array, means: Array, sds: Array, shares: Array) -> Array:
    """Return F(t) of such mixtures; t broadcasts with [n]."""
    total = np.zeros_like(t)
    for mean, sd, share in zip(means, sds, shares, strict=True):
        total += share * special.ndtr((t - mean) / sd)
    return total


def _mean_absolute(mean: Array, sd: Array) -> Array:
    """E|N(mean, sd²)|."""
    z = mean / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return np.asarray(2 * sd * density + mean * (2 * special.ndtr(z) - 1))


def _mean_absolute_difference(means: Array, sds: Array, shares: Array) -> Array:
    """Return E|X − X'| of two independent draws from the mixture [n]: the diagonal once, every other pair twice."""
    total = shares**2 @ (2 * sds / math.sqrt(math.pi))
    for s in range(1, len(means)):
        total += 2 * shares[s] * (shares[:s] @ _mean_absolute(means[s] - means[:s], np.hypot(sds[s], sds[:s])))
    return np.asarray(total)


def bernoulli_scores(probability: ArrayLike, label: ArrayLike) -> Scores:
    """Score p = P(label = 1): NLL, Brier (p − label)², correct at ½, and histograms of log odds by class."""
    p, y = np.asarray(probability, dtype=np.float64), np.asarray(label, dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise NumericsError("a predicted probability is not in [0, 1]; look for non-finite latent values")
    if not np.all((y == 0) | (y == 1)):
        raise NumericsError("a label is neither 0 nor 1; labels are indices into the two agreed levels")
    nll = -special.xlogy(y, p) - special.xlog1py(1 - y, -p)
    found = _classified((p >= 0.5) == (y == 1), nll, (p - y) ** 2, p, y)
    log_odds = np.clip(special.logit(p), -RANK_REACH, RANK_REACH)
    ranks = [np.histogram(log_odds[y == c], RANK_BINS, (-RANK_REACH, RANK_REACH))[0].astype(float) for c in (0, 1)]
    return Scores(found.sums, found.arrays | {"evaluation.ranks": np.stack(ranks, axis=1)})


def class_scores(probabilities: ArrayLike, label: ArrayLike) -> Scores:
    """Score [n, C]: NLL, Brier Σ_c (p_c − 1[label = c])², reliability of the most probable class (Guo et al. 2017)."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(label, dtype=np.float64)
    if not np.all(p >= 0) or not np.allclose(p.sum(axis=1), 1.0, atol=1e-6):
        raise NumericsError("a row of predicted probabilities does not sum to one; look for non-finite latent values")
    if not np.isin(y, np.arange(p.shape[1])).all():
        raise NumericsError(f"a label is not one of the {p.shape[1]} classes 0 to {p.shape[1] - 1}")
    observed, hit = y[:, None] == np.arange(p.shape[1]), (p.argmax(axis=1) == y).astype(np.float64)
    nll, brier = -special.xlogy(observed, p).sum(axis=1), ((p - observed) ** 2).sum(axis=1)
    return _classified(hit, nll, brier, p.max(axis=1), hit)


def _classified(correct: Array, nll: Array, brier: Array, probability: Array, outcome: Array) -> Scores:
    columns = (np.ones_like(probability), correct, nll, brier)
    sums = {name: float(np.sum(column)) for name, column in zip(CLASSIFICATION_SUMS, columns, strict=True)}
    return Scores(sums, {"evaluation.reliability": _by_probability(probability, outcome)})


def _by_probability(probability: Array, outcome: Array) -> Array:
    """Return numbers of rows, sums of probabilities and of outcomes by bins of the probability [B, 3]."""
    weights = (np.ones_like(probability), probability, outcome)
    bins = [np.histogram(probability, RELIABILITY_BINS, (0, 1), weights=weight)[0] for weight in weights]
    return np.stack(bins, axis=1)


@dataclass(frozen=True, slots=True)
class TargetUnits:
    """Units of the target: y = g⁻¹(shift + scale · t) for standardised t, with transformation g or the identity."""

    shift: float
    scale: float
    transform: Transform | None = None
    classes: int = 0
    """Number of classes of a target with classes."""
    follow_up: FollowUp | None = None
    """Follow-up of a target that is a time to an event."""

    def gaussian_scores(self, prediction: Prediction, target: Array) -> Scores:
        """Score predictions of a standardised target: normal, or mixtures of normals with the same mean."""
        if prediction.tails is None:
            return self.mixture_scores(prediction.mean[None], prediction.variance[None], target)
        factors, shares = prediction.tails
        mean, sd = self.modelled(prediction.mean, np.sqrt(prediction.variance))
        sds = factors[:, None] * sd
        return mixture_scores(np.broadcast_to(mean, sds.shape), sds, target * self.scale + self.shift, shares)

    def mixture_scores(self, means: Array, variances: Array, target: Array) -> Scores:
        """Score equally weighted mixtures of Gaussians [S, N] of a standardised target [N]."""
        goal, moments = target * self.scale + self.shift, self.modelled(means, np.sqrt(variances))
        if self.transform is None:
            return mixture_scores(*moments, goal)
        return transformed_scores(*moments, goal, self.transform)

    def original(self, prediction: Prediction, target: Array) -> tuple[Array, Array, Array]:
        """Return mean, sd and target in original units."""
        return *self.moments(prediction.mean, np.sqrt(prediction.variance)), self.values(target)

    def values(self, standardised: Array) -> Array:
        """Return standardised values in original units."""
        shifted = standardised * self.scale + self.shift
        return shifted if self.transform is None else self.transform.inverse(shifted)

    def moments(self, mean: Array, sd: Array) -> tuple[Array, Array]:
        """Return mean and sd [N] in original units."""
        mean, sd = self.modelled(mean, sd)
        return (mean, sd) if self.transform is None else transformed_moments(mean[None], sd[None], self.transform)

    def quantiles(self, mean: Array, sd: Array, levels: Sequence[float], tails: Array | None = None) -> Array:
        """Return quantiles [levels, N] in original units, of normals or of mixtures as in :class:`Prediction`."""
        mean, sd = self.modelled(mean, sd)
        if tails is not None:
            unit = mixture_quantiles(np.zeros((tails.shape[1], 1)), tails[0][:, None], levels, tails[1])
            return mean + sd * unit
        if self.transform is None:
            return mean + sd * special.ndtri(np.array(levels))[:, None]
        return transformed_quantiles(mean, sd, levels, self.transform)

    def modelled(self, mean: Array, sd: Array) -> tuple[Array, Array]:
        """Return mean and sd of g(y), the transformed target, without standardisation."""
        return mean * self.scale + self.shift, sd * self.scale


def transformed_scores(means: Array, sds: Array, target: Array, transform: Transform) -> Scores:
    """Score the mixture (1/S) Σ_s N(means_s, sds_s²) of t, [S, n], at t = ``target`` [n], in units of y = g⁻¹(t).

    If t has a floor c, such as 0 for a square root, its distribution is truncated to t > c. The CRPS is an integral
    over t by Gauss–Legendre quadrature, with dy = dt / g'(y):

        CRPS = ∫_{t < t₀} F(t)² dy + ∫_{t > t₀} (1 − F(t))² dy.
    """
    even = np.full(len(means), 1 / len(means))
    y, cut = transform.inverse(target), _cumulative(np.full(means.shape[1], transform.floor), means, sds, even)
    low = np.maximum((means - REACH * sds).min(axis=0), transform.floor)
    high = (means + REACH * sds).max(axis=0)
    middle = np.clip(target, low, high)
    crps = np.abs(y - transform.inverse(middle))
    for start, end, above in ((low, middle, 0.0), (middle, high, 1.0)):
        t, weights = _rule(start, end)
        lengths = weights * np.exp(-transform.log_slope(transform.inverse(t)))
        reached = (_cumulative(t, means, sds, even) - cut) / (1 - cut)
        crps = crps + (lengths * (reached - above) ** 2).sum(axis=0)
    nll = np.log1p(-cut) - _log_density(target, means, sds, even) - transform.log_slope(y)
    pit = (_cumulative(target, means, sds, even) - cut) / (1 - cut)
    return regression_scores(transformed_moments(means, sds, transform)[0] - y, nll, crps, pit, pit)


def transformed_moments(means: Array, sds: Array, transform: Transform) -> tuple[Array, Array]:
    """Return mean and sd of y [n] for mixtures of t [S, n], by quadrature over the range of each component."""
    first, second = np.zeros(means.shape[1]), np.zeros(means.shape[1])
    for mean, sd in zip(means, sds, strict=True):
        t, weights = _rule(np.maximum(mean - REACH * sd, transform.floor), mean + REACH * sd)
        weights = weights * np.exp(-0.5 * ((t - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
        y = transform.inverse(t)
        first, second = first + (weights * y).sum(axis=0), second + (weights * y**2).sum(axis=0)
    even = np.full(len(means), 1 / len(means))
    share = len(means) * (1 - _cumulative(np.full(means.shape[1], transform.floor), means, sds, even))
    return first / share, np.sqrt(np.maximum(second / share - (first / share) ** 2, 0.0))


def transformed_quantiles(mean: Array, sd: Array, levels: Sequence[float], transform: Transform) -> Array:
    """Return quantiles of y [levels, n] for t ~ N(mean, sd²)."""
    below = special.ndtr((transform.floor - mean) / sd)
    share = np.array(levels)[:, None]
    return transform.inverse(mean + sd * special.ndtri(below + share * (1 - below)))


def _rule(low: Array, high: Array) -> tuple[Array, Array]:
    """Return quadrature nodes and weights [Q, n] for integrals from ``low`` to ``high`` [n]."""
    half = (high - low) / 2
    return low + half * (NODES[:, None] + 1), half * WEIGHTS[:, None]
