"""Rules that merge the updates of several sites into one, for any method that averages arrays.

A rule sees one row per site and returns the merged row with the weight each site had in it. It needs every update by
itself, so that what it serves asks ``Each``. Where Flower has the rule as a function of numbers it is Flower's that is
called: Krum and the trimmed mean; the median is numpy's, as in Flower, and the mean with other weights is one product.

To add a rule, write a function ``(updates, signals) -> Merged`` and its row in :data:`RULES`::

    def geometric_mean(updates: Array, signals: Signals) -> Merged:
        ...

    RULES = {..., "geometric-mean": geometric_mean}

Then ``fedmgp.aggregation = "geometric-mean"`` is valid, and :mod:`tests.test_aggregators` checks that it does not
depend on the order of the sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedgp_flower.errors import ConfigError
from fedgp_flower.typing import Array, NamedArrays


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged update and what each site contributed to it."""

    update: Array  # [P]
    weights: Array  # [K]  of each site; for coordinate-wise rules its mean over coordinates


@dataclass(frozen=True, slots=True)
class Signals:
    """What a rule may know beside the updates; only the fields that a rule names are read."""

    shares: Array  # [K]  p_k, summing to 1: equal, or by number of examples
    log_likelihoods: Array | None = None  # [K]  expected log-likelihood per observation
    staleness: Array | None = None  # [K]  rounds since the site sent its update
    threshold: float = 0.0
    """Norm above which an update is shortened; 0 takes the ``quantile`` of this round's norms."""
    quantile: float = 0.5
    trim: float = 0.2
    """Fraction cut from each end of every coordinate."""
    malicious: int = 0
    """Number of bad sites to withstand."""
    select: int = 1
    """Sites that multi-Krum averages."""
    decay: float = 1.0
    """An update that is t rounds old counts (1 + t)^(−decay)."""


Rule: TypeAlias = Callable[[Array, Signals], Merged]


def mean(updates: Array, signals: Signals) -> Merged:
    """Σ_k p_k Δ_k (Chung and Al Kontar 2024, Eq. 15).  ``updates`` [K, P]."""
    return Merged(signals.shares @ updates, signals.shares)


def loss_weighted(updates: Array, signals: Signals) -> Merged:
    """Weights softmax_k(expected log-likelihood per observation): a site whose data do not fit counts less."""
    if signals.log_likelihoods is None:
        raise ConfigError("aggregation 'loss-weighted' needs the log-likelihood of every site")
    weights = np.exp(signals.log_likelihoods - signals.log_likelihoods.max())
    weights = weights / weights.sum()
    return Merged(weights @ updates, weights)


def norm_clipped(updates: Array, signals: Signals) -> Merged:
    """Σ_k p_k min(1, c/‖Δ_k‖) Δ_k: no site moves the result further than p_k c.

    The weights are not normalised again, since that would give back the length that was cut. c = 0 takes a quantile of
    the norms, so that the threshold follows the updates as they shrink.
    """
    norms = np.linalg.norm(updates, axis=1)
    limit = signals.threshold or float(np.quantile(norms, signals.quantile))
    weights = signals.shares * np.minimum(1.0, limit / np.maximum(norms, np.finfo(float).tiny))
    return Merged(weights @ updates, weights)


def median(updates: Array, signals: Signals) -> Merged:
    """Coordinate-wise median, as Flower's FedMedian computes it; ``shares`` do not matter."""
    return Merged(np.median(updates, axis=0), _kept(updates, (len(updates) - 1) // 2))


def trimmed_mean(updates: Array, signals: Signals) -> Merged:
    """Coordinate-wise mean without the ⌊trim · K⌋ smallest and largest values; ``shares`` do not matter."""
    return Merged(trim_mean(updates, signals.trim), _kept(updates, int(signals.trim * len(updates))))


def _kept(updates: Array, cut: int) -> Array:
    """Mean over coordinates of each site's weight when ``cut`` values go from each end."""
    count = len(updates)
    ranks = np.argsort(np.argsort(updates, axis=0, kind="stable"), axis=0, kind="stable")
    inside = (ranks >= cut) & (ranks < count - cut)
    weights: Array = inside.mean(axis=1) / (count - 2 * cut)
    return weights


def krum(updates: Array, signals: Signals) -> Merged:
    """The one update nearest to its K − f − 2 closest others (Blanchard et al. 2017)."""
    return _krum(updates, signals, 1)


def multi_krum(updates: Array, signals: Signals) -> Merged:
    """The mean of the ``select`` updates with the best Krum scores."""
    return _krum(updates, signals, signals.select)


def _krum(updates: Array, signals: Signals, select: int) -> Merged:
    if len(updates) < least_sites("krum", signals.malicious):
        raise ConfigError(
            f"Krum withstands f = {signals.malicious} bad sites among {2 * signals.malicious + 3} or more (2f + 3); "
            f"{len(updates)} sites replied. Lower `malicious` or wait for more sites."
        )
    records = [RecordDict({"update": ArrayRecord({"update": FlowerArray(row)})}) for row in updates]
    chosen = select_multikrum(records, num_malicious_nodes=signals.malicious, num_nodes_to_select=select)
    weights = np.array([float(any(record is c for c in chosen)) for record in records])
    weights = signals.shares * weights
    weights /= weights.sum()
    return Merged(weights @ updates, weights)


def staleness_weighted(updates: Array, signals: Signals) -> Merged:
    """Weights ∝ p_k (1 + t_k)^(−decay), normalised, for updates that are t_k rounds old."""
    if signals.staleness is None:
        raise ConfigError("aggregation 'staleness-weighted' needs the staleness of every site")
    weights = signals.shares * (1.0 + signals.staleness) ** -signals.decay
    weights = weights / weights.sum()
    return Merged(weights @ updates, weights)


RULES: Mapping[str, Rule] = {
    "mean": mean,
    "loss-weighted": loss_weighted,
    "norm-clipped": norm_clipped,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "staleness-weighted": staleness_weighted,
}


def least_sites(rule: str, malicious: int) -> int:
    """Fewest sites a rule can work with: Krum chooses among 2f + 3 or more."""
    return 2 * malicious + 3 if rule in {"krum", "multi-krum"} else 1


def aggregate(rule: str, updates: Sequence[Mapping[str, Array]], signals: Signals) -> tuple[NamedArrays, Array]:
    """Merge named updates of several sites with a named rule; returns the merged arrays and each site's weight.

    Raises:
        ConfigError: an unknown rule, or signals the rule needs are missing.
    """
    if rule not in RULES:
        raise ConfigError(f"aggregation {rule!r} is not a rule; allowed: {', '.join(RULES)}")
    names = sorted(updates[0])
    rows = np.stack([np.concatenate([np.ravel(u[name]) for name in names]) for u in updates])
    merged = RULES[rule](rows, signals)
    ends = np.cumsum([np.size(updates[0][name]) for name in names])[:-1]
    parts = zip(names, np.split(merged.update, ends), strict=True)
    return {name: part.reshape(np.shape(updates[0][name])) for name, part in parts}, merged.weights
