"""The hierarchical GP of a weather run outside its federation: fitted to all rows at once, and drawn as a map."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch
from fedgp_flower.methods.sfvi.estimators import expected_site_term
from fedgp_flower.methods.sfvi.models import model_at
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedgp_flower.data.sites import RawSite, load_all_sites
from fedgp_flower.data.sites import SiteData as Encoded
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.optimisers import maximise
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.methods.family import (
    GlobalPosterior,
    LocalPosterior,
    expected_global_term,
    initial_global,
    named,
    with_named,
)
from fedgp_flower.methods.sfvi.gp import HierarchicalGP
from fedgp_flower.methods.sfvi.options import SHARED, SFVIOptions
from fedgp_flower.methods.sfvi.structured import SiteData
from fedgp_flower.run.artefacts import read_posterior
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import read_config
from fedgp_flower.typing import NamedArrays

EVALUATIONS = 400
"""Of the pooled bound."""
OWN_EVALUATIONS = 200
"""Of a site's term, for the map."""


@dataclass(frozen=True)
class Problem:
    """The rows of a run's sites in the units of its model, and what it saved."""

    config: RunConfig
    arrays: NamedArrays
    raw: list[RawSite]
    encoded: list[Encoded]

    @property
    def width(self) -> int:
        """D."""
        return int(self.encoded[0].x.shape[1])

    def deal(self, model: HierarchicalGP, site: int) -> SiteData:
        """Rows of a site as the model has them."""
        x, y = (torch.from_numpy(part) for part in (self.encoded[site].x, self.encoded[site].y))
        return model.prepare(x, y, key=site)

    def start(self, model: HierarchicalGP, site: SiteData) -> LocalPosterior:
        """q(Z_Lk | Z_G) as a site begins."""
        options = self.config.options
        scale, triangular = options.initial_local_scale, options.local_structure == "full"
        return model.initial_local(site, scale=scale, coupled=options.coupling, triangular=triangular)


def problem(folder: Path, sites: int) -> Problem:
    """Read a run's folder."""
    config = parse_config(read_config(folder / "config.toml"))
    saved = read_posterior(folder)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    preparation = Preparation.from_wire(arrays, json.dumps(saved.schema))
    raw = load_all_sites(config, sites)
    return Problem(config, arrays, raw, [site.encode(preparation) for site in raw])


