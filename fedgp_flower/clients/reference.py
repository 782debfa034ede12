"""A site of ``local-only`` and ``pooled``: the messages every client answers are all it needs."""

from __future__ import annotations

from fedgp_flower.clients.numpy_client import SiteClient


class ReferenceClient(SiteClient):
    """Fits by itself, or for all simulated sites, when it is asked for scores."""
