"""Policies that are cheap and tell what they were asked; servers on real sockets without Ray."""

import contextlib
import threading
import time

import numpy as np
import uvicorn

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.types import ActionChunk
from rlsvc.serve.app import build_app
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings

POISON = -666.0
"""A state that makes the policy raise."""

CONTRACT = Contract(
    observation={
        "observation.state": Feature((3,), "float32"),
        "observation.image": Feature((4, 4, 3), "uint8"),
        "task": Feature((), "str"),
    },
    action=Feature((2,), "float32"),
    rate_hz=10.0,
    n_obs_steps=2,
    action_horizon=4,
)
SMALL_CONTRACT = Contract({"observation.state": Feature((3,), "float32")}, Feature((2,), "float32"), 10.0, 1, 4)


def observation(value: float = 1.0) -> dict[str, np.ndarray | str]:
    """A window that fits CONTRACT."""
    return {
        "observation.state": np.full((2, 3), value, np.float32),
        "observation.image": np.full((2, 4, 4, 3), 7, np.uint8),
        "task": "push the T",
    }


def expected_action(state: np.ndarray, seed: int, step: int, horizon: int = 4) -> np.ndarray:
    """[H, 2], what FakeRunner answers: the sum of the newest state, plus h, and seed + step / 8."""
    action = np.empty((horizon, 2), np.float32)
    action[:, 0] = np.asarray(state, np.float32).reshape(-1, 3)[-1].sum() + np.arange(horizon)
    action[:, 1] = seed + step / 8
    return action


class FakeRunner:
    """Answers `expected_action`, and remembers the size of every batch."""

    robot = None

    def __init__(self, contract: Contract = CONTRACT, seconds: float = 0.0, version: str = "fake-1") -> None:
        self.contract = contract
        self.version = version
        self.seconds = seconds
        self.batches: list[int] = []
        self.open = threading.Event()
        self.open.set()

    def warm_up(self) -> None:
        pass

    def initial_carry(self, batch_size):
        return ()

    def act(self, observation, seeds, steps, carry=None):
        self.open.wait(10)
        time.sleep(self.seconds)
        states = observation["observation.state"]
        self.batches.append(len(states))
        if (states == POISON).any():
            raise RuntimeError("secret detail of the policy")
        actions = [
            expected_action(state, int(seed), int(step)) for state, seed, step in zip(states, seeds, steps, strict=True)
        ]
        return ActionChunk(np.stack(actions), self.version)


COUNTED = Contract({"x": Feature((), "float32")}, Feature((3,), "float32"), 10.0, 2, 4)
"""Windows of two, chunks of four."""


class Counting:
    """Acts [number of the chunk in its episode, oldest observation, newest], at every step of the chunk."""

    contract, robot = COUNTED, None

    def __init__(self, version: str = "counting") -> None:
        self.version = version

    def initial_carry(self, batch_size):
        return np.zeros((batch_size, 1), np.float32)

    def act(self, observation, seeds, steps, carry=None):
        if (observation["x"] == POISON).any():
            raise RuntimeError("secret detail of the policy")
        begun = self.initial_carry(len(seeds)) if carry is None else np.where(steps[:, None] == 0, 0, carry)
        action = np.concatenate([begun, observation["x"]], axis=1).astype(np.float32)
        return ActionChunk(np.repeat(action[:, None], 4, 1), self.version, begun + 1)

    def warm_up(self) -> None:
        pass


@contextlib.contextmanager
def service_of(runner, **settings):
    """A PolicyService named "fake" that is closed at the end."""
    service = PolicyService("fake", runner, ServeSettings(**settings))
    try:
        yield service
    finally:
        runner_gate = getattr(runner, "open", None)
        if runner_gate is not None:
            runner_gate.set()
        service.close()


@contextlib.contextmanager
def serving(runner, port: int = 0, uvicorn_options: dict | None = None, keys=None, **settings):
    """Serve a runner on a loopback socket with uvicorn, as a Ray Serve replica does; gives "127.0.0.1:port"."""
    with service_of(runner, **settings) as service, serving_app(build_app(service, keys), port, uvicorn_options) as url:
        yield url


@contextlib.contextmanager
def serving_app(app, port: int = 0, uvicorn_options: dict | None = None):
    """Serve an application likewise."""
    # No logging set-up by uvicorn: it closes all handlers there are, and absl's closes the stderr that pytest lent.
    options = {"log_config": None, "log_level": "error", "timeout_graceful_shutdown": 1} | (uvicorn_options or {})
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
