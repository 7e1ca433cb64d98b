"""PolicyBundle: a trained policy as a folder that can be checked, moved and served.

    bundle.json         schema version, id, policy, precision, contract, normaliser, robot, run, versions, and of each
                        file the sha256
    params.safetensors  weights by name; model.safetensors where LeRobot reads the folder too
    ...                 what else the policy needs, named in the manifest (tokenizer.model)

No pickle anywhere. A bundle is written under a temporary name, synced to disk and renamed, so that a partial one never
has the final name; reading verifies every byte against the manifest before it is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import BundleError
from rlsvc.data.commit import sync
from rlsvc.data.normalize import Normalizer
from rlsvc.data.transforms import RobotTransforms
from rlsvc.spec.robot import RobotSpec

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
PRECISIONS = ("fp32", "bf16")
SCHEMA_VERSION = 2
READS = (1, 2)
"""Schema versions: 1 had no robot."""
META, PARAMS = "bundle.json", "params.safetensors"
LEROBOT_WEIGHTS = "model.safetensors"
WEIGHTS = (PARAMS, LEROBOT_WEIGHTS)
"""What the file of weights may be called; a bundle has one of them."""
PACKAGES = ("rlsvc", "jax", "flax", "numpy")
MAX_META_BYTES = 8 * 2**20
"""JSON takes some forty times its size in memory."""
MAX_FILE_BYTES = 2**30
"""Of a file beside the weights."""
MAX_ARRAY_BYTES = 2**30
"""Of one feature's window, and of a chunk of actions."""


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
    weights: str = PARAMS,
) -> Path:
    """Write a bundle; a folder already there under this name is replaced only once the new one is whole.

    `files`: what else the policy needs (a tokenizer), by plain file name; `weights`: one of WEIGHTS.

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
        data = save({name: np.asarray(value, order="C") for name, value in params.items()})
        contents = {weights: data, **(files or {})}
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
        manifest = meta["manifest"]
        contract, normalizer = Contract.from_json(meta["contract"]), Normalizer.from_json(meta["normalizer"])
        policy, stated_id = dict(meta["policy"]), str(meta["id"])
        robot = None if meta.get("robot") is None else _robot(meta["robot"], path)
        precision, run = str(meta["precision"]), dict(meta["run"])
        made_id = _id(meta)
    except BundleError:
        raise
    except _MALFORMED as error:
        raise BundleError(f"{path / META}: field {error} is missing or malformed") from error
    _check_sizes(contract, path)
    named = [name for name in WEIGHTS if isinstance(manifest, dict) and name in manifest]
    if not named:
        raise BundleError(f"{path / META}: the manifest does not name {PARAMS}, nor {LEROBOT_WEIGHTS}")
    if len(named) > 1:
        raise BundleError(f"{path / META}: the manifest names both {PARAMS} and {LEROBOT_WEIGHTS}; a bundle has one")
    weights = b""
    for name, entry in manifest.items():
        if name == named[0]:
            weights = _read_verified(path, name, entry, keep=True)
        else:
            _read_verified(path, name, entry, keep=False)
    if made_id != stated_id:
        raise BundleError(
            f"{path / META}: its contents do not give its id {stated_id[:12]}; it was changed after it was written"
        )
    try:
        # safetensors takes the last of two tensors of one name.
        if (length := int.from_bytes(weights[:8], "little")) > MAX_META_BYTES:
            raise ValueError(f"its header has {length} bytes, at most {MAX_META_BYTES} are read")
        params = load(weights)
        json.loads(weights[8 : 8 + length], object_pairs_hook=_unique)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BundleError(f"{path / named[0]}: not a safetensors file ({error})") from error
    if not isinstance(policy.get("name"), str):
        raise BundleError(f"{path / META}: the policy has no name")
    if precision not in PRECISIONS:
        raise BundleError(f"{path / META}: precision '{precision[:40]}', expected {' or '.join(PRECISIONS)}")
    try:
        normalizer.check_contract(contract)
    except BundleError as error:
        raise BundleError(f"{path / META}: {error}") from error
    RobotTransforms(robot).check(contract)
    return Bundle(stated_id, policy, precision, contract, normalizer, params, run, path, robot)


SAME = ("contract", "policy", "precision", "robot")
"""Fields of a bundle that whoever acts with it cannot have replaced with the weights."""


def parts(bundle: Bundle, names: tuple[str, ...]) -> dict[str, object]:
    """Fields of a bundle in a form that can be compared."""
    return {name: bundle.normalizer.to_json() if name == "normalizer" else getattr(bundle, name) for name in names}


def refuse_another(bundle: Bundle, same: Mapping[str, object], version: str) -> None:
    """Refuse weights of another policy.

    Args:
        bundle: whose weights are to be acted with.
        same: `parts` of the bundle that was loaded.
        version: id of that one.

    Raises:
        BundleError: a part differs; names it.
    """
    for name, value in parts(bundle, tuple(same)).items():
        if value != same[name]:
            what = "normaliser" if name == "normalizer" else name
            raise BundleError(f"bundle {bundle.path}: its {what} is not that of {version[:12]}; load it anew")


def read_id(path: str | Path) -> str:
    """The id that `read_bundle` would give it; nothing but its manifest is read. Raises as that."""
    return _id(_read_meta(Path(path)))


@dataclass(frozen=True)
class Entry:
    """What a manifest says of one file."""

    sha256: str
    bytes: int


def read_manifest(path: str | Path) -> dict[str, Entry]:
    """The files of a bundle by plain name, as its manifest states them; none of them is looked at.

    Raises:
        BundleError: not a bundle, another schema version, or a manifest with a name, size or sum that cannot be one.
    """
    path = Path(path)
    try:
        found = {name: Entry(str(e["sha256"]), int(e["bytes"])) for name, e in _read_meta(path)["manifest"].items()}
    except _MALFORMED as error:
        raise BundleError(f"{path / META}: field {error} is missing or malformed") from error
    for name, entry in found.items():
        if not _NAME.fullmatch(name) or name == META:
            raise BundleError(f"{path / META}: the manifest names {name[:80]!r}, which is not a plain file name")
        if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256) or entry.bytes < 0:
            raise BundleError(f"{path / META}: the manifest gives no sha256 and size of '{name}'")
    return found


def read_versions(path: str | Path) -> dict[str, str]:
    """The packages that made a bundle and the commit of rlsvc, by name, as it states them. Raises as `read_bundle`."""
    versions = _read_meta(Path(path)).get("versions")
    return {str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else {}


def read_weight_bytes(path: str | Path) -> int:
    """That the weights of a bundle take on disk, by its manifest. Raises as `read_bundle`."""
    try:
        return int(_read_meta(Path(path))["manifest"][PARAMS]["bytes"])
    except _MALFORMED as error:
        raise BundleError(f"{Path(path) / META}: field {error} is missing or malformed") from error


def read_contract(path: str | Path) -> Contract:
    """The contract of a bundle, without its weights.

    Raises:
        BundleError: not a bundle, or another schema version.
    """
    meta = _read_meta(Path(path))
    try:
        contract = Contract.from_json(meta["contract"])
    except _MALFORMED as error:
        raise BundleError(f"{Path(path) / META}: field {error} is missing or malformed") from error
    _check_sizes(contract, Path(path))
    return contract


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
    if not os.path.lexists(file):
        raise BundleError(f"{path}: not a policy bundle; it has no {META}")
    with _open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_META_BYTES:
            raise BundleError(f"{file}: {size} bytes, at most {MAX_META_BYTES} are read")
        data = stream.read(MAX_META_BYTES)
    try:
        meta = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON ({error})") from error
    found = meta.get("schema_version") if isinstance(meta, dict) else None
    if type(found) is not int or found not in READS:
        raise BundleError(f"{file}: schema_version is {found!r}, this rlsvc reads {' and '.join(map(str, READS))}")
    return meta


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A map whose keys all differ: of two readers of one with a key twice each may see another value."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key comes twice")
    return made


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _check_sizes(contract: Contract, path: Path) -> None:
    """Refuse a contract whose arrays nobody could hold: they are made when the policy is compiled."""
    features = {key: (feature, contract.n_obs_steps) for key, feature in contract.observation.items()}
    for key, (feature, steps) in {**features, "action": (contract.action, contract.action_horizon)}.items():
        sizes = (steps, *feature.shape)
        width = 1 if feature.dtype == TEXT else np.dtype(feature.dtype).itemsize
        fewest = 0 if key == "action" else 1  # what judges states gives no action
        if steps < fewest or min(sizes) < 0 or math.prod(sizes) * width > MAX_ARRAY_BYTES:
            raise BundleError(
                f"{path / META}: '{key}' of the contract is {str(sizes)[:80]} {feature.dtype}, expected "
                f"{fewest} steps or more and at most {MAX_ARRAY_BYTES} bytes"
            )
    if not math.isfinite(contract.rate_hz):
        raise BundleError(f"{path / META}: the contract's rate is {contract.rate_hz} Hz")


def _open_plain(file: Path) -> BufferedReader:
    """Open a file that is one, and no link, pipe or device, whatever takes its place meanwhile."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BundleError(f"{file}: not a plain file that can be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleError(f"{file}: not a plain file")
    return os.fdopen(descriptor, "rb")


