"""FSGP: a sparse GP whose hyperparameters and inducing points are learned by all sites, with an exact posterior.

Guo et al., *Federated sparse Gaussian processes* (2022). Training is either the paper's federated averaging (this
module) or the exact gradient of the pooled bound (:mod:`strategies.fsgp_exact`). Prediction is the same for both: sums
over sites give the optimal q(u) of all rows (paper Eqs. 14-15), whatever the partition.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fedgp_flower.config import CoreConfig, Fraction, MethodOptions, Positive
from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.shapes import NamedArrays
from fedgp_flower.statistics import SparseSums, WhitenedPosterior, collapsed_bound_value, exact_posterior
from strategies.averaging import Averaging, ParameterStrategy, median_hyperparameters
from strategies.base import Observer, Snapshot
from strategies.closing import Posterior
from strategies.wire import Answer, ArraySpec, Specs

logger = logging.getLogger("fedgp")

LOG_NOISE = "likelihood.log_noise"


class FSGPOptions(MethodOptions):
    """The table ``fsgp.*``."""

    table: ClassVar[str] = "fsgp"

    objective: Literal["exact", "average"] = "exact"
    """``exact``: gradient of the pooled bound, L-BFGS or Adam at the server; ``average``: the paper's local steps."""
    fraction: Fraction = 1.0
    """Share ρ of the sites that take part in a round of ``average``; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi"] = "fedavg"
    """``average``: Flower's rule that combines the sites' parameters."""
    exact_optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    """``exact``: what the server does with the exact gradient."""
    server_learning_rate: Positive = 0.1
    """Of ``fedadam``, ``fedyogi`` and ``adam``."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """``exact``: stop when the bound per row changes less than this, relative to its size."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood, whole batches, and a server optimiser that fits the objective."""
        if core.model.likelihood != "gaussian":
            raise ConfigError(f"`model.likelihood` = {core.model.likelihood!r}: the sums of fsgp need 'gaussian'")
        if core.optimizer.batch_size:
            raise ConfigError(
                "`optimizer.batch-size`: the collapsed bound of fsgp takes all rows of a site; set it to 0"
            )


class SparseStrategy(ParameterStrategy, ABC):
    """What both objectives share: parameters w = {β, Z}, sums over sites, and prediction from them."""

    @property
    def options(self) -> FSGPOptions:
        """The table ``fsgp.*``."""
        return cast(FSGPOptions, self.config.options)

    @property
    def noise(self) -> float:
        """Noise variance of the standardised target."""
        return math.exp(float(self.parameters[LOG_NOISE][0]))

    def initialise(self) -> None:
        """Draw inducing points from federated statistics; hyperparameters start where the configuration says."""
        answers = self.shapes_of_inputs()
        locations = self.initial_inducing_points(answers)
        self.parameters = {"inducing.locations": locations, **median_hyperparameters(answers)}

    def statistics_specs(self) -> Specs:
        """Shapes of the sums of a site."""
        return {name: ArraySpec(shape) for name, shape in SparseSums.shapes(self.config.model.num_inducing).items()}

    def usable_sums(self, answers: Mapping[str, Answer]) -> dict[str, SparseSums]:
        """The sums of each site, without those that cannot come from its rows."""
        found: dict[str, SparseSums] = {}
        for site, own in answers.items():
            reason = sums_refusal(own.arrays, self.preparation.rows[site])
            if reason:
                self.network.fail(site, reason)
            else:
                found[site] = SparseSums.from_arrays(own.arrays)
        return found

    def pooled(self) -> SparseSums:
        """The sums of all rows of all sites that answer, at the current parameters."""
        answers = self.ask("query.statistics", self.parameters, self.statistics_specs(), retries=1)
        parts = list(self.usable_sums(answers).values())
        if not parts:
            raise RunError("no site sent usable sums; see the failures above")
        return functools.reduce(operator.add, parts)

    def predictive(self) -> NamedArrays:
        """Parameters and the exact posterior at them, from one query for sums."""
        return self.predictive_from(self.pooled())

    def predictive_from(self, sums: SparseSums) -> NamedArrays:
        """Parameters and the exact posterior that follows from sums at them."""
        self.bound = collapsed_bound_value(sums, self.noise)
        self.whitened = exact_posterior(sums, self.noise)
        return {**self.parameters, **self.whitened.to_arrays()}

    def posterior(self) -> Posterior:
        """The saved posterior: parameters in natural units, q of whitened inducing values."""
        return sparse_posterior(self.parameters, self.whitened, self.config)

    def details(self) -> dict[str, Any]:
        """The pooled bound at the end, in nats, and the noise level."""
        return {"bound": self.bound, "noise_sd_standardised": math.sqrt(self.noise)}


