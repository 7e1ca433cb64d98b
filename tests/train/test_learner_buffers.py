"""What updates draw from when people intervened in rollouts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.types import Chunk
from rlsvc.data.interventions import PeoplesView
from rlsvc.data.replay import Replay
from rlsvc.data.sequence import ReplayView
from rlsvc.spec.replay import ReplaySpec
from rlsvc.spec.run import RunSpec
from rlsvc.train.learner_data import SequenceData
from rlsvc.train.rollout_worker import chunk_schema

CONTRACT = Contract({"observation.state": Feature((1,), "float32")}, Feature((1,), "float32"), 10.0)


def replay(marked: bool) -> Replay:
    schema = {**CONTRACT.observation, "action": CONTRACT.action}
    columns = {name: np.zeros((3, *feature.shape), feature.dtype) for name, feature in chunk_schema(CONTRACT).items()}
    columns["step"][:], columns["is_first"][0], columns["is_last"][2] = np.arange(3), True, True
    columns["observation.state"][:, 0] = np.arange(3) + (10 if marked else 0)
    if marked:
        schema["intervention"] = Feature((), "bool")
        columns["intervention"] = np.array([False, True, False])
    made = Replay(ReplaySpec(capacity=10, placement="host"), schema, (0,))
    made.add(Chunk(0, 0, 0, np.array([0], np.int32), np.array([0, 3], np.int64), columns))
    return made


def data(**replays: Replay) -> SequenceData:
    made = SequenceData.__new__(SequenceData)
    made._replays = replays
    return made


@pytest.mark.parametrize("stand_in", [None, {}])
def test_a_run_in_which_people_intervene_keeps_who_acted_in_its_replay(stand_in, tmp_path):
    spec = RunSpec.model_validate(
        {
            "policy": {"name": "gaussian"}, "algo": {"name": "sac", "batch_size": 16}, "evaluation": {"interval": None},
            "env": {"name": "gymnasium", "id": "Pendulum-v1"}, "rollout": {"stand_in": stand_in},
            "replay": {"capacity": 100, "placement": "host"},
            "phases": [{"name": "all", "type": "online", "hooks": {"collect": 1}, "duration_steps": 10}],
        }
    )  # fmt: skip
    made = SequenceData(spec, CONTRACT, lambda x: x, tmp_path, 1)
    assert ("intervention" in made._replays["replay"].schema) == (stand_in is not None)


@pytest.mark.parametrize("buffer", [{"demonstrations": 1.0}, {"replay": 0.5, "demonstrations": 0.5}])
def test_interventions_are_drawn_with_the_demonstrations(buffer):

    source = data(replay=replay(marked=True), demonstrations=replay(marked=False)).source(buffer)
    batch = source.sample(jax.random.key(0), 200, 1)
    state = batch["observation"]["observation.state"][:, 0, 0]
    of_people = state[batch["buffer"] == 1] if "buffer" in batch else state
    assert set(of_people.tolist()) == {0, 1, 11}  # two demonstrated steps, and the one that a person took in a rollout
    if "buffer" in batch:
        assert set(state[batch["buffer"] == 0].tolist()) == {10, 11}


def test_rollouts_that_nobody_could_intervene_in_leave_the_demonstrations_as_they_are():
    plain = data(replay=replay(marked=False), demonstrations=replay(marked=False))
    assert isinstance(plain.source({"demonstrations": 1.0}), ReplayView)
    alone = data(demonstrations=replay(marked=False))
    assert isinstance(alone.source({"demonstrations": 1.0}), ReplayView)
    both = data(replay=replay(marked=True), demonstrations=replay(marked=False))
    assert isinstance(both.source({"demonstrations": 1.0}), PeoplesView)
    assert isinstance(both.source({"replay": 1.0}), ReplayView)
