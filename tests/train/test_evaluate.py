import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from rlsvc.cli import app
from rlsvc.core.errors import UserError
from rlsvc.core.types import MALFORMED, ActionChunk
from rlsvc.data.normalize import Normalizer
from rlsvc.envs.make import make_env
from rlsvc.nn.params import flatten_params
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.runner import BaselineRunner
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.env import PushTSpec
from rlsvc.store.bundle import write_bundle
from rlsvc.train.evaluate import (
    Evaluation,
    batch_sizes,
    evaluate,
    mean_interval,
    paired_share_interval,
    share_interval,
    write_video,
)
from rlsvc.train.inference import LocalInference
from rlsvc.train.workers import EpisodeResult, EpisodeWorker, InProcess, Processes, WorkerLost

SPEC = PushTSpec(max_steps=12)
SEEDS = [5, 6, 7, 8, 9]


def baseline() -> BaselineRunner:
    env = make_env(SPEC)
    try:
        return BaselineRunner("random", env.contract(n_obs_steps=2, action_horizon=5))
    finally:
        env.close()


def episode(seed: int, rewards: list[float], success: bool = False) -> EpisodeResult:
    return EpisodeResult(seed, rewards, [np.zeros(2, np.float32)] * len(rewards), success)


class Shares:
    """Workers in this process; the first calls named in `lose` lose one."""

    def __init__(self, count: int, lose: int = 0) -> None:
        self.count, self.lose = count, lose
        self.workers = [EpisodeWorker(SPEC, 2) for _ in range(count)]

    def call(self, method, arguments):
        if method == "step" and self.lose:
            self.lose -= 1
            raise WorkerLost("rollout worker 0 died or hung")
        return [getattr(worker, method)(*argument) for worker, argument in zip(self.workers, arguments, strict=True)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def same(a: Evaluation, b: Evaluation) -> None:
    for left, right in zip(a.episodes, b.episodes, strict=True):
        assert (left.seed, left.rewards, left.success) == (right.seed, right.rewards, right.success)
        np.testing.assert_array_equal(left.actions, right.actions)


@pytest.fixture(scope="module")
def reference() -> Evaluation:
    workers = InProcess(SPEC, 2)
    try:
        return evaluate(baseline(), workers, SEEDS, parallel=5)
    finally:
        workers.close()


def test_every_seed_gives_one_episode_in_order(reference):
    assert [e.seed for e in reference.episodes] == SEEDS
    assert [e.length for e in reference.episodes] == [12] * 5


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_result_is_the_same_for_any_number_of_workers(reference, count):
    workers = Shares(count)
    same(evaluate(baseline(), workers, SEEDS, parallel=5), reference)
    workers.close()


def test_the_result_is_the_same_in_waves(reference):
    workers = Shares(2)
    same(evaluate(baseline(), workers, SEEDS, parallel=2), reference)
    workers.close()


def test_the_result_is_the_same_in_processes_of_their_own(reference):
    workers = Processes(SPEC, 2, 2)
    try:
        same(evaluate(baseline(), workers, SEEDS, parallel=5), reference)
    finally:
        workers.close()


def test_a_jax_policy_gives_the_same_result_for_any_number_of_workers(tmp_path):
    spec = DiffusionSpec.model_validate(
        {"n_obs_steps": 2, "horizon": 6, "n_action_steps": 5, "train_steps": 10, "sample_steps": 1,
         "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8}}
    )  # fmt: skip
    contract = baseline().contract
    features = {**contract.observation, "action": contract.action}
    data = {key: np.stack([np.zeros(f.shape), np.full(f.shape, 512)]) for key, f in features.items()}
    path = write_bundle(
        tmp_path / "bundle",
        policy=spec.model_dump(mode="json"),
        contract=contract,
        normalizer=Normalizer.fit({"default": data}, features, {}),
        params=flatten_params(jax.jit(DiffusionPolicy(spec, contract).init)(jax.random.key(0))),
    )
    inference = LocalInference((5,), "cpu")
    inference.load(path)
    one, three = Shares(1), Shares(3)
    same(evaluate(inference, one, SEEDS, parallel=5), evaluate(inference, three, SEEDS, parallel=5))
    one.close()
    three.close()


def test_an_episode_fails_where_the_policy_says_no_action_and_goes_on_where_the_robot_is_held_still():
    class Sayer:
        contract = baseline().contract
        version = ""

        def act(self, observation, seeds, steps, carry=None):
            action = np.full((len(seeds), 5, 2), 256, np.float32)
            nothing = (seeds == 5) | ((seeds == 6) & (steps == 5))
            action[nothing] = np.nan
            return ActionChunk(action, extras={MALFORMED: np.where(nothing | (seeds == 7), "no_end", "")})

    workers = Shares(2)
    found = evaluate(Sayer(), workers, SEEDS, parallel=5)
    workers.close()
    assert [e.length for e in found.episodes] == [0, 5, 12, 12, 12]
    assert [e.malformed for e in found.episodes] == [1, 1, 3, 0, 0]
    assert found.metrics()["malformed_chunks"] == 5
    assert (found.scores("success")[:2] == 0).all()
    assert (found.scores("max_reward")[0], found.scores("return")[0]) == (0, 0)


def test_a_policy_that_says_no_tokens_has_no_malformed_chunks(reference):
    assert "malformed_chunks" not in reference.metrics()


def test_the_policy_sees_windows_padded_at_the_start_and_the_control_step_of_its_seed():
    calls = []

    class Recorder:
        contract = baseline().contract
        version = ""

        def act(self, observation, seeds, steps, carry=None):
            calls.append((observation["observation.state"], seeds.tolist(), steps.tolist()))
            return ActionChunk(np.full((len(seeds), 5, 2), 256, np.float32))

        def warm_up(self):
            pass

    workers = InProcess(SPEC, 2)
    evaluate(Recorder(), workers, [5, 6], parallel=2)
    workers.close()
    assert [(seeds, steps) for _, seeds, steps in calls] == [([5, 6], [s, s]) for s in (0, 5, 10)]
    first, second = calls[0][0], calls[1][0]
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    assert not np.array_equal(second[:, 0], second[:, 1])


def test_a_lost_worker_has_its_wave_run_again(reference):
    workers = Shares(2, lose=2)
    same(evaluate(baseline(), workers, SEEDS, parallel=5), reference)
    workers.close()


def test_workers_lost_again_and_again_end_the_evaluation_with_the_seeds():
    workers = Shares(2, lose=100)
    with pytest.raises(UserError, match=r"evaluation: rollout worker 0 died or hung, 4 times with the seeds 5 to 9"):
        evaluate(baseline(), workers, SEEDS, parallel=5)
    workers.close()


def test_the_interval_of_a_mean_is_the_normal_approximation():
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 1.96 * math.sqrt(5 / 3) / 2
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    assert mean_interval([1.0]).low == -math.inf


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Wilson's interval at z = 1.96.
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (45, 50, 0.7864, 0.9565)],
)
def test_the_interval_of_a_share_is_wilsons(successes, count, low, high):
    interval = share_interval(successes, count)
    assert interval.mean == successes / count
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("only_one", "only_other", "count", "low", "high"),
    # By the formula of Agresti and Min (2005), section 2, with a pencil: 14 and 5 of 102, n + 2 = 104.
    [(14, 5, 102, 9 / 104 - 1.96 * math.sqrt(20 - 81 / 104) / 104, 9 / 104 + 1.96 * math.sqrt(20 - 81 / 104) / 104),
     (0, 0, 50, -1.96 / 52, 1.96 / 52), (1, 0, 1, 1 / 3 - 1.96 * math.sqrt(2 - 1 / 3) / 3, 1.0)],
)  # fmt: skip
def test_the_interval_of_a_paired_difference_is_agresti_and_mins(only_one, only_other, count, low, high):
    interval = paired_share_interval(only_one, only_other, count)
    assert interval.mean == (only_one - only_other) / count
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_two_policies_are_compared_seed_by_seed():
    def scored(*rewards, seeds=(7, 8, 9)):
        return Evaluation([episode(seed, [r], r >= 1) for seed, r in zip(seeds, rewards, strict=True)])

    one, other = scored(1.0, 0.5, 1.0), scored(0.9, 0.4, 0.9)
    # The policies differ by a tenth in every pair, however much the starts differ.
    difference = one.minus(other, "max_reward")
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.1, 0.1, 0.1))
    assert one.minus(other, "success") == paired_share_interval(2, 0, 3)
    assert other.minus(one, "success").mean == pytest.approx(-2 / 3)
    with pytest.raises(AssertionError, match="same seeds"):
        one.minus(scored(1.0, 1.0, 1.0, seeds=(7, 8, 10)), "success")


