"""The run configuration: flat dotted keys, validated once, identical on the server and at every site."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fedgp_flower.errors import ConfigError, similar
from fedgp_flower.formula import SITE, Formula
from fedgp_flower.formula import parse as parse_formula
from fedgp_flower.options import (
    AUTO,
    BASIC,
    SECOND_COLUMN,
    AveragingSection,
    Count,
    FlatConfig,
    MethodOptions,
    ModelSection,
    NonNegative,
    OptimizerSection,
    Positive,
    PositiveInt,
    Section,
    Value,
)

if TYPE_CHECKING:
    from fedgp_flower.typing import Facts, Json

S = TypeVar("S", bound=BaseModel)


class PartitionSection(Section):
    """How a data set is split over simulated sites."""

    column: Annotated[str, BASIC] = ""
    """Column of ``natural``, ``dirichlet``, ``pathological``; empty: the target."""
    alpha: Positive = 0.5
    """Concentration of ``dirichlet``: small is uneven."""
    ratio: Annotated[float, Field(ge=1)] = 10.0
    """Rows of the largest site over rows of the smallest, for ``sizes``."""
    min_rows: Count = 0
    """Natural groups with fewer training rows are left out, named and not scored. ``dirichlet`` draws until every site
    has as many; 0 means 10 there."""


class TransformSection(Section):
    """Transformation of the target to a Gaussian scale."""

    target: Annotated[Literal["none", "log", "sqrt", "yeo-johnson"], BASIC] = "none"
    """Model this function of the target, with Gaussian noise. ``log`` and ``sqrt`` need targets above zero;
    ``yeo-johnson`` takes any. Predictions and scores are in units of the target."""


class BaselineSection(Section):
    """Comparisons computed with each run, shown in ``metrics.json`` and the report."""

    linear: bool = True
    """Mean of the target, and linear or logistic regression, from sums."""
    local_only: bool = True
    """A GP of each site's rows."""
    pooled: bool = True
    """Simulation only: a GP of all rows (exact up to 3000 rows, else with as many inducing points as the run) and
    gradient boosting."""
    max_evaluations: PositiveInt = 200
    """L-BFGS evaluations of each baseline."""


class RoundSection(Section):
    """Treatment of rounds that a site missed."""

    incomplete: Literal["accept", "repeat"] = "accept"
    """A round with a failed site: continue without that site, or repeat the round until the site is back or has failed
    ``max-failures`` times. Not for asynchronous schedules."""


_RANGES = TypeAdapter(dict[str, tuple[float, float]])