def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that can be optimised."""
    return {name: value.detach().clone().requires_grad_() for name, value in values.items()}


def pooled_sums(folder: Path, sites: int) -> pd.DataFrame:
    """Rows, NLL and squared error by country of the model fitted to all rows from the same start by L-BFGS."""
    limit_threads(1)
    own = problem(folder, sites)
    points = torch.from_numpy(own.arrays[SHARED])
    options = cast(SFVIOptions, own.config.options)
    model = HierarchicalGP.configured(options, own.config.model, own.width, points)
    data = [own.deal(model, index) for index in range(sites)]
    first = initial_global(model.global_size, scale=own.config.options.initial_scale, triangular=False)
    starts = [own.start(model, site) for site in data]
    eta, locals_ = leaves(named(first)), [leaves(named(start)) for start in starts]

    def now() -> tuple[GlobalPosterior, list[LocalPosterior]]:
        return with_named(first, eta), [with_named(q, v) for q, v in zip(starts, locals_, strict=True)]

    def bound() -> Tensor:
        q_global, q_locals = now()
        terms = [expected_site_term(model, site, q_global, q) for site, q in zip(data, q_locals, strict=True)]
        total = expected_global_term(model.prior_log_scale(), q_global) + torch.stack(terms).sum()
        return total / sum(len(s.targets) for s in data)

    parameters: list[Tensor] = [*model.theta().values(), *eta.values(), *(v for own in locals_ for v in own.values())]
    end = maximise(bound, parameters, max_evaluations=EVALUATIONS, tolerance=1e-8)
    print(f"pooled: ELBO per row {end.value:.4f} after {end.evaluations} evaluations", flush=True)
    with torch.no_grad():
        q_global, q_locals = now()
    return _scores(own, model, data, q_global, q_locals)


def _scores(
    own: Problem,
    model: HierarchicalGP,
    data: Sequence[SiteData],
    q_global: GlobalPosterior,
    q_locals: Sequence[LocalPosterior],
) -> pd.DataFrame:
    rows = {}
    for raw, encoded, site, q_local in zip(own.raw, own.encoded, data, q_locals, strict=True):
        found = model.predict(site.at(torch.from_numpy(encoded.x_test)), q_global, q_local)
        squares = (torch.from_numpy(encoded.y_test) - found.mean).square()
        nll = 0.5 * (2 * torch.pi * found.variance).log() + 0.5 * squares / found.variance
        rows[raw.label] = {"rows": float(len(squares)), "nll": float(nll.sum()), "squares": float(squares.sum())}
    return pd.DataFrame.from_dict(rows, orient="index")


def stations(folder: Path, sites: int) -> pd.DataFrame:
    """A row per training station: place, observation, trend g, deviation h of its country, and the sd of both, in °C.

    The countries' own q(Z_Lk | Z_G) did not leave them, so they are found again around the saved q(Z_G) and θ, as a
    site would that has lost its state.
    """
    limit_threads(1)
    own = problem(folder, sites)
    options = cast(SFVIOptions, own.config.options)
    model = cast(HierarchicalGP, model_at(options, own.config.model, own.width, own.arrays))
    q_global, frames = GlobalPosterior.of(own.arrays), []
    centre, scale = float(own.arrays["target.mean"]), float(own.arrays["target.scale"])
    for index, raw in enumerate(own.raw):
        site = own.deal(model, index)
        start = own.start(model, site)
        values = leaves(named(start))
        maximise(
            lambda site=site, start=start, values=values: expected_site_term(  # type: ignore[misc]
                model, site, q_global, with_named(start, values)
            ),
            list(values.values()),
            max_evaluations=OWN_EVALUATIONS,
        )
        with torch.no_grad():
            mean, variance = model.latent(site, q_global, with_named(start, values))
        trend, _ = model.trend_moments(site.features, q_global)
        frame = raw.train[["lon", "lat", "tmin"]].astype(float).assign(trend=centre + scale * trend.numpy())
        frames.append(frame.assign(deviation=scale * (mean - trend).numpy(), sd=scale * variance.sqrt().numpy()))
    return pd.concat(frames, ignore_index=True)


def map_figure(folder: Path, sites: int) -> Figure:
    """Observation, shared trend, the countries' deviations from it, and how well their sum is known, at stations."""
    frame = stations(folder, sites)
    figure = Figure(figsize=(9.2, 6.6), layout="constrained")
    axes: list[Axes] = list(figure.subplots(2, 2, sharex=True, sharey=True).ravel())
    low, high = np.quantile(frame["tmin"], [0.01, 0.99])
    most = float(np.quantile(frame["deviation"].abs(), 0.99))
    panels = (
        ("tmin", "observed least temperature", "viridis", low, high),
        ("trend", "shared trend g, posterior mean", "viridis", low, high),
        ("deviation", "deviation h of the country, posterior mean", "RdBu_r", -most, most),
        ("sd", "posterior sd of g + h", "magma", 0.0, float(np.quantile(frame["sd"], 0.99))),
    )
    for ax, (column, title, colours, least, largest) in zip(axes, panels, strict=True):
        shown = ax.scatter(frame["lon"], frame["lat"], c=frame[column], s=5, cmap=colours, vmin=least, vmax=largest)
        figure.colorbar(shown, ax=ax, label="°C", shrink=0.85, extend="both" if least else "max")
        ax.set_title(title, fontsize=9)
    for ax in axes[2:]:
        ax.set_xlabel("longitude (°)")
    for ax in axes[::2]:
        ax.set_ylabel("latitude (°)")
    return figure
