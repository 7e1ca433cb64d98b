"""What acts, one file each. `make_policy` is the table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsvc.core.contract import Contract
from rlsvc.core.errors import unknown_name
from rlsvc.policies.api import PRECISIONS, ActOptions, Policy, SupervisedPolicy
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.policies.pi0_fast import Pi0FastPolicy
from rlsvc.policies.prompt import Pi0Prompter
from rlsvc.policies.prompt_fast import Pi0FastPrompter
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec

__all__ = ["POLICIES", "ActOptions", "Policy", "SupervisedPolicy", "make_policy", "make_prompter"]

POLICIES = {
    "diffusion": (DiffusionSpec, DiffusionPolicy),
    "pi0": (Pi0Spec, Pi0Policy),
    "pi0_fast": (Pi0FastSpec, Pi0FastPolicy),
    "tdmpc2": (TDMPC2PolicySpec, TDMPC2Policy),
}
PROMPTERS = {"pi0": (Pi0Spec, Pi0Prompter), "pi0_fast": (Pi0FastSpec, Pi0FastPrompter)}
"""What turns texts into tokens, and tokens into actions, for policies that read or say them."""


def make_policy(spec: Mapping[str, Any], contract: Contract, precision: str = "fp32") -> Policy:
    """The policy that a bundle or a run describes.

    Args:
        spec: its specification as plain values, with `name`.
        contract: what it sees and does.
        precision: compute dtype, "fp32" or "bf16".

    Raises:
        NotFoundError: an unknown policy name.
    """
    name = str(spec.get("name"))
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    spec_class, policy_class = POLICIES[name]
    return policy_class(spec_class.model_validate(dict(spec)), contract, PRECISIONS[precision])


def make_prompter(spec: Mapping[str, Any], folder: Path | None = None) -> Pi0Prompter | Pi0FastPrompter | None:
    """What has to be done on the host before and after the policy acts; None for a policy that reads no text.

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
