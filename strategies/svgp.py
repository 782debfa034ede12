"""SVGP for classes, counts and outliers: the pooled variational bound in dual form, one exchange per evaluation.

The server keeps the natural parameters (B, b) of all rows for the whitened inducing values v, and sends parameters w
with q(v) = N((I + B)⁻¹ b, (I + B)⁻¹). Sites answer with sums over their rows: the expected log likelihood, its gradient
by w, and the statistics of a natural-gradient step. From the totals the server takes that step in (B, b) and an L-BFGS
step in w, and transfers (B, b) to the new w as pseudo-observations (:mod:`fedgp_flower.methods.sgpr.duals`). If the
objective falls, the server returns to the previous point and halves both steps. The run does not depend on how the rows
are divided among sites. At its end, the probabilities of several classes get the temperature at which rows are best
predicted from all other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.likelihoods.classes import TEMPERATURES, best_temperature
from fedgp_flower.gp.models import CONSTANT, FLOAT32_JITTER, HYPER, LOCATIONS, LatentGP
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.gp.steps import num_bins, step_points
from fedgp_flower.gp.sums import at_unit_noise
from fedgp_flower.lazy import optimize
from fedgp_flower.messages import message
from fedgp_flower.methods.sgpr.duals import Duals, gradient_at_server, pseudo_sums, transferred
from fedgp_flower.methods.sgpr.messages import Expectations, PooledPosterior, TemperedScores, ValueCounts
from fedgp_flower.methods.sgpr.options import SVGPOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import pooled_bound
from strategies.pooled_bound import Problem
from strategies.server.questions import Asking, Doubt, Figures, Predicted, Refuse, Roster, Summed, Total
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

WARM_UP = 3
"""Evaluations at the first parameters, until q(v) settles."""
MEMORY = 30
"""Largest number of pairs of L-BFGS."""
FIRST_STEP, LARGEST_STEP = 0.1, 1.0
"""Largest entry of the first step, and of any step, in the units of :func:`units`."""
LOCATION_UNIT = 0.3
"""Unit of inducing points in a step, as a share of the lengthscale."""
EXCHANGES_BEFORE = 2
"""Exchanges before training: descriptions, and histograms of inputs; another one for steps."""
OF_DIFFERENCES = 0.5
"""Length of a natural-gradient step of functions that matter by their differences. Each is stepped as if the others
were fixed; along the difference of two the curvature is up to twice as large."""
HALVINGS = 4
"""The memory of L-BFGS is cleared after this many halvings in a row; the run ends after twice as many."""
DEFAULT_EXCHANGES = 57
"""Default number of exchanges; with those that agree on columns, 60."""
COMPARISON_PERIOD = 5
"""Evaluations between comparisons of the sites' sums, which cost K systems of M equations."""
LATEST = 5
"""The run ends when the latest evaluations, of this number, together gain less than a minimum."""
MINIMUM_GAIN, TOLERANCE = 5e-4, 3e-6
"""That minimum, in nats per row, and the minimum if ``sgpr.exchanges`` is set."""


@message()
class SVGPState:
    """The latest accepted evaluation, and the memory of L-BFGS; they determine the next trial point."""

    values: Mapping[str, AnyShape]  # w
    precision: Float[ndarray, "*C M M"]  # B at w
    shift: Float[ndarray, "*C M"]  # b at w
    relative: bool
    """Whether only the differences of functions matter."""
    points: Float[ndarray, "E P"]
    """w at accepted evaluations, the latest last."""
    gradients: Float[ndarray, "E P"]
    """Gradients of the objective at ``points``."""
    objectives: Float[ndarray, " E"] = field(default_factory=lambda: np.empty(0))
    """(F + log p(w))/N at ``points``, in nats per row."""
    found: Expectations | None = None
    """Totals at w and q(v); None before the first evaluation."""
    bound: float = 0.0
    """F in nats; 0 before the first evaluation."""
    evaluations: int = 0
    """Number of accepted evaluations."""
    halvings: int = 0
    """The next trial takes 2^−halvings of each step."""
    sites: tuple[str, ...] = ()
    """Sites whose rows are in ``found``."""
    exchanges: int = EXCHANGES_BEFORE
    """Exchanges with every site so far."""

    @property
    def duals(self) -> Duals:
        """(B, b) as tensors."""
        return Duals(torch.from_numpy(self.precision), torch.from_numpy(self.shift), self.relative)


