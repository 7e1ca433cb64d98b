"""Random numbers by row, for policies that ask Torch for them: in acting one generator a row, in training one a batch.

A LeRobot policy draws its noise with torch.randn and its like, for a whole batch. While one of the modes below is
entered, draws whose leading axis is the batch's come row by row from where they should; all others, such as dropout's
masks, come from Torch's own generator as ever. The modes are of their thread alone.

Letters: B rows of the batch, N of the whole batch over all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

Draw = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
"""Numbers of a shape, from a generator, on its device."""


def seed_of(*numbers: int) -> int:
    """A generator's seed that follows from these numbers, each at least 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class ByRow(TorchFunctionMode):
    """Draws with the batch as their leading axis go to `rows`."""

    def rows(self, count: int) -> bool:
        """Whether `count` rows are those of the batch."""
        raise NotImplementedError

    def draw(self, shape: tuple[int, ...], draw: Draw, device: torch.device) -> torch.Tensor:
        """Numbers [count, ...] for it."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As Torch calls it for every function."""
        kwargs = kwargs or {}
        reader = READERS.get(func)
        if reader is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return reader(self, func, args, kwargs)

    def from_rows(self, shape: Sequence[int], draw: Draw, device: Any, dtype: Any) -> torch.Tensor | None:
        """What a function gives that draws numbers of this shape; None where the rows are not the batch's."""
        if not shape or not self.rows(int(shape[0])):
            return None
        made = self.draw(tuple(int(n) for n in shape), draw, torch.device(device or torch.get_default_device()))
        return made if dtype is None else made.to(dtype)


