"""The process of one simulator: `python -m rlsvc.envs.child FD OWNER`.

It reads one message at a time from the socket FD and answers it, until the socket ends or its owner dies. It may run in
an environment of the simulator's own, so what it imports needs numpy, gymnasium, pydantic and msgpack, and no more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import step_columns
from rlsvc.envs.channel import Channel, ChannelClosedError
from rlsvc.envs.make import make_here
from rlsvc.spec.env import EnvBase, EnvSpec

PR_SET_PDEATHSIG = 1
_NUMBERS = (bool, int, float, np.generic)


def main() -> None:
    """Serve until the owner has gone."""
    number, owner = int(sys.argv[1]), int(sys.argv[2])
    die_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when its simulators end
    os.dup2(2, 1)  # what a simulator prints is not the owner's output
    channel = Channel(socket.socket(fileno=number))
    server = Server()
    while True:
        try:
            request = channel.receive()
            channel.send(server.answer(request))
        except ChannelClosedError:
            return


def die_with(owner: int) -> None:
    """Let the kernel kill this process when its owner dies, however it does, also while a simulator hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        sys.exit()


class Server:
    """The simulator, driven by messages; an error is an answer."""

    def __init__(self) -> None:
        self._env: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to `make`, `reset`, `step` or `render`."""
        try:
            return getattr(self, f"_{request['do']}")(request)
        except UserError as error:
            return {"error": str(error), "user": True}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}", "user": False}

    def _make(self, request: dict[str, Any]) -> dict[str, Any]:
        spec: EnvBase = TypeAdapter(EnvSpec).validate_python(request["spec"])
        self._env = make_here(spec)
        self._columns = step_columns(self._env)
        return {
            "contract": self._env.contract().to_json(),
            "render_fps": float(self._env.metadata["render_fps"]),
            "step_columns": {name: feature.to_json() for name, feature in self._columns.items()},
        }

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        observation, info = self._env.reset(seed=request["seed"], options=request.get("options"))
        return {"observation": observation, "info": _sendable(info)}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self._env.step(request["action"])
        return {
            "observation": observation,
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "success": bool(info.get("is_success", info.get("success", False))),
            "info": _sendable(info),
            "columns": {name: np.asarray(info[name]) for name in self._columns},
        }

    def _render(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.asarray(self._env.render())}


def _sendable(info: dict[str, Any]) -> dict[str, Any]:
    """What of an info can travel: numbers and texts, and maps of them."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, str) or (isinstance(value, _NUMBERS) and np.asarray(value).dtype.kind in "biuf"):
            found[str(key)] = value
        elif isinstance(value, dict):
            found[str(key)] = _sendable(value)
    return found


if __name__ == "__main__":
    main()
