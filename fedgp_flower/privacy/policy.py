"""The policy of a site: rules for its answers, from its owner's TOML file or by default."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field

from fedgp_flower.config import RunConfig, defaults, validated
from fedgp_flower.data.cells import kind_of
from fedgp_flower.data.dates import source
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.tables import OTHER
from fedgp_flower.errors import ConfigError, DamagedError, PolicyError, first_of
from fedgp_flower.files import exclusive, read_json, read_toml, write_bytes
from fedgp_flower.options import Count, MethodOptions, Positive, Section, Value
from fedgp_flower.privacy.disclosure import is_identifier, kept_levels

A = TypeVar("A")
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]

DEFAULT = "the default policy"
ROUNDS = "rounds.json"
"""File in the `state-dir` with the number of rounds answered today."""
UNRESTRICTED = frozenset(
    {"method", "dataset", "data-dir", "output-dir", "name", "resume", "extra", "round-timeout", "wait-seconds"}
    | {"sites", "baselines.pooled"}  # `fedgp deploy run` sets them
)
"""Keys that `keys` does not restrict: a real site does not read them, and `methods` restricts the method."""
FEW_ROWS = "sums of a site with so few rows nearly show its rows to the server"
"""Start of the warning to the server; the site's log names the message."""


class Policy(Section):
    """The rules of a site. Masks switch off ``parameters-per-row``, because the server sees only totals."""

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
    """The verdict of a rule on a message."""

    rule: str
    limit: object
    verdict: Literal["passed", "refused", "warned", "merged"]
    found: str = ""
    """Details for the site's log; the server does not receive them."""


