"""Gradient steps on a LeRobot policy's own loss: LeRobot's optimizer and schedule, on one rank or several.

An update draws a batch, has LeRobot's preprocessor normalise it, averages the gradient over its shards (ranks times
micro-batches), clips, and steps; an average of the weights may act. Batch and noise follow from seed and update number
alone. A shard's loss is made such that the mean over shards is the batch's loss (rlsvc/backends/torch_noise.py): what
is left to a shard alone are dropout's masks and the random crop, which LeRobot draws once for a whole batch.

Letters: B rows of a shard, K updates of a call.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lerobot.policies.pretrained import PreTrainedPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from rlsvc.backends.torch_noise import PaddingMask, ShardNoise, seed_of
from rlsvc.backends.torch_windows import TorchWindows
from rlsvc.core.errors import SpecError, UserError
from rlsvc.spec.optim import EmaSpec, ScheduleSpec
from rlsvc.spec.torch_lerobot import TorchImitationSpec

VALIDATION = 1024
"""Most windows of a validation."""
NOISE, SHARD, FIXED = 1, 2, 3
"""What a seed is for: a batch's noise, what a shard draws alone, validation."""


def schedule_factor(spec: ScheduleSpec, total_steps: int, step: int) -> float:
    """Learning rate of an update as a share of that at the top; see `rlsvc.algos.optim.make_schedule`."""
    decay_steps = spec.decay_steps or total_steps
    warmup = min(spec.warmup_steps, max(decay_steps - 1, 0))
    if step < warmup:
        return step / warmup
    if spec.name == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(decay_steps - warmup, 1))
    return spec.final_fraction + (1 - spec.final_fraction) * 0.5 * (1 + math.cos(math.pi * share))


def ema_decay(spec: EmaSpec, step: int) -> float:
    """Decay after `step` updates; see `rlsvc.algos.optim.ema_decay`."""
    return min(max(1 - (1 + step) ** -spec.power, 0.0), spec.max_decay)


