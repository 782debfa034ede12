"""The table of methods: each row has a Flower Strategy, its NumPyClient, its configuration and its posterior."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fedgp_flower.config import CoreConfig, RunConfig, defaults, parse, resolved
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import AUTO, FlatConfig, MethodOptions, Value, with_installed

GROUP = "fedgp_flower.methods"
"""Entry points of packages with methods: a name, and the ``module:attribute`` of a :class:`Method`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the registry. References are ``module:attribute``, imported only when they are used."""

    summary: str
    paper: str
    options: str
    """A subclass of :class:`~fedgp_flower.options.MethodOptions`."""
    strategy: str
    client: str
    federated: bool = True
    """Whether sites learn together; False for baselines."""
    posterior: str = ""
    """A :class:`~fedgp_flower.run.predict.SavedModel`; empty if a run saves nothing that predicts without a site."""
    why_no_posterior: str = ""
    """If ``posterior`` is empty: the reason, as the end of a sentence about runs of the method."""
    panels: str = ""
    """A function from a :class:`~fedgp_flower.run.artefacts.Run` to further sections of its report."""
    at_site: str = ""
    """A :class:`~fedgp_flower.run.predict.SiteModel`, if a site saves state for predictions."""
    forget: str = ""
    """A function from a checkpoint and a site's id to the checkpoint without that site, if the method has one."""
    forgotten: str = ""
    """A function from the runs before and after forgetting to further entries of ``forgotten.json``."""


_FROM_ITS_ROWS = "every site predicts from its rows, which stay there"

_SFVI = Method(
    summary="Structured federated VI: shared latents, and latents that stay at their site; one gradient a round",
    paper="Hassan et al., Federated variational inference methods for structured latent variable models (2023)",
    options="fedgp_flower.methods.sfvi.options:SFVIKeys",
    strategy="strategies.sfvi:SFVI",
    client="fedgp_flower.methods.sfvi.client:SFVIClient",
    posterior="fedgp_flower.methods.sfvi.posterior:saved_model",
    panels="fedgp_flower.methods.sfvi.posterior:panels",
    at_site="fedgp_flower.methods.sfvi.posterior:site_model",
)
_FEDMGP = Method(
    summary="Federated multi-output GP: units are smoothed, scaled views of shared latent functions; pseudo-gradients",
    paper="Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024)",
    options="fedgp_flower.methods.fedmgp.options:FedMGPOptions",
    strategy="strategies.fedmgp:FedMGP",
    client="fedgp_flower.methods.fedmgp.client:FedMGPClient",
    why_no_posterior="the saved functions are shared by all units, and a prediction also needs the parameters that stay"
    " at one unit: name the unit with `--site`, or give the table of a new one to `fedgp join`",
    panels="fedgp_flower.methods.fedmgp.posterior:panels",
    at_site="fedgp_flower.methods.fedmgp.posterior:site_model",
)
_REFERENCE = Method(
    summary="Baseline: every site fits a GP of its rows, nothing is shared",
    paper="Rasmussen and Williams, Gaussian processes for machine learning (2006)",
    options="fedgp_flower.options:ReferenceOptions",
    strategy="strategies.references:LocalOnly",
    client="fedgp_flower.clients.numpy_client:SiteClient",
    federated=False,
    why_no_posterior=_FROM_ITS_ROWS,
)

_SGPR = Method(
    summary="A sparse GP of all rows in 20 to 60 exchanges of sums, Gaussian noise",
    paper="Snelson and Ghahramani, Sparse Gaussian processes using pseudo-inputs (2005), by sums",
    options="fedgp_flower.methods.sgpr.options:SGPROptions",
    strategy="strategies.sgpr:SGPR",
    client="fedgp_flower.methods.sgpr.client:SGPRClient",
    posterior="fedgp_flower.methods.sparse_posterior:saved_model",
)

