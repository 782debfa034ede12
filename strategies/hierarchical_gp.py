"""A shared trend and a deviation of each site or unit, in closed form: Newton steps on θ, one exchange per step.

At fixed θ the structured posterior of Hassan, Salomone and Mengersen (2023) is known. A site integrates its deviation
out and sends sums. Their total gives the server the bound F, its exact gradient and its Hessian
(:mod:`fedgp_flower.methods.hierarchical_gp.newton`). Deviations are ``smooth`` at sites and ``rough`` at units along
one input: see the modules of these names.

Each logarithm of θ has a weak normal prior; its mode is the start of a run. The size of smooth deviations
(the amplitude of k_L and the sds τ of intercepts and slopes) also has an exponential prior, under which it exceeds its
first value with probability .05 (Simpson et al., *Penalising model component complexity*, 2017). After the last step,
units with rough deviations calibrate their bands. With smooth deviations, the errors of all rows then give the law of
predictions (:mod:`fedgp_flower.gp.error_law`).

Units share the noise, so that one broken unit would make all others noisy. A unit whose rows alone are far less likely
than those of most units is named and left out of the totals while it is.
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
from fedgp_flower.gp.error_law import SCALE, TAILS, unit_variance
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.messages import add, leaves, message
from fedgp_flower.methods.family import initial_global, named, on_the_wire
from fedgp_flower.methods.hierarchical_gp import messages, rough, smooth
from fedgp_flower.methods.hierarchical_gp.newton import (
    BoundExpansion,
    bound_of,
    expansion,
    newton_step,
    posterior,
    transported,
)
from fedgp_flower.methods.hierarchical_gp.options import HierarchicalOptions
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS
from fedgp_flower.methods.sfvi.gp import NOISE
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.outcome import AT_SITE
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.fedmgp_shared import scaled_targets
from strategies.pooled_bound import MEANINGS, law_of_errors
from strategies.server.questions import Asking, Doubt, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import initial_locations, shape_of_inputs
from strategies.server.strategy import FederatedStrategy
from strategies.sfvi import saved

TOLERANCE = {"smooth": 0.1, "rough": 0.05}
"""Newton's method stops when a step promises a smaller rise of the bound of all rows, in nats."""
FIRST_RADIUS, LARGEST_RADIUS = 1.0, 1.5
"""Trust radius: the largest change of any entry of θ in a step, in the smallest prior standard deviation."""
GOOD, POOR = 0.6, 0.25
"""Above the first share of the promised rise the radius doubles; below the second it becomes a third of the step."""
SLACK = 0.05
"""Allowed decrease of F in nats, because q(Z_G) and the shapes of sites lag one step behind."""
SETTLING, WIDER = 1.0, 0.05
"""Widths are updated if a step promises fewer nats than the first, and if a log width changes by the second."""
USUAL_SITES = 4.0
"""Weight of the initial widths, as a number of sites."""
FAR, SPREADS, LEAST = 5.0, 10.0, 20.0
"""A unit is broken if its log density is below the median of units by more than each of these: nats per row, median
distances of units, and nats for all its rows."""
HOW = "the curvature of the bound at its maximum (Laplace's approximation); straight lines have separate terms"
BROKEN = "its rows are {:.3g} nats per row less likely than those of most units; it is left out of what units share"
SHRINKAGE = math.log(20)
"""Rate of the exponential prior of the size of deviations, relative to its first value."""


