"""The model of a configuration, the same at every site and from a saved posterior, and rows as a model reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.methods.sfvi.options import LEARNED, SHARED, SFVIOptions
from fedgp_flower.methods.sfvi.shaped import ShapedGP
from fedgp_flower.methods.sfvi.structured import SiteData, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.registry import load
from fedgp_flower.typing import Array


def configured(
    options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Tensor | None = None
) -> StructuredModel:
    """The model at its initial θ; in closed form sites of ``gp`` differ in shape."""
    model: type[StructuredModel] = ShapedGP if options.in_closed_form(section) else load(options.row.model)
    return model.configured(options, section, num_inputs, inputs)


def model_at(
    options: SFVIOptions, section: ModelSection, num_inputs: int, arrays: Mapping[str, np.ndarray]
) -> StructuredModel:
    """The model at the θ of a message or of a saved posterior, which ``arrays`` hold with the shared inputs if any."""
    inputs = arrays.get(SHARED, arrays.get(LEARNED))
    points = None if inputs is None else torch.as_tensor(inputs)
    model = configured(options, section, num_inputs, points)
    theta = {name: array for name, array in arrays.items() if name.startswith("theta.")}
    model.load_theta({name.removeprefix("theta."): torch.as_tensor(array) for name, array in theta.items()})
    return model


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs without the column that names units, and those names."""

    features: Tensor  # [N, D]
    groups: Tensor  # int64 [N]


def rows_of(preparation: Preparation, inputs: Array, options: SFVIOptions) -> Rows:
    """Standardised inputs [N, D] as :class:`Rows`; without a column that names units all are of one unit.

    Raises:
        DataError: a column is not there, or holds what is not a whole number.
    """
    names = list(preparation.names)
    features = torch.from_numpy(inputs[:, options.columns(names)])
    if not options.groups_by:
        return Rows(features, torch.zeros(len(inputs), dtype=torch.int64))
    index = names.index(options.groups_by)
    values = inputs[:, index] * preparation.input_scale[index] + preparation.input_mean[index]
    whole = np.rint(values)
    if np.abs(values - whole).max(initial=0.0) > 1e-6:
        raise DataError(f"column `{options.groups_by}` names units by whole numbers; it has others here")
    return Rows(features, torch.from_numpy(whole.astype(np.int64)))


def site_number(site: str) -> int:
    """A number of a site, for draws that no other site shares."""
    return int.from_bytes(hashlib.sha256(site.encode()).digest()[:7], "big")


def model_and_rows(
    config: RunConfig, preparation: Preparation, site: RawSite, arrays: Mapping[str, np.ndarray]
) -> tuple[StructuredModel, SiteData]:
    """The model at some parameters, and the training rows of a site as it has them."""
    options, data = cast(SFVIOptions, config.options), site.encode(preparation)
    rows = rows_of(preparation, data.x, options)
    model = model_at(options, config.model, rows.features.shape[1], arrays)
    return model, model.prepare(rows.features, torch.from_numpy(data.y), rows.groups, key=site_number(site.site))
