"""Which structured model a run is about, built the same way at every site and from a saved posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fedgp_flower.config import ModelSection
from fedgp_flower.models.kernels import build_kernel
from fedgp_flower.models.logistic_mixed import LogisticMixed
from fedgp_flower.models.multinomial import Multinomial
from fedgp_flower.models.structured import SiteData, StructuredModel
from fedgp_flower.models.structured_gp import GPOptions, HierarchicalGP
from fedgp_flower.shapes import NamedArrays, Rows, Targets

SHARED = "inducing.locations"
LEARNED = "theta.inputs"


@dataclass(frozen=True, slots=True)
class Structure:
    """The keys of ``sfvi.*`` that say what the model is."""

    model: Literal["gp", "logistic-mixed", "multinomial"]
    learn_inputs: bool
    site_inducing: int
    site_noise: float
    site_slope: float
    deviation: float
    prior_scale: float
    centred: bool
    classes: int

    @staticmethod
    def of(values: Mapping[str, Any]) -> Structure:
        """From a mapping that has these keys, with dashes or underscores, among others."""
        plain = {name.replace("-", "_"): value for name, value in values.items()}
        return Structure(**{field.name: plain[field.name] for field in fields(Structure)})

    def build(self, section: ModelSection, num_inputs: int, inputs: Rows | None = None) -> StructuredModel:
        """The model at its initial θ.

        Args:
            section: ``model.*``.
            num_inputs: D, without a column that names units.
            inputs: Shared inducing inputs of ``gp``; without them it stands for its shapes only.
        """
        return MODELS[self.model].build(self, section, num_inputs, inputs)

    def at(self, section: ModelSection, num_inputs: int, arrays: NamedArrays) -> StructuredModel:
        """The model at the θ of a message or of a saved posterior."""
        where = arrays.get(SHARED, arrays.get(LEARNED))
        model = self.build(section, num_inputs, None if where is None else torch.from_numpy(where))
        model.load_theta({n.removeprefix("theta."): torch.from_numpy(a) for n, a in arrays.items() if _of_theta(n)})
        return model

    def deal(self, model: StructuredModel, features: Rows, targets: Targets, groups: Tensor, key: int) -> SiteData:
        """Rows of a site, dealt to units.

        Args:
            model: What :meth:`build` gave.
            features: [N, D].
            targets: [N].
            groups: int64 [N], equal for rows of one unit; read by ``logistic-mixed`` only.
            key: Number of the site, for models in which it is one unit.
        """
        return MODELS[self.model].deal(self, model, features, targets, groups, key)


def _hierarchical_gp(own: Structure, section: ModelSection, num_inputs: int, inputs: Rows | None) -> StructuredModel:
    deviation = section.model_copy(update={"outputscale": own.deviation * section.outputscale})
    options = GPOptions(
        likelihood=cast(Literal["gaussian", "bernoulli", "poisson"], section.likelihood),
        deviates=own.site_inducing > 0,
        noise=section.noise,
        noise_spread=own.site_noise,
        site_slope=own.site_slope,
        learn_inputs=own.learn_inputs,
        jitter=section.jitter,
    )
    points = torch.zeros(section.num_inducing, num_inputs, dtype=torch.float64) if inputs is None else inputs
    return HierarchicalGP(build_kernel(section, num_inputs), build_kernel(deviation, num_inputs), points, options)


@dataclass(frozen=True, slots=True)
class Model:
    """How a model is made, and rows dealt to its units; arguments as those of :class:`Structure`'s methods."""

    build: Callable[[Structure, ModelSection, int, Rows | None], StructuredModel]
    deal: Callable[[Structure, Any, Rows, Targets, Tensor, int], SiteData]


MODELS: Mapping[str, Model] = {
    "gp": Model(
        _hierarchical_gp,
        lambda own, model, x, y, groups, key: model.prepare(x, y, key=key, num_inducing=own.site_inducing),
    ),
    "logistic-mixed": Model(
        lambda own, section, d, inputs: LogisticMixed(d, prior_scale=own.prior_scale, centred=own.centred),
        lambda own, model, x, y, groups, key: model.prepare(x, y, groups),
    ),
    "multinomial": Model(
        lambda own, section, d, inputs: Multinomial(d, own.classes),
        lambda own, model, x, y, groups, key: model.prepare(x, y, key=key),
    ),
}
"""By the name in ``sfvi.model``."""


def initial_arrays(model: StructuredModel) -> NamedArrays:
    """θ and the prior of Z_G under the names they have in messages."""
    theta = {f"theta.{name}": value.detach().numpy().copy() for name, value in model.theta().items()}
    prior = {"prior.fixed_log_scale": model.fixed_log_scale.numpy(), "prior.block": model.block.numpy()}
    return {**theta, **prior}


def _of_theta(name: str) -> bool:
    return name.startswith("theta.")
