"""The learner group: one rank in this process, or a Ray Train group that is reached through a mailbox.

The driver posts numbered orders to the mailbox, an actor of its own; every rank asks for the next one, does it, and the
first rank posts the result. When a rank dies, Ray Train starts the group again; when Ray Train's controller dies, the
driver starts another one. The new ranks announce a new attempt and the step of the checkpoint that they read, and the
driver learns of it as GroupRestarted. Ranks that hang are killed by the driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.run import RunSpec
from rlsvc.store.storage import is_url
from rlsvc.train.cluster import own_node
from rlsvc.train.orchestrator import GroupRestarted, Order

if TYPE_CHECKING:
    from rlsvc.train.learner import Learner
    from rlsvc.train.torch_learner import TorchLearner

logger = logging.getLogger(__name__)

POLL_S = 1.0
START_TIMEOUT_S = 600.0
PARAMS_TIMEOUT_S = 60.0


def make_learner(spec: RunSpec, run_dir: Path, contract: Contract | None) -> Learner | TorchLearner:
    """The rank's learner, in the framework of the run's algorithm; arguments are the learners'.

    Raises:
        UserError: as the learners; or a package that it needs is not installed.
    """
    if ALGORITHMS[spec.algo.name].framework == "torch":
        try:
            from rlsvc.train.torch_learner import TorchLearner
        except ImportError as error:
            raise UserError(
                f"algo {spec.algo.name} needs {error.name}, which is not installed: pip install 'rlsvc[torch]'"
            ) from error
        return TorchLearner(spec, run_dir, contract)
    from rlsvc.train.learner import Learner

    return Learner(spec, run_dir, contract)


class LocalGroup:
    """One rank in this process, without Ray."""

    def __init__(self, spec: RunSpec, run_dir: Path, contract: Contract | None) -> None:
        self._make = (spec, run_dir, contract)

    def start(self) -> int:
        """See LearnerGroup."""
        self._learner = make_learner(*self._make)
        return self._learner.clock

    def execute(self, order: Order) -> dict[str, Any]:
        """See LearnerGroup. Weights come as a copy on the device, since the next update takes the state's own apart."""
        result = self._learner.execute(order)
        if "params" in result:
            import jax

            result["params"] = jax.tree.map(lambda x: x.copy(), result["params"])
        return result

    def close(self) -> None:
        """See LearnerGroup."""


class Mailbox:
    """Async actor between driver and ranks; holds the current attempt, its orders, and their results.

    Consumes orders from the driver and results from the first rank. Every call returns within POLL_S with what there
    is, so that nobody waits for ever on a peer that died; when the driver dies this actor dies with it, and the ranks'
    next call fails.
    """

    def __init__(self) -> None:
        self._attempt, self._step = 0, -1
        self._orders: list[dict[str, Any] | None] = []
        self._progress: dict[int, int] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._ranks: list[Any] = []
        self._changed = asyncio.Event()

    async def join(self, handle: Any) -> None:
        """From a rank, before it begins: the actor that it runs in."""
        self._ranks.append(handle)

    async def take_ranks(self) -> list[Any]:
        """For the driver: actors of all ranks that joined since it asked last, which it is about to kill."""
        ranks, self._ranks = self._ranks, []
        return ranks

    async def begin(self, step: int) -> int:
        """From the first rank of a (re)started group: where its state is. Returns the attempt's number."""
        self._attempt, self._step = self._attempt + 1, step
        self._orders, self._progress, self._results = [], {}, {}
        self._notify()
        return self._attempt

    async def attempt(self) -> tuple[int, int]:
        """The current attempt and the step it began at; (0, -1) before the first."""
        return self._attempt, self._step

    async def post(self, attempt: int, order: dict[str, Any]) -> bool:
        """From the driver: the next order of an attempt; False when that attempt is over."""
        if attempt != self._attempt:
            return False
        self._orders.append(order)
        self._notify()
        return True

    async def order(self, attempt: int, index: int, rank: int, ranks: int) -> dict[str, Any] | None:
        """For a rank: the index-th order of its attempt, None when there is none yet; raises when it is over.

        A rank that asks for the next order has done the one before. Orders that all have done are let go, and with them
        the chunks that they refer to.
        """
        if attempt != self._attempt:
            raise RuntimeError(f"attempt {attempt} is over; attempt {self._attempt} runs")
        self._progress[rank] = index
        if len(self._progress) == ranks:
            for i in range(min(self._progress.values()) - 1, -1, -1):
                if self._orders[i] is None:
                    break
                self._orders[i] = None
        if index >= len(self._orders):
            await self._wait()
        return self._orders[index] if attempt == self._attempt and index < len(self._orders) else None

    async def done(self, attempt: int, number: int, result: dict[str, Any]) -> None:
        """From the first rank: an order's result."""
        if attempt == self._attempt:
            self._results[number] = result
            self._notify()

    async def result(self, attempt: int, number: int) -> tuple[int, dict[str, Any] | None]:
        """For the driver: the current attempt, and the result when it is there."""
        if attempt == self._attempt and number not in self._results:
            await self._wait()
        return self._attempt, self._results.pop(number, None) if attempt == self._attempt else None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), POLL_S)
        except TimeoutError:
            return


