"""Rules that merge the pseudo-gradients of several units into one.

A rule sees one row per unit and returns the merged row with the weight each unit had in it. Krum and the trimmed mean
are Flower's. To add a rule, write a function ``(updates, signals) -> (update, weights)`` and its row in :data:`RULES`.

Where q(u) is in natural parameters, a Δ_m that no rows can produce is left out, and rules that are no weighted mean
compare units in coordinates in which q(u) is N(0, I), without those that say next to nothing. There ``agreement`` reads
off Δ_m what the unit's rows say of u.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum
from numpy.typing import NDArray

from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, SHIFT, Statistics, from_natural
from fedgp_flower.methods.fedmgp.trust import semidefinite, sharing
from fedgp_flower.typing import Array, NamedArrays

AGREEMENT = "agreement"
CLIP_QUANTILE = 0.5
"""``norm-clipped`` shortens updates to this quantile of the round's norms."""
LINEAR = ("mean", "loss-weighted", "staleness-weighted")
"""Rules whose result is the same in any coordinates."""
LEAST_TOLD = 0.1
"""A unit that says less of u than this share of what the median unit says has no vote in the other rules."""
LEAST_VOTES = 3
"""What Krum needs at least."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a rule may know beside the updates."""

    shares: Array  # [K]  p_k, summing to 1
    log_likelihoods: Array  # [K]  expected log-likelihood per observation
    staleness: Array  # [K]  rounds since the unit sent its update
    trim: float = 0.2
    """Fraction cut from each end of every coordinate."""
    malicious: int = 0
    """Number of bad units to withstand."""
    select: int = 1
    """Units that multi-Krum averages."""

    def of(self, among: NDArray[np.bool_]) -> Signals:
        """Of some of the units; those left out are fewer bad ones to withstand."""
        return replace(
            self,
            shares=self.shares[among] / self.shares[among].sum(),
            log_likelihoods=self.log_likelihoods[among],
            staleness=self.staleness[among],
            malicious=max(0, self.malicious - int((~among).sum())),
        )


Rule: TypeAlias = Callable[[Array, Signals], tuple[Array, Array]]


