import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.mixture import load_demonstrations, split_episodes
from rlsvc.spec.data import DataSpec

OBSERVATION = ["observation.state", "observation.environment_state"]


def data(*paths, observation=OBSERVATION, **fields) -> DataSpec:
    datasets = [path if isinstance(path, dict) else {"path": str(path)} for path in paths]
    return DataSpec.model_validate({"datasets": datasets, "observation": observation, **fields})


def load(spec: DataSpec):
    return load_demonstrations(spec, n_obs_steps=2, horizon=8, action_horizon=4)


def test_splits_are_disjoint_complete_and_of_the_stated_shares():
    split = split_episodes(206, data("x", validation_fraction=0.02, heldout_fraction=0.1))
    assert (len(split.validation), len(split.heldout)) == (4, 21)
    assert sorted(split.train + split.validation + split.heldout) == list(range(206))


def test_splits_follow_from_the_seed_alone():
    assert split_episodes(50, data("x")) == split_episodes(50, data("x"))
    assert split_episodes(50, data("x")).validation != split_episodes(50, data("x", split_seed=1)).validation


def test_fewer_training_episodes_leave_validation_as_it_is():
    whole, small = split_episodes(50, data("x")), split_episodes(50, data("x", max_train_episodes=5))
    assert small.validation == whole.validation
    assert len(small.train) == 5
    assert set(small.train) <= set(whole.train)


def test_a_share_above_zero_takes_at_least_one_episode_and_none_at_zero():
    assert len(split_episodes(3, data("x", validation_fraction=0.02)).validation) == 1
    assert split_episodes(3, data("x", validation_fraction=0)).validation == ()


def test_a_split_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(DatasetError, match="1 episodes: 1 for validation and 0 held out leave none to train on"):
        split_episodes(1, data("x"))


def test_the_normaliser_sees_training_episodes_alone(sample):
    path = sample("pusht/pusht_first3.npz")
    arrays = dict(np.load(path))
    split = split_episodes(3, data(path, validation_fraction=0.3))
    start = [0, *arrays["episode_ends"]][split.validation[0]]
    arrays["action"][start] = 1e6
    np.savez(path, **arrays)
    demonstrations = load(data(path, validation_fraction=0.3))
    assert demonstrations.normalizer.stats["action"][0].max.max() <= 512
    assert demonstrations.validation is not None
    assert demonstrations.validation.columns["action"].max() == 1e6
    normal = demonstrations.normalizer.normalize("action", demonstrations.train.columns["action"])
    np.testing.assert_allclose([normal.min(0), normal.max(0)], [[-1, -1], [1, 1]], atol=1e-5)


def test_the_contract_is_the_datasets(sample):
    contract = load(data(sample("pusht/pusht_first3.npz"))).contract
    assert {k: (f.shape, f.dtype, f.unit) for k, f in contract.observation.items()} == {
        "observation.state": ((2,), "float32", "px"),
        "observation.environment_state": ((18,), "float32", "px"),
    }
    assert (contract.action.shape, contract.rate_hz, contract.n_obs_steps, contract.action_horizon) == (
        (2,),
        10.0,
        2,
        4,
    )


def test_a_mixture_weighs_its_datasets_and_normalises_each_group_on_its_own(sample, tmp_path):
    path = sample("pusht/pusht_first3.npz")
    arrays = dict(np.load(path))
    other = tmp_path / "other.npz"
    np.savez(other, **{**arrays, "action": arrays["action"] * 2})
    demonstrations = load(
        data(
            {"path": str(path), "weight": 3, "group": "b"},
            {"path": str(other), "weight": 1, "group": "a", "episodes": [0, 1]},
        )
    )
    assert demonstrations.normalizer.groups == ("a", "b")
    np.testing.assert_allclose(demonstrations.train.weight, [0.75, 0.25])
    groups = demonstrations.train.gather(np.arange(demonstrations.train.num_windows))["group"]
    first = demonstrations.train.offset[1]
    assert set(groups[:first].tolist()) == {1}
    assert set(groups[first:].tolist()) == {0}
    batch = demonstrations.train.gather(np.arange(demonstrations.train.num_windows))
    normal = demonstrations.normalizer.normalize("action", batch["action"], batch["group"])
    for rows in (normal[:first], normal[first:]):
        np.testing.assert_allclose([rows.min(), rows.max()], [-1, 1], atol=1e-5)


def test_datasets_of_other_widths_are_refused_by_feature_and_source(sample, tmp_path):
    path = sample("pusht/pusht_first3.npz")
    arrays = dict(np.load(path))
    other = tmp_path / "other.npz"
    # Three actions are no PushT recording any more, so the state keeps its five numbers.
    arrays["action"] = np.concatenate([arrays["action"], arrays["action"][:, :1]], axis=1)
    np.savez(other, **arrays, fps=10.0)
    message = r"'observation\.state' is float32 \(5,\) in .*other\.npz and float32 \(2,\) in .*first3"
    with pytest.raises(DatasetError, match=message):
        load(data(path, other, observation=["observation.state"]))


def test_a_mode_under_the_datasets_own_action_name_is_refused(sample):
    spec = data(
        sample("pusht/pusht_first3.npz"),
        action="block_pose",
        normalization={"block_pose": "mean_std"},
        validation_fraction=0,
    )
    with pytest.raises(DatasetError, match="the action's mode goes under 'action'"):
        load(spec)


def test_an_action_of_another_name_is_normalised_as_the_action(sample):
    demonstrations = load(
        data(sample("pusht/pusht_first3.npz"), action="block_pose", normalization={"action": "mean_std"})
    )
    assert demonstrations.normalizer.modes["action"] == "mean_std"
    assert demonstrations.normalizer.stats["action"][0].mean.shape == (3,)
    demonstrations.normalizer.check_contract(demonstrations.contract)
