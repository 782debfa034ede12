"""Prediction from a finished run, without any site: the saved posterior and the equation written beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch
from scipy.special import ndtri

from fedgp_flower.artefacts import read_posterior, read_run
from fedgp_flower.clients.counts import count_quantiles
from fedgp_flower.config import ModelSection
from fedgp_flower.data.standardisation import Preparation, count_unknown_levels, encode_inputs, read_inputs
from fedgp_flower.errors import RunError
from fedgp_flower.models.pvi_predict import pvi_predictor
from fedgp_flower.models.sparse import SparseGP
from fedgp_flower.models.structured_prediction import structured_predictor
from fedgp_flower.pvi_figures import panels as pvi_panels
from fedgp_flower.records import Posterior
from fedgp_flower.report import write_report
from fedgp_flower.shapes import Array, NamedArrays
from fedgp_flower.statistics import WhitenedPosterior
from fedgp_flower.structured_figures import panels as structured_panels
from fedgp_flower.unit_figures import panels as unit_panels

Standardised: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Mean and standard deviation [N] at standardised inputs [N, D]; of indicators of classes [N, C] for more than two."""
QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)


@dataclass(frozen=True, slots=True)
class Predictor:
    """The posterior of a run, ready to predict noisy observations in original units."""

    preparation: Preparation
    standardised: Standardised
    likelihood: str = "gaussian"

    @staticmethod
    def of_run(run: Path) -> Predictor:
        """Read the posterior of a run.

        Raises:
            RunError: if the run saved none, as a personal method does.
        """
        _require_posterior(run)
        posterior = read_posterior(run)
        preparation = Preparation.from_wire(posterior.arrays, json.dumps(posterior.schema))
        return Predictor(preparation, _family(posterior, preparation), posterior.likelihood)

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation, both [N], at encoded inputs [N, D] in original units."""
        own = self.preparation
        mean, sd = self.standardised((inputs - own.input_mean) / own.input_scale)
        return mean * own.target_scale + own.target_mean, sd * own.target_scale

    def table(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Mean, sd and quantiles of a noisy observation for each row of a table with the agreed columns.

        For a target of classes: the probability of each.
        """
        own = self.preparation
        mean, sd = self.standardised(encode_inputs(frame, own))
        if own.target.levels or mean.ndim == 2:
            classes = mean if mean.ndim == 2 else np.stack([1 - mean, mean], axis=1)
            levels = own.target.levels or [str(index) for index in range(classes.shape[1])]
            return pd.DataFrame(classes, columns=[f"probability of {level}" for level in levels])
        mean, sd = mean * own.target_scale + own.target_mean, sd * own.target_scale
        counts = self.likelihood == "poisson"
        found = count_quantiles(mean, sd, QUANTILES) if counts else mean + sd * ndtri(np.array(QUANTILES))[:, None]
        quantiles = {f"q{100 * level:g}": row for level, row in zip(QUANTILES, found, strict=True)}
        return pd.DataFrame({"mean": mean, "sd": sd, **quantiles})


def _require_posterior(run: Path) -> None:
    if not (run / "posterior.json").exists():
        method = read_run(run).metrics.method
        raise RunError(
            f"{run} has no posterior to predict from: with `method` = {method!r} every site predicts from its own rows,"
            " which stay there. Run a method that shares a posterior, such as 'fsgp'"
        )


def _family(posterior: Posterior, preparation: Preparation) -> Standardised:
    family = str(posterior.model.get("family"))
    if family in PERSONAL:
        raise RunError(
            "the run saved what its units share; a prediction also takes what one unit alone knows, which stays there"
        )
    if family not in FAMILIES:
        known = " or ".join(repr(name) for name in FAMILIES)
        raise RunError(f"posterior of family {family!r}: expected {known}; update fedgp-flower")
    return FAMILIES[family](posterior, preparation)


def _sparse(posterior: Posterior, preparation: Preparation) -> Standardised:
    del preparation
    settings = {key: posterior.model[key] for key in ("kernel", "ard", "jitter")}
    arrays: NamedArrays = dict(posterior.arrays)
    for name, array in posterior.arrays.items():
        if name.startswith(("kernel.", "likelihood.")):
            *path, leaf = name.split(".")
            arrays[".".join([*path, f"log_{leaf}"])] = np.log(array)
    model = SparseGP.from_arrays(ModelSection.model_validate(settings), arrays)
    whitened = WhitenedPosterior.from_arrays(arrays)

    def predict(inputs: Array) -> tuple[Array, Array]:
        with torch.no_grad():
            mean, variance = model.predict(torch.from_numpy(inputs), whitened)
        return mean.numpy(), variance.sqrt().numpy()

    return predict


def _structured(posterior: Posterior, preparation: Preparation) -> Standardised:
    return structured_predictor(dict(posterior.arrays), posterior.model, preparation.names)


def _partitioned(posterior: Posterior, preparation: Preparation) -> Standardised:
    del preparation
    section = {key: posterior.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    return pvi_predictor(
        posterior.arrays,
        ModelSection.model_validate(section),
        num_samples=int(posterior.model["samples"]),
        seed=int(posterior.model["seed"]),
    )


PERSONAL = ("shared-latents",)
"""Posteriors of what units share, which predict no unit by themselves."""

FAMILIES: Mapping[str, Callable[[Posterior, Preparation], Standardised]] = {
    "sparse": _sparse,
    "structured": _structured,
    "pvi": _partitioned,
}
"""What ``posterior.json`` calls its family → mean and sd of a noisy observation at standardised inputs."""


def predict_file(run: Path, source: Path, output: Path, predictor: Predictor | None = None) -> tuple[int, int]:
    """Predict every row of a table into a CSV; returns the rows and the cells with a level no site had.

    Args:
        run: Folder of a finished run.
        source: CSV or Parquet.
        output: CSV to write.
        predictor: That of a site; default is what the run saved for everybody.

    Raises:
        RunError: if the run saved no posterior, or the CSV cannot be written.
        DataError: naming the file, column and row that cannot be used.
    """
    predictor = predictor or Predictor.of_run(run)
    frame = read_inputs(source, predictor.preparation)
    try:
        predictor.table(frame).to_csv(output, index=False)
    except OSError as error:
        raise RunError(f"{output} cannot be written: {error.strerror or error}") from None
    return len(frame), count_unknown_levels(frame, predictor.preparation)


def _trend(run: Path, predictor: Predictor | None) -> Callable[[Array], tuple[Array, Array]] | None:
    """Prediction for a new site at encoded inputs in original units, on the scale where effects add up."""
    posterior = None if predictor is None else read_posterior(run)
    if predictor is None or posterior is None or posterior.model.get("family") != "structured":
        return None
    if posterior.model["structure"]["model"] == "multinomial":
        return None
    if posterior.likelihood == "gaussian":
        return predictor
    own = predictor.preparation
    standardised = structured_predictor(dict(posterior.arrays), posterior.model, own.names, link=True)
    return lambda inputs: standardised((inputs - own.input_mean) / own.input_scale)


def report(run: Path) -> Path:
    """Write ``report.html`` of a run, with curve or map where a posterior was saved; returns its path."""
    saved = (run / "posterior.safetensors").exists() and read_posterior(run).model.get("family") not in PERSONAL
    predictor, content = Predictor.of_run(run) if saved else None, read_run(run)
    panels = [*unit_panels(content), *structured_panels(content, _trend(run, predictor)), *pvi_panels(content)]
    return write_report(run, predictor, panels)
