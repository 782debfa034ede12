"""Distributions of an observation around the function f, a file for each kind of target."""

from __future__ import annotations

from collections.abc import Callable

from fedgp_flower.gp.likelihoods.classes import Softmax
from fedgp_flower.gp.likelihoods.counts import Counts, OverdispersedCounts, Successes
from fedgp_flower.gp.likelihoods.grades import Grades
from fedgp_flower.gp.likelihoods.labels import Logit, Probit
from fedgp_flower.gp.likelihoods.numbers import GaussianNoise, HeavyTailed, Heteroscedastic, gaussian_likelihood
from fedgp_flower.gp.likelihoods.point import NONE, LearnedLikelihood, Noise, PointLikelihood
from fedgp_flower.gp.likelihoods.times import LogLogisticTimes, LogNormalTimes, WeibullTimes

__all__ = [
    "NONE",
    "GaussianNoise",
    "LearnedLikelihood",
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
"""By the name in ``model.likelihood``, those that need no noise to start from."""


OF_NUMBERS: dict[str, Callable[[float], PointLikelihood]] = {
    "gaussian": GaussianNoise,
    "student-t": HeavyTailed,
    "heteroscedastic": Heteroscedastic,
}
"""The others, which begin with a noise variance."""


def build_point_likelihood(name: str, *, noise: float = 0.1, nodes: int = 20) -> PointLikelihood:
    """The likelihood that ``model.likelihood`` names; ``noise`` is the initial σ² or squared scale."""
    return OF_NUMBERS[name](noise) if name in OF_NUMBERS else BY_NAME[name](nodes)


def canonical_likelihood(name: str, noise: float = 0.1) -> PointLikelihood:
    """The likelihood of ``model.likelihood`` with its canonical link: for two classes the logit."""
    return Logit() if name == "bernoulli" else build_point_likelihood(name, noise=noise)
