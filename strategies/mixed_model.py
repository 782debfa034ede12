"""Generalised linear mixed models from sums over groups: restricted or marginal maximum likelihood by Newton's method.

Sites integrate the random effects of their groups out. Gaussian: REML is exact (Bates et al. 2015, lme4). Otherwise:
adaptive Gauss–Hermite quadrature, or Laplace's approximation for several factors. An exchange tries a few parameters at
once; what a site sends is a sum over its groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import block_diag, solve_triangular

from fedgp_flower.formula import Formula, parse
from fedgp_flower.messages import message
from fedgp_flower.methods.mixed_model import estimates, profile
from fedgp_flower.methods.mixed_model.design import FIXED, TERM, Columns, sizes, whitening
from fedgp_flower.methods.mixed_model.effects import SHAPES, STRIDE, Terms
from fedgp_flower.methods.mixed_model.estimates import Estimates, Expansion, Totals
from fedgp_flower.methods.mixed_model.messages import (
    MarginalSums,
    MixedView,
    Outline,
    Restricted,
    SiteEffect,
    Trials,
    pieces,
)
from fedgp_flower.methods.mixed_model.options import MixedOptions
from fedgp_flower.methods.mixed_model.smooth import Smooths, agreed_parts
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import AnyShape, Array, Json, NamedArrays
from strategies.server.questions import Asking, Each, Figures, Predicted, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

START = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Standard deviations of whitened random effects that the first exchange tries."""
LENGTHSCALES = (1.0, 0.5, 1.0, 2.0, 1.0)
"""Beside them, of smooth terms, whose amplitudes start at 1."""
LENGTHS = (1.0, 0.3, 2.5)
"""Of the Newton step, that an exchange tries while far from the maximum."""
NEAR = 1e-2
"""Nats that a step promises, below which it alone is tried."""
FAR = 0.1
"""Nats that weights of features promise on the way to their mode, above which another exchange goes there."""
SETTLED = 1e-8
"""Nats that the last step promises; it is taken and not evaluated, which leaves an error of its third power."""
RADIUS = 3.0
"""Largest entry of the first step."""
MOST = 30
"""Exchanges after which the search ends without having converged."""
EQUATION = (
    "η = xᵀ fixed.mean + offset + zᵀ b by `formula`, x and z in units of the table; of a new group b ~ N(0,"
    " random.covariance.k) for the k-th random term. Gaussian: y ~ N(η, noise). Bernoulli: P(y = 1) = E 1/(1 + e^(−η))."
    " Poisson: y with rate e^η. Negative binomial: y with mean μ = e^η and variance μ + dispersion μ²."
    " The estimates of the fixed effects have covariance fixed.covariance."
)


@message()
class MixedState:
    """The best trial so far, what the likelihood is around it, and the trials to come."""

    whitening: Mapping[str, AnyShape]
    trials: Float[ndarray, "K B"]
    point: Float[ndarray, " B"]
    value: float
    gradient: Float[ndarray, " B"]
    hessian: Float[ndarray, "B B"]
    totals: Mapping[str, AnyShape]
    """Of a Gaussian model: log|V| and S at the best trial."""
    radius: float
    count: float
    groups: Float[ndarray, " F"]
    sites: tuple[str, ...]
    exchanges: int
    turns: Float[ndarray, "D B"]
    """Along which Hessians by features' weights are differentiated; none while these are on the way to their mode."""
    inner: int
    """How many these are, first among the parameters; 0 where they are summed out."""

    @property
    def step(self) -> Array:
        """Newton's step from the best trial, no longer than the radius; weights of features follow."""
        gradient, hessian, n = self.gradient, self.hessian, self.inner
        follow = np.linalg.solve(-hessian[:n, :n], np.column_stack([gradient[:n], hessian[:n, n:]]))
        change = np.column_stack([gradient[n:], hessian[n:, n:]]) + hessian[n:, :n] @ follow
        outer = uphill(change[:, 0], change[:, 1:], self.radius)
        return np.append(follow @ np.append(1.0, outer), outer)

    @property
    def promised(self) -> float:
        """Nats that the step promises to second order; ∞ before the first trial."""
        step = self.step
        return float(self.gradient @ step + 0.5 * step @ self.hessian @ step) if self.sites else np.inf


