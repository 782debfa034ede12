"""What a model is to SFVI: log p_θ(Z_G), log p_θ(y_k, Z_Lk | Z_G), their shapes and a prediction.

A model is one file with one subclass, and a row with its keys, see :mod:`fedgp_flower.methods.sfvi.rows`. Its
parameters (``nn.Parameter``) are θ and are shared; everything that belongs to a site is in :class:`SiteRows` and stays
there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import wire_name
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior, initial_local, unit_noise
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import load
from fedgp_flower.typing import Rows, Scalar, Targets

if TYPE_CHECKING:  # a model in one file with its row is imported by the options
    from fedgp_flower.methods.sfvi.options import SFVIOptions

IndexVector = Int64[Tensor, " N"]
PREDICTION_DRAWS, PREDICTION_SEED = 200, 20
"""Draws in a prediction: the Monte Carlo error of a mean is then 7 % of the predictive sd. They are always the same, so
that a prediction is a function of the posterior alone."""


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of one site, dealt to units whose local latents are independent given Z_G."""

    features: Rows
    targets: Targets
    unit: IndexVector
    """Unit of every row, 0 … U−1."""
    keys: Int64[Tensor, " U"]
    """What the random draws of a unit are keyed by; different for all units of all sites."""
    anchors: Float[Tensor, "A D"]
    """Inputs that the site's latents refer to; empty for most models."""

    def at(self, features: Rows, unit: IndexVector | None = None) -> SiteRows:
        """The same site with other rows, to predict at; all of unit 0 unless told."""
        where = torch.zeros(len(features), dtype=torch.int64) if unit is None else unit
        return replace(self, features=features, targets=features.new_zeros(len(features)), unit=where)


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs without the column that names units, and those names."""

    features: Rows
    groups: IndexVector


class PredictiveMoments(NamedTuple):
    """Mean and variance of a noisy observation, [N]; of indicators of the classes, [N, C], for a classifier."""

    mean: Tensor
    variance: Tensor


class ReportTable(NamedTuple):
    """A table that a model adds to a report."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    caption: str


class StructuredModel(nn.Module, ABC):
    """Latents Z_G [M] with p_θ(Z_G) = N(0, diag s²), units Z_Lu [W] and data y_u independent given Z_G.

    log s = ``fixed`` + ``prior_log_scales``[``block``] where scales are learned, and a server needs no more than these
    arrays for its gradient. Another prior is the same model with Z_G transformed inside the likelihood.
    """

    fixed_log_scale: Tensor
    block: Tensor

    def __init__(self, fixed_log_scale: Float[Tensor, " M"], block: Int64[Tensor, " M"] | None = None) -> None:
        super().__init__()
        self.register_buffer("fixed_log_scale", fixed_log_scale)
        if block is None:
            self.register_buffer("block", torch.zeros(0, dtype=torch.int64))
        else:
            self.register_buffer("block", block)
            self.prior_log_scales = nn.Parameter(torch.zeros(int(block.max()) + 1, dtype=torch.float64))

    @classmethod
    @abstractmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> StructuredModel:
        """The model at its initial θ; without shared inducing ``inputs`` it has the right shapes only."""

    @property
    def global_size(self) -> int:
        """M, the length of Z_G."""
        return len(self.fixed_log_scale)

    def prior_log_scale(self) -> Float[Tensor, " M"]:
        """The vector log s, by entry of Z_G."""
        if len(self.block) == 0:
            return self.fixed_log_scale
        return self.fixed_log_scale + self.prior_log_scales[self.block]

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site, dealt to units by equal ``groups``; here the site is one unit, and ``key`` its number."""
        unit = torch.zeros(len(features), dtype=torch.int64)
        return SiteRows(features, targets, unit, torch.tensor([key]), features[:0])

    @abstractmethod
    def local_width(self, site: SiteRows) -> int:
        """W, the number of latents of a unit; may differ from site to site."""

    def initial_local(self, site: SiteRows, *, scale: float, coupled: bool, triangular: bool) -> LocalPosterior:
        """N(0, scale² I) over the latents of a site."""
        size = self.local_width(site)
        return initial_local(
            len(site.keys), size, self.global_size, scale=scale, coupled=coupled, triangular=triangular
        )

    @abstractmethod
    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> PredictiveMoments:
        """Prediction at rows of a site, or of a new site without ``q_local``.

        With ``link`` it is on the scale of the link function, where trend and deviation add up.
        """

    def sections(self, q_global: GlobalPosterior, names: Sequence[str]) -> list[ReportTable]:
        """Tables of a report that say what Z_G is, given the model's columns; nothing to say here."""
        return []

    def theta(self) -> dict[str, nn.Parameter]:
        """The parameters that are learned, by the names they have in messages."""
        return {wire_name(name): value for name, value in self.named_parameters() if value.requires_grad}

    def load_theta(self, values: Mapping[str, Tensor]) -> None:
        """Take θ from a message.

        Raises:
            ProtocolError: if names or shapes are not those of this model.
        """
        theta = self.theta()
        expected = {name: tuple(value.shape) for name, value in theta.items()}
        got = {name: tuple(value.shape) for name, value in values.items()}
        if expected != got:
            raise ProtocolError(f"model parameters: expected {expected}, got {got}. Is `model.*` the same everywhere?")
        with torch.no_grad():
            for name, parameter in theta.items():
                parameter.copy_(values[name])


