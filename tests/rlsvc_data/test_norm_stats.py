"""openpi's statistics, on six real files (tests/data/openpi_norm_stats)."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, DatasetError
from rlsvc.data.norm_stats import NormStats, read_norm_stats, to_normalizer, write_norm_stats
from rlsvc.data.normalize import Normalizer, Stats

FOLDER = Path(__file__).parents[1] / "data" / "openpi_norm_stats"
# By file: state and action dimensions of its robot, and what else stands in it.
FILES = {
    "jkim447_pi05_humanoid": (24, 24, ()),  # state padded to 32
    "kongyue_lightacot": (8, 7, ("coarse_actions",)),
    "otoshuki_acot_vla": (21, 21, ("coarse_actions",)),  # both padded to 32, with constants at 14 to 19
    "robomme": (8, 8, ()),
    "zwbx_pi05_bridge": (8, 7, ()),  # state 6 is constant
    "zwbx_pi05_libero": (8, 7, ()),
}


def contract(state: int, action: int, **more: Feature) -> Contract:
    return Contract({"observation.state": Feature((state,), "float32"), **more}, Feature((action,), "float32"), 10.0)


def load(name: str, mode: str) -> Normalizer:
    state, action, ignore = FILES[name]
    stats = read_norm_stats(FOLDER / f"{name}.json")
    return to_normalizer(stats, contract(state, action), mode, ignore=ignore)


def published(name: str, key: str, width: int) -> dict[str, np.ndarray]:
    entry = json.loads((FOLDER / f"{name}.json").read_text())["norm_stats"][key]
    return {field: np.array(values)[:width] for field, values in entry.items()}


def around(stats: dict[str, np.ndarray]) -> np.ndarray:
    """[200, W] values that the robot may have had; a dimension that does not move stays at its constant."""
    x = stats["mean"] + stats["std"] * np.random.default_rng(0).normal(size=(200, len(stats["mean"])))
    return x.astype(np.float32)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[object], dict[str, NormStats]]:
    """Statistics as `read_norm_stats` gives them, from the contents of a file."""

    def made(stats: object) -> dict[str, NormStats]:
        (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
        return read_norm_stats(tmp_path)

    return made


@pytest.mark.parametrize("name", FILES)
def test_z_scores_are_openpis_to_1e_3_and_the_way_back_to_1e_5(name):
    normalizer = load(name, "mean_std")
    for key, theirs, width in zip(("observation.state", "action"), ("state", "actions"), FILES[name], strict=False):
        s = published(name, theirs, width)
        x = around(s)
        z = (x - s["mean"]) / (s["std"] + 1e-6)
        # Off by 1e-6 / std of the value: 4e-4 for the smallest std in these files, 0.0098.
        np.testing.assert_allclose(normalizer.normalize(key, x), z, atol=1e-3)
        np.testing.assert_allclose(normalizer.unnormalize(key, z), z * (s["std"] + 1e-6) + s["mean"], atol=1e-5)


@pytest.mark.parametrize("name", FILES)
def test_openpi_quantiles_are_openpis_to_1e_5(name):
    normalizer = load(name, "openpi_quantile")
    for key, theirs, width in zip(("observation.state", "action"), ("state", "actions"), FILES[name], strict=False):
        s = published(name, theirs, width)
        x = around(s)
        span = s["q99"] - s["q01"] + 1e-6
        y = (x - s["q01"]) / span * 2 - 1
        np.testing.assert_allclose(normalizer.normalize(key, x), y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(normalizer.unnormalize(key, y), (y + 1) / 2 * span + s["q01"], rtol=1e-5, atol=2e-6)


def test_a_dimension_that_does_not_move_is_what_openpi_makes_it_and_does_not_blow_up():
    x = np.zeros(8, np.float32)
    for mode, constant in (("openpi_quantile", -1.0), ("mean_std", 0.0), ("quantile", 0.0)):
        normalizer = load("zwbx_pi05_bridge", mode)
        assert normalizer.normalize("observation.state", x)[6] == constant
        assert normalizer.normalize("observation.state", x + np.float32(0.5))[6] == constant + 0.5
        assert normalizer.unnormalize("observation.state", np.full(8, constant, np.float32))[6] == 0


def test_padding_is_cut_to_the_contracts_width_and_kept_where_the_contract_has_it():
    stats = read_norm_stats(FOLDER / "jkim447_pi05_humanoid.json")
    cut = to_normalizer(stats, contract(24, 24), "mean_std")
    whole = to_normalizer(stats, contract(32, 24), "mean_std")
    assert cut.stats["observation.state"][0].mean.tolist() == stats["state"].mean[:24].tolist()
    assert whole.normalize("observation.state", np.ones(32, np.float32))[24:].tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("name", "state", "action", "message"),
    [
        (
            "robomme",
            9,
            8,
            r"'state' for 'observation\.state': got 8 dimensions, the contract has 9; they are of another",
        ),
        ("robomme", 8, 14, r"'actions' for 'action': got 8 dimensions, the contract has 14"),
        (
            "robomme",
            8,
            7,
            r"'actions' for 'action': got 8 dimensions, the contract has 7, and dimension 7 is no padding",
        ),
        (
            "otoshuki_acot_vla",
            14,
            16,
            r"'state' .* got 32 dimensions, the contract has 14, and dimension 20 is no padding",
        ),
        ("zwbx_pi05_bridge", 6, 7, r"'state' .* the contract has 6, and dimension 7 is no padding"),
    ],
)
def test_statistics_of_another_width_are_refused_by_key_and_dimension(name, state, action, message):
    stats = read_norm_stats(FOLDER / f"{name}.json")
    with pytest.raises(DatasetError, match=message):
        to_normalizer(stats, contract(state, action), "mean_std", ignore=FILES[name][2])


def test_padding_whose_mean_or_quantile_is_not_zero_is_not_cut(read):
    entry = {"mean": [1.0, 0.0], "std": [1.0, 0.0], "q01": [0.0, 0.0], "q99": [2.0, 0.0]}
    for field, value in (("mean", 0.5), ("std", 0.1), ("q01", -1.0), ("q99", 1.0)):
        changed = read({"state": entry | {field: [entry[field][0], value]}, "actions": entry})
        with pytest.raises(DatasetError, match=r"dimension 1 is no padding"):
            to_normalizer(changed, contract(1, 2), "mean_std")
    to_normalizer(read({"state": entry, "actions": entry}), contract(1, 2), "mean_std")


def test_statistics_that_belong_to_no_feature_are_refused_unless_they_are_ignored_by_name():
    stats = read_norm_stats(FOLDER / "kongyue_lightacot.json")
    with pytest.raises(DatasetError, match=r"statistics 'coarse_actions' \(7 wide\) belong to no feature"):
        to_normalizer(stats, contract(8, 7), "mean_std")
    coarse = to_normalizer(
        stats, contract(8, 7), "mean_std", {"observation.state": "state", "action": "coarse_actions"}, ["actions"]
    )
    assert coarse.stats["action"][0].mean[0] == -0.043546564877033234


def test_a_feature_without_statistics_is_refused_by_name():
    stats = read_norm_stats(FOLDER / "robomme.json")
    more = contract(8, 8, **{"observation.velocity": Feature((8,), "float32")})
    with pytest.raises(
        DatasetError, match=r"no statistics are named for 'observation\.velocity'; there are: state, act"
    ):
        to_normalizer(stats, more, "mean_std")
    with pytest.raises(DatasetError, match=r"have no 'action' for 'action' \(did you mean 'actions'\?\)"):
        to_normalizer(stats, contract(8, 8), "mean_std", {"observation.state": "state", "action": "action"})
    with pytest.raises(DatasetError, match=r"for 'state': the contract has no such vector; it has: observation\.state"):
        to_normalizer(stats, contract(8, 8), "mean_std", {"state": "state", "action": "actions"})
    square = Contract(contract(8, 8).observation, Feature((2, 4), "float32"), 10.0)
    with pytest.raises(DatasetError, match=r"'action' has shape \(2, 4\); openpi's statistics are of vectors"):
        to_normalizer(stats, square, "mean_std")


def test_images_take_their_own_mode_and_texts_none():
    more = contract(8, 7, task=Feature((), "str"), **{"observation.image": Feature((4, 4, 3), "uint8")})
    normalizer = to_normalizer(read_norm_stats(FOLDER / "zwbx_pi05_libero.json"), more, "openpi_quantile")
    assert normalizer.modes == {
        "observation.state": "openpi_quantile", "action": "openpi_quantile", "observation.image": "image",
    }  # fmt: skip
    normalizer.check_contract(more)


def test_a_mode_whose_statistics_openpi_has_not_is_refused_by_name(read):
    with pytest.raises(
        BundleError, match=r"'observation\.state': mode 'min_max' needs min and max, the statistics have"
    ):
        load("robomme", "min_max")
    alone = {"mean": [0.0], "std": [1.0], "q01": None}
    stats = read({"state": alone, "actions": alone})
    assert to_normalizer(stats, contract(1, 1), "mean_std").normalize("action", np.ones(1, np.float32)) == 1
    with pytest.raises(BundleError, match=r"mode 'openpi_quantile' needs q01 and q99, the statistics have mean, std;"):
        to_normalizer(stats, contract(1, 1), "openpi_quantile")


@pytest.mark.parametrize("name", FILES)
def test_what_was_read_goes_through_a_bundles_json_and_is_written_back_bit_for_bit(name, tmp_path):
    normalizer = load(name, "openpi_quantile")
    again = Normalizer.from_json(json.loads(json.dumps(normalizer.to_json(), allow_nan=False)))
    file = write_norm_stats(tmp_path, again)
    assert file == tmp_path / "norm_stats.json"
    written = json.loads(file.read_text())["norm_stats"]
    for key, width in zip(("state", "actions"), FILES[name], strict=False):
        assert written[key] == {field: x.tolist() for field, x in published(name, key, width).items()}


def test_one_group_of_several_is_written_under_names_of_ones_own(tmp_path):
    zero, one = np.zeros(2), np.ones(2)
    stats = (Stats(zero, one, zero, one, zero, one, 5), Stats(one, one, None, None, None, None, 0))
    normalizer = Normalizer(("a", "b"), {"action": "mean_std"}, {"action": stats})
    file = write_norm_stats(tmp_path / "b.json", normalizer, {"action": "actions"}, group="b")
    assert json.loads(file.read_text())["norm_stats"] == {
        "actions": {"mean": [1, 1], "std": [1, 1], "q01": None, "q99": None}
    }
    with pytest.raises(BundleError, match=r"group: got None, expected one of a, b"):
        write_norm_stats(tmp_path, normalizer, {"action": "actions"})
    with pytest.raises(DatasetError, match=r"no statistics for 'observation\.state'; it has: action"):
        write_norm_stats(tmp_path, normalizer, group="a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"not JSON"),
        (b"{", r"not JSON"),
        (b"[]", r"not openpi's statistics; expected"),
        (b'{"norm_stats": {}}', r"not openpi's statistics"),
        (b'{"norm_stats": {"state": [1]}}', r"'state': got list, expected mean, std"),
        (b'{"norm_stats": {"state": {"mean": [1]}}}', r"'state' has no list of numbers 'std'"),
        (b'{"norm_stats": {"state": {"mean": ["a"], "std": [1]}}}', r"'state' has no list of numbers 'mean'"),
        (b'{"norm_stats": {"state": {"mean": 1, "std": 1}}}', r"'state' 'mean': got shape \(\), expected one number"),
        (b'{"norm_stats": {"state": {"mean": [1, NaN], "std": [1, 1]}}}', r"'mean': dimension 1 is not finite"),
        (b'{"norm_stats": {"state": {"mean": [1, 2], "std": [1]}}}', r"lists of unequal width: mean 2, std 1"),
        (b'{"norm_stats": {"state": {"mean": [1], "std": [-1]}}}', r"'std': dimension 0 is negative"),
        (b'{"norm_stats": {"state": {"mean": [1], "std": [1], "q01": [0]}}}', r"one of q01 and q99"),
        (
            b'{"norm_stats": {"s": {"mean": [1], "std": [1], "q01": [2], "q99": [1]}}}',
            r"q01 is above q99 in dimension 0",
        ),
    ],
)
def test_a_file_that_is_damaged_is_refused_by_file_and_key(content, message, tmp_path):
    (tmp_path / "norm_stats.json").write_bytes(content)
    with pytest.raises(DatasetError, match=rf"norm_stats\.json: .*{message}"):
        read_norm_stats(tmp_path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(
        DatasetError, match=r"norm_stats\.json: not readable \(No such file or directory\); expected op"
    ):
        read_norm_stats(tmp_path)
