"""The RayJob that `rlsvc submit --kuberay` prints: against KubeRay's schema, and as large as the run asks for."""

import importlib.util
import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from rlsvc import __version__
from rlsvc.commands import jobs as commands
from rlsvc.core.errors import UserError
from rlsvc.jobs.run import SPEC, SPEC_FILE
from rlsvc.spec.compose import compose

ROOT = Path(__file__).parents[2]
APP = typer.Typer()
APP.command()(commands.submit)
APP.add_typer(commands.app, name="jobs")


def _manifests():
    """What the tests of the manifests under deployments/kuberay know."""
    spec = importlib.util.spec_from_file_location("kuberay_manifests", Path(__file__).with_name("test_kuberay.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KUBERAY = _manifests()
RUN = ["train", "experiment=pusht_diffusion", "root=/shared/runs"]


def printed(*words: str, command: list[str] = RUN) -> dict:
    result = CliRunner().invoke(APP, ["submit", "--kuberay", "--dry-run", *words, "--", *command])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.output)


def group(document: dict, name: str) -> dict:
    return KUBERAY.groups(document)[name]


def resources(document: dict, name: str) -> dict:
    (container,) = group(document, name)["template"]["spec"]["containers"]
    return container["resources"]["limits"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], RUN),
        (["--retries", "2", "--image", "me/mine:1", "--env", "A=b"], [*RUN, "device=gpu"]),
        (
            ["--working-dir", "https://example.org/tree.zip"],
            ["serve", "models:/a@b", "--gpus", "1", "--root", "/shared/runs"],
        ),
        ([], ["sweep", str(ROOT / "tune_spaces/pusht_diffusion.yaml"), "root=/shared/runs"]),
    ],
)
def test_it_fits_kuberays_schema_and_a_misspelt_key_does_not(words, command):
    document = printed("--name", "night.1", *words, command=command)
    jsonschema.validate(document, KUBERAY.SCHEMAS["RayJob"])
    document["spec"]["backofLimit"] = document["spec"].pop("backoffLimit")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, KUBERAY.SCHEMAS["RayJob"])


def test_learners_with_gpus_get_a_group_of_gpus_for_all_of_them():
    document = printed(command=[*RUN, "learner.ranks=4", "learner.gpus_per_rank=1", "evaluation.gpus=0.5"])
    gpu = group(document, "gpu")
    assert gpu["replicas"] == gpu["minReplicas"] == gpu["maxReplicas"] == 5  # 4 ranks and what acts in evaluation
    assert gpu["rayStartParams"] == {"num-gpus": "1"}
    assert resources(document, "gpu")["nvidia.com/gpu"] == "1"
    assert gpu["template"]["spec"]["containers"][0]["image"] == f"rlsvc/cuda:{__version__}"
    assert group(document, "cpu")["replicas"] == 1  # evaluation workers


def test_a_run_without_gpus_gets_cpus_for_all_that_it_starts():
    document = printed(command=[*RUN, "device=cpu", "learner.ranks=8", "evaluation.workers=3"])
    assert set(KUBERAY.groups(document)) == {"head", "cpu"}
    cpu = group(document, "cpu")
    assert cpu["replicas"] * int(resources(document, "cpu")["cpu"]) >= 8 + 3


def test_a_rank_of_many_cpus_gets_a_pod_that_holds_it():
    document = printed(command=[*RUN, "device=cpu", "learner.cpus_per_rank=16", "learner.ranks=2"])
    assert int(resources(document, "cpu")["cpu"]) == 16


def test_a_fraction_of_a_gpu_a_rank_shares_cards_as_ray_would():
    document = printed(command=[*RUN, "learner.ranks=2", "learner.gpus_per_rank=0.5", "evaluation.gpus=0"])
    assert group(document, "gpu")["replicas"] == 1


def test_a_robots_run_gets_the_computer_beside_its_arm():
    station = {"id": "arm1", "driver": {"name": "so101", "port": "/dev/ttyUSB0"}}
    asks = {"CPU": 1.0, f"robot:{station['id']}": 1.0}
    from rlsvc.jobs.kuberay import groups_of, ray_job

    document = ray_job("j", "rlsvc doctor", {}, groups_of(None, asks, None), None, 0)
    jsonschema.validate(document, KUBERAY.SCHEMAS["RayJob"])
    robot = group(document, "robot-arm1")
    (word,) = shlex.split(robot["rayStartParams"]["resources"])
    assert json.loads(word.replace('\\"', '"')) == {"robot:arm1": 1}
    assert robot["template"]["spec"]["nodeSelector"] == {"rlsvc/robot": "arm1"}


def test_the_run_travels_with_the_job_and_composes_there(tmp_path):
    document = printed("--env", "MLFLOW_TRACKING_URI=http://mlflow:5000", "--retries", "2")
    environment = yaml.safe_load(document["spec"]["runtimeEnvYAML"])["env_vars"]
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    (tmp_path / "sent.yaml").write_text(environment[SPEC])
    *_, verb, file, option = shlex.split(document["spec"]["entrypoint"])
    assert (verb, file, option) == ("train", SPEC_FILE, "--continue")
    assert compose([str(tmp_path / "sent.yaml")]) == compose(RUN[1:])
    assert document["spec"]["backoffLimit"] == 2


def test_the_cluster_asks_for_its_token_and_its_pods_have_no_rights():
    document = printed(command=[*RUN, "device=gpu"])
    assert KUBERAY.cluster_of(document)["authOptions"] == {"mode": "token", "secretName": "rlsvc-ray-token"}
    import ray

    assert KUBERAY.cluster_of(document)["rayVersion"] == ray.__version__
    for one in KUBERAY.groups(document).values():
        spec = one["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert one["template"]["metadata"]["labels"]["app.kubernetes.io/part-of"] == "rlsvc"
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_a_root_that_would_go_with_the_cluster_is_refused():
    with pytest.raises(UserError, match=r"root: got runs, which goes with the RayJob's cluster.*/shared"):
        printed(command=["train", "experiment=pusht_diffusion"])
    printed(command=["train", "experiment=pusht_diffusion", "root=s3://bucket/runs"])
