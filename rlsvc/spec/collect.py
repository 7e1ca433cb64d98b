"""`rlsvc collect`: demonstrations and policy rollouts of a robot into a LeRobot dataset (rlsvc/collect.py)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.spec.station import ConsoleSpec, StationSpec


class ActorSpec(Spec):
    """The policy that acts while no person does, here or behind an endpoint."""

    bundle: str | None = None
    """Folder of a policy bundle, or models:/name@alias, that acts in this process."""
    url: str | None = None
    """Address of a served policy, or of a run with `rollout.clients`: "host:port"."""
    key_file: str | None = None
    """File with the API key for the url, which nobody else may read; null sends none."""
    send_episodes: bool = False
    """Send every episode of the dataset that the run behind the url lacks, those of earlier sessions too; without a
    network they wait on this disk."""
    mode: Literal["sync", "async"] = "async"
    """sync: the robot waits for each chunk; async: the next chunk is made while the last one is executed."""
    execute: int | None = Field(default=None, ge=1)
    """Actions of each chunk before the next one is asked for; null takes what the policy's robot executes, or all."""
    ahead: int | None = Field(default=None, ge=0)
    """async: asks when so many of them are left; null asks as soon as a chunk has come."""
    blend: bool = True
    """async: where two chunks overlap the new one's share grows along the overlap. Off for policies with real-time
    chunking, which go on from the old chunk by themselves."""
    sample_steps: int | None = Field(default=None, ge=1)
    """Denoising steps of a bundle; null takes its own."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.bundle is None) == (self.url is None):
            raise ValueError("bundle, url: expected one of the two")
        if self.url is None and (self.send_episodes or self.key_file is not None):
            raise ValueError("send_episodes, key_file: they go with a url, got a bundle")
        if self.execute is not None and self.ahead is not None and self.ahead > self.execute:
            raise ValueError(f"ahead: got {self.ahead}, at most execute = {self.execute}")
        return self


class CollectSpec(Spec):
    """A session at a robot."""

    station: StationSpec
    """The robot."""
    task: str = Field(min_length=1)
    """What it is to do; the policy's prompt, and the dataset's task."""
    dataset: str
    """Folder of the dataset: a new one, or one of this robot to add to."""
    robot_type: str = Field(min_length=1)
    """Kind of robot, as datasets call it ("so101")."""
    episodes: int = Field(ge=1)
    """How many are to be kept; discarded ones do not count."""
    episode_s: float = Field(gt=0)
    """Longest episode, s; one that lasts so long is cut."""
    policy: ActorSpec | None = None
    """What acts while no person does; null: people alone."""
    against: ActorSpec | None = None
    """A second policy, to be compared with `policy`: episodes come in pairs that begin alike, one of each policy in an
    order that is drawn anew, and whoever judges is not told which one acts."""
    reward: RewardSourceSpec | None = None
    """A reward classifier that ends an episode as a success with reward 1; whoever is at the console may end it before,
    and their word counts. null leaves that to people."""
    console: ConsoleSpec | None = ConsoleSpec()
    """null: episodes begin by themselves and end with their time, for tests and robots that need nobody."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the policy's noise: each episode has one that follows from it."""

    @model_validator(mode="after")
    def _somebody_acts(self) -> Self:
        if self.policy is None and self.station.teleop is None:
            raise ValueError(
                "policy, station.teleop: got neither, so nothing would move the robot; give one of the two"
            )
        if self.against is not None and (self.policy is None or self.console is None):
            raise ValueError("against: needs a policy to compare with, and a console at which a person judges")
        if self.against is not None and self.episodes % 2:
            raise ValueError(f"episodes: got {self.episodes}, expected an even number: a comparison is made of pairs")
        if self.console is None and self.policy is None:
            raise ValueError("console: null needs a policy, since nobody could take over")
        return self
