"""Generalised linear mixed models by restricted or marginal maximum likelihood, with Newton's method.

Sites integrate out the random effects of their groups and send sums over the groups. The restricted likelihood of
Gaussian models is exact (Bates et al. 2015, lme4). Other models use adaptive Gauss–Hermite quadrature, or the Laplace
approximation for several factors. Each exchange evaluates a few trial parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import block_diag, solve_triangular

from fedgp_flower.errors import NumericsError
from fedgp_flower.formula import Formula, parse
from fedgp_flower.messages import message
from fedgp_flower.methods.mixed_model import estimates, messages, profile
from fedgp_flower.methods.mixed_model.design import FIXED, TERM, Columns, sizes, whitening
from fedgp_flower.methods.mixed_model.effects import SHAPES, STRIDE, Terms
from fedgp_flower.methods.mixed_model.estimates import Estimates, Expansion, Totals
from fedgp_flower.methods.mixed_model.options import MixedOptions
from fedgp_flower.methods.mixed_model.smooth import Smooths, agreed_parts
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import AnyShape, Array, Json, NamedArrays
from strategies.server.questions import Asking, Each, Figures, Predicted, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

START = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Standard deviations of the whitened random effects in the trials of the first exchange."""
LENGTHSCALES = (1.0, 0.5, 1.0, 2.0, 1.0)
"""Standardised lengthscales in the same trials; amplitudes start at 1."""
LENGTHS = (1.0, 0.3, 2.5)
"""Multiples of the Newton step that an exchange tries far from the maximum."""
NEAR = 1e-2
"""Predicted increase in nats below which an exchange tries the full Newton step alone."""
FAR = 0.1
"""Predicted increase in nats above which feature weights need another exchange to reach their mode."""
SETTLED = 1e-8
"""Predicted increase in nats below which the search ends with a last step, whose error is of third order."""
RADIUS = 3.0
"""Initial bound of the entries of a step."""
MOST = 30
"""Number of exchanges after which the search stops without convergence."""
EQUATION = (
    "η = xᵀ fixed.mean + offset + zᵀ b by `formula`, x and z in units of the table; of a new group b ~ N(0,"
    " random.covariance.k) for the k-th random term. Gaussian: y ~ N(η, noise). Bernoulli: P(y = 1) = E 1/(1 + e^(−η))."
    " Poisson: y with rate e^η. Negative binomial: y with mean μ = e^η and variance μ + dispersion μ²."
    " The estimates of the fixed effects have covariance fixed.covariance."
)


@message()
class MixedState:
    """The best trial, the expansion of the log likelihood around it, and the trials of the next exchange."""

    whitening: Mapping[str, AnyShape]
    trials: Float[ndarray, "K B"]
    point: Float[ndarray, " B"]
    near: Expansion
    """The log likelihood around the best trial."""
    totals: Mapping[str, AnyShape]
    """The sums log|V| and S of a Gaussian model at the best trial; empty for other models."""
    radius: float
    count: float
    groups: Float[ndarray, " F"]
    sites: tuple[str, ...]
    exchanges: int
    turns: Float[ndarray, "D B"]
    """Displacements for derivatives of the Hessian by feature weights; empty until the weights reach their mode."""
    inner: int
    """The number of feature weights, which are the first parameters; 0 for a Gaussian model."""

    @property
    def step(self) -> Array:
        """The Newton step from the best trial; the radius bounds its entries other than the feature weights."""
        gradient, hessian, n = self.near.gradient, self.near.hessian, self.inner
        weights = np.linalg.solve(-hessian[:n, :n], np.column_stack([gradient[:n], hessian[:n, n:]]))
        schur = np.column_stack([gradient[n:], hessian[n:, n:]]) + hessian[n:, :n] @ weights
        outer = uphill(schur[:, 0], schur[:, 1:], self.radius)
        return np.append(weights @ np.append(1.0, outer), outer)

    @property
    def promised(self) -> float:
        """The increase in nats that the expansion predicts for :attr:`step`; ∞ before the first exchange."""
        step = self.step
        return float(self.near.gradient @ step + 0.5 * step @ self.near.hessian @ step) if self.sites else np.inf

    @property
    def converged(self) -> bool:
        """Whether the last step is so short that no exchange needs to evaluate it."""
        return self.promised < SETTLED and len(self.trials) == 1


