"""What a finished mixed model predicts for rows of new groups, and its table in the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

from fedgp_flower.data.cells import COUNTS
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.formula import parse
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.methods.mixed_model.design import columns, decoded
from fedgp_flower.methods.mixed_model.estimates import Z95
from fedgp_flower.methods.mixed_model.messages import pieces
from fedgp_flower.methods.mixed_model.smooth import smooths
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import DPI
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import interval, show
from fedgp_flower.typing import Array, Facts


class NewGroup:
    """Prediction for a row of a group without rows."""

    def __init__(self, saved: Posterior) -> None:
        self.agreed = Preparation.from_wire(saved.arrays, json.dumps(saved.schema))
        self.formula, self.likelihood = parse(str(saved.model["formula"])), saved.likelihood
        self.mean, self.covariance = saved.arrays["fixed.mean"], saved.arrays["fixed.covariance"]
        self.random, self.noise = pieces(saved.arrays, "random.covariance."), float(saved.arrays["noise"])
        self.smooth = smooths(self.formula, self.agreed)
        self.parameters = torch.tensor(saved.arrays.get("smooth", np.empty(0)))
        self.shape = torch.tensor(np.log(saved.arrays.get("dispersion", np.empty(0))))

    def latent(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of η [N], in units of the table."""
        table = decoded(inputs, self.agreed)
        found = columns(self.formula, table, self.agreed, finite=False)
        parts, left = self.features(self.smooth.at(table))
        fixed = np.hstack([*parts, found.fixed])
        variance = np.einsum("ne,ef,nf->n", fixed, self.covariance, fixed) + sum(left)
        for z, covariance in zip(found.effects, self.random, strict=True):
            variance += np.einsum("ne,ef,nf->n", z, covariance, z)
        return fixed @ self.mean + found.offset, variance

    def features(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Array], list[Array]]:
        """Φ of every smooth term, and the variance that it leaves of each row."""
        lengths, amplitudes = self.parameters.split([sum(self.smooth.lengths), len(self.smooth.terms)])
        parts = [part.numpy() for part in self.smooth.features(inputs, lengths)]
        scales = self.noise * amplitudes.numpy() ** 2
        return parts, [a * (1 - (part**2).sum(1)) for a, part in zip(scales, parts, strict=True)]

    def rise(self, term: int, place: int, grid: Array) -> tuple[Array, Array]:
        """A smooth term along one of its inputs, standardised, less its value where all are at their means: mean, sd.

        Features explain |Δφ|² of a difference's prior variance 2 − 2 k(x, 0), in units of a² σ².
        """
        smooth, before, at = self.smooth.terms[term], sum(self.smooth.lengths[:term]), np.append(grid, 0.0)
        x = torch.zeros(len(at), len(smooth.inputs), dtype=torch.float64)
        x[:, place] = torch.from_numpy(at)
        log_lengths = self.parameters[before : before + len(smooth.inputs)]
        phi = smooth.features(x, log_lengths).numpy()
        change = phi[:-1] - phi[-1]
        end = sum(self.smooth.widths[: term + 1])
        here = slice(end - self.smooth.widths[term], end)
        scale = self.noise * float(self.parameters[sum(self.smooth.lengths) + term]) ** 2
        prior = -2 * np.expm1(-0.5 * (grid / math.exp(log_lengths[place])) ** 2)
        variance = np.einsum("ne,ef,nf->n", change, self.covariance[here, here], change)
        return change @ self.mean[here], np.sqrt(variance + scale * np.maximum(prior - (change**2).sum(1), 0))

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an observation [N], standardised."""
        mean, variance = self.latent(inputs)
        if self.likelihood == "gaussian":
            agreed = self.agreed
            return (mean - agreed.target_mean) / agreed.target_scale, np.sqrt(
                variance + self.noise
            ) / agreed.target_scale
        moments = torch.from_numpy(mean), torch.from_numpy(variance)
        centre, spread = canonical_likelihood(self.likelihood).moments(*moments, self.shape)
        return centre.numpy(), spread.sqrt().numpy()


class NewCounts(NewGroup):
    """Counts of a group without rows, which are not normal."""

    def quantiles(self, inputs: Array, levels: Sequence[float]) -> Array:
        """Quantiles [levels, N]."""
        return canonical_likelihood(self.likelihood).quantiles(*self.latent(inputs), self.shape, levels)


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewGroup:
    """The model of a finished run."""
    del names
    return (NewCounts if saved.likelihood in COUNTS else NewGroup)(saved)


RATIOS = {"bernoulli": "odds ratio", "poisson": "rate ratio", "negative-binomial": "rate ratio"}


def panels(run: Run) -> list[Panel]:
    """The table of effects, and of random effects."""
    facts, family = run.metrics.method_details, "" if run.saved is None else run.saved.likelihood
    ratio = [RATIOS[family]] if family in RATIOS else []
    rows = [
        [
            str(row["effect"]),
            *(show(row[name]) for name in ("estimate", "se")),
            interval(row),
            *([f"{show(row['ratio'])} ({show(row['ratio_low'])} to {show(row['ratio_high'])})"] if ratio else []),
            probability(row["p"]),
        ]
        for row in facts["effects"]
    ]
    titles = ["effect", "estimate", "standard error", "95 % interval", *(f"{name} (95 %)" for name in ratio), "p"]
    spread = [
        [f"{row['group']}: {row['effect']}".removesuffix(": "), str(row["kind"]), show(row["estimate"]), interval(row)]
        for row in facts["random"]
    ]
    found = [
        Panel("Effects", html_table(titles, rows), caption(facts)),
        Panel("Random effects", html_table(("effect", "", "estimate", "95 % interval"), spread), _shares(facts)),
    ]
    if run.saved is not None and (model := saved_model(run.saved, ())).smooth.terms:
        words = (
            "Each smooth term along an input, less its value where its inputs are at their means: mean and 95 % band"
        )
        words += f", on the scale of {unit(family)}."
        found.append(Panel("Smooth terms", curves(model), words))
    if sites := facts.get("sites"):
        words = "How far a site is from the typical one: estimate and 95 % interval, drawn to 0 where it has few rows."
        found.append(Panel("Effects of sites", site_effects(sites, family), words))
    return found


def curves(model: NewGroup) -> Figure:
    """Each smooth term along each of its inputs, in units of the table."""
    places = [(k, d) for k, length in enumerate(model.smooth.lengths) for d in range(length)]
    figure, grid = (
        Figure(figsize=(3.2 * len(places), 2.6), dpi=DPI, layout="constrained"),
        np.linspace(-2, 2, 121),
    )
    for ax, (k, d) in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        term, (mean, sd) = model.smooth.terms[k], model.rise(k, d, grid)
        x = term.mean[d] + term.scale[d] * grid
        ax.fill_between(x, mean - Z95 * sd, mean + Z95 * sd, alpha=0.25, lw=0)
        ax.plot(x, mean, lw=1.4)
        ax.set_xlabel(term.inputs[d], fontsize=8)
        ax.set_ylabel(f"{term.called}, {unit(model.likelihood)}", fontsize=8)
        ax.tick_params(labelsize=7)
    return figure


def site_effects(sites: Sequence[Facts], family: str) -> Figure:
    """The effect of each site with its interval, the lowest first."""
    figure = Figure(figsize=(6.4, 0.8 + min(0.22 * len(sites), 12.0)), dpi=DPI, layout="constrained")
    axes, places = figure.subplots(), np.arange(len(sites))
    middle, low, high = (np.array([row[name] for row in sites]) for name in ("estimate", "low", "high"))
    axes.errorbar(middle, places, xerr=(middle - low, high - middle), fmt="o", ms=4, lw=1.2)
    axes.axvline(0, color="black", lw=0.7)
    axes.set_yticks(places, [str(row["effect"]) for row in sites], fontsize=8)
    axes.set_xlabel(unit(family), fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    return figure


def unit(family: str) -> str:
    """Of a linear predictor."""
    return f"log {RATIOS[family].split()[0]}" if family in RATIOS else "units of the target"


def probability(p: float) -> str:
    """A p-value as journals print it."""
    return "< 0.001" if p < 1e-3 else f"{p:.3f}"


def caption(facts: Facts) -> str:
    """How the model was fitted, to how much, and how well."""
    groups: Sequence[str] = [f"{count:,} groups of `{name}`" for name, count in facts["groups"].items()]
    said = f"{facts['criterion']} estimates in units of the table, of {facts['rows']:,} rows"
    said += f" and {', '.join(groups) or 'no groups'}"
    fit = f"log likelihood {facts['log_likelihood']:.2f}, AIC {facts['aic']:.2f}, BIC {facts['bic']:.2f}"
    kind = "Intervals by the profile of the likelihood, Wald's" if _profiled(facts) else "Wald intervals and"
    return f"{said}; {fit}. {kind} p-values."


def _profiled(facts: Facts) -> bool:
    """Whether there are such intervals."""
    return "profile_low" in facts["effects"][0]


def _shares(facts: Facts) -> str:
    parts = [f"{share:.3f} for `{group}`" for group, share in facts["icc"].items()]
    icc = [f"Intraclass correlation {', '.join(parts)}."] if parts else []
    how = [] if _profiled(facts) else ["Intervals by the delta method."]
    singular = ["A random effect has no variance: the fit is singular."] if facts["singular"] else []
    return " ".join(icc + how + singular)
