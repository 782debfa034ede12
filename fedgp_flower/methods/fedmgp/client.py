"""The site's half of FedMGP, one unit, and of the two reference methods that a simulation compares it with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from fedgp_flower.clients.baselines import Baseline
from fedgp_flower.clients.counts import count_scores
from fedgp_flower.clients.numpy_client import Prediction, Said
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.fedmgp.deviation import predict_with_deviation
from fedgp_flower.methods.fedmgp.exact_q import posterior
from fedgp_flower.methods.fedmgp.joining import MOST_ROWS, predict_joining
from fedgp_flower.methods.fedmgp.latents import (
    FACTOR,
    INDUCING,
    MEAN,
    PRECISION,
    SCALES,
    SHIFT,
    Latents,
    from_natural,
    from_parameters,
    grid_side,
)
from fedgp_flower.methods.fedmgp.learner import LocalSteps, Memories, Memory, fit_alone, fit_personal, local_update
from fedgp_flower.methods.fedmgp.likelihoods import Kind, log_density, moments, regression_targets
from fedgp_flower.methods.fedmgp.messages import (
    PSEUDO_INPUTS,
    AlignedStatistics,
    Broadcast,
    Curve,
    CurveRequest,
    Directions,
    FirstStatistics,
    Known,
    NaturalGradient,
    PseudoGradient,
    PseudoGradientSum,
    Towards,
    Trials,
    TrialStatistics,
    View,
)
from fedgp_flower.methods.fedmgp.multi_output import from_exact, load, shared_parameters, to_exact, unit_model
from fedgp_flower.methods.fedmgp.natural import natural_steps
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.references import (
    MultiOutputFit,
    fit_modular,
    fit_polynomial,
    fit_pooled,
    starting_point,
)
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitParameters,
    UnitState,
    explained_share,
    predict,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.methods.fedmgp.unit_client import UnitClient
from fedgp_flower.methods.messages import Nothing
from fedgp_flower.run.metrics import Scores, bernoulli_scores
from fedgp_flower.typing import Array, NamedArrays


class FedMGPClient(UnitClient):
    """One unit: shared latent functions from the server; smoothing, amplitudes and noise stay here."""

    @property
    def options(self) -> FedMGPOptions:
        """The table ``fedmgp.*``."""
        return cast(FedMGPOptions, self.config.options)

    @property
    def search(self) -> SearchOptions:
        """How the unit improves φ_m."""
        return SearchOptions(convolved=self.options.covariance != "lmc")

    @property
    def likelihood(self) -> Kind:
        """What observations are like."""
        return self.config.model.likelihood

    @property
    def gaussian(self) -> bool:
        """Whether targets are numbers with Gaussian noise."""
        return self.likelihood == "gaussian"

    def unit(self, latents: Latents) -> UnitData:
        """The rows as seen from the pseudo-inputs, with targets that a regression can start from."""
        return UnitData.build(self.rows.x, regression_targets(self.likelihood, self.rows.y), latents.inducing)

    # What the unit remembers.

    def memories(self) -> dict[str, Memory]:
        """By start."""
        return dict(decode(Memories, self.state.arrays).starts) if self.state.arrays else {}

    def memory(self, known: Known) -> Memory | None:
        """Of the start that a request is about."""
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
        own = self.first(request.latents).statistics
        sign = math.copysign(1.0, float(posterior(own).mean @ request.direction))
        return AlignedStatistics(replace(own, shift=sign * own.shift))

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
        latents, q = from_parameters(request.parameters, request.inducing, self.config.model.jitter)
        memory, optimizer = self.memory(request.known), self.config.optimizer
        before = (
            fit_alone(self.unit(latents), latents, q, self.search)
            if memory is None
            else memory.start(self.setting.round)
        )
        model = unit_model(latents, before, likelihood=self.likelihood, learn_inducing=INDUCING in request.parameters)
        load(shared_parameters(model), request.parameters)
        x, y = torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y)
        name: Literal["adam", "sgd"] = "sgd" if optimizer.name == "sgd" else "adam"
        steps = LocalSteps(self.options.local_steps, request.learning_rate, name, optimizer.batch_size)
        update = local_update(model, x, y, steps, weight=self.share(request), generator=self._generator())
        with torch.no_grad():
            fit = float(model.expected_log_likelihood(x, y).mean())
        if not np.isfinite(fit):
            raise NumericsError("local steps diverged: the fit is not finite. Lower `optimizer.learning-rate`.")
        latents, phi = to_exact(model)
        self.remember(UnitState(phi, phi, latents.scales), request.known, before)
        flat = np.array(float(self.is_flat(self.unit(latents), phi))) if self.gaussian else None
        return PseudoGradient(update, fit, np.array(float(memory is None)), flat)

    def natural(self, request: Broadcast) -> NaturalGradient:
        """Local steps on natural parameters, φ_m as in :meth:`train`."""
        given, optimizer, rows = request.parameters, self.config.optimizer, self.rows
        mean, factors = from_natural(given[PRECISION], given[SHIFT])
        as_factors = {SCALES: given[SCALES], MEAN: mean, FACTOR: factors}
        latents, q = from_parameters(as_factors, request.inducing, self.config.model.jitter)
        memory, data, batch = self.memory(request.known), self.unit(latents), optimizer.batch_size
        before = fit_alone(data, latents, q, self.search) if memory is None else memory.start(self.setting.round)
        rng = np.random.default_rng([self.config.seed, self.setting.round, *self.site.site.encode()])

        def draw() -> NDArray[np.int64] | None:
            return None if batch == 0 or batch >= len(rows.y) else rng.permutation(len(rows.y))[:batch]

        steps = self.options.local_steps, request.learning_rate, self.options.natural_step
        after, phi = natural_steps(given, (rows.x, rows.y, latents, before), draw, steps, weight=self.share(request))
        self.remember(UnitState(phi, phi, np.exp(after[SCALES])), request.known, before)
        mean, variance = predict(rows.x, latents, q, phi)
        misfit = float(np.mean((rows.y - mean) ** 2 + variance))
        fit = -0.5 * (np.log(2 * np.pi * phi.noise) + misfit / phi.noise)
        update = {name: given[name] - after[name] for name in after}
        flat = np.array(float(self.is_flat(data, phi)))
        return NaturalGradient(update, float(fit), np.array(float(memory is None)), flat)

    def pseudo_sum(self, request: Broadcast) -> PseudoGradientSum:
        """The same as a summand."""
        return PseudoGradientSum.of(self.train(request), self.share(request), self.num_examples)

    def share(self, request: Broadcast) -> float:
        """p_m (Algorithm 2): 1/M, or N_m / Σ N_m."""
        return (self.num_examples if self.options.weights == "examples" else 1) / request.whole

    def is_flat(self, data: UnitData, phi: UnitParameters) -> bool:
        """Whether noise explains nearly all of the signal; the share itself would reveal the unit's noise."""
        return explained_share(data, phi) < self.options.flat_threshold

    def _generator(self) -> torch.Generator:
        entropy = [self.config.seed, self.setting.round, *self.site.site.encode()]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
        return torch.Generator().manual_seed(seed)

    # Prediction.

    def reported(self, request: View) -> UnitParameters | None:
        """φ_m behind the report that counts."""
        memory = self.memory(request.known)
        return None if memory is None else memory.agreed(self.unit(request.latents), request.known)

    def fitted_alone(self, request: View) -> UnitParameters:
        """φ_m fitted to the unit's rows with what is shared as it is."""
        latents, q = request.latents, request.posterior
        phi = fit_alone(self.unit(latents), latents, q, self.search)
        if self.gaussian:
            return phi
        model = from_exact(latents, q, phi, likelihood=self.likelihood)
        return fit_personal(model, torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))

    def function(self, request: View, inputs: Array) -> tuple[Array, Array, UnitParameters]:
        """Mean and variance of f at standardised inputs [N, D], and the parameters that go with them."""
        latents, q, rows = request.latents, request.posterior, (self.rows.x, self.rows.y)
        reported = self.reported(request)
        phi = self.fitted_alone(request) if reported is None else reported
        if self.gaussian and self.options.own_deviation:
            mean, variance, noise = predict_with_deviation(rows, inputs, latents, q, phi)
            return mean, variance, replace(phi, noise=noise)
        short = latents.scales.shape == (1, 1) and len(self.rows.y) <= MOST_ROWS
        if reported is None and self.gaussian and self.search.convolved and short:
            mean, variance, noise = predict_joining(rows, inputs, latents, q)
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
        """The unit as a report shows it; a real unit refuses."""
        return self.drawn(request.view, request.grid)

    # Baselines.

    def pooled(self, request: Nothing) -> Said:
        """The same multi-output model with the rows of all units in one place; only a simulation can do that."""
        if not self.gaussian:
            return super().pooled(request)
        units, W = self.units(), self.setting.constants[PSEUDO_INPUTS]
        rows, most = [(part.x, part.y) for part in units], self.config.baselines.max_evaluations
        start = starting_point(rows, W, multiples=self.options.multiples, options=self.search)
        return self._compared(units, fit_pooled(rows, [start], max_evaluations=most))

    def units(self) -> list[SiteData]:
        """The rows of all simulated units."""
        self._require_simulated("does not see the rows of other sites")
        return [site.encode(self.preparation) for site in load_all_sites(self.config, self.site.partitions)]

    def _compared(self, units: list[SiteData], fit: MultiOutputFit) -> Said:
        """Scores of a multi-output GP fitted in one place."""
        parts = [predict(u.x_test, fit.latents, fit.posterior, phi) for u, phi in zip(units, fit.units, strict=True)]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(parts, fit.units, strict=True)])
        mean, target = np.concatenate([m for m, _ in parts]), np.concatenate([part.y_test for part in units])
        return self.compared(Baseline(mean, variance, target, self.config.baselines.max_evaluations))


