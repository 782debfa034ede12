"""Messages that all methods use, and the messages of the linear baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.messages import leaves, message
from fedgp_flower.privacy.disclosure import merged_cells
from fedgp_flower.scores import HISTOGRAM_SHAPES, REGRESSION_SUMS, TASK_SUMS, Scores
from fedgp_flower.typing import AnyShape, Array, Facts, NamedArrays

A = TypeVar("A")

MOVE = 10.0
"""Largest change that local steps make to a log parameter or a standardised input in a round: a factor of 22 000."""
OUTLIER = 300.0
"""A gradient or precision per row is refused above this multiple of the median over sites."""
LEAST_EIGENVALUE = 1e-3
"""Smallest eigenvalue of the correlations from which missing cells are imputed."""
DIRECTIONS = 4
"""Number of random directions along which a matrix is checked before it is added to a total."""
_directions = np.random.default_rng()


@message()
class Nothing:
    """No content: a request that needs no arrays, or the state of a method that keeps none."""


@dataclass(frozen=True, slots=True)
class Described:
    """Summary of the training rows of a site, or of all sites of a total. Unknown values are None, or NaN by column."""

    rows: int
    input_squares: ndarray | None = None
    """Σx² of each standardised input, [D]."""
    target_square: float | None = None
    """yᵀy."""
    input_means: ndarray | None = None
    reaches: ndarray | None = None
    """Largest distance of a row from these means, [D]: √(N − 1) times the site's sd (Samuelson's inequality)."""
    added: bool = False
    """Whether the answer is only added to a total. Checks that cost O(M³) then run on the total."""

    def rows_mismatch(self, name: str, count: float | ndarray) -> str | None:
        """Return why a number of rows contradicts the description, or None."""
        return None if count == self.rows else f"`{name}` is {float(count):.15g} rows; the site described {self.rows}"

    def squares_mismatch(self, name: str, found: ndarray, expected: ndarray | float | None) -> str | None:
        """Return why sums of squares contradict the description, or None; single precision is tolerated."""
        if expected is None:
            return None
        found = np.atleast_1d(found)
        expected = np.broadcast_to(expected, found.shape) if np.ndim(expected) == 0 else np.asarray(expected)
        if found.shape == expected.shape:
            known = ~np.isnan(expected)
            gap = np.abs(found[known] - expected[known]) - 1e-3 * expected[known]
            if not (gap > 1e-6 * self.rows).any():
                return None
        return f"`{name}` is not the sum of squares of the {self.rows} rows that the site described"


def oversized(
    answers: Mapping[str, A], rows: Mapping[str, float], what: str, size: Callable[[A], float]
) -> dict[str, str]:
    """Return the sites whose ``size`` per row far exceeds the median, with the reason; needs three sites or more."""
    sizes = {site: size(answer) / rows[site] for site, answer in answers.items()}
    median = float(np.median(list(sizes.values()))) if len(sizes) > 2 else 0.0
    return {
        site: f"its {what} per row is {size / median:.1e} times the median over sites"
        for site, size in sizes.items()
        if not size <= OUTLIER * median and median > 0
    }


def indefinite(name: str, matrices: Float[ndarray, "*C E E"]) -> str | None:
    """Return why matrices are not all positive semi-definite, or None; those of a dishonest site may be huge."""
    size = max(max_abs(matrices), 1e-300)
    wrong = matrices.size and not np.linalg.eigvalsh(matrices / size).min() >= -1e-6
    return f"`{name}` is not positive semi-definite" if wrong else None


def max_abs(*arrays: ndarray) -> float:
    """Return the largest absolute entry. A norm could overflow on the huge numbers of a dishonest site."""
    return max(float(np.abs(array).max(initial=0.0)) for array in arrays)


def outlying_variances(variances: Mapping[str, float]) -> dict[str, str]:
    """Return the sites whose Σ k(x, x) per row differs from that of most sites, with the reason.

    A stationary kernel has the same value at all sites. A linear part spreads the values, so only a site beyond ten
    times the median distance is returned.
    """
    if len(variances) < 3:
        return {}
    entries = np.array(list(variances.values()))
    median = float(np.median(entries))
    reach = max(1e-3 * median, 10 * float(np.median(np.abs(entries - median))))
    far = [site for site, entry in variances.items() if not abs(entry - median) <= reach]
    if len(far) > (len(variances) - 1) // 2:
        return {}
    return {
        site: f"`prior_variance` is {variances[site] / median:.3g} times that of most sites, per row" for site in far
    }


def quadratic_forms(matrix: ndarray, *vectors: ndarray) -> tuple[ndarray, ndarray]:
    """Return unit vectors v [M, V], random and along ``vectors``, and vᵀ A v of each [V]."""
    directions = np.vstack([_directions.standard_normal((DIRECTIONS, len(matrix))), *vectors])
    units = directions.T / np.maximum(np.linalg.norm(directions, axis=1), np.finfo(float).tiny)
    return units, np.einsum("mv,mv->v", units, matrix @ units)


@message("query.shape", summand=True, counts="D")
class Shape:
    """Histograms and products of a site's standardised inputs."""

    histogram: Int[ndarray, "D B"] = leaves("counts of each input in fixed bins")
    products: Float[ndarray, "D D"] = leaves("XᵀX of the standardised inputs")
    beside: Float[ndarray, ""] = leaves("sum of the second target column, such as exposure; without one, rows")

    def coarse(self, least: int) -> Shape:
        """Merge histogram cells with fewer than ``least`` rows."""
        return replace(self, histogram=np.stack([merged_cells(entry, least) for entry in self.histogram]))

    def refusal(self, described: Described) -> str | None:
        """Return why the message contradicts the description of the rows, or None."""
        if (self.histogram.sum(axis=1) != described.rows).any():
            return f"`histogram` does not count the {described.rows} rows that the site described"
        if reason := described.squares_mismatch("products", np.diag(self.products), described.input_squares):
            return reason
        if (self.histogram < 0).any() or not self.beside >= 0:
            return "`histogram` or `beside` has negative counts"
        if self._outside_range(described):
            return f"`histogram` has rows outside the range of the {described.rows} rows that the site described"
        eigenvalues = np.linalg.eigvalsh(self.products / 2 + self.products.T / 2)
        slack = 1e-6 * max(float(eigenvalues[-1]), 1e-300)
        if np.abs(self.products - self.products.T).max() > slack or eigenvalues[0] < -slack:
            return "`products` is not XᵀX of any rows"
        return None

    def _outside_range(self, described: Described) -> bool:
        """Return whether the histogram has rows outside the described range; sums of squares cannot tell x from −x."""
        if described.input_means is None or described.reaches is None:
            return False
        edges = np.concatenate([[-np.inf], INPUT_EDGES[1:-1], [np.inf]])
        slack = 1e-3 * (1 + np.abs(described.input_means))
        low, high = (described.input_means + sign * (described.reaches + slack) for sign in (-1, 1))
        beyond = (edges[1:] < low[:, None]) | (edges[:-1] > high[:, None])  # False where the range is unknown (NaN)
        return self.histogram.shape == beyond.shape and bool((beyond & (self.histogram > 0)).any())