class PrivacySection(Section):
    """Protection of the sites' rows from the server."""

    secure_aggregation: Annotated[bool, BASIC] = False
    """Masks: the server sees only sums over sites. Methods that ask single sites are refused. See
    ``docs/privacy.md``."""
    min_sites: Annotated[int, Field(ge=3)] = 3
    """Fewest sites in a sum under masks; a site may insist on more."""
    epsilon: Annotated[NonNegative, BASIC] = 0.0
    """Differential privacy: ε of training for each row, by noise in the sums (``sgpr-private``); 0: none.
    See ``docs/privacy.md``."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ of the guarantee."""
    ranges: str = ""
    """With ``epsilon``: public range of every column, as JSON, ``{"age": [0, 110], "y": [-3, 3]}``. Targets are clipped
    to theirs."""

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Public range of each column."""
        return _RANGES.validate_json(self.ranges or "{}")

    @field_validator("ranges")
    @classmethod
    def _finite_ranges(cls, text: str) -> str:
        for name, (low, high) in _RANGES.validate_json(text or "{}").items():
            if not -math.inf < low < high < math.inf:
                raise ValueError(f"the range of `{name}` should be [low, high] with low < high, both finite")
        return text


Partitioner: TypeAlias = Literal[
    "iid", "linear", "square", "exponential", "dirichlet", "pathological", "natural", "sizes", "kmeans", "blocks"
]
BY_COLUMN = ("natural", "dirichlet", "pathological")
"""Partitioners that deal rows by the levels of a column."""


class CoreConfig(Section):
    """The keys that all methods share."""

    method: Annotated[str, BASIC] = AUTO
    """Method of `fedgp methods`. ``auto``: ``sgpr`` for a Gaussian likelihood, ``svgp`` for others,
    ``mixed-model`` with a ``formula``."""
    dataset: Annotated[str, BASIC] = "diabetes"
    """Simulation: a name from `fedgp datasets`, the path of a table, or `openml/<name>`. Real sites ignore it."""
    data_dir: str = ""
    """Folder of data sets; empty: the environment variable ``FEDGP_DATA``."""
    split: Annotated[Annotated[int, Field(ge=-1)], BASIC] = -1
    """Standard split whose test rows are held out; -1: every site holds out some of its rows."""
    target: Annotated[str, BASIC] = ""
    """Target column; empty: ``y``, else the last column. A second column may follow a comma: the exposure of counts
    (``cases,person_years``), the trials of ``binomial`` (``cured,treated``), whether the event was seen, 1 or 0
    (``days,died``), the order of grades (``pain,none<mild<severe``)."""
    features: Annotated[str, BASIC] = ""
    """Feature columns, comma-separated, or with a minus each those to leave out; empty: all but the target."""
    formula: Annotated[str, BASIC] = ""
    """A mixed model in lme4's notation, ``wheeze ~ smoke * age + (1 + age | child)``. See ``docs/mixed-models.md``."""
    test_fraction: Annotated[Annotated[float, Field(ge=0, lt=1)], BASIC] = 0.2
    """Share of its rows that a site holds out; 0: nothing is scored."""
    holdout: Annotated[str, BASIC] = "random"
    """Held-out rows: any (``random``), whole groups (``group:patient``), the latest (``time:COLUMN``), or in a
    simulation by natural groups whole sites (``site``). The column is an input only if `features` names it."""
    missing: Annotated[Literal["error", "drop", "impute", "indicator"], BASIC] = "error"
    """Missing cells: an error, drop the row, impute the mean given the row's other cells, or impute and add an
    indicator as input. Rows without a target are dropped unless it is ``error``."""
    dates: Annotated[Literal["error", "days", "season", "days-and-season"], BASIC] = "error"
    """Columns of dates: an error, days since 1 January 2000, sine and cosine of the day of the year, or all three."""
    standardise: bool = True
    """Scale inputs and target by means and standard deviations of all sites."""
    partitioner: Annotated[Partitioner, BASIC] = "iid"
    """How rows are split over simulated sites: at random, in equal (``iid``) or growing shares (``linear``, ``square``,
    ``exponential``, ``sizes``); unevenly by a column (``dirichlet``, ``pathological``); by a column that names the site
    (``natural``); by regions of the inputs (``kmeans``, ``blocks``)."""
    num_server_rounds: Annotated[Annotated[int, Field(ge=-1)], BASIC] = -1
    """Most rounds; -1 leaves it to the method: 2000 for ``sfvi``, 100 otherwise. A run ends when it has converged."""
    seed: Annotated[Count, BASIC] = 0
    """Seed of all random numbers."""
    output_dir: Annotated[str, BASIC] = "results"
    """Folder that the run's folder goes into."""
    name: Annotated[str, BASIC] = ""
    """Name of the run's folder; empty: method-dataset-time."""
    resume: Annotated[bool, BASIC] = False
    """Resume the run called `name` from its last complete round."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where sites compute."""
    precision: Literal["float64", "float32"] = "float64"
    """Floating-point type of the sites' computations."""
    threads: PositiveInt = 1
    """Threads of linear algebra at a site; with one, figures agree to the last digit."""
    evaluate_every: Count = 10
    """Rounds between evaluations; 0 evaluates only after the last round."""
    sites: Count = 0
    """Sites that the server waits for; 0: all simulated sites, or ``min-sites`` real ones."""
    min_sites: Annotated[PositiveInt, BASIC] = 2
    """Fewest usable sites; with fewer the run stops."""
    wait_seconds: Positive = 120.0
    """Seconds to wait for sites before the start."""
    round_timeout: Positive = 3600.0
    """Seconds after which a missing reply counts as that site's failure."""
    max_failures: PositiveInt = 3
    """Failures after which a site is left out; a round without a failure clears them."""
    extra: str = ""
    """Keys that Flower does not know, of methods from other packages: ``toy.steps=3 toy.rate=0.1``."""
    keep_predictions: bool = True
    """Simulation only: keep held-out predictions row by row in the run's folder."""
    partition: PartitionSection = PartitionSection()
    transform: TransformSection = TransformSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    averaging: AveragingSection = AveragingSection()
    baselines: BaselineSection = BaselineSection()
    privacy: PrivacySection = PrivacySection()
    round: RoundSection = RoundSection()

    @model_validator(mode="after")
    def _combinations(self) -> CoreConfig:
        if self.partitioner == "natural" and not self.partition.column:
            raise ValueError(
                "`partitioner` = 'natural' needs `partition.column`, the column that names the site of a row"
            )
        if self.partition.column and self.partitioner not in BY_COLUMN:
            raise ValueError(
                f"`partition.column` is for `partitioner` = {', '.join(map(repr, BY_COLUMN))}, not {self.partitioner!r}"
            )
        if self.holdout != "random" and self.split >= 0:
            raise ValueError(f"`holdout` = '{self.holdout}' needs `split` = -1: a standard split fixes the test rows")
        if self.holdout == "site" and self.partitioner != "natural":
            raise ValueError("`holdout` = 'site' holds out natural groups of one table: set `partitioner` = 'natural'")
        if self.resume and not self.name:
            raise ValueError("`resume` needs `name`, the name of the run to resume")
        if self.formula and (self.target or self.features):
            raise ValueError("`formula` names the target and the features; leave out `target` and `features`")
        transform, likelihood = self.transform.target, self.model.likelihood
        if transform != "none" and not self.standardise:
            raise ValueError(f"`transform.target` = '{transform}' needs `standardise` = true")
        if transform != "none" and likelihood != "gaussian":
            raise ValueError(
                f"`transform.target` = '{transform}' needs a Gaussian likelihood; with `model.likelihood` ="
                f" '{likelihood}' set it to 'none'"
            )
        return self

    @field_validator("formula")
    @classmethod
    def _readable(cls, text: str) -> str:
        if text:
            parse_formula(text)
        return text

    @property
    def design(self) -> Formula | None:
        """The parsed formula; None without one."""
        return parse_formula(self.formula) if self.formula else None

    @property
    def sites_named(self) -> set[str]:
        """Names that a formula may use for the site."""
        return {SITE, *([self.partition.column] if self.partitioner == "natural" else [])}

    @property
    def outcome(self) -> str:
        """The target column; empty if ``target`` is."""
        return self.target.partition(",")[0].strip() if self.second_target or self.order else self.target

    @property
    def second_target(self) -> str:
        """Second target column that the likelihood reads, such as the exposure; empty without one."""
        return self.target.partition(",")[2].strip() if self.model.likelihood in SECOND_COLUMN else ""

    @property
    def order(self) -> tuple[str, ...]:
        """Ordered grades of the target; empty if they are numbers or the likelihood is not ordinal."""
        known = self.target.partition(",")[2] if self.model.likelihood == "ordinal" else ""
        return tuple(level.strip() for level in known.split("<")) if known else ()

    @property
    def group_columns(self) -> list[str]:
        """Columns that only name groups of the formula, and are no inputs."""
        design = self.design
        return [name for name in design.groups if name not in {*design.inputs, *self.sites_named}] if design else []

    @field_validator("name")
    @classmethod
    def _no_path(cls, name: str) -> str:
        if name in {".", ".."} or "/" in name or "\\" in name:
            raise ValueError("expected the name of a folder inside `output-dir`, without a path")
        return name

    @field_validator("holdout")
    @classmethod
    def _known_holdout(cls, way: str) -> str:
        if not re.fullmatch(r"random|site|(time|group):.+", way):
            raise ValueError("expected random, time:COLUMN, group:COLUMN or site")
        return way

    @property
    def default_exclusions(self) -> set[str]:
        """Columns of sites, of ``holdout`` and the second target, which are inputs only if ``features`` names them."""
        site = self.partition.column if self.partitioner == "natural" else ""
        return {site, self.holdout.partition(":")[2], self.second_target} - {""}

    @property
    def excluded(self) -> list[str]:
        """A note on the column of times of ``holdout``, if it would be an input otherwise."""
        way, _, column = self.holdout.partition(":")
        given = [name.strip() for name in self.features.split(",") if name.strip()]
        chosen = self.design is not None or f"-{column}" in given or any(not name.startswith("-") for name in given)
        words = f"`holdout` orders the rows by `{column}`, so neither it nor a number of its dates is an input"
        return [f"{words}; to use it, name all inputs in `features`"] if way == "time" and not chosen else []

    @property
    def agreement_options(self) -> Json:
        """Keyword arguments of :func:`fedgp_flower.agreement.agree`."""
        known = {"standardise": self.standardise, "likelihood": self.model.likelihood}
        return {**known, "missing": self.missing, "order": self.order}

    def run_name(self, label: str = "") -> str:
        """Return the name of the run's folder; ``label`` replaces the name of the data set."""
        words = (self.method, re.sub(r"[^\w.]+", "-", label or self.dataset), time.strftime("%Y%m%d-%H%M%S"))
        return self.name or "-".join(words)

    def require_whole_rosters(self) -> None:
        """Raise ConfigError if rounds under masks would sample sites."""
        if self.averaging.fraction < 1 and self.privacy.secure_aggregation:
            raise ConfigError(
                f"`averaging.fraction` = {self.averaging.fraction:g} samples sites in every round, so differences of"
                " masked totals would reveal the sums of few sites; set it to 1, or `privacy.secure-aggregation` to"
                " false"
            )

    def require_whole_batches(self) -> None:
        """Raise ConfigError if a batch size is set."""
        if self.optimizer.batch_size:
            raise ConfigError(f"`optimizer.batch-size`: `method` = {self.method!r} uses all rows; set it to 0")

    def require_float64_on_cpu(self) -> None:
        """Raise ConfigError for another device or precision."""
        if self.device == "cuda" or self.precision != "float64":
            raise ConfigError(f"`device`, `precision`: `method` = {self.method!r} computes on the 'cpu' in 'float64'")

    def require_supported(self, options: MethodOptions) -> None:
        """Raise ConfigError if the method does not support the likelihood or a second target column."""
        likelihood = self.model.likelihood
        if likelihood not in options.likelihoods:
            supported = " or ".join(map(repr, sorted(options.likelihoods)))
            raise ConfigError(
                f"`model.likelihood` = {likelihood!r}: `method` = {self.method!r} needs {supported}; take 'svgp'"
            )
        second = SECOND_COLUMN.get(likelihood, "exposure")
        if second != "exposure" and not self.second_target:
            example = {"trials": "cured,treated", "event": "days,died"}[second]
            raise ConfigError(
                f"`target` = {self.target!r}: `model.likelihood` = {likelihood!r} needs the {second} in a second"
                f" column: `target` = {example!r}"
            )
        if self.second_target and not {*SECOND_COLUMN} <= options.likelihoods:
            raise ConfigError(
                f"`target` = {self.target!r} names a second column, the {second}, which `method` ="
                f" {self.method!r} does not read; take 'svgp'"
            )

    def require_private(self, options: MethodOptions) -> None:
        """Raise ConfigError if the run would release anything outside the privacy budget."""
        privacy, baselines = self.privacy, self.baselines.model_dump(by_alias=True)
        if not privacy.epsilon and privacy.ranges:
            raise ConfigError("`privacy.ranges` is only used with `privacy.epsilon`; leave it out")
        if not privacy.epsilon:
            return
        named = ", ".join(f"`baselines.{name}`" for name, value in baselines.items() if value is True)
        problems = {
            f"`method` = {self.method!r} adds no noise; take 'sgpr-private'": not options.accounted,
            f"{named}: the budget does not cover baselines; set them to false": bool(named),
            "`privacy.ranges` is empty: the budget does not cover means and scales; give public ranges": (
                not privacy.ranges
            ),
            "`standardise` = false: columns are scaled by `privacy.ranges`; set it to true": not self.standardise,
            f"`missing` = {self.missing!r} reveals counts of missing cells; set it to 'error'": self.missing != "error",
        }
        if reasons := [reason for reason, holds in problems.items() if holds]:
            raise ConfigError(f"`privacy.epsilon` = {privacy.epsilon:g} cannot be promised: {'; '.join(reasons)}")


