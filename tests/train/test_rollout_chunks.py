"""A rollout worker whose policy gives several actions at once, and in whose environments somebody else may act."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_env import ledger_env

from rlsvc.core.contract import TEXT
from rlsvc.core.types import ActionChunk
from rlsvc.data.normalize import Normalizer
from rlsvc.data.texts import decode_texts
from rlsvc.envs.make import make_env
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.stand_in import StandInSpec
from rlsvc.train.rollout_worker import Acting, RolloutWorker

PUSH = GymnasiumSpec(id="rlsvc/PlanarPush-v0", import_module="rlsvc.envs.planar_push")


class Counting:
    """Gives H actions whose first number tells which of them it is, and remembers the steps that it was asked at."""

    def __init__(self, contract, scale=1.0):
        self.contract, self.version, self.scale, self.asked = contract, "7", scale, []

    def act(self, observation, seeds, steps, carry=None):
        self.asked.append(steps.tolist())
        which = self.scale * np.arange(self.contract.action_horizon, dtype=np.float32)
        action = np.stack([which, np.full_like(which, 2 * self.scale)], 1)
        return ActionChunk(np.repeat(action[None], len(seeds), 0), self.version)

    def warm_up(self):
        pass


def worker_of(spec, horizon, num_envs=1, scale=1.0, **acting):
    contract = make_env(spec).contract(action_horizon=horizon)
    runner = Counting(contract, scale)
    made = Acting({}, contract, Normalizer.identity({}), "fp32", **acting)
    return RolloutWorker(spec, made, worker=0, num_envs=num_envs, seed=0, runner=runner), runner


def test_a_chunk_of_actions_is_executed_to_its_end_before_the_policy_is_asked_again():
    worker, runner = worker_of(ledger_env(length=10)[0], 3)
    chunk = worker.collect(5)
    assert runner.asked == [[0], [3]]
    assert chunk.columns["action"][:, 0].tolist() == [0, 1, 2, 0, 1]
    assert worker.collect(2).columns["action"][:, 0].tolist() == [2, 0]
    assert runner.asked == [[0], [3], [6]]


def test_an_episode_begins_with_a_chunk_of_its_own():
    worker, runner = worker_of(ledger_env(length=4)[0], 3)
    chunk = worker.collect(6)
    assert runner.asked == [[0], [3], [0]]
    assert chunk.columns["action"][~chunk.columns["is_last"], 0].tolist() == [0, 1, 2, 0, 0, 1]


def test_only_the_environments_whose_chunk_is_used_up_are_asked_for():
    worker, runner = worker_of(ledger_env(length=4)[0], 3, num_envs=2)
    worker.collect(4)
    runner.asked.clear()
    worker._used[1] = 0  # the second has a whole chunk left
    worker.collect(1)
    assert runner.asked == [[0]]


def test_an_action_keeps_the_version_of_the_weights_that_chose_it():
    worker, runner = worker_of(ledger_env(length=10)[0], 3)
    worker.collect(1)
    runner.version = "9"
    assert worker.collect(3).columns["version"].tolist() == [7, 7, 9]


def test_the_policy_is_asked_anew_after_every_step_in_which_somebody_else_acted():
    stand_in = StandInSpec(patience=4, control_steps=3, min_progress=1.0)
    worker, runner = worker_of(PUSH, 8, scale=0.01, stand_in=stand_in)
    chunk = worker.collect(9)
    assert chunk.columns["intervention"].tolist() == [False] * 4 + [True] * 3 + [False] * 2
    assert runner.asked == [[0], [5], [6], [7]]
    asked_for = [0, 0.01, 0.02, 0.03, 0, 0.01]
    mine = chunk.columns["action"][~chunk.columns["intervention"], 0]
    np.testing.assert_allclose(mine, asked_for, atol=1e-7)
    assert not np.isin(chunk.columns["action"][4:7, 0], asked_for).any()
    assert np.array_equal(chunk.columns["action"], chunk.columns["commanded"])


def test_texts_are_rows_of_bytes():
    spec = GymnasiumSpec(id="rlsvc/TwoGoals-v0", import_module="rlsvc.envs.two_goals")
    worker, _ = worker_of(spec, 4, scale=0.1)
    assert worker._contract.observation["task"].dtype == TEXT
    rows = worker.collect(45).columns["task"]
    assert rows.dtype == np.uint8
    assert set(decode_texts(rows)) <= {"go to the red disc", "go to the blue disc"}


def test_nobody_watches_where_the_run_has_no_stand_in():
    worker, _ = worker_of(PUSH, 2, scale=0.01)
    assert not {"intervention", "commanded"} & set(worker.collect(3).columns)


@pytest.mark.parametrize("stand_in", [None, StandInSpec(patience=2)])
def test_the_same_seed_collects_the_same_rows(stand_in):
    one, two = (worker_of(PUSH, 2, num_envs=2, scale=0.1, stand_in=stand_in)[0].collect(30) for _ in range(2))
    assert all(np.array_equal(one.columns[name], two.columns[name]) for name in one.columns)
