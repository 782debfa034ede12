"""Site side of federated standardisation: describe rows by sums, and encode them by the agreed schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from numpy.typing import NDArray

from fedgp_flower.agreement import COVARIANCE, Column, SiteDescription
from fedgp_flower.data.cells import kind_of, typed
from fedgp_flower.data.dates import source, with_numbers
from fedgp_flower.data.tables import OTHER, read_table, require_columns
from fedgp_flower.errors import DataError, ProtocolError
from fedgp_flower.follow_up import FollowUp
from fedgp_flower.lazy import pd
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array

BLOCK = 2**22
"""Entries of the matrices of a block of rows with missing cells."""


def _numbers(frame: pd.DataFrame, columns: Iterable[Column]) -> Array:
    return frame[[column.name for column in columns if column.kind == "numeric"]].to_numpy(dtype=np.float64)


def _level_counts(frame: pd.DataFrame, columns: Iterable[Column]) -> Array:
    """Return the number of rows of each level of the categorical columns [T]."""
    texts = [column for column in columns if column.kind == "categorical"]
    counts = [np.bincount(_level_index(frame[c.name].dropna(), c), minlength=len(c.levels)) for c in texts]
    return np.concatenate([np.empty(0), *counts])


def _missing_cells(frame: pd.DataFrame, columns: Iterable[Column]) -> Array:
    """Return the number of missing cells of each numeric column, then of each categorical one."""
    ordered = sorted(columns, key=lambda column: column.kind != "numeric")
    return frame[[column.name for column in ordered]].isna().sum().to_numpy(dtype=np.float64)


def summed(values: Array) -> Array:
    """Return Σx, the rounding error Σ(x − c) and Σ(x − c)², c = Σx / N, of the columns of [N, D] but NaN, [D, 3]."""
    total = np.nansum(values, axis=0)
    deviation = values - total / np.maximum((~np.isnan(values)).sum(axis=0), 1)
    return np.stack([total, np.nansum(deviation, axis=0), np.nansum(deviation**2, axis=0)], axis=1)


def describe(
    frame: pd.DataFrame, features: Sequence[str], target: str, ranges: Mapping[str, tuple[float, float]] | None = None
) -> SiteDescription:
    """Return sums and level counts of typed training rows; with public ``ranges``, those of uniform values in them."""
    kinds = {name: kind_of(frame[name]) for name in (*features, target)}
    columns = [
        Column(name, kind, tuple(sorted(frame[name].dropna().unique())) if kind == "categorical" else ())
        for name, kind in kinds.items()
    ]
    *entries, last = (column.as_json() for column in columns)
    schema = json.dumps({"features": entries, "target": last})
    rows, sums, missing = len(frame), summed(_numbers(frame, columns)), _missing_cells(frame, columns)
    if ranges:
        if rest := [column.name for column in columns if column.kind != "numeric" or column.name not in ranges]:
            raise DataError(f"column `{rest[0]}` is text or has no range in `privacy.ranges`: add it, or leave it out")
        low, high = np.array([ranges[column.name] for column in columns], dtype=np.float64).T
        missing = np.zeros(len(columns))
        sums = np.stack([rows * (low + high) / 2, missing, rows * (high - low) ** 2 / 12], axis=1)
    return SiteDescription({"sums": sums, "missing": missing, "levels": _level_counts(frame, columns)}, schema, rows)


def column_sums(frame: pd.DataFrame, agreed: Preparation) -> dict[str, Array]:
    """Return Σx and Σ|x| of each numeric column [C], missing cells of each column, and rows of each level [T]."""
    columns = (*agreed.columns, agreed.target)
    values = _numbers(frame, columns)
    return {
        "sums": np.nansum(values, axis=0),
        "sizes": np.nansum(np.abs(values), axis=0),
        "missing": _missing_cells(frame, columns),
        "levels": _level_counts(frame, columns),
    }


def column_squares(frame: pd.DataFrame, agreed: Preparation, centre: Array, scale: Array) -> tuple[Array, Array]:
    """Return Σ(x − c)/s and Σ(x − c)²/s² of each numeric column [C]."""
    deviation = (_numbers(frame, (*agreed.columns, agreed.target)) - centre) / scale
    return np.nansum(deviation, axis=0), np.nansum(deviation**2, axis=0)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The agreed columns in order, and mean and scale of every encoded input and of the target."""

    columns: tuple[Column, ...]
    target: Column
    input_mean: Array  # [D]
    input_scale: Array  # [D]
    target_mean: float
    target_scale: float
    missing: str = "error"
    """Treatment of missing cells; see the key of that name."""
    transform: Transform | None = None
    """Transformation of the target before standardisation."""
    follow_up: FollowUp | None = None
    """Follow-up times, for a target that is a time to an event."""
    covariance: Array | None = None
    """Covariance [E, E] of the standardised inputs but missingness indicators; None if missing cells get the mean."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the D encoded inputs."""
        return tuple(name for column in self.columns for name in column.names)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the feature columns of a table."""
        return tuple(column.name for column in self.columns)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Whether an input is no missingness indicator, [D]; there are E such inputs."""
        flags = ([*column.names[:-1], ""] if column.flagged else column.names for column in self.columns)
        return np.array([bool(name) for names in flags for name in names])

    def fingerprint(self) -> bytes:
        """Return a key that is equal for preparations with the same encoding."""
        words = repr((self.columns, self.target, self.missing, self.transform))
        covariance = np.empty(0) if self.covariance is None else self.covariance
        scales = self.input_mean, self.input_scale, self.target_mean, self.target_scale
        return words.encode() + np.hstack([*scales, covariance.ravel()]).tobytes()

    @staticmethod
    def from_wire(arrays: Mapping[str, NDArray[np.generic]], schema: str) -> Preparation:
        """Read the arrays and schema of a message or a run folder. Raise ProtocolError if they are malformed."""
        try:
            entries = json.loads(schema)
            columns = tuple(Column.from_json(entry) for entry in entries["features"])
            target = Column.from_json(entries["target"])
            missing = str(entries.get("missing", "error"))
            named = entries["target"].get("transform")
            transform = Transform(str(named["name"]), float(named["power"])) if named else None
        except (ValueError, KeyError, TypeError):
            raise ProtocolError("the agreed schema is not JSON with `features` and `target`") from None
        width = sum(len(column.names) for column in columns)
        input_mean, input_scale = (_array(arrays, name, (width,)) for name in ("input.mean", "input.scale"))
        mean, scale = (float(_array(arrays, name, ())) for name in ("target.mean", "target.scale"))
        scales = input_mean, input_scale, mean, scale
        covariance = None
        if COVARIANCE in arrays:
            width -= sum(column.flagged for column in columns)
            covariance = _array(arrays, COVARIANCE, (width, width))
        return Preparation(columns, target, *scales, missing, transform, FollowUp.from_arrays(arrays), covariance)


