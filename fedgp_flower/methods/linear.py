"""Old place of :mod:`fedgp_flower.shared_messages`, for imports that are not changed yet."""

from fedgp_flower.shared_messages import *  # noqa: F403
