"""Server side of federated standardisation: combine the sites' sums into one schema, means and scales.

For sites k with n_k rows, mean c_k, residual r_k = Σ(x − c_k) and squares Q_k = Σ(x − c_k)² of a column,

    m = Σ_k (n_k c_k + r_k) / N,    Σ(x − m)² = Σ_k [Q_k + 2 (c_k − m) r_k + n_k (c_k − m)²],

the exact pairwise update of Chan, Golub & LeVeque (1983) for any number of parts. No offset is squared, so a column
with mean 1e8 and sd 1 loses no digits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError, ProtocolError, first_of, many
from fedgp_flower.options import MAX_LEVELS, MOST_CLASSES, MULTICLASS, REAL_VALUED
from fedgp_flower.typing import Array, Facts, Json, NamedArrays

Kind: TypeAlias = Literal["numeric", "categorical"]
Site: TypeAlias = str

COVARIANCE = "input.covariance"
"""Name of the covariance of the inputs, from which missing cells are imputed."""
ROUNDING = 4 * np.finfo(np.float64).eps
"""A column is constant if its sd is below this share of its mean."""

DIGITS = 30
"""Binary digits of an sd, and of a mean in units of its sd; the others depend on the order in which rows are summed."""

ROWS_PER_INPUT = 3
"""Fewer training rows per encoded input give a warning."""
TOO_MANY_LEVELS = f"at most {MAX_LEVELS} are allowed: leave it out of `features`"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the schema, with the sorted levels of a categorical one."""

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    """Imputed value of each encoded input, its mean over all sites. Empty if missing cells are not imputed."""
    flagged: bool = False
    """Whether the column has a missingness indicator."""

    @property
    def shown(self) -> tuple[str, ...]:
        """Levels with an indicator: the second of two levels, otherwise all; that of a single level is constant."""
        return self.levels[1:] if len(self.levels) == 2 else self.levels

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded inputs: the column or ``column=level`` for each indicator, and ``column missing``."""
        inputs = (self.name,) if self.kind == "numeric" else tuple(f"{self.name}={level}" for level in self.shown)
        return (*inputs, f"{self.name} missing") if self.flagged else inputs

    def as_json(self) -> Json:
        """Return the column as an entry of the schema's JSON."""
        levels = {"levels": list(self.levels)} if self.kind == "categorical" else {}
        missing = {"missing": {"fill": list(self.fill), "indicator": self.flagged}} if self.fill else {}
        return {"name": self.name, "kind": self.kind, **levels, **missing}

    @staticmethod
    def from_json(entry: Facts) -> Column:
        """Read an entry that :meth:`as_json` wrote."""
        levels, missing = tuple(str(level) for level in entry.get("levels", ())), entry.get("missing", {})
        fill = tuple(map(float, missing.get("fill", ())))
        return Column(str(entry["name"]), entry["kind"], levels, fill, bool(missing.get("indicator", False)))


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """A site's answer to ``query.describe``, unchecked."""

    arrays: Mapping[str, NDArray[np.generic]]
    """``sums`` [C, 3], sum, residual and squares of the C numeric columns; ``missing`` cells of these, then of each
    column of text; ``levels``, rows of each level. The columns are in the order of the schema, the target last."""
    schema: str
    num_examples: int
    label: str = ""
    dropped: int = 0
    partitions: int = 0
    """Number of simulated sites; 0 if the site is real."""
    bare: bool = False
    """Whether the description has no arrays, because the site answers under masks only."""
    trusting: bool = False


@dataclass(frozen=True, slots=True)
class _ColumnSummary:
    """A site's checked summary of one column."""

    kind: Kind
    rows: int
    filled: int
    sums: Array
    """For a numeric column: sum, residual and squares about the site's mean, [3]."""
    counts: Mapping[str, int]
    """For a categorical column: rows by level."""


_Description: TypeAlias = dict[str, _ColumnSummary]
"""Summaries of a site's columns by name, the target last."""