@message()
class TargetTrials:
    """Powers of a transformation, or scales, to try for the target, and centres, which keep squares small."""

    tried: Float[ndarray, " J"] = leaves("powers or scales to try")
    centres: Float[ndarray, " J"] = leaves("for each, the centre of the (transformed) target")


@message("query.target", summand=True, counts="J J 1")
class TargetMoments:
    """Sums over training rows of t − c, with t = g(y) and centre c, for each power of a transformation."""

    first: Float[ndarray, " J"] = leaves("Σ (t − c), t = g(y) the transformed target, for each power tried")
    second: Float[ndarray, " J"] = leaves("Σ (t − c)²")
    slopes: Float[ndarray, " J"] = leaves("Σ log g'(y)")
    count: Float[ndarray, ""] = leaves("number of rows")

    def refusal(self, described: Described) -> str | None:
        """Return why the message contradicts the number of rows, or None."""
        if (self.second * described.rows < self.first**2 * (1 - 1e-9)).any():
            return "`second` is less than `first`² / N"
        return described.rows_mismatch("count", self.count)


@message("query.robust", summand=True, counts="J J J")
class RobustMoments:
    """Sums for the location and scale of the targets under a Cauchy likelihood; no row adds more than 2 to a sum."""

    weights: Float[ndarray, " J"] = leaves("Σ w, w = 2 / (1 + z²), z = (y − c)/s, for each scale")
    first: Float[ndarray, " J"] = leaves("Σ w z")
    second: Float[ndarray, " J"] = leaves("Σ w z²")
    count: Float[ndarray, ""] = leaves("number of rows")

    def refusal(self, described: Described) -> str | None:
        """Return why the sums are impossible for this many rows, or None: w (1 + z²) = 2 and |z| ≤ ½ (1 + z²)."""
        rows, slack = described.rows, 1e-6 * described.rows
        impossible = (np.abs(self.weights + self.second - 2 * rows) > slack) | (np.abs(self.first) > rows + slack)
        return described.rows_mismatch("count", self.count) or ("no rows have these sums" if impossible.any() else None)


