"""What a run is refused for before anything starts: its folder, its storage, what another project would say."""

from __future__ import annotations

from pathlib import Path

from rlsvc.core.errors import BusyError, SpecError, UserError
from rlsvc.spec.compose import compose
from rlsvc.spec.env import RobotEnvSpec
from rlsvc.spec.rllib import RLlibSpec
from rlsvc.spec.run import RunSpec
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec
from rlsvc.store.run_store import RunStore

MUST_AGREE = ("policy", "algo", "data", "robot", "env", "replay", "seed", "precision")
"""Parts of the specification that a resumed run may not change."""


def check_torch(spec: RunSpec, profile: Path | None) -> None:
    """Refuse what LeRobot would. `profile`: where a trace of JAX was asked for. Raises UserError."""
    if not isinstance(spec.policy, LeRobotPolicySpec):
        return
    if profile is not None:
        raise UserError(f"--profile: traces JAX, but algo {spec.algo.name} learns in Torch; leave it out")
    try:
        from rlsvc.backends.torch_lerobot import make_config
    except ImportError as error:
        raise UserError(
            f"algo {spec.algo.name} needs {error.name}, which is not installed: pip install 'rlsvc[torch]'"
        ) from error
    make_config(spec.policy, None)


def check_robot(spec: RunSpec, local: bool) -> None:
    """Refuse a robot that would wait for the learner, in whose process it is stepped. Raises UserError."""
    if local and spec.online and isinstance(spec.env, RobotEnvSpec):
        raise UserError(
            f"--local: robot '{spec.env.station.id}' does not wait while the learner updates; leave --local out, and a "
            "worker of Ray, which is started here, steps it"
        )


def check_store(spec: RunSpec, store: RunStore | None) -> None:
    """Have a run's folder hold what its storage does, or refuse a storage that has a run. Raises UserError."""
    if store is None:
        return
    if spec.resume:
        store.fetch()
    elif not spec.overwrite and store.manifest() is not None:
        raise BusyError(
            f"{store.url} holds a run already. Go on with it (--resume), delete it first (--overwrite), "
            "or choose another name=..."
        )


def check_rllib(spec: RunSpec, profile: Path | None, local: bool) -> None:
    """Refuse what RLlib would. `local`: without Ray. Raises UserError."""
    if not isinstance(spec.algo, RLlibSpec):
        return
    if local:
        raise UserError("--local: RLlib's runners and learners are Ray's; leave --local out, and Ray is started here")
    if profile is not None:
        raise UserError("--profile: traces JAX, but RLlib learns in Torch; leave it out")
    try:
        from rlsvc.backends.rllib import check_rllib
    except ImportError as error:
        raise UserError(f"algo rllib needs {error.name}, which is not installed: pip install 'rlsvc[rllib]'") from error
    check_rllib(spec)


def check_folder(spec: RunSpec, folder: Path) -> None:
    """Refuse a folder that another run has, or one to resume in which there is none or another. Raises UserError."""
    stored = folder / "spec.yaml"
    if stored.exists() and not (spec.overwrite or spec.resume):
        raise BusyError(
            f"{folder} holds a run already. Go on with it (--resume), delete it first (--overwrite), "
            "or choose another name=..."
        )
    if stored.exists() and not spec.overwrite:
        check_resumable(spec, compose([str(stored)]), stored)
    elif spec.resume and not stored.exists():
        raise UserError(f"--resume: there is no run in {folder}; start it without --resume")


def check_resumable(spec: RunSpec, old: RunSpec, stored: Path) -> None:
    """Refuse to resume where `old`, read from `stored`, differs in what must agree. Raises SpecError."""
    for name in MUST_AGREE:
        if getattr(spec, name) != getattr(old, name):
            raise SpecError(
                f"--resume: '{name}' differs from the run's own {stored}: "
                f"got {getattr(spec, name)}, the run has {getattr(old, name)}. "
                "Resume with the run's values, or start a new run under another name."
            )
    now, then = (one.rollout.workers * one.rollout.envs_per_worker for one in (spec, old))
    if spec.online and now != then:
        raise SpecError(
            f"--resume: rollout.workers x rollout.envs_per_worker is {now}, the run has {then} ({stored}); its replay "
            "has a stream for each of these environments. Spread the same number over the workers, or start a new run."
        )
