"""The manifests for Kubernetes: against KubeRay's own schemas, against each other, and against the command line.

KubeRay's resource definitions hold the schemas of pods, services, claims and network rules too, so the other manifests
are held to those. A key that a schema does not know is refused, where a cluster would only drop it.
"""

import copy
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from rlsvc import __version__
from rlsvc.cli import app as cli
from rlsvc.spec.compose import compose, validate
from rlsvc.spec.serve import ServeConfigSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "kuberay"
FILES = sorted(FOLDER.glob("*.yaml"))
CRDS = ROOT / "tests" / "data" / "kuberay_crds"
CLUSTER_AT = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec"), "RayService": ("spec", "rayClusterConfig")}
UID = 10001


def strict(schema: Any) -> Any:
    """A structural schema that refuses keys it does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: {name: strict(child) for name, child in value.items()} if key == "properties" else strict(value)
        for key, value in schema.items()
    }
    if "properties" in out and not out.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


def crd(kind: str) -> Any:
    return strict(json.loads(gzip.decompress((CRDS / f"{kind.lower()}.json.gz").read_bytes()))["schema"])


def inside(schema: Any, *path: str) -> Any:
    for name in path:
        schema = schema["items"] if name == "[]" else schema["properties"][name]
    return schema


def closed(required: tuple[str, ...], **properties: Any) -> Any:
    """An object with these keys and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def schemas() -> dict[str, Any]:
    """A schema for each kind that the manifests use."""
    ray = {kind: crd(kind) for kind in CLUSTER_AT}
    spec = ray["RayCluster"]["properties"]["spec"]
    template = inside(spec, "headGroupSpec", "template")
    metadata = inside(template, "metadata")
    claim = inside(template, "spec", "volumes", "[]", "ephemeral", "volumeClaimTemplate", "spec")
    rules = inside(spec, "networkPolicy", "head", "ingressRules")
    selector = inside(rules, "[]", "from", "[]", "podSelector")
    text, one = {"type": "string"}, {"type": "integer", "minimum": 1}
    specs = {
        **{kind: schema["properties"]["spec"] for kind, schema in ray.items()},
        "Service": inside(spec, "headGroupSpec", "headService", "spec"),
        "PersistentVolumeClaim": claim,
        "Deployment": closed(
            ("replicas", "selector", "template"),
            replicas=one, selector=selector, template=template, strategy=closed(("type",), type={"const": "Recreate"}),
        ),
        "StatefulSet": closed(
            ("serviceName", "replicas", "selector", "template"),
            serviceName=text, replicas=one, selector=selector, template=template,
            volumeClaimTemplates={"items": closed(("metadata", "spec"), metadata=metadata, spec=claim)},
        ),
        "NetworkPolicy": closed(
            ("podSelector", "policyTypes"),
            podSelector=selector, policyTypes={"const": ["Ingress"]}, ingress=rules,
        ),
    }  # fmt: skip
    top = ("apiVersion", "kind", "metadata", "spec")
    return {
        kind: closed(top, apiVersion=text, kind={"const": kind}, metadata=metadata, spec=schema)
        for kind, schema in specs.items()
    }


SCHEMAS = schemas()


def documents() -> list[dict[str, Any]]:
    return [document for file in FILES for document in yaml.safe_load_all(file.read_text())]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents() if document["kind"] in kinds]


def name_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    for key in CLUSTER_AT[document["kind"]]:
        document = document[key]
    return document


