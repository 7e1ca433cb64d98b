"""Runs of value functions without Ray, what their bundles are good for, and imitation that is filtered by them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlsvc.cli import app
from rlsvc.core.errors import BundleError, ContractError, DatasetError
from rlsvc.data.load import load_table
from rlsvc.data.mixture import split_episodes
from rlsvc.data.monte_carlo import read_outcomes
from rlsvc.data.normalize import Normalizer
from rlsvc.runner import PolicyRunner
from rlsvc.spec.compose import compose
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.train.learner import Learner, WindowData
from rlsvc.train.run import train
from rlsvc.value import ValueRunner

ROOT = Path(__file__).resolve().parents[2]
PUSHT = ROOT / "datasets" / "pusht_human"
DOOR = ROOT / "tests" / "data" / "dapg_door" / "door_2demos.npz"


def value_spec(root: Path, *overrides: str) -> RunSpec:
    return compose([
        "experiment=value_pusht", f"root={root}", f"data.datasets.0.path={PUSHT}",
        "data.datasets.0.episodes=[0,1,2,3,4,5]", "data.validation_fraction=0.3", "policy.hidden=[16]",
        "policy.head.bins=11", "algo.batch_size=8", "total_steps=8", "learner.updates_per_call=4", "log_interval=4",
        "checkpoint.interval=4", "tracking.trackers=[]", *overrides,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    return train(value_spec(tmp_path_factory.mktemp("runs")), local=True)


def table():
    keys = ["observation.state", "observation.environment_state", "action"]
    return load_table(DatasetSpec(path=str(PUSHT), episodes=(0, 1, 2)), keys)


def test_a_run_logs_its_metrics_and_leaves_a_bundle_that_judges_every_step(trained):
    logged = ("loss", "value", "return", "explained_variance", "out_of_support")
    assert {f"{stage}/{name}" for stage in ("train", "validation") for name in logged} <= trained.metrics.keys()
    runner, steps = ValueRunner.load(trained.bundle), table()
    assert (runner.returns.discount, runner.returns.success_bonus) == (0.99, 1)
    values = runner.values(steps)
    assert (values.shape, values.dtype) == ((steps.num_steps,), np.float32)
    assert np.isfinite(values).all()
    # Neither the batch, nor what comes before in the table, changes a step's value.
    np.testing.assert_allclose(runner.values(steps.select([2])), values[steps.episode_starts[2] :], rtol=1e-4)


def test_a_stopped_run_resumes_to_the_same_bundle_bit_for_bit(trained, tmp_path):
    stop = threading.Event()
    train(value_spec(tmp_path), local=True, on_metrics=lambda *_: stop.set(), stop=stop)
    resumed = train(value_spec(tmp_path, "resume=true"), local=True)
    assert read_bundle(resumed.bundle).id == read_bundle(trained.bundle).id


def test_advantages_are_returns_less_values_and_unknown_where_the_episode_was_cut(trained):
    runner, steps = ValueRunner.load(trained.bundle), table()
    values, last = runner.values(steps), int(steps.episode_ends[0]) - 1
    data = value_spec(Path()).data
    advantage, known = runner.advantages(read_outcomes(steps, data, 1.0, success=True), values)
    assert known.all()
    assert advantage[last] == pytest.approx(1 - values[last])
    assert advantage[last - 2] == pytest.approx(0.99**2 - values[last - 2])
    one, _ = runner.advantages(read_outcomes(steps, data, 1.0, success=True), values, n_steps=1)
    assert one[5] == pytest.approx(0.99 * values[6] - values[5], abs=1e-6)
    steps.columns["done"] = np.arange(steps.num_steps) > last
    cut = read_outcomes(steps, data.replace(terminated="done"), 1.0, success=True)
    assert runner.advantages(cut, values)[1].tolist() == steps.columns["done"].tolist()


def test_a_value_function_is_neither_tried_nor_served(trained):
    with pytest.raises(ContractError, match="'value_mlp' is a value function, which does not act"):
        PolicyRunner.load(trained.bundle)


def test_a_bundle_without_the_scale_of_its_values_is_refused(trained):
    bundle = read_bundle(trained.bundle)
    kept = {name: stats for name, stats in bundle.normalizer.stats.items() if name != "return"}
    modes = {name: mode for name, mode in bundle.normalizer.modes.items() if name != "return"}
    without = replace(bundle, normalizer=Normalizer(bundle.normalizer.groups, modes, kept))
    with pytest.raises(BundleError, match="its normaliser has no statistics for 'return', the scale of its values"):
        ValueRunner(without)


def test_a_table_that_lacks_what_it_sees_is_refused_by_name(trained):
    runner, steps = ValueRunner.load(trained.bundle), table()
    del steps.columns["observation.state"]
    with pytest.raises(ContractError, match=r"has no 'observation\.state', which the value function needs"):
        runner.values(steps)
    steps = table()
    steps.columns["observation.state"] = steps.columns["observation.state"][:, :1]
    with pytest.raises(ContractError, match=r"'observation.state' shape: value function has \(2,\), .* has \(1,\)"):
        runner.values(steps)


def filtered(root: Path, bundle: Path, *overrides: str) -> RunSpec:
    """Imitation of the same episodes by a tiny diffusion policy."""
    return compose([
        "experiment=pusht_demo", f"root={root}", "name=filtered", f"data.datasets.0.path={PUSHT}",
        "data.datasets.0.episodes=[0,1,2,3,4,5]", "data.datasets.0.success=true", "data.validation_fraction=0.3",
        "total_steps=2", "learner.updates_per_call=2", "algo.batch_size=8", "policy.backbone.down_dims=[8,8]",
        "policy.backbone.step_embed_dim=8", "env=null", "tracking.trackers=[]", f"algo.advantage.bundle={bundle}",
        *overrides,
    ])  # fmt: skip


def learned_from(spec: RunSpec):
    return WindowData(spec, None, lambda arrays: arrays, "cpu")


def test_imitation_learns_from_the_training_steps_above_the_quantile_and_validates_on_all(trained, tmp_path):
    data = learned_from(filtered(tmp_path, trained.bundle, "algo.advantage.quantile=0.3"))
    spec = filtered(tmp_path, trained.bundle, "algo.advantage=null")
    whole = learned_from(spec)
    # By hand: the bonus of 1 at the end of each episode, 0.99 for every step before it.
    runner = ValueRunner.load(trained.bundle)
    steps = load_table(spec.data.datasets[0], (*spec.data.observation, "action"))
    steps = steps.select(list(split_episodes(6, spec.data).train))
    to_end = np.concatenate([np.arange(n)[::-1] for n in steps.episode_ends - steps.episode_starts])
    advantage = 0.99**to_end - runner.values(steps)
    expected = np.flatnonzero(advantage >= np.quantile(advantage, 0.3))
    np.testing.assert_array_equal(data.source({}).anchor, expected)
    assert data.source({}).num_windows == pytest.approx(0.7 * whole.source({}).num_windows, abs=1)
    assert data.validation.num_windows == whole.validation.num_windows
    assert data.normalizer.to_json() == whole.normalizer.to_json()


def test_a_filtered_policy_leaves_a_bundle_that_acts_and_does_not_judge(trained, tmp_path):
    spec = filtered(tmp_path, trained.bundle, "algo.advantage.threshold=0.0")
    bundle = Learner(spec, tmp_path / "run").export(tmp_path / "bundle")
    assert read_bundle(bundle).policy["name"] == "diffusion"
    with pytest.raises(ContractError, match="'diffusion' is not a value function"):
        ValueRunner.load(bundle)


def test_a_threshold_that_nothing_reaches_is_refused_with_its_value(trained, tmp_path):
    spec = filtered(tmp_path, trained.bundle, "algo.advantage.threshold=9.0")
    with pytest.raises(
        DatasetError, match=r"pusht_human: none of its \d+ steps is left \(algo\.advantage: threshold = 9"
    ):
        learned_from(spec)


def test_a_filter_without_rewards_or_successes_says_what_to_name(trained, tmp_path):
    spec = filtered(tmp_path, trained.bundle, "algo.advantage.quantile=0.5", "data.datasets.0.success=null")
    with pytest.raises(DatasetError, match=r"every return would be 0; name the reward's column \(data\.reward\)"):
        learned_from(spec)


def test_a_q_function_learns_from_recorded_rewards_judges_actions_and_has_no_advantage(tmp_path):
    door = tmp_path / "door.npz"
    np.savez(door, **np.load(DOOR), fps=20.0)
    result = train(
        value_spec(
            tmp_path, f"data.datasets=[{{path: {door}}}]", "data.observation=[observation.state]",
            "data.reward=next.reward", "policy.n_action_steps=1",
            "policy.returns.truncated=keep", "data.validation_fraction=0.5",
        ),
        local=True,
    )  # fmt: skip
    steps = load_table(DatasetSpec(path=str(door)), ["observation.state", "action", "next.reward"])
    runner = ValueRunner.load(result.bundle)
    values = runner.values(steps)
    steps.columns["action"] = steps.columns["action"] + 0.1
    assert not np.allclose(runner.values(steps), values)
    data = value_spec(tmp_path).data.replace(reward="next.reward")
    with pytest.raises(ContractError, match=r"advantages are over V\(s\).*policy\.n_action_steps=0"):
        runner.advantages(read_outcomes(steps, data, 0.0), values)


def test_the_command_prints_a_summary_and_writes_what_it_found_of_every_step(trained, tmp_path):
    out = tmp_path / "new" / "values.npz"
    words = ["dataset", "values", str(PUSHT), str(trained.bundle), "--success", "all", "--output", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "advantage" in done.output
    assert "% of the variance of the returns" in done.output
    found = np.load(out)
    assert found["value"].shape == found["return"].shape == found["advantage"].shape == (25650,)
    np.testing.assert_allclose(found["advantage"], found["return"] - found["value"], atol=1e-6)
    assert found["return"][found["episode_ends"] - 1].tolist() == [1] * 206
    plain = CliRunner().invoke(app, words[:4])
    assert plain.exit_code == 0, plain.output
    assert "advantage" not in plain.output