@message("query.column_sums", summand=True, counts="columns levels")
class ColumnSums:
    """Sums and counts of each column, from which means follow. They replace a site's description under masks."""

    sums: Float[ndarray, " columns"] = leaves("Σ x of each numeric column")
    sizes: Float[ndarray, " columns"] = leaves("Σ |x|")
    missing: Float[ndarray, " cells"] = leaves("missing cells of each numeric column, then of each column of text")
    levels: Float[ndarray, " levels"] = leaves("rows of each level of each column of text")
    dropped: Float[ndarray, ""] = leaves("rows left out for a missing cell")


@message()
class Centres:
    """Centres and scales for :class:`ColumnSquares`."""

    centre: Float[ndarray, " columns"] = leaves("means over all sites")
    scale: Float[ndarray, " columns"] = leaves("mean sizes over all sites")


@message("query.column_squares", summand=True, counts="columns")
class ColumnSquares:
    """Sums of residuals and squares of each column, from which standard deviations follow."""

    residual: Float[ndarray, " columns"] = leaves("Σ (x − c)/s of each numeric column")
    squares: Float[ndarray, " columns"] = leaves("Σ (x − c)²/s²")


@message("query.cell_products", summand=True, counts="E E")
class CellProducts:
    """Products of pairs of standardised inputs u and v, over the rows that have both cells."""

    products: Float[ndarray, "E E"] = leaves("Σ u v over rows with both cells", symmetric=True)
    counts: Float[ndarray, "E E"] = leaves("rows with both cells", symmetric=True)

    def covariance(self) -> Float[ndarray, "E E"]:
        """Return the covariance of the inputs, with correlations [Σ u v / sd sd' + E 1(u = v)] / (n + E).

        E rows of independent inputs are added, so that few rows give small correlations. Correlations of pairs with
        different rows may have negative eigenvalues; those below :data:`LEAST_EIGENVALUE` are raised to it.
        """
        size = len(self.counts)
        sd = np.sqrt(np.diag(self.products) / np.maximum(np.diag(self.counts), 1))
        sd = np.where(sd > 0, sd, 1.0)
        values, vectors = np.linalg.eigh(
            (self.products / np.outer(sd, sd) + size * np.eye(size)) / (self.counts + size)
        )
        correlations = vectors * np.maximum(values, LEAST_EIGENVALUE) @ vectors.T
        sd /= np.sqrt(np.diag(correlations))
        return np.asarray(correlations * np.outer(sd, sd))

    def refusal(self, described: Described) -> str | None:
        """Return why no rows have these products and counts, or None."""
        squares = np.diag(self.products)
        largest = np.sqrt(np.outer(squares, squares)) * (1 + 1e-9) + 1e-9
        if (self.counts < 0).any() or (self.counts > described.rows).any() or (np.abs(self.products) > largest).any():
            return f"`products` and `counts` are not those of {described.rows} rows"
        return None

    @staticmethod
    def outliers(answers: Mapping[str, CellProducts], rows: Mapping[str, float]) -> dict[str, str]:
        """Return the sites whose products per row far exceed the median, with the reason."""
        return oversized(answers, rows, "products", lambda answer: max_abs(answer.products))


@message()
class Points:
    """Number of inducing points of the pooled baseline."""

    count: int = leaves("number of inducing points of the run; 0 without any")


@message()
class Parameters:
    """Named parameters in unconstrained coordinates, such as ``kernel.log_lengthscale`` or ``inducing.locations``."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")


@message()
class Step:
    """Request to take local steps from these parameters."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    learning_rate: float = leaves("learning rate of this round")
    reach: float = leaves("largest change by an honest site's steps", default=MOVE)


