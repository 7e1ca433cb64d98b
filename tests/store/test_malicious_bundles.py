"""Bundles that somebody made to do harm: each is refused with one clear line, nothing is executed, memory stays small.

Every bundle here has right sums, sizes and id wherever it can: what is wrong with it is its own fault alone.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import socket
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.store import bundle as module
from rlsvc.store.bundle import META, PARAMS, read_bundle, read_contract, write_bundle

CONTRACT = Contract({"observation.state": Feature((2,), "float32")}, Feature((1,), "float32"), 10.0, 2, 8)
WEIGHTS = save({"net.kernel": np.ones((2, 3), np.float32), "net.bias": np.zeros(3, np.float32)})
MOST_BYTES = 300 * 2**20
CANARY = "canary"
OUTSIDE = "outside"


class Executed:
    """Unpickled, it makes the canary."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / CANARY}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good bundle, and a file beside it that is nobody's business."""
    columns = {"observation.state": np.array([[0.0, 1], [2, 3]]), "action": np.array([[0.0], [1]])}
    normalizer = Normalizer.fit({"default": columns}, {**CONTRACT.observation, "action": CONTRACT.action}, {})
    params = load(WEIGHTS)
    (tmp_path / OUTSIDE).write_text("secret of this machine")
    policy = {"name": "diffusion"}
    return write_bundle(
        tmp_path / "bundle", policy=policy, contract=CONTRACT, normalizer=normalizer, params=params,
        files={"tokenizer.model": b"words"},
    )  # fmt: skip


def meta_of(folder: Path) -> dict:
    return json.loads((folder / META).read_text())


