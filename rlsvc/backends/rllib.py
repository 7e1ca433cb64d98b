"""RLlib's algorithms for a run: built, stepped, stored without pickles, exported; the loop is rlsvc/train/rllib.py.

The Algorithm lives in the run's own process. Its environment runners are Ray actors, restarted when they die; with
several ranks, or a GPU, its learners are too.

Letters: D numbers of an observation.
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.registry import register_env
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlsvc.backends.rllib_config import check_config, make_config
from rlsvc.backends.rllib_module import FILTER, MODULE, MODULE_OF, whole_model_config
from rlsvc.backends.rllib_recorded import RecordedEpisodes, Rows
from rlsvc.backends.rllib_spaces import EnvMaker, ModuleSpaces
from rlsvc.backends.rllib_state import (
    learned_state,
    pack,
    random_state,
    replay_state,
    set_learned_state,
    set_random_state,
    set_replay_state,
    unpack,
)
from rlsvc.core.contract import Contract
from rlsvc.core.errors import SpecError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.spec.rllib import RLlibPolicySpec, RLlibSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import write_bundle

STATE, SKELETON = "state.safetensors", "state.json"
COLLECTED = {"episode_return_mean": "collect/return", "episode_len_mean": "collect/length"}
"""What RLlib's environment runners tell of the episodes that ended, over its window of the newest 100."""
COUNTERS = ("num_", "weights_seq_no", "module_train_batch_size", "last_target_update_ts")
"""Beginnings of names among a module's numbers that say nothing of how it learns."""


def check_rllib(spec: RunSpec) -> None:
    """Refuse what RLlib would, before anything starts.

    Raises:
        SpecError: a key, or a value, of `algo.config` or `policy.config`.
    """
    assert isinstance(spec.algo, RLlibSpec)
    assert isinstance(spec.policy, RLlibPolicySpec)
    check_config(spec.algo, spec.policy)


