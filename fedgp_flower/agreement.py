"""The server's half of federated standardisation: combine the sites' sums into one schema, means and scales.

For sites k with n_k rows, mean c_k, residual r_k = Σ(x − c_k) and squares Q_k = Σ(x − c_k)² of a column,

    m = Σ_k (n_k c_k + r_k) / N,    Σ(x − m)² = Σ_k [Q_k + 2 (c_k − m) r_k + n_k (c_k − m)²],

which is the exact pairwise update of Chan, Golub & LeVeque (1983) for any number of parts: no square of an offset is
ever formed, so a column with mean 1e8 and spread 1 loses nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError, ProtocolError
from fedgp_flower.typing import Array, NamedArrays

Kind: TypeAlias = Literal["numeric", "categorical"]
Site: TypeAlias = str
Kinds: TypeAlias = dict[str, str]

SUMS = ("sum", "residual", "squares")
GONE = "features.missing"
"""Array of missing cells of the numeric columns; sent only where a cell of any column is missing."""
ROUNDING = 4 * np.finfo(np.float64).eps
"""A spread below this share of the mean is rounding: the column is constant."""

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

    def as_json(self) -> dict[str, Any]:
        """The column as it stands in the schema's JSON."""
        levels = {"levels": list(self.levels)} if self.kind == "categorical" else {}
        missing = {"missing": {"fill": list(self.fill), "indicator": self.flagged}} if self.fill else {}
        return {"name": self.name, "kind": self.kind, **levels, **missing}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Column:
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


@dataclass(frozen=True, slots=True)
class _Described:
    """A checked description, by column name."""

    num_examples: int
    features: tuple[str, ...]
    target: str
    kinds: Kinds
    sums: dict[str, Array]
    """By numeric column: the sum, its residual, and the squares about the site's mean, [3]."""
    counts: dict[str, dict[str, int]]
    """By categorical column: rows of each level."""
    filled: dict[str, int]
    """By column: rows whose cell is not missing."""


def _parse(description: SiteDescription) -> _Described:
    """Read a description; ProtocolError where its schema or its arrays are not what they must be."""
    arrays, rows = description.arrays, description.num_examples
    features, target = _parse_schema(description.schema)
    numeric = [column.name for column in features if column.kind == "numeric"]
    texts = [column for column in (*features, target) if column.kind == "categorical"]
    shapes: dict[str, tuple[int, ...]] = {f"features.{part}": (len(numeric),) for part in SUMS}
    if target.kind == "numeric":
        shapes |= {f"target.{part}": () for part in SUMS}
    shapes |= {f"levels.{column.name}": (len(column.levels),) for column in texts}
    shapes |= {GONE: (len(numeric),)} if GONE in arrays else {}
    _check(arrays, shapes, rows, target.name)
    sums = dict(zip(numeric, np.stack([_float(arrays[f"features.{p}"]) for p in SUMS], axis=1), strict=True))
    if target.kind == "numeric":
        sums[target.name] = np.array([_float(arrays[f"target.{part}"]) for part in SUMS])
    counts = {
        column.name: dict(zip(column.levels, map(int, _float(arrays[f"levels.{column.name}"])), strict=True))
        for column in texts
    }
    kinds: Kinds = {column.name: column.kind for column in (*features, target)}
    filled = dict.fromkeys(kinds, rows) | {name: sum(counted.values()) for name, counted in counts.items()}
    gone = _float(arrays.get(GONE, np.zeros(len(numeric))))
    filled |= {name: rows - int(n) for name, n in zip(numeric, gone, strict=True)}
    return _Described(rows, tuple(column.name for column in features), target.name, kinds, sums, counts, filled)


def summed_arrays(
    schema: str, parts: Sequence[Array], missing: NDArray[Any], levels: Array, rows: int
) -> dict[str, NDArray[Any]]:
    """A description's arrays from sums over all columns, the target last, as :class:`_Described` reads them."""
    features, target = _parse_schema(schema)
    numeric = sum(column.kind == "numeric" for column in features)
    found: dict[str, NDArray[Any]] = {f"features.{n}": p[:numeric] for n, p in zip(SUMS, parts, strict=True)}
    if target.kind == "numeric":
        found |= {f"target.{name}": part[numeric].reshape(()) for name, part in zip(SUMS, parts, strict=True)}
    gone = bool(missing.any())
    for column in (column for column in (*features, target) if column.kind == "categorical"):
        counts, levels = levels[: len(column.levels)], levels[len(column.levels) :]
        found[f"levels.{column.name}"] = np.rint(counts).astype(np.int64)
        gone |= counts.sum() < rows - 0.5
    return found | ({GONE: np.rint(missing[:numeric])} if gone else {})


