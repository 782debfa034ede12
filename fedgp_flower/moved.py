"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

from __future__ import annotations

MOVED_METHODS: dict[str, str] = dict.fromkeys(
    ("modular-gp", "fed-poly"),
    "set `method` = 'fedmgp-exact' and `baselines.pooled` = true, which compares with a pooled fit",
)
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

_CONSTANT, _NO_GAIN = "it is a constant now; leave it out", "no measured case gained from it; leave it out"
_KEYS = {
    _CONSTANT: """
        averaging.server-learning-rate bnn.batch-size bnn.prediction-draws bnn.prior-scale bnn.start-scale
        deep.concentration deep.features deep.hidden deep.prediction-draws deep.server-learning-rate
        fedmgp.final-rate fedmgp.lmc-rounds fedmgp.margin fedmgp.start-ratio fgpr.server-learning-rate
        fsgp.server-learning-rate glm.prior-scale glm.steps model.jitter model.outputscale partition.bins
        partition.classes-per-site pvi.alpha pvi.max-points pvi.min-rows-per-pseudo-point pvi.prediction-samples
        pvi.samples sfvi.catch-up-steps sfvi.concentration sfvi.constant-share sfvi.final-rate
        sfvi.prediction-draws sfvi.prior-scale""",
    _NO_GAIN: """
        bnn.early-stopping fedmgp.center-target fedmgp.clip-norm fedmgp.clip-quantile fedmgp.covariance
        fedmgp.flat-threshold fedmgp.learn-inducing fedmgp.parametrisation fedmgp.patience fedmgp.perturbation
        fedmgp.pseudo-inputs fedmgp.server-momentum fedmgp.server-optimizer fedmgp.server-step
        fedmgp.staleness-decay fedmgp.weights fsgp.intervals model.hyperparameters model.inducing-init
        pvi.first-steps pvi.fraction pvi.points-fraction sfvi.amortised-units sfvi.centred sfvi.coupling
        sfvi.fraction sfvi.keep-moments sfvi.learn-inputs sfvi.local-structure sfvi.own-steps sfvi.scaling
        sfvi.shared-inputs sfvi.weights""",
    "it is learned from where it starts; leave it out": """
        sfvi.deviation sfvi.site-amplitude sfvi.site-inducing sfvi.site-lengthscale sfvi.site-noise sfvi.site-slope""",
    "three methods now: 'profiled' is `method` = 'sgpr' ('svgp' for classes, counts and outliers), 'average' is"
    " `method` = 'fsgp', 'exact' is gone": "fsgp.objective",
    "take `method` = 'sgpr'": "fsgp.exact-optimizer",
    "`sgpr.exchanges` limits training": "fsgp.tolerance",
    "`sgpr.exchanges` now, with `method` = 'sgpr' or 'svgp'": "fsgp.exchanges",
    "`sgpr.small-sites` now, with `method` = 'sgpr'": "fsgp.small-sites",
    "`sgpr.trials` now, with `method` = 'sgpr-private'": "fsgp.trials",
    "`averaging.fraction` now": "fsgp.fraction fgpr.fraction deep.fraction",
    "`averaging.server-optimizer` now": "fsgp.server-optimizer fgpr.server-optimizer deep.server-optimizer",
    "`pvi.inducing` = 'fixed' keeps Z and β": "pvi.hyper",
    "lower `model.num-inducing` to a third of the smallest site's rows, as the warning says": "pvi.small-sites",
    "`pvi.learning-rate` now": "pvi.step bnn.learning-rate",
    "`pvi.steps` now": "pvi.evaluations bnn.steps",
    "take `pvi.local-update` = 'sums'": "pvi.refit-evaluations pvi.refit-steps",
    "`pvi.preset` = 'global-vi' takes gradient steps of length `pvi.damping`": "glm.local-update",
    **{
        f"`pvi.{key}` now": f"glm.{key} bnn.{key}"
        for key in ("preset", "schedule", "order", "concurrency", "damping", "deletion")
    },
    "set `method` = 'hierarchical-gp' for the closed form; 'sfvi' always takes gradients": "sfvi.objective",
    "`method` = 'hierarchical-gp' stops by itself; leave it out": "sfvi.tolerance",
    "see `sfvi.initial-scale`, which holds for all latents": "sfvi.initial-local-scale",
    "real sites leave a constant column out of `features`; a simulation warns of it": "constant-columns",
    "a column of text has at most 50 levels; leave it out of `features`, or merge its levels": "max-levels",
    "set `method` = 'fedmgp-exact' for exact rounds and 'fedmgp' for pseudo-gradients": "fedmgp.update",
    "set `method` = 'fedmgp-exact' for exact rounds": "fedmgp.final-rounds",
    "for units that deviate from one shared curve set `method` = 'hierarchical-gp'": "fedmgp.own-deviation",
    "there is one start; vary `fedmgp.start-multiple` and compare the bounds": "fedmgp.starts fedmgp.start-rounds",
    "the evidence of all rows chooses how far heads of sites deviate, which may be not at all": "deep.heads",
}
MOVED_KEYS: dict[str, str] = {key: words for words, keys in _KEYS.items() for key in keys.split()}
"""Old key → what to write instead, as the end of a sentence."""
