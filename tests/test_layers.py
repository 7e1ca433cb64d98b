"""The light install: what a laptop or a robot's computer can do without jax, torch and ray."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "flax", "torch", "ray", "mlflow", "lerobot")

# Lets in the standard library, rlsvc, and what the base dependencies bring; anything else is as if not installed.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if top not in allowed and not standard:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
allowed = set({allowed!r})
sys.meta_path.insert(0, Block())
"""


def base_modules() -> set[str]:
    """Top-level modules of the base dependencies and what they need themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.sub(r"[-_.]+", "-", d.name).lower(): d for d in distributions()}
    wanted, found = list(project["dependencies"]), set()
    while wanted:
        requirement = wanted.pop()
        if ";" in requirement and "extra" in requirement:
            continue
        name = re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[(]", requirement)[0]).lower()
        if name in installed and name not in found:
            found.add(name)
            wanted += requires(name) or []
    files = [file for name in found for file in installed[name].files or []]
    tops = {file.parts[0].partition(".")[0] for file in files if file.suffix in (".py", ".so")}
    return {top for top in tops if top.isidentifier()} | {"rlsvc"}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def blocked() -> str:
    return BLOCK.format(allowed=sorted(base_modules()))


def rlsvc(blocked: str, *arguments: str) -> subprocess.CompletedProcess:
    return python(f"{blocked}\nfrom rlsvc.cli import main\nsys.argv[0] = 'rlsvc'\nmain()", *arguments)


def test_importing_the_command_line_specs_client_and_jobs_loads_nothing_heavy():
    specs = sorted(
        f"rlsvc.spec.{file.stem}" for file in (ROOT / "rlsvc" / "spec").glob("*.py") if file.stem != "__init__"
    )
    core = sorted(
        f"rlsvc.core.{file.stem}" for file in (ROOT / "rlsvc" / "core").glob("*.py") if file.stem != "__init__"
    )
    modules = ["rlsvc.cli", "rlsvc.client", "rlsvc.jobs", *specs, *core]
    done = python(f"import sys, {', '.join(modules)}\nprint(sorted(set({HEAVY}) & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_block_keeps_out_what_the_base_install_has_not(blocked):
    assert not base_modules() & {*HEAVY, "pyarrow", "gymnasium", "matplotlib", "safetensors", "optax"}
    for name in ("jax", "ray", "pyarrow"):
        done = python(f"{blocked}\nimport {name}")
        assert f"No module named '{name}'" in done.stderr


def test_help_works_on_the_light_install(blocked):
    done = rlsvc(blocked, "--help")
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("train", "serve", "sweep", "query", "submit", "doctor"))


def test_a_specification_is_composed_and_checked_on_the_light_install(blocked):
    done = rlsvc(blocked, "train", "experiment=pusht_diffusion", "--cfg", "algo.learning_rate=3e-4")
    assert done.returncode == 0, done.stderr
    assert "learning_rate: 0.0003" in done.stdout
    wrong = rlsvc(blocked, "train", "experiment=pusht_diffusion", "algo.learning_rat=3e-4")
    assert wrong.returncode == 2
    assert "Did you mean 'learning_rate'?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_the_doctor_says_what_is_missing_on_the_light_install(blocked):
    done = rlsvc(blocked, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert '"missing"' in done.stdout
    assert "rlsvc[" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["train", "experiment=pusht_demo", "--local"], ["evaluate", "random", "--local"]]
)
def test_a_command_that_needs_more_says_which_extra(blocked, arguments):
    done = rlsvc(blocked, *arguments)
    assert done.returncode == 2, done.stderr
    assert "rlsvc[" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_session_at_a_robot_that_sends_its_episodes_needs_no_ray():
    done = python(
        "import sys\nsys.modules['ray'] = None\n"
        "import rlsvc.collect, rlsvc.collect_send, rlsvc.data.pack_episode, rlsvc.client, rlsvc.robots.lerobot"
    )
    assert done.returncode == 0, done.stderr
