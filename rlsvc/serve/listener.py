"""Where Serve's proxies listen, asked of Serve itself: keys are needed as soon as others reach it."""

from __future__ import annotations

from typing import Any

from rlsvc.core.errors import UserError
from rlsvc.serve.preflight import is_loopback


def check_listener(*, keys: bool) -> None:
    """Refuse to answer everybody: a config file may say `host: 0.0.0.0`, which is also its default.

    Args:
        keys: whether callers are asked for one.

    Raises:
        UserError: Serve listens beyond loopback, and no keys.
    """
    if keys:
        return
    host = listener()
    if host is not None and not is_loopback(host):
        raise UserError(
            f"Serve listens on {host} (http_options.host, 0.0.0.0 by default), and without keys it may on loopback "
            "only. Make keys (rlsvc keys add NAME --role act --file keys.json) and name the file (args: keys: ...), or "
            "set http_options.host to 127.0.0.1; Serve has to be shut down for another host"
        )


def listener() -> str | None:
    """The host that Serve's proxies bind; None where Serve does not run, or runs without them."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    # Serve has no public way to ask; what it answers in serve.status() leaves the host out.
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    options: Any = ray.get(controller.get_http_config.remote(), timeout=30.0)
    return options.host
