"""Faults drawn from a seed: what happens to every reply of one site, or of all, in a run of any method."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from faults import Clock, FaultyGrid, arrays, configured, each, run, texts
from flwr.app import Message, RecordDict

from fedgp_flower.errors import FedGPError

_TWO = {"dataset": "breast-cancer", "model__likelihood": "bernoulli", "features": "mean radius,mean texture"}
_CLASSES = _TWO | {"sfvi__hidden": 3}
METHODS: dict[str, dict[str, Any]] = {
    "sgpr": {"method": "sgpr", "sgpr__exchanges": 9},
    "fsgp": {"method": "fsgp"},
    "svgp": {"method": "svgp", **_TWO},
    "fgpr": {"method": "fgpr"},
    "pvi": {"method": "pvi", "pvi__local_update": "adam", "pvi__steps": 5},
    "pvi whitened": {"method": "pvi", "pvi__inducing": "fixed", "pvi__schedule": "synchronous"}
    | {"pvi__local_update": "adam", "pvi__steps": 5},
    "pvi asynchronous": {"method": "pvi", "pvi__schedule": "asynchronous", "pvi__local_update": "adam"}
    | {"pvi__steps": 3},
    "fedmgp exact": {"method": "fedmgp-exact"},
    "fedmgp": {"method": "fedmgp"},
    "fedmgp heavy tails": {"method": "fedmgp", "model__likelihood": "student-t"},
    "sfvi": {"method": "sfvi"},
    "hierarchical-gp": {"method": "hierarchical-gp", "test_fraction": 0.8},
    "sfvi-avg": {"method": "sfvi-avg", "sfvi__local_steps": 3},
    "sfvi networks": {"method": "sfvi", "sfvi__model": "hierarchical-bnn", **_CLASSES},
    "sfvi-avg networks": {"method": "sfvi-avg", "sfvi__model": "fedpop", "sfvi__local_steps": 3, **_CLASSES},
    "pvi-glm": {"method": "pvi-glm"},
    "pvi-bnn": {"method": "pvi-bnn", **_TWO, "bnn__hidden": 4, "pvi__steps": 5},
    "deep-kernel": {"method": "deep-kernel", **_TWO, "deep__local_steps": 3},
    "sgpr, masked": {"method": "sgpr", "sgpr__exchanges": 9, "privacy__secure_aggregation": True},
    "sgpr-private": {"method": "sgpr-private", "privacy__epsilon": 1.0}
    | {"privacy__ranges": '{"x": [-1, 7], "y": [-2, 2]}'},
    "mixed-model": {"method": "mixed-model", "formula": "y ~ x + (1 | site)"},
    "pvi sums": {"method": "pvi", "pvi__exchanges": 6},
    "pvi sums, asynchronous": {"method": "pvi", "pvi__exchanges": 6, "pvi__schedule": "asynchronous"},
    "pvi classes": {"method": "pvi", **_TWO},
    "rough": {"method": "hierarchical-gp", "hierarchical__deviation": "rough", "test_fraction": 0.8},
    "sfvi glmm": {"method": "sfvi", "sfvi__model": "glmm", "sfvi__unit_column": "age", "sfvi__random_slopes": "bmi"}
    | {"dataset": "diabetes", "features": "age,bmi", "sfvi__importance_samples": 2},
    "sfvi vae": {"method": "sfvi", "sfvi__model": "vae", **_CLASSES} | {"features": "mean smoothness,mean compactness"},
    "sfvi-avg prodlda": {"method": "sfvi-avg", "sfvi__model": "prodlda", "sfvi__local_steps": 3, **_CLASSES},
}
"""A tiny run of every Strategy that trains."""
MORE = {"sfvi after averages": {"method": "sfvi", "sfvi__warm_start_rounds": 2, "sfvi__local_steps": 2}}


def keys_of(method: str, **changes: Any) -> dict[str, Any]:
    return configured(**{"num_server_rounds": 3} | (METHODS | MORE)[method] | changes)


def scaled(reply: Message, size: float) -> Message | None:
    return arrays(lambda own: {n: a * size if a.dtype.kind == "f" else a for n, a in own.items()})(reply)


def one_entry(reply: Message, size: float) -> Message | None:

    def change(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for array in own.values():
            if array.dtype.kind == "f" and array.size:
                array.flat[-1] = size
        return own

    return arrays(change)(reply)


SPOILS: Mapping[str, Callable[[Message, float], Message | None]] = {
    "drop": lambda reply, size: None,
    "scale": scaled,
    "flip": lambda reply, size: scaled(reply, -1.0),
    "shift": lambda reply, size: each(lambda array: array + size if array.dtype.kind == "f" else array)(reply),
    "entry": one_entry,
    "nan": lambda reply, size: one_entry(reply, np.nan),
    "shape": lambda reply, size: each(lambda array: array[None])(reply),
    "schema": lambda reply, size: texts(schema_version=9)(reply),
    "garbage": lambda reply, size: texts(schema="{", label="?")(reply),
}
SIZES = (0.0, 1e-3, 0.5, 2.0, 10.0, 1e3, 1e9, 1e300)


@dataclass
class Schedule:
    """What befalls the replies of a run."""

    seed: int
    liar: str = ""
    """The site whose replies are spoilt; empty for any site."""
    rate: float = 0.3
    kinds: tuple[str, ...] = (*SPOILS, "delay", "replay", "duplicate", "forget")
    size: float | None = None
    first: int = 0
    """Round in which it begins; 0: with the introduction."""
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)


class ScheduledGrid(FaultyGrid):
    """Replies that are lost, late, doubled, out of order, old ones, spoilt; and sites that forget."""

    def __init__(self, flat: Mapping[str, Any], nodes: int, schedule: Schedule) -> None:
        super().__init__(flat, nodes)
        self.schedule = schedule
        self.late: list[Message] = []
        self.old: dict[tuple[str, str], Message] = {}

    def arrival(self, message: Message) -> Message | None:
        reply = super().arrival(message)
        schedule, kind = self.schedule, message.metadata.message_type
        site = self.visits[-1].site
        hit = schedule.draw.random() < schedule.rate and schedule.liar in ("", site)
        hit = hit and self.visits[-1].round >= schedule.first
        what = str(schedule.draw.choice(schedule.kinds))
        size = float(schedule.draw.choice(SIZES)) if schedule.size is None else schedule.size
        before = self.old.get((site, kind))
        if reply is not None and not reply.has_error():
            self.old[site, kind] = _copied(reply)
        if reply is None or reply.has_error() or not hit:
            return reply
        schedule.done.append(f"{site} {kind} {what} {size:g}")
        if what == "forget":
            self.contexts[message.metadata.dst_node_id].state = RecordDict()
        if what in ("delay", "duplicate"):
            self.late.append(_copied(reply))
        if what == "replay" and before is not None:
            reply.content = before.content
        if what == "delay":
            return None
        return SPOILS[what](reply, size) if what in SPOILS else reply

    def pull_messages(self, message_ids: Any) -> list[Message]:
        ids = list(message_ids)
        self.schedule.draw.shuffle(ids)
        late = [self.late.pop()] if self.late and self.schedule.draw.random() < 0.5 else []
        return [*late, *super().pull_messages(ids)]


def _copied(reply: Message) -> Message:
    content = RecordDict({name: type(record)(dict(record)) for name, record in reply.content.items()})
    twin = Message(content, dst_node_id=reply.metadata.dst_node_id, message_type=reply.metadata.message_type)
    twin.metadata.__dict__.update(reply.metadata.__dict__)
    return twin


@contextmanager
def quietly() -> Iterator[None]:
    with np.errstate(all="ignore"), mock.patch("strategies.server.session.time", Clock(10.0)):
        yield


@dataclass(frozen=True)
class Ending:
    """How a run ended: its negative log likelihood, or the words with which it gave up."""

    nll: float
    words: str = ""
    blamed: tuple[str, ...] = ()


def ended(method: str, schedule: Schedule, sites: int = 4, **changes: Any) -> Ending:
    try:
        with quietly():
            strategy = run(ScheduledGrid(keys_of(method, **changes), sites, schedule))
    except FedGPError as error:
        return Ending(np.nan, str(error))
    found = strategy.outcome
    for name, array in found.posterior.arrays.items() if found.posterior else ():
        assert np.isfinite(array).all(), name
    test = found.metrics["test"]
    value = float(test["nll"]) if test else np.nan
    return Ending(value, "", tuple(sorted({failure.site for failure in strategy.network.failures})))


def drawn(seed: int) -> Ending:
    """A schedule over the method that the seed chooses: of one site, or every other time of all.

    The run ends with words or with a figure, and where one site is spoilt, no other is blamed.
    """
    schedule = Schedule(seed, liar="1" if seed // len(METHODS) % 2 == 0 else "")
    ending = ended(tuple(METHODS)[seed % len(METHODS)], schedule)
    assert ending.words or np.isfinite(ending.nll), schedule.done
    assert not schedule.liar or not set(ending.blamed) & {"0", "2", "3"}, (ending.blamed, schedule.done)
    return ending
