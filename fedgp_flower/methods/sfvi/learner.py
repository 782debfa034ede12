"""What a site computes in SFVI and SFVI-Avg: its term of the bound, gradients of it, and local steps. No Flower.

    ELBO = E[log p_θ(Z_G) − log q(Z_G)] + Σₖ E[log p_θ(y_k, Z_Lk | Z_G) − log q(Z_Lk | Z_G)]

The first bracket is the server's, the k-th term is site k's (Hassan et al. 2023, Equations S5–S8).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.family import (
    GlobalPosterior,
    LocalPosterior,
    expected_global_term,
    held,
    named,
    sampled_global_term,
    unit_noise,
    with_named,
)
from fedgp_flower.methods.sfvi.options import SHARED, SFVIOptions
from fedgp_flower.methods.sfvi.structured import (
    ClosedFormModel,
    ModelInputs,
    SampledModel,
    SiteRows,
    StructuredModel,
    configured,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, Scalar

LocalState: TypeAlias = tuple[GlobalPosterior, LocalPosterior, AdamState[Tensor]]
"""Where local steps start and end; θ is in the model."""
LOCAL = "local."
"""Prefix of η_Lk among the names of parameters that a site moves."""
CATCHING_UP = 2**40
"""Steps of catching up are numbered from here, so that they share no draw with a round."""


def sampled_site_term(
    model: SampledModel,
    site: SiteRows,
    q_global: GlobalPosterior,
    q_local: LocalPosterior,
    *,
    noise: tuple[Float[Tensor, "S M"], Float[Tensor, "R S U W"]],
) -> Scalar:
    """The site's term, averaged over S draws of Z_G, with R draws of every unit's latents for each.

    R = 1: log p(y_u, Z_Lu | Z_G) − log q(Z_Lu | Z_G) with the parameters inside log q held constant (sticking the
    landing, Roeder et al. 2017). R > 1: Σ_u log 1/R Σ_r p/q, which needs the units to be independent given Z_G and is
    nearer to Σ_u log p(y_u | Z_G); its gradient is the plain reparametrised one. ``noise`` holds the standard normal
    draws of Z_G and of the units.
    """
    noise_global, noise_local = noise
    draws = len(noise_local)
    z_global = q_global.transform(noise_global)
    z_local = q_local.transform(z_global, q_global.mean, noise_local)
    inside, centre = (held(q_local), q_global.mean.detach()) if draws == 1 else (q_local, q_global.mean)
    log_p = model.log_local(site, z_global.expand(draws, *z_global.shape), z_local)
    log_weight = log_p - inside.log_density(z_local, z_global, centre)  # [R, S, U]
    return (log_weight.logsumexp(0) - math.log(draws)).sum(-1).mean()


@dataclass(frozen=True, slots=True)
class SiteGradient:
    """Value and gradient of a term. ``theta`` and ``eta`` may be sent; ``local`` and what it belongs to stay."""

    value: float
    theta: dict[str, Tensor]
    eta: dict[str, Tensor]
    local: dict[str, Tensor]

    def joined(self) -> dict[str, Tensor]:
        """The whole gradient."""
        return joined(self.theta, self.eta, self.local)


def gradients(
    model: StructuredModel,
    q_global: GlobalPosterior,
    q_local: LocalPosterior,
    term: Callable[[GlobalPosterior, LocalPosterior], Scalar],
) -> SiteGradient:
    """∇ of ``term`` with respect to θ, η_G (through Z_G and through Z_Lk) and η_Lk."""
    theta: Mapping[str, Tensor] = model.theta()
    eta, local = (
        {name: value.detach().requires_grad_() for name, value in named(q).items()} for q in (q_global, q_local)
    )
    value = term(with_named(q_global, eta), with_named(q_local, local))
    leaves: list[Tensor] = [*theta.values(), *eta.values(), *local.values()]
    found = iter(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    parts = [{name: next(found) for name in part} for part in (theta, eta, local)]
    return SiteGradient(float(value.detach()), *parts)


@dataclass(frozen=True, slots=True)
class Learner:
    """A model, a site's rows, and how the site draws."""

    model: StructuredModel
    site: SiteRows
    seed: int
    """Of the draws of units' latents; a real site tells it nobody."""
    key: int
    """Number of the site, so that no other site has the same draws of Z_G."""
    samples: int
    importance: int

    def noise_global(self, step: int) -> Tensor | None:
        """ε_G [S, M] of a step that the site takes by itself; None where expectations are known."""
        if isinstance(self.model, ClosedFormModel):
            return None
        draw = np.random.default_rng([self.seed, self.key, step])
        return torch.from_numpy(draw.standard_normal((self.samples, self.model.global_size)))

    def site_term(self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int) -> Scalar:
        """The site's term of the bound; ``noise`` is ε_G [S, M] and needed where expectations are not known."""
        if isinstance(self.model, ClosedFormModel):
            return self.model.expected_log_local(self.site, q_global, q_local) + q_local.entropy()
        assert noise is not None
        assert isinstance(self.model, SampledModel)
        width = self.model.local_width(self.site)
        shape = (self.importance if width else 1, len(noise))
        noise_local = unit_noise(self.seed, step, self.site.keys, shape, width)
        return sampled_site_term(self.model, self.site, q_global, q_local, noise=(noise, noise_local))

    def global_term(self, q_global: GlobalPosterior, noise: Tensor | None) -> Scalar:
        """The server's bracket, for a site that stands in for all."""
        log_scale = self.model.prior_log_scale()
        if noise is None:
            return expected_global_term(log_scale, q_global)
        return sampled_global_term(log_scale, q_global, noise)

    def gradient(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int
    ) -> SiteGradient:
        """Value and gradient of the site's term: one message of SFVI, and what the site keeps."""
        return gradients(self.model, q_global, q_local, lambda eta, local: self.site_term(eta, local, noise, step))

    def caught_up(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, rates: Sequence[float]
    ) -> tuple[LocalPosterior, AdamState[Tensor]]:
        """The site's q after a step on it alone at every rate, θ and q(Z_G) as they are: for a site that comes late."""
        moments: AdamState[Tensor] = AdamState()
        for step, rate in enumerate(rates, CATCHING_UP):
            share = self.gradient(q_global, q_local, self.noise_global(step), step)
            q_local, moments = step_local(q_local, share, moments, rate)
        return q_local, moments

    def local_steps(
        self, start: LocalState, ratio: float, *, first_step: int, rates: Sequence[float]
    ) -> tuple[LocalState, float]:
        """SFVI-Avg: a step on θ, η_G and η_Lk alike at every rate; the model is moved in place.

        The site stands in for all: its whole term, log p and −log q alike, counts ``ratio`` = N / N_k times.

        Returns:
            Where the steps led, and the scaled bound, averaged over the steps.
        """
        q_global, q_local, moments = start
        value = 0.0
        for step, rate in enumerate(rates, first_step):
            noise = self.noise_global(step)

            def term(
                eta: GlobalPosterior, local: LocalPosterior, noise: Tensor | None = noise, step: int = step
            ) -> Scalar:
                return self.global_term(eta, noise) + ratio * self.site_term(eta, local, noise, step)

            share = gradients(self.model, q_global, q_local, term)
            moves, moments = moments.update(share.joined(), rate)
            point = joined(self.model.theta(), named(q_global), named(q_local))
            moved = {name: array + moves[name] for name, array in point.items()}
            theta, eta, local = (
                {name.removeprefix(prefix): value for name, value in moved.items() if name.startswith(prefix)}
                for prefix in ("theta.", "q.", LOCAL)
            )
            self.model.load_theta(theta)
            q_global, q_local = with_named(q_global, eta), with_named(q_local, local)
            value += share.value / len(rates)
        return (q_global, q_local, moments), value


