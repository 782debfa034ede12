"""PVI over the weights of a network: the draws are those of weights, factors are proper, runs go through."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from faults import configured

from fedgp_flower.errors import DataError
from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.methods.pvi_weights.network import ClassRows, VisitSettings, WeightSpaceNetwork, refined
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process

NETWORK = WeightSpaceNetwork(2, 4, 3)
SIZE = 4 * 3 + 3 * 5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def three_classes(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    """Points around three centres."""
    rng = np.random.default_rng(seed)
    label = np.arange(rows) % 3
    centres = np.array([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])
    x = centres[label] + 0.5 * rng.standard_normal((rows, 2))
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": label.astype(float)})


def data(frame: pd.DataFrame) -> ClassRows:
    return ClassRows(*(torch.from_numpy(frame[names].to_numpy().copy()) for names in (["a", "b"], "label")))


def test_draws_for_each_row_are_those_of_the_weights():
    """Mean and spread of every logit over 40 000 draws of all weights, written out."""
    x = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    mean, variance = (
        torch.randn(SIZE, generator=generator()).double(),
        torch.rand(SIZE, generator=generator(1)).double(),
    )
    q = DiagonalGaussian.from_moments(mean, variance)
    theta = mean + variance.sqrt() * torch.randn(40000, SIZE, generator=generator(2), dtype=torch.float64)
    first, second = theta[:, :12].view(-1, 4, 3), theta[:, 12:].view(-1, 3, 5)
    hidden = torch.relu(first @ torch.cat([x, torch.ones(2, 1)], 1).T)
    wanted = second @ torch.cat([hidden, hidden.new_ones(40000, 1, 2)], 1)  # [S, C, N]
    found = torch.stack([NETWORK.logits(x.repeat(20000, 1), q, generator(3))]).view(-1, 2, 3)
    torch.testing.assert_close(found.mean(0), wanted.mean(0).T, atol=0.08, rtol=0)
    torch.testing.assert_close(found.std(0), wanted.std(0).T, atol=0, rtol=0.04)


def test_a_visit_raises_the_bound_and_its_factor_is_proper():
    rows, prior = data(three_classes()), DiagonalGaussian.standard(SIZE)
    start = DiagonalGaussian.from_moments(NETWORK.initial(generator()), torch.full((SIZE,), 0.05**2).double())
    q, free_energy, trace = refined(NETWORK, rows, prior, start, VisitSettings(200, 0.02), generator())
    assert free_energy > trace.values[0] + 50
    assert ((q / prior).precision > 0).all()
    probability = NETWORK.probabilities(rows.x, q, 20, generator())
    assert (probability.argmax(1) == rows.y).double().mean() > 0.95


def test_a_visit_stops_where_the_fit_rises_no_more():
    rows, prior = data(three_classes()), DiagonalGaussian.standard(SIZE)
    start = DiagonalGaussian.from_moments(NETWORK.initial(generator()), torch.full((SIZE,), 0.05**2).double())
    *_, trace = refined(NETWORK, rows, prior, start, VisitSettings(500, 0.05), generator())
    assert trace.evaluations < 500


def test_labels_that_are_no_classes_are_named():
    with pytest.raises(DataError, match=r"below `bnn.classes` = 2"):
        data(three_classes()).checked(2)


KEYS = {
    "method": "pvi-bnn",
    "target": "label",
    "standardise": False,
    "bnn__classes": 3,
    "bnn__hidden": 6,
    "pvi__steps": 60,
    "pvi__learning_rate": 0.03,
    "num_server_rounds": 3,
    "name": "run",
}


def test_a_run_is_scored_saved_and_predicts(tmp_path: Path):
    path = tmp_path / "classes.csv"
    three_classes(150).to_csv(path, index=False)
    keys = configured(**KEYS, dataset=str(path), output_dir=str(tmp_path), keep_predictions=True)
    folder = run_in_process(keys, 3)
    read = load_run(folder)
    assert read.metrics.test["accuracy"] > 0.9
    chance = read.posterior.predict(three_classes(30, 5))
    assert list(chance) == [f"probability of {c}" for c in range(3)]
    assert (chance.to_numpy().argmax(1) == np.arange(30) % 3).mean() > 0.9
    assert "Pruned weights" in (folder / "report.html").read_text()
