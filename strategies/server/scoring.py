"""The evaluation of a run and its baselines.

Sites send sums over their held-out rows in original units (see :mod:`fedgp_flower.scores`); their total weighs all rows
equally. If the target is y = location + scale · t, densities obey p(y) = p(t) / scale, so in standardised units

    −log p(t) = −log p(y) − log(scale),

while RMSE, MAE and CRPS have the units of y and are divided by ``scale``; coverage does not change.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
from flwr.app import Message

from fedgp_flower import shared_messages as wire
from fedgp_flower.errors import ProtocolError
from fedgp_flower.messages import add, kind_of
from fedgp_flower.options import CLASSIFICATION, MULTICLASS, SECOND_COLUMN
from fedgp_flower.scores import LEVELS, RANK_BINS, RANK_REACH, much_better, shares_of
from fedgp_flower.typing import Array, Facts, Json, NamedArrays
from strategies.server.network import Check, by_site, finite_arrays, natural_order, numbers_of
from strategies.server.questions import Asking, Each, Figures, Predicted, Summed, Synchronous, Total
from strategies.server.session import Asked, Session

logger = logging.getLogger("fedgp")

PENALTIES = 10.0 ** np.arange(-6, 6.25, 0.25)
"""λ: the prior has the information of λ rows."""
NEWTON_STEPS = 30
LONGEST = 2.0
"""Largest change of a coefficient of counts in a step."""
LEAST_DISPERSION = 1e-6
"""Dispersion of negative binomial counts that vary no more than Poisson counts."""
TOLERANCE = 1e-10
"""Newton decrement, in nats, at which the search for the mode ends."""
HALVES = (
    "; runs of each half of the sites, with three or more in each, show which half sends false sums; with fewer sites,"
    " `privacy.secure-aggregation` = false names the site that contradicts the others"
)
ALL = ""
"""Key, in place of a site id, of the total of all sites: under masks, or of a model of all rows in one place."""
POOLED = (wire.PooledScoreSums, wire.BoostedScoreSums)
"""Scores of models of all rows in one place: one site of a simulation fits them and scores all held-out rows."""


class Evaluation(TypedDict):
    """Figures of held-out rows in original and standardised units, figures of each site, and histograms."""

    test: Figures
    test_standardised: Figures
    per_site: list[Json]
    calibration: dict[str, list[Any]]


class Scoring:
    """The scores of one run; sites score their held-out rows themselves."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.predicted = Predicted(wire.Nothing())
        self.asked: Asked | None = None
        """The question of the latest evaluation; None if each site answers with Flower's metrics."""
        self.evaluation: Evaluation | None = None
        self.local_only: Facts | None = None
        self.warnings: list[str] = []
        """Warnings on sites that predict better from their own rows."""

    @property
    def check(self) -> Check:
        """The check of replies to the latest evaluation."""
        return finite_arrays if self.asked is None else self.asked.refusal

    def ask(self, total: type[wire.ScoreSums], predicted: Predicted) -> list[Message]:
        """Return messages that ask for the scores of a prediction, or of a model that each site fits itself."""
        if type(predicted) is not Predicted:
            raise ProtocolError(f"`predictive` returned {type(predicted).__name__}, expected Predicted")
        session, self.predicted, self.asked = self.session, predicted, None
        if total is wire.ScoreSums and session.masking is None:
            return [session.message(site, "evaluate", predicted.at(site)) for site in session.network.sites()]
        if isinstance(predicted.request, Mapping):
            session.require_clear(type(next(iter(predicted.request.values()))))
        self.asked = session.prepare(self._question(total, predicted.request))
        return self.asked.messages

    def _question(self, total: type[wire.ScoreSums], request: object) -> Synchronous:
        """Return a question for a total under masks, else for each site's scores; one site fits pooled models."""
        sites = self.session.roster().all_sites
        if issubclass(total, POOLED):
            sites = tuple(self.session.network.healthy()[:1])
        elif self.session.masking is not None:
            return Total(total, request, sites)
        return Each(total, dict.fromkeys(sites, request), retries=1)

    def evaluate(self, replies: Iterable[Message]) -> Evaluation | None:
        """Return the figures of the replies to an evaluation; None if no site scored a row."""
        scores = self._scores_in_metrics(replies) if self.asked is None else self.session.read(self.asked, replies)
        found = self._figures(scores)
        self.evaluation = found or self.evaluation
        return found

    def local_baseline(self) -> Json | None:
        """Return the scores of local models; warn if they are much better than those of the latest evaluation."""
        request, labels = self.predicted.request, self.session.preparation.labels
        masked = self.session.masking is not None and not isinstance(request, wire.Nothing)
        logger.info("comparison: local scores")
        kind: type[wire.LocalScoreSums] = wire.ComparedScoreSums if masked else wire.LocalScoreSums
        found = self.session.ask(self._question(kind, request if masked else wire.Nothing()))
        if masked:
            sites, better = (0.0, 0.0) if found.total is None else found.total.sites
            self._warn(round(sites), round(better))
        elif not isinstance(found, Summed) and self.evaluation is not None:
            nll = {row["site"]: row["nll"] for row in self.evaluation["per_site"]}
            pairs = {site: (sums.nll, nll[site] * sums.rows, sums.rows) for site, sums in found.items() if site in nll}
            named = [labels.get(site, site) for site, pair in pairs.items() if much_better(*pair)]
            self._warn(len(pairs), len(named), f" ({', '.join(named[:5])}{', …' * (len(named) > 5)})")
        return as_baseline(self._figures(found))

    def _warn(self, sites: int, better: int, named: str = "") -> None:
        """Warn if local models are much better at some sites; if at most sites, name possible causes."""
        if better < 1:
            return
        warning = f"{better} of {sites} sites{named} predict held-out rows much better from their own rows"
        warning += "" if named else "; the sites' logs say which, the server does not know"
        if better > sites / 2:
            warning += ". The model may suit no site, the sums of some site may be false, or the sites follow no common"
            warning += " relation"
            remedy = self.session.config.options.where_sites_differ
            warning += f": {remedy}" if remedy else ""
            warning += "" if named else HALVES
        self.warnings.append(warning)
        logger.warning("%s", warning)

    def baseline(self, total: type[wire.ScoreSums], request: object) -> Json | None:
        """Return the scores of a comparison; None if no site has any."""
        logger.info("comparison: %s", kind_of(total).removeprefix("query.").replace("_", " "))
        return as_baseline(self._figures(self.session.ask(self._question(total, request))))

    def _scores_in_metrics(self, replies: Iterable[Message]) -> dict[str, wire.ScoreSums]:
        """Return the scores in the metrics of replies; a site with invalid scores fails."""
        found: dict[str, wire.ScoreSums] = {}
        for site, reply in by_site(replies).items():
            try:
                found[site] = wire.ScoreSums.from_metrics(numbers_of(reply))
            except ProtocolError as error:
                self.session.network.fail(site, str(error))
        return found

    def _figures(self, found: Summed[wire.ScoreSums] | Mapping[str, wire.ScoreSums]) -> Evaluation | None:
        """Return the figures of sites, or of all together without a row per site; None if without rows."""
        scores = {ALL: found.total} if isinstance(found, Summed) else found
        if any(isinstance(sums, POOLED) for sums in scores.values()):
            scores = {ALL: add(scores.values())}
        scores = {site: sums for site, sums in scores.items() if sums is not None and sums.rows}
        kinds = Counter(tuple(sums.known) for sums in scores.values()).most_common(1)
        for site in [site for site, sums in scores.items() if tuple(sums.known) != kinds[0][0]]:
            self.session.network.fail(site, "its scores are for another task than those of most sites")
            del scores[site]
        if not scores:
            return None
        combined = combine(scores, self.session.preparation.target_scale)
        if ALL in scores:
            combined["per_site"] = []
        return combined

    def pooled_baselines(self) -> tuple[Json | None, Json | None]:
        """Return the scores of a GP and of gradient boosting, both fitted to all rows; only in a simulation."""
        points = wire.Points(int(self.predicted.details.get("num_inducing") or 0))
        return self.baseline(wire.PooledScoreSums, points), self.baseline(wire.BoostedScoreSums, wire.Nothing())

    def simple_baselines(self) -> tuple[Json | None, Json | None]:
        """Return the scores of the mean of the target and of a regression; None for other tasks."""
        session, preparation = self.session, self.session.preparation
        likelihood = session.config.model.likelihood
        if SECOND_COLUMN.get(likelihood) == "event":
            sites, middle = session.roster().all_sites, preparation.training_target["mean"]
            line = session.run(time_regression(sites, preparation.num_inputs, middle))
            return self.baseline(wire.LifeTableScoreSums, wire.Nothing()), self._scored(line)
        other_task = self.evaluation is None or ("brier" in self.evaluation["test"]) != (likelihood in CLASSIFICATION)
        if other_task:
            return None, None
        inputs, rows = preparation.num_inputs, sum(preparation.rows.values())
        sites = session.roster().all_sites
        if likelihood in SECOND_COLUMN:
            if (formula := session.config.design) is not None and formula.offset:  # the exposure is no column
                return None, None
            mean = session.run(count_regression(sites, likelihood, inputs, 0))
            line = session.run(count_regression(sites, likelihood, inputs, inputs))
        else:
            scale = float(preparation.arrays["target.mean"]), float(preparation.arrays["target.scale"])
            target = {"mean": scale[0], "sd": scale[1]} if preparation.transformed else preparation.training_target
            mean = constant(target, rows, inputs, likelihood, scale)
            line = session.run(linear_fit(sites, likelihood, inputs, len(preparation.classes)))
        return self._scored(mean), self._scored(line)

    def _scored(self, model: wire.LinearPredictor | None) -> Json | None:
        return None if model is None else self.baseline(wire.LinearScoreSums, model)

    def predictions(self, predicts: bool) -> dict[str, NamedArrays]:
        """Return held-out rows of simulated sites with their predictions, if the configuration keeps them."""
        session = self.session
        allowed = session.preparation.simulated and session.masking is None
        if not (predicts and allowed and session.config.keep_predictions):
            return {}
        scored = [] if self.evaluation is None else [row["site"] for row in self.evaluation["per_site"]]
        requests = {site: self.predicted.at(site) for site in scored}
        found: dict[str, wire.HeldOutRows] = session.ask(Each(wire.HeldOutRows, requests, retries=1))
        return {site: dict(answer.values) for site, answer in found.items() if answer.values}


