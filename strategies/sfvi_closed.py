"""SFVI in closed form: Newton steps on θ for a hierarchical GP with Gaussian noise, one exchange a step.

At fixed θ the structured posterior of Hassan, Salomone and Mengersen (2023) is known. A site integrates its deviation
out and sends sums; from their total the server has the bound F, its exact gradient and its Hessian
(:mod:`fedgp_flower.methods.closed_form`). The server needs totals and no site's summand. Every logarithm of θ has
a weak normal prior, whose mode is where a run starts and whose standard deviations are the units of a step. What sites
deviate by, the amplitude of k_L and the sds τ of intercepts and slopes, has an exponential prior besides, which
penalises leaving the model without deviations (Simpson et al., *Penalising model component complexity*, 2017): it
exceeds its first value with probability .05.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray

from fedgp_flower.gp.ascent import pack, unpack
from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.linalg import kernel_cholesky, laplace_deviations
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.closed_form import (
    Expansion,
    Slopes,
    Sums,
    expansion,
    newton_step,
    posterior,
    transported,
)
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.family import initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.methods.sfvi.shaped import NOISE, WIDTHS, ShapedGP
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.pooled_bound import CURVATURE
from strategies.server.finalise import lengthscale_facts
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
from strategies.sfvi_state import StructuredVI, initialise

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
HOW = f"{CURVATURE}; straight lines have terms of their own and do not count here"
VARIANCES = ("outputscale", "variance", "noise")
SHRINKAGE = math.log(20)
"""Rate of the prior of a standard deviation of what sites deviate by, over its first value."""


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
    """That of a step that no radius shortens."""

    @property
    def theta(self) -> NamedArrays:
        """The best θ that steps move."""
        return {
            name: array
            for name, array in self.parameters.items()
            if name.startswith("theta.") and name not in self.widths
        }


N = TypeVar("N", bound=NewtonState)
FactorAt: TypeAlias = Callable[[Mapping[str, ndarray]], torch.Tensor]
"""L with L Lᵀ = K_zz of the trend at θ and widths."""


def one_round(state: NewtonState, roster: Roster, factor_at: FactorAt) -> Asking[tuple[NewtonState, Figures]]:
    """One exchange, one step. Totals of other sites than before belong to another F: then the trial point is taken."""
    del roster
    request = ExpansionRequest({**unpack(state.trial, state.theta), **state.widths, **state.asked})
    summed: Summed[ExpansionShare] = yield Total(ExpansionShare, request)
    if summed.total is None:
        return state, {}
    found, count = with_prior(state, summed.total), float(summed.total.count)
    if state.value is None or (summed.sites, count) != (state.sites, state.count):
        radius, taken = FIRST_RADIUS, True
    else:
        radius = next_radius(state, found.value)
        taken = found.value > state.value - SLACK
    if taken:
        theta = unpack(state.trial, state.theta)
        state = replace(
            state,
            **of_total(summed.total, found),
            parameters={**theta, **state.widths, **on_the_wire({}, named(found.q_global))},
            sites=summed.sites,
            count=count,
            value=found.value,
            bound=found.value - log_prior(state)[0],
        )
    state = stepped(state, radius, factor_at)
    assert state.bound is not None
    return state, {"objective": state.bound / state.count, "promised_rise": state.rise}


def of_total(total: ExpansionShare, found: Expansion) -> dict[str, Any]:
    """What a state keeps of a total that counts, and of F to second order."""
    kept = {name: getattr(total, name) for name in ("precision", "shift", "squares", "known")}
    return kept | {"gradient": found.gradient.numpy(), "hessian": found.hessian.numpy()}


def shaped_round(state: NewtonState, roster: Roster, model: ShapedGP) -> Asking[tuple[NewtonState, Figures]]:
    """The same, and a step on the widths of the priors of shapes once it is due."""
    state, figures = yield from one_round(state, roster, partial(inducing_factor, model))
    return widened(state, np.array(model.varied) != NOISE) if figures else state, figures


def widened(state: N, learned: Bool[ndarray, " W"]) -> N:
    """MacKay's step on widths, w² ← (Σₖ(w zₖ)² + n₀ w₀²) / (Σₖ(1 − var zₖ) + n₀), once steps on θ promise little.

    It rests where EM does, at w² = mean E(w zₖ)². F is another one then, so that the next point is taken. That of noise
    stays: one site with next to no noise would widen it for all.
    """
    if state.rise > SETTLING or not state.widths:
        return state
    assert state.squares is not None
    assert state.known is not None
    [(name, now)], start = state.widths.items(), state.first_widths
    squares = state.squares + USUAL_SITES * np.exp(2 * (start - now))
    moved = np.where(learned, now + 0.5 * np.log(squares / (state.known + USUAL_SITES)), now)
    if np.abs(moved - now).max() < WIDER:
        return state
    return replace(state, widths={name: moved}, value=None, promised=math.inf)


def prior_of(name: str) -> tuple[float, float]:
    """Standard deviation of a logarithm of θ under its normal prior, and κ of its exponential one."""
    variance = any(kind in name for kind in VARIANCES)
    if "site_slope" in name or ("deviation." in name and variance):
        return 4.0, 0.5 if variance else 1.0
    return 2.0 if variance else 1.0, 0.0


def log_prior(state: NewtonState) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Log p(θ) at the trial point up to a constant, its first and second derivatives in prior standard deviations."""
    away, rate = (state.trial - state.mode) / state.scale, state.scale * state.powers
    shrunk = SHRINKAGE * np.exp(rate * away) * (rate > 0)
    slope, curvature = -away - rate * shrunk, -1 - rate**2 * shrunk
    return float(-0.5 * away @ away - shrunk.sum()), torch.from_numpy(slope), torch.from_numpy(curvature)


