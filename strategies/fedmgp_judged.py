"""FedMGP as it is by default along one input: two covariances side by side, and the evidence of all rows decides.

Units that are smoothed, scaled views of a shared function (:mod:`strategies.fedmgp_exact`), or one shared curve and a
deviation of each (:mod:`strategies.fedmgp_deviations`). A round takes an exact round of the first and a Newton step of
the second, until that has ended. Both bounds are of the same rows in the same units, so the higher one is of the
covariance that explains them better; it predicts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import decode, encode, message
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS, EitherCurveRequest, EitherView
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.typing import NamedArrays
from strategies import fedmgp_deviations, fedmgp_exact
from strategies.fedmgp_deviations import DeviationState
from strategies.fedmgp_exact import ExactRun
from strategies.fedmgp_shared import Record, Shared, SharedLatents, first_inducing, unit_curves
from strategies.server import finalise
from strategies.server.questions import Asking, Figures, Roster

logger = logging.getLogger("fedgp")

MOST_ROWS = 200
"""Of a unit for which deviations are tried: a step on them takes time that grows with the cube of its rows."""


@message()
class Judged:
    """Where both covariances are."""

    convolved: ExactRun
    deviations: DeviationState | None = None
    """None where they are not tried, or came to nothing."""

    @property
    def evidence(self) -> tuple[float, float] | None:
        """Bounds of the convolved one and of deviations; None where they are not of the same units."""
        bound, own = self.convolved.state.bound, self.deviations
        if own is None or own.newton.bound is None or bound is None or not self.convolved.record.weights:
            return None
        counted = {site for site, weight in self.convolved.record.weights[-1].items() if weight}
        return (bound, own.newton.bound) if counted == set(own.newton.sites) else None

    @property
    def deviating(self) -> DeviationState | None:
        """Deviations, where they explain the rows better."""
        return self.deviations if self.evidence and np.diff(self.evidence) > 0 else None


class FedMGPJudged(SharedLatents[Judged]):
    """Exact rounds of two covariances; the one with the higher bound predicts."""

    state_class = Judged
    implied: ClassVar[Mapping[str, Any]] = {"update": "exact", "covariance": "auto", "latents": 1}

    def phase(self, state: Judged) -> ExactRun:
        """The exact rounds of the convolved covariance."""
        return state.convolved

    def initialise(self, roster: Roster) -> Asking[Judged]:
        """Both from the same pseudo-inputs; deviations along one input and for short series alone."""
        inducing = yield from first_inducing(self.plan, roster)
        first = yield from fedmgp_exact.first_state(inducing, 0, roster, self.plan)
        tried = inducing.shape[1] == 1 and max(self.plan.rows.values()) <= MOST_ROWS
        run = ExactRun((first,), 0, Record((), {}))
        return Judged(run, fedmgp_deviations.start_state(inducing) if tried else None)

    def one_round(self, state: Judged, roster: Roster) -> Asking[tuple[Judged, Figures]]:
        """An exact round, and a Newton step unless that has ended."""
        self.sizes |= state.convolved.sizes
        run, figures = yield from fedmgp_exact.one_round(state.convolved, roster, self.plan)
        state = replace(state, convolved=run)
        if state.deviations is not None and not _settled(state.deviations, roster):
            state = replace(state, deviations=(yield from self._stepped(state.deviations, roster)))
        if state.deviating is not None and figures:
            bound = state.deviating.newton.bound
            assert bound is not None
            figures = {**figures, "bound": bound, "objective": bound / state.deviating.newton.count}
        return state, figures

    def _stepped(self, own: DeviationState, roster: Roster) -> Asking[DeviationState | None]:
        last, jitter = roster.round >= self.config.num_server_rounds, self.config.model.jitter
        try:
            own, _ = yield from fedmgp_deviations.one_round(own, roster, last=last, jitter=jitter)
        except NumericsError as error:
            logger.warning("deviations of units are not tried any more: %s", error)
            return None
        return own

    def predictive(self, state: Judged, roster: Roster) -> Asking[Any]:
        """The shared curve, or each unit's view of the latent functions."""
        if state.deviating is not None:
            return EitherView(trend=state.deviating.view)
        return (yield from super().predictive(state, roster))

    def constants(self, state: Judged) -> NamedArrays:
        """The pseudo-inputs."""
        return {PSEUDO_INPUTS: state.convolved.shared.latents.inducing}

    def public(self, state: Judged) -> NamedArrays:
        """Latent functions and q(u), or θ and q(u)."""
        if state.deviating is not None:
            return encode(Parameters(state.deviating.newton.parameters))
        return super().public(state)

    def adopt(self, state: Judged, arrays: NamedArrays) -> Judged:
        """Other latent functions and q(u); deviations stay what they are."""
        if state.deviating is not None:
            return state
        run = state.convolved
        return replace(state, convolved=run.having(replace(run.state, **vars(decode(Shared, arrays)))))

    def posterior_of(self, state: Judged) -> finalise.Posterior:
        """Of the covariance that predicts."""
        if state.deviating is not None:
            return fedmgp_deviations.saved(state.deviating, self.config.model.jitter)
        return super().posterior_of(state)

    def details_of(self, state: Judged) -> dict[str, Any]:
        """The same, and both bounds."""
        chosen = "convolved" if state.deviating is None else "deviations"
        own = super().details_of(state) if state.deviating is None else fedmgp_deviations.told(state.deviating)
        bounds = dict(zip(("convolved", "deviations"), state.evidence or (), strict=False))
        return own | {"covariance": chosen, "bounds_of_covariances": bounds}

    def final(self, state: Judged, roster: Roster) -> Asking[dict[str, Any]]:
        """Curves of the first simulated units, by the covariance that predicts."""
        if state.deviating is None:
            return (yield from super().final(state, roster))
        view_of_all = EitherView(trend=state.deviating.view)
        inducing = state.convolved.shared.latents.inducing
        return (yield from unit_curves(self, inducing, roster, lambda _, at: EitherCurveRequest(view_of_all, at)))


def _settled(own: DeviationState, roster: Roster) -> bool:
    """Whether no step promises more, and the factors are those of the end."""
    return own.calibrated and fedmgp_deviations.ended(own.newton, roster)
