"""What a run does next, phase by phase, and which phases are refused."""

import json
import re

import pytest

from rlsvc.core.errors import SpecError, UserError
from rlsvc.spec.compose import compose
from rlsvc.spec.phases import COLLECT, PhaseSpec
from rlsvc.train.phases import PhaseScheduler


def online(name="train", **fields):
    return PhaseSpec(**{"name": name, "type": "online", "hooks": {"collect": 1, "update": 1}, **fields})


def offline(name="pretrain", **fields):
    return PhaseSpec(**{"name": name, "type": "offline", "hooks": {"update": 1}, **fields})


def evaluation(name="judge", **fields):
    return PhaseSpec(**{"name": name, "type": "eval_only", "hooks": {"evaluate": 1}, "duration_cycles": 1, **fields})


def scheduler(*phases, k=50, state=None):
    return PhaseScheduler(phases, k, state)


def step(run, chunk=1, boundary=None):
    """Do what comes next: at most `chunk` steps, or all of the updates; None at the end."""
    work = run.next(boundary)
    if work is None:
        return None
    count = min(work.count, chunk) if work.hook == COLLECT else work.count
    run.advance(work.hook, count)
    return work.hook, count


def drive(run, chunk=1):
    """All that is left of a run, in short: `collect 4, update 2, ...`."""
    out = []
    while done := step(run, chunk):
        out.append(f"{done[0]} {done[1]}")
    return ", ".join(out)


# --- online: the ratio ---------------------------------------------------------------------------------------------


def test_two_updates_follow_each_step_where_the_ratio_says_so():
    run = scheduler(online(hooks={"collect": 1, "update": 2}, duration_steps=2))
    assert drive(run) == "collect 1, update 2, collect 1, update 2"


def test_one_update_follows_four_steps_where_the_ratio_says_so():
    run = scheduler(online(hooks={"collect": 4, "update": 1}, duration_steps=9))
    assert drive(run) == ", ".join([*["collect 1"] * 4, "update 1"] * 2 + ["collect 1"])


def test_a_large_chunk_is_owed_all_of_its_updates_in_calls_of_at_most_k():
    run = scheduler(online(hooks={"collect": 2, "update": 1}, duration_steps=20), k=4)
    assert drive(run, chunk=20) == "collect 20, update 4, update 4, update 2"


def test_several_hooks_each_keep_their_own_ratio_in_the_order_in_which_they_are_written():
    hooks = {"collect": 2, "update_model": 4, "update_controller": 1, "evaluate": 1}
    run = scheduler(online(hooks=hooks, duration_steps=4))
    cycle = "collect 1, update_model 2, collect 1, update_model 2, update_controller 1, evaluate 1"
    assert drive(run) == f"{cycle}, {cycle}"


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize(("steps", "updates"), [(1, 2), (4, 1), (3, 2)])
def test_at_the_end_of_every_turn_the_updates_are_what_the_ratio_makes_of_the_steps(chunk, steps, updates):
    run = scheduler(online(hooks={"collect": steps, "update": updates}, duration_steps=24), k=5)
    while (work := run.next()) is not None:
        if work.hook == COLLECT:
            assert run.updates == run.env_steps * updates // steps
        step(run, chunk)
    assert run.env_steps == 24
    assert run.updates == 24 * updates // steps


def test_a_chunk_that_is_longer_than_the_phase_is_owed_its_updates_too():
    run = scheduler(online(duration_steps=5))
    while (work := run.next()) is not None:
        run.advance(work.hook, 4 if work.hook == COLLECT else work.count)
    assert (run.env_steps, run.updates, run.clock) == (8, 8, 5)


@pytest.mark.parametrize("chunk", [1, 2, 5, 10])
def test_steps_before_the_minimum_fill_are_owed_nothing_whatever_the_chunks_are(chunk):
    run = scheduler(online(min_fill=5, duration_steps=10))
    first = None
    while (work := run.next()) is not None:
        if work.hook == "update" and first is None:
            first = run.env_steps
        step(run, chunk)
    assert first >= 5
    assert run.updates == 6  # of the steps 5 .. 10


def test_what_an_earlier_phase_collected_counts_for_the_minimum_fill():
    seed = online("seed", hooks={"collect": 1}, acting="random", duration_steps=5)
    run = scheduler(seed, online(min_fill=5, duration_steps=2))
    assert drive(run, chunk=5) == "collect 5, collect 2, update 2"