def configured(
    options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Tensor | None = None
) -> StructuredModel:
    """The model at its initial θ."""
    model: type[StructuredModel] = load(options.row.model)
    return model.configured(options, section, num_inputs, inputs)


class SampledModel(StructuredModel):
    """A model whose expectations are averages over draws of its latents."""

    def located(self, site: SiteRows, rows: ModelInputs, *, trained: bool) -> Iterator[tuple[Tensor, SiteRows, bool]]:
        """Rows to predict at: which they are, as the model has them, and whether the site's posterior is about them.

        ``trained`` says whether the site has a posterior at all.
        """
        yield torch.ones(len(rows.features), dtype=torch.bool), site.at(rows.features), trained

    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> PredictiveMoments:
        """Over draws; a unit that the site has no rows of has its latents from the prior."""
        parts: list[tuple[Tensor, PredictiveMoments]] = []
        noise = np.random.default_rng(PREDICTION_SEED).standard_normal((PREDICTION_DRAWS, self.global_size))
        for chosen, data, known in self.located(site, rows, trained=q_local is not None):
            noise_local = unit_noise(PREDICTION_SEED, 0, data.keys, (PREDICTION_DRAWS,), self.local_width(data))
            draws = {"noise_global": torch.from_numpy(noise), "noise_local": noise_local}
            parts.append(
                (chosen, predict_by_draws(self, data, q_global, q_local if known else None, **draws, link=link))
            )
        if len(parts) == 1:
            return parts[0][1]
        joined = rows.features.new_empty(2, len(rows.features))
        for chosen, part in parts:
            joined[:, chosen] = torch.stack(part)
        return PredictiveMoments(*joined)

    @abstractmethod
    def log_local(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """The log density log p_θ(y_u, Z_Lu | Z_G) of every unit."""

    def draw_local(self, z_global: Float[Tensor, "*S M"], noise: Float[Tensor, "*S U W"]) -> Float[Tensor, "*S U W"]:
        """Z_L | Z_G from its prior, for a site that has no posterior: N(0, I), unless it depends on Z_G."""
        return noise

    @abstractmethod
    def observation(
        self, site: SiteRows, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation at every row given the latents, [S, N] or [S, N, C]."""

    @abstractmethod
    def link(self, site: SiteRows, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]) -> Tensor:
        """What an observation depends on, on the scale where effects add up: [S, N] or [S, N, C]."""


class ClosedFormModel(StructuredModel):
    """A model whose expected local part is known, so that a site needs no draws and its gradients have no noise."""

    @abstractmethod
    def expected_log_local(self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior) -> Scalar:
        """E_q log p_θ(y_k, Z_Lk | Z_G), summed over units."""

    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> PredictiveMoments:
        """Without draws."""
        where = (site.at(rows.features), q_global, q_local)
        return PredictiveMoments(*self.latent(*where)) if link else self.predict(*where)

    @abstractmethod
    def latent(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance on the scale of the link function, where effects add up; for a new site without q."""

    @abstractmethod
    def predict(self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None) -> PredictiveMoments:
        """Prediction at ``site.features``; without ``q_local``, for a new site."""


def predict_by_draws(
    model: SampledModel,
    site: SiteRows,
    q_global: GlobalPosterior,
    q_local: LocalPosterior | None,
    *,
    noise_global: Float[Tensor, "S M"],
    noise_local: Float[Tensor, "S U W"],
    link: bool = False,
) -> PredictiveMoments:
    """The mixture over draws: its mean, and variance E var + var E.

    Without ``q_local`` the site is new: its latents come from their prior given Z_G. With ``link`` the prediction is on
    the scale of the link function instead of that of an observation. Noise is standard normal.
    """
    with torch.no_grad():
        z_global = q_global.transform(noise_global)
        if q_local is None:
            z_local = model.draw_local(z_global, noise_local)
        else:
            z_local = q_local.transform(z_global, q_global.mean, noise_local)
        if link:
            values = model.link(site, z_global, z_local)
            return PredictiveMoments(values.mean(0), values.var(0, correction=0))
        mean, variance = model.observation(site, z_global, z_local)
        return PredictiveMoments(mean.mean(0), variance.mean(0) + mean.var(0, correction=0))
