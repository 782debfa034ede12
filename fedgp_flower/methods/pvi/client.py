"""The site's half of partitioned variational inference: refine a factor against the others, predict, report leakage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.clients.numpy_client import Prediction, Said, SiteClient, scored
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.messages import kind_of
from fedgp_flower.methods.messages import Nothing
from fedgp_flower.methods.pvi.factors import Factor, PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import (
    Data,
    Draws,
    Latents,
    Mixture,
    Point,
    SparseModel,
    free_energy_parts,
    predict,
    sparse_model,
)
from fedgp_flower.methods.pvi.learner import UPDATES, Site, Situation, Update, alone, distilled, refitted
from fedgp_flower.methods.pvi.messages import (
    LATENTS,
    Distilled,
    Factors,
    FreeEnergyShare,
    Leakage,
    Marginal,
    Predictive,
    Refined,
    Refitted,
    Visit,
)
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.posterior import prediction_draws, random_source
from fedgp_flower.methods.pvi.pseudo_points import distance_report, membership_auc
from fedgp_flower.run.metrics import Scores, bernoulli_scores, gaussian_scores
from fedgp_flower.typing import Array, NamedArrays

logger = logging.getLogger("fedgp")

A = TypeVar("A", bound=Refined)


class PVIClient(SiteClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    @property
    def options(self) -> PVIOptions:
        """The table ``pvi.*``."""
        options = self.config.options
        assert isinstance(options, PVIOptions)
        return options

    @cached_property
    def model(self) -> SparseModel:
        """Kernel and likelihood of the configuration."""
        return sparse_model(self.config.model, self.rows.x.shape[1])

    @cached_property
    def data(self) -> Data:
        """The site's standardised training rows."""
        return Data(*self.tensors)

    def start(self, num_inputs: int) -> NamedArrays:
        """β at the initial values of the configuration."""
        return {"hyper": sparse_model(self.config.model, num_inputs).initial_hyper().numpy()}

    # Visits.

    def train(self, request: Visit) -> Refined:
        """One local update (Ashman et al. 2022, Algorithm 1, step 2)."""
        return self._answer(Refined, UPDATES[self.options.local_update], self._given(request))

    def distil(self, request: Visit) -> Distilled:
        """Parallel replay: this site's pseudo-observations, at the q(Z), q(β) of all."""
        return self._answer(Distilled, distilled, self._given(request))

    def refit(self, request: Predictive) -> Refitted:
        """Parallel replay: q(Z), q(β) from the pseudo-observations of all sites; no row of this one is used."""
        latents = request.q.latents()
        return self._answer(Refitted, refitted, Situation(latents, latents, self._factors(request.factors)))

    def _given(self, request: Visit) -> Situation:
        latents, context, posterior = request.q.latents(), request.context, request.posterior
        cavity = (context[n].diagonal() if n in context else getattr(latents, n) for n in LATENTS)
        return Situation(
            latents,
            Latents(*cavity),
            self._factors(request.others),
            None if request.own is None else self._factors(request.own)[0],
            context["whitened"].full() if "whitened" in context else None,
            posterior["whitened"].full() if "whitened" in posterior else None,
            request.known,
        )

    def _factors(self, factors: Factors) -> list[Factor]:
        return factors.factors(tied=self.options.tied)

    def _answer(self, kind: type[A], update: Callable[[Site, Situation], Update], given: Situation) -> A:
        source = random_source(self.config.seed, kind_of(kind), self.site.site, self.setting.round)
        done = update(Site(self.model, self.data, self.options, source, self.config.optimizer.batch_size), given)
        own = Factors() if done.own is None else Factors.of(done.own)
        return kind(
            done.objective,
            done.evaluations,
            done.rejected,
            done.halvings,
            points=next(iter(own.points), None),
            values=own.values,
            whitened=own.whitened,
            **{name: self._part(name, done, given) for name in LATENTS},
            leakage=self._leakage(done.own) if isinstance(done.own, PseudoObservations) else None,
            moved=None if done.latents is None else change(done.latents, given.latents),
        )

    def _part(self, name: str, done: Update, given: Situation) -> Marginal | None:
        """A factor q_k / cavity of a latent in the product; a latent outside of it itself, unless it is fixed."""
        fixed = getattr(self.options, name) == "fixed"
        if done.latents is None or fixed:
            return None
        latent, cavity = getattr(done.latents, name), getattr(given.cavity, name)
        return Marginal.of(latent / cavity if name in self.options.product else latent)

    def _leakage(self, own: PseudoObservations) -> Leakage:
        """How near the pseudo-observations are to this site's rows, written to its log before they leave.

        Targets are compared as values of f, which is what pseudo-observations hold.
        """
        likelihood = build_point_likelihood(self.config.model.likelihood)

        def seen(x: Array, y: Array) -> Data:
            return Data(torch.from_numpy(x), likelihood.as_function(torch.from_numpy(y))[0])

        site, auc = self.rows, None
        rows = seen(site.x, site.y)
        report = distance_report(own, rows)
        low, median, _ = report.quantiles
        logger.info(
            "site %s: %d pseudo-observations of %d rows; nearest row at %.2f (5 %%) and %.2f (median) row spacings",
            self.site.site,
            len(own.targets),
            len(site.x),
            low,
            median,
        )
        if self.site.simulated and len(site.x_test):
            auc = membership_auc(own, rows, seen(site.x_test, site.y_test))
        return Leakage(report.share_near, low, median, auc)

    # What is asked at the posterior of all.

    def free_energy(self, request: Predictive) -> FreeEnergyShare:
        """This site's terms of the global free energy."""
        factors = self._factors(request.factors)
        return FreeEnergyShare(*free_energy_parts(self.model, self._draws(request.q.latents()), factors, self.data))

    def _draws(self, latents: Latents) -> Draws:
        number = self.options.prediction_samples
        return prediction_draws(latents, self.model, num_samples=number, seed=self.config.seed)

    def mixture(self, request: Predictive, inputs: Array, targets: Array | None = None) -> Mixture:
        """The predictive mixture over draws of (Z, β), the same draws at every site."""
        factors, y = self._factors(request.factors), None if targets is None else torch.from_numpy(targets)
        return predict(self.model, self._draws(request.q.latents()), factors, torch.from_numpy(inputs), y)

    def predict(self, request: Predictive, inputs: Array) -> Prediction:
        """Mean and variance of the mixture; for classes, of the label."""
        mixture = self.mixture(request, inputs)
        return Prediction(mixture.mean().numpy(), mixture.variance().numpy())

    def score(self, request: Predictive) -> Scores:
        """Scores of the mixture itself."""
        return self._scores(self.mixture(request, self.rows.x_test, self.rows.y_test), self.rows.y_test)

    def _scores(self, mixture: Mixture, target: Array) -> Scores:
        name = self.config.model.likelihood
        if name == "bernoulli":
            return bernoulli_scores(mixture.mean().clamp(0.0, 1.0).numpy(), target)
        if name == "gaussian":
            return self.mixture_scores(mixture.means.numpy(), mixture.variances.numpy(), target)
        moments = Prediction(mixture.mean().numpy(), mixture.variance().numpy())
        rough = gaussian_scores(*self.original(moments, target))
        nll = -float(mixture.log_density().sum()) + len(target) * float(np.log(self.preparation.target_scale))
        return Scores(rough.sums | {"nll": nll}, rough.arrays)

    def shown(self, request: Predictive) -> NamedArrays:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        arrays = super().shown(request)
        if self.config.model.likelihood != "bernoulli":
            return arrays
        kept = {name: array for name, array in arrays.items() if name in {"prediction.target", "prediction.input"}}
        return {"prediction.probability": arrays["prediction.mean"], **kept}

    # Baselines of likelihoods that are not Gaussian.

    def own_scores(self) -> tuple[Scores, int]:
        """Those of a GP of this site's rows; one of the configured likelihood where that is not Gaussian."""
        if self.config.model.likelihood == "gaussian":
            return super().own_scores()
        return self._alone("query.local_only", [self.rows])

    def pooled(self, request: Nothing) -> Said:
        """Simulation only: a GP of the rows of all sites; one of the configured likelihood where it is not Gaussian."""
        if self.config.model.likelihood == "gaussian" or not self.site.simulated:
            return super().pooled(request)
        every = load_all_sites(self.config, self.site.partitions)
        scores, evaluations = self._alone("query.pooled", [site.encode(self.preparation) for site in every])
        return scored(scores, evaluations=evaluations)

    def _alone(self, kind: str, sites: Sequence[SiteData]) -> tuple[Scores, int]:
        parts: list[ndarray] = [
            np.concatenate([getattr(site, name) for site in sites]) for name in ("x", "y", "x_test", "y_test")
        ]
        x, y, inputs, target = map(torch.from_numpy, parts)
        source = random_source(self.config.seed, kind, self.site.site)
        update = alone(Site(self.model, Data(x, y), self.options, source), self.config.model.num_inducing)
        assert update.own is not None
        assert update.latents is not None
        mixture = predict(self.model, self._draws(update.latents), [update.own], inputs, target)
        return self._scores(mixture, parts[-1]), update.evaluations


def change(new: Latents, old: Latents) -> float | None:
    """How far a visit moved q(Z) and q(β), in nats; None where both were points."""
    pairs = [(new.inducing, old.inducing), (new.hyper, old.hyper)]
    both = [(n, o) for n, o in pairs if not isinstance(n, Point) and not isinstance(o, Point)]
    return sum(float(n.kl(o)) for n, o in both) if both else None