def test_scores_are_those_of_the_episodes():
    made = Evaluation([episode(1, [0.1, 0.5]), episode(2, [0.2, 1.0, 1.0], True)])
    metrics = made.metrics()
    assert (metrics["max_reward"], metrics["success"], metrics["length"]) == (0.75, 0.5, 2.5)
    assert metrics["return"] == pytest.approx((0.6 + 2.2) / 2)
    assert metrics["max_reward_low"] < 0.75 < metrics["max_reward_high"]
    assert "max_reward_low" not in Evaluation([episode(1, [0.1])]).metrics()


def test_best_median_and_worst_are_picked_by_the_metric():
    made = Evaluation([episode(1, [0.5]), episode(2, [0.9]), episode(3, [0.1]), episode(4, [0.9]), episode(5, [0.3])])
    assert {name: e.seed for name, e in made.extremes("max_reward").items()} == {"worst": 3, "median": 1, "best": 4}


def test_a_small_batch_has_a_quarter_beside_it():
    assert (batch_sizes(50), batch_sizes(2), batch_sizes(1), batch_sizes(500)) == ((12, 50), (1, 2), (1,), (500,))


@pytest.mark.render
def test_a_video_replays_the_episode_frame_by_frame(reference, tmp_path: Path):
    import av

    path = write_video(reference.episodes[0], SPEC, tmp_path / "videos" / "a.mp4")
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 10
    assert len(frames) == reference.episodes[0].length
    env = make_env(SPEC)
    env.reset(seed=reference.episodes[0].seed)
    for action in reference.episodes[0].actions:
        env.step(action)
    # The last frame is the last state, up to what the codec loses.
    assert np.abs(frames[-1].astype(int) - env.render()).mean() < 6
    env.close()


def test_the_command_compares_two_policies_on_the_same_starts_and_keeps_both_scores(tmp_path: Path):
    words = [
        "evaluate",
        "random",
        "--against",
        "zero",
        "--env",
        "gymnasium",
        "id=Pendulum-v1",
        "max_steps=5",
        "--local",
    ]
    done = CliRunner().invoke(app, [*words, "--episodes", "3", "--output", str(tmp_path / "scores.json")])
    assert done.exit_code == 0, done.output
    assert "random minus zero, seed by seed" in done.output
    random, zero = (json.loads((tmp_path / f"scores{end}.json").read_text()) for end in ("", "_against"))
    assert [e["seed"] for e in random["episodes"]] == [e["seed"] for e in zero["episodes"]]
    assert random["episodes"] != zero["episodes"]
