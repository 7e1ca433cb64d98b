"""`rlsvc collect`: a session at a robot, episode after episode, into a dataset.

Letters: T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlsvc.collect_send import EpisodeSender, read_key
from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError, UserError
from rlsvc.core.history import ObservationHistory
from rlsvc.data.recorder import CameraLostError, EpisodeLostError, Outcome, Recorder
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.console.app import ConsoleServer
from rlsvc.robots.console.hub import ConsoleHub
from rlsvc.robots.drivers import make_driver, open_station
from rlsvc.robots.handover import Handover, Planned
from rlsvc.robots.operator import Marked
from rlsvc.robots.station import Step
from rlsvc.spec.collect import ActorSpec, CollectSpec
from rlsvc.spec.reward_classifier import RewardSourceSpec

if TYPE_CHECKING:
    from rlsvc.collect_judge import Judge

log = logging.getLogger(__name__)
POLL_S = 0.05
RECONNECT_S = 1.0
METRICS_S = 1.0
SEND_S = 60.0
"""Longest that the end of a session waits for a learner to have its episodes."""


class Actor(Protocol):
    """A policy, here or far away."""

    contract: Contract
    version: str
    execute: int

    def begin(self, seed: int) -> None:
        """An episode begins."""
        ...

    def act(self, window: Mapping[str, np.ndarray], tick: int) -> np.ndarray:
        """A chunk [H, A] for a window by name [T, ...]."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class BundleActor:
    """A bundle that acts in this process."""

    def __init__(self, spec: ActorSpec) -> None:
        """Load and compile. Raises BundleError."""
        from rlsvc.runner import PolicyRunner
        from rlsvc.store.registry import resolve

        assert spec.bundle is not None
        self._runner = PolicyRunner.load(resolve(spec.bundle), sample_steps=spec.sample_steps)
        self._runner.warm_up()
        self.contract, self.version = self._runner.contract, self._runner.version[:12]
        robot = self._runner.robot
        self.execute = spec.execute or (robot.execute if robot and robot.execute else self.contract.action_horizon)
        self.begin(0)

    def begin(self, seed: int) -> None:
        """An episode begins."""
        self._seed, self._carry = seed, None

    def act(self, window: Mapping[str, np.ndarray], tick: int) -> np.ndarray:
        """A chunk [H, A]."""
        batch = {key: value[None] for key, value in window.items()}
        chunk = self._runner.act(batch, np.array([self._seed]), np.array([tick]), self._carry)
        self._carry = chunk.carry
        return chunk.action[0]

    def close(self) -> None:
        """Nothing runs."""


class ServedActor:
    """A served policy."""

    def __init__(self, spec: ActorSpec) -> None:
        """Connect. Raises UserError, PolicyUnavailableError."""
        from rlsvc.client import ClientOptions, PolicyClient

        assert spec.url is not None
        self._client = PolicyClient(spec.url, options=ClientOptions(key=read_key(spec.key_file)))
        self.contract, self.version = self._client.contract, self._client.version[:12]
        self.execute = spec.execute or self._client.execute or self.contract.action_horizon
        self.begin(0)

    def begin(self, seed: int) -> None:
        """An episode begins."""
        self._seed, self._carry = seed, b""

    def act(self, window: Mapping[str, np.ndarray], tick: int) -> np.ndarray:
        """A chunk [H, A]; where another version took over, what the one before handed on is forgotten."""
        from rlsvc.client import SessionLostError

        try:
            reply = self._client.act(window, seed=self._seed, step=tick, carry=self._carry)
        except SessionLostError as error:
            log.info("the policy begins anew: %s", error)
            reply = self._client.act(window, seed=self._seed, step=tick, carry=b"")
        self.version, self._carry = reply.version[:12], reply.carry or b""
        return reply.action

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()


