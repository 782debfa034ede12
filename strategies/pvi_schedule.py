"""Who is visited next, and the special cases of partitioned variational inference that are only a choice of schedule.

References:
    Ashman et al., Partitioned variational inference (2022), Sections 2.4 and 4; residual order: Elidan et al. (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

Schedule = Literal["sequential", "synchronous", "asynchronous"]
Order = Literal["fixed", "random", "residual"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How sites are visited and merged."""

    schedule: Schedule = "sequential"
    order: Order = "fixed"
    fraction: float = 1.0
    """Share of the sites of a synchronous round."""
    damping: float = 0.0
    """ρ; 0 means automatic: 1 when sequential, 1/K of the participating sites otherwise."""
    deletion: bool = True
    split_prior: bool = False
    """The context is p^(N_k/N) alone."""
    passes: int = 0
    """Stop after this many visits of every site; 0 goes on until the rounds are over."""
    local_update: str = ""
    """Local update the special case needs; empty leaves the choice."""


PRESETS: Mapping[str, Plan] = MappingProxyType(
    {
        "bcm-same": Plan("synchronous", damping=1.0, passes=1),
        "bcm-split": Plan("synchronous", damping=1.0, deletion=False, split_prior=True, passes=1),
        "vcl": Plan("sequential", damping=1.0, passes=1),
        "streaming-vb": Plan("sequential", damping=1.0, deletion=False, passes=1),
        "global-vi": Plan("synchronous", damping=1.0, local_update="gradient"),
    }
)
"""Bayesian committee machines, variational continual learning, streaming VB, and global VI (Property 3.1)."""


def damping_of(plan: Plan, num_participants: int) -> float:
    """ρ of a merge of ``num_participants`` sites (asynchronous: of all sites that are being visited at once)."""
    if plan.damping > 0:
        return plan.damping
    return 1.0 if plan.schedule == "sequential" else 1.0 / num_participants


def next_sites(
    plan: Plan,
    sites: Sequence[str],
    visits: Mapping[str, int],
    sizes: Mapping[str, float],
    generator: np.random.Generator,
) -> list[str]:
    """The sites of the next round, sorted by name; a sequential round has one.

    Args:
        plan: Schedule and order.
        sites: Sites that may be visited.
        visits: How often each was visited.
        sizes: Size of each one's last update, for ``residual``; unknown counts as the largest, and of equal ones the
            site visited least is next.
        generator: Source of the choice; derive it from (seed, purpose, round).
    """
    allowed = [s for s in sorted(sites) if not plan.passes or visits.get(s, 0) < plan.passes]
    if not allowed:
        return []
    if plan.schedule == "synchronous":
        number = max(1, math.floor(plan.fraction * len(allowed)))
        return sorted(generator.choice(allowed, size=number, replace=False).tolist())
    if plan.schedule == "asynchronous":
        return allowed
    unvisited = [s for s in allowed if visits.get(s, 0) == 0]
    if plan.order == "residual" and not unvisited:
        return [min(allowed, key=lambda s: (-sizes.get(s, math.inf), visits[s], s))]
    fewest = min(visits.get(s, 0) for s in allowed)
    due = [s for s in allowed if visits.get(s, 0) == fewest]
    return [due[0] if plan.order != "random" else str(generator.choice(due))]


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Asynchronous visits under way: which version of the posterior each site was given."""

    versions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def sent(self, site: str, version: int) -> Outstanding:
        """A site was given the posterior of this version."""
        return replace(self, versions={**self.versions, site: version})

    def received(self, site: str, version: int) -> tuple[Outstanding, int]:
        """A site answered when the posterior was at ``version``; also the merges it did not see."""
        left = {name: value for name, value in self.versions.items() if name != site}
        return replace(self, versions=left), version - self.versions[site]
