"""Rules that merge the pseudo-gradients of several units into one.

To add a rule, write a function ``(updates, options) -> update`` from a row per unit and its row in :data:`RULES`. Where
q(u) is in natural parameters, a Δ_m that no rows can produce is left out, and rules that are not the mean compare units
in coordinates in which q(u) is N(0, I).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, SHIFT, UnitStatistics, from_natural
from fedgp_flower.methods.fedmgp.options import NATURAL_STEP, FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import semidefinite, sharing
from fedgp_flower.typing import Array, NamedArrays

LEAST_TOLD = 0.1
"""A unit that says less of u than this share of what the median unit says has no vote in the other rules."""
LEAST_VOTES = 3
"""What Krum needs at least."""

Rule: TypeAlias = Callable[[Array, FedMGPOptions], Array]


def mean(updates: Array, options: FedMGPOptions) -> Array:
    """Σ_k Δ_k / K (Chung and Al Kontar 2024, Eq. 15).  ``updates`` [K, P]."""
    del options
    return np.full(len(updates), 1 / len(updates)) @ updates


def norm_clipped(updates: Array, options: FedMGPOptions) -> Array:
    """Σ_k min(1, c/‖Δ_k‖) Δ_k / K: no unit moves the result further than c/K, with c the median of the norms."""
    norms = np.linalg.norm(updates, axis=1)
    shortened = np.minimum(1.0, np.median(norms) / np.maximum(norms, np.finfo(float).tiny))
    return mean(shortened[:, None] * updates, options)


def median(updates: Array, options: FedMGPOptions) -> Array:
    """Coordinate-wise median, as Flower's FedMedian computes it."""
    del options
    return np.asarray(np.median(updates, axis=0))


def trimmed_mean(updates: Array, options: FedMGPOptions) -> Array:
    """Coordinate-wise mean without the ⌊trim · K⌋ smallest and largest values."""
    return np.asarray(trim_mean(updates, options.trim))


def krum(updates: Array, options: FedMGPOptions) -> Array:
    """The mean of the ``select`` updates nearest to their K − f − 2 closest others (Blanchard et al. 2017)."""
    if len(updates) < least_sites(options):
        raise ConfigError(
            f"Krum withstands f = {options.malicious} bad units among {least_sites(options)} or more (2f + 3); "
            f"{len(updates)} replied. Lower `fedmgp.malicious` or wait for more units."
        )
    records = [RecordDict({"update": ArrayRecord({"update": FlowerArray(row)})}) for row in updates]
    chosen = select_multikrum(records, num_malicious_nodes=options.malicious, num_nodes_to_select=options.select)
    return mean(updates[[any(record is each for each in chosen) for record in records]], options)


RULES: Mapping[str, Rule] = {
    "mean": mean,
    "norm-clipped": norm_clipped,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
}


def least_sites(options: FedMGPOptions) -> int:
    """Fewest units a rule can work with: Krum chooses among 2f + 3 or more."""
    return 2 * options.malicious + 3 if options.aggregation == "krum" else 1


def merged(rule: Rule, options: FedMGPOptions, updates: Sequence[Mapping[str, Array]]) -> NamedArrays:
    """Named updates of several units, merged by a rule."""
    names = sorted(updates[0])
    rows = np.stack([np.concatenate([np.ravel(update[name]) for name in names]) for update in updates])
    ends = np.cumsum([np.size(updates[0][name]) for name in names])[:-1]
    parts = zip(names, np.split(rule(rows, options), ends), strict=True)
    return {name: part.reshape(np.shape(updates[0][name])) for name, part in parts}


# Natural parameters.


