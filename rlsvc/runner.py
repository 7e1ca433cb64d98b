"""A bundle made ready to act: weights on the device, fixed batch shapes, compiled, warm.

Letters: B batch, T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.errors import BundleError, UserError
from rlsvc.core.types import ActionChunk
from rlsvc.data.normalize import Stats
from rlsvc.data.transforms import RobotTransforms
from rlsvc.spec.robot import RobotSpec
from rlsvc.store.bundle import SAME, Bundle, parts, read_bundle, refuse_another

if TYPE_CHECKING:
    from rlsvc.backends.rllib_runner import RLlibRunner
    from rlsvc.backends.torch_runner import TorchRunner

LEROBOT = "lerobot"
"""The name of policies that Torch runs, in LeRobot's own code."""
RLLIB = "rllib"
"""Likewise, in RLlib's modules."""
BASELINES = ("zero", "random")
"""Policies without weights: no motion target at all (zeros), and uniform over the contract's action range."""
_BACKENDS = {
    LEROBOT: ("rlsvc.backends.torch_runner", "TorchRunner", "torch"),
    RLLIB: ("rlsvc.backends.rllib_runner", "RLlibRunner", "rllib"),
}
"""Module, class and extra of what runs policies that are not JAX's, by the policy's name."""

SEEDS, STEPS = "_seeds", "_steps"
"""Beside the observation in what is sent to the device; no feature is called so."""


class Runner(Protocol):
    """Anything that acts on batches of observation windows."""

    contract: Contract
    version: str

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """Actions for a batch.

        Args:
            observation: by the contract's names [B, T, ...], raw (not normalised).
            seeds: [B] integers; the randomness of a row follows from its (seed, step) alone.
            steps: [B] integers, the control step of each row; where it is 0 an episode begins and the carry is the
                initial one.
            carry: of the chunk before, rows in the same order; None begins all rows anew.

        Returns:
            Actions [B, H, A] float32 in the contract's units, with the next carry. A row for which the policy gave
            none is NaN, and the extras say why (`rlsvc.core.types.MALFORMED`).
        """
        ...

    def warm_up(self) -> None:
        """Compile whatever is compiled, so that the first `act` is as quick as the next."""
        ...


class ServedRunner(Runner, Protocol):
    """A runner that says whose runtime asks it, and hands something from one chunk to the next."""

    robot: RobotSpec | None

    def initial_carry(self, batch_size: int) -> Any:
        """The carry with which an episode begins, rows first."""
        ...


