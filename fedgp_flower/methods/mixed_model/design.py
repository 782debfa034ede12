"""The design matrices of a formula, whitened: X of the fixed effects, the offset, and Z of each random term.

Each column is divided by its largest absolute value D at a few reference rows, which all sites derive from the agreed
scales. Cholesky factors R of the mean cross-products over all sites then whiten the columns: x̃ = R⁻ᵀ D⁻¹ x, so
β = D⁻¹ R⁻¹ β̃. The columns of each Z are whitened in the same way. Whitening improves the conditioning of the sums; the
estimates do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.data.cells import design_matrix
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.formula import Formula
from fedgp_flower.lazy import pd
from fedgp_flower.typing import Array, NamedArrays

FIXED, TERM = "mixed.fixed", "mixed.term."
"""Name of the array R D of the fixed effects, and prefix of those of the random terms."""
REACH = 2.0
"""Reference rows reach this number of standard deviations from the mean."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The design matrices of a formula at N rows, in units of the table, with the names of their columns."""

    fixed: Array  # [N, E]
    names: tuple[str, ...]
    offset: Array  # [N]
    effects: tuple[Array, ...]  # Z [N, q] of each random term
    effect_names: tuple[tuple[str, ...], ...]


def columns(formula: Formula, frame: pd.DataFrame, agreed: Preparation, *, finite: bool = True) -> Columns:
    """The design matrices of the rows of ``frame``, whose columns have the agreed types.

    A level that no site has becomes the first level. Raises DataError if the formula cannot be read, or if an entry is
    not finite and ``finite`` is True.
    """
    levels = {c.name: list(c.levels) for c in agreed.columns if c.levels}
    if problem := formula.unknown_reference(levels):
        raise DataError(problem)
    coded = {c: pd.Categorical(frame[c].where(frame[c].isin(names), names[0]), names) for c, names in levels.items()}
    table = frame.assign(**coded)
    fixed, names = _matrix(formula.fixed, table, finite)
    offset = _matrix(f"0 + I({formula.offset})", table, finite)[0][:, 0] if formula.offset else np.zeros(len(frame))
    effects = [_matrix(term.effects, table, finite) for term in formula.random]
    return Columns(fixed, names, offset, tuple(z for z, _ in effects), tuple(names for _, names in effects))


def _matrix(part: str, table: pd.DataFrame, finite: bool) -> tuple[Array, tuple[str, ...]]:
    """The design matrix [N, q] of one part of the formula, and the names of its columns."""
    matrix = design_matrix(part, table)
    values = matrix.to_numpy(dtype=np.float64)
    if finite and not np.isfinite(values).all():
        infinite = ~np.isfinite(values)
        names, count = map(str, matrix.columns[infinite.any(axis=0)]), int(infinite.any(axis=1).sum())
        found = f"`formula`: {', '.join(names)} is not finite in {count} of {len(values)} rows"
        raise DataError(f"{found}, like log(…) of a number that is not above zero; correct or omit these rows")
    return values, tuple(str(name).replace("Intercept", "intercept") for name in matrix.columns)


def reference(formula: Formula, agreed: Preparation) -> Columns:
    """The design matrices at five reference rows around the agreed means."""
    start, rows = 0, {}
    for column in agreed.columns:
        mean, scale = agreed.input_mean[start], agreed.input_scale[start]
        values: Array = mean + scale * np.array([REACH, REACH / 2, 0.0, -REACH / 2, -REACH])
        if mean > 0:  # the formula may take logarithms
            values = np.where(values > 0, values, mean)
        rows[column.name] = [column.levels[-1], column.levels[0]] * 2 + [column.levels[-1]] if column.levels else values
        start += len(column.names)
    return columns(formula, pd.DataFrame(rows, index=range(5)), agreed)


def sizes(matrix: Array) -> Array:
    """D: the largest absolute value of each column; 1 for a column of zeros."""
    largest = np.abs(matrix).max(axis=0)
    return np.where(largest > 0, largest, 1.0)


def whitening(gram: Array, names: Sequence[str], size: Array) -> Array:
    """R D [q, q] with RᵀR = ``gram``, the mean cross-products of columns divided by ``size`` D.

    Raises DataError with the name of the first column that is a linear combination of the columns before it.
    """
    correlation = gram / np.sqrt(np.outer(gram.diagonal(), gram.diagonal()) + 1e-300)
    for column, name in enumerate(names):
        before, across = correlation[:column, :column], correlation[:column, column]
        explained = across @ np.linalg.lstsq(before, across, rcond=1e-13)[0]  # R²
        if not correlation[column, column] - explained > 1e-9:
            raise DataError(f"`formula`: {name} is constant or follows from the columns before it; leave it out")
    return np.asarray(np.linalg.cholesky(gram).T * size)


def whitened(matrix: Array, factor: Array) -> Tensor:
    """Whitened rows x̃ = (R D)⁻ᵀ x [N, q], with ``factor`` = R D."""
    return torch.from_numpy(np.linalg.solve(factor.T, matrix.T).T.copy())


def design(raw: Columns, arrays: NamedArrays) -> tuple[Float[Tensor, "N E"], Float[Tensor, " N"], list[Tensor]]:
    """Whitened X, the offset in units of the table, and the whitened Z [N, q] of each random term."""
    effects = [whitened(z, arrays[f"{TERM}{k}"]) for k, z in enumerate(raw.effects)]
    return whitened(raw.fixed, arrays[FIXED]), torch.tensor(raw.offset), effects


def decoded(inputs: Array, agreed: Preparation) -> pd.DataFrame:
    """The table of encoded, standardised inputs [N, D]; a row without an indicator has the level without a column."""
    raw, start, table = inputs * agreed.input_scale + agreed.input_mean, 0, {}
    for column in agreed.columns:
        block = raw[:, start : start + len(column.names)]
        start += len(column.names)
        if column.kind == "numeric":
            table[column.name] = block[:, 0]
            continue
        levels, first = np.array(column.levels, dtype=object), len(column.levels) - len(column.shown)
        code = np.minimum(first + block.argmax(axis=1), len(levels) - 1)
        table[column.name] = levels[np.where(block.max(axis=1) < 0.5, 0, code)]
    return pd.DataFrame(table, index=range(len(inputs)))
