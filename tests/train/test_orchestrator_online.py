"""Online phases: what is collected, acknowledged, learned from and handed out, and when; with a group in no time.

The group's replay is the real one, filled by the orders that it is given, and the journal lies on disk.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from ledger_env import ledger_env

from rlsvc.core.types import ActionChunk
from rlsvc.data.journal import Journal
from rlsvc.data.normalize import Normalizer
from rlsvc.data.replay import Replay
from rlsvc.envs.make import make_env
from rlsvc.spec.compose import compose
from rlsvc.train import orchestrator
from rlsvc.train.learner import SequenceData
from rlsvc.train.orchestrator import GroupRestarted, Orchestrator
from rlsvc.train.rollout import LocalRollouts, next_incarnations
from rlsvc.train.rollout_worker import Acting

SEED = "{name: seed, type: online, acting: random, hooks: {collect: 1}, duration_steps: 12}"
PRETRAIN = "{name: pretrain, type: offline, hooks: {update: 1}, duration_updates: 6}"
TRAIN = "{name: train, type: online, hooks: {collect: 2, update: 1}, duration_steps: 24}"

pytestmark = pytest.mark.timeout(60)


class Runner:
    """Acts at random, in no time; its version is that of the weights."""

    def __init__(self, contract):
        self.contract, self.version, self._rng = contract, "", np.random.default_rng(0)

    def act(self, observation, seeds, steps, carry=None):
        action = self._rng.uniform([-2, 1], [2, 3], (len(seeds), 1, 2)).astype(np.float32)
        return ActionChunk(action, self.version)

    def warm_up(self):
        pass


class FastActing(Acting):
    """Acts without a net."""

    def runner(self, batch_sizes, device):
        return Runner(self.contract)


class Rollouts(LocalRollouts):
    """Local ones that write down what they are asked for; `change` may alter what arrives."""

    def __init__(self, events, change=None, **options):
        super().__init__(**options)
        self.events, self.change = events, change

    def collect(self, num_steps, acting):
        arrived = super().collect(num_steps, acting)
        self.events.append(("collect", sum(one.chunk.num_steps for one in arrived), acting))
        return self.change(arrived) if self.change else arrived

    def set_weights(self, params, version):
        assert params == f"weights {version}"
        self.events.append(("weights", version))
        self._runner.version = str(version)
        super().set_weights(params, version)


class Group:
    """Carries out orders on a replay; loses its ranks at the orders of `restarts`, back to the newest checkpoint."""

    def __init__(self, spec, folder, contract, events, saved, restarts=()):
        self._make = (spec, contract, lambda data: data, folder, 3)
        self.events, self.saved, self.restarts, self.folder = events, saved, set(restarts), folder
        self.orders, self.starts = [], 0

    def start(self):
        self.starts += 1
        self.data = SequenceData(*self._make)
        clock, state = max(self.saved.items(), default=(0, {}))
        self.updates = state.get("scheduler", {}).get("updates", 0)
        self.data.restore(state.get("cursor", 0), self.folder)
        return clock

    def execute(self, order):
        with Journal(self.folder / "journal", read_only=True) as journal:
            assert order.cursor == len(journal)
            newest = list(journal.ids())[order.cursor - len(order.chunks) :]
            assert [chunk.id for chunk in order.chunks] == newest
        self.orders.append(order)
        if len(self.orders) - 1 in self.restarts:
            raise GroupRestarted(self.start())
        self.data.absorb(order)
        if order.kind == "update":
            self.updates += order.num_updates
            self.events.append(("update", order.num_updates))
        elif order.kind == "checkpoint":
            self.saved.setdefault(order.step, order.meta)
        result = {"loss": 1.0} if order.kind == "update" else {}
        return result | ({"params": f"weights {self.updates}"} if order.with_weights else {})

    def close(self):
        pass

    @property
    def replay(self):
        return self.data._replays["replay"]


class Listener:
    def __init__(self, on_metrics):
        self.metrics, self.then = [], on_metrics

    def on_metrics(self, step, metrics):
        self.metrics.append((step, metrics))
        self.then(step)

    def on_result(self, order, result):
        pass


class Run:
    """A run of phases to its end, or until its clock has come to `stop_at`; then, what it was.

    Attributes:
        events: ("collect", steps, acting), ("update", count), ("weights", version), in order.
        saved: checkpoints by clock, as the next part of the run finds them.
    """

    def __init__(self, folder, phases, words=(), saved=None, env=None, **options):
        self.folder, self.events, self.saved = folder, [], {} if saved is None else saved
        spec, self.ledger = ledger_env(length=5, **(env or {}))
        small = ["experiment=tdmpc2_walker_walk", "rollout.envs_per_worker=2", "replay.placement=host"]
        quiet = ["replay.capacity=1000", "log_interval=1000", "checkpoint.interval=1000", "evaluation.interval=null"]
        run = compose([*small, *quiet, f"phases=[{', '.join(phases)}]", *words])
        self.spec = run.replace(env=spec.model_dump())
        self.contract = make_env(spec).contract()
        self._go(spec, **options)

    def _go(self, env, change=None, restarts=(), stop_at=1e9):
        stop, rollout = threading.Event(), self.spec.rollout
        self.listener = Listener(lambda step: stop.set() if step >= stop_at else None)
        acting = FastActing({}, self.contract, Normalizer.from_contract(self.contract), "fp32")
        self.group = Group(self.spec, self.folder, self.contract, self.events, self.saved, restarts)
        with Journal(self.folder / "journal") as journal:
            rollouts = Rollouts(
                self.events, change, env=env, spec=rollout, acting=acting, seed=0, device="cpu",
                incarnations=next_incarnations(journal, rollout.workers),
            )  # fmt: skip
            self.orchestrator = Orchestrator(
                self.spec, self.group, self.listener, stop, rollouts=rollouts, journal=journal,
                read_meta=lambda step: self.saved[step],
            )  # fmt: skip
            self.clock = self.orchestrator.run()
            rollouts.close()
            self.chunks = list(journal.read())

    @property
    def collected(self):
        return sum(chunk.num_steps for chunk in self.chunks)

    @property
    def counters(self):
        return self.orchestrator._scheduler.to_json()

    def count(self, kind):
        return sum(event[1] for event in self.events if event[0] == kind)

    def of(self, *kinds):
        return [event for event in self.events if event[0] in kinds]

    def check_replay(self):
        """The group's replay is the one that the journal gives, and each step is in the journal once."""
        schema = {**self.contract.observation, "action": self.contract.action}
        streams = range(self.spec.rollout.workers * self.spec.rollout.envs_per_worker)
        fresh = Replay(self.spec.replay, schema, streams)
        for chunk in self.chunks:
            fresh.add(chunk)
        assert self.group.replay.digest() == fresh.digest()
        columns = [(chunk.columns["episode"].tolist(), chunk.columns["step"].tolist()) for chunk in self.chunks]
        rows = [row for episode, step in columns for row in zip(episode, step, strict=True)]
        assert len(rows) == len(set(rows))