def _array(arrays: Mapping[str, NDArray[np.generic]], name: str, shape: tuple[int, ...]) -> Array:
    if name not in arrays:
        raise ProtocolError(f"the preparation lacks the array `{name}`")
    value = np.asarray(arrays[name], dtype=np.float64)
    if value.shape != shape:
        raise ProtocolError(f"the preparation's `{name}` has shape {value.shape}; the schema needs {shape}")
    if not np.isfinite(value).all() or (name.endswith("scale") and (value <= 0).any()):
        raise ProtocolError(f"the preparation's `{name}` must be finite, and positive if it is a scale")
    return value


def read_inputs(path: Path, preparation: Preparation) -> pd.DataFrame:
    """Return :func:`typed_inputs` of a file of new rows."""
    return typed_inputs(read_table(path), preparation, path.name)


def other_columns(path: Path, preparation: Preparation) -> pd.DataFrame:
    """Return the columns of a file that are not inputs, such as ids, as text."""
    frame = read_table(path, as_written=True)
    return frame.drop(columns=[source(feature, frame.columns) for feature in preparation.features])


def typed_inputs(frame: pd.DataFrame, preparation: Preparation, name: str) -> pd.DataFrame:
    """Return the feature columns of new rows with their agreed kinds; other columns are ignored."""
    frame = frame.rename(columns=lambda name: str(name).strip())  # as in files
    require_columns(frame, [source(feature, frame.columns) for feature in preparation.features], name)
    kinds = {column.name: column.kind for column in preparation.columns}
    numbered = with_numbers(frame, preparation.features, name)
    return typed(numbered, preparation.features, name, kinds, preparation.missing)


def _level_index(series: pd.Series, column: Column) -> NDArray[np.int64]:
    """Return the index of every cell's level; of an unknown level, the index of ``other`` or else −1."""
    index = pd.Index(list(column.levels), dtype="str").get_indexer(pd.Index(series)).astype(np.int64)
    return np.where(index < 0, column.levels.index(OTHER), index) if OTHER in column.levels else index


def encode_inputs(frame: pd.DataFrame, preparation: Preparation) -> Array:
    """Return standardised inputs [N, D] of typed rows; a missing cell is imputed, or NaN if rows are dropped.

    A level that no site had is imputed like a missing cell; without imputation it has the mean of its column.
    """
    inputs, known = _encoded(frame, preparation)
    if preparation.covariance is not None and not known.all():
        kept = preparation.measured
        inputs[:, kept] += conditional_means(_deviations(inputs, known, preparation), known, preparation.covariance)
    return inputs


