"""An RLModule from explicit data and tensors, without an Algorithm; and actions from what it says.

A bundle of RLlib's has in its policy `module` (one of MODULES), `model_config` (every field of RLlib's
DefaultModelConfig, and what the algorithm adds), and in its weights `module/<name>`, besides `filter/mean` and
`filter/std` where observations are filtered.

RLlib 2.60 acts for a squashed Gaussian without exploring by its mean before the squashing; here by tanh of it, which is
where the samples that it trained with are centred.

Letters: B rows, D numbers of an observation, A action dimensions, K choices.
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.algorithms.bc.torch.default_bc_torch_rl_module import DefaultBCTorchRLModule
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.numpy import MAX_LOG_NN_OUTPUT, MIN_LOG_NN_OUTPUT, SMALL_NUMBER

from rlsvc.backends.rllib_config import check_model
from rlsvc.backends.rllib_spaces import ModuleSpaces
from rlsvc.core.errors import BundleError, SpecError
from rlsvc.spec.rllib import RLlibPolicySpec

MODULES = {"ppo": DefaultPPOTorchRLModule, "bc": DefaultBCTorchRLModule, "sac": DefaultSACTorchRLModule}
MODULE_OF = {
    "ppo": "ppo", "appo": "ppo", "impala": "ppo", "marwil": "ppo", "bc": "bc", "sac": "sac", "cql": "sac",
}  # fmt: skip
"""Which module acts for an algorithm: APPO, IMPALA and MARWIL act as PPO does, CQL as SAC."""
ADDED = {"twin_q": bool, "num_actions": int, "vf_share_layers": bool}
"""Fields that algorithms add to a module's configuration."""
MODULE, FILTER = "module/", "filter/"
FILTER_CLIP = 10.0
"""RLlib's own."""


def whole_model_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a module's configuration, as plain values; initialisers are none, since weights are loaded."""
    fields = {**dataclasses.asdict(DefaultModelConfig()), **given}
    return {name: None if "initializer" in name else value for name, value in fields.items()}


def build_module(kind: str, module: ModuleSpaces, model_config: Mapping[str, Any], where: str) -> RLModule:
    """A module that acts, on no device yet: nothing of its size is held before its weights are known to fit.

    Raises:
        BundleError: an unknown kind or field, or a configuration that RLlib cannot build.
    """
    if kind not in MODULES:
        raise BundleError(f"{where}: module '{kind}' is not one of {', '.join(MODULES)}")
    added = {name: model_config[name] for name in ADDED if name in model_config}
    plain = {name: value for name, value in model_config.items() if name not in added}
    try:
        checked = check_model(RLlibPolicySpec(config=plain))
        for name, value in added.items():
            if type(value) is not ADDED[name]:
                raise SpecError(f"model_config.{name}: got {value!r}, expected {ADDED[name].__name__}")
        with torch.device("meta"):
            return RLModuleSpec(
                module_class=MODULES[kind],
                observation_space=module.observation,
                action_space=module.action,
                inference_only=True,
                model_config={**checked, **added},
            ).build()
    except (SpecError, ValueError, TypeError, AssertionError, RuntimeError, KeyError) as error:
        raise BundleError(f"{where}: RLlib cannot build its module ({type(error).__name__}: {error})") from error


def load_module(module: RLModule, params: Mapping[str, np.ndarray], where: str) -> None:
    """Give a module its weights, by `module/<name>`.

    Raises:
        BundleError: names or shapes that are not the module's; names the first.
    """
    given = {name.removeprefix(MODULE): x for name, x in params.items() if name.startswith(MODULE)}
    wanted = {name: tuple(x.shape) for name, x in module.state_dict().items()}  # pyright: ignore - a torch module
    for name in sorted(wanted.keys() | given.keys()):
        found = given[name].shape if name in given else None
        if found != wanted.get(name):
            raise BundleError(f"{where}: weight '{name}' has shape {found}, the module's has {wanted.get(name)}")
    tensors = {name: torch.from_numpy(np.array(x, np.float32)) for name, x in given.items()}
    module.load_state_dict(tensors, strict=True, assign=True)  # pyright: ignore[reportAttributeAccessIssue]
    module.eval()  # pyright: ignore[reportAttributeAccessIssue]


def filtered(observation: np.ndarray, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """Observations as RLlib's MeanStdFilter left them in training; unchanged where there was none. [B, D] float32."""
    if f"{FILTER}mean" not in params:
        return observation
    centred = (observation - params[f"{FILTER}mean"]) / (params[f"{FILTER}std"] + SMALL_NUMBER)
    return np.clip(centred, -FILTER_CLIP, FILTER_CLIP).astype(np.float32)


def distribution_inputs(module: RLModule, observation: torch.Tensor) -> torch.Tensor:
    """What the module says of its actions, [B, ...]: logits of choices, or mean and log deviation [B, 2 A]."""
    return module.forward_inference({Columns.OBS: observation})[Columns.ACTION_DIST_INPUTS]


def choose(kind: str, action: spaces.Space, inputs: np.ndarray, rows: list[np.random.Generator] | None) -> np.ndarray:
    """Actions of the module, [B, ...], from distribution inputs.

    Args:
        kind: one of MODULES.
        action: its action space.
        inputs: [B, K], [B, sum K] or [B, 2 A] float32.
        rows: explore, with this randomness of each row; None takes the most likely choice, or the mean.
    """
    if isinstance(action, spaces.Discrete):
        return _choice(inputs, rows)
    if isinstance(action, spaces.MultiDiscrete):
        parts = np.split(inputs, np.cumsum(action.nvec)[:-1], axis=-1)
        return np.stack([_choice(part, rows) for part in parts], -1)
    mean, log_std = np.split(inputs, 2, axis=-1)
    if kind == "sac":
        log_std = np.clip(log_std, MIN_LOG_NN_OUTPUT, MAX_LOG_NN_OUTPUT)
    if rows is not None:
        noise = np.stack([row.standard_normal(mean.shape[-1], np.float32) for row in rows])
        mean = mean + np.exp(log_std) * noise
    return np.tanh(mean) if kind == "sac" else mean


def _choice(logits: np.ndarray, rows: list[np.random.Generator] | None) -> np.ndarray:
    """[B] int64; with randomness by Gumbel's trick."""
    if rows is not None:
        logits = logits + np.stack([row.gumbel(size=logits.shape[-1]) for row in rows])
    return logits.argmax(-1)