# --- ratio and weights ----------------------------------------------------------------------------------------------


def test_a_synchronous_run_collects_and_learns_in_turn_in_the_ratio_of_its_phase(tmp_path):
    run = Run(tmp_path, [TRAIN])
    assert run.of("collect", "update") == [("collect", 2, "policy"), ("update", 1)] * 12
    assert (run.clock, run.collected, run.counters["updates"]) == (24, 24, 12)
    run.check_replay()


def test_phases_follow_one_another_with_who_acts_and_what_is_learned(tmp_path):
    run = Run(tmp_path, [SEED, PRETRAIN, TRAIN], ["learner.updates_per_call=4"])
    assert [event[2] for event in run.of("collect")] == ["random"] * 6 + ["policy"] * 12
    assert run.of("update")[:2] == [("update", 4), ("update", 2)]
    updates = [order for order in run.group.orders if order.kind == "update"]
    assert [(order.phase, order.step) for order in updates[:2]] == [(("pretrain", 0.0), 16), (("pretrain", 4 / 6), 18)]
    assert {order.phase[0] for order in updates[2:]} == {"train"}
    assert run.clock == run.spec.length == 42
    assert (run.counters["env_steps"], run.counters["updates"]) == (36, 18)


def test_chunks_are_as_long_as_asked_for_but_no_longer_than_what_is_left(tmp_path):
    run = Run(tmp_path, [TRAIN], ["rollout.chunk_steps=5"])
    assert [event[1] for event in run.of("collect")] == [10, 10, 4]
    assert run.count("update") == 12


def test_weights_are_handed_out_before_the_policy_first_acts_and_after_every_update(tmp_path):
    run = Run(tmp_path, [SEED, PRETRAIN, TRAIN])
    acts = next(i for i, event in enumerate(run.events) if event[0] == "collect" and event[2] == "policy")
    assert run.events[acts - 1] == ("weights", 6)
    assert run.of("weights") == [("weights", version) for version in range(6, 19)]
    assert {int(v) for chunk in run.chunks for v in chunk.columns["version"]} == {-1, *range(6, 18)}