def conditional_means(
    deviations: Float[ndarray, "N E"], known: Bool[ndarray, "N E"], covariance: Float[ndarray, "E E"]
) -> Float[ndarray, "N E"]:
    """Return E[u_m | u_o] = C_mo C_oo⁻¹ u_o for the missing entries m of each row, given the others, and 0 for these.

    For inputs from N(0, C). A row without any known entry keeps its means.

    >>> covariance = np.array([[1.0, 0.5], [0.5, 1.0]])
    >>> conditional_means(np.array([[2.0, 0.0]]), np.array([[True, False]]), covariance)
    array([[0., 1.]])
    """
    found, gaps = np.zeros_like(deviations), np.flatnonzero(~known.all(axis=1))
    for rows in np.array_split(gaps, 1 + len(gaps) * covariance.size // BLOCK):
        filled = known[rows]
        both = filled[:, :, None] & filled[:, None, :]
        matrices = np.where(both, covariance, 0.0) + np.eye(len(covariance)) * ~filled[:, :, None]
        weights = np.linalg.solve(matrices, np.where(filled, deviations[rows], 0.0)[..., None])[..., 0]
        found[rows] = np.where(filled, 0.0, weights @ covariance)
    return found


def cell_products(frame: pd.DataFrame, preparation: Preparation) -> tuple[Array, Array]:
    """Return Σ u uᵀ of the deviations u of known cells from their means, and the rows that have both cells, [E, E]."""
    inputs, known = _encoded(frame, preparation)
    deviations, counted = _deviations(inputs, known, preparation), known.astype(np.float64)
    return deviations.T @ deviations, counted.T @ counted


def _deviations(inputs: Array, known: NDArray[np.bool_], preparation: Preparation) -> Array:
    """Return inputs but indicators minus their imputed value, in standardised units, [N, E]; 0 for missing cells."""
    kept, fill = preparation.measured, np.concatenate([column.fill for column in preparation.columns])
    centre = (fill - preparation.input_mean[kept]) / preparation.input_scale[kept]
    return np.where(known, inputs[:, kept] - centre, 0.0)


def _encoded(frame: pd.DataFrame, preparation: Preparation) -> tuple[Array, NDArray[np.bool_]]:
    """Return standardised inputs [N, D], with means for missing cells, and which have a known cell, [N, E]."""
    require_columns(frame, preparation.features, "the table does not fit the schema agreed by the sites")
    blocks, known = [np.empty((len(frame), 0))], [np.empty((len(frame), 0), dtype=bool)]
    for column in preparation.columns:
        series = frame[column.name]
        if kind_of(series) != column.kind:
            raise DataError(
                f"column `{column.name}` is {kind_of(series)} here and {column.kind} in the agreed schema;"
                " write its cells as the other sites do"
            )
        missing = series.isna().to_numpy(dtype=bool)[:, None]
        unknown = np.zeros_like(missing)
        if column.kind == "numeric":
            block = series.to_numpy(dtype=np.float64)[:, None]
        else:
            shown = np.arange(len(column.levels) - len(column.shown), len(column.levels))
            index = _level_index(series, column)[:, None]
            block, unknown = (index == shown).astype(np.float64), (index < 0) & ~missing
        start = sum(part.shape[1] for part in blocks)
        mean = preparation.input_mean[start : start + block.shape[1]]
        blocks.append(np.where(unknown, mean, np.where(missing, column.fill or np.nan, block)))
        known.append(np.broadcast_to(~missing & ~unknown, block.shape))
        blocks += [missing.astype(np.float64)] if column.flagged else []
    inputs = (np.concatenate(blocks, axis=1) - preparation.input_mean) / preparation.input_scale
    return inputs, np.concatenate(known, axis=1)


def unknown_levels(frame: pd.DataFrame, preparation: Preparation) -> pd.DataFrame:
    """Return whether each cell of a column of text has a level that is not in the schema, [N, T]."""
    texts = [column for column in preparation.columns if column.levels]
    found = {c.name: (_level_index(frame[c.name], c) < 0) & frame[c.name].notna().to_numpy() for c in texts}
    return pd.DataFrame(found, index=frame.index)


def encode_targets(series: pd.Series, preparation: Preparation) -> Array:
    """Return standardised targets [N], or the indices 0, 1, … of their levels."""
    target = preparation.target
    if kind_of(series) != target.kind:
        raise DataError(f"target `{target.name}` is {kind_of(series)} here and {target.kind} at the other sites")
    if target.kind == "numeric":
        values = series.to_numpy(dtype=np.float64)
        values = values if preparation.transform is None else preparation.transform.forward(values)
        return (values - preparation.target_mean) / preparation.target_scale
    index = _level_index(series, target)
    if (index < 0).any():
        raise DataError(f"target `{target.name}` has a level here that is not among the {len(target.levels)} agreed")
    return index.astype(np.float64)