def rank_main(config: dict[str, Any]) -> None:
    """What every rank of the Ray Train group runs until the stop order.

    Consumes orders from the mailbox, produces results (first rank) and checkpoints (all ranks, reported to Ray Train).
    Waits for the mailbox only; when it is gone, the driver is, and the rank ends.
    """
    import ray
    import ray.train

    from rlsvc.nn.params import flatten_params

    mailbox = config["mailbox"]
    ray.get(mailbox.join.remote(ray.get_runtime_context().current_actor))
    rank = ray.train.get_context().get_world_rank()
    contract = None if config["contract"] is None else Contract.from_json(config["contract"])
    spec = RunSpec.model_validate(config["spec"])
    if ALGORITHMS[spec.algo.name].framework == "torch":
        _take_card()
    try:
        learner = make_learner(spec, Path(config["run_dir"]), contract)
    except UserError as error:
        # A person's mistake is not retried: it goes to the driver as it is.
        if rank == 0:
            attempt = ray.get(mailbox.begin.remote(-1))
            ray.get(mailbox.done.remote(attempt, -1, {"user_error": str(error)}))
        return
    ranks = ray.train.get_context().get_world_size()
    begun: Any = ray.get(mailbox.begin.remote(learner.clock)) if rank == 0 else 0
    attempt = learner.agree(begun)
    index = 0
    while True:
        found: Any = ray.get(mailbox.order.remote(attempt, index, rank, ranks))
        if found is None:
            continue
        order = Order(**found)
        index += 1
        try:
            result: dict[str, Any] = {} if order.kind == "stop" else learner.execute(order)
        except UserError as error:
            result = {"user_error": str(error)}
        if order.kind == "checkpoint" and "checkpoint" in result:
            _report(Path(result["checkpoint"]), rank)
        params = result.pop("params", None)
        if params is not None and rank == 0:
            # By reference: the driver fetches them from this process, and then owns its own copy.
            result["params"] = ray.put(flatten_params(params))
        if rank == 0:
            ray.get(mailbox.done.remote(attempt, order.number, result))
        if order.kind == "stop" or "user_error" in result:
            return


def _report(path: Path, rank: int) -> None:
    """Tell Ray Train of a committed checkpoint: it lies in the run's folder, Ray keeps a pointer to it."""
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "path").write_text(str(path))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


