"""A virtual SO-101: a serial port that LeRobot's own driver opens, physics in real time, cameras over HTTP.

    python -m rlsvc.robots.virtual.so101 --id my_arm

prints the port, the cameras' addresses and what to type next. As a process of its own (`start`) it shares no GIL with
the driver; within a process (`VirtualSO101`) it is for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from rlsvc.core.errors import UserError, unknown_name
from rlsvc.robots.virtual.cameras import CameraProcess, View, Web
from rlsvc.robots.virtual.feetech import Faults, VirtualBus
from rlsvc.robots.virtual.so101_sim import JOINTS, MODEL, SO101Sim, write_calibration

CAMERAS = ("front", "wrist")
BEHIND = 0.05
"""s: physics that is further behind the clock does not catch up."""
PORTION = 4
"""Steps of physics between two looks at the bus."""


class VirtualSO101:
    """Servos on a port, moved by physics in real time. A context manager.

    Attributes:
        sim: the arm; take `sim.lock` to look at several of its values at one time.
        bus: the servos' bus; `bus.port` is what a driver opens, `bus.faults` what goes wrong on it.
        cameras: addresses of the cameras' streams by name.
        calibration: as in LeRobot's files, None if the motors are as the factory made them.
        url: of what this process answers: GET /state, POST /hand, /faults, /reset, in JSON.
        late: how often physics was too slow for the clock.
    """

    def __init__(
        self,
        cameras: Mapping[str, View] | None = None,
        calibrated: bool = True,
        seed: int = 0,
        port: int = 0,
        assembly: tuple[int, ...] | None = None,
    ) -> None:
        """No cameras by default; `port` is that of HTTP, `assembly` see so101_sim.ASSEMBLY (each arm has its own)."""
        self.sim = SO101Sim(seed) if assembly is None else SO101Sim(seed, assembly)
        self.calibration = self.sim.calibrate() if calibrated else None
        self.bus = VirtualBus(self.sim.servos, Faults(), seed, self._move)
        self.cameras: dict[str, str] = {}
        self.late = 0
        self._views = dict(cameras or {})
        self._drawing: CameraProcess | None = None
        self._port = port
        self._moved = 0.0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            if self._views:
                self._drawing = opened.enter_context(CameraProcess(MODEL, self._views, self.sim.model.nq))
                self.cameras = self._drawing.urls
            post = {"hand": self._hand, "faults": self._faults, "reset": self._reset}
            self.url = opened.enter_context(Web({}, {"state": self.state}, post, self._port)).url
            self._moved = time.monotonic()
            opened.enter_context(self.bus)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _move(self) -> bool:
        """Let physics catch up with the clock, a portion at a time; returns whether it has."""
        now = time.monotonic()
        if now - self._moved > BEHIND:
            self.late += 1
            self._moved = now - BEHIND
        for _ in range(PORTION):
            if self._moved >= now:
                break
            self.sim.step()
            self._moved += self.sim.dt
        if self._drawing is not None:
            self._drawing.show(self.sim.data.qpos)
        return self._moved >= now

    def state(self) -> dict[str, Any]:
        """By joint angles (rad), velocities (rad/s) and torque; the cube [7]; when (monotonic, and simulated, s)."""
        with self.sim.lock:
            return {
                "stamp": time.monotonic(),
                "time": float(self.sim.data.time),
                "angles": dict(zip(JOINTS, self.sim.angles.tolist(), strict=True)),
                "velocities": dict(zip(JOINTS, self.sim.data.qvel[: len(JOINTS)].tolist(), strict=True)),
                "torque": {joint: servo.torque for joint, servo in zip(JOINTS, self.sim.servos, strict=True)},
                "cube": self.sim.cube.tolist(),
                "late": self.late,
            }

    def _hand(self, angles: dict[str, float | None]) -> dict[str, Any]:
        self.sim.hand(angles)
        return self.state()

    def _reset(self, _: object) -> dict[str, Any]:
        self.sim.reset()
        return self.state()

    def _faults(self, faults: dict[str, Any]) -> dict[str, Any]:
        """Fields of Faults, and `camera`: {name: fault}."""
        for name, fault in faults.pop("camera", {}).items():
            if self._drawing is None:
                raise unknown_name("camera", name, ())
            self._drawing.fault(name, fault)
        for name, value in faults.items():
            if name not in Faults.__dataclass_fields__:
                raise unknown_name("fault", name, Faults.__dataclass_fields__)
            if name == "error":
                value = {int(id): bits for id, bits in value.items()}
            setattr(self.bus.faults, name, set(value) if name == "mute" else value)
        return self.state()


class RemoteSO101:
    """A virtual SO-101 in a process of its own.

    Attributes:
        port: serial.
        url: see VirtualSO101.
        cameras: see VirtualSO101.
        pid: of its process.
    """

    def __init__(self, port: str, url: str, cameras: dict[str, str], pid: int) -> None:
        self.port, self.url, self.cameras, self.pid = port, url, cameras, pid

    def state(self) -> dict[str, Any]:
        """See VirtualSO101.state."""
        return self._ask("state", None)

    def hand(self, angles: Mapping[str, float | None]) -> None:
        """See SO101Sim.hand."""
        self._ask("hand", dict(angles))

    def faults(self, **faults: Any) -> None:
        """Fields of Faults, and `camera={name: fault}`."""
        self._ask("faults", faults)

    def reset(self) -> None:
        """See SO101Sim.reset."""
        self._ask("reset", {})

    def _ask(self, name: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.url}/{name}", data, timeout=5) as answer:
            return json.load(answer)


@contextmanager
def start(*arguments: str) -> Iterator[RemoteSO101]:
    """The command of this module as a child process with these arguments; ends with the block."""
    command = [sys.executable, "-m", "rlsvc.robots.virtual.so101", "--json", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise UserError(f"the virtual SO-101 did not start (exit code {child.wait()}); see its output above")
        told = json.loads(line)
        yield RemoteSO101(told["port"], told["url"], told["cameras"], child.pid)
    finally:
        child.terminate()
        child.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m rlsvc.robots.virtual.so101", description="A virtual SO-101 arm.")
    parser.add_argument("--cameras", default="front", help=f"some of {', '.join(CAMERAS)}, with commas, or none")
    parser.add_argument("--size", default="640x480", help="of images, WIDTHxHEIGHT px")
    parser.add_argument("--fps", type=float, default=10.0, help="of the cameras")
    parser.add_argument("--http-port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--id", help="write LeRobot's calibration file for this id")
    parser.add_argument("--calibration-dir", type=Path, help="where that file goes; LeRobot's own folder by default")
    parser.add_argument("--uncalibrated", action="store_true", help="motors as the factory made them")
    parser.add_argument("--leader", action="store_true", help="the file of a leader arm (a teleoperator)")
    parser.add_argument("--seed", type=int, default=0, help="of where the cube lies")
    parser.add_argument("--json", action="store_true", help="print one line of JSON; end when standard input does")
    given = parser.parse_args(arguments)
    names = [name for name in given.cameras.split(",") if name and name != "none"]
    for name in names:
        if name not in CAMERAS:
            parser.error(str(unknown_name("camera", name, CAMERAS)))
    try:
        width, height = (int(part) for part in given.size.split("x"))
    except ValueError:
        parser.error(f"--size: got '{given.size}', expected WIDTHxHEIGHT, such as 640x480")
    views = {name: View(name, width, height, given.fps) for name in names}
    sys.setswitchinterval(0.0005)  # a servo answers at once, whatever the cameras do
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell that put it behind had it ignore Ctrl-C
        signal.signal(number, lambda *_: sys.exit(0))
    with VirtualSO101(views, not given.uncalibrated, given.seed, given.http_port) as arm:
        if given.id and arm.calibration:
            write_calibration(_calibration_file(given.calibration_dir, given.id, given.leader), arm.calibration)
        told = {"port": arm.bus.port, "url": arm.url, "cameras": arm.cameras}
        if given.json:
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()
            sys.stdin.read()  # an owner that dies closes it
        else:
            sys.stdout.write(_told(told, given.id))
            sys.stdout.flush()
            signal.pause()


def _calibration_file(folder: Path | None, id: str, leader: bool) -> Path:
    """Where LeRobot looks for it."""
    if folder is None:
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "lerobot"
        root = Path(
            os.environ.get("HF_LEROBOT_CALIBRATION", Path(os.environ.get("HF_LEROBOT_HOME", home)) / "calibration")
        )
        folder = root / ("teleoperators/so_leader" if leader else "robots/so_follower")
    return folder / f"{id}.json"


def _told(told: dict[str, Any], id: str | None) -> str:
    lines = [f"port     {told['port']}", *(f"camera   {name}: {url}" for name, url in told["cameras"].items())]
    lines += [f"state    {told['url']}/state"]
    lines += [f"move a joint by hand   curl -d '{{\"elbow_flex\": 0.5}}' {told['url']}/hand   (rad; null lets go)"]
    if id is None:
        lines += [
            f"calibrate   lerobot-calibrate --robot.type=so101_follower --robot.port={told['port']} --robot.id=ID"
        ]
    return "\n".join([*lines, "Ctrl-C ends it.", ""])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
