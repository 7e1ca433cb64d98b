"""Simulators in processes of their own, which are killed and made anew when they hang or die.

A process is started anew (never forked), talks over an inherited socket, and dies with its owner, also when that is
killed.

Letters: N environments.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.core.wire import WireError
from rlsvc.envs.adapter import contract_spaces
from rlsvc.envs.channel import Channel, ChannelClosedError
from rlsvc.envs.runtime import ensure_runtime, runtime_environment
from rlsvc.spec.env import EnvBase

log = logging.getLogger(__name__)

# Making and resetting load models and scenes.
SLOW_FACTOR = 10
# A process imports its simulator first, which on a busy machine takes longer than any step.
START_S = 60.0
MEMORY_INTERVAL_S = 1.0


class SimulatorError(RuntimeError):
    """A simulator raised, hung or died; the message says which."""


class Child:
    """The process of one simulator, started when this is made and not waited for.

    One request is under way at a time: `ask`, then `take` its answer.
    """

    def __init__(self, spec: EnvBase) -> None:
        """Starts it and asks for the environment.

        Raises:
            UserError: its runtime cannot be built.
        """
        self._timeout_s, self._allowed_s, self._deadline = spec.step_timeout_s, 0.0, 0.0
        self._killed = False
        python = sys.executable if spec.runtime is None else ensure_runtime(spec.runtime)
        environment = _own_environment() if spec.runtime is None else runtime_environment(spec.runtime)
        mine, theirs = socket.socketpair()
        with theirs:
            command = [python, "-P", "-m", "rlsvc.envs.child", str(theirs.fileno()), str(os.getpid())]
            # A child's death signal comes with the end of the thread that started it, so one that lives on starts all.
            self._process = _spawner().submit(_start, command, theirs.fileno(), environment).result()
        self._channel = Channel(mine)
        here = spec.replace(isolation="none", runtime=None, max_memory_mb=None)
        self.ask({"do": "make", "spec": here.model_dump(mode="json")}, max(SLOW_FACTOR, START_S / self._timeout_s))

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def memory_mb(self) -> float:
        """Resident memory, 0 where the system does not tell."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return 0.0

    def ask(self, request: dict[str, Any], factor: float = 1.0) -> None:
        """Send a request; the time for its answer, `factor` times the step timeout, runs from now."""
        self._allowed_s = factor * self._timeout_s
        self._deadline = time.monotonic() + self._allowed_s
        # One that has died is noticed where its answer is taken.
        with contextlib.suppress(ChannelClosedError, TimeoutError):
            self._channel.send(request, self._allowed_s)

    def take(self) -> dict[str, Any]:
        """The answer to the request.

        Raises:
            SimulatorError: it raised, hung or died. In the last two cases its process is killed.
            UserError: it cannot be made as specified.
        """
        try:
            answer = self._channel.receive(self._deadline)
        except TimeoutError as error:
            self.kill()
            raise SimulatorError(f"no answer within {self._allowed_s:g} s") from error
        except (ChannelClosedError, WireError) as error:
            code = self.kill(grace_s=1.0)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            raise SimulatorError(f"its process ended ({how})") from error
        if "error" in answer:
            raise UserError(answer["error"]) if answer["user"] else SimulatorError(answer["error"])
        return answer

    def kill(self, grace_s: float = 0.0) -> int:
        """End the process and what it started.

        Args:
            grace_s: for how long to wait for a process that ends by itself.

        Returns:
            Its exit code as subprocess gives it, negative for a signal.
        """
        if not self._killed:
            self._killed = True
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


def _start(command: list[str], fd: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), env=environment, start_new_session=True)


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rlsvc-spawner")


def _own_environment() -> dict[str, str]:
    """This process's, with all that it can import."""
    path = [folder or os.getcwd() for folder in sys.path]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}


