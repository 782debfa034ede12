"""FSGP's exact mode: the server maximises the pooled collapsed bound with its exact gradient.

A round is one evaluation, in two questions: sums up (the value, and the derivatives of the bound by the sums),
derivatives down and each site's share of dF/dw up. The trajectory is that of a centralised sparse GP, whatever the
partition (the map-reduce of Gal et al., 2014). The server needs totals and no site's summand.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp import sparse
from fedgp_flower.gp.optimisers import FREE, LBFGS, LOGARITHM, Adam, Evaluation, Minimiser, Minimum
from fedgp_flower.gp.sums import bound_gradient
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fsgp.messages import Adjoints, GradientShare, PooledPosterior, Statistics
from fedgp_flower.methods.fsgp.options import FSGPOptions
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Observer, Snapshot
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.fsgp import LOG_NOISE, facts, initial_parameters, noise_of, pooled, posterior_at, saved
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")


@message()
class ExactState:
    """The evaluations of the running segment: one call of the optimiser with fixed sites.

    When a site does not answer, the segment ends and a new one starts from the best point with the sites that are
    left, so that two different objectives never mix. Sites that came back or joined enter when a segment has
    converged. The evaluations determine what the optimiser does next, so a resumed run goes on exactly where it was.
    """

    start: Mapping[str, AnyShape]
    """Parameters at which the segment started."""
    sites: tuple[str, ...]
    """Whose rows the objective is of; empty before the first round."""
    points: Float[ndarray, "E P"]
    values: Float[ndarray, " E"]
    """−F/N, nats per row."""
    gradients: Float[ndarray, "E P"]
    totals: Statistics | None
    """At the best point."""
    absences: Mapping[str, int]
    """Segments that a site ended by its silence."""
    ended: bool = False
    converged: bool = False

    @property
    def best(self) -> NamedArrays:
        """The parameters with the highest bound so far."""
        if not len(self.values):
            return dict(self.start)
        lowest = len(self.values) - 1 - int(np.argmin(self.values[::-1]))  # the latest of equals
        return unpack(self.points[lowest], self.start)

    @property
    def history(self) -> list[Evaluation]:
        """As the optimiser wants it."""
        return [Evaluation(*own) for own in zip(self.points, map(float, self.values), self.gradients, strict=True)]


def segment(
    start: Mapping[str, ndarray], sites: tuple[str, ...] = (), absences: Mapping[str, int] | None = None
) -> ExactState:
    """A segment without evaluations."""
    size = pack(start).size
    return ExactState(start, sites, np.empty((0, size)), np.empty(0), np.empty((0, size)), None, absences or {})


def one_round(state: ExactState, point: Array, model: ModelSection) -> Asking[tuple[ExactState, Figures]]:
    """Evaluate the pooled bound and its gradient at a point; where sites are silent the next segment begins."""
    parameters = unpack(point, state.start)
    summed: Summed[Statistics] = yield Total(Statistics, Parameters(parameters), state.sites)
    if summed.sites != state.sites or summed.total is None:
        return without(state, set(state.sites) - set(summed.sites)), {}
    bound = bound_gradient(summed.total.sums(), float(parameters[LOG_NOISE][0]))
    adjoints = Adjoints(parameters, bound.gram, bound.projection, bound.prior_variance)
    shares: Summed[GradientShare] = yield Total(GradientShare, adjoints, state.sites)
    if shares.silent != summed.silent or _of_other_rows(summed.total, state):
        logger.warning("some sites added nothing; the optimiser starts anew from the best point so far")
        return segment(state.best, state.sites, state.absences), {}
    if shares.sites != state.sites or shares.total is None:
        return without(state, set(state.sites) - set(shares.sites)), {}
    gradient = dict(shares.total.values)
    for name, share in through_inducing_points(parameters, summed.total, adjoints, model).items():
        gradient[name] = gradient[name] + share
    gradient[LOG_NOISE] = gradient[LOG_NOISE] + bound.log_noise
    count = float(summed.total.count)
    value = -bound.value / count
    figures = {"bound": bound.value, "objective": -value, "noise": noise_of(parameters)}
    return evaluated(state, point, value, -pack(gradient) / count, summed.total), figures


def _of_other_rows(totals: Statistics, state: ExactState) -> bool:
    """Whether the totals are of other rows than those of the segment's best point: some site added nothing to one."""
    return state.totals is not None and float(totals.count) != float(state.totals.count)


def through_inducing_points(
    parameters: Mapping[str, ndarray], totals: Statistics, adjoints: Adjoints, model: ModelSection
) -> NamedArrays:
    """The part of the gradient that no site needs to send: through K_zz, it follows from the totals."""
    sparse_gp = sparse.SparseGP.from_arrays(model, parameters)
    sums = totals.sums()
    given = sparse.Adjoints.of(adjoints.gram, adjoints.projection, adjoints.prior_variance, sums.gram)
    return sparse.inducing_gradient(sparse_gp, sums.gram, sums.projection, given)


def evaluated(state: ExactState, point: Array, value: float, gradient: Array, totals: Statistics) -> ExactState:
    """The state with one more evaluation."""
    better = not len(state.values) or value <= state.values.min()
    return replace(
        state,
        points=np.vstack([state.points, point]),
        values=np.append(state.values, value),
        gradients=np.vstack([state.gradients, gradient]),
        totals=totals if better else state.totals,
    )


