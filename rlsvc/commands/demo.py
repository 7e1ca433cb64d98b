"""`rlsvc demo`: the main job from demonstrations to an endpoint that is queried, on two CPU cores."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError

DATASET = Path("datasets/pusht_human")
QUERIES = 200


def demo(
    words: Annotated[list[str] | None, typer.Argument(help="key=value changes to experiment=pusht_demo.")] = None,
    port: Annotated[int, typer.Option(help="Loopback port of the endpoint, for as long as the demo lasts.")] = 8000,
    output: Annotated[Path | None, typer.Option(help="Write the figures here too, as JSON.")] = None,
) -> None:
    """Train, evaluate, serve and query a small PushT policy; prints what came out and where it lies."""
    from rlsvc.commands.train import run_with_progress
    from rlsvc.data.check import check_path
    from rlsvc.envs.make import make_env
    from rlsvc.serve.preflight import check_address
    from rlsvc.spec.compose import compose
    from rlsvc.train.standalone import evaluate_bundle

    begin = time.monotonic()
    console = Console(soft_wrap=True)
    if not DATASET.is_dir():
        raise UserError(f"{DATASET}: not here; run the demo in the repository's root (`make demo` does)")
    check_address("127.0.0.1", port)
    spec = compose(["experiment=pusht_demo", "overwrite=true", *(words or [])])
    assert spec.env is not None

    console.rule("1/4 demonstrations")
    (report,) = check_path(DATASET)
    findings = ", ".join(f"{finding.severity}: {finding.what}" for finding in report.findings) or "nothing to object to"
    console.print(f"{DATASET}: {report.episodes} episodes by people, {report.steps} steps; {findings}")

    console.rule("2/4 train and evaluate")
    result = run_with_progress(spec, console)
    if result.interrupted or result.bundle is None:
        raise typer.Exit(130)

    console.rule("3/4 a random policy on the same seeds")
    settings = spec.evaluation
    chance = evaluate_bundle(
        "random",
        spec.env,
        episodes=settings.episodes,
        first_seed=settings.first_seed,
        workers=settings.workers,
        parallel=settings.parallel,
    )

    console.rule("4/4 serve and query")
    import ray

    ray.shutdown()
    env = make_env(spec.env)
    overlap, latencies = _drive(result.bundle, env, settings.first_seed, port, console)
    env.close()

    trained = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    baseline = chance.interval("max_reward")
    table = Table(
        "", "trained", "random", title=f"PushT, {settings.episodes} episodes on seeds that training never saw"
    )
    table.add_row(
        "mean max overlap (95 % interval)",
        f"{trained['max_reward']:.3f} ({trained['max_reward_low']:.3f} to {trained['max_reward_high']:.3f})",
        f"{baseline.mean:.3f} ({baseline.low:.3f} to {baseline.high:.3f})",
    )
    table.add_row("success", f"{100 * trained['success']:.0f} %", f"{100 * chance.interval('success').mean:.0f} %")
    p50, p95 = np.percentile(latencies, [50, 95])
    table.add_row("served, over WebSocket: latency p50 / p95", f"{p50:.1f} / {p95:.1f} ms", "")
    table.add_row(f"served: max overlap on seed {settings.first_seed}", f"{overlap:.3f}", "")
    console.print(table)
    rows: dict[str, Any] = {"bundle": result.bundle, "registered as": result.registered, "learning curve": result.plot}
    rows |= {f"video, {name}": path for name, path in result.videos.items()}
    for name, value in rows.items():
        console.print(f"{name}: {value}")
    minutes = (time.monotonic() - begin) / 60
    console.print(f"{minutes:.1f} minutes. A GPU trains the paper's size in four: see docs/benchmarks.md.")
    if output is not None:
        figures = {"minutes": minutes, "trained": trained, "random": chance.metrics(), "latency_ms": latencies}
        output.write_text(json.dumps(figures, indent=1))


def _drive(bundle: Path, env: Any, seed: int, port: int, console: Console) -> tuple[float, list[float]]:
    """Serve the bundle, run one episode through the client as a robot would; best overlap, and latencies in ms."""
    from rlsvc.client import ChunkedPolicy, PolicyClient
    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.preflight import hold_port
    from rlsvc.serve.source import PolicySource

    deployment = Deployment(name="pusht", load=PolicySource(str(bundle.absolute())), port=port)
    console.print("starting Ray Serve ...")
    with hold_port(port), ray_for_serving(deployment):
        start(deployment)
        console.print(f"serving {bundle} at http://127.0.0.1:{port}")
        with PolicyClient(f"127.0.0.1:{port}") as client:
            policy = ChunkedPolicy(client, seed=seed, expire=False)
            observation, _ = env.reset(seed=seed)
            best, ended = 0.0, False
            while not ended:
                observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
                best, ended = max(best, reward), terminated or truncated
            example, latencies = client.contract.example_observation(), []
            for step in range(QUERIES):
                before = time.perf_counter()
                client.act(example, seed=seed, step=step)
                latencies.append((time.perf_counter() - before) * 1e3)
    return best, latencies
