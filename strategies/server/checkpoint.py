"""What a run records: checkpoints to go on from, the course of its figures and its time, and the summary at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from fedgp_flower.messages import decode, encode
from fedgp_flower.outcome import Snapshot
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, PooledScoreSums
from fedgp_flower.typing import Json
from strategies.server.network import Failure, Traffic
from strategies.server.scoring import Evaluation, Scoring, with_skill
from strategies.server.session import Session

S = TypeVar("S")

STATE = "state."
"""Prefix of the arrays of a method's state."""
LEAST = 10
"""Rounds of a window."""
ERRORS, DEVIATIONS = 3.0, 2.0
NOTHING = 5e-3
"""Nats a row along a window that are no rise."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A straight line through the latest values."""

    slope: float
    """By round."""
    error: float
    """Its standard error."""
    noise: float
    """Standard deviation of a value around the line."""
    rounds: int

    @property
    def flat(self) -> bool:
        """Whether the rise along the window is below the noise."""
        return (self.slope + ERRORS * self.error) * self.rounds < max(DEVIATIONS * self.noise, NOTHING)


def rise(values: Sequence[float]) -> Rise | None:
    """The line through the latest half of ``values``; None before there are enough.

    >>> rise([0.1 * k for k in range(30)]).flat, rise([1.0] * 30).flat
    (False, True)
    """
    rounds = max(LEAST, len(values) // 2)
    if len(values) < rounds:
        return None
    latest = np.array(values[-rounds:])
    along = np.arange(rounds) - (rounds - 1) / 2
    spread = float(along @ along)
    slope = float(along @ latest) / spread
    residual = latest - latest.mean() - slope * along
    noise = math.sqrt(float(residual @ residual) / (rounds - 2))
    return Rise(slope, noise / math.sqrt(spread), noise, rounds)


@dataclass
class Course:
    """The values of a noisy bound so far, and the round after which they were flat for the first time.

    Over the latest half of the rounds, ten at least, a straight line is fitted. The bound counts as flat once its rise
    along that window, and three standard errors more, is below two standard deviations of a single value around the
    line, or below :data:`NOTHING`. Of series that rise by two deviations in ten rounds one in fifty is taken for flat.
    """

    values: list[float] = field(default_factory=list)
    flat_from: int | None = None

    @property
    def flat(self) -> bool:
        """Whether the latest values are."""
        line = rise(self.values)
        return line is not None and line.flat

    def add(self, value: float, after: int) -> None:
        """The value after a round."""
        self.values.append(value)
        if self.flat_from is None and self.flat:
            self.flat_from = after


@dataclass(slots=True)
class Clock:
    """Seconds spent in the parts of a run, carried over a resume."""

    seconds: dict[str, float] = field(default_factory=lambda: {"setup": 0.0, "training": 0.0, "evaluation": 0.0})
    started: float = field(default_factory=time.perf_counter)
    part: str = "setup"
    booked: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes up to the latest complete round."""

    def switch(self, part: str) -> str:
        """Book the time so far and go on in another part; returns the part left."""
        now = time.perf_counter()
        self.seconds[self.part] += now - self.started
        self.started, left, self.part = now, self.part, part
        return left

    def since_last_round(self, traffic: Traffic) -> dict[str, float]:
        """Seconds and bytes since the round before was complete."""
        self.switch(self.part)
        total = {"seconds": sum(self.seconds.values()), "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}
        spent = {name: value - self.booked.get(name, 0) for name, value in total.items()}
        self.booked = total
        return spent


def checkpoint(session: Session, state: object, clock: Clock, course: Course, merged: bool) -> Snapshot:
    """State and preparation, and what was counted so far; the codec of messages writes the state too."""
    network, preparation = session.network, session.preparation
    network.forgive()
    arrays = {f"{STATE}{name}": array for name, array in encode(state).items()}
    facts: Json = {} if session.masking is None else {"privacy": session.masking.facts()}
    facts |= {
        "course": asdict(course),
        "run": network.run,
        "traffic": asdict(network.traffic),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "streak": network.streak,
        "site_seconds": network.site_seconds,
        "took_part": sorted(network.took_part),
        "round": network.round,
        "seconds": clock.seconds,
        "merged": merged,
        "preparation": preparation.facts(),
    }
    return Snapshot({**preparation.arrays, **arrays}, facts)


def restore(session: Session, snapshot: Snapshot, clock: Clock, state_class: type[S]) -> S:
    """The state of a checkpoint; what it had counted is added to what the new process has counted since it started."""
    network, facts = session.network, snapshot.facts
    before, now = facts["traffic"], asdict(network.traffic)
    network.traffic = Traffic(**{name: now[name] + int(before[name]) for name in now})
    network.failures[:0] = [Failure(**failure) for failure in facts["failures"]]
    network.repairs = {**facts["repairs"]}
    network.streak |= {site: int(count) for site, count in facts["streak"].items()}
    network.site_seconds += float(facts["site_seconds"])
    network.took_part |= set(facts.get("took_part", ()))
    if session.masking is not None:
        session.masking.restore(facts["privacy"])
    clock.seconds = dict(facts["seconds"])
    clock.booked = {"seconds": sum(clock.seconds.values())}
    clock.booked |= {name: before[name] for name in ("bytes_up", "bytes_down")}
    arrays = {name.removeprefix(STATE): a for name, a in snapshot.arrays.items() if name.startswith(STATE)}
    return decode(state_class, arrays)


def dataset_of(session: Session) -> str:
    """What is learned from."""
    return session.config.dataset if session.preparation.simulated else "the sites' tables"


def compare(session: Session, scoring: Scoring) -> Json:
    """The scores of the comparisons that the configuration wants, by name; None where there are none."""
    wanted, simulated = session.config.baselines, session.preparation.simulated
    scoring.local_only = scoring.baseline(LocalScoreSums, Nothing()) if wanted.local_only else None
    pooled = scoring.baseline(PooledScoreSums, Nothing()) if wanted.pooled and simulated else None
    mean, line = scoring.simple_baselines() if wanted.linear else (None, None)
    return {"mean": mean, "linear": line, "local_only": scoring.local_only, "pooled": pooled}


def metrics(session: Session, evaluation: Evaluation | None, baselines: Json, clock: Clock) -> Json:
    """The figures of a run that do not depend on its method, as ``metrics.json`` has them."""
    network, preparation = session.network, session.preparation
    clock.switch("evaluation")
    found = evaluation or Evaluation(test={}, test_standardised={}, per_site=[], calibration={})
    seconds = {"total": sum(clock.seconds.values()), **clock.seconds, "sites": network.site_seconds}
    labels, rows, mean = preparation.labels, preparation.rows, baselines["mean"] or {}
    return {
        "method": session.config.method,
        "dataset": dataset_of(session),
        "sites": len(network.took_part) or len(network.sites()),
        "rounds": network.round,
        "communications": network.traffic.communications,
        "exchanges": network.traffic.exchanges,
        "seconds": seconds,
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": with_skill(found["test"], mean),
        "test_standardised": found["test_standardised"],
        "per_site": [
            {**row, "label": labels[row["site"]], "training_rows": rows[row["site"]]} for row in found["per_site"]
        ],
        "names": dict(labels),
        **{name: None if scores is None else with_skill(scores, mean) for name, scores in baselines.items()},
        "training_target": preparation.training_target,
        "data": preparation.data,
        "calibration": found["calibration"],
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
    }
