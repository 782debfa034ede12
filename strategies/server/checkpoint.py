"""Records of a run: checkpoints, the time of its parts, and the summary at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedgp_flower.errors import RunError
from fedgp_flower.messages import decode, encode
from fedgp_flower.options import MULTICLASS
from fedgp_flower.outcome import Snapshot, Summary
from fedgp_flower.typing import Json, NamedArrays
from strategies.server.algorithm import Algorithm
from strategies.server.network import Failure, Traffic
from strategies.server.questions import S
from strategies.server.scoring import Evaluation, with_skill
from strategies.server.session import Session

STATE, COURSE = "state.", "course."
NOT_KEPT = {"arrays", "sums", "refused", "constant"}
"""Fields of an agreement that a checkpoint's facts omit: its arrays, and data that sites send again."""


@dataclass(slots=True)
class Clock:
    """Seconds spent in the parts of a run, including those before a resume."""

    seconds: dict[str, float] = field(default_factory=lambda: {"setup": 0.0, "training": 0.0, "evaluation": 0.0})
    started: float = field(default_factory=time.perf_counter)
    part: str = "setup"
    at_round_end: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes up to the latest complete round."""

    def switch(self, part: str) -> str:
        """Add the time since the last call to the current part and start another; return the previous part."""
        now = time.perf_counter()
        self.seconds[self.part] += now - self.started
        self.started, previous, self.part = now, self.part, part
        return previous

    def since_last_round(self, traffic: Traffic) -> dict[str, float]:
        """Return visits and exchanges so far, and seconds and bytes since the previous round ended."""
        self.switch(self.part)
        total = {"seconds": sum(self.seconds.values()), "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}
        spent = {name: value - self.at_round_end.get(name, 0) for name, value in total.items()}
        self.at_round_end = total
        return {"communications": traffic.communications, "exchanges": traffic.exchanges, **spent}


def seconds_to_come(spent: Sequence[tuple[float, int, float]], waiting: float, exchanges: int, work: float) -> float:
    """Return the remaining seconds of training, from seconds, exchanges and work of each round so far.

    Each exchange waits w seconds; the rest of the time is proportional to the work:
    exchanges · w + work · Σ max(s − e w, 0) / Σ work so far.
    """
    computed = sum(max(seconds - count * waiting, 0.0) for seconds, count, _ in spent)
    done = sum(part for _, _, part in spent)
    return exchanges * waiting + (work * computed / done if done else 0.0)


def checkpoint(algorithm: Algorithm[Any], clock: Clock, merged: bool) -> Snapshot:
    """Return the checkpoint: state, agreement and counts so far; the state uses the codec of messages."""
    network, preparation, masking = algorithm.network, algorithm.preparation, algorithm.session.masking
    network.end_round()
    parts = {STATE: algorithm.current} | ({} if algorithm.course is None else {COURSE: algorithm.course})
    arrays = {f"{part}{name}": a for part, value in parts.items() for name, a in encode(value).items()}
    facts: Json = {} if masking is None else {"privacy": masking.facts()}
    facts |= {
        "run": network.run,
        "traffic": asdict(network.traffic),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "streak": network.streak,
        "site_seconds": network.site_seconds,
        "took_part": sorted(network.took_part),
        "doubted": algorithm.session.doubted,
        "rounds_in_vain": algorithm.session.rounds_in_vain,
        "round": network.round,
        "seconds": clock.seconds,
        "merged": merged,
        "preparation": {name: value for name, value in asdict(preparation).items() if name not in NOT_KEPT},
    }
    return Snapshot({**preparation.arrays, **arrays}, facts)


def restore(session: Session, snapshot: Snapshot, clock: Clock, state_class: type[S]) -> S:
    """Return the state of a checkpoint and add its counts to those of the new process."""
    network, facts = session.network, snapshot.facts
    before, now = facts["traffic"], asdict(network.traffic)
    network.traffic = Traffic(**{name: now[name] + int(before[name]) for name in now})
    network.failures[:0] = [Failure(**failure) for failure in facts["failures"]]
    network.repairs = {**facts["repairs"]}
    network.streak |= {site: int(count) for site, count in facts["streak"].items()}
    network.site_seconds += float(facts["site_seconds"])
    network.took_part |= set(facts.get("took_part", ()))
    session.doubted |= facts.get("doubted", {})
    session.rounds_in_vain = int(facts.get("rounds_in_vain", 0))
    if session.masking is not None:
        session.masking.restore(facts["privacy"])
    clock.seconds = dict(facts["seconds"])
    clock.at_round_end = {"seconds": sum(clock.seconds.values())}
    clock.at_round_end |= {name: before[name] for name in ("bytes_up", "bytes_down")}
    return decode(state_class, arrays_of(snapshot, STATE))


def arrays_of(snapshot: Snapshot, part: str) -> NamedArrays:
    """Return the arrays of a part, without its prefix."""
    return {name.removeprefix(part): a for name, a in snapshot.arrays.items() if name.startswith(part)}


def dataset_of(session: Session) -> str:
    """Return the name of the data."""
    return session.config.dataset if session.preparation.simulated else "the sites' tables"


def close(algorithm: Algorithm[Any], clock: Clock, scored_by: int) -> Summary:
    """Compute the configured baselines and return the summary of the run; raise RunError if no site scored rows."""
    network, session, scoring = algorithm.network, algorithm.session, algorithm.scoring
    preparation, enabled = algorithm.preparation, session.config.baselines
    inputs = preparation.num_inputs > 0  # without any, GPs and boosting have nothing to predict from
    predicts = algorithm.predicts and session.config.model.likelihood not in MULTICLASS
    predictions, posterior = scoring.predictions(predicts), scoring.predicted.posterior
    scoring.local_only = scoring.local_baseline() if enabled.local_only and inputs else None
    with_all = enabled.pooled and preparation.simulated and inputs
    pooled, boosting = scoring.pooled_baselines() if with_all else (None, None)
    mean_only, linear = scoring.simple_baselines() if enabled.linear else (None, None)
    if scored_by == 0:
        failures = network.latest_failures()
        raise RunError(f"no site could score its held-out rows, so the run has no result. {failures}")
    details = algorithm.details()
    clock.switch("evaluation")
    evaluation = scoring.evaluation or Evaluation(test={}, test_standardised={}, per_site=[], calibration={})
    baselines = {"mean": mean_only, "linear": linear, "local_only": scoring.local_only}
    baselines |= {"pooled": pooled, "boosting": boosting}
    seconds = {"total": sum(clock.seconds.values()), **clock.seconds, "sites": network.site_seconds}
    labels, rows, mean = preparation.labels, preparation.rows, mean_only or {}
    metrics = {
        "method": session.config.method,
        "dataset": dataset_of(session),
        "sites": len(network.took_part) or len(network.sites()),
        "rounds": network.round,
        "communications": network.traffic.communications,
        "exchanges": network.traffic.exchanges,
        "nodes": len(network.asked_nodes),
        "seconds": seconds,
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": with_skill(evaluation["test"], mean),
        "test_standardised": evaluation["test_standardised"],
        "per_site": [
            {**row, "label": labels[row["site"]], "training_rows": rows[row["site"]]} for row in evaluation["per_site"]
        ],
        "names": dict(labels),
        **{name: None if scores is None else with_skill(scores, mean) for name, scores in baselines.items()},
        "converged": algorithm.converged(algorithm.current),
        "training_target": preparation.training_target,
        "data": {**preparation.data, "likelihood": session.config.model.likelihood},
        "warnings": session.warnings() + algorithm.warnings() + scoring.warnings,
        "calibration": evaluation["calibration"],
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "method_details": details,
    }
    return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)
