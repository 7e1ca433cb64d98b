"""The contract: what a policy sees and does, by name. It travels in the bundle and is compared at every seam.

Letters: T observation steps, H action steps, A action dimensions, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsvc.core.errors import ContractError, nearest

TEXT = "str"
DTYPES = ("float32", "float64", "uint8", "int32", "int64", "bool", TEXT)


@dataclass(frozen=True)
class Feature:
    """One named array of one step.

    Attributes:
        shape: of one step, without batch and time; () for a scalar or a text. Images are (height, width, channels).
        dtype: one of DTYPES. Images are uint8 in [0, 255]; text is "str".
        unit: of every element ("px", "rad", "m"), "" when it has none or is mixed.
        names: of the elements of a vector, in order; empty when not known.
        low: smallest allowed value, for all elements or one for each; None when not bounded.
        high: largest allowed value, likewise.
    """

    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    names: tuple[str, ...] = ()
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ContractError(f"feature dtype '{self.dtype}' is not one of {', '.join(DTYPES)}")

    @property
    def is_image(self) -> bool:
        """Whether the feature is an image, (height, width, channels) uint8."""
        return self.dtype == "uint8" and len(self.shape) == 3

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "unit": self.unit,
            "names": list(self.names),
            "low": None if self.low is None else list(self.low),
            "high": None if self.high is None else list(self.high),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Feature:
        """Inverse of `to_json`."""
        return cls(
            shape=tuple(int(n) for n in value["shape"]),
            dtype=value["dtype"],
            unit=value.get("unit", ""),
            names=tuple(value.get("names", ())),
            low=None if value.get("low") is None else tuple(float(x) for x in value["low"]),
            high=None if value.get("high") is None else tuple(float(x) for x in value["high"]),
        )


@dataclass(frozen=True)
class Contract:
    """What a policy sees and does.

    Attributes:
        observation: features of one step by name (LeRobot's names: `observation.state`, `observation.image`, `task`).
        action: the feature of one action, shape (A,).
        rate_hz: control rate at which the actions of a chunk follow each other.
        n_obs_steps: T, how many observations in a row, oldest first, a policy sees.
        action_horizon: H, how many actions a policy returns to be executed.
    """

    observation: dict[str, Feature] = field(hash=False)
    action: Feature
    rate_hz: float
    n_obs_steps: int = 1
    action_horizon: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return {
            "observation": {key: feature.to_json() for key, feature in self.observation.items()},
            "action": self.action.to_json(),
            "rate_hz": self.rate_hz,
            "n_obs_steps": self.n_obs_steps,
            "action_horizon": self.action_horizon,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Contract:
        """Inverse of `to_json`."""
        return cls(
            observation={key: Feature.from_json(item) for key, item in value["observation"].items()},
            action=Feature.from_json(value["action"]),
            rate_hz=float(value["rate_hz"]),
            n_obs_steps=int(value["n_obs_steps"]),
            action_horizon=int(value["action_horizon"]),
        )

    def example_observation(self, batch_size: int | None = None) -> dict[str, Any]:
        """An observation that fits: zeros (and the text "example"), [T, ...] or [B, T, ...] by key."""
        lead = (self.n_obs_steps,) if batch_size is None else (batch_size, self.n_obs_steps)
        return {
            key: np.full(lead, "example") if feature.dtype == TEXT else np.zeros(lead + feature.shape, feature.dtype)
            for key, feature in self.observation.items()
        }

    def check_observation(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """One observation window, checked key by key and cast without loss.

        Args:
            observation: by key an array [T, ...]; where T is 1 the time axis may be left out. Keys that the contract
                does not name are an error, so that a misspelt key is not ignored.

        Returns:
            By key an array [T, ...] of the contract's dtype. Python numbers and lists are taken; a float array is never
            taken for an image, nor a text for a number.

        Raises:
            ContractError: a missing or unknown key, a wrong shape or dtype, a value that is not finite; names the key.
        """
        if not isinstance(observation, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers send anything
            raise ContractError(
                f"observation: got {type(observation).__name__}, expected arrays by name: {self._keys()}"
            )
        for key in observation:
            if key not in self.observation:
                guess = nearest(str(key), self.observation)
                hint = f" (did you mean '{guess}'?)" if guess else ""
                raise ContractError(f"observation key '{key}' is not in the contract{hint}; expected: {self._keys()}")
        missing = [key for key in self.observation if key not in observation]
        if missing:
            raise ContractError(
                f"observation lacks '{missing[0]}'; got: {', '.join(map(str, observation)) or 'nothing'}; "
                f"expected: {self._keys()}"
            )
        return {key: self._check_one(key, feature, observation[key]) for key, feature in self.observation.items()}

    def _keys(self) -> str:
        return ", ".join(self.observation)

    def _check_one(self, key: str, feature: Feature, value: Any) -> np.ndarray:
        if feature.dtype == TEXT:
            return self._check_text(key, value)
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ContractError(f"observation '{key}': not an array ({error})") from error
        expected = (self.n_obs_steps, *feature.shape)
        if self.n_obs_steps == 1 and array.shape == feature.shape:
            array = array[None]
        if array.shape != expected:
            steps = f" ({self.n_obs_steps} observation steps, oldest first)" if self.n_obs_steps > 1 else ""
            raise ContractError(f"observation '{key}': got shape {array.shape}, expected {expected}{steps}")
        target = np.dtype(feature.dtype)
        if array.dtype.kind != "b" and _holds_flag(value):  # numpy has made 1 of a true
            raise ContractError(f"observation '{key}': got true or false among numbers, expected {target}")
        if array.dtype != target:
            array = _cast(key, array, target)
        if target.kind == "f" and not np.isfinite(array).all():
            raise ContractError(f"observation '{key}': {int((~np.isfinite(array)).sum())} values are not finite")
        return array

    def _check_text(self, key: str, value: Any) -> np.ndarray:
        texts = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(texts, str):
            texts = [texts] * self.n_obs_steps
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ContractError(f"observation '{key}': got {type(value).__name__}, expected a text")
        if len(texts) != self.n_obs_steps:
            raise ContractError(
                f"observation '{key}': got {len(texts)} texts, expected one for each of {self.n_obs_steps} steps"
            )
        if any(not text.strip() for text in texts):
            raise ContractError(
                f"observation '{key}': the text is empty, expected what to do, such as 'pick up the cup'"
            )
        return np.asarray(texts, dtype=np.str_)

    def check_same(self, other: Contract, mine: str, theirs: str) -> None:
        """Refuse two contracts that differ in what is seen, done, or at what rate.

        Args:
            other: the contract to compare with.
            mine: what this contract belongs to ("policy"), for the message.
            theirs: what the other belongs to ("environment PushT").

        Raises:
            ContractError: names the first key that differs and both sides.
        """
        for key, feature in self.observation.items():
            if key not in other.observation:
                raise ContractError(
                    f"{theirs} gives no '{key}', which the {mine} needs; it gives: {', '.join(other.observation)}"
                )
            _same_feature(key, feature, other.observation[key], mine, theirs)
        _same_feature("action", self.action, other.action, mine, theirs)
        if abs(self.rate_hz - other.rate_hz) > 1e-6:
            raise ContractError(f"rate_hz: {mine} has {self.rate_hz:g}, {theirs} has {other.rate_hz:g}")


def _holds_flag(value: Any) -> bool:
    """Whether there is a boolean in nested lists."""
    if not isinstance(value, list | tuple):
        return isinstance(value, bool | np.bool_)
    return not {int, float}.issuperset(map(type, value)) and any(_holds_flag(item) for item in value)


def _cast(key: str, array: np.ndarray, target: np.dtype) -> np.ndarray:
    kinds = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}[target.kind]
    if array.dtype.kind not in kinds:
        raise ContractError(f"observation '{key}': got dtype {array.dtype}, expected {target}")
    if target.kind in "iu" and array.size:
        limits = np.iinfo(target)
        if array.min() < limits.min or array.max() > limits.max:
            raise ContractError(f"observation '{key}': values outside {target} ({limits.min} to {limits.max})")
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and the caller refuses that by name
        return array.astype(target)


def _same_feature(key: str, a: Feature, b: Feature, mine: str, theirs: str) -> None:
    for name in ("shape", "dtype", "unit"):
        left, right = getattr(a, name), getattr(b, name)
        if left != right and not (name == "unit" and (not left or not right)):
            raise ContractError(f"'{key}' {name}: {mine} has {left}, {theirs} has {right}")
    if a.names and b.names and a.names != b.names:
        raise ContractError(f"'{key}' names: {mine} has {a.names}, {theirs} has {b.names}")
