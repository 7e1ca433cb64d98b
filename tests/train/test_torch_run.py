"""LeRobot's policies trained under the same RunSpec as everything else."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch_ranks import updated

from rlsvc.core.errors import SpecError, UserError
from rlsvc.runner import PolicyRunner
from rlsvc.spec.compose import compose
from rlsvc.store import checkpoint
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.run import run_dir, train
from rlsvc.train.torch_learner import STATE, TorchLearner

torch.set_num_threads(1)

ACT = "policy.config={chunk_size: 8, dim_model: 16, n_heads: 2, dim_feedforward: 16, n_encoder_layers: 1, \
n_vae_encoder_layers: 1, latent_dim: 4, pretrained_backbone_weights: null, dropout: 0.1, optimizer_lr: 0.001}"
DIFFUSION = "policy.config={horizon: 8, down_dims: [8, 8], n_groups: 2, diffusion_step_embed_dim: 8, \
num_train_timesteps: 4, pretrained_backbone_weights: null, optimizer_lr: 0.001, scheduler_warmup_steps: 2, \
do_mask_loss_for_padding: true}"
VQBET = "policy.config={n_action_pred_token: 2, action_chunk_size: 3, n_vqvae_training_steps: 5, \
vqvae_embedding_dim: 8, vqvae_enc_hidden_dim: 8, gpt_block_size: 16, gpt_input_dim: 16, gpt_output_dim: 16, \
gpt_n_layer: 1, gpt_n_head: 2, gpt_hidden_dim: 16, pretrained_backbone_weights: null}"
IMAGES = (
    "data.datasets=[{path: tests/data/pusht/pusht_first1.zarr}]", "data.validation_fraction=0",
    "data.observation=[observation.image,observation.state]", "env.observation=pixels",
)  # fmt: skip
SIZES = {"act": ("experiment=act_pusht", ACT), "diffusion": ("experiment=lerobot_diffusion_pusht", DIFFUSION)}


@pytest.fixture
def make_spec(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """A tiny run of a LeRobot policy on the shipped demonstrations; takes overrides."""
    monkeypatch.chdir(root)

    def make(kind: str, *overrides: str):
        experiment, config = SIZES[kind]
        words = [
            experiment, "~policy.config", f"+{config}", f"root={tmp_path}", "name=tiny", "total_steps=8",
            "log_interval=4", "policy.n_action_steps=4", "learner.updates_per_call=4", "learner.cpus_per_rank=0.5",
            "checkpoint.interval=4", "algo.batch_size=8", "data.max_train_episodes=4", "evaluation.interval=null",
            "evaluation.episodes=2", "evaluation.parallel=2", "evaluation.videos=false", "env.max_steps=12",
            "tracking.trackers=[]", "device=cpu",
        ]  # fmt: skip
        return compose([*words, *overrides])

    return make


def state_of(result) -> dict[str, torch.Tensor]:
    return load_file(result.run_dir / "checkpoints" / str(result.step) / STATE)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_run_trains_evaluates_and_leaves_a_bundle_that_plain_lerobot_loads(make_spec, kind):
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    told: dict[str, float] = {}
    result = train(make_spec(kind), local=True, on_metrics=lambda step, metrics: told.update(metrics))
    assert result.step == 8
    assert result.bundle is not None
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "validation/loss", "eval/max_reward"} <= told.keys()
    assert np.isfinite(list(told.values())).all()

    bundle = read_bundle(result.bundle)
    policy = get_policy_class(kind).from_pretrained(result.bundle, strict=True)
    assert all(np.array_equal(x.numpy(), bundle.params[name]) for name, x in policy.state_dict().items())
    before, _ = make_pre_post_processors(policy.config, pretrained_path=str(result.bundle))
    seen = {"observation.state": torch.zeros(1, 2), "observation.environment_state": torch.zeros(1, 18), "task": [""]}
    made = before({**seen, "action": torch.zeros(1, 2)})
    assert made["action"].abs().max() > 0.5, "the statistics are those of the data, not none"

    runner = PolicyRunner.load(result.bundle, device="cpu")
    runner.warm_up()
    assert bundle.contract.action.unit == "px", "the environment's contract is in the bundle"


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_run_that_stopped_and_resumes_equals_one_that_did_not_bit_for_bit(make_spec, kind):
    words = ("algo.ema={max_decay: 0.9}", "evaluation.episodes=1")
    whole = train(make_spec(kind, *words, "name=whole"), local=True)
    stop = threading.Event()
    half = train(
        make_spec(kind, *words, "name=half"), local=True, stop=stop, on_metrics=lambda step, metrics: stop.set()
    )
    assert half.interrupted
    assert half.step == 4
    rest = train(make_spec(kind, *words, "name=half", "resume=true"), local=True)
    assert rest.step == 8
    assert same(state_of(rest), state_of(whole))
    assert read_bundle(rest.bundle).id == read_bundle(whole.bundle).id


@pytest.mark.slow
def test_vqbet_resumes_in_either_of_its_phases_and_acts_from_images(make_spec):
    """It counts the updates of its first phase outside of its weights, and freezes a part of itself after them."""
    words = (
        "policy.type=vqbet", "policy.n_obs_steps=2", "policy.n_action_steps=3", "~policy.config", f"+{VQBET}", *IMAGES,
        "checkpoint.keep_last=9", "checkpoint.interval=3", "log_interval=3", "learner.updates_per_call=3",
        "total_steps=9",
    )  # fmt: skip
    whole = train(make_spec("act", *words, "name=whole"), local=True)
    for stop_at in (3, 6):
        stop, name = threading.Event(), f"name=half{stop_at}"

        def stop_once(step: int, metrics: dict[str, float], stop=stop, stop_at=stop_at) -> None:
            if step == stop_at:
                stop.set()

        half = train(make_spec("act", *words, name), local=True, stop=stop, on_metrics=stop_once)
        assert half.step == stop_at
        rest = train(make_spec("act", *words, name, "resume=true"), local=True)
        assert same(state_of(rest), state_of(whole))
    assert read_bundle(whole.bundle).contract.observation["observation.image"].is_image


def test_the_average_of_the_weights_acts_and_is_no_copy_of_them(make_spec):
    result = train(make_spec("act", "algo.ema={max_decay: 0.9}"), local=True)
    state, params = state_of(result), read_bundle(result.bundle).params
    name = "model.action_head.weight"
    assert np.array_equal(params[name], state[f"average/{name}"].numpy())
    assert not torch.equal(state[f"average/{name}"], state[f"policy/{name}"])


def test_lerobots_own_loop_on_the_same_batches_gives_the_same_weights(make_spec, tmp_path):
    """Its preset optimizer and schedule, its clipping, in the order of its lerobot_train.update_policy."""
    spec = make_spec("diffusion")
    learner = TorchLearner(spec, tmp_path / "ours")
    other = TorchLearner(spec, tmp_path / "theirs")
    learner.algorithm.update(learner._train, 3)

    policy, data = other.algorithm.policy, other._train
    preset = policy.config.get_optimizer_preset()
    optimizer = preset.build(policy.get_optim_params())
    schedule = policy.config.get_scheduler_preset().build(optimizer, spec.total_steps)
    from rlsvc.backends.torch_imitation import NOISE
    from rlsvc.backends.torch_noise import seed_of

    policy.train()
    for step in range(3):
        (batch,) = data.batches([data.draw(spec.seed, step, 8)])
        batch = other._processors[0](batch)
        torch.manual_seed(seed_of(spec.seed, step, NOISE))
        loss, _ = policy.forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), preset.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert same(dict(learner.algorithm.policy.state_dict()), dict(policy.state_dict()))


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_micro_batches_give_the_gradient_of_their_batch(make_spec, tmp_path, kind):
    """Padded actions and noise included; dropout, whose masks are a micro-batch's own, is off."""
    off = ("policy.config.dropout=0.0", "policy.config.chunk_size=100") if kind == "act" else ()
    learners = [
        TorchLearner(make_spec(kind, *off, f"algo.accumulation={parts}", "data.max_train_episodes=1"), tmp_path)
        for parts in (1, 4)
    ]
    whole, cut = (learner.algorithm.update(learner._train, 1) for learner in learners)
    assert whole["loss"] == pytest.approx(cut["loss"], rel=1e-5)
    assert whole["grad_norm"] == pytest.approx(cut["grad_norm"], rel=1e-4)


