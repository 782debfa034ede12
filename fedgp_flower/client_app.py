"""The ClientApp: it passes messages to the client of the configured method and returns its replies."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedgp_flower.clients.app import SiteApp
from fedgp_flower.config import RunConfig, require_method
from fedgp_flower.data.sites import Data, RawSite, site_of
from fedgp_flower.errors import ConfigError
from fedgp_flower.run.registry import client_class, methods, parse_config


def make_client_app(
    method: str | None,
    load_data: Callable[[Context], Data],
    mods: list[Mod] | None = None,
    train_mods: list[Mod] | None = None,
) -> ClientApp:
    """Return the ClientApp of a method, with a loader for the rows of a site.

    The id of a site is ``site`` in its node configuration, in simulation its ``partition-id``. All other settings come
    with the server's messages.

    Args:
        method: Name of the method; other methods are refused. None answers every method.
        load_data: Returns ``(X, y)``, ``(X, y, X_test, y_test)``, or ``(frame, target)`` with a DataFrame and the name
            of the target. Without test rows a share ``test_fraction`` of the rows is held out.
        mods: Flower's mods, applied to every message.
        train_mods: Flower's mods for training messages only, such as ``fixedclipping_mod``.
    """
    if method is not None:
        require_method(method, methods())
    cache: dict[tuple[int, int], tuple[RunConfig, RawSite]] = {}

    def load(config: RunConfig, context: Context) -> RawSite:
        if method is not None and config.method != method:
            raise ConfigError(f"the server runs the method `{config.method}`; this app was made for `{method}`")
        key = context.run_id, context.node_id
        if key not in cache or cache[key][0] != config:
            cache[key] = config, site_of(config, context.node_config, load_data(context))
        return cache[key][1]

    return SiteApp(parse_config, client_class, load, mods, train_mods)


app = SiteApp(parse_config, client_class)
