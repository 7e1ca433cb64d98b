"""RLlib's AlgorithmConfig for a run: what the specification says, in RLlib's own setters, checked by their types.

What may be named in `algo.config` are the arguments of AlgorithmConfig's setters whose values YAML can say; each value
is checked against the argument's annotation, and the whole by RLlib's own `validate`.
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

import dataclasses
import importlib
import inspect
import logging
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rlsvc.backends.rllib_spaces import ModuleSpaces
from rlsvc.core.errors import SpecError, nearest
from rlsvc.spec.env import RobotEnvSpec
from rlsvc.spec.needs import robot_resources
from rlsvc.spec.rllib import OURS, RLlibPolicySpec, RLlibSpec, remote_learners
from rlsvc.spec.run import RunSpec

CONFIGS = {
    "ppo": "ray.rllib.algorithms.ppo:PPOConfig",
    "appo": "ray.rllib.algorithms.appo:APPOConfig",
    "impala": "ray.rllib.algorithms.impala:IMPALAConfig",
    "sac": "ray.rllib.algorithms.sac:SACConfig",
    "cql": "ray.rllib.algorithms.cql:CQLConfig",
    "marwil": "ray.rllib.algorithms.marwil:MARWILConfig",
    "bc": "ray.rllib.algorithms.bc:BCConfig",
}
SETTERS = ("training", "env_runners", "learners", "environment", "reporting", "fault_tolerance", "debugging")
"""Of AlgorithmConfig; what the others set is the run's."""
BUFFERS = ("EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer")
"""Replay buffers by name; RLlib itself would import whatever a dotted name says."""
BUFFER_KEYS = {"type": Literal["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"], "capacity": int,
               "alpha": float, "beta": float}  # fmt: skip
STATEFUL = ("use_lstm", "use_attention")
PLAIN = (int, float, str, bool, types.NoneType)
RESTART_DELAY_S = 1.0


def default_config(kind: str) -> AlgorithmConfig:
    """RLlib's own configuration of a type."""
    module, _, name = CONFIGS[kind].partition(":")
    return getattr(importlib.import_module(module), name)()


def known_keys(config: AlgorithmConfig) -> dict[str, tuple[str, Any]]:
    """Keys that `algo.config` may have: by name the setter that takes it and the annotation of its values."""
    found: dict[str, tuple[str, Any]] = {}
    for setter in SETTERS:
        for cls in type(config).__mro__:
            method = vars(cls).get(setter)
            if method is None:
                continue
            for parameter in inspect.signature(method).parameters.values():
                offered = parameter.kind is parameter.KEYWORD_ONLY and not parameter.name.startswith("_")
                plain = _is_plain(parameter.annotation) or parameter.name == "replay_buffer_config"
                if offered and plain and parameter.name not in OURS:
                    found.setdefault(parameter.name, (setter, parameter.annotation))
    return found


def _is_plain(annotation: Any) -> bool:
    """Whether YAML can say all values of a type: numbers, texts, flags, and lists of them."""
    if annotation in PLAIN:
        return True
    if get_origin(annotation) in (Union, types.UnionType, list, tuple, Literal):
        return all(part is Ellipsis or get_origin(annotation) is Literal or _is_plain(part)
                   for part in get_args(annotation))  # fmt: skip
    return False


