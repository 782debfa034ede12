"""The configuration: one source of truth, and errors that name the key."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from fedgp_flower.config import flatten
from fedgp_flower.errors import ConfigError
from fedgp_flower.run.registry import default_config, load, methods, parse_config


def test_pyproject_lists_every_key_with_its_default():
    """`flwr run --run-config` refuses keys that are not there."""
    content = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert flatten(content["tool"]["flwr"]["app"]["config"]) == default_config()


def test_defaults_are_a_valid_configuration():
    options = parse_config({}).options  # 0 leaves it to the method
    chosen = {"model.num-inducing": options.default_inducing, "model.max-megabytes": options.default_megabytes}
    chosen |= {"model.kernel": options.default_kernel, "num-server-rounds": options.default_rounds, "method": "sgpr"}
    assert parse_config({}).flat().items() <= (default_config() | chosen).items()
    assert parse_config(default_config()) == parse_config({})
    assert parse_config({"model.noise": 1}).model.noise == 1.0  # an integer stands for a float


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"num-server-round": 3}, ["`num-server-round`", "did you mean", "`num-server-rounds`"]),
        ({"seed": "one"}, ["`seed` = 'one'", "integer"]),
        ({"model.kernel": "rbf + cubic"}, ["`model.kernel` = 'rbf + cubic'", "matern52"]),
        ({"model.kernel": "rbf - linear"}, ["`model.kernel`", "sum or product"]),
        ({"model.noise": -1.0}, ["`model.noise` = -1.0", "greater than 0"]),
        ({"fsgp.exchanges": 9}, ["the configuration key `fsgp.exchanges` was removed", "`sgpr.exchanges` now"]),
        ({"method": "fed-poly"}, ["`method` = 'fed-poly' was removed", "fedmgp-exact"]),
        ({"sgpr.small-sites": "drop"}, ["`sgpr.small-sites`", "'warn', 'cap' or 'masks'"]),
        ({"method": "gp"}, ["`method` = 'gp'", "fsgp"]),
        ({"partitioner": "natural"}, ["`partition.column`"]),
        ({"partition.column": "cell"}, ["`partition.column`", "'natural', 'dirichlet', 'pathological'", "'iid'"]),
        ({"model.likelihood": "poisson"}, ["`model.likelihood`", "gaussian"]),
        ({"optimizer.batch-size": 10}, ["`optimizer.batch-size`", "0"]),
        ({"extra": "toy.step=3"}, ["unknown configuration key `toy.step`"]),
        ({"extra": "seed=-1"}, ["`seed` = -1"]),
        ({"extra": "name='x"}, ["No closing quotation"]),
        ({"extra": "seed=3", "seed": 4}, ["given both directly and in `extra`: `seed`"]),
        ({"seed": -1, "threads": 0}, ["`seed`", "`threads`"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(flat, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({"method": "fsgp", **flat})
    for word in words:
        assert word in str(caught.value)
    assert "Value error" not in str(caught.value)


PRIVATE = {"privacy.epsilon": 1.0, "privacy.ranges": '{"x": [-1, 7], "y": [-2, 2]}', "baselines.linear": False}
PRIVATE |= {"baselines.local-only": False, "baselines.pooled": False}
MASKED = {"privacy.secure-aggregation": True}
TOGETHER: dict[str, list[tuple[dict[str, object], str]]] = {
    "fedmgp-exact": [
        ({"fedmgp.aggregation": "median"}, "needs `method` = 'fedmgp'"),
        ({"optimizer.batch-size": 5}, "batch-size"),
        ({"model.kernel": "matern32"}, "rbf"),
        ({"model.likelihood": "poisson"}, "gaussian"),
        ({"precision": "float32"}, "precision"),
        ({"model.num-inducing": 1}, "num-inducing"),
        (MASKED | {"fedmgp.aggregation": "agreement"}, "uses updates of single units"),
    ],
    "fedmgp": [
        ({"fedmgp.aggregation": "agreement", "fedmgp.latents": 2}, "one latent function"),
        ({"optimizer.name": "sgd"}, "adam"),
        (MASKED | {"fedmgp.aggregation": "median"}, "'median' uses updates"),
        (MASKED | {"averaging.fraction": 0.5}, "`averaging.fraction` = 0.5 samples sites"),
    ],
    "sfvi-avg": [(MASKED | {"sfvi.structure": "full"}, "full covariances is not a sum")],
    "pvi": [
        ({"pvi.local-update": "adam", "pvi.deletion": False}, "deletion"),
        ({"pvi.local-update": "adam", "pvi.preset": "bcm-split", "pvi.factor": "cpo"}, "pvi.preset"),
        ({"pvi.local-update": "adam", "pvi.preset": "global-vi"}, "pvi.preset"),
        ({"pvi.local-update": "adam", "precision": "float32"}, "precision"),
        ({"pvi.local-update": "adam", "pvi.damping": 0.5, "pvi.inducing": "fixed"}, "has no effect"),
        ({"pvi.local-update": "adam", "optimizer.steps": 20}, "pvi.steps"),
        ({"pvi.local-update": "adam", "optimizer.learning-rate": 0.01}, "pvi.learning-rate"),
        ({"pvi.factor": "cpo"}, "`pvi.factor`: `pvi.local-update` = 'sums' ignores"),
        ({"optimizer.steps": 7}, "`optimizer.steps`: `pvi.local-update` = 'sums' has no local steps"),
        (MASKED, "take method 'sgpr', which gets the same"),
        ({"model.likelihood": "bernoulli", "pvi.schedule": "asynchronous"}, "`pvi.local-update` = 'sums' needs"),
        (PRIVATE, "adds no noise"),
    ],
    "pvi-bnn": [
        ({"pvi.preset": "global-vi"}, "which pvi-bnn does not have"),
        ({"optimizer.steps": 7}, "`optimizer.steps`"),
        ({"model.likelihood": "poisson"}, "needs 'bernoulli' or 'categorical'"),
    ],
    "sfvi": [
        ({"model.likelihood": "student-t"}, "`model.likelihood`"),
        ({"sfvi.model": "glmm", "model.likelihood": "bernoulli"}, "`sfvi.unit-column`"),
        ({"sfvi.classes": 3}, "was removed: classes are those of the target"),
        ({"sfvi.unit-column": "u", "sfvi.latents": 3, "sfvi.hidden": 9}, "`sfvi.hidden`"),  # the first in order
        ({"optimizer.batch-size": 3}, "`optimizer.batch-size`"),
        ({"precision": "float32"}, "`precision`"),
        ({"optimizer.name": "sgd", "optimizer.steps": 7}, "`optimizer.name`, `optimizer.steps`"),
        ({"model.likelihood": "categorical"}, "needs 'gaussian'"),
        ({"sfvi.model": "multinomial", "sfvi.random-slopes": "a"}, "`sfvi.random-slopes`"),
    ],
    "deep-kernel": [({"optimizer.learning-rate": 0.3}, "learning-rate")],
    "hierarchical-gp": [({"hierarchical.deviation": "rough", "model.likelihood": "poisson"}, "needs 'gaussian'")],
    "sgpr-private": [
        (PRIVATE | {"baselines.linear": True}, "`baselines.linear`"),
        (PRIVATE | {"privacy.ranges": ""}, "give public ranges"),
        (PRIVATE | {"standardise": False}, "`standardise`"),
        (PRIVATE | {"missing": "drop"}, "`missing`"),
        (PRIVATE | {"model.kernel": "linear"}, "bounds its part of the sums"),
        (PRIVATE | {"model.likelihood": "bernoulli"}, "'gaussian'"),
        (PRIVATE | {"privacy.ranges": '{"x": [1, 0]}'}, "low < high"),
        (PRIVATE | {"privacy.epsilon": 0.0}, "needs a budget: set `privacy.epsilon`"),
    ],
    "sgpr": [
        (PRIVATE | {"privacy.epsilon": 0.0}, "is only used with `privacy.epsilon`"),
        ({"model.likelihood": "poisson"}, "`method` = 'sgpr' needs 'gaussian'; take 'svgp'"),
        ({"model.kernel": "steps(rbf)"}, "svgp"),
    ],
    "svgp": [({}, "with Gaussian noise take 'sgpr'")],
    "fsgp": [(MASKED | {"averaging.fraction": 0.5}, "`averaging.fraction` = 0.5 samples sites")],
}
"""Method → keys that make no sense together with it, and what is said of them."""


@pytest.mark.parametrize(
    ("method", "keys", "words"), [(method, *case) for method, cases in TOGETHER.items() for case in cases]
)
def test_keys_that_make_no_sense_together_are_refused(method, keys, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_config({"method": method, **keys})


def test_keys_of_another_method_are_told():
    """Taken without a word, they let someone believe that they had changed the run."""
    config = parse_config({"pvi.damping": 0.3, "hierarchical.deviation": "rough", "pvi.steps": 0, "sgpr.exchanges": 4})
    [note] = config.ignored
    assert note == "`method` = 'sgpr' does not read `hierarchical.deviation`, `pvi.damping`"
    assert not parse_config({"method": "pvi", "pvi.damping": 0.3}).ignored
    assert not parse_config(default_config()).ignored
    assert parse_config(config.flat()).digest() == config.digest()


def test_digest_ignores_where_and_how_long_but_not_what():
    base = parse_config({}).digest()
    elsewhere = {"output-dir": "elsewhere", "num-server-rounds": 7, "resume": True, "name": "x"}
    assert parse_config(elsewhere).digest() == base
    assert parse_config({"seed": 1}).digest() != base


@pytest.mark.parametrize("name", methods())
def test_every_reference_of_a_row_resolves(name):
    row = methods()[name]
    references = [value for entry in fields(row) if re.fullmatch(r"[\w.]+:\w+", value := str(getattr(row, entry.name)))]
    assert len(references) >= 3
    assert all(callable(load(reference)) for reference in references)
    assert bool(row.posterior) != bool(row.why_no_posterior), "a row says how a run predicts, or why it does not"
    assert bool(row.forgotten) <= bool(row.forget)


def test_extra_carries_keys_and_is_checked_like_them():
    config = parse_config({"extra": "seed=3 model.kernel='matern52 + linear' method=fsgp"})
    told = (config.seed, config.model.kernel, config.method, config.extra)
    assert told == (3, "matern52 + linear", "fsgp", "")
    assert parse_config(config.flat()) == config