class RLlibTrainer:
    """An Algorithm under way.

    Attributes:
        clock: environment steps that were sampled, or updates on recorded data.
    """

    def __init__(
        self,
        spec: RunSpec,
        contract: Contract,
        normalizer: Normalizer,
        *,
        episodes: Sequence[Rows] = (),
        begun: int = 0,
    ) -> None:
        """Build the Algorithm, its runners and learners.

        Args:
            spec: of the run.
            contract: of the policy.
            normalizer: of the contract's features.
            episodes: recorded ones, where the type learns from them.
            begun: the clock at which it goes on, 0 for a new run; environments then begin from other seeds.

        Raises:
            UserError: spaces that RLlib has no module for, a configuration that it refuses, or an environment that no
                runner could make.
        """
        assert isinstance(spec.algo, RLlibSpec)
        self.spec, self.algo_spec, self.contract, self.normalizer = spec, spec.algo, contract, normalizer
        self.spaces = ModuleSpaces(contract, normalizer)
        name = None
        if not spec.algo.recorded:
            name = f"rlsvc-{uuid.uuid4().hex}"
            assert spec.env is not None
            register_env(name, EnvMaker(spec.env, self.spaces))
        config = make_config(spec, self.spaces, name, seed=(spec.seed + begun) % 2**31)
        try:
            # Any: what RLlib declares as Optional is there once it is built.
            self.algorithm: Any = config.build_algo()
        except (ValueError, NotImplementedError) as error:
            raise SpecError(f"RLlib's {spec.algo.type} cannot be built: {str(error).strip()}") from error
        if spec.algo.recorded:
            try:
                self.recorded.fill(episodes, self.spaces, spec.seed, spec.algo.reward_scale)
            except BaseException:
                self.close()
                raise

    @property
    def recorded(self) -> RecordedEpisodes:
        """The data of a type that learns from it."""
        data = self.algorithm.offline_data
        assert isinstance(data, RecordedEpisodes)
        return data

    @property
    def clock(self) -> int:
        """See the class."""
        if self.algo_spec.recorded:
            return self.recorded.updates
        return int(self.algorithm.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0))

    def step(self, at_most: int) -> dict[str, float]:
        """One iteration; `at_most`: updates on recorded data. What it logs, by this project's names.

        Raises:
            RuntimeError: all environment runners are lost, and lost again after they were restarted.
        """
        before, begin = self.clock, time.monotonic()
        if self.algo_spec.recorded:
            self.recorded.due = at_most
        result = self.algorithm.train()
        metrics = _metrics(result)
        if not self.algo_spec.recorded:
            metrics["collect/steps_per_s"] = (self.clock - before) / max(time.monotonic() - begin, 1e-9)
            metrics["progress/env_steps"] = float(self.clock)
        return metrics

    def save(self, folder: Path) -> Path:
        """Write and commit the checkpoint of the clock under `folder`, as `rlsvc.store.checkpoint` does.

        Raises:
            UserError: the disk has no room.
        """
        step = self.clock
        if step in checkpoint.steps(folder):
            return folder / str(step)
        arrays, skeleton = pack(self._state())
        with checkpoint.begun(folder, step, sum(x.nbytes for x in arrays.values())) as partial:
            save_file(arrays, partial / STATE)
            (partial / SKELETON).write_text(json.dumps(skeleton))
            for name in (STATE, SKELETON):
                with (partial / name).open("rb") as written:
                    os.fsync(written.fileno())
            return checkpoint.commit(partial, step, {"rllib": self.algo_spec.type})

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"algorithm": self.algorithm.get_state(), "random": random_state()}
        state["learned"] = _first(self.algorithm.learner_group.foreach_learner(learned_state))
        if self.algo_spec.recorded:
            state["updates"] = self.recorded.updates
        elif self._stores_replay:
            state["replay"] = replay_state(self.algorithm.local_replay_buffer)
        return state

    @property
    def _stores_replay(self) -> bool:
        buffer = self.algorithm.local_replay_buffer
        return buffer is not None and bool(getattr(self.algorithm.config, "store_buffer_in_checkpoints", False))

    def restore(self, path: Path) -> None:
        """Go on from a committed checkpoint.

        Raises:
            UserError: it is damaged, or of another algorithm or module.
        """
        try:
            state = unpack(load_file(path / STATE), json.loads((path / SKELETON).read_text()))
            self._set_state(state)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(
                f"checkpoint {path} cannot be read ({type(error).__name__}: {error}). It is damaged, or of another "
                "algorithm; delete this folder to resume from the one before it."
            ) from error

    def _set_state(self, state: Mapping[str, Any]) -> None:
        whole = dict(state["algorithm"])
        # Weights are taken over only by who has older ones.
        self.algorithm.learner_group.foreach_learner(_forget_version)
        if self.algorithm.env_runner_group is not None:
            self.algorithm.env_runner_group.foreach_env_runner(_forget_version)
        if self.algo_spec.recorded:
            # RLlib's own way would give weights to environment runners, of which there are none.
            self.algorithm.learner_group.set_state(whole["learner_group"])
            self.algorithm.metrics.set_state(whole["metrics_logger"])
            self.recorded.updates = int(state["updates"])
        else:
            self.algorithm.set_state(whole)
        learned = state["learned"]
        self.algorithm.learner_group.foreach_learner(lambda learner: set_learned_state(learner, learned))
        if "replay" in state and self._stores_replay:
            set_replay_state(self.algorithm.local_replay_buffer, state["replay"], self.spaces)
        set_random_state(state["random"])

    def params(self) -> dict[str, np.ndarray]:
        """Weights that act, `module/<name>`, and what observations are filtered by, `filter/mean` and `filter/std`."""
        state = self.algorithm.learner_group.get_state(
            components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}", inference_only=True
        )
        weights = state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
        found = {f"{MODULE}{name}": np.asarray(x) for name, x in weights.items()}
        if self.algo_spec.observation_filter == "mean_std":
            found |= self._filter()
        return found

    def _filter(self) -> dict[str, np.ndarray]:
        from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
        from ray.rllib.utils.filter import RunningStat

        connectors: list[Any] = self.algorithm.env_runner._env_to_module.connectors
        (piece,) = [each for each in connectors if isinstance(each, MeanStdFilter)]
        ((told,),) = [agent["running_stats"] for agent in piece.get_state().values()]
        stats = RunningStat.from_state(told)
        return {f"{FILTER}mean": np.asarray(stats.mean, np.float32), f"{FILTER}std": np.asarray(stats.std, np.float32)}

    def export(self, path: Path) -> Path:
        """Write the bundle of the weights that act.

        Raises:
            BundleError: a weight is not finite.
        """
        run = {"project": self.spec.project, "name": self.spec.name, "seed": self.spec.seed, "step": self.clock}
        config = self.algorithm.config
        return write_bundle(
            path,
            policy={
                "name": "rllib",
                "type": self.algo_spec.type,
                "module": MODULE_OF[self.algo_spec.type],
                "model_config": whole_model_config(config.model_config),
            },
            contract=self.contract,
            normalizer=self.normalizer,
            params=self.params(),
            run=run,
        )

    def close(self) -> None:
        """End runners and learners."""
        logdir = self.algorithm.logdir
        self.algorithm.stop()
        if logdir is not None:
            shutil.rmtree(logdir, ignore_errors=True)  # RLlib makes one in the home directory


def _forget_version(holder: Any) -> None:
    """Let a learner or an environment runner take any weights for newer ones."""
    holder._weights_seq_no = 0


def _first(results: Any) -> Any:
    """What the first learner said."""
    for result in results:
        return result.get() if hasattr(result, "get") and not isinstance(result, dict) else result
    raise RuntimeError("no learner answers")


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """An iteration's numbers: `train/<name>` of the module's losses, `collect/<name>` of episodes that ended."""
    found: dict[str, float] = {}
    for name, value in dict(result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})).items():
        number = _number(value)
        if number is not None and not name.startswith(COUNTERS):
            found[f"train/{name}"] = number
    runners = result.get(ENV_RUNNER_RESULTS, {})
    for theirs, ours in COLLECTED.items():
        number = _number(runners.get(theirs))
        if number is not None and math.isfinite(number):
            found[ours] = number
    faults = result.get("fault_tolerance", {})
    if (restarts := _number(faults.get("num_remote_worker_restarts"))) is not None:
        found["rollout/restarts"] = restarts
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool | str) or value is None:
        return None
    array = np.asarray(value) if not hasattr(value, "detach") else value.detach().cpu().numpy()
    return float(array) if array.ndim == 0 and array.dtype.kind in "fiu" else None