def combine(scores: Mapping[str, wire.ScoreSums], target_scale: float) -> Evaluation:
    """Return the figures of the sites' scores; ``target_scale`` is the divisor of the standardised target."""
    sites = sorted(scores, key=natural_order)
    total = add(scores[site] for site in sites)
    histograms = {name.removeprefix("evaluation."): array for name, array in total.histograms.items()}
    known = {name: array.tolist() for name, array in histograms.items() if array.any()}
    test = _figures(total) | ranking_figures(known.get("ranks"))
    standardised = dict(test)
    if "rmse" in test:  # probabilities of classes have no units
        standardised |= {name: test[name] / target_scale for name in ("rmse", "mae", "crps")}
        standardised["nll"] -= math.log(target_scale)
    rows = [{"site": site, "num_examples": int(scores[site].rows), **_figures(scores[site])} for site in sites]
    return Evaluation(test=test, test_standardised=standardised, per_site=rows, calibration=known)


def as_baseline(evaluation: Evaluation | None) -> Json | None:
    """Return the entry of a baseline in ``metrics.json``: the test figures and a row per site."""
    return None if evaluation is None else {**evaluation["test"], "per_site": evaluation["per_site"]}


def ranking_figures(counts: Sequence[Sequence[float]] | None) -> Figures:
    """Return AUC and b of logit P(y = 1) = a + b · log odds, from counts of rows by log odds and class [bins, 2]."""
    if counts is None:
        return {}
    zeros, ones = np.asarray(counts, dtype=np.float64).T
    controls, cases = float(zeros.sum()), float(ones.sum())
    both = controls > 0 and cases > 0
    slope, error = _slope(zeros, ones) if both else (math.nan, math.nan)
    return {
        "auc": float(ones @ (np.cumsum(zeros) - zeros / 2)) / (controls * cases) if both else math.nan,
        "calibration_slope": slope,
        "calibration_slope_se": error,
        "base_rate": cases / (controls + cases) if controls + cases else math.nan,
    }