BUILT_IN: Mapping[str, Method] = {
    "sgpr": _SGPR,
    "svgp": replace(
        _SGPR,
        summary="The same for classes, counts and outliers: the variational bound of all rows from sums",
        paper="Hensman et al. (2015); dual form: Adam et al., Dual parameterization of sparse variational GPs (2021)",
        options="fedgp_flower.methods.sgpr.options:SVGPOptions",
        strategy="strategies.svgp:SVGP",
        client="fedgp_flower.methods.sgpr.client:SVGPClient",
    ),
    "sgpr-private": replace(
        _SGPR,
        summary="SGPR from sums with noise: differential privacy for every training row",
        paper="Honkela and Melkas, Gaussian processes with differential privacy (2021), by sums",
        options="fedgp_flower.methods.sgpr.options:PrivateSGPROptions",
        strategy="strategies.private_sgpr:PrivateSGPR",
        client="fedgp_flower.methods.sgpr.client:PrivateSGPRClient",
    ),
    "pvi": Method(
        summary="Partitioned variational inference: a factor per site, refined in turn; sites can be forgotten",
        paper="Ashman et al., Partitioned variational inference (2022); Federated learning of sparse GPs",
        options="fedgp_flower.methods.pvi.options:PVIOptions",
        strategy="strategies.pvi:PVI",
        client="fedgp_flower.methods.pvi.client:PVIClient",
        posterior="fedgp_flower.methods.pvi.posterior:saved_model",
        panels="fedgp_flower.methods.pvi.panels:panels",
        forget="strategies.pvi:forget_site",
        forgotten="fedgp_flower.methods.pvi.panels:changes",
    ),
    "pvi-glm": Method(
        summary="Bayesian linear, logistic and Poisson regression by PVI: a factor of the weights per site",
        paper="Ashman et al., Partitioned variational inference (2022), Section 5.1",
        options="fedgp_flower.methods.pvi_weights.options:GLMOptions",
        strategy="strategies.pvi_weights:PVIGLM",
        client="fedgp_flower.methods.pvi_weights.client:GLMClient",
        posterior="fedgp_flower.methods.pvi_weights.model:saved_model",
        panels="fedgp_flower.methods.pvi_weights.panels:panels",
        forget="strategies.pvi:forget_site",
    ),
    "mixed-model": Method(
        summary="Mixed models in lme4's notation, equal to the fit of all rows, from sums over groups",
        paper="Bates et al., Fitting linear mixed-effects models using lme4 (2015); Pinheiro and Bates (1995)",
        options="fedgp_flower.methods.mixed_model.options:MixedOptions",
        strategy="strategies.mixed_model:MixedModel",
        client="fedgp_flower.methods.mixed_model.client:MixedClient",
        posterior="fedgp_flower.methods.mixed_model.posterior:saved_model",
        panels="fedgp_flower.methods.mixed_model.posterior:panels",
    ),
    "pvi-bnn": Method(
        summary="Mean-field Bayesian neural networks for classes by PVI: a factor of the weights per site",
        paper="Ashman et al., Partitioned variational inference (2022), Section 5.3",
        options="fedgp_flower.methods.pvi_weights.options:BNNOptions",
        strategy="strategies.pvi_weights:PVIBNN",
        client="fedgp_flower.methods.pvi_weights.client:BNNClient",
        posterior="fedgp_flower.methods.pvi_weights.model:saved_network",
        panels="fedgp_flower.methods.pvi_weights.panels:network_panels",
        forget="strategies.pvi:forget_site",
    ),
    "fsgp": replace(
        _SGPR,
        summary="Federated averaging of a sparse GP, then the exact posterior of all rows from sums",
        paper="Guo et al., Federated sparse Gaussian processes (2022)",
        options="fedgp_flower.methods.sgpr.options:AveragedOptions",
        strategy="strategies.fsgp:FSGP",
        client="fedgp_flower.methods.sgpr.client:FSGPClient",
    ),
    "fgpr": Method(
        summary="Averaged hyperparameters of exact GPs; every site predicts from its rows",
        paper="Yue and Kontar, Federated Gaussian process (2021); baseline of Guo et al. (2022)",
        options="fedgp_flower.methods.sgpr.options:AveragedOptions",
        strategy="strategies.fsgp:FGPR",
        client="fedgp_flower.methods.sgpr.client:FGPRClient",
        why_no_posterior=_FROM_ITS_ROWS,
    ),
    "deep-kernel": Method(
        summary="A GP on features that a network learns by federated averaging: heads by exact sums, personal at sites",
        paper="Achituve et al., Personalized federated learning with Gaussian processes (2021); heads after Guo et al.",
        options="fedgp_flower.methods.deep_kernel.options:DeepKernelOptions",
        strategy="strategies.deep_kernel:DeepKernelGP",
        client="fedgp_flower.methods.deep_kernel.client:DeepKernelClient",
        posterior="fedgp_flower.methods.deep_kernel.posterior:saved_model",
        panels="fedgp_flower.methods.deep_kernel.posterior:panels",
        at_site="fedgp_flower.methods.deep_kernel.posterior:site_model",
    ),
    "hierarchical-gp": Method(
        summary="A shared trend and a deviation of each site or unit, exact from sums; Newton steps",
        paper="Model: Hassan et al. (2023); bound: Titsias (2009); units: beside Chung and Al Kontar (2024)",
        options="fedgp_flower.methods.hierarchical_gp.options:HierarchicalOptions",
        strategy="strategies.hierarchical_gp:HierarchicalGP",
        client="fedgp_flower.methods.hierarchical_gp.client:HierarchicalClient",
        posterior="fedgp_flower.methods.hierarchical_gp.posterior:saved_model",
        panels="fedgp_flower.methods.sfvi.posterior:panels",
        at_site="fedgp_flower.methods.hierarchical_gp.posterior:site_model",
    ),
    "sfvi": _SFVI,
    "sfvi-avg": replace(
        _SFVI,
        summary="SFVI with local steps: mean of parameters, Wasserstein barycentre of the sites' posteriors",
        options="fedgp_flower.methods.sfvi.options:SFVIAvgKeys",
        strategy="strategies.sfvi:SFVIAvg",
    ),
    "fedmgp": _FEDMGP,
    "fedmgp-exact": replace(
        _FEDMGP,
        summary="The same model for Gaussian noise: exact posterior of the shared functions from sums over units",
        options="fedgp_flower.methods.fedmgp.options:FedMGPExactOptions",
        strategy="strategies.fedmgp_exact:FedMGPExact",
    ),
    "local-only": _REFERENCE,
    "pooled": replace(
        _REFERENCE,
        summary="Baseline, simulation only: one sparse GP of the rows of all sites",
        paper="Titsias, Variational learning of inducing variables in sparse GPs (2009)",
        strategy="strategies.references:Pooled",
        why_no_posterior="the model is only used for the comparison and is not saved",
    ),
}

