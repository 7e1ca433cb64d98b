"""The learner group on a real Ray: ranks, restarts, refusals."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rlsvc.core.errors import UserError
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.cluster import check_resources, place_on_gpus
from rlsvc.train.group import LocalGroup
from rlsvc.train.orchestrator import Order
from rlsvc.train.run import run_dir, train


def losses(spec) -> list[float]:
    return [row["train/loss"] for row in read_metrics(run_dir(spec) / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.slow
def test_two_ranks_give_the_loss_of_one_with_the_same_global_batch(make_spec, ray_cluster):
    alone = make_spec("name=one", "env=null")
    together = make_spec("name=two", "env=null", "learner.ranks=2")
    train(alone, local=True)
    train(together)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_episodes_on_ray_actors_score_as_in_this_process(make_spec, ray_cluster):
    here = train(make_spec("name=here"), local=True)
    there = train(make_spec("name=there"))
    assert there.metrics == pytest.approx(here.metrics, rel=1e-5)
    assert read_bundle(there.bundle).params.keys() == read_bundle(here.bundle).params.keys()


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint_and_the_run_ends(make_spec, ray_cluster):
    import psutil

    spec = make_spec("env=null", "total_steps=16")
    killed = []

    def kill_once(step: int, metrics: dict[str, float]) -> None:
        if step == 8 and not killed and "train/loss" in metrics:
            mine = psutil.Process().children(recursive=True)
            ranks = [p for p in mine if "RayTrainWorker" in " ".join(p.cmdline())]
            killed.extend(p.pid for p in ranks)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    result = train(spec, on_metrics=kill_once)
    assert killed
    assert result.step == 16
    whole = train(make_spec("name=whole", "env=null", "total_steps=16"), local=True)
    assert losses(spec)[-1] == pytest.approx(losses(make_spec("name=whole"))[-1], rel=1e-5)
    assert whole.step == 16


@pytest.mark.slow
def test_a_mistake_that_only_the_ranks_can_see_reaches_the_person_as_it_is(make_spec, ray_cluster):
    with pytest.raises(UserError, match="nowhere: no such file"):
        train(make_spec("data.datasets=[{path: nowhere}]", "env=null"))


@pytest.mark.parametrize(
    ("words", "cards", "per_rank", "acting"),
    [
        ([], 0, 0.0, 0.0),
        ([], 1, 0.75, 0.25),
        ([], 2, 1.0, 0.25),
        (["learner.ranks=2"], 2, 0.75, 0.25),
        (["env=null"], 1, 1.0, 0.0),
        (["device=cpu"], 8, 0.0, 0.0),
        (["learner.gpus_per_rank=0.5", "evaluation.gpus=0"], 4, 0.5, 0.0),
    ],
)
def test_ranks_and_evaluation_take_the_gpus_that_the_cluster_has_unless_told(make_spec, words, cards, per_rank, acting):
    placed = place_on_gpus(make_spec(*words), cards)
    assert (placed.learner.gpus_per_rank, placed.evaluation.gpus) == (per_rank, acting)


def test_a_gpu_asked_for_on_a_cluster_without_one_is_refused(make_spec):
    with pytest.raises(UserError, match="device: got gpu, but the Ray cluster has no GPU"):
        place_on_gpus(make_spec("device=gpu"), 0)


def test_a_run_that_asks_for_more_than_the_cluster_has_is_refused_at_once(make_spec, ray_cluster):
    with pytest.raises(UserError, match="asks for 9 CPU"):
        check_resources(make_spec("learner.ranks=8", "learner.cpus_per_rank=1"))
    with pytest.raises(UserError, match="asks for 1 GPU"):
        check_resources(make_spec("learner.gpus_per_rank=1"))


@pytest.mark.slow
def test_stopping_a_ray_run_writes_a_checkpoint_first(make_spec, ray_cluster):
    stop = threading.Event()
    result = train(make_spec("env=null", "total_steps=400"), on_metrics=lambda *_: stop.set(), stop=stop)
    assert result.interrupted
    assert 4 <= result.step < 400


def test_a_local_group_carries_out_orders_and_says_where_it_is(make_spec, tmp_path):
    group = LocalGroup(make_spec("env=null"), tmp_path / "run", None)
    assert group.start() == 0
    assert group.execute(Order("update", 4, hook="update", num_updates=4))["loss"] > 0
    assert group.execute(Order("checkpoint", 4))["checkpoint"].endswith("/4")
    group.close()
    again = LocalGroup(make_spec("env=null"), tmp_path / "run", None)
    assert again.start() == 4
