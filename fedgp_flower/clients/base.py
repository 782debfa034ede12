"""What every client shares: named arrays in and out of Flower's ``NumPyClient``, and the phases all methods answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays
from flwr.common.typing import Scalar as FlowerScalar
from numpy.typing import NDArray

from fedgp_flower.clients import baselines
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ProtocolError
from fedgp_flower.metrics import Scores, gaussian_scores
from fedgp_flower.models.kernels import build_kernel, wire_name
from fedgp_flower.models.placement import Placement
from fedgp_flower.shapes import NamedArrays
from fedgp_flower.statistics import input_shape

NAMES_KEY = "array-names"
"""Config key (request) and metric key (reply) that names the arrays of a ``fit`` call, in order, as JSON."""


@dataclass(frozen=True, slots=True)
class Request:
    """A message as a client sees it."""

    phase: str
    arrays: NamedArrays
    round: int
    communication: int
    settings: Mapping[str, FlowerScalar]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client answers: arrays, numbers, and short texts such as a schema."""

    arrays: NamedArrays = field(default_factory=dict)
    num_examples: int = 0
    metrics: Mapping[str, float | list[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictive mean and variance of noisy observations, standardised, each [N]."""

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


def handler_name(phase: str) -> str:
    """The method that answers a phase: ``query.statistics`` is ``on_query_statistics``."""
    return "on_" + phase.replace(".", "_")


class GPClient(NumPyClient):
    """Carry requests to handlers ``on_<phase>``; a method adds its own handlers and ``predict``."""

    def __init__(self, config: RunConfig, site: RawSite, state: SiteState) -> None:
        self.config = config
        self.site = site
        self.state = state
        self.placement = Placement.of(config)
        torch.set_num_threads(config.threads)

    def fit(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Answer a training or query phase; names of arrays travel beside them as JSON."""
        reply = self.answer(_request(parameters, config))
        out: dict[str, Any] = {**reply.metrics, **reply.texts, NAMES_KEY: json.dumps(list(reply.arrays))}
        return [np.asarray(array) for array in reply.arrays.values()], reply.num_examples, out

    def evaluate(self, parameters: NDArrays, config: dict[str, FlowerScalar]) -> tuple[float, int, dict[str, Any]]:
        """Score predictions for the site's held-out rows; returns (mean NLL, rows, sums of scores)."""
        request = _request(parameters, config)
        scores = self.score(request)
        count = int(scores.sums["count"])
        loss = scores.sums["nll"] / count if count else 0.0
        return loss, count, flat_scores(scores)

    def answer(self, request: Request) -> Reply:
        """Run the handler of the request's phase.

        Raises:
            ProtocolError: if this client has no such handler.
        """
        handler: Callable[[Request], Reply] | None = getattr(self, handler_name(request.phase), None)
        if handler is None:
            raise ProtocolError(f"method `{self.config.method}` does not answer `{request.phase}`")
        return handler(request)

    def data(self, request: Request) -> SiteData:
        """The site's rows, standardised as the request says."""
        return self.site.encode(Preparation.from_wire(request.arrays, str(request.settings["schema"])))

    def predict(self, request: Request, inputs: NDArray[np.float64]) -> Prediction:
        """Predict noisy observations at standardised inputs [N, D] with what the request carries.

        Raises:
            ProtocolError: for a method whose clients share nothing that predicts rows, such as a yardstick.
        """
        del request, inputs
        raise ProtocolError(f"method `{self.config.method}` has no prediction of single rows")

    def score(self, request: Request) -> Scores:
        """Scores of the held-out rows in original units."""
        mean, sd, target = self._held_out(request, self.data(request))
        return gaussian_scores(mean, sd, target)

    def _held_out(self, request: Request, data: SiteData) -> tuple[NDArray[np.float64], ...]:
        prediction = self.predict(request, data.x_test)
        return to_original_units(request, prediction, data.y_test)

    def on_query_describe(self, request: Request) -> Reply:
        """Counts, sums and sums of squares of the training rows, and the schema of the site's table."""
        del request
        description = self.site.describe()
        return Reply(
            arrays=dict(description.arrays),
            num_examples=description.num_examples,
            metrics={"partitions": self.site.partitions},
            texts={"schema": description.schema, "label": self.site.label},
        )

    def on_query_shape(self, request: Request) -> Reply:
        """Where the standardised inputs lie, and the initial hyperparameters of the configured model."""
        data = self.data(request)
        return Reply({**input_shape(data.x), **self.initial_arrays(data.x.shape[1])}, len(data.x))

    def initial_arrays(self, num_inputs: int) -> NamedArrays:
        """Initial hyperparameters under their wire names; the same at every site, from the configuration alone."""
        kernel = build_kernel(self.config.model, num_inputs)
        arrays: NamedArrays = {f"kernel.{wire_name(n)}": p.detach().numpy() for n, p in kernel.named_parameters()}
        return arrays | {"likelihood.log_noise": np.log([self.config.model.noise])}

    def on_query_predictions(self, request: Request) -> Reply:
        """Held-out rows with their predictions; a real site refuses, its rows stay where they are."""
        if not self.site.simulated:
            raise ProtocolError("a real site does not send rows")
        data = self.data(request)
        mean, sd, target = self._held_out(request, data)
        arrays: NamedArrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": target}
        if data.x_test.shape[1] <= 2:
            arrays["prediction.input"] = data.x_test * request.arrays["input.scale"] + request.arrays["input.mean"]
        return Reply(arrays, len(target))

    def on_query_local_only(self, request: Request) -> Reply:
        """The comparison a site can make by itself: a GP of its own rows alone."""
        data = self.data(request)
        return self._baseline(request, baselines.local_only((data.x, data.y, data.x_test, data.y_test), self.config))

    def on_query_pooled(self, request: Request) -> Reply:
        """The comparison only a simulation can make: one sparse GP of the rows of all sites."""
        if not self.site.simulated:
            raise ProtocolError("a real site does not see the rows of other sites")
        preparation = Preparation.from_wire(request.arrays, str(request.settings["schema"]))
        return self._baseline(request, baselines.pooled(self.site, preparation, self.config))

    def _baseline(self, request: Request, result: baselines.Baseline) -> Reply:
        scored = to_original_units(request, Prediction(result.mean, result.variance), result.target)
        scores = gaussian_scores(*scored)
        return Reply({}, int(scores.sums["count"]), {**flat_scores(scores), "evaluations": result.evaluations})


def flat_scores(scores: Scores) -> dict[str, float | list[float]]:
    """Scores as metrics of a reply: sums as numbers, histograms as flat lists."""
    histograms = {name: [float(value) for value in array.ravel()] for name, array in scores.arrays.items()}
    return {**scores.sums, **histograms}


def to_original_units(
    request: Request, prediction: Prediction, target: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean, standard deviation and target in the units of the data."""
    mean, scale = request.arrays["target.mean"], request.arrays["target.scale"]
    return prediction.mean * scale + mean, np.sqrt(prediction.variance) * scale, target * scale + mean


def _request(parameters: NDArrays, config: Mapping[str, FlowerScalar]) -> Request:
    names = json.loads(str(config[NAMES_KEY]))
    return Request(
        phase=str(config["phase"]),
        arrays=dict(zip(names, parameters, strict=True)),
        round=int(config["round"]),
        communication=int(config["communication"]),
        settings=config,
    )
