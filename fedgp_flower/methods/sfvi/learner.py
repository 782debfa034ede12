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
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from scipy.special import ndtri
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
    with_named,
)
from fedgp_flower.methods.sfvi.memory import LOCAL, below
from fedgp_flower.methods.sfvi.options import SHARED, SFVIOptions
from fedgp_flower.methods.sfvi.structured import ClosedFormModel, SampledModel, SiteRows, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import load
from fedgp_flower.typing import Array, Scalar

LocalState: TypeAlias = tuple[GlobalPosterior, LocalPosterior, AdamState[Tensor]]
"""Where local steps start and end; θ is in the model."""
CATCHING_UP = 2**40
"""Steps of catching up are numbered from here, so that they share no draw with a round."""

# The term of a site.


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


def expected_site_term(
    model: ClosedFormModel, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior
) -> Scalar:
    """The site's term without draws."""
    return model.expected_log_local(site, q_global, q_local) + q_local.entropy()


@dataclass(frozen=True, slots=True)
class SiteGradient:
    """Value and gradient of a term. ``theta`` and ``eta`` may be sent; ``local`` and what it belongs to stay."""

    value: float
    theta: dict[str, Tensor]
    eta: dict[str, Tensor]
    local: dict[str, Tensor]


def gradients(
    model: StructuredModel,
    q_global: GlobalPosterior,
    q_local: LocalPosterior,
    term: Callable[[GlobalPosterior, LocalPosterior], Scalar],
) -> SiteGradient:
    """∇ of ``term`` with respect to θ, η_G (through Z_G and through Z_Lk) and η_Lk."""
    theta: Mapping[str, Tensor] = model.theta()
    eta: dict[str, Tensor] = _leaves(named(q_global))
    local: dict[str, Tensor] = _leaves(named(q_local))
    value = term(with_named(q_global, eta), with_named(q_local, local))
    leaves: list[Tensor] = [*theta.values(), *eta.values(), *local.values()]
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    first, second = len(theta), len(theta) + len(eta)
    return SiteGradient(
        float(value.detach()),
        dict(zip(theta, found[:first], strict=True)),
        dict(zip(eta, found[first:second], strict=True)),
        dict(zip(local, found[second:], strict=True)),
    )


def _leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in values.items()}


def unit_noise(
    seed: int, step: int, keys: Int64[Tensor, " U"], shape: tuple[int, ...], width: int
) -> Float[Tensor, "*S U W"]:
    """Standard normal draws that depend on (seed, step, key of the unit) and on nothing else.

    A unit gets the same draws whichever site it is in, so the sum of the gradient messages does not depend on the
    partition. Every number is a counter put through the splitmix64 finaliser, then Φ⁻¹.
    """
    if width == 0:
        return torch.zeros(*shape, len(keys), 0, dtype=torch.float64)
    count = math.prod(shape) * width
    state = _absorb(np.zeros(1, dtype=np.uint64), np.array([seed % 2**64], dtype=np.uint64))
    state = _absorb(state, np.array([step % 2**64], dtype=np.uint64))
    state = _absorb(state, keys.numpy().astype(np.uint64))  # [U]
    bits = _absorb(state[None, :], np.arange(count, dtype=np.uint64)[:, None])  # [count, U]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    normal = torch.from_numpy(ndtri(uniform)).reshape(*shape, width, len(keys))
    return normal.mT


