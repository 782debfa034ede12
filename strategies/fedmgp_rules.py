"""Rules that merge the pseudo-gradients of several units into one.

To add a rule, write a function ``(updates, options) -> update`` of one row per unit and add it to :data:`RULES`. For
q(u) in natural parameters, a Δ_m that no rows can produce is left out, and all rules except the mean compare units in
coordinates in which q(u) is N(0, I).
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
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, SHIFT, UnitStatistics, from_natural
from fedgp_flower.methods.fedmgp.options import NATURAL_STEP, FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import semidefinite, sharing
from fedgp_flower.typing import Array, NamedArrays

LEAST_INFORMATION = 0.1
"""Units with less than this share of the median unit's information on u are left out of robust rules."""
LEAST_VOTES = 3
"""Minimum number of units for Krum."""

Rule: TypeAlias = Callable[[Array, FedMGPOptions], Array]


def mean(updates: Array, options: FedMGPOptions) -> Array:
    """Σ_k Δ_k / K (Chung and Al Kontar 2024, Eq. 15).  ``updates`` [K, P]."""
    return np.full(len(updates), 1 / len(updates)) @ updates


def norm_clipped(updates: Array, options: FedMGPOptions) -> Array:
    """Σ_k min(1, c/‖Δ_k‖) Δ_k / K: a unit moves the result by at most c/K, with c the median norm."""
    norms = np.linalg.norm(updates, axis=1)
    shortened = np.minimum(1.0, np.median(norms) / np.maximum(norms, np.finfo(float).tiny))
    return mean(shortened[:, None] * updates, options)


def median(updates: Array, options: FedMGPOptions) -> Array:
    """Coordinate-wise median, as Flower's FedMedian computes it."""
    return np.asarray(np.median(updates, axis=0))


def trimmed_mean(updates: Array, options: FedMGPOptions) -> Array:
    """Coordinate-wise mean without the ⌊trim · K⌋ smallest and largest values."""
    return np.asarray(trim_mean(updates, options.trim))


