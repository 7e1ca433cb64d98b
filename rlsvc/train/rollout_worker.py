"""A rollout worker: it steps environments, acts in them, and packs what happened into chunks.

It knows nothing of learning, of Ray, or of other workers (rlsvc/train/rollout.py).

A policy that gives several actions at once is asked again when they are used up, when an episode begins, and after
every step in which somebody else acted. An action of it carries the version of the weights that chose it.

Letters: N environments of a worker (streams), L steps of a chunk, T observation steps, R rows of a chunk, H actions
that the policy gives at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.types import INTERVENTION, Chunk
from rlsvc.data.normalize import Normalizer
from rlsvc.data.texts import encode_texts
from rlsvc.envs.stand_in import StandIn
from rlsvc.envs.vector import VectorEnv, episode_seed, random_actions
from rlsvc.runner import PolicyRunner, Runner
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.env import EnvSpec
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.spec.robot import RobotSpec
from rlsvc.spec.run import RunSpec
from rlsvc.spec.stand_in import StandInSpec
from rlsvc.store.bundle import Bundle, read_bundle
from rlsvc.store.registry import resolve


@dataclass(frozen=True)
class Acting:
    """What acts, without its weights; plain values, so that it travels to actors.

    Attributes:
        policy: its specification, with `name`.
        contract: what it sees and does.
        normalizer: between the contract's units and the policy's.
        precision: "fp32" or "bf16".
        extras: what the policy hands out besides actions and the learner wants stored, feature by name.
        folder: with the policy's other files (a tokenizer).
        robot: whose numbers the policy learns; None where it takes them as they are.
        group: of the normaliser; None where it has one.
        stand_in: takes over in the environments; None leaves them to the policy.
        reward: says what is rewarded, its classifier a folder; None leaves that to the environments.
    """

    policy: dict[str, Any]
    contract: Contract
    normalizer: Normalizer
    precision: str
    extras: dict[str, Feature] = field(default_factory=dict)
    folder: Path = Path()
    robot: RobotSpec | None = None
    group: str | None = None
    stand_in: StandInSpec | None = None
    reward: RewardSourceSpec | None = None

    def runner(self, batch_sizes: tuple[int, ...], device: str) -> PolicyRunner:
        """A runner that explores; it has no weights yet."""
        bundle = Bundle(
            "", self.policy, self.precision, self.contract, self.normalizer, {}, {}, self.folder, self.robot
        )
        return PolicyRunner(bundle, batch_sizes=batch_sizes, device=device, explore=True, group=self.group)

    def wrap(self) -> Callable[[Any], Any] | None:
        """What stands around each environment of a worker; None where nothing does."""
        judged: Callable[[Any], Any] = _itself
        if self.reward is not None:
            from rlsvc.train.reward import ClassifierReward, RewardRunner

            judge = RewardRunner(self.reward.classifier, device="cpu")
            judged = partial(ClassifierReward, spec=self.reward, runner=judge)
        if self.stand_in is not None:
            stand_in = self.stand_in
            return lambda env: StandIn(judged(env), stand_in)
        return None if self.reward is None else judged


def _itself(env: Any) -> Any:
    return env


ACTING = "acting"
"""In a run's folder: a bundle without weights, from which rollout workers know what the learner made of the data."""


def make_acting(spec: RunSpec, contract: Contract | None, run_dir: Path) -> Acting:
    """The policy of a run as its rollout workers need it.

    Args:
        spec: of the run.
        contract: the environment's, or that of robots far away; None where the learner says it of its windows.
        run_dir: where the learner says what it made of demonstrations, if it learns from windows of them.
    """
    if ALGORITHMS[spec.algo.name].episodes is not None:
        made = read_bundle((run_dir / ACTING).absolute())
        return Acting(
            made.policy, made.contract, made.normalizer, made.precision, folder=made.path, robot=made.robot,
            group=spec.evaluation.group, **_around(spec),
        )  # fmt: skip
    assert contract is not None
    policy = spec.policy.model_dump(mode="json")
    acting = Acting(policy, contract, Normalizer.from_contract(contract), spec.precision, extra_columns(spec, contract))
    return replace(acting, **_around(spec))