class RunConfig(CoreConfig):
    """The core keys, and the keys of the chosen method as ``options``."""

    options: MethodOptions = MethodOptions()
    shared: MethodOptions = MethodOptions()
    """Keys that the method shares with another method; ``options`` if it shares none."""
    unread: tuple[str, ...] = ()
    """Keys of other methods that differ from their defaults."""

    def flat(self) -> dict[str, Value]:
        """Return every key with its value, the method's keys under the method's prefix."""
        tables = {section.table: section.model_dump(by_alias=True) for section in (self.shared, self.options)}
        return flatten(self.model_dump(by_alias=True, exclude={"options", "shared", "unread"}) | tables)

    @property
    def ignored(self) -> list[str]:
        """A note on keys of other methods, if any differ from their defaults."""
        named = ", ".join(f"`{key}`" for key in self.unread)
        return [f"`method` = {self.method!r} does not read {named}"] if named else []

    @property
    def resumable_keys(self) -> set[str]:
        """Keys that may change when a run is resumed."""
        budgets = {f"{self.options.table}.{name}" for name in self.options.budgets}
        return {"resume", "output-dir", "name", "num-server-rounds", "round-timeout", "wait-seconds"} | budgets

    def digest(self) -> str:
        """Return a short hash of all keys that affect the result; site state is valid for one digest."""
        keep = {k: v for k, v in sorted(self.flat().items()) if k not in self.resumable_keys}
        return hashlib.sha256(json.dumps(keep).encode()).hexdigest()[:16]


