"""The table of algorithms: what each is called, configured by, and works with. A new algorithm is one line here.

It names classes by their path, since this folder imports no jax; `rlsvc.algos.load_algorithm` follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlsvc.spec.base import Spec
from rlsvc.spec.hiors import HiORSSpec
from rlsvc.spec.imitation import ImitationSpec
from rlsvc.spec.reward_classifier import RewardLearningSpec
from rlsvc.spec.rllib import RLlibSpec
from rlsvc.spec.sac import SACSpec
from rlsvc.spec.tdmpc2 import TDMPC2Spec
from rlsvc.spec.torch_lerobot import TorchImitationSpec
from rlsvc.spec.value_function import ValueFunctionSpec


@dataclass(frozen=True)
class Entry:
    """One algorithm.

    Attributes:
        spec: its specification class; its `name` is the key of the table.
        path: `module:class` of the algorithm.
        policies: names of the policies that it trains.
        hooks: its hooks, which phases name.
        acts: whether what it trains acts, and so can be tried in an environment.
        sequence_length: steps of the sequences that it draws from a replay, given the policy's specification; None for
            an algorithm that draws windows from demonstrations.
        episodes: `module:function` that says what is learned from a whole episode of its rollouts, for an algorithm
            that draws windows from those besides; None for one that does not. Takes the episode
            (`rlsvc.data.episodes`), the algorithm's specification and the contract; gives columns or None.
        afar: whether robots far away can collect for it (`rollout.clients`): it learns from whole episodes, of which
            they know what `rlsvc collect` records, and its policy remembers nothing between two requests.
        framework: jax or torch: which learner a rank of the group is (rlsvc/train/group.py); rllib has a loop and
            learners of its own (rlsvc/train/rllib.py).
        extras: names of what the policy hands out besides actions and the algorithm wants stored with each step, given
            the algorithm's specification.
    """

    spec: type[Spec]
    path: str
    policies: tuple[str, ...]
    hooks: tuple[str, ...] = ("update",)
    acts: bool = True
    sequence_length: Callable[[Any], int] | None = None
    episodes: str | None = None
    afar: bool = False
    framework: Literal["jax", "torch", "rllib"] = "jax"
    extras: Callable[[Any], tuple[str, ...]] = lambda algo: ()


def _tdmpc2_extras(algo: TDMPC2Spec) -> tuple[str, ...]:
    return ("behaviour_mean", "behaviour_log_std") if algo.behaviour_coef else ()


ALGORITHMS: dict[str, Entry] = {
    "imitation": Entry(ImitationSpec, "rlsvc.algos.imitation:Imitation", ("diffusion", "pi0", "pi0_fast")),
    "hiors": Entry(
        HiORSSpec, "rlsvc.algos.hiors:HiORS", ("diffusion", "pi0"), episodes="rlsvc.algos.hiors:learned_rows", afar=True
    ),
    "sac": Entry(
        SACSpec, "rlsvc.algos.sac:SAC", ("gaussian",), sequence_length=lambda policy: policy.horizon, afar=True
    ),
    "tdmpc2": Entry(
        TDMPC2Spec,
        "rlsvc.algos.tdmpc2:TDMPC2",
        ("tdmpc2",),
        sequence_length=lambda policy: policy.horizon,
        extras=_tdmpc2_extras,
    ),
    "torch_imitation": Entry(
        TorchImitationSpec, "rlsvc.backends.torch_imitation:TorchImitation", ("lerobot",), framework="torch"
    ),
    "rllib": Entry(RLlibSpec, "rlsvc.backends.rllib:RLlibTrainer", ("rllib",), framework="rllib"),
    "reward_classifier": Entry(
        RewardLearningSpec, "rlsvc.algos.reward_classifier:RewardLearning", ("reward_classifier",), acts=False
    ),
    "value_function": Entry(
        ValueFunctionSpec, "rlsvc.algos.value_function:ValueLearning", ("value_mlp", "value_vlm"), acts=False
    ),
}
