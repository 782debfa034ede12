"""The site's part of SFVI and SFVI-Avg. Whatever is about Z_Lk stays in the site's state; see :class:`Memory`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request, flat_scores, to_original_units
from fedgp_flower.clients.counts import count_scores
from fedgp_flower.clients.sfvi_rows import Rows, refuse_classes, rows_of
from fedgp_flower.clients.standing import LACKS, PREFIX, carried, completed
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import NumericsError
from fedgp_flower.metrics import Scores, bernoulli_scores, class_scores, gaussian_scores
from fedgp_flower.models.logistic_mixed import LogisticMixed
from fedgp_flower.models.structured_choice import Structure, initial_arrays
from fedgp_flower.models.structured_estimators import UNSCALED, likelihood_only, whole_term
from fedgp_flower.models.structured_family import (
    GlobalPosterior,
    LocalFamily,
    initial_amortised,
    initial_global,
    named,
)
from fedgp_flower.models.structured_gp import HierarchicalGP, farthest_points
from fedgp_flower.models.structured_local import Learner, step_local
from fedgp_flower.models.structured_memory import NOW, Memory, Moments, fits, kept, read_around, recalled, subject
from fedgp_flower.models.structured_prediction import global_posterior, moments_at
from fedgp_flower.shapes import Array, NamedArrays

SEED = "seed"
AGAIN = 2**32
"""A site's further steps in a round are numbered so far apart, so that they share no draw with another round."""


