"""The client of SFVI and SFVI-Avg. Z_Lk and its posterior stay in the site's memory."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.clients.numpy_client import SiteClient, confusion
from fedgp_flower.data.sites import SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.likelihoods.counts import Counts
from fedgp_flower.gp.likelihoods.point import NONE
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.family import LOCAL, GlobalPosterior, LocalPosterior, initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi.gp import farthest_points
from fedgp_flower.methods.sfvi.learner import (
    Learner,
    LocalState,
    RoundMemory,
    SiteMemory,
    initial_local,
    model_at,
    rows_of,
    step_local,
    subject,
)
from fedgp_flower.methods.sfvi.messages import GradientRequest, GradientShare, LocalEnd, LocalEndSum, LocalStepsRequest
from fedgp_flower.methods.sfvi.options import CATCH_UP_STEPS, SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs, StructuredModel, configured
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays


class SFVIClient(SiteClient):
    """Fits q(Z_Lk | Z_G) of this site, given q(Z_G) and θ from the server."""

    options: SFVIOptions

    def gradient(self, request: GradientRequest) -> GradientShare:
        """SFVI: return the gradient in θ and η_G, and take a step on η_Lk (paper, Algorithm 1)."""
        learner, (q_global, q_local, moments), fresh = self.begin(request.values)
        noise = None if request.noise is None else torch.from_numpy(request.noise)
        value, slopes = learner.gradient(q_global, q_local, noise, self.setting.round)
        q_local, moments = step_local(q_local, slopes, moments, request.learning_rate)
        shared = {name: slope for name, slope in slopes.items() if not name.startswith(LOCAL)}
        answer = GradientShare(on_the_wire(shared), value, int(fresh))
        self.remember(learner, (q_global, q_local, moments), answer, averaged=False)
        return answer

    def average(self, request: LocalStepsRequest) -> LocalEnd:
        """SFVI-Avg: take steps on θ, η_G and η_Lk, and return the first two (paper, Algorithm 2)."""
        learner, start, fresh = self.begin(request.values)
        ratio, steps = request.total_rows / self.num_examples, self.options.local_steps
        rates = [request.learning_rate] * steps
        end, value = learner.local_steps(start, ratio, first_step=self.setting.round * steps, rates=rates)
        answer = LocalEnd(on_the_wire(learner.model.theta() | named(end[0])), value, fresh)
        self.remember(learner, end, answer, averaged=True)
        return answer

    def average_sum(self, request: LocalStepsRequest) -> LocalEndSum:
        """The answer of :meth:`average` as a summand."""
        return LocalEndSum.of(self.average(request), float(self.num_examples))

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Prediction with the shared latents of the request and the local ones of this site."""
        learner, q_global, q_local = self.posterior(request.values)
        return learner.predict(q_global, q_local, rows_of(self.preparation, inputs, self.options))

    def score(self, request: Parameters) -> Scores:
        """Scores by the kind of the target."""
        return self.scores(*self.posterior(request.values), self.rows)

    confusion = confusion

    def held_out_rows(self, request: Parameters) -> NamedArrays:
        """Held-out rows with their predictions, trend and deviation; for classes the probability of the second."""
        learner, q_global, q_local = self.posterior(request.values)
        rows = rows_of(self.preparation, self.rows.x_test, self.options)
        trend, total = (learner.predict(q_global, q, rows, link=True).mean for q in (None, q_local))
        return super().held_out_rows(request) | trend_and_deviation(self.preparation, trend, total)

    # Helpers of the handlers.

    @cached_property
    def memory(self) -> SiteMemory:
        """The stored memory of this site."""
        return decode(SiteMemory, self.state.arrays) if self.state.arrays else SiteMemory()

    @cached_property
    def seed(self) -> int:
        """Seed of the site's draws: that of the run in a simulation, a secret at a real site."""
        if self.site.simulated:
            return self.config.seed
        return secrets.randbits(62) if self.memory.seed is None else self.memory.seed

    def learner(self, values: Mapping[str, ndarray]) -> Learner:
        """The learner at given parameters, with this site's training rows."""
        rows = rows_of(self.preparation, self.rows.x, self.options)
        arrays = {**values, **self.setting.constants}
        model = model_at(self.options, self.config.model, rows.features.shape[1], arrays)
        return self.learner_of(model, rows, self.rows.y, self.seed)

    def learner_of(self, model: StructuredModel, rows: ModelInputs, targets: Array, seed: int) -> Learner:
        """The learner of a model and rows."""
        options, digest = self.options, hashlib.sha256(self.site.site.encode()).digest()
        key = int.from_bytes(digest[:7], "big")  # unique, so that no other site has the same draws
        site = model.prepare(rows.features, torch.from_numpy(targets), rows.groups, key=key)
        samples = 0 if options.row.known_expectations else options.samples
        return Learner(model, site, seed, key, samples, 1 if options.row.mean_field else options.importance_samples)

    def begin(self, values: Mapping[str, ndarray]) -> tuple[Learner, LocalState, bool]:
        """Return the learner, the state of q and Adam at the start of a round, and whether the site had to catch up.

        A site without memory catches up after the first round, if the model has local parameters.
        """
        learner, q_global, server_round = self.learner(values), GlobalPosterior.of(values), self.setting.round
        start = initial_local(learner.model, learner.site, self.options)
        memory = self.memory.at(server_round)
        stored = None if memory is None else memory.read(learner.site, start, q_global.mean, server_round)
        if memory is not None and stored is not None:
            return learner, (q_global, stored, memory.moments), False
        if server_round == 1 or not any(array.numel() for array in named(start).values()):
            return learner, (q_global, start, AdamState()), False
        rates = [self.options.rate(step, CATCH_UP_STEPS) for step in range(CATCH_UP_STEPS)]
        return learner, (q_global, *learner.catch_up(q_global, start, rates)), True

    def remember(self, learner: Learner, end: LocalState, answer: GradientShare | LocalEnd, *, averaged: bool) -> None:
        """Store the state after this round; a repeated round overwrites its first attempt."""
        (q_global, q_local, moments), about = end, subject(learner.site)
        local = {name.removeprefix(LOCAL): array for name, array in on_the_wire(named(q_local)).items()}
        adam = moments.step, on_the_wire(moments.first), on_the_wire(moments.second)
        centre = q_global.mean.detach().numpy()
        memory = RoundMemory(self.setting.round, averaged, about, centre, local, *adam)
        if not all(np.isfinite(array).all() for array in (*encode(memory).values(), *encode(answer).values())):
            raise NumericsError(
                "a step gave numbers that are not finite, so the site keeps its old state. Lower `sfvi.learning-rate`."
            )
        seed = None if self.site.simulated else self.seed
        self.state.replace(encode(SiteMemory(memory, self.memory.at(memory.round), seed)))

    def posterior(self, values: Mapping[str, ndarray]) -> tuple[Learner, GlobalPosterior, LocalPosterior | None]:
        """The learner, q(Z_G), and q(Z_Lk | Z_G) or None if the site has not trained or has other units now."""
        learner, q_global, memory = self.learner(values), GlobalPosterior.of(values), self.memory.latest
        start = initial_local(learner.model, learner.site, self.options)
        if memory is None:
            return learner, q_global, None
        return learner, q_global, memory.read(learner.site, start, q_global.mean, self.setting.round)

    def scores(
        self, learner: Learner, q_global: GlobalPosterior, q_local: LocalPosterior | None, data: SiteData
    ) -> Scores:
        """Scores of held-out rows; those of counts use the moments of the linear predictor."""
        counts = self.config.model.likelihood == "poisson"
        rows = rows_of(self.preparation, data.x_test, self.options)
        found = learner.predict(q_global, q_local, rows, link=counts)
        if counts:
            return Counts().scores(found.mean, found.variance, data.y_test, NONE, self.units)
        return self.scores_of(found, data.y_test)

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of the model fitted to these rows, by the schedule of the run."""
        options, section = self.options, self.config.model
        if options.model == "gp" and section.likelihood == "gaussian":  # the baseline is a sparse GP
            return super().baseline_scores(data, pooled)
        rows = rows_of(self.preparation, data.x, options)
        points = farthest_points(rows.features, section.num_inducing) if options.row.inducing else None
        model = configured(options, section, rows.features.shape[1], points)
        learner, full = self.learner_of(model, rows, data.y, self.config.seed), options.structure == "full"
        q_global = initial_global(model.global_size, scale=options.scale, triangular=full)
        start = (q_global, initial_local(model, learner.site, options), AdamState[torch.Tensor]())
        rounds = self.config.num_server_rounds
        averaging = options.averaging_rounds(rounds)
        steps = [options.local_steps] * averaging + [1] * (rounds - averaging)
        rates = [options.rate(step, rounds) for step, many in enumerate(steps) for _ in range(many)]
        (q_global, q_local, _), _ = learner.local_steps(start, 1.0, first_step=0, rates=rates)
        return self.scores(learner, q_global, q_local, data)


def trend_and_deviation(preparation: Preparation, trend: Array, total: Array) -> NamedArrays:
    """Trend and deviation in original units; for a transformed target the medians and their difference."""
    trend, total = (part * preparation.target_scale + preparation.target_mean for part in (trend, total))
    if preparation.transform is not None:
        trend, total = preparation.transform.inverse(trend), preparation.transform.inverse(total)
    return {"prediction.trend": trend, "prediction.deviation": total - trend}