def initial_state(latent: LatentGP) -> SVGPState:
    """Return the state before the first evaluation, where q(v) is the prior."""
    values = latent.to_arrays()
    none, size = np.empty((0, pack(values).size)), (*values[CONSTANT].shape[:-1], len(values[LOCATIONS]))
    return SVGPState(values, np.zeros((*size, size[-1])), np.zeros(size), latent.observed.relative, none, none)


def start(problem: Problem, roster: Roster) -> Asking[SVGPState]:
    """Return the first state: Z from pooled histograms of inputs, c from the mean of the target.

    M is at most the number of rows, by default a third of it: then the total over sites does not nearly reveal rows.
    """
    most = sum(roster.rows.values())
    most = max(1, most // pooled_bound.ROWS_PER_POINT) if problem.megabytes else most
    count = min(problem.model.num_inducing, most)
    model = problem.model.model_copy(update={"num_inducing": count})
    shape = yield from shape_of_inputs(roster)
    locations = initial_locations(shape, model, problem.seed)
    rows, more = float(shape.histogram[0].sum()), 0
    if model.has_steps and locations.shape[1] > 1:
        bins = num_bins(locations.shape[1])
        summed: Summed[ValueCounts] = yield Total(ValueCounts, Nothing(), sizes={"D": locations.shape[1], "B": bins})
        more += 1
        if summed.total is not None:
            locations = np.vstack([step_points(summed.total.rows, summed.total.sums, rows), locations])
    latent = LatentGP(model, torch.from_numpy(locations)).begin(problem.target, float(shape.beside) / rows)
    return replace(initial_state(latent), exchanges=EXCHANGES_BEFORE + more)


def one_round(problem: Problem, state: SVGPState, roster: Roster) -> Asking[tuple[SVGPState, Figures]]:
    """Evaluate the next trial point, one exchange; return the state there, or after a rejection."""
    model, state = problem.model, replace(state, exchanges=state.exchanges + 1)
    old, duals, point = LatentGP.from_arrays(model, state.values), natural_step(state), trial(state, model)
    new = LatentGP.from_arrays(model, point)
    with torch.no_grad():
        moved = transferred(duals, old, new, new.factor())
        request = PooledPosterior.of(point, moved.posterior())
    sizes = dict(zip("MC", request.mean.shape[::-1], strict=False))
    summed: Summed[Expectations] = yield Total(Expectations, request, roster.sites, sizes=sizes)
    if summed.total is None or summed.silent or summed.sites != roster.sites:  # an overflow may silence a site
        return (state if state.found is None else rejected(state)), {}
    found, rows = summed.total, sum(roster.rows.values())
    bound = float(found.fit) - float(moved.divergence())
    objective = (bound + float(new.log_prior().detach())) / rows
    if summed.sites == state.sites and not objective >= state.objectives[-1]:
        return rejected(state), {"objective": float(state.objectives[-1]), "bound": state.bound}
    if refused := Expectations.dwarfing(summed.parts, roster.rows):  # a rejected point may suit one site badly
        for site, reason in refused.items():
            yield Refuse(site, reason)
        return (state if state.found is None else rejected(state)), {}
    if state.evaluations % COMPARISON_PERIOD == 0 and HYPER not in found.values:  # Student-t noise is not log-concave
        pseudo = [pseudo_sums(part, request.mean) for part in summed.parts.values()]
        ones = np.broadcast_to(pooled_bound.unit_function(new), request.mean.shape)
        reasons: dict[str, str] = {}
        for one, *each in zip(ones.reshape(-1, ones.shape[-1]), *pseudo, strict=True):  # for each function
            reasons |= pooled_bound.contradictions(dict(zip(summed.parts, each, strict=True)), one, at_unit_noise)
        yield Doubt(reasons)
    if summed.sites != state.sites:
        state = with_memory(state, 0)
    local = gradient_at_server(duals, old, new, found)
    gradient = pack({name: (share + local[name]) / rows for name, share in found.values.items()})
    state = replace(with_memory(state, MEMORY), values=point, found=found, bound=bound, sites=summed.sites)
    state = replace(state, precision=moved.precision.numpy(), shift=moved.shift.numpy())
    state = replace(state, evaluations=state.evaluations + 1, halvings=max(state.halvings - 1, 0))
    points, gradients = np.vstack([state.points, pack(point)]), np.vstack([state.gradients, gradient])
    state = replace(state, points=points, gradients=gradients, objectives=np.append(state.objectives, objective))
    return state, {"objective": objective, "bound": bound}


def rejected(state: SVGPState) -> SVGPState:
    """Return the latest accepted state with half the steps, and after :data:`HALVINGS` of them without memory."""
    halved = replace(state, halvings=state.halvings + 1)
    return halved if halved.halvings % HALVINGS else with_memory(halved, 1)


def with_memory(state: SVGPState, count: int) -> SVGPState:
    """Return the state with at most the latest ``count`` evaluations in memory."""
    kept = slice(max(len(state.objectives) - count, 0), None)
    return replace(state, points=state.points[kept], gradients=state.gradients[kept], objectives=state.objectives[kept])


def natural_step(state: SVGPState) -> Duals:
    """Return (B, b) after the natural-gradient step."""
    length = (OF_DIFFERENCES if state.relative else 1.0) * 0.5**state.halvings
    return state.duals if state.found is None else state.duals.stepped(state.found, length)


def trial(state: SVGPState, model: ModelSection) -> NamedArrays:
    """Return w after a step of L-BFGS (Nocedal and Wright, Algorithm 7.4) in the units of :func:`units`."""
    if state.evaluations < WARM_UP or not len(state.points):
        return dict(state.values)
    scale = units(state.values, model)
    points, gradients = state.points / scale, state.gradients * scale
    steps, changes = np.diff(points, axis=0), -np.diff(gradients, axis=0)
    along = (steps * changes).sum(1)
    kept = along > 1e-10 * np.linalg.norm(steps, axis=1) * np.linalg.norm(changes, axis=1)
    first, steps, changes = not kept.any(), steps[kept], changes[kept]
    root = 1.0 if first else math.sqrt(along[kept][-1]) / float(np.linalg.norm(changes[-1]))
    inverse = optimize.LbfgsInvHessProduct(steps / root, root * changes)  # it starts from I, so in units of the root
    step = root * (inverse @ (root * gradients[-1]))
    limit = FIRST_STEP if first else LARGEST_STEP
    largest = float(np.abs(step).max())
    step *= limit / largest if largest > limit or first else 1.0
    return unpack(pack(state.values) + 0.5**state.halvings * step * scale, state.values)


def units(values: Mapping[str, ndarray], model: ModelSection) -> Array:
    """Return the unit of each entry of w [P]: a share of the initial lengthscale for Z, 1 for the others."""
    start = LatentGP(model, torch.from_numpy(values[LOCATIONS])).to_arrays()
    lengths = [np.exp(array).mean() for name, array in start.items() if "lengthscale" in name]
    unit = LOCATION_UNIT * float(np.mean(lengths)) if lengths else 1.0
    return pack({name: np.full_like(array, unit if name == LOCATIONS else 1.0) for name, array in values.items()})


def finished(problem: Problem, state: SVGPState) -> bool:
    """Return whether the run has converged, is stuck or has no exchanges left."""
    return converged(problem, state) or stuck(state) or state.exchanges >= problem.exchanges


def stuck(state: SVGPState) -> bool:
    """Return whether too many trials in a row were rejected."""
    return state.halvings >= 2 * HALVINGS


def converged(problem: Problem, state: SVGPState) -> bool:
    """Return whether the latest evaluations gained nearly nothing, or no trial gains any more after some did."""
    latest, least = state.objectives[-LATEST - 1 :], max(problem.minimum_gain, TOLERANCE)
    flat = len(latest) > LATEST and latest[-1] - latest[0] < least
    return state.evaluations > 2 * WARM_UP and bool(flat or stuck(state))


def posterior(state: SVGPState) -> PooledPosterior:
    """Return the accepted parameters, with q(v) after the natural-gradient step from their totals."""
    return PooledPosterior.of(state.values, natural_step(state).posterior())


class SVGP(FederatedStrategy[SVGPState]):
    """Maximise the pooled variational bound of any likelihood by natural-gradient and L-BFGS steps, from sums."""

    method = "svgp"
    options_class = SVGPOptions
    state_class = SVGPState
    options: SVGPOptions

    @property
    def problem(self) -> Problem:
        """The constants of the run; the jitter is that of the sites, which may compute in float32."""
        model, exchanges = self.config.model, self.options.exchanges or DEFAULT_EXCHANGES
        if self.config.precision == "float32":
            model = model.model_copy(update={"jitter": max(model.jitter, FLOAT32_JITTER)})
        target, minimum = self.preparation.training_target, 0.0 if self.options.exchanges else MINIMUM_GAIN
        return Problem(model, self.config.seed, exchanges, target, minimum_gain=minimum, megabytes=model.max_megabytes)

    def initialise(self, roster: Roster) -> Asking[SVGPState]:
        """Return the state before the first evaluation."""
        return (yield from start(self.problem, roster))

    def one_round(self, state: SVGPState, roster: Roster) -> Asking[tuple[SVGPState, Figures]]:
        """Return the state after one evaluation."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: SVGPState) -> bool:
        """Whether the run has converged, is stuck or has no exchanges left."""
        return finished(self.problem, state)

    def converged(self, state: SVGPState) -> bool:
        """Whether the run has converged."""
        return converged(self.problem, state)

    def exchanges_to_come(self, state: SVGPState) -> list[tuple[int, float]]:
        """Return the number of exchanges left, of equal cost; the run may converge earlier."""
        return [(max(0, self.problem.exchanges - state.exchanges), 1.0)]

    def predictive(self, state: SVGPState, roster: Roster) -> Asking[Predicted]:
        """Return the posterior at the accepted parameters; at the end of a run of classes, with their temperature."""
        found, gains = posterior(state), np.diff(state.objectives[-pooled_bound.RECENT_ROUNDS - 1 :])
        last = state.relative and (self.finished(state) or self.round >= self.planned_rounds)
        if last:
            scores: Summed[TemperedScores] = yield Total(
                TemperedScores, found, state.sites, sizes={"G": len(TEMPERATURES)}
            )
            if scores.total is not None:
                found = replace(found, values={**found.values, HYPER: best_temperature(scores.total.values)})
        details = pooled_bound.progress(state.exchanges + last, gains, 1, sum(self.preparation.rows.values()))
        details |= {"bound": state.bound, "evaluations": state.evaluations, "num_inducing": found.mean.shape[-1]}
        return Predicted(found, pooled_bound.saved(found, self.problem.model), details)

    def adopt(self, state: SVGPState, arrays: NamedArrays) -> SVGPState:
        """Return a state that starts from these parameters."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return initial_state(LatentGP.from_arrays(self.problem.model, given))

    def warnings(self) -> list[str]:
        """Return a warning if even the total over sites nearly reveals rows."""
        points = len(self.current.values[LOCATIONS])
        return super().warnings() + pooled_bound.disclosure_by_total(points, self.roster().rows)