@message("train", counts="values")
class Stepped:
    """Parameters after local steps, which federated averaging averages."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates", as_sent=True, within="reach")
    objective: float = leaves("mean over rows of the local objective after the steps")

    @staticmethod
    def of(request: Step, arrays: Mapping[str, np.ndarray], objective: float) -> Stepped:
        """Return the parameters after the steps, in the order and shapes of the request."""
        return Stepped({name: arrays[name].reshape(sent.shape) for name, sent in request.values.items()}, objective)

    def weighted(self, rows: int) -> WeightedStep:
        """Return the parameters weighted by the number of rows."""
        values = {name: np.asarray(rows * array) for name, array in self.values.items()}
        return WeightedStep(values, np.array(rows * self.objective), np.array(float(rows)))


@message("train.weighted", summand=True, counts="values")
class WeightedStep:
    """Parameters after local steps, times the number of rows: the summand of a weighted mean."""

    values: Mapping[str, AnyShape] = leaves("N times the parameters after local steps", as_sent=True)
    objective: Float[ndarray, ""] = leaves("N times the mean over rows of the local objective")
    rows: Float[ndarray, ""] = leaves("N, number of rows")

    def mean(self) -> Stepped:
        """Return the weighted mean of a total."""
        values = {name: np.asarray(array / float(self.rows)) for name, array in self.values.items()}
        return Stepped(values, float(self.objective / self.rows))


@message("query.score_sums", summand=True)
class ScoreSums:
    """Scores of held-out rows, see :mod:`fedgp_flower.scores`. Scores of other kinds of task are zero."""

    regression: Float[ndarray, " 8"] = leaves("rows, squared and absolute errors, NLL, CRPS, rows inside intervals")
    classification: Float[ndarray, " 4"] = leaves("rows, correct rows, NLL, Brier score")
    times: Float[ndarray, " 9"] = leaves(
        "rows, events, NLL, Brier score, pairs in the predicted order, pairs, rows inside intervals"
    )
    pit: Float[ndarray, " 20"] = leaves("histogram of the PIT")
    reliability: Float[ndarray, "10 3"] = leaves("rows, probabilities and outcomes by predicted probability")
    ranks: Float[ndarray, "80 2"] = leaves("rows of each class by predicted log odds")
    survival: Float[ndarray, "3 10 3"] = leaves("rows, predicted and observed survival at three times, by predicted")

    @property
    def known(self) -> dict[str, float]:
        """The nonzero sums by name, those of regression, classification or times."""
        kinds = zip(TASK_SUMS, (self.regression, self.classification, self.times), strict=True)
        return next((dict(zip(names, map(float, sums), strict=True)) for names, sums in kinds if sums[0] > 0), {})

    @property
    def rows(self) -> float:
        """Number of held-out rows."""
        return self.known.get("count", 0.0)

    @property
    def nll(self) -> float:
        """Summed negative log likelihood of these rows, in nats."""
        return self.known.get("nll", 0.0)

    @property
    def histograms(self) -> NamedArrays:
        """Histograms by name; those of other kinds of task are zero."""
        return dict(zip(HISTOGRAM_SHAPES, (self.pit, self.reliability, self.ranks, self.survival), strict=True))

    def coarse(self, least: int) -> ScoreSums:
        """Merge histogram cells with fewer than ``least`` rows."""
        merged = Scores({}, self.histograms).coarse(least).arrays
        return replace(self, **{name.removeprefix("evaluation."): array for name, array in merged.items()})

    def refusal(self, described: Described) -> str | None:
        """Return why these cannot be scores of any rows, or None."""
        sums = np.concatenate(
            [np.delete(self.regression, 3), np.delete(self.classification, 2), np.delete(self.times, 2)]
        )
        if not (sums >= 0).all():  # the NLL is excluded: a density above one makes it negative
            return "a sum of scores is negative"
        counted = max(*self.regression[5:], self.classification[1], self.times[1], *self.times[6:])
        too_many = counted > self.rows + 1e-6 or self.times[4] > self.times[5]
        return "a score counts more rows or pairs than there are" if too_many else None

    @classmethod
    def of(cls, scores: Scores) -> Self:
        """Build the message from the scores of a site."""
        parts = [
            np.array([scores.sums[name] for name in names] if set(names) <= set(scores.sums) else np.zeros(len(names)))
            for names in TASK_SUMS
        ]
        for name, shape in HISTOGRAM_SHAPES.items():
            parts.append(np.asarray(scores.arrays.get(name, np.zeros(shape)), np.float64).reshape(shape))
        return cls(*parts)

    @classmethod
    def from_metrics(cls, metrics: Facts) -> Self:
        """Read the metrics of a reply to ``evaluate``. Raise ProtocolError if they are not scores."""
        names = next((names for names in TASK_SUMS if set(names) <= metrics.keys()), REGRESSION_SUMS)
        if missing := [name for name in names if np.ndim(metrics.get(name, ()))]:
            raise ProtocolError(f"scores missing: {', '.join(missing)}")
        sent = {name: np.array(metrics[name]) for name in HISTOGRAM_SHAPES if name in metrics}
        for name, array in sent.items():
            if array.shape != (size := math.prod(HISTOGRAM_SHAPES[name]),):
                raise ProtocolError(f"`{name}`: expected {size} numbers")
        found = cls.of(Scores({name: float(metrics[name]) for name in names}, sent))
        if reason := found.refusal(Described(0)):
            raise ProtocolError(reason)
        return found


@message("query.follow_up", summand=True, counts="B")
class TimeCounts:
    """Numbers of training rows and of events by follow-up time."""

    counts: Float[ndarray, "B 2"] = leaves("rows and observed events by bin of time")
    rounded: Float[ndarray, " U"] = leaves("rows, if all times of the site are multiples of a unit, else 0")

    def coarse(self, least: int) -> TimeCounts:
        """Merge cells with fewer than ``least`` rows."""
        return replace(self, counts=merged_cells(self.counts, least))

    def refusal(self, described: Described) -> str | None:
        """Return why these cannot be counts of the described rows, or None."""
        rows, events = self.counts.T
        wrong = (events < 0).any() or (events > rows).any() or rows.sum() != described.rows
        wrong = wrong or (self.rounded < 0).any() or (self.rounded > described.rows).any()
        return f"`counts` are not counts of {described.rows} rows and the events among them" if wrong else None


@message("query.life_table", summand=True)
class LifeTableScoreSums(ScoreSums):
    """Scores of the Kaplan–Meier curve on a site's held-out rows."""


