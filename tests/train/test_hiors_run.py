"""Hi-ORS as a run: rollouts are accepted, learned from beside demonstrations, and held again after a resume."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from rlsvc.core.errors import SpecError
from rlsvc.data.journal import Journal
from rlsvc.envs import two_goals
from rlsvc.envs.make import make_env
from rlsvc.envs.planar_push import demonstrations
from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.learner import Learner
from rlsvc.train.learner_data import EpisodeData
from rlsvc.train.orchestrator import Order
from rlsvc.train.run import RunResult, run_dir, train

MakeSpec = Callable[..., RunSpec]
MIX = {"replay": 0.5, "demonstrations": 0.5}


def maker(folder: Path) -> MakeSpec:
    """The shipped experiment in small, with a stand-in that soon takes over; takes overrides."""
    np.savez(folder / "push.npz", **demonstrations(2))

    def make(*overrides: str) -> RunSpec:
        words = [
            "experiment=hiors_planar_push", f"root={folder}", "name=tiny", "log_interval=100",
            f"data.datasets.0.path={folder / 'push.npz'}", "algo.batch_size=8", "policy.horizon=4",
            "policy.n_action_steps=2", "policy.train_steps=4", "policy.sample_steps=1",
            "policy.backbone.down_dims=[8]", "policy.backbone.step_embed_dim=8",
            "rollout.envs_per_worker=2", "rollout.chunk_steps=10", "rollout.weights_interval=2",
            "rollout.stand_in={patience: 3, control_steps: 20, noise: 0.1, min_progress: 0.01}",
            "phases.0.duration_updates=4", "phases.1.duration_steps=200", "phases.1.hooks={collect: 20, update: 1}",
            "learner.updates_per_call=1", "learner.cpus_per_rank=0.5", "rollout.cpus_per_worker=0.4",
            "checkpoint.interval=1000", "evaluation.interval=null", "evaluation.episodes=1", "evaluation.parallel=1",
            "evaluation.cpus_per_worker=0.4", "tracking.trackers=[]",
        ]  # fmt: skip
        return compose([*words, *overrides])

    return make


@pytest.fixture
def make_hiors(tmp_path: Path) -> MakeSpec:
    """See `maker`."""
    return maker(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[MakeSpec, RunResult]:
    """A run to its end."""
    make = maker(tmp_path_factory.mktemp("hiors"))
    return make, train(make(), local=True)


def a_learner(spec: RunSpec) -> Learner:
    """A rank of the run, without its driver."""
    assert spec.env is not None
    return Learner(spec, run_dir(spec), make_env(spec.env).contract(2, 2))


def test_a_run_accepts_episodes_that_the_stand_in_saved_and_its_steps_say_so(trained):
    make, result = trained
    folder = run_dir(make())
    assert result.step == 204
    made = read_bundle(result.bundle)
    assert made.policy["name"] == "diffusion"
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert (last["progress/env_steps"], last["progress/updates"]) == (200, 14)
    assert last["train/accepted_episodes"] >= 1
    assert 0 < last["train/accepted_share"] <= 1
    assert 0 < last["collect/intervention"] < 1
    with Journal(folder / "journal", read_only=True) as journal:
        rows = [chunk.columns for chunk in journal.read()]
    acted = np.concatenate([columns["intervention"] for columns in rows])
    final = np.concatenate([columns["is_last"] for columns in rows])
    assert acted.any()
    assert not acted[final].any()
    versions = np.concatenate([columns["version"] for columns in rows])[~final]
    assert versions.min() == 4  # the updates of the offline phase
    assert versions.max() > 4
    # Workers act by the statistics of the demonstrations, as the bundle does.
    acting = read_bundle(folder / "acting")
    assert acting.normalizer.to_json() == made.normalizer.to_json()
    assert acting.params == {}


def test_a_rank_that_comes_back_holds_the_same_episodes_and_learns_the_same(trained):
    make, _ = trained
    spec = make()
    at = checkpoint.steps(run_dir(spec) / "checkpoints")[-1]
    cursor = checkpoint.load_meta(run_dir(spec) / "checkpoints", at)["cursor"]
    back, told = a_learner(spec), a_learner(spec)
    assert back.data.metrics()["accepted_episodes"] >= 1
    # The other one begins empty, and is given the chunks by orders of a few.
    told.data = EpisodeData(spec, make_env(spec.env).contract(2, 2), told._put, told.platform, run_dir(spec))
    with Journal(run_dir(spec) / "journal", read_only=True) as journal:
        chunks = list(journal.read(0, cursor))
    for start in range(0, cursor, 3):
        few = tuple(chunks[start : start + 3])
        told.data.absorb(Order("absorb", 0, chunks=few, cursor=start + len(few)))
    assert told.data.metrics() == back.data.metrics()
    one, two = (learner.data.source(MIX) for learner in (back, told))
    every = np.arange(one.num_windows)
    for a, b in zip(jax.tree.leaves(one.gather(every)), jax.tree.leaves(two.gather(every)), strict=True):
        np.testing.assert_array_equal(a, b)
    order = Order("update", at, hook="update", num_updates=1, buffer=MIX, cursor=cursor)
    assert back.execute(order) == told.execute(order)


def test_until_enough_is_accepted_batches_come_from_demonstrations_alone(trained):
    make, _ = trained
    few, enough = (a_learner(make(f"algo.min_accepted={n}")).data for n in (1000, 1))
    assert few.metrics()["accepted_episodes"] >= 1
    demos = few.source({"demonstrations": 1.0}).num_windows
    assert few.source({"replay": 1.0}).num_windows == demos
    view = enough.source({"replay": 1.0})
    assert view.num_windows > demos
    assert np.asarray(view.draw(jax.random.key(0), 100)).min() >= demos


def test_no_episode_is_taken_where_the_bar_is_too_high(trained):
    make, _ = trained
    data = a_learner(make("algo.reward_above=1")).data
    assert data.metrics() == {"accepted_episodes": 0, "accepted_steps": 0, "accepted_share": 0}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(trained, make_hiors):
    _, result = trained
    assert read_bundle(train(make_hiors(), local=True).bundle).id == read_bundle(result.bundle).id


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_end_with_its_counters(make_hiors):
    stop = threading.Event()
    train(make_hiors(), local=True, stop=stop, on_metrics=lambda step, _: stop.set() if step >= 100 else None)
    result = train(make_hiors("resume=true"), local=True)
    assert result.step == 204
    last = read_metrics(run_dir(make_hiors()) / "metrics.jsonl")[-1]
    assert (last["progress/env_steps"], last["progress/updates"]) == (200, 14)


@pytest.mark.slow
def test_pi0_learns_from_accepted_episodes_with_their_prompts(tmp_path):
    np.savez(tmp_path / "two_goals.npz", **two_goals.demonstrations(4))
    words = [
        "experiment=hiors_two_goals", f"root={tmp_path}", f"data.datasets.0.path={tmp_path / 'two_goals.npz'}",
        "policy.vision={width: 16, depth: 1, mlp_dim: 32, heads: 2, patch: 8}",
        "policy.backbone={width: 16, depth: 1, mlp_dim: 32, heads: 2, head_dim: 8}",
        "policy.expert={width: 16, depth: 1, mlp_dim: 32, heads: 2, head_dim: 8}", "policy.sample_steps=2",
        "algo.batch_size=4", "rollout.envs_per_worker=2", "rollout.chunk_steps=20",
        "rollout.stand_in={patience: 2, control_steps: 40, noise: 0.1}", "phases.0.duration_updates=2",
        "phases.1.duration_steps=160", "phases.1.hooks={collect: 40, update: 1}", "learner.updates_per_call=1",
        "checkpoint.interval=1000", "evaluation.interval=null", "evaluation.episodes=1", "evaluation.parallel=1",
        "tracking.trackers=[]",
    ]  # fmt: skip
    spec = compose(words)
    result = train(spec, local=True)
    assert result.metrics["train/accepted_episodes"] >= 1
    assert read_bundle(result.bundle).policy["name"] == "pi0"
    env = make_env(spec.env).contract(spec.policy.n_obs_steps, spec.policy.n_action_steps)
    data = Learner(spec, run_dir(spec), env).data
    demos = data.source({"demonstrations": 1.0})
    view = data.source(MIX)
    accepted = view.gather(np.arange(demos.num_windows, view.num_windows))["observation"]
    known = demos.gather(np.arange(demos.num_windows))["observation"]
    # The prompts of rollouts came through the journal, and are the demonstrations' own tokens.
    said, ours = ({x.tobytes() for x in part["prompt_tokens"][..., :20].reshape(-1, 20)} for part in (known, accepted))
    assert ours <= said
    assert accepted["observation.image"].any()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("words", [("learner.ranks=2",), ("rollout.mode=async", "rollout.inference=central")])
def test_several_ranks_and_rollout_actors_make_a_run_together(make_hiors, words):
    result = train(make_hiors(*words))
    assert result.step == 204
    assert result.metrics["train/accepted_episodes"] >= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=null", "phases.0.buffer=replay"], r"phase 'warm': buffer replay is still empty"),
        (["data.placement=device"], r"data\.placement: got device, expected auto or host: hiors"),
        (["env.isolation=process"], r"rollout\.stand_in: it stands beside the simulator"),
        (["algo={name: imitation}"], r"phase 'online': imitation learns from demonstrations"),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_name(make_hiors, words, message):
    with pytest.raises(SpecError, match=message):
        make_hiors(*words)
