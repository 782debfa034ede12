"""What PVI writes down about its visits, and how a site's answer becomes a proposal or a failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from strategies import pvi_arrays as wire
from strategies.pvi_options import PVIOptions
from strategies.pvi_state import Contribution, MergeRecord
from strategies.wire import Answer

LATENTS = ("inducing", "hyper")


@dataclass(slots=True)
class Book:
    """What happened so far, besides the factors."""

    visits: dict[str, int] = field(default_factory=dict)
    """Updates merged, per site."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Visits begun, per site: a site that fails does not hold up the others."""
    sizes: dict[str, float] = field(default_factory=dict)
    """How far each site's last update moved q, in nats."""
    staleness: dict[str, int] = field(default_factory=dict)
    """Merges that a site's last update had not seen."""
    leakage: dict[str, dict[str, float]] = field(default_factory=dict)
    """Each site's own report of how near its pseudo-observations are to its rows."""
    halvings: int = 0
    refused: int = 0
    """Updates left out because no damping made them proper."""
    local: dict[str, int] = field(default_factory=dict)
    """What optimisers at the sites had to do: ``rejected`` trial points, ``halvings`` of a fixed point's steps."""
    forgotten: list[str] = field(default_factory=list)
    forgotten_visits: int = 0
    refit_due: bool = False
    """Shared q(Z), q(β) still hold what a forgotten site had said."""

    @property
    def communications(self) -> int:
        """Updates merged so far, those of forgotten sites among them: the abscissa of a history."""
        return sum(self.visits.values()) + self.forgotten_visits

    def note(self, answers: Mapping[str, Answer], record: MergeRecord, *, replays: bool) -> None:
        """Write down a merge and what the merged sites said.

        Args:
            answers: Of the sites that were merged.
            record: What the merge did.
            replays: Whether q(Z) and q(β) are shared, so that only a site can say how far it moved them.
        """
        self.halvings += record.halvings
        self.refused += len(record.refused)
        for site, own in answers.items():
            self.visits[site] = self.visits.get(site, 0) + 1
            moved = own.number("moved") if replays else record.size[site]
            if math.isfinite(moved) and (moved or not replays):  # else unknown: it counts as the largest
                self.sizes[site] = moved
            for name in ("rejected", "halvings"):
                said = own.number(f"counts.{name}")
                self.local[name] = self.local.get(name, 0) + (int(said) if 0 < said < wire.LIMIT else 0)
            found = {name: own.number(f"leakage.{name}") for name in ("near", "low", "median", "auc")}
            self.leakage[site] = {n: v for n, v in found.items() if f"leakage.{n}" in own.metrics}


def refusal(own: Answer, rows: int, *, densities: bool) -> str | None:
    """Why the answer to a visit cannot come from ``rows`` rows, or None.

    Args:
        own: The answer.
        rows: Rows the site introduced itself with.
        densities: Whether it holds q(Z) and q(β) themselves, which must be proper; what the merge would make of a
            factor is judged by the merge.
    """
    if own.num_examples != rows:
        return f"claims {own.num_examples} rows, introduced itself with {rows}"
    points = wire.part(own.arrays, "points")
    reason = wire.points_refusal(points, rows) if points else None
    return reason or wire.gaussian_refusal(own.arrays) or (latents_refusal(own) if densities else None)


def latents_refusal(own: Answer) -> str | None:
    """Why q(Z) or q(β) is no density, or None."""
    for name in LATENTS:
        latent = wire.part(own.arrays, name)
        if "eta2" in latent and not (latent["eta2"] < 0).all():
            return f"`{name}`: its precision is not positive"
        if any(np.abs(array).max() > wire.LIMIT for array in latent.values()):
            return f"`{name}`: numbers above {wire.LIMIT:g}"
    return None


def contribution(own: Answer, options: PVIOptions) -> Contribution:
    """The factors that a site proposes; a refit's q(Z), q(β) are shared values and no factors."""
    blocks = wire.OWN_U if options.replays else (*LATENTS, *wire.OWN_U)
    factors = {name: wire.gaussian_of(wire.part(own.arrays, name)) for name in blocks if f"{name}.eta1" in own.arrays}
    points = wire.part(own.arrays, "points")
    if points:
        points |= {"tied": np.array(options.factor == "tied")}
    return Contribution(factors, points, own.num_examples)
