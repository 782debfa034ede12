"""Every optimiser of the project: one Adam, one L-BFGS, and a form of both that asks for its evaluations.

Torch parameters are maximised in place: :func:`ascend` (a few plain steps), :func:`adam` (noisy objectives, with a
stopping rule) and :func:`maximise` (L-BFGS). Arrays whose moments travel or are saved use :class:`AdamState`. A server
that evaluates its objective by asking sites uses :class:`Minimiser`, which owns no state worth saving: the evaluations
made so far determine the next one, so a resumed run replays them and goes on exactly where it was.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.placement import to_array
from fedgp_flower.typing import Array

Bound: TypeAlias = tuple[float | None, float | None]
Reason: TypeAlias = Literal["converged", "budget"]
V = TypeVar("V", Tensor, Array)

FREE: Bound = (None, None)
LOGARITHM: Bound = (-LOG_RANGE, LOG_RANGE)
"""Bounds of the logarithm of a hyperparameter."""

# ---- Adam on arrays -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamState(Generic[V]):
    """Moments of Adam (Kingma & Ba 2015) by name of the parameter, of torch tensors or of arrays.

    first ← first + (1 − β₁)(g − first),  second ← second + (1 − β₂)(g² − second),  with β = (0.9, 0.999); a parameter
    unseen so far starts from zero.
    """

    step: int = 0
    first: Mapping[str, V] = field(default_factory=dict)
    second: Mapping[str, V] = field(default_factory=dict)

    def update(self, gradient: Mapping[str, V], rate: float) -> tuple[dict[str, V], AdamState[V]]:
        """The step to add to the parameters to go uphill, and the next state.

        rate · (first / (1 − β₁ᵗ)) / (√(second / (1 − β₂ᵗ)) + 1e-8) for every parameter that has a gradient.
        """
        step = self.step + 1
        first, second, moves = dict(self.first), dict(self.second), {}
        for name, slope in gradient.items():
            one, two = (moment.get(name, 0.0 * slope) for moment in (self.first, self.second))
            first[name] = _kept(one + 0.1 * (slope - one))
            second[name] = _kept(two + 0.001 * (slope**2 - two))
            scale = second[name] ** 0.5 / (1 - 0.999**step) ** 0.5 + 1e-8
            moves[name] = _kept(rate * (first[name] / ((1 - 0.9**step) * scale)))
        return moves, AdamState(step, first, second)


def _kept(value: Any) -> Any:
    """Numpy makes scalars of arrays without axes; they stay arrays."""
    return value if isinstance(value, Tensor) else np.asarray(value)


# ---- minimising functions of a vector -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Value and gradient of the objective at a point."""

    point: Array  # [n]
    value: float
    gradient: Array  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """Where an optimiser ended, after how many evaluations, and whether it says that it converged."""

    point: Array  # [n]
    value: float
    evaluations: int
    converged: bool
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The next point to evaluate."""

    point: Array  # [n]
    used: int
    """Evaluations of the history that led here. Fewer than were given: from there on they belong to another trajectory
    (SciPy changed, say); drop them before adding the new one."""


Iterates: TypeAlias = Generator[Array, tuple[float, Array], Minimum]
"""An optimiser as a generator: it yields points, is sent value and gradient, and returns the minimum."""


@dataclass(frozen=True, slots=True)
class Adam:
    """Plain Adam downhill; never converges by itself."""

    rate: float

    def iterates(self, start: Array) -> Iterates:
        """The run from ``start``."""
        point = start.copy()
        state: AdamState[Array] = AdamState()
        while True:
            _, gradient = yield point
            moves, state = state.update({"point": gradient}, self.rate)
            point = point - moves["point"]


@dataclass(frozen=True, slots=True)
class LBFGS:
    """SciPy's L-BFGS-B."""

    tolerance: float = 1e-7
    """Relative change of the value at which it stops."""
    gradient_tolerance: float = 1e-6
    """Largest entry of the projected gradient at which it stops."""
    bounds: Sequence[Bound] | None = None
    """Of each entry of the vector."""
    max_evaluations: int = 10**6
    max_iterations: int = 10**6
    memory: int = 20
    """Pairs of steps and gradient changes that are kept."""

    def minimise(self, function: Callable[[Array], tuple[float, Array]], start: Array) -> Minimum:
        """Minimise a function that returns value and gradient."""
        from scipy.optimize import minimize  # noqa: PLC0415  a site that only answers with sums does without it

        options = {
            "maxcor": self.memory,
            "maxfun": self.max_evaluations,
            "maxiter": self.max_iterations,
            "ftol": self.tolerance,
            "gtol": self.gradient_tolerance,
        }
        end = minimize(function, start, jac=True, method="L-BFGS-B", bounds=self.bounds, options=options)
        return Minimum(np.asarray(end.x), float(end.fun), int(end.nfev), bool(end.success), str(end.message))

    def iterates(self, start: Array) -> Iterates:
        """SciPy calls back, so it runs in a thread of its own that waits while the caller evaluates.

        Closing the generator, or dropping it, ends the thread.
        """
        points: queue.SimpleQueue[Array | Minimum | BaseException] = queue.SimpleQueue()
        answers: queue.SimpleQueue[tuple[float, Array] | None] = queue.SimpleQueue()
        worker = threading.Thread(target=_work, args=(self, start.copy(), points, answers), daemon=True)
        worker.name = f"L-BFGS-{worker.name}"
        worker.start()
        try:
            while True:
                said = points.get()
                if isinstance(said, Minimum):
                    return said
                if isinstance(said, BaseException):
                    raise said
                answers.put((yield said))
        finally:
            answers.put(None)


