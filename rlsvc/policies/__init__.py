"""What acts, and what judges instead of acting, one file each. POLICIES and VALUE_FUNCTIONS are the tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError, unknown_name
from rlsvc.policies.api import PRECISIONS, ActOptions, Policy, SupervisedPolicy, ValueFunction
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.policies.gaussian import GaussianPolicy
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.policies.pi0_fast import Pi0FastPolicy
from rlsvc.policies.prompt import Pi0Prompter, TextPrompter
from rlsvc.policies.prompt_fast import Pi0FastPrompter
from rlsvc.policies.reward_classifier import RewardClassifier
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.policies.value_mlp import ValueMlp
from rlsvc.policies.value_vlm import ValueVlm
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.reward_classifier import RewardClassifierSpec
from rlsvc.spec.sac import GaussianPolicySpec
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec
from rlsvc.spec.value_function import ValueMlpSpec, ValueVlmSpec

__all__ = [
    "CLASSIFIERS",
    "POLICIES",
    "VALUE_FUNCTIONS",
    "ActOptions",
    "Policy",
    "SupervisedPolicy",
    "ValueFunction",
    "make_classifier",
    "make_judge",
    "make_policy",
    "make_prompter",
    "make_value_function",
]

POLICIES = {
    "diffusion": (DiffusionSpec, DiffusionPolicy),
    "gaussian": (GaussianPolicySpec, GaussianPolicy),
    "pi0": (Pi0Spec, Pi0Policy),
    "pi0_fast": (Pi0FastSpec, Pi0FastPolicy),
    "tdmpc2": (TDMPC2PolicySpec, TDMPC2Policy),
}
VALUE_FUNCTIONS = {"value_mlp": (ValueMlpSpec, ValueMlp), "value_vlm": (ValueVlmSpec, ValueVlm)}
CLASSIFIERS = {"reward_classifier": (RewardClassifierSpec, RewardClassifier)}
PROMPTERS = {
    "pi0": (Pi0Spec, Pi0Prompter),
    "pi0_fast": (Pi0FastSpec, Pi0FastPrompter),
    "value_vlm": (ValueVlmSpec, TextPrompter),
}
"""What turns texts into tokens, and tokens into actions, for what reads or says them."""


def make_policy(spec: Mapping[str, Any], contract: Contract, precision: str = "fp32") -> Policy:
    """The policy that a bundle or a run describes.

    Args:
        spec: its specification as plain values, with `name`.
        contract: what it sees and does.
        precision: compute dtype, "fp32" or "bf16".

    Raises:
        NotFoundError: an unknown policy name.
        ContractError: a value function, which does not act.
    """
    name = str(spec.get("name"))
    if name in VALUE_FUNCTIONS:
        raise ContractError(
            f"'{name}' is a value function, which does not act: it can be neither tried in an environment nor served. "
            "`rlsvc dataset values` shows what it makes of a dataset, and algo.advantage learns by it"
        )
    if name in CLASSIFIERS:
        raise ContractError(
            f"'{name}' says what is rewarded and does not act: it can be neither tried in an environment nor served. "
            "rollout.reward has it reward rollouts"
        )
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    spec_class, policy_class = POLICIES[name]
    return policy_class(spec_class.model_validate(dict(spec)), contract, PRECISIONS[precision])


def make_prompter(spec: Mapping[str, Any], folder: Path | None = None) -> TextPrompter | Pi0FastPrompter | None:
    """What has to be done on the host before and after the policy acts, or judges; None where it reads no text.

    Args:
        spec: of the policy, as plain values with `name`.
        folder: of the bundle that it comes from; None for a run.

    Raises:
        UserError: a tokenizer's file that is not there.
    """
    name = str(spec.get("name"))
    if name not in PROMPTERS:
        return None
    spec_class, prompter = PROMPTERS[name]
    return prompter(spec_class.model_validate(dict(spec)), folder)


def make_value_function(spec: Mapping[str, Any], contract: Contract, precision: str = "fp32") -> ValueFunction:
    """The value function that a bundle or a run describes; arguments as of `make_policy`.

    Raises:
        ContractError: not a value function.
    """
    name = str(spec.get("name"))
    if name not in VALUE_FUNCTIONS:
        raise ContractError(f"'{name}' is not a value function; there are: {', '.join(VALUE_FUNCTIONS)}")
    spec_class, value_class = VALUE_FUNCTIONS[name]
    return value_class(spec_class.model_validate(dict(spec)), contract, PRECISIONS[precision])


def make_classifier(spec: Mapping[str, Any], contract: Contract, precision: str = "fp32") -> RewardClassifier:
    """The reward classifier that a bundle or a run describes; arguments as of `make_policy`.

    Raises:
        ContractError: not a reward classifier.
    """
    name = str(spec.get("name"))
    if name not in CLASSIFIERS:
        raise ContractError(f"'{name}' is not a reward classifier; there are: {', '.join(CLASSIFIERS)}")
    spec_class, classifier = CLASSIFIERS[name]
    return classifier(spec_class.model_validate(dict(spec)), contract, PRECISIONS[precision])


def make_judge(
    spec: Mapping[str, Any], contract: Contract, precision: str = "fp32"
) -> ValueFunction | RewardClassifier:
    """What a run trains that does not act; arguments as of `make_policy`. Raises as the makers of each."""
    make = make_classifier if spec.get("name") in CLASSIFIERS else make_value_function
    return make(spec, contract, precision)
