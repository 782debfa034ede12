"""What a run records: checkpoints to go on from, the time that its parts took, and the figures at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedgp_flower.errors import RunError
from fedgp_flower.messages import decode, encode
from fedgp_flower.outcome import Snapshot, Summary
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, PooledScoreSums
from strategies.server.algorithm import Algorithm
from strategies.server.course import Course, rise
from strategies.server.network import Failure, Network, Traffic
from strategies.server.scoring import Evaluation, combine_histograms, with_skill
from strategies.server.session import Session

STATE = "state."
"""Prefix of the arrays of a method's state."""


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

    def since_last_round(self, network: Network) -> dict[str, float]:
        """Seconds and bytes since the round before was complete."""
        self.switch(self.part)
        traffic = network.traffic
        total = {"seconds": sum(self.seconds.values()), "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}
        spent = {name: value - self.booked.get(name, 0) for name, value in total.items()}
        self.booked = total
        return spent

    def resume(self, seconds: Mapping[str, float], traffic: Mapping[str, Any]) -> None:
        """Go on from the seconds and bytes of a checkpoint."""
        self.seconds = dict(seconds)
        self.booked = {"seconds": sum(seconds.values())}
        self.booked |= {name: traffic[name] for name in ("bytes_up", "bytes_down")}


def checkpoint(session: Session, state: Any, clock: Clock, merged: bool) -> Snapshot:
    """State and preparation, and what was counted so far; the codec of messages writes the state too."""
    network, preparation = session.network, session.preparation
    arrays = {f"{STATE}{name}": array for name, array in encode(state).items()}
    facts: dict[str, Any] = {} if session.masking is None else {"privacy": session.masking.facts()}
    facts |= {
        "course": asdict(session.course),
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


def restore(session: Session, snapshot: Snapshot, clock: Clock, state_class: type) -> Any:
    """The state of a checkpoint; what it had counted is added to what the new process has counted since it started."""
    network, facts = session.network, snapshot.facts
    before, now = facts["traffic"], asdict(network.traffic)
    network.traffic = Traffic(**{name: now[name] + int(before[name]) for name in now})
    network.failures[:0] = [Failure(**failure) for failure in facts["failures"]]
    network.repairs = {**facts["repairs"]}
    network.streak |= {site: int(count) for site, count in facts["streak"].items()}
    network.site_seconds += float(facts["site_seconds"])
    network.took_part |= set(facts.get("took_part", ()))
    session.course = Course(**facts.get("course", {}))
    if session.masking is not None:
        session.masking.restore(facts["privacy"])
    clock.resume(facts["seconds"], before)
    arrays = {name.removeprefix(STATE): a for name, a in snapshot.arrays.items() if name.startswith(STATE)}
    return decode(state_class, arrays)


def dataset_of(algorithm: Algorithm[Any]) -> str:
    """What is learned from."""
    return algorithm.config.dataset if algorithm.preparation.simulated else "the sites' tables"


def close(algorithm: Algorithm[Any], state: Any, clock: Clock, scored_by: int, expected: dict[str, float]) -> Summary:
    """Ask for the comparisons and rows the configuration wants, and put the figures of the run together.

    Args:
        algorithm: With the session of its run.
        state: At the end of training.
        clock: The time so far.
        scored_by: How many sites answered the closing evaluation.
        expected: Exchanges and seconds of training, as announced before it.
    """
    network, config, preparation = algorithm.network, algorithm.config, algorithm.preparation
    scoring, wanted = algorithm.scoring, algorithm.config.baselines
    predictions = scoring.predictions(algorithm.predicts)
    scoring.local_only = scoring.baseline(LocalScoreSums, Nothing()) if wanted.local_only else None
    pooled = scoring.baseline(PooledScoreSums, Nothing()) if wanted.pooled and preparation.simulated else None
    mean, line = scoring.simple_baselines() if wanted.linear else (None, None)
    posterior = scoring.predicted.posterior
    if scored_by == 0:
        raise RunError("no site could score its held-out rows, so the run has no result; see the failures above")
    facts = details(algorithm, state, expected)
    clock.switch("evaluation")
    evaluation = scoring.evaluation or Evaluation(test={}, test_standardised={}, per_site=[])
    baselines = {"mean": mean, "linear": line, "local_only": scoring.local_only, "pooled": pooled}
    seconds = {"total": sum(clock.seconds.values()), **clock.seconds, "sites": network.site_seconds}
    labels, rows = preparation.labels, preparation.rows
    metrics = {
        "method": config.method,
        "dataset": dataset_of(algorithm),
        "sites": len(network.took_part) or len(network.sites()),
        "rounds": network.round,
        "communications": network.traffic.communications,
        "exchanges": network.traffic.exchanges,
        "seconds": seconds,
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": with_skill(evaluation["test"], mean or {}),
        "test_standardised": evaluation["test_standardised"],
        "per_site": [
            {**row, "label": labels[row["site"]], "training_rows": rows[row["site"]]} for row in evaluation["per_site"]
        ],
        "names": dict(labels),
        **{name: None if scores is None else with_skill(scores, mean or {}) for name, scores in baselines.items()},
        "converged": algorithm.converged(state),
        "training_target": preparation.training_target,
        "data": preparation.data,
        "warnings": algorithm.session.warnings() + algorithm.warnings(),
        "calibration": combine_histograms(scoring.calibrated),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "method_details": facts,
    }
    return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)


def details(algorithm: Algorithm[Any], state: Any, expected: dict[str, float]) -> dict[str, Any]:
    """Facts of the method, those that sites are asked for among them."""
    asked = algorithm.session.run(algorithm.final(state, algorithm.roster()))
    facts = {**algorithm.scoring.predicted.details, **expected, **asked}
    if (line := rise(algorithm.course.values)) is not None:
        facts["rise_per_round"] = line.slope
    return facts if algorithm.masking is None else facts | {"privacy": algorithm.masking.facts()}