class TorchImitation:
    """A policy that learns.

    Attributes:
        policy: LeRobot's, with its own names of weights.
        step: updates done.
    """

    def __init__(
        self,
        policy: PreTrainedPolicy,
        preprocessor: Any,
        spec: TorchImitationSpec,
        *,
        seed: int,
        total_steps: int,
        precision: str = "fp32",
        fsdp: int = 1,
    ) -> None:
        """Wrap the policy for the process group, if there is one, and build its optimizer.

        Args:
            policy: on its device, the same weights on every rank.
            preprocessor: LeRobot's.
            spec: of the algorithm.
            seed: of batches and noise.
            total_steps: of the run, for the schedule.
            precision: bf16 computes losses in mixed precision.
            fsdp: ranks that share one copy of the weights.

        Raises:
            SpecError: a pattern that fits no weight or module, or a policy with an optimizer of several parts.
        """
        self.policy, self.spec, self.seed, self.step = policy, spec, seed, 0
        self._before, self._narrow = preprocessor, precision == "bf16"
        self._device = next(policy.parameters()).device
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._begun = _counts(policy)
        self._freeze()
        policy.train()
        if spec.compile:
            policy.compile()
        self._fsdp = fsdp > 1
        if self._fsdp:
            self._cut(fsdp)
        self._module = policy if self._fsdp or self._ranks == 1 else self._replicated()
        self._optimizer, self._schedule, self._clip = self._build(total_steps)
        self._learnt = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._ema = {name: p.detach().clone() for name, p in self._learnt.items()} if spec.ema else None

    @property
    def shards(self) -> int:
        """Parts of a batch whose gradients are averaged."""
        return self._ranks * self.spec.accumulation

    def _freeze(self) -> None:
        names = [name for name, _ in self.policy.named_parameters()]
        for pattern in self.spec.freeze:
            hits = [name for name in names if _matches("algo.freeze", pattern, name)]
            if not hits:
                raise SpecError(f"algo.freeze: '{pattern}' matches no weight; there are: {', '.join(names[:5])}, ...")
            for name in hits:
                self.policy.get_parameter(name).requires_grad_(False)
        if not any(p.requires_grad for p in self.policy.parameters()):
            raise SpecError("algo.freeze: nothing is left to train")

    def _cut(self, fsdp: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((fsdp,), ("fsdp",)) if fsdp == self._ranks else ((self._ranks // fsdp, fsdp), ("data", "fsdp"))
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        modules = dict(self.policy.named_modules())
        for pattern in self.spec.fsdp_blocks:
            hits = [name for name in modules if name and _matches("algo.fsdp_blocks", pattern, name)]
            if not hits:
                raise SpecError(f"algo.fsdp_blocks: '{pattern}' matches no module of the policy")
            for name in hits:
                fully_shard(modules[name], mesh=mesh)
        fully_shard(self.policy, mesh=mesh)

    def _replicated(self) -> DistributedDataParallel:
        # As LeRobot has it: policies leave weights out of some losses.
        return DistributedDataParallel(self.policy, find_unused_parameters=True)

    def _build(self, total_steps: int) -> tuple[torch.optim.Optimizer, Any, float]:
        spec, config = self.spec, self.policy.config
        preset = config.get_optimizer_preset()
        if spec.learning_rate is not None:
            preset = replace(preset, lr=spec.learning_rate)
        optimizer = preset.build(self.policy.get_optim_params())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(f"policy.type: LeRobot's {config.type} has several optimizers; torch_imitation steps one")
        if self._device.type == "cuda" and isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            for group in optimizer.param_groups:
                group |= {"fused": True, "foreach": False}
        if spec.schedule is not None:
            chosen = spec.schedule
            schedule = LambdaLR(optimizer, lambda step: schedule_factor(chosen, total_steps, step))
        else:
            given = config.get_scheduler_preset()
            schedule = None if given is None else given.build(optimizer, total_steps)
        return optimizer, schedule, preset.grad_clip_norm if spec.grad_clip is None else spec.grad_clip

    def update(self, data: TorchWindows, num_updates: int) -> dict[str, float]:
        """K gradient steps; metrics averaged over them and over all ranks.

        `loss`, `grad_norm` before clipping, `learning_rate`, and what the policy's loss tells besides.
        """
        self.policy.train()
        batch, parts = self.spec.batch_size, self.spec.accumulation
        drawn = [data.draw(self.seed, self.step + k, batch) for k in range(num_updates)]
        mine = [rows.reshape(self.shards, -1)[self._rank * parts : (self._rank + 1) * parts] for rows in drawn]
        batches = data.batches([part for rows in mine for part in rows])
        totals: dict[str, list[torch.Tensor]] = {}
        for rows in drawn:
            valid = data.valid(rows) / self.shards
            for part in range(parts):
                self._accumulate(next(batches), part, valid, totals)
            _append(totals, "grad_norm", self._clipped())
            _append(totals, "learning_rate", self._optimizer.param_groups[0]["lr"])
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if self._schedule is not None:
                self._schedule.step()
            if callable(after := getattr(self.policy, "update", None)):
                after()
            self._average()
            self.step += 1
        return self._means(totals)

    def _accumulate(
        self, batch: dict[str, Any], part: int, valid: float, totals: dict[str, list[torch.Tensor]]
    ) -> None:
        """Add the gradient of one micro-batch."""
        last = part == self.spec.accumulation - 1
        if self._fsdp:
            self.policy.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue] - fully_shard added it
        alone = contextlib.nullcontext()
        if not last and isinstance(self._module, DistributedDataParallel):
            alone = self._module.no_sync()
        with alone:
            loss, told = self._loss(batch, self._rank * self.spec.accumulation + part, valid)
            (loss / self.spec.accumulation).backward()
        _append(totals, "loss", loss.detach())
        for name, value in (told or {}).items():
            if name != "loss" and (isinstance(value, int | float) or getattr(value, "ndim", 1) == 0):
                _append(totals, name, value)

    def _loss(self, batch: dict[str, Any], shard: int, valid: float) -> tuple[torch.Tensor, Mapping[str, Any] | None]:
        size = len(batch["action_is_pad"])
        batch = self._before(batch)
        noise = seed_of(self.seed, self.step, NOISE)
        by_row = contextlib.nullcontext()
        if self.shards == 1:
            torch.manual_seed(noise)
        else:
            torch.manual_seed(seed_of(self.seed, self.step, SHARD, shard))
            if not self.spec.compile:
                batch["action_is_pad"] = PaddingMask.of(batch["action_is_pad"], valid)
                by_row = ShardNoise(noise, shard, self.shards, size, self._device)
        with by_row, self._autocast():
            return self._module(batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._narrow)

    def _clipped(self) -> torch.Tensor:
        """The gradient's global norm before it is clipped."""
        largest = self._clip if self._clip > 0 else math.inf
        return _whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), largest))

    @torch.no_grad()
    def _average(self) -> None:
        if self._ema is not None and self.spec.ema is not None:
            share = 1 - ema_decay(self.spec.ema, self.step)
            for name, average in self._ema.items():
                average.lerp_(self._learnt[name].detach(), share)

    def _means(self, totals: Mapping[str, list[torch.Tensor]]) -> dict[str, float]:
        names = sorted(totals)
        values = [torch.stack([x.float().to(self._device) for x in totals[name]]).mean() for name in names]
        means = torch.stack(values)
        if self._ranks > 1:
            dist.all_reduce(means)
            means /= self._ranks
        return dict(zip(names, means.tolist(), strict=True))

    @torch.no_grad()
    def validate(self, data: TorchWindows) -> dict[str, float]:
        """Mean loss of the acting weights over up to 1024 windows, the same ones and the same noise every time."""
        count, size = min(VALIDATION, data.num_windows), max(1, self.spec.batch_size // self.shards)
        index = torch.arange(count).numpy() * data.num_windows // count
        parts = [index[i : i + size] for i in range(0, count, size)]
        kept, counts = {name: buffer.clone() for name, buffer in self.policy.named_buffers()}, _counts(self.policy)
        frozen = [p for p in self.policy.parameters() if not p.requires_grad]
        total = torch.zeros((), device=self._device)
        with self._acting():
            self.policy.eval()
            for number, (rows, batch) in enumerate(zip(parts, data.batches(parts), strict=True)):
                torch.manual_seed(seed_of(self.seed, number, FIXED))
                with self._autocast():
                    loss, _ = self.policy(self._before(batch))
                total += loss.detach() * len(rows)
        # Some count their calls, and freeze themselves after so many (VQ-BeT).
        for name, buffer in self.policy.named_buffers():
            buffer.copy_(kept[name])
        _set_counts(self.policy, counts)
        for p in self.policy.parameters():
            p.requires_grad_(not any(p is other for other in frozen))
        self.policy.train()
        return {"loss": float(total) / count}

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """The averaged weights in the policy, meanwhile."""
        if self._ema is None:
            yield
            return
        kept = {name: p.detach().clone() for name, p in self._learnt.items()}
        for name, p in self._learnt.items():
            p.data.copy_(self._ema[name])
        try:
            yield
        finally:
            for name, p in self._learnt.items():
                p.data.copy_(kept[name])

    @torch.no_grad()
    def acting_state(self) -> dict[str, torch.Tensor]:
        """The whole policy's weights and buffers that act, on the host; every rank has to ask."""
        with self._acting():
            return {name: _whole(x).detach().cpu().clone() for name, x in self.policy.state_dict().items()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that training goes on from: tensors by name on the host, and plain values; every rank has to ask."""
        tensors = {f"policy/{name}": x for name, x in self.policy.state_dict().items()}
        tensors |= {f"average/{name}": x for name, x in (self._ema or {}).items()}
        for name, p in self.policy.named_parameters():
            for key, value in self._optimizer.state.get(p, {}).items():
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        schedule = None if self._schedule is None else self._schedule.state_dict()
        plain = {key: x for key, x in (schedule or {}).items() if key != "lr_lambdas"}
        rates = [group["lr"] for group in self._optimizer.param_groups]
        whole = {name: _whole(x).detach().cpu().clone() for name, x in tensors.items()}
        counts = {name: x for name, x in _counts(self.policy).items() if self._begun.get(name) != x}
        frozen = [name for name, p in self.policy.named_parameters() if not p.requires_grad]
        return whole, {"updates": self.step, "schedule": plain, "rates": rates, "counts": counts, "frozen": frozen}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], where: str) -> None:
        """Go on from what `state` gave.

        Raises:
            UserError: it is of another policy or optimizer; names the tensor.
        """
        own: dict[str, torch.Tensor] = {f"policy/{name}": x for name, x in self.policy.state_dict().items()}
        own |= {f"average/{name}": x for name, x in (self._ema or {}).items()}
        for name, value in own.items():
            found = tensors.get(name)
            if found is None or found.shape != value.shape:
                raise UserError(
                    f"checkpoint {where} is of another policy or optimizer: '{name}' has shape "
                    f"{None if found is None else list(found.shape)} there and {list(value.shape)} in this run. Resume "
                    "with the run's own values, or start a new run."
                )
            value.copy_(_like(found, value))
        for name, p in self.policy.named_parameters():
            prefix = f"optimizer/{name}/"
            kept = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
            if kept:
                self._optimizer.state[p] = {key: self._moment(key, x, p) for key, x in kept.items()}
        _set_counts(self.policy, meta["counts"])
        for name, p in self.policy.named_parameters():
            p.requires_grad_(name not in meta["frozen"])
        for group, rate in zip(self._optimizer.param_groups, meta["rates"], strict=True):
            group["lr"] = rate
        if self._schedule is not None:
            lambdas = getattr(self._schedule, "lr_lambdas", None)
            extra = {} if lambdas is None else {"lr_lambdas": [None] * len(lambdas)}
            self._schedule.load_state_dict({**meta["schedule"], **extra})
        self.step = int(meta["updates"])

    def _moment(self, key: str, value: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if value.shape == p.shape and key != "step":
            return _like(value, p)
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        return value.clone().to(p.device) if fused else value.clone()


def _matches(field: str, pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise SpecError(f"{field}: '{pattern}' is not a regular expression ({error})") from error


def _counts(policy: torch.nn.Module) -> dict[str, int]:
    """Whole numbers that modules keep beside their buffers, such as the steps of VQ-BeT's first phase."""
    return {
        f"{path}.{name}": value
        for path, module in policy.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }


def _set_counts(policy: torch.nn.Module, counts: Mapping[str, int]) -> None:
    modules = dict(policy.named_modules())
    for key, value in counts.items():
        path, _, name = key.rpartition(".")
        setattr(modules[path], name, value)


def _append(totals: dict[str, list[torch.Tensor]], name: str, value: Any) -> None:
    totals.setdefault(name, []).append(torch.as_tensor(value).detach())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that is cut over ranks; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device of another, and cut as it is."""
    moved = value.clone().to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements) if isinstance(like, DTensor) else moved
