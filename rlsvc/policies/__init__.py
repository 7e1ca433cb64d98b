"""What acts, one file each. `make_policy` is the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsvc.core.contract import Contract
from rlsvc.core.errors import unknown_name
from rlsvc.policies.api import PRECISIONS, ActOptions, Policy, SupervisedPolicy
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec

__all__ = ["POLICIES", "ActOptions", "Policy", "SupervisedPolicy", "make_policy"]

POLICIES = {"diffusion": (DiffusionSpec, DiffusionPolicy), "tdmpc2": (TDMPC2PolicySpec, TDMPC2Policy)}


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
