import json
import os
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError
from rlsvc.data.normalize import Normalizer
from rlsvc.spec.robot import RobotSpec
from rlsvc.store import bundle as module
from rlsvc.store.bundle import read_bundle, read_robot, write_bundle

CONTRACT = Contract({"observation.state": Feature((2,), "float32", "px")}, Feature((1,), "float32"), 10.0, 2, 8)
COLUMNS = {
    "observation.state": np.array([[0.1, 1], [3, 4 / 3]], np.float32),
    "action": np.array([[0], [1 / 3]], np.float32),
}
PARAMS = {"net.kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "net.bias": np.zeros(3, np.float32)}
POLICY = {"name": "diffusion", "horizon": 16}


def normalizer() -> Normalizer:
    return Normalizer.fit({"default": COLUMNS}, {**CONTRACT.observation, "action": CONTRACT.action}, {})


def write(path: Path, **changes) -> Path:
    fields = {"policy": POLICY, "contract": CONTRACT, "normalizer": normalizer(), "params": PARAMS, "run": {"step": 3}}
    return write_bundle(path, **{**fields, **changes})


def edit(path: Path, change) -> None:
    meta = json.loads((path / "bundle.json").read_text())
    change(meta)
    (path / "bundle.json").write_text(json.dumps(meta))


def refused(path: Path, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_bundle(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "bundle")


def test_what_was_written_is_read_bit_for_bit(path):
    bundle = read_bundle(path)
    assert bundle.params.keys() == PARAMS.keys()
    assert all(np.array_equal(bundle.params[k], v) and bundle.params[k].dtype == v.dtype for k, v in PARAMS.items())
    assert (bundle.contract, bundle.policy, bundle.precision, bundle.run) == (CONTRACT, POLICY, "fp32", {"step": 3})
    assert bundle.normalizer.to_json() == normalizer().to_json()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["bundle"]


def test_the_id_follows_from_what_decides_how_the_policy_acts_and_from_nothing_else(path, tmp_path):
    first = read_bundle(path).id
    assert read_bundle(write(tmp_path / "b", run={"step": 4})).id == first
    other = {**PARAMS, "net.bias": np.ones(3, np.float32)}
    assert read_bundle(write(tmp_path / "c", params=other)).id != first
    assert read_bundle(write(tmp_path / "d", policy={**POLICY, "horizon": 8})).id != first


ROBOT = RobotSpec.model_validate(
    {"name": "arm", "keys": {"observation.state": "state"}, "delta": {"dims": [0]}, "metadata": {"pose": [0.1, 2]}}
)


def test_a_robot_travels_in_the_bundle_and_decides_about_its_id(path, tmp_path):
    made = write(tmp_path / "b", robot=ROBOT)
    assert read_bundle(made).robot == read_robot(made) == ROBOT
    assert read_bundle(path).robot is read_robot(path) is None
    others = [read_bundle(write(tmp_path / "c", robot=robot)).id for robot in (None, ROBOT.replace(delta=None))]
    assert len({read_bundle(made).id, *others}) == 3
    edit(made, lambda meta: meta.update(robot=None))
    refused(made, "its contents do not give its id")


def test_a_bundle_from_before_there_were_robots_is_read_and_keeps_its_id(path):
    before = read_bundle(path).id
    edit(path, lambda meta: (meta.update(schema_version=1), meta.pop("robot")))
    assert (read_bundle(path).id, read_bundle(path).robot) == (before, None)


def test_a_robot_that_does_not_fit_is_refused_when_written_and_when_read(tmp_path):
    with pytest.raises(ContractError, match="robot 'arm': delta: 'action' has no dimension 1, it has 0 to 0"):
        write(tmp_path / "b", robot=ROBOT.replace(delta={"dims": [1]}))
    made = write(tmp_path / "c", robot=ROBOT)

    def change(meta):
        meta["robot"]["delta"]["dims"] = ["first"]
        meta["id"] = module._id(meta)

    edit(made, change)
    refused(made, r"bundle\.json: 'robot\.delta\.dims\.0': Input should be a valid integer")


def test_a_changed_weight_file_is_refused(path):
    data = bytearray((path / "params.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "params.safetensors").write_bytes(data)
    refused(path, r"params\.safetensors: its sha256 is not the manifest's")


def test_a_truncated_weight_file_is_refused(path):
    file = path / "params.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(path, r"params\.safetensors: 167 bytes, the manifest says 172")


def test_a_file_that_is_no_safetensors_is_refused_even_with_the_right_sum(path):
    data = b"\xff" * 40
    (path / "params.safetensors").write_bytes(data)

    def change(meta):
        meta["manifest"]["params.safetensors"] = {"sha256": module.hashlib.sha256(data).hexdigest(), "bytes": 40}
        meta["id"] = module._id(meta)

    edit(path, change)
    refused(path, r"params\.safetensors: not a safetensors file")


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta["policy"].update(horizon=8),
        lambda meta: meta["contract"].update(rate_hz=20.0),
        lambda meta: meta["contract"]["action"].update(unit="rad"),
        lambda meta: meta.update(precision="bf16"),
        lambda meta: meta["normalizer"]["stats"]["action"][0]["max"].__setitem__(0, 2.0),
    ],
)
def test_an_edited_bundle_json_is_refused(path, change):
    edit(path, change)
    refused(path, r"bundle\.json: its contents do not give its id .* changed after it was written")


@pytest.mark.parametrize("file", ["params.safetensors", "bundle.json"])
def test_a_missing_file_is_named(path, file):
    (path / file).unlink()
    refused(path, file.replace(".", r"\."))


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_another_schema_version_is_refused(path, version):
    edit(path, lambda meta: meta.update(schema_version=version))
    refused(path, rf"bundle\.json: schema_version is {version!r}, this rlsvc reads 1 and 2")


@pytest.mark.parametrize("field", ["manifest", "contract", "normalizer", "policy", "id", "precision", "run"])
def test_a_missing_field_is_named(path, field):
    edit(path, lambda meta: meta.pop(field))
    refused(path, rf"bundle\.json: field '{field}' is missing or malformed")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"a"', "\x00"])
def test_a_bundle_json_that_is_none_is_refused(path, text):
    (path / "bundle.json").write_text(text)
    refused(path, r"bundle\.json: ")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ""])
