"""The site's half of FedMGP: one unit, which sees the shared latent functions smoothed and scaled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedgp_flower.clients.baselines import fitted
from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.fedmgp.joining import MOST_ROWS, predict_joining
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, Latents, from_parameters, posterior
from fedgp_flower.methods.fedmgp.local_steps import LocalSteps, factor_steps, natural_steps
from fedgp_flower.methods.fedmgp.messages import (
    PSEUDO_INPUTS,
    Broadcast,
    Curve,
    CurveRequest,
    Directions,
    FirstLook,
    FirstStatistics,
    Known,
    PseudoGradient,
    Trials,
    TrialStatistics,
    View,
)
from fedgp_flower.methods.fedmgp.model import (
    Kind,
    MultiOutputGP,
    fit_personal,
    likelihood_parameters,
    moments,
    regression_targets,
)
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.pooled import fit_pooled, starting_point
from fedgp_flower.methods.fedmgp.unit import (
    UnitData,
    UnitParameters,
    UnitState,
    fit_alone,
    predict,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.typing import Array

MOST_ROWS_SHOWN = 250


class FedMGPClient(SiteClient):
    """One unit: shared latent functions come from the server; smoothing, amplitudes and noise stay here."""

    @property
    def options(self) -> FedMGPOptions:
        """The table ``fedmgp.*``."""
        return cast(FedMGPOptions, self.config.options)

    @property
    def likelihood(self) -> Kind:
        """How targets are observed."""
        return self.config.model.likelihood

    @property
    def gaussian(self) -> bool:
        """Whether targets are numbers with Gaussian noise."""
        return self.likelihood == "gaussian"

    def unit(self, latents: Latents) -> UnitData:
        """The rows as seen from the pseudo-inputs, with targets that a regression can start from."""
        return UnitData.build(self.rows.x, regression_targets(self.likelihood, self.rows.y), latents.inducing)

    @property
    def memory(self) -> UnitState | None:
        """What the unit remembers of earlier rounds."""
        return decode(UnitState, self.state.arrays) if self.state.arrays else None

    def remember(self, state: UnitState, known: Known) -> None:
        """Keep a state for the next round."""
        self.state.replace(encode(replace(state, round=self.setting.round, based_on=known.report)))

    # Handlers.

    def first(self, request: FirstLook) -> FirstStatistics:
        """Statistics at the parameters that every unit starts from."""
        data, latents = self.unit(request.latents), request.latents
        found = statistics(data, latents, starting_parameters(data, latents))
        if request.direction is None:
            return FirstStatistics(found)
        sign = math.copysign(1.0, float(posterior(found).mean @ request.direction))
        return FirstStatistics(replace(found, shift=sign * found.shift))

    def directions(self, request: Latents) -> Directions:
        """Where the unit's first look at g points."""
        mean = posterior(self.first(FirstLook(request)).statistics).mean
        return Directions(np.outer(mean, mean))

    def exact(self, request: Trials) -> TrialStatistics:
        """One exact round: improve φ_m with q fixed, answer with statistics at every trial move."""
        latents, q, known = request.view.latents, request.view.posterior, request.view.known
        data, memory = self.unit(latents), self.memory
        phi = None if memory is None else memory.agreed(data, known)
        state, answers = respond(data, latents, q, request.moves, phi, smooth=request.smooth)
        self.remember(state, known)
        return TrialStatistics.of(answers)

    def train(self, request: Broadcast) -> PseudoGradient:
        """Local steps of Algorithm 2 on (θ, φ_m)."""
        theta = request.parameters
        latents, q = from_parameters(theta, request.inducing, self.config.model.jitter)
        memory, data = self.memory, self.unit(latents)
        before = fit_alone(data, latents, q) if memory is None else memory.start(self.setting.round)
        steps = LocalSteps(
            self.options.local_steps, request.learning_rate, self.options.natural_step, request.share, self.batches()
        )
        if PRECISION in theta:
            after, phi = natural_steps(theta, data, latents, before, steps)
            mean, variance = predict(self.rows.x, latents, q, phi)
            misfit = float(np.sum((self.rows.y - mean) ** 2 + variance))
            fit = -0.5 * (self.num_examples * np.log(2 * np.pi * phi.noise) + misfit / phi.noise)
        else:
            model = MultiOutputGP(latents, before, len(latents.scales), likelihood=self.likelihood)
            model.load(theta)
            after, phi = factor_steps(model, *self.tensors, steps), model.unit_parameters()
            with torch.no_grad():
                fit = float(model.expected_log_likelihood(*self.tensors).sum())
        if not np.isfinite(fit):
            raise NumericsError("local steps diverged: the fit is not finite. Lower `optimizer.learning-rate`.")
        self.remember(UnitState(before, phi, np.exp(after[SCALES])), request.known)
        update = {name: theta[name] - array for name, array in after.items()}
        return PseudoGradient(update, float(fit), float(self.num_examples))

    def batches(self) -> Callable[[], NDArray[np.int64] | None]:
        """Mini-batches without replacement, the same where a round is repeated."""
        rng = np.random.default_rng([self.config.seed, self.setting.round, *self.site.site.encode()])
        batch, rows = self.config.optimizer.batch_size, self.num_examples
        return lambda: None if batch == 0 or batch >= rows else rng.permutation(rows)[:batch]

    # Prediction.

    def function(self, request: View, inputs: Array) -> tuple[Array, Array, UnitParameters]:
        """Mean and variance of f at standardised inputs [N, D], and φ_m: behind the report that counts, or fitted."""
        latents, q, memory = request.latents, request.posterior, self.memory
        data = self.unit(latents)
        phi = None if memory is None else memory.agreed(data, request.known)
        if phi is None:
            phi = fit_alone(data, latents, q)
            if self.gaussian and latents.scales.shape == (1, 1) and self.num_examples <= MOST_ROWS:
                mean, variance, noise = predict_joining((self.rows.x, self.rows.y), inputs, latents, q)
                return mean, variance, replace(phi, noise=noise)
            if not self.gaussian:
                phi = fit_personal(MultiOutputGP.of(latents, q, phi, likelihood=self.likelihood), *self.tensors)
        return *predict(inputs, latents, q, phi), phi

    def predict(self, request: View, inputs: Array) -> Prediction:
        """Personalised prediction of an observation (paper, Eq. 16); for classes, of the label."""
        mean, variance, phi = self.function(request, inputs)
        observed = (mean, variance + phi.noise) if self.gaussian else moments(self.likelihood, mean, variance, phi)
        return Prediction(*observed)

    def score(self, request: View) -> Scores:
        """Scores of held-out rows in original units."""
        if self.gaussian:
            return super().score(request)
        mean, variance, phi = self.function(request, self.rows.x_test)
        point = build_point_likelihood(self.likelihood)
        parameter = likelihood_parameters(point, phi)
        return point.scores(mean, variance, self.rows.y_test, parameter, self.preparation.target_scale)

    def curve(self, request: CurveRequest) -> Curve:
        """Predictions along the one input with and without the other units, and rows; a real unit refuses."""
        self.require_simulated("does not send rows")
        rows, every, agreed = self.rows, max(1, -(-self.num_examples // MOST_ROWS_SHOWN)), self.preparation
        none = np.zeros(len(request.grid))
        alone = fitted(SiteData(rows.x, rows.y, request.grid, none, 0), self.config, pooled=False)
        mean, sd, y = self.units.original(self.predict(request.view, request.grid), rows.y[::every])
        alone_mean = self.units.original(Prediction(alone.mean, alone.variance), none)[0]
        x = rows.x[::every, 0] * agreed.input_scale[0] + agreed.input_mean[0]
        return Curve(mean, sd, alone_mean, x, y)

    def alone(self, data: SiteData, pooled: bool) -> Scores:
        """Scores of a GP of the unit's rows; in a simulation of the same multi-output model of all units' rows."""
        if not (pooled and self.gaussian):
            return super().alone(data, pooled)
        units: list[SiteData] = [
            site.encode(self.preparation) for site in load_all_sites(self.config, self.site.partitions)
        ]
        rows, most = [(part.x, part.y) for part in units], self.config.baselines.max_evaluations
        start = starting_point(rows, self.setting.constants[PSEUDO_INPUTS], self.options.multiples)
        latents, q, parameters, _ = fit_pooled(rows, *start, max_evaluations=most)
        parts = [predict(unit.x_test, latents, q, phi) for unit, phi in zip(units, parameters, strict=True)]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(parts, parameters, strict=True)])
        mean = np.concatenate([m for m, _ in parts])
        return self.units.gaussian_scores(Prediction(mean, variance), data.y_test)
