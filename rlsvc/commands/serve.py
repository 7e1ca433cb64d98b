"""`rlsvc serve`: a policy behind an endpoint."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlsvc.core.errors import UserError


def serve(
    policy: Annotated[str, typer.Argument(help="Folder of a policy bundle, or models:/name@alias.")],
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
        float, typer.Option(help="Longest that a request waits for others, when others are about.")
    ] = 2.0,
    group: Annotated[
        str | None, typer.Option(help="The robot's normaliser group, for a bundle that has several.")
    ] = None,
    root: Annotated[str, typer.Option(help="Where the model registry lives, for models:/ names.")] = "runs",
    max_body_mb: Annotated[int, typer.Option(help="Largest request in MiB; at most 16.")] = 16,
    deadline_s: Annotated[float, typer.Option(help="Longest that a request may take.")] = 30.0,
    keys: Annotated[Path | None, typer.Option(help="File of API keys (rlsvc keys add); callers must have one.")] = None,
    chunk_expiry_ms: Annotated[
        float | None, typer.Option(help="How long a chunk may be executed; as long as its actions last when left out.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Of the replicas' JSON lines: debug (one an answer), info, warning or error.")
    ] = "info",
) -> None:
    """Serve a policy over HTTP and openpi's WebSocket until Ctrl-C."""
    from rlsvc.serve.keys import Keys
    from rlsvc.serve.preflight import check_address, check_name, check_resources, hold_port, local_cpus, local_gpus

    if not 1 <= batch_size <= 1024 or batch_wait_ms < 0 or not 1 <= max_body_mb <= 16 or deadline_s <= 0:
        raise UserError(
            "expected --batch-size 1 to 1024, --batch-wait-ms 0 or more, --max-body-mb 1 to 16, --deadline-s above 0; "
            f"got {batch_size}, {batch_wait_ms:g}, {max_body_mb} and {deadline_s:g}"
        )
    if name is not None:
        check_name(name)
    known = None if keys is None else Keys.read(keys)
    check_address(host, port, keys=known is not None)
    if "RAY_ADDRESS" not in os.environ:
        check_resources(replicas, cpus, gpus, have_cpus=local_cpus(), have_gpus=local_gpus())

    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.replica import BundleLoader
    from rlsvc.serve.service import ServeSettings
    from rlsvc.store.bundle import read_bundle
    from rlsvc.store.registry import resolve

    path = resolve(policy, root=root).resolve()
    bundle = read_bundle(path)
    bundle.normalizer.group_index(group)
    registered = policy.removeprefix("models:/").split("@")[0].split("/")[0] if policy.startswith("models:/") else None
    deployment = Deployment(
        name=check_name(name or registered or str(bundle.policy["name"])),
        load=BundleLoader(path, batch_size, "gpu" if gpus else "cpu", group),
        host=host,
        port=port,
        replicas=replicas,
        cpus=cpus,
        gpus=gpus,
        settings=ServeSettings(
            max_body_bytes=max_body_mb * 2**20,
            max_batch=batch_size,
            batch_wait_s=batch_wait_ms / 1e3,
            deadline_s=deadline_s,
            log_level=log_level,
            chunk_expiry_ms=chunk_expiry_ms,
        ),
        keys=known,
    )
    console = Console(soft_wrap=True)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        console.print(
            f"loading {policy} (bundle {bundle.id[:12]}) on {replicas} replica(s); Ray takes some 30 s to start ..."
        )
        with hold_port(port), ray_for_serving(deployment):
            # Stop as on Ctrl-C; only now, since Ray puts a handler of its own there when it starts.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            start(deployment)
            base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            console.print(f"ready: policy '{deployment.name}' at {base}")
            console.print(f"  POST {base}/v1/policies/{deployment.name}/act   (JSON or msgpack; {base}/docs)")
            console.print(f"  ws{base.removeprefix('http')}/   (openpi's protocol, rlsvc.client)")
            if known is not None:
                console.print("  asks for a key; without TLS before it, keys and pictures travel unencrypted")
            console.print(f"  try: rlsvc query {host}:{port} --example -n 100   Ctrl-C stops it")
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        signal.signal(signal.SIGTERM, previous)
