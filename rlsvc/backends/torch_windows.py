"""Windows of demonstrations as Torch batches, cut on the device where the data fits there.

The same windows as `rlsvc.data.windows`; which ones an update draws follows from the run's seed and the update's number
alone, so that it depends neither on ranks nor on where the data lies, and resuming needs no cursor.

Letters: N steps of all episodes, W windows, K updates, B batch, T observation steps, H actions of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from rlsvc.backends.torch_runner import as_batch
from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import DatasetError
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows

DEVICE_SHARE = 0.5
"""Largest share of accelerator memory that "auto" placement gives to the dataset."""


class TextIds:
    """Texts as numbers, since arrays of texts lie on no device; the `rlsvc.data.mixture.Prepare` of these policies."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}

    def fit(self, chunks: Windows, normalizer: Normalizer) -> None:
        """Nothing is learnt."""

    def __call__(
        self, observation: dict[str, np.ndarray], normalizer: Normalizer, group: int, chunks: Windows | None = None
    ) -> dict[str, Any]:
        """The same columns, texts [N] as int32 indices into `texts`."""
        out = {}
        for name, column in observation.items():
            if column.dtype.kind not in "UO":
                out[name] = column
                continue
            known = self.texts.setdefault(name, [])
            values, inverse = np.unique(column.astype(str), return_inverse=True)
            known += [str(value) for value in values if str(value) not in known]
            out[name] = np.array([known.index(str(value)) for value in values], np.int32)[inverse]
        return out


class TorchWindows:
    """The windows of a run, on the host or on a device."""

    def __init__(
        self,
        windows: Windows,
        contract: Contract,
        texts: TextIds,
        device: torch.device,
        *,
        placement: str,
        window: bool,
        drop_last: int = 0,
    ) -> None:
        """Take host windows.

        Args:
            windows: in host memory.
            contract: names, and which are texts.
            texts: that made numbers of them.
            device: where batches go.
            placement: device, host, or auto for the device when half of its memory holds them.
            window: whether the policy sees the T axis.
            drop_last: steps at the end of every episode around which no window is drawn.

        Raises:
            DatasetError: no window is left of a dataset.
        """
        if drop_last:
            keep = windows.anchor < windows.end - drop_last
            pairs = zip(windows.offset[:-1], windows.offset[1:], strict=True)
            if not all(keep[first:end].any() for first, end in pairs):
                raise DatasetError(
                    f"policy.config.drop_n_last_frames: without the last {drop_last} steps of every episode nothing is "
                    "left of a dataset; lower it"
                )
            windows = windows.select(keep)
        self._windows, self._device, self._window = windows, device, window
        self._texts = {
            name: texts.texts[name] for name, feature in contract.observation.items() if feature.dtype == TEXT
        }
        fits = device.type == "cpu" or windows.nbytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
        self.on_device = placement == "device" or (placement == "auto" and fits)
        if self.on_device:
            columns = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in windows.columns.items()}
            self._columns = {name: x.to(device) for name, x in columns.items()}
            self._rows = [torch.from_numpy(x).long().to(device) for x in (windows.anchor, windows.start, windows.end)]

    @property
    def num_windows(self) -> int:
        """W."""
        return self._windows.num_windows

    def draw(self, seed: int, step: int, size: int) -> np.ndarray:
        """[B] window numbers of an update: a dataset by weight, then one of its windows uniformly, with replacement."""
        rng = np.random.default_rng((seed, step))
        offset, edges = self._windows.offset, np.cumsum(self._windows.weight)
        which = np.searchsorted(edges[:-1], rng.random(size), side="right")
        return rng.integers(offset[which], offset[which + 1])

    def valid(self, index: np.ndarray) -> int:
        """How many actions of these windows are not padded."""
        w = self._windows
        first = w.anchor[index] + 1 - w.n_obs_steps
        return int((np.minimum(first + w.horizon, w.end[index]) - np.maximum(first, w.start[index])).sum())

    def batches(self, index: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """A batch for each [B] window numbers, as LeRobot's preprocessors take them; from the host one ahead."""
        if self.on_device:
            for rows in torch.from_numpy(np.stack(index)).to(self._device):
                yield self._on_device(rows)
            return
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self._on_host, index[0])
            for rows in (*index[1:], None):
                batch = coming.result()
                if rows is not None:
                    coming = ahead.submit(self._on_host, rows)
                yield batch

    def _on_device(self, index: torch.Tensor) -> dict[str, Any]:
        anchor, start, end = (x[index][:, None] for x in self._rows)
        w = self._windows
        first = 1 - w.n_obs_steps
        steps = anchor + torch.arange(first, first + w.horizon, device=self._device)
        last = end - 1
        rows = torch.clamp(anchor + torch.arange(first, 1, device=self._device), start, last)
        observation = {name: self._columns[name][rows] for name in w.observation}
        action = self._columns[w.action][torch.clamp(steps, start, last)]
        return self._batch(observation, action, (steps < start) | (steps >= end))

    def _on_host(self, index: np.ndarray) -> dict[str, Any]:
        made = self._windows.gather(index)
        observation = {name: self._pinned(x) for name, x in made["observation"].items()}
        return self._batch(observation, self._pinned(made["action"]), self._pinned(~made["mask"]))

    def _pinned(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _batch(
        self, observation: dict[str, torch.Tensor], action: torch.Tensor, padded: torch.Tensor
    ) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name, texts in self._texts.items():
            told[name] = [texts[i] for i in observation.pop(name)[:, -1].tolist()]
        batch = as_batch(observation | told, self._device, window=self._window)
        batch.setdefault("task", [""] * len(action))
        batch["action"] = action.to(self._device, non_blocking=True)
        return batch | {"action_is_pad": padded.to(self._device, non_blocking=True)}
