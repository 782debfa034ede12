"""The site's half of SGPR with differential privacy: it answers noisy sums, as often as its budget lets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.sgpr.client import SparseClient
from fedgp_flower.methods.sgpr.messages import PrivateRequest, PrivateSums
from fedgp_flower.methods.sgpr.private import EDGE, Budget, disturbed
from fedgp_flower.privacy.questions import content_digest
from fedgp_flower.typing import NamedArrays

ANSWERED = frozenset({"private", "evaluate", "score_sums", "predictions"})
"""What says nothing of training rows beyond their number, and what is paid for."""
ASKED = "asked"
"""Array of the site's state: the hash of the question that its latest release answered."""


class PrivateSGPRClient(SparseClient):
    """Noise as the configuration says; the latest release, and how many there were, stand in the site's state."""

    def asked(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """As usual, of few kinds."""
        if (kind.partition(".")[2] or kind) not in ANSWERED:
            raise ProtocolError(f"`privacy.epsilon` is set: `{kind}` would tell more of rows than is accounted for")
        return super().asked(kind, arrays, numbers)

    def private(self, request: PrivateRequest) -> PrivateSums:
        """Sums of the clipped rows with this site's part of the noise.

        Who did not get a release asks for it again and gets the same one, which tells nothing more: where it has all of
        its noise. A part of it would tell more, since the total may have been of others.
        """
        budget, asked = Budget.of(self.config), np.frombuffer(bytes.fromhex(content_digest("", encode(request))), "u1")
        kept = dict(self.state.arrays)
        if request.sharing == 1 and np.array_equal(kept.pop(ASKED, ()), asked):
            return decode(PrivateSums, kept)
        if self.state.updates >= budget.releases:
            raise ProtocolError(f"the budget of {budget.releases} release(s) is spent; see `sgpr.trials`")
        if request.sharing < 1:
            raise ProtocolError("`sharing` is a number of sites")
        whitener = self.whitener(request.values)
        inputs, targets = self.tensors
        with torch.no_grad():
            amplitude = float(prior_variance(self.model.kernel, inputs[:1]))
        sums = pooled_sums(self.model, inputs, targets.clamp(-EDGE, EDGE), whitener)
        released = disturbed(sums, amplitude, budget.noise / request.sharing**0.5, self._rng())
        self.state.replace({**encode(released), ASKED: asked})
        return released

    def _rng(self) -> np.random.Generator:
        """From the operating system; in a simulation from the seed, where nothing is secret anyway."""
        if not self.site.simulated:
            return np.random.default_rng()
        return np.random.default_rng([self.config.seed, self.setting.round, *b"noise", *self.site.site.encode()])
