"""A robot's numbers and those that a policy learns: pairs that undo each other, for training and acting alike.

Images come to one size, and maps change single dimensions of a feature, whole columns at once. A relative action is the
action less the state in which the policy acts, which is the newest of its window: so it is made window by window, after
the maps and before the normaliser, whose statistics are those of relative actions. Acting goes the same way back.

Letters: B batch, T observation steps, H actions of a chunk, A action dimensions, D numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, nearest
from rlsvc.data.images import resize_images
from rlsvc.spec.robot import AffineSpec, DeltaSpec, MapSpec, RangeSpec, RobotSpec, SliderCrankSpec

ACTION = "action"


def _affine(m: AffineSpec, x: np.ndarray) -> np.ndarray:
    return x * m.scale + m.offset


def _affine_inverse(m: AffineSpec, y: np.ndarray) -> np.ndarray:
    return (y - m.offset) / m.scale


def _range(m: RangeSpec, x: np.ndarray) -> np.ndarray:
    return (x - m.of[0]) / (m.of[1] - m.of[0]) * (m.to[1] - m.to[0]) + m.to[0]


def _range_inverse(m: RangeSpec, y: np.ndarray) -> np.ndarray:
    return (y - m.to[0]) / (m.to[1] - m.to[0]) * (m.of[1] - m.of[0]) + m.of[0]


def _crank_angle(m: SliderCrankSpec, x: np.ndarray) -> np.ndarray:
    """Law of cosines in the triangle of crank, rod and way, the angle counted from the crank's perpendicular."""
    x = np.clip(x, m.rod - m.crank, m.rod + m.crank)
    return np.arcsin(np.clip((m.crank**2 + x**2 - m.rod**2) / (2 * m.crank * x), -1.0, 1.0))


def _slider_way(m: SliderCrankSpec, y: np.ndarray) -> np.ndarray:
    y = np.clip(y, -np.pi / 2, np.pi / 2)
    return m.crank * np.sin(y) + np.sqrt(m.rod**2 - (m.crank * np.cos(y)) ** 2)


MAPS: dict[str, tuple[Callable[[Any, np.ndarray], np.ndarray], Callable[[Any, np.ndarray], np.ndarray]]] = {
    "affine": (_affine, _affine_inverse),
    "range": (_range, _range_inverse),
    "slider_crank": (_crank_angle, _slider_way),
}
"""By name the map from the robot's number to the policy's, and the way back; float64."""