def test_mixed_precision_is_near_full_precision_and_in_the_bundle(make_spec, tmp_path):
    full, narrow = (TorchLearner(make_spec("diffusion", f"precision={p}"), tmp_path) for p in ("fp32", "bf16"))
    losses = [learner.algorithm.update(learner._train, 2)["loss"] for learner in (full, narrow)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    bundle = read_bundle(narrow.export(tmp_path / "bundle"))
    assert bundle.precision == "bf16"
    assert all(x.dtype == np.float32 for x in bundle.params.values())
    assert '"use_amp": true' in (bundle.path / "config.json").read_text()
    PolicyRunner.load(bundle.path, device="cpu").warm_up()


@pytest.mark.slow
def test_a_compiled_policy_learns_what_an_eager_one_does(make_spec, tmp_path, monkeypatch):
    """With eager's random numbers, where compiled programs have their own."""
    monkeypatch.setattr("torch._inductor.config.fallback_random", True)
    eager, compiled = (TorchLearner(make_spec("diffusion", f"algo.compile={on}"), tmp_path) for on in ("false", "true"))
    one, other = (learner.algorithm.update(learner._train, 3) for learner in (eager, compiled))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert read_bundle(compiled.export(tmp_path / "bundle")).params.keys() == eager.algorithm.acting_state().keys()


def test_frozen_weights_stay(make_spec, tmp_path):
    learner = TorchLearner(make_spec("act", "algo.freeze=['model.encoder.*']"), tmp_path)
    before = {name: x.clone() for name, x in learner.algorithm.policy.state_dict().items()}
    learner.algorithm.update(learner._train, 2)
    moved = {name for name, x in learner.algorithm.policy.state_dict().items() if not torch.equal(x, before[name])}
    assert moved
    assert not any(name.startswith("model.encoder.") for name in moved)
    with pytest.raises(SpecError, match="'vision' matches no weight"):
        TorchLearner(make_spec("act", "algo.freeze=[vision]"), tmp_path)


def test_windows_in_host_memory_are_those_on_the_device(make_spec, tmp_path):
    device, host = (
        TorchLearner(make_spec("diffusion", f"data.placement={where}"), tmp_path)._train for where in ("device", "host")
    )
    assert (device.on_device, host.on_device) == (True, False)
    index = [device.draw(0, step, 8) for step in range(3)]
    for one, other in zip(device.batches(index), host.batches(index), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(x, other[name]) for name, x in one.items() if name != "task")
    padded = sum(int(batch["action_is_pad"].sum()) for batch in host.batches(index))
    assert sum(device.valid(rows) for rows in index) == 3 * 8 * 8 - padded


def test_windows_leave_out_the_end_of_every_episode_as_lerobots_sampler_does(make_spec, tmp_path):
    every = TorchLearner(make_spec("diffusion", "+policy.config.drop_n_last_frames=0"), tmp_path)._train
    fewer = TorchLearner(make_spec("diffusion", "+policy.config.drop_n_last_frames=7"), tmp_path)._train
    assert every.num_windows - fewer.num_windows == 7 * 4
    with pytest.raises(UserError, match="without the last 9999 steps of every episode nothing is left"):
        TorchLearner(make_spec("diffusion", "+policy.config.drop_n_last_frames=9999"), tmp_path)


def test_a_pretrained_folder_is_gone_on_from(make_spec, tmp_path):
    first = train(make_spec("act", "env=null"), local=True)
    spec = make_spec("act", "name=second", f"policy.pretrained={first.bundle}", "policy.config={}")
    learner = TorchLearner(spec, tmp_path)
    wanted = read_bundle(first.bundle).params
    assert all(np.array_equal(x.numpy(), wanted[n]) for n, x in learner.algorithm.policy.state_dict().items())


def test_a_checkpoint_of_another_policy_or_a_damaged_one_is_refused(make_spec):
    result = train(make_spec("act", "env=null"), local=True)
    with pytest.raises(UserError, match=r"is of another policy or optimizer: 'policy/.*' has shape"):
        TorchLearner(make_spec("act", "policy.config.dim_model=32"), result.run_dir)
    file = result.run_dir / "checkpoints" / "8" / STATE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"checkpoints/8 cannot be read .*delete this folder"):
        TorchLearner(make_spec("act"), result.run_dir)
    assert checkpoint.steps(result.run_dir / "checkpoints") == [4, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("policy.type=akt",), "unknown policy of LeRobot 'akt'. Did you mean 'act'?"),
        (("+policy.config.chunk_sise=4",), "no field 'chunk_sise'"),
        (("policy.n_obs_steps=3",), "Multiple observation steps not handled"),
    ],
)
def test_a_specification_that_does_not_fit_is_refused_before_anything_starts(make_spec, words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(make_spec("act", *words), local=True)
    assert not (tmp_path / "rlsvc").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algo.batch_size=6", "algo.accumulation=4"), r"learner.ranks x algo.accumulation = 4"),
        (("learner.tensor=2",), r"learner.tensor: got 2, with algo torch_imitation expected 1"),
        (("learner.ranks=2", "learner.fsdp=3"), r"learner.fsdp: got 3, .* expected a divisor of learner.ranks"),
        (("+data.normalization.action=mean_std",), r"data.normalization: .*normalization_mapping"),
        (("algo.name=imitation",), r"algo imitation trains diffusion or pi0 or pi0_fast, got lerobot"),
    ],
)
def test_what_torch_has_no_place_for_is_refused_by_its_key(make_spec, words, message):
    with pytest.raises(UserError, match=message):
        make_spec("act", *words)


