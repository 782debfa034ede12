"""The client of FedMGP: one unit, whose output is a smoothed and scaled copy of the shared latent functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import Setting, SiteClient
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.fedmgp import latents as shared
from fedgp_flower.methods.fedmgp import messages, model, unit
from fedgp_flower.methods.fedmgp.joining import MOST_ROWS, predict_joining
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, posterior
from fedgp_flower.methods.fedmgp.messages import FirstStatistics, Known, View
from fedgp_flower.methods.fedmgp.options import NATURAL_STEP, FedMGPOptions
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters, UnitState
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.typing import Array, Indices


class FedMGPClient(SiteClient):
    """One unit: the server sends the latent functions; smoothing, amplitudes and noise never leave the unit."""

    options: FedMGPOptions

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.likelihood: str = setting.config.model.likelihood
        self.gaussian = self.likelihood == "gaussian"

    def data(self, latents: LatentFunctions) -> UnitData:
        """The unit's rows; counts and classes become real-valued targets from which a Gaussian fit can start."""
        y = self.rows.y
        if self.likelihood in ("poisson", "bernoulli"):
            y = np.log(y + 0.5) if self.likelihood == "poisson" else 2 * y - 1
        return UnitData.build(self.rows.x, y, latents.inducing)

    @property
    def memory(self) -> UnitState | None:
        """The state saved in an earlier round."""
        return decode(UnitState, self.state.arrays) if self.state.arrays else None

    def remember(self, state: UnitState, known: Known) -> None:
        """Save a state for the next round."""
        self.state.replace(encode(replace(state, round=self.setting.round, based_on=known.report)))

    # Handlers.

    def first(self, request: messages.FirstLook) -> FirstStatistics:
        """Statistics at the initial parameters φ_m."""
        data, sign = self.data(request.latents), 1.0
        sums = unit.statistics(data, request.latents, unit.starting_parameters(data, request.latents))
        if request.direction is not None:
            sign = math.copysign(1.0, float(posterior(sums).mean @ request.direction))
        return FirstStatistics(replace(sums, shift=sign * sums.shift))

    def directions(self, request: LatentFunctions) -> messages.Directions:
        """Outer product m mᵀ of the first statistics."""
        mean = posterior(self.first(messages.FirstLook(request)).statistics).mean
        return messages.Directions(np.outer(mean, mean))

    def exact(self, request: messages.TrialMoves) -> messages.TrialStatistics:
        """One exact round: improve φ_m for fixed q and return the statistics at every trial move."""
        latents, q, known = request.view.latents, request.view.posterior, request.view.known
        data, memory = self.data(latents), self.memory
        phi = None if memory is None else memory.accepted(data, known)
        state, answers = unit.respond(data, latents, q, request.moves, phi, smooth=request.smooth)
        self.remember(state, known)
        return messages.TrialStatistics.of(answers)

    def train(self, request: messages.Broadcast) -> messages.PseudoGradient:
        """Local steps of Algorithm 2 on (θ, φ_m)."""
        theta = request.parameters
        latents, q = shared.from_parameters(theta, request.inducing, self.config.model.jitter)
        memory, data = self.memory, self.data(latents)
        if memory is None:
            before = unit.fit_alone(data, latents, q)
        else:  # a repeated round starts again from the same φ_m
            before = memory.before if memory.round == self.setting.round else memory.proposed
        steps = unit.LocalSteps(
            self.options.local_steps, request.learning_rate, NATURAL_STEP, request.share, self.batches()
        )
        if shared.PRECISION in theta:
            after, phi = unit.natural_steps(theta, data, latents, before, steps)
            fit = unit.statistics(data, latents, phi).expected(q)
        else:
            gp = model.MultiOutputGP(theta, request.inducing, latents.jitter, before, self.likelihood)
            after, phi = model.factor_steps(gp, *self.tensors, steps), gp.unit_parameters()
            with torch.no_grad():
                fit = float(gp.expected_log_likelihood(*self.tensors).sum())
        if not np.isfinite(fit):
            raise NumericsError("local steps diverged: the fit is not finite. Lower `optimizer.learning-rate`.")
        self.remember(UnitState(before, phi, np.exp(after[shared.SCALES])), request.known)
        update = {name: theta[name] - array for name, array in after.items()}
        return messages.PseudoGradient(update, fit, float(self.num_examples))

    def batches(self) -> Callable[[], Indices | None]:
        """Return a sampler of mini-batches without replacement; a repeated round draws the same batches."""
        rng = np.random.default_rng([self.config.seed, self.setting.round, *self.site.site.encode()])
        batch, rows = self.config.optimizer.batch_size, self.num_examples
        return lambda: None if batch == 0 or batch >= rows else rng.permutation(rows)[:batch]

    # Prediction.

    def function(self, request: View, inputs: Array) -> tuple[Array, Array, UnitParameters]:
        """Mean and variance of f at standardised inputs [N, D], and φ_m of the accepted report or fitted now."""
        latents, q, memory = request.latents, request.posterior, self.memory
        data = self.data(latents)
        phi = None if memory is None else memory.accepted(data, request.known)
        few = self.num_examples < unit.FEW_ROWS or (phi is None and self.num_examples <= MOST_ROWS)
        if phi is None:
            phi = unit.fit_alone(data, latents, q)
            if not self.gaussian:
                phi = model.fit_personal(latents, q, phi, self.likelihood, *self.tensors)
        if few and self.gaussian and latents.scales.shape == (1, 1):
            mean, variance, noise = predict_joining((self.rows.x, self.rows.y), inputs, latents, q)
            return mean, variance, replace(phi, noise=noise)
        return *unit.predict(inputs, latents, q, phi), phi

    def predict(self, request: View, inputs: Array) -> Prediction:
        """Personalised prediction of an observation (paper, Eq. 16); for classes, of the label."""
        mean, variance, phi = self.function(request, inputs)
        point, learned = model.observed(self.likelihood, phi)
        first, second = point.moments(torch.from_numpy(mean), torch.from_numpy(variance), learned)
        return Prediction(first.numpy(), second.numpy())

    def score(self, request: View) -> Scores:
        """Scores of held-out rows in original units."""
        mean, variance, phi = self.function(request, self.rows.x_test)
        point, learned = model.observed(self.likelihood, phi)
        return point.scores(mean, variance, self.rows.y_test, learned, self.units)

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of a GP fitted to the unit's rows or, if ``pooled``, of the multi-output model fitted to all rows."""
        if not (pooled and self.gaussian):
            return super().baseline_scores(data, pooled)
        units = [site.encode(self.preparation) for site in load_all_sites(self.config, self.site.partitions)]
        rows, most = [(part.x, part.y) for part in units], self.config.baselines.max_evaluations
        start = model.starting_point(rows, self.setting.constants[messages.PSEUDO_INPUTS], self.options.multiples)
        latents, q, parameters, _ = model.fit_pooled(rows, *start, max_evaluations=most)
        parts = [unit.predict(part.x_test, latents, q, phi) for part, phi in zip(units, parameters, strict=True)]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(parts, parameters, strict=True)])
        mean = np.concatenate([m for m, _ in parts])
        return self.units.gaussian_scores(Prediction(mean, variance), data.y_test)