@message()
class NewtonState:
    """The best θ so far, the expansion of F around it, and the next trial θ."""

    parameters: Mapping[str, AnyShape]
    """The best θ as ``theta.*``, and its q(Z_G)."""
    shared: Mapping[str, AnyShape]
    mode: Float[ndarray, " T"]
    """Mode of the prior of θ."""
    scale: Float[ndarray, " T"]
    """Standard deviations of the prior of θ."""
    powers: Float[ndarray, " T"]
    """κ of amplitudes e^(κ(θ − mode)) with an exponential prior; 0 for other entries."""
    trial: Float[ndarray, " T"]
    asked: Mapping[str, AnyShape]
    """A guess of q(Z_G) at ``trial``, from which sites start to find their shapes."""
    widths: Mapping[str, AnyShape] = field(default_factory=dict)
    """Logarithms of the widths of priors of shapes, as part of ``theta.*``."""
    first_widths: Float[ndarray, " W"] | None = None
    squares: Float[ndarray, " W"] | None = None
    """Sum of z² over sites at the best θ."""
    known: Float[ndarray, " W"] | None = None
    """Sum of 1 − var z over sites at the best θ."""
    precision: Float[ndarray, "G G"] | None = leaves("P at the best θ", symmetric=True, default=None)
    shift: Float[ndarray, " G"] | None = None
    """p of the total at the best θ."""
    sites: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Units whose sums are not in the total."""
    count: float = 0.0
    """Rows of ``sites``."""
    value: float | None = None
    """F plus the log prior, nats; None before the first total."""
    bound: float | None = None
    """F."""
    gradient: Float[ndarray, " T"] | None = None
    """Gradient of ``value``; like the Hessian, by θ in prior standard deviations."""
    hessian: Float[ndarray, "T T"] | None = None
    radius: float = FIRST_RADIUS
    promised: float = math.inf
    """Predicted rise of ``value`` by the step to ``trial``."""
    rise: float = math.inf
    """Predicted rise by the full Newton step, without a trust radius."""
    factors: Float[ndarray, " K"] | None = leaves(
        "by cut, how much wider bands beyond a unit's last row are at the best θ; none before the end", default=None
    )

    @property
    def theta(self) -> NamedArrays:
        """The best θ, without widths."""
        theta = {name: array for name, array in self.parameters.items() if name.startswith("theta.")}
        return {name: array for name, array in theta.items() if name not in self.widths}


FactorAt: TypeAlias = Callable[[Mapping[str, ndarray]], torch.Tensor]
"""L with L Lᵀ = K_zz of the trend at θ and widths."""


def one_round(state: NewtonState, roster: Roster, factor_at: FactorAt) -> Asking[tuple[NewtonState, Figures]]:
    """One exchange and one step. If the sites have changed, F is another function and the trial point is accepted."""
    theta = unpack(state.trial, state.theta)
    request = Parameters({**theta, **state.widths, **state.asked})  # 1. P, p, c and their derivatives by θ
    summed: Summed[messages.ExpansionShare] = yield Total(messages.ExpansionShare, request)
    if summed.total is None:
        return state, {}
    if "theta.roughness" in theta:
        summed, left_out = yield from without_broken(summed, state.left_out)
        state = replace(state, left_out=left_out)
    assert summed.total is not None
    found, log_prior = with_prior(state, summed.total)  # 2. F + log p(θ) to second order
    count = float(summed.total.count)
    if state.value is None or (summed.sites, count) != (state.sites, state.count):
        radius, taken = FIRST_RADIUS, True
    else:  # 3. accept or reject the trial point, and set the radius
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


def without_broken(
    summed: Summed[messages.ExpansionShare], before: tuple[str, ...]
) -> Asking[tuple[Summed[messages.ExpansionShare], tuple[str, ...]]]:
    """Return the total without broken units, and these; a unit returns at half the limit. Masks hide all units."""
    if not summed.parts:
        return summed, ()
    rows = {site: float(share.count) for site, share in summed.parts.items()}
    densities = np.array([bound_of(share) / rows[site] for site, share in summed.parts.items()])
    gaps = np.median(densities) - densities
    limit = max(FAR, SPREADS * float(np.median(np.abs(gaps))))
    limits = [max(limit, LEAST / count) * (0.5 if site in before else 1.0) for site, count in rows.items()]
    broken = {site: gap for site, gap, most in zip(rows, gaps, limits, strict=True) if not gap <= most}
    yield Doubt({site: BROKEN.format(gap) for site, gap in broken.items()})
    kept = {site: share for site, share in summed.parts.items() if site not in broken}
    return Summed(add(kept.values()), tuple(kept), parts=kept) if broken else summed, tuple(broken)


def widened(state: NewtonState) -> NewtonState:
    """MacKay's update of widths, w² ← (Σₖ(w zₖ)² + n₀ w₀²) / (Σₖ(1 − var zₖ) + n₀), once steps on θ promise little.

    The next trial point is then accepted. The width of noise is fixed: one site with almost no noise would widen it.
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


def with_prior(state: NewtonState, total: messages.ExpansionShare) -> tuple[BoundExpansion, float]:
    """Return the expansion of F + log p(θ) at the trial point, by θ in prior standard deviations, and log p(θ)."""
    away, rate = (state.trial - state.mode) / state.scale, state.scale * state.powers
    shrunk = SHRINKAGE * np.exp(rate * away) * (rate > 0)
    value = float(-0.5 * away @ away - shrunk.sum())
    slope, bend = torch.from_numpy(-away - rate * shrunk), torch.from_numpy(-1 - rate**2 * shrunk)
    found, scale = expansion(total), torch.from_numpy(state.scale)
    hessian = scale[:, None] * found.hessian * scale + torch.diag(bend)
    return BoundExpansion(found.value + value, scale * found.gradient + slope, hessian, found.q_global), value


