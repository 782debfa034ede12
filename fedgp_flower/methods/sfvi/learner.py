"""Computations of a site in SFVI and SFVI-Avg: its term of the bound, gradients, and local steps.

    ELBO = E[log p_θ(Z_G) − log q(Z_G)] + Σₖ E[log p_θ(y_k, Z_Lk | Z_G) − log q(Z_Lk | Z_G)]

The server computes the first bracket, site k the k-th term (Hassan et al. 2023, Equations S5–S8). Parameters and
their gradients have the names ``theta.*``, ``q.*`` (η_G) and ``local.*`` (η_Lk).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import message
from fedgp_flower.methods.family import (
    LOCAL,
    GlobalPosterior,
    LocalPosterior,
    global_term,
    named,
    unit_noise,
    with_named,
)
from fedgp_flower.methods.sfvi.options import SHARED, SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs, SiteRows, StructuredModel, configured
from fedgp_flower.options import ModelSection
from fedgp_flower.scores import Prediction
from fedgp_flower.typing import AnyShape, Array, Scalar

LocalState: TypeAlias = tuple[GlobalPosterior, LocalPosterior, AdamState[Tensor]]
"""State of local steps; θ is in the model."""
Slopes: TypeAlias = dict[str, Tensor]
"""A gradient; its entries ``local.*`` stay at the site."""
CATCHING_UP = 2**40
"""First number of catch-up steps, so that they share no draw with a round."""


def gradients(
    model: StructuredModel,
    q_global: GlobalPosterior,
    q_local: LocalPosterior,
    term: Callable[[GlobalPosterior, LocalPosterior], Scalar],
) -> tuple[float, Slopes]:
    """Value of ``term`` and its gradients in θ, η_G (through Z_G and Z_Lk) and η_Lk."""
    leaves = {name: value.detach().requires_grad_() for name, value in (named(q_global) | named(q_local)).items()}
    value = term(with_named(q_global, leaves), with_named(q_local, leaves))
    leaves = model.theta() | leaves
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return float(value.detach()), dict(zip(leaves, slopes, strict=True))


@dataclass(frozen=True, slots=True)
class Learner:
    """A model, a site's rows, and the settings of its random draws."""

    model: StructuredModel
    site: SiteRows
    seed: int
    """Seed of the draws of units' latents; a real site keeps it secret."""
    key: int
    """Unique key of the site's draws of Z_G."""
    samples: int
    """S; 0 for closed-form expectations."""
    importance: int

    def noise_global(self, step: int) -> Tensor | None:
        """ε_G [S, M] of a local step; None for closed-form expectations."""
        if not self.samples:
            return None
        draw = np.random.default_rng([self.seed, self.key, step])
        return torch.from_numpy(draw.standard_normal((self.samples, self.model.global_size)))

    def site_term(self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int) -> Scalar:
        """The site's term of the bound; ``noise`` is ε_G [S, M], or None for closed-form expectations."""
        if noise is None:
            return self.model.site_term(self.site, q_global, q_local, None)
        width = self.model.local_width(self.site)
        shape = (self.importance if width else 1, len(noise))
        noise_local = unit_noise(self.seed, step, self.site.keys, shape, width)
        return self.model.site_term(self.site, q_global, q_local, (noise, noise_local))

    def whole_term(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int, ratio: float
    ) -> Scalar:
        """The server's bracket plus ``ratio`` = N / N_k times the site's term, an estimate of the bound of all rows."""
        bracket = global_term(self.model.prior_log_scale(), q_global, noise)
        return bracket + ratio * self.site_term(q_global, q_local, noise, step)

    def gradient(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int
    ) -> tuple[float, Slopes]:
        """Value and gradient of the site's term."""
        return gradients(self.model, q_global, q_local, partial(self.site_term, noise=noise, step=step))

    def catch_up(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, rates: Sequence[float]
    ) -> tuple[LocalPosterior, AdamState[Tensor]]:
        """q(Z_Lk | Z_G) of a late site after one step at each rate, with θ and q(Z_G) fixed."""
        moments: AdamState[Tensor] = AdamState()
        for step, rate in enumerate(rates, CATCHING_UP):
            _, slopes = self.gradient(q_global, q_local, self.noise_global(step), step)
            q_local, moments = step_local(q_local, slopes, moments, rate)
        return q_local, moments

    def local_steps(
        self, start: LocalState, ratio: float, *, first_step: int, rates: Sequence[float]
    ) -> tuple[LocalState, float]:
        """SFVI-Avg: one step on θ, η_G and η_Lk at each rate; θ changes in place.

        Returns the final state, and :meth:`whole_term` averaged over the steps. Stored Adam moments of η_Lk are
        those of the site's term without ``ratio``, so that later gradient rounds can use them.
        """
        q_global, q_local, stored = start
        moments, total = scaled(stored, ratio), 0.0
        for step, rate in enumerate(rates, first_step):
            term = partial(self.whole_term, noise=self.noise_global(step), step=step, ratio=ratio)
            value, slopes = gradients(self.model, q_global, q_local, term)
            moves, moments = moments.update(slopes, rate)
            point = self.model.theta() | named(q_global) | named(q_local)
            moved = {name: value.detach() + moves[name] for name, value in point.items()}
            self.model.load_theta(moved)
            q_global, q_local = with_named(q_global, moved), with_named(q_local, moved)
            total += value / len(rates)
        return (q_global, q_local, scaled(moments, 1 / ratio)), total

    def predict(
        self, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, *, link: bool = False
    ) -> Prediction:
        """Predict at rows; ``q_local`` is None for a new site, and ``link`` asks for the linear predictor."""
        mean, variance = self.model.moments(self.site, q_global, q_local, rows, link)
        return Prediction(mean.numpy(), variance.numpy())


