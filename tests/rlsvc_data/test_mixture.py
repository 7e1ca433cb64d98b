import json

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.mixture import Selection, load_demonstrations, split_episodes
from rlsvc.spec.data import DataSpec
from rlsvc.spec.value_function import ReturnsSpec

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


def with_rewards(source, path, **arrays):
    """The recording of three episodes with more columns; without its keypoints it is not known for PushT's."""
    recorded = {name: array for name, array in np.load(source).items() if name != "keypoint"}
    np.savez(path, **recorded, **arrays, fps=10.0)
    return path


def load_returns(spec: DataSpec, **fields):
    returns = ReturnsSpec.model_validate(fields)
    return load_demonstrations(spec, n_obs_steps=1, horizon=1, action_horizon=0, returns=returns)


def test_returns_are_in_every_batch_and_the_normaliser_scales_those_of_training_steps(sample):
    source = sample("pusht/pusht_first3.npz")
    dataset = {"path": str(source), "success": True}
    demonstrations = load_returns(data(dataset, validation_fraction=0.3), discount=0.5, success_bonus=8)
    train, validation = demonstrations.train, demonstrations.validation
    assert validation is not None
    for part in (train, validation):
        returns = part.gather(np.arange(part.num_windows))["return"]
        last = part.end[0] - part.start[0]
        assert returns[last - 3 : last].tolist() == [2, 4, 8]
    normal = demonstrations.normalizer.normalize("return", train.gather(np.arange(train.num_windows))["return"])
    np.testing.assert_allclose([normal.min(), normal.max()], [-1, 1], atol=1e-5)
    demonstrations.normalizer.check_contract(demonstrations.contract)


def test_cut_episodes_are_neither_learned_from_nor_validated_on_nor_in_the_statistics(sample, tmp_path):
    source = sample("pusht/pusht_first3.npz")
    ends = np.load(source)["episode_ends"]
    done, reward = np.zeros(ends[-1], bool), np.ones(ends[-1], np.float32)
    done[ends[1] - 1] = True
    reward[: ends[0]] = 1e6
    path = with_rewards(source, tmp_path / "cut.npz", done=done, reward=reward)
    plain = {"observation": ["observation.state"], "reward": "next.reward", "terminated": "next.done"}
    demonstrations = load_returns(data(path, validation_fraction=0, **plain), discount=0)
    assert demonstrations.train.num_windows == ends[-1]  # without a discount nothing is missing
    demonstrations = load_returns(data(path, validation_fraction=0, **plain), discount=1)
    assert demonstrations.train.num_windows == ends[1] - ends[0]
    assert demonstrations.normalizer.stats["return"][0].max == ends[1] - ends[0]
    message = (
        r"cut\.npz: none of its \d+ steps is left \(policy\.returns\.truncated=drop leaves out episodes that were cut"
    )
    with pytest.raises(DatasetError, match=message):
        load_returns(data(path, observation=["observation.state"], reward="next.reward"))


def test_each_group_has_the_scale_of_its_own_returns(sample):
    path = str(sample("pusht/pusht_first3.npz"))
    datasets = [
        {"path": path, "group": "b", "success": True, "episodes": [0]},
        {"path": path, "group": "a", "success": False, "episodes": [1, 2]},
    ]
    demonstrations = load_returns(data(*datasets, validation_fraction=0), discount=1, success_bonus=6)
    found = [(float(stats.min), float(stats.max)) for stats in demonstrations.normalizer.stats["return"]]
    assert (demonstrations.normalizer.groups, found) == (("a", "b"), [(0, 0), (6, 6)])


def test_a_feature_may_not_have_the_name_of_the_target(sample, tmp_path):
    source = sample("pusht/pusht_first3.npz")
    steps = int(np.load(source)["episode_ends"][-1])
    path = with_rewards(source, tmp_path / "named.npz", **{"return": np.ones(steps, np.float32)})
    with pytest.raises(DatasetError, match="'return' is the target of a value function; leave it out"):
        load_returns(data({"path": str(path), "success": True}, observation=["return"]), success_bonus=1)


def test_a_selection_chooses_among_training_steps_and_is_given_the_columns_that_it_looks_at(sample):
    source, seen = sample("pusht/pusht_first3.npz"), []

    def choose(tables):
        seen.extend(tables)
        return [table.columns["block_pose"][:, 0] > 200 for table in tables]

    spec, shape = data(source, validation_fraction=0.3), {"n_obs_steps": 2, "horizon": 8, "action_horizon": 4}
    chosen = load_demonstrations(spec, **shape, selection=Selection(("block_pose",), choose, "a test"))
    whole = load_demonstrations(spec, **shape)
    (table,) = seen
    keep = table.columns["block_pose"][:, 0] > 200
    assert 0 < keep.sum() < len(keep) == whole.train.num_windows
    np.testing.assert_array_equal(chosen.train.anchor, np.flatnonzero(keep))
    assert "block_pose" not in chosen.train.columns
    assert chosen.normalizer.to_json() == whole.normalizer.to_json()
    assert chosen.validation is not None
    assert chosen.validation.num_windows == whole.validation.num_windows


def test_a_selection_that_leaves_nothing_is_refused_with_its_reason(sample):
    nothing = Selection((), lambda tables: [np.zeros(table.num_steps, bool) for table in tables], "a test")
    spec = data(sample("pusht/pusht_first3.npz"))
    with pytest.raises(DatasetError, match=r"first3\.npz: none of its \d+ steps is left \(a test\)"):
        load_demonstrations(spec, n_obs_steps=2, horizon=8, action_horizon=4, selection=nothing)


def openpi_file(tmp_path, width: int = 2):
    """Statistics of a state of this width and of PushT's action."""
    state = {"mean": [250.0] * width, "std": [50.0] * width, "q01": [100.0] * width, "q99": [400.0] * width}
    action = {"mean": [256.0] * 2, "std": [64.0] * 2, "q01": [0.0] * 2, "q99": [512.0] * 2}
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": state, "actions": action}}))
    return str(tmp_path / "norm_stats.json")


def test_openpis_statistics_take_the_place_of_the_datas(sample, tmp_path):
    def normal(mode: str):
        spec = data(
            sample("pusht/pusht_first3.npz"), observation=["observation.state"], norm_stats=openpi_file(tmp_path),
            normalization={"observation.state": mode, "action": mode},
        )  # fmt: skip
        found = load(spec).normalizer
        return found.normalize("observation.state", np.full((1, 2), 300.0)), found.normalize("action", np.zeros((1, 2)))

    np.testing.assert_allclose(normal("mean_std"), [[[1, 1]], [[-4, -4]]], rtol=1e-6)
    np.testing.assert_allclose(normal("openpi_quantile"), [[[1 / 3, 1 / 3]], [[-1, -1]]], rtol=1e-6)


def test_statistics_of_another_robot_or_for_another_mode_are_refused_by_key(sample, tmp_path):
    path = sample("pusht/pusht_first3.npz")
    spec = data(path, observation=["observation.state"], norm_stats=openpi_file(tmp_path, 3))
    with pytest.raises(DatasetError, match=r"'state' for 'observation.state': got 3 dimensions, the contract has 2"):
        load(spec)
    with pytest.raises(DatasetError, match=r"data.norm_stats, data.normalization: .*'min_max' needs min and max"):
        load(spec.replace(norm_stats=openpi_file(tmp_path)))
