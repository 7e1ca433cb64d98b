"""RLlib's configuration, spaces, state and modules: without an Algorithm, and without Ray."""

import rlsvc.backends.rllib_opengl  # noqa: F401 - before RLlib

# isort: split
import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns

from rlsvc.backends.rllib_config import check_config, default_config, known_keys, make_config
from rlsvc.backends.rllib_module import FILTER, MODULE, MODULE_OF, whole_model_config
from rlsvc.backends.rllib_recorded import RecordedEpisodes
from rlsvc.backends.rllib_runner import RLlibRunner
from rlsvc.backends.rllib_spaces import ModuleEnv, ModuleSpaces
from rlsvc.backends.rllib_state import pack, unpack
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, SpecError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.data.replay_table import rows_of_episode
from rlsvc.envs.make import make_env
from rlsvc.runner import PolicyRunner
from rlsvc.spec.compose import compose
from rlsvc.spec.env import GymnasiumSpec, PushTSpec
from rlsvc.spec.rllib import RLlibPolicySpec, RLlibSpec
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.train.rllib import seen_contract

TYPES = sorted(MODULE_OF)
ARM = Contract(
    {"observation.state": Feature((3,), "float32"), "observation.goal": Feature((2,), "float32", "m")},
    Feature((2,), "float32", "rad", (), (-1.0, 0.5), (3.0, 1.5)),
    10.0,
)
CHOICE = replace(ARM, action=Feature((), "int64", low=(0.0,), high=(3.0,)))
CHOICES = replace(ARM, action=Feature((2,), "int64", low=(0.0, 0.0), high=(2.0, 4.0)))
CAMERA = replace(ARM, observation={"observation.image": Feature((64, 64, 3), "uint8")})


def spaces_of(contract: Contract) -> ModuleSpaces:
    return ModuleSpaces(contract, Normalizer.from_contract(contract))


def run_of(kind: str, *words: str):
    experiment = {"cql": "cql_pendulum", "marwil": "marwil_pendulum", "bc": "bc_pusht", "sac": "sac_pendulum"}
    return compose([f"experiment=rllib_{experiment.get(kind, f'{kind}_cartpole')}", *words])


def bundle_of(path, kind: str, contract: Contract, *, filtered: bool = False, **changes):
    """A module as RLlib builds it for the algorithm, with random weights, and its bundle."""
    module_spaces = spaces_of(contract)
    spec = run_of(kind)
    if contract is CAMERA:
        spec = spec.replace(policy={"name": "rllib", "config": {"conv_filters": [[8, 8, 4], [8, 4, 2]]}})
    config = make_config(spec, module_spaces, None if spec.algo.recorded else "not-made", seed=0)
    torch.manual_seed(3)
    pair = (module_spaces.observation, module_spaces.action)
    module = config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: pair}, inference_only=True).build()
    params = {f"{MODULE}{name}": x.numpy() for name, x in module.state_dict().items()}
    if filtered:
        params |= {f"{FILTER}mean": np.full(5, 2, np.float32), f"{FILTER}std": np.full(5, 4, np.float32)}
    policy = {"name": "rllib", "type": kind, "module": MODULE_OF[kind],
              "model_config": whole_model_config(config.model_config)}  # fmt: skip
    policy["model_config"] |= changes.pop("model_config", {})
    written = write_bundle(
        path, policy={**policy, **changes}, contract=contract, normalizer=module_spaces.normalizer, params=params
    )
    return module, written


def observed(contract: Contract, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        name: rng.integers(0, 256, (count, 1, *f.shape), np.uint8)
        if f.is_image
        else rng.normal(size=(count, 1, *f.shape)).astype(np.float32)
        for name, f in contract.observation.items()
    }


def fits(kind: str, contract: Contract) -> bool:
    """SAC has no several discrete actions, nor images; CQL no discrete ones."""
    if MODULE_OF[kind] != "sac":
        return True
    return contract is ARM or (contract is CHOICE and kind == "sac")