def _parse(description: SiteDescription) -> _Description:
    """Read a description. Raise ProtocolError if its schema or its arrays are invalid."""
    rows, columns = description.num_examples, _parse_schema(description.schema)
    if rows < 1:
        raise ProtocolError(f"num-examples is {rows}; expected at least 1")
    numbers, texts = ([column for column in columns if bool(column.levels) is text] for text in (False, True))
    for column in texts:
        if len(column.levels) > MAX_LEVELS:  # the site should have refused it
            raise ProtocolError(f"`{column.name}` has {len(column.levels)} levels; {TOO_MANY_LEVELS}")
    ends = np.cumsum([len(column.levels) for column in texts], dtype=int)
    shapes = {"sums": (len(numbers), 3), "missing": (len(columns),), "levels": (sum(len(c.levels) for c in texts),)}
    if description.bare:  # mean 0, sd 1 and levels that are equally frequent
        sums, missing = np.tile([0.0, 0.0, rows], (len(numbers), 1)), np.zeros(len(columns))
        levels = np.ones(shapes["levels"])
    else:
        sums, missing, levels = _checked_arrays(description.arrays, shapes)
    filled = rows - missing
    _check_sums(sums, filled[: len(numbers)], rows)
    found = {
        column.name: _ColumnSummary("numeric", rows, int(count), own, {})
        for column, count, own in zip(numbers, filled, sums, strict=False)
    }
    for column, count, held in zip(texts, filled[len(numbers) :], np.split(levels, ends), strict=False):
        if not description.bare and held.sum() != count:
            raise ProtocolError(f"the levels of `{column.name}` must add up to its {count:.0f} filled cells")
        counts = dict(zip(column.levels, map(int, held), strict=True))
        found[column.name] = _ColumnSummary("categorical", rows, int(count), np.empty(0), counts)
    if found[columns[-1].name].filled < rows:
        raise ProtocolError(f"the target `{columns[-1].name}` has missing cells")
    return {column.name: found[column.name] for column in columns}


