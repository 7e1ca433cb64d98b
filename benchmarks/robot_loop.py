"""How well a virtual SO-101 is driven at 30 Hz with a camera at 10 Hz, and how long a key takes to become a command.

    python benchmarks/robot_loop.py --minutes 10

The arm is a process of its own: servos on a serial port, physics in real time, a rendered camera. LeRobot's unmodified
driver reads and moves it, through the guard, in this process; a policy moves all joints in slow waves for half of the
time, then a person at the console (a WebSocket, as the page has) jogs a joint back and forth. Printed: overruns (ticks
that were missed), jitter, the time in use of a period, dropped commands (ticks for which none was sent), the skew
between joints and camera, and the time from a key's message to the first command that follows it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import load_of_others, percentile_interval, write_result
from websockets.sync.client import connect

from rlsvc.robots.console.app import ConsoleServer
from rlsvc.robots.console.hub import ConsoleHub
from rlsvc.robots.drivers import make_driver
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.handover import Planned
from rlsvc.robots.operator import Jog, Operator
from rlsvc.robots.station import Station
from rlsvc.robots.virtual.so101 import start
from rlsvc.spec.guard import GuardSpec
from rlsvc.spec.lerobot_robot import SO101Spec

RATE, CAMERA_FPS = 30.0, 10
GUARD = GuardSpec(
    low=(-105, -105, -96, -95, -160, 0), high=(105, 105, 96, 95, 160, 100), velocity=(90, 90, 90, 90, 90, 200),
    acceleration=(600, 600, 600, 600, 600, 2000), step=(30, 30, 30, 30, 30, 60), workspace=None, time_to_live_s=0.5,
    expiry_s=0.5, torque="hold", on_limit="clip",
)  # fmt: skip
SPEED = np.array([30.0, 30, 30, 30, 30, 60])
PACKAGES = ("rlsvc", "lerobot", "mujoco", "numpy", "websockets", "uvicorn")


def person(url: str, seconds: float) -> None:
    """Take over, and move a joint back and forth, with a new key every half a second."""
    with connect(url.replace("http", "ws").replace("/?", "/ws?")) as socket:
        threading.Thread(target=lambda: [None for _ in socket], daemon=True).start()
        say = lambda **message: socket.send(json.dumps(message))  # noqa: E731
        say(type="hello", person="the benchmark")
        say(type="take_over")
        begin, rng = time.monotonic(), np.random.default_rng(0)
        while time.monotonic() - begin < seconds:
            held = time.monotonic() + rng.uniform(0.3, 0.7)
            key = float(rng.choice([-1.0, 0.0, 1.0]))
            while time.monotonic() < held:  # a key that is held is said again, as the page does
                say(type="axes", axes=[key, 0, 0, 0, 0, 0])
                time.sleep(0.08)
        say(type="hand_back")


def main() -> None:
    """Drive, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--no-store", action="store_true")
    args = parser.parse_args()
    load = load_of_others()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--fps", str(CAMERA_FPS), "--id", "arm", "--calibration-dir", folder)
        with start(*arguments) as arm:
            camera = {"type": "mjpeg", "url": arm.cameras["front"], "width": 640, "height": 480, "fps": CAMERA_FPS}
            driver = make_driver(
                SO101Spec(port=arm.port, id="arm", calibration_dir=Path(folder), cameras={"front": camera})
            )
            with GuardedRobot(f"loop-{os.getpid()}", driver, GUARD, RATE) as robot:
                jog, operator = Jog(SPEED), Operator(robot)
                station = Station(robot, operator, rate_hz=RATE, max_skew_s=1.0, teleop=jog)
                hub = ConsoleHub(station)
                console = ConsoleServer(hub)
                ticks, dropped = drive(station, hub, console.url, args.minutes * 60)
                console.close()
                report(station, jog, ticks, dropped, load, args)


def drive(station: Station, hub: ConsoleHub, url: str, seconds: float) -> tuple[int, int]:
    """Ticks, and ticks for which no command was sent."""
    station.begin()
    begin = time.monotonic()
    rest: np.ndarray | None = None
    ticks, dropped, hands = 0, 0, None
    while (passed := time.monotonic() - begin) < seconds:
        reading = station.observe()
        if rest is None:
            rest = station.robot.positions(reading.values["observation.state"])
        wave = rest + np.array([20, 25, -20, -15, 20, 20]) * (1 - np.cos(passed * 0.8)) / 2
        step = station.act(Planned(wave.astype(np.float32), reading.stamps["observation.state"]), reading, "wave")
        hub.publish(step)
        if (stopped := station.robot.stopped) is not None:
            raise SystemExit(f"the robot was stopped by {stopped.by} after {passed:.1f} s: {stopped.why}")
        ticks, dropped = ticks + 1, dropped + (step.verdict is None or step.verdict.sent is None)
        if hands is None and passed > seconds / 2:
            hands = threading.Thread(target=person, args=(url, seconds / 2 - 2), daemon=True)
            hands.start()
    station.end()
    return ticks, dropped


def report(station: Station, jog: Jog, ticks: int, dropped: int, load: float, args: argparse.Namespace) -> None:
    """Print, and store where the machine was quiet and the time long enough."""
    found = station.metrics()
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    print(f"{ticks} ticks, {dropped} without a command, {len(jog.latencies)} keys")
    keys = np.array(jog.latencies) * 1e3
    p50, p99 = percentile_interval(keys, 50), percentile_interval(keys, 99)
    print(f"key to command: p50 {p50[0]:.1f} ms, p99 {p99[0]:.1f} ms")
    if args.no_store or args.minutes < 10:
        return
    if load > 1.0:
        print(f"not stored: the machine had a load of {load:.1f} when it began")
        return
    figures = {
        "robot_loop_overruns": (found["overruns"], "count"),
        "robot_loop_jitter_p99_ms": (found["jitter_p99_ms"], "ms"),
        "robot_loop_dropped_commands": (float(dropped), "count"),
    }
    for name, (value, unit) in figures.items():
        write_result(name, value, unit, packages=PACKAGES)
    write_result("key_to_command_p50_ms", p50[0], "ms", low=p50[1], high=p50[2], packages=PACKAGES)
    write_result("key_to_command_p99_ms", p99[0], "ms", low=p99[1], high=p99[2], packages=PACKAGES)


if __name__ == "__main__":
    main()
