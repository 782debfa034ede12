"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

MOVED_METHODS: dict[str, str] = {
    "modular-gp": "set `method` = 'fedmgp-exact' and `baselines.pooled` = true, which compares with a pooled fit",
    "fed-poly": "set `method` = 'fedmgp-exact' and `baselines.pooled` = true, which compares with a pooled fit",
}
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

_ALIKE = {
    "it is always 0.1": (
        "fsgp.server-learning-rate averaging.server-learning-rate fgpr.server-learning-rate "
        "fedmgp.flat-threshold deep.server-learning-rate"
    ),
    "it is learned from where it starts; leave it out": (
        "sfvi.site-inducing sfvi.site-noise sfvi.site-amplitude sfvi.site-lengthscale sfvi.site-slope sfvi.deviation"
    ),
    "no measured case gained from it; leave it out": (
        "sfvi.local-structure sfvi.coupling sfvi.learn-inputs sfvi.scaling sfvi.weights sfvi.keep-moments "
        "sfvi.own-steps sfvi.centred sfvi.amortised-units sfvi.fraction"
    ),
    "it is a constant; leave it out": (
        "sfvi.constant-share sfvi.final-rate sfvi.catch-up-steps sfvi.prediction-draws sfvi.prior-scale "
        "sfvi.concentration"
    ),
    "the server takes the merged step": "fedmgp.server-optimizer fedmgp.server-step fedmgp.server-momentum",
}
"""What to write instead → the old keys that it holds for."""