def check_config(algo: RLlibSpec, policy: RLlibPolicySpec) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The checked values of `algo.config`, by setter, and of `policy.config`.

    Raises:
        SpecError: an unknown key (with the nearest), or a value of another type than RLlib has it.
    """
    config = default_config(algo.type)
    keys = known_keys(config)
    chosen: dict[str, dict[str, Any]] = {}
    for name, value in algo.config.items():
        if name not in keys:
            raise _unknown(f"algo.config: RLlib's {type(config).__name__}", name, keys)
        setter, annotation = keys[name]
        default = getattr(config, "lambda_" if name == "lambda" else name, None)
        if value is None and default is not None:
            raise SpecError(f"algo.config.{name}: got null, RLlib has {default!r} where nothing is said")
        if name == "replay_buffer_config":
            checked: Any = _check_buffer(value)
        else:
            checked = _checked(f"algo.config.{name}", value, annotation)
        chosen.setdefault(setter, {})[name] = checked
    return chosen, check_model(policy)


def _unknown(what: str, name: str, choices: Any) -> SpecError:
    guess = nearest(name, choices)
    hint = f" (did you mean '{guess}'?)" if guess else f"; it has: {', '.join(sorted(choices))}"
    return SpecError(f"{what} has no key '{name}'{hint}")


def _checked(where: str, value: Any, annotation: Any) -> Any:
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        raise SpecError(
            f"{where}: got {value!r}, expected {_shown(annotation)} ({error.errors()[0]['msg']})"
        ) from error


def _shown(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _check_buffer(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"algo.config.replay_buffer_config: got {value!r}, expected {', '.join(BUFFER_KEYS)} by name")
    for name in value:
        if name not in BUFFER_KEYS:
            raise _unknown("algo.config.replay_buffer_config", str(name), BUFFER_KEYS)
    where = "algo.config.replay_buffer_config"
    return {name: _checked(f"{where}.{name}", x, BUFFER_KEYS[name]) for name, x in value.items()}


def check_model(policy: RLlibPolicySpec) -> dict[str, Any]:
    """The checked fields of `policy.config`."""
    fields = {field.name: field.type for field in dataclasses.fields(DefaultModelConfig)}
    checked: dict[str, Any] = {}
    for name, value in policy.config.items():
        if name not in fields:
            raise _unknown("policy.config: RLlib's DefaultModelConfig", name, fields)
        if name in STATEFUL and value:
            raise SpecError(
                f"policy.config.{name}: got true, but a policy of RLlib's keeps no state here; leave it out"
            )
        annotation: Any = fields[name]
        if "initializer" in name:
            annotation = dict[str, Any] | None if name.endswith("_kwargs") else str | None
        checked[name] = _checked(f"policy.config.{name}", value, annotation)
    return checked


def make_config(spec: RunSpec, module: ModuleSpaces, env: str | None, *, seed: int) -> AlgorithmConfig:
    """RLlib's configuration of a run.

    Args:
        spec: whose `algo` is RLlib's.
        module: its spaces.
        env: the name under which RLlib knows the environment; None where it learns from recorded data.
        seed: of weights, actions and environments.

    Raises:
        SpecError: as `check_config`; or values that RLlib refuses together.
    """
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)
    algo, policy, rollout, learner = spec.algo, spec.policy, spec.rollout, spec.learner
    assert isinstance(algo, RLlibSpec)
    assert isinstance(policy, RLlibPolicySpec)
    chosen, model = check_config(algo, policy)
    config = default_config(algo.type)
    ranks = remote_learners(learner)
    config.framework("torch")
    config.environment(
        env=env, observation_space=module.observation, action_space=module.action,
        normalize_actions=False, clip_actions=False, disable_env_checking=True,
    )  # fmt: skip
    config.env_runners(
        num_env_runners=0 if algo.recorded else rollout.workers,
        num_envs_per_env_runner=rollout.envs_per_worker,
        num_cpus_per_env_runner=rollout.cpus_per_worker,  # pyright: ignore[reportArgumentType] - Ray takes fractions
        custom_resources_per_env_runner=robot_resources(spec.env),
        sample_timeout_s=rollout.timeout_s,
    )
    if isinstance(spec.env, RobotEnvSpec) and algo.type == "ppo":
        # A robot does not wait in the middle of an episode for an update: what is awaited is whole episodes.
        config.env_runners(batch_mode="complete_episodes")
    if algo.observation_filter == "mean_std":
        config.env_runners(env_to_module_connector=_mean_std)
    config.learners(
        num_learners=ranks,
        num_cpus_per_learner=learner.cpus_per_rank if ranks else "auto",
        num_gpus_per_learner=(learner.gpus_per_rank or 0) if ranks else 0,
    )
    config.fault_tolerance(
        restart_failed_env_runners=True,
        restart_failed_sub_environments=True,
        max_num_env_runner_restarts=rollout.max_restarts,
        delay_between_env_runner_restarts_s=RESTART_DELAY_S,
    )
    config.debugging(seed=seed, log_level="ERROR", log_sys_usage=False)
    config.rl_module(model_config=model)
    _fit_to_type(config, algo)
    for setter, values in chosen.items():
        getattr(config, setter)(**values)
    try:
        config.copy(copy_frozen=False).validate()
    except (ValueError, NotImplementedError) as error:
        raise SpecError(f"algo.config: RLlib's {algo.type} refuses it: {str(error).strip()}") from error
    return config


def _mean_std(*_: Any, **__: Any) -> Any:
    from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter

    return MeanStdFilter()


def _fit_to_type(config: AlgorithmConfig, algo: RLlibSpec) -> None:
    """What a type needs to run here, where RLlib's default is another."""
    if algo.type in ("appo", "impala"):
        # An iteration ends with a batch's worth of steps, not after ten seconds.
        config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=500)
    if algo.type == "sac":
        config.reporting(min_time_s_per_iteration=0)
        config.training(store_buffer_in_checkpoints=True)  # pyright: ignore[reportCallIssue] - SAC's own
    if algo.recorded:
        from rlsvc.backends.rllib_recorded import ALGORITHMS, RecordedEpisodes

        config.algo_class = ALGORITHMS[algo.type]
        # CQL's says that it steps environments too, of which it then wants one.
        config._is_online = False  # pyright: ignore[reportPrivateUsage]
        config.offline_data(input_="recorded", offline_data_class=RecordedEpisodes, dataset_num_iters_per_learner=1)
        config.reporting(min_time_s_per_iteration=0, min_train_timesteps_per_iteration=0)
    if algo.type == "cql":
        from rlsvc.backends.rllib_recorded import CountingCQLLearner

        config.learners(learner_class=CountingCQLLearner)
        config.training(lr=None)  # it has rates for each part
