"""What a site does in SFVI and SFVI-Avg: gradients of its term, and its own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.models.structured import ClosedFormModel, SiteData, StructuredModel
from fedgp_flower.models.structured_estimators import (
    UNSCALED,
    Scaling,
    SiteGradient,
    expected_global_term,
    expected_site_term,
    gradients,
    sampled_global_term,
    sampled_site_term,
    unit_noise,
)
from fedgp_flower.models.structured_family import GlobalPosterior, LocalFamily, named, with_named
from fedgp_flower.models.structured_memory import Moments, Values, below
from fedgp_flower.shapes import Scalar

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
        if noise is None:
            raise ValueError("a sampled term needs draws of Z_G")
        width = self.model.local_width(self.site)
        shape = (self.importance if width else 1, len(noise))
        own = unit_noise(self.seed, step, self.site.keys, shape, width)
        return sampled_site_term(
            self.model, self.site, q_global, q_local, noise_global=noise, noise_local=own, scaling=scaling
        )

    def global_term(self, q_global: GlobalPosterior, noise: Tensor | None) -> Scalar:
        """The server's bracket, for a site that stands in for all."""
        if isinstance(self.model, ClosedFormModel):
            return expected_global_term(self.model, q_global)
        if noise is None:
            raise ValueError("a sampled term needs draws of Z_G")
        return sampled_global_term(self.model, q_global, noise_global=noise)

    def gradient(
        self, q_global: GlobalPosterior, q_local: LocalFamily, noise: Tensor | None, step: int
    ) -> SiteGradient:
        """Value and gradient of the site's term: one message of SFVI, and the site's own part."""
        return gradients(
            self.model, q_global, q_local, lambda eta, own: self.site_term(eta, own, noise, step, UNSCALED)
        )

    def caught_up(
        self, q_global: GlobalPosterior, q_local: LocalFamily, rates: Sequence[float]
    ) -> tuple[LocalFamily, Moments]:
        """The site's q after a step on it alone at every rate, θ and q(Z_G) as they are: for a site that comes late."""
        moments = Moments()
        for step, rate in enumerate(rates, CATCHING_UP):
            noise = None if self.closed_form else self.noise_global(step)
            found = self.gradient(q_global, q_local, noise, step)
            q_local, moments = step_local(q_local, found, moments, rate)
        return q_local, moments

    def travel(
        self,
        start: tuple[GlobalPosterior, LocalFamily, Moments],
        scaling: Scaling,
        *,
        first_step: int,
        rates: Sequence[float],
    ) -> Travelled:
        """SFVI-Avg: a step on θ, η_G and η_Lk alike at every rate; the model is moved in place."""
        q_global, q_local, moments = start
        value = 0.0
        for step, rate in enumerate(rates, first_step):
            noise = None if self.closed_form else self.noise_global(step)

            def term(eta: GlobalPosterior, own: LocalFamily, noise: Tensor | None = noise, step: int = step) -> Scalar:
                return self.global_term(eta, noise) + self.site_term(eta, own, noise, step, scaling)

            found = gradients(self.model, q_global, q_local, term)
            values = _joined(self.model.theta(), named(q_global), named(q_local))
            moved, moments = moments.ascend(values, _joined(found.theta, found.eta, found.local), rate)
            self.model.load_theta(below(moved, "theta."))
            q_global = with_named(q_global, below(moved, "q."))
            q_local = with_named(q_local, below(moved, "local."))
            value += found.value / len(rates)
        return Travelled(q_global, q_local, moments, value)


@dataclass(frozen=True, slots=True)
class Travelled:
    """Where a site's own steps led; θ is in the model."""

    q_global: GlobalPosterior
    q_local: LocalFamily
    moments: Moments
    value: float
    """The scaled bound, averaged over the steps."""


def step_local(q_local: LocalFamily, found: SiteGradient, moments: Moments, rate: float) -> tuple[LocalFamily, Moments]:
    """One step of the site's own q."""
    moved, moments = moments.ascend(_joined({}, {}, named(q_local)), _joined({}, {}, found.local), rate)
    return with_named(q_local, below(moved, "local.")), moments


def _joined(theta: Mapping[str, Tensor], eta: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> Values:
    joined = {f"theta.{name}": value.detach() for name, value in theta.items()}
    joined |= {f"q.{name}": value.detach() for name, value in eta.items()}
    return joined | {f"local.{name}": value.detach() for name, value in local.items()}
