"""Aggregation rules on small arrays with answers by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from strategies.fedmgp_rules import RULES, krum, mean, median, merged, norm_clipped, trimmed_mean

ROWS = np.array([[1.0, 2.0], [3.0, -4.0], [100.0, 6.0]])
USUAL = FedMGPOptions()


def test_the_mean_keeps_names_and_shapes() -> None:
    found = merged(mean, USUAL, [{"b": row[1:], "a": row[:1].reshape(1, 1)} for row in ROWS])
    np.testing.assert_allclose(found["a"], [[104 / 3]])
    np.testing.assert_allclose(found["b"], [4 / 3])


def test_norm_clipping_bounds_every_site() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 1.0], [600.0, 800.0]])  # norms 5, 1, 1000: the median is 5
    np.testing.assert_allclose(norm_clipped(rows, USUAL), np.array([6.0, 9.0]) / 3)
    np.testing.assert_allclose(norm_clipped(rows * 0, USUAL), [0.0, 0.0])


def test_median_and_trimmed_mean_by_coordinate() -> None:
    np.testing.assert_allclose(median(ROWS, USUAL), [3.0, 2.0])
    np.testing.assert_allclose(median(np.vstack([ROWS, [[5.0, 5.0]]]), USUAL), [4.0, 3.5])
    rows = np.arange(10.0)[:, None] ** 2
    np.testing.assert_allclose(trimmed_mean(rows, FedMGPOptions(trim=0.2)), [np.mean([4, 9, 16, 25, 36, 49])])


def test_krum_takes_an_honest_update_or_averages_several() -> None:
    rng = np.random.default_rng(0)
    honest = 1.0 + 0.1 * rng.normal(size=(5, 4))
    rows = np.vstack([honest, np.full((2, 4), -50.0) + rng.normal(size=(2, 4))])
    distance = np.square(rows[:, None] - rows[None]).sum(-1)
    scores = np.sort(distance, axis=1)[:, 1 : 7 - 2 - 2 + 1].sum(1)
    for select in (1, 3):
        options = FedMGPOptions(aggregation="krum", malicious=2, select=select)
        np.testing.assert_allclose(krum(rows, options), rows[np.argsort(scores)[:select]].mean(0))
    with pytest.raises(ConfigError, match="2f"):
        krum(ROWS, options)


@settings(max_examples=30)
@given(st.integers(5, 9), st.integers(0, 10_000))
def test_no_rule_depends_on_the_order_of_sites_and_robust_ones_stay_in_the_honest_range(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 3))
    rows[0] *= 1e6
    order = rng.permutation(count)
    for name, rule in RULES.items():
        options = FedMGPOptions(aggregation=name, trim=0.25, malicious=1, select=2)
        update = rule(rows, options)
        np.testing.assert_allclose(update, rule(rows[order], options), rtol=1e-9, err_msg=name)
        if name in {"median", "trimmed-mean", "krum"}:
            assert np.all(update <= rows[1:].max(0)), name
            assert np.all(update >= rows[1:].min(0)), name