def test_collecting_is_ahead_by_the_steps_whose_updates_are_not_made():
    run = scheduler(online(hooks={"collect": 2, "update": 1}, min_fill=3, duration_steps=100))
    run.next()
    run.advance(COLLECT, 2)
    assert run.ahead == 0  # too few for an update, so none is owed
    run.advance(COLLECT, 10)
    assert run.ahead == 10
    run.advance("update", 3)
    assert run.ahead == 4


def test_the_slowest_hook_says_how_far_collecting_is_ahead():
    run = scheduler(online(hooks={"collect": 1, "a": 1, "b": 2}, duration_steps=100))
    run.advance(COLLECT, 6)
    run.advance("a", 5)
    run.advance("b", 4)
    assert run.ahead == 4


def test_phases_without_updates_or_without_steps_are_never_ahead():
    seed = online("seed", hooks={"collect": 1}, duration_steps=9)
    run = scheduler(seed, offline(duration_updates=2))
    run.advance(COLLECT, 9)
    assert run.ahead == 0
    run.next()
    assert (run.phase.name, run.ahead) == ("pretrain", 0)


# --- durations -----------------------------------------------------------------------------------------------------


def test_an_online_phase_of_so_many_updates_collects_what_they_are_owed_to():
    run = scheduler(online(hooks={"collect": 4, "update": 1}, duration_updates=2))
    assert drive(run, chunk=4) == "collect 4, update 1, collect 4, update 1"
    assert (run.clock, run.phase.length, run.phase.num_updates) == (8, 8, 2)


def test_an_online_phase_of_so_many_updates_ends_amid_what_is_owed():
    run = scheduler(online(hooks={"collect": 1, "a": 1, "b": 2}, duration_updates=5))
    assert drive(run) == "collect 1, a 1, b 2, collect 1, a 1, b 1"


def test_an_online_phase_of_so_many_updates_first_fills_the_replay():
    run = scheduler(online(min_fill=4, duration_updates=2))
    assert drive(run) == "collect 1, collect 1, collect 1, collect 1, update 1, collect 1, update 1"
    assert run.phase.length == 5


def test_cycles_of_an_online_phase_are_counted_in_the_steps_that_they_collect():
    run = scheduler(online(hooks={"collect": 4, "update": 2}, duration_cycles=3))
    drive(run, chunk=4)
    assert (run.env_steps, run.updates, run.clock) == (12, 6, 12)
    assert run.phase.num_updates == 6


def test_an_offline_phase_with_one_hook_is_cut_by_k_and_the_boundary_alone():
    run = scheduler(offline(duration_updates=12), k=5)
    assert [step(run, boundary=boundary) for boundary in (7, 7, 100, 100, 100)] == [
        ("update", 5), ("update", 2), ("update", 5), None, None,
    ]  # fmt: skip


def test_offline_cycles_carry_out_every_hook_in_turn():
    run = scheduler(offline(hooks={"a": 3, "b": 1, "evaluate": 1}, duration_cycles=2), k=2)
    cycle = "a 2, a 1, b 1, evaluate 1"
    assert drive(run) == f"{cycle}, {cycle}"
    assert (run.updates, run.clock) == (8, 8)


def test_an_offline_phase_that_ends_amid_a_cycle_makes_no_evaluation_for_it():
    run = scheduler(offline(hooks={"update": 3, "evaluate": 1}, duration_updates=4))
    assert drive(run) == "update 3, evaluate 1, update 1"


def test_evaluations_may_come_first_in_a_cycle():
    run = scheduler(offline(hooks={"evaluate": 2, "update": 3}, duration_cycles=2))
    cycle = "evaluate 1, evaluate 1, update 3"
    assert drive(run) == f"{cycle}, {cycle}"


def test_an_eval_only_phase_evaluates_and_does_nothing_else():
    run = scheduler(evaluation(hooks={"evaluate": 2}, duration_cycles=2))
    assert drive(run) == "evaluate 1, evaluate 1, evaluate 1, evaluate 1"
    assert (run.env_steps, run.updates, run.clock) == (0, 0, 4)


@pytest.mark.parametrize(
    ("phase", "updates"),
    [
        (online(hooks={"collect": 4, "update": 2}, duration_steps=10), 5),
        (online(hooks={"collect": 1}, duration_steps=10), 0),
        (online(min_fill=4, duration_steps=10), 7),
        (online(hooks={"collect": 2, "a": 1, "b": 2}, duration_cycles=5), 15),
        (offline(duration_updates=7), 7),
        (offline(hooks={"a": 2, "b": 1}, duration_cycles=3), 9),
        (evaluation(), 0),
    ],
)
def test_the_updates_of_a_phase_are_known_beforehand(phase, updates):
    assert phase.num_updates == updates
    run = scheduler(phase)
    drive(run)
    assert run.updates == updates


