"""A physical robot as an environment: a rollout worker steps it like a simulator, in real time.

A step sends the action through the guard, waits for the next tick, and reads. A person may take over in the middle of
it: then the step says what was sent in the policy's place. Reward and end come from the person too: an episode that
they call a success ends with reward 1, a failure with 0; one that they discard is lost, as if a simulator had failed.

Letters: A action dimensions.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.core.types import COMMANDED, INTERVENTION
from rlsvc.envs.adapter import TASK, contract_spaces
from rlsvc.robots.api import ConnectionLost, Reading
from rlsvc.robots.console.app import ConsoleServer
from rlsvc.robots.console.hub import ConsoleHub
from rlsvc.robots.drivers import make_driver, open_station
from rlsvc.robots.handover import Planned
from rlsvc.robots.operator import Operator
from rlsvc.robots.station import Station
from rlsvc.spec.env import RobotEnvSpec

POLL_S = 0.05
RECONNECT_S = 1.0
POLICY = "policy"
"""Who holds the lease while no person does; a chunk's `version` says which weights acted."""


class EpisodeDiscardedError(Exception):
    """A person discarded the episode under way."""


class RobotEnv(gymnasium.Env):
    """One robot. It is connected with the first `reset`, so that its contract can be asked for from afar.

    Attributes:
        recovers: a failed step leaves it in place: its next `reset` finds the robot again, and people keep their page.
        step_columns: what each step's `info` tells: `action` [A] that was sent, `commanded` [A] that was asked for
            before the guard, `intervention`.
        operator: what people want; there once it is connected.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    recovers = True

    def __init__(self, spec: RobotEnvSpec) -> None:
        """Nothing is opened.

        Raises:
            UserError: the driver's configuration does not fit, or what it needs is not installed.
        """
        self._spec, self._place = spec, spec.station
        self.metadata = {**type(self).metadata, "render_fps": self._place.rate_hz}
        self.render_mode = "rgb_array"
        self._driver = make_driver(self._place.driver)
        guard, action = self._place.guard, self._driver.action
        self._action = Feature(action.shape, "float32", action.unit, action.names, guard.low, guard.high)
        self.step_columns = {
            "action": self._action,
            COMMANDED: self._action,
            INTERVENTION: Feature((), "bool"),
        }
        self.observation_space, self.action_space = contract_spaces(self.contract())
        self._stack = ExitStack()
        self._station: Station | None = None
        self._reading: Reading | None = None
        self._hub: Any = None
        self._steps, self._lost = 0, False

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """What the robot gives and takes; actions are bounded by the guard's limits."""
        features = dict(self._driver.observation)
        if self._spec.task is not None:
            features[TASK] = Feature((), TEXT)
        return Contract(features, self._action, self._place.rate_hz, n_obs_steps, action_horizon)

    @property
    def station(self) -> Station:
        """The robot and its people.

        Raises:
            UserError: it was not reset yet.
        """
        if self._station is None:
            raise UserError("robot: reset the environment first, which connects it")
        return self._station

    @property
    def operator(self) -> Operator:
        """See the class."""
        return self.station.operator

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Hold the robot still until somebody starts an episode, or at once where the specification says so.

        Raises:
            UserError: nobody started one within `start_timeout_s`, or the robot cannot be had.
            ConnectionLost: it does not answer.
        """
        super().reset(seed=seed)
        if self._reading is not None:  # an episode that was left in its middle
            self._rest()
        self._connect()
        self._reading = None
        progress = self._hub.progress
        progress.state = "waiting"
        self._await_start()
        progress.state, progress.policy = "running", POLICY
        self.station.begin()
        self._reading, self._steps = self.station.observe(), 0
        self._hub.progress.episode += 1
        return self._observation(), {"is_success": False}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One tick.

        Raises:
            ConnectionLost: the robot or a camera is gone; the next `reset` connects anew.
            EpisodeDiscardedError: a person discarded the episode.
        """
        assert self._reading is not None
        planned = Planned(np.asarray(action, np.float32), min(self._reading.stamps.values()))
        try:
            done = self.station.act(planned, self._reading, POLICY)
            self._reading = self.station.observe()
        except ConnectionLost:
            self._reading, self._lost = None, True
            raise
        self._steps += 1
        self._hub.publish(done)
        self._hub.metrics = self.station.metrics() if self._steps % 30 == 0 else self._hub.metrics
        mark = self.operator.take_mark()
        if mark is not None and mark.ending == "discard":
            self._rest()
            raise EpisodeDiscardedError(f"{mark.by} discarded the episode")
        success = mark is not None and mark.ending == "success"
        cut = self.station.robot.stopped is not None or self._steps >= self._spec.step_limit
        if mark is not None or cut:
            self._rest()
        told = {
            "is_success": success,
            "action": done.action,
            COMMANDED: done.commanded,
            INTERVENTION: done.intervention,
            "actor": mark.by if mark is not None else done.actor,
            "guard": "" if done.verdict is None else done.verdict.why,
        }
        return self._observation(), float(success), mark is not None, cut and mark is None, told

    def render(self) -> np.ndarray:
        """The newest frame of the first camera, [H, W, 3] uint8; black where there is none."""
        images = [] if self._reading is None else [x for x in self._reading.values.values() if x.dtype == np.uint8]
        return images[0] if images else np.zeros((96, 96, 3), np.uint8)

    def close(self) -> None:
        """Stop the robot by the guard's rule and let it go."""
        self._stack.close()
        self._station = self._reading = None

    def _rest(self) -> None:
        """The episode is over: its robot holds still, and no command is missed until the next one begins."""
        if self.station.robot.stopped is not None:
            return
        try:
            self.station.end()
        except ConnectionLost:  # what was done is known; the next `reset` connects anew
            self._lost = True

    def _connect(self) -> None:
        """Open the robot, or find one again that was lost, as long as a person would be waited for."""
        deadline = time.monotonic() + self._spec.start_timeout_s
        while self._station is None or self._lost:
            try:
                if self._station is not None:
                    self._station.robot.reconnect()
                else:
                    self._open()
                self._lost = False
            except ConnectionLost as error:
                if time.monotonic() > deadline:
                    raise UserError(f"robot '{self._place.id}' does not answer: {error}") from error
                time.sleep(RECONNECT_S)

    def _open(self) -> None:
        with ExitStack() as stack:
            station = open_station(self._place, self._driver, stack)
            self._hub = ConsoleHub(station)
            self._hub.progress.task = self._spec.task or self._place.id
            if self._spec.console is not None:
                stack.callback(ConsoleServer(self._hub, self._spec.console.host, self._spec.console.port).close)
            self._station, self._stack = station, stack.pop_all()

    def _await_start(self) -> None:
        deadline = time.monotonic() + self._spec.start_timeout_s
        robot = self.station.robot
        while True:
            waits_for_person = self._spec.start == "person" or robot.stopped is not None
            if not waits_for_person or (self.operator.await_start(POLL_S) and robot.stopped is None):
                return
            if time.monotonic() > deadline:
                why = f"it was stopped: {robot.stopped.why}" if robot.stopped else "nobody started an episode"
                raise UserError(
                    f"robot '{self._place.id}': {why}; waited {self._spec.start_timeout_s:g} s for a person"
                )

    def _observation(self) -> dict[str, Any]:
        assert self._reading is not None
        told: dict[str, Any] = dict(self._reading.values)
        if self._spec.task is not None:
            told[TASK] = self._spec.task
        return told


def make_robot(spec: RobotEnvSpec) -> RobotEnv:
    """The environment of a specification.

    Raises:
        UserError: an option that a robot has no meaning for.
    """
    plain = RobotEnvSpec(station=spec.station)
    own = {"station", "task", "start", "start_timeout_s", "console", "max_steps", "import_module"}
    for name in type(spec).model_fields:
        if name not in own and getattr(spec, name) != getattr(plain, name):
            raise UserError(f"env.{name}: a robot's numbers are taken as they are; leave it out")
    return RobotEnv(spec)