@dataclass(frozen=True)
class CollectResult:
    """What a session made.

    Attributes:
        dataset: its folder.
        episodes: kept in this session.
        discarded: not kept.
        interrupted: whether it ended before all were there.
        metrics: of the loop: rate, cameras, guard.
        judged: by policy ("policy", "against"), successes and episodes that a person called a success or a failure.
    """

    dataset: Path
    episodes: int
    discarded: int
    interrupted: bool
    metrics: dict[str, float]
    judged: dict[str, tuple[int, int]]


class _Pilot:
    """A policy, and how its chunks become commands."""

    def __init__(self, name: str, spec: ActorSpec, stack: ExitStack) -> None:
        """Load it, or connect to it; `name`: of its key in the specification. Raises UserError."""
        self.name = name
        self.actor: Actor = BundleActor(spec) if spec.bundle is not None else ServedActor(spec)
        stack.callback(self.actor.close)
        horizon = self.actor.contract.action_horizon
        if self.actor.execute > horizon:
            raise UserError(f"{name}.execute: got {self.actor.execute}, the policy's chunks have {horizon} actions")
        self.handover = Handover(
            self.actor.act, spec.mode, execute=self.actor.execute, ahead=spec.ahead, blend=spec.blend
        )

    def begin(self, seed: int) -> None:
        """An episode begins, or a person hands back."""
        self.handover.reset()
        self.actor.begin(seed)


def collect(
    spec: CollectSpec, *, say: Callable[[str], None] = log.info, stop: threading.Event | None = None
) -> CollectResult:
    """Run a session.

    Args:
        spec: of it.
        say: told what happens, a line at a time.
        stop: set from outside to end the session after the step under way; the episode under way is not kept.

    Raises:
        UserError: whatever does not fit, before the robot moves; names it.
    """
    session = _Session(spec, say, stop or threading.Event())
    with session:
        return session.run()