def forge(folder: Path, change: Callable[[dict], object] = lambda meta: None, **files: bytes) -> None:
    """Change a bundle, and make sums, sizes and id right again."""
    meta = meta_of(folder)
    for name, data in files.items():
        file = folder / {"weights": PARAMS, "tokenizer": "tokenizer.model"}[name]
        file.write_bytes(data)
        meta["manifest"][file.name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    change(meta)
    with contextlib.suppress(KeyError):
        meta["id"] = module._id(meta)
    (folder / META).write_text(json.dumps(meta))


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def tensor(**changes: object) -> dict:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def archive(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zip_of(name: str, data: bytes) -> bytes:
    def write(buffer: io.BytesIO) -> None:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(name, data)

    return archive(write)


def tar_of(kind: bytes, target: str) -> bytes:
    def write(buffer: io.BytesIO) -> None:
        with tarfile.open(fileobj=buffer, mode="w") as file:
            info = tarfile.TarInfo("../escaped")
            info.type, info.linkname = kind, target
            file.addfile(info)

    return archive(write)


def yaml_of(tag: str, folder: Path) -> bytes:
    return f"!!python/{tag} ['touch {folder / CANARY}']\n".encode()


def sparse(file: Path, size: int) -> None:
    file.unlink()
    with file.open("wb") as stream:
        stream.truncate(size)


DATA = bytes(8)
PICKLES = {
    f"a pickle of protocol {protocol}": lambda at, protocol=protocol: pickle.dumps(Executed(at), protocol)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}
YAML = {
    f"YAML with the tag {tag}": lambda at, tag=tag: yaml_of(tag, at)
    for tag in ("object/apply:os.system", "object/new:os.system", "object/apply:subprocess.run", "name:os.system")
}
CONTENT = {
    **PICKLES,
    **YAML,
    "a checkpoint of Torch": lambda at: zip_of("archive/data.pkl", pickle.dumps(Executed(at))),
    "an npy of objects": lambda at: archive(lambda buffer: np.save(buffer, np.array([Executed(at)], object), True)),
    "an npz of objects": lambda at: archive(lambda buffer: np.savez(buffer, np.array([Executed(at)], object))),
    "a zip bomb": lambda at: zip_of(PARAMS, bytes(64 * 2**20)),
    "a gzip bomb": lambda at: gzip.compress(bytes(64 * 2**20)),
    "a tar with a symbolic link": lambda at: tar_of(tarfile.SYMTYPE, "/etc/passwd"),
    "a tar with a hard link": lambda at: tar_of(tarfile.LNKTYPE, "/etc/passwd"),
    "a tar with a device": lambda at: tar_of(tarfile.CHRTYPE, ""),
    "a program": lambda at: b"\x7fELF" + bytes(60),
    "a script": lambda at: f"#!/bin/sh\ntouch {at / CANARY}\n".encode(),
    "nothing": lambda at: b"",
    "four bytes": lambda at: bytes(4),
}
"""In the place of a file, by the folder of the canary."""
HEADERS = {
    "a header of no length": safetensors(b"", length=0),
    "a header of one byte": safetensors({"x": tensor()}, DATA, length=1),
    "a header cut short": safetensors({"x": tensor()}, DATA, length=10),
    "a header that reaches into the data": safetensors({"x": tensor()}, DATA, length=70),
    "a header longer than the file": safetensors({"x": tensor()}, DATA, length=10_000),
    "a header over the format's limit": safetensors({"x": tensor()}, DATA, length=100_000_001),
    "a header of 2^63 bytes": safetensors({"x": tensor()}, DATA, length=2**63),
    "a header of 2^64 - 1 bytes": safetensors({"x": tensor()}, DATA, length=2**64 - 1),
    "a header that is no JSON": safetensors(b"not json", DATA),
    "a header that is no UTF-8": safetensors(b'{"\xff\xfe": 1}', DATA),
    "a header that is a list": safetensors([tensor()], DATA),
    "a header that is a number": safetensors(7, DATA),
    "a header of lists 100,000 deep": safetensors(b"[" * 100_000, DATA),
    "a header of maps 100,000 deep": safetensors(b'{"x":' * 100_000, DATA),
    "a tensor twice": safetensors(b'{"x": %s, "x": %s}' % ((json.dumps(tensor()).encode(),) * 2), DATA),
    "overlapping offsets": safetensors({"x": tensor(), "y": tensor(data_offsets=[4, 12])}, bytes(12)),
    "the same bytes twice": safetensors({"x": tensor(), "y": tensor()}, DATA),
    "offsets backwards": safetensors({"x": tensor(data_offsets=[8, 0])}, DATA),
    "offsets below zero": safetensors({"x": tensor(data_offsets=[-8, 0])}, DATA),
    "offsets beyond the end": safetensors({"x": tensor(data_offsets=[8, 16])}, DATA),
    "offsets of 2^64": safetensors({"x": tensor(data_offsets=[2**64 - 8, 2**64])}, DATA),
    "offsets with a fraction": safetensors({"x": tensor(data_offsets=[0.0, 8.5])}, DATA),
    "offsets of text": safetensors({"x": tensor(data_offsets=["0", "8"])}, DATA),
    "three offsets": safetensors({"x": tensor(data_offsets=[0, 4, 8])}, DATA),
    "a hole between tensors": safetensors({"x": tensor(), "y": tensor(data_offsets=[16, 24])}, bytes(24)),
    "bytes after the last tensor": safetensors({"x": tensor()}, bytes(16)),
    "fewer bytes than the shape needs": safetensors({"x": tensor(shape=[3])}, DATA),
    "a shape below zero": safetensors({"x": tensor(shape=[-2])}, DATA),
    "a shape that overflows": safetensors({"x": tensor(shape=[2**62, 2**62])}, DATA),
    "a shape of 2^64": safetensors({"x": tensor(shape=[2**64])}, DATA),
    "a shape of NaN": safetensors(b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', DATA),
    "a shape with a fraction": safetensors({"x": tensor(shape=[2.5])}, DATA),
    "a shape of text": safetensors({"x": tensor(shape="2")}, DATA),
    "a shape that is null": safetensors({"x": tensor(shape=None)}, DATA),
    "no elements of a huge shape": safetensors({"x": tensor(shape=[0, 2**62, 2**62], data_offsets=[0, 0])}),
    "a dtype of objects": safetensors({"x": tensor(dtype="O")}, DATA),
    "a dtype that there is not": safetensors({"x": tensor(dtype="F31")}, DATA),
    "a dtype that is a list": safetensors({"x": tensor(dtype=["F32"])}, DATA),
    "a tensor without a dtype": safetensors({"x": {"shape": [2], "data_offsets": [0, 8]}}, DATA),
    "a tensor that is null": safetensors({"x": None}, DATA),
    "metadata that is no text": safetensors({"__metadata__": {"x": [1]}, "x": tensor()}, DATA),
}
NAMES = (
    "../outside", "../../etc/passwd", "/etc/passwd", "a/b", "./params.safetensors", "params.safetensors/", "..", ".",
    "",
    "a\0b", "\0", "\ud800", "~root", "-rf", "C:\\x", "..\\outside", "//host/share", "x" * 300, " ", "a\nb",
    "%2e%2e%2foutside", ".hidden", "$(touch canary)", "`touch canary`", "\u202eexe",
)  # fmt: skip


def put(folder: Path, *keys: str | int, value: object) -> None:
    """Set one place of bundle.json."""

    def change(meta: dict) -> None:
        for key in keys[:-1]:
            meta = meta[key]
        meta[keys[-1]] = value

    forge(folder, change)


FEATURE = ("contract", "observation", "observation.state")
STATS = ("normalizer", "stats", "action", 0)
VALUES = {
    "a schema version that is true": (("schema_version",), True),
    "a schema version with a fraction": (("schema_version",), 2.0),
    "a schema version of text": (("schema_version",), "2"),
    "a schema version of the future": (("schema_version",), 3),
    "a schema version in a list": (("schema_version",), [2]),
    "a shape of the contract below zero": ((*FEATURE, "shape"), [-2]),
    "a huge shape of the contract": ((*FEATURE, "shape"), [2**40]),
    "a shape of the contract that is a text": ((*FEATURE, "shape"), ["two"]),
    "a shape of the contract in lists": ((*FEATURE, "shape"), [[2]]),
    "a dtype of objects in the contract": ((*FEATURE, "dtype"), "O"),
    "a dtype of the contract that is a map": ((*FEATURE, "dtype"), {"float32": 1}),
    "a feature that is null": (FEATURE, None),
    "a feature that is a list": (FEATURE, [2]),
    "an image that nobody could hold": (
        ("contract", "observation", "image"), {"shape": [10**6, 10**6, 3], "dtype": "uint8", "names": []}
    ),
    "no observation": (("contract", "observation"), None),
    "observations in a list": (("contract", "observation"), [["observation.state", 1]]),
    "no observation step": (("contract", "n_obs_steps"), 0),
    "steps below zero": (("contract", "n_obs_steps"), -1),
    "2^40 observation steps": (("contract", "n_obs_steps"), 2**40),
    "a horizon of 2^40": (("contract", "action_horizon"), 2**40),
    "a horizon below nothing": (("contract", "action_horizon"), -1),
    "a precision that there is not": (("precision",), "fp7"),
    "a precision that is a list": (("precision",), ["fp32"]),
    "a rate of text": (("contract", "rate_hz"), "fast"),
    "an action that is null": (("contract", "action"), None),
    "a contract that is a list": (("contract",), []),
    "statistics that are null": ((*STATS, "mean"), None),
    "a null among statistics": ((*STATS, "mean"), [None]),
    "statistics of text": ((*STATS, "mean"), ["a"]),
    "ragged statistics": ((*STATS, "mean"), [[1], [2, 3]]),
    "statistics of another width": ((*STATS, "std"), [1.0, 2.0]),
    "statistics in a map": (("normalizer", "stats", "action"), {"mean": 1}),
    "a mode that is a list": (("normalizer", "modes"), [1]),
    "groups that are a number": (("normalizer", "groups"), 3),
    "a normaliser that is a text": (("normalizer",), "normal"),
    "a robot that is a list": (("robot",), [1]),
    "a robot with a field that there is not": (("robot",), {"name": "arm", "execute_python": "x"}),
    "a policy that is null": (("policy",), None),
    "a policy that is a list": (("policy",), ["name"]),
    "a policy without a name": (("policy",), {"horizon": 8}),
    "a policy whose name is a list": (("policy", "name"), ["diffusion"]),
    "a run that is a number": (("run",), 3),
    "a manifest that is a list": (("manifest",), [[PARAMS, {}]]),
    "a manifest of lists": (("manifest",), [[1, {}]]),
    "a manifest that is null": (("manifest",), None),
    "a manifest that is empty": (("manifest",), {}),
    "an entry that is null": (("manifest", PARAMS), None),
    "an entry that is a text": (("manifest", PARAMS), "sha256"),
    "a sum that is null": (("manifest", PARAMS, "sha256"), None),
    "a sum that is a list": (("manifest", PARAMS, "sha256"), ["0"]),
    "a size below the file's": (("manifest", PARAMS, "bytes"), 8),
    "a size beyond the file's": (("manifest", PARAMS, "bytes"), 2**50),
    "a size of text": (("manifest", PARAMS, "bytes"), "172"),
}  # fmt: skip
"""A place of bundle.json, and what stands there."""


def text(folder: Path, old: str, new: str) -> None:
    """Change the text of bundle.json: what json.dumps would not write."""
    before = (folder / META).read_text()
    assert old in before
    (folder / META).write_text(before.replace(old, new, 1))


def deep(opening: str, depth: int, closing: str) -> Callable[[Path], None]:
    return lambda folder: text(folder, '"run": {}', f'"run": {{"x": {opening * depth}1{closing * depth}}}')


TEXTS: dict[str, Callable[[Path], None]] = {
    "a key twice": lambda at: text(at, '"schema_version": 2', '"schema_version": 1, "schema_version": 2'),
    "two manifests": lambda at: text(at, '"manifest"', '"manifest": {}, "manifest"'),
    "a key twice, further down": lambda at: text(at, '"name": "diffusion"', '"name": "zero", "name": "diffusion"'),
    "a rate of NaN": lambda at: text(at, '"rate_hz": 10.0', '"rate_hz": NaN'),
    "an infinite rate": lambda at: text(at, '"rate_hz": 10.0', '"rate_hz": -Infinity'),
    "a rate that overflows": lambda at: text(at, '"rate_hz": 10.0', '"rate_hz": 1e999'),
    "NaN in what the run says": lambda at: text(at, '"run": {}', '"run": {"loss": NaN}'),
    "steps of NaN": lambda at: text(at, '"n_obs_steps": 2', '"n_obs_steps": NaN'),
    "steps that overflow": lambda at: text(at, '"n_obs_steps": 2', '"n_obs_steps": 1e999'),
    "a number of 100,000 digits": lambda at: text(at, '"n_obs_steps": 2', '"n_obs_steps": ' + "9" * 100_000),
    "lists 1,000,000 deep": deep("[", 10**6, "]"),
    "maps 100,000 deep": deep('{"x":', 10**5, "}"),
    "a policy too deep to be summed": lambda at: text(
        at, '"name": "diffusion"', '"name": "diffusion", "x": ' + "[" * 5000 + "]" * 5000
    ),
    "text after the end": lambda at: (at / META).write_text((at / META).read_text() + "{}"),
    "UTF-16 that lies": lambda at: (at / META).write_bytes(b"\xff\xfe" + (at / META).read_bytes()),
    "null bytes": lambda at: (at / META).write_bytes(b"\0" + (at / META).read_bytes()),
    "ten million lists": lambda at: (at / META).write_text("[" + "[]," * 10**7 + "[]]"),
}


def replaced(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A bundle in which something else stands in the place of a file."""

    def change(folder: Path) -> None:
        target = folder / file
        target.rename(folder.parent / "moved")
        make(target)

    return change


def as_socket(path: Path) -> None:
    # The name of a socket must be short.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def truthful_and_huge(file: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        sparse(folder / file, size)
        put(folder, "manifest", file, "bytes", value=size)

    return change


THINGS: dict[str, Callable[[Path], object]] = {
    "a symbolic link to itself made good": lambda path: path.symlink_to(path.parent.parent / "moved"),
    "a symbolic link to a secret": lambda path: path.symlink_to(path.parent.parent / OUTSIDE),
    "a symbolic link to a system file": lambda path: path.symlink_to("/etc/passwd"),
    "a symbolic link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to nothing": lambda path: path.symlink_to("nowhere"),
    "a symbolic link to itself": lambda path: path.symlink_to(path.name),
    "a hard link to a secret": lambda path: path.hardlink_to(path.parent.parent / OUTSIDE),
    "a folder": lambda path: path.mkdir(),
    "a pipe that nobody writes": os.mkfifo,
    "a socket": as_socket,
}
FILES: dict[str, Callable[[Path], None]] = {
    **{
        f"{what} for {file}": replaced(file, make)
        for what, make in THINGS.items()
        for file in (PARAMS, META, "tokenizer.model")
    },
    "weights of a tebibyte and no bytes on disk": truthful_and_huge(PARAMS, 2**40),
    "a tokenizer of a tebibyte and no bytes on disk": truthful_and_huge("tokenizer.model", 2**40),
    "weights larger than they say": lambda folder: sparse(folder / PARAMS, 2**40),
    "a bundle.json of a tebibyte": lambda folder: sparse(folder / META, 2**40),
    "the canary's maker for a folder": lambda folder: (folder / META).unlink(),
}  # fmt: skip
ENTRY = {"sha256": hashlib.sha256(b"").hexdigest(), "bytes": 0}
CASES: dict[str, Callable[[Path], object]] = {
    **{f"{what} for the weights": lambda at, x=make: forge(at, weights=x(at.parent)) for what, make in CONTENT.items()},
    **{
        f"{what} for bundle.json": lambda at, x=make: (at / META).write_bytes(x(at.parent))
        for what, make in CONTENT.items()
    },
    **{what: lambda at, x=data: forge(at, weights=x) for what, data in HEADERS.items()},
    **{f"the name {name[:20]!a}": lambda at, x=name: put(at, "manifest", x, value=ENTRY) for name in NAMES},
    **{what: lambda at, keys=keys, x=value: put(at, *keys, value=x) for what, (keys, value) in VALUES.items()},
    **TEXTS,
    **FILES,
}


def test_the_bundle_that_the_cases_are_made_from_is_good(folder):
    forge(folder)
    assert read_bundle(folder).policy == {"name": "diffusion"}
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES)
def test_a_malicious_bundle_is_refused_in_one_line_executes_nothing_and_takes_little_memory(folder, case):
    CASES[case](folder)
    before = sorted(path.name for path in folder.parent.iterdir())
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as refusal:
            read_bundle(folder)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refusal.value)
    assert message.splitlines() == [message]
    assert "bundle" in message
    assert len(message) < 1000
    assert "secret of this machine" not in message
    assert sorted(path.name for path in folder.parent.iterdir()) == before
    assert CANARY not in before
    assert most < MOST_BYTES


@pytest.mark.parametrize("case", [*VALUES, *TEXTS])
def test_the_contract_alone_of_a_malicious_bundle_is_read_or_refused(folder, case):
    CASES[case](folder)
    with contextlib.suppress(UserError):  # and nothing else
        assert read_contract(folder).n_obs_steps >= 1


def test_what_would_execute_does_when_it_is_unpickled(tmp_path):
    """The canary works."""
    pickle.loads(pickle.dumps(Executed(tmp_path)))
    assert (tmp_path / CANARY).exists()
