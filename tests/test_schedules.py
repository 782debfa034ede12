"""Whatever befalls the messages of a run: it ends with a proper posterior, or with words."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from schedules import METHODS, SPOILS, Schedule, ended

NAMES = tuple(METHODS)
LONG = 500


def hold(seed: int) -> None:
    """A schedule, of one site for even seeds and of all sites for odd ones, over a method that the seed chooses."""
    schedule = Schedule(seed, liar="1" if seed % 2 == 0 else "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ending = ended(NAMES[seed % len(NAMES)], schedule)
    assert ending.words or np.isfinite(ending.nll), schedule.done
    assert seed % 2 or not set(ending.blamed) & {"0", "2", "3"}, (ending.blamed, schedule.done)


@pytest.mark.parametrize("seed", range(6))
def test_a_schedule_of_faults(seed: int) -> None:
    hold(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, LONG))
def test_many_schedules_of_faults(seed: int) -> None:
    hold(seed)


@pytest.mark.parametrize("kind", [kind for kind in SPOILS if kind != "garbage"])
def test_a_spoilt_reply_is_its_sites_alone(kind: str) -> None:
    """Exact sums tell every lie that changes yᵀy or Σ k(x, x): what is left is the run of the others."""
    ending = ended("fsgp exact", Schedule(0, liar="1", rate=1.0, kinds=(kind,), size=7.0, first=1), num_server_rounds=2)
    assert ending.blamed == ("1",)
    assert ending.nll < 0.9


def test_an_old_reply_under_a_new_question_is_refused() -> None:
    from faults import blamed, run
    from schedules import ScheduledGrid, keys_of

    schedule = Schedule(0, liar="1", rate=1.0, kinds=("replay",), first=1)
    strategy = run(ScheduledGrid(keys_of("fsgp exact"), 3, schedule))
    assert all("to another question: its" in reason for reason in blamed(strategy)["1"])
    assert blamed(strategy).keys() == {"1"}