def initial_local(model: StructuredModel, site: SiteRows, options: SFVIOptions) -> LocalPosterior:
    """q(Z_Lk | Z_G) before the first step."""
    whole = not options.row.mean_field
    return model.initial_local(site, scale=options.initial_scale, coupled=whole, triangular=whole)


def step_local(
    q_local: LocalPosterior, share: SiteGradient, moments: AdamState[Tensor], rate: float
) -> tuple[LocalPosterior, AdamState[Tensor]]:
    """One step on the site's q."""
    moves, moments = moments.update(joined({}, {}, share.local), rate)
    moved = {name: value.detach() + moves[f"{LOCAL}{name}"] for name, value in named(q_local).items()}
    return with_named(q_local, moved), moments


def joined(theta: Mapping[str, Tensor], eta: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """θ, η_G and η_Lk, or gradients by them, as one mapping."""
    parts = {"theta.": theta, "q.": eta, LOCAL: local}
    return {f"{prefix}{name}": value.detach() for prefix, part in parts.items() for name, value in part.items()}


# The model of a configuration, and rows as a model reads them.


def model_at(
    options: SFVIOptions, section: ModelSection, num_inputs: int, arrays: Mapping[str, np.ndarray]
) -> StructuredModel:
    """The model at the θ of a message or of a saved posterior, which ``arrays`` hold with the shared inputs if any."""
    inputs = arrays.get(SHARED)
    model = configured(options, section, num_inputs, None if inputs is None else torch.as_tensor(inputs))
    theta = {name: array for name, array in arrays.items() if name.startswith("theta.")}
    model.load_theta({name.removeprefix("theta."): torch.as_tensor(array) for name, array in theta.items()})
    return model


def rows_of(preparation: Preparation, inputs: Array, options: SFVIOptions) -> ModelInputs:
    """Standardised inputs [N, D] as :class:`ModelInputs`; without a column that names units all are of one unit.

    Raises:
        DataError: a column is not there, or holds what is not a whole number.
    """
    names = list(preparation.names)
    features = torch.from_numpy(inputs[:, options.columns(names)])
    if not options.unit_column:
        return ModelInputs(features, torch.zeros(len(inputs), dtype=torch.int64))
    index = names.index(options.unit_column)
    values = inputs[:, index] * preparation.input_scale[index] + preparation.input_mean[index]
    whole = np.rint(values)
    if np.abs(values - whole).max(initial=0.0) > 1e-6:
        raise DataError(f"column `{options.unit_column}` names units by whole numbers; it has others here")
    return ModelInputs(features, torch.from_numpy(whole.astype(np.int64)))


def site_number(site: str) -> int:
    """A number of a site, for draws that no other site shares."""
    return int.from_bytes(hashlib.sha256(site.encode()).digest()[:7], "big")


def model_and_rows(
    config: RunConfig, preparation: Preparation, site: RawSite, arrays: Mapping[str, np.ndarray]
) -> tuple[StructuredModel, SiteRows]:
    """The model at some parameters, and the training rows of a site as it has them."""
    options, data = cast(SFVIOptions, config.options), site.encode(preparation)
    rows = rows_of(preparation, data.x, options)
    model = model_at(options, config.model, rows.features.shape[1], arrays)
    return model, model.prepare(rows.features, torch.from_numpy(data.y), rows.groups, key=site_number(site.site))