class RobotTransforms:
    """The robot stage of a RobotSpec; without one it changes nothing."""

    def __init__(self, spec: RobotSpec | None) -> None:
        self.spec = spec
        self._maps = {} if spec is None else spec.maps
        self._delta = None if spec is None else spec.delta
        self._size = None if spec is None else spec.image_size

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """The policy's numbers for a robot's, [..., D] float32, or its images, [..., H, W, 3].

        `name`: of the feature, `action` for actions.
        """
        if self._size is not None and x.dtype == np.uint8 and x.ndim >= 3:
            return resize_images(x, self._size)
        return self._mapped(name, x, lambda m, column: MAPS[m.name][0](m, column), 1)

    def decode(self, name: str, x: np.ndarray) -> np.ndarray:
        """Inverse of `encode` for numbers."""
        return self._mapped(name, x, lambda m, column: MAPS[m.name][1](m, column), -1)

    def encode_observation(self, observation: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every feature encoded, with whatever leading axes."""
        return {name: self.encode(name, x) for name, x in observation.items()}

    def to_robot(self, action: np.ndarray, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """What a policy returned, [B, H, A], in the robot's numbers; `observation`: what it saw, encoded."""
        return self.decode(ACTION, absolute(action, observation, self._delta))

    def seen(self, contract: Contract) -> Contract:
        """What a policy sees of a contract: its images in the robot's size."""
        if self._size is None:
            return contract
        images = {key: replace(f, shape=(*self._size, 3)) for key, f in contract.observation.items() if f.is_image}
        return replace(contract, observation={**contract.observation, **images})

    def check(self, contract: Contract) -> None:
        """Refuse a specification that does not fit a contract.

        Raises:
            ContractError: a feature or dimension that is not there, a feature that the runtime has no name for, an
                image that cannot be resized, or another control rate.
        """
        if self.spec is None:
            return
        where = f"robot '{self.spec.name}'"
        features = {**contract.observation, ACTION: contract.action}
        for name, parts in self._maps.items():
            for part in parts:
                _check_dims(f"{where}: maps.{name}", name, part.dims, features)
        if self._delta is not None:
            for name in (ACTION, self._delta.of):
                _check_dims(f"{where}: delta", name, self._delta.dims, features)
        for name, feature in contract.observation.items() if self._size is not None else ():
            if feature.is_image and feature.shape[-1] != 3:
                raise ContractError(
                    f"{where}: image_size needs images of 3 channels, '{name}' has {feature.shape[-1]}; set it to null"
                )
        for name in contract.observation if self.spec.keys else ():
            if name not in self.spec.keys:
                raise ContractError(
                    f"{where}: its runtime does not send '{name}'; leave it out of data.observation, or name it in "
                    f"robot.keys, which has: {', '.join(self.spec.keys)}"
                )
        rate = self.spec.rate_hz
        if rate is not None and abs(rate - contract.rate_hz) > 1e-6:
            raise ContractError(
                f"{where}: its runtime acts at {rate:g} Hz, the data has {contract.rate_hz:g} Hz; take data of that "
                "rate, or set robot.rate_hz where the robot can go at another"
            )

    def _mapped(self, name: str, x: Any, apply: Callable[[MapSpec, np.ndarray], np.ndarray], order: int) -> Any:
        parts = self._maps.get(name, ())
        if not parts:
            return x
        out = np.array(x, np.float64)
        for part in parts:
            at = (..., list(part.dims))
            for m in part.by[::order]:
                out[at] = apply(m, out[at])
        return out.astype(np.float32)


def relative(action: Any, observation: Mapping[str, Any], delta: DeltaSpec | None) -> Any:
    """Actions less the newest state of their window, where they are relative.

    Args:
        action: [..., H, A] encoded, numpy or JAX.
        observation: of the same windows, encoded and not normalised; [..., T, D].
        delta: which are relative; None gives the actions as they are.
    """
    return action if delta is None else action - _anchor(action, observation, delta)


def absolute(action: Any, observation: Mapping[str, Any], delta: DeltaSpec | None) -> Any:
    """Inverse of `relative`."""
    return action if delta is None else action + _anchor(action, observation, delta)


def _anchor(action: Any, observation: Mapping[str, Any], delta: DeltaSpec) -> Any:
    """[..., 1, A], 0 where an action stays absolute."""
    dims = list(delta.dims)
    index, mask = np.zeros(action.shape[-1], np.int32), np.zeros(action.shape[-1], np.float32)
    index[dims], mask[dims] = dims, 1.0
    state = observation[delta.of]
    return state[..., -1:, :][..., index] * mask.reshape((1,) * (state.ndim - 1) + mask.shape)


def _check_dims(where: str, name: str, dims: tuple[int, ...], features: Mapping[str, Feature]) -> None:
    if name not in features:
        guess = nearest(name, features)
        hint = f" (did you mean '{guess}'?)" if guess else ""
        raise ContractError(f"{where}: there is no '{name}'{hint}; the contract has: {', '.join(features)}")
    feature = features[name]
    if len(feature.shape) != 1 or not feature.dtype.startswith("float"):
        raise ContractError(f"{where}: '{name}' is {feature.dtype} {feature.shape}, expected a vector of floats")
    if max(dims) >= feature.shape[0]:
        raise ContractError(f"{where}: '{name}' has no dimension {max(dims)}, it has 0 to {feature.shape[0] - 1}")