def test_weights_may_be_handed_out_less_often(tmp_path):
    run = Run(tmp_path, [TRAIN], ["rollout.weights_interval=4"])
    assert run.of("weights") == [("weights", version) for version in (0, 4, 8, 12)]
    assert [int(chunk.columns["version"].max()) for chunk in run.chunks] == [0] * 4 + [4] * 4 + [8] * 4


def test_what_an_offline_phase_learned_acts_in_the_next_online_one_at_once(tmp_path):
    again = TRAIN.replace("name: train", "name: again")
    run = Run(tmp_path, [TRAIN, PRETRAIN, again], ["rollout.max_staleness=0"])
    assert run.events[run.events.index(("weights", 18)) + 1] == ("collect", 2, "policy")
    assert (run.collected, run.counters["updates"]) == (48, 30)


def test_a_phase_without_updates_hands_its_chunks_over_before_they_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(orchestrator, "MAX_UNSENT_BYTES", 200)
    run = Run(tmp_path, [SEED])
    assert len([order for order in run.group.orders if order.kind == "absorb"]) > 1
    run.check_replay()


# --- asynchronous ---------------------------------------------------------------------------------------------------

ASYNC = ["rollout.mode=async", "rollout.max_ahead=8", "rollout.chunk_steps=2"]


@pytest.mark.parametrize("max_ahead", [1, 4, 8, 100])
def test_an_asynchronous_run_makes_the_updates_that_its_steps_are_owed_and_no_step_too_many(tmp_path, max_ahead):
    run = Run(tmp_path, [SEED, TRAIN], [*ASYNC, f"rollout.max_ahead={max_ahead}"])
    assert (run.clock, run.collected, run.counters["updates"]) == (36, 36, 12)
    run.check_replay()
    ahead = 0
    for event in run.events[run.events.index(("collect", 4, "policy")) :]:
        ahead += event[1] if event[0] == "collect" else -2 * event[1] if event[0] == "update" else 0
        assert ahead <= max(max_ahead, 4)  # a chunk of four steps is the least


def test_an_asynchronous_run_of_so_many_updates_ends_with_them(tmp_path):
    run = Run(tmp_path, [SEED, TRAIN.replace("duration_steps: 24", "duration_updates: 12")], ASYNC)
    assert run.counters["updates"] == 12
    assert 24 <= run.collected - 12 <= 24 + 8


def test_an_asynchronous_run_with_a_large_ratio_does_not_wait_for_itself(tmp_path):
    run = Run(tmp_path, [TRAIN.replace("collect: 2", "collect: 20")], ASYNC)
    assert (run.collected, run.counters["updates"]) == (24, 1)


def test_an_asynchronous_run_logs_and_checkpoints_although_updates_are_always_owed(tmp_path):
    words = [*ASYNC, "log_interval=4", "checkpoint.interval=8", "learner.updates_per_call=1"]
    run = Run(tmp_path, [TRAIN.replace("duration_steps: 24", "duration_steps: 48")], words)
    assert len(run.listener.metrics) >= 10
    assert len(run.saved) >= 5


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_a_chunk_that_is_sent_again_changes_nothing(tmp_path):
    old = []

    def twice(arrived):
        old.extend(arrived)
        return [*arrived, *arrived, old[0], old[max(len(old) - 2, 0)]]

    whole, run = Run(tmp_path / "a", [TRAIN]), Run(tmp_path / "b", [TRAIN], change=twice)
    assert run.counters == whole.counters
    assert len(run.chunks) == len(whole.chunks) == 12
    run.check_replay()


def test_chunks_of_weights_that_are_too_old_are_dropped_and_counted(tmp_path):
    """The third to fifth chunks say that the first weights chose their actions."""
    number = itertools.count(1)

    def outdate(arrived):
        for one in arrived:
            if next(number) in (3, 4, 5):
                one.chunk.columns["version"][:] = 0
        return arrived

    run = Run(tmp_path, [TRAIN], ["rollout.max_staleness=1"], change=outdate)
    assert sum(metrics["rollout/stale_dropped"] for _, metrics in run.listener.metrics) == 3
    assert [chunk.number for chunk in run.chunks] == [0, 1, *range(5, 15)]
    assert (run.collected, run.counters["env_steps"], run.counters["updates"]) == (24, 24, 12)
    assert run.count("collect") == 30
    assert max(metrics["rollout/staleness_max"] for _, metrics in run.listener.metrics) == 2
    run.check_replay()


