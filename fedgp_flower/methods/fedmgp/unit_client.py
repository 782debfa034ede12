"""What the clients of FedMGP's forms share: the unit's GP of its own, and its curve in a report."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedgp_flower.clients.baselines import Baseline, local_only
from fedgp_flower.clients.numpy_client import Prediction, SiteClient
from fedgp_flower.methods.fedmgp.messages import Curve
from fedgp_flower.typing import Array

MOST_ROWS_SHOWN = 250


class UnitClient(SiteClient):
    """One unit."""

    def local_fit(self) -> Baseline:
        """A GP of the unit's rows, fitted only where there is a held-out row to score."""
        if len(self.rows.y_test):
            return super().local_fit()
        none = np.empty(0)
        return Baseline(none, none, none, 0)

    def drawn(self, view: Any, grid: Array) -> Curve:
        """Predictions along the one input with and without the other units, and rows; a real unit refuses."""
        self._require_simulated("does not send rows")
        rows, every, agreed = self.rows, max(1, -(-self.num_examples // MOST_ROWS_SHOWN)), self.preparation
        none = np.zeros(len(grid))
        alone = local_only((rows.x, rows.y, grid, none), self.config)
        mean, sd, y = self.original(self.predict(view, grid), rows.y[::every])
        alone_mean, alone_sd, _ = self.original(Prediction(alone.mean, alone.variance), none)
        x = rows.x[::every, 0] * agreed.input_scale[0] + agreed.input_mean[0]
        return Curve(mean, sd, alone_mean, alone_sd, x, y)
