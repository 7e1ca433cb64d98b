"""One rollout worker, without Ray: what its chunks hold of what its simulators did."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ledger_env import ledger_env

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.core.types import ActionChunk
from rlsvc.data.journal import Journal
from rlsvc.data.normalize import Normalizer
from rlsvc.data.replay import Replay
from rlsvc.envs.make import make_env
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.replay import ReplaySpec
from rlsvc.train.rollout_worker import Acting, RolloutWorker


class Scripted:
    """Acts by the step alone, (0.5 + step, 2), in the version that it is told, and remembers what it saw."""

    def __init__(self, contract):
        self.contract, self.version, self.seen = contract, "7", []

    def act(self, observation, seeds, steps, carry=None):
        self.seen.append(({name: x.copy() for name, x in observation.items()}, seeds.copy(), steps.copy(), carry))
        action = np.stack([0.5 + steps, np.full(len(steps), 2.0)], 1).astype(np.float32)
        return ActionChunk(action[:, None], self.version, len(self.seen), {"mood": steps[:, None] * 10.0})

    def warm_up(self):
        pass


@pytest.fixture
def make():
    """A worker on a ledger; gives the worker, the ledger and the runner."""
    made = []

    def make(num_envs=2, worker=0, seed=0, incarnation=0, n_obs_steps=1, extras=None, **kwargs):
        spec, ledger = ledger_env(**kwargs)
        env = make_env(spec)
        contract = env.contract(n_obs_steps)
        runner = Scripted(contract)
        acting = Acting({}, contract, Normalizer.from_contract(contract), "fp32", extras or {})
        made.append(
            RolloutWorker(
                spec, acting, worker=worker, num_envs=num_envs, seed=seed, incarnation=incarnation, runner=runner
            )
        )
        return made[-1], ledger, runner

    yield make
    for worker in made:
        worker.close()


def column(chunk, name, stream=0):
    """A column's rows of the worker's i-th stream, as a list."""
    return chunk.columns[name][chunk.offsets[stream] : chunk.offsets[stream + 1]].tolist()


def transitions(chunks):
    """(episode, t) to (reward, terminated, next t) of every real transition, by the rule of `Chunk`."""
    found, rows = {}, {}
    for chunk in chunks:
        for i, stream in enumerate(chunk.streams.tolist()):
            part = slice(chunk.offsets[i], chunk.offsets[i + 1])
            rows.setdefault(stream, []).extend(
                {name: values[k] for name, values in chunk.columns.items()} for k in range(part.start, part.stop)
            )
    for stream in rows.values():
        for row, after in itertools.pairwise(stream):
            if not row["is_last"] and not after["is_first"]:
                number, t, _ = row["observation.state"].tolist()
                assert after["observation.state"][0] == number
                assert after["episode"] == row["episode"]
                assert (number, t) not in found
                found[number, t] = (float(row["reward"]), bool(row["terminated"]), after["observation.state"][1])
    return found


def same(one, two):
    return one.id[0] == two.id[0] and all(np.array_equal(one.columns[k], two.columns[k]) for k in one.columns)


def test_an_episode_of_three_steps_is_four_rows_and_the_next_one_follows(make):
    chunk = make(num_envs=1)[0].collect(5)
    assert column(chunk, "step") == [0, 1, 2, 3, 0, 1]
    assert column(chunk, "is_first") == [True, False, False, False, True, False]
    assert column(chunk, "is_last") == [False, False, False, True, False, False]
    assert column(chunk, "terminated") == [False, False, True, False, False, False]
    assert column(chunk, "truncated") == [False] * 6
    assert column(chunk, "action") == [[0.5, 2], [1.5, 2], [2.5, 2], [0, 0], [0.5, 2], [1.5, 2]]
    assert column(chunk, "reward") == [0.5, 1.5, 2.5, 0, 0.5, 1.5]
    assert [row[:2] for row in column(chunk, "observation.state")] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert (chunk.num_rows, chunk.num_steps) == (6, 5)


def test_a_truncated_episode_is_nowhere_terminated_and_has_its_final_observation(make):
    chunk = make(num_envs=1, end="truncated")[0].collect(3)
    assert column(chunk, "terminated") == [False] * 4
    assert column(chunk, "truncated") == [False, False, True, False]
    assert column(chunk, "observation.state")[-1][:2] == [0, 3]
    assert column(chunk, "is_last")[-1]


def test_rows_of_a_stream_lie_together_in_the_order_of_time_and_streams_are_numbered_over_workers(make):
    chunk = make(num_envs=3, worker=2)[0].collect(4)
    assert chunk.streams.tolist() == [6, 7, 8]
    assert chunk.offsets.tolist() == [0, 5, 10, 15]
    for stream in range(3):
        assert column(chunk, "step", stream) == [0, 1, 2, 3, 0]
        assert len({row[0] for row in column(chunk, "observation.state", stream)[:4]}) == 1


def test_an_episode_goes_on_in_the_next_chunk(make):
    worker, _, runner = make(num_envs=2, length=5)
    chunks = [worker.collect(steps) for steps in (2, 1, 4)]
    assert [chunk.id for chunk in chunks] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    for stream in (0, 1):
        steps = [step for chunk in chunks for step in column(chunk, "step", stream)]
        episodes = [episode for chunk in chunks for episode in column(chunk, "episode", stream)]
        assert steps == [0, 1, 2, 3, 4, 5, 0, 1]
        assert len(set(episodes[:6])) == 1
        assert episodes[6] != episodes[5]
    # The policy is told the same, and given back its carry.
    assert [steps.tolist() for _, _, steps, _ in runner.seen] == [[t, t] for t in (0, 1, 2, 3, 4, 0, 1)]
    assert [carry for *_, carry in runner.seen] == [None, 1, 2, 3, 4, 5, 6]


def test_a_chunk_keeps_its_rows_while_the_worker_goes_on(make):
    worker = make()[0]
    chunk = worker.collect(4)
    before = {name: values.copy() for name, values in chunk.columns.items()}
    worker.collect(4)
    assert all(np.array_equal(before[name], values) for name, values in chunk.columns.items())


def test_return_length_and_success_of_the_episodes_that_ended_come_with_the_chunk(make):
    worker = make(num_envs=2, length=3)[0]
    assert worker.collect(2).ended["return"].tolist() == []
    chunk = worker.collect(4)
    assert chunk.ended["return"].tolist() == [4.5] * 4
    assert chunk.ended["length"].tolist() == [3] * 4
    assert chunk.ended["success"].tolist() == [True] * 4


def test_episodes_have_numbers_of_their_own_over_workers_streams_and_incarnations(make):
    episodes = []
    for worker, incarnation in ((0, 0), (0, 1), (1, 0), (1, 1), (3, 900)):
        chunk = make(num_envs=2, worker=worker, incarnation=incarnation, length=2)[0].collect(6)
        episodes += [episode for stream in (0, 1) for episode in dict.fromkeys(column(chunk, "episode", stream))]
    assert len(episodes) == len(set(episodes)) == 5 * 2 * 3


def test_an_episode_whose_simulator_fails_is_discarded_from_the_chunk_as_a_whole(make):
    # Two environments in turn: step 9 of all is the fifth of the first one, amid its second episode.
    worker, ledger, _ = make(length=3, fail_at=[9])
    chunk = worker.collect(7)
    assert ledger.lost == {2}
    assert chunk.lost == 1
    assert column(chunk, "step", 0) == [0, 1, 2, 3, 0, 1]
    assert column(chunk, "is_first", 0) == [True, False, False, False, True, False]
    assert column(chunk, "step", 1) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert chunk.num_steps == 2 * 7 - 2
    assert chunk.ended["length"].tolist() == [3, 3, 3]
    wanted = {key: value for key, value in ledger.steps.items() if key[0] not in ledger.lost}
    newest = {(4.0, 1.0), (5.0, 0.0)}  # rows without a successor yet
    assert set(transitions([chunk])) == set(wanted) - newest


def test_of_an_episode_that_fails_in_a_later_chunk_the_steps_stay_that_were_sent_before(make):
    worker, *_ = make(num_envs=1, length=10, fail_at=[5])
    chunks = [worker.collect(3), worker.collect(3)]
    assert [chunk.lost for chunk in chunks] == [0, 1]
    assert [column(chunk, "step") for chunk in chunks] == [[0, 1, 2], [0]]
    assert set(transitions(chunks)) == {(0, 0), (0, 1)}
    assert column(chunks[1], "is_first") == [True]


def test_a_chunk_of_nothing_but_lost_steps_is_empty_and_goes_through_journal_and_replay(make, tmp_path):
    worker, _, _ = make(num_envs=1, length=3, fail_at=[2])
    chunks = [worker.collect(1) for _ in range(4)]
    assert [chunk.num_rows for chunk in chunks] == [1, 0, 1, 1]
    replay = Replay(ReplaySpec(capacity=100, placement="host"), schema(worker), [0])
    with Journal(tmp_path) as journal:
        for chunk in chunks:
            journal.append(chunk)
        for chunk in journal.read():
            replay.add(chunk)
    assert (replay.num_rows, replay.num_transitions) == (3, 1)


def schema(worker):
    contract = worker._acting.contract
    return {**contract.observation, "action": contract.action}


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("steps", [1, 4, 13])
def test_a_replay_of_its_chunks_has_exactly_the_transitions_that_the_simulators_made(make, steps, end):
    worker, ledger, _ = make(num_envs=3, length=4, end=end, fail_at=[20, 47, 48, 90, 130])
    chunks = [worker.collect(steps) for _ in range(52 // steps)]
    assert sum(chunk.lost for chunk in chunks) == len(ledger.lost) == 5
    replay = Replay(ReplaySpec(capacity=3000, placement="host"), schema(worker), range(3))
    for chunk in chunks:
        assert replay.add(chunk)
    view = replay.view()
    index = np.flatnonzero(view.real.reshape(-1)).astype(np.int32)
    batch = view.gather(index, 1)
    assert batch["mask"].all()
    stored = {
        (int(before[0]), int(before[1])): (float(action[0]), float(reward), bool(terminated), int(after[1]))
        for (before, after), (action,), (reward,), (terminated,) in zip(
            batch["observation"]["observation.state"],
            batch["action"],
            batch["reward"],
            batch["terminated"],
            strict=True,
        )
    }
    assert len(stored) == len(index) == replay.num_transitions
    over = {episode: length - 1 for episode, length in ledger.ends.items() if end == "terminated"}
    for (episode, t), (action, reward) in ledger.steps.items():
        if (episode, t) in stored:
            assert stored[episode, t] == (action, reward, over.get(episode) == t, t + 1)
    missing = set(ledger.steps) - set(stored)
    assert set(stored) <= set(ledger.steps)
    # Only the newest step of each stream, and steps of episodes that were lost, may be missing.
    whole = {key for key in missing if key[0] not in ledger.lost}
    assert len(whole) <= 3
    assert all(key[0] not in ledger.ends for key in whole)
    assert {key: value[0] for key, value in transitions(chunks).items()} == {k: v[1] for k, v in stored.items()}


def test_the_version_that_acted_and_what_the_policy_hands_out_are_with_each_step(make):
    worker, _, runner = make(num_envs=1, extras={"mood": Feature((1,), "float32")})
    worker.collect(1)
    runner.version = "12"
    chunk = worker.collect(4)
    assert column(chunk, "version") == [12, 12, 12, 12, 12]
    assert column(chunk, "step") == [1, 2, 3, 0, 1]
    assert column(chunk, "mood") == [[10], [20], [0], [0], [10]]


def test_random_steps_have_no_version_and_no_extras_even_after_the_policy_acted(make):
    worker, _, runner = make(num_envs=2, extras={"mood": Feature((1,), "float32")}, length=9)
    worker.collect(4)
    chunk = worker.collect(4, "random")
    assert len(runner.seen) == 4
    assert set(column(chunk, "version")) == {-1}
    assert not chunk.columns["mood"].any()


def test_random_actions_fill_the_bounds_of_each_dimension(make):
    chunk = make(num_envs=2, length=1000)[0].collect(300, "random")
    actions = chunk.columns["action"]
    assert actions.dtype == np.float32
    for dimension, (low, high) in enumerate(((-2, 2), (1, 3))):
        values = actions[:, dimension]
        assert values.min() >= low
        assert values.max() <= high
        assert values.min() < low + 0.05
        assert values.max() > high - 0.05
        assert abs(values.mean() - (low + high) / 2) < 0.15


def test_random_discrete_actions_take_every_choice(make):
    chunk = make(num_envs=2, length=1000, discrete=True)[0].collect(50, "random")
    assert chunk.columns["action"].dtype == np.int64
    assert set(column(chunk, "action")) == {0, 1, 2, 3}
    assert column(chunk, "reward") == [action + 3.0 for action in column(chunk, "action")]  # the simulator's own


def test_random_actions_without_bounds_are_refused():
    spec = GymnasiumSpec(id="Unbounded-v0", import_module="unbounded_env")
    env = make_env(spec)
    contract = env.contract()
    acting = Acting({}, contract, Normalizer.from_contract(contract), "fp32")
    with pytest.raises(UserError, match="random actions: the environment's actions have no bounds"):
        RolloutWorker(spec, acting, worker=0, num_envs=1, seed=0).collect(1, "random")


def test_the_policy_sees_the_newest_observations_and_at_a_start_the_first_one_several_times(make):
    worker, _, runner = make(num_envs=1, n_obs_steps=3, length=4)
    for steps in (2, 3, 1):
        worker.collect(steps)
    windows = [observation["observation.state"][0, :, :2].tolist() for observation, *_ in runner.seen]
    assert windows == [
        [[0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0], [0, 1]],
        [[0, 0], [0, 1], [0, 2]],
        [[0, 1], [0, 2], [0, 3]],
        [[1, 0], [1, 0], [1, 0]],
        [[1, 0], [1, 0], [1, 1]],
    ]


def test_a_lost_episode_leaves_nothing_in_the_window_of_the_next_one(make):
    worker, _, runner = make(num_envs=1, n_obs_steps=2, length=9, fail_at=[3])
    worker.collect(4)
    assert runner.seen[3][0]["observation.state"][0, :, :2].tolist() == [[1, 0], [1, 0]]
    assert runner.seen[3][2].tolist() == [0]


@pytest.mark.parametrize("acting", ["policy", "random"])
def test_the_same_seed_gives_the_same_chunks_whatever_their_size(make, acting):
    one, two, cut = (make(num_envs=2, seed=5)[0] for _ in range(3))
    for _ in range(3):
        assert same(one.collect(6, acting), two.collect(6, acting))
    whole = transitions([make(num_envs=2, seed=5)[0].collect(18, acting)])
    assert transitions([cut.collect(steps, acting) for steps in (7, 1, 10)]) == whole


@pytest.mark.parametrize("change", [{"incarnation": 1}, {"seed": 6}, {"worker": 1}])
def test_another_seed_worker_or_incarnation_gives_other_episodes_actions_and_noise(make, change):
    (one, first, runner), (two, second, other) = make(seed=5), make(**{"seed": 5, **change})
    assert not same(one.collect(2, "random"), two.collect(2, "random"))
    assert not set(first.starts) & set(second.starts)
    one.collect(4)
    two.collect(4)
    noise, others = ({int(seed) for _, seeds, *_ in who.seen for seed in seeds} for who in (runner, other))
    assert not noise & others


def test_every_episode_of_every_stream_has_noise_and_a_start_of_its_own(make):
    worker, ledger, runner = make(num_envs=3, length=2)
    worker.collect(8)
    noise = {int(seed) for _, seeds, *_ in runner.seen for seed in seeds}
    assert len(noise) == 3 * 4
    assert len(set(ledger.starts)) == len(ledger.starts) == 3 * 5
