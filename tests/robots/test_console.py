"""The console in a real browser (Debian's Chromium), before an arm that a loop drives at 30 Hz."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from fake_arm import CAMERA, FakeArm
from playwright.sync_api import Page, expect, sync_playwright
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from rlsvc.robots.console.app import ConsoleServer
from rlsvc.robots.console.hub import ConsoleHub
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.handover import Planned
from rlsvc.robots.operator import Jog, Operator
from rlsvc.robots.station import Station
from rlsvc.spec.guard import GuardSpec

ROOT = Path(__file__).parents[2]
SPEC = GuardSpec(
    low=(-1.0, -1.0), high=(1.0, 1.0), velocity=(2.0, 2.0), acceleration=(100.0, 100.0), step=(1.0, 1.0),
    workspace=None, time_to_live_s=0.5, expiry_s=0.5, torque="hold", on_limit="clip",
)  # fmt: skip


class Session:
    """What `rlsvc collect` does, without a recorder: a policy that holds still, and people."""

    def __init__(self, folder: Path) -> None:
        self.arm = FakeArm(folder / "log", camera=True)
        self.robot = GuardedRobot(f"console-{os.getpid()}", self.arm, SPEC, rate_hz=30.0)
        self.operator = Operator(self.robot)
        self.jog = Jog(np.array([0.5, 0.5]))
        self.station = Station(self.robot, self.operator, rate_hz=30.0, max_skew_s=0.5, teleop=self.jog)
        self.hub = ConsoleHub(self.station)
        self.hub.progress.task, self.hub.progress.policy = "push the block", "bundle 3"
        self.endings: list[str] = []
        self.started = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Session:
        self.robot.connect()
        self.console = ConsoleServer(self.hub)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        self._thread.join(10)
        self.console.close()
        self.robot.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if not self.operator.await_start(0.05):
                continue
            self.hub.progress.state = "running"
            self.station.begin()
            self.started.set()
            while not self._over.is_set() and self.robot.stopped is None:
                reading = self.station.observe()
                hold = Planned(self.arm.position.astype(np.float32), time.monotonic())
                self.hub.publish(self.station.act(hold, reading, "bundle 3"), reward=0.25)
                if (mark := self.operator.take_mark()) is not None:
                    self.endings.append(f"{mark.ending} by {mark.by}")
                    break
            self.hub.progress.state = "waiting"
            if self.robot.stopped is None:
                self.station.end()


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "robots"), str(ROOT)]))
    with Session(tmp_path) as session:
        yield session


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    assert path, "the console is tested in Debian's chromium: .ci/system-packages installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, session):
    context = browser.new_context()
    problems: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_default_timeout(15_000)
    yield page
    context.close()
    assert not problems


def join(page: Page, session: Session, name: str) -> Page:
    page.goto(session.console.url)
    page.fill("#name", name)
    page.click("text=Join")
    return page


def wait_for(done, seconds: float = 15.0):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


def test_a_person_starts_an_episode_watches_it_and_calls_it_a_success(page, session):
    join(page, session, "Ada")
    expect(page.locator("#task")).to_have_text("push the block")
    expect(page.locator("#state")).to_have_text("waiting")
    expect(page.locator("#success")).to_be_disabled()
    page.click("#start")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#holder")).to_have_text("policy")
    expect(page.locator("#reward")).to_have_text("0.250")
    expect(page.locator("#value-0")).to_have_text("0.00")
    # The camera's picture is red: it is drawn into a canvas and read back.
    page.wait_for_function("document.querySelector('#cameras img').naturalWidth === 64")
    red = page.evaluate(
        """() => { const i = document.querySelector('#cameras img'), c = document.createElement('canvas');
        c.width = 64; c.height = 48; const p = c.getContext('2d'); p.drawImage(i, 0, 0);
        return [...p.getImageData(32, 24, 1, 1).data]; }"""
    )
    assert red[:3] == pytest.approx([200, 30, 30], abs=8)
    page.click("#success")
    expect(page.locator("#state")).to_have_text("waiting")
    assert session.endings == ["success by Ada"]


def test_a_person_takes_over_moves_a_joint_with_a_key_and_hands_back(page, session):
    join(page, session, "Ada")
    page.click("#start")
    expect(page.locator("#state")).to_have_text("running")
    page.click("#take_over")
    expect(page.locator("#holder")).to_have_text("Ada")
    page.keyboard.down("w")
    wait_for(lambda: session.arm.position[1] > 0.1)
    page.keyboard.up("w")
    wait_for(lambda: not session.jog._axes.any())
    at = session.arm.position.copy()
    assert at[0] == pytest.approx(0.0)
    time.sleep(0.3)
    assert session.arm.position.tolist() == pytest.approx(at.tolist())
    page.click("#hand_back")
    expect(page.locator("#holder")).to_have_text("policy")
    assert session.jog.latencies


@pytest.mark.parametrize("how", ["button", "space"])
def test_stop_stops_from_the_button_and_from_a_key_until_somebody_resumes(page, session, how):
    join(page, session, "Ada")
    page.click("#start")
    expect(page.locator("#state")).to_have_text("running")
    page.click("#stop") if how == "button" else page.keyboard.press("Space")
    expect(page.locator("#stopped")).to_contain_text("Stopped by Ada: a person pressed STOP")
    assert session.robot.stopped.by == "Ada"
    expect(page.locator("#start")).to_be_disabled()
    page.click("#resume")
    expect(page.locator("#stopped")).to_be_hidden()
    page.click("#start")
    expect(page.locator("#state")).to_have_text("running")


def test_two_people_cannot_take_over_at_once_and_the_second_is_told_who_has_it(page, session, browser):
    join(page, session, "Ada")
    page.click("#take_over")
    expect(page.locator("#holder")).to_have_text("Ada")
    other = browser.new_context()
    try:
        ben = join(other.new_page(), session, "Ben")
        expect(ben.locator("#take_over")).to_be_disabled()
        ben.evaluate("say({ type: 'take_over' })")
        expect(ben.locator("#error")).to_contain_text("Ada commands the robot; Ben can take over")
        ben.evaluate("say({ type: 'axes', axes: [1, 1] })")
        expect(ben.locator("#error")).to_contain_text("axes: take over first")
    finally:
        other.close()


def test_a_name_that_is_there_already_is_refused(page, session, browser):
    join(page, session, "Ada")
    expect(page.locator("#task")).to_have_text("push the block")
    other = browser.new_context()
    try:
        again = join(other.new_page(), session, "Ada")
        expect(again.locator("#closed")).to_have_text("Ada is here already; choose another name")
    finally:
        other.close()


def test_a_person_who_goes_away_while_in_control_stops_the_robot(page, session):
    join(page, session, "Ada")
    page.click("#start")
    page.click("#take_over")
    expect(page.locator("#holder")).to_have_text("Ada")
    page.goto("about:blank")
    wait_for(lambda: session.robot.stopped is not None)
    assert "Ada, who commanded the robot, left the console" in session.robot.stopped.why
    assert session.operator.in_control is None


def test_without_the_key_there_is_no_picture_and_no_word(session):
    address = session.console.url.split("?")[0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}camera/top?key=wrong")
    assert refused.value.code == 401

    with connect(address.replace("http", "ws") + "ws?key=wrong") as socket:
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd.code == 4401


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("not json", "expected a JSON object"),
        ('{"type": "dance"}', "type: got 'dance', expected start, take_over"),
        ('{"type": "mark", "ending": "draw"}', "expected success, failure or discard"),
        ('["type"]', "expected a JSON object"),
        (json.dumps({"type": "x" * 5000}), "at most 4096"),
    ],
    ids=["text", "type", "ending", "list", "long"],
)
def test_a_message_that_is_none_is_answered_and_changes_nothing(session, message, answer):
    with connect(session.console.url.replace("http", "ws").replace("/?", "/ws?")) as socket:
        socket.send('{"type": "hello", "person": "Ada"}')
        socket.send(message)
        while (got := json.loads(socket.recv(timeout=10)))["type"] != "error":
            pass
        assert answer in got["message"]
    assert session.operator.in_control is None


def test_a_camera_that_there_is_not_is_named(session):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{session.console.url.split('?')[0]}camera/side?key={session.console.key}")
    assert refused.value.code == 404
    assert b"there are: top" in refused.value.read()


def test_a_port_in_use_is_refused_by_name(session):
    from rlsvc.core.errors import BusyError

    port = int(session.console.url.split(":")[2].split("/")[0])
    with pytest.raises(BusyError, match=f"127.0.0.1:{port} cannot be listened on"):
        ConsoleServer(session.hub, port=port)


def test_the_camera_of_the_contract_is_shown_by_its_short_name(session):
    assert session.hub.cameras == ["top"]
    assert CAMERA in session.arm.observation
