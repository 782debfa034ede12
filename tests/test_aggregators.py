"""Aggregation rules on small arrays with answers by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgp_flower.errors import ConfigError
from strategies.fedmgp_rules import RULES, Signals, aggregate, krum, median, norm_clipped, trimmed_mean


def signalled(shares: np.ndarray, **changes: object) -> Signals:
    """Nothing is known but the shares."""
    return replace(Signals(shares, np.zeros(len(shares)), np.zeros(len(shares))), **changes)


EQUAL3 = signalled(np.full(3, 1 / 3))
ROWS = np.array([[1.0, 2.0], [3.0, -4.0], [100.0, 6.0]])


def named(rows: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{"b": row[1:], "a": row[:1].reshape(1, 1)} for row in rows]


def test_mean_uses_the_shares_and_keeps_names_and_shapes() -> None:
    merged, weights = aggregate("mean", named(ROWS), signalled(np.array([0.5, 0.3, 0.2])))
    assert merged["a"].shape == (1, 1)
    np.testing.assert_allclose(merged["a"], [[0.5 + 0.9 + 20.0]])
    np.testing.assert_allclose(merged["b"], [1.0 - 1.2 + 1.2])
    np.testing.assert_allclose(weights, [0.5, 0.3, 0.2])


def test_loss_weighted_is_a_softmax_that_does_not_overflow() -> None:
    levels = np.array([1000.0, 1000.0 + np.log(3.0), -1000.0])
    merged, weights = aggregate("loss-weighted", named(ROWS), signalled(EQUAL3.shares, log_likelihoods=levels))
    np.testing.assert_allclose(weights, [0.25, 0.75, 0.0], atol=1e-15)
    np.testing.assert_allclose(merged["b"], [0.25 * 2 - 0.75 * 4])


def test_norm_clipping_bounds_every_site() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 1.0], [600.0, 800.0]])  # norms 5, 1, 1000: the median is 5
    update, weights = norm_clipped(rows, EQUAL3)
    np.testing.assert_allclose(weights, np.array([1.0, 1.0, 0.005]) / 3)
    np.testing.assert_allclose(update, np.array([6.0, 9.0]) / 3)
    np.testing.assert_allclose(norm_clipped(rows * 0, EQUAL3)[0], [0.0, 0.0])


def test_median_and_trimmed_mean_by_coordinate() -> None:
    update, weights = median(ROWS, EQUAL3)
    np.testing.assert_allclose(update, [3.0, 2.0])
    np.testing.assert_allclose(weights, [0.5, 0.5, 0.0])
    update, weights = median(np.vstack([ROWS, [[5.0, 5.0]]]), signalled(np.full(4, 0.25)))
    np.testing.assert_allclose(update, [4.0, 3.5])
    np.testing.assert_allclose(weights.sum(), 1.0)
    rows = np.arange(10.0)[:, None] ** 2
    update, weights = trimmed_mean(rows, signalled(np.full(10, 0.1), trim=0.2))
    np.testing.assert_allclose(update, [np.mean([4, 9, 16, 25, 36, 49])])
    np.testing.assert_allclose(weights, [0, 0, *[1 / 6] * 6, 0, 0])


def test_krum_takes_an_honest_update_and_multi_krum_averages_them() -> None:
    rng = np.random.default_rng(0)
    honest = 1.0 + 0.1 * rng.normal(size=(5, 4))
    rows = np.vstack([honest, np.full((2, 4), -50.0) + rng.normal(size=(2, 4))])
    signals = signalled(np.full(7, 1 / 7), malicious=2, select=3)
    update, weights = krum(rows, signals)
    distance = np.square(rows[:, None] - rows[None]).sum(-1)
    scores = np.sort(distance, axis=1)[:, 1 : 7 - 2 - 2 + 1].sum(1)
    np.testing.assert_allclose(update, rows[np.argmin(scores)])
    assert weights.tolist() == [float(i == np.argmin(scores)) for i in range(7)]
    update, weights = RULES["multi-krum"](rows, signals)
    best = np.argsort(scores)[:3]
    np.testing.assert_allclose(update, rows[best].mean(0))
    assert weights[5:].sum() == 0


def test_staleness_discounts_late_updates() -> None:
    signals = signalled(np.array([0.5, 0.25, 0.25]), staleness=np.array([0.0, 0.0, 3.0]))
    _, weights = aggregate("staleness-weighted", named(ROWS), signals)
    np.testing.assert_allclose(weights, np.array([0.5, 0.25, 0.0625]) / 0.8125)


@settings(max_examples=40)
@given(st.integers(5, 9), st.integers(0, 10_000))
def test_no_rule_depends_on_the_order_of_sites_and_robust_ones_stay_in_the_honest_range(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 3))
    rows[0] *= 1e6
    shares = rng.dirichlet(np.ones(count))
    signals = Signals(
        shares, rng.normal(size=count), rng.integers(0, 4, count).astype(float), trim=0.25, malicious=1, select=2
    )
    order = rng.permutation(count)
    shuffled = Signals(
        shares[order], signals.log_likelihoods[order], signals.staleness[order], trim=0.25, malicious=1, select=2
    )
    for name, rule in RULES.items():
        (update, weights), (other, others) = rule(rows, signals), rule(rows[order], shuffled)
        np.testing.assert_allclose(update, other, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(weights[order], others, rtol=1e-9, atol=1e-12, err_msg=name)
        if name in {"median", "trimmed-mean", "krum", "multi-krum"}:
            assert np.all(update <= rows[1:].max(0)), name
            assert np.all(update >= rows[1:].min(0)), name


def test_too_few_updates_for_krum_are_refused() -> None:
    with pytest.raises(ConfigError, match="2f"):
        aggregate("krum", named(ROWS), signalled(EQUAL3.shares, malicious=1))