class _Session:
    """A robot, its people, its policy and its dataset, for one call of `collect`."""

    def __init__(self, spec: CollectSpec, say: Callable[[str], None], stop: threading.Event) -> None:
        self.spec, self.say, self.stop = spec, say, stop
        self._stack = ExitStack()
        self._seed = 0
        self._lost = False
        self.pilot: _Pilot | None = None
        self.judged: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> _Session:
        with ExitStack() as stack:
            spec, place = self.spec, self.spec.station
            driver = make_driver(place.driver)
            given = {"policy": spec.policy, "against": spec.against}
            self.pilots = [_Pilot(name, one, stack) for name, one in given.items() if one is not None]
            for pilot in self.pilots:
                _check_contract(pilot.actor.contract, driver, place.rate_hz, f"robot '{place.id}'")
            self.recorder = stack.enter_context(
                Recorder(spec.dataset, driver.observation, driver.action, place.rate_hz, spec.robot_type)
            )
            self.senders = [_sender(spec, one, self.say, stack) for one in given.values() if one and one.send_episodes]
            self.judge = None if spec.reward is None else _judge(spec.reward, driver, place.rate_hz, stack)
            self.station = open_station(place, driver, stack)
            self.robot, self.operator = self.station.robot, self.station.operator
            self.hub = ConsoleHub(self.station)
            self.hub.progress.episodes, self.hub.progress.task = spec.episodes, spec.task
            if spec.console is not None:
                console = ConsoleServer(self.hub, spec.console.host, spec.console.port)
                stack.callback(console.close)
                self.say(f"console: {console.url}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _send_the_rest(self) -> None:
        for sender in self.senders:
            if left := sender.drain(0.0 if self.stop.is_set() else SEND_S):
                self.say(
                    f"{left} episodes are still to be sent: go on with this session, or run rlsvc dataset send "
                    f"{self.spec.dataset} URL"
                )

    def run(self) -> CollectResult:
        kept, discarded, number = 0, 0, 0
        while kept < self.spec.episodes and not self.stop.is_set():
            if self._lost:
                self._find_again()
            self.hub.progress.episode = kept
            self.pilot = self._whose_turn(kept)
            if not self._await_start():
                break
            outcome, reward, source = self._episode(number)
            number += 1
            if outcome is None or not self.recorder.num_steps:
                self.recorder.discard()
                discarded += 1
                continue
            try:
                index = self.recorder.end_episode(outcome, self.spec.task, reward=reward, reward_source=source)
            except EpisodeLostError as error:
                self._tell(str(error))
                discarded += 1
                continue
            kept += 1
            for sender in self.senders:
                sender.notify()
            self._tell(f"episode {index} is saved: {outcome}")
            if self.pilot is not None and outcome != "cut":
                won, of = self.judged.get(self.pilot.name, (0, 0))
                self.judged[self.pilot.name] = (won + (outcome == "success"), of + 1)
        metrics = self.station.metrics()
        self._send_the_rest()
        return CollectResult(self.recorder.path, kept, discarded, kept < self.spec.episodes, metrics, dict(self.judged))

    def _whose_turn(self, kept: int) -> _Pilot | None:
        """The policy of the next episode; of two, each has one of a pair, in an order that is drawn for the pair."""
        if len(self.pilots) < 2:
            return self.pilots[0] if self.pilots else None
        pair, second = divmod(kept, 2)
        order = np.random.default_rng((self.spec.seed, pair)).permutation(2)
        if second:
            self._tell("put everything back as it was at the start of the last episode")
        return self.pilots[int(order[second])]

    def _await_start(self) -> bool:
        """Whether an episode is to begin; False when the session is to end."""
        self.hub.progress.state = "waiting"
        if self.spec.console is None:
            return not self.stop.is_set()
        while not self.stop.is_set():
            if self.operator.await_start(POLL_S):
                if self.robot.stopped is None:
                    return True
                self._tell(f"the robot is stopped ({self.robot.stopped.why}); resume it first")
        return False

    def _episode(self, number: int) -> tuple[Outcome | None, float | None, str | None]:
        """Outcome (None: not to be kept), and the reward of the last step with its source where a person gave one."""
        progress = self.hub.progress
        progress.state, progress.said = "running", ""
        if self.pilot is not None:
            self._seed = (self.spec.seed + number) % 2**31
            self.pilot.begin(self._seed)
            progress.policy = self.pilot.actor.version if len(self.pilots) == 1 else "one of two"
        if self.judge is not None:
            self.judge.begin()
        try:
            self.station.begin()
            outcome = self._ticks()
            if self.robot.stopped is None:
                self.station.end()
        except (ConnectionLost, CameraLostError) as error:
            self._tell(f"the episode ends: {error}")
            self._lost = True  # what was recorded is saved before the robot is looked for
            return "cut", None, None
        except EpisodeLostError as error:
            self._tell(str(error))
            self.robot.rest()
            return None, None, None
        except UserError as error:
            if self.spec.console is None:
                raise
            self._tell(str(error))
            return None, None, None
        if isinstance(outcome, Marked):
            if outcome.ending == "discard":
                return None, None, None
            return outcome.ending, float(outcome.ending == "success"), outcome.by
        return outcome, None, None

    def _ticks(self) -> Marked | Outcome | None:
        """Tick after tick; how a person ended the episode, or "cut", or None when the session ends."""
        pilot = self.pilot
        history = None if pilot is None else ObservationHistory(pilot.actor.contract.n_obs_steps)
        last = self.spec.episode_s * self.spec.station.rate_hz
        told = time.monotonic()
        was_person = begun = False
        while not self.stop.is_set():
            reading = self.station.observe()
            planned = None
            if pilot is not None and history is not None:
                window = history.append(self._seen(pilot, reading.values))
                if self.operator.in_control is None:
                    if was_person:
                        pilot.begin(self._seed)
                    planned = self._ask(pilot, window, min(reading.stamps.values()))
            acts = planned is not None
            if not acts and (pilot is None or not begun):
                # Until a person or a first chunk comes the robot is held, which keeps its watchdog quiet.
                planned = self.station.hold(reading)
            # People who compare two policies must not see which one acts.
            shown = "" if pilot is None or not acts else "policy" if len(self.pilots) > 1 else pilot.actor.version
            step = self.station.act(planned, reading, shown)
            was_person = step.intervention
            begun = begun or acts or step.intervention
            if begun:
                acted = pilot.actor.version if pilot is not None and acts and not step.intervention else step.actor
                self._record(step, acted)
            self.hub.publish(step)
            if time.monotonic() - told > METRICS_S:
                told, self.hub.metrics = time.monotonic(), self.station.metrics()
            if (marked := self.operator.take_mark()) is not None:
                return marked
            if self.judge is not None and begun and self.judge.look(reading.values):
                return Marked("success", self.judge.source)
            if self.robot.stopped is not None:
                self._tell(f"the robot was stopped by {self.robot.stopped.by}: {self.robot.stopped.why}")
                return "cut"
            if step.tick + 1 >= last:
                return "cut"
        return None

    def _ask(self, pilot: _Pilot, window: Mapping[str, np.ndarray], captured: float) -> Planned | None:
        """The policy's command for this tick; None when it has none, or could not be asked."""
        try:
            return pilot.handover.command(window, captured, self.station.pacer.tick)
        except (UserError, OSError, TimeoutError, RuntimeError) as error:
            # The robot's watchdog stops it when this lasts.
            self._tell(f"{pilot.name}: {error}")
            pilot.handover.reset()
            return None

    def _record(self, step: Step, actor: str) -> None:
        asked = step.commanded if np.isfinite(step.commanded).all() else step.action
        row = {
            **step.reading.values,
            "action": step.action,
            "commanded": asked,
            "intervention": step.intervention,
            "actor": actor,
            "reward": 0.0,
            "reward_source": "",
        }
        self.recorder.add(row, step.reading.stamps)

    def _seen(self, pilot: _Pilot, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What the policy sees of a reading."""
        return {
            key: self.spec.task if feature.dtype == TEXT else values[key]
            for key, feature in pilot.actor.contract.observation.items()
        }

    def _find_again(self) -> None:
        """Connect to a robot that was lost, until it is there or the session ends."""
        self.hub.progress.state = "reconnecting"
        while not self.stop.is_set():
            try:
                self.robot.reconnect()
                self._lost = False
                return
            except (ConnectionLost, UserError) as error:
                self._tell(f"robot '{self.robot.robot}' is not there yet: {error}")
                self.stop.wait(RECONNECT_S)

    def _tell(self, what: str) -> None:
        self.hub.progress.said = what
        self.say(what)


def _judge(spec: RewardSourceSpec, driver: Any, rate_hz: float, stack: ExitStack) -> Judge:
    from rlsvc.collect_judge import Judge

    judge = Judge(spec, Contract(dict(driver.observation), driver.action, rate_hz))
    stack.callback(judge.close)
    return judge


def _sender(spec: CollectSpec, actor: ActorSpec, say: Callable[[str], None], stack: ExitStack) -> EpisodeSender:
    assert actor.url is not None
    sender = EpisodeSender(Path(spec.dataset), actor.url, read_key(actor.key_file), say)
    stack.callback(sender.close)
    return sender


def _check_contract(policy: Contract, driver: Any, rate_hz: float, robot: str) -> None:
    """Refuse a policy of another robot, by name."""
    gives = {**driver.observation}
    texts = {key: feature for key, feature in policy.observation.items() if feature.dtype == TEXT}
    there = Contract({**gives, **texts}, driver.action, rate_hz)
    try:
        dataclasses.replace(policy, n_obs_steps=1, action_horizon=1).check_same(there, "policy", robot)
    except ContractError as error:
        raise ContractError(f"{error}; take a policy that was trained for this robot") from error
