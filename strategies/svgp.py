"""SVGP for classes, counts and outliers: the pooled variational bound in dual form, one exchange an evaluation.

The server keeps (B, b), what all rows say of the whitened inducing values, and sends parameters w with
q(v) = N((I + B)⁻¹ b, (I + B)⁻¹). Sites answer with sums: the expected log likelihood, its gradient by w, and what
(B, b) would be where it no longer moves. From these alone the server takes a natural-gradient step in (B, b) and a
quasi-Newton step in w, to which (B, b) is carried as pseudo-observations (:mod:`fedgp_flower.methods.sgpr.duals`). A
trial that loses is taken back, and both steps are halved. Whatever the partition, the run is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.models import CONSTANT, FLOAT32_JITTER, HYPER, LOCATIONS, LatentGP
from fedgp_flower.gp.optimisers import pack, two_loops, unpack
from fedgp_flower.gp.sums import at_unit_noise
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.sgpr.duals import Duals, carried, gradient_at_server, pseudo_sums
from fedgp_flower.methods.sgpr.messages import Expectations, PooledPosterior
from fedgp_flower.methods.sgpr.options import SVGPOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import pooled_bound
from strategies.pooled_bound import Problem
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

WARM = 3
"""Evaluations with the first parameters, while q settles."""
MEMORY = 30
"""Pairs of steps and gradient changes that the quasi-Newton step knows."""
FIRST, LARGEST = 0.1, 1.0
"""Largest entry of a step: of the first one, and of any; logarithms as they are, Z in units of ``UNIT`` ℓ."""
UNIT = 0.3
BEFORE = 2
"""Exchanges before training: descriptions, where inputs lie."""
HALVINGS = 4
"""After so many in a row the memory is cleared, after twice as many the run has ended."""
USUAL = 57
"""Exchanges where the configuration leaves them to the method: with those that agree on columns, 60."""
COMPARED = 5
"""Evaluations from one comparison of what sites say, which costs K systems of M equations, to the next."""
TOLERANCE = 1e-6
"""Nats per row: the ascent ends where the latest evaluations gained less than this."""


@message()
class SVGPState:
    """The latest accepted evaluation and those before it: all that the next trial follows from."""

    values: Mapping[str, AnyShape]  # w
    precision: Float[ndarray, "*C M M"]  # B at w
    shift: Float[ndarray, "*C M"]  # b at w
    relative: bool
    """Whether only the differences of functions matter."""
    found: Expectations | None
    """At w and q(v); None before the first evaluation."""
    points: Float[ndarray, "E P"]
    """w at accepted evaluations, the latest last."""
    gradients: Float[ndarray, "E P"]
    """Of the objective there."""
    objectives: Float[ndarray, " E"]  # (F + log p(w))/N, nats per row
    bound: float  # F, nats; 0 before the first evaluation
    evaluations: int
    halvings: int
    """The next trial takes 2^−halvings of each step."""
    sites: tuple[str, ...]
    """Whose rows the evaluation is of."""
    exchanges: int
    """With every site, those before training among them."""

    @property
    def duals(self) -> Duals:
        """(B, b) as tensors."""
        return Duals(torch.from_numpy(self.precision), torch.from_numpy(self.shift), self.relative)


def at(latent: LatentGP) -> SVGPState:
    """Before the first evaluation, where q is the prior."""
    values = latent.to_arrays()
    nothing, size = np.empty((0, pack(values).size)), (*values[CONSTANT].shape[:-1], len(values[LOCATIONS]))
    zeros = np.zeros((*size, size[-1])), np.zeros(size)
    return SVGPState(
        values, *zeros, latent.observed.relative, None, nothing, nothing, np.empty(0), 0.0, 0, 0, (), BEFORE
    )


def start(problem: Problem, roster: Roster) -> Asking[SVGPState]:
    """Inducing points from federated statistics, c from the mean of the target, the rest from the configuration."""
    model = problem.model.model_copy(
        update={"num_inducing": min(problem.model.num_inducing, sum(roster.rows.values()))}
    )
    shape = yield from shape_of_inputs(roster)
    locations = initial_locations(shape, model, problem.seed)
    beside = float(shape.beside) / float(shape.histogram[0].sum())
    return at(LatentGP(model, torch.from_numpy(locations)).begin(problem.target, beside))


def one_round(problem: Problem, state: SVGPState, roster: Roster) -> Asking[tuple[SVGPState, Figures]]:
    """One exchange: evaluate the trial that the state implies; take it, or take it back."""
    model, state = problem.model, replace(state, exchanges=state.exchanges + 1)
    old, duals, point = LatentGP.from_arrays(model, state.values), improved(state), trial(state, model)
    new = LatentGP.from_arrays(model, point)
    with torch.no_grad():
        moved = carried(duals, old, new, new.factor())
        q = moved.posterior()
    asked = PooledPosterior(point, q.mean.numpy(), q.covariance.numpy())
    lengths = dict(zip("MC", asked.mean.shape[::-1], strict=False))
    summed: Summed[Expectations] = yield Total(Expectations, asked, roster.sites, sizes=lengths)
    if summed.total is None or summed.silent or summed.sites != roster.sites:
        return (state if state.found is None else taken_back(state)), {}  # they may have met numbers without end
    found, rows = summed.total, sum(roster.rows.values())
    bound = float(found.fit) - float(moved.divergence())
    objective = (bound + float(new.log_prior().detach())) / rows
    if summed.sites == state.sites and not objective >= state.objectives[-1]:
        return taken_back(state), {"objective": float(state.objectives[-1]), "bound": state.bound}
    if state.evaluations % COMPARED == 0 and HYPER not in found.values:  # Student-t noise is not concave
        pseudo = [pseudo_sums(part, asked.mean, roster.rows[site]) for site, part in summed.parts.items()]
        levels = np.broadcast_to(pooled_bound.unit_function(new), asked.mean.shape).reshape(-1, asked.mean.shape[-1])
        for level, *each in zip(levels, *pseudo, strict=True):  # of each function
            parts = dict(zip(summed.parts, each, strict=True))
            yield from pooled_bound.report_contradictions(parts, level, at_unit_noise)
    if summed.sites != state.sites:
        state = remembering(state, 0)
    local = gradient_at_server(duals, old, new, found)
    gradient = pack({name: (share + local[name]) / rows for name, share in found.values.items()})
    points, gradients = np.vstack([state.points, pack(point)]), np.vstack([state.gradients, gradient])
    objectives, known = np.append(state.objectives, objective), (moved.precision.numpy(), moved.shift.numpy())
    memory = points[-MEMORY - 1 :], gradients[-MEMORY - 1 :], objectives[-MEMORY - 1 :]
    count, halvings = state.evaluations + 1, max(state.halvings - 1, 0)
    state = SVGPState(
        point, *known, state.relative, found, *memory, bound, count, halvings, summed.sites, state.exchanges
    )
    return state, {"objective": objective, "bound": bound}


def taken_back(state: SVGPState) -> SVGPState:
    """The same evaluation with half the steps; now and then without the memory."""
    halved = replace(state, halvings=state.halvings + 1)
    return halved if halved.halvings % HALVINGS else remembering(halved, 1)


def remembering(state: SVGPState, count: int) -> SVGPState:
    """With the latest evaluations alone."""
    rest = slice(len(state.objectives) - count, None)
    return replace(state, points=state.points[rest], gradients=state.gradients[rest], objectives=state.objectives[rest])


def improved(state: SVGPState) -> Duals:
    """(B, b) after the natural-gradient step."""
    return state.duals if state.found is None else state.duals.stepped(state.found, 0.5**state.halvings)


def trial(state: SVGPState, model: ModelSection) -> NamedArrays:
    """The next w: uphill by L-BFGS (Nocedal and Wright, Algorithm 7.4) in the units of :func:`units`."""
    if state.evaluations < WARM or not len(state.points):
        return dict(state.values)
    scale = units(state.values, model)
    points, gradients = state.points / scale, state.gradients * scale
    pairs = [
        (s, -y)
        for s, y in zip(np.diff(points, axis=0), np.diff(gradients, axis=0), strict=True)
        if -s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y)
    ]
    inverse = pairs[-1][0] @ pairs[-1][1] / (pairs[-1][1] @ pairs[-1][1]) if pairs else 1.0
    step = two_loops(gradients[-1], pairs, np.full(len(scale), inverse))
    limit = LARGEST if pairs else FIRST
    largest = float(np.abs(step).max())
    step *= limit / largest if largest > limit or not pairs else 1.0
    return unpack(pack(state.values) + 0.5**state.halvings * step * scale, state.values)


def units(values: Mapping[str, ndarray], model: ModelSection) -> Array:
    """The unit of each entry of w: of Z a share of the first lengthscale, of all others one."""
    start = LatentGP(model, torch.from_numpy(values[LOCATIONS])).to_arrays()
    lengths = [np.exp(array).mean() for name, array in start.items() if "lengthscale" in name]
    unit = UNIT * float(np.mean(lengths)) if lengths else 1.0
    return pack({name: np.full_like(array, unit if name == LOCATIONS else 1.0) for name, array in values.items()})


def finished(problem: Problem, state: SVGPState) -> bool:
    """Whether nothing is gained any more, or the exchanges are used up."""
    return converged(state) or state.exchanges >= problem.exchanges


def converged(state: SVGPState) -> bool:
    """Whether nothing is gained any more."""
    gained = np.diff(state.objectives[-WARM - 1 :])
    flat = len(gained) == WARM and state.evaluations > 2 * WARM and gained.max() < TOLERANCE
    return bool(flat) or state.halvings >= 2 * HALVINGS


def posterior(state: SVGPState) -> PooledPosterior:
    """The accepted parameters, with q after the step that their totals allow."""
    q = improved(state).posterior()
    return PooledPosterior(state.values, q.mean.numpy(), q.covariance.numpy())


class SVGP(FederatedStrategy[SVGPState]):
    """Natural-gradient and quasi-Newton steps on the pooled bound of any likelihood, from sums."""

    method = "svgp"
    options_class = SVGPOptions
    state_class = SVGPState
    options: SVGPOptions

    @property
    def problem(self) -> Problem:
        """What stays the same during a run, with the jitter that sites use: they whiten as the server does."""
        model, exchanges = self.config.model, self.options.exchanges or USUAL
        if self.config.precision == "float32":
            model = model.model_copy(update={"jitter": max(model.jitter, FLOAT32_JITTER)})
        return Problem(model, self.config.seed, exchanges, self.preparation.training_target)

    def initialise(self, roster: Roster) -> Asking[SVGPState]:
        """Before the first evaluation."""
        return (yield from start(self.problem, roster))

    def one_round(self, state: SVGPState, roster: Roster) -> Asking[tuple[SVGPState, Figures]]:
        """One evaluation."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: SVGPState) -> bool:
        """Whether nothing is gained any more, or the exchanges are used up."""
        return finished(self.problem, state)

    def converged(self, state: SVGPState) -> bool:
        """Whether nothing is gained any more."""
        return converged(state)

    def exchanges_to_come(self, state: SVGPState) -> list[tuple[int, float]]:
        """As many as are left, if it does not converge before."""
        return [(max(0, self.problem.exchanges - state.exchanges), 1.0)]

    def predictive(self, state: SVGPState, roster: Roster) -> Asking[Predicted]:
        """The posterior at the accepted parameters; no site is asked."""
        del roster
        yield from ()
        found, gains = posterior(state), np.diff(state.objectives[-pooled_bound.RECENT_ROUNDS - 1 :])
        details = pooled_bound.progress(state.exchanges, gains, 1, sum(self.preparation.rows.values()))
        details |= {"bound": state.bound, "evaluations": state.evaluations}
        return Predicted(found, pooled_bound.saved(found, self.problem.model), details)

    def public(self, state: SVGPState) -> NamedArrays:
        """The parameters."""
        return encode(Parameters(state.values))

    def adopt(self, state: SVGPState, arrays: NamedArrays) -> SVGPState:
        """Other parameters start anew; the same ones change nothing."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return (
            state
            if np.array_equal(pack(given), pack(state.values))
            else at(LatentGP.from_arrays(self.problem.model, given))
        )

    def warnings(self) -> list[str]:
        """Whether the total of sums nearly reveals rows."""
        points = len(self.current.values[LOCATIONS])
        return super().warnings() + pooled_bound.disclosure_by_total(points, self.roster().rows)
