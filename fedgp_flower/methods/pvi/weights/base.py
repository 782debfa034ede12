"""What the sites of every model of weights share: its comparisons are the same model of other rows."""

from __future__ import annotations

from abc import abstractmethod

from fedgp_flower.clients.baselines import Baseline, all_rows
from fedgp_flower.clients.numpy_client import Said, SiteClient
from fedgp_flower.methods.messages import Nothing
from fedgp_flower.typing import Array


class WeightsClient(SiteClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    def local_fit(self) -> Baseline:
        """VI of this site's rows alone."""
        return self._alone((self.rows.x, self.rows.y, self.rows.x_test, self.rows.y_test))

    def pooled(self, request: Nothing) -> Said:
        """Simulation only: global VI, of the rows of all sites in one place."""
        del request
        self._require_simulated("does not see the rows of other sites")
        return self.compared(self._alone(all_rows(self.config, self.site.partitions, self.preparation)))

    @abstractmethod
    def _alone(self, data: tuple[Array, Array, Array, Array]) -> Baseline:
        """VI of these rows, judged on the held-out ones."""
