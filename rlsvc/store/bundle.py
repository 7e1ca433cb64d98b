"""PolicyBundle: a trained policy as a folder that can be checked, moved and served.

    bundle.json         schema version, id, policy, precision, contract, normaliser, robot, run, versions, and of each
                        file the sha256
    params.safetensors  weights by name
    ...                 what else the policy needs, named in the manifest (tokenizer.model)

No pickle anywhere. A bundle is written under a temporary name, synced to disk and renamed, so that a partial one never
has the final name; reading verifies every byte against the manifest before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlsvc.core.contract import Contract
from rlsvc.core.errors import BundleError
from rlsvc.data.commit import sync
from rlsvc.data.normalize import Normalizer
from rlsvc.data.transforms import RobotTransforms
from rlsvc.spec.robot import RobotSpec

SCHEMA_VERSION = 2
READS = (1, 2)
"""Schema versions: 1 had no robot."""
META, PARAMS = "bundle.json", "params.safetensors"
PACKAGES = ("rlsvc", "jax", "flax", "numpy")
MAX_META_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory.

    Attributes:
        id: sha256 over everything that decides how the policy acts; the version that actions carry.
        policy: the policy's specification, with `name`.
        precision: compute dtype, "fp32" or "bf16".
        contract, normalizer: as trained.
        params: weights by name.
        run: which run and step made it, and its metrics.
        path: the folder.
        robot: whose numbers the policy learnt, and how its runtime calls them; None where it learnt them as they are.
    """

    id: str
    policy: dict[str, Any]
    precision: str
    contract: Contract
    normalizer: Normalizer
    params: dict[str, np.ndarray]
    run: dict[str, Any]
    path: Path
    robot: RobotSpec | None = None


def write_bundle(
    path: str | Path,
    *,
    policy: Mapping[str, Any],
    contract: Contract,
    normalizer: Normalizer,
    params: Mapping[str, np.ndarray],
    precision: str = "fp32",
    run: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    robot: RobotSpec | None = None,
) -> Path:
    """Write a bundle; a folder already there under this name is replaced only once the new one is whole.

    `files`: what else the policy needs (a tokenizer), by plain file name.

    Raises:
        BundleError: the normaliser does not cover the contract, or a weight is not finite.
        ContractError: the robot does not fit the contract.
        OSError: the disk is full or not writable; nothing is left under the final name.
    """
    normalizer.check_contract(contract)
    RobotTransforms(robot).check(contract)
    for name, value in params.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise BundleError(f"weight '{name}' is not finite; the bundle is not written")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        data = save({name: np.ascontiguousarray(value) for name, value in params.items()})
        contents = {PARAMS: data, **(files or {})}
        for name, content in contents.items():
            _write_synced(partial / name, content)
        meta: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "policy": dict(policy),
            "precision": precision,
            "contract": contract.to_json(),
            "normalizer": normalizer.to_json(),
            "robot": None if robot is None else robot.model_dump(mode="json"),
            "manifest": {
                name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
                for name, content in contents.items()
            },
        }
        meta |= {"id": _id(meta), "run": dict(run or {}), "versions": _versions()}
        _write_synced(partial / META, json.dumps(meta, indent=1, allow_nan=False).encode())
        sync(partial)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(old)
            try:
                partial.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            partial.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


def read_bundle(path: str | Path) -> Bundle:
    """Read and verify a bundle.

    Raises:
        BundleError: not a bundle, another schema version, a file that is missing, changed or not named in the manifest,
            or statistics that do not fit the contract. The message names the file or key.
    """
    path = Path(path)
    meta = _read_meta(path)
    try:
        manifest = dict(meta["manifest"])
        contract, normalizer = Contract.from_json(meta["contract"]), Normalizer.from_json(meta["normalizer"])
        policy, stated_id = dict(meta["policy"]), str(meta["id"])
        robot = None if meta.get("robot") is None else _robot(meta["robot"], path)
        precision, run = str(meta["precision"]), dict(meta["run"])
    except BundleError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path / META}: field {error} is missing or malformed") from error
    if PARAMS not in manifest:
        raise BundleError(f"{path / META}: the manifest does not name {PARAMS}")
    contents = {name: _read_verified(path, name, entry) for name, entry in manifest.items()}
    if _id(meta) != stated_id:
        raise BundleError(
            f"{path / META}: its contents do not give its id {stated_id[:12]}; it was changed after it was written"
        )
    try:
        params = load(contents[PARAMS])
    except (SafetensorError, ValueError, KeyError) as error:
        raise BundleError(f"{path / PARAMS}: not a safetensors file ({error})") from error
    normalizer.check_contract(contract)
    RobotTransforms(robot).check(contract)
    return Bundle(stated_id, policy, precision, contract, normalizer, params, run, path, robot)


def read_contract(path: str | Path) -> Contract:
    """The contract of a bundle, without its weights.

    Raises:
        BundleError: not a bundle, or another schema version.
    """
    return Contract.from_json(_read_meta(Path(path))["contract"])


def read_robot(path: str | Path) -> RobotSpec | None:
    """The robot of a bundle, without its weights.

    Raises:
        BundleError: not a bundle, or another schema version.
    """
    robot = _read_meta(Path(path)).get("robot")
    return None if robot is None else _robot(robot, Path(path))


def _robot(value: Any, path: Path) -> RobotSpec:
    try:
        return RobotSpec.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in ("robot", *fault["loc"]))
        raise BundleError(f"{path / META}: '{where}': {fault['msg']}") from error


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    if not path.is_dir():
        raise BundleError(f"{path}: no such folder; expected a policy bundle (a folder with {META} and {PARAMS})")
    if not file.is_file():
        raise BundleError(f"{path}: not a policy bundle; it has no {META}")
    if file.stat().st_size > MAX_META_BYTES:
        raise BundleError(f"{file}: {file.stat().st_size} bytes, at most {MAX_META_BYTES} are read")
    try:
        meta = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON ({error})") from error
    found = meta.get("schema_version") if isinstance(meta, dict) else None
    if found not in READS:
        raise BundleError(f"{file}: schema_version is {found!r}, this rlsvc reads {' and '.join(map(str, READS))}")
    return meta


def _read_verified(path: Path, name: str, entry: Any) -> bytes:
    if Path(name).name != name or name in ("", ".", ".."):
        raise BundleError(f"{path / META}: the manifest names '{name}', which is not a plain file name")
    file = path / name
    try:
        is_file = stat.S_ISREG(file.lstat().st_mode)
    except OSError as error:
        raise BundleError(f"{file}: named in the manifest, but not there") from error
    if not is_file:
        raise BundleError(f"{file}: not a plain file")
    data = file.read_bytes()
    if not isinstance(entry, dict) or hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise BundleError(
            f"{file}: its sha256 is not the manifest's; the file was changed or damaged. Copy the bundle again."
        )
    return data


def _id(meta: Mapping[str, Any]) -> str:
    names = ("policy", "precision", "contract", "normalizer", "manifest", "robot")
    decides = {key: meta[key] for key in names if key != "robot" or meta.get(key) is not None}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
