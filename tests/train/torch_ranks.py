"""Ranks of a Torch learner as processes, without Ray; importable, in whatever way pytest imports test modules."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlsvc.spec.run import RunSpec


def _rank(rank: int, store: str, spec: dict, folder: str, updates: int, results) -> None:
    from rlsvc.train.orchestrator import Order
    from rlsvc.train.torch_learner import TorchLearner

    torch.set_num_threads(1)
    made = RunSpec.model_validate(spec)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=made.learner.ranks)
    learner = TorchLearner(made, Path(folder))
    found = [learner.algorithm.update(learner._train, 1) for _ in range(updates)]
    time.sleep(2 * rank)  # the first rank commits before another looks whether there is a checkpoint
    learner.execute(Order("checkpoint", learner.step))
    assert learner.agree(7 - rank) == 7, "the ranks are no longer in the same place"
    learner.execute(Order("export", learner.step))
    if rank == 0:
        results.put((learner.step, found))
    # Gloo's thread lets go of the last tensors under the GIL, which the end of the group, that waits for this thread,
    # holds: it gets its turn before (torch 2.11).
    del learner
    time.sleep(0.2)
    dist.destroy_process_group()


def updated(spec: RunSpec, folder: Path, updates: int) -> tuple[int, list[dict[str, float]]]:
    """The step reached from the folder's newest checkpoint, and the metrics of each update; a checkpoint and a bundle
    are written."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)
    arguments = (str(store), spec.model_dump(mode="json"), str(folder), updates, results)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=spec.learner.ranks)
    return results.get()
