"""Environments that other packages bring: by a module that registers them, and by the entry point `rlsvc.envs`."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.envs.make import make_env
from rlsvc.spec.base import Spec
from rlsvc.spec.env import EnvBase, EnvSpec, GymnasiumSpec, PushTSpec

PACKAGE = '''
from typing import Literal
import toy_envs
from rlsvc.spec.env import EnvBase

class LabSpec(EnvBase):
    """A laboratory's own simulator."""
    name: Literal["lab"] = "lab"
    steps: int = 3

class Lab:
    spec = LabSpec

    @staticmethod
    def make(spec):
        return toy_envs.Walk(length=spec.steps)

class Broken:
    spec = dict
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package `lab_envs` with entry points, as pip leaves it."""
    (tmp_path / "lab_envs.py").write_text(PACKAGE)
    info = tmp_path / "lab_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-envs\nVersion: 1.0\n")
    points = ["lab = lab_envs:Lab", "broken = lab_envs:Broken", "absent = no_such_module:Env"]
    (info / "entry_points.txt").write_text("[rlsvc.envs]\n" + "\n".join(points) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))


class Run(Spec):
    env: EnvSpec | None = None


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_an_entry_points_environment_is_specified_made_and_stepped_like_a_built_in_one(opened, installed, isolation):
    run = Run.model_validate({"env": {"name": "lab", "steps": 2, "frame_stack": 2, "isolation": isolation}})
    assert isinstance(run.env, EnvBase)
    assert Run.model_validate(run.model_dump(mode="json")) == run
    assert run.replace(env=run.env.replace(steps=4)).env.steps == 4
    env = opened(run.env, 1)
    np.testing.assert_array_equal(env.reset([5])["observation.state"], [[5, 0, 5, 0]])
    ends = [bool(env.step(np.ones((1, 1), np.float32)).terminated[0]) for _ in range(2)]
    assert ends == [False, True]


def test_an_unknown_key_of_a_third_party_environment_is_refused(installed):
    with pytest.raises(ValidationError, match="stepz"):
        Run.model_validate({"env": {"name": "lab", "stepz": 2}})


def test_an_unknown_name_is_refused_with_those_of_installed_packages_too(installed):
    with pytest.raises(ValidationError, match=r"unknown environment 'labb'\. Did you mean 'lab'\?.*lab, libero"):
        Run.model_validate({"env": {"name": "labb"}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "needs `spec`, a subclass of rlsvc.spec.env.EnvBase"),
        ("absent", "its entry point no_such_module:Env"),
    ],
)
def test_an_entry_point_that_does_not_keep_to_the_form_is_refused_with_the_reason(installed, name, words):
    with pytest.raises(ValidationError, match=words):
        Run.model_validate({"env": {"name": name}})


def test_a_name_that_no_package_brings_is_refused_when_it_is_made():
    with pytest.raises(NotFoundError, match="unknown environment 'lab'"):
        make_env(PushTSpec.model_construct(name="lab"))


def test_a_module_is_imported_before_its_environment_is_looked_up(opened):
    with pytest.raises(UserError, match="unknown gymnasium environment 'nowhere/Walk-v0'"):
        opened(GymnasiumSpec(id="nowhere/Walk-v0"))
    spec = TypeAdapter(EnvSpec).validate_python({"name": "gymnasium", "id": "toy/Walk-v0", "import_module": "toy_envs"})
    assert opened(spec).reset(seed=2)[0]["observation.state"].tolist() == [2, 0]


def test_every_built_in_environment_is_chosen_by_its_name_and_memory_limits_need_a_process():
    adapter = TypeAdapter(EnvSpec)
    assert adapter.validate_python({"name": "dm_control", "task": "walker-walk"}).task == "walker-walk"
    assert adapter.validate_python({"name": "pusht"}) == PushTSpec()
    assert adapter.validate_python({"name": "libero"}).own_process
    with pytest.raises(ValidationError, match="max_memory_mb needs isolation: process"):
        adapter.validate_python({"name": "pusht", "max_memory_mb": 500})
    with pytest.raises(ValidationError, match="backend: gpu steps all environments at once"):
        adapter.validate_python({"name": "maniskill", "id": "PickCube-v1", "backend": "gpu", "frame_stack": 2})
