"""What datasets and robots call things, and the run's own names: the first stage between a robot and a policy.

A dataset says it in `data.datasets.N.keys`, a robot in `robot.keys`; images come to one layout, type and size.

Letters: N steps, H W height and width, D numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError, DatasetError, nearest
from rlsvc.core.types import EpisodeTable
from rlsvc.data.images import resize_with_pad
from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.robot import RobotSpec


def load_features(dataset: DatasetSpec, names: Sequence[str]) -> EpisodeTable:
    """The selected episodes of a dataset under the run's names.

    Args:
        dataset: what to read, and what it calls the features.
        names: the run's features.

    Raises:
        DatasetError: as `rlsvc.data.load.load_table`; or a name that is no feature of the run, or features that
            cannot be joined.
    """
    for name in dataset.keys:
        if name not in names:
            guess = nearest(name, names)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise DatasetError(
                f"{dataset.path}: `keys` names '{name}'{hint}, which is no feature of the run; it has: "
                f"{', '.join(names)}"
            )
    sources = {name: dataset.keys.get(name, (name,)) for name in names}
    table = load_table(dataset, list(dict.fromkeys(key for keys in sources.values() for key in keys)))
    columns, labels, units = {}, {}, {}
    for name, keys in sources.items():
        columns[name] = table.columns[keys[0]] if len(keys) == 1 else _joined_column(table, name, keys)
        if all(key in table.names for key in keys):
            labels[name] = tuple(label for key in keys for label in table.names[key])
        if len(found := {table.units.get(key, "") for key in keys}) == 1:
            units[name] = found.pop()
    return replace(table, columns=columns, names=labels, units=units)


def repack(observation: Mapping[str, Any], robot: RobotSpec, contract: Contract) -> dict[str, Any]:
    """One observation as the robot's runtime sends it, under the contract's names.

    Args:
        observation: one step, by the runtime's keys, nested or with slashes. One that has none of them is taken to be
            under the contract's names already, and given back as it is.
        robot: whose runtime.
        contract: of the policy, which then checks shapes and dtypes.

    Raises:
        ContractError: a key that the runtime is not known to send or the policy does not see, one that is missing, a
            prompt that is missing or empty, or an image of another layout or type.
    """
    sent = {key: name for name, keys in robot.keys.items() for key in keys} | dict.fromkeys(robot.unused, "")
    theirs = {top for key in sent for top in (key, key.split("/")[0])} - set(contract.observation)
    if not any(key in theirs for key in observation):
        return dict(observation)
    if contract.n_obs_steps != 1:
        raise ContractError(
            f"robot '{robot.name}' sends one observation, the policy sees {contract.n_obs_steps} in a row; send "
            "windows under the contract's names"
        )
    flat = _flatten(observation)
    for key in flat:
        if key not in sent:
            guess = nearest(key, sent)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise ContractError(f"robot '{robot.name}' sends no '{key}'{hint}; expected: {_keys(robot, contract)}")
        if sent[key] and sent[key] not in contract.observation:
            raise ContractError(
                f"observation '{key}' is '{sent[key]}', which the policy does not see; leave it out, or train with it "
                f"in robot.unused. Expected: {_keys(robot, contract)}"
            )
    return {name: _feature(name, flat, robot, contract) for name in contract.observation}


def _feature(name: str, flat: Mapping[str, Any], robot: RobotSpec, contract: Contract) -> Any:
    feature, keys = contract.observation[name], robot.keys[name]
    if feature.dtype == TEXT:
        text = flat.get(keys[0], robot.prompt)
        if text is not None and (not isinstance(text, str) or text.strip()):
            return text
        got = "is missing" if text is None else "is empty"
        raise ContractError(f"observation '{keys[0]}' {got}: the policy needs a prompt, such as 'pick up the cup'")
    missing = [key for key in keys if key not in flat]
    if missing:
        raise ContractError(
            f"observation lacks '{missing[0]}'{_cameras(flat, robot, contract) if feature.is_image else ''}; expected: "
            f"{_keys(robot, contract)}"
        )
    if feature.is_image:
        return _image(keys[0], flat[keys[0]], robot)
    return flat[keys[0]] if len(keys) == 1 else np.concatenate([_vector(key, flat[key]) for key in keys])


def _image(key: str, value: Any, robot: RobotSpec) -> np.ndarray:
    """[H, W, 3] uint8."""
    image, axes = np.asarray(value), robot.image_layout
    channels = axes.index("c")
    if image.ndim != 3 or image.shape[channels] != 3:
        raise ContractError(
            f"observation '{key}': got shape {image.shape}, robot '{robot.name}' sends ({', '.join(axes)}) with 3 "
            "channels"
        )
    if image.dtype != np.dtype(robot.image_dtype):
        raise ContractError(f"observation '{key}': got {image.dtype}, robot '{robot.name}' sends {robot.image_dtype}")
    if image.dtype == np.float32:
        if not ((image >= 0) & (image <= 1)).all():
            raise ContractError(f"observation '{key}': a float32 image with values outside [0, 1]")
        image = np.round(image * 255).astype(np.uint8)
    image = np.moveaxis(image, channels, -1)
    return image if robot.image_size is None else resize_with_pad(image, robot.image_size)


def _vector(key: str, value: Any) -> np.ndarray:
    """[D]; a number is a vector of one."""
    try:
        vector = np.atleast_1d(np.asarray(value, np.float64))
    except (ValueError, TypeError) as error:
        raise ContractError(f"observation '{key}': got {type(value).__name__}, expected a vector") from error
    if vector.ndim != 1:
        raise ContractError(f"observation '{key}': got shape {vector.shape}, expected a vector")
    return vector


def _flatten(observation: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in observation.items():
        flat |= _flatten(value, f"{path}{key}/") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flat


def _cameras(flat: Mapping[str, Any], robot: RobotSpec, contract: Contract) -> str:
    images = [robot.keys[name][0] for name, feature in contract.observation.items() if feature.is_image]
    return f" (got {sum(key in flat for key in images)} of the policy's {len(images)} cameras)"


def _keys(robot: RobotSpec, contract: Contract) -> str:
    return ", ".join(key for name in contract.observation for key in robot.keys[name])


def _joined_column(table: EpisodeTable, name: str, keys: Sequence[str]) -> np.ndarray:
    """[N, D] float32."""
    columns = [table.columns[key] for key in keys]
    for key, column in zip(keys, columns, strict=True):
        if column.ndim > 2 or column.dtype.kind != "f":
            raise DatasetError(
                f"{table.source}: '{key}' is {column.dtype} {column.shape[1:]}; '{name}' joins vectors of floats"
            )
    return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)
