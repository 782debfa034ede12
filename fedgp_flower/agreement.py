"""The server's half of federated standardisation: combine the sites' sums into one schema, means and scales.

For sites k with n_k rows, mean c_k, residual r_k = Σ(x − c_k) and squares Q_k = Σ(x − c_k)² of a column,

    m = Σ_k (n_k c_k + r_k) / N,    Σ(x − m)² = Σ_k [Q_k + 2 (c_k − m) r_k + n_k (c_k − m)²],

which is the exact pairwise update of Chan, Golub & LeVeque (1983) for any number of parts: no square of an offset is
ever formed, so a column with mean 1e8 and spread 1 loses nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError, ProtocolError
from fedgp_flower.options import MOST_CLASSES, NUMBERS, SEVERAL
from fedgp_flower.typing import Array, Facts, Json, NamedArrays

Kind: TypeAlias = Literal["numeric", "categorical"]
Site: TypeAlias = str

SUMS = ("sum", "residual", "squares")
GONE = "features.missing"
"""Array of missing cells of the numeric columns; sent only where a cell of any column is missing."""
ROUNDING = 4 * np.finfo(np.float64).eps
"""A spread below this share of the mean is rounding: the column is constant."""

ROWS_PER_INPUT = 3
"""Fewer training rows than this for an encoded input are worth a warning."""
TOO_MANY_LEVELS = "at most {} are allowed: leave it out of `features`"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the schema; a categorical one lists its levels in sorted order."""

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    """What stands for a missing cell in each input: its mean over all sites. Empty where no cell may be missing."""
    flagged: bool = False
    """Whether a further input says where cells are missing."""

    @property
    def shown(self) -> tuple[str, ...]:
        """Levels with an indicator. Two levels need one, that of the second; a single level has a constant one."""
        return self.levels[1:] if len(self.levels) == 2 else self.levels

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded inputs: the column or ``column=level`` for each indicator, and ``column missing``."""
        inputs = (self.name,) if self.kind == "numeric" else tuple(f"{self.name}={level}" for level in self.shown)
        return (*inputs, f"{self.name} missing") if self.flagged else inputs

    def as_json(self) -> Json:
        """The column as it stands in the schema's JSON."""
        levels = {"levels": list(self.levels)} if self.kind == "categorical" else {}
        missing = {"missing": {"fill": list(self.fill), "indicator": self.flagged}} if self.fill else {}
        return {"name": self.name, "kind": self.kind, **levels, **missing}

    @staticmethod
    def from_json(entry: Facts) -> Column:
        """The inverse of :meth:`as_json`."""
        levels, missing = tuple(str(level) for level in entry.get("levels", ())), entry.get("missing", {})
        fill = tuple(map(float, missing.get("fill", ())))
        return Column(str(entry["name"]), entry["kind"], levels, fill, bool(missing.get("indicator", False)))


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """A site's answer to ``query.describe`` as it came."""

    arrays: Mapping[str, NDArray[np.generic]]
    schema: str
    num_examples: int
    label: str = ""
    dropped: int = 0
    partitions: int = 0
    """Sites of a simulation; 0 where the site is real."""
    bare: bool = False
    """Whether it says nothing of rows, since it answers under masks alone."""
    trusting: bool = False


@dataclass(frozen=True, slots=True)
class _Told:
    """What a site says of one column, checked."""

    kind: Kind
    rows: int
    filled: int
    sums: Array
    """Of numbers: the sum, its residual, and the squares about the site's mean, [3]."""
    counts: Mapping[str, int]
    """Of text: rows of each level."""


_Description: TypeAlias = dict[str, _Told]
"""The columns of a site by name, the target last."""


