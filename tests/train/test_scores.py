"""Evaluations over several tasks, and ones that were stopped."""

import json

import numpy as np
import pytest

from rlsvc.commands.train import _count
from rlsvc.core.errors import UserError
from rlsvc.spec.env import LiberoSpec, PushTSpec
from rlsvc.train.evaluate import Evaluation, write_video
from rlsvc.train.scores import Made, read_scores, write_scores
from rlsvc.train.standalone import evaluate_bundle
from rlsvc.train.workers import STEP_TIMEOUT_S, EpisodeResult, EpisodeWorker, answer_timeout_s

SPEC = PushTSpec(max_steps=6)


def of_task(task: str, *successes: bool) -> list[EpisodeResult]:
    return [EpisodeResult(i, [float(s)], [np.zeros(2, np.float32)], s, task) for i, s in enumerate(successes)]


def run(path=None, episodes=3, env=SPEC, **options) -> Evaluation:
    return evaluate_bundle(
        "random", env, episodes=episodes, first_seed=7, parallel=2, local=True, output=path, **options
    )


def rewards(evaluation: Evaluation) -> list[tuple[int, list[float]]]:
    return [(e.seed, e.rewards) for e in evaluation.episodes]


def test_every_task_has_a_share_of_successes_of_its_own():
    made = Evaluation(of_task("b", True, False) + of_task("a", True, True))
    assert {name: len(part.episodes) for name, part in made.by_task().items()} == {"b": 2, "a": 2}
    metrics = made.metrics()
    assert (metrics["task_success/a"], metrics["task_success/b"], metrics["success"]) == (1.0, 0.5, 0.75)


def test_one_task_is_not_listed_beside_the_mean():
    assert not [name for name in Evaluation(of_task("a", True, False)).metrics() if "/" in name]


def test_an_episode_has_the_name_of_its_task(toy):
    worker = EpisodeWorker(toy, 1)
    worker.reset([4, 5])
    assert [result.task for result in worker.results()] == ["even", "odd"]
    worker.close()


@pytest.fixture
def toy():
    """An environment whose seed chooses its task."""
    import gymnasium

    from rlsvc.spec.env import GymnasiumSpec

    class TwoTasks(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {"task": "odd" if seed % 2 else "even"}

    gymnasium.register("two_tasks-v0", TwoTasks)
    yield GymnasiumSpec(id="two_tasks-v0")
    del gymnasium.registry["two_tasks-v0"]


def test_an_evaluation_that_was_stopped_goes_on_and_ends_as_one_that_was_not(tmp_path):
    whole, path = run(), tmp_path / "scores.json"
    run(path, episodes=2)
    first = json.loads(path.read_text())
    assert [(e["seed"], e["length"]) for e in first["episodes"]] == [(7, 6), (8, 6)]
    resumed = run(path, resume=True)
    assert rewards(resumed) == rewards(whole)
    # The first two were not run again: their actions are not there, and videos of them are refused.
    assert [len(e.actions) for e in resumed.episodes] == [0, 0, 6]
    with pytest.raises(UserError, match="seed 7 are not stored with its scores; evaluate without --resume"):
        write_video(resumed.episodes[0], SPEC, tmp_path / "a.mp4")
    stored = json.loads(path.read_text())
    assert stored["episodes"][:2] == first["episodes"]
    assert stored["metrics"]["max_reward"] == pytest.approx(np.mean([max(r) for _, r in rewards(whole)]))


def test_scores_are_on_disk_after_every_wave(tmp_path, monkeypatch):
    path, calls = tmp_path / "scores.json", []
    step = EpisodeWorker.reset

    def reset(self, seeds):
        if calls:
            raise UserError("stopped")
        calls.append(seeds)
        return step(self, seeds)

    monkeypatch.setattr(EpisodeWorker, "reset", reset)
    with pytest.raises(UserError, match="stopped"):
        run(path)
    assert [e["seed"] for e in json.loads(path.read_text())["episodes"]] == [7, 8]


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"env": PushTSpec(max_steps=5)}, "made with another env"), ({"sample_steps": 3}, "another sample_steps: it has")],
)
def test_scores_of_another_evaluation_are_not_taken_over(tmp_path, changed, message):
    path = tmp_path / "scores.json"
    run(path, episodes=1)
    with pytest.raises(UserError, match=message):
        run(path, resume=True, **changed)


def test_a_file_that_has_no_scores_and_a_missing_output_are_refused(tmp_path):
    path = tmp_path / "scores.json"
    path.write_text('{"made": {}}')
    with pytest.raises(UserError, match=r"--resume: .*scores\.json is no file of scores"):
        run(path, resume=True)
    with pytest.raises(UserError, match="--resume: goes on with the scores of --output"):
        run(resume=True)


def test_scores_are_read_as_they_were_written_and_isolation_does_not_matter(tmp_path):
    made = Made.by("id", SPEC, None)
    episodes = of_task("a", True, False)
    write_scores(Evaluation(episodes), made, tmp_path / "folder" / "scores.json")
    again = read_scores(tmp_path / "folder" / "scores.json", Made.by("id", SPEC.replace(isolation="process"), None))
    assert [(e.seed, e.rewards, e.success, e.task) for e in again] == [(0, [1.0], True, "a"), (1, [0.0], False, "a")]


def test_trials_are_the_episodes_of_every_task():
    whole = LiberoSpec(suite="libero_90")
    assert (_count(whole, None, 50), _count(whole.replace(task=3), None, 50)) == (4500, 50)
    assert (_count(SPEC, None, 20), _count(SPEC, 7, None), _count(SPEC, None, None)) == (20, 7, 50)
    with pytest.raises(UserError, match="--episodes, --trials: choose one"):
        _count(whole, 5, 5)
    with pytest.raises(UserError, match="--trials: it is not known how many tasks"):
        _count(LiberoSpec(suite="libero_10_swap"), None, 5)


def test_workers_of_simulators_that_are_watched_elsewhere_may_take_longer():
    assert answer_timeout_s(SPEC) == STEP_TIMEOUT_S
    assert answer_timeout_s(LiberoSpec()) > 10 * STEP_TIMEOUT_S
