"""ModularGP and FedPoly over the rows of all simulated units; real sites refuse."""

from __future__ import annotations

import numpy as np

from fedgp_flower.clients.base import Reply, Request
from fedgp_flower.clients.baselines import Baseline
from fedgp_flower.clients.fedmgp import FedMGPClient
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ConfigError, ProtocolError
from fedgp_flower.models.exact_q import predict
from fedgp_flower.models.federated_polynomial import fit_polynomial
from fedgp_flower.models.multi_output_baselines import fit_modular, starting_point
from fedgp_flower.shapes import Array


class MultiOutputYardstickClient(FedMGPClient):
    """The one site that fits a yardstick for all."""

    def units(self, request: Request) -> list[SiteData]:
        """Rows of all simulated units; both yardsticks are regressions."""
        if not self.gaussian:
            raise ConfigError(f"method `{self.config.method}` needs `model.likelihood` = 'gaussian'")
        if not self.site.simulated:
            raise ProtocolError("a real site does not see the rows of other sites")
        preparation = Preparation.from_wire(request.arrays, str(request.settings["schema"]))
        return [site.encode(preparation) for site in load_all_sites(self.config, self.site.partitions)]

    def grid(self, low: Array, high: Array) -> Array:
        """At most ``model.num-inducing`` pseudo-inputs over a box and a twentieth beyond it at each end."""
        count = self.config.model.num_inducing
        side = round(count ** (1 / len(low)))
        side -= side ** len(low) > count
        beyond = 0.05 * (high - low)
        axes = [np.linspace(a, b, side) for a, b in zip(low - beyond, high + beyond, strict=True)]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(low))

    def on_query_modular(self, request: Request) -> Reply:
        """Modules of all units at the same pseudo-inputs, joined by a multi-output GP."""
        units, own = self.units(request), self.options
        rows = [(part.x, part.y) for part in units]
        x = np.concatenate([part.x for part in units])
        W, most = self.grid(x.min(axis=0), x.max(axis=0)), self.config.baselines.max_evaluations
        scales = [own["start_multiple"] * own["start_ratio"] ** i for i in range(own["latents"])]
        fit = fit_modular(rows, W, starting_point(rows, W, multiples=scales, options=self.search), max_evaluations=most)
        told = [predict(u.x_test, fit.latents, fit.posterior, phi) for u, phi in zip(units, fit.units, strict=True)]
        variance = np.concatenate([v + phi.noise for (_, v), phi in zip(told, fit.units, strict=True)])
        target = np.concatenate([part.y_test for part in units])
        return self._baseline(request, Baseline(np.concatenate([m for m, _ in told]), variance, target, most))

    def on_query_polynomial(self, request: Request) -> Reply:
        """FedPoly; its intervals take the spread of the unit's residuals, as the method itself has none."""
        units = self.units(request)
        x = np.concatenate([part.x for part in units])
        fit = fit_polynomial([(part.x, part.y) for part in units], x.min(axis=0), x.max(axis=0))
        mean = np.concatenate([fit.predict(m, part.x_test) for m, part in enumerate(units)])
        spread = [np.mean((fit.predict(m, part.x) - part.y) ** 2) for m, part in enumerate(units)]
        variance = np.concatenate([np.full(len(part.y_test), v) for part, v in zip(units, spread, strict=True)])
        return self._baseline(request, Baseline(mean, variance, np.concatenate([p.y_test for p in units]), 1))