def without(state: ExactState, silent: set[str]) -> ExactState:
    """The next segment, from the best point, without the sites that were silent."""
    logger.warning("sites changed; the optimiser starts anew from the best point so far")
    absences = Counter(state.absences)
    absences.update(silent)
    left = tuple(site for site in state.sites if site not in silent)
    return segment(state.best, left, absences)


def pack(arrays: Mapping[str, ndarray]) -> Array:
    """Named arrays as one vector w, in the order of their names."""
    return np.concatenate([np.asarray(arrays[name], dtype=np.float64).ravel() for name in sorted(arrays)])


def unpack(point: Array, like: Mapping[str, ndarray]) -> NamedArrays:
    """The inverse of :func:`pack`, with the names and shapes of ``like``."""
    names = sorted(like)
    pieces = np.split(point, np.cumsum([like[name].size for name in names])[:-1])
    return {name: piece.reshape(like[name].shape) for name, piece in zip(names, pieces, strict=True)}


class FSGPExact(FederatedStrategy[ExactState]):
    """L-BFGS or Adam on F(w), the bound of all rows of all sites, in nats per row."""

    method = "fsgp"
    options_class = FSGPOptions
    state_class = ExactState
    options: FSGPOptions
    implied: ClassVar[Mapping[str, Any]] = {"objective": "exact"}
    minimiser: tuple[bytes, Minimiser] | None = None
    """The running optimiser and where it started; only a memory of what the state determines."""

    def _set(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None) -> None:
        if config.model.likelihood != "gaussian":
            name = config.model.likelihood
            raise ConfigError(f"`model.likelihood` = {name!r}: FSGPExact needs 'gaussian'; use FSGPDuals")
        super()._set(config, observer, snapshot)

    def initialise(self, roster: Roster) -> Asking[ExactState]:
        """Inducing points from federated statistics, hyperparameters where the configuration says."""
        return segment((yield from initial_parameters(roster, self.config.model, self.config.seed)))

    def one_round(self, state: ExactState, roster: Roster) -> Asking[tuple[ExactState, Figures]]:
        """One evaluation where the optimiser wants it; where it has ended, the next segment begins."""
        there = tuple(site for site in state.sites if site in roster.everyone)
        if there != state.sites:  # of a resumed run, a site may not be back
            state = segment(state.best, there, state.absences)
        if state.ended or len(state.sites) < self.config.min_sites:
            again = tuple(roster.sites) if not state.ended else self._available(state, roster)
            start, absences = state.best, state.absences
            state = segment(start, again or tuple(roster.sites), absences)
        answer = self._ask_optimiser(state)
        assert not isinstance(answer, Minimum)
        kept = slice(answer.used)
        state = replace(state, points=state.points[kept], values=state.values[kept], gradients=state.gradients[kept])
        state, figures = yield from one_round(state, answer.point, self.config.model)
        return self._judged(state), figures

    def _judged(self, state: ExactState) -> ExactState:
        """Whether the optimiser has ended after these evaluations."""
        if not len(state.values):
            return state
        answer = self._ask_optimiser(state)
        return replace(state, ended=True, converged=answer.converged) if isinstance(answer, Minimum) else state

    def _ask_optimiser(self, state: ExactState) -> Any:
        start = pack(state.start)
        if self.minimiser is None or self.minimiser[0] != start.tobytes():
            self.minimiser = start.tobytes(), Minimiser(start, self._optimiser(state))
        return self.minimiser[1].ask(state.history)

    def _optimiser(self, state: ExactState) -> LBFGS | Adam:
        """Hyperparameters stay where a Cholesky factor exists in double precision; inducing points are free."""
        options = self.options
        if options.exact_optimizer == "adam":
            return Adam(options.server_learning_rate)
        bounds = [
            LOGARITHM if ".log_" in name else FREE
            for name in sorted(state.start)
            for _ in range(state.start[name].size)
        ]
        return LBFGS(options.tolerance, bounds=bounds)

    def _available(self, state: ExactState, roster: Roster) -> tuple[str, ...]:
        """Healthy sites, without those that ended ``max-failures`` segments.

        A site that answers evaluations, and nothing else, would otherwise start the optimiser anew for ever.
        """
        return tuple(site for site in roster.sites if state.absences.get(site, 0) < self.config.max_failures)

    def finished(self, state: ExactState) -> bool:
        """Whether the optimiser has ended and no site waits to take part."""
        return state.ended and set(self._available(state, self.roster())) <= set(state.sites)

    def converged(self, state: ExactState) -> bool:
        """Whether the optimiser has ended at a maximum."""
        return state.ended and state.converged

    def predictive(self, state: ExactState, roster: Roster) -> Asking[PooledPosterior]:
        """The exact posterior at the best point so far: a trial point may be far off."""
        totals = state.totals
        if totals is None or state.sites != roster.everyone:
            totals = yield from pooled(state.best, roster.everyone)
        self.last = (posterior_at(state.best, totals), totals)
        return self.last[0]

    def public(self, state: ExactState) -> NamedArrays:
        """The best parameters so far."""
        return encode(Parameters(state.best))

    def adopt(self, state: ExactState, arrays: NamedArrays) -> ExactState:
        """Other parameters start a segment of their own; the same ones change nothing."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        if np.array_equal(pack(given), pack(state.best)):
            return state
        return segment(given, state.sites, state.absences)

    def posterior_of(self, state: ExactState) -> Posterior:
        """Parameters in natural units, q of whitened inducing values."""
        return saved(self.last[0], self.config.model)

    def details_of(self, state: ExactState) -> dict[str, Any]:
        """The pooled bound in nats and the noise level."""
        del state
        return facts(*self.last)
