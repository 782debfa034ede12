"""What the owner of a site lets it answer: the rules of a TOML file, or the default where there is none."""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from pydantic import Field

from fedgp_flower.config import RunConfig, defaults, validated
from fedgp_flower.data.cells import kind_of
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.tables import OTHER
from fedgp_flower.errors import ConfigError, PolicyError
from fedgp_flower.files import write_bytes
from fedgp_flower.options import Count, Positive, Section, Value
from fedgp_flower.privacy.disclosure import kept_levels, names_rows

A = TypeVar("A")
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]

DEFAULT = "the default policy"
ROUNDS = "rounds.json"
"""File in the `state-dir` that remembers the rounds of a day."""
HARMLESS = frozenset(
    {"method", "dataset", "data-dir", "output-dir", "name", "resume", "extra", "round-timeout", "wait-seconds"}
)
"""Keys that `keys` does not judge: a real site does not read them, and `methods` judges the method."""


@runtime_checkable
class Counted(Protocol):
    """An answer that is estimated from rows."""

    def num_parameters(self) -> int:
        """How many numbers it estimates."""


@runtime_checkable
class Histograms(Protocol):
    """An answer with histograms."""

    def coarse(self, least: int) -> Self:
        """The same with histograms whose cells have at least so many rows."""


FEW_ROWS = (
    "sums of a site with so few rows nearly show its rows to the server; fewer `model.num-inducing`, or"
    " `privacy.secure-aggregation` = true, hide them (`parameters-per-row` of docs/privacy.md)"
)
"""One warning for all kinds of messages: the log of the site says which."""


class Policy(Section):
    """The rules of a site. Under masks ``parameters-per-row`` does not hold: the server sees the total alone."""

    least_rows: Count = 10
    """Fewest training rows to take part."""
    least_cell: Count = 3
    """Levels of text with fewer training rows become ``other``; cells of histograms with fewer rows join a neighbour; a
    class of the target with fewer is refused; fewer held-out rows are not scored."""
    rows_per_level: Count = 10
    """A column of text with ten levels or more, most of them with fewer training rows, is refused as identifiers."""
    parameters_per_row: Positive = 0.33
    """Most parameters (M and hyperparameters) of a message for each training row."""
    strict: bool = False
    """Whether more parameters are refused. Otherwise the message leaves with a warning in the run's log and report."""
    hidden_columns: Names = ()
    """Columns that no run may use."""
    methods: Names = ()
    """Methods that may run; empty: all."""
    kinds: Names = ()
    """Messages that are answered, as patterns such as ``query.*``; empty: all."""
    keys: Names = ()
    """Patterns of the keys of a run that may differ from their defaults; empty: all."""
    rounds_per_day: Count = 0
    """Most rounds answered in a day (UTC), of all runs; 0: any number. All that comes before the first round counts as
    one, and a second question of a kind in a round as another. Needs ``state-dir``."""
    secure_aggregation: bool = False
    """Whether totals under masks are required."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule said of a message."""

    rule: str
    limit: object
    verdict: Literal["passed", "refused", "warned", "merged"]
    found: str = ""
    """For the site's log alone."""


