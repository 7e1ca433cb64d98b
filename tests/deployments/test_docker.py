"""The images and the compose file: linted, valid, without root or build tools, and their RUN steps work."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

from rlsvc import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).parent / "hadolint"
BUILD_TOOLS = re.compile(r"\b(gcc|g\+\+|make|build-essential|libc6-dev|uv|cargo|pip)\b")


COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()


def compose() -> dict:
    return yaml.safe_load(COMPOSE)


def read_compose(text: str) -> PyCompose:
    """Read it as the Compose specification has it; YAML's merge keys are resolved first, as Docker does."""
    return PyCompose.from_json(json.dumps(yaml.safe_load(text)))


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments) of a Dockerfile, continued lines joined and comments left out."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def stages(file: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(file):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def make_steps(file: Path) -> list[list[str]]:
    """The words of every `RUN make ...`, with the default of each ARG in its place."""
    arguments = dict(value.split("=", 1) for name, value in instructions(file) if name == "ARG")
    steps = []
    for name, value in instructions(file):
        if name == "RUN" and value.startswith("make "):
            for argument, default in arguments.items():
                value = value.replace(f'"${argument}"', default)
            steps.append(re.findall(r'(?:[^\s"]|"[^"]*")+', value))
    return [[word.replace('"', "") for word in step] for step in steps]


def test_there_is_an_image_for_each_kind_of_node():
    assert [file.name for file in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "robot.Dockerfile"]


def test_hadolint_finds_nothing():
    answer = subprocess.run(
        [HADOLINT, "--failure-threshold", "style", *DOCKERFILES], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (0, "")


def test_hadolint_finds_what_it_should(tmp_path):
    broken = tmp_path / "Dockerfile"
    broken.write_text("FROM python:latest\nUSER root\nRUN cd /opt && apt-get install gcc\n")
    answer = subprocess.run([HADOLINT, broken], capture_output=True, text=True, check=False)
    assert {"DL3002", "DL3007", "DL3008"} <= set(re.findall(r"DL\d+", answer.stdout))
    assert answer.returncode != 0


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_last_stage_has_a_pinned_base_no_build_tools_and_no_root(file):
    build, last = stages(file)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm", last[0][1])
    assert build[0][1] == f"{last[0][1]} AS build"  # the environment's interpreter is the base's
    assert ("ENV", "UV_PYTHON_DOWNLOADS=never") in build
    assert [value for name, value in last if name == "RUN" and BUILD_TOOLS.search(value)] == []
    users = [value for name, value in last if name == "USER"]
    assert users == ["10001:10001"]
    after = last[last.index(("USER", users[0])) :]
    assert [name for name, _ in after if name in ("RUN", "COPY", "ADD")] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_step_of_a_build_is_a_target_of_the_makefile_and_every_extra_exists(file):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    steps = make_steps(file)
    assert steps
    assert [
        value for name, value in stages(file)[0] if name == "RUN" and not value.startswith(("make ", "apt-get "))
    ] == []
    for _, *words in steps:
        assert {word for word in words if "=" not in word} <= targets
        (given,) = [word.removeprefix("EXTRAS=") for word in words if word.startswith("EXTRAS=")]
        assert set(given.split()) <= extras


def test_the_images_get_what_they_copy_and_nothing_private():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        word for file in DOCKERFILES for name, value in stages(file)[0] if name == "COPY" for word in value.split()[:-1]
    }
    assert copied == let_in
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_compose_file_is_valid():
    read = read_compose(COMPOSE)
    for check in (read.validate_networks, read.validate_volumes, read.validate_secrets):
        check()
    assert set(read.service_names()) == {"head", "worker", "mlflow"}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("healthcheck:", "healtcheck:", "healtcheck"),
        ("interval:", "intervall:", "intervall"),
        ("shm_size", "shm", "shm"),
    ],
)
def test_a_misspelt_key_of_a_compose_file_is_refused(before, after, text):
    with pytest.raises(ValueError, match=text):
        read_compose(COMPOSE.replace(before, after))


def test_nothing_of_the_compose_cluster_is_published_beyond_loopback_and_mlflow_not_at_all():
    services = compose()["services"]
    published = {name: service.get("ports", []) for name, service in services.items()}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert {port.split(":")[1] for ports in published.values() for port in ports} == {"8000", "8265"}
    assert published["mlflow"] == published["worker"] == []
    assert services["mlflow"]["networks"] == services["worker"]["networks"] == ["inner"]
    inner = compose()["networks"]["inner"]
    assert inner["internal"] is True
    # The head is on two networks, and Ray would take its address of the other one, which no worker reaches.
    address = services["head"]["networks"]["inner"]["ipv4_address"]
    assert f"--node-ip-address={address}" in services["head"]["command"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(inner["ipam"]["config"][0]["subnet"])


def test_every_compose_service_asks_for_tokens_is_watched_and_has_no_rights():
    services = compose()["services"]
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "user" not in service  # the image's own is not root
        if name != "mlflow":
            assert service["environment"]["RAY_AUTH_MODE"] == "token"
            assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_auth_token"
            assert service["secrets"] == ["ray_auth_token"]
    assert services["worker"]["deploy"]["replicas"] == 2


def test_the_compose_services_run_the_image_of_this_version_and_commands_that_parse():
    import click
    from ray.scripts.scripts import cli as ray

    services = compose()["services"]
    assert {service["image"] for service in services.values()} == {f"rlsvc/cpu:{__version__}"}
    for name in ("head", "worker"):
        program, verb, *words = services[name]["command"]
        assert (program, verb) == ("ray", "start")
        ray.commands["start"].make_context("start", words)
        with pytest.raises(click.NoSuchOption):
            ray.commands["start"].make_context("start", [*words, "--no-such-option"])
    from mlflow.cli import cli as mlflow

    program, verb, *words = services["mlflow"]["command"]
    assert (program, verb) == ("mlflow", "server")
    mlflow.commands["server"].make_context("server", words)


def test_the_compose_secret_is_no_file_of_the_repository():
    secret = compose()["secrets"]["ray_auth_token"]["file"]
    ignored = subprocess.run(
        ["git", "check-ignore", f"docker/{Path(secret).name}"], cwd=ROOT, capture_output=True, check=False
    )
    assert ignored.returncode == 0


@pytest.mark.slow
def test_the_steps_of_the_cpu_image_make_a_working_environment_in_an_empty_folder(tmp_path):
    """As the build does: what it copies, in its order, and its own commands."""
    file = ROOT / "docker" / "cpu.Dockerfile"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    environment["UV_PYTHON"] = str(Path(sys.base_prefix) / "bin" / "python3.12")  # the base image has it on its path
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    steps = iter(make_steps(file))
    for name, value in stages(file)[0]:
        if name == "COPY":
            *sources, _ = value.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, tmp_path / source)
        elif name == "RUN" and value.startswith("make "):
            made = subprocess.run(
                next(steps), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550, check=False
            )
            assert made.returncode == 0, made.stderr
    programs = tmp_path / ".venv" / "bin"
    shutil.rmtree(tmp_path / "rlsvc")  # the last stage has the environment alone
    said = subprocess.run(
        [programs / "rlsvc", "--version"], cwd="/", env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == __version__
    assert not (programs / "pytest").exists()
    haproxy = subprocess.run([programs / "rlsvc-haproxy", "-v"], capture_output=True, text=True, check=True)
    assert "HAProxy version" in haproxy.stdout