class ProcessSlots:
    """N simulators in processes, stepped side by side: all are asked before the first answer is taken."""

    def __init__(self, spec: EnvBase, num_envs: int) -> None:
        """Starts all.

        Raises:
            UserError: one cannot be made.
        """
        self._spec = spec
        self._next_memory_check = 0.0
        if spec.runtime is not None:
            ensure_runtime(spec.runtime)
        self._children = [Child(spec) for _ in range(num_envs)]
        try:
            ready = [child.take() for child in self._children]
        except SimulatorError as error:
            self.close()
            raise UserError(f"environment cannot be made: {error}") from error
        except UserError:
            self.close()
            raise
        self.contract = Contract.from_json(ready[0]["contract"])
        self.metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": ready[0]["render_fps"]}
        self.step_columns = {name: Feature.from_json(value) for name, value in ready[0]["step_columns"].items()}

    @property
    def pids(self) -> list[int]:
        """Of the simulators' processes."""
        return [child.pid for child in self._children]

    def step(self, actions: np.ndarray, into: Any) -> dict[int, str]:
        """Step all with actions [N, ...]."""
        for child, action in zip(self._children, actions, strict=True):
            child.ask({"do": "step", "action": action})

        def write(i: int, answer: dict[str, Any]) -> None:
            for name, rows in into.observation.items():
                rows[i] = answer["observation"][name]
            into.reward[i], into.success[i] = answer["reward"], answer["success"]
            into.terminated[i], into.truncated[i] = answer["terminated"], answer["truncated"]
            for name, rows in into.columns.items():
                rows[i] = answer["columns"][name]

        failed = self._take(range(len(self._children)), write)
        self._check_memory(failed)
        return failed

    def reset(self, seeds: Mapping[int, int], into: dict[str, Any]) -> dict[int, str]:
        """Begin an episode in these slots."""
        for i, seed in seeds.items():
            self._children[i].ask({"do": "reset", "seed": seed}, SLOW_FACTOR)

        def write(i: int, answer: dict[str, Any]) -> None:
            for name, rows in into.items():
                rows[i] = answer["observation"][name]

        return self._take(seeds, write)

    def rebuild(self, slots: Sequence[int]) -> dict[int, str]:
        """Kill these processes and start others."""
        for i in slots:
            self._children[i].kill()
            self._children[i] = Child(self._spec)
        return self._take(slots, lambda i, answer: None)

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.kill()

    def _take(
        self, slots: Sequence[int] | Mapping[int, int], write: Callable[[int, dict[str, Any]], None]
    ) -> dict[int, str]:
        failed: dict[int, str] = {}
        for i in slots:
            try:
                write(i, self._children[i].take())
            except (SimulatorError, UserError, ValueError, KeyError, TypeError) as error:
                failed[i] = str(error)
        return failed

    def _check_memory(self, failed: dict[int, str]) -> None:
        limit, now = self._spec.max_memory_mb, time.monotonic()
        if limit is None or now < self._next_memory_check:
            return
        self._next_memory_check = now + MEMORY_INTERVAL_S
        for i, child in enumerate(self._children):
            if i not in failed and (used := child.memory_mb) > limit:
                failed[i] = f"it holds {used:.0f} MB, more than max_memory_mb: {limit}"


class ProcessEnv(gymnasium.Env):
    """One environment in a process of its own; the same observations, actions and contract as in this one."""

    def __init__(self, spec: EnvBase) -> None:
        """Starts it.

        Raises:
            UserError: it cannot be made as specified.
        """
        self._child = Child(spec)
        try:
            ready = self._child.take()
        except SimulatorError as error:
            self._child.kill()
            raise UserError(f"environment cannot be made: {error}") from error
        except UserError:
            self._child.kill()
            raise
        self._contract = Contract.from_json(ready["contract"])
        self.observation_space, self.action_space = contract_spaces(self._contract)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": ready["render_fps"]}
        self.render_mode = "rgb_array"

    @property
    def pid(self) -> int:
        """Of the simulator's process."""
        return self._child.pid

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """What the environment gives and takes."""
        known = self._contract
        return Contract(known.observation, known.action, known.rate_hz, n_obs_steps, action_horizon)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Raises:
            SimulatorError: the simulator raised, hung or died.
        """
        self._child.ask({"do": "reset", "seed": seed, "options": options}, SLOW_FACTOR)
        answer = self._child.take()
        return answer["observation"], answer["info"]

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One step.

        Raises:
            SimulatorError: the simulator raised, hung or died.
        """
        self._child.ask({"do": "step", "action": np.asarray(action)})
        answer = self._child.take()
        return (answer["observation"], answer["reward"], answer["terminated"], answer["truncated"], answer["info"])

    def render(self) -> np.ndarray:
        """[H, W, 3] uint8."""
        self._child.ask({"do": "render"}, SLOW_FACTOR)
        return self._child.take()["image"]

    def close(self) -> None:
        """End its process."""
        self._child.kill()