class MultiOutputReferenceClient(FedMGPClient):
    """The one site that fits ModularGP or FedPoly for all."""

    def units(self) -> list[SiteData]:
        """Rows of all simulated units; both methods are regressions."""
        if not self.gaussian:
            raise ConfigError(f"method `{self.config.method}` needs `model.likelihood` = 'gaussian'")
        return super().units()

    def grid(self, low: Array, high: Array) -> Array:
        """At most ``model.num-inducing`` pseudo-inputs over a box and a twentieth beyond it at each end."""
        side = grid_side(self.config.model.num_inducing, len(low))
        beyond = 0.05 * (high - low)
        axes = [np.linspace(a, b, side) for a, b in zip(low - beyond, high + beyond, strict=True)]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(low))

    def modular(self, request: Nothing) -> Said:
        """Modules of all units at the same pseudo-inputs, joined by a multi-output GP."""
        del request
        units = self.units()
        rows, x = [(part.x, part.y) for part in units], np.concatenate([part.x for part in units])
        W, most = self.grid(x.min(axis=0), x.max(axis=0)), self.config.baselines.max_evaluations
        start = starting_point(rows, W, multiples=self.options.multiples, options=self.search)
        return self._compared(units, fit_modular(rows, W, start, max_evaluations=most))

    def polynomial(self, request: Nothing) -> Said:
        """FedPoly; its intervals take the spread of the unit's residuals, as the method itself has none."""
        del request
        units = self.units()
        x = np.concatenate([part.x for part in units])
        fit = fit_polynomial([(part.x, part.y) for part in units], x.min(axis=0), x.max(axis=0))
        mean = np.concatenate([fit.predict(m, part.x_test) for m, part in enumerate(units)])
        spread = [np.mean((fit.predict(m, part.x) - part.y) ** 2) for m, part in enumerate(units)]
        variance = np.concatenate([np.full(len(part.y_test), v) for part, v in zip(units, spread, strict=True)])
        return self.compared(Baseline(mean, variance, np.concatenate([part.y_test for part in units]), 1))