class FSGPAverage(SparseStrategy, Averaging):
    """Federated averaging: sampled sites take a few local steps on their own bound per row (paper, Algorithms 1-2)."""

    def round_metrics(self) -> dict[str, float]:
        """The noise variance beside the mean of the sites' objectives."""
        return {"noise": self.noise}


@np.errstate(over="ignore")
def sums_refusal(arrays: Mapping[str, np.ndarray], rows: int) -> str | None:
    """Why sums cannot come from ``rows`` rows: necessary conditions every honest site meets.

    A = W Wᵀ is symmetric and positive semi-definite, tr A ≤ Σ k(x, x) because the whitened projection cannot explain
    more than the prior variance, and by Cauchy-Schwarz bᵀb ≤ λ_max(A) Σ y².
    """
    gram, slack = arrays["sums.gram"], 1e-6
    if float(arrays["sums.count"]) != rows:
        return f"sums of {float(arrays['sums.count']):g} rows, introduced itself with {rows}"
    eigenvalues = np.linalg.eigvalsh(gram / 2 + gram.T / 2)  # halves first: a liar's numbers may be huge
    largest = max(float(eigenvalues[-1]), 1e-300)
    if np.abs(gram - gram.T).max() > slack * largest or eigenvalues[0] < -slack * largest:
        return "`sums.gram` is not a Gram matrix"
    if np.trace(gram) > float(arrays["sums.prior_variance"]) * (1 + slack):
        return "`sums.gram` explains more than the prior variance of the rows"
    limit = math.sqrt(largest) * math.sqrt(max(float(arrays["sums.target_squares"]), 0.0)) * (1 + slack)
    if math.hypot(*arrays["sums.projection"]) > limit:
        return "`sums.projection` is larger than the targets allow"
    return None


def sparse_posterior(parameters: NamedArrays, whitened: WhitenedPosterior, config: Any) -> Posterior:
    """Arrays, meanings and the equation of prediction for a sparse GP with whitened q(v)."""
    arrays: NamedArrays = {"inducing.locations": parameters["inducing.locations"], **whitened.to_arrays()}
    for name, array in parameters.items():
        if ".log_" in name:
            arrays[name.replace(".log_", ".", 1)] = np.exp(array)
    meanings = {
        "inducing.locations": "Z, inducing inputs",
        "inducing.mean": "m, mean of v = L⁻¹ f(Z)",
        "inducing.covariance": "S, covariance of v = L⁻¹ f(Z)",
        "kernel.lengthscale": "lengthscale per input",
        "kernel.outputscale": "prior variance of f",
        "likelihood.noise": "σ², noise variance of an observation",
    }
    standardised = "standardised"
    coordinates = dict.fromkeys(arrays, standardised) | dict.fromkeys(
        ("inducing.mean", "inducing.covariance"), "whitened"
    )
    equation = (
        "With L Lᵀ = k(Z, Z) + jitter · k(z, z) · I and a = L⁻¹ k(Z, x): y(x) ~ N(aᵀm, k(x, x) − aᵀa + aᵀS a + σ²), "
        "x and y standardised by input.mean, input.scale, target.mean, target.scale."
    )
    model = {"family": "sparse", "kernel": config.model.kernel, "ard": config.model.ard, "jitter": config.model.jitter}
    return Posterior(arrays, {n: meanings.get(n, "hyperparameter") for n in arrays}, coordinates, equation, model)


def create(config: Any, observer: Observer, snapshot: Snapshot | None = None) -> SparseStrategy:
    """The Strategy of ``fsgp.objective``."""
    from strategies.fsgp_exact import FSGPExact  # noqa: PLC0415  it builds on this module

    return (FSGPExact if config.options.objective == "exact" else FSGPAverage)(config, observer, snapshot)