def initial_local(model: StructuredModel, site: SiteRows, options: SFVIOptions) -> LocalPosterior:
    """q(Z_Lk | Z_G) before the first step."""
    return model.initial_local(site, scale=options.scale, whole=not options.row.mean_field)


def scaled(moments: AdamState[Tensor], factor: float) -> AdamState[Tensor]:
    """Adam moments for gradients in η_Lk multiplied by ``factor``."""
    first, second = (
        {name: value * factor**power if name.startswith(LOCAL) else value for name, value in part.items()}
        for power, part in ((1, moments.first), (2, moments.second))
    )
    return AdamState(moments.step, first, second)


def step_local(
    q_local: LocalPosterior, slopes: Slopes, moments: AdamState[Tensor], rate: float
) -> tuple[LocalPosterior, AdamState[Tensor]]:
    """One step on the site's q."""
    moves, moments = moments.update({name: slopes[name] for name in slopes if name.startswith(LOCAL)}, rate)
    return with_named(q_local, {name: value.detach() + moves[name] for name, value in named(q_local).items()}), moments


# Memory of a site between rounds, which is never sent.


@message()
class RoundMemory:
    """q(Z_Lk | Z_G) after a round, the moments of its optimiser, and the μ_G to which it was fitted."""

    round: int
    averaged: bool
    """Whether q(Z_G) was averaged after the site's steps; its latents then need a shift to the new μ_G."""
    about: str
    """Digest of the units; see :func:`subject`."""
    centre: Float[ndarray, " G"]
    local: Mapping[str, AnyShape]
    steps: int
    first: Mapping[str, AnyShape]
    second: Mapping[str, AnyShape]

    @property
    def moments(self) -> AdamState[Tensor]:
        """The state of Adam."""
        first, second = (
            {name: torch.tensor(array) for name, array in part.items()} for part in (self.first, self.second)
        )
        return AdamState(self.steps, first, second)

    def read(self, site: SiteRows, start: LocalPosterior, centre: Tensor, server_round: int) -> LocalPosterior | None:
        """q(Z_Lk | Z_G) for the current μ_G; None if the site has other units now.

        It is shifted if q(Z_G) was averaged or the site missed rounds. A site that sends gradients every round needs no
        shift, because μ̄_k and μ_G moved together. ``start`` is the initial q.
        """
        local = {LOCAL + name: torch.tensor(array) for name, array in self.local.items()}
        shapes, expected = ({n: v.shape for n, v in part.items()} for part in (local, named(start)))
        if self.about != subject(site) or shapes != expected:
            return None
        q_local = with_named(start, local)
        late = self.averaged or server_round > self.round + 1
        return q_local.shifted(torch.tensor(self.centre), centre) if late else q_local


@message()
class SiteMemory:
    """All that a site stores during a run."""

    latest: RoundMemory | None = None
    before: RoundMemory | None = None
    """Memory from which a repetition of the latest round starts."""
    seed: int | None = None
    """Secret seed of a real site's draws."""

    def at(self, server_round: int) -> RoundMemory | None:
        """Return the memory from which a round starts; a repeated round starts from the one before."""
        repeated = self.latest is not None and self.latest.round >= server_round
        return self.before if repeated else self.latest


def subject(site: SiteRows) -> str:
    """Digest of the units whose latents q describes, and of their anchor inputs."""
    parts = (site.keys, site.anchors)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


# The model of a configuration, and its rows.


def model_at(
    options: SFVIOptions, section: ModelSection, num_inputs: int, arrays: Mapping[str, ndarray]
) -> StructuredModel:
    """The model at the θ in ``arrays``, from a message or a saved posterior, with the shared inputs if any."""
    inputs = arrays.get(SHARED)
    model = configured(options, section, num_inputs, None if inputs is None else torch.as_tensor(inputs))
    model.load_theta(arrays)
    return model


def rows_of(preparation: Preparation, inputs: Array, options: SFVIOptions) -> ModelInputs:
    """Standardised inputs [N, D] as :class:`ModelInputs`; without ``sfvi.unit-column`` all rows are of one unit."""
    names = list(preparation.names)
    features = torch.from_numpy(inputs[:, options.columns(names)])
    if not options.unit_column:
        return ModelInputs(features, torch.zeros(len(inputs), dtype=torch.int64))
    index = names.index(options.unit_column)
    values = inputs[:, index] * preparation.input_scale[index] + preparation.input_mean[index]
    units = np.rint(values)
    if np.abs(values - units).max(initial=0.0) > 1e-6:
        raise DataError(f"column `{options.unit_column}` must hold whole numbers, which name units")
    return ModelInputs(features, torch.from_numpy(units.astype(np.int64)))
