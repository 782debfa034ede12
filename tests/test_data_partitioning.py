import numpy as np
import pandas as pd
import pytest

from fedgp_flower.config import CoreConfig
from fedgp_flower.data.partitioning import Deal, deal, standard_columns
from fedgp_flower.errors import DataError

N = 240


def rows() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {"a": draw.normal(size=N), "b": 1e3 * draw.normal(size=N), "job": draw.choice(["u", "v"], N), "one": 1.0}
    )


def by(partitioner: str, sites: int, by_column: pd.Series | None = None, seed: int = 0, **partition) -> Deal:
    inputs = rows()
    config = CoreConfig.model_validate({"partitioner": partitioner, "seed": seed, "partition": partition})
    return deal(inputs, inputs["a"] if by_column is None else by_column, sites, config)


def sizes(found: Deal) -> list[int]:
    return [part.size for part in found.rows]


ALL = {
    "iid": {},
    "linear": {},
    "square": {},
    "exponential": {},
    "dirichlet": {"alpha": 1.0, "min-rows": 5},
    "sizes": {"ratio": 4.0},
    "kmeans": {},
    "blocks": {},
}


@pytest.mark.parametrize("name", ALL)
def test_every_row_is_dealt_once_and_the_seed_decides(name):
    found = by(name, 5, **ALL[name])
    assert np.array_equal(np.sort(np.concatenate(found.rows)), np.arange(N))
    assert all((np.diff(part) > 0).all() for part in found.rows)
    assert found.labels == ("0", "1", "2", "3", "4")
    again = by(name, 5, **ALL[name])
    assert all(np.array_equal(a, b) for a, b in zip(found.rows, again.rows, strict=True))
    other = by(name, 5, seed=1, **ALL[name])
    if name not in ("blocks", "kmeans"):  # these follow the inputs
        assert any(not np.array_equal(a, b) for a, b in zip(found.rows, other.rows, strict=True))


def test_sizes_are_what_the_names_say():
    assert sizes(by("iid", 7)) == [35, 35, 34, 34, 34, 34, 34]
    k = np.arange(1, 5)
    for name, weight in (("linear", k), ("square", k**2), ("exponential", np.exp(k))):
        assert np.abs(np.array(sizes(by(name, 4))) - N * weight / weight.sum()).max() < 4
    assert sizes(by("sizes", 3, ratio=3.0)) == [40, 80, 120]
    assert sizes(by("blocks", 5)) == [48] * 5


def test_blocks_are_contiguous_along_the_first_principal_component():
    x = np.random.default_rng(0).permutation(N).astype(float)
    inputs = pd.DataFrame({"x": x, "twice": 2 * x})
    found = deal(inputs, inputs["x"], 4, CoreConfig.model_validate({"partitioner": "blocks"}))
    assert [sorted(x[part]) for part in found.rows] == np.arange(N, dtype=float).reshape(4, -1).tolist()


def test_kmeans_finds_clusters_in_standardised_units():
    group = np.repeat([0, 1, 2], 80)
    draw = np.random.default_rng(0)
    inputs = pd.DataFrame({"fine": group + 0.01 * draw.normal(size=N), "wide": 1e6 * draw.uniform(-0.01, 0.01, N)})
    inputs["wide"] += 1e6 * (group == 1)
    found = deal(inputs, inputs["fine"], 3, CoreConfig.model_validate({"partitioner": "kmeans"}))
    assert sorted(tuple(np.unique(group[part])) for part in found.rows) == [(0,), (1,), (2,)]


def test_standard_columns_have_unit_spread_and_constants_vanish():
    wide = standard_columns(rows())
    assert wide.shape == (N, 5)  # a, b, one, and an indicator of each job
    assert wide.mean(axis=0) == pytest.approx(np.zeros(5), abs=1e-12)
    assert sorted(wide.std(axis=0)) == pytest.approx([0, 1, 1, 1, 1])


def test_dirichlet_with_small_alpha_skews_the_bins_of_a_numeric_column():
    column = rows()["a"]
    overall = column.std()
    even = by("dirichlet", 4, column, alpha=1000.0)
    skewed = by("dirichlet", 4, column, **{"alpha": 0.1, "min-rows": 2})
    assert max(sizes(even)) - min(sizes(even)) < 25
    means = [np.std([column.iloc[part].mean() for part in found.rows]) for found in (even, skewed)]
    assert means[0] < 0.1 * overall < 0.3 * overall < means[1]


def test_pathological_sites_see_few_classes():
    label = pd.Series(np.arange(N) % 6).astype(float)
    for sites in (6, 5, 12):
        found = by("pathological", sites, label)
        assert {label.iloc[part].nunique() for part in found.rows} == {2}
        assert sum(sizes(found)) == N


def test_natural_groups_are_the_sites_and_small_ones_are_left_out():
    ward = pd.Series(np.repeat([30.0, 4.0, 100.0, 7.0], [100, 60, 75, 5]))
    found = by("natural", 3, ward, column="ward")
    assert found.labels == ("4", "30", "100")
    assert [np.unique(ward.iloc[part]).tolist() for part in found.rows] == [[4.0], [30.0], [100.0]]
    assert sizes(found) == [60, 100, 75]
    town = ward.map({30.0: "Ely", 4.0: "Bath", 100.0: "Zell", 7.0: "Aix"})
    assert by("natural", 3, town, column="town").labels == ("Bath", "Ely", "Zell")
    assert by("natural", 4, town, **{"column": "town", "min-rows": 5}).labels == ("Aix", "Bath", "Ely", "Zell")
    for sites in (2, 4):
        with pytest.raises(DataError, match=r"`ward` has 3 groups with at least 10 rows .*; run with 3 sites"):
            by("natural", sites, ward, column="ward")


def test_impossible_requests_are_refused_with_the_key_to_change():
    with pytest.raises(DataError, match="'iid' with 241 sites: there are 240 training rows"):
        by("iid", N + 1)
    with pytest.raises(DataError, match="'exponential' with 20 sites is not possible"):
        by("exponential", 20)
    with pytest.raises(DataError, match=r"raise `partition.alpha`, lower `partition.min-rows` \(now 50\)"):
        by("dirichlet", 5, **{"alpha": 0.05, "min-rows": 50})
    with pytest.raises(DataError, match="cannot deal every class to a site; the partition column has 10 classes"):
        by("pathological", 5)
    few = pd.DataFrame({"x": [0.0, 0.0, 1.0, 1.0, 1.0]})
    with pytest.raises(DataError, match="'kmeans' with 3 sites leaves a site without rows"):
        deal(few, few["x"], 3, CoreConfig.model_validate({"partitioner": "kmeans"}))