def _parse(description: SiteDescription, max_levels: float = np.inf) -> _Description:
    """Read a description; ProtocolError where its schema or its arrays are not what they must be."""
    rows, gone = description.num_examples, GONE in description.arrays
    if rows < 1:
        raise ProtocolError(f"num-examples is {rows}; expected at least 1")
    features, target = _parse_schema(description.schema)
    numeric = sum(not column.levels for column in features)
    shapes: dict[str, tuple[int, ...]] = {f"features.{part}": (numeric,) for part in SUMS}
    shapes |= {f"target.{part}": () for part in SUMS if not target.levels}
    shapes |= {f"levels.{column.name}": (len(column.levels),) for column in (*features, target) if column.levels}
    arrays = _shaped(description.arrays, shapes | ({GONE: (numeric,)} if gone else {}))
    sums = np.stack([np.append(arrays[f"features.{p}"], arrays.get(f"target.{p}", ())) for p in SUMS], axis=1)
    filled = np.full(len(sums), float(rows))
    filled[:numeric] -= arrays.get(GONE, 0.0)
    _check_sums(sums, filled, rows)
    numbers = iter(zip(sums, filled, strict=True))
    told: _Description = {}
    for column in (*features, target):
        if not column.levels:
            known, count = next(numbers)
            told[column.name] = _Told("numeric", rows, int(count), known, {})
            continue
        if len(column.levels) > max_levels:  # the site should have refused it
            levels = f"`{column.name}` has {len(column.levels)} levels"
            raise ProtocolError(f"{levels}; {TOO_MANY_LEVELS.format(max_levels)}")
        held = arrays[f"levels.{column.name}"]
        if held.sum() > rows or (held.sum() < rows and (column is target or not gone)):
            raise ProtocolError(f"`levels.{column.name}` must add up to the {rows} rows of the site")
        counts = dict(zip(column.levels, map(int, held), strict=True))
        told[column.name] = _Told("categorical", rows, sum(counts.values()), np.empty(0), counts)
    return told


def summed_arrays(schema: str, parts: Sequence[Array], missing: Array, levels: Array, rows: int) -> NamedArrays:
    """A description's arrays from sums over all columns, the target last, as :func:`_parse` reads them."""
    features, target = _parse_schema(schema)
    numeric = sum(column.kind == "numeric" for column in features)
    found: NamedArrays = {f"features.{name}": part[:numeric] for name, part in zip(SUMS, parts, strict=True)}
    if target.kind == "numeric":
        found |= {f"target.{name}": part[numeric].reshape(()) for name, part in zip(SUMS, parts, strict=True)}
    gone = bool(missing.any())
    for column in (column for column in (*features, target) if column.kind == "categorical"):
        counts, levels = levels[: len(column.levels)], levels[len(column.levels) :]
        found[f"levels.{column.name}"] = np.rint(counts).astype(np.int64)
        gone |= bool(counts.sum() < rows - 0.5)
    return found | ({GONE: np.rint(missing[:numeric])} if gone else {})


