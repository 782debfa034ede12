"""``hierarchical-bnn``, ``fedpop``: Bayesian neural networks with a personal part."""

from __future__ import annotations

from fedgp_flower.methods.sfvi.catalogue.multinomial import ClassRow, HiddenKeys

_MODELS = "fedgp_flower.methods.sfvi.networks"
_WORDS = "a Bayesian neural network {} at every site, Section 4.1"
ROWS = {
    "hierarchical-bnn": ClassRow(
        f"{_MODELS}:HierarchicalNetwork", _WORDS.format("with weights of its own"), HiddenKeys, mean_field=True
    ),
    "fedpop": ClassRow(f"{_MODELS}:FedPop", _WORDS.format("with a last layer of its own"), HiddenKeys, mean_field=True),
}