CASES = [
    (kind, name) for kind in TYPES for name in ("ARM", "CHOICE", "CHOICES", "CAMERA") if fits(kind, globals()[name])
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_bundle_acts_as_rllibs_own_module_and_distribution_do(tmp_path, kind, name):
    contract = globals()[name]
    module, path = bundle_of(tmp_path / "bundle", kind, contract)
    runner = PolicyRunner.load(path, device="cpu", batch_sizes=(1, 4))
    assert isinstance(runner, RLlibRunner)
    runner.warm_up()
    seen = observed(contract, 4)
    with torch.inference_mode():
        batch = {Columns.OBS: torch.from_numpy(runner.seen(seen))}
        inputs = module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
    np.testing.assert_allclose(runner.inputs(seen), inputs.numpy(), atol=1e-6)

    distribution = module.get_inference_action_dist_cls().from_logits(inputs)
    chosen = distribution.to_deterministic().sample()
    chosen = torch.stack(list(chosen), -1) if isinstance(chosen, tuple | list) else chosen
    if MODULE_OF[kind] == "sac" and name == "ARM":
        chosen = torch.tanh(chosen)  # which RLlib leaves out
    wanted = runner.spaces.to_contract(chosen.numpy())
    chunk = runner.act(seen, np.zeros(4, int), np.zeros(4, int))
    assert chunk.action.shape == (4, 1, *contract.action.shape)
    assert chunk.version == read_bundle(path).id
    np.testing.assert_allclose(chunk.action[:, 0], wanted, atol=1e-5)
    low, high = np.asarray(contract.action.low), np.asarray(contract.action.high)
    assert (chunk.action >= low).all()
    assert (chunk.action <= high).all()


@pytest.mark.parametrize(("kind", "name"), [("ppo", "ARM"), ("sac", "ARM"), ("ppo", "CHOICE"), ("ppo", "CHOICES")])
def test_exploring_actions_have_the_modules_distribution(tmp_path, kind, name):
    contract = globals()[name]
    module, path = bundle_of(tmp_path / "bundle", kind, contract)
    runner = RLlibRunner(read_bundle(path), device="cpu", explore=True)
    count = 4000
    one = {key: np.repeat(x, count, 0) for key, x in observed(contract, 1).items()}
    drawn = runner.act(one, np.arange(count), np.zeros(count, int)).action[:, 0]
    torch.manual_seed(0)
    inputs = torch.from_numpy(runner.inputs({key: x[:1] for key, x in one.items()}))
    samples = module.get_exploration_action_dist_cls().from_logits(inputs.repeat(count, 1)).sample()
    samples = torch.stack(list(samples), -1) if isinstance(samples, tuple | list) else samples
    wanted = runner.spaces.to_contract(samples.numpy())
    spread = wanted.std(0) if contract.action.dtype == "float32" else np.ones_like(wanted.std(0))
    np.testing.assert_allclose(drawn.mean(0), wanted.mean(0), atol=0.1 * spread.max())
    np.testing.assert_allclose(drawn.std(0), wanted.std(0), atol=0.1 * spread.max())

    seeds, steps = np.array([7, 8]), np.array([3, 3])
    both = runner.act({key: x[:2] for key, x in one.items()}, seeds, steps).action
    alone = runner.act({key: x[1:2] for key, x in one.items()}, seeds[1:], steps[1:]).action
    np.testing.assert_allclose(both[1:], alone, atol=1e-6)


def test_filtered_observations_are_what_rllibs_filter_gave_in_training(tmp_path):
    from ray.rllib.utils.filter import MeanStdFilter

    _, path = bundle_of(tmp_path / "bundle", "ppo", ARM, filtered=True)
    runner = RLlibRunner(read_bundle(path), device="cpu")
    seen = observed(ARM, 6)
    seen["observation.state"][0] = 1e3  # which is clipped
    raw = runner.spaces.observe({name: x[:, -1] for name, x in seen.items()})
    theirs = MeanStdFilter((5,))
    theirs.running_stats.num_pushes = 11
    theirs.running_stats.mean_array[:] = 2
    theirs.running_stats.sum_sq_diff_array[:] = 16 * 10
    np.testing.assert_allclose(runner.seen(seen), [theirs(row, update=False) for row in raw], atol=1e-5)


def test_the_maps_between_contract_and_module_are_inverse_and_stay_in_range():
    arm = spaces_of(ARM)
    action = np.array([[-1, 0.5], [3, 1.5], [1, 1]], np.float32)
    np.testing.assert_allclose(arm.to_module(action), [[-1, -1], [1, 1], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(arm.to_contract(arm.to_module(action)), action, atol=1e-6)
    np.testing.assert_allclose(arm.to_contract(np.array([[9, -9]])), [[3, 0.5]])
    shifted = replace(CHOICE, action=Feature((), "int64", low=(2.0,), high=(5.0,)))
    choice = spaces_of(shifted)
    assert choice.action == spaces.Discrete(4)
    assert choice.to_contract(np.array([0, 3])).tolist() == [2, 5]
    assert choice.to_module(np.array([2, 5])).tolist() == [0, 3]


def test_an_image_is_in_minus_one_to_one_and_vectors_are_joined_in_the_contracts_order():
    seen = spaces_of(CAMERA).observe({"observation.image": np.full((2, 64, 64, 3), 255, np.uint8)})
    assert (seen.shape, seen.dtype, float(seen.max())) == ((2, 64, 64, 3), np.float32, 1.0)
    joined = spaces_of(ARM).observe({"observation.goal": np.ones((1, 2)), "observation.state": np.zeros((1, 3))})
    assert joined.tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (
            replace(ARM, observation={**ARM.observation, **CAMERA.observation}),
            "vectors or images, not both.*observation",
        ),
        (replace(ARM, observation={"task": Feature((), "str")}), "'task' is a text"),
        (replace(ARM, action=Feature((2,), "float32")), "action: it has no bounds"),
    ],
)
def test_what_rllibs_modules_have_no_place_for_is_refused_by_name(contract, message):
    with pytest.raises(ContractError, match=message):
        spaces_of(contract)


def test_an_episodes_end_means_the_same_to_rllib_as_elsewhere():
    env = make_env(GymnasiumSpec(id="CartPole-v1", max_steps=5))
    wrapped = ModuleEnv(env, spaces_of(env.contract()))
    seen, info = wrapped.reset(seed=0)
    assert (seen.shape, info) == ((4,), {})
    ends = [wrapped.step(step % 2)[2:4] for step in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    wrapped.reset(seed=0)
    for _ in range(4):
        wrapped.step(0)
    env.env.unwrapped.state = np.array([9.0, 0, 0, 0])
    assert wrapped.step(0)[2:4] == (True, False), "off the rail at its last step it is terminated, not truncated"
    wrapped.close()


def test_a_number_that_is_not_finite_is_an_error_so_that_the_environment_is_made_anew():
    class Broken(gymnasium.Env):
        metadata, render_mode = {}, None

        def reset(self, *, seed=None, options=None):
            return {"observation.state": np.zeros(3), "observation.goal": np.full(2, np.nan)}, {}

    with pytest.raises(FloatingPointError, match="observation is not finite"):
        ModuleEnv(Broken(), spaces_of(ARM)).reset()


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_offers_its_own_keys_and_none_that_the_run_says_elsewhere(kind):
    keys = known_keys(default_config(kind))
    assert {"gamma", "train_batch_size_per_learner", "grad_clip", "restart_failed_env_runners"} <= keys.keys()
    assert not keys.keys() & {"num_env_runners", "seed", "learner_class", "env", "env_runner_cls", "model"}
    own = {"ppo": "clip_param", "appo": "circular_buffer_num_batches", "impala": "vtrace_clip_rho_threshold",
           "sac": "tau",
           "cql": "min_q_weight", "marwil": "vf_coeff", "bc": "lr"}  # fmt: skip
    assert own[kind] in keys


@pytest.mark.parametrize(
    ("config", "policy", "message"),
    [
        (
            {"clip_parm": 0.2},
            {},
            r"algo\.config: RLlib's PPOConfig has no key 'clip_parm' \(did you mean 'clip_param'\?\)",
        ),
        ({"gamma": "high"}, {}, r"algo\.config\.gamma: got 'high', expected"),
        ({"num_epochs": 1.5}, {}, r"algo\.config\.num_epochs: got 1\.5, expected"),
        ({"gamma": None}, {}, r"algo\.config\.gamma: got null, RLlib has 0\.99"),
        ({"learner_class": "os.system"}, {}, r"no key 'learner_class'"),
        ({}, {"fcnet_hidden": [8]}, r"DefaultModelConfig has no key 'fcnet_hidden' \(did you mean 'fcnet_hiddens'\?\)"),
        ({}, {"fcnet_hiddens": "wide"}, r"policy\.config\.fcnet_hiddens: got 'wide', expected"),
        ({}, {"use_lstm": True}, r"policy\.config\.use_lstm: got true"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(config, policy, message):
    with pytest.raises(SpecError, match=message):
        check_config(RLlibSpec(type="ppo", config=config), RLlibPolicySpec(config=policy))


def test_a_replay_buffer_by_a_dotted_name_is_refused_since_rllib_would_import_it():
    spec = RLlibSpec(type="sac", config={"replay_buffer_config": {"type": "os.path.join"}})
    with pytest.raises(SpecError, match=r"replay_buffer_config\.type: got 'os\.path\.join'"):
        check_config(spec, RLlibPolicySpec())


def test_values_that_rllib_refuses_together_are_refused_before_anything_is_built():
    with pytest.raises(SpecError, match=r"RLlib's ppo refuses it: .*minibatch_size"):
        make_config(run_of("ppo", "algo.config.minibatch_size=4096"), spaces_of(CHOICE), "x", seed=0)


@pytest.mark.parametrize(
    ("kind", "word", "message"),
    [
        ("ppo", "+algo.config.num_env_runners=2", r"config\.num_env_runners: is rollout\.workers here"),
        ("ppo", "replay.capacity=50", r"replay: .*replay_buffer_config is RLlib's own"),
        ("ppo", "rollout.mode=async", r"rollout\.mode: got async, with algo rllib expected sync"),
        ("ppo", "precision=bf16", r"precision: got bf16, with algo rllib expected fp32"),
        ("ppo", "env=null", r"env: RLlib's ppo learns by stepping an environment"),
        ("cql", "data.reward=null", r"data\.reward: RLlib's cql learns from rewards"),
        ("cql", "algo.observation_filter=mean_std", r"observation_filter: got mean_std, but cql steps no environment"),
        ("ppo", "algo.reward_scale=0.1", r"reward_scale: got 0\.1, but ppo has no recorded rewards"),
        ("cql", "+data.normalization={action: mean_std}", r"data\.normalization\.action: got mean_std"),
        ("ppo", "policy={name: gaussian}", r"policy.*rllib|config"),
    ],
)
def test_what_the_run_says_elsewhere_or_rllib_has_no_place_for_is_refused(kind, word, message):
    with pytest.raises(UserError, match=message):
        run_of(kind, word)


def test_failed_runners_and_environments_are_made_anew_unless_the_run_says_otherwise():
    config = make_config(run_of("ppo"), spaces_of(CHOICE), "x", seed=0)
    assert (config.restart_failed_env_runners, config.restart_failed_sub_environments) == (True, True)
    off = make_config(run_of("ppo", "+algo.config.restart_failed_env_runners=false"), spaces_of(CHOICE), "x", seed=0)
    assert off.restart_failed_env_runners is False


def test_a_state_of_anything_plain_goes_through_safetensors_and_json_and_comes_back():
    from safetensors.numpy import load, save

    tree = {
        "a": {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), 3: torch.ones(2), None: (1, "x", None)},
        "long": list(range(100)), "pairs": [(i, 2 * i, 3) for i in range(100)], "floats": [0.5, np.float64(2)] * 50,
        "queue": deque([1.0, 2.0], maxlen=5), "inf": float("inf"), "big": 2**100, "flag": True,
        "scalar": np.float32(1.5),
    }  # fmt: skip
    arrays, skeleton = pack(tree)
    again = unpack(load(save(arrays)), json.loads(json.dumps(skeleton, allow_nan=False)))
    assert again["a"]["weights"].tolist() == tree["a"]["weights"].tolist()
    assert torch.equal(again["a"][3], torch.ones(2))
    assert again["a"][None] == (1, "x", None)
    assert {k: again[k] for k in ("long", "pairs", "floats", "inf", "big", "scalar", "flag")} == {
        k: tree[k] for k in ("long", "pairs", "floats", "inf", "big", "scalar", "flag")
    }
    assert again["queue"] == tree["queue"]
    assert again["queue"].maxlen == 5
    with pytest.raises(TypeError, match=r"state /x/f: function is neither"):
        pack({"x": {"f": lambda: 0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": "dqn"}, "module 'dqn' is not one of ppo, bc, sac"),
        ({"model_config": {"fcnet_hiddens": [10**9]}}, "weight '.*' has shape .*, the module's has"),
        ({"model_config": {"fcnet_hiddens": ["__import__"]}}, "fcnet_hiddens"),
        ({"model_config": {"unknown": 1}}, "no key 'unknown'"),
        ({"model_config": {"fcnet_activation": "os.system"}}, "RLlib cannot build its module"),
    ],
)
def test_a_bundle_whose_architecture_does_not_fit_is_refused_before_it_takes_memory(tmp_path, changes, message):
    _, path = bundle_of(tmp_path / "bundle", "ppo", ARM, **changes)
    with pytest.raises(BundleError, match=message):
        PolicyRunner.load(path, device="cpu")


def test_a_runner_takes_other_weights_of_the_same_policy_and_refuses_another_policys(tmp_path):
    _, path = bundle_of(tmp_path / "a", "ppo", ARM)
    bundle = read_bundle(path)
    other = {name: x + 0.1 for name, x in bundle.params.items()}
    second = write_bundle(
        tmp_path / "b", policy=bundle.policy, contract=ARM, normalizer=bundle.normalizer, params=other
    )
    runner = RLlibRunner(bundle, device="cpu")
    before = runner.inputs(observed(ARM, 2))
    runner.set_weights(read_bundle(second))
    assert runner.version == read_bundle(second).id
    assert not np.allclose(runner.inputs(observed(ARM, 2)), before)
    _, third = bundle_of(tmp_path / "c", "sac", ARM)
    with pytest.raises(BundleError, match="its policy is not that of"):
        runner.set_weights(read_bundle(third))


def episode(length: int, terminated: bool) -> dict[str, np.ndarray]:
    steps = np.arange(length, dtype=np.float32)
    columns = {
        "observation.state": np.repeat(steps[:, None], 3, 1), "observation.goal": np.zeros((length, 2), np.float32),
        "action": np.tile(np.float32([1, 1]), (length, 1)), "reward": steps,
        "done": np.array([False] * (length - 1) + [terminated]),
    }  # fmt: skip
    return rows_of_episode(columns, 0, tuple(ARM.observation), "action", "reward", "done")


def test_recorded_transitions_end_where_the_episode_did_and_bootstrap_where_it_was_cut():
    data = RecordedEpisodes(None)
    data.fill([episode(4, True), episode(4, False)], spaces_of(ARM), seed=0)
    columns = data._columns
    assert columns[Columns.REWARDS].tolist() == [0, 1, 2, 3, 0, 1, 2], "a cut episode gives up its last step"
    assert columns[Columns.TERMINATEDS].tolist() == [False, False, False, True, False, False, False]
    assert columns[Columns.TRUNCATEDS].tolist() == [False] * 6 + [True]
    assert columns[Columns.NEXT_OBS][:, 0].tolist() == [1, 2, 3, 3, 1, 2, 3]
    np.testing.assert_allclose(columns[Columns.ACTIONS], 0, atol=1e-6)

    again = RecordedEpisodes(None)
    again.fill([episode(4, True), episode(4, False)], spaces_of(ARM), seed=0)
    assert again._columns[Columns.REWARDS].tolist() == columns[Columns.REWARDS].tolist()
    mine, theirs = (x.transitions(8, 3)[DEFAULT_MODULE_ID][Columns.REWARDS].tolist() for x in (data, again))
    assert mine == theirs != data.transitions(8, 4)[DEFAULT_MODULE_ID][Columns.REWARDS].tolist()
    whole = data.whole(9, 0)
    assert sum(len(each) for each in whole) >= 9
    assert {(len(each), each.is_terminated, each.is_truncated) for each in whole} <= {
        (4, True, False),
        (3, False, True),
    }


def test_whoever_imports_rllib_first_has_cameras_drawn_without_a_display(root):
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY")}
    script = "import os, rlsvc.backends.rllib_opengl; print(os.environ['MUJOCO_GL'])"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "egl", done.stderr
    for file in (root / "rlsvc" / "backends").glob("*.py"):
        text = file.read_text()
        if "from ray.rllib" in text:
            first = text.index("import rlsvc.backends.rllib_opengl") if "rllib_opengl" in text else len(text)
            assert first < text.index("from ray.rllib"), f"{file.name} imports RLlib before OpenGL is chosen"


def test_recorded_rewards_are_scaled_and_nothing_else():
    data = RecordedEpisodes(None)
    data.fill([episode(4, True)], spaces_of(ARM), seed=0, reward_scale=0.5)
    assert data._columns[Columns.REWARDS].tolist() == [0, 0.5, 1, 1.5]
    assert data._columns[Columns.NEXT_OBS][:, 0].tolist() == [1, 2, 3, 3]


def test_what_is_seen_of_an_environment_that_gives_images_and_vectors_is_chosen_or_refused_by_name():
    env = make_env(PushTSpec(observation="pixels"))
    contract = env.contract()
    env.close()
    with pytest.raises(ContractError, match=r"images observation\.image and the vectors observation\.state; name what"):
        spaces_of(contract)
    assert spaces_of(seen_contract(contract, ("observation.state",))).observation.shape == (2,)
    assert spaces_of(seen_contract(contract, ("observation.image",))).observation.shape == (96, 96, 3)
    with pytest.raises(ContractError, match=r"no 'observation\.images' \(did you mean 'observation\.image'\?\)"):
        seen_contract(contract, ("observation.images",))
