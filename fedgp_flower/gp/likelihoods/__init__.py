"""Likelihoods p(y | f); each module handles one kind of target."""

from __future__ import annotations

from collections.abc import Callable

from fedgp_flower.gp.likelihoods.classes import Softmax
from fedgp_flower.gp.likelihoods.counts import Counts, OverdispersedCounts, Successes
from fedgp_flower.gp.likelihoods.grades import Grades
from fedgp_flower.gp.likelihoods.labels import Logit, Probit
from fedgp_flower.gp.likelihoods.numbers import GaussianNoise, HeavyTailed, Heteroscedastic, gaussian_likelihood
from fedgp_flower.gp.likelihoods.point import NONE, Noise, PointLikelihood
from fedgp_flower.gp.likelihoods.times import LogLogisticTimes, LogNormalTimes, WeibullTimes

__all__ = [
    "NONE",
    "GaussianNoise",
    "Logit",
    "Noise",
    "PointLikelihood",
    "build_point_likelihood",
    "canonical_likelihood",
    "gaussian_likelihood",
]


BY_NAME: dict[str, type[PointLikelihood]] = {
    "bernoulli": Probit,
    "poisson": Counts,
    "negative-binomial": OverdispersedCounts,
    "binomial": Successes,
    "time-to-event": WeibullTimes,
    "log-logistic": LogLogisticTimes,
    "log-normal": LogNormalTimes,
    "ordinal": Grades,
    "categorical": Softmax,
}
"""Likelihoods by ``model.likelihood``."""


OF_NUMBERS: dict[str, Callable[[float], PointLikelihood]] = {
    "gaussian": GaussianNoise,
    "student-t": HeavyTailed,
    "heteroscedastic": Heteroscedastic,
}
"""Likelihoods by ``model.likelihood``, built from an initial noise variance."""


def build_point_likelihood(name: str, *, noise: float = 0.1) -> PointLikelihood:
    """The likelihood with a name of ``model.likelihood``; KeyError for another name.

    ``noise`` is the initial noise variance σ² or squared scale, in standardised units.
    """
    return OF_NUMBERS[name](noise) if name in OF_NUMBERS else BY_NAME[name]()


def canonical_likelihood(name: str, noise: float = 0.1) -> PointLikelihood:
    """As :func:`build_point_likelihood`, but with the logit instead of the probit for two classes."""
    return Logit() if name == "bernoulli" else build_point_likelihood(name, noise=noise)