def test_the_manifest_names_plain_files_only(path, name):
    edit(path, lambda meta: meta["manifest"].update({name: {"sha256": "0"}}))
    refused(path, "is not a plain file name")


def test_a_manifest_without_the_weights_is_refused(path):
    edit(path, lambda meta: meta["manifest"].clear())
    refused(path, r"the manifest does not name params\.safetensors")


def test_a_symlink_is_not_followed(path, tmp_path):
    file = path / "params.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(path, r"params\.safetensors: not a plain file")


def test_a_folder_that_is_no_bundle_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such folder; expected a policy bundle")
    refused(tmp_path, r"not a policy bundle; it has no bundle\.json")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value):
    with pytest.raises(BundleError, match=r"weight 'net\.bias' is not finite; the bundle is not written"):
        write(tmp_path / "bundle", params={**PARAMS, "net.bias": np.full(3, value, np.float32)})
    assert not (tmp_path / "bundle").exists()


def test_statistics_that_do_not_cover_the_contract_are_not_written(tmp_path):
    wider = Contract({"observation.state": Feature((3,), "float32")}, CONTRACT.action, 10.0)
    with pytest.raises(BundleError, match=r"'mean' of 'observation\.state'"):
        write(tmp_path / "bundle", contract=wider)


def test_statistics_that_do_not_cover_the_contract_are_not_read(path):
    """wall-x#113, lerobot#4446: not even when everything else was made to agree."""

    def change(meta):
        meta["contract"]["observation"]["observation.velocity"] = Feature((2,), "float32").to_json()
        meta["id"] = module._id(meta)

    edit(path, change)
    refused(path, r"no statistics for 'observation\.velocity'")


def test_a_rewritten_bundle_replaces_the_old_one_whole(path):
    write(path, policy={**POLICY, "horizon": 8})
    assert read_bundle(path).policy["horizon"] == 8
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["bundle"]


@pytest.mark.parametrize("step", ["params.safetensors", "bundle.json", "rename"])
def test_a_write_that_fails_leaves_the_old_bundle_whole_and_no_rest(path, monkeypatch, step):
    before = read_bundle(path).id
    if step == "rename":
        rename = Path.rename

        def fail(self, target):
            if str(self).endswith(".tmp"):
                raise OSError(28, "No space left on device")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
    else:
        written = module._write_synced

        def fail(file, data):
            if file.name == step:
                file.write_bytes(data[: len(data) // 2])
                raise OSError(28, "No space left on device")
            written(file, data)

        monkeypatch.setattr(module, "_write_synced", fail)
    with pytest.raises(OSError, match="No space left"):
        write(path, policy={**POLICY, "horizon": 8})
    monkeypatch.undo()
    assert read_bundle(path).id == before
    assert os.listdir(path.parent) == ["bundle"]
