"""The unit's part of FedMGP: statistics, pseudo-gradients, and prediction with what only the unit knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedgp_flower.clients import baselines
from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request
from fedgp_flower.clients.fedmgp_memory import Memory
from fedgp_flower.clients.fedmgp_scores import scores_of
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.latent import INDUCING, Latents, Posterior, from_parameters, from_wire, moves_from_wire, pack
from fedgp_flower.metrics import Scores
from fedgp_flower.models.exact_q import (
    SearchOptions,
    UnitData,
    UnitParameters,
    UnitState,
    explained_share,
    maximise,
    predict,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.models.multi_output import (
    LocalSteps,
    fit_personal,
    from_exact,
    local_update,
    shared_parameters,
    to_exact,
    unit_model,
)
from fedgp_flower.models.multi_output import load as load_parameters
from fedgp_flower.models.multi_output_baselines import fit_pooled, starting_point
from fedgp_flower.models.multi_output_likelihoods import Kind, moments, regression_targets
from fedgp_flower.models.own_deviation import predict_with_deviation
from fedgp_flower.shapes import Array, NamedArrays

ALONE_SWEEPS = 20
"""Sweeps of a unit that fits φ_m to a g it took no part in."""
MOST_ROWS_SHOWN = 250


class FedMGPClient(GPClient):
    """One unit: shared latent functions from the server, smoothing, amplitudes and noise of its own."""

    @property
    def options(self) -> dict[str, Any]:
        """The table ``fedmgp.*``; its class belongs to the Strategy."""
        return self.config.options.model_dump()

    @property
    def search(self) -> SearchOptions:
        """How the unit improves its own parameters."""
        return SearchOptions(convolved=self.options["covariance"] == "convolved")

    @property
    def likelihood(self) -> Kind:
        """What observations are like."""
        return self.config.model.likelihood

    @property
    def gaussian(self) -> bool:
        """Whether targets are numbers with Gaussian noise."""
        return self.likelihood == "gaussian"

    def shared(self, request: Request) -> tuple[Latents, Posterior]:
        """Latent functions and q(u) of the request."""
        return from_wire(request.arrays, self.config.model.jitter)

    def unit(self, request: Request, latents: Latents) -> UnitData:
        """The unit's rows as seen from the pseudo-inputs, with targets that a regression can start from."""
        data = self.data(request)
        return UnitData.build(data.x, regression_targets(self.likelihood, data.y), latents.inducing)

    def memory(self, request: Request) -> Memory | None:
        """What the unit remembers of the start that the request is about."""
        return Memory.of(self.state.arrays, int(request.arrays["own.start"]))

    def remember(self, request: Request, unit: UnitState) -> int:
        """Keep a state beside those of other starts; returns its number."""
        memory = Memory(unit, self.state.updates + 1, int(request.arrays["own.updates"]))
        self.state.replace({**self.state.arrays, **memory.to_arrays(int(request.arrays["own.start"]))})
        return memory.number

    def on_query_start(self, request: Request) -> Reply:
        """Statistics at the unit's starting parameters: one unit's first look at g."""
        latents, _ = self.shared(request)
        data = self.unit(request, latents)
        own = starting_parameters(data, latents, self.search)
        return Reply(pack([statistics(data, latents, own)]), len(data.y))

    def on_train_exact(self, request: Request) -> Reply:
        """One exact round: improve φ_m with q fixed, answer with statistics at every trial move."""
        latents, q = self.shared(request)
        data, memory = self.unit(request, latents), self.memory(request)
        phi = None if memory is None else memory.agreed(data, request.arrays)
        unit, told = respond(data, latents, q, moves_from_wire(request.arrays, "moves"), phi, self.search)
        number = self.remember(request, unit)
        flat = self.is_flat(data, unit.proposed)
        return Reply(pack(told), len(data.y), {"state-updates": number, "fresh": float(phi is None), "flat": flat})

    def on_train(self, request: Request) -> Reply:
        """Local steps E of Algorithm 2 on (θ, φ_m); the pseudo-gradient Δ_m = θ − θ_m goes back."""
        theta = {n.removeprefix("theta."): np.array(a) for n, a in request.arrays.items() if n.startswith("theta.")}
        latents, q = from_parameters(theta, request.arrays["latents.inducing"], self.config.model.jitter)
        memory, data = self.memory(request), self.data(request)
        phi = self.alone(self.unit(request, latents), latents, q) if memory is None else memory.unit.proposed
        model = unit_model(latents, phi, likelihood=self.likelihood, learn_inducing=INDUCING in theta)
        load_parameters(shared_parameters(model), theta)
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        own, optimizer = self.options, self.config.optimizer
        steps = LocalSteps(
            own["local_steps"],
            float(request.arrays["rate"]),
            "sgd" if optimizer.name == "sgd" else "adam",
            optimizer.batch_size,
        )
        generator = torch.Generator().manual_seed(self._seed(request.round))
        share = float(request.arrays["own.share"])
        update = local_update(model, x, y, steps, weight=share, generator=generator)
        with torch.no_grad():
            fit = float(model.expected_log_likelihood(x, y).mean())
        if not np.isfinite(fit):
            raise NumericsError("local steps diverged: the fit is not finite. Lower `optimizer.learning-rate`.")
        latents, phi = to_exact(model)
        number = self.remember(request, UnitState(phi, phi, latents.scales))
        metrics: dict[str, float | list[float]] = {"state-updates": number, "fresh": float(memory is None)}
        metrics["log-likelihood"] = fit
        if self.gaussian:
            metrics["flat"] = self.is_flat(self.unit(request, latents), phi)
        return Reply({f"update.{name}": array for name, array in update.items()}, len(data.y), metrics)

    def is_flat(self, data: UnitData, phi: UnitParameters) -> float:
        """1 where noise explains nearly all of the unit's signal; the share itself would tell the unit's noise."""
        return float(explained_share(data, phi) < self.options["flat_threshold"])

    def _seed(self, server_round: int) -> int:
        entropy = [self.config.seed, server_round, *self.site.site.encode()]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

    def alone(self, data: UnitData, latents: Latents, q: Posterior) -> UnitParameters:
        """φ_m fitted with g as it is: what a unit that joins late does, and nothing of it goes back."""
        phi = starting_parameters(data, latents, self.search)
        for sweep in range(ALONE_SWEEPS):
            phi = maximise(data, latents, q, phi, self.search, coarse=sweep == 0)
        return phi

    def parameters(self, request: Request, latents: Latents, q: Posterior) -> UnitParameters:
        """φ_m behind the server's last report of this unit, or fitted alone where there is none."""
        data, memory = self.unit(request, latents), self.memory(request)
        known = None if memory is None else memory.agreed(data, request.arrays)
        if known is not None:
            return known
        phi = self.alone(data, latents, q)
        if self.gaussian:
            return phi
        rows = self.data(request)
        model = from_exact(latents, q, phi, likelihood=self.likelihood)
        return fit_personal(model, torch.from_numpy(rows.x), torch.from_numpy(rows.y))

    def latent(self, request: Request, inputs: Array) -> tuple[Array, Array, UnitParameters]:
        """Mean and variance of f at standardised inputs [N, D], and the parameters that go with them."""
        latents, q = self.shared(request)
        phi = self.parameters(request, latents, q)
        if self.gaussian and self.options["own_deviation"]:
            data = self.data(request)
            mean, variance, noise = predict_with_deviation((data.x, data.y), inputs, latents, q, phi)
            return mean, variance, replace(phi, noise=noise)
        return *predict(inputs, latents, q, phi), phi

    def predict(self, request: Request, inputs: Array) -> Prediction:
        """Personalised prediction of an observation (paper, Eq. 16); for classes, of the label."""
        mean, variance, phi = self.latent(request, inputs)
        if self.gaussian:
            return Prediction(mean, variance + phi.noise)
        return Prediction(*moments(self.likelihood, mean, variance, phi))

    def score(self, request: Request) -> Scores:
        """Scores of held-out rows, in the original units of the target."""
        if self.gaussian:
            return super().score(request)
        data = self.data(request)
        mean, variance, phi = self.latent(request, data.x_test)
        return scores_of(self.likelihood, request, (mean, variance), phi, data.y_test)

    def on_query_predictions(self, request: Request) -> Reply:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        reply = super().on_query_predictions(request)
        if self.likelihood != "bernoulli":
            return reply
        kept = {n: a for n, a in reply.arrays.items() if n in {"prediction.target", "prediction.input"}}
        return Reply({"prediction.probability": reply.arrays["prediction.mean"], **kept}, reply.num_examples)

    def on_query_curve(self, request: Request) -> Reply:
        """Predictions along the one input with and without the other units, and rows; a real site refuses."""
        if not self.site.simulated:
            raise ProtocolError("a real site does not send rows")
        grid, data = np.array(request.arrays["grid"]), self.data(request)
        shown = self.predict(request, grid)
        own = baselines.local_only((data.x, data.y, grid, np.zeros(len(grid))), self.config)
        scale, mean = float(request.arrays["target.scale"]), float(request.arrays["target.mean"])
        every = max(1, -(-len(data.y) // MOST_ROWS_SHOWN))
        x = data.x[::every, 0] * request.arrays["input.scale"][0] + request.arrays["input.mean"][0]
        arrays: NamedArrays = {
            "curve.mean": shown.mean * scale + mean,
            "curve.sd": np.sqrt(shown.variance) * scale,
            "curve.alone.mean": own.mean * scale + mean,
            "curve.alone.sd": np.sqrt(own.variance) * scale,
            "curve.x": x,
            "curve.y": data.y[::every] * scale + mean,
        }
        return Reply(arrays, len(data.y))

    def on_query_local_only(self, request: Request) -> Reply:
        """A GP of the unit's own rows, fitted only where there is a held-out row to score."""
        if len(self.data(request).y_test):
            return super().on_query_local_only(request)
        none = np.empty(0)
        return self._baseline(request, baselines.Baseline(none, none, none, 0))

    def on_query_pooled(self, request: Request) -> Reply:
        """The same multi-output model with the rows of all units in one place; only a simulation can do that."""
        if not self.gaussian:
            return super().on_query_pooled(request)
        if not self.site.simulated:
            raise ProtocolError("a real site does not see the rows of other sites")
        preparation = Preparation.from_wire(request.arrays, str(request.settings["schema"]))
        units = [site.encode(preparation) for site in load_all_sites(self.config, self.site.partitions)]
        W, own = np.array(request.arrays["pooled.inducing"]), self.options
        rows = [(part.x, part.y) for part in units]
        scales = [own["start_multiple"] * own["start_ratio"] ** i for i in range(own["latents"])]
        start = starting_point(rows, W, multiples=scales, options=self.search)
        fit = fit_pooled(rows, [start], max_evaluations=self.config.baselines.max_evaluations)
        told = [
            predict(part.x_test, fit.latents, fit.posterior, phi) for part, phi in zip(units, fit.units, strict=True)
        ]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(told, fit.units, strict=True)])
        mean, target = np.concatenate([m for m, _ in told]), np.concatenate([part.y_test for part in units])
        return self._baseline(
            request, baselines.Baseline(mean, variance, target, self.config.baselines.max_evaluations)
        )
