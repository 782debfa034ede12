"""Sections of the configuration that server and clients of every method read, as frozen, validated records."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedgp_flower.errors import ConfigError

if TYPE_CHECKING:
    from fedgp_flower.config import CoreConfig

R = TypeVar("R")
Value: TypeAlias = bool | int | float | str
FlatConfig: TypeAlias = Mapping[str, Value]

PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]


STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-"))
"""Unknown keys are errors; keys have dashes for underscores."""


class Section(BaseModel):
    """One table of the configuration."""

    model_config = STRICT


@cache
def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field, parsed from the source; slow, so only documentation uses it."""
    found: dict[str, str] = {}
    for parent in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        for field, below in itertools.pairwise(getattr(tree, "body", ())):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.replace("``", "`").split())
    return found


BASIC = "basic"
"""Mark of fields that many runs set; help and documentation show these keys first."""

KERNELS = ("rbf", "matern32", "matern52", "l1", "periodic", "linear")
"""Names of the built-in kernels in a kernel expression."""
AUTO, DEFAULT_KERNEL = "auto", "rbf"
"""Value of ``method`` and ``kernel`` that chooses by the likelihood, and the kernel of most methods."""
KERNEL_GROUP = "fedgp_flower.kernels"
"""Entry points of packages with kernels; see :func:`fedgp_flower.gp.kernels.build_kernel`."""