def uphill(gradient: Array, hessian: Array, radius: float) -> Array:
    """H⁻¹∇ with every eigenvalue of −H taken as positive, shortened where an entry exceeds the radius."""
    curvatures, directions = np.linalg.eigh(-hessian)
    size = np.maximum(np.abs(curvatures), 1e-8 * np.abs(curvatures).max(initial=1e-300))
    step = directions @ ((directions.T @ gradient) / size)
    return np.asarray(step * min(1.0, radius / max(float(np.abs(step).max(initial=0.0)), 1e-300)))


@dataclass(frozen=True, slots=True)
class Fitting:
    """What stays the same during a run."""

    formula: Formula
    family: str
    columns: Columns
    """The columns of the formula at reference rows."""
    smooth: Smooths

    @property
    def terms(self) -> Terms:
        """The widths of the random terms."""
        return Terms(tuple(len(names) for names in self.columns.effect_names))

    @property
    def entries(self) -> int:
        """How many numbers a site sends of each trial: log|V|, a triangle of [Φ X y], what features leave."""
        size = sum(self.smooth.widths) + self.columns.fixed.shape[1] + 1
        return 1 + size * (size + 1) // 2 + len(self.smooth.terms)

    def asked(self, points: Array, state: MixedState, sites: tuple[str, ...]) -> Total[Any]:
        """The question of an exchange."""
        count, width = points.shape
        sizes, turns = {"K": count, "B": width, "F": len(self.factors)}, state.turns
        if self.gaussian:
            told = width - len(self.smooth.terms)
            sizes |= {"T": told, "Q": self.entries, "H": told * (told + 1) // 2}
            return Total(Restricted, Trials(points, turns), sites, sizes=sizes)
        size = sum(self.smooth.widths)
        sizes |= {"D": len(turns), "Q": size * (size + 1) // 2}
        return Total(MarginalSums, Trials(points, turns), sites, sizes=sizes)

    @property
    def shapes(self) -> range:
        """Places of log ℓ and a among all parameters but weights of features; none where noise is Gaussian."""
        start, smooth = self.columns.fixed.shape[1] + self.terms.count, self.smooth
        return range(start, start + sum(smooth.lengths) + len(smooth.terms))

    def turns(self, point: Array, near: Expansion) -> Array:
        """Short ways from a point, then their opposites: one for each parameter, with the mode of features' weights.

        And for every two together that are no fixed effects. Along them weights go as ``near`` has them to first order,
        else as followed.
        """
        n = len(self.smooth.names)
        units = np.eye(len(point) - n)
        units = np.vstack(
            [
                units,
                *(
                    units[[i, j]].sum(0)
                    for i, j in itertools.combinations(range(self.columns.fixed.shape[1], len(units)), 2)
                ),
            ]
        )
        ways = STRIDE * np.hstack([np.linalg.solve(-near.hessian[:n, :n], near.hessian[:n, n:] @ units.T).T, units])
        sides = np.array([[self.followed(point, near, point + sign * way) for way in ways] for sign in (1, 0, -1)])
        bent = np.pad(0.5 * (sides[0] + sides[2]) - sides[1], ((0, 0), (0, len(point) - n)))
        return np.vstack([bent + ways, bent - ways])

    def followed(self, point: Array, near: Expansion, trial: Array) -> Array:
        """The mode of features' weights at a trial, where the likelihood is a quadratic of functions' values at Z."""
        n = len(self.smooth.names)
        parts = (at[n + self.shapes.start : n + self.shapes.stop] for at in (point, trial))
        turn = np.linalg.solve(*(self.smooth.roots(torch.tensor(part)) for part in parts))
        others, information = trial[n:] - point[n:], -near.hessian[:n, :n] - np.eye(n)
        others[self.shapes] = 0.0
        slope = near.gradient[:n] + point[:n] + near.hessian[:n, n:] @ others
        pull = turn.T @ (slope + information @ point[:n])
        return np.asarray(np.linalg.solve(turn.T @ information @ turn + np.eye(n), pull))

    def known(self, state: MixedState) -> Totals | Expansion:
        """What is known around the best trial."""
        if not self.gaussian:
            return Expansion(state.value, state.gradient, state.hessian)
        return self.totals(state.totals, state.count, state.point)

    def totals(self, sums: Mapping[str, Array], count: float, point: Array) -> Totals:
        """Of the sums at a point."""
        amplitudes = point[len(point) - len(self.smooth.terms) :]
        return Totals(sums["values"], sums["slopes"], sums["curvatures"], count, amplitudes, self.smooth.widths)

    @property
    def factors(self) -> list[str]:
        """The names of the factors."""
        return list(dict.fromkeys(term.called for term in self.formula.random))

    @property
    def gaussian(self) -> bool:
        """Whether noise is Gaussian, so that β and σ are known at each θ."""
        return self.family == "gaussian"


def start(problem: Fitting, roster: Roster) -> Asking[MixedState]:
    """What whitens the columns, and trials around rough estimates."""
    columns, terms = problem.columns, problem.terms
    widths = {"E": columns.fixed.shape[1], "W": sum(q * q for q in terms.widths)}
    summed: Summed[Outline] = yield Total(Outline, Nothing(), sizes=widths)
    outline = summed.total
    if outline is None:
        raise RuntimeError("no site has answered")
    count = float(outline.count)
    arrays: NamedArrays = {FIXED: whitening(outline.gram / count, columns.names, sizes(columns.fixed))}
    blocks = np.split(outline.effects, np.cumsum([q * q for q in terms.widths])[:-1])
    for k, (names, matrix) in enumerate(zip(columns.effect_names, columns.effects, strict=True)):
        gram = blocks[k].reshape(len(names), len(names)) / count
        arrays[f"{TERM}{k}"] = whitening(gram, names, sizes(matrix))
    first = np.outer(START if terms.count or problem.smooth.terms else START[:1], terms.first.numpy())
    if smooth := problem.smooth.terms:
        lengths = np.outer(np.log(LENGTHSCALES), np.ones(sum(problem.smooth.lengths)))
        first = np.hstack([first, lengths, np.ones((len(lengths), len(smooth)))])
    inner = 0 if problem.gaussian else len(problem.smooth.names)
    if not problem.gaussian:
        root = arrays[FIXED] / sizes(columns.fixed)
        rough = np.append(np.zeros(inner), np.linalg.solve(root.T, outline.products / count))
        every = len(first), 1
        first = np.hstack([np.tile(rough, every), first, np.tile(SHAPES.get(problem.family, ()), every)])
    width = first.shape[1]
    nothing = np.zeros(width), 0.0, np.zeros(width), -np.eye(width)
    radius, groups = 0.1 * RADIUS if inner else RADIUS, np.zeros(len(problem.factors))
    return MixedState(arrays, first, *nothing, {}, radius, count, groups, (), 2, np.empty((0, width)), inner)


def one_round(problem: Fitting, state: MixedState, roster: Roster) -> Asking[tuple[MixedState, Figures]]:
    """One exchange: the likelihood at the trials, and from the best of them the next ones."""
    state = replace(state, exchanges=state.exchanges + 1)
    count = len(state.trials)
    summed: Summed[Restricted | MarginalSums] = yield problem.asked(state.trials, state, roster.sites)
    found = summed.total
    if found is None or summed.silent or summed.sites != roster.sites:
        return state, {}
    here = [around(problem, found, k, point).expansion() for k, point in enumerate(state.trials)]
    if state.inner and not len(state.turns):
        return settling(problem, state, here), {}
    best = max(range(count), key=lambda k: here[k].value)
    rows = float(found.count)
    slack = 1e-9 * (1 + abs(state.value)) + (min(state.promised, NEAR) if state.inner else 0.0)
    if summed.sites == state.sites and not here[best].value >= state.value - slack:
        state = replace(state, radius=0.1 * min(state.radius, float(np.abs(state.step).max())))
    else:
        grown = np.abs(state.trials[best] - state.point)[state.inner :].max(initial=0.0) if state.sites else 0.0
        totals = {} if isinstance(found, MarginalSums) else kept(found, best)
        near = here[best]
        state = replace(
            state,
            point=state.trials[best],
            value=near.value,
            gradient=near.gradient,
            hessian=near.hessian,
            totals=totals,
            radius=max(state.radius, 2 * float(grown)),
            count=rows,
            groups=found.groups,
            sites=summed.sites,
        )
    step, promised = state.step, state.promised
    lengths_tried = LENGTHS if promised > NEAR else LENGTHS[:1]
    trials = state.point + np.outer(lengths_tried, step)
    if state.inner:
        near = Expansion(state.value, state.gradient, state.hessian)
        trials[:, : state.inner] = [problem.followed(state.point, near, trial) for trial in trials]
    state = replace(state, trials=trials, turns=state.turns[:0])
    return state, {"objective": state.value / rows, "promised": promised}


def settling(problem: Fitting, state: MixedState, here: Sequence[Expansion]) -> MixedState:
    """Features' weights a Newton step nearer to their mode, beside the best of other parameters that were tried."""
    n = state.inner
    best = max(range(len(here)), key=lambda k: here[k].value)
    gradient, hessian = here[best].gradient, here[best].hessian
    step = uphill(gradient[:n], hessian[:n, :n], RADIUS)
    far = gradient[:n] @ step > 2 * FAR
    lengths = LENGTHS if far else LENGTHS[:1]
    trials = np.tile(state.trials[best], (len(lengths), 1))
    trials[:, :n] += np.outer(lengths, step)
    turns = state.turns if far else problem.turns(state.trials[best], here[best])
    return replace(state, trials=trials, turns=turns)


def around(problem: Fitting, found: Restricted | MarginalSums, k: int, point: Array) -> Totals | Expansion:
    """What is known around a trial."""
    if isinstance(found, MarginalSums):
        told = Expansion(float(found.values[k]), found.gradients[k], found.hessians[k])
        return estimates.laplace(
            told, point, found.bends[k], sum(problem.smooth.widths), problem.columns.fixed.shape[1]
        )
    return problem.totals(kept(found, k), float(found.count), point)


def kept(found: Restricted, k: int) -> NamedArrays:
    """What the estimates follow from."""
    return {"values": found.values[k], "slopes": found.slopes[k], "curvatures": found.curvatures[k]}


def estimated(problem: Fitting, state: MixedState) -> Estimates:
    """The estimates a last step away from the best trial."""
    step = state.step if state.promised < NEAR else np.zeros_like(state.point)
    known = problem.known(state)
    if isinstance(known, Expansion):
        fixed = sum(problem.smooth.widths) + problem.columns.fixed.shape[1]
        return estimates.of_marginal(state.point, known, step, problem.smooth, (fixed, fixed + problem.terms.count))
    return estimates.of_restricted(known, state.point, step)


def converged(state: MixedState) -> bool:
    """Whether the last step is short enough to be taken unseen."""
    return state.promised < SETTLED and len(state.trials) == 1


def profiled(
    problem: Fitting,
    state: MixedState,
    found: Estimates,
    parameters: Sequence[tuple[estimates.Function, Array | None]],
) -> Asking[list[tuple[float, float]]]:
    """95 % intervals of parameters by the profile of the likelihood; NaN for ends that are not found."""
    known, start = problem.known(state), np.append(state.point, [found.log_noise] * problem.gaussian)
    best = profile.lowest(known, state.point, start)
    ends = [best, *(profile.first(best, known, f, row, sign) for f, row in parameters for sign in (-1, 1))]
    near, before = [known] * len(ends), 0.0
    for share in profile.SHARES:
        least = float(near[0].deviance(ends[0].centre, None)(torch.tensor(ends[0].point)))
        there = [ends[0], *(end.farther(share / before) if before else end for end in ends[1:])]
        level, before = least + share**2 * profile.LEVEL, share
        ends = [profile.moved(end, at, level) for end, at in zip(there, near, strict=True)]
        if share == 1 and profile.settled(there, ends):
            break
        asked = np.array([state.point if end.lost else end.theta for end in ends])
        summed = yield problem.asked(asked, state, state.sites)
        if summed.total is None or summed.silent or summed.sites != state.sites:
            return [(np.nan, np.nan)] * len(parameters)
        told = summed.total
        near = [around(problem, told, k, at) for k, at in enumerate(asked)]
        ends = [replace(end, centre=at) for end, at in zip(ends, asked, strict=True)]
    values = [
        np.nan if end.lost or end.parameter is None else float(end.parameter(torch.tensor(end.point))) for end in ends
    ]
    return [*zip(values[1::2], values[2::2], strict=True)]


class MixedModel(FederatedStrategy[MixedState]):
    """Mixed models by Newton's method on restricted or marginal likelihoods, from sums."""

    method = "mixed-model"
    options_class = MixedOptions
    state_class = MixedState
    options: MixedOptions

    @cached_property
    def problem(self) -> Fitting:
        """What stays the same during a run."""
        formula, likelihood = parse(self.config.formula), self.config.model.likelihood
        return Fitting(formula, likelihood, *agreed_parts(formula, self.preparation.arrays, self.preparation.schema))

    def initialise(self, roster: Roster) -> Asking[MixedState]:
        """Whitened columns, and the first trials."""
        return (yield from start(self.problem, roster))

    def constants(self, state: MixedState) -> NamedArrays:
        """What whitens the columns."""
        return dict(state.whitening)

    def one_round(self, state: MixedState, roster: Roster) -> Asking[tuple[MixedState, Figures]]:
        """One exchange."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: MixedState) -> bool:
        """Whether the maximum is reached, or too much was tried."""
        return converged(state) or state.exchanges >= MOST

    def converged(self, state: MixedState) -> bool:
        """Whether the maximum is reached."""
        return converged(state)

    @property
    def scale(self) -> float:
        """Units of the target of one of the model's."""
        return float(self.preparation.arrays["target.scale"]) if self.problem.gaussian else 1.0

    def predictive(self, state: MixedState, roster: Roster) -> Asking[Predicted]:
        """The estimates; no site is asked."""
        del roster
        yield from ()
        problem, found, scale = self.problem, estimated(self.problem, state), self.scale
        view = MixedView(found.beta, found.covariance, found.theta, float(np.exp(2 * found.log_noise)), found.shape)
        base, bases = state.whitening[FIXED], pieces(state.whitening, TERM)
        units = block_diag(np.eye(sum(problem.smooth.widths)), base)
        mean = scale * solve_triangular(units, found.beta)
        covariance = scale**2 * solve_triangular(units, solve_triangular(units, found.covariance).T)
        names = (*problem.smooth.names, *problem.columns.names)
        if problem.gaussian and "intercept" in names:
            mean[names.index("intercept")] += float(self.preparation.arrays["target.mean"])
        factors = problem.terms.factors(torch.tensor(found.theta[: problem.terms.count]))
        roots = [
            scale * np.exp(found.log_noise) * np.linalg.solve(b, f.numpy()) for b, f in zip(bases, factors, strict=True)
        ]
        arrays: NamedArrays = {
            "fixed.mean": mean,
            "fixed.covariance": covariance,
            "noise": np.array(scale**2 * view.noise),
        }
        arrays |= {"dispersion": np.exp(found.shape)} if len(found.shape) else {}
        arrays |= {f"random.covariance.{k}": root @ root.T for k, root in enumerate(roots)}
        arrays |= {"smooth": found.theta[problem.terms.count :]} if problem.smooth.terms else {}
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
        return Predicted(view, saved, self.table(state, found, mean, covariance))

    def table(self, state: MixedState, found: Estimates, mean: Array, covariance: Array) -> Json:
        """What is quoted: effects, random effects, and how well the model fits."""
        problem, scale, size = self.problem, self.scale, sum(self.problem.smooth.widths)
        called, names = [term.called for term in problem.formula.random], problem.columns.effect_names
        rows = estimates.random_rows(called, names, problem.smooth, gaussian=problem.gaussian)
        random = [*estimates.random_table(rows, self.spreads(state), found), *estimates.shape_rows(found)]
        likelihood = found.log_likelihood
        if problem.gaussian:  # back to the units of the table, as lme4 counts
            likelihood -= np.log(np.abs(np.diag(state.whitening[FIXED]))).sum()
            likelihood -= (state.count - len(mean) + size) * np.log(scale)
        free = len(mean) - size + len(found.theta) + problem.gaussian + len(found.shape)
        singular = any(row["kind"] == "sd" and not row["estimate"] > 1e-4 * scale for row in random)
        return {
            "effects": estimates.fixed_table(
                problem.columns.names, mean[size:], covariance[size:, size:], problem.family
            ),
            "random": random,
            "icc": estimates.shares(random, problem.family),
            "log_likelihood": likelihood,
            "criterion": "REML" if problem.gaussian else "ML",
            "aic": 2 * free - 2 * likelihood,
            "bic": free * float(np.log(state.count)) - 2 * likelihood,
            "rows": int(state.count),
            "groups": dict(zip(problem.factors, map(int, state.groups), strict=True)),
            "singular": singular,
            "exchanges": state.exchanges,
            "promised_rise": state.promised,
        }

    def spreads(self, state: MixedState) -> profile.Spread:
        """Standard deviations, correlations and lengthscales."""
        problem, bases = self.problem, pieces(state.whitening, TERM)
        return estimates.spreads(problem.terms, bases, self.scale, problem.smooth, gaussian=problem.gaussian)

    def final(self, state: MixedState, roster: Roster) -> Asking[Json]:
        """Intervals by the profile of the likelihood; and in the clear, where they are random, the effects of sites."""
        tables = yield from self.with_profiles(state)
        terms = zip(self.problem.formula.random, self.problem.columns.effect_names, strict=True)
        named = any({*term.group} <= self.config.sites_named and "intercept" in names for term, names in terms)
        if roster.totals_only or not named:
            return tables
        view = self.scoring.predicted.request
        told: Mapping[str, SiteEffect] = yield Each(SiteEffect, dict.fromkeys(roster.sites, view))
        sites = []
        for site, effect in told.items():
            mean, reach = self.scale * float(effect.mean), self.scale * estimates.Z95 * float(effect.variance) ** 0.5
            row = {"group": "site", "effect": self.preparation.labels[site], "kind": "of one site"}
            sites.append(row | {"estimate": mean, "low": mean - reach, "high": mean + reach})
        return {**tables, "sites": sorted(sites, key=lambda row: row["estimate"])}

    def with_profiles(self, state: MixedState) -> Asking[Json]:
        """The table with intervals by the profile of the likelihood, where no term is smooth."""
        problem, found, told = self.problem, estimated(self.problem, state), self.scoring.predicted.details
        if problem.smooth.terms or not converged(state) or told["singular"]:
            return {}
        fixed, random, scale = told["effects"], told["random"], self.scale
        base = state.whitening[FIXED]
        turn = scale * solve_triangular(base, np.eye(len(base)))  # its rows are the answer
        spread, size, end = self.spreads(state), len(turn), len(turn) + problem.terms.count
        rows = [row / effect["se"] for row, effect in zip(turn, fixed, strict=True)]
        parameters: list[tuple[estimates.Function, Array | None]]
        if problem.gaussian:
            parameters = [(profile.entry(-1), row) for row in rows]
        else:
            parameters = [(profile.weighed(row), None) for row in rows]

            def others(at: torch.Tensor) -> torch.Tensor:
                return torch.cat([self.spreads(state)(torch.cat([at[size:end], at.new_zeros(1)])), at[end:]])

            spread = others
        parameters += [(profile.entry(k, spread), None) for k in range(len(random))]
        ends = yield from profiled(problem, state, found, parameters)
        found_at = [float(row @ found.beta[-len(row) :]) for row in rows]
        tables: dict[str, list[Json]] = {"effects": [], "random": []}
        for effect, middle, pair in zip(fixed, found_at, ends[: len(fixed)], strict=True):
            low, high = (effect["estimate"] + effect["se"] * (end - middle) for end in pair)
            ratios = {"ratio_low": float(np.exp(low)), "ratio_high": float(np.exp(high))} if "ratio" in effect else {}
            tables["effects"].append({**effect, "profile_low": low, "profile_high": high, **ratios})
        for row, pair in zip(random, ends[len(fixed) :], strict=True):
            low, high = (float(np.tanh(end) if row["kind"] == "correlation" else np.exp(end)) for end in pair)
            tables["random"].append({**row, "profile_low": low, "profile_high": high})
        return tables
