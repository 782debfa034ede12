"""A Grid whose sites fail on demand, and runs over it that take a second: no folder, no clock, no baseline."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedgp_flower import client_app
from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.sites import RawSite, load_site, site_id
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.models import SparseGP, WhitenedPosterior
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.outcome import Snapshot
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.records import numpy_arrays
from fedgp_flower.run.in_process import InProcessGrid, run_in_process, simulated_nodes
from fedgp_flower.run.registry import parse_config, strategy_class
from fedgp_flower.typing import NamedArrays
from strategies.pooled_bound import noise_of
from strategies.server.network import content_bytes
from strategies.server.strategy import FederatedStrategy

Change = Callable[[Message], Message | None]
"""A reply as the site meant it → what arrives; None is lost on the way."""

ALONE = {"baselines.linear": False, "baselines.local-only": False, "baselines.pooled": False}
"""Nothing beside the model."""
TINY: dict[str, Any] = ALONE | {
    "method": "sgpr",
    "sgpr.exchanges": 20,
    "dataset": "sine",
    "model.num-inducing": 5,
    "num-server-rounds": 4,
    "evaluate-every": 0,
    "keep-predictions": False,
    "baselines.max-evaluations": 20,
    "round-timeout": 5.0,
    "wait-seconds": 5.0,
}


@dataclass
class Fault:
    """What happens to the replies of a site, in some phases and rounds, so many times."""

    site: str
    change: Change
    phases: tuple[str, ...] = ()
    rounds: range | None = None
    times: int = 10**9

    def strikes(self, site: str, phase: str, server_round: int) -> bool:
        here = site == self.site and (not self.phases or phase in self.phases)
        return here and (self.rounds is None or server_round in self.rounds) and self.times > 0


@dataclass(frozen=True)
class Visit:
    """A message and its reply as they crossed the wire."""

    site: str
    phase: str
    round: int
    down: int
    up: int


class FaultyGrid(InProcessGrid):
    """Sites that lose, spoil or fake replies, restart under another node id, vanish, or join late."""

    def __init__(self, flat: Mapping[str, Any], nodes: int | Iterable[Mapping[str, Any]], *faults: Fault) -> None:
        super().__init__(client_app.app, flat, simulated_nodes(nodes) if isinstance(nodes, int) else nodes)
        self.flat = flat
        self.faults = list(faults)
        self.visits: list[Visit] = []
        self.replies: list[tuple[str, str, Message]] = []
        """Site, kind and reply of all that arrived."""
        self.ghosts: set[int] = set()
        """Listed as online, but nobody is there."""

    def get_node_ids(self) -> Iterable[int]:
        return [*self.contexts, *self.ghosts]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            message = self._pending.pop(message_id, None)
            reply = None if message is None else self.arrival(message)
            if reply is not None:
                return [reply]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        del timeout
        replies = [self.arrival(self._pending.pop(message_id)) for message_id in self.push_messages(messages)]
        return [reply for reply in replies if reply is not None]

    def arrival(self, message: Message) -> Message | None:
        meta, config = message.metadata, message.content.config_records["config"]
        reply: Message | None = None
        site = "nobody"
        if meta.dst_node_id in self.contexts:
            site = site_id(self.contexts[meta.dst_node_id].node_config)
            with mock.patch("fedgp_flower.clients.app.load_site", loaded):
                reply = self.answer(message)
            for fault in self.faults:
                if reply is not None and fault.strikes(site, meta.message_type, int(config["round"])):
                    fault.times -= 1
                    reply = fault.change(reply)
        up = 0 if reply is None else content_bytes(reply)
        self.visits.append(Visit(site, meta.message_type, int(config["round"]), content_bytes(message), up))
        if reply is not None:
            self.replies.append((site, meta.message_type, reply))
        return reply

    def of(self, kind: str, site: str) -> list[Message]:
        return [reply for where, what, reply in self.replies if (where, what) == (site, kind)]

    def node_of(self, site: str) -> int:
        return next(node for node, context in self.contexts.items() if site_id(context.node_config) == site)

    def restart(self, site: str, *, ghost: bool = False) -> None:
        old = self.node_of(site)
        context = self.contexts.pop(old)
        if ghost:
            self.ghosts.add(old)
        self.join(context.node_config)

    def join(self, node_config: Mapping[str, Any]) -> None:
        node = 5000 + max([*self.contexts, *self.ghosts])
        self.contexts |= {node: InProcessGrid(self.client_app, self.flat, [node_config]).contexts.popitem()[1]}


class Killed(BaseException):
    """Nothing in the program may catch it."""


def fill(disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))


def lost(reply: Message) -> None:
    del reply


def crashed(reply: Message) -> Message:
    broken = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type=reply.metadata.message_type)
    broken.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return Message(Error(code=2, reason="Traceback\n  File x.py\nMemoryError: no room"), reply_to=broken)


def arrays(change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Change:

    def apply(reply: Message) -> Message:
        if "arrays" in reply.content.array_records:
            own = numpy_arrays(reply.content.array_records["arrays"])
            new = ArrayRecord({name: Array(np.asarray(array)) for name, array in change(own).items()})
            reply.content["arrays"] = new
        return reply

    return apply


def each(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return arrays(lambda own: {name: change(array) for name, array in own.items()})


@contextlib.contextmanager
def false_projections(site: str, size: float) -> Iterator[None]:
    """A site of sgpr or fsgp multiplies its projections, one of svgp its slopes, before masks hide them."""
    whole = SiteClient.answer

    def answer(client: SiteClient, kind: str, request: Any) -> Any:
        found = whole(client, kind, request)
        names = [name for name in ("projection", "projections", "slope") if hasattr(found, name)]
        lies = client.site.site == site and names
        return replace(found, **{name: size * getattr(found, name) for name in names}) if lies else found

    with mock.patch.object(SiteClient, "answer", answer):
        yield


def texts(**values: Any) -> Change:

    def apply(reply: Message) -> Message:
        for name, value in values.items():
            reply.content.config_records["config"][name.replace("_", "-")] = value
        return reply

    return apply


def numbers(**values: Any) -> Change:

    def apply(reply: Message) -> Message:
        record = reply.content.metric_records["metrics"]
        for name, value in values.items():
            record.pop(name.replace("_", "-"), None)
            if value is not None:
                record[name.replace("_", "-")] = value
        return reply

    return apply


@dataclass
class Clock:
    """Time passes only while somebody sleeps."""

    speed: float = 1.0
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += self.speed * seconds


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    clock = Clock()
    with mock.patch("strategies.server.network.time", clock), mock.patch("strategies.server.enrolment.time", clock):
        yield


@dataclass
class Recorder:
    """History and checkpoints of a run; ``at`` are things to do when a round is complete."""

    rows: list[dict[str, float]] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    at: dict[int, Callable[[], None]] = field(default_factory=dict)

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        self.rows.append(dict(row))
        self.totals.append(total)

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.at.pop(self.rows[-1]["round"], lambda: None)()


def configured(**changes: Any) -> dict[str, Any]:
    return TINY | {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}


def run(grid: FaultyGrid, recorder: Recorder | None = None, snapshot: Snapshot | None = None) -> Any:
    config = parse_config(grid.flat)
    strategy: FederatedStrategy[Any] = strategy_class(config).from_config(config, recorder or Recorder(), snapshot)
    with no_waiting():
        strategy.start(grid, ArrayRecord(), num_rounds=config.num_server_rounds, timeout=config.round_timeout)
    return strategy


def blamed(strategy: FederatedStrategy[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for failure in strategy.network.failures:
        found.setdefault(failure.site, []).append(failure.reason)
    return found


def alike(found: Mapping[str, Any], wanted: Mapping[str, Any], rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require that named arrays are equal, or close."""
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=atol, err_msg=name)


