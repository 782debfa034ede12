"""FedMGP by pseudo-gradients in natural parameters; for Gaussian noise.

Algorithm 2 of Chung and Al Kontar, Technometrics 66 (2024), but what units step on and the server averages of q(u) are
its precision λ and shift h (:mod:`fedgp_flower.methods.fedmgp.natural`). Their average with weights p_m is a step on
the pooled bound, whereas averages of means and Cholesky factors drift away from its optimum. Rules, server's step,
sampling and stand-ins are those of :mod:`strategies.fedmgp`; but a Δ_m that no rows can produce is left out, rules that
are no weighted mean compare units in coordinates of q(u), without those that say next to nothing, and one more,
``agreement``, reads off Δ_m what the unit's rows say of u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fedmgp.latents import (
    FACTOR,
    MEAN,
    PRECISION,
    SCALES,
    SHIFT,
    Statistics,
    from_natural,
    to_natural,
)
from fedgp_flower.methods.fedmgp.messages import NaturalGradient, PseudoGradient
from fedgp_flower.methods.fedmgp.options import AGREEMENT, FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import semidefinite, sharing
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.typing import Array, NamedArrays
from strategies import fedmgp
from strategies.fedmgp import PseudoGradients, PseudoState
from strategies.server.aggregators import Signals, aggregate
from strategies.server.questions import Asking, Figures, Roster

LINEAR = ("mean", "loss-weighted", "staleness-weighted")
"""Rules whose result is the same in any coordinates."""
LEAST_TOLD = 0.1
"""A unit that says less of u than this share of what the median unit says has no vote in the other rules."""
LEAST_VOTES = 3
"""What Krum needs at least."""


@message()
class NaturalState(PseudoState):
    """θ = {log S, λ, h} instead of {log S, mean, factor}; all else is the same."""

    answer: ClassVar[type[PseudoGradient]] = NaturalGradient

    def as_factors(self) -> Mapping[str, ndarray]:
        """Mean and Cholesky factor of each q(u_i)."""
        mean, factors = from_natural(self.parameters[PRECISION], self.parameters[SHIFT])
        return {SCALES: self.parameters[SCALES], MEAN: mean, FACTOR: factors}

    def merged(
        self, updates: Mapping[str, NamedArrays], signals: Signals, options: FedMGPOptions
    ) -> tuple[NamedArrays, Array]:
        """The rule, among units whose Δ_m rows can produce; where it is no weighted mean, in coordinates of q(u).

        Raises:
            NumericsError: there is no such unit, or no units agree.
        """
        moved = 1 - (1 - options.natural_step) ** options.local_steps
        told = [site for site, own in updates.items() if possible(self.parameters, own, moved)]
        if options.aggregation == "staleness-weighted":
            told = list(updates)  # Δ of an earlier θ cannot be judged by this one
        if not told:
            raise NumericsError("no unit sent what rows can produce")
        if options.aggregation not in (*LINEAR, AGREEMENT):
            told = telling(Frame.of(self.parameters), {site: updates[site] for site in told}, moved)
        among = np.array([site in told for site in updates])
        shares = dict(zip(updates, signals.shares.tolist(), strict=True))
        updates, signals = {site: updates[site] for site in told}, narrowed(signals, among)
        if options.aggregation in LINEAR:
            own, weights = aggregate(options.aggregation, list(updates.values()), signals)
        elif options.aggregation == AGREEMENT:
            said = {site: statistics_of(self.parameters, own, moved, shares[site]) for site, own in updates.items()}
            own, weights = agreed(self.parameters, updates, said, signals, moved)
        else:
            frame = Frame.of(self.parameters)
            seen, weights = aggregate(options.aggregation, [frame.seen(one) for one in updates.values()], signals)
            own = frame.back({**seen, PRECISION: within_averages(seen[PRECISION], 1 - moved)})
        whole = np.zeros(len(among))
        whole[among] = weights
        return own, whole


def possible(theta: Mapping[str, Array], update: Mapping[str, Array], moved: float) -> bool:
    """Whether rows could have produced Δ_m: its G_m must be positive semi-definite for each latent function.

    A flipped or hundredfold Δ_m is not, wherever a unit knows less of some direction than the others.
    """
    parts = zip(*(theta[name] - update[name] / moved for name in (PRECISION, SHIFT)), strict=True)
    said = [Statistics(own - np.eye(len(h)), h, 0.0, np.zeros(1)) for own, h in parts]
    return bool(np.isfinite(update[SCALES]).all()) and all(map(semidefinite, said))


def telling(frame: Frame, updates: Mapping[str, Mapping[str, Array]], moved: float) -> list[str]:
    """Units whose rows say something of u: tr C⁻¹G_mC⁻ᵀ of each latent is a share of the units' median at least.

    A unit of pure noise says next to nothing. A median that counts it moves towards knowing nothing, and Krum prefers
    what several such units agree on; the mean alone can take it for what it is, a unit without rows.
    """
    size = frame.factor.shape[1]
    nothing = np.square(np.linalg.solve(frame.factor, np.eye(size))).sum((1, 2))  # tr C⁻¹C⁻ᵀ
    known = {
        site: size - np.trace(frame.seen(own)[PRECISION], axis1=1, axis2=2) / moved - nothing
        for site, own in updates.items()
    }
    least = LEAST_TOLD * np.median(list(known.values()), axis=0)
    told = [site for site, own in known.items() if (own >= least).all()]
    return told if len(told) >= LEAST_VOTES else list(updates)


def within_averages(update: Array, least: float) -> Array:
    """Δ with eigenvalues of I − Δ, which was λ in coordinates of q(u), raised to ``least``.

    There every unit sends (1 − c) I and what its rows say, so that no average is below it. Medians of entries can be.
    """
    values, vectors = np.linalg.eigh(np.eye(update.shape[1]) - 0.5 * (update + update.transpose(0, 2, 1)))
    raised = (vectors * np.maximum(values, least)[:, None]) @ vectors.transpose(0, 2, 1)
    return np.asarray(np.eye(update.shape[1]) - raised, np.float64)


def narrowed(signals: Signals, among: NDArray[np.bool_]) -> Signals:
    """Of some of the units; those left out are fewer bad ones to withstand."""
    log_likelihoods, staleness = (
        None if own is None else own[among] for own in (signals.log_likelihoods, signals.staleness)
    )
    malicious = max(0, signals.malicious - int((~among).sum()))
    shares = signals.shares[among] / signals.shares[among].sum()
    return replace(signals, shares=shares, log_likelihoods=log_likelihoods, staleness=staleness, malicious=malicious)


def agreed(
    theta: Mapping[str, Array],
    updates: Mapping[str, NamedArrays],
    said: Mapping[str, Statistics],
    signals: Signals,
    moved: float,
) -> tuple[NamedArrays, Array]:
    """The mean, in which a unit that does not share g with most others counts as without rows.

    Raises:
        NumericsError: no units agree.
    """
    kept = sharing(said)
    if not kept:
        raise NumericsError("no units agree on g yet")
    nothing = without_rows(theta, moved)
    nothing[SCALES] = np.mean([updates[site][SCALES] for site in kept], axis=0)
    counted = [own if site in kept else nothing for site, own in updates.items()]
    return aggregate("mean", counted, signals)[0], signals.shares * np.array([site in kept for site in updates])


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
        """What was seen, in those of u."""
        precision = self.factor @ update[PRECISION] @ self.factor.transpose(0, 2, 1)
        shift = np.einsum("iab,ib->ia", self.factor, update[SHIFT]) + np.einsum("iab,ib->ia", precision, self.mean)
        return {SCALES: update[SCALES], PRECISION: precision, SHIFT: shift}


def statistics_of(theta: Mapping[str, Array], update: Mapping[str, Array], moved: float, share: float) -> Statistics:
    """G_m and b_m of one latent function, a mean over the local steps, from Δ_m.

    With c = 1 − (1 − ρ)^E the steps led to λ_m = (1 − c) λ + c (I + G_m/p_m) and h_m = (1 − c) h + c b_m/p_m.
    """
    precision, shift = ((theta[name] - update[name] / moved)[0] for name in (PRECISION, SHIFT))
    return Statistics(share * (precision - np.eye(len(shift))), share * shift, 0.0, np.zeros(1))


def without_rows(theta: Mapping[str, Array], moved: float) -> NamedArrays:
    """Δ of a unit that has none: λ goes to I and h to 0."""
    return {
        SCALES: np.zeros_like(theta[SCALES]),
        PRECISION: moved * (theta[PRECISION] - np.eye(theta[PRECISION].shape[1])),
        SHIFT: moved * theta[SHIFT],
    }


def natural(state: PseudoState) -> NaturalState:
    """The start of Algorithm 2 in natural parameters."""
    given = state.parameters
    precision, shift = to_natural(given[FACTOR], given[MEAN])
    parameters = {SCALES: given[SCALES], PRECISION: precision, SHIFT: shift}
    velocity = {name: 0 * own for name, own in parameters.items()}
    return NaturalState(**{**vars(state), "parameters": parameters, "velocity": velocity})


class FedMGPNatural(PseudoGradients[NaturalState]):
    """Algorithm 2 in natural parameters, for Gaussian noise and mini-batches."""

    state_class = NaturalState
    implied: ClassVar[Mapping[str, Any]] = {"update": "pseudo-gradient", "parametrisation": "natural"}

    def phase(self, state: NaturalState) -> NaturalState:
        """All of it."""
        return state

    def initialise(self, roster: Roster) -> Asking[NaturalState]:
        """Pseudo-inputs from where inputs lie, lengthscales from their spacing, q(u) from one unit."""
        return natural((yield from fedmgp.initialise(roster, self.plan)))

    def one_round(self, state: NaturalState, roster: Roster) -> Asking[tuple[NaturalState, Figures]]:
        """Algorithm 2."""
        after, figures = yield from fedmgp.one_round(state, roster, self.plan)
        assert isinstance(after, NaturalState)
        return after, figures

    def finished(self, state: NaturalState) -> bool:
        """Whether the objective was flat and the learning rate has come down since."""
        return self.converged(state) and self.round >= self.plan.pseudo_rounds

    def public(self, state: NaturalState) -> NamedArrays:
        """θ."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: NaturalState, arrays: NamedArrays) -> NaturalState:
        """Another θ, the same memory."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})
