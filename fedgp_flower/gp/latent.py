"""A sparse GP behind any likelihood: f = c + g with a constant c, observed through p(y | f)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.kernels import prior_variance, wire_name
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.sparse import CHUNK, SparseGP
from fedgp_flower.gp.whitened import WhitenedPosterior
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, Rows, Targets

CONSTANT, HYPER = "mean.constant", "likelihood.log_parameters"
AMPLITUDE, REACH = 2.0, 1.35
"""Where ``model.outputscale`` and ``model.lengthscale`` keep their default: k(x, x), and ℓ in units of √D."""


class LatentGP(SparseGP):
    """Kernel, inducing points, constant mean c [1], and the likelihood's parameters as logarithms [R]."""

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        super().__init__(model, inducing_points)
        del self._modules["likelihood"]
        self.observed = build_point_likelihood(model.likelihood, noise=model.noise)
        self.constant = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.hyper = torch.nn.Parameter(self.observed.initial.clone())
        usual, reach = ModelSection(), REACH * math.sqrt(inducing_points.shape[-1])
        for name, parameter in self.kernel.named_parameters():
            if "lengthscale" in name and model.lengthscale == usual.lengthscale:
                parameter.data.fill_(math.log(reach))
            elif _is_amplitude(name) and model.outputscale == usual.outputscale:
                parameter.data.fill_(math.log(AMPLITUDE))

    @staticmethod
    def from_arrays(model: ModelSection, arrays: Mapping[str, Array]) -> LatentGP:
        """The model that ``arrays`` describe."""
        latent = LatentGP(model, torch.as_tensor(arrays["inducing.locations"]))
        latent.load(arrays)
        return latent

    def wire_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Inducing points, kernel, constant, and what the likelihood has."""
        yield "inducing.locations", self.inducing_points
        for name, parameter in self.kernel.named_parameters():
            yield f"kernel.{wire_name(name)}", parameter
        yield CONSTANT, self.constant
        if self.hyper.numel():
            yield HYPER, self.hyper

    def log_prior(self) -> Tensor:
        """Log density, up to a constant, of log ℓ ~ N(½ log D + ½, 1) and log k(x, x) ~ N(log 4, 1).

        Without it classes that can be separated drive the amplitude to infinity.
        """
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.kernel.named_parameters():
            if "lengthscale" in name:
                total = total - 0.5 * (parameter - 0.5 * math.log(self.inducing_points.shape[-1]) - 0.5).square().sum()
            elif _is_amplitude(name):
                total = total - 0.5 * (parameter - math.log(4.0)).square().sum()
        return total

    def nugget(self) -> Tensor:
        """The variance that jitter adds to f: at Z in L Lᵀ, and so at every input."""
        return self.jitter * prior_variance(self.kernel, self.inducing_points)

    def moments(
        self, cross: Float[Tensor, "M N"], prior: Float[Tensor, " N"], posterior: WhitenedPosterior
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, "M N"]]:
        """Mean c + Wᵀμ and variance k(x, x) − |w|² + wᵀSw of f with its nugget, and SW, for W = L⁻¹ k(Z, x)."""
        mean, covariance = posterior.mean.to(cross), posterior.covariance.to(cross)
        spread = covariance @ cross
        return self.constant + cross.mT @ mean, prior + self.nugget() + ((spread - cross) * cross).sum(0), spread

    @torch.no_grad()
    def latent(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, both [N]."""
        pieces = [
            self.moments(self.whitened_cross(x), self.kernel(x, diag=True), posterior)[:2] for x in inputs.split(CHUNK)
        ]
        mean, variance = (torch.cat(part).double() for part in zip(*pieces, strict=True))
        return mean, variance

    def predict(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, both [N]: of a label its probability p and p (1 − p)."""
        return self.observed.moments(*self.latent(inputs, posterior), self.hyper.detach())

    def log_predictive(self, inputs: Rows, targets: Targets, posterior: WhitenedPosterior) -> Tensor:
        """Log density of each target [N]."""
        return self.observed.log_predictive(targets, *self.latent(inputs, posterior), self.hyper.detach())

    def forward(self, inputs: Rows) -> MultivariateNormal:
        """The prior, with the nugget."""
        prior = super().forward(inputs)
        nugget = self.nugget().expand(inputs.shape[:-1])
        return MultivariateNormal(prior.mean + self.constant, prior.lazy_covariance_matrix.add_diagonal(nugget))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood at the parameters, as one of GPyTorch in evaluation mode."""
        return self.observed.to_gpytorch(self.hyper.detach()).requires_grad_(False).eval()


def _is_amplitude(name: str) -> bool:
    return "outputscale" in name or "variance" in name


def sparse_gp(model: ModelSection, arrays: Mapping[str, Array]) -> SparseGP:
    """The model that ``arrays`` describe, of the configured likelihood."""
    kind = SparseGP if model.likelihood == "gaussian" else LatentGP
    return kind.from_arrays(model, arrays)
