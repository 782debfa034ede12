"""The site's part of partitioned variational inference: update a factor against the others, predict, report leakage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request, flat_scores, to_original_units
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.metrics import Scores, bernoulli_scores, gaussian_scores, mixture_scores
from fedgp_flower.models import pvi_arrays as wire
from fedgp_flower.models.factors import PseudoObservations
from fedgp_flower.models.hierarchical import Data, Draws, Latents, Mixture, Point, SparseModel, predict
from fedgp_flower.models.likelihoods import build_point_likelihood
from fedgp_flower.models.pseudo_points import distance_report, membership_auc
from fedgp_flower.models.pvi_bound import free_energy_parts
from fedgp_flower.models.pvi_local import (
    LocalSettings,
    Outcome,
    Situation,
    alone,
    distil_only,
    local_update,
    refit_all,
)
from fedgp_flower.models.pvi_predict import prediction_draws, random_source
from fedgp_flower.shapes import Array, NamedArrays

logger = logging.getLogger("fedgp")


class PVIClient(GPClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    def settings(self) -> LocalSettings:
        """The site's part of the table ``pvi.*``."""
        return LocalSettings.of(self.config.options, self.config.optimizer.batch_size)

    def initial_arrays(self, num_inputs: int) -> NamedArrays:
        """β at the initial values of the configuration."""
        return {"hyper.start": wire.sparse_model(self.config.model, num_inputs).initial_hyper().numpy()}

    def on_train(self, request: Request) -> Reply:
        """A visit: one local update (Ashman et al. 2022, Algorithm 1, step 2)."""
        site = self.data(request)
        problem = self._problem(request, site)
        return self._reply(local_update(*problem), problem[2], site)

    def on_train_distil(self, request: Request) -> Reply:
        """Parallel replay: this site's pseudo-observations, at the q(Z), q(β) of all."""
        site = self.data(request)
        problem = self._problem(request, site)
        return self._reply(distil_only(*problem), problem[2], site, latents=False)

    def on_train_refit(self, request: Request) -> Reply:
        """Parallel replay: q(Z), q(β) from the pseudo-observations of all sites; no row of this one is used."""
        site = self.data(request)
        model, _, told, settings, generator = self._problem(request, site)
        outcome = refit_all(model, told, settings, generator)
        return Reply(self._moved(outcome, told), len(site.x), _figures(outcome))

    def on_query_free_energy(self, request: Request) -> Reply:
        """This site's terms of the global free energy."""
        site = self.data(request)
        model = self._model(request)
        factors = wire.factors_of(request.arrays, "others")
        parts = free_energy_parts(model, self._draws(request, model), factors, _rows(site))
        return Reply({}, len(site.x), {"fit": parts.fit, "divergence": parts.divergence})

    def mixture(self, request: Request, inputs: Array, targets: Array | None = None) -> Mixture:
        """The predictive mixture over draws of (Z, β), the same draws at every site."""
        model = self._model(request)
        factors = wire.factors_of(request.arrays, "others")
        y = None if targets is None else torch.from_numpy(targets)
        return predict(model, self._draws(request, model), factors, torch.from_numpy(inputs), y)

    def predict(self, request: Request, inputs: Array) -> Prediction:
        """Mean and variance of the mixture; for classes, of the label."""
        found = self.mixture(request, inputs)
        return Prediction(found.mean().numpy(), found.variance().numpy())

    def score(self, request: Request) -> Scores:
        """Scores of the mixture itself."""
        site = self.data(request)
        return self._scores(request, self.mixture(request, site.x_test, site.y_test), site.y_test)

    def _scores(self, request: Request, found: Mixture, target: Array) -> Scores:
        name = self.config.model.likelihood
        if name == "bernoulli":
            return bernoulli_scores(found.mean().clamp(0.0, 1.0).numpy(), target)
        location, scale = request.arrays["target.mean"], request.arrays["target.scale"]
        if name == "gaussian":
            means, sds = found.means.numpy() * scale + location, found.variances.sqrt().numpy() * scale
            return mixture_scores(means, sds, target * scale + location)
        moments = Prediction(found.mean().numpy(), found.variance().numpy())
        rough = gaussian_scores(*to_original_units(request, moments, target))
        nll = -float(found.log_density().sum()) + len(target) * float(np.log(scale))
        return Scores(rough.sums | {"nll": nll}, rough.arrays)

    def on_query_local_only(self, request: Request) -> Reply:
        """A GP of this site's rows; one of the configured likelihood where that is not Gaussian."""
        if self.config.model.likelihood == "gaussian":
            return super().on_query_local_only(request)
        return self._alone(request, [self.data(request)])

    def on_query_pooled(self, request: Request) -> Reply:
        """Simulation only: a GP of the rows of all sites; one of the configured likelihood where it is not Gaussian."""
        if self.config.model.likelihood == "gaussian" or not self.site.simulated:
            return super().on_query_pooled(request)
        preparation = Preparation.from_wire(request.arrays, str(request.settings["schema"]))
        every = [site.encode(preparation) for site in load_all_sites(self.config, self.site.partitions)]
        return self._alone(request, every)

    def _alone(self, request: Request, sites: Sequence[SiteData]) -> Reply:
        x, y = (torch.from_numpy(np.concatenate([getattr(site, name) for site in sites])) for name in ("x", "y"))
        inputs, target = (np.concatenate([getattr(site, name) for site in sites]) for name in ("x_test", "y_test"))
        model, size = self._model(request), self.config.model.num_inducing
        generator = random_source(self.config.seed, request.phase, self.site.site)
        outcome = alone(model, Data(x, y), self.settings(), size, generator)
        number = _options(self.config).prediction_samples
        draws = prediction_draws(outcome.latents, model, num_samples=number, seed=self.config.seed)
        found = predict(model, draws, [outcome.own], torch.from_numpy(inputs), torch.from_numpy(target))
        scores = self._scores(request, found, target)
        return Reply({}, len(target), {**flat_scores(scores), "evaluations": float(outcome.evaluations)})

    def on_query_predictions(self, request: Request) -> Reply:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        reply = super().on_query_predictions(request)
        if self.config.model.likelihood != "bernoulli":
            return reply
        kept = {n: a for n, a in reply.arrays.items() if n in {"prediction.target", "prediction.input"}}
        return Reply({"prediction.probability": reply.arrays["prediction.mean"], **kept}, reply.num_examples)

    def _problem(
        self, request: Request, site: SiteData
    ) -> tuple[SparseModel, Data, Situation, LocalSettings, torch.Generator]:
        arrays, own = request.arrays, _options(self.config)
        latents = wire.latents_of(arrays, "q")
        told = Situation(
            latents,
            latents if own.replays or own.linear else wire.latents_of(arrays, "cavity"),
            wire.factors_of(arrays, "others"),
            next(iter(wire.factors_of(arrays, "own")), None),
            _natural(wire.part(arrays, "context")),
            _natural(wire.part(arrays, "posterior")),
            float(arrays["known"]) if "known" in arrays else 1.0,
        )
        generator = random_source(self.config.seed, request.phase, self.site.site, request.round)
        return self._model(request), _rows(site), told, self.settings(), generator

    def _model(self, request: Request) -> SparseModel:
        return wire.sparse_model(self.config.model, len(request.arrays["input.mean"]))

    def _draws(self, request: Request, model: SparseModel) -> Draws:
        latents, own = wire.latents_of(request.arrays, "q"), _options(self.config)
        return prediction_draws(latents, model, num_samples=own.prediction_samples, seed=self.config.seed)

    def _reply(self, outcome: Outcome, told: Situation, site: SiteData, *, latents: bool = True) -> Reply:
        metrics = _figures(outcome)
        arrays = wire.factor_arrays(outcome.own)
        if isinstance(outcome.own, PseudoObservations):
            metrics |= self._leakage(outcome.own, site)
        if latents:
            arrays |= self._moved(outcome, told)
            metrics |= _change(outcome.latents, told.latents)
        return Reply(arrays, len(site.x), metrics)

    def _moved(self, outcome: Outcome, told: Situation) -> NamedArrays:
        """q(Z), q(β) after a refit; else this site's factors q_k / cavity of them, and a Z that is being averaged."""
        settings = self.settings()
        arrays: NamedArrays = {}
        for name in ("inducing", "hyper"):
            fixed = settings.fixed_inducing if name == "inducing" else settings.fixed_hyper
            latent, cavity = getattr(outcome.latents, name), getattr(told.cavity, name)
            if settings.local_update == "replay":
                arrays |= {} if fixed else wire.named(name, wire.latent_arrays(latent))
            elif not isinstance(latent, Point):
                arrays |= wire.named(name, (latent / cavity).to_arrays())
            elif name == "inducing" and settings.average_inducing:
                arrays |= wire.named(name, wire.latent_arrays(latent))
        return arrays

    def _leakage(self, own: PseudoObservations, site: SiteData) -> dict[str, float]:
        """How near the pseudo-observations are to this site's rows, told in its log before they leave.

        Targets are compared as values of f, which is what pseudo-observations hold.
        """
        likelihood = build_point_likelihood(self.config.model.likelihood)

        def seen(x: Array, y: Array) -> Data:
            return Data(torch.from_numpy(x), likelihood.as_function(torch.from_numpy(y))[0])

        rows = seen(site.x, site.y)
        report = distance_report(own, rows)
        low, median, _ = report.quantiles
        found = {"near": report.share_near, "low": low, "median": median}
        logger.info(
            "site %s: %d pseudo-observations of %d rows; nearest row at %.2f (5 %%) and %.2f (median) row spacings",
            self.site.site,
            len(own.targets),
            len(site.x),
            low,
            median,
        )
        if self.site.simulated and len(site.x_test):
            found["auc"] = membership_auc(own, rows, seen(site.x_test, site.y_test))
        return {f"leakage.{name}": value for name, value in found.items()}


def _figures(outcome: Outcome) -> dict[str, float]:
    """What an update says of itself: its local free energy, and what its optimisers had to do for it."""
    return {
        "objective": outcome.objective,
        "evaluations": float(outcome.evaluations),
        "counts.rejected": float(outcome.rejected),
        "counts.halvings": float(outcome.halvings),
    }


def _change(new: Latents, old: Latents) -> dict[str, float]:
    """How far a visit moved q(Z) and q(β), in nats; unknown where one of them was a point."""
    pairs = [(new.inducing, old.inducing), (new.hyper, old.hyper)]
    both = [(n, o) for n, o in pairs if isinstance(n, DiagonalGaussian) and isinstance(o, DiagonalGaussian)]
    return {"moved": sum(float(n.kl(o)) for n, o in both)} if both else {}


def _rows(site: SiteData) -> Data:
    return Data(torch.from_numpy(site.x), torch.from_numpy(site.y))


def _natural(arrays: dict[str, Any]) -> NaturalGaussian | None:
    return NaturalGaussian.from_arrays(arrays) if arrays else None


def _options(config: RunConfig) -> Any:
    return config.options
