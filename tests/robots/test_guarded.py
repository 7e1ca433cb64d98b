"""Commands, stops and ways out of a guarded robot, in this process and from outside of one that was killed."""

from __future__ import annotations

import math
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_arm import FakeArm, read_log

from rlsvc.core.errors import BusyError, UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.supervisor import Page
from rlsvc.spec.guard import GuardSpec

HERE = Path(__file__).parent
SPEC = GuardSpec(
    low=(-1.0, -1.0), high=(1.0, 1.0), velocity=(2.0, 2.0), acceleration=(50.0, 50.0), step=(1.0, 1.0), workspace=None,
    time_to_live_s=0.5, expiry_s=0.1, torque="hold", on_limit="clip",
)  # fmt: skip


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    return tmp_path / "log.jsonl"


@pytest.fixture
def arm(log) -> FakeArm:
    return FakeArm(log)


@pytest.fixture
def robot(arm, log):
    with GuardedRobot(f"test-{os.getpid()}", arm, SPEC, rate_hz=20.0) as robot:
        yield robot


def started(robot: GuardedRobot) -> int:
    robot.start()
    return robot.lease.take("policy 7", is_person=False).token


def command(robot: GuardedRobot, position, token: int):
    return robot.command(position, answers=robot.clock(), token=token)


def whats(log: Path) -> list[str]:
    return [line["what"] for line in read_log(log)]


def wait_for(done, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert done()


def test_what_the_guard_lets_through_reaches_the_arm(robot, arm, log):
    token = started(robot)
    assert command(robot, [0.05, -0.05], token).sent is not None
    assert arm.position.tolist() == [0.05, -0.05]
    assert command(robot, [float("nan"), 0.0], token).refused == "finite"
    assert whats(log) == ["send"]


def test_nothing_is_sent_before_start_and_after_rest(robot, log):
    token = robot.lease.take("policy 7", is_person=False).token
    assert command(robot, [0.0, 0.0], token).refused == "lease"
    robot.start()
    command(robot, [0.0, 0.0], token)
    robot.rest()
    time.sleep(3 * SPEC.expiry_s)
    assert command(robot, [0.0, 0.0], token).refused == "lease"
    assert whats(log) == ["send", "stop"]
    assert robot.stopped is None


def test_the_arm_is_stopped_when_commands_stop_and_stays_so_until_a_person_resumes(robot, log):
    token = started(robot)
    command(robot, [0.01, 0.0], token)
    wait_for(lambda: robot.stopped is not None)
    assert robot.stopped.by == "watchdog"
    assert [(line["what"], line.get("torque")) for line in read_log(log)][-1] == ("stop", "hold")
    assert command(robot, [0.01, 0.0], token).refused == "stopped"
    with pytest.raises(UserError, match=r"was stopped by watchdog .* a person has to resume it"):
        robot.start()
    with pytest.raises(UserError, match="a person has to say who"):
        robot.resume(" ")
    robot.resume("Ada")
    robot.start()
    assert command(robot, [0.02, 0.0], token).sent is not None


def test_refused_commands_do_not_keep_the_watchdog_quiet(robot):
    token = started(robot)
    wait_for(lambda: command(robot, [float("inf"), 0.0], token).refused == "stopped", seconds=2.0)


def test_the_watchdog_stops_the_arm_although_its_bus_is_busy(robot, arm, log):
    token = started(robot)
    command(robot, [0.01, 0.0], token)
    with robot._bus:  # a read that hangs
        wait_for(lambda: "stop" in whats(log))
    assert read_log(log)[-1]["by"] == "stopper"


def test_the_watchdog_stops_the_arm_and_lives_although_the_driver_fails_in_a_way_of_its_own(robot, arm, log):
    token = started(robot)
    arm.broken = True
    command(robot, [0.01, 0.0], token)
    wait_for(lambda: "stop" in whats(log))
    assert read_log(log)[-1]["by"] == "stopper"
    assert robot._watchdog.is_alive()
    arm.broken = False
    robot.resume("Ada")
    robot.start()
    wait_for(lambda: robot.stopped is not None)
    assert read_log(log)[-1]["by"] == "driver"


def test_the_last_command_of_who_lost_the_lease_is_refused(robot):
    token = started(robot)
    robot.lease.take("Ada", is_person=True)
    assert command(robot, [0.0, 0.0], token).refused == "lease"


def test_a_person_takes_over_from_a_policy_and_no_other_person_from_them(robot):
    robot.lease.take("policy 7", is_person=False)
    ada = robot.lease.take("Ada", is_person=True)
    with pytest.raises(BusyError, match="Ada commands the robot; Ben can take over"):
        robot.lease.take("Ben", is_person=True)
    with pytest.raises(BusyError, match="Ada commands the robot"):
        robot.lease.take("policy 7", is_person=False)
    assert robot.lease.take("Ada", is_person=True) == ada
    robot.lease.give_back(ada)
    assert not robot.lease.holds(ada.token)
    ben = robot.lease.take("Ben", is_person=True)
    robot.lease.give_back(ada)
    assert robot.lease.holds(ben.token)


def test_two_processes_cannot_drive_one_arm(robot, tmp_path):
    other = GuardedRobot(robot.robot, FakeArm(tmp_path / "other"), SPEC, rate_hz=20.0)
    with pytest.raises(BusyError, match=f"in use by process {os.getpid()}"):
        other.connect()


def test_a_lost_connection_ends_commanding_and_not_for_ever(robot, arm):
    token = started(robot)
    arm.lost = True
    with pytest.raises(ConnectionLost):
        command(robot, [0.01, 0.0], token)
    arm.lost = False
    time.sleep(2 * SPEC.expiry_s)
    assert robot.stopped is None
    assert command(robot, [0.01, 0.0], token).refused == "lease"
    robot.start()
    assert command(robot, [0.01, 0.0], token).sent is not None


READ_ALL = """
import sys, time
from rlsvc.robots.supervisor import Page
page, seen, end = Page(int(sys.argv[1])), set(), time.monotonic() + 2
while time.monotonic() < end:
    seen.add(page.deadline)
print(sorted(seen))
"""


def test_a_deadline_is_read_whole_however_often_it_is_written(tmp_path):
    """Half of one reads as a moment long past, at which a robot that is well would be stopped."""
    with (tmp_path / "page").open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        page = Page(file.fileno())
        page.deadline = 1e9
        command = [sys.executable, "-c", READ_ALL, str(file.fileno())]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[file.fileno()])
        while reader.poll() is None:
            for _ in range(1000):
                page.deadline = math.inf
                page.deadline = 1e9
        assert reader.stdout.read() == "[1000000000.0, inf]\n"