class SFVIClient(GPClient):
    """q(Z_Lk | Z_G) of this site, fitted around whatever q(Z_G) and θ the server sends."""

    @property
    def options(self) -> Any:
        """The table ``sfvi.*``."""
        return self.config.options

    @property
    def structure(self) -> Structure:
        """Which model it is."""
        return Structure.of(self.options.model_dump())

    def answer(self, request: Request) -> Reply:
        """Answer a message, with what was sent once read into it; a site that has lost that says so."""
        whole = completed(request, self.state.arrays)
        if whole is None:
            return Reply(metrics={LACKS: 1.0})
        told = carried(request)
        if told:
            self.state.replace({**self.state.arrays, **told})
        return super().answer(whole)

    def on_query_model(self, request: Request) -> Reply:
        """θ and the prior of Z_G at the start: the same at every site, from the configuration alone."""
        rows = self.rows(request, self.data(request).x)
        model = self.structure.build(self.config.model, rows.features.shape[1])
        return Reply(initial_arrays(model), len(rows.features))

    def on_train_gradient(self, request: Request) -> Reply:
        """SFVI: the gradient with respect to θ and η_G, and a step of the site's own q (paper, Algorithm 1)."""
        learner, q_global = self.learner(request), global_posterior(request.arrays)
        rate = float(request.settings["learning-rate"])
        q_local, moments, fresh = self.recall(request, learner, q_global)
        noise = request.arrays.get("noise.global")
        drawn = None if noise is None else torch.from_numpy(noise)
        for again in range(self.options.own_steps):
            found = learner.gradient(q_global, q_local, drawn, request.round + again * AGAIN)
            q_local, moments = step_local(q_local, found, moments, rate)
        sent = {f"theta.{name}": value.numpy() for name, value in found.theta.items()}
        sent |= {f"q.{name}": value.numpy() for name, value in found.eta.items()}
        about = subject(learner.site, q_local)
        self.remember(Memory(request.round, False, about, q_global.mean, named(q_local), moments), sent, found.value)
        return Reply(sent, len(learner.site.targets), self.figures(found.value, fresh))

    def on_train_average(self, request: Request) -> Reply:
        """SFVI-Avg: steps on θ, η_G and the site's own q; the first two are sent (paper, Algorithm 2)."""
        learner, q_global = self.learner(request), global_posterior(request.arrays)
        rate, steps = float(request.settings["learning-rate"]), int(self.options.local_steps)
        q_local, moments, fresh = self.recall(request, learner, q_global)
        count = len(learner.site.targets)
        ratio = float(request.settings["total-rows"]) / count
        whole = self.options.scaling == "whole"
        scaling, factor = (whole_term(ratio), ratio) if whole else (likelihood_only(ratio), 1.0)
        start = q_global, q_local, moments.scaled("local.", factor) if self.options.keep_moments else Moments()
        end = learner.travel(start, scaling, first_step=request.round * steps, rates=[rate] * steps)
        moments = end.moments.scaled("local.", 1 / factor)
        sent = {f"theta.{name}": value.detach().numpy() for name, value in learner.model.theta().items()}
        sent |= {f"q.{name}": value.numpy() for name, value in named(end.q_global).items()}
        about = subject(learner.site, end.q_local)
        self.remember(
            Memory(request.round, True, about, end.q_global.mean, named(end.q_local), moments), sent, end.value
        )
        return Reply(sent, count, self.figures(end.value, fresh))

    def figures(self, value: float, fresh: bool) -> Mapping[str, float | list[float]]:
        """What a reply says besides its arrays."""
        return {"objective": value, "fresh": float(fresh)}

    def learner(self, request: Request) -> Learner:
        """The model at the θ of the request, over this site's rows."""
        data = self.data(request)
        rows = self.rows(request, data.x)
        model = self.structure.at(self.config.model, rows.features.shape[1], request.arrays)
        site = self.structure.deal(model, rows.features, torch.from_numpy(data.y), rows.groups, self.key)
        if self.structure.model == "multinomial":
            refuse_classes(data.y, self.structure.classes)
        return Learner(model, site, self.seed, self.key, self.options.samples, self.options.importance_samples)

    def rows(self, request: Request, inputs: Array) -> Rows:
        """Encoded inputs without the unit column, and its values in original units."""
        column = self.options.unit_column if self.structure.model == "logistic-mixed" else None
        return rows_of(Preparation.from_wire(request.arrays, str(request.settings["schema"])), inputs, column)

    @property
    def key(self) -> int:
        """A number of this site, for draws that no other site shares."""
        return int.from_bytes(hashlib.sha256(self.site.site.encode()).digest()[:7], "big")

    @property
    def seed(self) -> int:
        """Of the site's draws: in a simulation the run's, so that it can be repeated; a real site keeps its own."""
        if self.site.simulated:
            return self.config.seed
        if SEED not in self.state.arrays:
            self.state.arrays[SEED] = np.array(secrets.randbits(62))
        return int(self.state.arrays[SEED])

    def initial(self, learner: Learner) -> LocalFamily:
        """q(Z_Lk | Z_G) before the first step."""
        own = self.options
        if isinstance(learner.model, LogisticMixed) and own.amortised_units:
            return initial_amortised(
                learner.model.summary(learner.site),
                learner.model.local_width(learner.site),
                learner.model.global_size,
                scale=own.initial_local_scale,
                hidden=own.amortised_units,
                coupled=own.coupling,
                generator=torch.Generator().manual_seed(learner.seed % 2**63),
            )
        return learner.model.initial_local(
            learner.site,
            scale=own.initial_local_scale,
            coupled=own.coupling,
            triangular=own.local_structure == "full",
        )

    def recall(
        self, request: Request, learner: Learner, q_global: GlobalPosterior
    ) -> tuple[LocalFamily, Moments, bool]:
        """q(Z_Lk | Z_G) as the latest round left it, read around the μ_G of the request; and whether it is new.

        A round that is asked for again starts where it started. A site without a memory that fits its rows begins
        anew, and catches up if the others are ahead.
        """
        start = self.initial(learner)
        memory = recalled(self.state.arrays, request.round)
        if memory is None or not fits(memory, learner.site, start):
            if request.round == 1 or learner.model.local_width(learner.site) == 0:
                return start, Moments(), False
            return *learner.caught_up(q_global, start, self.options.catch_up_rates()), True
        return read_around(memory, start, q_global.mean, request.round), memory.moments, False

    def remember(self, memory: Memory, sent: NamedArrays, value: float) -> None:
        """Keep this; the seed of the site's draws stays, and what the server sent once.

        Raises:
            NumericsError: for steps that led to numbers that are not finite; what was kept before stays.
        """
        if not (memory.finite and np.isfinite(value) and all(np.isfinite(array).all() for array in sent.values())):
            raise NumericsError(
                "a step led to numbers that are not finite, so the site stays where it was. Lower `sfvi.learning-rate`?"
            )
        aside = {n: array for n, array in self.state.arrays.items() if n == SEED or n.startswith(PREFIX)}
        self.state.replace({**aside, **kept(self.state.arrays, memory)})

    def local_posterior(self, request: Request, learner: Learner, q_global: GlobalPosterior) -> LocalFamily | None:
        """q(Z_Lk | Z_G) to predict with; None at a site that has not trained."""
        start = self.initial(learner)
        memory = Memory.from_arrays(self.state.arrays, NOW)
        if memory is None or not fits(memory, learner.site, start):
            return None
        return read_around(memory, start, q_global.mean, request.round)

    def predict(self, request: Request, inputs: Array) -> Prediction:
        """Personal prediction: shared latents of the request, local ones of this site."""
        learner, q_global = self.learner(request), global_posterior(request.arrays)
        q_local, rows = self.local_posterior(request, learner, q_global), self.rows(request, inputs)
        where = (learner.site, q_global, q_local, rows.features, rows.groups)
        return Prediction(*moments_at(learner.model, *where, draws=self.options.prediction_draws))

    def score(self, request: Request) -> Scores:
        """Scores by the kind of the target."""
        whole = completed(request, self.state.arrays)
        if whole is None:
            return Scores({"count": 0.0, LACKS: 1.0}, {})
        data, learner, q_global = self.data(whole), self.learner(whole), global_posterior(whole.arrays)
        return self.scores(whole, learner, q_global, self.local_posterior(whole, learner, q_global), data)

    def scores(
        self, request: Request, learner: Learner, q_global: GlobalPosterior, q_local: LocalFamily | None, data: SiteData
    ) -> Scores:
        """Scores of held-out rows: of class probabilities, of counts, or Gaussian in original units."""
        rows, target, model = self.rows(request, data.x_test), data.y_test, learner.model
        if self.config.model.likelihood == "poisson" and isinstance(model, HierarchicalGP):
            own = None if q_local is None else q_local.unfold()
            mean, variance = (part.numpy() for part in model.latent(learner.site.at(rows.features), q_global, own))
            return count_scores(mean, variance, target)
        where = (learner.site, q_global, q_local, rows.features, rows.groups)
        mean, variance = moments_at(model, *where, draws=self.options.prediction_draws)
        if self.structure.model == "multinomial":
            return class_scores(mean, target)
        if self.config.model.likelihood == "bernoulli":
            return bernoulli_scores(mean, target)
        return gaussian_scores(*to_original_units(request, Prediction(mean, variance), target))

    def on_query_predictions(self, request: Request) -> Reply:
        """Held-out rows with their predictions, and how they add up; for classes the probability of the second one."""
        reply = super().on_query_predictions(request)
        arrays = {**reply.arrays, **self.parts(request)}
        if self.config.model.likelihood == "bernoulli":
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
            del arrays["prediction.sd"]
        return Reply(arrays, reply.num_examples)

    def parts(self, request: Request) -> NamedArrays:
        """Of held-out rows: the mean for a new site, and what this one adds to it, where the two add up."""
        learner, q_global = self.learner(request), global_posterior(request.arrays)
        rows, own = self.rows(request, self.data(request).x_test), self.local_posterior(request, learner, q_global)
        trend, whole = (
            moments_at(
                learner.model,
                learner.site,
                q_global,
                q_local,
                rows.features,
                rows.groups,
                draws=self.options.prediction_draws,
                link=True,
            )[0]
            for q_local in (None, own)
        )
        mean, scale = request.arrays["target.mean"], request.arrays["target.scale"]
        return {"prediction.trend": trend * scale + mean, "prediction.deviation": (whole - trend) * scale}

    @property
    def plain(self) -> bool:
        """Whether the comparisons of all methods will do: a Gaussian likelihood and a Gaussian process."""
        return self.structure.model == "gp" and self.config.model.likelihood == "gaussian"

    def on_query_local_only(self, request: Request) -> Reply:
        """What the site can do alone; with classes, the same model fitted to its own rows."""
        if self.plain:
            return super().on_query_local_only(request)
        return self.alone(request, self.data(request))

    def on_query_pooled(self, request: Request) -> Reply:
        """What one analyst with all rows could do; with classes, the same model with one site."""
        if self.plain or not self.site.simulated:
            return super().on_query_pooled(request)
        preparation = Preparation.from_wire(request.arrays, str(request.settings["schema"]))
        parts = [site.encode(preparation) for site in load_all_sites(self.config, self.site.partitions)]
        x, y, x_test, y_test = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "x_test", "y_test")
        )
        return self.alone(request, SiteData(x, y, x_test, y_test, 0))

    def alone(self, request: Request, data: SiteData) -> Reply:
        """Fit the model to these rows as if there were no others, by the run's schedule, and score."""
        rows, own = self.rows(request, data.x), self.options
        points = farthest_points(rows.features, self.config.model.num_inducing) if own.model == "gp" else None
        model = self.structure.build(self.config.model, rows.features.shape[1], points)
        site = self.structure.deal(model, rows.features, torch.from_numpy(data.y), rows.groups, self.key)
        learner = Learner(model, site, self.config.seed, self.key, own.samples, own.importance_samples)
        start = initial_global(model.global_size, scale=own.initial_scale, triangular=own.structure == "full")
        rates = own.rates(self.config.method, self.config.num_server_rounds)
        end = learner.travel((start, self.initial(learner), Moments()), UNSCALED, first_step=0, rates=rates)
        scores = self.scores(request, learner, end.q_global, end.q_local, data)
        return Reply({}, int(scores.sums["count"]), {**flat_scores(scores), "evaluations": len(rates)})
