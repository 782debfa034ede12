"""A model of ``sfvi`` in one file: Bayesian linear regression, y ~ N((1, x) Z_G, σ²) with Z_G ~ N(0, I)."""

import torch

from fedgp_flower.methods.sfvi.rows import ModelRow
from fedgp_flower.methods.sfvi.structured import ReportTable, StructuredModel
from fedgp_flower.options import Positive
from fedgp_flower.options import Section as Keys


class ToyKeys(Keys):
    """What the model adds to the table ``sfvi.*``."""

    toy_noise: Positive = 1.0
    """``toy-linear``: noise variance σ², of the standardised target."""


class ToyLinear(StructuredModel):
    """No parameters θ and no latents of a site."""

    def __init__(self, num_inputs, noise):
        super().__init__(torch.zeros(1 + num_inputs, dtype=torch.float64))
        self.noise = noise

    @classmethod
    def configured(cls, options, section, num_inputs, inputs=None):
        return cls(num_inputs, options.toy_noise)

    def local_width(self, site):
        return 0

    def latent(self, features, q_global):
        design = torch.nn.functional.pad(features, (1, 0), value=1.0)
        return design @ q_global.mean, q_global.mixed(design).square().sum(-1)

    def site_term(self, site, q_global, q_local, noise):
        mean, variance = self.latent(site.features, q_global)
        return -0.5 * ((site.targets - mean).square() + variance).sum() / self.noise

    def moments(self, site, q_global, q_local, rows, link):
        mean, variance = self.latent(rows.features, q_global)
        return mean.detach(), variance.detach() + self.noise * (not link)

    def sections(self, q_global, names):
        rows = list(zip(["intercept", *names], q_global.mean.tolist(), strict=True))
        return [ReportTable("Weights of the toy model", ("weight", "mean"), rows, "Of standardised inputs.")]


ROW = ModelRow("toy_model:ToyLinear", "linear regression", ToyKeys, known_expectations=True)