def with_prior(state: NewtonState, total: ExpansionShare) -> Expansion:
    """F + log p(θ) to second order around the trial point, by θ in prior standard deviations."""
    precision, shift, constant, flat, curvature = (
        torch.from_numpy(np.asarray(own))
        for own in (total.precision, total.shift, total.constant, total.slopes, total.curvature)
    )
    found = expansion(Sums(precision, shift, constant), Slopes.of(flat, len(shift)), curvature)
    scale, (value, slope, bend) = torch.from_numpy(state.scale), log_prior(state)
    return replace(
        found,
        value=found.value + value,
        gradient=scale * found.gradient + slope,
        hessian=scale[:, None] * found.hessian * scale + torch.diag(bend),
    )


def next_radius(state: NewtonState, value: float) -> float:
    """By the share of the promised rise that came."""
    assert state.value is not None
    share = (value - state.value) / state.promised
    if share > GOOD:
        return min(2 * state.radius, LARGEST_RADIUS)
    length = float(np.abs((state.trial - pack(state.theta)) / state.scale).max())
    return length / 3 if share < POOR else state.radius


def stepped(state: N, radius: float, factor_at: FactorAt) -> N:
    """The next trial point, from the best one, and a guess of q(Z_G) there."""
    assert state.gradient is not None
    assert state.hessian is not None
    assert state.precision is not None
    assert state.shift is not None
    gradient, hessian = torch.from_numpy(state.gradient), torch.from_numpy(state.hessian)
    step, promised = newton_step(gradient, hessian, radius)
    _, rise = newton_step(gradient, hessian, math.inf)
    trial = pack(state.theta) + state.scale * step.numpy()
    turned = transported(
        torch.from_numpy(state.precision),
        torch.from_numpy(state.shift),
        factor_at({**state.theta, **state.widths}),
        factor_at({**unpack(trial, state.theta), **state.widths}),
    )
    asked = on_the_wire({}, named(posterior(*turned)[0]))
    return replace(state, trial=trial, asked=asked, radius=radius, promised=promised, rise=rise)


def deviations(state: NewtonState) -> Array:
    """Standard deviations of θ at the best one, by Laplace's approximation [T]."""
    assert state.hessian is not None
    return np.asarray(state.scale * laplace_deviations(-state.hessian - np.eye(len(state.scale)), prior=1.0))


