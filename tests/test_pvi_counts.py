"""Counts: as data (Poisson), as rows of a mini-batch, and of what a local update had to do, which sites report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, FaultyGrid, configured, run
from flwr.app import Message

from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.gp.optimisers import AdamSettings, Trace, maximise
from fedgp_flower.methods.pvi import replay
from fedgp_flower.methods.pvi.factors import PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import (
    Data,
    Draws,
    Latents,
    Point,
    SparseModel,
    local_free_energy,
    sparse_model,
)
from fedgp_flower.methods.pvi.learner import Site, Situation, Update, linear, replayed
from fedgp_flower.methods.pvi.options import Form, PVIOptions
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update, first_factor, lbfgs_update
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config

INDUCING = 10


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(likelihood: str) -> SparseModel:
    return sparse_model(ModelSection(likelihood=likelihood, noise=0.04), 1)


def fixed(own: SparseModel) -> Latents:
    return Latents(Point(torch.linspace(-3, 3, INDUCING).double()), Point(own.initial_hyper()))


def draws_at(latents: Latents) -> Draws:
    return Draws(latents.inducing.value.reshape(1, -1, 1), latents.hyper.value[None])


def counts(level: float, rows: int = 60) -> Data:
    """Poisson counts around exp(level)."""
    x = 6 * torch.rand(rows, 1, generator=generator(), dtype=torch.float64) - 3
    return Data(x, torch.poisson((level + 0.7 * x[:, 0].sin()).exp(), generator=generator(1)))


def sine(rows: int = 30) -> Data:
    x = 6 * torch.rand(rows, 1, generator=generator(), dtype=torch.float64) - 3
    return Data(x, x[:, 0].sin() + 0.2 * torch.randn(rows, generator=generator(1), dtype=torch.float64))


def options(**keys: Any) -> PVIOptions:
    flat = {f"pvi.{name.replace('_', '-')}": value for name, value in keys.items()}
    return parse_config(
        {"method": "pvi", "pvi.local-update": "replay", "pvi.min-rows-per-pseudo-point": 1, **flat}
    ).options


@pytest.mark.parametrize("form", ["tied", "free", "full", "cpo"])
@pytest.mark.parametrize("level", [0.0, 3.0, 6.0])
def test_a_first_factor_of_counts_starts_near_the_optimum_at_any_level(form: Form, level: float) -> None:
    """The raw counts would be off by thousands of nats; log(y + ½) is off by less than one per row."""
    own, data = model("poisson"), counts(level)
    latents = fixed(own)
    start = first_factor(own, data, latents, form, num_points=40, min_rows=1)
    value = local_free_energy(own, draws_at(latents), [], start, data).item()
    begun = first_factor(own, data, latents, "free", num_points=60, min_rows=1)
    problem = LocalProblem(own, data, [], latents, num_samples=1)
    best = lbfgs_update(problem, begun, latents, max_evaluations=200, generator=generator()).free_energy
    assert best - len(data) < value <= best + 1e-6


def test_averaged_counts_weigh_what_their_rows_say_of_the_logarithm() -> None:
    """Var log y ≈ 1/E y: a mean of n counts near λ suggests log λ with precision nλ."""
    own = model("poisson")
    same = Data(torch.zeros(6, 1).double(), torch.full((6,), 20.0).double())
    factor = first_factor(own, same, fixed(own), "tied", num_points=2, min_rows=3)
    assert factor.targets.tolist() == pytest.approx([math.log(20.5)] * 2)
    assert factor.root.square().tolist() == pytest.approx([3 * 20.5] * 2)


def test_a_mini_batch_stands_for_all_rows() -> None:
    """All rows are equal, so N/|B| times any batch is the sum over all rows: the update is that of all rows."""
    own = model("gaussian")
    same = Data(torch.full((24, 1), 0.7).double(), torch.full((24,), 1.1).double())
    factor, latents = PseudoObservations(same.inputs[:3] + 0.1, same.targets[:3], torch.ones(3).double()), fixed(own)
    found = [
        adam_update(
            LocalProblem(own, same, [], latents, num_samples=1, batch_size=size),
            factor,
            latents,
            AdamSettings(steps=4),
            generator(),
        )
        for size in (0, 8)
    ]
    assert found[1].trace.values == pytest.approx(found[0].trace.values, rel=1e-10)
    torch.testing.assert_close(found[1].own.targets, found[0].own.targets)
    assert abs(found[0].trace.values[0]) > 1.0


def test_the_free_energy_of_lbfgs_is_that_of_what_it_returns() -> None:
    own, data = model("gaussian"), sine()
    latents = fixed(own)
    start = first_factor(own, data, latents, "tied", num_points=8, min_rows=1)
    start = replace(start, targets=start.targets - 1.0)
    problem = LocalProblem(own, data, [], latents, num_samples=1)
    found = lbfgs_update(problem, start, latents, max_evaluations=30, generator=generator())
    again = local_free_energy(own, draws_at(latents), [], found.own, data).item()
    assert found.free_energy == pytest.approx(again, rel=1e-12)


def fixed_point(likelihood: str, data: Data) -> Update:
    """A first visit by natural gradients."""
    own = model(likelihood)
    chosen = options(inducing="fixed", hyper="fixed", local_update="natural-gradient")
    prior = NaturalGaussian.from_moments(torch.zeros(INDUCING).double(), torch.eye(INDUCING).double())
    latents = fixed(own)
    given = Situation(latents, latents, context=prior, posterior=prior)
    return linear(Site(own, data, chosen, generator()), given)


def test_rejected_trial_points_of_refit_and_distillation_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def stumbling(*args: Any, **kwargs: Any) -> Trace:
        made.append(3 if not made else 5)
        return replace(maximise(*args, **kwargs), rejected=made[-1])

    monkeypatch.setattr(replay, "maximise", stumbling)
    keys = {"hyper": "distribution", "refit_evaluations": 4, "evaluations": 4, "refit_steps": 2}
    own = model("gaussian")
    found = replayed(Site(own, sine(), options(**keys), generator()), Situation(fixed(own), fixed(own)))
    assert made == [3, 5]
    assert found.rejected == 8
    assert found.evaluations >= 4 + 4 + 2


def test_shortened_steps_of_a_fixed_point_are_counted() -> None:
    """Rows beyond the tails of a Student-t likelihood have negative precision: undamped, the posterior is improper."""
    x = torch.linspace(-1, 1, 40).double()[:, None]
    odd = Data(x, torch.where(torch.arange(40) % 2 == 0, 1.5, -1.5).double())
    assert fixed_point("student-t", odd).halvings > 0
    calm = fixed_point("gaussian", sine())
    assert calm.halvings == 0


@pytest.mark.parametrize("update", ["replay", "adam", "natural-gradient"])
def test_a_site_reports_what_its_update_had_to_do(update: str) -> None:
    told: list[dict[str, Any]] = []

    def heard(reply: Message) -> Message:
        told.append(dict(reply.content.metric_records["metrics"]))
        return reply

    keys = {"pvi__refit_evaluations": 4, "pvi__evaluations": 4, "pvi__refit_steps": 2, "pvi__first_steps": 3}
    if update == "natural-gradient":
        keys |= {"pvi__inducing": "fixed", "pvi__hyper": "fixed"}
    flat = configured(method="pvi", num_server_rounds=1, pvi__local_update=update, pvi__prediction_samples=2, **keys)
    run(FaultyGrid(flat, 2, Fault("0", heard, ("train",))))
    (first,) = told
    assert first["rejected"] >= 0
    assert first["halvings"] == 0
    assert first["evaluations"] >= 1
    assert np.isfinite(first["objective"])
