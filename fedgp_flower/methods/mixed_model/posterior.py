"""Predictions of a saved mixed model for rows of new groups, and its panels in the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
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
from fedgp_flower.run.figures import PANELS_PER_ROW, axes_of, band, intervals, label_text
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import ends, interval, restricted, show
from fedgp_flower.typing import Array, Facts


class NewGroup:
    """Predicts rows of new groups with a saved mixed model."""

    def __init__(self, saved: Posterior) -> None:
        self.agreed = Preparation.from_wire(saved.arrays, json.dumps(saved.schema))
        self.formula, self.likelihood = parse(str(saved.model["formula"])), saved.likelihood
        self.mean, self.covariance = saved.arrays["fixed.mean"], saved.arrays["fixed.covariance"]
        self.random, self.noise = pieces(saved.arrays, "random.covariance."), float(saved.arrays["noise"])
        self.smooth = smooths(self.formula, self.agreed)
        self.parameters = torch.tensor(saved.arrays.get("smooth", np.empty(0)))
        self.shape = torch.tensor(np.log(saved.arrays.get("dispersion", np.empty(0))))

    def latent(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of η [N] in units of the table, at standardised inputs [N, D]."""
        table = decoded(inputs, self.agreed)
        raw = columns(self.formula, table, self.agreed, finite=False)
        lengths, amplitudes = self.parameters.split([sum(self.smooth.lengths), len(self.smooth.terms)])
        features = self.smooth.features(self.smooth.at(table), lengths)
        fixed = np.hstack([*(part.numpy() for part in features), raw.fixed])
        variance = np.einsum("ne,ef,nf->n", fixed, self.covariance, fixed)
        variance += self.noise * self.smooth.unexplained(features, amplitudes, len(table)).numpy()
        for z, covariance in zip(raw.effects, self.random, strict=True):
            variance += np.einsum("ne,ef,nf->n", z, covariance, z)
        return fixed @ self.mean + raw.offset, variance

    def curve(self, term: int, place: int, grid: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of s(x) − s(0) for a smooth term, x along input ``place``, others at their means.

        ``grid`` holds standardised values. The features explain |φ(x) − φ(0)|² of the prior variance 2 − 2 k(x, 0) of
        the difference, in units of a² σ².
        """
        smooth, start, values = self.smooth.terms[term], sum(self.smooth.lengths[:term]), np.append(grid, 0.0)
        x = torch.zeros(len(values), len(smooth.inputs), dtype=torch.float64)
        x[:, place] = torch.from_numpy(values)
        log_lengths = self.parameters[start : start + len(smooth.inputs)]
        phi = smooth.features(x, log_lengths).numpy()
        change = phi[:-1] - phi[-1]
        end = sum(self.smooth.widths[: term + 1])
        weights = slice(end - self.smooth.widths[term], end)
        scale = self.noise * float(self.parameters[sum(self.smooth.lengths) + term]) ** 2
        prior = -2 * np.expm1(-0.5 * (grid / math.exp(log_lengths[place])) ** 2)
        variance = np.einsum("ne,ef,nf->n", change, self.covariance[weights, weights], change)
        return change @ self.mean[weights], np.sqrt(variance + scale * np.maximum(prior - (change**2).sum(1), 0))

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Standardised mean and standard deviation of an observation [N], at standardised inputs [N, D]."""
        mean, variance = self.latent(inputs)
        if self.likelihood == "gaussian":
            scale = self.agreed.target_scale
            return (mean - self.agreed.target_mean) / scale, np.sqrt(variance + self.noise) / scale
        moments = torch.from_numpy(mean), torch.from_numpy(variance)
        centre, spread = canonical_likelihood(self.likelihood).moments(*moments, self.shape)
        return centre.numpy(), spread.sqrt().numpy()


class NewCounts(NewGroup):
    """Predicts counts of new groups, with exact quantiles."""

    def quantiles(self, inputs: Array, levels: Sequence[float]) -> Array:
        """Predictive quantiles of the counts [levels, N]."""
        return canonical_likelihood(self.likelihood).quantiles(*self.latent(inputs), self.shape, levels)


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewGroup:
    """The predictor of a finished run; the input names are not needed."""
    return (NewCounts if saved.likelihood in COUNTS else NewGroup)(saved)


RATIOS = {"bernoulli": "odds ratio", "poisson": "rate ratio", "negative-binomial": "rate ratio"}


def panels(run: Run) -> list[Panel]:
    """Panels of the report: fixed effects, random effects, smooth terms and site effects."""
    facts, family = run.metrics.method_details, "" if run.saved is None else run.saved.likelihood
    ratio = [RATIOS[family]] if family in RATIOS else []
    rows = [
        [
            str(row["effect"]),
            *(show(row[name]) for name in ("estimate", "se")),
            interval(row),
            *([f"{show(row['ratio'])} ({ends(row['ratio_low'], row['ratio_high'])})"] if ratio else []),
            probability(row["p"]),
        ]
        for row in facts["effects"]
    ]
    titles = ["effect", "estimate", "standard error", "95 % interval", *(f"{name} (95 %)" for name in ratio), "p"]
    spread = [
        [f"{row['group']}: {row['effect']}".removesuffix(": "), str(row["kind"]), show(row["estimate"]), interval(row)]
        for row in facts["random"]
    ]
    sections = [
        Panel("Effects", html_table(titles, rows), caption(facts)),
        Panel(
            "Random effects", html_table(("effect", "", "estimate", "95 % interval"), spread), _random_caption(facts)
        ),
    ]
    if run.saved is not None and (model := saved_model(run.saved, ())).smooth.terms:
        words = "Each smooth term along an input, minus its value at the means of its inputs: mean and 95 % band"
        words += f", in {unit(family)}."
        sections.append(Panel("Smooth terms", curves(model), words))
    if sites := facts.get("sites"):
        words = "Random intercepts of the sites: estimate and 95 % interval. Few rows shrink an estimate towards 0."
        table = pd.DataFrame(sites).set_index("effect").rename(columns={"estimate": "value"})
        sections.append(Panel("Effects of sites", intervals(table, unit(family)), words))
    return sections


def curves(model: NewGroup) -> Figure:
    """The figure of each smooth term along each of its inputs, in units of the table."""
    places = [(k, d) for k, length in enumerate(model.smooth.lengths) for d in range(length)]
    figure, axes = axes_of(len(places), width=3.2 * min(len(places), PANELS_PER_ROW), height=2.6)
    grid = np.linspace(-2, 2, 121)
    for ax, (k, d) in zip(axes, places, strict=True):
        term, (mean, sd) = model.smooth.terms[k], model.curve(k, d, grid)
        band(ax, term.mean[d] + term.scale[d] * grid, mean - Z95 * sd, mean, mean + Z95 * sd)
        ax.set(xlabel=label_text(term.inputs[d]), ylabel=f"{label_text(term.called)}, {unit(model.likelihood)}")
    return figure


def unit(family: str) -> str:
    """The unit of the linear predictor, such as log odds."""
    return f"log {RATIOS[family].split()[0]}" if family in RATIOS else "units of the target"


def probability(p: float | None) -> str:
    """A p-value as journals print it; a dash if it is unknown."""
    if p is None:
        return "–"
    return "< 0.001" if p < 1e-3 else f"{p:.3f}"


def caption(facts: Facts) -> str:
    """The caption of the fixed effects: criterion, rows, groups and goodness of fit."""
    groups: Sequence[str] = [f"{count:,} groups of `{name}`" for name, count in facts["groups"].items()]
    words = f"{facts['criterion']} estimates in units of the table, from {facts['rows']:,} rows"
    words += f" and {', '.join(groups) or 'no groups'}"
    words += " (a group with rows at several sites counts as another group at each)" if groups else ""
    by = restricted(facts)
    fit = f"log likelihood{by} {facts['log_likelihood']:.2f}, AIC{by} {facts['aic']:.2f}, BIC{by} {facts['bic']:.2f}"
    fit = fit.replace(" -", " −")
    same = " Figures by REML compare models with the same fixed effects only." if by else ""
    kind = "Profile likelihood intervals and Wald" if _profiled(facts) else "Wald intervals and"
    return f"{words}; {fit}.{same} {kind} p-values."


def _profiled(facts: Facts) -> bool:
    """Whether the tables have profile likelihood intervals."""
    return "profile_low" in facts["effects"][0]


def _random_caption(facts: Facts) -> str:
    """The caption of the random effects."""
    parts = [f"{share:.3f} for `{group}`" for group, share in facts["icc"].items()]
    slopes = any(row["kind"] == "sd" and row["effect"] not in ("intercept", "") for row in facts["random"])
    where = " where every column with a random slope is 0" if slopes else ""
    icc = [f"Intraclass correlation{where}: {', '.join(parts)}."] if parts else []
    known = any(interval(row) != "–" for row in facts["random"])
    how = ["Intervals by the delta method."] if known and not _profiled(facts) else []
    singular = ["A combination of random effects has no variance: the fit is singular."] if facts["singular"] else []
    return " ".join(icc + how + singular)