def _parse_schema(schema: str) -> tuple[list[Column], Column]:
    try:
        entries = json.loads(schema)
        *features, target = columns = [Column.from_json(entry) for entry in [*entries["features"], entries["target"]]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtocolError("the site's schema is not JSON with `features` and `target`") from None
    for column in columns:
        kind = "categorical" if column.levels else "numeric"
        if column.kind != kind or len(set(column.levels)) < len(column.levels):
            raise ProtocolError("the site's schema names a level twice, or a kind that does not exist")
    if len({column.name for column in columns}) < len(columns):
        raise ProtocolError("the site's schema names a column twice")
    return features, target


def _shaped(arrays: Mapping[str, NDArray[np.generic]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """The arrays as numbers, which must be those of the schema, finite, and not negative where nothing can be."""
    odd = sorted(set(arrays) ^ set(shapes))
    if odd:
        raise ProtocolError(f"the description lacks, or has besides what its schema says, the arrays {', '.join(odd)}")
    found = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}
    for name, value in found.items():
        if value.shape != shapes[name]:
            raise ProtocolError(f"`{name}` has shape {value.shape}; the schema needs {shapes[name]}")
        counted = name.startswith("levels.") or not name.endswith((".sum", ".residual"))
        if not np.isfinite(value).all() or (counted and (value < 0).any()):
            raise ProtocolError(f"`{name}` must be finite, and not negative where it counts or sums squares")
    return found


def _check_sums(sums: Array, filled: Array, rows: int) -> None:
    """Refuse sums [C, 3] that no rows have: a spread of one row, or a residual that is more than rounding.

    N additions of x round off at most N ε Σ|x|, and Σ|x| ≤ √(N Σx²) with Σx² = Q + s²/N; four such sums go into r.
    """
    if (filled < 0).any():
        raise ProtocolError(f"`{GONE}` counts more than the {rows} rows of the site")
    total, residual, squares = sums.T
    if ((filled <= 1) & (squares > 0)).any() or ((filled == 0) & (total != 0)).any():
        raise ProtocolError("the squares of a single row must be 0, and all sums of none")
    size = np.sqrt(filled) * np.hypot(np.sqrt(squares), np.abs(total) / np.sqrt(np.maximum(filled, 1)))
    if (np.abs(residual) > 4 * filled * np.finfo(np.float64).eps * size).any():
        raise ProtocolError("a residual is more than rounding takes from a sum of so many rows")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the sites agreed on: schema and standardisation, of which training rows."""

    arrays: NamedArrays
    """What later messages carry: ``input.mean|scale`` [D], ``target.mean|scale`` (0-d)."""
    schema: str
    names: tuple[str, ...]
    rows: dict[Site, int]
    labels: dict[Site, str]
    simulated: bool
    training_target: dict[str, float] = field(default_factory=dict)
    """``mean`` and ``sd`` of the target over all training rows, or the ``share`` of the second class, or of each."""
    columns: list[Json] = field(default_factory=list)
    dropped: int = 0
    sums: dict[Site, Array] = field(default_factory=dict)
    """What each site said of its columns, [D + 1, 3]; a checkpoint keeps none: sites say it again."""
    refused: dict[Site, str] = field(default_factory=dict)
    """Sites whose columns differ from those of most sites, and in what."""
    constant: tuple[str, ...] = ()
    """Feature columns with one value over all accepted sites; they become zero inputs."""

    @property
    def target_scale(self) -> float:
        """Units of the target per unit of the standardised target; of a transformed one, its standard deviation."""
        return self.training_target["sd"] if self.transformed else float(self.arrays["target.scale"])

    @property
    def transformed(self) -> bool:
        """Whether the target is modelled through a transformation."""
        return "transform" in json.loads(self.schema)["target"]

    @property
    def classes(self) -> tuple[str, ...]:
        """Levels of the target; none of a number."""
        return Column.from_json(json.loads(self.schema)["target"]).levels

    @property
    def num_inputs(self) -> int:
        """D, the number of encoded inputs."""
        return len(self.arrays["input.mean"])

    def sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Lengths of an answer's dimensions: those that every answer may name, and those of a question."""
        return {"D": self.num_inputs, "P": 1 + self.num_inputs, **known}

    @property
    def data(self) -> Facts:
        """What ``metrics.json`` says of the training rows."""
        target = json.loads(self.schema)["target"]["name"]
        counted = {"sites": len(self.rows), "rows": sum(self.rows.values()), "inputs": self.num_inputs}
        called = [
            {**column, "differs": [self.labels.get(site, site) for site in column["differs"]]}
            if "differs" in column
            else column
            for column in self.columns
        ]
        return {"target": target, **counted, "dropped": self.dropped, "columns": called}

    @property
    def warnings(self) -> list[str]:
        """What a reader of the results should know of the data."""
        rows = sum(self.rows.values())
        if self.num_inputs * ROWS_PER_INPUT <= rows:
            return []
        return [
            f"{self.num_inputs} encoded inputs for {rows} training rows are more than a third: expect predictions near"
            " the mean. Name fewer columns in `features`, above all fewer of text, whose every level is an input."
        ]


def agree(
    descriptions: Mapping[Site, SiteDescription],
    *,
    standardise: bool = True,
    likelihood: str = "gaussian",
    max_levels: int = 50,
    missing: str = "error",
    order: Sequence[str] = (),
) -> Agreement:
    """Settle columns, levels, means and scales from the sites' sums; DataError where nothing can be agreed on.

    Columns are those that most sites have; other sites are refused. Indicators of levels have mean p and scale
    √(p(1−p)); with ``missing`` = impute or indicator the means stand for missing cells. Levels of the target stand in
    ``order``, else as numbers where they are numbers.
    """
    sites, refused = _accepted(descriptions, max_levels, two=likelihood not in SEVERAL)
    *features, target = next(iter(sites.values()))
    found = [_pooled(sites, name, missing) for name in features]
    columns = [pooled.column for pooled in found]
    many = [f"`{c.name}` has {len(c.levels)} levels over all sites" for c in columns if len(c.levels) > max_levels]
    if many:
        raise DataError(f"{', '.join(many)}; {TOO_MANY_LEVELS.format(max_levels)}")
    goal = _pooled(sites, target, rank=order.index if order else _as_number)
    classes = goal.column.levels
    if goal.constant:
        what, end = ("class", "classification needs two") if classes else ("number", "there is nothing to learn")
        raise DataError(f"target `{target}` is the same {what} at every site; {end}")
    mean, scale = (np.concatenate([np.empty(0), *(getattr(c, part) for c in found)]) for part in ("mean", "scale"))
    centre, spread = float(goal.mean[0]), float(goal.scale[0])
    if likelihood == "categorical" and len(classes) > MOST_CLASSES:
        raise DataError(
            f"target `{target}` has {len(classes)} classes over all sites; at most {MOST_CLASSES} are told apart"
        )
    raw_target = classes or likelihood not in NUMBERS or not standardise
    arrays = {
        "input.mean": mean if standardise else np.zeros_like(mean),
        "input.scale": scale if standardise else np.ones_like(scale),
        "target.mean": np.array(0.0 if raw_target else centre),
        "target.scale": np.array(1.0 if raw_target else spread),
    }
    known = {"features": [column.as_json() for column in columns], "target": goal.column.as_json()}
    schema = json.dumps(known if missing == "error" else known | {"missing": missing})
    accepted = {site: descriptions[site] for site in sites}
    return Agreement(
        arrays,
        schema,
        names=tuple(name for column in columns for name in column.names),
        rows={site: told.num_examples for site, told in accepted.items()},
        labels={site: told.label for site, told in accepted.items()},
        simulated=any(told.partitions for told in accepted.values()),
        training_target=_known_of(goal),
        columns=[pooled.facts for pooled in found],
        dropped=sum(told.dropped for told in accepted.values()),
        sums={site: encoded_sums(told, schema) for site, told in accepted.items()},
        refused=refused,
        constant=tuple(pooled.column.name for pooled in found if pooled.constant),
    )


def _as_number(level: str) -> tuple[float, str]:
    """What levels are sorted by: the number that they are, and those that are none by the alphabet, before them."""
    try:
        return float(level), level
    except ValueError:
        return -np.inf, level


def _known_of(target: _Pooled) -> dict[str, float]:
    """Mean and sd of a target, the share of the second of two classes, or the shares of several in their order."""
    levels, mean = target.column.shown, target.mean.tolist()
    if not levels:
        return {"mean": mean[0], "sd": float(target.scale[0])}
    shares = {f"share of {level}": share for level, share in zip(levels, mean, strict=True)}
    return {"share": mean[0]} if len(levels) == 1 else shares


def _accepted(
    descriptions: Mapping[Site, SiteDescription], max_levels: int, *, two: bool
) -> tuple[dict[Site, _Description], dict[Site, str]]:
    """The sites that agree with most, in sorted order, and why the others do not."""
    parsed: dict[Site, _Description] = {}
    refused: dict[Site, str] = {}
    for site in sorted(descriptions):
        try:
            parsed[site] = _parse(descriptions[site], max_levels)
        except ProtocolError as error:
            refused[site] = str(error)
    for differing in (_other_columns, *([_other_classes] if two else ())):
        refused |= differing(parsed)
        parsed = {site: told for site, told in parsed.items() if site not in refused}
    if not parsed:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in refused.items()) or "no site described its data"
        raise DataError(f"no site is left to agree with: {reasons}")
    return parsed, refused


@dataclass(frozen=True, slots=True)
class _Pooled:
    """One column over all sites; ``mean`` and ``scale`` have an entry for each encoded input."""

    column: Column
    mean: Array
    scale: Array
    constant: bool
    facts: Json
    """Kind, encoded inputs and missing cells; levels, or mean, sd and the sites that differ."""


FAR = 3.0
"""A site whose mean is so many standard deviations within a site from that of most is worth a look: other units?"""


def _pooled(
    sites: Mapping[Site, _Description], name: str, missing: str = "error", rank: Callable[[str], Any] | None = None
) -> _Pooled:
    """A column of all sites, with what stands for its missing cells."""
    told = {site: columns[name] for site, columns in sites.items() if columns[name].filled}
    if not told:
        raise DataError(f"no site has a filled cell of `{name}`; leave it out of `features`")
    filled = np.array([column.filled for column in told.values()], dtype=np.float64)
    if next(iter(told.values())).kind == "numeric":
        sums = np.stack([column.sums for column in told.values()])
        centre, spread = _moments(filled, sums)
        constant = bool(spread <= ROUNDING * abs(centre))
        column, mean, scale = Column(name, "numeric"), np.array([centre]), np.array([1.0 if constant else spread])
        means, within = sums[:, 0] / filled, np.median(np.sqrt(sums[:, 2] / filled))
        distance = np.abs(means - np.median(means))  # the median of the sites' means, and of the spreads within a site
        differs = [site for site, far in zip(told, distance > FAR * within, strict=True) if far]
        facts = {"kind": "number", "mean": centre, "sd": float(scale[0]), "differs": differs}
    else:
        counts = sum((Counter(column.counts) for column in told.values()), Counter[str]())
        column, constant = Column(name, "categorical", tuple(sorted(counts, key=rank))), len(counts) == 1
        mean = np.array([counts[level] for level in column.shown]) / counts.total()
        scale = np.ones(1) if constant else np.sqrt(mean * (1 - mean))
        facts = {"kind": "text", "levels": len(counts)}
    rows = sum(columns[name].rows for columns in sites.values())
    gone = rows - int(filled.sum())
    if missing in {"impute", "indicator"}:
        column = replace(column, fill=tuple(mean.tolist()), flagged=missing == "indicator" and gone > 0)
    if column.flagged:
        share = gone / rows
        mean, scale = np.append(mean, share), np.append(scale, np.sqrt(share * (1 - share)))
    return _Pooled(column, mean, scale, constant, {"name": name, "inputs": len(column.names), "missing": gone, **facts})


def _moments(rows: Array, sums: Array) -> tuple[float, float]:
    """Mean and population standard deviation of a column from the sites' row counts [K] and sums [K, 3]."""
    total, residual, _ = sums.T
    centre = total / rows
    mean = centre[0] + (rows * (centre - centre[0]) + residual).sum() / rows.sum()
    # Rounding can leave a constant column a spread of minus one unit in the last place of mean².
    return float(mean), float(np.sqrt(abs(squares_about(rows, sums, mean).sum()) / rows.sum()))


def squares_about(rows: int | Array, sums: Array, point: Array) -> Array:
    """Σ(x − p)² of columns with so many rows, from sums [D, 3]; see the formula at the top of this module."""
    total, residual, squares = sums.T
    gap = total / rows - point
    return np.asarray(squares + 2 * gap * residual + rows * gap**2)


def encoded_sums(description: SiteDescription, schema: str) -> Array:
    """Sum, residual, squares of each encoded input, then of the target, [D + 1, 3]; NaN with missing cells.

    Of a target with levels they are those of the numbers 0, 1, … of its classes.
    """
    told, (features, target) = _parse(description), _parse_schema(schema)
    columns = (*features, target)
    if {(name, known.kind) for name, known in told.items()} != {(column.name, column.kind) for column in columns}:
        raise ProtocolError("its columns are not those the other sites agreed on")
    sums: list[list[float]] = []
    for column in columns:
        found: list[list[float]]
        known = told[column.name]
        held = np.array([float(known.counts.get(level, 0)) for level in column.shown])
        if column is target and len(held) > 1:  # numbers of classes
            number = np.arange(len(held))
            total = float(held @ number)
            found = [[total, 0.0, float(held @ number**2) - total**2 / known.rows]]
        else:
            found = [[n, 0.0, n - n**2 / known.rows] for n in held.tolist()] or [known.sums.tolist()]
        found += [[np.nan] * 3] * column.flagged
        sums += found if known.filled == known.rows else [[np.nan] * 3] * len(found)
    return np.array(sums)


def _other_columns(sites: Mapping[Site, _Description]) -> dict[Site, str]:
    """Sites whose columns or kinds differ from the most common ones; the order of columns does not matter."""
    layout = {site: (list(told)[-1], frozenset((n, c.kind) for n, c in told.items())) for site, told in sites.items()}
    refused: dict[Site, str] = {}
    [(target, agreed)] = [most for most, _ in Counter(layout.values()).most_common(1)] or [("", frozenset())]
    for site, found in layout.items():  # of equal counts, those of the first site
        kinds, here = dict(agreed), dict(found[1])
        parts = {
            "lacks the column": kinds.keys() - here.keys(),
            "has the extra column": here.keys() - kinds.keys(),
            "has as another kind": {name for name in kinds.keys() & here.keys() if kinds[name] != here[name]},
            "has as target": {found[0]} - {target},
        }
        said = "; ".join(f"{w} {', '.join(f'`{n}`' for n in sorted(names))}" for w, names in parts.items() if names)
        if said:
            refused[site] = f"differs from most sites: {said}; write the file the way they do, or name `features`"
    return refused


def _other_classes(sites: Mapping[Site, _Description]) -> dict[Site, str]:
    """Sites with a class that is not among the two that most sites have; none where the target is a number."""
    targets = {site: list(told.items())[-1] for site, told in sites.items()}
    held = Counter(level for _, column in targets.values() for level in column.counts)
    two = sorted(held, key=lambda level: (-held[level], level))[:2]
    return {
        site: f"target `{name}` has a class that is not among the two that most sites have; correct its spelling"
        for site, (name, column) in targets.items()
        if not set(column.counts) <= set(two)
    }


OVERVIEW_TITLES = ("column", "kind", "inputs", "missing", "levels, or mean ± sd", "differs at")


def overview_lines(data: Facts) -> list[str]:
    """A line on the whole, and one for every column with missing cells or sites that differ."""
    columns: Sequence[Facts] = data["columns"]
    left_out = f", {data['dropped']:,} rows left out for a missing cell" if data["dropped"] else ""
    inputs, of = data["inputs"], len(columns)
    target = f"target `{data['target']}`: " if "target" in data else ""
    lines = [
        f"{target}{data['rows']:,} training rows at {data['sites']} site{'s' * (data['sites'] != 1)}{left_out};"
        f" {inputs} input{'s' * (inputs != 1)} of {of} column{'s' * (of != 1)}"
    ]
    for column in columns:
        said = [f"{column['missing']:,} missing cells"] if column["missing"] else []
        if column.get("differs"):
            said += [f"mean far from that of the other sites at {', '.join(column['differs'][:5])}"]
        lines += [f"`{column['name']}`: {'; '.join(said)}"] if said else []
    return lines


def overview_rows(data: Facts) -> list[list[str]]:
    """A row of text for every feature column, as ``OVERVIEW_TITLES`` says."""
    return [
        [
            *(str(column[name]) for name in ("name", "kind", "inputs")),
            f"{column['missing']:,}",
            f"{column['levels']} levels" if "levels" in column else f"{column['mean']:.4g} ± {column['sd']:.3g}",
            ", ".join(column.get("differs", ())),
        ]
        for column in data.get("columns", ())
    ]