def _slope(zeros: Array, ones: Array) -> tuple[float, float]:
    """Return the slope of a logistic regression and its standard error; NaN if it diverges (separated classes)."""
    width = 2 * RANK_REACH / RANK_BINS
    design = np.column_stack([np.ones(RANK_BINS), (np.arange(RANK_BINS) + 0.5) * width - RANK_REACH])
    weights = np.array([0.0, 1.0])
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ weights))
        information = design.T * ((zeros + ones) * p * (1 - p)) @ design
        if np.linalg.cond(information) > 1e10:
            break
        step = np.linalg.solve(information, design.T @ (ones - (zeros + ones) * p))
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            return float(weights[1]), math.sqrt(np.linalg.solve(information, [0.0, 1.0])[1])
    return math.nan, math.nan


def with_skill(figures: Figures, mean: Facts) -> Figures:
    """Return figures and skill over predicting the mean: 1 − S / S_mean for squared error, CRPS and Brier score."""
    powers = {"r2": ("rmse", 2), "crps_skill": ("crps", 1), "brier_skill": ("brier", 1), "ibs_skill": ("ibs", 1)}
    gains = {
        name: 1 - (figures[score] / mean[score]) ** power if mean[score] else math.nan
        for name, (score, power) in powers.items()
        if score in figures and score in mean
    }
    return figures | gains


