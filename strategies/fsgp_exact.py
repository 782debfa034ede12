"""FSGP's exact mode: the server maximises the pooled collapsed bound with its exact gradient.

Each evaluation takes two exchanges: sums up (the value, and the derivatives of the bound by the sums), derivatives down
and each site's share of dF/dw up. The trajectory is that of a centralised sparse GP, whatever the partition (the
map-reduce of Gal et al., 2014). A *round* is one evaluation.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from scipy.optimize import minimize

from fedgp_flower.linalg import LOG_RANGE
from fedgp_flower.shapes import Array, NamedArrays
from fedgp_flower.statistics import SparseSums, bound_gradient
from strategies.base import Observer, Snapshot
from strategies.fsgp import LOG_NOISE, SparseStrategy
from strategies.wire import Specs, answer, array_record, sums_over

logger = logging.getLogger("fedgp")


class BudgetSpent(Exception):  # noqa: N818  a signal, not an error
    """All rounds are used; the best point so far is the result."""


class SitesChanged(Exception):  # noqa: N818  a signal, not an error
    """Sites, the arguments, did not answer an evaluation: the objective is another one now."""


class FSGPExact(SparseStrategy):
    """L-BFGS or Adam on F(w), the bound of all rows of all sites, in nats per row.

    A segment is one call of the optimiser with fixed sites. When a site fails twice in a row within an evaluation the
    segment ends and a new one starts from the best point with the sites that are left, so that two different
    objectives never mix. Sites that came back or joined meanwhile enter when a segment has converged. Evaluations of
    the running segment are kept in the checkpoint; a resumed run replays them, and the optimiser goes on exactly where
    it was.
    """

    def __init__(self, config: Any, observer: Observer, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        self.points: list[Array] = []  # w of each evaluation of this segment
        self.values: list[float] = []  # -F/N
        self.gradients: list[Array] = []
        self.replayed = 0
        self.segment_sites: list[str] = []
        self.absences: Counter[str] = Counter()
        self.converged = False
        self.finished = False
        self.best: tuple[float, Array] | None = None
        self.best_sums: SparseSums | None = None
        self.sums: SparseSums

    def train(self, num_rounds: int) -> None:
        """Segments of the optimiser until it converges or the rounds are used."""
        self.budget = num_rounds
        start = self.points[0] if self.points else self.pack(self.parameters)
        while not self.converged and self.round < num_rounds:
            try:
                success = self._optimise(start)
            except BudgetSpent:
                break
            except SitesChanged as change:
                start = self._leave_segment(silent=change.args)
                continue
            if set(self._available()) <= set(self.segment_sites):
                self.converged = success
                break
            start = self._leave_segment()
        self.finished = True
        self.evaluated_round = -1  # what was evaluated last is a trial point, not the best
        if self.best is not None:
            self.parameters = self.unpack(self.best[1])

    def _optimise(self, start: Array) -> bool:
        """Run the optimiser with the sites of the segment; whether it says that it converged."""
        self.replayed = 0
        if not self.segment_sites:
            self.segment_sites = self._available()
        tolerance = self.options.tolerance
        if self.options.exact_optimizer == "adam":
            self._adam(start)
        options = {"maxcor": 20, "maxiter": 10**6, "maxfun": 10**6, "ftol": tolerance, "gtol": 1e-6}
        result = minimize(self.objective, start, jac=True, method="L-BFGS-B", bounds=self._bounds(), options=options)
        return bool(result.success)

    def _bounds(self) -> list[tuple[float | None, float | None]]:
        """Hyperparameters stay where a Cholesky factor exists in double precision; inducing points are free."""
        limits = ((-LOG_RANGE, LOG_RANGE) if ".log_" in name else (None, None) for name in self._names())
        return [
            limit for name, limit in zip(self._names(), limits, strict=True) for _ in range(self.parameters[name].size)
        ]

    def _adam(self, start: Array) -> None:
        """Adam on the exact gradient, for those who prefer small steps; never converges by itself."""
        rate, point = self.options.server_learning_rate, start.copy()
        first, second = np.zeros_like(point), np.zeros_like(point)
        for step in range(1, 10**9):
            _, gradient = self.objective(point)
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            point = point - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)

    def objective(self, point: Array) -> tuple[float, Array]:
        """-F/N and its gradient at a point, replayed when a checkpoint has it."""
        if self.replayed < len(self.points):
            index, self.replayed = self.replayed, self.replayed + 1
            if np.array_equal(point, self.points[index]):
                return self.values[index], self.gradients[index]
            # another version of the optimiser goes another way: from here its own evaluations count
            for record in (self.points, self.values, self.gradients):
                del record[index:]
            self.replayed = index
        if self.round >= self.budget:
            raise BudgetSpent
        self.begin_round()
        self.parameters = self.unpack(point)
        messages = list(self.configure_train(self.round, ArrayRecord(), ConfigRecord(), self.network.grid))
        replies = self.network.exchange(messages, self.statistics_specs(), retries=1)
        self.aggregate_train(self.round, replies)
        value, gradient = self._gradient()
        self.points.append(point.copy())
        self.values.append(value)
        self.gradients.append(gradient)
        self.replayed += 1
        if self.best is None or value <= self.best[0]:
            self.best, self.best_sums = (value, point.copy()), self.sums
        self.complete_round({"bound": -value * float(self.sums.count), "objective": -value, "noise": self.noise})
        return value, gradient

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """First half of an evaluation: ask the sites of the segment for their sums."""
        del server_round, arrays, config, grid
        return self.broadcast("query.statistics", self.parameters, self.segment_sites)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pool the sums of the segment; all its sites must be there, or the objective would be another one."""
        del server_round
        answers = {self.network.site_of(reply): reply for reply in replies}
        found = self.usable_sums({site: answer(site, reply) for site, reply in answers.items()})
        self._all_there(found)
        self.sums = functools.reduce(operator.add, (found[site] for site in self.segment_sites))
        return array_record(self.sums.to_arrays()), None

    def _gradient(self) -> tuple[float, Array]:
        """Second half: send the derivatives of the bound by the sums, add the sites' shares of dF/dw."""
        bound = bound_gradient(self.sums, float(self.parameters[LOG_NOISE][0]))
        adjoints: NamedArrays = {
            "adjoint.gram": bound.gram,
            "adjoint.projection": bound.projection,
            "adjoint.prior_variance": bound.prior_variance,
        }
        specs, request = self.parameter_specs(), {**self.parameters, **adjoints}
        answers = self.ask("train.gradient", request, specs, self.segment_sites, retries=1)
        self._all_there(answers)
        gradient = self.pack({name: sums_over(answers, name) for name in specs})
        gradient[self._noise_index()] += bound.log_noise
        count = float(self.sums.count)
        return -bound.value / count, -gradient / count

    def _all_there(self, answers: Iterable[str]) -> None:
        """Raise SitesChanged with the sites of the segment that did not answer."""
        missing = sorted(set(self.segment_sites) - set(answers))
        if missing:
            raise SitesChanged(*missing)

    def _leave_segment(self, silent: Iterable[str] = ()) -> Array:
        """Start of the next segment: the best point of this one; its sites: the healthy ones that answered."""
        start = self.best[1] if self.best is not None else self.pack(self.parameters)
        logger.warning("sites changed; the optimiser starts anew from the best point so far")
        self.points, self.values, self.gradients, self.best, self.best_sums = [], [], [], None, None
        self.parameters = self.unpack(start)
        self.absences.update(silent)
        left = [site for site in self._available() if site not in set(silent)]
        self.segment_sites = left if len(left) >= self.config.min_sites else self.network.healthy()
        return start

    def _available(self) -> list[str]:
        """Healthy sites, without those that ended ``max-failures`` segments.

        A site that answers evaluations, and nothing else, would otherwise start the optimiser anew for ever.
        """
        return [site for site in self.network.healthy() if self.absences[site] < self.config.max_failures]

    def predictive(self) -> NamedArrays:
        """While training, predict at the best point so far: its sums are there, and a trial point may be far off."""
        if self.finished or self.best is None:
            return super().predictive()
        trial, self.parameters = self.parameters, self.unpack(self.best[1])
        try:
            return super().predictive() if self.best_sums is None else self.predictive_from(self.best_sums)
        finally:
            self.parameters = trial

    def details(self) -> dict[str, Any]:
        """Also whether the optimiser converged within the rounds."""
        return super().details() | {"converged": self.converged}

    def state(self) -> Snapshot:
        """The parameters, and the evaluations of the running segment."""
        own = super().state()
        segment: NamedArrays = {
            "segment.points": np.stack(self.points),
            "segment.values": np.asarray(self.values),
            "segment.gradients": np.stack(self.gradients),
        }
        facts = {"segment_sites": self.segment_sites, "absences": dict(self.absences)}
        return Snapshot({**own.arrays, **segment}, {**own.facts, **facts})

    def restore(self, snapshot: Snapshot) -> None:
        """Also the evaluations to replay, if the same sites are back; else a new segment from the best of them."""
        super().restore(snapshot)
        self.points = list(snapshot.arrays["segment.points"])
        self.values = [float(value) for value in snapshot.arrays["segment.values"]]
        self.gradients = list(snapshot.arrays["segment.gradients"])
        self.segment_sites = list(snapshot.facts["segment_sites"])
        self.absences = Counter(snapshot.facts["absences"])
        index = int(np.argmin(self.values))
        self.best = (self.values[index], self.points[index])
        if set(self.segment_sites) - set(self.network.sites()):
            self._leave_segment()

    def _names(self) -> list[str]:
        return sorted(self.parameters)

    def pack(self, arrays: NamedArrays) -> Array:
        """Named arrays as one vector w, in the order of their names."""
        return np.concatenate([np.asarray(arrays[name], dtype=np.float64).ravel() for name in self._names()])

    def unpack(self, point: Array) -> NamedArrays:
        """The inverse of :meth:`pack`, with the shapes of the current parameters."""
        sizes = np.cumsum([self.parameters[name].size for name in self._names()])[:-1]
        pieces = np.split(point, sizes)
        shapes = [self.parameters[name].shape for name in self._names()]
        return {n: piece.reshape(shape) for n, piece, shape in zip(self._names(), pieces, shapes, strict=True)}

    def _noise_index(self) -> int:
        before = self._names()[: self._names().index(LOG_NOISE)]
        return int(sum(self.parameters[name].size for name in before))

    def train_specs(self) -> Specs:
        """The first half of an evaluation returns sums."""
        return self.statistics_specs()
