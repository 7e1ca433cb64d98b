"""`rlsvc serve`: a policy behind an endpoint."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.serve.deploy import Deployment


def serve(
    policy: Annotated[str, typer.Argument(help="Folder of a bundle, models:/name@alias, or a Serve config (.yaml).")],
    name: Annotated[
        str | None,
        typer.Option(help="Under which clients ask for it; the registered or the policy's name when left out."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    replicas: Annotated[int, typer.Option(help="Processes that each hold the policy.")] = 1,
    cpus: Annotated[float, typer.Option(help="CPUs of each replica.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of each replica; a fraction shares a card.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Most requests answered in one call of the policy.")] = 1,
    batch_wait_ms: Annotated[
        float, typer.Option(help="How long a request waits for others, when others are about; 0: never.")
    ] = 2.0,
    group: Annotated[
        str | None, typer.Option(help="The robot's normaliser group, for a bundle that has several.")
    ] = None,
    root: Annotated[str, typer.Option(help="Where the model registry lives, for models:/ names.")] = "runs",
    max_body_mb: Annotated[int, typer.Option(help="Largest request in MiB; at most 16.")] = 16,
    deadline_s: Annotated[float, typer.Option(help="Longest that a request may take.")] = 30.0,
    keys: Annotated[Path | None, typer.Option(help="File of API keys (rlsvc keys add); callers must have one.")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the listener's certificate, with its chain; needs --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key, without a password.")] = None,
    chunk_expiry_ms: Annotated[
        float | None, typer.Option(help="How long a chunk may be executed; as long as its actions last when left out.")
    ] = None,
    watch_s: Annotated[
        float, typer.Option(min=0, help="How often to look up what models:/NAME@ALIAS means; 0 never.")
    ] = 10.0,
    drain_s: Annotated[
        float, typer.Option(help="Longest that a session keeps a version that was replaced, within an episode.")
    ] = 600.0,
    canary: Annotated[
        str | None, typer.Option(help="A candidate that answers a share of the sessions: folder or models:/NAME@ALIAS.")
    ] = None,
    canary_share: Annotated[float | None, typer.Option(help="That share, up to 1; a tenth when left out.")] = None,
    shadow: Annotated[
        str | None, typer.Option(help="A candidate whose actions are compared with the answers, and given to nobody.")
    ] = None,
    session_expiry_s: Annotated[
        float, typer.Option(help="How long the server keeps an episode, for clients that keep none.")
    ] = 60.0,
    log_level: Annotated[
        str, typer.Option(help="Of the replicas' JSON lines: debug (one an answer), info, warning or error.")
    ] = "info",
) -> None:
    """Serve a policy, or what a Serve config file names, over HTTP and openpi's WebSocket until Ctrl-C."""
    from rlsvc.serve.haproxy import write_pem
    from rlsvc.serve.keys import Keys
    from rlsvc.serve.preflight import check_address, check_name, hold_port
    from rlsvc.spec.compose import compose_file, validate
    from rlsvc.spec.serve import ServeConfigSpec, ServeSpec

    args: dict[str, Any] = {
        "policy": policy, "name": name, "root": root, "group": group, "keys": None if keys is None else str(keys),
        "replicas": replicas, "cpus": cpus, "gpus": gpus, "batch_size": batch_size, "batch_wait_ms": batch_wait_ms,
        "max_body_mb": max_body_mb, "deadline_s": deadline_s, "chunk_expiry_ms": chunk_expiry_ms,
        "log_level": log_level, "watch_s": watch_s or None, "drain_s": drain_s, "shadow": shadow,
        "session_expiry_s": session_expiry_s, "canary": _canary(canary, canary_share),
    }  # fmt: skip
    spec = validate(ServeSpec, args)
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key: give both, or neither")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    if tls is not None:
        with tempfile.TemporaryDirectory() as folder:
            write_pem(*tls, Path(folder) / "tls.pem")
    from_file = policy.endswith((".yaml", ".yml"))
    if from_file:
        if (spec, host, port) != (ServeSpec(policy=policy), "127.0.0.1", 8000):
            raise UserError(f"{policy}: a Serve config says everything; write options into it, not beside it")
        config = compose_file(ServeConfigSpec, Path(policy))
        host, port = config.http_options.host, config.http_options.port
    else:
        if name is not None:
            check_name(name)
        if keys is not None:
            Keys.read(keys)
        check_address(host, port, keys=keys is not None)
        app = {"import_path": "rlsvc.serve.application:build", "args": args}
        http = {"host": host, "port": port}
        config = validate(ServeConfigSpec, {"proxy_location": "HeadOnly", "http_options": http, "applications": [app]})

    from rlsvc.serve.application import deployments_of
    from rlsvc.serve.deploy import ray_for_serving, start

    deployments = deployments_of(config)
    if from_file:
        check_address(host, port, keys=True)
    console = Console(soft_wrap=True)
    previous = signal.getsignal(signal.SIGTERM)
    names = ", ".join(f"'{one.name}'" for one in deployments)
    count = sum(one.fewest for one in deployments)
    try:
        console.print(f"loading {policy} as {names} on {count} replica(s); Ray takes some 30 s to start ...")
        with hold_port(port), ray_for_serving(*deployments, tls=tls):
            # Stop as on Ctrl-C; only now, since Ray puts a handler of its own there when it starts.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            start(*deployments, proxies=config.proxy_location, http=config.http_options.model_dump())
            for one in deployments:
                _ready(console, one, secure=tls is not None)
            address = f"{'https://' if tls else ''}{host}:{port}"
            console.print(f"  try: rlsvc query {address} --example -n 100   Ctrl-C stops it")
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        signal.signal(signal.SIGTERM, previous)


def _canary(policy: str | None, share: float | None) -> dict[str, Any] | None:
    if policy is None:
        if share is not None:
            raise UserError(f"--canary-share {share:g}: of which candidate? Give --canary too")
        return None
    return {"policy": policy} if share is None else {"policy": policy, "share": share}


def _ready(console: Console, one: Deployment, *, secure: bool) -> None:
    host = f"[{one.host}]" if ":" in one.host else one.host
    base = f"http{'s' if secure else ''}://{host}:{one.port}{one.route.rstrip('/')}"
    console.print(f"ready: policy '{one.name}' at {base}")
    console.print(f"  POST {base}/v1/policies/{one.name}/act   (JSON or msgpack; {base}/docs)")
    console.print(f"  ws{base.removeprefix('http')}/   (openpi's protocol, rlsvc.client)")
    if one.keys is not None and not secure:
        console.print("  asks for a key; without TLS before it, keys and pictures travel unencrypted")