def _figures(scores: wire.ScoreSums) -> Figures:
    known = scores.known
    mean = {name: value / scores.rows for name, value in known.items()}
    if "correct" in known:
        return {"accuracy": mean["correct"], "nll": mean["nll"], "brier": mean["brier"]}
    coverage = {f"coverage_{level}": mean[f"inside-{level}"] for level in LEVELS}
    if "comparable" in known:
        concordance = known["concordant"] / known["comparable"] if known["comparable"] else math.nan
        rows, predicted, observed = scores.survival.sum(axis=1).T  # at the quartiles of time
        found = {"concordance": concordance, "nll": mean["nll"], "ibs": mean["ibs"], "events": mean["events"]}
        return found | {"survival_error": float(np.abs(predicted - observed).max() / rows[0])} | coverage
    found = {"rmse": math.sqrt(mean["squared-error"]), "mae": mean["absolute-error"]}
    return {**found, "nll": mean["nll"], "crps": mean["crps"], **coverage}


def constant(
    target: Mapping[str, float], rows: int, inputs: int, likelihood: str, scale: tuple[float, float]
) -> wire.LinearPredictor:
    """Return the predictor without inputs: mean and sd of the training targets, or the class shares."""
    if likelihood in MULTICLASS:
        shares = shares_of(target)
        intercepts = np.log(shares[1:] / shares[0])[:, None]
        return wire.LinearPredictor(
            np.zeros(inputs), np.zeros(inputs), 0.0, 0.0, None, intercepts * np.eye(1, inputs + 1)
        )
    if likelihood == "bernoulli":
        intercept, variance = math.log(target["share"] / (1 - target["share"])), 0.0
    else:
        intercept = (target["mean"] - scale[0]) / scale[1]
        variance = (target["sd"] / scale[1]) ** 2 * (rows + 1) / (rows - 1)  # of a new row about the mean of N rows
    return wire.LinearPredictor(np.zeros(inputs), np.zeros(inputs), intercept, variance)


def linear_fit(
    sites: tuple[str, ...], likelihood: str, inputs: int, classes: int = 2
) -> Asking[wire.LinearPredictor | None]:
    """Return linear regression for numbers, logistic regression for classes; None without answers.

    The weights of logistic regression are at the mode of log p(y | w) − Σ ‖w_c − w̄‖² over C classes; for two classes
    this is −½‖w_1 − w_0‖². w_0 = 0.
    """
    if likelihood in CLASSIFICATION:
        shape = classes - 1, 1 + inputs
        across = 2 * (np.eye(classes - 1) - 1 / classes)
        penalty = np.asarray(np.kron(across, np.diag([0.0, *np.ones(inputs)])), dtype=np.float64)
        sums = Total(wire.LogisticSums, None, sites, sizes={"R": classes - 1, "Q": len(penalty)})
        weights, _ = yield from _mode(sums, np.zeros(shape), penalty)
        if weights is None:
            return None
        if likelihood in MULTICLASS:
            return wire.LinearPredictor(np.zeros(inputs), np.zeros(inputs), 0.0, 0.0, None, weights)
        return wire.LinearPredictor(np.zeros(inputs), weights[0, 1:], float(weights[0, 0]), 0.0)
    summed: Summed[wire.Moments] = yield Total(wire.Moments, wire.Nothing(), sites)
    return None if summed.total is None or summed.total.gram[0, 0] < 2 else ridge(summed.total)