def with_installed(built_in: Mapping[str, R], kind: type[R], noun: str, group: str) -> dict[str, R]:
    """Return the built-in rows of a table by name, then those of installed packages: the entry points of a group.

    Raise ConfigError for one that cannot be loaded, is of another kind or has the name of another row.
    """
    rows = dict(built_in)
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        package = f" of package {entry.dist.name}" if entry.dist else ""
        label = f"{noun} {entry.name!r}{package} (entry point {entry.value})"
        if entry.name in rows:
            raise ConfigError(f"{label}: another {noun} has that name already; rename or uninstall one")
        try:
            row = entry.load()
        except Exception as error:
            raise ConfigError(f"{label} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(row, kind):
            raise ConfigError(f"{label}: expected a `{kind.__module__}.{kind.__name__}`, got {type(row).__name__}")
        rows[entry.name] = row
    return rows


def kernel_names() -> tuple[str, ...]:
    """Return the names of built-in kernels and of those in installed packages, without importing them."""
    return (*KERNELS, *sorted(name for name in entry_points(group=KERNEL_GROUP).names if name.isidentifier()))


def kernel_tree(expression: str) -> ast.expr:
    """Parse a sum or product of :func:`kernel_names`, or ``warp`` or ``steps`` of one; ``auto`` means ``rbf``.

    Raise ValueError for anything else.
    """
    try:
        expression = DEFAULT_KERNEL if expression == AUTO else expression
        tree = ast.parse(expression.strip(), mode="eval").body
        inner = tree
        for name in ("steps", "warp"):
            match inner:
                case ast.Call(func=ast.Name(found), args=[own], keywords=[]) if found == name:
                    inner = own
        nodes = list(ast.walk(inner))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        known = names <= {*KERNELS} or names <= {*kernel_names()}
        if known and all(isinstance(node, ast.BinOp | ast.Add | ast.Mult | ast.Name | ast.Load) for node in nodes):
            return tree
    except SyntaxError:
        pass
    raise ValueError(f"expected a sum or product of {', '.join(kernel_names())}; example: 'warp(rbf + l1)'")


SECOND_COLUMN = {
    "poisson": "exposure",
    "negative-binomial": "exposure",
    "binomial": "trials",
    **dict.fromkeys(("time-to-event", "log-logistic", "log-normal"), "event"),
}
"""Content of the second target column, by likelihood."""
FIRST = {"event": "time", "exposure": "count", "trials": "successes"}
"""Content of the target column beside a second one."""
MULTICLASS = frozenset({"categorical", "ordinal"})
"""Likelihoods of classes 0, 1, 2, …"""
CLASSIFICATION = MULTICLASS | {"bernoulli"}
MOST_CLASSES = 20
MAX_LEVELS = 50
"""Most levels of a column of text, at a site and over all sites: a column with more is an identifier."""
REAL_VALUED = frozenset({"gaussian", "student-t", "heteroscedastic"})
"""Likelihoods of a real number with units; the target is standardised."""
WITH_NOISE = frozenset({"heteroscedastic", "ordinal"})
"""Likelihoods of a function of the target and one of its noise."""
POINT_LIKELIHOODS = frozenset({"gaussian", "bernoulli", "poisson", "student-t"})
"""Likelihoods of one function, without a second target column."""


class ModelSection(Section):
    """The Gaussian process."""

    kernel: Annotated[str, BASIC] = AUTO
    """Sums and products of ``rbf``, ``matern32``, ``matern52``, ``l1`` (Matérn-1/2 of each input, for steps),
    ``linear``, ``periodic`` and those of packages; ``warp(…)`` learns a scale of each input, and ``steps(…)``
    (``svgp``) a step at each common value. ``auto``: ``rbf``; ``warp(rbf + l1)`` for ``sgpr``,
    ``steps(rbf)`` for ``svgp``, ``matern52`` for ``hierarchical-gp``, ``rbf + linear`` for several classes."""
    ard: bool = True
    """A lengthscale for each input."""
    num_inducing: Annotated[Count, BASIC] = 0
    """M; 0: 300 for ``sgpr``, ``sgpr-private`` and ``svgp`` (at most a third of the rows), 50 otherwise."""
    max_megabytes: Count = 0
    """``sgpr``: largest message when inducing points are added after training. M points need M² / 2 numbers, twice that
    under masks; 64 MB hold 4000. 0: 64, or none added if ``num-inducing`` is set."""
    likelihood: Annotated[
        Literal[
            "gaussian",
            "bernoulli",
            "poisson",
            "student-t",
            "heteroscedastic",
            "categorical",
            "negative-binomial",
            "binomial",
            "time-to-event",
            "log-logistic",
            "log-normal",
            "ordinal",
        ],
        BASIC,
    ] = "gaussian"
    """Kind of target: a number; two classes; counts; a number with outliers; a number whose noise is a second
    Gaussian process of the inputs (``heteroscedastic``); 2 to 20 classes;
    overdispersed counts; successes among trials; times to an event, some censored:
    Weibull (``time-to-event``), log-logistic or log-normal; ordered grades (``ordinal``)."""
    lengthscale: Positive = 1.0
    """Initial lengthscale, and period of ``periodic``, in standardised units."""
    outputscale: Annotated[Positive, Field(exclude=True)] = 1.0
    """Initial variance of the GP, in squared standardised units of the target. No key: targets are standardised."""
    noise: Positive = 0.1
    """Initial noise variance, in standardised units."""
    jitter: Annotated[NonNegative, Field(exclude=True)] = 1e-8
    """Added to the diagonal of K_zz, relative to the prior variance. No key: a saved posterior has its value."""

    @property
    def has_steps(self) -> bool:
        """Whether the kernel is ``steps(…)``."""
        return ast.unparse(kernel_tree(self.kernel)).startswith("steps(")

    @field_validator("kernel")
    @classmethod
    def _known_kernel(cls, expression: str) -> str:
        kernel_tree(expression)
        return expression


class OptimizerSection(Section):
    """The optimiser a site uses for its local steps."""

    name: Literal["sgd", "adam", "lbfgs"] = "adam"
    """Optimiser of the local steps."""
    learning_rate: Positive = 0.1
    """Learning rate in the first round."""
    decay: Fraction = 1.0
    """Factor of the learning rate from round to round."""
    steps: PositiveInt = 3
    """Local steps of a site in a round."""
    batch_size: Count = 0
    """Rows of a mini-batch; 0: all rows."""

    def unread(self, *read: str) -> str:
        """Return the keys that differ from their default although the method reads only the fields ``read``."""
        default = OptimizerSection()
        names = [name for name in type(self).model_fields if name not in read]
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        return ", ".join(f"`optimizer.{name.replace('_', '-')}`" for name in changed)


class AveragingSection(Section):
    """How the server averages parameters; read by ``fsgp``, ``fgpr`` and ``deep-kernel``."""

    fraction: Fraction = 1.0
    """Share of the sites that take part in a round."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi", "fedmedian", "fedtrimmedavg"] = "fedavg"
    """Flower's rule that combines parameters; the last two are robust to a few dishonest sites."""


class MethodOptions(BaseModel):
    """The keys of a method; methods with the same keys share the class."""

    model_config = STRICT
    table: ClassVar[str] = ""
    """Prefix of the keys, for example ``sgpr``; empty for a method without options."""
    budgets: ClassVar[frozenset[str]] = frozenset()
    """Keys that limit the length of training; they may change when a run is resumed."""
    variant_key: ClassVar[str] = ""
    """The key that chooses among :attr:`variants`, such as ``model``."""
    variants: ClassVar[Mapping[str, str]] = {}
    """Values of this key with a description each."""
    foreign: ClassVar[frozenset[str]] = frozenset()
    """Fields from installed packages."""
    shared: ClassVar[type[MethodOptions] | None] = None
    """Class of keys that the method shares with another method."""
    likelihoods: ClassVar[frozenset[str]] = frozenset({"gaussian"})
    """Supported likelihoods."""
    takes_steps: ClassVar[bool] = False
    """Whether ``model.kernel`` may be ``steps(…)``."""
    reads_formula: ClassVar[bool] = False
    """Whether the method reads ``formula``."""
    fewer_parameters: ClassVar[str] = "fewer `model.num-inducing`"
    """What makes messages of the method smaller, for a warning."""
    where_sites_differ: ClassVar[str] = ""
    """What to try if sites follow no common relation, for a warning."""
    accounted: ClassVar[bool] = False
    """Whether the method can add the noise for ``privacy.epsilon``."""
    default_kernel: ClassVar[str] = DEFAULT_KERNEL
    """The method's default of ``model.kernel``."""
    default_megabytes: ClassVar[int] = 0
    """The method's default of ``model.max-megabytes``; 0 adds no inducing points after training."""
    classes: Annotated[int, Field(exclude=True)] = 0
    """Number of agreed classes; 0 for a number."""

    @property
    def default_likelihood(self) -> str:
        """The method's default likelihood."""
        return "gaussian"

    @property
    def hyperprior(self) -> str:
        """Name in :data:`fedgp_flower.clients.baselines.PRIORS`, also for the pooled fit."""
        return "none"

    @property
    def default_rounds(self) -> int:
        """The method's default of ``num-server-rounds``."""
        return 100

    @property
    def default_inducing(self) -> int:
        """The method's default of ``model.num-inducing``."""
        return 50

    def kernel_for(self, likelihood: str) -> str:
        """Return the default kernel for a likelihood."""
        return self.default_kernel

    def of_classes(self, count: int) -> Self:
        """Return these options with the agreed number of classes."""
        return self.model_copy(update={"classes": count})

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError if the method cannot work with these core keys."""

    def check_shared(self, shared: MethodOptions) -> None:
        """Raise ConfigError if the method cannot work with these :attr:`shared` keys."""


class ReferenceOptions(MethodOptions):
    """The baselines: they have no keys."""

    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS
