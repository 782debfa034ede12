"""``vae``, ``prodlda``: a latent of every row, read off it by one encoder that sites share."""

from __future__ import annotations

from fedgp_flower.methods.sfvi.catalogue.multinomial import ClassRow, HiddenKeys
from fedgp_flower.options import Positive, PositiveInt


class LatentKeys(HiddenKeys):
    """Latents of a row."""

    latents: PositiveInt = 2
    """``vae``: latents of a row; ``prodlda``: topics."""


class TopicKeys(LatentKeys):
    """Topics."""

    concentration: Positive = 1.0
    """``prodlda``: α of the Dirichlet prior of a document's topics; smaller ones make documents purer."""


_MODELS = "fedgp_flower.methods.sfvi.amortised"
ROWS = {
    "vae": ClassRow(
        f"{_MODELS}:Autoencoder", "an autoencoder, one encoder for all sites", LatentKeys, mean_field=True, along=False
    ),
    "prodlda": ClassRow(
        f"{_MODELS}:TopicModel", "topics of counts of words, likewise", TopicKeys, mean_field=True, along=False
    ),
}
