"""The ClientApp: turns messages into ``fit`` and ``evaluate`` calls of the configured method's client, and back."""

from __future__ import annotations

from fedgp_flower.clients.app import SiteApp

app = SiteApp()