def test_staleness_is_measured_where_nothing_bounds_it(tmp_path):
    metrics = Run(tmp_path, [TRAIN], ["rollout.weights_interval=4"]).listener.metrics[-1][1]
    assert (metrics["rollout/staleness_max"], metrics["rollout/staleness"]) == (3, pytest.approx(1.5))


def test_random_steps_are_never_stale(tmp_path):
    run = Run(tmp_path, [TRAIN.replace("online,", "online, acting: random,")], ["rollout.max_staleness=0"])
    assert run.collected == 24
    assert run.listener.metrics[-1][1]["rollout/staleness_max"] == 0


def test_episodes_that_ended_and_those_that_were_lost_are_counted(tmp_path):
    run = Run(tmp_path, [TRAIN], env={"fail_at": [7, 12]})
    _, metrics = run.listener.metrics[-1]
    assert metrics["collect/episodes_lost"] == 2
    assert metrics["collect/episodes"] == len(run.ledger.ends)
    returns = [sum(run.ledger.steps[episode, t][1] for t in range(5)) for episode in run.ledger.ends]
    assert metrics["collect/return"] == pytest.approx(np.mean(returns), abs=1e-5)
    assert metrics["collect/length"] == 5
    assert metrics["progress/env_steps"] == run.collected == 24
    assert metrics["progress/updates"] == 12
    run.check_replay()


# --- restarts and resumes -------------------------------------------------------------------------------------------

WORDS = ["checkpoint.interval=8", "log_interval=4", "learner.updates_per_call=4"]


@pytest.mark.parametrize("restarts", [*([i] for i in range(0, 22, 3)), [4, 5, 6], [14, 15], [1, 8, 15]])
def test_a_group_that_comes_back_gets_from_the_journal_what_it_has_not_seen(tmp_path, restarts):
    run = Run(tmp_path, [SEED, PRETRAIN, TRAIN], WORDS, restarts=restarts)
    assert run.group.starts == 1 + len(restarts)
    assert run.clock == 42
    # No step is collected in vain: what the journal has counts, and is owed its updates.
    assert run.collected == run.counters["env_steps"] == 36
    assert run.counters["updates"] == run.group.updates == 18
    run.check_replay()


@pytest.mark.parametrize("stop_at", [4, 12, 16, 20, 28, 36, 40])
def test_a_stopped_run_goes_on_with_its_counters(tmp_path, stop_at):
    saved = {}
    first = Run(tmp_path, [SEED, PRETRAIN, TRAIN], WORDS, saved, stop_at=stop_at)
    assert stop_at <= first.clock < 42
    assert first.clock in saved
    second = Run(tmp_path, [SEED, PRETRAIN, TRAIN], WORDS, saved)
    whole = Run(tmp_path / "whole", [SEED, PRETRAIN, TRAIN], WORDS)
    assert second.clock == 42
    assert second.counters == whole.counters
    assert first.collected + second.count("collect") == second.collected == 36
    assert first.count("update") + second.count("update") == 18
    assert {chunk.incarnation for chunk in second.chunks} <= {0, 1}
    second.check_replay()


def test_a_run_that_was_cut_off_before_its_first_checkpoint_keeps_what_was_collected(tmp_path):
    """It learns anew, and steps as often in all as it would have."""
    first = Run(tmp_path, [SEED, PRETRAIN, TRAIN], ["log_interval=4"], {}, stop_at=28)
    assert first.collected > 12
    second = Run(tmp_path, [SEED, PRETRAIN, TRAIN], ["log_interval=4"], {})
    assert second.clock == 42
    assert second.collected == second.counters["env_steps"] == 36
    assert second.counters["updates"] == second.count("update") == 18
    second.check_replay()


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(tmp_path):
    saved = {}
    Run(tmp_path, [SEED, TRAIN], saved=saved)
    again = Run(tmp_path, [SEED, TRAIN], saved=saved)
    assert (again.clock, again.events) == (36, [])
    assert [order.kind for order in again.group.orders] == ["stop"]


def test_a_learner_is_not_idle_while_the_run_evaluates(monkeypatch):
    now = 100.0
    monkeypatch.setattr(orchestrator.time, "monotonic", lambda: now)
    collected = orchestrator._Collected(busy=4.0, paused=5.0, since=now - 10)
    assert collected.metrics()["rollout/learner_idle"] == pytest.approx(1 / 5)
