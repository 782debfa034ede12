"""The site's half of FSGP with differential privacy: it answers noisy sums, as often as its budget lets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.methods.fsgp.client import FSGPClient
from fedgp_flower.methods.fsgp.private import EDGE, Budget, disturbed
from fedgp_flower.methods.fsgp.private_messages import PrivateRequest, PrivateSums

ANSWERED = frozenset({"describe", "private", "score_sums", "predictions"})
"""What says nothing of training rows beyond their number, and what is paid for."""
RELEASES = "releases"


class PrivateClient(FSGPClient):
    """Noise as the configuration says; the number of releases stands in the site's state."""

    def handler(self, kind: str) -> Callable[[Any], Any]:
        """As usual, of few kinds.

        Raises:
            ProtocolError: the kind would tell of rows and is not paid for.
        """
        if (kind.partition(".")[2] or kind) not in ANSWERED:
            raise ProtocolError(f"`privacy.epsilon` is set: `{kind}` would tell more of rows than is accounted for")
        return super().handler(kind)

    def private(self, request: PrivateRequest) -> PrivateSums:
        """Sums of the clipped rows with this site's part of the noise.

        Raises:
            ProtocolError: the budget is spent.
        """
        budget, done = Budget.of(self.config), self.state.updates
        if done >= budget.releases:
            raise ProtocolError(f"the budget of {budget.releases} release(s) is spent; see `fsgp.trials`")
        if request.sharing < 1:
            raise ProtocolError("`sharing` is a number of sites")
        whitener = self.whitener(request.values)
        inputs, targets = self.tensors
        with torch.no_grad():
            amplitude = float(prior_variance(whitener.model.kernel, inputs[:1]))
        sums = pooled_sums(whitener.model, inputs, targets.clamp(-EDGE, EDGE), whitener)
        self.state.replace({RELEASES: np.array(done + 1)})
        return disturbed(sums, amplitude, budget.noise / request.sharing**0.5, self._rng())

    def _rng(self) -> np.random.Generator:
        """From the operating system; in a simulation from the seed, where nothing is secret anyway."""
        if not self.site.simulated:
            return np.random.default_rng()
        return np.random.default_rng([self.config.seed, self.setting.round, *b"noise", *self.site.site.encode()])