@message("query.time_regression", summand=True, counts="Q")
class TimeSums:
    """Log likelihood of a site's times, z = τ log t − X̃ᵀv, and its derivatives with respect to (v, τ)."""

    likelihood: Float[ndarray, ""] = leaves("Σ log p(t), or of censored rows log P(T > t)")
    gradient: Float[ndarray, " Q"] = leaves("first derivatives")
    information: Float[ndarray, "Q Q"] = leaves("minus the second derivatives", symmetric=True)


@message("query.count_regression", summand=True, counts="Q")
class CountSums:
    """Log likelihood of a site's counts and its derivatives with respect to w: log rate or log odds X̃w, mean μ."""

    likelihood: Float[ndarray, ""] = leaves("Σ log p(y)")
    gradient: Float[ndarray, " Q"] = leaves("first derivatives")
    information: Float[ndarray, "Q Q"] = leaves("minus the second derivatives", symmetric=True)
    excess: Float[ndarray, " 2"] = leaves("Σ (y − μ)² − μ and Σ μ²")


@message("query.local_scores", summand=True)
class LocalScoreSums(ScoreSums):
    """Scores of a GP fitted to each site's rows alone, on its held-out rows."""


@message("query.compared_scores", summand=True)
class ComparedScoreSums(LocalScoreSums):
    """Local scores with counts of sites, for runs under masks, where the server sees no site's scores."""

    sites: Float[ndarray, " 2"] = leaves("1 if rows are held out, and 1 if that GP predicts them much better")


@message("query.pooled", public=True)
class PooledScoreSums(ScoreSums):
    """Simulation only: scores of one model fitted to all rows."""


@message("query.boosted", public=True)
class BoostedScoreSums(ScoreSums):
    """Simulation only: scores of gradient boosting fitted to all rows."""