class _Closed(Exception):  # noqa: N818  a signal, not an error
    """Nobody waits for the minimum any more."""


def _work(
    method: LBFGS,
    start: Array,
    points: queue.SimpleQueue[Array | Minimum | BaseException],
    answers: queue.SimpleQueue[tuple[float, Array] | None],
) -> None:
    def evaluate(point: Array) -> tuple[float, Array]:
        points.put(point.copy())
        answer = answers.get()
        if answer is None:
            raise _Closed
        return answer

    try:
        points.put(method.minimise(evaluate, start))
    except _Closed:
        return
    except BaseException as error:  # the caller's to handle, in its own thread
        points.put(error)


class Minimiser:
    """An optimiser that is asked for its next point and told what was found there.

    >>> minimiser, history = Minimiser(np.array([3.0]), LBFGS()), []
    >>> while isinstance(answer := minimiser.ask(history), Trial):
    ...     x = answer.point
    ...     history = [*history[: answer.used], Evaluation(x, float(x @ x), 2 * x)]
    >>> answer.converged, round(float(answer.point[0]), 6)
    (True, 0.0)
    """

    def __init__(self, start: Array, method: LBFGS | Adam) -> None:
        self._start, self._method = start.copy(), method
        self._iterates: Iterates | None = None
        self._used: list[Evaluation] = []
        self._next: Array | Minimum = self._start

    def ask(self, history: Sequence[Evaluation]) -> Trial | Minimum:
        """The point to evaluate after ``history``, which are all evaluations since the start, or the end.

        Where the history goes on from the one of the last call the optimiser goes on too; otherwise, as after a
        restart, it starts anew and replays the history.
        """
        try:
            self._follow(history)
        except BaseException:
            self.close()
            raise
        return self._next if isinstance(self._next, Minimum) else Trial(self._next.copy(), len(self._used))

    def close(self) -> None:
        """Let go of the running optimiser; a later :meth:`ask` replays."""
        if self._iterates is not None:
            self._iterates.close()
        self._iterates = None

    def _follow(self, history: Sequence[Evaluation]) -> None:
        if self._iterates is None or not self._continues(history):
            self._restart()
        for evaluation in history[len(self._used) :]:
            if isinstance(self._next, Minimum) or not np.array_equal(self._next, evaluation.point):
                return
            self._advance(evaluation)

    def _continues(self, history: Sequence[Evaluation]) -> bool:
        seen = self._used
        return len(history) >= len(seen) and all(_same(a, b) for a, b in zip(seen, history, strict=False))

    def _restart(self) -> None:
        self.close()
        self._iterates, self._used = self._method.iterates(self._start), []
        self._next = next(self._iterates)

    def _advance(self, evaluation: Evaluation) -> None:
        assert self._iterates is not None
        self._used.append(evaluation)
        try:
            self._next = self._iterates.send((evaluation.value, evaluation.gradient))
        except StopIteration as end:
            self._next = end.value


def _same(left: Evaluation, right: Evaluation) -> bool:
    if left is right:
        return True
    same = left.value == right.value and np.array_equal(left.point, right.point)
    return same and np.array_equal(left.gradient, right.gradient)


# ---- maximising over torch parameters -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """What an optimiser did."""

    values: tuple[float, ...]
    """Objective at every evaluation; after L-BFGS the last one is that of the point returned."""
    reason: Reason
    evaluations: int = 0
    rejected: int = 0
    """Trial points at which a matrix lost positive definiteness; the line search stepped back from them."""

    @property
    def value(self) -> float:
        """The last of the values."""
        return self.values[-1]


