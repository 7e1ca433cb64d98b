"""A scripted stand-in for the person who watches a robot: it takes over when an episode goes badly, and hands back.

It is a script and no person: it shows that interventions are recorded and learned from, and nothing of how people act.

Letters: A action dimensions.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import innermost, step_columns
from rlsvc.spec.stand_in import StandInSpec


class StandIn(gymnasium.Wrapper):
    """An environment whose expert acts in the policy's place for a while, whenever there is no progress.

    Each step's `info` says what was executed (`action`), what was asked for by whoever acted (`commanded`, the same in
    a simulator) and whether the expert acted (`intervention`). What the policy asked for meanwhile is ignored.
    """

    def __init__(self, env: Any, spec: StandInSpec) -> None:
        """Wraps an environment that has `expert(rng, noise)` [A] and `progress()`.

        Raises:
            UserError: it has none.
        """
        super().__init__(env)
        self._spec, self._inner = spec, innermost(env)
        for name in ("expert", "progress"):
            if not callable(getattr(self._inner, name, None)):
                raise UserError(
                    f"rollout.stand_in: environment {type(self._inner).__name__} has no `{name}`, which the stand-in "
                    "acts by; leave rollout.stand_in out, or take an environment with a script (docs/hiors.md)"
                )
        action: Feature = env.contract().action
        mine = {"action": action, "commanded": action, "intervention": Feature((), "bool")}
        self.step_columns = {**step_columns(env), **mine}

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """That of the environment."""
        return self.env.contract(n_obs_steps, action_horizon)  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, in the policy's hands."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._rng = np.random.default_rng(seed)
        self._best, self._waited, self._left = self._inner.progress(), 0, 0
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step of whoever is in control."""
        acts = self._left > 0
        executed = self._inner.expert(self._rng, self._spec.noise) if acts else np.asarray(action)
        observation, reward, terminated, truncated, info = self.env.step(executed)
        if acts:
            self._left -= 1
        self._watch(acts)
        told = {"action": executed, "commanded": executed, "intervention": acts}
        return observation, float(reward), terminated, truncated, {**info, **told}

    def _watch(self, acts: bool) -> None:
        progress = self._inner.progress()
        if progress >= self._best + self._spec.min_progress:
            self._best, self._waited = progress, 0
        elif not acts:
            self._waited += 1
        if self._waited >= self._spec.patience:
            self._left, self._waited = self._spec.control_steps, 0
