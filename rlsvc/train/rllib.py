"""The loop of a run whose algorithm is RLlib's: iterations, and what is due after each."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from rlsvc.backends.rllib import RLlibTrainer
from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError, nearest
from rlsvc.data.mixture import split_episodes, table_contract
from rlsvc.data.normalize import Normalizer
from rlsvc.data.repack import load_features
from rlsvc.data.replay_table import rows_of_episode
from rlsvc.spec.rllib import RLlibPolicySpec, RLlibSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.train.learner_data import joined
from rlsvc.train.orchestrator import Listener, Order


def run_rllib(
    spec: RunSpec, run_dir: Path, contract: Contract | None, listener: Listener, stop: threading.Event
) -> int:
    """Train to the end, or until `stop` is set, after a checkpoint; the clock reached.

    Args:
        spec: of the run.
        run_dir: its folder; goes on from the newest checkpoint there.
        contract: of the environment.
        listener: is told of metrics, bundles and checkpoints.
        stop: looked at between iterations.

    Raises:
        UserError: data, contract, configuration or checkpoint that do not fit; by name.
    """
    folder = run_dir / "checkpoints"
    trainer = make_trainer(spec, contract, folder)
    try:
        return _Loop(spec, trainer, run_dir, listener).run(stop)
    finally:
        trainer.close()


def make_trainer(spec: RunSpec, env: Contract | None, folder: Path) -> RLlibTrainer:
    """The Algorithm, where the newest checkpoint in `folder` left it. Raises as `run_rllib`."""
    assert isinstance(spec.algo, RLlibSpec)
    assert isinstance(spec.policy, RLlibPolicySpec)
    committed = checkpoint.steps(folder)
    begun = committed[-1] if committed else 0
    if spec.algo.recorded:
        trainer = _recorded(spec, env)
    else:
        assert env is not None
        contract = seen_contract(env, spec.policy.observation)
        trainer = RLlibTrainer(spec, contract, Normalizer.from_contract(contract), begun=begun)
    if committed:
        try:
            trainer.restore(folder / str(begun))
        except BaseException:
            trainer.close()
            raise
    return trainer


def seen_contract(contract: Contract, names: tuple[str, ...] | None) -> Contract:
    """The contract with these observations alone; None keeps all.

    Raises:
        ContractError: a name that the environment does not give.
    """
    if names is None:
        return contract
    for name in names:
        if name not in contract.observation:
            guess = nearest(name, contract.observation)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise ContractError(
                f"policy.observation: the environment gives no '{name}'{hint}; it gives: "
                f"{', '.join(contract.observation)}"
            )
    return replace(contract, observation={name: contract.observation[name] for name in names})


def _recorded(spec: RunSpec, env: Contract | None) -> RLlibTrainer:
    """On the training episodes of the run's dataset; observations are normalised by them, actions by the contract."""
    data = spec.data
    assert data is not None
    extra = [name for name in (data.reward, data.terminated) if name is not None]
    table = load_features(data.datasets[0], (*data.observation, data.action, *extra))
    chosen = split_episodes(table.num_episodes, data.replace(validation_fraction=0.0)).train
    table = table.select(list(chosen))
    if table.columns[data.action].ndim != 2:
        raise ContractError(
            f"{table.source}: '{data.action}' has the shape {table.columns[data.action].shape[1:]} a step, expected a "
            "vector"
        )
    contract = joined(table_contract(table, data, 1), env, spec)
    fitted = Normalizer.fit(
        {"default": {name: table.columns[name] for name in contract.observation}},
        contract.observation,
        data.normalization,
    )
    action = Normalizer.from_contract(contract)
    normalizer = Normalizer(
        fitted.groups,
        {**fitted.modes, "action": action.modes["action"]},
        {**fitted.stats, "action": action.stats["action"]},
    )
    episodes = [
        rows_of_episode(
            table.episode(number), number, tuple(contract.observation), data.action, data.reward, data.terminated
        )
        for number in range(table.num_episodes)
    ]
    return RLlibTrainer(spec, contract, normalizer, episodes=episodes)


class _Loop:
    """Iterations of a trainer, whose clock goes by RLlib's steps: what is due is done at the first one past it."""

    def __init__(self, spec: RunSpec, trainer: RLlibTrainer, run_dir: Path, listener: Listener) -> None:
        self.spec, self.trainer, self.run_dir, self.listener = spec, trainer, run_dir, listener

    def run(self, stop: threading.Event) -> int:
        trainer, total = self.trainer, self.spec.length
        seen = trainer.clock
        while seen < total:
            if stop.is_set():
                self._checkpoint()
                break
            metrics = trainer.step(min(self.spec.learner.updates_per_call, total - seen))
            before, seen = seen, trainer.clock
            self._pass_intervals(before, seen, metrics, final=seen >= total)
        return seen

    def _pass_intervals(self, before: int, now: int, metrics: dict[str, float], *, final: bool) -> None:
        """Log, export (which is evaluated), checkpoint, in this order, where the clock passed an interval."""

        def due(interval: int | None) -> bool:
            return final or (interval is not None and now // interval > before // interval)

        if due(self.spec.log_interval):
            self.listener.on_metrics(now, metrics)
        if due(self.spec.evaluation.interval if self.spec.evaluates else None):
            bundle = self.trainer.export(self.run_dir / "bundles" / str(now))
            self.listener.on_result(Order("export", now), {"bundle": str(bundle)})
        if due(self.spec.checkpoint.interval):
            self._checkpoint()

    def _checkpoint(self) -> None:
        path = self.trainer.save(self.run_dir / "checkpoints")
        self.listener.on_result(Order("checkpoint", self.trainer.clock), {"checkpoint": str(path)})