GROUPS: dict[str, list[str]] = {
    "Predict from the rows of all sites": ["sgpr", "svgp", "sgpr-private"],
    "Keep a factor for each site, which can be forgotten": ["pvi", "pvi-glm", "pvi-bnn"],
    "Effects with intervals, and groups": ["mixed-model"],
    "A shared trend, and sites that deviate from it": ["hierarchical-gp", "sfvi", "sfvi-avg"],
    "Units with curves of their shape: multi-output models": ["fedmgp", "fedmgp-exact"],
    "Average parameters": ["fsgp", "fgpr", "deep-kernel"],
    "Baselines": ["local-only", "pooled"],
}


def load(reference: str) -> Any:
    """Return the object of a ``module:attribute`` reference; raise ConfigError if it cannot be imported."""
    try:
        return pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{reference} cannot be loaded: {type(error).__name__}: {error}") from error


@cache
def methods() -> Mapping[str, Method]:
    """Return the built-in methods by name, then those of installed packages."""
    return with_installed(BUILT_IN, Method, "method", GROUP)


@cache
def option_classes() -> dict[str, type[MethodOptions]]:
    """Return the options class of every method.

    Raise ConfigError for one with keys that has no table, or that of a section of every run.
    """
    classes: dict[str, type[MethodOptions]] = {name: load(method.options) for name, method in methods().items()}
    for name, section in classes.items():
        keyless = all(field.exclude for field in section.model_fields.values())
        if section.table in CoreConfig.model_fields or not (section.table or keyless):
            raise ConfigError(
                f"method {name!r}: the `table` of its {section.__name__} is {section.table!r}; expected the prefix of"
                " its keys, which no section of every run has"
            )
    return classes


def parse_config(flat: FlatConfig) -> RunConfig:
    """Validate a run configuration; see :func:`fedgp_flower.config.parse`."""
    # Flower starts a process for each message of a real site, so options of other methods are not imported.
    name = resolved(str(flat.get("method", AUTO)), flat)
    options = {name: load(BUILT_IN[name].options)} if name in BUILT_IN and not flat.get("extra") else option_classes()
    config = parse(flat, options if set(flat) <= set(defaults(options.values())) else option_classes())
    method = methods()[config.method]
    if config.holdout == "site" and (not method.posterior or method.at_site or config.options.reads_formula):
        raise ConfigError(
            f"`holdout` = 'site': predictions of `method` = {config.method!r} depend on the site; take a method whose"
            " predictions do not, such as 'sgpr' or 'svgp'"
        )
    return config


def default_config() -> dict[str, Value]:
    """Return every key with its default, except those of installed packages, for ``[tool.flwr.app.config]``."""
    sections = [load(method.options) for method in BUILT_IN.values()]
    foreign = {
        f"{section.table}.{section.model_fields[name].alias}" for section in sections for name in section.foreign
    }
    return {key: value for key, value in defaults(sections).items() if key not in foreign}


def strategy_class(config: RunConfig) -> Any:
    """Return the class of the configured Strategy."""
    importlib.import_module("gpytorch")  # before any of its submodules: see fedgp_flower/clients/__init__.py
    return load(methods()[config.method].strategy)


def client_class(config: RunConfig) -> Any:
    """Return the class of the configured client."""
    return load(methods()[config.method].client)
