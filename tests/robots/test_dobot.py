"""The Dobot driver against the virtual CR5: what it refuses, what it notices, and real recordings replayed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from rlsvc.core.errors import BusyError, ContractError, UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.dobot import DobotDriver, positions_from_velocities
from rlsvc.robots.virtual.cr5 import VirtualCR5
from rlsvc.spec.dobot import DobotSpec

HOME = np.array([0.0, 0, -90, 0, 90, 0])
GRIPPER = {"output": "controller", "index": 1}


@pytest.fixture
def robot() -> Iterator[VirtualCR5]:
    with VirtualCR5(HOME, enabled=True) as robot:
        yield robot


def spec(robot: VirtualCR5, **changes: Any) -> DobotSpec:
    values = {
        "host": "127.0.0.1",
        **{f"{name}_port": port for name, port in robot.ports.items()},
        "timeout_s": 0.5,
        "stale_after_s": 0.3,
        **changes,
    }
    return DobotSpec.model_validate(values)


@contextlib.contextmanager
def connected(robot: VirtualCR5, **changes: Any) -> Iterator[DobotDriver]:
    driver = DobotDriver(spec(robot, **changes))
    driver.connect()
    try:
        yield driver
    finally:
        driver.close()


def wait_until(condition: Any, seconds: float = 3.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


def test_state_and_action_have_the_names_and_unit_of_the_recordings(robot: VirtualCR5):
    names = ("joint_0", "joint_1", "joint_2", "joint_3", "joint_4", "joint_5")
    plain = DobotDriver(spec(robot))
    assert (plain.action.names, plain.action.unit) == (names, "rad")
    assert plain.observation["observation.state"].names == names
    gripping = DobotDriver(spec(robot, gripper=GRIPPER))
    assert gripping.action.shape == gripping.observation["observation.state"].shape == (7,)
    assert gripping.action.names == (*names, "gripper")
    assert gripping.action.high is not None
    assert gripping.action.high[2:3] + gripping.action.high[6:] == (2.86, 1.0)


def test_a_reading_is_in_radians_with_the_time_at_which_it_came(robot: VirtualCR5):
    with connected(robot) as driver:
        before = time.monotonic()
        wait_until(lambda: driver.read().stamps["observation.state"] > before)
        reading = driver.read()
    state = reading.values["observation.state"]
    assert state.dtype == np.float32
    np.testing.assert_allclose(state, [0, 0, -np.pi / 2, 0, np.pi / 2, 0], atol=1e-6)
    assert before < reading.stamps["observation.state"] <= time.monotonic()


def test_the_arm_goes_to_what_is_sent_and_holds_it(robot: VirtualCR5):
    target = np.array([0.1, 0.2, -1.5, 0.1, 1.5, 0.3], np.float32)
    with connected(robot, servo_time_s=0.02) as driver:
        driver.send(target)
        wait_until(lambda: np.abs(driver.read().values["observation.state"] - target).max() < 1e-3)


@pytest.mark.parametrize("closed_level", [0, 1])
def test_the_last_action_dimension_opens_and_closes_the_gripper_and_is_read_back(robot: VirtualCR5, closed_level: int):
    robot.arm.outputs[3] = 1 - closed_level
    at_home = np.deg2rad(HOME)
    with connected(robot, gripper={"output": "controller", "index": 3, "closed_level": closed_level}) as driver:
        for value, closed in ((0.2, 0), (0.9, 1), (1.0, 1), (0.5, 0)):
            driver.send(np.append(at_home, value))
            assert robot.arm.outputs[3] == (closed_level if closed else 1 - closed_level)
            wait_until(lambda closed=closed: driver.read().values["observation.state"][6] == closed)


def test_a_gripper_at_the_tool_has_its_own_outputs(robot: VirtualCR5):
    with connected(robot, gripper={"output": "tool", "index": 2}) as driver:
        driver.send(np.append(np.deg2rad(HOME), 1.0))
        assert robot.arm.tool_outputs == {1: 0, 2: 1}
        assert driver.read().values["observation.state"][6] == 1.0
    with pytest.raises(ValidationError, match="expected 1 or 2 of the tool"):
        spec(robot, gripper={"output": "tool", "index": 3})


def test_the_dashboard_is_free_while_the_driver_is_connected(robot: VirtualCR5):
    with connected(robot), socket.create_connection(("127.0.0.1", robot.ports["dashboard"]), 1.0) as other:
        other.settimeout(1.0)
        other.sendall(b"RobotMode()")
        assert other.recv(100) == b"0,{5},RobotMode();"


# What it refuses, with one clear message each.


def test_a_host_that_refuses_the_connection(robot: VirtualCR5):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port} \(dashboard\): Connection refused; .*address"):
        DobotDriver(spec(robot, dashboard_port=port)).connect()


class _Web(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class _Chatty(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                self.request.sendall(b"SSH-2.0-OpenSSH\r\n" * 200)
                time.sleep(0.01)


@contextlib.contextmanager
def another_host(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("port", "handler", "message"),
    [
        ("dashboard_port", _Web, "does not speak Dobot's protocol V3: it answered RobotMode.. with 'HTTP/1.1 400"),
        ("motion_port", _Chatty, r"\(motion\) greets with b'SSH-2.0.*check driver.motion_port"),
        ("feedback_port", _Chatty, r"\(feedback\) sends b'SSH-2.0.*not one of Dobot's packets"),
    ],
)
def test_a_host_that_speaks_another_protocol(robot: VirtualCR5, port: str, handler: Any, message: str):
    with another_host(handler) as number, pytest.raises(UserError, match=message):
        DobotDriver(spec(robot, **{port: number})).connect()


def test_a_robot_in_error_tells_its_alarms_and_is_not_cleared_by_itself(robot: VirtualCR5):
    robot.arm.alarm(66)
    with pytest.raises(UserError, match=r"the robot is in error, alarms \[\[66\],.*Remove the cause"):
        DobotDriver(spec(robot, enable=True)).connect()
    assert robot.arm.alarms == [66]


def test_a_robot_that_is_not_enabled_is_refused_unless_it_may_be_enabled(robot: VirtualCR5):
    robot.arm.disable()
    with pytest.raises(UserError, match=r"disabled \(mode 4\), expected enabled and idle \(5\); .*driver.enable: true"):
        DobotDriver(spec(robot)).connect()
    assert not robot.arm.enabled
    with connected(robot, enable=True):
        assert robot.arm.enabled


def test_a_robot_that_another_program_moves_is_refused(robot: VirtualCR5):
    with robot.lock:
        robot.arm.queue(HOME + 90.0, 1)
    with pytest.raises(UserError, match=r"running \(mode 7\), expected enabled and idle \(5\); end that first"):
        DobotDriver(spec(robot)).connect()


def test_a_controller_in_another_control_mode_is_refused(robot: VirtualCR5):
    robot.tcp_mode = False
    with pytest.raises(UserError, match=r"Control Mode Is Not Tcp.*DobotStudio Pro"):
        DobotDriver(spec(robot)).connect()


@pytest.mark.parametrize("port", ["dashboard", "motion", "feedback"])
def test_a_robot_with_another_client_is_refused_and_taken_when_that_one_leaves(robot: VirtualCR5, port: str):
    driver = DobotDriver(spec(robot))
    with socket.create_connection(("127.0.0.1", robot.ports[port]), 1.0):
        time.sleep(0.05)
        with pytest.raises(BusyError, match=rf":{robot.ports[port]}.* in use by another client"):
            driver.connect()
    driver.connect()
    driver.close()


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ({"type": "opencv", "index_or_path": "/dev/none", "width": 64, "height": 48, "fps": 30}, "does not open"),
        ({"type": "opencw", "index_or_path": 0}, "unknown type of camera 'top' 'opencw'. Did you mean 'opencv'"),
        ({"type": "opencv", "index_or_path": 0}, "no width and height"),
        ({"type": "opencv", "index_or_path": 0, "hight": 3}, "hight"),
    ],
)
def test_a_camera_that_cannot_be_used_is_named(robot: VirtualCR5, camera: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as raised:
        DobotDriver(spec(robot, cameras={"top": camera})).connect()
    assert "'top'" in str(raised.value)


@pytest.mark.parametrize("command", [np.full(6, np.nan), np.full(6, np.inf), np.zeros(7), np.zeros(())])
def test_a_command_that_is_no_command_never_reaches_the_arm(robot: VirtualCR5, command: np.ndarray):
    with connected(robot) as driver, pytest.raises(ContractError, match="expected 6 finite numbers"):
        driver.send(command)
    assert robot.arm.mode == 5


# What it notices while it runs.


def test_feedback_that_stops_on_a_half_open_connection_is_a_lost_connection(robot: VirtualCR5):
    with connected(robot) as driver:
        driver.read()
        robot.freeze()
        wait_until(lambda: raises_lost(driver.read))
        with pytest.raises(ConnectionLost, match=r"the newest packet is .* ms old"):
            driver.send(np.deg2rad(HOME))
        robot.thaw()
        wait_until(lambda: not raises_lost(driver.read))


@pytest.mark.parametrize("port", ["motion", "feedback"])
def test_a_connection_that_ends_is_lost_and_can_be_made_anew(robot: VirtualCR5, port: str):
    with connected(robot, servo_time_s=0.3) as driver:
        driver.send(np.deg2rad(HOME + 5.0))  # it is still on its way when it is connected again
        robot.drop(port)
        wait_until(lambda: raises_lost(lambda: (driver.read(), driver.send(np.deg2rad(HOME)))))
        driver.close()
        driver.connect()
        driver.send(np.deg2rad(HOME))


def raises_lost(call: Any) -> bool:
    try:
        call()
    except ConnectionLost:
        return True
    return False


def test_a_torn_packet_costs_a_packet_and_not_the_connection(robot: VirtualCR5):
    with connected(robot) as driver:
        for keep in (0, 20, 50, 700, 1430):
            robot.tear(keep)
        time.sleep(0.15)
        np.testing.assert_allclose(driver.read().values["observation.state"], np.deg2rad(HOME), atol=1e-6)
        assert driver._feedback is not None
        assert driver._feedback.lost_bytes > 0


def test_an_alarm_is_seen_and_no_more_is_sent(robot: VirtualCR5):
    with connected(robot) as driver:
        driver.send(np.array([0, 0, -3.0, 0, 0, 0]))  # beyond joint 3's limit of 2.86
        wait_until(lambda: driver._newest().mode == 9)
        with pytest.raises(ConnectionLost, match="in error and takes no commands"):
            driver.send(np.deg2rad(HOME))
        np.testing.assert_allclose(driver.read().values["observation.state"], np.deg2rad(HOME), atol=1e-6)


def test_a_refused_command_is_told_with_its_error(robot: VirtualCR5):
    with connected(robot) as driver:
        robot.arm.enabled = False
        # The feedback tells it as well; here only the reply is looked at.
        with pytest.raises(ConnectionLost, match=r"ServoJ\(.*\) was answered with ErrorID -1 \(failed to execute\)"):
            wait_until(lambda: driver._move("ServoJ(0,0,-90,0,90,0)"))


def test_a_controller_that_gives_no_replies_on_the_motion_port_is_commanded_all_the_same(robot: VirtualCR5):
    robot.silent_motion = True
    with connected(robot, servo_time_s=None) as driver:
        driver.send(np.deg2rad(HOME + 1.0))
        wait_until(lambda: abs(driver.read().values["observation.state"][0] - np.deg2rad(1.0)) < 1e-3)


@pytest.mark.parametrize(("torque", "enabled"), [("hold", True), ("release", False)])
def test_stop_halts_the_arm_on_its_way(robot: VirtualCR5, torque: Any, enabled: bool):
    with connected(robot, servo_time_s=2.0) as driver:
        driver.send(np.deg2rad(HOME + 90.0))
        wait_until(lambda: robot.arm.q[0] > 1.0)
        driver.stop(torque)
        with robot.lock:
            stands = robot.arm.q.copy()
            assert robot.arm.enabled is enabled
        time.sleep(0.1)
        np.testing.assert_array_equal(robot.arm.q, stands)
        assert stands[0] < 80.0


def test_stop_says_so_when_nobody_answers(robot: VirtualCR5):
    with connected(robot, stop_timeout_s=0.1) as driver:
        robot.freeze()
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="no answer to RobotMode"):
            driver.stop("hold")
        assert time.monotonic() - began < 2.0
        robot.thaw()


DRIVE = """
import sys, numpy as np
from rlsvc.robots.dobot import DobotDriver
from rlsvc.spec.dobot import DobotSpec
driver = DobotDriver(DobotSpec.model_validate_json(sys.argv[1]))
driver.connect()
driver.send(np.deg2rad(np.array([90.0, 0, -90, 0, 90, 0])))
print("sent", flush=True)
sys.stdin.read()
"""


def test_the_stopper_stops_the_arm_of_a_process_that_hangs(robot: VirtualCR5):
    described = spec(robot, servo_time_s=3.0)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVE, described.model_dump_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: robot.arm.q[0] > 1.0)
        stopper = DobotDriver(described).stopper()
        stopper.load()(**stopper.arguments, torque="hold")
        stands = robot.arm.q[0]
        time.sleep(0.1)
        assert robot.arm.q[0] == stands < 80.0
    finally:
        process.kill()
        process.communicate()


# Recordings of a real CR5 (tests/data/SOURCES.md).

FOLLOWS_RAD = 0.03
"""How far behind a command the arm may be when the next one comes: at 0.7 rad/s some 40 ms."""


def recording(root: Path, episode: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = pq.read_table(root / f"tests/data/cr5_v21/data/chunk-000/episode_{episode:06d}.parquet")
    state, action, seconds = (
        np.array(table[name].to_pylist()) for name in ("observation.state", "action", "timestamp")
    )
    return state, action, seconds


@pytest.mark.parametrize(("episode", "within_rad"), [(0, 0.018), (2, 0.045)])
def test_recorded_actions_are_velocities_whose_integral_is_the_recorded_way(
    root: Path, episode: int, within_rad: float
):
    state, action, seconds = recording(root, episode)
    assert np.abs(state - state[0]).max() > 0.7
    positions = positions_from_velocities(state[0], action[:, :6], seconds)
    assert np.abs(positions - state).max() < within_rad


def test_velocities_are_integrated_by_the_trapezoidal_rule():
    velocity = np.array([[0.0] * 6, [2.0] * 6, [4.0] * 6])
    positions = positions_from_velocities([1.0] * 6, velocity, np.array([0.0, 0.5, 0.6]))
    np.testing.assert_allclose(positions[:, 0], [1.0, 1.5, 1.8])  # 0.5 s at 1 rad/s, 0.1 s at 3 rad/s


def test_a_real_arms_recorded_actions_are_replayed(root: Path):
    state, action, seconds = recording(root, 0)
    positions = positions_from_velocities(state[0], action[:, :6], seconds)
    measured = []
    with (
        VirtualCR5(np.rad2deg(state[0]), enabled=True, time_scale=0.0) as robot,
        connected(robot, gripper=GRIPPER, servo_time_s=0.1, stale_after_s=5.0) as driver,
    ):
        for i, step in enumerate(np.diff(seconds, append=seconds[-1] + 0.1)):
            driver.send(np.append(positions[i], action[i, 6]).astype(np.float32))
            wait_until(lambda sent=i + 1: robot.commands["motion"] == sent)
            robot.pass_time(float(step))
            wait_until(lambda: int(driver._newest().record["time_stamp"]) == round(robot.arm.time_s * 1e3))
            measured.append(driver.read().values["observation.state"])
    joints, gripper = np.array(measured)[:, :6], np.array(measured)[:, 6]
    assert np.abs(joints - positions).max() < FOLLOWS_RAD
    assert np.abs(joints - state).max() < FOLLOWS_RAD + 0.018
    np.testing.assert_array_equal(gripper, action[:, 6])
    assert set(gripper) == {0.0, 1.0}


@pytest.mark.parametrize(("latency_s", "answers"), [(0.05, True), (0.8, False)])
def test_a_slow_controller_is_waited_for_until_the_deadline(robot: VirtualCR5, latency_s: float, answers: bool):
    robot.latency_s = latency_s
    driver = DobotDriver(spec(robot))
    if answers:
        driver.connect()
        driver.close()
    else:
        with pytest.raises(ConnectionLost, match=r"no answer to RobotMode\(\) within 0.5 s"):
            driver.connect()


def test_a_camera_that_gives_the_same_frame_while_the_arm_moves_is_lost(robot: VirtualCR5):
    frame = {"observation.images.top": np.full((4, 6, 3), 90, np.uint8)}

    def move_on(driver: DobotDriver) -> None:
        for step in range(100):
            state = driver.read().values["observation.state"]
            driver.send(state + np.array([0.02 * (step > 3), 0, 0, 0, 0, 0]))
            time.sleep(0.03)

    with connected(robot, watch={"frozen_s": 0.2}) as driver:
        driver._cameras.read = lambda: (frame, {"observation.images.top": time.monotonic()})
        with pytest.raises(ConnectionLost, match="camera 'top' is frozen"):
            move_on(driver)
