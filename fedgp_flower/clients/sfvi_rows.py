"""A site's rows as a structured model reads them: which unit each belongs to, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.shapes import Array


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs without the column that names units, and those names."""

    features: Tensor  # [N, D]
    groups: Tensor  # int64 [N]


def rows_of(preparation: Preparation, inputs: Array, column: str | None) -> Rows:
    """Standardised inputs [N, D] as :class:`Rows`; without ``column`` all are of one unit.

    Raises:
        DataError: the column is not there, or holds what is not a whole number.
    """
    if column is None:
        return Rows(torch.from_numpy(inputs), torch.zeros(len(inputs), dtype=torch.int64))
    names = list(preparation.names)
    if column not in names:
        raise DataError(f"`sfvi.unit-column` = {column!r} is not a numeric feature; there are {', '.join(names)}")
    index = names.index(column)
    values = inputs[:, index] * preparation.input_scale[index] + preparation.input_mean[index]
    whole = np.rint(values)
    if np.abs(values - whole).max(initial=0.0) > 1e-6:
        raise DataError(f"column `{column}` names units by whole numbers; it has others here")
    return Rows(torch.from_numpy(np.delete(inputs, index, axis=1)), torch.from_numpy(whole.astype(np.int64)))


def refuse_classes(targets: Array, classes: int) -> None:
    """Raise DataError unless the targets are numbers of classes."""
    if not np.isin(targets, np.arange(classes)).all():
        raise DataError(f"targets must be whole numbers below `sfvi.classes` = {classes}")