def _read_verified(path: Path, name: str, entry: Any, *, keep: bool) -> bytes:
    """The bytes of a file whose sum was checked, or none of them where they are not kept."""
    if not _NAME.fullmatch(name):
        raise BundleError(f"{path / META}: the manifest names {name[:80]!r}, which is not a plain file name")
    file = path / name
    if not os.path.lexists(file):
        raise BundleError(f"{file}: named in the manifest, but not there")
    stated = entry if isinstance(entry, dict) else {}
    with _open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        most = _memory() if keep else MAX_FILE_BYTES
        if size > most:
            raise BundleError(f"{file}: {size} bytes, at most {most} can be read")
        if size != stated.get("bytes"):
            raise BundleError(
                f"{file}: {size} bytes, the manifest says {stated.get('bytes')}; it is cut short or was changed. Copy "
                "the bundle again."
            )
        data = stream.read(size) if keep else b""
        digest = hashlib.sha256(data) if keep else hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != stated.get("sha256"):
        raise BundleError(
            f"{file}: its sha256 is not the manifest's; the file was changed or damaged. Copy the bundle again."
        )
    return data


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    return found if (commit := _commit()) is None else {**found, "commit": commit}


@functools.cache
def _commit() -> str | None:
    """The commit of rlsvc's checkout, with "+changes" where its files differ from it.

    Outside a checkout what RLSVC_COMMIT says, else None.
    """
    if os.environ.get("RLSVC_COMMIT"):
        return os.environ["RLSVC_COMMIT"]
    package = Path(__file__).parents[1]
    try:
        # An installed package may lie in the checkout of something else, which does not track it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
        return _git(package, "rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