@contextlib.contextmanager
def totals_only(first: int = 0) -> Iterator[None]:
    """From a round on, algorithms ask plain totals as they ask those under masks."""
    whole = FederatedStrategy.roster

    def roster(strategy: FederatedStrategy[Any]) -> Any:
        return replace(whole(strategy), totals_only=strategy.round >= first)

    with mock.patch.object(FederatedStrategy, "roster", roster):
        yield


def parameters(strategy: Any) -> NamedArrays:
    return {name.removeprefix("values."): array for name, array in strategy.public(strategy.current).items()}


def rows_of(grid: FaultyGrid, strategy: Any, sites: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
    prepared = strategy.preparation
    preparation = Preparation.from_wire(prepared.arrays, prepared.schema)
    nodes = [grid.contexts[grid.node_of(site)].node_config for site in sites]
    data = [load_site(strategy.config, node).encode(preparation) for node in nodes]
    x, y = (np.concatenate(parts) for parts in zip(*((site.x, site.y) for site in data), strict=True))
    return torch.from_numpy(x), torch.from_numpy(y)


def sums_of(grid: FaultyGrid, strategy: Any, sites: Iterable[str]) -> SparseSums:
    model = SparseGP.from_arrays(strategy.config.model, parameters(strategy))
    return pooled_sums(model, *rows_of(grid, strategy, sites))


def posterior_of(grid: FaultyGrid, strategy: Any, sites: Iterable[str]) -> WhitenedPosterior:
    return sums_of(grid, strategy, sites).posterior(noise_of(parameters(strategy)))


def waves(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1.7, 1.7, (rows, 2))
    y = np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] + 0.2 * draw.standard_normal(rows)
    return pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y})


