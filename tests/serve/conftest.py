"""What tests of several files need; makes serving_fakes importable, in whatever way pytest imports test modules."""

import io
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving_fakes import SMALL_CONTRACT

from rlsvc.data.normalize import Normalizer
from rlsvc.serve import log
from rlsvc.serve.haproxy import free_ports
from rlsvc.store.bundle import write_bundle


@pytest.fixture(scope="session")
def serve_port(ray_cluster):
    """The port of the suite's Serve, which keeps its first one."""
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of the "random" policy."""
    rng = np.random.default_rng(0)
    columns = {
        "observation.state": rng.normal(size=(10, 3)).astype(np.float32),
        "action": rng.normal(size=(10, 2)).astype(np.float32),
    }
    normalizer = Normalizer.fit({"all": columns}, {**SMALL_CONTRACT.observation, "action": SMALL_CONTRACT.action}, {})
    folder = tmp_path_factory.mktemp("bundle") / "random"
    return write_bundle(folder, policy={"name": "random"}, contract=SMALL_CONTRACT, normalizer=normalizer, params={})


@pytest.fixture
def lines(monkeypatch):
    """What was logged as JSON so far, by line."""
    ours = logging.getLogger("rlsvc")
    kept = ours.handlers, ours.propagate, ours.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    log.log_as_json("info")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    ours.handlers, ours.propagate = kept[:2]
    ours.setLevel(kept[2])
