"""The site's half of FedMGP: one unit, which sees the shared latent functions smoothed and scaled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from fedgp_flower.clients.baselines import Baseline, local_only
from fedgp_flower.clients.numpy_client import Prediction, Said, SiteClient
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.fedmgp.joining import MOST_ROWS, predict_joining
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, Latents, from_parameters, posterior
from fedgp_flower.methods.fedmgp.local_steps import LocalSteps, factor_steps, natural_steps
from fedgp_flower.methods.fedmgp.messages import (
    PSEUDO_INPUTS,
    AlignedStatistics,
    Broadcast,
    Curve,
    CurveRequest,
    Directions,
    FirstStatistics,
    Known,
    PseudoGradient,
    PseudoGradientSum,
    Towards,
    Trials,
    TrialStatistics,
    View,
)
from fedgp_flower.methods.fedmgp.model import (
    Kind,
    MultiOutputGP,
    fit_personal,
    log_density,
    moments,
    regression_targets,
)
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.pooled import fit_pooled, starting_point
from fedgp_flower.methods.fedmgp.unit import (
    Memories,
    Memory,
    SearchOptions,
    UnitData,
    UnitParameters,
    UnitState,
    explained_share,
    fit_alone,
    predict,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.scores import Scores, bernoulli_scores, count_scores
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import Array, NamedArrays

MOST_ROWS_SHOWN = 250
FLAT = 0.1
"""A unit counts as flat where g explains less than this share of its signal."""


class FedMGPClient(SiteClient):
    """One unit: shared latent functions come from the server; smoothing, amplitudes and noise stay here."""

    @property
    def options(self) -> FedMGPOptions:
        """The table ``fedmgp.*``."""
        return cast(FedMGPOptions, self.config.options)

    @property
    def search(self) -> SearchOptions:
        """How the unit improves φ_m."""
        return SearchOptions(convolved=self.options.covariance == "convolved")

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

    def memories(self) -> dict[str, Memory]:
        """What the unit remembers, by start."""
        return dict(decode(Memories, self.state.arrays).starts) if self.state.arrays else {}

    def memory(self, known: Known) -> Memory | None:
        """What the unit remembers of the start that a request is about."""
        return self.memories().get(str(known.start))

    def remember(self, unit: UnitState, known: Known, began: UnitParameters | None = None) -> None:
        """Keep a state beside those of other starts."""
        memory = Memory(unit, self.setting.round, known.report, began)
        self.state.replace(encode(Memories({**self.memories(), str(known.start): memory})))

    # Handlers.

    def first(self, request: Latents) -> FirstStatistics:
        """Statistics at the parameters that every unit starts from."""
        data = self.unit(request)
        return FirstStatistics(statistics(data, request, starting_parameters(data, request, self.search)))

    def directions(self, request: Latents) -> Directions:
        """Where the unit's first look at g points."""
        mean = posterior(self.first(request).statistics).mean
        return Directions(np.outer(mean, mean))

    def aligned(self, request: Towards) -> AlignedStatistics:
        """Its first statistics with the sign of a direction."""
        first = self.first(request.latents).statistics
        sign = math.copysign(1.0, float(posterior(first).mean @ request.direction))
        return AlignedStatistics(replace(first, shift=sign * first.shift))

    def exact(self, request: Trials) -> TrialStatistics:
        """One exact round: improve φ_m with q fixed, answer with statistics at every trial move."""
        latents, q, known = request.view.latents, request.view.posterior, request.view.known
        data, memory = self.unit(latents), self.memory(known)
        phi = None if memory is None else memory.agreed(data, known)
        unit, answers = respond(data, latents, q, request.moves, phi, replace(self.search, released=request.smooth))
        self.remember(unit, known)
        return TrialStatistics.of(answers, flat=self.is_flat(data, unit.proposed), fresh=phi is None)

    def train(self, request: Broadcast) -> PseudoGradient:
        """Local steps of Algorithm 2 on (θ, φ_m)."""
        theta = request.parameters
        latents, q = from_parameters(theta, request.inducing, self.config.model.jitter)
        memory, data = self.memory(request.known), self.unit(latents)
        before = fit_alone(data, latents, q, self.search) if memory is None else memory.start(self.setting.round)
        steps = LocalSteps(
            self.options.local_steps, request.learning_rate, self.options.natural_step, request.share, self.batches()
        )
        if PRECISION in theta:
            after, phi = natural_steps(theta, data, latents, before, steps)
            mean, variance = predict(self.rows.x, latents, q, phi)
            misfit = float(np.mean((self.rows.y - mean) ** 2 + variance))
            fit = -0.5 * (np.log(2 * np.pi * phi.noise) + misfit / phi.noise)
        else:
            model = MultiOutputGP(latents, before, len(latents.scales), likelihood=self.likelihood)
            model.load(theta)
            after, phi = factor_steps(model, *self.tensors, steps), model.unit_parameters()
            with torch.no_grad():
                fit = float(model.expected_log_likelihood(*self.tensors).mean())
        if not np.isfinite(fit):
            raise NumericsError("local steps diverged: the fit is not finite. Lower `optimizer.learning-rate`.")
        self.remember(UnitState(phi, phi, np.exp(after[SCALES])), request.known, before)
        flat = np.array(float(self.is_flat(data, phi))) if self.gaussian else None
        update = {name: theta[name] - array for name, array in after.items()}
        return PseudoGradient(update, float(fit), np.array(float(memory is None)), flat)

    def pseudo_sum(self, request: Broadcast) -> PseudoGradientSum:
        """The same as a summand."""
        return PseudoGradientSum.of(self.train(request), self.num_examples)

    def is_flat(self, data: UnitData, phi: UnitParameters) -> bool:
        """Whether noise explains nearly all of the signal; the share itself would reveal the unit's noise."""
        return explained_share(data, phi) < FLAT

    def batches(self) -> Callable[[], NDArray[np.int64] | None]:
        """Mini-batches without replacement, the same where a round is repeated."""
        rng = np.random.default_rng([self.config.seed, self.setting.round, *self.site.site.encode()])
        batch, rows = self.config.optimizer.batch_size, self.num_examples
        return lambda: None if batch == 0 or batch >= rows else rng.permutation(rows)[:batch]

    # Prediction.

    def model(self, view: View, phi: UnitParameters) -> MultiOutputGP:
        """The unit as a GPyTorch model."""
        return MultiOutputGP.of(view.latents, view.posterior, phi, likelihood=self.likelihood)

    def reported(self, request: View) -> UnitParameters | None:
        """φ_m behind the report that counts."""
        memory = self.memory(request.known)
        return None if memory is None else memory.agreed(self.unit(request.latents), request.known)

    def fitted_alone(self, request: View) -> UnitParameters:
        """φ_m fitted to the unit's rows with what is shared as it is."""
        phi = fit_alone(self.unit(request.latents), request.latents, request.posterior, self.search)
        return phi if self.gaussian else fit_personal(self.model(request, phi), *self.tensors)

    def function(self, request: View, inputs: Array) -> tuple[Array, Array, UnitParameters]:
        """Mean and variance of f at standardised inputs [N, D], and the parameters that go with them."""
        latents, q = request.latents, request.posterior
        reported = self.reported(request)
        phi = self.fitted_alone(request) if reported is None else reported
        short = latents.scales.shape == (1, 1) and self.num_examples <= MOST_ROWS
        if reported is None and self.gaussian and self.search.convolved and short:
            mean, variance, noise = predict_joining((self.rows.x, self.rows.y), inputs, latents, q)
            return mean, variance, replace(phi, noise=noise)
        return *predict(inputs, latents, q, phi), phi

    def predict(self, request: View, inputs: Array) -> Prediction:
        """Personalised prediction of an observation (paper, Eq. 16); for classes, of the label."""
        return Prediction(*self._observed(*self.function(request, inputs)))

    def _observed(self, mean: Array, variance: Array, phi: UnitParameters) -> tuple[Array, Array]:
        return (mean, variance + phi.noise) if self.gaussian else moments(self.likelihood, mean, variance, phi)

    def score(self, request: View) -> Scores:
        """Scores of held-out rows in original units.

        Classes by their probability Φ(m / √(1 + v)), counts as a mixture of Poisson distributions; heavy-tailed numbers
        by their density, with intervals and CRPS of a Gaussian with the same two moments.
        """
        target = self.rows.y_test
        mean, variance, phi = self.function(request, self.rows.x_test)
        if self.likelihood == "bernoulli":
            return bernoulli_scores(ndtr(mean / np.sqrt(1 + variance)), target)
        if self.likelihood == "poisson":
            return count_scores(mean, variance, target)
        scores = self.gaussian_scores(Prediction(*self._observed(mean, variance, phi)), target)
        if self.gaussian:
            return scores
        density = log_density(self.likelihood, target, mean, variance, phi)
        nll = float(np.sum(np.log(self.preparation.target_scale) - density))
        return Scores(scores.sums | {"nll": nll}, scores.arrays)

    def shown(self, request: View) -> NamedArrays:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        arrays = super().shown(request)
        if self.likelihood == "bernoulli":
            del arrays["prediction.sd"]
            arrays = {"prediction.probability": arrays.pop("prediction.mean"), **arrays}
        return arrays

    def curve(self, request: CurveRequest) -> Curve:
        """Predictions along the one input with and without the other units, and rows; a real unit refuses."""
        return drawn(self, request.view, request.grid)

    # Baselines.

    def local_fit(self) -> Baseline:
        """A GP of the unit's rows, fitted only where there is a held-out row to score."""
        none = np.empty(0)
        return super().local_fit() if len(self.rows.y_test) else Baseline(none, none, none, 0)

    def pooled(self, request: Nothing) -> Said:
        """The same multi-output model with the rows of all units in one place; only a simulation can do that."""
        if not self.gaussian:
            return super().pooled(request)
        self._require_simulated("does not see the rows of other sites")
        units: list[SiteData] = [
            site.encode(self.preparation) for site in load_all_sites(self.config, self.site.partitions)
        ]
        rows, most = [(part.x, part.y) for part in units], self.config.baselines.max_evaluations
        start = starting_point(rows, self.setting.constants[PSEUDO_INPUTS], self.options.multiples, self.search)
        fit = fit_pooled(rows, *start, max_evaluations=most)
        parts = [predict(u.x_test, fit.latents, fit.posterior, phi) for u, phi in zip(units, fit.units, strict=True)]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(parts, fit.units, strict=True)])
        mean, target = np.concatenate([m for m, _ in parts]), np.concatenate([part.y_test for part in units])
        return self.compared(Baseline(mean, variance, target, most))


def drawn(client: SiteClient, view: object, grid: Array) -> Curve:
    """A simulated unit as a report shows it."""
    client._require_simulated("does not send rows")
    rows, every, agreed = client.rows, max(1, -(-client.num_examples // MOST_ROWS_SHOWN)), client.preparation
    none = np.zeros(len(grid))
    alone = local_only((rows.x, rows.y, grid, none), client.config)
    mean, sd, y = client.original(client.predict(view, grid), rows.y[::every])
    alone_mean, alone_sd, _ = client.original(Prediction(alone.mean, alone.variance), none)
    x = rows.x[::every, 0] * agreed.input_scale[0] + agreed.input_mean[0]
    return Curve(mean, sd, alone_mean, alone_sd, x, y)
