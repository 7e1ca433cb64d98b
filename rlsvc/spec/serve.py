"""Served policies: the file that `rlsvc serve` and Ray's `serve deploy` take alike (deployments/serve.yaml)."""

from __future__ import annotations

from typing import Any, Literal, Self

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


class CanarySpec(Spec):
    """A candidate that answers a share of the sessions."""

    policy: str = Field(min_length=1)
    """Folder of a bundle, or models:/name@alias; with the contract of the policy that is served."""
    share: float = Field(default=0.1, gt=0, le=1)
    """Of the new sessions."""


class OfferedSpec(Spec):
    """A further policy of the same replicas."""

    policy: str = Field(min_length=1)
    """Folder of a policy bundle, or models:/name@alias."""
    name: str | None = None
    """Under which clients ask for it; null takes the registered or the policy's name."""
    group: str | None = None
    """The robot's normaliser group, for a bundle that has several."""


class ServeSpec(Spec):
    """One policy behind an endpoint, or several that share its replicas."""

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
    wait_for_nodes: bool = False
    """Deploy although the cluster has no room for the replicas now, since an autoscaler brings nodes."""
    batch_size: int = Field(default=1, ge=1, le=1024)
    """Most requests answered in one call of the policy."""
    batch_wait_ms: float = Field(default=2.0, ge=0)
    """How long a request waits for others, when others are about; behind a slow policy longer, by shares of what its
    last batch took. 0: never."""
    max_body_mb: int = Field(default=16, ge=1, le=16)
    """Largest request, MiB."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest that a request may take."""
    chunk_expiry_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How long a chunk may be executed from when it is answered; null for as long as its actions last."""
    also: tuple[OfferedSpec, ...] = ()
    """Further policies, which a replica loads when they are first asked for."""
    memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """GiB that the weights in a replica may take; policies of `also` are let go for others. null for no limit."""
    watch_s: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """How often each replica looks up what an alias means; null never: then it is what it meant at the start."""
    drain_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """Longest that a session keeps a version that another has taken the place of, within an episode."""
    canary: CanarySpec | None = None
    """A candidate that answers a share of the sessions."""
    shadow: str | None = Field(default=None, min_length=1)
    """A candidate, folder or models:/name@alias, whose actions are compared with the answers and given to nobody."""
    session_expiry_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """How long the server keeps an episode, for clients that keep none, after its last request."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the JSON lines that a replica writes; debug has one for every answer."""

    @property
    def fewest(self) -> int:
        """Replicas that there are at least."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas


class HttpSpec(Spec):
    """Where Serve listens. It is fixed when Serve starts: another host or port needs `serve shutdown` first."""

    host: str = "0.0.0.0"
    """Address; Ray's default is every interface, for which each application needs `keys`."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port."""
    keep_alive_timeout_s: int = Field(default=60, ge=1)
    """How long an idle connection is kept."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest that Serve lets a request take; null leaves it to each application's `deadline_s`."""


class ServeApplicationSpec(Spec):
    """One policy under one route of the endpoint."""

    name: str = Field(default="rlsvc", min_length=1)
    """Of the application, in Serve's status."""
    route_prefix: str = Field(default="/", pattern=r"^/(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*)?$")
    """Under which it answers; `/` is where rlsvc.client and openpi's client look."""
    import_path: Literal["rlsvc.serve.application:build"]
    """What Serve calls with `args`."""
    args: ServeSpec
    """The policy, and how it is served."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the application; the nodes' own when empty."""


class ServeConfigSpec(Spec):
    """What Serve runs: a part of Ray's schema, which passes over keys that it does not know; here they are refused."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "EveryNode"
    """Nodes that listen."""
    http_options: HttpSpec = HttpSpec()
    """Where they listen."""
    logging_config: dict[str, Any] = Field(default_factory=dict)
    """Ray Serve's logging: encoding, log_level, ..."""
    applications: tuple[ServeApplicationSpec, ...] = Field(min_length=1)
    """Policies."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for key, values in (
            ("name", [app.name for app in self.applications]),
            ("route_prefix", [app.route_prefix for app in self.applications]),
            ("args.name", [app.args.name for app in self.applications if app.args.name is not None]),
        ):
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"applications: two have the {key} '{twice[0]}', expected different ones")
        return self
