"""What a Serve config names as `import_path: rlsvc.serve.application:build` (deployments/serve.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.serve.exceptions import RayServeException

from rlsvc.core.errors import UserError
from rlsvc.serve.deploy import Deployment, application
from rlsvc.serve.keys import Keys
from rlsvc.serve.listener import check_listener
from rlsvc.serve.policies import Offered
from rlsvc.serve.preflight import check_name, check_resources, is_loopback
from rlsvc.serve.service import check_same_contract
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.source import PolicySource
from rlsvc.serve.version import CANARY, CURRENT, SHADOW
from rlsvc.spec.compose import validate
from rlsvc.spec.serve import OfferedSpec, ServeConfigSpec, ServeSpec
from rlsvc.store.bundle import Bundle, read_bundle, read_weight_bytes
from rlsvc.store.mlflow_store import store_uri
from rlsvc.store.registry import resolve
from rlsvc.store.storage import is_url

if TYPE_CHECKING:
    from ray.serve import Application


class BuildError(UserError, RayServeException):
    """A config's arguments do not fit. Of this kind Serve reports the message alone, of others the traceback."""


def build(args: dict[str, Any]) -> Application:
    """The application of a config's `args`, which are those of `rlsvc.spec.serve.ServeSpec`.

    Serve calls it on a node of the cluster, with its proxies up; whoever calls it without Ray has nothing to check the
    listener and the resources against.

    Raises:
        BuildError: an argument, a policy, a name or a file of keys that does not fit, no keys behind a listener that
            others reach, or more than the cluster has. One line; what was served before goes on.
    """
    import ray

    try:
        spec = validate(ServeSpec, args)
        if ray.is_initialized():
            check_listener(keys=spec.keys is not None)
            if not spec.wait_for_nodes:
                _check_nodes(spec, ray.cluster_resources())
        return application(deployment_of(spec))
    except UserError as error:
        raise BuildError("; ".join(str(error).splitlines())) from error


def _check_nodes(spec: ServeSpec, have: Mapping[str, float]) -> None:
    ask = (spec.fewest, spec.cpus, spec.gpus)
    try:
        check_resources(*ask, have_cpus=have.get("CPU", 0.0), have_gpus=have.get("GPU", 0.0))
    except UserError as error:
        raise UserError(f"{error}; where an autoscaler brings nodes: wait_for_nodes: true") from error


def deployment_of(spec: ServeSpec, **where: Any) -> Deployment:
    """The policy resolved, read and checked; `where`: its place, for those who start the proxies themselves.

    Raises:
        UserError: a policy, a name or a file of keys that does not fit.
    """
    if spec.name is not None:
        check_name(spec.name)
    keys = None if spec.keys is None else Keys.read(Path(spec.keys))
    bundle = read_bundle(resolve(spec.policy, root=spec.root))
    bundle.normalizer.group_index(spec.group)
    source = _source(spec, spec.policy, spec.group)
    candidates = {CANARY: None if spec.canary is None else spec.canary.policy, SHADOW: spec.shadow}
    sources = {CURRENT: source} if source.known is not None else {}
    for role, target in candidates.items():
        if target is not None:
            _check_candidate(spec, role, target, bundle)
            sources[role] = _source(spec, target, spec.group)
    name = check_name(spec.name or registered_name(spec.policy) or str(bundle.policy["name"]))
    also = tuple(_offered(spec, one) for one in spec.also)
    weight_bytes = read_weight_bytes(bundle.path)
    budget_bytes = float("inf") if spec.memory_gb is None else spec.memory_gb * 2**30
    _check_several(name, weight_bytes, also, budget_bytes)
    return Deployment(
        name=name,
        load=source,
        sources=sources,
        watch_s=spec.watch_s,
        also=also,
        weight_bytes=weight_bytes,
        budget_bytes=budget_bytes,
        replicas=spec.replicas,
        autoscaling=spec.autoscaling,
        cpus=spec.cpus,
        gpus=spec.gpus,
        settings=ServeSettings(
            max_body_bytes=spec.max_body_mb * 2**20,
            max_batch=spec.batch_size,
            batch_wait_s=spec.batch_wait_ms / 1e3,
            deadline_s=spec.deadline_s,
            chunk_expiry_ms=spec.chunk_expiry_ms,
            log_level=spec.log_level,
            session_expiry_s=spec.session_expiry_s,
            drain_s=spec.drain_s,
            canary_share=0.0 if spec.canary is None else spec.canary.share,
        ),
        keys=keys,
        **where,
    )


