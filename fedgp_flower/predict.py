"""Prediction from a finished run, without any site: the saved posterior and the equation written beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import ndtri

from fedgp_flower.artefacts import read_posterior
from fedgp_flower.config import ModelSection
from fedgp_flower.data.standardisation import Preparation, count_unknown_levels, encode_inputs, read_inputs
from fedgp_flower.errors import RunError
from fedgp_flower.models.sparse import SparseGP
from fedgp_flower.records import Posterior
from fedgp_flower.report import write_report
from fedgp_flower.shapes import Array, NamedArrays
from fedgp_flower.statistics import WhitenedPosterior

QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)


@dataclass(frozen=True, slots=True)
class Predictor:
    """The posterior of a run, ready to predict noisy observations in original units."""

    preparation: Preparation
    standardised: Callable[[Array], tuple[Array, Array]]
    """Mean and standard deviation [N] at standardised inputs [N, D]."""

    @staticmethod
    def of_run(run: Path) -> Predictor:
        """Read the posterior of a run.

        Raises:
            RunError: if the run saved none, as a personal method does.
        """
        posterior = read_posterior(run)
        preparation = Preparation.from_wire(posterior.arrays, json.dumps(posterior.schema))
        return Predictor(preparation, _family(posterior))

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation, both [N], at encoded inputs [N, D] in original units."""
        own = self.preparation
        mean, sd = self.standardised((inputs - own.input_mean) / own.input_scale)
        return mean * own.target_scale + own.target_mean, sd * own.target_scale

    def table(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Mean, sd and quantiles of a noisy observation for each row of a table with the agreed columns."""
        own = self.preparation
        mean, sd = self.standardised(encode_inputs(frame, own))
        mean, sd = mean * own.target_scale + own.target_mean, sd * own.target_scale
        quantiles = {f"q{100 * level:g}": mean + sd * ndtri(level) for level in QUANTILES}
        return pd.DataFrame({"mean": mean, "sd": sd, **quantiles})


def _family(posterior: Posterior) -> Callable[[Array], tuple[Array, Array]]:
    if posterior.model.get("family") != "sparse":
        raise RunError(f"posterior of family {posterior.model.get('family')!r}: expected 'sparse'; update fedgp-flower")
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


def predict_file(run: Path, source: Path, output: Path) -> tuple[int, int]:
    """Predict every row of a table into a CSV; returns the rows and the cells with a level no site had.

    Raises:
        RunError: if the run saved no posterior.
        DataError: naming the file, column and row that cannot be used.
    """
    predictor = Predictor.of_run(run)
    frame = read_inputs(source, predictor.preparation)
    predictor.table(frame).to_csv(output, index=False)
    return len(frame), count_unknown_levels(frame, predictor.preparation)


def report(run: Path) -> Path:
    """Write ``report.html`` of a run, with curve or map where a posterior was saved; returns its path."""
    saved = (run / "posterior.safetensors").exists()
    return write_report(run, Predictor.of_run(run) if saved else None)