def groups(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = cluster_of(document)
    return {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, pod template) of everything that runs."""
    for document in documents():
        where = name_of(document)
        if document["kind"] in CLUSTER_AT:
            for name, group in groups(document).items():
                yield f"{where}/{name}", group["template"]
        elif document["kind"] in ("Deployment", "StatefulSet"):
            yield where, document["spec"]["template"]


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every key of a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        if isinstance(node, dict):
            yield (*path, key)
        yield from paths(child, (*path, key))


def values_of(node: Any, key: str) -> list[Any]:
    """What stands under this key, anywhere."""
    if isinstance(node, list):
        return [value for child in node for value in values_of(child, key)]
    if not isinstance(node, dict):
        return []
    own = [node[key]] if key in node else []
    return own + [value for child in node.values() for value in values_of(child, key)]


@pytest.mark.parametrize(
    "document", documents(), ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_a_manifest_fits_its_schema(document):
    jsonschema.validate(document, SCHEMAS[document["kind"]])


@pytest.mark.parametrize("kind", sorted({document["kind"] for document in documents()}))
def test_a_misspelt_key_anywhere_is_refused(kind):
    """Each key in turn. Free maps (labels, quantities, Ray's start parameters, selectors) take any key."""
    free = {"labels", "matchLabels", "nodeSelector", "requests", "limits", "rayStartParams", "selector", "annotations"}
    document, validator = of_kind(kind)[0], jsonschema.Draft202012Validator(SCHEMAS[kind])
    refused = 0
    for path in paths(document):
        if path[-2:-1] and path[-2] in free:
            continue
        wrong = copy.deepcopy(document)
        parent = wrong
        for key in path[:-1]:
            parent = parent[key]
        parent[f"{path[-1]}x"] = parent.pop(path[-1])
        assert not validator.is_valid(wrong), path
        refused += 1
    assert refused > 3


def test_the_schemas_say_where_they_come_from():
    sources = (ROOT / "tests" / "data" / "SOURCES.md").read_text()
    (row,) = [line for line in sources.splitlines() if "kuberay_crds" in line]
    assert "ray-project/kuberay @ feeaf72f" in row
    assert "Apache License" in (CRDS / "LICENSE").read_text()
    assert sum(file.stat().st_size for file in CRDS.iterdir()) < 64_000


def test_every_name_is_used_once():
    names = [(document["kind"], document["metadata"]["name"]) for document in documents()]
    assert len(names) == len(set(names))
    # KubeRay makes a Service NAME-head-svc for a cluster and for a service.
    owners = [document["metadata"]["name"] for document in of_kind(*CLUSTER_AT)]
    assert len(owners) == len(set(owners))


@pytest.mark.parametrize("document", of_kind(*CLUSTER_AT), ids=lambda document: document["kind"])
def test_a_ray_cluster_asks_for_its_token_and_grows(document):
    import ray

    cluster = cluster_of(document)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "rlsvc-ray-token"}
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["maxReplicas"] > 0


@pytest.mark.parametrize("document", of_kind("RayCluster", "RayService"), ids=lambda document: document["kind"])
def test_a_cluster_that_stays_keeps_its_state_in_redis(document):
    options = cluster_of(document)["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    (service,) = [one for one in of_kind("Service") if one["metadata"]["name"] == host]
    assert int(port) == service["spec"]["ports"][0]["port"]
    (redis,) = [one for one in of_kind("StatefulSet") if one["metadata"]["name"] == host]
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    secret = {"name": "rlsvc-redis", "key": "password"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == secret
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == secret
    assert container["args"][:2] == ["--requirepass", f"$({container['env'][0]['name']})"]


def test_there_are_groups_for_cpus_gpus_and_a_robot():
    (document,) = of_kind("RayCluster")
    found = groups(document)
    assert set(found) == {"head", "cpu", "gpu", "robot-arm1"}
    gpu = found["gpu"]["template"]["spec"]["containers"][0]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == found["gpu"]["rayStartParams"]["num-gpus"] == "1"
    # A string in a string: KubeRay puts it on a shell's command line.
    (word,) = shlex.split(found["robot-arm1"]["rayStartParams"]["resources"])
    (name,) = json.loads(word.replace('\\"', '"'))
    assert name == "robot:arm1"
    assert found["robot-arm1"]["maxReplicas"] == 1  # one process drives an arm


@pytest.mark.parametrize(("where", "template"), pods(), ids=lambda value: value if isinstance(value, str) else None)
def test_a_pod_has_no_root_no_rights_probes_and_limits(where, template):
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "rlsvc"  # the network policies select it
    # The head's pod holds the autoscaler, which speaks to Kubernetes.
    assert where.endswith("/head") or spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert "privileged" not in container["securityContext"]
    for key in ("hostNetwork", "hostPID", "hostIPC", "hostPath"):
        assert values_of(template, key) == []


@pytest.mark.parametrize(("where", "template"), pods(), ids=lambda value: value if isinstance(value, str) else None)
def test_a_pods_mounts_ports_and_images_exist(where, template):
    spec = template["spec"]
    claims = {document["metadata"]["name"] for document in of_kind("PersistentVolumeClaim")}
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    if where.startswith("StatefulSet"):
        volumes |= {one["metadata"]["name"] for one in of_kind("StatefulSet")[0]["spec"]["volumeClaimTemplates"]}
    assert set(values_of(spec, "claimName")) <= claims
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        ports = {port["name"] for port in container["ports"]}
        assert {get["port"] for get in values_of(container, "httpGet")} <= ports
        name, tag = container["image"].split(":")
        if name.startswith("rlsvc/"):
            assert (ROOT / "docker" / f"{name.removeprefix('rlsvc/')}.Dockerfile").exists()
            assert tag == __version__
            assert spec["securityContext"]["runAsUser"] == UID
        else:
            assert re.fullmatch(r"\d+\.\d+\.\d+-\w+", tag)


def test_each_group_has_the_image_of_its_kind():
    for document in of_kind(*CLUSTER_AT):
        for name, group in groups(document).items():
            kind = {"head": "cpu", "cpu": "cpu", "gpu": "cuda"}.get(name, "robot")
            assert group["template"]["spec"]["containers"][0]["image"] == f"rlsvc/{kind}:{__version__}"


def test_the_image_user_is_that_of_the_manifests():
    for file in (ROOT / "docker").glob("*.Dockerfile"):
        assert f"USER {UID}:{UID}" in file.read_text()


def test_no_service_leaves_the_cluster():
    assert of_kind("Ingress") == []
    for service in of_kind("Service"):
        assert service["spec"]["type"] == "ClusterIP"
    for document in documents():
        assert set(values_of(document, "serviceType")) <= {"ClusterIP"}
        for key in ("nodePort", "hostPort", "externalIPs", "enableIngress"):
            assert values_of(document, key) == []


def test_services_reach_the_pods_that_they_select():
    targets = {one["metadata"]["name"]: one for one in of_kind("Deployment", "StatefulSet")}
    for service in of_kind("Service"):
        template = targets[service["metadata"]["name"]]["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_callers_reach_port_8000_alone_and_mlflow_and_redis_are_for_rays_nodes():
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("NetworkPolicy")}
    assert "ingress" not in policies["rlsvc-deny"]
    node = {"app.kubernetes.io/part-of": "rlsvc", "ray.io/is-ray-node": "yes"}
    for name, port in (("rlsvc-mlflow", 5000), ("rlsvc-redis", 6379)):
        (rule,) = policies[name]["ingress"]
        assert rule["from"][0] == {"podSelector": {"matchLabels": node}}
        assert [one["port"] for one in rule["ports"]] == [port]
    for rule in policies["rlsvc-ray"]["ingress"]:
        if rule["from"] != [{"podSelector": {"matchLabels": node}}]:
            assert {one["port"] for one in rule["ports"]} <= {8000, 8265}
    (callers,) = [
        rule for rule in policies["rlsvc-ray"]["ingress"] if {"port": 8000, "protocol": "TCP"} in rule.get("ports", [])
    ]
    assert len(callers["ports"]) == 1


def test_mlflow_is_where_the_nodes_look_for_it_and_its_command_parses():
    from mlflow.cli import cli as mlflow

    (deployment,) = of_kind("Deployment")
    program, verb, *words = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (program, verb) == ("mlflow", "server")
    mlflow.commands["server"].make_context("server", list(words))
    (service,) = [one for one in of_kind("Service") if one["metadata"]["name"] == "mlflow"]
    address = f"http://mlflow:{service['spec']['ports'][0]['port']}"
    for document in of_kind(*CLUSTER_AT):
        for group in groups(document).values():
            environment = {one["name"]: one["value"] for one in group["template"]["spec"]["containers"][0]["env"]}
            assert environment["MLFLOW_TRACKING_URI"] == address


def test_the_jobs_entrypoint_parses_and_composes():
    (job,) = of_kind("RayJob")
    program, verb, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "rlsvc"
    command = typer.main.get_command(cli)
    command.commands[verb].make_context(verb, list(words))  # type: ignore[attr-defined]
    spec = compose([word for word in words if not word.startswith("--")])
    mounts = {mount["mountPath"] for mount in groups(job)["gpu"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert "/shared" in mounts
    assert spec.root.startswith("/shared/")
    assert all(dataset.path.startswith("/shared/") for dataset in spec.data.datasets)
    assert groups(job)["gpu"]["minReplicas"] >= spec.learner.ranks  # the run looks once, when it starts


def test_the_service_deploys_a_config_that_is_valid_for_rlsvc_and_for_ray():
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    (service,) = of_kind("RayService")
    plain = yaml.safe_load(service["spec"]["serveConfigV2"])
    config = validate(ServeConfigSpec, plain)
    ServeDeploySchema.model_validate(plain)
    for application in config.applications:
        assert callable(import_attr(application.import_path))
        assert application.args.keys is not None  # others reach it
        for group in groups(service).values():
            (container,) = group["template"]["spec"]["containers"]
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert {str(Path(application.args.keys).parent), "/shared"} <= set(mounts)
            assert config.http_options.port in [port["containerPort"] for port in container["ports"]]
    shipped = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    for one in (shipped, plain):
        for key in ("keys", "wait_for_nodes"):
            one["applications"][0]["args"].pop(key, None)
    assert plain == shipped


def test_every_secret_is_made_by_the_page_on_deploying_and_none_lies_here():
    page = (ROOT / "docs" / "deploy.md").read_text()
    made = set(re.findall(r"kubectl create secret generic (\S+) .*--from-(?:literal|file)=([\w.]+)=", page))
    used = {("rlsvc-ray-token", "auth_token"), ("rlsvc-keys", "keys.json")}
    used |= {(ref["name"], ref["key"]) for ref in values_of(documents(), "secretKeyRef")}
    named = {*values_of(documents(), "secretName")}
    assert named == {"rlsvc-ray-token", "rlsvc-keys"}
    assert used == made
    assert of_kind("Secret") == []