def flatten(nested: Facts) -> dict[str, Value]:
    """Flatten nested tables to dotted keys: ``{"model": {"kernel": "rbf"}}`` becomes ``{"model.kernel": "rbf"}``."""
    out: dict[str, Value] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            out |= {f"{key}.{name}": leaf for name, leaf in flatten(value).items()}
        else:
            out[key] = value
    return out


def nest(flat: FlatConfig) -> Json:
    """Nest dotted keys into tables, the inverse of :func:`flatten`."""
    out: Json = {}
    for key, value in flat.items():
        *tables, leaf = key.split(".")
        node = out
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return out


def with_shared(options: Iterable[type[MethodOptions]]) -> list[type[MethodOptions]]:
    """Return the classes of method keys and the classes that they share."""
    return [section for table in options for section in (table, table.shared) if section is not None]


def defaults(options: Iterable[type[MethodOptions]]) -> dict[str, Value]:
    """Return every key of a run with its default, the content of ``[tool.flwr.app.config]``."""
    tables = {section.table: section().model_dump(by_alias=True) for section in with_shared(options) if section.table}
    return flatten(CoreConfig().model_dump(by_alias=True) | tables)


def resolved(method: str, flat: FlatConfig) -> str:
    """Resolve ``auto``: ``mixed-model`` with a formula, ``sgpr`` for the Gaussian likelihood, otherwise ``svgp``."""
    if method != AUTO:
        return method
    if flat.get("formula"):
        return "mixed-model"
    return "sgpr" if flat.get("model.likelihood", "gaussian") == "gaussian" else "svgp"


