"""A served policy, as a Serve config file names it (deployments/serve.yaml)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec


class AutoscalingSpec(Spec):
    """Replicas by how many robots are connected: an open WebSocket counts for as long as it is open."""

    min_replicas: int = Field(default=1, ge=1)
    """Fewest; a policy takes a minute to load and compile, so that there is no waiting for the first."""
    max_replicas: int = Field(default=4, ge=1)
    """Most."""
    robots_per_replica: float = Field(default=8.0, gt=0)
    """Open connections and requests under way that one replica is to have."""
    downscale_delay_s: float = Field(default=600.0, ge=0)
    """How long there must be too many before one ends; robots connected to it connect anew."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: got {self.max_replicas}, at least min_replicas = {self.min_replicas}")
        return self


class ServeSpec(Spec):
    """One policy behind an endpoint."""

    policy: str = Field(min_length=1)
    """Folder of a policy bundle, or models:/name@alias; every node that may hold a replica has to reach it."""
    name: str | None = None
    """Under which clients ask for it; null takes the registered or the policy's name."""
    root: str = "runs"
    """Where the model registry lives, for models:/ names."""
    group: str | None = None
    """The robot's normaliser group, for a bundle that has several."""
    keys: str | None = None
    """File of API keys (rlsvc keys add) on the node that builds the application; callers must have one of them."""
    replicas: int = Field(default=1, ge=1)
    """Processes that each hold the policy."""
    autoscaling: AutoscalingSpec | None = None
    """In the place of a fixed number of replicas; null keeps `replicas`."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs of each replica."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each replica; a fraction shares a card."""
    batch_size: int = Field(default=1, ge=1, le=1024)
    """Most requests answered in one call of the policy."""
    batch_wait_ms: float = Field(default=2.0, ge=0)
    """Longest that a request waits for others, when others are about."""
    max_body_mb: int = Field(default=16, ge=1, le=16)
    """Largest request, MiB."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest that a request may take."""
