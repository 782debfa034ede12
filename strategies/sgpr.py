"""SGPR in few exchanges: a sparse GP with Gaussian noise, trained on sums over the rows of all sites.

Training maximises J(θ) = log p(y | θ) + log p(θ) over the log hyperparameters θ. The log evidence is that of FITC
(:mod:`fedgp_flower.gp.fitc`), the log prior that of :mod:`fedgp_flower.gp.priors`.

*Start.* The server draws inducing points from a sketch of all rows: sums over cells of rows, the common values of each
input, and the common pairs of values of two inputs. Training does not move them. The first θ is the mean of its prior,
with the best of three shares of noise. The first curvature of J is its expectation there, the Fisher information of a
GP at drawn inputs (Mardia and Marshall 1984), which asks nothing of the sites.

*Training.* A round is a gradient and a BFGS step within a trust region, two exchanges. The server alone optimises the
common scale of kernel and noise. Rounds end when a step promises less than a minimum gain.

*Enlarging.* The server asks for sums at 1024 inducing points and doubles their number while the evidence gains
(:mod:`strategies.enlarging`). Training goes on at 1024 points if twice as many may follow, since few points cannot
represent a rough function; then training at few points ends early if a doubling promises far more. The posterior uses
the fewest points that reach nearly the best evidence.

*Errors.* After training, every row is predicted from all other rows. The distribution of predictions is that of these
errors, a mixture of normals with a scale that varies with the inputs (:mod:`fedgp_flower.gp.error_law`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp import error_law
from fedgp_flower.gp.cells import VALUES, common_values, drawn, weight_of, with_pairs, with_values
from fedgp_flower.gp.fitc import WeightedSums, at_unit_scale, evidence
from fedgp_flower.gp.kernels import amplitude_names, build_kernel
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.models import LOCATIONS, LOG_NOISE, ExactGP
from fedgp_flower.gp.optimisers import pack, rounds_to_come, unpack
from fedgp_flower.gp.priors import NOISE, hyperpriors, log_prior
from fedgp_flower.gp.sums import SparseSums, at_unit_noise
from fedgp_flower.lazy import optimize
from fedgp_flower.messages import message, weighted
from fedgp_flower.methods.sgpr.messages import (
    Candidates,
    EvidenceGradient,
    PairCounts,
    PooledPosterior,
    Sketch,
    TrialSums,
)
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import OneArray, Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import enlarging, pooled_bound
from strategies.pooled_bound import Problem, law_of_errors
from strategies.server.questions import Asking, Doubt, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import points_like_inputs, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

ANCHORS, DRAWS_PER_POINT = 2048, 4
"""Anchors of the sketch; draws from the sketch for each inducing point, since equal draws are merged."""
FIRST_NOISE = (NOISE[0], -2.5, -1.0)
"""Log noise of the first candidates; the others have more noise than the prior expects."""
INFORMATION_ENTRIES = 2**22
"""Most entries in the derivatives of a covariance matrix by all hyperparameters, for the Fisher information."""
LARGEST_STEP = 1.0
"""Largest radius of a step, the change of any log hyperparameter."""
POOR, GOOD = 0.1, 0.5
"""Shares of the predicted gain below which the radius is halved and above which it is doubled."""
SHORTER = (0.1, 0.5)
"""Range of the factor that shortens the radius after a step that lowered J."""
NEWTON_STEPS = 8
"""Newton steps to the best common scale of kernel and noise."""
EXCHANGES_BEFORE, EXCHANGES_PER_ROUND = 4, 2
"""Exchanges before training (descriptions, histograms of inputs, sketch, pairs of common values), and in a round."""
EXCHANGES_AFTER = error_law.REGRESSIONS + 1
"""Exchanges after training: scale and shape of the errors of rows that are predicted from all others."""
DEFAULT_EXCHANGES = 60
"""Exchanges with those at more inducing points, unless ``sgpr.exchanges`` is set."""
MINIMUM_GAIN = 0.001
"""Training ends when a step promises less than this, in nats per row, unless ``sgpr.exchanges`` is set."""
FIRST_SIZE = 1024
"""Number of inducing points at the first enlargement; two doublings fill a message of the default size."""
EXCHANGES_PER_SIZE, ROUNDS_PER_SIZE = 3, 1
"""Exchanges for each number of inducing points after training, and rounds among them."""
FEW_POINTS, FIRST_OF_SEVERAL = 1 / 2, 3 / 5
"""Shares of all exchanges after which training leaves the few points it began with, and the first of several sizes."""
JUDGED_ROUNDS, SHARE_OF_DOUBLING = 2, 0.05
"""Training leaves few points, too, once this many rounds in a row each gain less than this share of a doubling."""
ROUND_COST = 3
"""Computing time of a round in evaluations of sums; the gradient takes as long as two of them."""
TOLERANCE = 1e-7
"""Training ends when a step promises less than this share of |J| per row."""
CURVATURE = "BFGS curvature of the log posterior, begun with the Fisher information"

Evaluated: TypeAlias = tuple[NamedArrays, WeightedSums, float]
"""Parameters at their best scale, the sums of all rows there, and J in nats."""


@message()
class SGPRState:
    """The parameters of the latest accepted step, with the sums, J and its gradient there, and the BFGS curvature."""

    values: Mapping[str, AnyShape]
    """Parameters {θ, Z}; with ``totals``, at the best scale of kernel and noise."""
    places: Float[ndarray, "_ _"]
    """Candidate inducing points [C, D]; training uses the first of them."""
    curvature: Float[ndarray, "_ _"] = field(default_factory=lambda: np.empty((0, 0)))
    """BFGS approximation of −∇²J [H, H], positive definite; empty before the first evaluation."""
    totals: WeightedSums | None = None
    """Weighted sums of all rows at ``values``; None before the first evaluation."""
    height: float = 0.0
    """J at ``values``, in nats."""
    gradient: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    """∇J at ``place`` [H]; empty before the first gradient."""
    place: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    """θ at the latest gradient [H]."""
    sites: tuple[str, ...] = ()
    """Sites whose rows are in ``totals``."""
    exchanges: int = EXCHANGES_BEFORE
    """Exchanges with every site so far."""
    gains: Float[ndarray, " R"] = field(default_factory=lambda: np.empty(0))
    """Gain of J in each recent round, in nats per row, the latest last."""
    converged: bool = False
    weight: float = 1.0
    """Weight of every row in J; below 1 if rows are copies of each other."""
    most: int = 0
    """Limit of the enlargements; none follows if training has as many inducing points."""
    asked: int = 0
    """Number of candidate points at the latest enlargement; 0 during training."""
    rounds: int = 0
    """Rounds since the latest enlargement."""
    radius: float = LARGEST_STEP
    """Largest entry of the next step."""

    @property
    def rows(self) -> float:
        """Number of rows N in ``totals``, weighted; 0 without totals."""
        return 0.0 if self.totals is None else float(self.totals.count)

    @property
    def theta(self) -> Array:
        """The log hyperparameters θ [H]."""
        return pack(logarithms(self.values))

    @property
    def evidence_curve(self) -> Array:
        """Log evidence per row at the first m inducing points, for every m [M]."""
        assert self.totals is not None
        return evidence(self.totals).curve / self.rows

    @property
    def several_sizes(self) -> bool:
        """Whether there may be a second doubling, so that training goes on at the first size."""
        return self.most // 2 >= FIRST_SIZE

    @property
    def training(self) -> bool:
        """Whether rounds train without a limit per size: before enlarging, or at the first of several sizes."""
        return not self.asked or (self.asked == FIRST_SIZE and self.several_sizes)

    @property
    def next_size(self) -> int:
        """Number of inducing points to ask for next; 0 if the limit is reached or another doubling gains too little."""
        if not self.asked:
            return min(FIRST_SIZE, self.most) if self.most > len(self.values[LOCATIONS]) else 0
        enlarges = self.most > self.asked and enlarging.doubling_gain(self.evidence_curve) >= enlarging.MINIMUM_GAIN
        return min(2 * self.asked, self.most) if enlarges else 0

    @property
    def outpaced(self) -> bool:
        """Whether the latest rounds at few points gain little compared with what a doubling promises."""
        if self.asked or not self.rows or not self.several_sizes or len(self.gains) < JUDGED_ROUNDS:
            return False
        promise = enlarging.doubling_gain(self.evidence_curve)
        return float(self.gains[-JUDGED_ROUNDS:].max()) < SHARE_OF_DOUBLING * promise

    def promised_gain(self) -> float:
        """Gain of a full step in the quadratic model, ½ ∇Jᵀ C⁻¹ ∇J, in nats per row."""
        return float(self.gradient @ np.linalg.solve(self.curvature, self.gradient)) / 2 / self.rows


def logarithms(values: Mapping[str, ndarray]) -> NamedArrays:
    """Return all parameters except the inducing points."""
    return {name: np.asarray(array) for name, array in values.items() if name != LOCATIONS}


def moved(values: Mapping[str, ndarray], step: Array) -> NamedArrays:
    """Return the parameters after a step of θ [H], clipped to ± :data:`LOG_RANGE`."""
    found = np.clip(pack(logarithms(values)) + step, -LOG_RANGE, LOG_RANGE)
    return {**values, **unpack(found, logarithms(values))}


def within_range(theta: Array, gradient: Array) -> Array:
    """Return the gradient [H] without its entries that point out of ± :data:`LOG_RANGE`."""
    return np.where((np.abs(theta) < LOG_RANGE) | (theta * gradient < 0), gradient, 0.0)


def at_best_scale(values: Mapping[str, ndarray], totals: WeightedSums, section: ModelSection) -> Evaluated:
    """Return the parameters, sums and J at the common scale τ² of kernel and noise that maximises J.

    With t = log τ², J(t) = F(t) + log p(θ(t)) is concave, and dJ/dt = ½ N (τ̂²/τ² − 1) − Σ (θ_i + t − m_i)/s_i². The log
    evidence F is largest at τ̂². The sum is over log amplitudes and log noise with priors N(m_i, s_i²). The noise does
    not fall below e^−:data:`LOG_RANGE`.
    """
    num_inputs = values[LOCATIONS].shape[1]
    names, priors = (*amplitude_names(section, num_inputs), LOG_NOISE), priors_of(section, num_inputs)
    prior_slope = sum(float(np.sum((values[name] - priors[name][0]) / priors[name][1] ** 2)) for name in names)
    prior_curvature = sum(values[name].size / priors[name][1] ** 2 for name in names)
    found, half = evidence(totals), float(totals.count) / 2
    log_evidence_scale = math.log(found.scale)
    log_scale = log_evidence_scale
    for _ in range(NEWTON_STEPS):
        residual = half * math.exp(log_evidence_scale - log_scale)
        slope = residual - half - prior_slope - prior_curvature * log_scale
        log_scale += slope / (residual + prior_curvature)
    log_scale = max(log_scale, -LOG_RANGE - float(values[LOG_NOISE][0]))
    values = {**values, **{name: np.asarray(values[name] + log_scale) for name in names}}
    height = found.at(math.exp(log_scale), 2 * half) + prior_of(values, section)[0]
    return values, totals.scaled(math.exp(log_scale)), height


def prior_of(values: Mapping[str, ndarray], section: ModelSection) -> tuple[float, NamedArrays]:
    """Return log p(θ) up to a constant, and its gradient by name."""
    priors = priors_of(section, values[LOCATIONS].shape[1])
    gradient = {name: np.asarray((m - values[name]) / sd**2) for name, (m, sd) in priors.items()}
    return float(log_prior({name: torch.as_tensor(values[name]) for name in priors}, priors)), gradient


def priors_of(section: ModelSection, num_inputs: int) -> Mapping[str, tuple[float, float]]:
    """Return mean and standard deviation of each log hyperparameter under the prior."""
    return hyperpriors(build_kernel(section, num_inputs), num_inputs)


def start(problem: Problem, roster: Roster) -> Asking[SGPRState]:
    """Return the first state: inducing points from a sketch of all rows, and θ at the means of its prior.

    Raise RunError if no site sends a sketch.
    """
    section, seed = problem.model, problem.seed
    shape = yield from shape_of_inputs(roster)
    anchors = points_like_inputs(shape, ANCHORS, np.random.default_rng([seed, *b"anchors"]))
    num_inputs = anchors.shape[1]
    summed: Summed[Sketch] = yield Total(Sketch, OneArray(anchors), sizes={"C": ANCHORS, "B": VALUES})
    sketch, rng = summed.required("a sketch of its rows"), np.random.default_rng([seed, *b"inducing"])
    wanted = pooled_bound.inducing_points(section.num_inducing, roster, problem.small_sites)
    policy = "warn" if problem.small_sites == "warn" else "cap"
    most = pooled_bound.inducing_points(enlarging.points_per_message(problem.megabytes), roster, policy)
    draws = drawn(sketch.rows, sketch.first, sketch.second, DRAWS_PER_POINT * max(wanted, most), rng)
    points = with_values(draws, sketch.value_rows, sketch.value_sums)
    common = common_values(sketch.value_rows, sketch.value_sums)
    sizes = {"P": num_inputs * (num_inputs - 1) // 2, "V": common.shape[1]}
    pairs: Summed[PairCounts] = yield Total(PairCounts, OneArray(common), sizes=sizes)
    if pairs.total is not None:
        points = with_pairs(draws, points, common, pairs.total.counts, float(sketch.rows.sum()))
    _, first = np.unique(points, axis=0, return_index=True)
    places = points[np.sort(first)][: max(wanted, most)]
    priors, like = priors_of(section, num_inputs), pooled_bound.initial_hyperparameters(section, num_inputs)
    values = {name: np.full_like(array, priors[name][0]) for name, array in like.items()}
    values[LOCATIONS] = places[:wanted]
    logger.info("%d inducing points in training, at most %d after it", len(values[LOCATIONS]), len(places))
    weight = weight_of(sketch.repeats, float(sketch.rows.sum()))
    return SGPRState(values, places, weight=weight, most=min(most, len(places)))


def expected_curvature(state: SGPRState, section: ModelSection) -> Array:
    """Return the curvature [H, H] of −J expected at θ: the Fisher information of N rows, and that of the prior.

    Candidate inducing points stand for the inputs of rows.
    """
    count = min(math.isqrt(INFORMATION_ENTRIES // state.theta.size), math.ceil(state.rows))
    points = torch.from_numpy(state.places[:count])
    model = ExactGP(section, points, torch.zeros(len(points), dtype=torch.float64))
    model.load(state.values)
    priors, theta = priors_of(section, points.shape[1]), logarithms(state.values)
    prior = pack({name: np.full(array.shape, priors[name][1] ** -2.0) for name, array in theta.items()})
    return state.rows / len(points) * model.information().numpy() + np.diag(prior)


def one_round(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
    """Return the state after a gradient and a step, or after an enlargement if training has settled."""
    if settled(problem, state) and state.rows:
        state = yield from enlarge(problem, state, roster.sites)
    else:
        if set(state.sites) != set(roster.sites) or not state.rows:
            state = yield from evaluate(problem, state, roster.sites)
        if state.rows and not np.array_equal(state.place, state.theta):
            state = yield from differentiate(problem, state)
        if state.rows and not state.converged:
            state = yield from search(problem, state)
    if state.totals is None:
        return state, {}
    value = state.height - prior_of(state.values, problem.model)[0]
    figures = {"evidence": value, "objective": value / state.rows, "noise": pooled_bound.noise_of(state.values)}
    return state, figures | {"points": float(len(state.values[LOCATIONS]))}


def sums_at(
    problem: Problem, tried: list[NamedArrays], sites: tuple[str, ...], weight: float
) -> Asking[tuple[Evaluated | None, tuple[str, ...]]]:
    """Ask for sums at several parameters; return the candidate with the largest J, and the sites that answered.

    Sites whose sums contradict those of the others are reported. The result is None if no site answers.
    """
    sizes = {"T": len(tried), "M": len(tried[0][LOCATIONS])}
    request = Candidates(tuple(map(Parameters, tried)))
    summed: Summed[TrialSums] = yield Total(TrialSums, request, sites, sizes=sizes)
    if summed.total is None:
        return None, ()
    totals = [weighted(sums, weight) for sums in summed.total.each()]
    found = [at_best_scale(*pair, problem.model) for pair in zip(tried, totals, strict=True)]
    best = max(range(len(found)), key=lambda number: found[number][2])
    unit_noise = {}  # sums of y/√λ, which has noise 1
    for site, answer in summed.parts.items():
        sums = answer.each()[best]
        unit_noise[site] = SparseSums(sums.gram, sums.projection, sums.weighted_squares, np.zeros(()), sums.count)
    level = pooled_bound.unit_function(pooled_bound.compared(tried[best], problem.model))
    yield Doubt(pooled_bound.contradictions(unit_noise, level, at_unit_noise))
    return found[best], summed.sites


def candidates(state: SGPRState) -> list[NamedArrays]:
    """Return the parameters to ask for; before the first evaluation with several shares of noise."""
    levels = FIRST_NOISE if state.exchanges == EXCHANGES_BEFORE else ()
    return [{**state.values, LOG_NOISE: np.full(1, level)} for level in levels] or [dict(state.values)]


def evaluate(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Return the state with the totals of these sites; the first evaluation tries several shares of noise."""
    found, answered = yield from sums_at(problem, candidates(state), sites, state.weight)
    if found is None:
        return replace(state, exchanges=state.exchanges + 1, converged=False)
    state = restarted(state, found, answered)
    return state if state.curvature.size else replace(state, curvature=expected_curvature(state, problem.model))


