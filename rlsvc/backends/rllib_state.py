"""What an RLlib Algorithm goes on from, as tensors and plain values: RLlib's own checkpoints are pickles.

A tree of maps, sequences, arrays and plain values becomes a map of arrays by path, for safetensors, and a skeleton for
JSON that says where they lie. Long lists of numbers become arrays too. What is neither is refused by its path.

RLlib 2.60 leaves out of its state what its learners adapt outside of modules and optimizers (SAC's temperature, PPO's
KL coefficient, MARWIL's norm of advantages); LEARNED has them here.
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

LEARNED = ("curr_log_alpha", "curr_kl_coeffs_per_module", "moving_avg_sqd_adv_norms_per_module")
LONG = 64
"""Numbers of a list above which it is stored as an array."""
KIND = "_"
"""Key of a skeleton's node that says what it is; no state has such a key."""


def pack(tree: Any) -> tuple[dict[str, np.ndarray], Any]:
    """A tree as arrays by path, and a skeleton of plain values. `unpack` is the inverse.

    Raises:
        TypeError: something that is neither an array nor a plain value; names its path.
    """
    arrays: dict[str, np.ndarray] = {}
    return arrays, _pack(tree, "", arrays)


def _pack(x: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if x is None or isinstance(x, bool | str) or type(x) in (int, float):
        return x if not isinstance(x, float) or np.isfinite(x) else {KIND: "float", "value": str(x)}
    if isinstance(x, torch.Tensor):
        return _stored("tensor", x.detach().cpu().numpy(), path, arrays)
    if isinstance(x, np.ndarray) and x.dtype.kind in "fiub":
        return _stored("array", x, path, arrays)
    if isinstance(x, np.generic) and x.dtype.kind in "fiub":
        return _stored("scalar", np.asarray(x), path, arrays)
    if isinstance(x, Mapping):
        if all(isinstance(key, str) for key in x) and KIND not in x:
            return {key: _pack(value, f"{path}/{key}", arrays) for key, value in x.items()}
        pairs = [[_pack(key, f"{path}/{i}k", arrays), _pack(value, f"{path}/{i}v", arrays)]
                 for i, (key, value) in enumerate(x.items())]  # fmt: skip
        return {KIND: "map", "items": pairs}
    if isinstance(x, list | tuple | deque):
        kind = {list: "list", tuple: "tuple", deque: "deque"}.get(type(x))
        if kind is not None:
            return _pack_sequence(x, kind, path, arrays)
    raise TypeError(f"state {path or '/'}: {type(x).__name__} is neither an array nor a plain value")


def _pack_sequence(x: Any, kind: str, path: str, arrays: dict[str, np.ndarray]) -> Any:
    node: dict[str, Any] = {KIND: kind}
    if isinstance(x, deque):
        node["maxlen"] = x.maxlen
    if len(x) > LONG and (rows := _numbers(x)) is not None:
        node |= {"rows": _stored("array", rows, path, arrays), "tuples": rows.ndim == 2}
    else:
        node["items"] = [_pack(value, f"{path}/{i}", arrays) for i, value in enumerate(x)]
    return node


def _numbers(x: Any) -> np.ndarray | None:
    """Whole numbers, floats, or tuples of as many whole numbers each, as an array; None of anything else."""
    if all(type(value) is int for value in x):
        return np.array(x, np.int64)
    if all(isinstance(value, float | np.floating) for value in x):
        return np.array(x, np.float64)
    first = x[0]
    if type(first) is tuple and all(
        type(value) is tuple and len(value) == len(first) and all(type(part) is int for part in value) for value in x
    ):
        return np.array(x, np.int64)
    return None


def _stored(kind: str, x: np.ndarray, path: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    arrays[path] = np.ascontiguousarray(x).reshape(x.shape)
    return {KIND: kind, "path": path}


def unpack(arrays: Mapping[str, np.ndarray], node: Any) -> Any:
    """The tree of `pack`.

    Raises:
        KeyError: an array that is not there, or a node of an unknown kind.
    """
    if not isinstance(node, dict):
        return node
    if KIND not in node:
        return {key: unpack(arrays, value) for key, value in node.items()}
    kind = node[KIND]
    if kind == "float":
        return float(node["value"])
    if kind == "map":
        return {unpack(arrays, key): unpack(arrays, value) for key, value in node["items"]}
    if kind in ("tensor", "array", "scalar"):
        x = np.array(arrays[node["path"]])
        return {"tensor": torch.from_numpy, "array": lambda x: x, "scalar": lambda x: x[()]}[kind](x)
    if "rows" in node:
        rows = arrays[node["rows"]["path"]].tolist()
        items = [tuple(row) for row in rows] if node["tuples"] else rows
    else:
        items = [unpack(arrays, value) for value in node["items"]]
    return {"list": list, "tuple": tuple, "deque": lambda x: deque(x, node["maxlen"])}[kind](items)


def learned_state(learner: Any) -> dict[str, dict[str, np.ndarray]]:
    """Of a learner, by attribute of LEARNED that it has and by module: its value. Runs where the learner is."""
    found = {}
    for name in LEARNED:
        if values := dict(getattr(learner, name, None) or {}):
            found[name] = {module: torch.as_tensor(x).detach().cpu().numpy().copy() for module, x in values.items()}
    return found


def set_learned_state(learner: Any, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Inverse of `learned_state`."""
    for name, values in state.items():
        for module, x in values.items():
            held = getattr(learner, name)[module]
            held.data.copy_(torch.as_tensor(np.array(x)).reshape(held.shape))


def random_state() -> dict[str, Any]:
    """Of this process's generators: Torch's, numpy's and Python's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, inner, following = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().copy(),
        "numpy": [str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(inner), following],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    np.random.set_state(tuple(state["numpy"]))
    version, inner, following = state["python"]
    random.setstate((version, tuple(inner), following))


def replay_state(buffer: Any) -> dict[str, Any]:
    """Of an EpisodeReplayBuffer: its episodes as arrays, end to end, and its bookkeeping."""
    rest = {name: value for name, value in buffer.get_state().items() if name != "episodes"}
    rows = [_episode_rows(episode) for episode in buffer.episodes]
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]} if rows else {}
    return {
        "rest": rest,
        "rng": buffer.rng.bit_generator.state,
        "columns": joined,
        "lengths": np.array([len(row["reward"]) for row in rows], np.int64),
        "ids": [str(episode.id_) for episode in buffer.episodes],
        "terminated": np.array([bool(episode.is_terminated) for episode in buffer.episodes], bool),
        "truncated": np.array([bool(episode.is_truncated) for episode in buffer.episodes], bool),
        "started": np.array([int(episode.t_started) for episode in buffer.episodes], np.int64),
    }


def _episode_rows(episode: Any) -> dict[str, np.ndarray]:
    return {
        "observation": np.asarray(episode.get_observations()),
        "action": np.asarray(episode.get_actions()),
        "reward": np.asarray(episode.get_rewards(), np.float64),
    }


def set_replay_state(buffer: Any, state: Mapping[str, Any], spaces: Any) -> None:
    """Inverse of `replay_state`; `spaces`: the module's."""
    buffer.episodes.clear()
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(state["lengths"])])
    columns = state["columns"]
    for i, name in enumerate(state["ids"]):
        begin, end = int(starts[i]), int(starts[i + 1])
        buffer.episodes.append(
            SingleAgentEpisode(
                id_=name,
                observation_space=spaces.observation,
                action_space=spaces.action,
                # An episode has an observation more than it has steps.
                observations=columns["observation"][begin + i : end + i + 1].copy(),
                actions=columns["action"][begin:end].copy(),
                rewards=columns["reward"][begin:end].copy(),
                infos=[{} for _ in range(end - begin + 1)],
                terminated=bool(state["terminated"][i]),
                truncated=bool(state["truncated"][i]),
                t_started=int(state["started"][i]),
                len_lookback_buffer=0,
            )
        )
    buffer.set_state(dict(state["rest"]) | {"episodes": []})
    buffer.rng.bit_generator.state = state["rng"]