@lru_cache(maxsize=64)
def _loaded(config: CoreConfig, node: tuple[tuple[str, Any], ...], run: str, files: tuple[Any, ...]) -> RawSite:
    del files
    return load_site(config, dict(node), run)


def loaded(config: CoreConfig, node: Mapping[str, Any], run: str = "") -> RawSite:
    """The rows of a site, read again only when its files have changed; a real site reads them for each message."""
    paths = [Path(node.get(name) or "/none") for name in ("data-path", "test-path")]
    files = tuple((found.st_mtime_ns, found.st_size) for path in paths if path.exists() and (found := path.stat()))
    return _loaded(config, tuple(node.items()), run, files)


def keyed(nodes: list[dict[str, str]], folder: Path) -> None:
    """Give each site a key, and all a trust file, in a folder."""
    trust = Trust({})
    for node in nodes:
        identity = Identity.simulated(node["site"])
        node |= {"site-key": str(folder / f"{node['site']}.key"), "trust": str(folder / "trust.toml")}
        identity.write(Path(node["site-key"]))
        trust = trust.with_site(node["site"], identity.public)
    trust.write(folder / "trust.toml")


def run_of_units(folder: Path, frame: pd.DataFrame, **keys: Any) -> Path:
    """The folder of a run over a table whose column ``unit`` names the sites, and ``split`` the rows held out."""
    frame.to_csv(folder / "units.csv", index=False)
    dealt = {"dataset": str(folder / "units.csv"), "split": 0, "partitioner": "natural", "partition__column": "unit"}
    kept = {"keep_predictions": True, "output_dir": str(folder), "name": "run"}
    return run_in_process(configured(target="y", **dealt, **kept, **keys))


def csv_nodes(folder: Path, frames: Mapping[str, pd.DataFrame], policy: str = "least-cell = 0") -> list[dict[str, str]]:
    for site, frame in frames.items():
        frame.to_csv(folder / f"{site}.csv", index=False)
    (folder / "sites.toml").write_text(policy)
    named = {"policy": str(folder / "sites.toml")} if policy else {}
    return [{"data-path": str(folder / f"{site}.csv"), "site": site, **named} for site in frames]