def krum(updates: Array, options: FedMGPOptions) -> Array:
    """Return the mean of the ``select`` updates nearest to their K − f − 2 neighbours (Blanchard et al. 2017)."""
    if len(updates) < least_sites(options):
        raise ConfigError(
            f"Krum with f = {options.malicious} malicious units needs at least {least_sites(options)} units (2f + 3); "
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
    """Return the minimum number of units of the configured rule: 2f + 3 for Krum."""
    return 2 * options.malicious + 3 if options.aggregation == "krum" else 1


def merged(rule: Rule, options: FedMGPOptions, updates: Sequence[Mapping[str, Array]]) -> NamedArrays:
    """Merge the named updates of several units by a rule."""
    return unpack(rule(np.stack([pack(update) for update in updates]), options), updates[0])


def merge_natural(
    options: FedMGPOptions, theta: Mapping[str, Array], updates: Mapping[str, NamedArrays]
) -> tuple[NamedArrays, tuple[str, ...]]:
    """Merge Δ of θ = {log S, λ, h} of units with positive semi-definite G_m; also return the units that count."""
    moved = 1 - (1 - NATURAL_STEP) ** options.local_steps  # total step of E local steps of size ρ
    statistics = {site: statistics_of(theta, update, moved, 1 / len(updates)) for site, update in updates.items()}
    usable = {
        site: update
        for site, update in updates.items()
        if np.isfinite(update[SCALES]).all() and all(map(semidefinite, statistics[site]))
    }
    if not usable:
        raise NumericsError("no unit sent an update that rows can produce")
    if options.aggregation == "agreement":
        kept = sharing({site: statistics[site][0] for site in usable})
        if not kept:
            raise NumericsError("no units agree on g yet")
        empty = {  # the update of a unit without rows: λ → I, h → 0
            SCALES: np.mean([usable[site][SCALES] for site in kept], axis=0),
            PRECISION: moved * (theta[PRECISION] - np.eye(theta[PRECISION].shape[1])),
            SHIFT: moved * theta[SHIFT],
        }
        return merged(mean, options, [usable[site] if site in kept else empty for site in usable]), kept
    if options.aggregation == "mean":
        return merged(mean, options, list(usable.values())), tuple(usable)
    frame = Frame(
        np.asarray(np.linalg.cholesky(theta[PRECISION]), np.float64), from_natural(theta[PRECISION], theta[SHIFT])[0]
    )
    usable = informative(frame, usable, moved)
    fewer = max(0, options.malicious - (len(updates) - len(usable)))  # malicious units among those left
    left = options.model_copy(update={"malicious": fewer})
    whitened = merged(RULES[options.aggregation], left, [frame.whiten(update) for update in usable.values()])
    return frame.unwhiten({**whitened, PRECISION: within_averages(whitened[PRECISION], 1 - moved)}), tuple(usable)


def statistics_of(
    theta: Mapping[str, Array], update: Mapping[str, Array], moved: float, share: float
) -> list[UnitStatistics]:
    """Return G_m and b_m of each latent function, averaged over the local steps, from Δ_m.

    With c = 1 − (1 − ρ)^E the steps lead to λ_m = (1 − c) λ + c (I + G_m/p_m) and h_m = (1 − c) h + c b_m/p_m.
    """
    parts = zip(*(theta[name] - update[name] / moved for name in (PRECISION, SHIFT)), strict=True)
    return [UnitStatistics(share * (G - np.eye(len(b))), share * b, 0.0, np.zeros(1)) for G, b in parts]


@dataclass(frozen=True, slots=True)
class Frame:
    """Coordinates v = Cᵀ(u − m) with C Cᵀ = λ, in which q(u) is N(0, I) and entries have comparable sizes.

    A unit moves λ to C⁻¹λ_mC⁻ᵀ and the mean by C⁻¹(h_m − λ_m m), which vanishes on average at the optimum.
    """

    factor: Array  # [I, J, J]
    mean: Array  # [I, J]

    def whiten(self, update: Mapping[str, Array]) -> NamedArrays:
        """Return Δ_m in these coordinates."""
        precision, shift = update[PRECISION], update[SHIFT] - np.einsum("iab,ib->ia", update[PRECISION], self.mean)
        left = np.linalg.solve(self.factor, precision).transpose(0, 2, 1)
        right = np.linalg.solve(self.factor, shift[..., None])[..., 0]
        return {SCALES: update[SCALES], PRECISION: np.linalg.solve(self.factor, left), SHIFT: right}

    def unwhiten(self, update: Mapping[str, Array]) -> NamedArrays:
        """Return an update of these coordinates in the coordinates of u."""
        precision = self.factor @ update[PRECISION] @ self.factor.transpose(0, 2, 1)
        shift = np.einsum("iab,ib->ia", self.factor, update[SHIFT]) + np.einsum("iab,ib->ia", precision, self.mean)
        return {SCALES: update[SCALES], PRECISION: precision, SHIFT: shift}


def informative(frame: Frame, updates: Mapping[str, NamedArrays], moved: float) -> dict[str, NamedArrays]:
    """Return updates whose tr C⁻¹G_mC⁻ᵀ is at least :data:`LEAST_INFORMATION` of the median for each latent."""
    size = frame.factor.shape[1]
    prior = np.square(np.linalg.solve(frame.factor, np.eye(size))).sum((1, 2))  # tr C⁻¹C⁻ᵀ
    traces = [np.trace(frame.whiten(update)[PRECISION], axis1=1, axis2=2) for update in updates.values()]
    information = size - np.array(traces) / moved - prior
    enough = (information >= LEAST_INFORMATION * np.median(information, axis=0)).all(axis=1)
    kept = {site: update for (site, update), good in zip(updates.items(), enough, strict=True) if good}
    return kept if len(kept) >= LEAST_VOTES else dict(updates)


def within_averages(update: Array, least: float) -> Array:
    """Return Δ with the eigenvalues of I − Δ (λ whitened by q(u)) raised to ``least``, the minimum of any average."""
    eye = np.eye(update.shape[1])
    values, vectors = np.linalg.eigh(eye - 0.5 * (update + update.transpose(0, 2, 1)))
    return np.asarray(eye - (vectors * np.maximum(values, least)[:, None]) @ vectors.transpose(0, 2, 1))
