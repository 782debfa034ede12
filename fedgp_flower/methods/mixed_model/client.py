"""The site's half of a mixed model: sums over its groups, and predictions with what its groups' rows say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.formula import Formula, parse
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.lazy import pd
from fedgp_flower.methods.mixed_model.design import (
    TERM,
    Columns,
    Design,
    columns,
    decoded,
    design,
    reference,
    sizes,
    whitened,
)
from fedgp_flower.methods.mixed_model.effects import (
    FAMILIES,
    MOST,
    SHAPES,
    TOGETHER,
    Conditional,
    Crossed,
    Factor,
    Marginal,
    Terms,
    derivatives,
    restricted_sums,
)
from fedgp_flower.methods.mixed_model.messages import (
    MarginalSums,
    MixedView,
    Outline,
    Restricted,
    SiteEffect,
    Trials,
)
from fedgp_flower.methods.mixed_model.smooth import Smooths, smooths
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import Array


class MixedClient(SiteClient):
    """Sums of the groups of the site."""

    def outline(self, request: Nothing) -> Outline:
        """Cross-products of the columns, and rough linear predictors."""
        del request
        found, around = columns(self.formula, self.site.train, self.preparation), self.around
        x = found.fixed / sizes(around.fixed)
        family = FAMILIES[self.likelihood](torch.tensor(SHAPES.get(self.likelihood, ())))
        rough = family.started(self.targets, torch.from_numpy(found.offset / self.scale)).numpy()
        effects = (matrix / sizes(other) for matrix, other in zip(found.effects, around.effects, strict=True))
        grams = [np.empty(0), *((z.T @ z).ravel() for z in effects)]
        return Outline(x.T @ x, x.T @ rough, np.concatenate(grams), np.array(float(len(x))))

    def restricted(self, request: Trials) -> Restricted:
        """What restricted maximum likelihood needs, with derivatives by θ and log ℓ."""
        rows, smooth = self.crossed, self.smooths
        points = torch.tensor(request.points[:, : rows.terms.count + sum(smooth.lengths)])
        widest = max(rows.inner.count * rows.inner.effects.shape[1], self.num_examples * len(smooth.terms), 1)
        entries = widest * (sum(smooth.widths) + rows.fixed.shape[1] + 1) * (1 + points.shape[1]) ** 2
        features = partial(smooth.features, smooth.at(self.site.train))
        together = min(TOGETHER, 1 + MOST // entries)
        each = vmap(partial(restricted_sums, rows, features=features), chunk_size=together)
        values, slopes, curvatures = (part.numpy() for part in each(points))
        lower = np.tril_indices(points.shape[1])
        return Restricted(values, slopes, curvatures[:, *lower], *self.counted)

    def marginal(self, request: Trials) -> MarginalSums:
        """Log marginal likelihoods of the groups, with derivatives by all parameters."""
        points, turns, inputs = (
            *map(torch.tensor, (request.points, request.turns)),
            self.smooths.at(self.site.train),
        )
        found = derivatives(self.crossed, FAMILIES[self.likelihood], points, self.smooths, inputs, turns)
        values, gradients, hessians, bends = (part.numpy() for part in found)
        return MarginalSums(values, gradients, hessians, bends, *self.counted)

    def site_effect(self, request: MixedView) -> SiteEffect:
        """The intercept of this site: η of a row without any other effect."""
        effects = []
        for k, (term, names) in enumerate(zip(self.formula.random, self.around.effect_names, strict=True)):
            row = np.zeros((1, len(names)))
            if not self.columns_of(term.group) and "intercept" in names:
                row[0, names.index("intercept")] = 1.0
            effects.append(whitened(row, self.setting.constants[f"{TERM}{k}"]))
        none = torch.zeros(1, len(request.beta), dtype=torch.float64)
        found = Design(none, none[:, 0], tuple(effects))
        mean, variance = self.latent(request, found, self.site.train.iloc[:1], known=True)
        return SiteEffect(mean.reshape(()), variance.reshape(()))

    def predict(self, request: MixedView, inputs: Array) -> Prediction:
        """An observation of a new group."""
        return self.observed(request, *self.linear(request, decoded(inputs, self.preparation), known=False))

    def held_out(self, request: MixedView) -> Prediction:
        """Observations of the held-out rows; those of groups with training rows by what these say."""
        return self.observed(request, *self.linear(request, self.site.test, known=True))

    def score(self, request: MixedView) -> Scores:
        """Scores by the likelihood."""
        y, (mean, variance), name = self.rows.y_test, self.linear(request, self.site.test, known=True), self.likelihood
        if name == "gaussian":
            return self.units.gaussian_scores(self.observed(request, mean, variance), y)
        return canonical_likelihood(name).scores(mean, variance, y, torch.tensor(request.shape), self.units)

    # What the handlers work with.

    @property
    def formula(self) -> Formula:
        """The model."""
        return parse(self.config.formula)

    @property
    def likelihood(self) -> str:
        """Its name."""
        return self.config.model.likelihood

    @property
    def scale(self) -> float:
        """Units of the target of one of the model's; offsets have none where noise is not Gaussian."""
        return self.preparation.target_scale

    @cached_property
    def around(self) -> Columns:
        """The columns at reference rows."""
        return reference(self.formula, self.preparation)

    @cached_property
    def targets(self) -> Tensor:
        """The targets, in units of their standard deviation; about their mean where there is an intercept."""
        return torch.from_numpy(self.rows.y + self.shift)

    @property
    def shift(self) -> float:
        """What is added to standardised targets."""
        return 0.0 if "intercept" in self.around.names else self.preparation.target_mean / self.scale

    @cached_property
    def crossed(self) -> Crossed:
        """The rows and the factors that group them."""
        found = design(self.formula, self.site.train, self.preparation, self.setting.constants)
        factors = [self.factor(group, found, self.site.train, known=True) for group in self.grouped]
        widths = Terms(tuple(effects.shape[1] for effects in found.effects))
        return Crossed(widths, found.fixed, found.offset / self.scale, self.targets, factors)

    @cached_property
    def smooths(self) -> Smooths:
        """The smooth terms."""
        return smooths(self.formula, self.preparation)

    @property
    def grouped(self) -> Mapping[tuple[str, ...], list[int]]:
        """The terms of each factor."""
        found: dict[tuple[str, ...], list[int]] = {}
        for k, term in enumerate(self.formula.random):
            found.setdefault(term.group, []).append(k)
        return found

    @property
    def counted(self) -> tuple[Array, Array]:
        """Rows, and groups of each factor in the order of the formula."""
        counts = [labels(self.site.train, self.columns_of(group)).nunique() for group in self.grouped]
        return np.array(float(self.num_examples)), np.array(counts, dtype=np.float64)

    def columns_of(self, group: tuple[str, ...]) -> list[str]:
        """The columns that name a group; none for the site."""
        return [name for name in group if name not in self.config.sites_named]

    def linear(self, request: MixedView, frame: pd.DataFrame, *, known: bool) -> tuple[Array, Array]:
        """Mean and variance of η at rows of a table, in units of the model; unless ``known`` their groups are new."""
        found = design(self.formula, frame, self.preparation, self.setting.constants)
        _, lengths, amplitudes = self.split(request)
        parts = self.smooths.features(self.smooths.at(frame), lengths)
        found = replace(found, fixed=torch.cat([*parts, found.fixed], dim=1))
        mean, variance = self.latent(request, found, frame, known)
        left = [a**2 * (1 - part.square().sum(1)) for a, part in zip(amplitudes, parts, strict=True)]
        return mean, variance + request.noise * sum(left, start=torch.zeros(len(frame))).numpy()

    def split(self, request: MixedView) -> tuple[Tensor, ...]:
        """Relative covariances, log ℓ and a."""
        sizes = [self.crossed.terms.count, sum(self.smooths.lengths), len(self.smooths.terms)]
        return torch.tensor(request.theta).split(sizes)

    def latent(self, request: MixedView, found: Design, frame: pd.DataFrame, known: bool) -> tuple[Array, Array]:
        """The same of whitened rows with their features, whose groups the table names."""
        beta, covariance = torch.tensor(request.beta), torch.tensor(request.covariance)
        theta, lengths, _ = self.split(request)
        factors = [self.factor(group, found, frame, known) for group in self.grouped]
        rows = copy(self.crossed)
        here = self.smooths.features(self.smooths.at(self.site.train), lengths)
        rows.fixed = torch.cat([*here, rows.fixed], dim=1)
        ordered = [factors[k] for k in rows.order]
        marginal = Marginal(rows, FAMILIES[self.likelihood](torch.tensor(request.shape)))
        conditional = Conditional(marginal, beta, theta)
        inner = ordered[0] if ordered else Factor(torch.zeros(len(frame), dtype=torch.int64), 0, found.fixed[:, :0], ())
        with torch.no_grad():
            mean, variance = conditional.linear(found.fixed, inner, ordered[1:], covariance, request.noise)
        return (mean + found.offset / self.scale).numpy(), variance.numpy()

    def factor(self, group: tuple[str, ...], found: Design, frame: pd.DataFrame, known: bool) -> Factor:
        """How rows of a table are grouped; −1 for a group without training rows."""
        here, there = (labels(table, self.columns_of(group)) for table in (self.site.train, frame))
        names = pd.Index(here.unique())
        level = names.get_indexer(pd.Index(there)) if known else np.full(len(frame), -1)
        terms = self.grouped[group]
        effects = torch.cat([found.effects[k] for k in terms], dim=1)
        return Factor(torch.from_numpy(level.astype(np.int64)), len(names), effects, tuple(terms))

    def observed(self, request: MixedView, mean: Array, variance: Array) -> Prediction:
        """Mean and variance of an observation, standardised, from those of η."""
        if self.likelihood == "gaussian":
            return Prediction(mean - self.shift, variance + request.noise)
        moments, shape = (torch.from_numpy(mean), torch.from_numpy(variance)), torch.tensor(request.shape)
        parts = canonical_likelihood(self.likelihood).moments(*moments, shape)
        return Prediction(*(part.numpy() for part in parts))


def labels(frame: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """The group of every row; one group where no column names it."""
    parts = [frame[name].astype("str") for name in names]
    return sum((part + "\n" for part in parts), start=pd.Series("", index=frame.index, dtype="str"))
