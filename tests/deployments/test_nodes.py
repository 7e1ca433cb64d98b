"""A head and two workers as separate Ray nodes of one machine; one is removed while it serves and trains."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from serving_fakes import SMALL_CONTRACT
from workplaces import belongs, workplace

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.data.normalize import Normalizer
from rlsvc.serve.haproxy import free_ports
from rlsvc.store.bundle import write_bundle

STEPS = 10_000
PLACES = """
import json, os, pathlib, ray, sys
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
actors = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
found = [(actor["ActorClassName"], names[actor["Address"]["NodeID"]]) for actor in actors]
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))  # Ray prints its own warnings to stdout
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)  # five minutes on two cores that are idle
def test_serving_and_training_go_on_when_a_node_of_the_cluster_is_removed(tmp_path):
    """Learner, rollout workers and replicas lie on two workers; the one without the learner goes, another one comes."""
    with workplace(tmp_path) as (folder, environment), contextlib.ExitStack() as stack:
        # Nodes of one machine share its ports, and HAProxy has fixed ones.
        environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_AUTH_MODE": "token", "RAY_TRAIN_V2_ENABLED": "1"}
        (port,) = free_ports(1)
        address = f"127.0.0.1:{environment['PORT_6379']}"
        environment["RAY_ADDRESS"] = address

        def run(*words, **options):
            return subprocess.run(
                words,
                cwd=folder,
                env=environment,
                text=True,
                check=True,
                timeout=120,
                stdout=subprocess.PIPE,
                **options,
            ).stdout

        def background(*words):
            log = stack.enter_context((folder / f"{words[1]}.log").open("w"))
            return subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

        def add_node(number, *options):
            (agent,) = free_ports(1)
            run(
                "ray", "start", f"--node-name=node{number}", f"--node-ip-address=127.0.0.{number}",
                f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0", "--max-worker-port=0", *options,
                "--object-store-memory=100000000", stderr=subprocess.STDOUT,
            )  # fmt: skip

        def places():
            found: dict[str, list[str]] = {}
            run(sys.executable, "-c", PLACES, "places.json", stderr=subprocess.DEVNULL)
            for name, node in json.loads((folder / "places.json").read_text()):
                kinds = {"ServeReplica:": "replica", "_RayWorker": "rollout", "RayTrainWorker": "learner"}
                for part, kind in kinds.items():
                    if part in name:
                        found.setdefault(kind, []).append(node)
            return found

        run("ray", "get-auth-token", "--generate")
        add_node(1, "--head", f"--port={environment['PORT_6379']}", "--num-cpus=0", "--include-dashboard=false")
        add_node(2, f"--address={address}", "--num-cpus=3")
        add_node(3, f"--address={address}", "--num-cpus=3")

        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {
                    "import_path": "rlsvc.serve.application:build",
                    "args": {"policy": str(bundle(tmp_path)), "replicas": 2},
                }
            ],
        }
        (folder / "serve.yaml").write_text(yaml.safe_dump(config))
        served = background("rlsvc", "serve", "serve.yaml")
        wait_until(lambda: "Ctrl-C" in (folder / "serve.log").read_text(), 120, lambda: served.poll() is None)
        trained = background(
            "rlsvc", "train", "experiment=sac_pendulum", "rollout.workers=2", "rollout.cpus_per_worker=1",
            "rollout.mode=async", "learner.cpus_per_rank=1",
            f"phases.1.duration_steps={STEPS - 600}", "log_interval=100",
            "evaluation.interval=null", "evaluation.episodes=2", "evaluation.parallel=2", "evaluation.videos=false",
            "tracking.trackers=[]", "checkpoint.interval=1000", f"root={folder / 'runs'}",
        )  # fmt: skip
        metrics = folder / "runs" / "rlsvc" / "sac_pendulum" / "metrics.jsonl"
        wait_until(lambda: progress(metrics) >= 800, 180, lambda: trained.poll() is None)

        before = places()
        assert {kind: len(nodes) for kind, nodes in before.items()} == {"replica": 2, "rollout": 2, "learner": 1}
        assert set(before["replica"]) == {"node2", "node3"}
        (removed,) = {"node2", "node3"} - set(before["learner"])
        assert removed in before["rollout"]
        with asking(f"127.0.0.1:{port}") as answered:
            wait_until(lambda: len(answered) >= 10, 30)
            at_removal = progress(metrics)
            (raylet,) = [
                process
                for process in psutil.process_iter()
                if is_raylet(process, removed) and belongs(process, tmp_path)
            ]
            raylet.kill()
            seen = len(answered)
            wait_until(lambda: len(answered) >= seen + 10, 60)  # the other replica answers
            add_node(4, f"--address={address}", "--num-cpus=3")
            wait_until(lambda: len(places().get("replica", [])) == 2, 120)
            wait_until(lambda: progress(metrics) >= at_removal + 500, 180, lambda: trained.poll() in (None, 0))
            after = places()
            assert trained.wait(300) == 0, (folder / "train.log").read_text()[-4000:]
            seen = len(answered)
            wait_until(lambda: len(answered) >= seen + 10, 30)
        assert removed not in {node for nodes in after.values() for node in nodes}
        assert progress(metrics) >= STEPS
        served.terminate()
        assert served.wait(60) == 0


def bundle(tmp_path: Path) -> Path:
    """A bundle of the "random" policy."""
    rng = np.random.default_rng(0)
    columns = {
        "observation.state": rng.normal(size=(10, 3)).astype(np.float32),
        "action": rng.normal(size=(10, 2)).astype(np.float32),
    }
    normalizer = Normalizer.fit({"all": columns}, {**SMALL_CONTRACT.observation, "action": SMALL_CONTRACT.action}, {})
    return write_bundle(
        tmp_path / "random", policy={"name": "random"}, contract=SMALL_CONTRACT, normalizer=normalizer, params={}
    )


@contextlib.contextmanager
def asking(url: str):
    """A robot that asks for actions all the while; gives the list of answers. Whatever it is refused fails the test."""
    answered, stop, failed = [], threading.Event(), []

    def robot():
        state = {"observation.state": np.array([1, 2, 3], np.float32)}
        try:
            with PolicyClient(url, options=ClientOptions(timeout_s=60.0, retries=100)) as client:
                while not stop.wait(0.1):
                    answered.append(client.act(state, seed=1, step=len(answered)))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=robot)
    thread.start()
    try:
        yield answered
    finally:
        stop.set()
        thread.join()
    assert failed == []


def progress(metrics: Path) -> float:
    """Environment steps of the newest line of a run's metrics."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line).get("progress/env_steps", 0) for line in lines if line.endswith("}")]
    return max(steps, default=0)


def is_raylet(process: psutil.Process, node: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name() == "raylet" and f"--node-name={node}" in process.cmdline()
    return False


def wait_until(true, seconds, possible=lambda: True):
    """Until it is true; fails when it takes longer, or is no longer possible."""
    deadline = time.monotonic() + seconds
    while not true():
        assert possible(), "it has ended"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.3)
