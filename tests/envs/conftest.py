from pathlib import Path

import pytest

from rlsvc.envs.make import make_env
from rlsvc.envs.vector import VectorEnv
from rlsvc.spec.env import GymnasiumSpec


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    """Lets `import_module: toy_envs` find the simulators of these tests, in child processes too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def toy():
    """The specification of a toy: `toy("Walk", length=4, options=dict(frame_stack=2))`."""

    def spec(name="Walk", options=None, **kwargs):
        return GymnasiumSpec(id=f"toy/{name}-v0", import_module="toy_envs", kwargs=kwargs, **(options or {}))

    return spec


@pytest.fixture
def opened():
    """Makes an environment, or a vector when given a number, and closes it at the end."""
    made = []

    def open_(spec, num_envs=None):
        made.append(make_env(spec) if num_envs is None else VectorEnv(spec, num_envs))
        return made[-1]

    yield open_
    for one in made:
        one.close()