def merge_natural(
    options: FedMGPOptions, theta: Mapping[str, Array], updates: Mapping[str, NamedArrays]
) -> tuple[NamedArrays, tuple[str, ...]]:
    """Merge Δ of θ = {log S, λ, h} of units whose G_m are positive semi-definite; also the units that counted."""
    moved = 1 - (1 - NATURAL_STEP) ** options.local_steps  # how far E local steps of size ρ went
    said = {site: statistics_of(theta, update, moved, 1 / len(updates)) for site, update in updates.items()}
    told = {
        site: update
        for site, update in updates.items()
        if np.isfinite(update[SCALES]).all() and all(map(semidefinite, said[site]))
    }
    if not told:
        raise NumericsError("no unit sent what rows can produce")
    if options.aggregation == "agreement":
        kept = sharing({site: said[site][0] for site in told})
        if not kept:
            raise NumericsError("no units agree on g yet")
        silent = {  # what a unit without rows sends: λ → I, h → 0
            SCALES: np.mean([told[site][SCALES] for site in kept], axis=0),
            PRECISION: moved * (theta[PRECISION] - np.eye(theta[PRECISION].shape[1])),
            SHIFT: moved * theta[SHIFT],
        }
        return merged(mean, options, [told[site] if site in kept else silent for site in told]), kept
    if options.aggregation == "mean":
        return merged(mean, options, list(told.values())), tuple(told)
    frame = Frame(
        np.asarray(np.linalg.cholesky(theta[PRECISION]), np.float64), from_natural(theta[PRECISION], theta[SHIFT])[0]
    )
    told = telling(frame, told, moved)
    fewer = max(0, options.malicious - (len(updates) - len(told)))  # bad units to withstand among those left
    left = options.model_copy(update={"malicious": fewer})
    seen = merged(RULES[options.aggregation], left, [frame.seen(update) for update in told.values()])
    return frame.back({**seen, PRECISION: within_averages(seen[PRECISION], 1 - moved)}), tuple(told)


def statistics_of(
    theta: Mapping[str, Array], update: Mapping[str, Array], moved: float, share: float
) -> list[UnitStatistics]:
    """G_m and b_m of each latent function, means over the local steps, from Δ_m.

    With c = 1 − (1 − ρ)^E the steps led to λ_m = (1 − c) λ + c (I + G_m/p_m) and h_m = (1 − c) h + c b_m/p_m.
    """
    parts = zip(*(theta[name] - update[name] / moved for name in (PRECISION, SHIFT)), strict=True)
    return [UnitStatistics(share * (G - np.eye(len(b))), share * b, 0.0, np.zeros(1)) for G, b in parts]


@dataclass(frozen=True, slots=True)
class Frame:
    """Coordinates v = Cᵀ(u − m) with C Cᵀ = λ, in which q(u) is N(0, I): entries of λ and h differ by orders.

    A unit moves λ to C⁻¹λ_mC⁻ᵀ and the mean by C⁻¹(h_m − λ_m m), which vanishes on average at the optimum.
    """

    factor: Array  # [I, J, J]
    mean: Array  # [I, J]

    def seen(self, update: Mapping[str, Array]) -> NamedArrays:
        """Δ_m in these coordinates."""
        precision, shift = update[PRECISION], update[SHIFT] - np.einsum("iab,ib->ia", update[PRECISION], self.mean)
        left = np.linalg.solve(self.factor, precision).transpose(0, 2, 1)
        turned = np.linalg.solve(self.factor, left), np.linalg.solve(self.factor, shift[..., None])[..., 0]
        return {SCALES: update[SCALES], PRECISION: turned[0], SHIFT: turned[1]}

    def back(self, update: Mapping[str, Array]) -> NamedArrays:
        """What was seen, in the coordinates of u."""
        precision = self.factor @ update[PRECISION] @ self.factor.transpose(0, 2, 1)
        shift = np.einsum("iab,ib->ia", self.factor, update[SHIFT]) + np.einsum("iab,ib->ia", precision, self.mean)
        return {SCALES: update[SCALES], PRECISION: precision, SHIFT: shift}


def telling(frame: Frame, updates: Mapping[str, NamedArrays], moved: float) -> dict[str, NamedArrays]:
    """Updates with tr C⁻¹G_mC⁻ᵀ of each latent a share of the median at least: in a median, pure noise has no vote."""
    size = frame.factor.shape[1]
    nothing = np.square(np.linalg.solve(frame.factor, np.eye(size))).sum((1, 2))  # tr C⁻¹C⁻ᵀ
    traces = [np.trace(frame.seen(update)[PRECISION], axis1=1, axis2=2) for update in updates.values()]
    known = size - np.array(traces) / moved - nothing
    enough = (known >= LEAST_TOLD * np.median(known, axis=0)).all(axis=1)
    told = {site: update for (site, update), good in zip(updates.items(), enough, strict=True) if good}
    return told if len(told) >= LEAST_VOTES else dict(updates)


def within_averages(update: Array, least: float) -> Array:
    """Δ with eigenvalues of I − Δ, λ in coordinates of q(u), raised to ``least``, below which no average is."""
    eye = np.eye(update.shape[1])
    values, vectors = np.linalg.eigh(eye - 0.5 * (update + update.transpose(0, 2, 1)))
    return np.asarray(eye - (vectors * np.maximum(values, least)[:, None]) @ vectors.transpose(0, 2, 1))