def test_without_its_supervisor_an_arm_does_not_move(robot, log):
    token = started(robot)
    os.kill(robot._supervisor._process.pid, signal.SIGKILL)
    wait_for(lambda: not robot._supervisor.alive)
    assert command(robot, [0.01, 0.0], token).refused == "stopped"
    assert robot.stopped.why == "its supervisor is gone"


def test_an_exception_stops_the_arm_and_frees_it(arm, log):
    def fails():
        with GuardedRobot(f"raise-{os.getpid()}", arm, SPEC, rate_hz=20.0) as robot:
            command(robot, [0.01, 0.0], started(robot))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert whats(log) == ["send", "stop"]
    assert arm.closed
    with GuardedRobot(f"raise-{os.getpid()}", arm, SPEC, rate_hz=20.0):
        pass


def test_an_arm_whose_stop_cannot_be_loaded_is_not_driven(arm, monkeypatch):
    from rlsvc.robots.api import Stopper

    monkeypatch.setattr(FakeArm, "stopper", lambda self: Stopper("fake_arm:not_there"))
    with pytest.raises(UserError, match="cannot load fake_arm:not_there"):
        GuardedRobot(f"load-{os.getpid()}", arm, SPEC, rate_hz=20.0).connect()
    assert arm.closed


def test_a_state_without_the_position_of_an_action_is_refused(arm):
    from rlsvc.core.contract import Feature

    arm.action = Feature((2,), "float32", "rad", ("shoulder.pos", "gripper.pos"))
    with pytest.raises(UserError, match=r"missing: gripper\.pos"):
        GuardedRobot(f"state-{os.getpid()}", arm, SPEC, rate_hz=20.0).connect()


DRIVES = """
import signal, sys, time
from fake_arm import FakeArm
from pathlib import Path
from test_guarded import SPEC
from rlsvc.robots.guarded import GuardedRobot
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run behind a shell
with GuardedRobot({name!r}, FakeArm(Path(sys.argv[1])), SPEC, rate_hz=20.0) as robot:
    robot.start()
    token = robot.lease.take("policy", is_person=False).token
    while True:
        robot.command([0.01, 0.0], answers=robot.clock(), token=token)
        time.sleep(0.03)
"""


@pytest.fixture
def driving(log, request):
    """A process that commands an arm, thirty times a second."""
    code = textwrap.dedent(DRIVES.format(name=f"child-{os.getpid()}-{abs(hash(request.node.name))}"))
    process = subprocess.Popen([sys.executable, "-c", code, str(log)], start_new_session=True, stderr=subprocess.PIPE)
    wait_for(lambda: whats(log).count("send") > 3, seconds=60.0)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_arm_whose_process_ends_is_stopped(driving, log, number):
    driving.send_signal(number)
    driving.wait(20)
    wait_for(lambda: read_log(log)[-1]["what"] == "stop")
    assert read_log(log)[-1]["by"] == ("driver" if number == signal.SIGINT else "stopper")


def test_an_arm_whose_process_hangs_is_stopped_and_stays_so_when_it_goes_on(driving, log):
    driving.send_signal(signal.SIGSTOP)
    wait_for(lambda: read_log(log)[-1]["what"] == "stop")
    assert read_log(log)[-1]["by"] == "stopper"
    driving.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    after = [line["what"] for line in read_log(log)[whats(log).index("stop") :]]
    # One command may have been past the last look at the page; it is taken back at once.
    assert after.count("send") <= 1
    assert after[-1] == "stop"
