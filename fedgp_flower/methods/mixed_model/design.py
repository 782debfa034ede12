"""The matrices of a formula: fixed effects X, offset, and the random effects Z of every term, in whitened coordinates.

Columns are first divided by their size at a few reference rows, which follow from the agreed scales, then whitened by
Cholesky factors R of mean cross-products over all sites: x̃ = R⁻ᵀ D⁻¹ x, so that β = D⁻¹ R⁻¹ β̃, and so each term's z.
Estimates do not depend on any of this; the conditioning of every sum does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.formula import Formula
from fedgp_flower.lazy import Lazy, pd
from fedgp_flower.typing import Array, NamedArrays

formulaic = Lazy("formulaic")
FIXED, TERM = "mixed.fixed", "mixed.term."
"""Names of the arrays D R of the fixed columns, and of every term's."""
REACH = 2.0
"""Reference rows are the mean and so many standard deviations around it."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a formula's matrices at some rows, in units of the table."""

    fixed: Array  # [N, E]
    names: tuple[str, ...]
    offset: Array  # [N]
    effects: tuple[Array, ...]  # by term [N, q]
    effect_names: tuple[tuple[str, ...], ...]


def columns(formula: Formula, frame: pd.DataFrame, agreed: Preparation, *, finite: bool = True) -> Columns:
    """The matrices of typed rows; a level that no site had counts as the first."""
    levels = {c.name: list(c.levels) for c in agreed.columns if c.levels}
    coded = {c: pd.Categorical(frame[c].where(frame[c].isin(known), known[0]), known) for c, known in levels.items()}
    table = frame.assign(**coded)
    fixed, names = _matrix(formula.fixed, table, finite)
    offset = _matrix(f"0 + I({formula.offset})", table, finite)[0][:, 0] if formula.offset else np.zeros(len(frame))
    found = [_matrix(term.effects, table, finite) for term in formula.random]
    return Columns(fixed, names, offset, tuple(m for m, _ in found), tuple(called for _, called in found))


def _matrix(part: str, table: pd.DataFrame, finite: bool) -> tuple[Array, tuple[str, ...]]:
    try:
        with np.errstate(invalid="ignore", divide="ignore"):
            matrix = formulaic.model_matrix(part, table, na_action="ignore")
    except Exception as error:
        raise DataError(f"`formula`: {part!r} cannot be read ({type(error).__name__}: {error})") from None
    values = matrix.to_numpy(dtype=np.float64)
    if finite and not np.isfinite(values).all():
        odd = [
            str(name) for name, column in zip(matrix.columns, values.T, strict=True) if not np.isfinite(column).all()
        ]
        raise DataError(f"`formula`: {', '.join(odd)} is not finite in some rows")
    return values, tuple(str(name).replace("Intercept", "intercept") for name in matrix.columns)


def reference(formula: Formula, agreed: Preparation) -> Columns:
    """The matrices at rows around the agreed means: names of columns, and their sizes."""
    start, rows = 0, {}
    for column in agreed.columns:
        mean, scale = agreed.input_mean[start], agreed.input_scale[start]
        number: Array = mean + scale * np.array([REACH, REACH / 2, 0.0, -REACH / 2, -REACH])
        if mean > 0:  # logarithms may be taken
            number = np.where(number > 0, number, mean)
        rows[column.name] = [column.levels[-1], column.levels[0]] * 2 + [column.levels[-1]] if column.levels else number
        start += len(column.names)
    return columns(formula, pd.DataFrame(rows, index=range(5)), agreed)


def sizes(matrix: Array) -> Array:
    """The largest entry of each column in size; 1 where all are 0."""
    found = np.abs(matrix).max(axis=0)
    return np.where(found > 0, found, 1.0)


def whitening(gram: Array, names: Sequence[str], size: Array) -> Array:
    """D R with RᵀR the mean cross-products [q, q]; DataError naming columns that others make up."""
    kept = gram / np.sqrt(np.outer(gram.diagonal(), gram.diagonal()) + 1e-300)
    left = np.array([_unexplained(kept, column) for column in range(len(kept))])
    if odd := [name for name, share in zip(names, left, strict=True) if not share > 1e-9]:
        raise DataError(f"`formula`: {odd[0]} is constant or follows from the columns before it; leave it out")
    return np.asarray(np.linalg.cholesky(gram).T * size)


def _unexplained(correlation: Array, column: int) -> float:
    """1 − R² of a column by those before it."""
    before, across = correlation[:column, :column], correlation[:column, column]
    return float(correlation[column, column] - across @ np.linalg.lstsq(before, across, rcond=1e-13)[0])


def whitened(matrix: Array, factor: Array) -> Tensor:
    """Rows x̃ = (D R)⁻ᵀ x [N, q]."""
    return torch.from_numpy(np.linalg.solve(factor.T, matrix.T).T.copy())


@dataclass(frozen=True, slots=True)
class Design:
    """Whitened matrices of rows, and which group of every factor a row belongs to."""

    fixed: Float[Tensor, "N E"]
    offset: Float[Tensor, " N"]
    effects: tuple[Tensor, ...]
    """By term, [N, q]."""


def design(formula: Formula, frame: pd.DataFrame, agreed: Preparation, arrays: NamedArrays) -> Design:
    """The whitened matrices of typed rows."""
    found = columns(formula, frame, agreed)
    effects = (whitened(matrix, arrays[f"{TERM}{k}"]) for k, matrix in enumerate(found.effects))
    return Design(whitened(found.fixed, arrays[FIXED]), torch.tensor(found.offset), tuple(effects))


def decoded(inputs: Array, agreed: Preparation) -> pd.DataFrame:
    """The table that encoded, standardised inputs [N, D] came from; no indicator is the level without one."""
    raw, start, found = inputs * agreed.input_scale + agreed.input_mean, 0, {}
    for column in agreed.columns:
        block = raw[:, start : start + len(column.names)]
        start += len(column.names)
        if column.kind == "numeric":
            found[column.name] = block[:, 0]
            continue
        hidden = len(column.levels) - len(column.shown)
        none = block.max(axis=1) < 0.5
        levels = np.array(column.levels, dtype=object)
        found[column.name] = np.where(
            none, levels[0], levels[np.minimum(hidden + block.argmax(axis=1), len(levels) - 1)]
        )
    return pd.DataFrame(found, index=range(len(inputs)))
