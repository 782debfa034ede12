"""A site's own estimate of the hyperparameters, with its curvature: what several sites add to one start for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.exact import ExactGP
from fedgp_flower.gp.linalg import bounded
from fedgp_flower.gp.optimisers import LOGARITHM, maximise
from fedgp_flower.gp.sums import prior
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, Rows, Targets

ROWS = 250
"""Of a site, at most, that its fit sees: O(n³)."""
EVALUATIONS = 60
DIFFERENCE = 1e-3
"""Step of a central difference, in logarithms."""


def local_mode(section: ModelSection, inputs: Rows, targets: Targets, rng: np.random.Generator) -> tuple[Array, Array]:
    """Precision H [H, H] and H θ [H] of a Gaussian around the mode of the site's own log posterior.

    θ are the logarithms of kernel and noise, in the order of :meth:`WiredModel.wire_parameters`. The sum over sites is
    that of independent Gaussians, whose mode is (Σ H)⁻¹ Σ Hθ. H is by central differences of the gradient.
    """
    chosen = np.sort(rng.permutation(len(inputs))[:ROWS])
    model = ExactGP(section, inputs[chosen].cpu().double(), targets[chosen].cpu().double())
    named = list(model.wire_parameters())
    parameters = [parameter for _, parameter in named]
    centres, spreads = zip(*(prior(name, inputs.shape[1]) for name, _ in named), strict=True)
    with torch.no_grad():
        for parameter, centre in zip(parameters, centres, strict=True):
            parameter.fill_(centre)

    def objective() -> torch.Tensor:
        away = [((p - c) / s).square().sum() for p, c, s in zip(parameters, centres, spreads, strict=True)]
        return len(chosen) * model.log_evidence() - 0.5 * torch.stack(away).sum()

    bounds = [LOGARITHM for _ in parameters]
    maximise(objective, parameters, max_evaluations=EVALUATIONS, bounds=bounds)
    mode = np.concatenate([parameter.detach().numpy().ravel() for parameter in parameters])
    precision = curvature(objective, parameters)
    return precision, precision @ mode


def curvature(objective: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Array:
    """−∂²/∂θ² of an objective [H, H], its eigenvalues bounded below."""

    def slopes() -> Array:
        found = torch.autograd.grad(objective(), parameters)
        return np.concatenate([own.numpy().ravel() for own in found])

    columns = []
    for parameter in parameters:
        flat = parameter.data.view(-1)
        for index in range(flat.numel()):
            flat[index] += DIFFERENCE
            above = slopes()
            flat[index] -= 2 * DIFFERENCE
            columns.append((slopes() - above) / (2 * DIFFERENCE))
            flat[index] += DIFFERENCE
    whole = np.stack(columns)
    return bounded(whole / 2 + whole.T / 2)
