"""The table of environments."""

from __future__ import annotations

from rlsvc.core.errors import UserError, unknown_name
from rlsvc.spec.env import PushTSpec

ENVIRONMENTS = {"pusht": PushTSpec}


def make_env(spec: PushTSpec):
    """The environment of a specification, a `gymnasium.Env` with `contract`.

    Raises:
        NotFoundError: an unknown name.
        UserError: its simulator is not installed.
    """
    try:
        if spec.name == "pusht":
            from rlsvc.envs.pusht import PushT

            return PushT(spec)
    except ImportError as error:
        raise UserError(
            f"environment '{spec.name}' needs a package that is not installed ({error}); install rlsvc[sim]"
        ) from error
    raise unknown_name("environment", spec.name, ENVIRONMENTS)