@message("query.confusion", summand=True)
class Confusion:
    """Confusion matrix: held-out rows by observed class and most probable class."""

    counts: Float[ndarray, "C C"] = leaves("held-out rows by observed and most probable class")

    @staticmethod
    def of(probabilities: Array, label: Array) -> Confusion:
        """Count from probabilities [N, C] and classes [N]."""
        size = probabilities.shape[1]
        cells = size * label.astype(int) + probabilities.argmax(axis=1)
        return Confusion(np.bincount(cells, minlength=size**2).reshape(size, size).astype(float))

    def num_parameters(self) -> int:
        """Return the number of cells."""
        return self.counts.size

    def coarse(self, least: int) -> Confusion:
        """Set cells with fewer than ``least`` rows to zero."""
        return replace(self, counts=np.where(self.counts < least, 0.0, self.counts))

    def refusal(self, described: Described) -> str | None:
        """Return why these cannot be counts, or None."""
        return "`counts` has negative numbers of rows" if (self.counts < 0).any() else None


@message("query.predictions")
class HeldOutRows:
    """Simulation only: held-out rows with their predictions."""

    values: Mapping[str, AnyShape] = leaves("held-out targets and predictions, row by row")


@message("query.moments", summand=True, counts="P")
class Moments:
    """Sufficient statistics of linear regression; X̃ = (1, X), P = 1 + D, standardised like y."""

    gram: Float[ndarray, "P P"] = leaves("X̃ᵀX̃, X̃ the standardised inputs with a column of ones", symmetric=True)
    products: Float[ndarray, " P"] = leaves("X̃ᵀy")
    square: Float[ndarray, ""] = leaves("yᵀy")

    def refusal(self, described: Described) -> str | None:
        """Return why the message contradicts the description of the rows, or None."""
        reason = described.rows_mismatch("gram[0, 0]", round(float(self.gram[0, 0])))
        return reason or described.squares_mismatch("square", self.square, described.target_square)


@message()
class OneArray:
    """A request that is one array: coefficients of a linear predictor, ends of bins of time, or places of inputs.

    Coefficients are for standardised inputs: intercept and weights of each class but the first [R, P], whose log odds
    are 0; v and τ [Q] of times; or w [Q] of counts, the intercept first. Ends are those of all bins but the last [E].
    Places are common values [D, V], or anchors [C, D], distributed like the inputs of all sites.
    """

    values: AnyShape = leaves("coefficients, ends of bins, or places, from sums")


@message("query.logistic", summand=True, counts="Q")
class LogisticSums:
    """Log likelihood of a site's classes, p = softmax(0, X̃w), and its derivatives with respect to w; Q = R P."""

    likelihood: Float[ndarray, ""] = leaves("Σ log p_y")
    gradient: Float[ndarray, "R P"] = leaves("(1[y = c] − p_c)ᵀ X̃ of each class but the first")
    information: Float[ndarray, "Q Q"] = leaves("X̃ᵀ diag(1[c = d] p_c − p_c p_d) X̃ of each pair", symmetric=True)


@message()
class LinearPredictor:
    """f(x) = intercept + (x − centre)ᵀ weights, in standardised coordinates. Its meaning depends on the likelihood.

    Gaussian or Student-t: y ~ N(f, variance + ‖spread (x − centre)‖²). Bernoulli: P(y = 1) = σ(f). Poisson: a log rate
    ~ N(f, variance). Negative binomial: log rate f, dispersion ``variance``. Binomial: log odds f. Times: log t =
    f + σ ε with σ² = variance. Classes: P(y = c) = softmax(0, classes (1, x))_c.
    """

    centre: Float[ndarray, " D"] = leaves("means of the training inputs")
    weights: Float[ndarray, " D"] = leaves("regression weights; zero for the mean of the target")
    intercept: float = leaves("prediction at the centre")
    variance: float = leaves("variance of a new row at the centre")
    spread: Float[ndarray, "D D"] | None = leaves("S, with SᵀS the covariance of the weights", default=None)
    classes: Float[ndarray, "R P"] | None = leaves("intercept and weights of each class but the first", default=None)


@message("query.linear_scores", summand=True)
class LinearScoreSums(ScoreSums):
    """Scores of a linear predictor on a site's held-out rows."""


def with_ones(inputs: ndarray) -> ndarray:
    """Return X̃ = (1, X), [N, P]."""
    return np.column_stack([np.ones(len(inputs)), inputs])
