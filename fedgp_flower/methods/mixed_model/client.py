"""The client of a mixed model: sums over the groups of a site, and predictions given the rows of these groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.formula import Formula, parse
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.lazy import pd
from fedgp_flower.methods.mixed_model.design import TERM, Columns, columns, decoded, design, reference, sizes, whitened
from fedgp_flower.methods.mixed_model.effects import (
    FAMILIES,
    MOST,
    SHAPES,
    TOGETHER,
    Crossed,
    Factor,
    Marginal,
    Terms,
    derivatives,
    restricted_sums,
)
from fedgp_flower.methods.mixed_model.messages import MarginalSums, MixedView, Outline, Restricted, SiteEffect, Trials
from fedgp_flower.methods.mixed_model.smooth import Smooths, smooths
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Nothing
from fedgp_flower.typing import Array


class MixedClient(SiteClient):
    """Answers the messages of a mixed model from the rows of one site."""

    def outline(self, request: Nothing) -> Outline:
        """Cross-products of the design matrices, and of the fixed effects with initial linear predictors."""
        raw, at_reference = self.columns, reference(self.formula, self.preparation)
        x = raw.fixed / sizes(at_reference.fixed)
        family = FAMILIES[self.likelihood](torch.tensor(SHAPES.get(self.likelihood, ())))
        initial = family.initial(self.targets, torch.from_numpy(raw.offset / self.scale)).numpy()
        effects = (z / sizes(other) for z, other in zip(raw.effects, at_reference.effects, strict=True))
        grams = [np.empty(0), *((z.T @ z).ravel() for z in effects)]
        return Outline(x.T @ x, x.T @ initial, np.concatenate(grams), np.array(float(len(x))))

    def restricted(self, request: Trials) -> Restricted:
        """Sums for the restricted likelihood at each trial, with their derivatives by θ and log ℓ."""
        rows, smooth = self.crossed, self.smooths
        points = torch.tensor(request.points[:, : rows.terms.count + sum(smooth.lengths)])
        widest = max(rows.inner.count * rows.inner.effects.shape[1], self.num_examples * len(smooth.terms), 1)
        entries = widest * (sum(smooth.widths) + rows.fixed.shape[1] + 1) * (1 + points.shape[1]) ** 2
        features = partial(smooth.features, smooth.at(self.site.train))
        sums = vmap(partial(restricted_sums, rows, features=features), chunk_size=min(TOGETHER, 1 + MOST // entries))
        values, slopes, curvatures = (part.numpy() for part in sums(points))
        lower = np.tril_indices(points.shape[1])
        return Restricted(values, slopes, curvatures[:, *lower], *self.counts)

    def marginal(self, request: Trials) -> MarginalSums:
        """The log marginal likelihood at each trial, with derivatives by all parameters."""
        family, inputs = FAMILIES[self.likelihood], self.smooths.at(self.site.train)
        points, turns = torch.tensor(request.points), torch.tensor(request.turns)
        sums = derivatives(self.crossed, family, points, self.smooths, inputs, turns)
        values, gradients, hessians, bends = (part.numpy() for part in sums)
        return MarginalSums(values, gradients, hessians, bends, *self.counts)

    def site_effect(self, request: MixedView) -> SiteEffect:
        """The conditional random intercept of this site: η of a row with all other effects zero."""
        effects = []
        for k, (term, names) in enumerate(zip(self.formula.random, self.columns.effect_names, strict=True)):
            row = np.zeros((1, len(names)))
            if not self.columns_of(term.group) and "intercept" in names:
                row[0, names.index("intercept")] = 1.0
            effects.append(whitened(row, self.setting.constants[f"{TERM}{k}"]))
        zero = torch.zeros(1, len(request.beta), dtype=torch.float64)
        mean, variance = self.conditional(request, zero, effects, self.site.train.iloc[:1], known_groups=True)
        return SiteEffect(mean.reshape(()), variance.reshape(()))

    def predict(self, request: MixedView, inputs: Array) -> Prediction:
        """Mean and variance of an observation of a new group."""
        return self.observation(
            request, *self.predictor(request, decoded(inputs, self.preparation), known_groups=False)
        )

    def held_out(self, request: MixedView) -> Prediction:
        """Mean and variance of the held-out rows, given the training rows of their groups."""
        return self.observation(request, *self.predictor(request, self.site.test, known_groups=True))

    def score(self, request: MixedView) -> Scores:
        """Scores of the held-out rows."""
        y, (mean, variance) = self.rows.y_test, self.predictor(request, self.site.test, known_groups=True)
        if self.likelihood == "gaussian":
            return self.units.gaussian_scores(self.observation(request, mean, variance), y)
        return canonical_likelihood(self.likelihood).scores(mean, variance, y, torch.tensor(request.shape), self.units)

    @property
    def formula(self) -> Formula:
        """The parsed formula of the model."""
        return parse(self.config.formula)

    @property
    def likelihood(self) -> str:
        """The name of the likelihood."""
        return self.config.model.likelihood

    @property
    def scale(self) -> float:
        """One standardised unit of η in units of the table; 1 unless the noise is Gaussian."""
        return self.preparation.target_scale

    @cached_property
    def columns(self) -> Columns:
        """The design matrices of the training rows."""
        return columns(self.formula, self.site.train, self.preparation)

    @cached_property
    def targets(self) -> Tensor:
        """The targets [N] in units of their standard deviation, and centred if the model has an intercept."""
        return torch.from_numpy(self.rows.y + self.shift)

    @property
    def shift(self) -> float:
        """The mean that :attr:`targets` add to standardised targets."""
        return 0.0 if "intercept" in self.columns.names else self.preparation.target_mean / self.scale

    @cached_property
    def crossed(self) -> Crossed:
        """The training rows and their grouping factors."""
        fixed, offset, effects = design(self.columns, self.setting.constants)
        factors = [self.factor(group, effects, self.site.train, known_groups=True) for group in self.factor_terms]
        terms = Terms(tuple(z.shape[1] for z in effects))
        return Crossed(terms, fixed, offset / self.scale, self.targets, factors)

    @cached_property
    def smooths(self) -> Smooths:
        """The smooth terms of the formula."""
        return smooths(self.formula, self.preparation)

    @property
    def factor_terms(self) -> Mapping[tuple[str, ...], list[int]]:
        """The random terms of each grouping factor, in the order of the formula."""
        factors: dict[tuple[str, ...], list[int]] = {}
        for k, term in enumerate(self.formula.random):
            factors.setdefault(term.group, []).append(k)
        return factors

    @property
    def counts(self) -> tuple[Array, Array]:
        """The number of rows, and of groups of each factor in the order of the formula."""
        groups = [labels(self.site.train, self.columns_of(group)).nunique() for group in self.factor_terms]
        return np.array(float(self.num_examples)), np.array(groups, dtype=np.float64)

    def columns_of(self, group: tuple[str, ...]) -> list[str]:
        """The columns whose values identify a group; empty if the site is the group."""
        return [name for name in group if name not in self.config.sites_named]

    def predictor(self, request: MixedView, frame: pd.DataFrame, *, known_groups: bool) -> tuple[Array, Array]:
        """Mean and variance of η [N] at rows of a table, standardised; their groups are new unless ``known_groups``."""
        at = columns(self.formula, frame, self.preparation)
        fixed, offset, effects = design(at, self.setting.constants)
        _, lengths, amplitudes = self.split(request)
        features = self.smooths.features(self.smooths.at(frame), lengths)
        mean, variance = self.conditional(request, torch.cat([*features, fixed], dim=1), effects, frame, known_groups)
        variance += request.noise * self.smooths.unexplained(features, amplitudes, len(frame)).numpy()
        return mean + (offset / self.scale).numpy(), variance

    def split(self, request: MixedView) -> tuple[Tensor, ...]:
        """The parts of θ: relative covariances, log ℓ and a."""
        sizes = [self.crossed.terms.count, sum(self.smooths.lengths), len(self.smooths.terms)]
        return torch.tensor(request.theta).split(sizes)

    def conditional(
        self, request: MixedView, fixed: Tensor, effects: Sequence[Tensor], frame: pd.DataFrame, known_groups: bool
    ) -> tuple[Array, Array]:
        """:meth:`predictor` without offset, from features and whitened columns ``fixed`` [N, E] and ``effects``."""
        theta, lengths, _ = self.split(request)
        rows = copy(self.crossed)
        features = self.smooths.features(self.smooths.at(self.site.train), lengths)
        rows.fixed = torch.cat([*features, rows.fixed], dim=1)
        marginal = Marginal(rows, FAMILIES[self.likelihood](torch.tensor(request.shape)))
        factors = [self.factor(group, effects, frame, known_groups) for group in self.factor_terms]
        with torch.no_grad():
            mean, variance, slopes = marginal.conditional(torch.tensor(request.beta), theta, fixed, factors)
            uncertain = torch.einsum("ne,ef,nf->n", slopes, torch.tensor(request.covariance), slopes)
        return mean.numpy(), (request.noise * variance + uncertain).numpy()

    def factor(
        self, group: tuple[str, ...], effects: Sequence[Tensor], frame: pd.DataFrame, known_groups: bool
    ) -> Factor:
        """The grouping factor of the rows of a table; level −1 for new groups: all of them unless ``known_groups``."""
        trained, asked = (labels(table, self.columns_of(group)) for table in (self.site.train, frame))
        names = pd.Index(trained.unique())
        level = names.get_indexer(pd.Index(asked)) if known_groups else np.full(len(frame), -1)
        terms = self.factor_terms[group]
        z = torch.cat([effects[k] for k in terms], dim=1)
        return Factor(torch.from_numpy(level.astype(np.int64)), len(names), z, tuple(terms))

    def observation(self, request: MixedView, mean: Array, variance: Array) -> Prediction:
        """Mean and variance of a standardised observation, from the mean and variance of η [N]."""
        if self.likelihood == "gaussian":
            return Prediction(mean - self.shift, variance + request.noise)
        moments, shape = (torch.from_numpy(mean), torch.from_numpy(variance)), torch.tensor(request.shape)
        parts = canonical_likelihood(self.likelihood).moments(*moments, shape)
        return Prediction(*(part.numpy() for part in parts))


def labels(frame: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """The group of each row as text; one group if ``names`` is empty."""
    parts = [frame[name].astype("str") for name in names]
    return sum((part + "\n" for part in parts), start=pd.Series("", index=frame.index, dtype="str"))