@dataclass(slots=True)
class Rules:
    """The policy of a site, applied to one message."""

    kind: str
    masked: bool = False
    policy: Policy = field(default_factory=Policy)
    file: str = DEFAULT
    decisions: list[Decision] = field(default_factory=list)
    active: bool = True
    """False for simulated sites with parts of one table and no policy file: one machine has all the rows."""
    warning: str = ""
    """Warning that is sent to the server."""
    fewer: str = MethodOptions.fewer_parameters
    """What the method of the run could have fewer of, so that a message holds fewer parameters."""

    def read(self, node_config: Mapping[str, Value]) -> Rules:
        """Read the file ``policy`` of the node configuration, if there is one, and return these rules."""
        if node_config.get("policy"):
            path = Path(str(node_config["policy"])).expanduser()
            self.policy, self.file = read(path), path.name
        return self

    def _require(self, rule: str, passes: bool, words: str, found: str = "") -> None:
        limit: object = getattr(self.policy, rule.replace("-", "_"))
        self.decisions.append(Decision(rule, limit, "passed" if passes else "refused", found))
        if not passes:
            remedy = "; its owner may set another in a file, `policy`" if self.file == DEFAULT else ""
            raise PolicyError(f"{words}: `{rule}` = {json.dumps(limit)} in {self.file} of this site{remedy}")

    def _require_shown(self, columns: set[str]) -> None:
        hidden = sorted(columns & {*self.policy.hidden_columns})
        self._require("hidden-columns", not hidden, f"column {', '.join(hidden)} may not be used")

    def admit(self, config: RunConfig, run: str, number: int, state_dir: str, content: str = "") -> None:
        """Raise PolicyError for a kind, round or configuration that is not allowed; ``content`` hashes the question."""
        limits, method, self.fewer = self.policy, config.method, config.options.fewer_parameters
        self._require("methods", not limits.methods or method in limits.methods, f"method `{method}` may not run")
        forbidden: list[str] = []
        if limits.keys:
            general = defaults([type(config.options)])
            of_method = {
                "num-server-rounds": config.options.default_rounds,
                "model.kernel": config.options.kernel_for(config.model.likelihood),
                "model.num-inducing": config.options.default_inducing,
                "model.max-megabytes": config.options.default_megabytes,
            }
            found = config.flat().items()
            changed = {key for key, value in found if value not in (general.get(key), of_method.get(key))}
            forbidden = sorted(f"`{key}`" for key in changed - UNRESTRICTED if not _matches(key, limits.keys))
        self._require("keys", not forbidden, f"keys may not be set: {first_of(forbidden)}")
        self._require("kinds", not limits.kinds or _matches(self.kind, limits.kinds), f"`{self.kind}` is not answered")
        masked = config.privacy.secure_aggregation
        self._require("secure-aggregation", masked or not limits.secure_aggregation, "totals under masks are required")
        self._require_shown({config.holdout.partition(":")[2]})
        if limits.rounds_per_day:
            if not state_dir:
                raise ConfigError(f"`rounds-per-day` in {self.file} needs a `state-dir` in the node configuration")
            path = Path(state_dir).expanduser() / ROUNDS
            with exclusive(path.with_suffix(".lock")):  # another message may be counted at the same time
                rounds = self._rounds_today(path, {"run": run, "number": number}, content)
                count = rounds["count"]
                self._require("rounds-per-day", count <= limits.rounds_per_day, "no more rounds today", f"{count}")
                write_bytes(path, json.dumps(rounds).encode())

    def _rounds_today(self, path: Path, latest: Mapping[str, object], content: str) -> dict[str, Any]:
        """Return today's number of rounds, and for the latest round the hash of each question by kind."""
        known = read_json(path) if path.exists() else {}
        today = {"day": datetime.now(UTC).date().isoformat()}
        count = known.get("count") if known.items() >= today.items() else 0
        if not isinstance(count, int):
            raise DamagedError(f"{path.name} in the `state-dir` of this site was changed; its owner may delete it")
        asked = known.get("asked", {}) if count and known.items() >= latest.items() else {}
        new = not asked or asked.get(self.kind, content) != content
        asked = {} if new else asked
        return {**today, **latest, "count": count + new, "asked": {**asked, self.kind: content}}

    def site(self, raw: RawSite) -> RawSite:
        """Return a site without rare levels of text; raise PolicyError if its rows or columns may not be used."""
        self.active = self.file != DEFAULT or not raw.shared_table
        if not self.active:
            return raw
        limits, rows = self.policy, len(raw.train)
        self._require("least-rows", rows >= limits.least_rows, "too few training rows", f"{rows} rows")
        self._require_shown({found for name in raw.train for found in (str(name), source(str(name), ()))})
        scored = raw.test if len(raw.test) >= limits.least_cell else raw.test.iloc[:0]
        train, test = raw.train.copy(), scored.copy()
        for name in (name for name in (*raw.features, raw.target) if kind_of(train[name]) == "categorical"):
            counts = train[name].value_counts()
            if name == raw.target:
                rare = f"a class of `{name}` has too few rows; correct its spelling, merge it, or leave out this site"
                self._require("least-cell", bool(counts.min() >= limits.least_cell), rare)
                continue
            identifies = is_identifier(counts, limits.rows_per_level)
            self._require("rows-per-level", not identifies, f"`{name}` names rows, as an identifier does", f"`{name}`")
            kept = kept_levels(counts, limits.least_cell)
            if len(kept) < len(counts):
                found = f"{len(counts) - len(kept)} levels of `{name}`"
                self.decisions.append(Decision("least-cell", limits.least_cell, "merged", found))
                train[name], test[name] = (frame[name].where(frame[name].isin(kept), OTHER) for frame in (train, test))
        return replace(raw, train=train, test=test)

    def answer(self, answer: A, rows: int) -> A:
        """Return an answer with merged cells; refuse or warn if it has too many parameters for the rows.

        An answer may have a method ``num_parameters()``, and ``coarse(least)``, which merges cells with few rows.
        """
        if not self.active:
            return answer
        if hasattr(answer, "num_parameters") and not self.masked:
            self._check_size(answer.num_parameters(), rows)
        return answer.coarse(self.policy.least_cell) if hasattr(answer, "coarse") else answer

    def _check_size(self, size: int, rows: int) -> None:
        limit = self.policy.parameters_per_row
        passes, found = size <= limit * rows, f"{size} parameters, {rows} rows"
        words = f"`{self.kind}` holds {size} parameters, too many for the rows of the site"
        if passes or self.policy.strict:
            self._require("parameters-per-row", passes, words, found)
            return
        self.decisions.append(Decision("parameters-per-row", limit, "warned", found))
        self.warning = (
            f"{FEW_ROWS}; {self.fewer}, or `privacy.secure-aggregation` = true, hide them (`parameters-per-row` of"
            " docs/privacy.md)"
        )


def read(path: Path) -> Policy:
    """Read a policy file."""
    policy: Policy = validated(Policy, read_toml(path), "", f"{path.name}: ")
    return policy


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
