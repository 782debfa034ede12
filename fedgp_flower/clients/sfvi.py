"""The site's part of SFVI and SFVI-Avg. Whatever is about Z_Lk stays in the site's state; see :class:`Memory`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request, flat_scores, to_original_units
from fedgp_flower.clients.counts import count_scores
from fedgp_flower.clients.standing import LACKS, PREFIX, carried, completed
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
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
from fedgp_flower.models.structured_memory import NOW, Memory, Moments, fits, kept, read_around, recalled
from fedgp_flower.models.structured_prediction import global_posterior, moments_at
from fedgp_flower.shapes import Array

SEED = "seed"
AGAIN = 2**32
"""A site's further steps in a round are numbered so far apart, so that they share no draw with another round."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as the model reads them: inputs without the column that names units, and those names."""

    features: Tensor  # [N, D]
    groups: Tensor  # int64 [N]


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
        q_local, moments, fresh = self.recall(request, learner, q_global, rate)
        noise = request.arrays.get("noise.global")
        drawn = None if noise is None else torch.from_numpy(noise)
        for again in range(self.options.own_steps):
            found = learner.gradient(q_global, q_local, drawn, request.round + again * AGAIN)
            q_local, moments = step_local(q_local, found, moments, rate)
        self.remember(Memory(request.round, False, q_global.mean, named(q_local), moments))
        sent = {f"theta.{name}": value.numpy() for name, value in found.theta.items()}
        sent |= {f"q.{name}": value.numpy() for name, value in found.eta.items()}
        return Reply(sent, len(learner.site.targets), self.figures(found.value, fresh))

    def on_train_average(self, request: Request) -> Reply:
        """SFVI-Avg: steps on θ, η_G and the site's own q; the first two are sent (paper, Algorithm 2)."""
        learner, q_global = self.learner(request), global_posterior(request.arrays)
        rate, steps = float(request.settings["learning-rate"]), int(self.options.local_steps)
        q_local, moments, fresh = self.recall(request, learner, q_global, rate)
        count = len(learner.site.targets)
        ratio = float(request.settings["total-rows"]) / count
        whole = self.options.scaling == "whole"
        scaling, factor = (whole_term(ratio), ratio) if whole else (likelihood_only(ratio), 1.0)
        start = q_global, q_local, moments.scaled("local.", factor) if self.options.keep_moments else Moments()
        end = learner.travel(start, scaling, steps=steps, first_step=request.round * steps, rate=rate)
        moments = end.moments.scaled("local.", 1 / factor)
        self.remember(Memory(request.round, True, end.q_global.mean, named(end.q_local), moments))
        sent = {f"theta.{name}": value.detach().numpy() for name, value in learner.model.theta().items()}
        sent |= {f"q.{name}": value.numpy() for name, value in named(end.q_global).items()}
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
            self.refuse_classes(data.y)
        return Learner(model, site, self.seed, self.key, self.options.samples, self.options.importance_samples)

    def rows(self, request: Request, inputs: Array) -> Rows:
        """Encoded inputs without the unit column, and its values in original units."""
        column = self.options.unit_column
        if self.structure.model != "logistic-mixed":
            return Rows(torch.from_numpy(inputs), torch.zeros(len(inputs), dtype=torch.int64))
        names = list(Preparation.from_wire(request.arrays, str(request.settings["schema"])).names)
        if column not in names:
            raise DataError(f"`sfvi.unit-column` = {column!r} is not a numeric feature; there are {', '.join(names)}")
        index = names.index(column)
        values = inputs[:, index] * request.arrays["input.scale"][index] + request.arrays["input.mean"][index]
        whole = np.rint(values)
        if np.abs(values - whole).max(initial=0.0) > 1e-6:
            raise DataError(f"column `{column}` names units by whole numbers; it has others here")
        features = np.delete(inputs, index, axis=1)
        return Rows(torch.from_numpy(features), torch.from_numpy(whole.astype(np.int64)))

    def refuse_classes(self, targets: Array) -> None:
        """Raise DataError unless the targets are numbers of classes."""
        known = np.isin(targets, np.arange(self.structure.classes))
        if not known.all():
            raise DataError(f"targets must be whole numbers below `sfvi.classes` = {self.structure.classes}")

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
        self, request: Request, learner: Learner, q_global: GlobalPosterior, rate: float
    ) -> tuple[LocalFamily, Moments, bool]:
        """q(Z_Lk | Z_G) as the latest round left it, read around the μ_G of the request; and whether it is new.

        A round that is asked for again starts where it started. A site without a memory that fits its rows begins
        anew, and catches up if the others are ahead.
        """
        start = self.initial(learner)
        memory = recalled(self.state.arrays, request.round)
        if memory is None or not fits(memory, start):
            if request.round == 1 or learner.model.local_width(learner.site) == 0:
                return start, Moments(), False
            return *learner.caught_up(q_global, start, self.options.catch_up_steps, rate), True
        return read_around(memory, start, q_global.mean, request.round), memory.moments, False

    def remember(self, memory: Memory) -> None:
        """Keep this; the seed of the site's draws stays, and what the server sent once."""
        aside = {n: array for n, array in self.state.arrays.items() if n == SEED or n.startswith(PREFIX)}
        self.state.replace({**aside, **kept(self.state.arrays, memory)})

    def local_posterior(self, request: Request, learner: Learner, q_global: GlobalPosterior) -> LocalFamily | None:
        """q(Z_Lk | Z_G) to predict with; None at a site that has not trained."""
        start = self.initial(learner)
        memory = Memory.from_arrays(self.state.arrays, NOW)
        if memory is None or not fits(memory, start):
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
        """Held-out rows with their predictions; for classes the probability of the second one."""
        reply = super().on_query_predictions(request)
        if self.config.model.likelihood != "bernoulli":
            return reply
        rest = {n: a for n, a in reply.arrays.items() if n in {"prediction.target", "prediction.input"}}
        return Reply({"prediction.probability": reply.arrays["prediction.mean"], **rest}, reply.num_examples)

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
        """Fit the model to these rows as if there were no others, and score their held-out rows."""
        rows, own = self.rows(request, data.x), self.options
        points = farthest_points(rows.features, self.config.model.num_inducing) if own.model == "gp" else None
        model = self.structure.build(self.config.model, rows.features.shape[1], points)
        site = self.structure.deal(model, rows.features, torch.from_numpy(data.y), rows.groups, self.key)
        learner = Learner(model, site, self.config.seed, self.key, own.samples, own.importance_samples)
        start = initial_global(model.global_size, scale=own.initial_scale, triangular=own.structure == "full")
        steps = self.config.baselines.max_evaluations
        end = learner.travel(
            (start, self.initial(learner), Moments()), UNSCALED, steps=steps, first_step=0, rate=own.learning_rate
        )
        scores = self.scores(request, learner, end.q_global, end.q_local, data)
        return Reply({}, int(scores.sums["count"]), {**flat_scores(scores), "evaluations": steps})
