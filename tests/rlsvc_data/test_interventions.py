"""What people did in rollouts is drawn with the demonstrations (arXiv:2410.21845)."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from chunks import SCHEMA, episode, make_chunk

from rlsvc.core.contract import Feature
from rlsvc.data.interventions import PeoplesView
from rlsvc.data.replay import Replay
from rlsvc.data.sequence import mix
from rlsvc.spec.replay import ReplaySpec

WITH_PEOPLE = {**SCHEMA, "intervention": Feature((), "bool")}


def filled(placement: str, intervened: set[int] | None) -> Replay:
    """Two episodes of four steps, states 100 .. 103 and 200 .. 203; a person acted at the given ones."""
    chunk = make_chunk(0, {0: [*episode(1, 4), *episode(2, 4, terminated=True)]})
    if intervened is not None:
        marks = np.isin(chunk.columns["observation.state"][:, 0], list(intervened))
        chunk = dataclasses.replace(chunk, columns={**chunk.columns, "intervention": marks})
    schema = SCHEMA if intervened is None else WITH_PEOPLE
    replay = Replay(ReplaySpec(capacity=50, placement=placement), schema, (0,))
    replay.add(chunk)
    return replay


def demonstrations(placement: str) -> Replay:
    replay = Replay(ReplaySpec(capacity=50, placement=placement), SCHEMA, (0,))
    replay.add(make_chunk(0, {0: episode(5, 6)}))
    return replay


def sample(view, seed: int, rows: int, length: int = 1) -> dict:
    """On the device as updates do it, in one compiled program."""
    key = jax.random.key(seed)
    if view.on_host:
        return view.sample(key, rows, length)
    return jax.tree.map(np.asarray, jax.jit(lambda v, k: v.sample(k, rows, length))(view, key))


def states(batch: dict) -> np.ndarray:
    return np.asarray(batch["observation"]["observation.state"])[..., 0, 0]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_every_demonstrated_and_every_intervened_transition_is_drawn_equally_often(placement):
    # 104 and 204 would be final observations, which begin no transition, whoever acted.
    view = PeoplesView(demonstrations(placement).view(), filled(placement, {101, 102, 203, 104}).view())
    assert int(view.num_transitions) == 6 + 3
    drawn = Counter(states(sample(view, 0, 9000)).tolist())
    assert set(drawn) == {500, 501, 502, 503, 504, 505, 101, 102, 203}
    np.testing.assert_allclose([n / 9000 for n in drawn.values()], 1 / 9, atol=0.02)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_row_has_action_reward_and_end_of_the_buffer_that_it_is_from(placement):
    view = PeoplesView(demonstrations(placement).view(), filled(placement, {203}).view())
    batch = sample(view, 1, 400, 2)
    state = states(batch)
    np.testing.assert_array_equal(batch["action"][..., 0, 0], state + 0.25)
    np.testing.assert_array_equal(batch["reward"][..., 0], state + 0.5)
    np.testing.assert_array_equal(batch["terminated"][..., 0], state == 203)
    np.testing.assert_array_equal(batch["mask"][..., 1], ~np.isin(state, [203, 505]))
    np.testing.assert_array_equal(batch["index"] < 0, state == 203)
    np.testing.assert_array_equal(batch["weight"], 1.0)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_without_interventions_it_is_the_demonstrations_alone(placement):
    view = PeoplesView(demonstrations(placement).view(), filled(placement, set()).view())
    assert set(states(sample(view, 2, 500)).tolist()) == {500, 501, 502, 503, 504, 505}


@pytest.mark.parametrize("placement", ["host", "device"])
def test_half_of_a_batch_is_of_people_and_interventions_stay_in_the_replay_too(placement):
    rollouts = filled(placement, {102}).view()
    both = mix(
        {"replay": rollouts, "demonstrations": PeoplesView(demonstrations(placement).view(), rollouts)},
        {"replay": 0.5, "demonstrations": 0.5},
    )
    batch = sample(both, 3, 2000)
    state, buffer = states(batch), np.asarray(batch["buffer"])
    assert (buffer == 0).sum() == (buffer == 1).sum() == 1000
    assert set(state[buffer == 0].tolist()) == {100, 101, 102, 103, 200, 201, 202, 203}
    assert set(state[buffer == 1].tolist()) == {500, 501, 502, 503, 504, 505, 102}


def test_several_batches_are_drawn_at_once_on_the_host():
    view = PeoplesView(demonstrations("host").view(), filled("host", {102}).view())
    batches = view.sample_many(jax.random.key(4), 3, 100, 2)
    assert batches["action"].shape == (3, 100, 2, 1)
    np.testing.assert_array_equal(batches["action"][..., 0, 0], states(batches) + 0.25)
    assert 102 in states(batches)
