"""What a site computes in SFVI and SFVI-Avg: gradients of its term, and local steps. No Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.family import (
    GlobalPosterior,
    LocalFamily,
    expected_global_term,
    initial_amortised,
    named,
    sampled_global_term,
    with_named,
)
from fedgp_flower.methods.sfvi.estimators import (
    UNSCALED,
    Scaling,
    SiteGradient,
    expected_site_term,
    gradients,
    sampled_site_term,
    unit_noise,
)
from fedgp_flower.methods.sfvi.memory import LOCAL, below
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ClosedFormModel, SampledModel, SiteData, StructuredModel
from fedgp_flower.typing import Scalar

LocalState: TypeAlias = tuple[GlobalPosterior, LocalFamily, AdamState[Tensor]]
"""Where local steps start and end; θ is in the model."""
WHOLE = "whole"
"""The one name of a packed vector."""
CATCHING_UP = 2**40
"""Steps of catching up are numbered from here, so that they share no draw with a round."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A model, a site's rows, and how the site draws."""

    model: StructuredModel
    site: SiteData
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

    def site_term(
        self, q_global: GlobalPosterior, q_local: LocalFamily, noise: Tensor | None, step: int, scaling: Scaling
    ) -> Scalar:
        """The site's term of the bound; ``noise`` is ε_G [S, M] and needed where expectations are not known."""
        if isinstance(self.model, ClosedFormModel):
            return expected_site_term(self.model, self.site, q_global, q_local, scaling=scaling)
        assert noise is not None
        assert isinstance(self.model, SampledModel)
        width = self.model.local_width(self.site)
        shape = (self.importance if width else 1, len(noise))
        own = unit_noise(self.seed, step, self.site.keys, shape, width)
        return sampled_site_term(self.model, self.site, q_global, q_local, noise=(noise, own), scaling=scaling)

    def global_term(self, q_global: GlobalPosterior, noise: Tensor | None) -> Scalar:
        """The server's bracket, for a site that stands in for all."""
        if isinstance(self.model, ClosedFormModel):
            return expected_global_term(self.model.prior_log_scale(), q_global)
        assert noise is not None
        return sampled_global_term(self.model.prior_log_scale(), q_global, noise)

    def gradient(
        self, q_global: GlobalPosterior, q_local: LocalFamily, noise: Tensor | None, step: int
    ) -> SiteGradient:
        """Value and gradient of the site's term: one message of SFVI, and the site's own part."""
        return gradients(
            self.model, q_global, q_local, lambda eta, own: self.site_term(eta, own, noise, step, UNSCALED)
        )

    def caught_up(
        self, q_global: GlobalPosterior, q_local: LocalFamily, rates: Sequence[float]
    ) -> tuple[LocalFamily, AdamState[Tensor]]:
        """The site's q after a step on it alone at every rate, θ and q(Z_G) as they are: for a site that comes late."""
        moments: AdamState[Tensor] = AdamState()
        for step, rate in enumerate(rates, CATCHING_UP):
            noise = None if self.closed_form else self.noise_global(step)
            share = self.gradient(q_global, q_local, noise, step)
            q_local, moments = step_local(q_local, share, moments, rate)
        return q_local, moments

    def local_steps(
        self, start: LocalState, scaling: Scaling, *, first_step: int, rates: Sequence[float]
    ) -> tuple[LocalState, float]:
        """SFVI-Avg: a step on θ, η_G and η_Lk alike at every rate; the model is moved in place.

        Returns:
            Where the steps led, and the scaled bound, averaged over the steps.
        """
        q_global, q_local, moments = start
        packing = Packing.of(_joined(self.model.theta(), named(q_global), named(q_local)))
        point, adam, value = packing.point, packing.packed(moments), 0.0
        for step, rate in enumerate(rates, first_step):
            noise = None if self.closed_form else self.noise_global(step)

            def term(eta: GlobalPosterior, own: LocalFamily, noise: Tensor | None = noise, step: int = step) -> Scalar:
                return self.global_term(eta, noise) + self.site_term(eta, own, noise, step, scaling)

            share = gradients(self.model, q_global, q_local, term)
            moves, adam = adam.update({WHOLE: packing.flat(_joined(share.theta, share.eta, share.local))}, rate)
            point = point + moves[WHOLE]
            moved = packing.parts(point)
            self.model.load_theta(below(moved, "theta."))
            q_global = with_named(q_global, below(moved, "q."))
            q_local = with_named(q_local, below(moved, LOCAL))
            value += share.value / len(rates)
        return (q_global, q_local, packing.unpacked(adam)), value


@dataclass(frozen=True, slots=True)
class Packing:
    """Parameters by name as one vector: a step of Adam on it costs a few operations, however many names there are."""

    shapes: Mapping[str, torch.Size]
    point: Float[Tensor, " P"]

    @staticmethod
    def of(values: Mapping[str, Tensor]) -> Packing:
        """Where ``values`` are."""
        shapes = {name: value.shape for name, value in values.items()}
        return Packing(shapes, torch.cat([value.flatten() for value in values.values()]))

    def flat(self, values: Mapping[str, Tensor]) -> Float[Tensor, " P"]:
        """In the order of names; zero where there is none."""
        missing = self.point.new_zeros(())
        return torch.cat([values.get(name, missing.expand(own)).flatten() for name, own in self.shapes.items()])

    def parts(self, flat: Float[Tensor, " P"]) -> dict[str, Tensor]:
        """By name."""
        pieces = flat.split([own.numel() for own in self.shapes.values()])
        return {n: piece.view(own) for (n, own), piece in zip(self.shapes.items(), pieces, strict=True)}

    def packed(self, moments: AdamState[Tensor]) -> AdamState[Tensor]:
        """Moments of the vector."""
        return AdamState(moments.step, {WHOLE: self.flat(moments.first)}, {WHOLE: self.flat(moments.second)})

    def unpacked(self, moments: AdamState[Tensor]) -> AdamState[Tensor]:
        """Moments by name."""
        return AdamState(moments.step, self.parts(moments.first[WHOLE]), self.parts(moments.second[WHOLE]))


def initial_local(model: StructuredModel, site: SiteData, options: SFVIOptions, seed: int) -> LocalFamily:
    """q(Z_Lk | Z_G) before the first step."""
    if hidden := options.row.amortised_units(options):
        return initial_amortised(
            model.summary(site),
            model.local_width(site),
            model.global_size,
            scale=options.initial_local_scale,
            hidden=hidden,
            coupled=options.coupling,
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
    scale, coupled, triangular = options.initial_local_scale, options.coupled, options.triangular
    return model.initial_local(site, scale=scale, coupled=coupled, triangular=triangular)


def step_local(
    q_local: LocalFamily, share: SiteGradient, moments: AdamState[Tensor], rate: float
) -> tuple[LocalFamily, AdamState[Tensor]]:
    """One step on the site's q."""
    moves, moments = moments.update(_joined({}, {}, share.local), rate)
    moved = {name: value.detach() + moves[f"{LOCAL}{name}"] for name, value in named(q_local).items()}
    return with_named(q_local, moved), moments


def _joined(theta: Mapping[str, Tensor], eta: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = {f"theta.{name}": value.detach() for name, value in theta.items()}
    joined |= {f"q.{name}": value.detach() for name, value in eta.items()}
    return joined | {f"{LOCAL}{name}": value.detach() for name, value in local.items()}
