"""Follows docs/adding-an-algorithm.md: its blocks go into a copy of the package, which then trains with its command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-an-algorithm.md"
BLOCK = re.compile(r"^```(\w+)\n(?:# (file|table): (\S+)\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)
# The page's run in small: a few seconds.
TINY = [
    "algo.batch_size=16", "policy.encoder_dim=16", "policy.hidden_dim=16", "policy.latent_dim=16",
    "phases.0.duration_steps=100", "phases.1.duration_steps=200", "log_interval=100", "checkpoint.interval=200",
    "evaluation.interval=null", "evaluation.episodes=1", "evaluation.parallel=1", "evaluation.videos=false",
    "tracking.trackers=[]",
]  # fmt: skip


def put_into_table(file: Path, text: str) -> None:
    """The imports of a block go to the others, its other lines to the end of ALGORITHMS."""
    imports = "".join(line for line in text.splitlines(keepends=True) if line.startswith("from "))
    entry = text.replace(imports, "").strip("\n")
    first = "from rlsvc.spec.rllib import"
    before = file.read_text()
    assert before.count(first) == 1
    assert before.rstrip().endswith("}")
    file.write_text(before.replace(first, imports + first).rstrip().removesuffix("}") + entry + "\n}\n")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """A folder with the package as the page leaves it, the files that it touched, and the words of its command."""
    folder = tmp_path_factory.mktemp("followed")
    shutil.copytree(ROOT / "rlsvc", folder / "rlsvc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    touched, commands = [], []
    for language, kind, path, text in BLOCK.findall(PAGE.read_text()):
        if kind == "file":
            assert not (folder / path).exists()
            (folder / path).write_text(text)
        elif kind == "table":
            put_into_table(folder / path, text)
        elif language == "bash":
            commands += [shlex.split(line) for line in text.splitlines()]
        touched += [path] if path else []
    (command,) = commands
    return folder, touched, command


def test_the_page_touches_algorithm_specification_experiment_and_table_alone(followed):
    _, touched, command = followed
    name = command[2].removeprefix("experiment=")
    assert sorted(touched) == [
        f"rlsvc/algos/{name}.py",
        f"rlsvc/configs/experiment/{name}.yaml",
        "rlsvc/spec/algorithms.py",
        f"rlsvc/spec/{name}.py",
    ]


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_what_the_page_writes_passes_the_project_s_own_checks(followed, words):
    folder, touched, _ = followed
    python = [path for path in touched if path.endswith(".py")]
    ruff = [sys.executable, "-m", "ruff", *words, *python]
    done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_algorithm_of_the_page_trains_to_a_bundle(followed, tmp_path):
    folder, _, (program, *words) = followed
    assert program == "rlsvc"
    words = [*words, *TINY, f"root={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "-c", "from rlsvc.cli import main; main()", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(folder), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    made = tmp_path / "rlsvc" / "reward_weighted"
    bundle = json.loads((made / "bundles" / "300" / "bundle.json").read_text())
    assert bundle["policy"]["name"] == "tdmpc2"
    assert bundle["run"]["updates"] == 50
    logged = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    worth = [metrics["train/sequences"] for metrics in logged if "train/sequences" in metrics]
    assert worth
    assert all(1 <= value <= 16 for value in worth)
    assert "reward_weighted" in (made / "spec.yaml").read_text()