def ascend(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    name: Literal["sgd", "adam", "lbfgs"],
    steps: int,
    learning_rate: float,
) -> float:
    """Take some steps uphill; returns the objective before the last step, of L-BFGS the last one.

    Raises:
        NumericsError: if a parameter is not finite afterwards, so that a diverged step is never sent.
    """
    if name == "lbfgs":
        return maximise(objective, parameters, max_evaluations=steps).value
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    stepper = kind([*parameters], lr=learning_rate, maximize=True)
    value = torch.zeros(())
    for _ in range(steps):
        stepper.zero_grad()
        value = objective()
        torch.autograd.backward(value)
        stepper.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
    return float(value.detach())


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Adam with one drop of the learning rate and a stop when window means no longer rise."""

    steps: int = 150
    learning_rate: float = 0.03
    final_fraction: float = 0.25
    """Share of the steps taken at a fifth of the learning rate."""
    window: int = 50
    """Steps averaged before two windows are compared: the objective is noisy."""
    tolerance: float = 1e-3
    """Smallest rise between windows worth going on for, in nats per row."""

    def flat(self, values: Sequence[float], num_rows: int) -> bool:
        """Whether the last window's mean is no higher than the one's before it, beyond the tolerance."""
        window = self.window
        if len(values) < 2 * window or len(values) % window:
            return False
        earlier, later = np.mean(values[-2 * window : -window]), np.mean(values[-window:])
        return bool(later - earlier < self.tolerance * num_rows)


def adam(objective: Callable[[], Tensor], parameters: Sequence[Tensor], settings: AdamSettings, num_rows: int) -> Trace:
    """Maximise in place a noisy objective, which draws its own samples at every call; a sum over ``num_rows`` rows.

    Raises:
        NumericsError: the objective is not finite.
    """
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate, maximize=True)
    values: list[float] = []
    remaining = settings.steps
    cooling = round(settings.final_fraction * settings.steps)
    reason: Reason = "budget"
    while remaining:
        optimiser.zero_grad()
        value = objective()
        if not bool(torch.isfinite(value)):
            raise NumericsError("the objective is not finite. Lower the learning rate.")
        torch.autograd.backward(value)
        if remaining == cooling:
            for group in optimiser.param_groups:
                group["lr"] = 0.2 * settings.learning_rate
        optimiser.step()
        values.append(value.item())
        remaining -= 1
        if remaining > cooling and settings.flat(values, num_rows):
            remaining, reason = cooling, "converged"
    return Trace(tuple(values), reason, len(values))


def maximise(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_evaluations: int,
    bounds: Sequence[Bound] | None = None,
    tolerance: float = 1e-7,
    gradient_tolerance: float = 1e-6,
) -> Trace:
    """L-BFGS-B on torch parameters, in place: they hold the best point afterwards.

    A trial point at which a matrix is not positive definite, or the value not finite, counts as very bad, so that the
    line search steps back; such points are counted.

    Args:
        objective: The same function at every call: samples must be fixed. Recomputes at the parameters' current data.
        parameters: Leaves with ``requires_grad``.
        max_evaluations: Budget of value-and-gradient evaluations.
        bounds: Of the entries of each parameter, as :data:`LOGARITHM` or :data:`FREE`; default all free.
        tolerance: Relative change of the value at which it stops.
        gradient_tolerance: Largest entry of the projected gradient at which it stops.

    Raises:
        NumericsError: the starting point is not admissible.
    """
    negative = _Negative(objective, parameters)
    limits = [bound for p, bound in zip(parameters, bounds, strict=True) for _ in range(p.numel())] if bounds else None
    method = LBFGS(tolerance, gradient_tolerance, limits, max_evaluations, max_evaluations)
    end = method.minimise(negative, _gather(parameters))
    _scatter(end.point, parameters)
    values = (*negative.values, -end.value)
    return Trace(values, "converged" if end.converged else "budget", end.evaluations, negative.rejected)


class _Negative:
    """Value and gradient of −objective at a flat vector, with a record of all evaluations."""

    def __init__(self, objective: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
        self.objective = objective
        self.parameters = parameters
        self.values: list[float] = []
        self.rejected = 0

    def __call__(self, flat: Array) -> tuple[float, Array]:
        _scatter(flat, self.parameters)
        try:
            value, slopes = self._evaluate()
        except NumericsError:
            if not self.values:
                raise
            self.rejected += 1
            return 10.0 * abs(self.values[0]) + 1e6, np.zeros_like(flat)
        self.values.append(value)
        return -value, -_gather(slopes)

    def _evaluate(self) -> tuple[float, list[Tensor]]:
        value = self.objective()
        if not bool(torch.isfinite(value)):
            raise NumericsError("the objective is not finite")
        slopes = torch.autograd.grad(value, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, slopes, strict=True)
        return value.item(), [torch.zeros_like(p) if g is None else g for p, g in pairs]


def _gather(tensors: Sequence[Tensor]) -> Array:
    return np.concatenate([to_array(tensor).ravel() for tensor in tensors])


def _scatter(flat: Array, parameters: Sequence[Tensor]) -> None:
    pieces = torch.from_numpy(flat.copy()).split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data.copy_(piece.view_as(parameter))
