"""SFVI and SFVI-Avg: structured federated variational inference, by gradients or by averaging.

Hassan, Salomone and Mengersen, *Federated variational inference methods for structured latent variable models* (2023).
A site has latents Z_Lk of its own whose q(Z_Lk | Z_G) never leaves it; only q(Z_G) and θ are shared. ``sfvi``: every
site sends the gradient of its term of the bound, and the server takes one step of Adam. Where units are not the sites
themselves, as they are for ``gp``, that step is the same for any partition. ``sfvi-avg``: sites take many steps on a
bound that stands in for all sites, and the server averages θ and takes the Wasserstein barycentre of the sites' q(Z_G).
The mathematics is in :mod:`strategies.sfvi_state`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import NumericsError, RunError
from fedgp_flower.shapes import Array, NamedArrays
from strategies import sfvi_checks as checks
from strategies import sfvi_state as core
from strategies.averaging import ParameterStrategy
from strategies.base import Observer, Snapshot
from strategies.closing import Posterior
from strategies.initialisation import box_points, initial_inducing_points
from strategies.sfvi_options import SFVIOptions
from strategies.sfvi_posterior import LEARNED, SHARED, structured_posterior
from strategies.standing import Standing
from strategies.wire import Answer, ArraySpec, Specs, answer, sums_over

logger = logging.getLogger("fedgp")

FIXED, BLOCK = "prior.fixed_log_scale", "prior.block"
FIRST, SECOND = "adam.first.", "adam.second."


class StructuredVI(ParameterStrategy):
    """Both methods: rounds of gradients, of local steps, or first the one and then the other."""

    prior: core.Prior
    adam: core.Adam
    shared: NamedArrays
    """Shared inducing inputs of ``gp``, unless they are part of θ."""
    bound: float = math.nan
    """The latest ELBO of all rows, in nats; not a number before the first sum of gradients."""
    estimate: float = math.nan
    """Mean over sites and local steps of what each site by itself took for the bound; the ELBO of no posterior."""
    averaging: core.Average | None = None
    spread: dict[str, float]
    """W₂ from each site's q(Z_G) to their barycentre in the latest average."""
    fresh: dict[str, int]
    """How often a site that had taken part had to begin anew: it lost its state, or came back with other rows."""
    trained: set[str]
    """Sites that have taken part."""

    def __init__(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        self.predicts = self.options.model != "multinomial"
        self.shared, self.spread, self.fresh, self.trained = {}, {}, {}, set()

    @property
    def options(self) -> SFVIOptions:
        """The table ``sfvi.*``."""
        return cast(SFVIOptions, self.config.options)

    def averages(self) -> bool:
        """Whether sites take local steps in this round."""
        return self.options.averages(self.config.method, self.round)

    def initialise(self) -> None:
        """θ as the sites' model starts, shared inputs from federated statistics, q(Z_G) = N(0, scale² I)."""
        start = self.agreed_model()
        self.prior = core.Prior(start.pop(FIXED), start.pop(BLOCK))
        if self.options.model == "gp":
            points = self.shared_points()
            if LEARNED in start:
                start[LEARNED] = points
            else:
                self.shared = {SHARED: points}
        size = len(self.prior.fixed)
        start["q.mean"] = np.zeros(size)
        start["q.log_scale"] = np.full(size, math.log(self.options.initial_scale))
        if self.options.structure == "full":
            start["q.lower"] = np.zeros(size * (size - 1) // 2)
        self.parameters = start
        self.adam = core.start(start).adam
        self.send_once()

    def send_once(self) -> None:
        """Standardisation and shared inputs stay as they are: a site is sent them once and keeps them."""
        standing = {**self.preparation.arrays, **self.shared}
        self.network.standing = Standing.of(standing, self.preparation.settings)

    def agreed_model(self) -> NamedArrays:
        """Initial θ and prior: honest sites send the same, so the median over those of the usual layout is theirs.

        Raises:
            RunError: if no site answers.
        """
        answers = self.ask("query.model", {}, None, self.network.healthy(), retries=1)
        layouts = {site: frozenset((n, a.shape) for n, a in own.arrays.items()) for site, own in answers.items()}
        if not layouts:
            raise RunError("no site described its model; see the failures above")
        usual = Counter(layouts.values()).most_common(1)[0][0]
        for site in [site for site, layout in layouts.items() if layout != usual]:
            self.network.fail(site, "its model is not the one that most sites have")
            del answers[site]
        first = next(iter(answers.values())).arrays
        return {
            name: np.median([own.arrays[name] for own in answers.values()], axis=0).astype(array.dtype)
            for name, array in first.items()
        }

    def shared_points(self) -> Array:
        """Inducing inputs [M, D] in standardised units; no site sends a row."""
        answers = self.shapes_of_inputs()
        histogram, rng = sums_over(answers, "input.histogram"), np.random.default_rng([self.config.seed, *b"inducing"])
        if self.options.shared_inputs == "box":
            return box_points(self.config.model.num_inducing, histogram, rng)
        return initial_inducing_points(
            "copula",
            self.config.model.num_inducing,
            histogram,
            sums_over(answers, "input.products"),
            float(sum(own.num_examples for own in answers.values())),
            rng,
        )

    def train_specs(self) -> Specs:
        """Parameters, or their gradients."""
        return self.parameter_specs()

    def rate(self) -> float:
        """The learning rate of this round."""
        return self.options.rate(self.round - 1, self.config.num_server_rounds)

    def noise(self) -> Array:
        """ε_G [S, M] of this round."""
        return core.global_noise(self.config.seed, self.round, self.options.samples, len(self.prior.fixed))

    def total_rows(self) -> int:
        """N, the rows of all sites that the posterior is about."""
        return sum(self.preparation.rows[site] for site in self.network.healthy())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send {θ, η_G} with ε_G, or with what local steps need, to a sample of the sites."""
        del server_round, arrays, config, grid
        healthy = self.network.healthy()
        size = max(math.ceil(self.options.fraction * len(healthy)), 1)
        chosen = sorted(self.generator("sample").choice(len(healthy), size=size, replace=False))
        settings: dict[str, str | float] = {**self.preparation.settings, "learning-rate": self.rate()}
        request = {**self.preparation.arrays, **self.predictive()}
        if self.averages():
            settings["total-rows"] = float(self.total_rows())
        elif not self.options.closed_form:
            request["noise.global"] = self.noise()
        phase = "train.average" if self.averages() else "train.gradient"
        return [self.network.message(healthy[i], phase, request, settings) for i in chosen]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One step of Adam on the sum of the gradients, or the average; without a usable reply nothing changes."""
        del server_round
        answers = {self.network.site_of(reply): answer(self.network.site_of(reply), reply) for reply in replies}
        usable = self.usable(answers)
        if not usable:
            return None, None
        figures = self.average(usable) if self.averages() else self.step(usable)
        return None, MetricRecord({**figures})

    def usable(self, answers: Mapping[str, Answer]) -> dict[str, Answer]:
        """Replies that can be honest; the others are failures of their sites."""
        rows = self.preparation.rows
        limit = checks.move_limit(self.rate(), self.options.local_steps)
        refused = {} if self.averages() else checks.gradient_refusals(answers, rows)
        found: dict[str, Answer] = {}
        for site, own in answers.items():
            reason = checks.rows_refusal(own, rows[site]) or refused.get(site)
            if reason is None and self.averages():
                reason = checks.move_refusal(own, self.parameters, limit)
            if reason:
                self.network.fail(site, reason)
                continue
            found[site] = own
            if own.number("fresh") > 0 and site in self.trained:
                self.fresh[site] = self.fresh.get(site, 0) + 1
                logger.warning("site %s has lost its state: it began anew and caught up", site)
            self.trained.add(site)
        return found

    def step(self, answers: Mapping[str, Answer]) -> dict[str, float]:
        """SFVI: the server's gradient plus the sites', whose sum stands in for sites that are absent."""
        rows = self.total_rows()
        scale = rows / sum(self.preparation.rows[site] for site in answers)
        if self.options.closed_form:
            value, gradient = core.expected_server_gradient(self.parameters, self.prior)
        else:
            value, gradient = core.sampled_server_gradient(self.parameters, self.prior, self.noise())
        summed = core.total(gradient, [own.arrays for own in answers.values()], scale=scale)
        state = core.ascend(core.SFVIState(self.parameters, self.adam), summed, rate=self.rate())
        self.parameters, self.adam = dict(state.parameters), state.adam
        self.bound = value + scale * sum(own.number("objective") for own in answers.values())
        return {"objective": self.bound / rows}

    def average(self, answers: Mapping[str, Answer]) -> dict[str, float]:
        """SFVI-Avg: mean of θ, barycentre of q(Z_G); it is kept as it was where no barycentre is found."""
        rows = np.array([float(self.preparation.rows[site]) for site in answers])
        weights = rows if self.options.weights == "rows" else np.ones(len(rows))
        try:
            found = core.average([own.arrays for own in answers.values()], weights)
        except NumericsError as error:
            logger.warning("round %d: parameters stay as they were: %s", self.round, error)
            return {}
        self.averaging, self.parameters = found, dict(found.parameters)
        self.spread = dict(zip(answers, map(float, found.spread), strict=True))
        self.estimate = float(np.average([own.number("objective") for own in answers.values()], weights=weights))
        return {
            "site_estimate": self.estimate / self.total_rows(),
            "barycentre_iterations": float(found.iterations),
            "barycentre_residual": found.residual,
            "spread": float(found.spread.mean()),
        }

    def predictive(self) -> NamedArrays:
        """θ, q(Z_G), and the shared inputs; a site adds what it keeps of its own."""
        return {**self.parameters, **self.shared}

    def row_specs(self) -> Specs:
        """Trend and deviation of every row."""
        return {name: ArraySpec((None,)) for name in ("prediction.trend", "prediction.deviation")}

    def posterior(self) -> Posterior:
        """What predicts for a new site: θ and q(Z_G)."""
        return structured_posterior({**self.parameters, **self.shared}, self.config)

    def details(self) -> dict[str, Any]:
        """The bound at the end, and how the latest average was found."""
        values = {"bound": self.bound, "site_estimate": self.estimate}
        found: dict[str, Any] = {name: value for name, value in values.items() if math.isfinite(value)}
        found["shared_latents"] = len(self.prior.fixed)
        if self.fresh:
            found["fresh_starts"] = self.fresh
        if self.averaging is None:
            return found
        last = {"iterations": self.averaging.iterations, "residual": self.averaging.residual}
        return found | {"barycentre": last, "spread": self.spread}

    def state(self) -> Snapshot:
        """Parameters, moments, prior and shared inputs."""
        own = super().state()
        moments = {FIRST + name: array for name, array in self.adam.first.items()}
        moments |= {SECOND + name: array for name, array in self.adam.second.items()}
        fixed = {FIXED: self.prior.fixed, BLOCK: self.prior.block, **self.shared}
        last = self.averaging
        facts = {
            "adam": self.adam.step,
            "bound": None if math.isnan(self.bound) else self.bound,
            "estimate": None if math.isnan(self.estimate) else self.estimate,
            "barycentre": None if last is None else [last.iterations, last.residual],
            "spread": self.spread,
            "fresh": self.fresh,
            "trained": sorted(self.trained),
        }
        return Snapshot({**own.arrays, **moments, **fixed}, {**own.facts, **facts})

    def restore(self, snapshot: Snapshot) -> None:
        """All of :meth:`state`."""
        super().restore(snapshot)
        arrays, facts = snapshot.arrays, snapshot.facts
        first, second = (
            {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
            for kind in (FIRST, SECOND)
        )
        self.adam = core.Adam(int(facts["adam"]), first, second)
        self.prior = core.Prior(arrays[FIXED], arrays[BLOCK])
        self.shared = {SHARED: arrays[SHARED]} if SHARED in arrays else {}
        self.send_once()
        self.bound, self.estimate = (math.nan if facts[n] is None else float(facts[n]) for n in ("bound", "estimate"))
        self.spread = {site: float(value) for site, value in facts["spread"].items()}
        self.fresh = {site: int(count) for site, count in facts["fresh"].items()}
        self.trained = set(facts["trained"])
        if facts["barycentre"] is not None:
            iterations, residual = facts["barycentre"]
            spread = np.array(list(self.spread.values()))
            self.averaging = core.Average(self.parameters, int(iterations), float(residual), spread)


def create(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> StructuredVI:
    """The Strategy of ``method = "sfvi"`` and of ``"sfvi-avg"``."""
    return StructuredVI(config, observer, snapshot)
