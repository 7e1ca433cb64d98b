"""Robots as data: those that ship, and what a specification refuses."""

import pytest
import yaml
from pydantic import ValidationError

from rlsvc.core.errors import NotFoundError, SpecError
from rlsvc.spec.compose import compose, robots, to_yaml
from rlsvc.spec.robot import RobotSpec

TURN = [{"name": "affine", "scale": -1}]
CHUNKS = ["policy.horizon=50", "policy.n_action_steps=50"]


def composed(*words):
    return compose(["experiment=pi05_debug", *CHUNKS, *words])


def spec(**fields):
    return RobotSpec.model_validate({"name": "arm", **fields})


# Rate and steps between queries of openpi's examples/{aloha_real,aloha_sim,droid,libero}/main.py.
@pytest.mark.parametrize(
    ("name", "rate_hz", "execute", "episode_steps"),
    [("aloha", 50, 25, 1000), ("aloha_sim", 50, 10, None), ("droid", 15, 8, 600), ("libero", None, 5, None)],
)
def test_a_shipped_robot_has_the_control_loop_of_its_published_runtime(name, rate_hz, execute, episode_steps):
    robot = composed(f"robot={name}").robot
    assert robot is not None
    assert (robot.name, robot.rate_hz, robot.execute, robot.episode_steps) == (name, rate_hz, execute, episode_steps)


def test_every_shipped_robot_is_listed_and_a_misspelt_one_is_named_with_the_nearest():
    assert robots() == ["aloha", "aloha_sim", "droid", "libero"]
    with pytest.raises(NotFoundError, match=r"unknown robot 'drod'. Did you mean 'droid'\?"):
        composed("robot=drod")


def test_the_grippers_of_aloha_stay_absolute():
    robot = composed("robot=aloha").robot
    assert robot is not None
    assert robot.delta is not None
    assert set(range(14)) - set(robot.delta.dims) == {6, 13}
    sim = composed("robot=aloha_sim").robot
    assert sim is not None
    assert sim.delta is None
    assert sim.maps == robot.maps


def test_a_run_stores_its_robot_and_is_composed_from_that_again(tmp_path):
    run = composed("robot=aloha", "robot.execute=12", "policy.horizon=${robot.horizon}")
    file = tmp_path / "spec.yaml"
    file.write_text(to_yaml(run))
    assert compose([str(file)]) == run
    without = composed()
    file.write_text(to_yaml(without))
    assert compose([str(file)]).robot is without.robot is None


def test_a_file_chooses_a_robot_and_changes_it(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "defaults": [{"/experiment": "pi05_debug"}, {"override /robot": "droid"}, "_self_"],
                "robot": {"execute": 2, "delta": {"dims": [0, 1]}},
            }
        )
    )
    robot = compose([str(file)]).robot
    assert robot is not None
    assert (robot.name, robot.execute) == ("droid", 2)
    assert robot.delta is not None
    assert robot.delta.dims == (0, 1)


def test_a_policy_that_returns_fewer_actions_than_the_runtime_executes_is_refused():
    with pytest.raises(SpecError, match=r"policy\.n_action_steps: got 7, robot 'droid' executes 8 actions"):
        composed("robot=droid", "policy.n_action_steps=7")


def test_a_robot_goes_with_imitation_alone():
    with pytest.raises(SpecError, match="robot: tdmpc2 takes the numbers as they are"):
        compose(["experiment=tdmpc2_pendulum", "robot=droid"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"execute": 5, "horizon": 4}, "execute: got 5, at most horizon = 4"),
        ({"keys": {"a": "x", "b": ["y", "x"]}}, "'x' stands there twice"),
        ({"keys": {"a": "x"}, "unused": ["x"]}, "'x' stands there twice"),
        (
            {"maps": {"action": [{"dims": [1, 2], "by": TURN}, {"dims": [2], "by": TURN}]}},
            "maps.action: dimension 2 stands there twice",
        ),
        ({"maps": {"action": [{"dims": [0], "by": [{"name": "affine", "scale": 0}]}]}}, "scale: 0 cannot be undone"),
        (
            {"maps": {"action": [{"dims": [0], "by": [{"name": "range", "of": [1, 1], "to": [0, 1]}]}]}},
            r"range: \[1.0, 1.0\] to \[0.0, 1.0\] cannot be undone",
        ),
        (
            {"maps": {"action": [{"dims": [0], "by": [{"name": "slider_crank", "crank": 0.03, "rod": 0.02}]}]}},
            "rod: got 0.02, expected more than crank = 0.03",
        ),
        ({"maps": {"action": [{"dims": [-1], "by": [{"name": "affine"}]}]}}, "greater than or equal to 0"),
        ({"prompt": ""}, "at least 1 character"),
    ],
)  # fmt: skip
def test_a_robot_that_makes_no_sense_is_refused(fields, text):
    with pytest.raises(ValidationError, match=text):
        spec(**fields)
