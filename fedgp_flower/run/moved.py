"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

MOVED_METHODS: dict[str, str] = {
    "modular-gp": "set `method` = 'fedmgp-exact' and `baselines.pooled` = true, which compares with a pooled fit",
    "fed-poly": "set `method` = 'fedmgp-exact' and `baselines.pooled` = true, which compares with a pooled fit",
}
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

MOVED_KEYS: dict[str, str] = {
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
    "fedmgp.server-optimizer": "the server takes the merged step",
    "fedmgp.server-step": "the server takes the merged step",
    "fedmgp.server-momentum": "the server takes the merged step",
    "fedmgp.weights": "every unit weighs 1/M",
    "fedmgp.learn-inducing": "pseudo-inputs stay where they start",
    "fedmgp.perturbation": "pseudo-inputs stay where they start",
    "fedmgp.pseudo-inputs": "they form a grid where `model.num-inducing` gives it three points along every input",
    "fedmgp.margin": "it is always 0.025",
    "fedmgp.center-target": "targets are not centred",
    "fedmgp.start-ratio": "it is always 3",
    "fedmgp.lmc-rounds": "it is always 10",
    "fedmgp.final-rate": "it is always 0.005",
    "fedmgp.clip-norm": "`norm-clipped` takes the median of the norms",
    "fedmgp.clip-quantile": "`norm-clipped` takes the median of the norms",
    "fedmgp.staleness-decay": "it is always 1",
    "fedmgp.patience": "it is always 5 rounds",
    "fedmgp.flat-threshold": "it is always 0.1",
    "deep.hidden": "the first dense layer has 50 units",
    "deep.concentration": "it is always 0.01",
    "deep.heads": "the evidence of all rows chooses how far heads of sites deviate, which may be not at all",
    "deep.prediction-draws": "it is always 200",
}
"""Old key → what to write instead, as the end of a sentence."""
