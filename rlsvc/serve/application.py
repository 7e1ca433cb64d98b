"""What a Serve config names as `import_path: rlsvc.serve.application:build` (deployments/serve.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsvc.serve.deploy import Deployment, application
from rlsvc.serve.keys import Keys
from rlsvc.serve.preflight import check_name
from rlsvc.serve.replica import BundleLoader
from rlsvc.serve.service import ServeSettings
from rlsvc.spec.serve import ServeSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.store.registry import resolve

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """The application of a config's `args`, which are those of `rlsvc.spec.serve.ServeSpec`.

    Raises:
        UserError: a policy, a name or a file of keys that there is not.
        ValueError: an argument that there is not, or out of range.
    """
    return application(deployment_of(ServeSpec.model_validate(args)))


def deployment_of(spec: ServeSpec, **where: Any) -> Deployment:
    """The policy resolved, read and checked; `where`: host and port, for those who start the proxies themselves.

    Raises:
        UserError: see `build`.
    """
    path = resolve(spec.policy, root=spec.root).resolve()
    bundle = read_bundle(path)
    bundle.normalizer.group_index(spec.group)
    return Deployment(
        name=check_name(spec.name or registered_name(spec.policy) or str(bundle.policy["name"])),
        load=BundleLoader(path, spec.batch_size, "gpu" if spec.gpus else "cpu", spec.group),
        replicas=spec.replicas,
        autoscaling=spec.autoscaling,
        cpus=spec.cpus,
        gpus=spec.gpus,
        settings=ServeSettings(
            max_body_bytes=spec.max_body_mb * 2**20,
            max_batch=spec.batch_size,
            batch_wait_s=spec.batch_wait_ms / 1e3,
            deadline_s=spec.deadline_s,
        ),
        keys=None if spec.keys is None else Keys.read(Path(spec.keys)),
        **where,
    )


def registered_name(policy: str) -> str | None:
    """`arm` of models:/arm@production and models:/arm/3; None for a folder."""
    return policy.removeprefix("models:/").split("@")[0].split("/")[0] if policy.startswith("models:/") else None
