"""The files for `ray up`: against Ray's own schema, and the commands that they run on the nodes."""

import copy
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "ray-up"
FILES = sorted(FOLDER.glob("*.yaml"))
ENVIRONMENT = "~/rlsvc/deployments/ray-up/environment"


def read(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def ray_commands(config: dict) -> list[list[str]]:
    """The words of every `ray ...` that runs on a node."""
    lines = [line for key in ("head_start_ray_commands", "worker_start_ray_commands") for line in config[key]]
    parts = [shlex.split(part) for line in lines for part in line.split(";")]
    return [words for words in parts if words[0] == "ray"]


def check(config: dict) -> None:
    """What `ray up` does first: Ray's defaults, then its schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))


def test_there_is_a_file_for_a_cloud_and_one_for_hosts_that_there_are():
    assert [file.stem for file in FILES] == ["aws", "on-premise"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ray_takes_the_file(file):
    check(read(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("key", ["cluster_name", "setup_commands", "head_start_ray_commands", "file_mounts", "auth"])
def test_a_misspelt_key_is_refused(file, key):
    config = read(file)
    config[f"{key}x"] = config.pop(key)
    with pytest.raises(jsonschema.ValidationError):
        check(config)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rays_commands_parse_and_run_with_tokens_and_a_dashboard_on_loopback(file):
    from ray.scripts.scripts import cli as ray

    config = read(file)
    commands = ray_commands(config)
    assert [words[1] for words in commands] == ["stop", "start", "stop", "start"]
    for _, verb, *words in commands:
        ray.commands[verb].make_context(verb, [word for word in words if not word.startswith("--address=")])
    assert "--dashboard-host=127.0.0.1" in commands[1]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert all(line.startswith(f". {ENVIRONMENT};") for line in config[key])
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_nodes_install_what_the_makefile_offers(file):
    config = read(file)
    (line,) = [line for line in config["setup_commands"] if "make " in line]
    words = shlex.split(line.partition("&& ")[2])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(words[1:-1]) <= targets
    assert words[-1].startswith("EXTRAS=learn cluster ")
    assert config["file_mounts"]["~/rlsvc"] == "."
    assert {".venv", "runs"} <= set(config["rsync_exclude"])  # the nodes make an environment of their own


def test_the_cloud_lets_in_ssh_from_one_network_and_nothing_else():
    config = read(FOLDER / "aws.yaml")
    (rule,) = config["provider"]["security_group"]["IpPermissions"]
    assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
    assert "0.0.0.0/0" not in str(rule)
    for node in config["available_node_types"].values():
        assert node["node_config"]["MetadataOptions"] == {"HttpTokens": "required"}


def test_the_nodes_environment_is_that_of_the_images(tmp_path):
    """Sourced by a plain shell, as on a node."""
    printed = subprocess.run(
        ["sh", "-c", f". {FOLDER / 'environment'}; env"],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    node = dict(line.split("=", 1) for line in printed.splitlines())
    assert node["PATH"].startswith(f"{tmp_path}/rlsvc/.venv/bin:")
    image = (ROOT / "docker" / "cuda.Dockerfile").read_text().replace("/opt/rlsvc", f"{tmp_path}/rlsvc")
    given = dict(re.findall(r"^(?:ENV)? +(RAY_\w+)=(\S+)", image, re.MULTILINE))
    assert given["RAY_AUTH_MODE"] == "token"
    assert given == {name: value for name, value in node.items() if name.startswith("RAY_")}