def test_an_offline_phase_refuses_a_replay_below_its_minimum_fill():
    seed = online("seed", hooks={"collect": 1}, duration_steps=3)
    run = scheduler(seed, offline(duration_updates=5, min_fill=10))
    with pytest.raises(UserError, match=re.escape("phase 'pretrain': the replay holds 3 transitions, min_fill asks")):
        drive(run)


# --- clock, progress, and going on ---------------------------------------------------------------------------------

CURRICULUM = (
    online("seed", hooks={"collect": 1}, acting="random", duration_steps=4),
    offline(hooks={"a": 2, "b": 1, "evaluate": 1}, duration_cycles=2),
    online("train", hooks={"collect": 3, "a": 2, "b": 1, "evaluate": 1}, min_fill=6, duration_steps=9),
    evaluation(hooks={"evaluate": 2}),
    offline("last", duration_updates=3),
)


def test_the_clock_counts_steps_then_updates_then_evaluations():
    run = scheduler(*CURRICULUM, k=2)
    clocks = {}
    while step(run, chunk=2):
        clocks.setdefault(run.phase.name, []).append(run.clock)
    assert [phase.length for phase in CURRICULUM] == [4, 6, 9, 2, 3]
    assert clocks["seed"] == [2, 4]
    assert clocks["pretrain"] == [6, 7, 7, 9, 10, 10]
    assert clocks["train"][-1] == 19
    assert clocks["judge"] == [20, 21]
    assert clocks["last"] == [23, 24]
    assert run.clock == 24


def test_the_clock_never_runs_back_and_progress_goes_from_0_to_1_in_each_phase():
    run = scheduler(*CURRICULUM, k=2)
    before, seen = 0, {}
    while True:
        assert run.clock >= before
        before = run.clock
        if run.next() is None:
            break
        seen.setdefault(run.phase.name, []).append(run.progress)
        step(run, chunk=2)
        seen[run.phase.name].append(run.progress)
    assert all(values == sorted(values) and values[0] == 0.0 and values[-1] == 1.0 for values in seen.values())
    assert run.finished
    assert (run.progress, run.phase.name) == (1.0, "last")


def test_a_run_that_is_over_has_nothing_left_to_do():
    run = scheduler(*CURRICULUM)
    drive(run)
    assert drive(scheduler(*CURRICULUM, state=run.to_json())) == ""


def test_a_scheduler_that_was_stored_at_any_point_goes_on_as_if_it_had_not_been():
    whole = scheduler(*CURRICULUM, k=2)
    points, done = [whole.to_json()], []
    while (one := step(whole, chunk=2)) is not None:
        done.append(f"{one[0]} {one[1]}")
        points.append(whole.to_json())
    assert len(points) > 25
    for i, state in enumerate(points):
        run = scheduler(*CURRICULUM, k=2, state=json.loads(json.dumps(state)))
        assert drive(run, chunk=2) == ", ".join(done[i:])
        assert run.to_json() == whole.to_json()


def test_steps_that_the_journal_has_beyond_a_checkpoint_count_as_collected_and_are_owed_updates():
    run = scheduler(online(hooks={"collect": 2, "update": 1}, duration_steps=10))
    run.next()
    run.absorb(6)
    assert (run.env_steps, run.ahead, run.clock) == (6, 6, 6)
    assert drive(run, chunk=4) == "update 3, collect 4, update 2"


def test_steps_that_were_collected_in_later_phases_count_there_when_a_run_begins_again():
    """As after a crash before the first checkpoint: the journal has it all, and nothing was learned."""
    seed = online("seed", hooks={"collect": 1}, duration_steps=4)
    run = scheduler(seed, offline(duration_updates=2), online(duration_steps=6))
    run.next()
    run.absorb(7)
    stored = json.loads(json.dumps(run.to_json()))
    assert (run.env_steps, run.fill) == (7, 7)
    for one in (run, scheduler(seed, offline(duration_updates=2), online(duration_steps=6), state=stored)):
        assert drive(one, chunk=6) == "update 2, update 3, collect 3, update 3"
        assert (one.env_steps, one.updates) == (10, 8)


def test_steps_beyond_the_last_online_phase_are_owed_updates_there():
    run = scheduler(online(duration_steps=4), offline(duration_updates=2))
    run.next()
    run.absorb(6)
    assert drive(run) == "update 6, update 2"