def _parse_schema(schema: str) -> list[Column]:
    """Return the columns, the target last."""
    try:
        entries = json.loads(schema)
        columns = [Column.from_json(entry) for entry in [*entries["features"], entries["target"]]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtocolError("the site's schema is not JSON with `features` and `target`") from None
    for column in columns:
        kind = "categorical" if column.levels else "numeric"
        if column.kind != kind or len(set(column.levels)) < len(column.levels):
            raise ProtocolError("the site's schema names a level twice or has an unknown kind of column")
    if len({column.name for column in columns}) < len(columns):
        raise ProtocolError("the site's schema names a column twice")
    return columns


def _checked_arrays(
    arrays: Mapping[str, NDArray[np.generic]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Array, Array, Array]:
    """Return sums, missing cells and levels after checks of names, shapes and signs; a message holds finite numbers."""
    if differing := sorted(set(arrays) ^ set(shapes)):
        raise ProtocolError(f"the description's arrays are wrong: missing or unknown: {', '.join(differing)}")
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ProtocolError(f"`{name}` has shape {arrays[name].shape}; the schema needs {shape}")
    sums, missing, levels = (np.asarray(arrays[name], dtype=np.float64) for name in shapes)
    if any((found < 0).any() for found in (sums[:, 2], missing, levels)):
        raise ProtocolError("counts and sums of squares must not be negative")
    return sums, missing, levels


def _check_sums(sums: Array, filled: Array, rows: int) -> None:
    """Raise ProtocolError for sums [C, 3] that no rows have: squares of a single row, or a residual beyond rounding.

    N additions of x round off at most N ε Σ|x|, and Σ|x| ≤ √(N Σx²) with Σx² = Q + s²/N; r contains four such sums.
    """
    if (filled < 0).any():
        raise ProtocolError(f"`missing` counts more than the {rows} rows of the site")
    total, residual, squares = sums.T
    if ((filled <= 1) & (squares > 0)).any() or ((filled == 0) & (total != 0)).any():
        raise ProtocolError("the squares about the mean of a single row, and all sums of no rows, must be 0")
    size = np.sqrt(filled) * np.hypot(np.sqrt(squares), np.abs(total) / np.sqrt(np.maximum(filled, 1)))
    if (np.abs(residual) > 4 * filled * np.finfo(np.float64).eps * size).any():
        raise ProtocolError("a residual is more than rounding can cause in a sum of this many rows")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Schema and standardisation that the sites agreed on, with a summary of the training rows."""

    arrays: NamedArrays
    """Standardisation: ``input.mean|scale`` [D], ``target.mean|scale`` (0-d), and any :data:`COVARIANCE`."""
    schema: str
    names: tuple[str, ...]
    rows: dict[Site, int]
    labels: dict[Site, str]
    simulated: bool
    training_target: dict[str, float] = field(default_factory=dict)
    """``mean`` and ``sd`` of the target over all training rows, the ``share`` of the second class, or each share."""
    columns: list[Json] = field(default_factory=list)
    dropped: int = 0
    sums: dict[Site, Array] = field(default_factory=dict)
    """:func:`encoded_sums` of each site, [D + 1, 3]. A checkpoint keeps none; sites send them again."""
    refused: dict[Site, str] = field(default_factory=dict)
    """Sites whose columns differ from those of most sites, with the difference."""
    constant: tuple[str, ...] = ()
    """Feature columns with a single value over all accepted sites; they become zero inputs."""
    target_differs: list[Site] = field(default_factory=list)
    """Sites whose mean of a numeric target is far from that of the others."""
    target_alone: dict[str, Site] = field(default_factory=dict)
    """Classes of the target that one site has alone, with the site."""

    @property
    def target_scale(self) -> float:
        """Scale of the standardised target in units of the target; of a transformed target, its standard deviation."""
        return self.training_target["sd"] if self.transformed else float(self.arrays["target.scale"])

    @property
    def transformed(self) -> bool:
        """Whether the target is modelled through a transformation."""
        return "transform" in json.loads(self.schema)["target"]

    @property
    def classes(self) -> tuple[str, ...]:
        """Levels of the target; empty for a number."""
        return Column.from_json(json.loads(self.schema)["target"]).levels

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """Levels of each feature column; empty for a number."""
        return {c.name: c.levels for c in map(Column.from_json, json.loads(self.schema)["features"])}

    @property
    def num_inputs(self) -> int:
        """D, the number of encoded inputs."""
        return len(self.arrays["input.mean"])

    def sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Return the lengths of the dimensions D and P with the ``known`` ones of a question."""
        return {"D": self.num_inputs, "P": 1 + self.num_inputs, **known}

    @property
    def data(self) -> Facts:
        """Summary of the training rows for ``metrics.json``."""
        target: Json = {"target": json.loads(self.schema)["target"]["name"]}
        if self.target_differs:
            target["target_differs"] = [self.labels.get(site, site) for site in self.target_differs]
        if self.target_alone:
            target["target_alone"] = {level: self.labels.get(site, site) for level, site in self.target_alone.items()}
        counted = {"sites": len(self.rows), "rows": sum(self.rows.values()), "inputs": self.num_inputs}
        columns = [dict(column) for column in self.columns]
        for column in (column for column in columns if "differs" in column):
            column["differs"] = [self.labels.get(site, site) for site in column["differs"]]
        return {**target, **counted, "dropped": self.dropped, "columns": columns}

    @property
    def warnings(self) -> list[str]:
        """Warnings on the data for a reader of the results."""
        rows = sum(self.rows.values())
        if self.num_inputs * ROWS_PER_INPUT <= rows:
            return []
        return [
            f"{self.num_inputs} encoded inputs are more than a third of the {rows} training rows: expect predictions"
            " near the mean. Name fewer columns in `features`; each level of a text column is an input."
        ]


def agree(
    descriptions: Mapping[Site, SiteDescription],
    *,
    standardise: bool = True,
    likelihood: str = "gaussian",
    missing: str = "error",
    order: Sequence[str] = (),
) -> Agreement:
    """Determine columns, levels, means and scales from the sites' sums.

    Columns are those that most sites have; other sites are refused. Indicators of levels have mean p and scale
    √(p(1−p)). With ``missing`` = impute or indicator, missing cells have a mean. Levels of the target follow
    ``order``; without one, they are sorted, numerically if they are numbers. Raise DataError if no site is left, a
    column has too many levels or no filled cell, or the target is constant.
    """
    sites, refused = _matching_sites(descriptions, two=likelihood not in MULTICLASS, order=order)
    *features, target = next(iter(sites.values()))
    pooled_features = [_pooled(sites, name, missing) for name in features]
    columns = [pooled.column for pooled in pooled_features]
    many = [f"`{c.name}` has {len(c.levels)} levels over all sites" for c in columns if len(c.levels) > MAX_LEVELS]
    if many:
        raise DataError(f"{', '.join(many)}; {TOO_MANY_LEVELS}")
    pooled_target = _pooled(sites, target, rank=order.index if order else _numeric_order)
    classes = pooled_target.column.levels
    if pooled_target.constant:
        what, end = ("class", "classification needs two") if classes else ("number", "there is nothing to learn")
        raise DataError(f"target `{target}` is the same {what} at every site; {end}")
    pairs = [(pooled.mean, pooled.scale) for pooled in pooled_features] or [(np.empty(0), np.empty(0))]
    mean, scale = map(np.concatenate, zip(*pairs, strict=True))
    centre, spread = float(pooled_target.mean[0]), float(pooled_target.scale[0])
    if likelihood == "categorical" and len(classes) > MOST_CLASSES:
        raise DataError(
            f"target `{target}` has {len(classes)} classes over all sites; at most {MOST_CLASSES} are allowed"
        )
    raw_target = classes or likelihood not in REAL_VALUED or not standardise
    arrays = {
        "input.mean": mean if standardise else np.zeros_like(mean),
        "input.scale": scale if standardise else np.ones_like(scale),
        "target.mean": np.array(0.0 if raw_target else centre),
        "target.scale": np.array(1.0 if raw_target else spread),
    }
    known = {"features": [column.as_json() for column in columns], "target": pooled_target.column.as_json()}
    schema = json.dumps(known if missing == "error" else known | {"missing": missing})
    accepted = {site: descriptions[site] for site in sites}
    return Agreement(
        arrays,
        schema,
        names=tuple(name for column in columns for name in column.names),
        rows={site: description.num_examples for site, description in accepted.items()},
        labels={site: description.label for site, description in accepted.items()},
        simulated=any(description.partitions for description in accepted.values()),
        training_target=_target_summary(pooled_target),
        columns=[pooled.facts for pooled in pooled_features],
        dropped=sum(description.dropped for description in accepted.values()),
        sums={site: encoded_sums(description, schema) for site, description in accepted.items()},
        refused=refused,
        constant=tuple(pooled.column.name for pooled in pooled_features if pooled.constant),
        target_differs=[] if classes else pooled_target.facts["differs"],
        target_alone=_alone({site: columns[target] for site, columns in sites.items()}),
    )


def _numeric_order(level: str) -> tuple[float, str]:
    """Return the sort key of a level: numbers by value, all other levels alphabetically before them."""
    try:
        return float(level), level
    except ValueError:
        return -np.inf, level


def _target_summary(target: _PooledColumn) -> dict[str, float]:
    """Return mean and sd of a target, the share of the second of two classes, or the share of each class."""
    levels, mean = target.column.shown, target.mean.tolist()
    if not levels:
        return {"mean": mean[0], "sd": float(target.scale[0])}
    shares = {f"share of {level}": share for level, share in zip(levels, mean, strict=True)}
    return {"share": mean[0]} if len(levels) == 1 else shares


def _matching_sites(
    descriptions: Mapping[Site, SiteDescription], *, two: bool, order: Sequence[str]
) -> tuple[dict[Site, _Description], dict[Site, str]]:
    """Return the sites, sorted, whose columns match those of most sites, and why the others are refused."""
    parsed: dict[Site, _Description] = {}
    refused: dict[Site, str] = {}
    for site in sorted(descriptions):
        try:
            parsed[site] = _parse(descriptions[site])
        except ProtocolError as error:
            refused[site] = str(error)
    for differing in (_other_columns, *([partial(_other_levels, order=order)] if two or order else ())):
        refused |= differing(parsed)
        parsed = {site: columns for site, columns in parsed.items() if site not in refused}
    if not parsed:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in refused.items()) or "no site described its data"
        raise DataError(f"no site is left to agree with: {reasons}")
    return parsed, refused


@dataclass(frozen=True, slots=True)
class _PooledColumn:
    """A column over all sites; ``mean`` and ``scale`` have an entry for each encoded input."""

    column: Column
    mean: Array
    scale: Array
    constant: bool
    facts: Json
    """Kind, encoded inputs, missing cells; number of levels, or mean, sd and the sites that differ."""


FAR = 3.0
"""A site differs if its mean is this many within-site sds from the median of means; its units may be others."""


def _pooled(
    sites: Mapping[Site, _Description], name: str, missing: str = "error", rank: Callable[[str], Any] | None = None
) -> _PooledColumn:
    """Pool a column over all sites, with imputed values for its missing cells."""
    by_site = {site: columns[name] for site, columns in sites.items() if columns[name].filled}
    if not by_site:
        raise DataError(f"no site has a filled cell of `{name}`; leave it out of `features`")
    filled = np.array([column.filled for column in by_site.values()], dtype=np.float64)
    if next(iter(by_site.values())).kind == "numeric":
        sums = np.stack([column.sums for column in by_site.values()])
        centre, spread = _moments(filled, sums)
        constant = bool(spread <= ROUNDING * abs(centre))
        centre, spread = (centre, 1.0) if constant else _shortened(centre, spread)
        column, mean, scale = Column(name, "numeric"), np.array([centre]), np.array([spread])
        means, within = sums[:, 0] / filled, np.median(np.sqrt(sums[:, 2] / filled))
        distance = np.abs(means - np.median(means))
        differs = [site for site, far in zip(by_site, distance > FAR * within, strict=True) if far]
        facts = {"kind": "number", "mean": centre, "sd": 0.0 if constant else spread, "differs": differs}
    else:
        counts = sum((Counter(column.counts) for column in by_site.values()), Counter[str]())
        column, constant = Column(name, "categorical", tuple(sorted(counts, key=rank))), len(counts) == 1
        mean = np.array([counts[level] for level in column.shown]) / counts.total()
        scale = np.ones(1) if constant else np.sqrt(mean * (1 - mean))
        alone = _alone(by_site)
        differs = [site for site, column in by_site.items() if {*column.counts} <= alone.keys()]
        facts = {"kind": "text", "levels": len(counts), "differs": differs}
    rows = sum(columns[name].rows for columns in sites.values())
    num_missing = rows - int(filled.sum())
    if missing in {"impute", "indicator"}:
        column = replace(column, fill=tuple(mean.tolist()), flagged=missing == "indicator" and num_missing > 0)
    if column.flagged:
        share = num_missing / rows
        mean, scale = np.append(mean, share), np.append(scale, np.sqrt(share * (1 - share)))
    facts = {"name": name, "inputs": len(column.names), "missing": num_missing, **facts}
    return _PooledColumn(column, mean, scale, constant, facts)


def _alone(sites: Mapping[Site, _ColumnSummary]) -> dict[str, Site]:
    """Return the levels that one site of several has alone, with the site."""
    held = Counter(level for column in sites.values() for level in column.counts)
    return {
        level: site for site, column in sites.items() for level in column.counts if held[level] == 1 and len(sites) > 1
    }


def _moments(rows: Array, sums: Array) -> tuple[float, float]:
    """Return mean and population sd of a column from the sites' row counts [K] and sums [K, 3]."""
    total, residual, _ = sums.T
    centre = total / rows
    mean = centre[0] + (rows * (centre - centre[0]) + residual).sum() / rows.sum()
    # For a constant column, rounding can leave squares of minus one unit in the last place of mean².
    return float(mean), float(np.sqrt(abs(squares_about(rows, sums, mean).sum()) / rows.sum()))


def _shortened(mean: float, sd: float) -> tuple[float, float]:
    """Return both with :data:`DIGITS`, so that runs whose sums differ by rounding have the same standardised rows."""
    unit = np.ldexp(1.0, int(np.frexp(sd)[1]) - DIGITS)
    return float(np.rint(mean / unit) * unit), float(np.rint(sd / unit) * unit)


def squares_about(rows: int | Array, sums: Array, point: Array) -> Array:
    """Return Σ(x − p)² of columns from their sums [D, 3], by the formula at the top of this module."""
    total, residual, squares = sums.T
    gap = total / rows - point
    return np.asarray(squares + 2 * gap * residual + rows * gap**2)


def encoded_sums(description: SiteDescription, schema: str) -> Array:
    """Return sum, residual and squares of each encoded input, then of the target, [D + 1, 3]; NaN with missing cells.

    The classes of a categorical target count as the numbers 0, 1, ….
    """
    summaries, columns = _parse(description), _parse_schema(schema)
    if {(name, known.kind) for name, known in summaries.items()} != {(column.name, column.kind) for column in columns}:
        raise ProtocolError("its columns are not those the other sites agreed on")
    sums: list[list[float]] = []
    for column in columns:
        found: list[list[float]]
        known = summaries[column.name]
        held = np.array([float(known.counts.get(level, 0)) for level in column.shown])
        if column is columns[-1] and len(held) > 1:  # numbers of classes
            number = np.arange(len(held))
            total = float(held @ number)
            found = [[total, 0.0, float(held @ number**2) - total**2 / known.rows]]
        else:
            found = [[n, 0.0, n - n**2 / known.rows] for n in held.tolist()] or [known.sums.tolist()]
        found += [[np.nan] * 3] * column.flagged
        sums += found if known.filled == known.rows else [[np.nan] * 3] * len(found)
    return np.array(sums)


def _other_columns(sites: Mapping[Site, _Description]) -> dict[Site, str]:
    """Return the sites whose columns or kinds differ from the most common ones, in any order, with the difference."""
    layout = {
        site: (list(columns)[-1], frozenset((name, column.kind) for name, column in columns.items()))
        for site, columns in sites.items()
    }
    refused: dict[Site, str] = {}
    [(target, agreed)] = [most for most, _ in Counter(layout.values()).most_common(1)] or [("", frozenset())]
    for site, found in layout.items():  # on a tie, the first site's columns are the most common
        kinds, here = dict(agreed), dict(found[1])
        other_kinds = {name for name in kinds.keys() & here.keys() if kinds[name] != here[name]}
        parts = {
            "lacks the column": kinds.keys() - here.keys(),
            "has the extra column": here.keys() - kinds.keys(),
            "has another kind (number, or text like 01) of": other_kinds,
            "has as target": {found[0]} - {target},
        }
        if differences := [f"{what} `{'`, `'.join(sorted(names))}`" for what, names in parts.items() if names]:
            reason = f"differs from most sites: {'; '.join(differences)}"
            refused[site] = f"{reason}; use the same columns, or set `features`"
    return refused


def _other_levels(sites: Mapping[Site, _Description], order: Sequence[str]) -> dict[Site, str]:
    """Return the sites with a grade that is not in the order, or with a class beyond the two that most sites have."""
    targets = {site: list(columns.items())[-1] for site, columns in sites.items()}
    held = Counter(level for _, column in targets.values() for level in column.counts)
    known = set(order or sorted(held, key=lambda level: (-held[level], level))[:2])
    beyond = "class that is not among the two that most sites have"
    what = "grade that is not in the order of `target`" if order else beyond
    return {
        site: f"target `{name}` has a {what}; correct its spelling"
        for site, (name, column) in targets.items()
        if not set(column.counts) <= known
    }


FAR_MEAN = "mean far from that of the other sites"
OVERVIEW_TITLES = ("column", "kind", "inputs", "missing", "levels, or mean ± sd", "differs at")


def overview_lines(data: Facts) -> list[str]:
    """Return a line on the whole data, one on a target that differs, and one for every column to look at."""
    columns: Sequence[Facts] = data["columns"]
    left_out = f", {many(data['dropped'], 'row')} left out for a missing cell" if data["dropped"] else ""
    target = f"target `{data['target']}`: " if "target" in data else ""
    lines = [
        f"{target}{many(data['rows'], 'training row')} at {many(data['sites'], 'site')}{left_out};"
        f" {many(data['inputs'], 'input')} of {many(len(columns), 'column')}"
    ]
    if differing := data.get("target_differs", ()):
        lines += [f"{target}{FAR_MEAN} at {first_of(differing)}; are its units the same everywhere?"]
    if alone := data.get("target_alone"):
        lines += [f"{target}only {site} has `{level}`; is it spelt as elsewhere?" for level, site in alone.items()][:5]
    for column in columns:
        notes = [many(column["missing"], "missing cell")] if column["missing"] else []
        if column.get("differs"):
            what = "no level in common with the other sites" if "levels" in column else FAR_MEAN
            notes += [f"{what} at {first_of(column['differs'])}"]
        lines += [f"`{column['name']}`: {'; '.join(notes)}"] if notes else []
    return lines


def overview_rows(data: Facts) -> list[list[str]]:
    """Return a row of cells for every feature column, with the titles ``OVERVIEW_TITLES``."""
    return [
        [
            *(str(column[name]) for name in ("name", "kind", "inputs")),
            f"{column['missing']:,}",
            f"{column['levels']} levels" if "levels" in column else f"{column['mean']:.4g} ± {column['sd']:.3g}",
            ", ".join(column.get("differs", ())),
        ]
        for column in data.get("columns", ())
    ]
