"""What sites share whose comparisons, local-only and pooled, are the method's own model of other rows."""

from __future__ import annotations

from abc import abstractmethod

from fedgp_flower.clients.baselines import Baseline, all_rows
from fedgp_flower.clients.numpy_client import Said, SiteClient
from fedgp_flower.methods.messages import Nothing
from fedgp_flower.typing import Array


class SameModelClient(SiteClient):
    """A subclass says how its model is fitted to some rows and judged on others."""

    def local_fit(self) -> Baseline:
        """The model of this site's rows alone."""
        return self._alone((self.rows.x, self.rows.y, self.rows.x_test, self.rows.y_test))

    def pooled(self, request: Nothing) -> Said:
        """Simulation only: the model of the rows of all sites in one place."""
        del request
        self._require_simulated("does not see the rows of other sites")
        return self.compared(self._alone(all_rows(self.config, self.site.partitions, self.preparation)))

    @abstractmethod
    def _alone(self, data: tuple[Array, Array, Array, Array]) -> Baseline:
        """The model of these rows, judged on the held-out ones."""