def logged(spec, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run_dir(spec) / "metrics.jsonl") if name in row]


def losses(spec) -> list[float]:
    return logged(spec, "train/loss")


CUT = ("learner.ranks=2", "learner.fsdp=2", "algo.fsdp_blocks=['.*mid_modules.[01]']")
PADDED = ("policy.config.dropout=0.0", "policy.config.chunk_size=100")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "ranks"),
    [
        ("act", PADDED, ("learner.ranks=2",)),
        ("diffusion", (), ("learner.ranks=2", "algo.accumulation=2")),
        ("diffusion", (), CUT),
    ],
    ids=["padded actions", "noise and micro-batches", "weights cut over the ranks"],
)
def test_two_ranks_equal_one_with_the_same_global_batch(make_spec, tmp_path, kind, words, ranks):
    words = (*words, "algo.ema={max_decay: 0.9}")
    alone = TorchLearner(make_spec(kind, *words), tmp_path / "one")
    one = [alone.algorithm.update(alone._train, 1) for _ in range(5)]
    spec = make_spec(kind, *words, *ranks)
    reached, two = updated(spec, tmp_path / "two", 3)
    assert reached == 3
    reached, rest = updated(spec, tmp_path / "two", 2)
    assert reached == 5, "it went on from its checkpoint"
    for name in ("loss", "grad_norm", "learning_rate"):
        values = [[metrics[name] for metrics in found] for found in (one, [*two, *rest])]
        assert values[1] == pytest.approx(values[0], rel=1e-4)
    bundle, wanted = read_bundle(tmp_path / "two" / "bundles" / "5"), alone.algorithm.acting_state()
    assert bundle.params.keys() == wanted.keys()
    far = [name for name, x in bundle.params.items() if not np.allclose(x, wanted[name], atol=1e-4)]
    assert len(far) < 0.05 * len(wanted), "but for weights whose gradient is nothing but rounding"
    TorchLearner(make_spec(kind, *words), tmp_path / "two")  # one rank goes on from what two have saved