def uphill(gradient: Array, hessian: Array, radius: float) -> Array:
    """|H|⁻¹∇, with the absolute eigenvalues of H, scaled down if an entry exceeds the radius.

    At a saddle point, such as a standard deviation of 0 that is too low, a unit of the steepest direction is added: by
    symmetry the gradient along it is 0.
    """
    curvatures, directions = np.linalg.eigh(-hessian)
    size = np.maximum(np.abs(curvatures), 1e-8 * np.abs(curvatures).max(initial=1e-300))
    slopes = directions.T @ gradient
    step = directions @ (slopes / size)
    if len(step) and gradient @ step + 0.5 * step @ hessian @ step < NEAR < -0.5 * curvatures[0]:
        step += math.copysign(1.0, slopes[0]) * directions[:, 0]
    return np.asarray(step * min(1.0, radius / max(float(np.abs(step).max(initial=0.0)), 1e-300)))


@dataclass(frozen=True, slots=True)
class Fitting:
    """The model of a run: formula, likelihood, design matrices at the reference rows, and smooth terms."""

    formula: Formula
    family: str
    columns: Columns
    smooth: Smooths

    @property
    def terms(self) -> Terms:
        """The layout of θ."""
        return Terms(tuple(len(names) for names in self.columns.effect_names))

    @property
    def entries(self) -> int:
        """The number of sums of a Gaussian trial: log|V|, the triangle of [Φ X y]ᵀV⁻¹[Φ X y], one R per smooth term."""
        size = sum(self.smooth.widths) + self.columns.fixed.shape[1] + 1
        return 1 + size * (size + 1) // 2 + len(self.smooth.terms)

    def asked(self, points: Array, state: MixedState, sites: tuple[str, ...]) -> Total[Any]:
        """The request for the sums at trial points [K, B]."""
        (count, width), trials = points.shape, messages.Trials(points, state.turns)
        sizes = {"K": count, "B": width, "F": len(self.factors)}
        if self.gaussian:
            size = width - len(self.smooth.terms)
            sizes |= {"T": size, "Q": self.entries, "H": size * (size + 1) // 2}
            return Total(messages.Restricted, trials, sites, sizes=sizes)
        size = sum(self.smooth.widths)
        sizes |= {"D": len(state.turns), "Q": size * (size + 1) // 2}
        return Total(messages.MarginalSums, trials, sites, sizes=sizes)

    @property
    def shapes(self) -> range:
        """The positions of log ℓ and a among (β, θ, log ℓ, a, shape)."""
        start, smooth = self.columns.fixed.shape[1] + self.terms.count, self.smooth
        return range(start, start + sum(smooth.lengths) + len(smooth.terms))

    def turns(self, point: Array, near: Expansion) -> Array:
        """Displacements from a point for finite differences, then those of the opposite directions.

        The directions are each parameter other than the feature weights v, and the sum of each two parameters other
        than fixed effects. Along a direction, v follows its mode: to first order by the Hessian of ``near``, to second
        order by :meth:`followed`.
        """
        n = len(self.smooth.names)
        units = np.eye(len(point) - n)
        pairs = itertools.combinations(range(self.columns.fixed.shape[1], len(units)), 2)
        units = np.vstack([units, *(units[[i, j]].sum(0) for i, j in pairs)])
        first = STRIDE * np.hstack([np.linalg.solve(-near.hessian[:n, :n], near.hessian[:n, n:] @ units.T).T, units])
        modes = np.array([[self.followed(point, near, point + sign * step) for step in first] for sign in (1, 0, -1)])
        second = np.pad(0.5 * (modes[0] + modes[2]) - modes[1], ((0, 0), (0, len(point) - n)))
        return np.vstack([second + first, second - first])

    def followed(self, point: Array, near: Expansion, trial: Array) -> Array:
        """The mode of the feature weights at a trial, if the log likelihood is quadratic in the function values at Z.

        ``near`` is the expansion at ``point``. The map from new to old weights keeps the function values.
        """
        n = len(self.smooth.names)
        parts = (at[n + self.shapes.start : n + self.shapes.stop] for at in (point, trial))
        weights = np.linalg.solve(*(self.smooth.roots(torch.tensor(part)) for part in parts))
        others, information = trial[n:] - point[n:], -near.hessian[:n, :n] - np.eye(n)
        others[self.shapes] = 0.0
        slope = near.gradient[:n] + point[:n] + near.hessian[:n, n:] @ others
        shift = weights.T @ (slope + information @ point[:n])
        return np.asarray(np.linalg.solve(weights.T @ information @ weights + np.eye(n), shift))

    def around_best(self, state: MixedState) -> Totals | Expansion:
        """The log likelihood around the best trial."""
        return self.totals(state.totals, state.count, state.point) if self.gaussian else state.near

    def totals(self, sums: Mapping[str, Array], count: float, point: Array) -> Totals:
        """The restricted likelihood around a point, from the sums there."""
        amplitudes = point[len(point) - len(self.smooth.terms) :]
        return Totals(sums["values"], sums["slopes"], sums["curvatures"], count, amplitudes, self.smooth.widths)

    @property
    def factors(self) -> list[str]:
        """The names of the grouping factors, in the order of the formula."""
        return list(dict.fromkeys(term.called for term in self.formula.random))

    @property
    def gaussian(self) -> bool:
        """Whether the noise is Gaussian, so that the maximum over β and σ is in closed form at each θ."""
        return self.family == "gaussian"


def one_round(problem: Fitting, state: MixedState, roster: Roster) -> Asking[tuple[MixedState, Figures]]:
    """One exchange: the log likelihood at the trials, and the next trials from the best of them."""
    state = replace(state, exchanges=state.exchanges + 1)
    summed: Summed[messages.Restricted | messages.MarginalSums] = yield problem.asked(state.trials, state, roster.sites)
    sums = summed.total
    if sums is None or summed.silent or summed.sites != roster.sites:
        return state, {}
    expansions = [around(problem, sums, k, point).expansion() for k, point in enumerate(state.trials)]
    best = max(range(len(expansions)), key=lambda k: expansions[k].value)
    near, rows = expansions[best], float(sums.count)
    if state.inner and not len(state.turns):
        return settling(problem, state, state.trials[best], near), {}
    slack = 1e-9 * (1 + abs(state.near.value)) + (min(state.promised, NEAR) if state.inner else 0.0)
    if summed.sites == state.sites and not near.value >= state.near.value - slack:
        state = replace(state, radius=0.1 * min(state.radius, float(np.abs(state.step).max())))
    else:
        grown = np.abs(state.trials[best] - state.point)[state.inner :].max(initial=0.0) if state.sites else 0.0
        state = replace(
            state,
            point=state.trials[best],
            near=near,
            totals=gaussian_sums(sums, best) if isinstance(sums, messages.Restricted) else {},
            radius=max(state.radius, 2 * float(grown)),
            count=rows,
            groups=sums.groups,
            sites=summed.sites,
        )
    step, promised = state.step, state.promised
    trials = state.point + np.outer(LENGTHS if promised > NEAR else LENGTHS[:1], step)
    if state.inner:
        trials[:, : state.inner] = [problem.followed(state.point, state.near, trial) for trial in trials]
    state = replace(state, trials=trials, turns=state.turns[:0])
    return state, {"objective": state.near.value / rows, "promised": promised}


def settling(problem: Fitting, state: MixedState, best: Array, near: Expansion) -> MixedState:
    """The state with trials that move the feature weights of the best trial by a Newton step towards their mode."""
    n = state.inner
    step = uphill(near.gradient[:n], near.hessian[:n, :n], RADIUS)
    far = near.gradient[:n] @ step > 2 * FAR
    trials = best + np.outer(LENGTHS if far else LENGTHS[:1], np.pad(step, (0, len(best) - n)))
    return replace(state, trials=trials, turns=state.turns if far else problem.turns(best, near))


def around(
    problem: Fitting, sums: messages.Restricted | messages.MarginalSums, k: int, point: Array
) -> Totals | Expansion:
    """The log likelihood around trial ``k``, whose parameters are ``point``."""
    if isinstance(sums, messages.Restricted):
        return problem.totals(gaussian_sums(sums, k), float(sums.count), point)
    conditional = Expansion(float(sums.values[k]), sums.gradients[k], sums.hessians[k])
    widths = sum(problem.smooth.widths), problem.columns.fixed.shape[1]
    return estimates.laplace(conditional, point, sums.bends[k], *widths)


def gaussian_sums(sums: messages.Restricted, k: int) -> NamedArrays:
    """The sums of a Gaussian model at trial ``k``, as the state stores them."""
    return {"values": sums.values[k], "slopes": sums.slopes[k], "curvatures": sums.curvatures[k]}


def estimated(problem: Fitting, state: MixedState) -> Estimates:
    """The estimates: the best trial plus the last step, if the search is near the maximum.

    A step along a flat direction, as the lengthscale of an input without effect, may be too long for the expansion of
    the sums of a Gaussian model; it is then left out.
    """
    step = state.step if state.promised < NEAR else np.zeros_like(state.point)
    local = problem.around_best(state)
    if isinstance(local, Expansion):
        fixed = sum(problem.smooth.widths) + problem.columns.fixed.shape[1]
        return estimates.of_marginal(state.point, local, step, problem.smooth, (fixed, fixed + problem.terms.count))
    try:
        return estimates.of_restricted(local, state.point, step)
    except NumericsError:
        return estimates.of_restricted(local, state.point, 0 * step)


def profiled(
    problem: Fitting,
    state: MixedState,
    fit: Estimates,
    parameters: Sequence[tuple[estimates.Function, Array | None]],
) -> Asking[list[tuple[float, float]]]:
    """Profile likelihood 95 % intervals of parameters; NaN for an endpoint that Newton's method does not reach."""
    local, best = lowest(problem, state, fit)
    ends = [best, *(profile.first_step(best, local, f, row, sign) for f, row in parameters for sign in (-1, 1))]
    near, before = [local] * len(ends), 0.0
    for share in profile.SHARES:
        minimum = float(near[0].deviance(ends[0].centre, None)(torch.tensor(ends[0].point)))
        started = [ends[0], *(end.farther(share / before) if before else end for end in ends[1:])]
        level, before = minimum + share**2 * profile.LEVEL, share
        ends = [profile.newton(end, at, level) for end, at in zip(started, near, strict=True)]
        if share == 1 and profile.settled(started, ends):
            break
        ends, near = yield from centred(problem, state, ends)
        if not near:
            return [(np.nan, np.nan)] * len(parameters)
    values = [
        float(f(torch.tensor(end.point))) if (f := end.parameter) and profile.reached(f, old, end) else np.nan
        for old, end in zip(started, ends, strict=True)
    ]
    return [*zip(values[1::2], values[2::2], strict=True)]


def lowest(problem: Fitting, state: MixedState, fit: Estimates) -> tuple[Totals | Expansion, profile.End]:
    """The likelihood around the best trial and the minimum of its deviance."""
    local, start = problem.around_best(state), np.append(state.point, [fit.log_noise] * problem.gaussian)
    return local, profile.minimum(local, state.point, start)


def centred(
    problem: Fitting, state: MixedState, ends: Sequence[profile.End]
) -> Asking[tuple[list[profile.End], list[Totals | Expansion]]]:
    """The endpoints and the likelihood around each, from sums there; nothing if sites are missing."""
    points = np.array([state.point if end.lost else end.theta for end in ends])
    summed = yield problem.asked(points, state, state.sites)
    if summed.total is None or summed.silent or summed.sites != state.sites:
        return [], []
    near = [around(problem, summed.total, k, point) for k, point in enumerate(points)]
    return [replace(end, centre=point) for end, point in zip(ends, points, strict=True)], near


def containing_zero(problem: Fitting, state: MixedState, fit: Estimates, places: Sequence[int]) -> Asking[list[bool]]:
    """Whether the least deviance with entry ``place`` of the point at 0 is at most that of an endpoint.

    The entries are θ of random terms with one effect: θ and −θ have the same deviance, so Newton's method keeps θ = 0.
    """
    local, best = lowest(problem, state, fit)
    level = float(local.deviance(best.centre, None)(torch.tensor(best.point))) + profile.LEVEL
    ends = [replace(best, point=np.where(np.arange(len(best.point)) == place, 0.0, best.point)) for place in places]
    for _ in profile.SHARES:
        started, near = yield from centred(problem, state, ends)
        if not near:
            return [False] * len(places)
        ends = [profile.newton(end, at, level) for end, at in zip(started, near, strict=True)]
        if profile.settled(started, ends):
            break
    values = [float(at.deviance(e.centre, None)(torch.tensor(e.point))) for e, at in zip(ends, near, strict=True)]
    return [not end.lost and value <= level for end, value in zip(ends, values, strict=True)]


class MixedModel(FederatedStrategy[MixedState]):
    """Fits a generalised linear mixed model of `formula` with lme4's likelihood from sums over all sites."""

    method = "mixed-model"
    options_class = MixedOptions
    state_class = MixedState
    options: MixedOptions

    @cached_property
    def problem(self) -> Fitting:
        """The model of the run."""
        formula, likelihood = parse(self.config.formula), self.config.model.likelihood
        return Fitting(formula, likelihood, *agreed_parts(formula, self.preparation.arrays, self.preparation.schema))

    def initialise(self, roster: Roster) -> Asking[MixedState]:
        """The whitening of the design matrices, and the first trials; RunError if no site answers."""
        self.__dict__.pop("problem", None)  # of an earlier agreement, if a site has contradicted its description
        problem = self.problem
        columns, terms = problem.columns, problem.terms
        widths = {"E": columns.fixed.shape[1], "W": sum(q * q for q in terms.widths)}
        summed: Summed[messages.Outline] = yield Total(messages.Outline, Nothing(), sizes=widths)
        outline = summed.required("an outline of its design matrices")
        count = float(outline.count)
        arrays: NamedArrays = {FIXED: whitening(outline.gram / count, columns.names, sizes(columns.fixed))}
        blocks = np.split(outline.effects, np.cumsum([q * q for q in terms.widths])[:-1])
        for k, (names, matrix) in enumerate(zip(columns.effect_names, columns.effects, strict=True)):
            gram = blocks[k].reshape(len(names), len(names)) / count
            arrays[f"{TERM}{k}"] = whitening(gram, names, sizes(matrix))
        trials = np.outer(START if terms.count or problem.smooth.terms else START[:1], terms.first.numpy())
        if smooth := problem.smooth.terms:
            lengths = np.outer(np.log(LENGTHSCALES), np.ones(sum(problem.smooth.lengths)))
            trials = np.hstack([trials, lengths, np.ones((len(lengths), len(smooth)))])
        inner = 0 if problem.gaussian else len(problem.smooth.names)
        if not problem.gaussian:
            root = arrays[FIXED] / sizes(columns.fixed)
            beta = np.append(np.zeros(inner), np.linalg.solve(root.T, outline.products / count))
            repeats = len(trials), 1
            trials = np.hstack([np.tile(beta, repeats), trials, np.tile(SHAPES.get(problem.family, ()), repeats)])
        width = trials.shape[1]
        first = np.zeros(width), Expansion(0.0, np.zeros(width), -np.eye(width))
        radius, groups = 0.1 * RADIUS if inner else RADIUS, np.zeros(len(problem.factors))
        return MixedState(arrays, trials, *first, {}, radius, count, groups, (), 2, np.empty((0, width)), inner)

    def constants(self, state: MixedState) -> NamedArrays:
        """The arrays that whiten the design matrices, for the sites."""
        return dict(state.whitening)

    def one_round(self, state: MixedState, roster: Roster) -> Asking[tuple[MixedState, Figures]]:
        """One exchange: the log likelihood at the trials, and the next trials."""
        return one_round(self.problem, state, roster)

    def finished(self, state: MixedState) -> bool:
        """Whether the search has converged or used :data:`MOST` exchanges."""
        return state.converged or state.exchanges >= MOST

    def converged(self, state: MixedState) -> bool:
        """Whether the search has converged."""
        return state.converged

    @property
    def scale(self) -> float:
        """One standardised unit of the target in units of the table; 1 unless the noise is Gaussian."""
        return float(self.preparation.arrays["target.scale"]) if self.problem.gaussian else 1.0

    def predictive(self, state: MixedState, roster: Roster) -> Asking[Predicted]:
        """The estimates for predictions at the sites and in the saved run; asks no site."""
        yield from ()
        problem, fit, scale = self.problem, estimated(self.problem, state), self.scale
        view = messages.MixedView(fit.beta, fit.covariance, fit.theta, float(np.exp(2 * fit.log_noise)), fit.shape)
        base, bases = state.whitening[FIXED], messages.pieces(state.whitening, TERM)
        units = block_diag(np.eye(sum(problem.smooth.widths)), base)
        mean = scale * solve_triangular(units, fit.beta)
        covariance = scale**2 * solve_triangular(units, solve_triangular(units, fit.covariance).T)
        names = (*problem.smooth.names, *problem.columns.names)
        if problem.gaussian and "intercept" in names:
            mean[names.index("intercept")] += float(self.preparation.arrays["target.mean"])
        factors = problem.terms.factors(torch.tensor(fit.theta[: problem.terms.count]))
        sd = scale * np.exp(fit.log_noise)
        roots = [sd * np.linalg.solve(b, f.numpy()) for b, f in zip(bases, factors, strict=True)]
        arrays: NamedArrays = {"fixed.mean": mean, "fixed.covariance": covariance}
        arrays |= {"noise": np.array(scale**2 * view.noise)}
        arrays |= {"dispersion": np.exp(fit.shape)} if len(fit.shape) else {}
        arrays |= {f"random.covariance.{k}": root @ root.T for k, root in enumerate(roots)}
        arrays |= {"smooth": fit.theta[problem.terms.count :]} if problem.smooth.terms else {}
        meanings = {
            "fixed.mean": "weights of features of smooth terms, then fixed effects",
            "smooth": "log ℓ of standardised inputs, then a, of all smooth terms",
            "fixed.covariance": "of their estimates",
            "noise": "variance of the noise",
            "dispersion": "of counts",
        }
        meanings = {name: meanings.get(name, "of the effects of a group") for name in arrays}
        model = {"formula": self.config.formula, "columns": list(names), "likelihood": problem.family}
        saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "original units"), EQUATION, model)
        return Predicted(view, saved, self.table(state, fit, mean, covariance))

    def table(self, state: MixedState, fit: Estimates, mean: Array, covariance: Array) -> Json:
        """The details of a run: fixed effects, random effects, and goodness of fit, in units of the table."""
        problem, scale, size = self.problem, self.scale, sum(self.problem.smooth.widths)
        groups, names = [term.called for term in problem.formula.random], problem.columns.effect_names
        rows = estimates.random_rows(groups, names, problem.smooth, gaussian=problem.gaussian)
        random = [*estimates.random_table(rows, self.spreads(state), fit), *estimates.shape_rows(fit)]
        likelihood = fit.log_likelihood
        if problem.gaussian:  # in units of the table, as in lme4
            likelihood -= np.log(np.abs(np.diag(state.whitening[FIXED]))).sum()
            likelihood -= (state.count - len(mean) + size) * np.log(scale)
        parameters = len(mean) - size + len(fit.theta) + problem.gaussian + len(fit.shape)
        fixed = mean[size:], covariance[size:, size:]
        lengths = scale * np.linalg.norm(np.linalg.solve(state.whitening[FIXED], np.eye(len(mean) - size)), axis=1)
        endless = [] if problem.gaussian else estimates.separated(problem.columns.names, *fixed, lengths)
        least = {"sd": 1e-4 * scale, "correlation": 1e-8}
        sizes = [(row["kind"], row["estimate"]) for row in random]
        left = [(kind, 1 - size**2 if kind == "correlation" else size) for kind, size in sizes]
        singular = any(kind in least and not size > least[kind] for kind, size in left)
        alike = [] if singular else estimates.alike(groups, random)
        return {
            "effects": estimates.fixed_table(problem.columns.names, *fixed, problem.family),
            "random": random,
            "icc": estimates.shares(random, problem.family),
            "log_likelihood": likelihood,
            "criterion": "REML" if problem.gaussian else "ML",
            "aic": 2 * parameters - 2 * likelihood,
            "bic": parameters * float(np.log(state.count)) - 2 * likelihood,
            "rows": int(state.count),
            "groups": dict(zip(problem.factors, map(int, state.groups), strict=True)),
            "singular": singular,
            "notes": [*endless, *alike],
            "exchanges": state.exchanges,
            "promised_rise": state.promised,
        }

    def spreads(self, state: MixedState) -> profile.Spread:
        """The function of (θ, log σ) that returns the transformed parameters of the table of random effects."""
        problem, bases = self.problem, messages.pieces(state.whitening, TERM)
        return estimates.spreads(problem.terms, bases, self.scale, problem.smooth, gaussian=problem.gaussian)

    def final(self, state: MixedState, roster: Roster) -> Asking[Json]:
        """Profile likelihood intervals, and the random intercepts of the sites if the run is in the clear."""
        tables = yield from self.with_profiles(state)
        terms = zip(self.problem.formula.random, self.problem.columns.effect_names, strict=True)
        named = any({*term.group} <= self.config.sites_named and "intercept" in names for term, names in terms)
        if roster.totals_only or not named:
            return tables
        view = self.scoring.predicted.request
        effects: Mapping[str, messages.SiteEffect] = yield Each(messages.SiteEffect, dict.fromkeys(roster.sites, view))
        sites = []
        for site, effect in effects.items():
            mean, half = self.scale * float(effect.mean), self.scale * estimates.Z95 * float(effect.variance) ** 0.5
            row = {"group": "site", "effect": self.preparation.labels[site], "kind": "of one site"}
            sites.append(row | {"estimate": mean, "low": mean - half, "high": mean + half})
        return {**tables, "sites": sorted(sites, key=lambda row: row["estimate"])}

    def with_profiles(self, state: MixedState) -> Asking[Json]:
        """The tables with profile likelihood intervals; none for smooth terms, a singular fit or no convergence.

        A parameter without information has no interval: its profile is flat. The lower end of the standard deviation
        of a term with one effect is 0 if the deviance there is below that of an endpoint.
        """
        problem, fit, details = self.problem, estimated(self.problem, state), self.scoring.predicted.details
        if problem.smooth.terms or not state.converged or details["singular"]:
            return {}
        fixed, random, scale = details["effects"], details["random"], self.scale
        base = state.whitening[FIXED]
        unwhitened = scale * solve_triangular(base, np.eye(len(base)))  # each row maps whitened effects to one effect
        spread, size, end = self.spreads(state), len(base), len(base) + problem.terms.count
        rows = [row / effect["se"] for row, effect in zip(unwhitened, fixed, strict=True)]
        parameters: list[tuple[estimates.Function, Array | None]]
        if problem.gaussian:
            parameters = [(profile.entry(-1), row) for row in rows]
        else:
            parameters = [(profile.combination(row), None) for row in rows]

            def with_shape(at: torch.Tensor) -> torch.Tensor:
                return torch.cat([self.spreads(state)(torch.cat([at[size:end], at.new_zeros(1)])), at[end:]])

            spread = with_shape
        parameters += [(profile.entry(k, spread), None) for k in range(len(random))]
        known = [np.isfinite(row["high"] - row["low"]) for row in (*fixed, *random)]
        found = yield from profiled(problem, state, fit, [*itertools.compress(parameters, known)])
        left = iter(found)
        ends = [next(left) if one else (np.nan, np.nan) for one in known]
        alone = [k for k in problem.terms.alone if known[size + k] and np.isnan(ends[size + k][0])]
        if alone:
            within = yield from containing_zero(problem, state, fit, [k + size * (not problem.gaussian) for k in alone])
            for k in itertools.compress(alone, within):
                ends[size + k] = -np.inf, ends[size + k][1]
        middles = [float(row @ fit.beta[-len(row) :]) for row in rows]
        tables: dict[str, list[Json]] = {"effects": [], "random": []}
        for effect, middle, pair in zip(fixed, middles, ends[: len(fixed)], strict=True):
            low, high = (effect["estimate"] + effect["se"] * (end - middle) for end in pair)
            with np.errstate(over="ignore"):
                ratios = {"ratio_low": float(np.exp(low)), "ratio_high": float(np.exp(high))}
            ratios = ratios if "ratio" in effect else {}
            tables["effects"].append({**effect, "profile_low": low, "profile_high": high, **ratios})
        for row, pair in zip(random, ends[len(fixed) :], strict=True):
            low, high = (float(np.tanh(end) if row["kind"] == "correlation" else np.exp(end)) for end in pair)
            tables["random"].append({**row, "profile_low": low, "profile_high": high})
        return tables
