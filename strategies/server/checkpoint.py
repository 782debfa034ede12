"""What a run that was killed needs to go on, and the time that its parts took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedgp_flower.messages import decode, encode
from fedgp_flower.outcome import Snapshot
from strategies.server.course import Course
from strategies.server.network import Failure, Network
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
        total = self._totals(network)
        spent = {name: value - self.booked.get(name, 0) for name, value in total.items()}
        self.booked = total
        return spent

    def resume(self, seconds: Mapping[str, float], traffic: Mapping[str, Any]) -> None:
        """Go on from the seconds and bytes of a checkpoint."""
        self.seconds = dict(seconds)
        self.booked = {"seconds": sum(seconds.values())}
        self.booked |= {name: traffic[name] for name in ("bytes_up", "bytes_down")}

    def _totals(self, network: Network) -> dict[str, float]:
        traffic = network.traffic
        bytes_of = {"bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}
        return {"seconds": sum(self.seconds.values()), **bytes_of}


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
    before = facts["traffic"]
    network.traffic.bytes_up += int(before["bytes_up"])
    network.traffic.bytes_down += int(before["bytes_down"])
    network.traffic.communications += int(before["communications"])
    network.traffic.exchanges += int(before["exchanges"])
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
