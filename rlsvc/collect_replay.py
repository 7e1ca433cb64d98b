"""Replay a recorded episode on a robot, through the guard, at the rate of its dataset.

Letters: N steps, A action dimensions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlsvc.core.errors import ContractError, DatasetError
from rlsvc.data.load import load_table
from rlsvc.robots.drivers import make_driver, open_station
from rlsvc.robots.guarded import STATE
from rlsvc.robots.handover import Planned
from rlsvc.robots.station import Station
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.station import StationSpec


@dataclass(frozen=True)
class Replayed:
    """What became of an episode.

    Attributes:
        steps: that were commanded.
        of: N, of the episode.
        clipped: commands that the guard changed.
        refused: commands that it refused.
        error: [A] largest distance of the measured joints from the recorded ones, in their unit; NaN where the dataset
            has no state of the same names.
    """

    steps: int
    of: int
    clipped: int
    refused: int
    error: np.ndarray


def replay(
    spec: StationSpec,
    dataset: str | Path,
    episode: int,
    *,
    column: str = "action",
    say: Callable[[str], None] = lambda line: None,
    stop: threading.Event | None = None,
) -> Replayed:
    """Send an episode's commands again. The arm first goes to where the episode began, as fast as the guard allows.

    Args:
        spec: the robot.
        dataset: folder of a dataset of this robot.
        episode: its number.
        column: which actions: "action" was sent then, "commanded" was asked for before the guard.
        say: told what happens.
        stop: set from outside to end it.

    Raises:
        DatasetError: no such episode or column.
        ContractError: a dataset of another robot, or of another rate.
        UserError: as GuardedRobot.
        ConnectionLost: the robot does not answer.
    """
    driver = make_driver(spec.driver)
    table = load_table(DatasetSpec(path=str(dataset)))
    _check(table.names.get(column, ()), table.fps, driver.action.names, spec.rate_hz, f"{dataset}, '{column}'")
    if not 0 <= episode < table.num_episodes:
        raise DatasetError(f"{dataset}: got episode {episode}, it has {table.num_episodes}, numbered from 0")
    if column not in table.columns:
        raise DatasetError(f"{dataset}: no column '{column}'; it has: {', '.join(table.columns)}")
    rows = table.episode(episode)
    actions, state = rows[column], rows.get(STATE)
    known = state is not None and table.names.get(STATE, ()) == driver.observation[STATE].names
    stop = stop or threading.Event()
    with ExitStack() as stack:
        # People may stop a replay, and not take it over.
        station = open_station(spec.replace(teleop=None), driver, stack)
        robot = station.robot
        station.begin()
        say("going to where the episode began")
        _go_to(station, actions[0], stop)
        say(f"replaying {len(actions)} steps")
        done = clipped = refused = 0
        error = np.full(len(driver.action.names), 0.0 if known else np.nan)
        for i, action in enumerate(actions):
            if stop.is_set() or robot.stopped is not None:
                break
            reading = station.observe()
            if known:
                assert state is not None
                there, then = robot.positions(reading.values[STATE]), robot.positions(state[i])
                error = np.maximum(error, np.abs(there - then))
            step = station.act(Planned(action, min(reading.stamps.values())), reading, "replay")
            assert step.verdict is not None
            done, clipped = done + 1, clipped + bool(step.verdict.clipped)
            refused += step.verdict.sent is None
        if robot.stopped is None:
            station.end()
        else:
            say(f"the robot was stopped by {robot.stopped.by}: {robot.stopped.why}")
    return Replayed(done, len(actions), clipped, refused, error)


def _go_to(station: Station, goal: np.ndarray, stop: threading.Event, seconds: float = 30.0) -> None:
    """The guard turns one far command into a way that it allows."""
    for _ in range(int(seconds / station.pacer.period)):
        reading = station.observe()
        near = np.abs(station.robot.positions(reading.values[STATE]) - goal) <= np.array(station.robot.spec.step) * 0.2
        if stop.is_set() or station.robot.stopped is not None or near.all():
            return
        station.act(Planned(goal, min(reading.stamps.values())), reading, "replay")


def _check(names: tuple[str, ...], fps: float, robot: tuple[str, ...], rate_hz: float, what: str) -> None:
    if tuple(names) != tuple(robot):
        raise ContractError(
            f"{what}: it is of another robot: got {', '.join(names) or 'no names'}, expected {', '.join(robot)}"
        )
    if abs(fps - rate_hz) > 1e-6:
        raise ContractError(f"{what}: recorded at {fps:g} Hz, the robot is driven at {rate_hz:g} Hz (station.rate_hz)")
