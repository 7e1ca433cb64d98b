"""A bundle of a LeRobot policy made ready to act: LeRobot's processors and weights, in Torch.

Letters: B batch, T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from lerobot.policies.utils import populate_queues
from lerobot.utils.constants import ACTION, OBS_IMAGES

from rlsvc.backends.torch_device import choose_device
from rlsvc.backends.torch_lerobot import TASK, build, bundle_config, executed, load_processors, load_weights
from rlsvc.backends.torch_noise import RowNoise, seed_of
from rlsvc.core.contract import TEXT
from rlsvc.core.errors import BundleError, UserError
from rlsvc.core.types import ActionChunk
from rlsvc.data.normalize import Stats
from rlsvc.data.transforms import RobotTransforms
from rlsvc.store.bundle import SAME, Bundle, parts, refuse_another

SAMPLE_STEPS = ("num_inference_steps", "num_steps")
"""What LeRobot's configurations call the number of denoising steps."""


def as_batch(observation: Mapping[str, Any], device: torch.device, *, window: bool) -> dict[str, Any]:
    """Observations as LeRobot's processors take them.

    Args:
        observation: by name [B, T, ...], raw: numpy or Torch; texts as numpy or as a list of B.
        device: where the tensors go.
        window: whether the policy sees the T axis; else T is 1.

    Returns:
        Images [B, (T,) C, H, W] float32 in [0, 1], vectors [B, (T,) ...] float32, texts a list of B.
    """
    batch: dict[str, Any] = {}
    for name, value in observation.items():
        if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in "UO"):
            batch[name] = [str(text if isinstance(text, str) else np.asarray(text).ravel()[-1]) for text in value]
            continue
        tensor = torch.as_tensor(value).to(device, non_blocking=True)
        tensor = tensor.movedim(-1, -3).float() / 255.0 if _is_image(tensor) else tensor.float()
        batch[name] = tensor if window else tensor[:, 0]
    return batch


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.ndim >= 4


class TorchRunner:
    """A LeRobot policy for batches of any size; the `rlsvc.runner.Runner` of its bundles."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_sizes: tuple[int, ...] = (1,),
        sample_steps: int | None = None,
        group: str | None = None,
        device: str = "auto",
    ) -> None:
        """Put the weights on the device.

        Args:
            bundle: verified.
            batch_sizes: that `warm_up` tries, ascending; none is compiled.
            sample_steps: denoising steps; None takes the policy's own.
            group: the normaliser's, of which there is one.
            device: auto, cpu or gpu.

        Raises:
            BundleError: files or weights that do not fit, or a configuration that acts in a way of its own.
            UserError: denoising steps of a policy that has none, or a package that is missing.
        """
        bundle.normalizer.group_index(group)
        self.batch_sizes = tuple(sorted(batch_sizes))
        self.contract, self.version, self.robot = bundle.contract, bundle.id, bundle.robot
        self.name = str(bundle.policy.get("type"))
        self._same = parts(bundle, SAME)
        self._transforms, self._normalizer = RobotTransforms(bundle.robot), bundle.normalizer
        config = bundle_config(bundle.path, choose_device(device))
        if config.type != self.name:
            raise BundleError(f"{bundle.path}: config.json is of '{config.type}', bundle.json of '{self.name}'")
        if getattr(config, "temporal_ensemble_coeff", None) is not None:
            raise BundleError(
                f"{bundle.path}: temporal_ensemble_coeff is set, with which a policy keeps chunks between requests; "
                "set it to null in config.json, and n_action_steps to what is executed of a chunk"
            )
        if sample_steps is not None:
            field = next((name for name in SAMPLE_STEPS if hasattr(config, name)), None)
            if field is None:
                raise UserError(f"sample_steps: LeRobot's {self.name} does not denoise")
            setattr(config, field, sample_steps)
        self._device = torch.device(str(config.device))
        self._window = config.observation_delta_indices is not None
        self._narrow = bundle.precision == "bf16"
        self._executed = executed(config)
        self._policy = build(config, bundle.params).eval()
        self._before, self._after = load_processors(config, bundle.path)

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """There is none: history and chunk, which LeRobot keeps in a policy between requests, are the caller's."""
        return ()

    def set_weights(self, bundle: Bundle) -> None:
        """Act with another bundle of the same policy from now on.

        Raises:
            BundleError: weights, contract or specification are those of another policy.
        """
        refuse_another(bundle, self._same, self.version)
        load_weights(self._policy, bundle.params)
        config = bundle_config(bundle.path, str(self._device))
        self._before, self._after = load_processors(config, bundle.path)
        self._normalizer, self.version = bundle.normalizer, bundle.id

    @torch.inference_mode()
    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`; there is no carry."""
        del carry
        encoded = self._transforms.encode_observation(observation)
        batch = as_batch(encoded, self._device, window=self._window)
        batch.setdefault(TASK, [""] * len(seeds))
        rows = [seed_of(int(seed), int(step)) for seed, step in zip(seeds, steps, strict=True)]
        narrow = torch.autocast(self._device.type, torch.bfloat16) if self._narrow else nullcontext()
        with RowNoise(rows), narrow:
            chunk = self._chunk(self._before(batch))[:, : self._executed]
        action = self._after(chunk.float()).float().cpu().numpy()
        return ActionChunk(self._transforms.to_robot(action, encoded), self.version)

    def _chunk(self, batch: dict[str, Any]) -> torch.Tensor:
        """[B, H, A] normalised. Policies keep the windows that they see in queues, which are filled here."""
        policy = self._policy
        policy.reset()
        seen = {name: value for name, value in batch.items() if name.startswith("observation.")}
        images = list(policy.config.image_features)
        queues = getattr(policy, "_queues", None)
        if self.contract.n_obs_steps == 1 or not queues:
            return policy.predict_action_chunk(seen)
        newest: dict[str, Any] = {}
        for step in range(self.contract.n_obs_steps):
            newest = {name: value[:, step] for name, value in seen.items()}
            if images:
                newest[OBS_IMAGES] = torch.stack([newest[name] for name in images], dim=-4)
            policy._queues = populate_queues(queues, newest, exclude_keys=[ACTION])  # pyright: ignore
        return policy.predict_action_chunk(newest)

    def _random_state(self) -> list[torch.Tensor]:
        on_gpu = self._device.type == "cuda"
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._device)] if on_gpu else [])]

    def training_statistics(self) -> dict[str, Stats]:
        """By observed feature the statistics of its training values, in the policy's numbers."""
        return {
            name: self._normalizer.stats[name][0]
            for name, feature in self.contract.observation.items()
            if name in self._normalizer.stats and feature.dtype != TEXT and self._known(name)
        }

    def _known(self, name: str) -> bool:
        stats = self._normalizer.stats[name][0]
        return stats.count > 0 or stats.min is not None or self._normalizer.modes[name] != "identity"

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """The policy's numbers for a robot's, of one feature; see `RobotTransforms.encode`."""
        return self._transforms.encode(name, x)

    def warm_up(self) -> None:
        """Act once with every batch size.

        Raises:
            BundleError: the policy drew random numbers that no row decides, so that its answers would depend on which
                requests it answers together.
        """
        before = self._random_state()
        for size in self.batch_sizes:
            zeros = np.zeros(size, np.int64)
            self.act(self.contract.example_observation(size), zeros, zeros)
        if not all(map(torch.equal, before, self._random_state())):
            raise BundleError(
                f"LeRobot's {self.name} draws random numbers in a way that is not known here "
                "(rlsvc/backends/torch_noise.py), so that no request's seed decides them"
            )