@torch.no_grad()
def inducing_factor(model: ShapedGP, theta: Mapping[str, ndarray]) -> torch.Tensor:
    """L with L Lᵀ = K_zz of the trend at a θ."""
    model.load_theta({name.removeprefix("theta."): torch.from_numpy(own) for name, own in theta.items()})
    kzz = model.trend(model.inputs).to_dense()
    return kernel_cholesky(kzz, variance=prior_variance(model.trend, model.inputs), jitter=model.options.jitter)


def beginning(parameters: Mapping[str, ndarray], shared: Mapping[str, ndarray], num_inputs: int) -> NewtonState:
    """θ as the sites' model starts, but lengthscales √D times as long, because so are distances; q(Z_G) = p(Z_G)."""
    theta = {name: array for name, array in parameters.items() if name.startswith("theta.")}
    widths = {name: theta.pop(name) for name in [f"theta.{WIDTHS}"] if name in theta}
    theta = {n: own + 0.5 * math.log(num_inputs) * n.endswith("lengthscale") for n, own in theta.items()}
    scales, powers = ({n: np.full(own.shape, prior_of(n)[k]) for n, own in theta.items()} for k in (0, 1))
    prior = initial_global(len(parameters["q.mean"]), scale=1.0, triangular=True)
    mode, eta = pack(theta), on_the_wire({}, named(prior))
    return NewtonState(
        {**theta, **widths, **eta},
        shared,
        mode,
        pack(scales),
        pack(powers),
        mode,
        eta,
        widths,
        next(iter(widths.values()), None),
    )


class ClosedFormVI(StructuredVI[N]):
    """What Newton steps on θ have in common, whatever the likelihood."""

    implied: ClassVar[Mapping[str, Any]] = {"objective": "closed-form"}

    def first_state(self, roster: Roster) -> Asking[NewtonState]:
        """The mode of the prior."""
        start = yield from initialise(roster, self.options, self.config.model, self.config.seed)
        return beginning(start.parameters, start.shared, self.preparation.num_inputs)

    def model_of(self, state: N) -> ShapedGP:
        """The model, for its kernels."""
        width, points = self.preparation.num_inputs, torch.from_numpy(state.shared[SHARED])
        return ShapedGP.configured(self.options, self.config.model, width, points)

    def finished(self, state: N) -> bool:
        """Whether no step promises more than the tolerance, and no healthy site is missing from the total."""
        return state.promised < self.options.tolerance and set(self.roster().sites) <= set(state.sites)

    def adopt(self, state: N, arrays: NamedArrays) -> N:
        """Other parameters are the next trial point, whatever their bound."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        if all(np.array_equal(given[name], own) for name, own in state.parameters.items()):
            return state
        state = replace(state, parameters=given, value=None, promised=math.inf)
        eta = {name: own for name, own in given.items() if name.startswith("q.")}
        widths = {name: given[name] for name in state.widths}
        return replace(state, trial=pack(state.theta), asked=eta, widths=widths)

    def details_of(self, state: N) -> dict[str, Any]:
        """The bound in nats, and what the next step would promise."""
        facts: dict[str, Any] = {"shared_latents": len(state.parameters["q.mean"])}
        if state.bound is None:
            return facts
        widths = {name: np.exp(own).tolist() for name, own in state.widths.items()}
        facts["relevance"] = lengthscale_facts(state.theta, unpack(deviations(state), state.theta), HOW)
        return facts | {"bound": state.bound, "promised_rise": state.rise, "widths": widths}

    def converged(self, state: N) -> bool:
        """Whether another step would promise less than the tolerance."""
        return state.value is not None and state.rise < self.options.tolerance


class SFVIClosedForm(ClosedFormVI[NewtonState]):
    """Newton steps on θ, until the next one promises no more than ``tolerance``."""

    method = "sfvi"
    state_class = NewtonState

    def initialise(self, roster: Roster) -> Asking[NewtonState]:
        """The mode of the prior."""
        return (yield from self.first_state(roster))

    def one_round(self, state: NewtonState, roster: Roster) -> Asking[tuple[NewtonState, Figures]]:
        """One exchange."""
        return (yield from shaped_round(state, roster, self.model_of(state)))