def whole_number(name: str, value: object, least: int) -> int:
    """Return an argument that counts something; raise ConfigError for other types and for less than ``least``."""
    if not isinstance(value, Integral) or value < least:
        raise ConfigError(f"`{name}` = {value!r}: expected a whole number, at least {least}")
    return int(value)


def require_method(method: str, known: Iterable[str]) -> None:
    """Raise ConfigError if a method is unknown."""
    names = sorted(known)
    if method not in names:
        advice = _moved()[0].get(method)
        words = f"was removed: {advice}" if advice else "is not a method"
        raise ConfigError(f"`method` = {method!r} {words}; allowed: {', '.join(names)}")


def parse(flat: FlatConfig, options: Mapping[str, type[MethodOptions]]) -> RunConfig:
    """Validate flat keys; ``options`` maps every method to the class of its keys."""
    known = defaults(options.values())
    given = {key: value.item() if hasattr(value, "item") else value for key, value in _merge_extra(flat, known).items()}
    problems = []
    for key in (key for key in given if key not in known):
        advice = _moved()[1].get(key)
        removed = advice and f"the configuration key `{key}` was removed: {advice}"
        problems.append(removed or unknown(key, known))
    if problems:
        raise ConfigError("\n".join(problems))
    method = resolved(str(given.get("method", AUTO)), given)
    require_method(method, options)
    # An integer is accepted for a float; all other types are checked strictly.
    numbers = {k: float(v) for k, v in given.items() if isinstance(known[k], float) and type(v) is int}
    nested = nest({**given, **numbers, "method": method})
    section = options[method]
    tables = {table.table: table for table in with_shared((*options.values(), section)) if table.table}
    read = {name: validated(table, nested.pop(name, {}), f"{name}.") for name, table in tables.items()}
    core = validated(CoreConfig, nested, "")
    chosen = read[section.table] if section.table else section()
    likelihood = core.model.likelihood if core.model.likelihood != "gaussian" else chosen.default_likelihood
    from_method: dict[str, Value] = {"likelihood": likelihood}
    if core.model.kernel == AUTO:
        from_method["kernel"] = chosen.kernel_for(likelihood)
    if not core.model.num_inducing:
        megabytes = core.model.max_megabytes or chosen.default_megabytes
        from_method |= {"num_inducing": chosen.default_inducing, "max_megabytes": megabytes}
    rounds = core.num_server_rounds if core.num_server_rounds >= 0 else chosen.default_rounds
    model = core.model.model_copy(update=from_method)
    core = core.model_copy(update={"model": model, "num_server_rounds": rounds})
    if core.formula and not chosen.reads_formula:
        raise ConfigError(f"`method` = {method!r} does not read `formula`; leave `method` out to run 'mixed-model'")
    core.require_supported(chosen)
    if core.model.has_steps and not chosen.takes_steps:
        raise ConfigError(f"`model.kernel` = {core.model.kernel!r} needs `method` = 'svgp'")
    chosen.check(core)
    shared = read[section.shared.table] if section.shared else chosen
    chosen.check_shared(shared)
    core.require_private(chosen)
    config = RunConfig.model_construct(**dict(core), options=chosen, shared=shared)
    unread = {key for key, value in {**given, **numbers}.items() if value != known[key]} - {*config.flat()}
    return config.model_copy(update={"unread": tuple(sorted(unread))})


