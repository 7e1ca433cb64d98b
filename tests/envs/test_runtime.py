"""Simulators whose packages are of their own."""

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.errors import UserError
from rlsvc.envs.runtime import MARK, ensure_runtime, runtime_environment
from rlsvc.envs.vector import VectorEnv
from rlsvc.spec.env import GymnasiumSpec, LiberoSpec, RuntimeSpec

MODULE = """
import importlib.util, os, sys
import gymnasium
import numpy as np
from gymnasium import spaces

class Elsewhere(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(seed), {}

    def seen(self, x):
        has = [importlib.util.find_spec(name) is not None for name in ("jax", "rlsvc")]
        return np.array([x, *has, float(os.environ["GRAVITY"])], np.float32)

    def step(self, action):
        return self.seen(0), 1.0, False, False, {}

gymnasium.register("Elsewhere-v0", Elsewhere)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path):
    """A package that is installed nowhere but in a runtime."""
    path = tmp_path / "elsewhere-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("elsewhere.py", MODULE)
        file.writestr("elsewhere-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr("elsewhere-1.0.dist-info/WHEEL", tag)
        file.writestr("elsewhere-1.0.dist-info/RECORD", "")
    return str(path)


def test_what_a_simulators_process_imports_is_in_every_runtime():
    heavy = ["jax", "torch", "hydra", "omegaconf", "rich", "typer", "httpx", "websockets", "cv2", "mujoco", "yaml"]
    program = f"import sys, rlsvc.envs.child, rlsvc.envs.options\nprint(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_runtimes_process_sees_rlsvc_alone_and_its_variables(cache, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    seen = runtime_environment(RuntimeSpec(packages=("x",), variables={"MUJOCO_GL": "egl"}))
    assert (seen["MUJOCO_GL"], seen["PYTHONNOUSERSITE"], "VIRTUAL_ENV" in seen) == ("egl", "1", False)
    assert [entry.name for entry in Path(seen["PYTHONPATH"]).iterdir()] == ["rlsvc"]


@pytest.mark.slow
def test_packages_that_cannot_be_installed_are_one_clear_error_and_leave_nothing(cache, tmp_path):
    spec = RuntimeSpec(packages=(str(tmp_path / "no-such-1.0-py3-none-any.whl"),))
    with pytest.raises(UserError, match=r"env.runtime: cannot install .*no-such.* for Python 3.12: ") as caught:
        ensure_runtime(spec)
    assert "\n" not in str(caught.value)
    assert [p.name for p in (cache / "runtimes").iterdir() if p.is_dir()] == []


@pytest.mark.slow
def test_a_runtime_is_built_once_by_one_builder_and_a_half_built_one_is_never_used(cache, wheel):
    spec = RuntimeSpec(packages=(wheel,))
    with ThreadPoolExecutor(3) as pool:
        pythons = set(pool.map(lambda _: ensure_runtime(spec), range(3)))
    assert len(pythons) == 1
    folder = next(p for p in (cache / "runtimes").iterdir() if p.is_dir())
    assert json.loads((folder / MARK).read_text())["packages"] == [wheel]
    built = (folder / MARK).stat().st_mtime_ns
    ensure_runtime(spec)
    assert (folder / MARK).stat().st_mtime_ns == built
    (folder / MARK).unlink()
    (folder / "bin" / "python").unlink()
    ensure_runtime(spec)
    assert (folder / "bin" / "python").exists()


@pytest.mark.slow
def test_a_simulator_runs_where_its_packages_are_and_the_worker_stays_where_its_own_are(cache, wheel):
    runtime = RuntimeSpec(packages=(wheel,), variables={"GRAVITY": "9.5"})
    spec = GymnasiumSpec(id="Elsewhere-v0", import_module="elsewhere", runtime=runtime, max_steps=2)
    with pytest.raises(ModuleNotFoundError):
        __import__("elsewhere")
    env = VectorEnv(spec, 2)
    try:
        first = env.reset([3, 4])
        np.testing.assert_array_equal(first["observation.state"], [[3, 0, 1, 9.5], [4, 0, 1, 9.5]])
        steps = [env.step(np.zeros((2, 1), np.float32)) for _ in range(2)]
        assert [s.truncated.tolist() for s in steps] == [[False] * 2, [True] * 2]
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.render
@pytest.mark.timeout(1800)
def test_libero_steps_in_its_own_environment():
    """Its packages (2 GB) need another mujoco than this environment has; they are kept in the cache."""
    spec = LiberoSpec(settle_steps=1, image_size=64, max_steps=3)
    env = VectorEnv(spec, 1)
    moves = [np.array([[0.5, -0.5, -1, 0, 0, 0.5, 1]], np.float32)] * 3
    try:
        # Of ten tasks: number 0, from its initial states 1, 0 and 1.
        first = env.reset([10])
        steps = [env.step(move) for move in moves]
        other = env.reset([0])
        again = env.reset([10])
    finally:
        env.close()
    assert (env.restarts, env.contract.rate_hz, env.contract.action.shape) == (0, 20.0, (7,))
    assert first["task"][0].startswith("pick up the black bowl between the plate and the ramekin")
    assert first["observation.images.image"].shape == first["observation.images.image2"].shape == (1, 64, 64, 3)
    assert first["observation.images.image"].std() > 10
    assert [(bool(s.terminated[0]), bool(s.truncated[0])) for s in steps] == [(False, False)] * 2 + [(False, True)]
    moved = steps[1].observation["observation.state"] - first["observation.state"]
    assert moved[0, 2] < -0.005, "the arm goes down"
    for key in ("observation.state", "observation.images.image", "observation.images.image2"):
        np.testing.assert_array_equal(again[key], first[key])
    assert (other["observation.images.image"] != first["observation.images.image"]).any()
