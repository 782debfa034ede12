"""Whatever befalls the messages of a run: it ends with a proper posterior, or with words."""

import pytest
from schedules import METHODS, drawn, keys_of

import strategies
from fedgp_flower.run.registry import parse_config, strategy_class

REFERENCES = {"LocalOnly", "Pooled", "ModularGP", "FedPoly"}
"""Comparisons: sites answer one question, and what is fitted is fitted where its rows are."""
LATE = ("sfvi glmm", "sfvi vae", "sfvi-avg prodlda")
"""Forms that the first seeds do not reach: units with random effects, and networks that read latents off rows."""


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