class RayGroup:
    """A Ray Train V2 group of `learner.ranks` processes.

    `fit` runs in a thread of the driver, the orchestrator in its main thread, which therefore keeps Ctrl-C.
    """

    def __init__(self, spec: RunSpec, run_dir: Path, contract: Contract | None) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.spec = spec
        # On the driver's own node: the loss of another one must not take it along.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Mailbox).options(num_cpus=0, max_concurrency=64, scheduling_strategy=here)
        self._mailbox: Any = actor.remote()
        self._run_dir = run_dir.absolute()
        self._config = {
            "spec": spec.model_dump(mode="json"),
            "run_dir": str(self._run_dir),
            "contract": contract.to_json() if contract else None,
            "mailbox": self._mailbox,
        }
        self._attempt = 0
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """See LearnerGroup."""
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()
        return self._await_attempt(0)

    def execute(self, order: Order) -> dict[str, Any]:
        """See LearnerGroup."""
        import ray

        self._check_alive()
        if not ray.get(self._mailbox.post.remote(self._attempt, vars(order))):
            raise GroupRestarted(self._await_attempt(self._attempt))
        deadline = time.monotonic() + self.spec.learner.timeout_s
        while True:
            attempt, result = ray.get(self._mailbox.result.remote(self._attempt, order.number))
            if attempt != self._attempt:
                raise GroupRestarted(self._await_attempt(self._attempt))
            if result is not None:
                if "user_error" in result:
                    raise UserError(result["user_error"])
                return self._with_params(result)
            if order.kind == "stop" and self._thread is not None and not self._thread.is_alive():
                return {}
            self._check_alive()
            if time.monotonic() > deadline:
                self._kill_ranks(f"{order.kind} at step {order.step}")
                raise GroupRestarted(self._await_attempt(self._attempt))

    def _kill_ranks(self, what: str) -> None:
        """All of them: they wait for each other, so that nobody knows which one hangs."""
        import ray

        logger.warning("learner ranks did not do an order (%s) within learner.timeout_s; they are killed", what)
        for rank in ray.get(self._mailbox.take_ranks.remote()):
            ray.kill(rank)

    def _with_params(self, result: dict[str, Any]) -> dict[str, Any]:
        """Weights fetched from the rank; without them when it died meanwhile, which the next order finds out."""
        import ray
        import ray.exceptions

        if "params" in result:
            try:
                result["params"] = ray.get(result["params"], timeout=PARAMS_TIMEOUT_S)
            except ray.exceptions.RayError:
                del result["params"]
        return result

    def close(self) -> None:
        """Wait for the ranks to end, then free the mailbox."""
        import ray

        if self._thread is not None:
            self._thread.join(60)
        ray.kill(self._mailbox)

    def _await_attempt(self, old: int) -> int:
        import ray

        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            attempt, step = ray.get(self._mailbox.attempt.remote())
            if attempt > old:
                self._attempt = attempt
                if step < 0:
                    _, result = ray.get(self._mailbox.result.remote(attempt, -1))
                    raise UserError((result or {}).get("user_error", "the learner group could not start"))
                return step
            self._check_alive()
            time.sleep(0.2)
        raise UserError(
            f"the learner group did not start within {START_TIMEOUT_S:.0f} s: {self.spec.learner.ranks} ranks of "
            f"{self.spec.learner.cpus_per_rank:g} CPUs and {self.spec.learner.gpus_per_rank or 0:g} GPUs; "
            "`ray status` says what is free"
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the learner group failed:\n{self._failure}")

    def _fit(self) -> None:
        """Until training ended or failed for good; a controller that died is replaced, which restarts its ranks."""
        import ray.exceptions

        for left in range(self.spec.learner.max_failures, -1, -1):
            try:
                _make_trainer(self.spec, self._run_dir, self._config).fit()
            except Exception as error:
                if isinstance(error, ray.exceptions.RayActorError) and left:
                    logger.warning("Ray Train's controller died; the learner group starts again")
                    continue
                self._failure = traceback.format_exc()
            return


def _take_card() -> None:
    """Torch's current device is the card that Ray gave this rank: all ranks of a node see all of the group's."""
    import torch
    from ray.train.torch import get_device

    device: Any = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _torch_backend(spec: RunSpec, on_gpu: bool) -> Any:
    """What makes TorchTrainer of a DataParallelTrainer: one process group, NCCL on GPUs and Gloo on CPUs."""
    from ray.train.torch import TorchConfig

    return TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=int(spec.learner.timeout_s))


def _make_trainer(spec: RunSpec, run_dir: Path, config: dict[str, Any]):
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from rlsvc.train.jax_backend import JaxBackendConfig

    learner = spec.learner
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    torch_learns = ALGORITHMS[spec.algo.name].framework == "torch"
    on_gpu = bool(learner.gpus_per_rank) and spec.device != "cpu"
    if torch_learns or not on_gpu:
        environment["JAX_PLATFORMS"] = "cpu"
    resources = {"CPU": learner.cpus_per_rank} | ({"GPU": learner.gpus_per_rank} if learner.gpus_per_rank else {})
    resources |= own_node() if is_url(spec.root) else {}
    return DataParallelTrainer(
        rank_main,
        train_loop_config=config,
        backend_config=_torch_backend(spec, on_gpu) if torch_learns else JaxBackendConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=learner.ranks, use_gpu=bool(learner.gpus_per_rank), resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=str(run_dir / ".train" / f"{os.getpid()}-{os.urandom(4).hex()}"),
            failure_config=ray.train.FailureConfig(max_failures=learner.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            worker_runtime_env={"env_vars": environment},
        ),
    )
