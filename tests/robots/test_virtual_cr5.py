"""The virtual CR5's own behaviour, over plain sockets: what Dobot's guide says of the real one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rlsvc.robots.virtual.cr5 import VirtualCR5
from rlsvc.robots.virtual.cr5_arm import CR5Arm
from rlsvc.robots.virtual.cr5_commands import execute

HOME = np.array([0.0, 0, -90, 0, 90, 0])


@pytest.fixture
def robot() -> Iterator[VirtualCR5]:
    with VirtualCR5(HOME, time_scale=5.0) as robot:
        yield robot


def line(robot: VirtualCR5, port: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", robot.ports[port]), 2.0)
    connection.settimeout(2.0)
    return connection


def ask(connection: socket.socket, command: str) -> str:
    connection.sendall(command.encode())
    text = ""
    while not text.endswith(";"):
        text += connection.recv(4096).decode()
    return text


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("RobotMode()", "0,{4},RobotMode();"),
        ("enableROBOT()", "0,{},enableROBOT();"),
        ("GetAngle()", "0,{0.000000,0.000000,-90.000000,0.000000,90.000000,0.000000},GetAngle();"),
        ("SpeedFactor(80)", "0,{},SpeedFactor(80);"),
        ("SpeedFactor(0)", "-40001,{},SpeedFactor(0);"),
        ("SpeedFactor(fast)", "-30001,{},SpeedFactor(fast);"),
        ("SpeedFactor()", "-20000,{},SpeedFactor();"),
        ("DO(1,2)", "-40002,{},DO(1,2);"),
        ("DO(1,1)", "0,{},DO(1,1);"),
        ("ToolDO(3,1)", "-40001,{},ToolDO(3,1);"),
        ("GetErrorID()", "0,{[[],[],[],[],[],[],[]]},GetErrorID();"),
        ("Mov(1)", "-10000,{},Mov(1);"),
        ("ServoJ(0,0,0,0,0,0)", "-10000,{},ServoJ(0,0,0,0,0,0);"),  # it belongs to the motion port
        ("nonsense", "-10000,{},nonsense;"),
    ],
)
def test_the_dashboard_answers_as_the_guide_says(command: str, reply: str):
    assert execute(CR5Arm(HOME), command, motion=False) == reply


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("ServoJ(0,0,-90,0,90,0)", 0),
        ("ServoJ(0,0,-90,0,90,0,t=0.05,gain=300)", 0),
        ("ServoJ(0,0,-90,0,90,0,t=0.001)", -40007),
        ("ServoJ(0,0,-90,0,90,0,speed=1)", -20000),
        ("ServoJ(0,0,-90,0,90)", -20000),
        ("ServoJ(0,0,nan,0,90,0)", -40003),
        ("ServoJ(0,0,x,0,90,0)", -30003),
        ("RobotMode()", -10000),
    ],
)
def test_the_motion_port_checks_parameters_one_by_one(command: str, error: int):
    assert execute(CR5Arm(HOME, enabled=True), command, motion=True).startswith(f"{error},{{}},")


def test_nothing_moves_while_it_is_disabled():
    arm = CR5Arm(HOME)
    for command in ("ServoJ(1,0,-90,0,90,0)", "JointMovJ(1,0,-90,0,90,0)", "MovJ(470,-141,469,180,0,-90)"):
        assert execute(arm, command, motion=True).startswith("-1,")
    arm.advance(1.0)
    np.testing.assert_array_equal(arm.q, HOME)
    assert arm.mode == 4


@pytest.mark.parametrize(("joint", "degrees", "alarm"), [(0, 360.0, 64), (2, -170.0, 69), (5, 400.0, 74)])
def test_a_target_beyond_a_joints_limit_is_an_alarm_and_halts(joint: int, degrees: float, alarm: int):
    arm = CR5Arm(HOME, enabled=True)
    execute(arm, "JointMovJ(90,0,-90,0,90,0)", motion=True)
    arm.advance(0.1)
    target = HOME.copy()
    target[joint] = degrees
    assert execute(arm, f"ServoJ({','.join(map(str, target))})", motion=True).startswith("0,")
    assert arm.mode == 9
    assert f"[[{alarm}]," in execute(arm, "GetErrorID()", motion=False)
    before = arm.q
    arm.advance(1.0)
    np.testing.assert_array_equal(arm.q, before)
    assert execute(arm, "EnableRobot()", motion=False).startswith("-1,")
    assert execute(arm, "ServoJ(0,0,-90,0,90,0)", motion=True).startswith("-1,")
    execute(arm, "ClearError()", motion=False)
    assert arm.mode == 5


def test_a_servo_target_is_reached_in_its_time_and_no_joint_is_faster_than_it_can_be():
    arm = CR5Arm(HOME, enabled=True)
    arm.servo(HOME + 9.0, 0.1)  # 90 deg/s
    for _ in range(10):
        arm.advance(0.01)
    np.testing.assert_allclose(arm.reference, HOME + 9.0)
    arm.servo(HOME + 100.0, 0.02)  # 4,550 deg/s are asked for
    speeds = []
    for _ in range(20):
        arm.advance(0.01)
        speeds.append(np.abs(arm.qd).max())
    assert 170 < max(speeds) <= 180.0 + 1e-9
    np.testing.assert_allclose(arm.reference[0], 9.0 + 0.2 * 180.0)


def test_moves_wait_for_those_before_them_and_reset_forgets_them():
    arm = CR5Arm(HOME, enabled=True)
    execute(arm, "SpeedFactor(50)", motion=False)  # 90 deg/s
    execute(arm, "JointMovJ(9,0,-90,0,90,0)", motion=True)  # 0.1 s
    execute(arm, "JointMovJ(9,18,-90,0,90,0)", motion=True)  # 0.2 s
    arm.advance(0.1)
    np.testing.assert_allclose(arm.reference[:2], [9.0, 0.0])
    arm.advance(0.1)
    np.testing.assert_allclose(arm.reference[:2], [9.0, 9.0])
    execute(arm, "ResetRobot()", motion=False)
    held = arm.q
    arm.advance(1.0)
    np.testing.assert_array_equal(arm.q, held)
    assert arm.mode == 5


def test_servo_p_and_mov_j_reach_a_pose_and_one_out_of_reach_is_an_alarm():
    arm = CR5Arm(HOME, enabled=True)
    pose = [450.0, -120.0, 440.0, 180.0, 0.0, -90.0]
    for name in ("ServoP", "MovJ", "MovL"):
        assert execute(arm, f"{name}({','.join(map(str, pose))})", motion=True).startswith("0,")
        for _ in range(100):
            arm.advance(0.01)
        np.testing.assert_allclose(arm.pose[:3], pose[:3], atol=0.05)
        pose[2] -= 10
    execute(arm, "MovJ(1500,0,300,180,0,0)", motion=True)
    assert arm.alarms == [17]


def test_an_emergency_stop_disables_and_needs_clearing_and_enabling(robot: VirtualCR5):
    with line(robot, "dashboard") as dashboard:
        ask(dashboard, "EnableRobot()")
        ask(dashboard, "EmergencyStop()")
        assert ask(dashboard, "RobotMode()") == "0,{9},RobotMode();"
        assert ask(dashboard, "EnableRobot()").startswith("-1,")
        ask(dashboard, "ClearError()")
        assert ask(dashboard, "RobotMode()") == "0,{4},RobotMode();"


def test_commands_are_cut_at_their_brackets_however_they_arrive(robot: VirtualCR5):
    with line(robot, "dashboard") as dashboard:
        for part in ("Enab", "leRobot()Robot", "Mode()"):
            dashboard.sendall(part.encode())
            time.sleep(0.02)
        text = ""
        while text.count(";") < 2:
            text += dashboard.recv(4096).decode()
    assert text == "0,{},EnableRobot();0,{5},RobotMode();"


def test_sync_answers_when_the_moves_before_it_are_done(robot: VirtualCR5):
    robot.arm.enable()
    with line(robot, "motion") as motion:
        assert ask(motion, "JointMovJ(30,0,-90,0,90,0)").startswith("0,")
        assert ask(motion, "Sync()") == "0,{},Sync();"
    with robot.lock:
        assert not robot.arm.moving
        np.testing.assert_allclose(robot.arm.q[0], 30.0, atol=0.02)


@pytest.mark.parametrize("port", ["dashboard", "motion", "feedback"])
def test_a_port_refuses_a_second_client_and_is_free_again_after_the_first(robot: VirtualCR5, port: str):
    first = line(robot, port)
    time.sleep(0.05)
    with line(robot, port) as second:
        text = second.recv(4096)
        assert text == b"Connection refused, IP:Port has been occupied"
        assert second.recv(4096) == b""
    first.close()
    time.sleep(0.05)
    with line(robot, port) as third:
        third.settimeout(0.2)
        try:
            assert b"occupied" not in third.recv(4096)
        except TimeoutError:
            assert port != "feedback"


def test_feedback_comes_as_whole_packets_at_a_steady_rate(robot: VirtualCR5):
    with line(robot, "feedback") as feedback:
        data = b""
        while len(data) < 20 * 1440:
            data += feedback.recv(65536)
    stamps = [int.from_bytes(data[at + 32 : at + 40], "little") for at in range(0, 20 * 1440, 1440)]
    assert all(data[at : at + 2] == b"\xa0\x05" for at in range(0, 20 * 1440, 1440))
    # 8 ms of this clock are 40 of the arm's; the machine may be late, and catches up by one packet at most.
    assert min(np.diff(stamps)) >= 0
    assert stamps[-1] - stamps[0] >= 17 * 40
