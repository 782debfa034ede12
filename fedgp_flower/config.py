"""The run configuration: flat dotted keys, validated once, the same on the server and at every site.

Keys are written with dashes and dots (``model.num-inducing``) in ``pyproject.toml``, ``--run-config`` and TOML files. A
method brings its own table (``fsgp.objective``) as a subclass of :class:`MethodOptions`; the registry knows
them all.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedgp_flower.errors import ConfigError

Value: TypeAlias = bool | int | float | str
FlatConfig: TypeAlias = Mapping[str, Value]

PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """One table of the configuration: frozen, strict, no unknown keys, dashes for underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=_dashed, populate_by_name=False)


class PartitionSection(Section):
    """How a data set is dealt to simulated sites; read only by the partitioners that need the key."""

    column: str = ""
    """Column to partition by (``natural``, ``dirichlet``, ``pathological``); empty means the target."""
    alpha: Positive = 0.5
    """Concentration of ``dirichlet``: small is uneven."""
    bins: PositiveInt = 10
    """Quantile bins a numeric column is cut into before ``dirichlet`` or ``pathological``."""
    classes_per_site: PositiveInt = 2
    ratio: Annotated[float, Field(ge=1)] = 10.0
    """Rows of the largest site over rows of the smallest, for ``sizes``."""
    min_rows: PositiveInt = 10
    """A natural group with fewer rows is left out; ``dirichlet`` deals until every site has as many."""


KERNELS = ("rbf", "matern32", "matern52", "periodic", "linear")
"""What a kernel expression is made of."""


def kernel_tree(expression: str) -> ast.expr:
    """The syntax tree of a kernel expression: a sum or product of :data:`KERNELS`.

    Raises:
        ValueError: if it is anything else.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        tree = None
    if tree is None or not _is_kernel(tree):
        raise ValueError(f"expected a sum or product of {', '.join(KERNELS)}; example: 'matern52 + linear'")
    return tree


def _is_kernel(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _is_kernel(node.left) and _is_kernel(node.right)
    return isinstance(node, ast.Name) and node.id in KERNELS


class ModelSection(Section):
    """The Gaussian process."""

    kernel: str = "rbf"
    """``rbf``, ``matern32``, ``matern52``, ``linear``, ``periodic``, and sums and products: ``matern52 + linear``."""
    ard: bool = True
    """A lengthscale for each input."""
    num_inducing: PositiveInt = 50
    """M."""
    inducing_init: Literal["normal", "copula"] = "copula"
    likelihood: Literal["gaussian", "bernoulli", "poisson", "student-t"] = "gaussian"
    lengthscale: Positive = 1.0
    outputscale: Positive = 1.0
    noise: Positive = 0.1
    """Initial noise variance, in units of the standardised target."""
    jitter: NonNegative = 1e-8
    """Added to the diagonal of K_zz, relative to the prior variance."""

    @field_validator("kernel")
    @classmethod
    def _known_kernel(cls, expression: str) -> str:
        kernel_tree(expression)
        return expression


class OptimizerSection(Section):
    """The optimiser a site uses for its local steps."""

    name: Literal["sgd", "adam", "lbfgs"] = "adam"
    learning_rate: Positive = 0.1
    decay: Fraction = 1.0
    """The learning rate of round t is ``learning-rate * decay**(t-1)``."""
    steps: PositiveInt = 3
    batch_size: Count = 0
    """Rows of a mini-batch; 0 takes all rows."""

    def unread(self, *read: str) -> str:
        """The keys with another value than their default that are not among the fields ``read``, for an error."""
        usual = OptimizerSection()
        names = [name for name in type(self).model_fields if name not in read]
        changed = [name for name in names if getattr(self, name) != getattr(usual, name)]
        return ", ".join(f"`optimizer.{name.replace('_', '-')}`" for name in changed)


class BaselineSection(Section):
    """Comparisons computed beside the method, shown in ``metrics.json`` and the report."""

    local_only: bool = True
    pooled: bool = True
    """Simulation only: one process sees the rows of all sites. Ignored where sites are real machines."""
    max_evaluations: PositiveInt = 200
    """L-BFGS evaluations of each baseline."""


class CoreConfig(Section):
    """The keys every method shares."""

    method: str = "fsgp"
    dataset: str = "diabetes"
    data_dir: str = ""
    """Folder that ``dataset`` names live in; empty means the environment variable ``FEDGP_DATA``."""
    split: Annotated[int, Field(ge=-1)] = -1
    """Standard split to use (its test rows are the pooled held-out set); -1: every site holds out its own rows."""
    target: str = ""
    """Target column; empty means ``y``, else the last column."""
    features: str = ""
    """Comma-separated feature columns; empty means all but the target."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    constant_columns: Literal["error", "keep"] = "error"
    """A feature that is constant in a site's own file; simulated partitions always keep it."""
    standardise: bool = True
    partitioner: Literal[
        "iid", "linear", "square", "exponential", "dirichlet", "pathological", "natural", "sizes", "kmeans", "blocks"
    ] = "iid"
    num_server_rounds: Count = 100
    seed: Count = 0
    output_dir: str = "results"
    name: str = ""
    """Name of the run's folder; empty means method-dataset-timestamp."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    precision: Literal["float64", "float32"] = "float64"
    threads: PositiveInt = 1
    """Threads of linear algebra at a site. One thread makes simulation engines agree to the last digit."""
    evaluate_every: Count = 10
    """Rounds between evaluations; 0 evaluates only after the last round."""
    sites: Count = 0
    """Sites the server waits for before it starts; 0 waits for all simulated sites, or for ``min-sites`` real ones."""
    min_sites: PositiveInt = 2
    """Usable sites below which the run stops."""
    wait_seconds: Positive = 120.0
    """Seconds the server waits for sites; then it starts with those that are there."""
    round_timeout: Positive = 3600.0
    """Seconds after which a missing reply counts as that site's failure."""
    max_failures: PositiveInt = 3
    """Consecutive failures after which a site is left out of training until it answers an evaluation or query again."""
    keep_predictions: bool = True
    """Keep held-out predictions row by row in the run folder. Simulation only: real sites never send rows."""
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    baselines: BaselineSection = BaselineSection()

    @model_validator(mode="after")
    def _combinations(self) -> CoreConfig:
        if self.partitioner == "natural" and not self.partition.column:
            raise ValueError(
                "`partitioner` = 'natural' needs `partition.column`, the column that names the site of a row"
            )
        return self