def _float(value: NDArray[np.generic]) -> Array:
    return np.asarray(value, dtype=np.float64)


def _parse_schema(schema: str) -> tuple[list[Column], Column]:
    try:
        entries = json.loads(schema)
        *features, target = (Column.from_json(entry) for entry in [*entries["features"], entries["target"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtocolError("the site's schema is not JSON with `features` and `target`") from None
    for column in (*features, target):
        levels = len(set(column.levels)) == len(column.levels) > 0
        if column.kind != "numeric" and not (column.kind == "categorical" and levels):
            raise ProtocolError("the site's schema names a level twice, or a kind that does not exist")
    if len({column.name for column in (*features, target)}) <= len(features):
        raise ProtocolError("the site's schema names a column twice")
    return features, target


def _check(
    arrays: Mapping[str, NDArray[np.generic]], shapes: Mapping[str, tuple[int, ...]], num_examples: int, target: str
) -> None:
    if num_examples < 1:
        raise ProtocolError(f"num-examples is {num_examples}; expected at least 1")
    odd = sorted(set(arrays) ^ set(shapes))
    if odd:
        raise ProtocolError(f"the description lacks, or has besides what its schema says, the arrays {', '.join(odd)}")
    for name, shape in shapes.items():
        value = _float(arrays[name])
        if value.shape != shape:
            raise ProtocolError(f"`{name}` has shape {value.shape}; the schema needs {shape}")
        negative = not name.endswith((".sum", ".residual")) and bool((value < 0).any())
        if negative or not np.isfinite(value).all():
            raise ProtocolError(f"`{name}` must be finite, and not negative where it counts or sums squares")
        most = name == GONE or (name.startswith("levels.") and GONE in arrays and name != f"levels.{target}")
        if most and (np.atleast_1d(value.sum() if name != GONE else value) > num_examples).any():
            raise ProtocolError(f"`{name}` counts more than the {num_examples} rows of the site")
        if name.startswith("levels.") and not most and value.sum() != num_examples:
            raise ProtocolError(f"`{name}` must add up to the {num_examples} rows of the site")
    for columns in {name.partition(".")[0] for name in shapes if name.endswith(".squares")}:
        filled = num_examples - (_float(arrays[GONE]) if columns == "features" and GONE in arrays else 0)
        _check_sums(columns, [_float(arrays[f"{columns}.{part}"]) for part in SUMS], np.asarray(filled))


def _check_sums(columns: str, sums: Sequence[Array], rows: NDArray[Any]) -> None:
    """Refuse what no rows have: a spread of one row, or a residual that is more than rounding.

    N additions of x round off at most N ε Σ|x|, and Σ|x| ≤ √(N Σx²) with Σx² = Q + s²/N; four such sums go into r.
    """
    total, residual, squares = sums
    if ((rows <= 1) & (squares > 0)).any() or ((rows == 0) & (total != 0)).any():
        raise ProtocolError(f"`{columns}.squares` of a single row must be 0, and all sums of none")
    size = np.sqrt(rows) * np.hypot(np.sqrt(squares), np.abs(total) / np.sqrt(np.maximum(rows, 1)))
    if (np.abs(residual) > 4 * rows * np.finfo(np.float64).eps * size).any():
        raise ProtocolError(f"`{columns}.residual` is more than rounding takes from a sum of so many rows")


@dataclass(frozen=True, slots=True)
class Agreement:
    """One schema and one standardisation for all accepted sites."""

    arrays: NamedArrays
    """What later messages carry: ``input.mean|scale`` [D], ``target.mean|scale`` (0-d)."""
    schema: str
    names: tuple[str, ...]
    """Names of the D encoded inputs."""
    num_examples: dict[Site, int]
    """Training rows of the accepted sites, in sorted order of their ids."""
    refused: dict[Site, str]
    """Sites whose columns differ from those of most sites, and in what."""
    constant: tuple[str, ...]
    """Feature columns with one value over all accepted sites; they become zero inputs."""
    columns: list[dict[str, Any]]
    """What is known of every feature column; see :func:`_summary`."""
    training_target: dict[str, float]
    """``mean`` and ``sd`` of the target over all training rows, or the ``share`` of rows of the second class."""

    @property
    def total(self) -> int:
        """N, the training rows of all accepted sites."""
        return sum(self.num_examples.values())


def agree(
    descriptions: Mapping[Site, SiteDescription],
    *,
    standardise: bool = True,
    likelihood: str = "gaussian",
    max_levels: int = 50,
    missing: str = "error",
) -> Agreement:
    """Settle columns, levels, means and scales from the sites' sums.

    The columns are those that most sites have (on a tie, those of the first site in sorted order); other sites, and
    those whose description is malformed, are refused by name. Means and population standard deviations are those of
    the pooled rows, of a column with missing cells those of the filled ones; indicators of levels have mean p and scale
    √(p(1−p)). With ``missing`` = impute or indicator the means also stand for missing cells. A target that is a class
    or a count is left as it is. DataError where nothing can be agreed on.
    """
    accepted, refused = _accepted(descriptions, max_levels)
    sites = list(accepted.values())
    found = [_combined(sites, name, missing) for name in sites[0].features]
    columns = [combined.column for combined in found]
    many = [f"`{c.name}` has {len(c.levels)} levels over all sites" for c in columns if len(c.levels) > max_levels]
    if many:
        raise DataError(f"{', '.join(many)}; {TOO_MANY_LEVELS.format(max_levels)}")
    goal = _combined(sites, sites[0].target)
    classes = goal.column.levels
    if goal.constant:
        what, end = ("class", "classification needs two") if classes else ("number", "there is nothing to learn")
        raise DataError(f"target `{goal.column.name}` is the same {what} at every site; {end}")
    mean, scale = (np.concatenate([np.empty(0), *(getattr(c, part) for c in found)]) for part in ("mean", "scale"))
    centre, spread = float(goal.mean[0]), float(goal.scale[0])
    raw_target = classes or likelihood == "poisson" or not standardise
    return Agreement(
        arrays={
            "input.mean": mean if standardise else np.zeros_like(mean),
            "input.scale": scale if standardise else np.ones_like(scale),
            "target.mean": np.array(0.0 if raw_target else centre),
            "target.scale": np.array(1.0 if raw_target else spread),
        },
        schema=json.dumps(
            {"features": [column.as_json() for column in columns], "target": goal.column.as_json()}
            | ({} if missing == "error" else {"missing": missing})
        ),
        names=tuple(name for column in columns for name in column.names),
        num_examples={site: description.num_examples for site, description in accepted.items()},
        refused=refused,
        constant=tuple(combined.column.name for combined in found if combined.constant),
        columns=[_summary(accepted, combined) for combined in found],
        training_target={"share": centre} if classes else {"mean": centre, "sd": spread},
    )


def _accepted(
    descriptions: Mapping[Site, SiteDescription], max_levels: int
) -> tuple[dict[Site, _Described], dict[Site, str]]:
    """The sites that agree with most, in sorted order, and why the others do not."""
    parsed: dict[Site, _Described] = {}
    refused: dict[Site, str] = {}
    for site in sorted(descriptions):
        try:
            parsed[site] = _parse(descriptions[site])
        except ProtocolError as error:
            refused[site] = str(error)
    for differing in (_other_columns, _other_classes, partial(_many_levels, most=max_levels)):
        refused |= differing(parsed)
        parsed = {site: described for site, described in parsed.items() if site not in refused}
    if not parsed:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in refused.items()) or "no site described its data"
        raise DataError(f"no site is left to agree with: {reasons}")
    return parsed, refused


@dataclass(frozen=True, slots=True)
class _Combined:
    """One column over all sites; ``mean`` and ``scale`` have an entry for each encoded input."""

    column: Column
    mean: Array
    scale: Array
    constant: bool


def _combined(sites: Sequence[_Described], name: str, missing: str = "error") -> _Combined:
    """A column of all sites, with what stands for its missing cells."""
    found = _of_filled(sites, name)
    if missing not in {"impute", "indicator"}:
        return found
    share = 1 - sum(site.filled[name] for site in sites) / sum(site.num_examples for site in sites)
    flagged = missing == "indicator" and share > 0
    column = replace(found.column, fill=tuple(found.mean.tolist()), flagged=flagged)
    if not flagged:
        return replace(found, column=column)
    mean, scale = np.append(found.mean, share), np.append(found.scale, np.sqrt(share * (1 - share)))
    return _Combined(column, mean, scale, found.constant)


FAR = 3.0
"""A site whose mean is so many standard deviations within a site from that of most is worth a look: other units?"""


def _summary(sites: Mapping[Site, _Described], found: _Combined) -> dict[str, Any]:
    """Kind, encoded inputs and missing cells of a column; its levels, or mean, sd and the sites that differ."""
    column = found.column
    facts: dict[str, Any] = {
        "name": column.name,
        "inputs": len(column.names),
        "missing": sum(site.num_examples - site.filled[column.name] for site in sites.values()),
    }
    if column.levels:
        return facts | {"kind": "text", "levels": len(column.levels)}
    mean, sd = float(found.mean[0]), float(found.scale[0])
    return facts | {"kind": "number", "mean": mean, "sd": sd, "differs": _far(sites, column.name)}


def _far(sites: Mapping[Site, _Described], name: str) -> list[Site]:
    """Sites whose mean is far from the median of the sites' means, by the median spread within a site."""
    filled = {site: told for site, told in sites.items() if told.filled[name]}
    rows = np.array([told.filled[name] for told in filled.values()])
    total, _, squares = np.stack([told.sums[name] for told in filled.values()], axis=1)
    distance = np.abs(total / rows - np.median(total / rows))
    return [site for site, far in zip(filled, distance > FAR * np.median(np.sqrt(squares / rows)), strict=True) if far]


def _of_filled(sites: Sequence[_Described], name: str) -> _Combined:
    if sites[0].kinds[name] == "numeric":
        some = [site for site in sites if site.filled[name]]
        if not some:
            raise DataError(f"no site has a filled cell of `{name}`; leave it out of `features`")
        rows = np.array([site.filled[name] for site in some], dtype=np.float64)
        mean, spread = _moments(rows, np.stack([site.sums[name] for site in some]))
        constant = bool(spread <= ROUNDING * abs(mean))
        return _Combined(Column(name, "numeric"), np.array([mean]), np.array([1.0 if constant else spread]), constant)
    counts = sum((Counter(site.counts[name]) for site in sites), Counter[str]())
    column = Column(name, "categorical", tuple(sorted(counts)))
    p = np.array([counts[level] for level in column.shown]) / counts.total()
    alone = len(column.levels) == 1
    return _Combined(column, p, np.ones(1) if alone else np.sqrt(p * (1 - p)), alone)


def _moments(rows: Array, sums: Array) -> tuple[float, float]:
    """Mean and population standard deviation of a column from the sites' row counts [K] and sums [K, 3]."""
    total, residual, squares = sums.T
    centre = total / rows
    mean = centre[0] + (rows * (centre - centre[0]) + residual).sum() / rows.sum()
    gap = centre - mean
    spread = (squares + 2 * gap * residual + rows * gap**2).sum()
    # Rounding can leave a constant column a spread of minus one unit in the last place of mean².
    return float(mean), float(np.sqrt(abs(spread) / rows.sum()))


def encoded_sums(description: SiteDescription, schema: str) -> Array:
    """Sum, residual and squares about the mean of each encoded input, then of the target, [D + 1, 3].

    NaN for a column with missing cells; ProtocolError where the description is malformed.
    """
    told, (features, target) = _parse(description), _parse_schema(schema)
    rows: list[list[float]] = []
    for column in (*features, target):
        name, total = column.name, told.num_examples
        held = [float(told.counts[name].get(level, 0)) for level in column.shown]
        found = [[n, 0.0, n - n**2 / total] for n in held] if held else [told.sums[name].tolist()]
        found += [[np.nan] * 3] * column.flagged
        rows += found if told.filled[name] == total else [[np.nan] * 3] * len(found)
    return np.array(rows)


def squares_about(rows: int, sums: Array, point: Array) -> Array:
    """Σ(x − p)² of columns with so many rows, from sums [D, 3]; see the formula at the top of this module."""
    total, residual, squares = sums.T
    gap = total / rows - point
    return np.asarray(squares + 2 * gap * residual + rows * gap**2)


def _other_columns(sites: Mapping[Site, _Described]) -> dict[Site, str]:
    """Sites whose columns or kinds differ from the most common ones; the order of columns does not matter."""
    if not sites:
        return {}
    layout = {site: (described.target, frozenset(described.kinds.items())) for site, described in sites.items()}
    agreed = Counter(layout.values()).most_common(1)[0][0]  # equal counts come in order of first appearance
    differing = [site for site, found in layout.items() if found != agreed]
    return {site: _difference(sites[site], dict(agreed[1]), agreed[0]) for site in differing}


def _difference(described: _Described, agreed: Mapping[str, str], target: str) -> str:
    kinds = described.kinds
    parts = {
        "lacks the column": [name for name in agreed if name not in kinds],
        "has the extra column": [name for name in kinds if name not in agreed],
        "has as another kind": [name for name in kinds if name in agreed and kinds[name] != agreed[name]],
        "has as target": [described.target] if described.target != target else [],
    }
    said = [f"{what} {', '.join(f'`{n}`' for n in sorted(names))}" for what, names in parts.items() if names]
    return f"differs from most sites: {'; '.join(said)}; write the file the way they do, or name `features`"


def _many_levels(sites: Mapping[Site, _Described], most: int) -> dict[Site, str]:
    """Sites that should have refused a column themselves."""
    return {
        site: f"`{name}` has {len(levels)} levels; {TOO_MANY_LEVELS.format(most)}"
        for site, described in sites.items()
        for name, levels in described.counts.items()
        if len(levels) > most
    }


def _other_classes(sites: Mapping[Site, _Described]) -> dict[Site, str]:
    """Sites with a class that is not among the two that most sites have; none where the target is a number."""
    held = Counter(
        level for d in sites.values() if d.kinds[d.target] == "categorical" for level in sorted(d.counts[d.target])
    )
    two = {level for level, _ in sorted(held.items(), key=lambda item: (-item[1], item[0]))[:2]}
    return {
        site: f"target `{d.target}` has a class that is not among the two that most sites have; correct its spelling"
        for site, d in sites.items()
        if not set(d.counts.get(d.target, ())) <= two
    }


# What is known of the training rows before training, from the sums that describe them.

OVERVIEW_TITLES = ("column", "kind", "inputs", "missing", "levels, or mean ± sd", "differs at")


def overview_lines(data: Mapping[str, Any]) -> list[str]:
    """A line on the whole, and one for every column with missing cells or sites that differ."""
    columns: Sequence[Mapping[str, Any]] = data["columns"]
    left_out = f", {data['dropped']:,} rows left out for a missing cell" if data["dropped"] else ""
    counts = f"{data['rows']:,} training rows at {data['sites']} sites{left_out}"
    inputs, of = data["inputs"], len(columns)
    lines = [f"{counts}; {inputs} input{'s' * (inputs != 1)} of {of} column{'s' * (of != 1)}"]
    for column in columns:
        missing = [f"{column['missing']:,} missing cells"] if column["missing"] else []
        far = f"mean far from that of the other sites at {', '.join(column.get('differs', ())[:5])}"
        lines += [f"`{column['name']}`: {'; '.join([*missing, *([far] if column.get('differs') else [])])}"]
    return [line for line in lines if not line.endswith(": ")]


def overview_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """A row of text for every feature column, as ``OVERVIEW_TITLES`` says."""
    return [
        [
            str(column["name"]),
            str(column["kind"]),
            str(column["inputs"]),
            f"{column['missing']:,}",
            f"{column['levels']} levels" if "levels" in column else f"{column['mean']:.4g} ± {column['sd']:.3g}",
            ", ".join(column.get("differs", ())),
        ]
        for column in data.get("columns", ())
    ]