@dataclass(slots=True)
class Rules:
    """The policy of a site, applied to one message."""

    kind: str
    masked: bool = False
    policy: Policy = field(default_factory=Policy)
    file: str = DEFAULT
    decisions: list[Decision] = field(default_factory=list)
    active: bool = True
    """Not where one table is dealt to simulated sites, unless a file was named: one machine holds all rows there."""
    warning: str = ""
    """What the server may know."""

    def read(self, node_config: Mapping[str, Value]) -> Rules:
        """The same by ``policy`` of the node configuration."""
        if node_config.get("policy"):
            path = Path(str(node_config["policy"])).expanduser()
            self.policy, self.file = read(path), path.name
        return self

    def _judge(self, rule: str, passes: bool, words: str, found: str = "") -> None:
        limit: object = getattr(self.policy, rule.replace("-", "_"))
        self.decisions.append(Decision(rule, limit, "passed" if passes else "refused", found))
        if not passes:
            raise PolicyError(f"{words}: `{rule}` = {json.dumps(limit)} in {self.file} of this site")

    def admit(self, config: RunConfig, run: str, number: int, state_dir: str, content: str = "") -> None:
        """Refuse a kind, round or configuration that the owner does not allow; ``content`` is the question's hash."""
        limits, method = self.policy, config.method
        self._judge("methods", not limits.methods or method in limits.methods, f"method `{method}` may not run")
        odd: list[str] = []
        if limits.keys:
            usual = defaults([type(config.options)])
            chosen = {
                "num-server-rounds": config.options.usual_rounds,
                "model.kernel": config.options.kernel_for(config.model.likelihood),
                "model.num-inducing": config.options.usual_inducing,
                "model.max-megabytes": config.options.usual_megabytes,
            }
            found = config.flat().items()
            changed = {key for key, value in found if value not in (usual.get(key), chosen.get(key))} - HARMLESS
            odd = sorted(key for key in changed if not _matches(key, limits.keys))
        self._judge("keys", not odd, f"keys may not be set: {', '.join(f'`{key}`' for key in odd[:5])}")
        self._judge("kinds", not limits.kinds or _matches(self.kind, limits.kinds), f"`{self.kind}` is not answered")
        masked = config.privacy.secure_aggregation
        self._judge("secure-aggregation", masked or not limits.secure_aggregation, "totals under masks are required")
        if limits.rounds_per_day:
            if not state_dir:
                raise ConfigError(f"`rounds-per-day` in {self.file} needs a `state-dir` in the node configuration")
            path = Path(state_dir).expanduser() / ROUNDS
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:  # two messages at once would not know of each other
                fcntl.flock(lock, fcntl.LOCK_EX)
                rounds = self._rounds_today(path, {"run": run, "number": number}, content)
                count = rounds["count"]
                self._judge("rounds-per-day", count <= limits.rounds_per_day, "no more rounds today", f"{count}")
                write_bytes(path, json.dumps(rounds).encode())

    def _rounds_today(self, path: Path, latest: Mapping[str, object], content: str) -> dict[str, Any]:
        """The round of this message, what was asked in it by kind, and how many rounds of today that makes."""
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        today = {"day": datetime.now(UTC).date().isoformat()}
        count = known["count"] if known.items() >= today.items() else 0
        asked = known.get("asked", {}) if count and known.items() >= latest.items() else {}
        new = not asked or asked.get(self.kind, content) != content
        asked = {} if new else asked
        return {**today, **latest, "count": count + new, "asked": {**asked, self.kind: content}}

    def site(self, raw: RawSite) -> RawSite:
        """The rows as messages may know them."""
        self.active = self.file != DEFAULT or not raw.dealt
        if not self.active:
            return raw
        limits, rows = self.policy, len(raw.train)
        self._judge("least-rows", rows >= limits.least_rows, "too few training rows", f"{rows} rows")
        hidden = sorted({*raw.features, raw.target, raw.beside} & {*limits.hidden_columns})
        self._judge("hidden-columns", not hidden, f"column {', '.join(hidden)} may not be used")
        scored = raw.test if len(raw.test) >= limits.least_cell else raw.test.iloc[:0]
        train, test = raw.train.copy(), scored.copy()
        for name in (name for name in (*raw.features, raw.target) if kind_of(train[name]) == "categorical"):
            counts = train[name].value_counts()
            if name == raw.target:
                self._judge("least-cell", bool(counts.min() >= limits.least_cell), f"a class of `{name}` is too rare")
                continue
            odd = names_rows(counts, limits.rows_per_level)
            self._judge("rows-per-level", not odd, f"`{name}` names rows, as an identifier does", f"`{name}`")
            kept = kept_levels(counts, limits.least_cell)
            if len(kept) < len(counts):
                found = f"{len(counts) - len(kept)} levels of `{name}`"
                self.decisions.append(Decision("least-cell", limits.least_cell, "merged", found))
                train[name], test[name] = (frame[name].where(frame[name].isin(kept), OTHER) for frame in (train, test))
        return replace(raw, train=train, test=test)  # one node has one policy, and encodes nothing but these rows

    def answer(self, answer: A, rows: int) -> A:
        """An answer as it may leave."""
        if not self.active:
            return answer
        if isinstance(answer, Counted) and not self.masked:
            self._weigh(answer.num_parameters(), rows)
        return answer.coarse(self.policy.least_cell) if isinstance(answer, Histograms) else answer

    def _weigh(self, size: int, rows: int) -> None:
        limit = self.policy.parameters_per_row
        passes, found = size <= limit * rows, f"{size} parameters, {rows} rows"
        words = f"`{self.kind}` holds {size} parameters, too many for the rows of the site"
        if passes or self.policy.strict:
            self._judge("parameters-per-row", passes, words, found)
            return
        self.decisions.append(Decision("parameters-per-row", limit, "warned", found))
        self.warning = FEW_ROWS


def read(path: Path) -> Policy:
    """A policy from its file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"`policy`: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"`policy`: {path} is not TOML: {error}") from None
    policy: Policy = validated(Policy, values, f"{path.name}: ")
    return policy


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