MOVED_KEYS: dict[str, str] = {
    **{key: words for words, keys in _ALIKE.items() for key in keys.split()},
    "model.hyperparameters": "gone: predictions are at the best hyperparameters",
    "fsgp.objective": "three methods now: 'profiled' is `method` = 'sgpr' ('svgp' for classes, counts and outliers), "
    "'average' is `method` = 'fsgp', 'exact' is gone",
    "fsgp.exact-optimizer": "gone with `fsgp.objective` = 'exact'; take `method` = 'sgpr'",
    "fsgp.tolerance": "a constant now; `sgpr.exchanges` limits training",
    "fsgp.intervals": "gone: lengthscales always get their intervals",
    "fsgp.exchanges": "`sgpr.exchanges` now, with `method` = 'sgpr' or 'svgp'",
    "fsgp.small-sites": "`sgpr.small-sites` now, with `method` = 'sgpr'",
    "fsgp.trials": "`sgpr.trials` now, with `method` = 'sgpr-private'",
    "fsgp.fraction": "`averaging.fraction` now",
    "fsgp.server-optimizer": "`averaging.server-optimizer` now",
    "fgpr.fraction": "`averaging.fraction` now",
    "fgpr.server-optimizer": "`averaging.server-optimizer` now",
    "pvi.hyper": "gone: `pvi.inducing` = 'fixed' keeps Z and β",
    "pvi.small-sites": "gone: lower `model.num-inducing` to a third of the smallest site's rows, as the warning says",
    "pvi.alpha": "a constant now, 0.01",
    "pvi.samples": "a constant now, 4",
    "pvi.prediction-samples": "a constant now, 100",
    "pvi.points-fraction": "gone: a pseudo-observation starts as the average of five rows",
    "pvi.max-points": "a constant now, 500",
    "pvi.min-rows-per-pseudo-point": "a constant now, 5",
    "pvi.first-steps": "gone: a first visit takes twice `pvi.steps`",
    "pvi.step": "`pvi.learning-rate` now",
    "pvi.evaluations": "`pvi.steps` now",
    "pvi.refit-evaluations": "gone with replay; take `pvi.local-update` = 'sums'",
    "pvi.refit-steps": "gone with replay; take `pvi.local-update` = 'sums'",
    "glm.prior-scale": "it is always 1: inputs are standardised",
    "bnn.prior-scale": "it is always 1: inputs are standardised",
    "pvi.fraction": "every site takes part in a synchronous round",
    "glm.local-update": "gone: `pvi.preset` = 'global-vi' takes gradient steps of length `pvi.damping`",
    "glm.steps": "a constant now, 100",
    "bnn.steps": "`pvi.steps` now",
    "bnn.learning-rate": "`pvi.learning-rate` now",
    "bnn.batch-size": "a constant now, 128",
    "bnn.start-scale": "a constant now, 0.05",
    "bnn.early-stopping": "gone: a visit always stops where the fit rises no more",
    "bnn.prediction-draws": "a constant now, 30",
    "glm.preset": "`pvi.preset` now",
    "glm.schedule": "`pvi.schedule` now",
    "glm.order": "`pvi.order` now",
    "glm.concurrency": "`pvi.concurrency` now",
    "glm.damping": "`pvi.damping` now",
    "glm.deletion": "`pvi.deletion` now",
    "bnn.preset": "`pvi.preset` now",
    "bnn.schedule": "`pvi.schedule` now",
    "bnn.order": "`pvi.order` now",
    "bnn.concurrency": "`pvi.concurrency` now",
    "bnn.damping": "`pvi.damping` now",
    "bnn.deletion": "`pvi.deletion` now",
    "sfvi.objective": "set `method` = 'hierarchical-gp' for the closed form; 'sfvi' always takes gradients",
    "sfvi.tolerance": "`method` = 'hierarchical-gp' stops by itself; leave it out",
    "sfvi.shared-inputs": "they always follow the sums that sites give of their inputs",
    "sfvi.initial-local-scale": "see `sfvi.initial-scale`, which holds for all latents",
    "constant-columns": "real sites leave a constant column out of `features`; a simulation warns of it",
    "max-levels": "a column of text has at most 50 levels; leave it out of `features`, or merge its levels",
    "partition.bins": "columns of numbers are cut into 10 bins",
    "partition.classes-per-site": "every site sees 2 classes",
    "model.inducing-init": "inducing points always start from the sums that sites give of their inputs",
    "model.outputscale": "targets are standardised, so that the GP starts with variance 1",
    "model.jitter": "it is always 1e-8 of the prior variance",
    "fedmgp.update": "set `method` = 'fedmgp-exact' for exact rounds and 'fedmgp' for pseudo-gradients",
    "fedmgp.parametrisation": "q(u) is in natural parameters where the noise is Gaussian",
    "fedmgp.final-rounds": "set `method` = 'fedmgp-exact' for exact rounds",
    "fedmgp.own-deviation": "for units that deviate from one shared curve set `method` = 'hierarchical-gp'",
    "fedmgp.weights": "every unit weighs 1/M",
    "fedmgp.learn-inducing": "pseudo-inputs stay where they start",
    "fedmgp.perturbation": "pseudo-inputs stay where they start",
    "fedmgp.pseudo-inputs": "they form a grid where `model.num-inducing` gives it three points along every input",
    "fedmgp.margin": "it is always 0.025",
    "fedmgp.center-target": "targets are not centred",
    "fedmgp.start-multiple": "it is always 1",
    "fedmgp.start-ratio": "it is always 3",
    "fedmgp.lmc-rounds": "it is always 10",
    "fedmgp.final-rate": "it is always 0.005",
    "fedmgp.clip-norm": "`norm-clipped` takes the median of the norms",
    "fedmgp.clip-quantile": "`norm-clipped` takes the median of the norms",
    "fedmgp.staleness-decay": "it is always 1",
    "fedmgp.patience": "it is always 5 rounds",
    "deep.hidden": "the first dense layer has 50 units",
    "deep.concentration": "it is always 0.01",
    "deep.heads": "the evidence of all rows chooses how far heads of sites deviate, which may be not at all",
    "deep.prediction-draws": "it is always 200",
    "deep.fraction": "set `averaging.fraction`",
    "deep.server-optimizer": "set `averaging.server-optimizer`",
}
"""Old key → what to write instead, as the end of a sentence."""
