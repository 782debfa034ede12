"""What PVI writes down about its visits, and how a site's answer becomes a proposal or a failure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from strategies import pvi_arrays as wire
from strategies.pvi_options import PVIOptions
from strategies.pvi_state import Contribution
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
    forgotten: list[str] = field(default_factory=list)
    refit_due: bool = False
    """Shared q(Z), q(β) still hold what a forgotten site had said."""


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
    return reason or wire.symmetry_refusal(own.arrays) or (latents_refusal(own) if densities else None)


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