def ridge(sums: wire.Moments) -> wire.LinearPredictor:
    """Return Bayesian linear regression y = b + (X − x̄)w + ε, w ~ N(0, σ²/λ I), from sums, with a flat prior on b.

    With the scatter X_cᵀX_c = V diag(d) Vᵀ and z = VᵀX_cᵀy, after b and w are integrated out,

        −2 log p(y | λ, σ²) = (N − 1) log σ² + Σᵢ log(1 + dᵢ/λ) + (y_cᵀy_c − Σᵢ zᵢ²/(dᵢ + λ)) / σ² + const

    (MacKay 1992, in the eigenbasis). σ² maximises it; λ is the best of a grid, which makes it robust to rounding.
    """
    rows = float(sums.gram[0, 0])
    centre, middle = sums.gram[0, 1:] / rows, float(sums.products[0]) / rows
    roots, vectors = np.linalg.eigh(sums.gram[1:, 1:] - rows * np.outer(centre, centre))
    roots = np.maximum(roots, 0.0)  # eigenvalues of a scatter are negative only by rounding
    projected = vectors.T @ (sums.products[1:] - rows * middle * centre)
    total = float(sums.square) - rows * middle**2
    residual = total - (projected**2 / (roots + PENALTIES[:, None])).sum(axis=1)
    residual = np.maximum(residual, rows * np.finfo(float).eps * total)  # rounding error, if all rows lie on a plane
    chosen = int(np.argmin((rows - 1) * np.log(residual) + np.log1p(roots / PENALTIES[:, None]).sum(axis=1)))
    shrunk = roots + PENALTIES[chosen]
    noise = float(residual[chosen]) / (rows - 1)
    spread = vectors.T * np.sqrt(noise / shrunk)[:, None]
    return wire.LinearPredictor(centre, vectors @ (projected / shrunk), middle, noise * (1 + 1 / rows), spread)


def time_regression(sites: tuple[str, ...], inputs: int, mean: float) -> Asking[wire.LinearPredictor | None]:
    """Return log t = w₀ + xᵀw + σ ε with the noise of the likelihood; the search starts at the time ``mean``.

    The coefficients are at the mode of log p(t | v, τ) − ½‖v‖² with τ = 1/σ and v = wτ.
    """
    penalty = np.diag([0.0, *np.ones(inputs), 0.0])
    sums = Total(wire.TimeSums, None, sites, sizes={"Q": len(penalty)})
    start = np.array([math.log(mean), *np.zeros(inputs), 1.0])
    at, _ = yield from _mode(sums, start, penalty, 1.0, positive=True)
    if at is None:
        return None
    weights = at[:-1] / at[-1]
    return wire.LinearPredictor(np.zeros(inputs), weights[1:], float(weights[0]), float(at[-1] ** -2))


def count_regression(
    sites: tuple[str, ...], likelihood: str, inputs: int, used: int
) -> Asking[wire.LinearPredictor | None]:
    """Return Poisson or binomial regression on the first ``used`` inputs; without any it predicts the mean.

    The coefficients w are at the mode of log p(y | w) − ½‖w‖² without the intercept in the norm. Counts have the
    dispersion α = Σ [(y − μ)² − μ] / Σ μ², or 0 if that is negative. For ``poisson``, a normal log rate gives counts
    var y = μ + αμ²; the log rate has the variance v = log(1 + α) and the mean log μ − ½v.
    """
    penalty = np.diag([0.0, *np.ones(used)])
    sums = Total(wire.CountSums, None, sites, sizes={"Q": len(penalty)})
    at, found = yield from _mode(sums, np.zeros(len(penalty)), penalty, LONGEST)
    if at is None or found is None:
        return None
    surplus, squares = found.excess.tolist()
    weights, variance, shift = np.r_[at[1:], np.zeros(inputs - used)], 0.0, 0.0
    if likelihood == "poisson":
        variance = math.log1p(max(surplus / squares, 0.0))
        shift = -variance / 2
    elif likelihood == "negative-binomial":
        variance = max(surplus / squares, LEAST_DISPERSION)
    return wire.LinearPredictor(np.zeros(inputs), weights, float(at[0]) + shift, variance)


def _mode(
    question: Total[Any], at: Array, penalty: Array, longest: float = math.inf, *, positive: bool = False
) -> Asking[tuple[Array | None, Any]]:
    """Return the mode w of log likelihood − ½ wᵀPw by Newton's method from ``at``, and the sums there; None without.

    A step that lowers the value, or makes a last entry negative that must be ``positive``, is halved; no entry of a
    step exceeds ``longest``.
    """
    step, value, found = np.zeros(at.size), -math.inf, None
    for _ in range(NEWTON_STEPS):
        trial = at.ravel() + step
        if trial[-1] > 0 or not positive:
            summed: Summed[Any] = yield replace(question, request=wire.OneArray(trial.reshape(at.shape)))
            if (sums := summed.total) is None:
                return None, None
            trial_value = float(sums.likelihood - 0.5 * trial @ penalty @ trial)
            if trial_value >= value:
                at, value, found = trial.reshape(at.shape), trial_value, sums
                gradient = sums.gradient.ravel() - penalty @ trial
                step = np.linalg.solve(sums.information + penalty, gradient)
                if gradient @ step < TOLERANCE:
                    break
                step = step / max(1.0, float(np.abs(step).max()) / longest)
                continue
        step = step / 2
    return at, found