class BaselineRunner:
    """The policies "zero" and "random", in numpy: for baselines, dry runs, and measuring what is around a policy."""

    def __init__(self, name: str, contract: Contract, version: str = "", robot: RobotSpec | None = None) -> None:
        self.name, self.contract, self.version, self.robot = name, contract, version or name, robot
        low, high = contract.action.low, contract.action.high
        width = contract.action.shape
        self.low = np.broadcast_to(np.asarray(-1.0 if low is None else low, np.float32), width)
        self.high = np.broadcast_to(np.asarray(1.0 if high is None else high, np.float32), width)

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `Runner.act`."""
        del carry
        shape = (self.contract.action_horizon, *self.contract.action.shape)
        if self.name == "zero":
            return ActionChunk(np.zeros((len(seeds), *shape), np.float32), self.version)
        generators = [np.random.default_rng((int(s), int(t))) for s, t in zip(seeds, steps, strict=True)]
        if self.contract.action.dtype.startswith("int"):
            low, high = self.low.astype(np.int64), self.high.astype(np.int64)
            return ActionChunk(np.asarray([g.integers(low, high + 1, shape) for g in generators]), self.version)
        rows = [generator.uniform(self.low, self.high, shape) for generator in generators]
        return ActionChunk(np.asarray(rows, np.float32), self.version)

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """There is none."""
        return ()

    def warm_up(self) -> None:
        """Nothing is compiled."""


COMPILED = (*SAME, "normalizer")
"""Parts of a bundle that are compiled in, and so cannot be replaced with the weights."""


class PolicyRunner:
    """A JAX policy at fixed batch sizes; a smaller batch is padded, a larger one split."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_sizes: tuple[int, ...] = (1,),
        sample_steps: int | None = None,
        group: str | None = None,
        device: str = "auto",
        explore: bool = False,
    ) -> None:
        """Put the weights on the device.

        Args:
            bundle: verified.
            batch_sizes: shapes that are compiled, ascending.
            sample_steps: denoising steps; None takes the policy's own.
            group: the normaliser group of the robot or dataset; may be left out when there is one.
            device: auto, cpu or gpu.
            explore: act as in training, where a policy explores.

        Raises:
            BundleError: the weights do not fit the policy (names the first that does not), or an unknown group.
        """
        import jax
        import jax.numpy as jnp

        from rlsvc.nn.backend import for_host, on_device, setup_jax
        from rlsvc.nn.packing import Layout, unpack
        from rlsvc.nn.params import leaf_names
        from rlsvc.policies import ActOptions, make_policy, make_prompter
        from rlsvc.policies.api import normalize_observation

        setup_jax(device)
        self.contract, self.version, self.name = bundle.contract, bundle.id, str(bundle.policy["name"])
        self.robot, self._transforms = bundle.robot, RobotTransforms(bundle.robot)
        self._compiled = parts(bundle, COMPILED)
        self.batch_sizes = tuple(sorted(batch_sizes))
        policy = make_policy(bundle.policy, bundle.contract, bundle.precision)
        prompter = make_prompter(bundle.policy, bundle.path)
        normalizer, which = bundle.normalizer, bundle.normalizer.group_index(group)
        self._normalizer, self._group = normalizer, which
        options = ActOptions(sample_steps=sample_steps, explore=explore)
        self._prepare = None if prompter is None else partial(prompter, normalizer=normalizer, group=which)
        finish = None if prompter is None else prompter.finish
        self._finish = None if finish is None else partial(finish, normalizer=normalizer, group=which)
        self._like = jax.eval_shape(policy.init, jax.random.key(0))
        self._dtypes = [
            policy.dtype if re.fullmatch(policy.narrow, name) else leaf.dtype
            for name, leaf in zip(leaf_names(self._like), jax.tree.leaves(self._like), strict=True)
        ]
        self._tree = tree = jax.tree.structure(self._like)
        # Leaves, since to flatten nnx states takes as long as a tenth of a planner's call.
        self._weights: list[Any] = []
        if bundle.params:
            self.set_params(dict(bundle.params), bundle.id)

        def act(weights: list[Any], packed: Any, carry: Any, layout: Layout) -> Any:
            observation = unpack(packed, layout)
            seeds, steps = observation.pop(SEEDS), observation.pop(STEPS)
            params = jax.tree.unflatten(tree, weights)
            keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(seeds, steps)
            normal = normalize_observation(observation, normalizer, which)
            begins = steps == 0

            def where_begun(initial: Any, old: Any) -> Any:
                return jnp.where(begins.reshape(-1, *[1] * (initial.ndim - 1)), initial, old)

            carry = jax.tree.map(where_begun, policy.initial_carry(seeds.shape[0]), carry)
            action, carry, extras = policy.act(params, normal, carry, keys, options)
            if finish is None:
                action = normalizer.unnormalize("action", action, which)
            return action, extras, carry

        host = for_host()
        self._act = jax.jit(
            act,
            static_argnames="layout",
            out_shardings=(host, host, on_device()),
            compiler_options=dict(policy.compiler_options),
        )
        self.initial_carry = policy.initial_carry
        self._initial = {size: policy.initial_carry(size) for size in self.batch_sizes}

    def sibling(self, bundle: Bundle) -> PolicyRunner:
        """Another bundle of the same policy, which acts beside this one with the program that is compiled already.

        Raises:
            BundleError: weights, contract, normaliser or specification are those of another policy, or it has a
                tokenizer, which is the bundle's own.
        """
        if self._prepare is not None:
            raise BundleError(f"bundle {bundle.path}: its tokenizer may not be that of {self.version[:12]}")
        other = copy.copy(self)
        other.set_weights(bundle)
        return other

    def set_weights(self, bundle: Bundle) -> None:
        """Act with another bundle of the same policy from now on, without compiling again.

        Raises:
            BundleError: weights, contract, normaliser or specification are those of another policy.
        """
        refuse_another(bundle, self._compiled, self.version)
        self.set_params(dict(bundle.params), bundle.id)

    def set_params(self, params: Any, version: str) -> None:
        """Act with these weights from now on: a pytree like the policy's own, or host arrays by name.

        Raises:
            BundleError: arrays by name that do not fit the policy; names the first.
            ValueError: a pytree of another structure.
        """
        import jax

        from rlsvc.nn.params import unflatten_params

        named = isinstance(params, dict) and all(isinstance(value, np.ndarray) for value in params.values())
        tree = unflatten_params(params, self._like) if named else params
        leaves = self._tree.flatten_up_to(tree)
        self._weights = [jax.device_put(x).astype(dtype) for x, dtype in zip(leaves, self._dtypes, strict=True)]
        self.version = version

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> PolicyRunner | TorchRunner | RLlibRunner | BaselineRunner:
        """Read, verify and make ready, whatever runs the policy; `options` as in the constructor. Baselines need none.

        Raises:
            UserError: a bundle that does not fit, or a package that its policy needs is not installed.
        """
        bundle = read_bundle(path)
        name = str(bundle.policy["name"])
        if name in BASELINES:
            return BaselineRunner(name, bundle.contract, bundle.id, bundle.robot)
        if name not in _BACKENDS:
            return cls(bundle, **options)
        module, runner, extra = _BACKENDS[name]
        try:
            backend = importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"{path}: a policy of {name} needs {error.name}, which is not installed: pip install 'rlsvc[{extra}]'"
            ) from error
        return getattr(backend, runner)(bundle, **options)

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `Runner.act`."""
        chunk = self._act_rows(observation, seeds, steps, carry)
        if self._finish is None:
            return chunk
        action, extras = self._finish(chunk.action)
        return ActionChunk(action, chunk.version, chunk.carry, {**chunk.extras, **extras})

    def _act_rows(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any
    ) -> ActionChunk:
        """What the compiled policy gives for any number of rows."""
        count, largest = len(seeds), self.batch_sizes[-1]
        seeds, steps = np.asarray(seeds).astype(np.uint32), np.asarray(steps).astype(np.uint32)
        if count in self.batch_sizes:
            return self._act_batch(dict(observation), seeds, steps, carry)
        parts = []
        for start in range(0, count, largest):
            rows = slice(start, min(start + largest, count))
            own = None if carry is None else take_rows(carry, rows)
            parts.append(
                self._act_padded({key: x[rows] for key, x in observation.items()}, seeds[rows], steps[rows], own)
            )
        if len(parts) == 1:
            return parts[0]
        joined = [(part.action, part.extras, part.carry) for part in parts]
        action, extras, carry = _map(lambda *leaves: np.concatenate(leaves), *joined)
        return ActionChunk(action, self.version, carry, extras)

    def _act_padded(
        self, observation: dict[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any
    ) -> ActionChunk:
        count = len(seeds)
        room = next(size for size in self.batch_sizes if size >= count) - count
        if room:
            observation = {key: np.concatenate([x, np.repeat(x[-1:], room, 0)]) for key, x in observation.items()}
            seeds, steps = np.pad(seeds, (0, room)), np.pad(steps, (0, room))
            if carry is not None:
                carry = _map(lambda x: np.concatenate([x, np.repeat(x[-1:], room, 0)]), carry)
        chunk = self._act_batch(observation, seeds, steps, carry)
        rows = slice(0, count)
        return ActionChunk(
            chunk.action[rows], self.version, take_rows(chunk.carry, rows), take_rows(chunk.extras, rows)
        )

    def _act_batch(
        self, observation: dict[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any
    ) -> ActionChunk:
        """A batch of a compiled size. The carry stays on the device, for the next call with the same rows."""
        import jax

        from rlsvc.nn.packing import pack

        if carry is None:
            carry = self._initial[len(seeds)]
        observation = self._transforms.encode_observation(observation)
        if self._prepare is not None:
            observation = self._prepare(observation)
        packed, layout = pack({**observation, SEEDS: seeds, STEPS: steps})
        action, extras, carry = self._act(self._weights, packed, carry, layout)
        action, extras = jax.device_get((action, extras))
        return ActionChunk(self._transforms.to_robot(action, observation), self.version, carry, extras)

    def training_statistics(self) -> dict[str, Stats]:
        """By observed feature the statistics of its training values, in the policy's numbers.

        Without images, texts, and features that were not fitted to data: a policy that learned from rollouts has none.
        """
        found: dict[str, Stats] = {}
        for name in self.contract.observation:
            stats = self._normalizer.stats.get(name, ())
            # Statistics of other programs have no count; where these know nothing either, they take the identity.
            foreign = bool(stats) and stats[self._group].min is None and self._normalizer.modes[name] != "identity"
            if stats and (stats[self._group].count > 0 or foreign):
                found[name] = stats[self._group]
        return found

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """The policy's numbers for a robot's, of one feature; see `RobotTransforms.encode`."""
        return self._transforms.encode(name, x)

    def warm_up(self) -> None:
        """Compile every batch size."""
        for size in self.batch_sizes:
            zeros = np.zeros(size, np.uint32)
            self._act_batch(self.contract.example_observation(size), zeros, zeros, None)


def _map(function: Any, *trees: Any) -> Any:
    import jax

    return jax.tree.map(function, *jax.device_get(trees))


def take_rows(tree: Any, rows: slice | list[int]) -> Any:
    """These rows of every array of a carry, on the host; None stays None."""
    return None if tree is None else _map(lambda x: x[rows], tree)
