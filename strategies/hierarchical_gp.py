"""A shared trend and a deviation of each site or unit, in closed form: Newton steps on θ, one exchange a step.

At fixed θ the structured posterior of Hassan, Salomone and Mengersen (2023) is known. A site integrates its deviation
out and sends sums; from their total the server has the bound F, its exact gradient and its Hessian
(:mod:`fedgp_flower.methods.hierarchical_gp.newton`). Deviations are ``smooth`` at sites and ``rough`` at units along
one input: see the modules of these names.

Every logarithm of θ has a weak normal prior, whose mode is where a run starts and whose standard deviations are the
units of a step. The size of smooth deviations, the amplitude of k_L and the sds τ of intercepts and slopes, has an
exponential prior besides (Simpson et al., *Penalising model component complexity*, 2017): it exceeds its first value
with probability .05. After the last step, units with rough deviations calibrate their bands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.agreement import Agreement
from fedgp_flower.gp.linalg import laplace_deviations
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.family import initial_global, named, on_the_wire
from fedgp_flower.methods.hierarchical_gp import rough, smooth
from fedgp_flower.methods.hierarchical_gp.messages import (
    Calibration,
    CalibrationRequest,
    ExpansionShare,
    HierarchicalView,
)
from fedgp_flower.methods.hierarchical_gp.newton import BoundExpansion, expansion, newton_step, posterior, transported
from fedgp_flower.methods.hierarchical_gp.options import HierarchicalOptions
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS
from fedgp_flower.methods.sfvi.gp import NOISE
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.fedmgp_shared import scaled_targets
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy
from strategies.sfvi import saved

TOLERANCE = {"smooth": 0.1, "rough": 0.05}
"""A step that promises a smaller rise of the bound of all rows, in nats, is not taken."""
FIRST_RADIUS, LARGEST_RADIUS = 1.0, 1.5
"""Farthest that a step moves any entry of θ, in prior standard deviations."""
GOOD, POOR = 0.6, 0.25
"""Shares of the promised rise from which on the radius doubles, and below which it is a third of the step."""
SLACK = 0.05
"""Nats by which F may fall: q(Z_G) and the shapes of sites lag a step behind."""
SETTLING, WIDER = 1.0, 0.05
"""Widths of shapes are learned where a step promises less than so many nats, and if some logarithm moves by so much."""
USUAL_SITES = 4.0
"""Sites of the initial widths that those of the run are averaged with."""
HOW = "the curvature of the bound at its end (Laplace's approximation); straight lines have separate terms"
SHRINKAGE = math.log(20)
"""Rate of the exponential prior of the size of deviations, over its first value."""


@message()
class NewtonState:
    """The best θ so far with F to second order around it, and the θ to ask about next."""

    parameters: Mapping[str, AnyShape]
    """The best θ as ``theta.*``, and its q(Z_G)."""
    shared: Mapping[str, AnyShape]
    mode: Float[ndarray, " T"]
    """Of the prior of θ."""
    scale: Float[ndarray, " T"]
    """Its standard deviations."""
    powers: Float[ndarray, " T"]
    """κ of the amplitudes e^(κ(θ − mode)) that have an exponential prior; 0 of what has none."""
    trial: Float[ndarray, " T"]
    asked: Mapping[str, AnyShape]
    """A guess of q(Z_G) there, around which sites find their shapes."""
    widths: Mapping[str, AnyShape] = field(default_factory=dict)
    """Logarithms of the widths of priors of shapes, as part of ``theta.*``."""
    first_widths: Float[ndarray, " W"] | None = None
    squares: Float[ndarray, " W"] | None = None
    """Sum of z² over sites at the best θ."""
    known: Float[ndarray, " W"] | None = None
    """Sum of 1 − var z."""
    precision: Float[ndarray, "G G"] | None = leaves("P at the best θ", symmetric=True, default=None)
    shift: Float[ndarray, " G"] | None = None
    """Of the total at the best θ: p."""
    sites: tuple[str, ...] = ()
    count: float = 0.0
    """Rows of these sites."""
    value: float | None = None
    """F plus the log prior, nats; none before the first total."""
    bound: float | None = None
    """F."""
    gradient: Float[ndarray, " T"] | None = None
    """Of ``value``, like the Hessian in prior standard deviations."""
    hessian: Float[ndarray, "T T"] | None = None
    radius: float = FIRST_RADIUS
    promised: float = math.inf
    """Rise of ``value`` that the step to ``trial`` promises."""
    rise: float = math.inf
    """Rise that a step promises which no radius shortens."""
    factors: Float[ndarray, " K"] | None = leaves(
        "by cut, how much wider bands beyond a unit's last row are at the best θ; none before the end", default=None
    )

    @property
    def theta(self) -> NamedArrays:
        """The best θ that steps move."""
        theta = {name: array for name, array in self.parameters.items() if name.startswith("theta.")}
        return {name: array for name, array in theta.items() if name not in self.widths}


FactorAt: TypeAlias = Callable[[Mapping[str, ndarray]], torch.Tensor]
"""L with L Lᵀ = K_zz of the trend at θ and widths."""


def one_round(state: NewtonState, roster: Roster, factor_at: FactorAt) -> Asking[tuple[NewtonState, Figures]]:
    """One exchange, one step. Totals of other sites than before belong to another F: then the trial point is taken."""
    theta = unpack(state.trial, state.theta)
    request = Parameters({**theta, **state.widths, **state.asked})
    summed: Summed[ExpansionShare] = yield Total(ExpansionShare, request)  # 1. P, p, c and their derivatives by θ
    if summed.total is None:
        return state, {}
    found, log_prior = with_prior(state, summed.total)  # 2. F + log p(θ) to second order
    count = float(summed.total.count)
    if state.value is None or (summed.sites, count) != (state.sites, state.count):
        radius, taken = FIRST_RADIUS, True
    else:  # 3. is the trial point better, and how far does the next step go?
        radius = next_radius(state, found.value, state.value)
        taken = found.value > state.value - SLACK
    if taken:
        state = replace(
            state,
            **{name: getattr(summed.total, name) for name in ("precision", "shift", "squares", "known")},
            gradient=found.gradient.numpy(),
            hessian=found.hessian.numpy(),
            parameters={**theta, **state.widths, **on_the_wire(named(found.q_global))},
            sites=summed.sites,
            count=count,
            value=found.value,
            bound=found.value - log_prior,
        )
    state = replace(stepped(state, radius, factor_at), factors=None)  # 4. the next trial point
    assert state.bound is not None
    return widened(state), {"objective": state.bound / state.count, "promised_rise": state.rise}


def widened(state: NewtonState) -> NewtonState:
    """MacKay's step on widths, w² ← (Σₖ(w zₖ)² + n₀ w₀²) / (Σₖ(1 − var zₖ) + n₀), once steps on θ promise little.

    The next point is taken then. The width of noise stays: one site with next to no noise would widen it for all.
    """
    if state.rise > SETTLING or not state.widths:
        return state
    assert state.squares is not None
    assert state.known is not None
    [(name, now)], start = state.widths.items(), state.first_widths
    squares = state.squares + USUAL_SITES * np.exp(2 * (start - now))
    moved = now + 0.5 * np.log(squares / (state.known + USUAL_SITES))
    moved[NOISE] = now[NOISE]
    if np.abs(moved - now).max() < WIDER:
        return state
    return replace(state, widths={name: moved}, value=None, promised=math.inf)


def with_prior(state: NewtonState, total: ExpansionShare) -> tuple[BoundExpansion, float]:
    """F + log p(θ) to second order around the trial point, by θ in prior standard deviations, and log p(θ)."""
    away, rate = (state.trial - state.mode) / state.scale, state.scale * state.powers
    shrunk = SHRINKAGE * np.exp(rate * away) * (rate > 0)
    value = float(-0.5 * away @ away - shrunk.sum())
    slope, bend = torch.from_numpy(-away - rate * shrunk), torch.from_numpy(-1 - rate**2 * shrunk)
    found, scale = expansion(total), torch.from_numpy(state.scale)
    hessian = scale[:, None] * found.hessian * scale + torch.diag(bend)
    return BoundExpansion(found.value + value, scale * found.gradient + slope, hessian, found.q_global), value


def next_radius(state: NewtonState, value: float, before: float) -> float:
    """By the share of the promised rise that came."""
    share = (value - before) / state.promised
    if share > GOOD:
        return min(2 * state.radius, LARGEST_RADIUS)
    length = float(np.abs((state.trial - pack(state.theta)) / state.scale).max())
    return length / 3 if share < POOR else state.radius


def stepped(state: NewtonState, radius: float, factor_at: FactorAt) -> NewtonState:
    """The next trial point, from the best one, and a guess of q(Z_G) there."""
    gradient, hessian, precision, shift = (
        torch.tensor(part) for part in (state.gradient, state.hessian, state.precision, state.shift)
    )
    step, promised = newton_step(gradient, hessian, radius)
    _, rise = newton_step(gradient, hessian, math.inf)
    trial = pack(state.theta) + state.scale * step.numpy()
    before, after = (factor_at({**theta, **state.widths}) for theta in (state.theta, unpack(trial, state.theta)))
    asked = on_the_wire(named(posterior(*transported(precision, shift, before, after))[0]))
    return replace(state, trial=trial, asked=asked, radius=radius, promised=promised, rise=rise)


# What the two kinds of deviations do not share.


def first_state(theta: NamedArrays, points: Array, size: int) -> NewtonState:
    """Of θ at the mode of its prior, with q(Z_G) = p(Z_G); lengthscales are √D times as long, as distances are."""
    units, wider = "theta.roughness" in theta, 0.5 * math.log(points.shape[1])
    widths = {name: theta.pop(name) for name in (WIDTHS,) if name in theta}
    theta = {name: array + wider * name.endswith("lengthscale") for name, array in theta.items()}
    priors = {name: (rough.PRIOR_SD, 0.0) if units else smooth.prior_of(name) for name in theta}
    scales, powers = ({name: np.full(theta[name].shape, priors[name][k]) for name in theta} for k in (0, 1))
    mode, eta = pack(theta), on_the_wire(named(initial_global(size, scale=1.0, triangular=True)))
    fixed = {**theta, **widths, **eta}, {SHARED: points}, mode, pack(scales), pack(powers)
    return NewtonState(*fixed, mode, eta, widths, next(iter(widths.values()), None))


def calibrated(state: NewtonState) -> Asking[NewtonState]:
    """The state with the factors of bands, from sums at the best q(u): a unit can only take out what it put in."""
    summed: Summed[ExpansionShare] = yield Total(ExpansionShare, Parameters(state.parameters))
    if summed.total is None:
        return state
    request = CalibrationRequest(state.parameters, summed.total.precision, summed.total.shift)
    answered: Summed[Calibration] = yield Total(Calibration, request, summed.sites)
    return state if answered.total is None else replace(state, factors=rough.factors(answered.total))


class HierarchicalGP(FederatedStrategy[NewtonState]):
    """Newton steps on θ, until the next one promises too little."""

    method = "hierarchical-gp"
    options_class = HierarchicalOptions
    state_class = NewtonState
    options: HierarchicalOptions

    def adjusted(self, agreement: Agreement) -> Agreement:
        """Targets of units are divided by their root mean square and not centred: a curve of zeros is no curve."""
        return scaled_targets(self, agreement) if self.options.rough and self.config.standardise else agreement

    def initialise(self, roster: Roster) -> Asking[NewtonState]:
        """The mode of the prior of θ, and inducing inputs from where inputs lie."""
        section = self.config.model
        shape = yield from shape_of_inputs(roster)
        if self.options.rough:
            points = rough.pseudo_inputs(shape.histogram, section.num_inducing)
            theta = {f"theta.{name}": array.numpy() for name, array in rough.first_theta().items()}
            return first_state(theta, points, len(points))
        points = initial_locations(shape, section, self.config.seed)
        model = smooth.shaped_gp(section, points)
        return first_state(on_the_wire(model.theta()), points, model.global_size)

    def one_round(self, state: NewtonState, roster: Roster) -> Asking[tuple[NewtonState, Figures]]:
        """One exchange; units are calibrated after the last one."""
        section, points = self.config.model, state.shared[SHARED]
        if not self.options.rough:
            model = smooth.shaped_gp(section, points)
            return (yield from one_round(state, roster, partial(smooth.inducing_factor, model)))
        inducing = rough.rescale(points, points)

        def factor_at(values: Mapping[str, ndarray]) -> torch.Tensor:
            return rough.inducing_factor(inducing, section.jitter, torch.tensor(values["theta.lengthscale"]))

        state, figures = yield from one_round(state, roster, factor_at)
        if roster.round >= self.config.num_server_rounds or self.settled(state):
            state = yield from calibrated(state)
        return state, figures

    def settled(self, state: NewtonState) -> bool:
        """Whether no step promises more than the tolerance, and no healthy site is missing from the total."""
        return state.promised < TOLERANCE[self.options.deviation] and set(self.roster().sites) <= set(state.sites)

    def finished(self, state: NewtonState) -> bool:
        """Whether Newton's method has settled and bands are calibrated."""
        return self.settled(state) and not (self.options.rough and state.factors is None)

    def converged(self, state: NewtonState) -> bool:
        """Whether another step would promise less than the tolerance."""
        return state.value is not None and state.rise < TOLERANCE[self.options.deviation]

    def constants(self, state: NewtonState) -> NamedArrays:
        """The shared inducing inputs."""
        return dict(state.shared)

    def adopt(self, state: NewtonState, arrays: NamedArrays) -> NewtonState:
        """Other parameters are the next trial point, whatever their bound."""
        given = super().adopt(state, arrays)
        if all(np.array_equal(given.parameters[name], array) for name, array in state.parameters.items()):
            return state
        asked = {name: array for name, array in given.parameters.items() if name.startswith("q.")}
        widths = {name: given.parameters[name] for name in state.widths}
        return replace(given, trial=pack(given.theta), asked=asked, widths=widths, value=None, promised=math.inf)

    def predictive(self, state: NewtonState, roster: Roster) -> Asking[Predicted]:
        """θ, q(Z_G) and the factors; a site adds its deviation."""
        yield from ()
        view, arrays = HierarchicalView(state.parameters, state.factors), {**state.parameters, **state.shared}
        arrays |= {} if state.factors is None else {"factors": state.factors}
        section, deviation = self.config.model.model_dump(by_alias=True), self.options.deviation
        model = {"family": "hierarchical", "model": section, "deviation": deviation}
        model |= {"why_no_posterior": rough.NEEDS_A_UNIT} if self.options.rough else {}
        meaning = "widths of bands beyond the last row, by cut, over normal ones"
        kept = saved(arrays, (rough if self.options.rough else smooth).EQUATION, model, factors=meaning)
        facts: dict[str, Any] = {"shared_latents": len(state.parameters["q.mean"])}
        if state.bound is not None:
            facts |= {"bound": state.bound, "promised_rise": state.rise}
            facts |= rough_facts(state) if self.options.rough else smooth_facts(state)
        return Predicted(view, kept, facts)


def smooth_facts(state: NewtonState) -> dict[str, Any]:
    """Lengthscales with their uncertainty, and how much sites differ."""
    sds = state.scale * laplace_deviations(-np.asarray(state.hessian) - np.eye(len(state.scale)), prior=1.0)
    relevance = lengthscale_facts(state.theta, unpack(sds, state.theta), HOW)
    return {"relevance": relevance, "widths": {name: np.exp(log).tolist() for name, log in state.widths.items()}}


def rough_facts(state: NewtonState) -> dict[str, Any]:
    """Hyperparameters, and the factors of bands by cut."""
    theta, factors = rough.theta_of(state.theta), [] if state.factors is None else state.factors.tolist()
    roughness = theta.pop("roughness").softmax(0).tolist()
    facts = {"roughness": roughness, "hyperparameters": {name: float(log.exp()) for name, log in theta.items()}}
    widened = {f"{cut:.1f}": by for cut, by in zip(rough.CUTS, factors, strict=False)}
    return facts | ({"widened": widened} if widened else {})