def restarted(state: SGPRState, found: Evaluated, sites: tuple[str, ...]) -> SGPRState:
    """Return the state after an exchange at other parameters or rows, where the gradient is unknown."""
    values, totals, objective = found
    state = replace(state, values=values, totals=totals, height=objective, sites=sites, converged=False)
    return replace(state, gradient=np.empty(0), place=np.empty(0), exchanges=state.exchanges + 1)


def differentiate(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """Return the state with ∇J at θ, the BFGS update along the latest step, and whether training has converged."""
    assert state.totals is not None
    theta, request = state.theta, PooledPosterior.of(state.values, state.totals.posterior())
    summed: Summed[EvidenceGradient] = yield Total(EvidenceGradient, request, state.sites, sizes={"H": theta.size})
    if summed.total is None or set(summed.sites) != set(state.sites) or summed.silent:
        return without_totals(state)
    gradient = state.weight * summed.total.gradient + pack(prior_of(state.values, problem.model)[1])
    gradient = within_range(theta, gradient)
    if state.gradient.size:
        state = replace(state, curvature=bfgs(state.curvature, theta - state.place, state.gradient - gradient))
    state = replace(state, gradient=gradient, place=theta, exchanges=state.exchanges + 1)
    return replace(state, converged=rests(problem, state))


def rests(problem: Problem, state: SGPRState) -> bool:
    """Return whether a step promises less than the minimum gain, or than rounding."""
    rounding = TOLERANCE * max(1.0, abs(state.height) / state.rows)
    minimum = problem.minimum_gain if state.training else enlarging.MINIMUM_GAIN
    return state.promised_gain() < max(minimum, rounding)


def bfgs(curvature: Array, step: Array, change: Array) -> Array:
    """Return the BFGS update C − C s sᵀ C/sᵀCs + y yᵀ/sᵀy for a step s and the change y of −∇J along it.

    C is returned unchanged if J is not concave along s, that is sᵀy ≤ 0 (Nocedal and Wright, Eq. 6.19).
    """
    along = float(step @ change)
    if along <= 1e-10 * float(np.linalg.norm(step) * np.linalg.norm(change)):
        return curvature
    image = curvature @ step
    return curvature - np.outer(image, image) / float(step @ image) + np.outer(change, change) / along


def restricted(curvature: Array, gradient: Array, radius: float) -> Array:
    """Return the step (C + μI)⁻¹∇J [H] with μ ≥ 0 so that its largest entry is at most the radius; 0 if possible.

    It maximises the quadratic model of J among steps of its length (Nocedal and Wright, Theorem 4.1).
    """
    roots, axes = np.linalg.eigh(curvature)
    along = axes.T @ gradient

    def excess(shift: float) -> float:
        return float(np.abs(axes @ (along / (roots + shift))).max()) - radius

    shift = optimize.brentq(excess, 0.0, float(np.linalg.norm(gradient)) / radius) if excess(0.0) > 0 else 0.0
    return axes @ (along / (roots + shift))


def search(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """Return the state after a step if it raises J; otherwise the old state with a smaller radius.

    The new radius is where the parabola through both values of J and the slope is highest, within :data:`SHORTER`.
    """
    step = restricted(state.curvature, state.gradient, state.radius)
    candidate = moved(state.values, step)
    found, sites = yield from sums_at(problem, [candidate], state.sites, state.weight)
    if found is None or set(sites) != set(state.sites):
        return without_totals(state)
    values, totals, objective = found
    gain, slope = objective - state.height, float(state.gradient @ step)
    gains = np.append(state.gains, max(gain, 0.0) / state.rows)[-pooled_bound.RECENT_ROUNDS :]
    state = replace(state, exchanges=state.exchanges + 1, rounds=state.rounds + bool(state.asked), gains=gains)
    if gain <= 0:
        shorter = float(np.clip(slope / 2 / (slope - gain), *SHORTER))
        return replace(state, radius=float(np.abs(step).max()) * shorter)
    share = gain / (slope - float(step @ state.curvature @ step) / 2)
    radius = state.radius * (0.5 if share < POOR else 2.0 if share > GOOD else 1.0)
    return replace(state, values=values, totals=totals, height=objective, radius=min(radius, LARGEST_STEP))


def enlarge(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Return the state with more inducing points and the same θ; without an answer of every site, the old one."""
    size = state.next_size
    values = enlarging.ordered({**state.values, LOCATIONS: state.places[:size]}, problem.model)
    found, answered = yield from sums_at(problem, [values], sites, state.weight)
    if found is None or set(answered) != set(sites):
        logger.warning("some sites sent no sums at %d inducing points; the run keeps the previous points", size)
        return replace(state, exchanges=state.exchanges + 1, most=0)
    return replace(restarted(state, found, answered), asked=size, rounds=0)


def without_totals(state: SGPRState) -> SGPRState:
    """Return the state without totals, so that the next round evaluates the rows of the present sites."""
    logger.warning("the sites changed; training evaluates the current parameters again")
    return replace(state, totals=None, exchanges=state.exchanges + 1)


def sizes_from(first: int, most: int) -> list[int]:
    """Return the numbers of inducing points of all enlargements: ``first``, and its doublings up to ``most``."""
    found = [first] if first else []
    while found and found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def exchanges_left(problem: Problem, state: SGPRState) -> int:
    """Return how many exchanges remain at the current number of inducing points."""
    if not state.training:
        return EXCHANGES_PER_ROUND * (ROUNDS_PER_SIZE - state.rounds)
    if state.several_sizes and (not state.asked or state.next_size):
        return share_of(problem, FIRST_OF_SEVERAL if state.asked else FEW_POINTS) - state.exchanges
    return problem.exchanges + EXCHANGES_PER_SIZE * bool(state.asked) - state.exchanges


def share_of(problem: Problem, share: float) -> int:
    """Return a share of the exchanges before and in training."""
    return int(share * (EXCHANGES_BEFORE + problem.exchanges))


def settled(problem: Problem, state: SGPRState) -> bool:
    """Return whether training at this number of points has converged, gains little, or has no exchanges left."""
    return state.converged or state.outpaced or exchanges_left(problem, state) < EXCHANGES_PER_ROUND


def finished(problem: Problem, state: SGPRState) -> bool:
    """Return whether training has settled and no enlargement follows."""
    return settled(problem, state) and (not state.rows or not state.next_size)


def posterior(
    problem: Problem, state: SGPRState, roster: Roster
) -> Asking[tuple[PooledPosterior, WeightedSums, tuple[str, ...]]]:
    """Return the exact posterior of all rows at the fewest sufficient inducing points, its totals and their sites.

    Raise RunError if the totals lack a site's rows and no site sends new sums.
    """
    values, totals, sites = state.values, state.totals, state.sites
    if totals is None or set(state.sites) != set(roster.all_sites):
        found, sites = yield from sums_at(problem, candidates(state), roster.all_sites, state.weight)
        if found is None:
            raise RunError("no site sent usable sums")
        values, totals, _ = found
    if state.asked:
        rows = float(totals.count)
        loss = enlarging.predictive_loss(values, problem.model, math.exp(float(totals.log_variances) / rows))
        count = enlarging.sufficient_points(evidence(totals).curve / rows, loss)
        values = {**values, LOCATIONS: values[LOCATIONS][:count]}
        values, totals, _ = at_best_scale(values, totals.leading(count), problem.model)
    return PooledPosterior.of(values, totals.posterior()), totals, sites


def with_errors(
    q: PooledPosterior, sites: tuple[str, ...], section: ModelSection, weight: float = 1.0, *, normal: bool
) -> Asking[PooledPosterior]:
    """Return the posterior with the law of the errors of its sites' rows, each predicted from all others.

    The variance of the errors scales kernel and noise by τ²; then m, the mean of whitened values, is divided by τ. With
    ``normal`` only their scale varies: the mean of a transformed target needs normal errors.
    """
    b, mixture = yield from law_of_errors(
        lambda law: replace(q, values={**q.values, **law}), sites, len(q.mean), weight
    )
    if mixture is None or (normal and not b.any()):
        return q
    mixture, variance = error_law.unit_variance(mixture)
    scaled = (*amplitude_names(section, q.values[LOCATIONS].shape[1]), LOG_NOISE)
    values = {**q.values, **{name: np.asarray(q.values[name] + math.log(variance)) for name in scaled}}
    values |= ({error_law.SCALE: b} if b.any() else {}) | ({} if normal else {error_law.TAILS: mixture})
    return replace(q, values=values, mean=q.mean / math.sqrt(variance))


class SGPR(FederatedStrategy[SGPRState]):
    """Maximise the log posterior of the hyperparameters from sums over all rows, then predict with the exact q(v)."""

    method = "sgpr"
    options_class = SGPROptions
    state_class = SGPRState
    options: SGPROptions
    exchanges_a_round = EXCHANGES_PER_ROUND

    @property
    def problem(self) -> Problem:
        """The constants of the run."""
        section, options = self.config.model, self.options
        most = enlarging.points_per_message(section.max_megabytes)
        enlargements = EXCHANGES_PER_SIZE * len(sizes_from(min(FIRST_SIZE, most), most))
        exchanges = options.exchanges or DEFAULT_EXCHANGES - enlargements - EXCHANGES_AFTER
        minimum_gain, megabytes = 0.0 if options.exchanges else MINIMUM_GAIN, section.max_megabytes
        return Problem(section, self.config.seed, exchanges, {}, options.small_sites, minimum_gain, megabytes)

    def initialise(self, roster: Roster) -> Asking[SGPRState]:
        """Return the first inducing points and hyperparameters."""
        return (yield from start(self.problem, roster))

    def one_round(self, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
        """Return the state after a gradient and a step, or after an enlargement."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: SGPRState) -> bool:
        """Whether training has settled and no enlargement follows."""
        return finished(self.problem, state)

    def converged(self, state: SGPRState) -> bool:
        """Whether training at few inducing points has converged."""
        return state.converged or bool(state.asked)

    def exchanges_to_come(self, state: SGPRState) -> list[tuple[int, float]]:
        """Return exchanges and cost per exchange: of the remaining training, then of each enlargement.

        Recent gains forecast when training converges.
        """
        left = exchanges_left(self.problem, state)
        rounds = None if state.asked else rounds_to_come(state.gains, 1, self.problem.minimum_gain)
        if settled(self.problem, state):
            left = 0
        elif rounds is not None:
            left = min(left, EXCHANGES_PER_ROUND * max(rounds, pooled_bound.RECENT_ROUNDS - len(state.gains)))
        sizes = sizes_from(state.next_size, state.most) if state.rows else []
        work = (1 + ROUNDS_PER_SIZE * ROUND_COST) / EXCHANGES_PER_SIZE
        enlargements = [(EXCHANGES_PER_SIZE, work * size**2) for size in sizes]
        if sizes and sizes[0] == FIRST_SIZE and state.several_sizes:
            rest = max(0, share_of(self.problem, FIRST_OF_SEVERAL) - state.exchanges - left)
            enlargements[0] = (EXCHANGES_PER_SIZE + rest, work * FIRST_SIZE**2)
        return [(left, self.work(state, state)), *enlargements]

    def work(self, before: SGPRState, after: SGPRState) -> float:
        """Return the mean cost of an exchange in a round: M² for sums, twice as much for a gradient."""
        cost = 1.0 if after.asked > before.asked else ROUND_COST / EXCHANGES_PER_ROUND
        return cost * len(after.values[LOCATIONS]) ** 2

    def predictive(self, state: SGPRState, roster: Roster) -> Asking[Predicted]:
        """Return the exact posterior of all rows."""
        found, totals, sites = yield from posterior(self.problem, state, roster)
        last = self.finished(state) or self.round >= self.planned_rounds
        if last:
            normal = self.config.transform.target != "none"
            found = yield from with_errors(found, sites, self.config.model, state.weight, normal=normal)
        exchanges = state.exchanges + EXCHANGES_AFTER * last
        details: dict[str, Any] = pooled_bound.progress(exchanges, state.gains, EXCHANGES_PER_ROUND, state.rows)
        details |= {"evidence": at_unit_scale(totals), "num_inducing": len(found.mean)}
        details["noise_sd_standardised"] = math.sqrt(pooled_bound.noise_of(found.values))
        if state.asked and state.totals is not None:
            details["doubling_promises"] = enlarging.doubling_gain(state.evidence_curve)
        return Predicted(found, pooled_bound.saved(found, self.config.model), details)

    def adopt(self, state: SGPRState, arrays: NamedArrays) -> SGPRState:
        """Return a state that starts from these parameters; the other candidates follow its inducing points."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        places = np.vstack([given[LOCATIONS], state.places[len(given[LOCATIONS]) :]])
        exchanges, weight, most = state.exchanges + 1, state.weight, state.most
        return SGPRState(given, places, state.curvature, exchanges=exchanges, weight=weight, most=most)

    def final(self, state: SGPRState, roster: Roster) -> Asking[dict[str, object]]:
        """Return the lengthscales with standard deviations of their logarithms, from the BFGS curvature, if known."""
        yield from ()
        if not state.curvature.size:  # the budget was too small for a round
            return {}
        logs = logarithms(state.values)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(state.curvature)))  # it is the answer
        spread = unpack(inverse.diagonal().sqrt().numpy(), logs)
        return {"relevance": lengthscale_facts(logs, spread, CURVATURE)}

    def warnings(self) -> list[str]:
        """Return warnings on disclosure by sums, copies of rows, and a capped number of points."""
        state, roster = self.current, self.roster()
        count = len(state.values[LOCATIONS])
        most = max(count, state.asked)
        disclosure = pooled_bound.disclosure_by_total(most, roster.rows)
        if not disclosure and not roster.totals_only:  # a site's sums disclose more than the total
            disclosure = pooled_bound.disclosure_by_sites(most, roster.rows, self.called)
        found = super().warnings() + disclosure
        if state.weight < 1:
            found.append(
                f"rows are copies of each other, about {1 / state.weight:.1f} copies of each: every row has the weight"
                f" {state.weight:.2f} in all sums, since a copy adds no information"
            )
        wanted, least = self.config.model.num_inducing, min(roster.rows, key=roster.rows.__getitem__)
        capped = self.options.small_sites == "cap" and not roster.totals_only
        if capped and count < min(wanted, roster.rows[least]):
            found.append(
                f"{count} inducing points instead of {wanted}: `sgpr.small-sites` = 'cap', and"
                f" site {self.called([least])} has {roster.rows[least]} rows; secure aggregation needs no such limit"
            )
        return found
