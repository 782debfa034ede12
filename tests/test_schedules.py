"""Whatever befalls the messages of a run: it ends with a proper posterior, or with words."""

from __future__ import annotations

import pytest
from schedules import METHODS, Schedule, drawn, ended, keys_of

import strategies
from fedgp_flower.run.registry import parse_config, strategy_class

REFERENCES = {"LocalOnly", "Pooled", "ModularGP", "FedPoly"}
"""Comparisons: sites answer one question, and what is fitted is fitted where its rows are."""
LATE = ("sfvi glmm", "sfvi vae", "sfvi-avg prodlda")
"""Forms that the first seeds do not reach: units with random effects, and networks that read latents off rows."""


SEEDS = [list(METHODS).index(form) for form in LATE]


def test_there_is_a_form_of_every_strategy() -> None:
    forms = {strategy_class(parse_config(keys_of(method))).__name__ for method in METHODS}
    assert forms == set(dir(strategies)) - REFERENCES


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(list(METHODS).index(form), marks=pytest.mark.long) for form in LATE)]
)
def test_a_schedule_of_faults(seed: int) -> None:
    """`python -m simulations.run faults` goes through five hundred."""
    drawn(seed)


@pytest.mark.parametrize("kind", ["scale", "flip", "nan", "schema"])
def test_a_spoilt_reply_is_its_sites_alone(kind: str) -> None:
    """Exact sums tell every lie that changes yᵀy or Σ k(x, x): what is left is the run of the others."""
    ending = ended("sgpr", Schedule(0, liar="1", rate=1.0, kinds=(kind,), size=7.0, first=1), num_server_rounds=2)
    assert ending.blamed == ("1",)
    assert ending.nll < 0.9