def mean(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Σ_k p_k Δ_k (Chung and Al Kontar 2024, Eq. 15).  ``updates`` [K, P]."""
    return signals.shares @ updates, signals.shares


def loss_weighted(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Weights softmax_k(expected log-likelihood per observation): a unit whose data do not fit counts less."""
    weights = np.exp(signals.log_likelihoods - signals.log_likelihoods.max())
    weights = weights / weights.sum()
    return weights @ updates, weights


def norm_clipped(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Σ_k p_k min(1, c/‖Δ_k‖) Δ_k: no unit moves the result further than p_k c, a quantile of the norms.

    The weights are not normalised again, since that would give back the length that was cut.
    """
    norms = np.linalg.norm(updates, axis=1)
    limit = float(np.quantile(norms, CLIP_QUANTILE))
    weights = signals.shares * np.minimum(1.0, limit / np.maximum(norms, np.finfo(float).tiny))
    return weights @ updates, weights


def median(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Coordinate-wise median, as Flower's FedMedian computes it; ``shares`` do not matter."""
    return np.median(updates, axis=0), _kept(updates, (len(updates) - 1) // 2)


def trimmed_mean(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Coordinate-wise mean without the ⌊trim · K⌋ smallest and largest values; ``shares`` do not matter."""
    return trim_mean(updates, signals.trim), _kept(updates, int(signals.trim * len(updates)))


def _kept(updates: Array, cut: int) -> Array:
    """Mean over coordinates of each unit's weight when ``cut`` values go from each end."""
    count = len(updates)
    ranks = np.argsort(np.argsort(updates, axis=0, kind="stable"), axis=0, kind="stable")
    inside = (ranks >= cut) & (ranks < count - cut)
    weights: Array = inside.mean(axis=1) / (count - 2 * cut)
    return weights


def krum(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """The one update nearest to its K − f − 2 closest others (Blanchard et al. 2017)."""
    return multi_krum(updates, replace(signals, select=1))


def multi_krum(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """The mean of the ``select`` updates with the best Krum scores.

    Raises:
        ConfigError: there are fewer than 2f + 3 updates.
    """
    if len(updates) < least_sites("krum", signals.malicious):
        raise ConfigError(
            f"Krum withstands f = {signals.malicious} bad units among {2 * signals.malicious + 3} or more (2f + 3); "
            f"{len(updates)} replied. Lower `fedmgp.malicious` or wait for more units."
        )
    records = [RecordDict({"update": ArrayRecord({"update": FlowerArray(row)})}) for row in updates]
    chosen = select_multikrum(records, num_malicious_nodes=signals.malicious, num_nodes_to_select=signals.select)
    weights = signals.shares * np.array([float(any(record is c for c in chosen)) for record in records])
    weights /= weights.sum()
    return weights @ updates, weights


def staleness_weighted(updates: Array, signals: Signals) -> tuple[Array, Array]:
    """Weights ∝ p_k / (1 + t_k), normalised, for updates that are t_k rounds old."""
    weights = signals.shares / (1.0 + signals.staleness)
    weights = weights / weights.sum()
    return weights @ updates, weights


RULES: Mapping[str, Rule] = {
    "mean": mean,
    "loss-weighted": loss_weighted,
    "norm-clipped": norm_clipped,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "staleness-weighted": staleness_weighted,
}


def least_sites(rule: str, malicious: int) -> int:
    """Fewest units a rule can work with: Krum chooses among 2f + 3 or more."""
    return 2 * malicious + 3 if rule in {"krum", "multi-krum"} else 1


def aggregate(rule: str, updates: Sequence[Mapping[str, Array]], signals: Signals) -> tuple[NamedArrays, Array]:
    """Merge named updates of several units with a named rule; returns the merged arrays and each unit's weight."""
    names = sorted(updates[0])
    rows = np.stack([np.concatenate([np.ravel(u[name]) for name in names]) for u in updates])
    merged, weights = RULES[rule](rows, signals)
    ends = np.cumsum([np.size(updates[0][name]) for name in names])[:-1]
    parts = zip(names, np.split(merged, ends), strict=True)
    return {name: part.reshape(np.shape(updates[0][name])) for name, part in parts}, weights


# Natural parameters.


def merge_natural(
    rule: str, theta: Mapping[str, Array], updates: Mapping[str, NamedArrays], signals: Signals, moved: float
) -> tuple[NamedArrays, Array]:
    """Merge Δ of θ = {log S, λ, h}; ``moved`` = 1 − (1 − ρ)^E is how far E local steps of size ρ went.

    Raises:
        NumericsError: no rows can have produced any of the updates, or no units agree.
    """
    told = [site for site, update in updates.items() if possible(theta, update, moved)]
    if rule == "staleness-weighted":
        told = list(updates)  # Δ of an earlier θ cannot be judged by this one
    if not told:
        raise NumericsError("no unit sent what rows can produce")
    if rule not in (*LINEAR, AGREEMENT):
        told = telling(Frame.of(theta), {site: updates[site] for site in told}, moved)
    among, kept = np.array([site in told for site in updates]), [updates[site] for site in told]
    shares, signals = signals.shares[among], signals.of(among)
    if rule in LINEAR:
        merged, some = aggregate(rule, kept, signals)
    elif rule == AGREEMENT:
        merged, some = agreed(theta, kept, shares, signals, moved)
    else:
        frame = Frame.of(theta)
        seen, some = aggregate(rule, [frame.seen(update) for update in kept], signals)
        merged = frame.back({**seen, PRECISION: within_averages(seen[PRECISION], 1 - moved)})
    weights = np.zeros(len(among))
    weights[among] = some
    return merged, weights


def possible(theta: Mapping[str, Array], update: Mapping[str, Array], moved: float) -> bool:
    """Whether rows could have produced Δ_m: its G_m must be positive semi-definite for each latent function.

    A flipped or hundredfold Δ_m is not, wherever a unit knows less of some direction than the others.
    """
    parts = zip(*(theta[name] - update[name] / moved for name in (PRECISION, SHIFT)), strict=True)
    said = [Statistics(precision - np.eye(len(h)), h, 0.0, np.zeros(1)) for precision, h in parts]
    return bool(np.isfinite(update[SCALES]).all()) and all(map(semidefinite, said))


@dataclass(frozen=True, slots=True)
class Frame:
    """Coordinates v = Cᵀ(u − m) with C Cᵀ = λ, in which q(u) is N(0, I).

    Entries of λ and h differ by orders of magnitude and hang together: a coordinate-wise rule in them makes an error of
    the size of the largest eigenvalue in directions that are hardly known, and distances see nothing but the largest.
    Here a unit moves λ to C⁻¹λ_mC⁻ᵀ and the mean by C⁻¹(h_m − λ_m m), which vanishes on average at the optimum.
    """

    factor: Array  # [I, J, J]
    mean: Array  # [I, J]

    @staticmethod
    def of(theta: Mapping[str, Array]) -> Frame:
        """Of q(u) at θ."""
        factor = np.asarray(np.linalg.cholesky(theta[PRECISION]), np.float64)
        return Frame(factor, from_natural(theta[PRECISION], theta[SHIFT])[0])

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


def telling(frame: Frame, updates: Mapping[str, Mapping[str, Array]], moved: float) -> list[str]:
    """Units whose rows say something of u: tr C⁻¹G_mC⁻ᵀ of each latent is a share of the units' median at least.

    A unit of pure noise says next to nothing. A median that counts it moves towards knowing nothing, and Krum prefers
    what several such units agree on; the mean alone can take it for what it is, a unit without rows.
    """
    size = frame.factor.shape[1]
    nothing = np.square(np.linalg.solve(frame.factor, np.eye(size))).sum((1, 2))  # tr C⁻¹C⁻ᵀ
    known = {
        site: size - np.trace(frame.seen(update)[PRECISION], axis1=1, axis2=2) / moved - nothing
        for site, update in updates.items()
    }
    least = LEAST_TOLD * np.median(list(known.values()), axis=0)
    told = [site for site, trace in known.items() if (trace >= least).all()]
    return told if len(told) >= LEAST_VOTES else list(updates)


def within_averages(update: Array, least: float) -> Array:
    """Δ with eigenvalues of I − Δ, which was λ in coordinates of q(u), raised to ``least``.

    There every unit sends (1 − c) I and what its rows say, so that no average is below it. Medians of entries can be.
    """
    values, vectors = np.linalg.eigh(np.eye(update.shape[1]) - 0.5 * (update + update.transpose(0, 2, 1)))
    raised = (vectors * np.maximum(values, least)[:, None]) @ vectors.transpose(0, 2, 1)
    return np.asarray(np.eye(update.shape[1]) - raised, np.float64)


def agreed(
    theta: Mapping[str, Array], updates: Sequence[NamedArrays], shares: Array, signals: Signals, moved: float
) -> tuple[NamedArrays, Array]:
    """The mean, in which a unit that does not share g with most others counts as without rows: λ → I, h → 0.

    Raises:
        NumericsError: no units agree.
    """
    parts = zip(updates, shares.tolist(), strict=True)
    said = {str(index): statistics_of(theta, update, moved, p) for index, (update, p) in enumerate(parts)}
    kept = [int(index) for index in sharing(said)]
    if not kept:
        raise NumericsError("no units agree on g yet")
    nothing = {
        SCALES: np.mean([updates[index][SCALES] for index in kept], axis=0),
        PRECISION: moved * (theta[PRECISION] - np.eye(theta[PRECISION].shape[1])),
        SHIFT: moved * theta[SHIFT],
    }
    among = np.isin(np.arange(len(updates)), kept)
    counted = [update if keep else nothing for update, keep in zip(updates, among, strict=True)]
    return aggregate("mean", counted, signals)[0], signals.shares * among


def statistics_of(theta: Mapping[str, Array], update: Mapping[str, Array], moved: float, share: float) -> Statistics:
    """G_m and b_m of one latent function, a mean over the local steps, from Δ_m.

    With c = 1 − (1 − ρ)^E the steps led to λ_m = (1 − c) λ + c (I + G_m/p_m) and h_m = (1 − c) h + c b_m/p_m.
    """
    precision, shift = ((theta[name] - update[name] / moved)[0] for name in (PRECISION, SHIFT))
    return Statistics(share * (precision - np.eye(len(shift))), share * shift, 0.0, np.zeros(1))