@cache
def _moved() -> tuple[dict[str, str], dict[str, str]]:
    """Return methods and keys of earlier versions, each with its replacement as the end of a sentence."""
    table = json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))
    return table["methods"], {key: words for words, keys in table["keys"].items() for key in keys.split()}


def assignments(words: Sequence[str], known: Mapping[str, Value]) -> dict[str, Value]:
    """Parse ``KEY=VALUE`` words; the value of a string key is plain text, other values are TOML scalars."""
    if malformed := [word for word in words if "=" not in word]:
        raise ConfigError(f"`{malformed[0]}` is not of the form KEY=VALUE")
    pairs = (word.split("=", 1) for word in words)
    return {key: text if isinstance(known.get(key), str) else _scalar(text) for key, text in pairs}


def _scalar(text: str) -> Value:
    try:
        value: Value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _merge_extra(flat: FlatConfig, known: Mapping[str, Value]) -> FlatConfig:
    """Return the keys with those inside ``extra`` merged in."""
    if not flat.get("extra"):
        return flat
    try:
        words = shlex.split(str(flat["extra"]))
    except ValueError as error:
        raise ConfigError(
            f"`extra` = {flat['extra']!r}: {error}; expected KEY=VALUE words with shell quoting"
        ) from None
    further = assignments(words, known)
    if twice := [key for key in further if key in flat and flat[key] != known.get(key, further[key])]:
        raise ConfigError(f"given both directly and in `extra`: {', '.join(f'`{key}`' for key in twice)}; remove one")
    return {**flat, "extra": "", **further}


def unknown(key: str, known: Collection[str]) -> str:
    """Return the error of an unknown key, with the known keys that are most similar."""
    hint = similar(key, known) or f"known keys: {', '.join(sorted(known))}"
    return f"unknown configuration key `{key}`; {hint}"


def validated(section: type[S], values: Facts, prefix: str, file: str = "") -> S:
    """Validate nested values as a section. Raise ConfigError with every invalid key, after the name of a ``file``."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = prefix + ".".join(str(part) for part in item["loc"])
            found = f"`{key}` = {item['input']!r}: " if key != prefix else f"`{prefix.rstrip('.')}`: " if prefix else ""
            words = found + item["msg"].removeprefix("Value error, ")
            names = [f"{prefix}{field.alias}" for field in section.model_fields.values()]
            lines.append(file + (unknown(key, names) if item["type"] == "extra_forbidden" else words))
        raise ConfigError("\n".join(lines)) from None