@pytest.mark.slow
def test_a_killed_rank_brings_the_group_back_from_the_last_commit(make_spec, ray_cluster):
    spec = make_spec("diffusion", "env=null", "total_steps=16", "learner.ranks=2")
    killed = []

    def kill_once(step: int, metrics: dict[str, float]) -> None:
        if step == 8 and not killed and "train/loss" in metrics:
            mine = psutil.Process().children(recursive=True)
            ranks = [p for p in mine if "RayTrainWorker" in " ".join(p.cmdline())]
            killed.append(ranks[0].pid)
            ranks[0].kill()

    result = train(spec, on_metrics=kill_once)
    assert killed
    assert result.step == 16
    train(make_spec("diffusion", "env=null", "total_steps=16", "name=whole"), local=True)
    assert losses(spec)[-1] == pytest.approx(losses(make_spec("diffusion", "name=whole"))[-1], rel=1e-4)


@pytest.mark.slow
def test_a_group_on_ray_evaluates_by_rollout_workers_as_this_process_does(make_spec, ray_cluster):
    here = train(make_spec("act", "name=here"), local=True)
    there = train(make_spec("act", "name=there"))
    assert {name: x for name, x in there.metrics.items() if name.startswith("eval/")} == pytest.approx(
        {name: x for name, x in here.metrics.items() if name.startswith("eval/")}, rel=1e-4
    )
