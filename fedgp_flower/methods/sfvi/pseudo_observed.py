"""A site of SFVI in closed form for labels and counts: its rows are seen as Gaussian pseudo-observations.

The optimal q(Z_G) ∏ₖ q(Z_Lk | Z_G) of a likelihood that factorises over rows is the posterior of pseudo-observations
t_n = √λ_n f_n + ε_n with ε_n ~ N(0, 1), where, with f_n ~ N(m_n, v_n) under q,

    λ_n = β_n,   √λ_n t_n = β_n m_n + α_n,   α = ∂/∂m and β = −2 ∂/∂v of E log p(y | f).

At a given q(Z_G) a site finds them by itself, by steps of the natural gradient of its term of the bound

    L_k = E log N(t | √λ ∘ f, 1) − KL(q(Z_Lk | Z_G) ‖ p) + Σ_n [E log p(y_n | f_n) − E log N(t_n | √λ_n f_n, 1)],

and where they have settled, derivatives of the last sum are zero: those of L_k by θ are those of the closed form with t
and λ held fixed. Each is found anew for each question, so that a site keeps nothing; with Gaussian noise they are the
targets over the noise's sd, and all is as in :mod:`fedgp_flower.methods.sfvi.exact_deviation`.

References:
    Khan and Lin, Conjugate-computation variational inference (AISTATS 2017).
    Adam et al., Dual parameterization of sparse variational Gaussian processes (NeurIPS 2021).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from gpytorch import settings
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.likelihoods import NONE
from fedgp_flower.methods.closed_form import Sums
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.exact_deviation import ROUNDING, Dense, ExactDeviation, LowRank, Parts
from fedgp_flower.methods.sfvi.shaped import ShapedGP
from fedgp_flower.methods.sfvi.structured import Prediction
from fedgp_flower.typing import Rows, Targets

STEPS, STILL = 200, 1e-9
"""Most steps to the pseudo-observations, and the largest change of one, relative to 1 + its size, that ends them."""


class PseudoObserved(ExactDeviation):
    """The rows of a site under a model that holds θ; ``targets`` are t, and the noise is 1.

    Args:
        model: With a likelihood other than Gaussian noise.
        features: [N, D].
        observed: Labels or counts [N].
    """

    def __init__(self, model: ShapedGP, features: Rows, observed: Targets) -> None:
        super().__init__(model, features, observed)
        self.observed, self.likelihood = observed, model.likelihood
        function, precision = self.likelihood.as_function(observed)
        self.root, self.correction = precision.sqrt(), observed.new_zeros(())
        self.targets = self.root * function

    def parts(self, offset: Float[Tensor, " W"], known: tuple[Tensor, Tensor] | None = None) -> Parts:
        """Φ, R and what inducing values leave open, of √λ f."""
        with settings.trace_mode():
            shape, (shared, left_over) = self.model.shape(offset), known or self._shared(self.features)
            one = shared.new_ones(())
            if self.dense:
                own = self.root[:, None] * self._covariance(self.features, self.features, shape) * self.root
                return Parts(shared * self.root, Dense(one, own), one, self.root.square() @ left_over)
            weights, open_deviation = self._weights(self.features, shape)
            left_over = left_over + open_deviation
            return Parts(shared * self.root, LowRank(one, weights * self.root), one, self.root.square() @ left_over)

    def sums(self, offset: Float[Tensor, " W"], known: tuple[Tensor, Tensor] | None = None) -> Sums:
        """P_k and p_k of the pseudo-observations, and c_k such that J_k is L_k where they have settled."""
        found = super().sums(offset, known)
        return replace(found, constant=found.constant + self.correction)

    def mode(self, q_global: GlobalPosterior) -> tuple[Float[Tensor, " W"], Float[Tensor, "W W"]]:
        """Find the pseudo-observations that maximise L_k at a q(Z_G); sites do not differ in shape, so W = 0."""
        self.settle(q_global)
        return super().mode(q_global)

    def predict(self, features: Rows, q_global: GlobalPosterior) -> Prediction:
        """Mean and variance of an observation."""
        return Prediction(*self.likelihood.moments(*self.link(features, q_global), NONE))

    @torch.no_grad()
    def link(self, features: Rows, q_global: GlobalPosterior) -> Prediction:
        """Mean and variance of f."""
        return self.mixed(features, q_global, noise=0.0)

    @torch.no_grad()
    def settle(self, q_global: GlobalPosterior) -> None:
        """Pseudo-observations at their optimum for a q(Z_G): a step that loses is taken back, and halved."""
        known, rate, best = (
            self._shared(self.features),
            1.0,
            torch.stack([self.root.square(), self.root * self.targets]),
        )
        value, wanted = self._seen(best, q_global, known)
        for _ in range(STEPS):
            if float(((wanted - best).abs() / (1 + best.abs())).max()) < STILL:
                break
            tried = torch.lerp(best, wanted, rate)
            found, next_wanted = self._seen(tried, q_global, known)
            if found >= value - ROUNDING:
                best, value, wanted, rate = tried, found, next_wanted, min(1.0, 2 * rate)
            else:
                rate /= 2
        self._seen(best, q_global, known)

    def _seen(
        self,
        naturals: Float[Tensor, "2 N"],
        q_global: GlobalPosterior,
        known: tuple[Tensor, Tensor],
    ) -> tuple[float, Float[Tensor, "2 N"]]:
        """L_k with rows seen as λ and √λ t, and what a whole step would make of these."""
        self.root = naturals[0].sqrt()
        self.targets = naturals[1] / self.root
        offset = self.targets.new_zeros(self.width)
        parts = self.parts(offset, known)
        mean, variance = self.function(self.features, offset, q_global, parts, known)
        fit, alpha, beta, _ = self.likelihood.slopes(self.observed, mean, variance, NONE)
        away = (self.targets - self.root * mean).square() + self.root.square() * variance
        self.correction = fit + 0.5 * (away + math.log(2 * math.pi)).sum()
        return float(self.sums(offset, known).expected(q_global)), torch.stack([beta, beta * mean + alpha])

    def _cross(self, features: Rows, shape: Float[Tensor, 3]) -> tuple[Tensor, Tensor]:
        """Covariance of d_k at new rows with √λ d_k at the site's, and its prior variance."""
        cross, prior = super()._cross(features, shape)
        return cross * self.root, prior
