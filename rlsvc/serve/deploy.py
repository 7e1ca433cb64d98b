"""A policy as a Ray Serve application: what is deployed, and how it is started and stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsvc.core.errors import UserError
from rlsvc.serve.haproxy import PEM, haproxy_environment, wait_for_replicas, write_pem
from rlsvc.serve.preflight import check_resources, local_cpus, local_gpus
from rlsvc.serve.settings import ServeSettings
from rlsvc.spec.serve import AutoscalingSpec

if TYPE_CHECKING:
    from ray.serve import Application

    from rlsvc.runner import ServedRunner
    from rlsvc.serve.keys import Keys
    from rlsvc.serve.policies import Offered
    from rlsvc.serve.watch import Source

APP = "rlsvc"


class StartError(UserError):
    """Ray Serve took the policy and could not start it."""


@dataclass(frozen=True)
class Deployment:
    """What is served, where, and with what.

    Attributes:
        name: of the policy.
        load: makes the runner, warm, in the replica's process.
        sources: by role the versions that are watched.
        watch_s: how often; None looks once.
        also: further policies that its replicas load when they are asked for.
        weight_bytes: that the weights of the policy itself take.
        budget_bytes: that the weights of all policies of a replica may take.
        host, port: where it listens.
        replicas: how many.
        autoscaling: in their place; None keeps that number.
        cpus, gpus: of each replica.
        settings: limits.
        keys: who may use it; None lets everybody who reaches it.
        app: name of the Serve application.
        route: prefix of its paths.
    """

    name: str
    load: Callable[[], ServedRunner]
    sources: Mapping[str, Source] = field(default_factory=dict)
    watch_s: float | None = None
    also: tuple[Offered, ...] = ()
    weight_bytes: int = 0
    budget_bytes: float = float("inf")
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    autoscaling: AutoscalingSpec | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    settings: ServeSettings = field(default_factory=ServeSettings)
    keys: Keys | None = None
    app: str = APP
    route: str = "/"

    @property
    def fewest(self) -> int:
        """Replicas that there are at least."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    def replica_environment(self) -> dict[str, str]:
        """Set in the replica's process before it imports jax: share a card, and stay off cards not asked for."""
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return variables if self.gpus else variables | {"JAX_PLATFORMS": "cpu"}


def check_room(deployments: Sequence[Deployment], *, have_cpus: float, have_gpus: float) -> None:
    """Refuse what Ray would wait for without end, of each policy and of all of them.

    Raises:
        UserError: not enough CPUs or GPUs.
    """
    for one in deployments:
        check_resources(one.fewest, one.cpus, one.gpus, have_cpus=have_cpus, have_gpus=have_gpus)
    cpus = sum(one.fewest * one.cpus for one in deployments)
    gpus = sum(one.fewest * one.gpus for one in deployments)
    if cpus > have_cpus or gpus > have_gpus:
        raise UserError(
            f"{len(deployments)} policies need {cpus:g} CPUs and {gpus:g} GPUs together, there are {have_cpus:g} and "
            f"{have_gpus:g}; ask for fewer replicas or smaller shares"
        )


def application(deployment: Deployment) -> Application:
    """What Ray Serve deploys."""
    from ray import serve

    from rlsvc.serve.replica import PolicyReplica

    settings, scaling = deployment.settings, deployment.autoscaling
    number: dict[str, Any] = {"num_replicas": deployment.replicas}
    if scaling is not None:
        number = {
            "autoscaling_config": {
                "min_replicas": scaling.min_replicas,
                "max_replicas": scaling.max_replicas,
                "target_ongoing_requests": scaling.robots_per_replica,
                "downscale_delay_s": scaling.downscale_delay_s,
            }
        }
    # An open WebSocket counts as a request under way for as long as it is open.
    most = settings.max_waiting + 256
    deploy = serve.deployment(
        name=deployment.name,
        **number,
        max_ongoing_requests=most,
        max_queued_requests=settings.max_waiting,
        ray_actor_options={
            "num_cpus": deployment.cpus,
            "num_gpus": deployment.gpus,
            "runtime_env": {"env_vars": deployment.replica_environment()},
        },
        # Connections stay open for hours: there is nothing to wait for at the end.
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        # A line for each request of a control loop fills a disk; /metrics counts them.
        logging_config={"enable_access_log": False},
        # A bundle that does not load will not load the second time either.
        max_constructor_retry_count=1,
    )
    return deploy(serve.ingress()(PolicyReplica)).bind(deployment)


