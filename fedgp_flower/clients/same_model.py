"""Old place of :mod:`fedgp_flower.clients.numpy_client`, for imports that are not changed yet."""

from fedgp_flower.clients.numpy_client import *  # noqa: F403