def _absorb(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix a word into the state; arithmetic is modulo 2⁶⁴."""
    mixed = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Learner:
    """A model, a site's rows, and how the site draws."""

    model: StructuredModel
    site: SiteRows
    seed: int
    """Of the draws of units' latents; a real site tells it nobody."""
    key: int
    """Number of the site: its own draws of Z_G are those of no other site."""
    samples: int
    importance: int

    @property
    def closed_form(self) -> bool:
        """Whether no draws are needed."""
        return isinstance(self.model, ClosedFormModel)

    def noise_global(self, step: int) -> Tensor:
        """ε_G [S, M] of a step that the site takes by itself."""
        draw = np.random.default_rng([self.seed, self.key, step])
        return torch.from_numpy(draw.standard_normal((self.samples, self.model.global_size)))

    def site_term(self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int) -> Scalar:
        """The site's term of the bound; ``noise`` is ε_G [S, M] and needed where expectations are not known."""
        if isinstance(self.model, ClosedFormModel):
            return expected_site_term(self.model, self.site, q_global, q_local)
        assert noise is not None
        assert isinstance(self.model, SampledModel)
        width = self.model.local_width(self.site)
        shape = (self.importance if width else 1, len(noise))
        noise_local = unit_noise(self.seed, step, self.site.keys, shape, width)
        return sampled_site_term(self.model, self.site, q_global, q_local, noise=(noise, noise_local))

    def global_term(self, q_global: GlobalPosterior, noise: Tensor | None) -> Scalar:
        """The server's bracket, for a site that stands in for all."""
        if isinstance(self.model, ClosedFormModel):
            return expected_global_term(self.model.prior_log_scale(), q_global)
        assert noise is not None
        return sampled_global_term(self.model.prior_log_scale(), q_global, noise)

    def gradient(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Tensor | None, step: int
    ) -> SiteGradient:
        """Value and gradient of the site's term: one message of SFVI, and the site's own part."""
        return gradients(self.model, q_global, q_local, lambda eta, local: self.site_term(eta, local, noise, step))

    def caught_up(
        self, q_global: GlobalPosterior, q_local: LocalPosterior, rates: Sequence[float]
    ) -> tuple[LocalPosterior, AdamState[Tensor]]:
        """The site's q after a step on it alone at every rate, θ and q(Z_G) as they are: for a site that comes late."""
        moments: AdamState[Tensor] = AdamState()
        for step, rate in enumerate(rates, CATCHING_UP):
            noise = None if self.closed_form else self.noise_global(step)
            share = self.gradient(q_global, q_local, noise, step)
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
            noise = None if self.closed_form else self.noise_global(step)

            def term(
                eta: GlobalPosterior, local: LocalPosterior, noise: Tensor | None = noise, step: int = step
            ) -> Scalar:
                return self.global_term(eta, noise) + ratio * self.site_term(eta, local, noise, step)

            share = gradients(self.model, q_global, q_local, term)
            point = _joined(self.model.theta(), named(q_global), named(q_local))
            moves, moments = moments.update(_joined(share.theta, share.eta, share.local), rate)
            moved = {name: array + moves[name] for name, array in point.items()}
            self.model.load_theta(below(moved, "theta."))
            q_global = with_named(q_global, below(moved, "q."))
            q_local = with_named(q_local, below(moved, LOCAL))
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
    moves, moments = moments.update(_joined({}, {}, share.local), rate)
    moved = {name: value.detach() + moves[f"{LOCAL}{name}"] for name, value in named(q_local).items()}
    return with_named(q_local, moved), moments


def _joined(theta: Mapping[str, Tensor], eta: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = {f"theta.{name}": value.detach() for name, value in theta.items()}
    joined |= {f"q.{name}": value.detach() for name, value in eta.items()}
    return joined | {f"{LOCAL}{name}": value.detach() for name, value in local.items()}


# The model of a configuration, and rows as a model reads them.


def configured(
    options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Tensor | None = None
) -> StructuredModel:
    """The model at its initial θ."""
    model: type[StructuredModel] = load(options.row.model)
    return model.configured(options, section, num_inputs, inputs)


def model_at(
    options: SFVIOptions, section: ModelSection, num_inputs: int, arrays: Mapping[str, np.ndarray]
) -> StructuredModel:
    """The model at the θ of a message or of a saved posterior, which ``arrays`` hold with the shared inputs if any."""
    inputs = arrays.get(SHARED)
    model = configured(options, section, num_inputs, None if inputs is None else torch.as_tensor(inputs))
    theta = {name: array for name, array in arrays.items() if name.startswith("theta.")}
    model.load_theta({name.removeprefix("theta."): torch.as_tensor(array) for name, array in theta.items()})
    return model


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs without the column that names units, and those names."""

    features: Tensor  # [N, D]
    groups: Tensor  # int64 [N]


def rows_of(preparation: Preparation, inputs: Array, options: SFVIOptions) -> ModelInputs:
    """Standardised inputs [N, D] as :class:`ModelInputs`; without a column that names units all are of one unit.

    Raises:
        DataError: a column is not there, or holds what is not a whole number.
    """
    names = list(preparation.names)
    features = torch.from_numpy(inputs[:, options.columns(names)])
    if not options.groups_by:
        return ModelInputs(features, torch.zeros(len(inputs), dtype=torch.int64))
    index = names.index(options.groups_by)
    values = inputs[:, index] * preparation.input_scale[index] + preparation.input_mean[index]
    whole = np.rint(values)
    if np.abs(values - whole).max(initial=0.0) > 1e-6:
        raise DataError(f"column `{options.groups_by}` names units by whole numbers; it has others here")
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
