"""Attacks find what is there to be found, and nothing where there is only a total or noise."""

from __future__ import annotations

import json

import numpy as np
import pytest
from faults import configured

from fedgp_flower.cli import app
from fedgp_flower.data.sites import SiteData
from fedgp_flower.errors import RunError
from fedgp_flower.methods.fedmgp.latents import Latents
from fedgp_flower.methods.fedmgp.unit import features, squared_gaps
from fedgp_flower.privacy.attacks import Seen, Sums, attacked, auc, reconstruction, spread
from fedgp_flower.run.attack import attack
from fedgp_flower.run.in_process import run_in_process


def site_of(rng: np.random.Generator, rows: int, dims: int = 1) -> SiteData:
    x, x_test = rng.uniform(-1.5, 1.5, (rows, dims)), rng.uniform(-1.5, 1.5, (60, dims))
    return SiteData(x, np.sin(2 * x[:, 0]), x_test, np.sin(2 * x_test[:, 0]), 0)


def kernel_rows(inducing: np.ndarray):
    latents = Latents(inducing, np.full((1, inducing.shape[1]), 0.3), np.ones(1), 1e-8)
    factors = latents.whitening()
    return lambda points: features(squared_gaps(points, inducing), latents, factors, latents.scales / 4)[0]


def test_auc_against_all_pairs():
    rng = np.random.default_rng(0)
    members, strangers = rng.integers(0, 5, 40).astype(float), rng.integers(0, 5, 30).astype(float)
    pairs = members[:, None] - strangers
    assert auc(members, strangers) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


@pytest.mark.parametrize("rows", [3, 10])
def test_sums_of_few_rows_are_the_rows(rows):
    """Their statistic has the rank of their number; that of more rows than inducing points says nothing."""
    rng = np.random.default_rng(1)
    of_row = kernel_rows(np.linspace(-2, 2, 20)[:, None])
    site, many = site_of(rng, rows), site_of(rng, 80)

    def sums(*sites: SiteData) -> Sums:
        x, y = np.concatenate([own.x for own in sites]), np.concatenate([own.y for own in sites])
        k = of_row(x)
        return Sums(k.T @ k, k.T @ y, of_row)

    x, both, recognised = reconstruction(sums(site), site, many, rng)
    assert x < 0.02
    assert both < 0.1
    assert recognised > 0.9
    distance, _, hidden = reconstruction(sums(site, many), site, many, rng)
    assert distance > 0.3
    assert abs(hidden - 0.5) < 4 * spread(rows, len(many.x_test))


def test_a_predictor_that_remembers_rows_betrays_them():
    rng = np.random.default_rng(2)
    sites = {"a": site_of(rng, 30), "b": site_of(rng, 30)}

    def remembers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = (np.abs(x - sites["a"].x[:, 0]) < 1e-12).any(axis=1)
        return np.sin(2 * x[:, 0]), np.where(known, 0.1, 1.0)

    plain = Seen(lambda x: (np.zeros(len(x)), np.ones(len(x))))
    [own, *_] = attacked({"a": Seen(remembers), "b": plain}, plain, sites)
    assert own.name == "membership by loss"
    assert own.per_site["a"] == 1.0
    assert own.reader == pytest.approx(0.5, abs=0.2)


KEYS = {"num_server_rounds": 2, "model__num_inducing": 12, "test_fraction": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over small sites, in the clear."""
    flat = configured(**KEYS, output_dir=str(tmp_path_factory.mktemp("runs")), name="run", partitioner="sizes")
    return run_in_process(flat | {"dataset": "diabetes", "partition.ratio": 12.0}, 6)


def test_the_command_prints_and_keeps_what_is_reached(folder, capsys):
    app(["attack", str(folder)], standalone_mode=False)
    assert "membership by loss" in capsys.readouterr().out
    assert "Attacks" in (folder / "report.html").read_text()
    kept = json.loads((folder / "attacks.json").read_text())
    names = [own["name"] for own in kept["attacks"]]
    assert names[:2] == ["membership by loss", "membership by likelihood ratio"]
    assert not kept["masked"]
    first = kept["attacks"][0]
    assert set(first["per_site"]) == set("012345")
    assert first["server"] > first["reader"] - 0.05


def test_under_masks_the_server_has_what_everybody_has(tmp_path):
    flat = configured(**KEYS, output_dir=str(tmp_path), name="run", privacy__secure_aggregation=True)
    found = attack(run_in_process(flat, 4))
    assert len(found) >= 3
    for own in found:
        assert own.server == pytest.approx(own.chance if own.reader is None else own.reader)
    with pytest.raises(RunError, match="attacks are known for"):
        attack(run_in_process(flat | {"name": "other", "method": "fgpr"}, 4))