class MethodOptions(Section):
    """A method's own table; methods that share a table share the class."""

    table: ClassVar[str] = ""
    """Prefix of the keys, for example ``fsgp``; empty for a method without options."""

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError where the method cannot work with these core keys."""


class RunConfig(CoreConfig):
    """Core keys plus the table of the chosen method as ``options``."""

    options: MethodOptions = MethodOptions()

    def flat(self) -> dict[str, Value]:
        """Every key with its resolved value, the method's table under the method's own prefix."""
        out = dict(_flatten(self.model_dump(by_alias=True, exclude={"options"})))
        return out | dict(_flatten({self.options.table: self.options.model_dump(by_alias=True)}))

    def digest(self) -> str:
        """Short hash of all keys that shape the result; equal digests mean interchangeable site state."""
        ignored = {"resume", "output-dir", "name", "num-server-rounds", "round-timeout", "wait-seconds"}
        keep = {k: v for k, v in sorted(self.flat().items()) if k not in ignored}
        return hashlib.sha256(json.dumps(keep).encode()).hexdigest()[:16]


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten(nested: Mapping[str, Any]) -> dict[str, Value]:
    """Nested TOML tables as flat dotted keys: ``{"model": {"kernel": "rbf"}}`` becomes ``{"model.kernel": "rbf"}``."""
    return dict(_flatten(nested))


def nest(flat: FlatConfig) -> dict[str, Any]:
    """Flat dotted keys as nested tables, the inverse of :func:`flatten`."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, leaf = key.split(".")
        node = out
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return out


def defaults(options: Iterable[type[MethodOptions]]) -> dict[str, Value]:
    """Every key a run knows, with its default: the content of ``[tool.flwr.app.config]``."""
    out = dict(_flatten(CoreConfig().model_dump(by_alias=True)))
    for section in options:
        if section.table:
            out |= dict(_flatten({section.table: section().model_dump(by_alias=True)}))
    return out


def parse(flat: FlatConfig, options: Mapping[str, type[MethodOptions]]) -> RunConfig:
    """Validate flat keys; ``options`` maps every method to the class of its table.

    Raises:
        ConfigError: naming every wrong key, its value and what is allowed.
    """
    known = defaults(options.values())
    unknown = [key for key in flat if key not in known]
    if unknown:
        raise ConfigError("\n".join(_unknown(key, known) for key in unknown))
    method = flat.get("method", known["method"])
    if method not in options:
        raise ConfigError(f"`method` = {method!r} is not a method; allowed: {', '.join(sorted(options))}")
    nested = nest({k: _number(v, known[k]) for k, v in flat.items()})
    tables = {section.table: section for section in options.values() if section.table}
    chosen = {name: _validated(section, nested.pop(name, {}), f"{name}.") for name, section in tables.items()}
    core = _validated(CoreConfig, nested, "")
    own = chosen.get(options[str(method)].table, MethodOptions())
    own.check(core)
    return RunConfig.model_construct(**{name: getattr(core, name) for name in CoreConfig.model_fields}, options=own)


def _number(value: Value, default: Value) -> Value:
    """TOML writes 1 for 1.0; everything else keeps its type and is judged strictly."""
    return float(value) if isinstance(default, float) and type(value) is int else value


def _unknown(key: str, known: Mapping[str, Value]) -> str:
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(f'`{k}`' for k in close)}?" if close else f"known keys: {', '.join(sorted(known))}"
    )
    return f"unknown configuration key `{key}`; {hint}"


def _validated(section: type[Section], values: Mapping[str, Any], prefix: str) -> Any:
    try:
        return section.model_validate(values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = prefix + ".".join(str(part) for part in item["loc"])
            found = "" if key == prefix else f" = {item['input']!r}"
            lines.append(f"`{key or prefix.rstrip('.') or 'configuration'}`{found}: {item['msg']}")
        raise ConfigError("\n".join(lines)) from None