def next_radius(state: NewtonState, value: float, before: float) -> float:
    """Return the trust radius after a step, from the ratio of actual to predicted rise."""
    share = (value - before) / state.promised
    if share > GOOD:
        return min(2 * state.radius, LARGEST_RADIUS)
    length = float(np.abs(state.trial - pack(state.theta)).max() / state.scale.min())
    return length / 3 if share < POOR else state.radius


def stepped(state: NewtonState, radius: float, factor_at: FactorAt) -> NewtonState:
    """Return the state with the next trial point, from the best one, and a guess of q(Z_G) there."""
    gradient, hessian, precision, shift = (
        torch.tensor(part) for part in (state.gradient, state.hessian, state.precision, state.shift)
    )
    step, promised = newton_step(gradient, hessian, radius, torch.from_numpy(state.scale / state.scale.min()))
    _, rise = newton_step(gradient, hessian, math.inf)
    trial = pack(state.theta) + state.scale * step.numpy()
    before, after = (factor_at({**theta, **state.widths}) for theta in (state.theta, unpack(trial, state.theta)))
    asked = on_the_wire(named(posterior(*transported(precision, shift, before, after))[0]))
    return replace(state, trial=trial, asked=asked, radius=radius, promised=promised, rise=rise)


def first_state(theta: NamedArrays, points: Array, size: int) -> NewtonState:
    """Return the state at the prior's mode of θ with q(Z_G) = p(Z_G); lengthscales grow by √D, as distances do."""
    units, wider = "theta.roughness" in theta, 0.5 * math.log(points.shape[1])
    widths = {name: theta.pop(name) for name in (WIDTHS,) if name in theta}
    theta = {name: array + wider * name.endswith("lengthscale") for name, array in theta.items()}
    priors = {name: (rough.PRIOR_SD, 0.0) if units else smooth.prior_of(name) for name in theta}
    scales, powers = ({name: np.full(theta[name].shape, priors[name][k]) for name in theta} for k in (0, 1))
    mode, eta = pack(theta), on_the_wire(named(initial_global(size, scale=1.0, triangular=True)))
    fixed = {**theta, **widths, **eta}, {SHARED: points}, mode, pack(scales), pack(powers)
    return NewtonState(*fixed, mode, eta, widths, next(iter(widths.values()), None))


def calibrated(state: NewtonState, sites: tuple[str, ...]) -> Asking[NewtonState]:
    """Return the state with the factors of bands; units subtract their own sums at the best q(u) to predict."""
    kept = tuple(site for site in sites if site not in state.left_out)
    summed: Summed[messages.ExpansionShare] = yield Total(messages.ExpansionShare, Parameters(state.parameters), kept)
    if summed.total is None:
        return state
    request = messages.CalibrationRequest(state.parameters, summed.total.precision, summed.total.shift)
    answered: Summed[messages.Calibration] = yield Total(messages.Calibration, request, summed.sites)
    return state if answered.total is None else replace(state, factors=rough.factors(answered.total))


def with_errors(state: NewtonState, *, normal: bool) -> Asking[NamedArrays]:
    """Return scale and mixture of the errors of all rows under smooth deviations; nothing if they are as predicted.

    With ``normal`` only their scale varies. b₀ holds the variance of the mixture, which is scaled to one.
    """
    values, points = state.parameters, len(state.shared[SHARED])
    b, mixture = yield from law_of_errors(lambda law: Parameters({**values, **law}), state.sites, points)
    if mixture is None or (normal and not b.any()):
        return {}
    mixture, variance = unit_variance(mixture)
    b[0] += math.log(variance)
    return {SCALE: b} | ({} if normal else {TAILS: mixture})