def _shape(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if "size" in kwargs:
        return tuple(kwargs["size"])
    return tuple(args[0]) if args and not isinstance(args[0], int) else tuple(args)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _new(draw: Draw) -> Callable[..., Any]:
    """torch.randn, torch.rand."""

    def read(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = mode.from_rows(_shape(args, kwargs), draw, kwargs.get("device"), kwargs.get("dtype"))
        return func(*args, **kwargs) if made is None else made

    return read


def _like(draw: Draw) -> Callable[..., Any]:
    """torch.randn_like, torch.rand_like."""

    def read(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        like = args[0]
        device, dtype = kwargs.get("device") or like.device, kwargs.get("dtype") or like.dtype
        made = mode.from_rows(like.shape, draw, device, dtype)
        return func(*args, **kwargs) if made is None else made

    return read


def _randint(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch.randint(high, size), torch.randint(low, high, size)."""
    numbers = [x for x in args if isinstance(x, int)]
    shape = kwargs.get("size") or next((x for x in args if not isinstance(x, int)), ())
    low, high = kwargs.get("low"), kwargs.get("high")
    low = low if low is not None else numbers[0] if len(numbers) + (high is not None) > 1 else 0
    high = numbers[-1] if high is None else high

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(int(low), int(high), shape, generator=generator, device=generator.device)

    made = mode.from_rows(tuple(shape), draw, kwargs.get("device"), kwargs.get("dtype"))
    return func(*args, **kwargs) if made is None else made


def _torch_normal(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch.normal(mean, std, size), and with tensors for mean or std."""
    names = dict(zip(("mean", "std", "size"), args, strict=False)) | kwargs
    mean, std = names.get("mean", 0.0), names.get("std", 1.0)
    tensor = next((x for x in (mean, std) if isinstance(x, torch.Tensor)), None)
    if tensor is not None:
        shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, torch.Tensor)))
        made = mode.from_rows(shape, _normal, tensor.device, tensor.dtype)
    else:
        made = mode.from_rows(tuple(names["size"]), _normal, kwargs.get("device"), kwargs.get("dtype"))
    return func(*args, **kwargs) if made is None else made * std + mean


def _multinomial(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch.multinomial by the inverse of the cumulated weights, where rows may be drawn twice or one is drawn."""
    names = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | kwargs
    weights, count = names["input"], int(names["num_samples"])
    made = None
    if weights.ndim == 2 and (count == 1 or names.get("replacement")):
        made = mode.from_rows((len(weights), count), _uniform, weights.device, torch.float64)
    if made is None:
        return func(*args, **kwargs)
    edges = weights.double().cumsum(-1)
    return torch.searchsorted(edges, made * edges[:, -1:], right=True).clamp_max(weights.shape[-1] - 1)


def _in_place(draw: Draw, low: str, high: str) -> Callable[..., Any]:
    """Tensor.normal_, Tensor.uniform_."""

    def read(mode: ByRow, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        names = {low: 0.0, high: 1.0} | dict(zip((low, high), args[1:], strict=False)) | kwargs
        made = mode.from_rows(tensor.shape, draw, tensor.device, tensor.dtype)
        if made is None:
            return func(*args, **kwargs)
        scale = names[high] if low == "mean" else names[high] - names[low]
        return tensor.copy_(made * scale + names[low])

    return read


READERS: dict[Any, Callable[..., Any]] = {
    torch.randn: _new(_normal),
    torch.rand: _new(_uniform),
    torch.randn_like: _like(_normal),
    torch.rand_like: _like(_uniform),
    torch.randint: _randint,
    torch.normal: _torch_normal,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.normal_: _in_place(_normal, "mean", "std"),
    torch.Tensor.uniform_: _in_place(_uniform, "from", "to"),
}
"""The functions that draw, and what reads their arguments."""


class RowNoise(ByRow):
    """In acting: every row has a generator of its own, so that its noise does not depend on its batch."""

    def __init__(self, seeds: Sequence[int]) -> None:
        """`seeds`: one a row, B of them."""
        super().__init__()
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def rows(self, count: int) -> bool:
        """A row may have several (one for each observation step)."""
        return count > 0 and count % len(self._generators) == 0

    def draw(self, shape: tuple[int, ...], draw: Draw, device: torch.device) -> torch.Tensor:
        """On the host, then moved."""
        each = shape[0] // len(self._generators)
        rows = [draw((each, *shape[1:]), generator) for generator in self._generators]
        return torch.cat(rows).to(device)


class ShardNoise(ByRow):
    """In training: the noise of the whole batch is drawn in every shard, which takes its own rows of it.

    So a batch has the same noise in one shard and in many, and each of its rows another.
    """

    def __init__(self, seed: int, shard: int, shards: int, size: int, device: torch.device) -> None:
        """One shard of a batch.

        Args:
            seed: of the whole batch.
            shard: number of this one.
            shards: how many there are.
            size: B, rows of a shard.
            device: where the numbers are drawn.
        """
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)
        self._shard, self._shards, self._size = shard, shards, size

    def rows(self, count: int) -> bool:
        """Exactly the shard's."""
        return count == self._size

    def draw(self, shape: tuple[int, ...], draw: Draw, device: torch.device) -> torch.Tensor:
        """The shard's rows of what is drawn for N."""
        whole = draw((shape[0] * self._shards, *shape[1:]), self._generator)
        return whole[self._shard * shape[0] : (self._shard + 1) * shape[0]].to(device)


class PaddingMask(torch.Tensor):
    """`action_is_pad` of a shard, [B, H] bool, whose count of valid actions is the whole batch's mean over shards.

    LeRobot's policies divide the sum over valid actions by `(~action_is_pad).sum()` of their batch. With another number
    of them in every shard the mean of the shards' means is not the batch's; with their mean it is.
    """

    valid: float
    inverted: bool

    @staticmethod
    def of(mask: torch.Tensor, valid: float, inverted: bool = False) -> torch.Tensor:
        """`valid`: actions of a shard that are not padded, in the mean over all shards."""
        made = mask.as_subclass(PaddingMask)
        made.valid, made.inverted = valid, inverted
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Inverting and reshaping keep the count; a sum over everything gives it."""
        mask = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            made = func(*args, **(kwargs or {}))
        if not isinstance(mask, PaddingMask):
            return made
        if func in (torch.Tensor.__invert__, torch.bitwise_not, torch.logical_not, torch.Tensor.logical_not):
            return cls.of(made, mask.valid, not mask.inverted)
        if func in (torch.Tensor.unsqueeze, torch.unsqueeze):
            return cls.of(made, mask.valid, mask.inverted)
        if func in (torch.Tensor.sum, torch.sum) and len(args) == 1 and not kwargs and mask.inverted:
            return torch.tensor(mask.valid, device=made.device)
        return made