def test_steps_absorbed_once_no_online_phase_is_left_are_in_the_replay_and_no_more():
    run = scheduler(online("seed", hooks={"collect": 1}, duration_steps=1), offline(duration_updates=2))
    step(run)
    run.next()
    run.absorb(5)
    assert (run.env_steps, run.fill, drive(run)) == (6, 6, "update 2")


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: online(), "phase 'train': got 0 durations, expected one of duration_steps"),
        (lambda: online(duration_steps=1, duration_cycles=1), "phase 'train': got 2 durations"),
        (lambda: offline(hooks={"collect": 1, "update": 1}, duration_updates=1), "`collect` belongs to online phases"),
        (lambda: online(hooks={"update": 1}, duration_steps=1), "every online phase has it"),
        (lambda: offline(hooks={"evaluate": 1}, duration_cycles=1), "an offline phase needs a hook of the algorithm"),
        (lambda: evaluation(hooks={"evaluate": 1, "update": 1}), "an eval_only phase has the hook `evaluate` alone"),
        (lambda: offline(duration_steps=1), "phase 'pretrain': duration_steps counts environment steps"),
        (lambda: online(hooks={"collect": 1}, duration_updates=1), "duration_updates, but none of its hooks updates"),
        (lambda: offline(buffer="reply", duration_updates=1), "buffer 'reply', expected replay or demonstrations"),
        (lambda: offline(buffer={"replay": 0.0}, duration_updates=1), "shares must be above 0"),
        (lambda: offline(buffer={}, duration_updates=1), "shares must be above 0"),
        (lambda: online(hooks={}, duration_steps=1), "hooks"),
        (lambda: online(hooks={"collect": 0}, duration_steps=1), "hooks.collect"),
    ],
)
def test_a_phase_that_makes_no_sense_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


BASE = ["experiment=tdmpc2_walker_walk", "rollout.envs_per_worker=4", "replay.capacity=50_000"]
SEED = "{name: seed, type: online, hooks: {collect: 1}, duration_steps: 5}"
TRAIN = "{name: train, type: online, hooks: {collect: 1, update: 1}, duration_steps: 5}"
PRETRAIN = "{name: pretrain, type: offline, hooks: {update: 1}, duration_updates: 5}"


def run_of(*phases, words=()):
    return compose([*BASE, f"phases=[{', '.join(phases)}]", *words])


def test_a_curriculum_of_several_phases_has_the_length_of_all():
    assert run_of(SEED, PRETRAIN, TRAIN).length == 15


@pytest.mark.parametrize(
    ("phases", "words", "message"),
    [
        ([TRAIN.replace("update:", "updat:")], [], "phase 'train': unknown hook 'updat' (did you mean 'update'?)"),
        ([SEED, SEED], [], "phases: two are called 'seed'"),
        ([PRETRAIN], [], "phase 'pretrain': buffer replay stays empty, since no phase is online"),
        ([PRETRAIN, TRAIN], [], "phase 'pretrain': buffer replay is still empty, since no phase before it is online"),
        ([TRAIN.replace("steps: 5", "steps: 5, buffer: demonstrations")], [], "buffer demonstrations needs `data`"),
        ([TRAIN], ["env=null"], "phase 'train': it steps or evaluates in an environment, and the run has no `env`"),
        ([TRAIN], ["replay.capacity=12"], "leave 3 rows to each, but sequences of 3 steps need 5"),
        ([TRAIN.replace("steps: 5", "steps: 5, min_fill: 60_000")], [], "phase 'train': min_fill asks for 60000"),
        ([TRAIN], ["total_steps=5"], "total_steps, phases: got both"),
        ([], [], "total_steps, phases: got neither"),
        ([TRAIN], ["policy={name: tdmpc}"], "tdmpc2"),
        ([TRAIN], ["algo={name: tdmcp2}"], "tdmpc2"),
        ([TRAIN], ["algo={name: imitation}"], ", got tdmpc2"),
        ([TRAIN], ["rollout.max_staleness=2", "rollout.weights_interval=4"], "chunks would be dropped for ever"),
    ],
)
def test_a_run_whose_parts_do_not_fit_is_refused_by_name(phases, words, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        run_of(*phases, words=words)


def test_an_algorithm_that_imitates_learns_from_no_replay():
    phases = f"phases=[{TRAIN}]"
    with pytest.raises(SpecError, match="imitation learns from demonstrations, got buffer replay"):
        compose(["experiment=pusht_demo", "total_steps=null", phases])