class HierarchicalGP(FederatedStrategy[NewtonState]):
    """Newton steps on θ until the next one promises too little."""

    method = "hierarchical-gp"
    options_class = HierarchicalOptions
    state_class = NewtonState
    options: HierarchicalOptions

    def adjusted(self, agreement: Agreement) -> Agreement:
        """Divide the targets of units by their root mean square, without centring."""
        return scaled_targets(self, agreement) if self.options.rough and self.config.standardise else agreement

    def initialise(self, roster: Roster) -> Asking[NewtonState]:
        """Return the mode of the prior of θ and inducing inputs from histograms of inputs."""
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
        """One Newton step; units calibrate their bands after the last one."""
        section, points = self.config.model, state.shared[SHARED]
        if not self.options.rough:
            model = smooth.shaped_gp(section, points)
            return (yield from one_round(state, roster, partial(smooth.inducing_factor, model)))
        inducing = rough.rescale(points, points)

        def factor_at(values: Mapping[str, ndarray]) -> torch.Tensor:
            return rough.inducing_factor(inducing, section.jitter, torch.tensor(values["theta.lengthscale"]))

        state, figures = yield from one_round(state, roster, factor_at)
        if roster.round >= self.planned_rounds or self.settled(state):
            state = yield from calibrated(state, roster.sites)
        return state, figures

    def settled(self, state: NewtonState) -> bool:
        """Whether the next step promises less than the tolerance, with all healthy sites in the total or left out."""
        known = {*state.sites, *state.left_out}
        return state.promised < TOLERANCE[self.options.deviation] and known.issuperset(self.roster().sites)

    def finished(self, state: NewtonState) -> bool:
        """Whether Newton's method has converged and bands are calibrated."""
        return self.settled(state) and not (self.options.rough and state.factors is None)

    def converged(self, state: NewtonState) -> bool:
        """Whether a full Newton step promises less than the tolerance."""
        return state.value is not None and state.rise < TOLERANCE[self.options.deviation]

    def constants(self, state: NewtonState) -> NamedArrays:
        """Return the shared inducing inputs."""
        return dict(state.shared)

    def adopt(self, state: NewtonState, arrays: NamedArrays) -> NewtonState:
        """Return the state with these parameters as the next trial point, which is accepted."""
        given = super().adopt(state, arrays)
        asked = {name: array for name, array in given.parameters.items() if name.startswith("q.")}
        widths = {name: given.parameters[name] for name in state.widths}
        return replace(given, trial=pack(given.theta), asked=asked, widths=widths, value=None, promised=math.inf)

    def predictive(self, state: NewtonState, roster: Roster) -> Asking[Predicted]:
        """Return θ, q(Z_G), and the factors of bands or the law of errors; a site adds its deviation."""
        values: NamedArrays = {**state.parameters, **({} if state.factors is None else {rough.FACTORS: state.factors})}
        law, last = dict[str, ndarray](), self.finished(state) or self.round >= self.planned_rounds
        if last and state.sites and not self.options.rough:
            law = yield from with_errors(state, normal=self.config.transform.target != "none")
        section, deviation = self.config.model.model_dump(by_alias=True), self.options.deviation
        model = {"family": "hierarchical", "model": section, "deviation": deviation}
        model |= {"why_no_posterior": rough.NEEDS_A_UNIT} if self.options.rough else {}
        meanings = {AT_SITE + name: f"{MEANINGS[name]}, at sites with rows" for name in law}
        meanings[rough.FACTORS] = "widths of bands beyond the last row, by cut, over normal ones"
        arrays = {**values, **state.shared, **{AT_SITE + name: array for name, array in law.items()}}
        kept = saved(arrays, (rough if self.options.rough else smooth).EQUATION, model, **meanings)
        facts: dict[str, Any] = {"shared_latents": len(state.parameters["q.mean"])}
        if state.bound is not None:
            facts |= {"bound": state.bound, "promised_rise": state.rise}
            facts |= rough_facts(state) if self.options.rough else smooth_facts(state)
        return Predicted(Parameters(values | law), kept, facts)


def smooth_facts(state: NewtonState) -> dict[str, Any]:
    """Return lengthscales with their uncertainty, and the widths of deviations."""
    curvatures, directions = np.linalg.eigh(-np.asarray(state.hessian))  # at least 1, that of the normal prior
    sds = state.scale * np.sqrt((directions**2 / np.maximum(curvatures, 1.0)).sum(1))
    relevance = lengthscale_facts(state.theta, unpack(sds, state.theta), HOW)
    return {"relevance": relevance, "widths": {name: np.exp(log).tolist() for name, log in state.widths.items()}}


def rough_facts(state: NewtonState) -> dict[str, Any]:
    """Return hyperparameters and the factors of bands by cut."""
    theta, factors = rough.theta_of(state.theta), [] if state.factors is None else state.factors.tolist()
    roughness = theta.pop("roughness").softmax(0).tolist()
    facts = {"roughness": roughness, "hyperparameters": {name: float(log.exp()) for name, log in theta.items()}}
    widened = {f"{cut:.1f}": by for cut, by in zip(rough.CUTS, factors, strict=False)}
    return facts | ({"widened": widened} if widened else {})
