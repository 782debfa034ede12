"""What a site keeps between rounds of SFVI and SFVI-Avg, and how a later round reads it. Nothing of it leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import message
from fedgp_flower.methods.family import LOCAL, LocalPosterior, named, on_the_wire, with_named
from fedgp_flower.methods.sfvi.learner import LocalState
from fedgp_flower.methods.sfvi.structured import SiteRows
from fedgp_flower.typing import AnyShape


@message()
class RoundMemory:
    """q(Z_Lk | Z_G) after a round, the moments of its optimiser, and the μ_G that it was fitted around."""

    round: int
    averaged: bool
    """Whether the site took steps on q(Z_G): then it owes its latents the shift to the average."""
    about: str
    """What the latents belong to; see :func:`subject`."""
    centre: Float[ndarray, " G"]
    local: Mapping[str, AnyShape]
    steps: int
    first: Mapping[str, AnyShape]
    second: Mapping[str, AnyShape]

    @staticmethod
    def of(server_round: int, site: SiteRows, end: LocalState, *, averaged: bool) -> RoundMemory:
        """The memory of a round from where its steps ended."""
        q_global, q_local, moments = end
        local = {name.removeprefix(LOCAL): array for name, array in on_the_wire(named(q_local)).items()}
        adam = moments.step, on_the_wire(moments.first), on_the_wire(moments.second)
        return RoundMemory(server_round, averaged, subject(site), q_global.mean.detach().numpy(), local, *adam)

    @property
    def moments(self) -> AdamState[Tensor]:
        """As the optimiser wants them."""
        first, second = (
            {name: torch.tensor(array) for name, array in part.items()} for part in (self.first, self.second)
        )
        return AdamState(self.steps, first, second)

    def fits(self, site: SiteRows, start: LocalPosterior) -> bool:
        """Whether it is about latents like these of the same units: a site may come back with other rows."""
        shapes = {LOCAL + name: array.shape for name, array in self.local.items()}
        return self.about == subject(site) and shapes == {n: tuple(v.shape) for n, v in named(start).items()}

    def read_around(self, start: LocalPosterior, centre: Tensor, server_round: int) -> LocalPosterior:
        """q(Z_Lk | Z_G) around another μ_G, for a site whose q(Z_G) was averaged or that missed rounds.

        A site that sends gradients every round owes no shift: the step of μ̄_k was taken together with that of μ_G.
        ``start`` is a q of the same family and shapes, ``centre`` μ_G as it is now.
        """
        q_local = with_named(start, {LOCAL + name: torch.tensor(array) for name, array in self.local.items()})
        if self.averaged or server_round > self.round + 1:
            return q_local.shifted(torch.tensor(self.centre), centre)
        return q_local


@message()
class SiteMemory:
    """All a site keeps of a run."""

    latest: RoundMemory | None = None
    before: RoundMemory | None = None
    """What a repetition of the latest round starts from."""
    seed: int | None = None
    """Of the site's draws, where nobody else knows it."""

    def at(self, server_round: int) -> RoundMemory | None:
        """What a round starts from: what the latest one left, or, asked for the latest again, what it started from."""
        repeated = self.latest is not None and self.latest.round >= server_round
        return self.before if repeated else self.latest


def subject(site: SiteRows) -> str:
    """A digest of the units whose latents q is about, and of the inputs they refer to."""
    parts = (site.keys, site.anchors)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


def scaled(moments: AdamState[Tensor], factor: float) -> AdamState[Tensor]:
    """Moments as if the gradients by η_Lk had been ``factor`` times what they were.

    A site keeps those of its latents for its term of the bound. Local steps on a bound that stands in for all sites
    follow N / N_k times that, and would leave moments under which later gradients move nothing.
    """
    first, second = (
        {name: value * factor**power if name.startswith(LOCAL) else value for name, value in part.items()}
        for power, part in ((1, moments.first), (2, moments.second))
    )
    return replace(moments, first=first, second=second)