def _around(spec: RunSpec) -> dict[str, Any]:
    reward = spec.rollout.reward
    if reward is not None:
        path = resolve(reward.classifier, root=spec.root, uri=spec.tracking.mlflow_uri)
        reward = reward.replace(classifier=str(path.absolute()))
    return {"stand_in": spec.rollout.stand_in, "reward": reward}


def extra_columns(spec: RunSpec, contract: Contract) -> dict[str, Feature]:
    """What the policy hands out besides actions and the algorithm wants stored with each step."""
    names = ALGORITHMS[spec.algo.name].extras(spec.algo)
    if not names:
        return {}
    import jax

    from rlsvc.policies import ActOptions, make_policy

    policy = make_policy(spec.policy.model_dump(mode="json"), contract, spec.precision)

    def act(key: Any) -> dict[str, Any]:
        observation = {name: jax.numpy.asarray(x) for name, x in contract.example_observation(1).items()}
        options = ActOptions(explore=True)
        return policy.act(policy.init(key), observation, policy.initial_carry(1), key[None], options)[2]

    shapes = jax.eval_shape(act, jax.random.key(0))
    return {name: Feature(shapes[name].shape[1:], "float32") for name in names}


class RolloutWorker:
    """One vector of environments.

    Consumes requests for chunks and weights, produces chunks; waits for its runner only.
    """

    def __init__(
        self,
        env: EnvSpec,
        acting: Acting,
        *,
        worker: int,
        num_envs: int,
        seed: int,
        incarnation: int = 0,
        runner: Runner | None = None,
    ) -> None:
        """Make the environments.

        Args:
            env: specification of every one of them.
            acting: the policy that acts.
            worker: number in the run; its streams are worker * num_envs ...
            num_envs: N.
            seed: of the run; environments and noise follow from it, the stream, the incarnation and the episode.
            incarnation: how often this worker was started before, over all resumes of the run.
            runner: acts; None makes one of its own on the CPU.
        """
        self.worker, self.incarnation, self.seed = worker, incarnation, seed
        self._acting, self._contract = acting, acting.contract
        self._env = VectorEnv(env, num_envs, acting.wrap())
        # Rows are the environment's own, whatever the policy makes of them.
        self._seen = {name: self._env.contract.observation[name] for name in acting.contract.observation}
        self._texts = [name for name, feature in self._seen.items() if feature.dtype == TEXT]
        self._runner = runner
        self._streams = np.arange(worker * num_envs, (worker + 1) * num_envs, dtype=np.int32)
        self._version, self._number, self._episodes = -1, 0, 0
        self._random = np.random.default_rng((seed, worker, incarnation))
        self._observation: dict[str, np.ndarray] | None = None
        self._buffers: dict[str, np.ndarray] = {}

    def collect(
        self, num_steps: int, acting: str = "policy", weights: Mapping[str, Any] | None = None, version: int = -1
    ) -> Chunk:
        """Step every environment `num_steps` times.

        Args:
            num_steps: L.
            acting: "policy", or "random" for uniform actions.
            weights: newer ones, host arrays by name; None keeps those of before.
            version: of `weights`.
        """
        if weights is not None and version != self._version:
            self.set_weights(weights, version)
        if self._observation is None:
            if self._runner is not None and max(version, self._version) >= 0:
                self._runner.warm_up()  # not in an episode, in whose middle a robot would miss its commands
            self._begin()
        n, columns = self._env.num_envs, self._allocate(num_steps)
        keep = np.ones((num_steps, n), bool)
        finals: list[tuple[int, int, dict[str, np.ndarray]]] = []
        ended: dict[str, list[Any]] = {"return": [], "length": [], "success": []}
        lost = 0
        # Written ahead, and anew from where an episode begins: in most steps none does.
        columns["step"][:], columns["episode"][:] = self._steps + np.arange(num_steps)[:, None], self._episode
        uniform = self._uniform(num_steps) if acting == "random" else None
        if uniform is not None:
            columns["action"][:], columns["version"][:] = uniform, -1
            for key in self._acting.extras:
                columns[key][:] = 0
        for t in range(num_steps):
            observation = self._observation
            assert observation is not None
            for key in self._contract.observation:
                columns[key][t] = observation[key]
            if uniform is not None:
                action = uniform[t]
            else:
                action, extras, versions = self._act()
                columns["action"][t], columns["version"][t] = action, versions
                for key in self._acting.extras:
                    columns[key][t] = extras.get(key, 0.0)
            out = self._env.step(action)
            for key, values in out.columns.items():
                columns[key][t] = values
            columns["reward"][t], columns["terminated"][t] = out.reward, out.terminated
            columns["truncated"][t] = out.truncated
            self._steps += 1
            self._returns += out.reward
            self._observation = out.observation
            over = out.ended | out.lost
            # On a few flags `in` a list takes a fifth of the time of numpy's any().
            if True in over.tolist():
                for i in np.flatnonzero(over):
                    if out.lost[i]:
                        lost += 1
                        # What this chunk has of the episode is discarded with it.
                        keep[: t + 1, i] &= columns["episode"][: t + 1, i] != self._episode[i]
                    else:
                        finals.append(
                            (t, int(i), {key: out.final_observation[key][i] for key in self._contract.observation})
                        )
                        ended["return"].append(self._returns[i])
                        ended["length"].append(self._steps[i])
                        ended["success"].append(out.success[i])
                self._start_episodes(over)
                columns["step"][t + 1 :, over] = np.arange(num_steps - t - 1)[:, None]
                columns["episode"][t + 1 :, over] = self._episode[over]
            self._slide(out.observation, over)
            self._used += 1
            self._used[over] = self._horizon
            if INTERVENTION in out.columns:
                self._used[out.columns[INTERVENTION]] = self._horizon
        columns["is_first"][:] = columns["step"] == 0
        chunk = self._pack(columns, keep, finals, ended, lost)
        self._number += 1
        return chunk

    def set_weights(self, params: Any, version: int) -> None:
        """Act with these weights from now on."""
        if self._runner is None:
            self._runner = self._acting.runner((self._env.num_envs,), "cpu")
        if isinstance(self._runner, PolicyRunner):
            self._runner.set_params(params, str(version))
        self._version = version

    def close(self) -> None:
        """Close the environments."""
        self._env.close()

    def _begin(self) -> None:
        n = self._env.num_envs
        seeds, self._noise_seeds = (
            [_seed(self.seed, use, int(stream), self.incarnation) for stream in self._streams] for use in (0, 1)
        )
        self._observation = self._env.reset(seeds)
        self._steps, self._returns = np.zeros(n, np.int32), np.zeros(n, np.float64)
        self._episode, self._noise = np.zeros(n, np.int64), np.zeros(n, np.uint32)
        self._carry: Any = None
        self._horizon = self._contract.action_horizon
        self._actions = np.zeros((n, self._horizon, *self._contract.action.shape), self._contract.action.dtype)
        self._used, self._versions = np.full(n, self._horizon), np.full(n, -1, np.int32)
        every = np.ones(n, bool)
        self._start_episodes(every)
        self._window: dict[str, np.ndarray] = {}
        self._slide(self._observation, every)

    def _start_episodes(self, rows: np.ndarray) -> None:
        for i in np.flatnonzero(rows):
            # Unique in the run: 2^15 workers, 2^20 incarnations of each, 2^28 episodes of those.
            self._episode[i] = (self.worker << 48) | (self.incarnation << 28) | self._episodes
            self._noise[i] = episode_seed(self._noise_seeds[i], self._episodes)
            self._episodes += 1
        self._steps[rows], self._returns[rows] = 0, 0.0

    def _slide(self, observation: Mapping[str, np.ndarray], begins: np.ndarray) -> None:
        """Keep the last T observations of each environment, [N, T, ...]; the first of an episode is repeated."""
        t = self._contract.n_obs_steps
        for key in self._contract.observation:
            newest = observation[key][:, None]
            if t == 1:
                self._window[key] = newest
                continue
            if key not in self._window:
                self._window[key] = np.repeat(newest, t, axis=1)
                continue
            window = np.concatenate([self._window[key][:, 1:], newest], axis=1)
            window[begins] = newest[begins]
            self._window[key] = window

    def _act(self) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | int]:
        """Actions [N, ...], extras, and the version of the weights that chose them, [N] or for all."""
        assert self._runner is not None, "acting before any weights were given"
        if self._horizon == 1:
            chunk = self._runner.act(self._window, self._noise, self._steps, self._carry)
            self._carry = chunk.carry
            return chunk.action[:, 0], chunk.extras, int(chunk.version)
        asks = np.flatnonzero(self._used >= self._horizon)
        if len(asks):
            # Policies that give several actions keep no carry, so that rows can be asked for alone.
            window = {name: values[asks] for name, values in self._window.items()}
            chunk = self._runner.act(window, self._noise[asks], self._steps[asks])
            self._actions[asks], self._versions[asks], self._used[asks] = chunk.action, int(chunk.version), 0
        return self._actions[np.arange(len(self._used)), self._used], {}, self._versions

    def _uniform(self, num_steps: int) -> np.ndarray:
        n, shape = self._env.num_envs, self._contract.action.shape
        return random_actions(self._contract, num_steps * n, self._random).reshape(num_steps, n, *shape)

    def _allocate(self, num_steps: int) -> dict[str, np.ndarray]:
        """Arrays [L, N, ...] that are filled anew for each chunk, and copied out by `_pack`."""
        if self._buffers and len(self._buffers["reward"]) == num_steps:
            return self._buffers
        lead = (num_steps, self._env.num_envs)
        schema = {**chunk_schema(self._contract), **self._seen, **self._acting.extras, **self._env.step_columns}
        self._buffers = {
            name: np.full(lead, "", object) if f.dtype == TEXT else np.zeros((*lead, *f.shape), f.dtype)
            for name, f in schema.items()
            if name != "is_last"
        }
        return self._buffers

    def _pack(
        self,
        columns: dict[str, np.ndarray],
        keep: np.ndarray,
        finals: list[tuple[int, int, dict[str, np.ndarray]]],
        ended: dict[str, list[Any]],
        lost: int,
    ) -> Chunk:
        num_steps, n = keep.shape
        count = num_steps * n
        times = np.concatenate([np.repeat(np.arange(num_steps), n), [t for t, _, _ in finals]])
        slots = np.concatenate([np.tile(np.arange(n), num_steps), [i for _, i, _ in finals]]).astype(np.int64)
        is_last = np.arange(len(slots)) >= count
        order = np.lexsort((is_last, times, slots))
        kept = np.concatenate([keep.reshape(-1), np.ones(len(finals), bool)])
        order = order[kept[order]]
        out: dict[str, np.ndarray] = {"is_last": is_last[order]}
        at = [(t, i) for t, i, _ in finals]
        for name, column in columns.items():
            flat = column.reshape(count, *column.shape[2:])
            if finals:
                flat = np.concatenate([flat, self._final_rows(name, column, at, finals)])
            out[name] = encode_texts(flat[order], name) if name in self._texts else flat[order]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(slots[order], minlength=n))]).astype(np.int64)
        stats = {
            "return": np.asarray(ended["return"], np.float64),
            "length": np.asarray(ended["length"], np.int64),
            "success": np.asarray(ended["success"], bool),
        }
        return Chunk(self.worker, self.incarnation, self._number, self._streams, offsets, out, stats, lost)

    def _final_rows(
        self,
        name: str,
        column: np.ndarray,
        at: list[tuple[int, int]],
        finals: list[tuple[int, int, dict[str, np.ndarray]]],
    ) -> np.ndarray:
        if name in self._contract.observation:
            return np.stack([np.asarray(observation[name]) for _, _, observation in finals]).astype(column.dtype)
        rows = np.stack([column[t, i] for t, i in at])
        if name in ("episode", "version"):
            return rows
        return rows + 1 if name == "step" else np.zeros_like(rows)


def chunk_schema(contract: Contract) -> dict[str, Feature]:
    """Columns of a chunk by name, without the policy's extras."""
    flags = {name: Feature((), "bool") for name in ("terminated", "truncated", "is_first", "is_last")}
    return {
        **contract.observation,
        "action": contract.action,
        "reward": Feature((), "float32"),
        **flags,
        "episode": Feature((), "int64"),
        "step": Feature((), "int32"),
        "version": Feature((), "int32"),
    }


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
