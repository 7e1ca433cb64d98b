"""One rank of a Torch learner group: data on the device, a LeRobot policy that learns, and the orders it carries out.

Ranks are data parallel (DDP), or cut the weights among themselves (FSDP2, `learner.fsdp`); every rank draws the same
window numbers and takes its share of them, so that the loss does not depend on the number of ranks, up to rounding.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlsvc.backends.torch_device import choose_device
from rlsvc.backends.torch_imitation import TorchImitation
from rlsvc.backends.torch_lerobot import (
    WEIGHTS,
    build,
    folder_files,
    horizon,
    make_config,
    read_weights,
    weights_of,
)
from rlsvc.backends.torch_noise import seed_of
from rlsvc.backends.torch_processors import lerobot_stats, make_processors, with_modes
from rlsvc.backends.torch_windows import TextIds, TorchWindows
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.data.mixture import load_demonstrations
from rlsvc.spec.run import RunSpec
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import LEROBOT_WEIGHTS, write_bundle
from rlsvc.train.learner_data import joined
from rlsvc.train.orchestrator import Order

STATE = "state.safetensors"


class TorchLearner:
    """A rank. Reads the data, restores the newest checkpoint of the run if there is one, then executes orders."""

    def __init__(self, spec: RunSpec, run_dir: Path, contract: Contract | None = None) -> None:
        """Load everything that an update needs.

        Args:
            spec: of the run.
            run_dir: the run's folder.
            contract: of the environment that the policy is for; None takes the dataset's.

        Raises:
            UserError: data, contract or checkpoint that do not fit; by name.
        """
        given = spec.policy
        assert spec.data is not None
        assert isinstance(given, LeRobotPolicySpec)
        self.spec, self.run_dir, self.clock = spec, run_dir, 0
        device = torch.device(choose_device(spec.device))
        if device.type == "cuda":  # as lerobot-train has it
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
        bare = make_config(given, None, device=device.type, precision=spec.precision)
        texts = TextIds()
        found = load_demonstrations(
            spec.data,
            n_obs_steps=spec.policy.n_obs_steps,
            horizon=horizon(bare),
            action_horizon=spec.policy.n_action_steps,
            prepare=texts,
            robot=spec.robot,
        )
        self.contract = joined(found.contract, contract, spec)
        config = make_config(given, self.contract, device=device.type, precision=spec.precision)
        self.normalizer = with_modes(found.normalizer, config)
        self._processors = make_processors(config, lerobot_stats(found.normalizer, self.contract))
        torch.manual_seed(seed_of(spec.seed, 0))
        weights = None if given.pretrained is None else read_weights(Path(given.pretrained) / WEIGHTS)
        policy = build(config, weights)
        where = {"placement": spec.data.placement, "window": config.observation_delta_indices is not None}
        dropped = int(getattr(config, "drop_n_last_frames", 0))
        self._train = TorchWindows(found.train, self.contract, texts, device, drop_last=dropped, **where)
        self._held_back = (
            None if found.validation is None else TorchWindows(found.validation, self.contract, texts, device, **where)
        )
        self.algorithm = TorchImitation(
            policy,
            self._processors[0],
            spec.algo,
            seed=spec.seed,
            total_steps=sum(phase.num_updates for phase in spec.curriculum),
            precision=spec.precision,
            fsdp=spec.learner.fsdp,
        )
        if committed := checkpoint.steps(self.checkpoints):
            self.clock = committed[-1]
            self._restore(self.checkpoints / str(self.clock))

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def step(self) -> int:
        """Updates done."""
        return self.algorithm.step

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        told = torch.tensor(value, dtype=torch.int64, device=device)
        dist.broadcast(told, 0)
        return int(told)

    def execute(self, order: Order) -> dict[str, Any]:
        """Carry out one order and wait for the device; the result is the same on every rank."""
        result: dict[str, Any] = {}
        if order.kind == "update":
            result = self.algorithm.update(self._train, order.num_updates)
        elif order.kind == "validate" and self._held_back is not None:
            result = self.algorithm.validate(self._held_back)
        elif order.kind == "export":
            result = {"bundle": str(self.export(self.run_dir / "bundles" / str(order.step), order.step))}
        elif order.kind == "checkpoint":
            result = {"checkpoint": str(self._save(order))}
        self.clock = order.step
        return result

    def export(self, path: Path, clock: int | None = None) -> Path:
        """Write the bundle of the acting weights; the first rank alone does. `clock`: None is the last order's."""
        state = self.algorithm.acting_state()
        if self._first:
            run = {"project": self.spec.project, "name": self.spec.name, "seed": self.spec.seed}
            run |= {"step": self.clock if clock is None else clock, "updates": self.step}
            write_bundle(
                path,
                policy={**self.spec.policy.model_dump(mode="json"), "pretrained": None},
                contract=self.contract,
                normalizer=self.normalizer,
                params=weights_of(state),
                precision=self.spec.precision,
                run=run,
                files=folder_files(self.algorithm.policy.config, self._processors),
                robot=self.spec.robot,
                weights=LEROBOT_WEIGHTS,
            )
        return path

    @property
    def _first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _save(self, order: Order) -> Path:
        """Write and commit a checkpoint as `rlsvc.store.checkpoint` does, with safetensors for orbax."""
        final = self.checkpoints / str(order.step)
        # One rank's answer: another may look when the first has committed already, and would then wait for nobody.
        if self.agree(int(order.step in checkpoint.steps(self.checkpoints))):
            return final
        tensors, plain = self.algorithm.state()
        if self._first:
            with checkpoint.begun(self.checkpoints, order.step, sum(x.nbytes for x in tensors.values())) as partial:
                save_file(tensors, partial / STATE)
                with (partial / STATE).open("rb") as written:
                    os.fsync(written.fileno())
                checkpoint.commit(partial, order.step, {"torch": plain, **order.meta})
        self.agree(0)
        return final

    def _restore(self, path: Path) -> None:
        meta = checkpoint.load_meta(path.parent, int(path.name))
        try:
            tensors, plain = load_file(path / STATE), meta["torch"]
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"checkpoint {path} cannot be read ({error}). It is damaged; delete this folder to resume from the one "
                "before it."
            ) from error
        self.algorithm.load(tensors, plain, str(path))
