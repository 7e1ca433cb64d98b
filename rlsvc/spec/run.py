"""RunSpec: everything that one training run is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, field_validator, model_validator

from rlsvc.core.errors import nearest
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.base import Spec
from rlsvc.spec.data import DataSpec
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.env import EnvSpec, RobotEnvSpec
from rlsvc.spec.learner import CheckpointSpec, EvaluationSpec, LearnerSpec
from rlsvc.spec.phases import COLLECT, EVALUATE, PhaseSpec
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.replay import ReplaySpec
from rlsvc.spec.reward_classifier import RewardClassifierSpec
from rlsvc.spec.rllib import RLlibPolicySpec, RLlibSpec
from rlsvc.spec.robot import RobotSpec
from rlsvc.spec.rollout import RolloutSpec
from rlsvc.spec.sac import GaussianPolicySpec
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec, TorchImitationSpec
from rlsvc.spec.tracking import TrackingSpec
from rlsvc.spec.value_function import ValueMlpSpec, ValueVlmSpec

PolicySpec = Annotated[
    DiffusionSpec
    | GaussianPolicySpec
    | LeRobotPolicySpec
    | Pi0Spec
    | Pi0FastSpec
    | RLlibPolicySpec
    | TDMPC2PolicySpec
    | ValueMlpSpec
    | ValueVlmSpec
    | RewardClassifierSpec,
    Field(discriminator="name"),
]
if TYPE_CHECKING:
    AlgoSpec = Any
else:
    AlgoSpec = Annotated[
        Union[tuple(entry.spec for entry in ALGORITHMS.values())],  # noqa: UP007 - made from the table
        Field(discriminator="name"),
    ]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class RunSpec(Spec):
    """A run: policy, algorithm, data, environment, resources, cadence. Stored with the run, enough to run it again."""

    name: str = Field(default="run", pattern=NAME)
    """Of the run: its folder, its tracking run, and in the registered model's name."""
    project: str = Field(default="rlsvc", pattern=NAME)
    """Runs that belong together: a folder, an MLflow experiment, a W&B project."""
    group: str | None = None
    """A label by which trackers group runs; null has none."""
    root: str = "runs"
    """Runs live in `<root>/<project>/<name>/`: a folder, or a storage by its URL, such as s3://bucket/runs."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the weights, the batches and the noise; on a CPU the same seed gives the same run, bit for bit."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes a GPU where there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute precision of the nets; weights and optimizer state are fp32."""
    total_steps: int | None = Field(default=None, ge=1)
    """Gradient updates on the demonstrations, for a run without `phases`. With algo rllib: environment steps, where its
    type steps `env`; the run ends with the iteration that passes them."""
    phases: tuple[PhaseSpec, ...] = ()
    """The curriculum, one phase after the other. The run's clock, in which intervals count, is environment steps while
    a phase is online and updates while it is offline."""
    log_interval: int = Field(default=100, ge=1)
    """Clock steps between logged metrics, which are means over them."""
    policy: PolicySpec
    """What acts, or judges: value_mlp or value_vlm stands here in the run of a value function."""
    algo: AlgoSpec
    """How it learns."""
    data: DataSpec | None = None
    """Demonstrations that it learns from; null for a run that learns from its own rollouts alone."""
    robot: RobotSpec | None = None
    """Whose data this is and whose runtime asks the served policy; null learns and answers in the data's own terms."""
    env: EnvSpec | None = None
    """Where the policy collects and is evaluated; null trains without evaluation."""
    rollout: RolloutSpec = RolloutSpec()
    """Who collects in `env`, in online phases."""
    replay: ReplaySpec = ReplaySpec()
    """Where what was collected lies."""
    learner: LearnerSpec = LearnerSpec()
    """Which processes learn."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the training state is written, and how much of it is kept."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """How often the policy is tried in `env`."""
    tracking: TrackingSpec = TrackingSpec()
    """Where metrics and the bundle go."""
    resume: bool = False
    """Go on with the run in its folder; as `--resume`."""
    overwrite: bool = False
    """Delete the run in its folder first; as `--overwrite`."""

    @property
    def curriculum(self) -> tuple[PhaseSpec, ...]:
        """The phases; a run without any has one, on the demonstrations."""
        if self.phases:
            return self.phases
        return (
            PhaseSpec(
                name="train",
                type="offline",
                hooks={"update": 1},
                buffer="demonstrations",
                duration_updates=self.total_steps,
            ),
        )

    @property
    def length(self) -> int:
        """The run's clock at its end: environment steps of online phases, updates of offline ones."""
        return sum(phase.length for phase in self.curriculum)

    @property
    def online(self) -> bool:
        """Whether any phase steps environments."""
        return any(phase.type == "online" for phase in self.phases)

    @property
    def collects(self) -> bool:
        """Whether rollout workers step `env`: in online phases, or as RLlib's environment runners."""
        return self.online or (isinstance(self.algo, RLlibSpec) and not self.algo.recorded)

    @property
    def evaluates(self) -> bool:
        """Whether bundles are tried in `env` as the run goes; a robot that collects is taken to the run's end."""
        return self.env is not None and not (isinstance(self.env, RobotEnvSpec) and self.collects)

    @property
    def people_intervene(self) -> bool:
        """Whether rollouts say of each step if a person, or a stand-in for one, acted."""
        rollout = self.rollout
        return isinstance(self.env, RobotEnvSpec) or rollout.stand_in is not None or rollout.clients is not None

    @field_validator("root")
    @classmethod
    def _folder_of_file_url(cls, root: str) -> str:
        return root.removeprefix("file://")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        entry = ALGORITHMS[self.algo.name]
        adapted = [name for name in ("lora_backbone", "lora_expert") if getattr(self.policy, name, None) is not None]
        if adapted and getattr(self.algo, "ema", None) is not None:
            raise ValueError(
                f"algo.ema: got an average, expected null with policy.{adapted[0]}: the averages of two factors do not "
                "give the average of their product"
            )
        advantage = getattr(self.algo, "advantage", None)
        conditions = advantage is not None and advantage.mode == "condition"
        if conditions != getattr(self.policy, "advantage_in_prompt", False):
            raise ValueError(
                f"policy.advantage_in_prompt: got {not conditions}, expected {conditions}: prompts of pi0 and pi0_fast "
                "tell the advantages that algo.advantage finds in mode condition, and no others"
            )
        if self.policy.name not in entry.policies:
            raise ValueError(
                f"policy.name: algo {self.algo.name} trains {' or '.join(entry.policies)}, got {self.policy.name}"
            )
        if self.algo.name == "reward_classifier" and (self.data is None or not self.data.validation_fraction):
            raise ValueError(
                "data.validation_fraction: a reward classifier is calibrated on episodes that are held back; give it a "
                "share above 0"
            )
        if self.env is not None and not entry.acts:
            raise ValueError(
                f"env: algo {self.algo.name} trains what does not act, so there is nothing to try in an environment; "
                "leave env out"
            )
        self._check_parts()
        self._check_torch()
        self._check_rllib()
        self._check_phases()
        self._check_robot()
        self._check_one_robot()
        self._check_clients()
        if self.data is not None:
            groups = sorted({dataset.group for dataset in self.data.datasets})
            group = self.evaluation.group
            if self.env is not None and ((group is None and len(groups) > 1) or group not in (None, *groups)):
                raise ValueError(f"evaluation.group: got {group}, expected the environment's among {', '.join(groups)}")
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: choose one; resume goes on with the run, overwrite deletes it first")
        return self

    def _check_parts(self) -> None:
        """A batch is cut evenly."""
        where, parts = "algo.optimizer.accumulation", self.learner.ranks
        if isinstance(self.algo, RLlibSpec):
            return  # a batch is train_batch_size_per_learner of each
        if isinstance(self.algo, TorchImitationSpec):
            where, parts = "algo.accumulation", parts * self.algo.accumulation
        elif hasattr(self.algo, "optimizer"):
            parts *= self.algo.optimizer.accumulation
        if self.algo.batch_size % parts:
            raise ValueError(
                f"algo.batch_size: {self.algo.batch_size} is not a multiple of learner.ranks x {where} = {parts}"
            )

    def _check_torch(self) -> None:
        """What the Torch learner has no place for."""
        if not isinstance(self.algo, TorchImitationSpec):
            return
        learner, data = self.learner, self.data
        if data is None:
            raise ValueError("data: torch_imitation learns from demonstrations; name some")
        refused = (
            (learner.tensor != 1, "learner.tensor", f"{learner.tensor}", "1 (FSDP cuts Torch's weights: learner.fsdp)"),
            (learner.ranks % learner.fsdp != 0, "learner.fsdp", f"{learner.fsdp}", "a divisor of learner.ranks"),
            (bool(data.normalization), "data.normalization", "modes", "none; policy.config.normalization_mapping"),
            (data.norm_stats is not None, "data.norm_stats", "a file", "none; the statistics are those of the data"),
            (len({d.group for d in data.datasets}) > 1, "data.datasets", "several groups", "one, as LeRobot has it"),
            (
                self.robot is not None and self.robot.delta is not None,
                "robot.delta",
                "relative actions",
                "none; LeRobot's are policy.config.use_relative_actions where the policy has them",
            ),
        )
        for bad, name, got, expected in refused:
            if bad:
                raise ValueError(f"{name}: got {got}, with algo torch_imitation expected {expected}")

    def _check_rllib(self) -> None:
        """What RLlib says in its own configuration, or has no place for."""
        if not isinstance(self.algo, RLlibSpec):
            return
        kind, learner, data = self.algo.type, self.learner, self.data
        if self.phases:
            raise ValueError("phases: RLlib has a loop of its own; give total_steps")
        if self.algo.recorded:
            if data is None:
                raise ValueError(f"data: RLlib's {kind} learns from recorded episodes; name some")
            if len(data.datasets) > 1:
                raise ValueError(f"data.datasets: RLlib's {kind} learns from one dataset, got {len(data.datasets)}")
            if data.reward is None and kind != "bc":
                raise ValueError(f"data.reward: RLlib's {kind} learns from rewards; name the feature that has them")
        elif data is not None:
            raise ValueError(f"data: RLlib's {kind} learns from its own steps; leave it out, or take cql, marwil or bc")
        elif self.env is None:
            raise ValueError(f"env: RLlib's {kind} learns by stepping an environment; name one")
        used = ("workers", "envs_per_worker", "cpus_per_worker", "timeout_s", "max_restarts", "inference_gpus")
        rest = {name: default for name, default in RolloutSpec() if name not in used}
        defaults: dict[str, tuple[Any, Any, str]]
        defaults = {"replay": (self.replay, ReplaySpec(), "algo.config.replay_buffer_config is RLlib's own")}
        defaults |= {
            f"rollout.{name}": (getattr(self.rollout, name), default, "RLlib's environment runners have none of it")
            for name, default in rest.items()
        }
        defaults |= {
            "precision": (self.precision, "fp32", "RLlib's modules compute in fp32"),
            "robot": (self.robot, None, "RLlib takes the numbers as they are"),
            "learner.fsdp": (learner.fsdp, 1, "RLlib's learners hold all of the weights each"),
            "learner.tensor": (learner.tensor, 1, "RLlib's learners hold all of the weights each"),
        }
        if data is not None:
            seen = getattr(self.policy, "observation", None)
            defaults["policy.observation"] = (seen, None, "data.observation says what is seen of recorded data")
            defaults["data.norm_stats"] = (data.norm_stats, None, "the statistics are those of the data")
            mode = data.normalization.get(data.action)
            defaults["data.normalization.action"] = (mode, None, "a module's actions are those of the contract's range")
        for name, (got, default, why) in defaults.items():
            if got != default:
                raise ValueError(f"{name}: got {got}, with algo rllib expected {default}: {why}")

    def _check_robot(self) -> None:
        if self.robot is None:
            return
        if ALGORITHMS[self.algo.name].sequence_length is not None:
            raise ValueError(f"robot: {self.algo.name} takes the numbers as they are; a robot goes with imitation")
        if self.robot.execute is not None and self.robot.execute > self.policy.n_action_steps:
            raise ValueError(
                f"policy.n_action_steps: got {self.policy.n_action_steps}, robot '{self.robot.name}' executes "
                f"{self.robot.execute} actions of a chunk (robot.execute)"
            )

    def _check_one_robot(self) -> None:
        """There is one arm, and a person beside it."""
        if not isinstance(self.env, RobotEnvSpec):
            return
        streams, name = self.rollout.workers * self.rollout.envs_per_worker, self.env.station.id
        if streams != 1:
            raise ValueError(
                f"rollout.workers, rollout.envs_per_worker: got {streams} environments, robot '{name}' is one"
            )
        if self.online and self.rollout.mode != "async":
            raise ValueError(
                f"rollout.mode: got {self.rollout.mode}, expected async: robot '{name}' does not wait while the "
                "learner updates"
            )
        if self.collects and self.evaluation.interval is not None:
            raise ValueError(
                f"evaluation.interval: got {self.evaluation.interval}, but robot '{name}' collects meanwhile; set it "
                "to null, and try the policy afterwards with rlsvc evaluate"
            )
        for phase in self.curriculum:
            if self.collects and EVALUATE in phase.hooks:
                raise ValueError(
                    f"phase '{phase.name}': hook evaluate, but robot '{name}' collects as long as the run lasts; "
                    "leave it out, and try the policy afterwards with rlsvc evaluate"
                )
        if self.collects and self.rollout.timeout_s <= self.env.start_timeout_s:
            raise ValueError(
                f"rollout.timeout_s: got {self.rollout.timeout_s:g}, at which a worker counts as hung, but it may wait "
                f"{self.env.start_timeout_s:g} s for a person (env.start_timeout_s); expected more than that"
            )

    def _check_clients(self) -> None:
        """Robots far away step when they want, and are judged by the people beside them."""
        rollout = self.rollout
        if rollout.clients is None:
            return
        if not ALGORITHMS[self.algo.name].afar:
            able = " or ".join(name for name, entry in ALGORITHMS.items() if entry.afar)
            raise ValueError(
                f"rollout.clients: robots far away do not collect for {self.algo.name}: they send whole episodes and "
                f"keep nothing of the policy's; take {able}"
            )
        if self.data is None:
            raise ValueError(
                "rollout.clients: robots' episodes have the features of the demonstrations; expected `data`, got none"
            )
        if self.env is not None:
            raise ValueError("rollout.clients: robots far away collect, so the run has no env; leave one of both out")
        if rollout.mode != "async":
            raise ValueError("rollout.mode: got sync, expected async with rollout.clients: robots do not wait")
        if rollout.inference != "local":
            raise ValueError("rollout.inference: got central, expected local with rollout.clients: the run itself acts")
        for name in ("stand_in", "reward"):
            if getattr(rollout, name) is not None:
                raise ValueError(f"rollout.{name}: people stand beside the robots of rollout.clients; leave it out")
        if random := next((phase.name for phase in self.phases if phase.acting == "random"), None):
            raise ValueError(f"phase '{random}': acting random, but the robots of rollout.clients ask the policy")

    def _check_phases(self) -> None:
        entry = ALGORITHMS[self.algo.name]
        if bool(self.phases) == (self.total_steps is not None):
            raise ValueError(
                "total_steps, phases: got " + ("both" if self.phases else "neither") + "; total_steps trains on "
                "demonstrations, phases say everything for themselves"
            )
        names = [phase.name for phase in self.phases]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"phases: two are called '{double}'; every phase needs a name of its own")
        collects = False
        for phase in self.curriculum:
            where, collects = f"phase '{phase.name}'", collects or phase.type == "online"
            for hook in phase.hooks:
                if hook not in (COLLECT, EVALUATE, *entry.hooks):
                    choices = [COLLECT, EVALUATE, *entry.hooks]
                    guess = nearest(hook, choices)
                    hint = f" (did you mean '{guess}'?)" if guess else ""
                    raise ValueError(
                        f"{where}: unknown hook '{hook}'{hint}; {self.algo.name} has: {', '.join(choices)}"
                    )
            steps = phase.type == "online" and self.rollout.clients is None
            if self.env is None and (steps or phase.type == "eval_only" or EVALUATE in phase.hooks):
                raise ValueError(f"{where}: it steps or evaluates in an environment, and the run has no `env`")
            if not phase.update_hooks or isinstance(self.algo, RLlibSpec):
                continue
            if "demonstrations" in phase.mixture and self.data is None:
                raise ValueError(f"{where}: buffer demonstrations needs `data`")
            if "replay" in phase.mixture and not collects:
                when = "is still empty, since no phase before it" if self.online else "stays empty, since no phase"
                raise ValueError(f"{where}: buffer replay {when} is online")
            if "replay" in phase.mixture and phase.min_fill > self.replay.capacity:
                raise ValueError(
                    f"{where}: min_fill asks for {phase.min_fill} transitions, but replay.capacity is "
                    f"{self.replay.capacity} rows"
                )
            windows = entry.sequence_length is None and entry.episodes is None
            if windows and phase.mixture != {"demonstrations": 1.0}:
                raise ValueError(f"{where}: {self.algo.name} learns from demonstrations, got buffer {phase.buffer}")
        if entry.episodes is not None and self.data is None:
            raise ValueError(f"data: algo {self.algo.name} begins with demonstrations, whose statistics it acts by")
        if entry.episodes is not None and self.data is not None and self.data.placement == "device":
            raise ValueError(
                f"data.placement: got device, expected auto or host: {self.algo.name} gathers windows in host memory, "
                "since its data grows"
            )
        if self.online and entry.sequence_length is None and entry.episodes is None:
            raise ValueError(
                f"phases: {self.algo.name} learns from demonstrations, so an online phase collects for nothing"
            )
        for name in ("stand_in", "reward"):
            if getattr(self.rollout, name) is not None and self.env is not None and self.env.own_process:
                raise ValueError(
                    f"rollout.{name}: it stands beside the simulator, which env.isolation: process or env.runtime puts "
                    "into a process of its own; take isolation: none"
                )
        if self.online and entry.sequence_length is not None:
            streams = self.rollout.workers * self.rollout.envs_per_worker
            self.replay.check(streams, entry.sequence_length(self.policy))