def _offered(spec: ServeSpec, one: OfferedSpec) -> Offered:
    if one.name is not None:
        check_name(one.name)
    path = resolve(one.policy, root=spec.root)
    bundle = read_bundle(path)
    bundle.normalizer.group_index(one.group)
    source = _source(spec, one.policy, one.group)
    return Offered(
        name=check_name(one.name or registered_name(one.policy) or str(bundle.policy["name"])),
        load=source,
        contract=bundle.contract,
        robot=bundle.robot,
        version=bundle.id,
        weight_bytes=read_weight_bytes(path),
        sources={CURRENT: source} if source.known is not None else {},
    )


def _check_several(name: str, weight_bytes: int, also: Sequence[Offered], budget_bytes: float) -> None:
    names = [name, *(one.name for one in also)]
    if twice := sorted({one for one in names if names.count(one) > 1}):
        raise UserError(f"two policies of the application are named '{twice[0]}'; give one of them another name")
    for one in also:
        if weight_bytes + one.weight_bytes > budget_bytes:
            need = (weight_bytes + one.weight_bytes) / 2**30
            raise UserError(
                f"memory_gb: got {budget_bytes / 2**30:.3g}, but '{name}', which is always loaded, and '{one.name}' "
                f"need {need:.3g} together"
            )
    if weight_bytes > budget_bytes:
        raise UserError(f"memory_gb: got {budget_bytes / 2**30:.3g}, but '{name}' needs {weight_bytes / 2**30:.3g}")


def _source(spec: ServeSpec, target: str, group: str | None) -> PolicySource:
    """A policy as each replica finds it: a watched alias by its name, anything else where it lies now."""
    path = resolve(target, root=spec.root).resolve()
    watched = target.startswith("models:") and "@" in target and spec.watch_s is not None
    return PolicySource(
        target if watched else str(path),
        store=store_uri(
            spec.root if is_url(spec.root) else Path(spec.root).resolve()
        ),  # here: a replica's environment may name another
        batch_size=spec.batch_size,
        device="gpu" if spec.gpus else "cpu",
        group=group,
        known=path if watched else None,
    )


def _check_candidate(spec: ServeSpec, role: str, target: str, served: Bundle) -> None:
    bundle = read_bundle(resolve(target, root=spec.root))
    try:
        bundle.normalizer.group_index(spec.group)
        check_same_contract(bundle.contract, served.contract, bundle.id)
    except UserError as error:
        raise UserError(f"{role} {target}: {error}") from error


def registered_name(policy: str) -> str | None:
    """`arm` of models:/arm@production and models:/arm/3; None for a folder."""
    return policy.removeprefix("models:/").split("@")[0].split("/")[0] if policy.startswith("models:/") else None


def deployments_of(config: ServeConfigSpec) -> list[Deployment]:
    """The policies of a whole file.

    Raises:
        UserError: see `deployment_of`; a listener that others reach, and no keys; two policies of one name.
    """
    http = config.http_options
    found: dict[str, Deployment] = {}
    for app in config.applications:
        if app.args.keys is None and not is_loopback(http.host):
            raise UserError(
                f"application '{app.name}': without args.keys, http_options.host must be loopback (127.0.0.1), got "
                f"{http.host}; rlsvc keys add NAME --role act --file keys.json makes keys"
            )
        where = {"host": http.host, "port": http.port, "app": app.name, "route": app.route_prefix}
        one = deployment_of(app.args, **where)
        if one.name in found:
            raise UserError(
                f"applications '{found[one.name].app}' and '{app.name}' both serve a policy named '{one.name}'; give "
                "one of them another args.name"
            )
        found[one.name] = one
    return list(found.values())