def start(*deployments: Deployment, proxies: str = "HeadOnly", http: dict[str, Any] | None = None) -> None:
    """Deploy on the Ray that this process is connected to, and wait until every replica is warm.

    Args:
        deployments: which all listen on the host and port of the first.
        proxies: nodes that listen, "HeadOnly" or "EveryNode".
        http: further options of Serve's listener.

    Raises:
        StartError: Serve or a replica failed to start.
    """
    from ray import serve
    from ray.exceptions import RayError

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its progress lines are no part of the command's output
    current = deployments[0]
    options = {"keep_alive_timeout_s": 60, **(http or {}), "host": current.host, "port": current.port}
    try:
        serve.start(proxy_location=proxies, http_options=options)
        for current in deployments:
            serve.run(application(current), name=current.app, route_prefix=current.route)
        wait_for_replicas(sum(one.fewest for one in deployments), os.environ)
    except (RayError, RuntimeError, TimeoutError) as error:
        app = serve.status().applications.get(current.app) if isinstance(error, RuntimeError) else None
        reports = [] if app is None else [status.message for status in app.deployments.values()]
        raise StartError(f"policy '{current.name}' could not be served: {_cause([*reports, str(error)])}") from error


def _cause(reports: list[str]) -> str:
    """What HAProxy or the innermost exception that Ray's reports name says, on one line, else the reports' first."""
    for report in reports:
        if alert := re.search(r"HAProxy crashed.*?^\[ALERT\][ ()\d:]*(.+?)$", report, re.MULTILINE | re.DOTALL):
            return f"HAProxy did not start: {alert[1].strip()}"
        named = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception): .+)$", report, re.MULTILINE)
        if named:
            return named[-1].strip()
    return next((line.strip() for report in reports for line in report.splitlines() if line.strip()), "no reason given")


@contextlib.contextmanager
def ray_for_serving(*deployments: Deployment, tls: tuple[Path, Path] | None = None) -> Iterator[None]:
    """A Ray to serve on: the cluster that RAY_ADDRESS names, else one of our own that ends with the block.

    Args:
        deployments: which it must have room for.
        tls: files of a certificate and its key, for the listener of a Ray of our own.

    Raises:
        StartError: Ray did not start.
        UserError: the cluster lacks what the replicas ask for, or the files are no certificate and its key.
    """
    address = os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        if address is not None and tls is not None:
            raise UserError(
                f"--tls-cert: the listener of the cluster at {address} is not ours; start its Ray with "
                f"{PEM}=/path/of/tls.pem (docs/deploy.md)"
            )
        if address is None:
            check_room(deployments, have_cpus=local_cpus(), have_gpus=local_gpus())
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlsvc-serve-", ignore_cleanup_errors=True))
            variables = haproxy_environment(Path(folder))
            if tls is not None:
                variables[PEM] = str(Path(folder) / "tls.pem")
                write_pem(*tls, Path(folder) / "tls.pem")
            stack.enter_context(_environment(variables))
        import ray

        try:
            ray.init(
                # Without "local" Ray would join whatever `ray start` last began on this machine.
                address=address or "local",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises Exception itself when a part of it does not come up in time
            raise StartError(f"Ray did not start: {error}") from error
        stack.callback(ray.shutdown)
        if address is not None:  # a Ray of our own ends with all that it holds
            stack.callback(_delete, [one.app for one in deployments])
        have = ray.cluster_resources()
        check_room(deployments, have_cpus=have.get("CPU", 0.0), have_gpus=have.get("GPU", 0.0))
        yield


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables for the block: what Ray starts inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _delete(apps: Sequence[str]) -> None:
    """End these applications: a cluster's Serve may hold others."""
    from ray import serve

    for app in apps:
        serve.delete(app)
