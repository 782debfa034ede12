"""FedMGP: units that are smoothed, scaled views of shared latent functions, with a personal model at every unit.

Chung and Al Kontar, *Federated multi-output Gaussian processes*, Technometrics 66 (2024). A round is exact (statistics
up, best q(g) and lengthscales down; the default for a Gaussian likelihood), or one of the paper's Algorithm 2
(pseudo-gradients). What a unit alone knows, φ_m = {R_m, s_m, σ_m}, never leaves it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.latent import Latents, Move, from_parameters, moves_to_wire, to_wire
from fedgp_flower.latent import Posterior as LatentPosterior
from fedgp_flower.shapes import Array, NamedArrays
from strategies import fedmgp_closing, fedmgp_pseudo, pseudo_gradient
from strategies.averaging import ParameterStrategy
from strategies.base import Observer, Snapshot
from strategies.closing import Posterior
from strategies.exact_q import ExactState, lead, start_state, trial_moves
from strategies.exact_trust import best_lead
from strategies.fedmgp_exact import Track, advance, best_track, claims_refusal, statistics_specs, usable
from strategies.fedmgp_options import FedMGPOptions
from strategies.fedmgp_record import exact_from_record, exact_to_record, pseudo_from_record, pseudo_to_record
from strategies.fedmgp_start import pseudo_inputs, scaled, start_factor, usable_starts
from strategies.meeting import Preparation
from strategies.pseudo_gradient import PseudoState
from strategies.wire import Answer, ArraySpec, Specs, answer, array_record

logger = logging.getLogger("fedgp")

LEADS = 20
"""Units that are asked for a first look at g, those with most rows: pairs of them are compared."""


class FedMGP(ParameterStrategy):
    """Exact rounds, or pseudo-gradients that may end with exact rounds."""

    def __init__(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        self.options = cast(FedMGPOptions, config.options)
        self.inducing: Array
        self.tracks: list[Track] = []
        self.active = 0
        self.pseudo: PseudoState | None = None
        self.weights: list[dict[str, float]] = []
        self.flat: dict[str, float] = {}

    @property
    def track(self) -> Track:
        """The start that is being worked on."""
        return self.tracks[self.active]

    @property
    def agreement(self) -> bool:
        """Whether exact rounds count only units that share g with most others."""
        return self.options.aggregation not in ("mean", "staleness-weighted")

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Targets are divided by their root mean square, and not centred."""
        return scaled(preparation, self.config, self.options)

    def initialise(self) -> None:
        """Pseudo-inputs from where inputs lie, lengthscales from their spacing, q(g) from one unit."""
        answers = self.shapes_of_inputs()
        self.inducing = pseudo_inputs(self.config, self.options, answers)
        if self.options.perturbation:
            noise = self.generator("pseudo-inputs").standard_normal(self.inducing.shape)
            self.inducing = self.inducing + self.options.perturbation * noise
        self.tracks = [self._begin(0)]
        if not self.options.exact(self.config):
            state = self.track.state
            self.pseudo = pseudo_gradient.start(
                state.latents, state.posterior, learn_inducing=self.options.learn_inducing
            )

    def _begin(self, number: int) -> Track:
        """A start: q(g) of the unit that shares g with most others; these then find their signs by regression."""
        own = self.options
        multiples = [start_factor(number) * own.start_multiple * own.start_ratio**i for i in range(own.latents)]
        state = start_state(self.inducing, multiples, jitter=self.config.model.jitter)
        healthy = self.network.healthy()
        asked = sorted(healthy, key=lambda site: -self.preparation.rows[site])[:LEADS]
        specs = statistics_specs(1, state.latents.size, own.latents)
        answers = self.ask("query.start", to_wire(state.latents, state.posterior), specs, asked, retries=1)
        starts = usable_starts(answers, self.preparation.rows, self.network.fail)
        if not starts:
            raise RunError("no unit sent statistics to start from; see the failures above")
        return Track(lead(state, starts[best_lead(starts)]))

    def _next_phase(self) -> None:
        """Begin another start, choose the best one, or leave pseudo-gradients for exact rounds, when it is time."""
        own, done = self.options, self.round - 1
        if own.starts > 1 and done and done % own.start_rounds == 0 and len(self.tracks) < own.starts:
            self.tracks.append(self._begin(len(self.tracks)))
            self.active = len(self.tracks) - 1
        elif own.starts > 1 and done == own.starts * own.start_rounds:
            self.active = best_track(self.tracks, agreement=self.agreement)
            logger.info("start %d of %d has the best bound", self.active + 1, own.starts)
        left = self.config.num_server_rounds - done
        if self.pseudo is not None and left <= own.final_rounds and self.config.model.likelihood == "gaussian":
            latents, q = self.shared()
            self.inducing = latents.inducing
            fresh = replace(start_state(latents.inducing, (1.0,) * own.latents), latents=latents, posterior=q)
            self.tracks[0] = replace(self.track, state=fresh)
            self.pseudo = None

    def shared(self) -> tuple[Latents, LatentPosterior]:
        """Latent functions and q(u) now."""
        if self.pseudo is None:
            return self.track.state.latents, self.track.state.posterior
        return from_parameters(self.pseudo.parameters, self.inducing, self.config.model.jitter)

    def personal(self, site: str) -> NamedArrays:
        """What the server knows of a unit's memory: the start, the number of its last report, the move it led to."""
        if not self.tracks:
            return {}
        report = self.track.state.reports.get(site)
        still = Move(np.zeros(self.track.state.latents.scales.shape), 1.0, "gain")
        return {
            "own.start": np.array(self.active),
            "own.updates": np.array(self.track.updates.get(site, 0)),
            "own.share": np.array(self._shares([site])[0]),
            **moves_to_wire([still if report is None else report.move], "own.move"),
        }

    def _shares(self, sites: list[str]) -> Array:
        """Weights p_m of Algorithm 2, over all units that are known."""
        rows = self.preparation.rows
        if self.options.weights == "equal":
            return np.full(len(sites), 1.0 / len(rows))
        return np.array([rows[site] for site in sites]) / sum(rows.values())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample max(⌈ρM⌉, 1) units and send them the latent functions, with trial moves in an exact round.

        Exact rounds after pseudo-gradients also ask every unit that is not in q(g) yet: they are too few to wait.
        """
        del arrays, config, grid
        self._next_phase()
        healthy = self.network.healthy()
        size = max(math.ceil(self.options.fraction * len(healthy)), 1)
        chosen = [healthy[i] for i in sorted(self.generator("sample").choice(len(healthy), size=size, replace=False))]
        if self.pseudo is None:
            if not self.options.exact(self.config):
                chosen = [site for site in healthy if site in chosen or site not in self.track.state.reports]
            request = to_wire(*self.shared()) | moves_to_wire(trial_moves(self.track.state), "moves")
            return self.broadcast("train.exact", request, chosen)
        fedmgp_pseudo.require_enough(self.options, size)
        request = {"latents.inducing": self.inducing, "rate": np.array(self.local_rate(server_round))}
        request |= {f"theta.{name}": array for name, array in self.pseudo.parameters.items()}
        return self.broadcast("train", request, chosen)

    def local_rate(self, server_round: int) -> float:
        """Learning rate of the local steps, from ``optimizer.learning-rate`` down to ``final-rate`` of it."""
        own, optimizer = self.options, self.config.optimizer
        share = (server_round - 1) / max(self.config.num_server_rounds - own.final_rounds - 1, 1)
        return float(
            optimizer.learning_rate * optimizer.decay ** (server_round - 1) * own.final_rate ** min(share, 1.0)
        )

    def train_specs(self) -> Specs:
        """Statistics at every trial move, or a pseudo-gradient."""
        if self.pseudo is not None:
            return {f"update.{name}": ArraySpec(array.shape) for name, array in self.pseudo.parameters.items()}
        state = self.track.state
        return statistics_specs(len(trial_moves(state)), state.latents.size, self.options.latents)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The best q(g) and move from all statistics, or θ after an average of pseudo-gradients."""
        answers = {self.network.site_of(reply): answer(self.network.site_of(reply), reply) for reply in replies}
        self._notice(answers)
        if self.pseudo is None:
            figures = self._exact_round(answers)
        else:
            figures = self._pseudo_round(self.pseudo, answers, server_round)
        return array_record(to_wire(*self.shared())), MetricRecord(dict(figures))

    def _notice(self, answers: dict[str, Answer]) -> None:
        self.flat |= {site: own.number("flat") for site, own in answers.items() if "flat" in own.metrics}
        for site, own in answers.items():
            if own.number("fresh") and self.track.updates.get(site):
                logger.warning("site %s lost its memory and starts afresh; its earlier report is replaced", site)

    def _exact_round(self, answers: dict[str, Answer]) -> dict[str, float]:
        state, rows = self.track.state, self.preparation.rows
        moves = trial_moves(state)
        replies = usable(answers, state.posterior, moves, rows, self.network.fail)
        track, weights = advance(self.track, replies, answers, moves, rows=rows, agreement=self.agreement)
        self.tracks[self.active] = track
        self.weights.append(weights)
        bound = self.track.state.bound
        counted = sum(rows[site] for site, weight in weights.items() if weight)
        return {"bound": bound, "objective": bound / counted} if counted and math.isfinite(bound) else {}

    def _pseudo_round(self, state: PseudoState, answers: dict[str, Answer], server_round: int) -> dict[str, float]:
        rows = self.preparation.rows
        for site, own in list(answers.items()):
            reason = claims_refusal(own, rows[site])
            if reason:
                self.network.fail(site, reason)
                del answers[site]
        said = {site: int(own.number("state-updates")) for site, own in answers.items()}
        self.tracks[0] = replace(self.track, updates={**self.track.updates, **said})
        self.pseudo, weights = fedmgp_pseudo.advance(
            state, answers, server_round, options=self.options, shares=self._shares
        )
        self.weights.append(weights)
        total = sum(rows[site] for site in answers)
        objective = sum(rows[s] * o.number("log-likelihood") for s, o in answers.items()) / max(total, 1)
        return {"objective": objective} if answers else {}

    def predictive(self) -> NamedArrays:
        """Latent functions and q(g); a unit adds what it alone knows."""
        return to_wire(*self.shared())

    def baseline_arrays(self) -> NamedArrays:
        """The pooled model has the same pseudo-inputs."""
        return {"pooled.inducing": self.inducing}

    def posterior(self) -> Posterior:
        """The saved posterior of the latent functions."""
        return fedmgp_closing.posterior(*self.shared(), self.config)

    def details(self) -> dict[str, Any]:
        """Bound, lengthscales, collapse, weights by round, and curves of simulated units."""
        return fedmgp_closing.details(self)

    def state(self) -> Snapshot:
        """Every start, θ, and what the report shows."""
        arrays: NamedArrays = {"fedmgp.inducing": self.inducing}
        facts: dict[str, Any] = {"active": self.active, "weights": self.weights, "flat": self.flat}
        tracks = []
        for index, track in enumerate(self.tracks):
            own, about = exact_to_record(track.state)
            arrays |= {f"track.{index}.{name}": array for name, array in own.items()}
            tracks.append({"state": about, "updates": dict(track.updates), "trusted": sorted(track.trusted)})
        facts["tracks"], facts["pseudo"] = tracks, None
        if self.pseudo is not None:
            own, facts["pseudo"] = pseudo_to_record(self.pseudo)
            arrays |= {f"pseudo.{name}": array for name, array in own.items()}
        return Snapshot(arrays, {"fedmgp": facts})

    def restore(self, snapshot: Snapshot) -> None:
        """The inverse of :meth:`state`."""

        def within(prefix: str) -> NamedArrays:
            return {n.removeprefix(prefix): a for n, a in snapshot.arrays.items() if n.startswith(prefix)}

        facts, jitter = snapshot.facts["fedmgp"], self.config.model.jitter
        self.inducing, self.active = snapshot.arrays["fedmgp.inducing"], int(facts["active"])
        self.weights, self.flat = list(facts["weights"]), dict(facts["flat"])
        self.tracks = []
        for index, about in enumerate(facts["tracks"]):
            state: ExactState = exact_from_record(within(f"track.{index}."), about["state"], jitter)
            self.tracks.append(Track(state, dict(about["updates"]), frozenset(about["trusted"])))
        if facts["pseudo"] is not None:
            self.pseudo = pseudo_from_record(within("pseudo."), facts["pseudo"])


def create(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> FedMGP:
    """The Strategy of ``method = "fedmgp"``."""
    return FedMGP(config, observer, snapshot)
