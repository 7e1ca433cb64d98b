import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.params import flatten_params
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.runner import BaselineRunner, PolicyRunner
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.robot import RobotSpec
from rlsvc.store.bundle import Bundle, read_bundle, write_bundle

SPEC = DiffusionSpec.model_validate(
    {"n_obs_steps": 1, "horizon": 4, "n_action_steps": 3, "train_steps": 10, "sample_steps": 2, "target": "v",
     "clip_sample": 10.0, "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8}}
)  # fmt: skip
CONTRACT = Contract(
    {"state": Feature((2,), "float32")}, Feature((1,), "float32", "", (), (-50.0,), (70.0,)), 10.0, 1, 3
)
FEATURES = {**CONTRACT.observation, "action": CONTRACT.action}
DATA = {"state": np.array([[0, 0], [10, 20]], np.float32), "action": np.array([[-50], [70]], np.float32)}


def bundle(folder: Path, groups=("default",), seed: int = 0, contract: Contract = CONTRACT) -> Bundle:
    columns = {group: {key: column * (i + 1) for key, column in DATA.items()} for i, group in enumerate(groups)}
    params = jax.jit(DiffusionPolicy(SPEC, CONTRACT).init)(jax.random.key(seed))
    path = write_bundle(
        folder / f"{'-'.join(groups)}-{seed}-{contract.rate_hz}",
        policy=SPEC.model_dump(mode="json"),
        contract=contract,
        normalizer=Normalizer.fit(columns, FEATURES, {}),
        params=flatten_params(params),
    )
    return read_bundle(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def runner(folder) -> PolicyRunner:
    return PolicyRunner(bundle(folder), batch_sizes=(4, 2))


def batch(count: int):
    state = np.random.default_rng(0).uniform(0, 20, (count, 1, 2)).astype(np.float32)
    return {"state": state}, np.arange(count) + 5, np.arange(count) % 3


def act(runner, observation, seeds, steps) -> np.ndarray:
    return runner.act(observation, seeds, steps).action


def test_actions_come_in_the_contracts_units_and_carry_the_bundles_id(runner, folder):
    runner.warm_up()
    chunk = runner.act(*batch(4))
    assert (chunk.action.shape, chunk.action.dtype) == ((4, 3, 1), np.float32)
    assert chunk.version == bundle(folder).id
    # The data's range is 120 wide, a normalised action's about 2.
    assert np.ptp(chunk.action) > 20


def test_a_row_does_not_depend_on_its_batch(runner):
    observation, seeds, steps = batch(4)
    together = act(runner, observation, seeds, steps)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(
        act(runner, {"state": observation["state"][order]}, seeds[order], steps[order]), together[order]
    )
    for i in range(4):
        row = slice(i, i + 1)
        alone = act(runner, {"state": observation["state"][row]}, seeds[row], steps[row])
        np.testing.assert_allclose(alone, together[row], rtol=1e-5, atol=1e-3)


def test_a_larger_batch_is_split_and_a_smaller_one_padded(runner):
    observation, seeds, steps = batch(7)
    out = act(runner, observation, seeds, steps)
    assert out.shape == (7, 3, 1)
    for rows in (slice(0, 3), slice(4, 7)):
        part = act(runner, {"state": observation["state"][rows]}, seeds[rows], steps[rows])
        np.testing.assert_allclose(part, out[rows], rtol=1e-5, atol=1e-3)
    assert runner._act._cache_size() == 2  # one program for each batch size


def test_the_noise_follows_from_seed_and_step(runner):
    observation, seeds, steps = batch(2)
    first = act(runner, observation, seeds, steps)
    assert np.array_equal(first, act(runner, observation, seeds, steps))
    assert not np.allclose(first, act(runner, observation, seeds + 1, steps))
    assert not np.allclose(first, act(runner, observation, seeds, steps + 1))


def test_a_sibling_acts_as_its_bundle_loaded_anew_beside_the_first_and_compiles_nothing(folder):
    first = PolicyRunner(bundle(folder), batch_sizes=(2,))
    before = act(first, *batch(2))
    second = first.sibling(bundle(folder, seed=1))
    np.testing.assert_array_equal(
        act(second, *batch(2)), act(PolicyRunner(bundle(folder, seed=1), batch_sizes=(2,)), *batch(2))
    )
    np.testing.assert_array_equal(act(first, *batch(2)), before)
    assert (first.version, second.version) == (bundle(folder).id, bundle(folder, seed=1).id)
    assert first._act._cache_size() == 1
    slower = replace(CONTRACT, rate_hz=5.0)
    with pytest.raises(BundleError, match="its contract is not that of"):
        first.sibling(bundle(folder, contract=slower))


def test_new_weights_act_without_compiling_again(folder):
    runner = PolicyRunner(bundle(folder), batch_sizes=(2,))
    before = act(runner, *batch(2))
    runner.set_weights(bundle(folder, seed=1))
    after = runner.act(*batch(2))
    assert after.version == bundle(folder, seed=1).id
    assert not np.allclose(after.action, before)
    assert runner._act._cache_size() == 1


def test_weights_of_another_contract_or_normaliser_are_refused(runner, folder):
    faster = Contract(CONTRACT.observation, CONTRACT.action, 20.0, 1, 3)
    with pytest.raises(BundleError, match="its contract is not that of"):
        runner.set_weights(bundle(folder, contract=faster))
    with pytest.raises(BundleError, match="its normaliser is not that of"):
        runner.set_weights(bundle(folder, groups=("a", "b")))
    with pytest.raises(BundleError, match="its robot is not that of"):
        runner.set_weights(replace(bundle(folder), robot=ROBOT))


ROBOT = RobotSpec.model_validate(
    {
        "name": "arm",
        "delta": {"dims": [0], "of": "state"},
        "maps": {
            "state": [{"dims": [0], "by": [{"name": "affine", "scale": 2}]}],
            "action": [{"dims": [0], "by": [{"name": "affine", "scale": 2, "offset": 1}]}],
        },
    }
)


def test_a_robots_actions_come_in_its_own_numbers_also_where_the_batch_is_padded(runner, folder):
    """The policy sees [2x, y] and answers a: the robot gets (a + 2x - 1) / 2."""
    observation, seeds, steps = batch(3)
    robots = PolicyRunner(replace(bundle(folder), robot=ROBOT), batch_sizes=(4, 2))
    answered = act(runner, {"state": observation["state"] * np.array([2, 1], np.float32)}, seeds, steps)
    expected = (answered + 2 * observation["state"][..., :1] - 1) / 2
    np.testing.assert_allclose(act(robots, observation, seeds, steps), expected, rtol=1e-4, atol=1e-3)


def test_the_group_must_be_named_where_there_are_several(folder):
    several = bundle(folder, groups=("a", "b"))
    with pytest.raises(BundleError, match="normaliser group: got None, expected one of a, b"):
        PolicyRunner(several)
    observation, seeds, steps = batch(1)
    doubled = act(PolicyRunner(several, group="b"), {"state": 2 * observation["state"]}, seeds, steps)
    single = act(PolicyRunner(several, group="a"), observation, seeds, steps)
    np.testing.assert_allclose(doubled, 2 * single, rtol=1e-4, atol=1e-2)


def test_weights_that_do_not_fit_the_policy_are_named(folder):
    made = bundle(folder)
    name = next(iter(made.params))
    with pytest.raises(BundleError, match=f"weight '{name}': got shape"):
        PolicyRunner(Bundle(**{**vars(made), "params": {**made.params, name: np.zeros((1, 2, 3, 4), np.float32)}}))
    with pytest.raises(BundleError, match=f"weight '{name}' is missing"):
        PolicyRunner(Bundle(**{**vars(made), "params": {k: v for k, v in made.params.items() if k != name}}))
    with pytest.raises(BundleError, match=rf"weight '{name}x' is not of this policy \(did you mean '{name}'\?\)"):
        PolicyRunner(Bundle(**{**vars(made), "params": {**made.params, f"{name}x": made.params[name]}}))


def test_the_baselines_need_no_weights_and_load_from_a_bundle(tmp_path):
    path = write_bundle(
        tmp_path / "random",
        policy={"name": "random"},
        contract=CONTRACT,
        normalizer=Normalizer.identity(FEATURES),
        params={},
    )
    random = PolicyRunner.load(path)
    assert isinstance(random, BaselineRunner)
    assert random.version == read_bundle(path).id
    action = act(random, *batch(50))
    assert action.shape == (50, 3, 1)
    assert -50 <= action.min() < -30
    assert 50 < action.max() <= 70
    np.testing.assert_array_equal(act(random, *batch(3)), action[:3])
    assert not act(BaselineRunner("zero", CONTRACT), *batch(2)).any()


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("lerobot", "torch_runner", "torch"), ("rllib", "rllib_runner", "rllib")]
)
def test_a_policy_whose_package_is_missing_names_it_and_what_to_install(folder, monkeypatch, name, module, extra):
    path = write_bundle(
        folder / f"without-{name}",
        policy={"name": name},
        contract=CONTRACT,
        normalizer=Normalizer.fit({"default": DATA}, FEATURES, {}),
        params={},
    )
    monkeypatch.delitem(sys.modules, f"rlsvc.backends.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=rf"policy of {name} needs torch, which is not installed: .*rlsvc\[{extra}\]"):
        PolicyRunner.load(path)
