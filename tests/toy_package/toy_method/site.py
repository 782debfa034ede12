"""The site's half, prediction from a finished run, and a section of its report."""

from collections.abc import Callable
from functools import partial

import numpy as np

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.scores import Prediction
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import Array
from toy_method.shared import Products, Weights, with_intercept


class ToyClient(SiteClient):
    """Sums of the site's rows, and prediction."""

    def products(self, request: Nothing) -> Products:
        features, y = with_intercept(self.rows.x), self.rows.y
        return Products(features.T @ features, features.T @ y, np.array(y @ y), np.array(float(len(y))))

    def predict(self, request: Weights, inputs: Array) -> Prediction:
        mean, sd = moments(request, inputs)
        return Prediction(mean, sd**2)


def moments(weights: Weights, inputs: Array) -> tuple[Array, Array]:
    """Mean and sd of noisy observations at standardised inputs [N, D]."""
    features = with_intercept(inputs)
    variance = np.einsum("ni,ij,nj->n", features, weights.covariance, features) + weights.noise
    return features @ weights.mean, np.sqrt(variance)


def saved_model(saved: Posterior, names: tuple[str, ...]) -> Callable[[Array], tuple[Array, Array]]:
    """Mean and sd of noisy observations from a run's folder."""
    arrays = saved.arrays
    return partial(moments, Weights(arrays["weights.mean"], arrays["weights.covariance"], float(arrays["noise"])))


def panels(run: Run) -> list[Panel]:
    rows = [("weights", str(len(run.saved.arrays["weights.mean"])))] if run.saved else []
    return [Panel("Weights of the toy", html_table(("what", "number"), rows), "With the intercept.")]
