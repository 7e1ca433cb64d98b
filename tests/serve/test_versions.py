"""Versions of a served policy: taken, drained, rolled back; canaries and shadows. Without Ray and without sockets."""

import asyncio
import time

import numpy as np
import pytest
from serving_fakes import SMALL_CONTRACT, FakeRunner, service_of

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, NotFoundError
from rlsvc.core.types import ActionChunk
from rlsvc.serve.codec import ActRequest, RequestError
from rlsvc.serve.version import CANARY, CURRENT, DRAINING, SHADOW
from rlsvc.serve.watch import TRIES, Watcher

STATE = {"observation.state": np.ones(3, np.float32)}


def runner(version: str) -> FakeRunner:
    return FakeRunner(SMALL_CONTRACT, version=version)


def roles(service) -> list[tuple[str, str]]:
    return [(role, version.id) for role, version in service.versions()]


async def ask(service, connection=None, **request) -> str:
    """The version that answers."""
    return (await service.act(ActRequest(STATE, **request), read=time.perf_counter(), session=connection)).version


def test_a_new_version_takes_new_sessions_and_the_old_one_ends_with_its_last():
    async def run():
        with service_of(runner("v1")) as service:
            old = service.open()
            service.assign(CURRENT, runner("v2"))
            new = service.open()
            assert [await ask(service, old, step=7), await ask(service, new, step=7)] == ["v1", "v2"]
            assert await ask(service) == "v2"  # over HTTP each request is a session
            assert roles(service) == [(CURRENT, "v2"), (DRAINING, "v1")]
            ended = service.versions()[1][1]
            service.close_session(old)
            assert roles(service) == [(CURRENT, "v2")]
            ended._batcher._thread.join(5)
            assert not ended._batcher.alive

    asyncio.run(run())


def test_a_request_under_way_is_answered_by_the_version_that_has_it():
    async def run():
        slow = runner("v1")
        with service_of(slow) as service:
            slow.open.clear()
            asked = asyncio.create_task(ask(service))
            await asyncio.sleep(0.05)
            service.assign(CURRENT, runner("v2"))
            assert roles(service) == [(CURRENT, "v2"), (DRAINING, "v1")]
            slow.open.set()
            assert await asked == "v1"
            assert roles(service) == [(CURRENT, "v2")]

    asyncio.run(run())


def test_a_session_takes_the_new_version_where_an_episode_begins():
    async def run():
        with service_of(runner("v1")) as service:
            session = service.open()
            service.assign(CURRENT, runner("v2"))
            assert [await ask(service, session, step=step) for step in (8, 0, 8)] == ["v1", "v2", "v2"]
            assert roles(service) == [(CURRENT, "v2")]

    asyncio.run(run())


def test_a_session_leaves_a_replaced_version_after_drain_s_even_where_it_asks_nothing():
    async def run():
        with service_of(runner("v1"), drain_s=0.05) as service:
            session, silent = service.open(), service.open()
            service.assign(CURRENT, runner("v2"))
            assert await ask(service, session, step=3) == "v1"
            await asyncio.sleep(0.06)
            assert await ask(service, session, step=4) == "v2"
            assert roles(service)[1:] == [(DRAINING, "v1")]
            service.tidy()
            assert (silent.version.id, roles(service)) == ("v2", [(CURRENT, "v2")])

    asyncio.run(run())


def test_rolling_back_takes_a_draining_version_again_without_loading_it():
    async def run():
        with service_of(runner("v1")) as service:
            session = service.open()
            first = service.current
            service.assign(CURRENT, runner("v2"))
            service.assign(CURRENT, service.loaded("v1"))
            assert service.current is first
            assert first.retired is None
            assert roles(service) == [(CURRENT, "v1")]
            assert await ask(service, session, step=5) == "v1"

    asyncio.run(run())


def test_a_canary_takes_its_share_of_sessions_and_the_same_key_gets_the_same_version():
    async def run():
        with service_of(runner("v1"), canary_share=0.2) as service:
            service.assign(CANARY, runner("v2"))
            keys = [f"robot-{i}" for i in range(1000)]
            sessions = [service.open(key) for key in keys]
            taken = [session.version.id for session in sessions]
            assert 160 < taken.count("v2") < 240
            assert [service.open(key).version.id for key in keys] == taken
            assert {await ask(service, seed=seed) for seed in range(50)} == {"v1", "v2"}

    asyncio.run(run())


def test_a_canary_that_becomes_the_current_version_is_not_loaded_again_and_its_sessions_stay():
    async def run():
        with service_of(runner("v1"), canary_share=1.0) as service:
            service.assign(CANARY, runner("v2"))
            canary, session = service.canary, service.open()
            service.assign(CURRENT, service.loaded("v2"))
            assert (service.current, service.canary, session.version) == (canary, None, canary)
            assert roles(service) == [(CURRENT, "v2")]

    asyncio.run(run())


def test_a_canary_that_is_taken_back_drains():
    async def run():
        with service_of(runner("v1"), canary_share=1.0) as service:
            service.assign(CANARY, runner("v2"))
            session = service.open()
            service.assign(CANARY, None)
            assert roles(service) == [(CURRENT, "v1"), (DRAINING, "v2")]
            assert [await ask(service, session, step=step) for step in (4, 0)] == ["v2", "v1"]
            assert roles(service) == [(CURRENT, "v1")]

    asyncio.run(run())


@pytest.mark.parametrize("role", [CURRENT, CANARY, SHADOW])
def test_a_version_of_another_contract_is_refused_and_the_one_before_goes_on(role):
    wide = Contract(SMALL_CONTRACT.observation, Feature((5,), "float32"), 10.0, 1, 4)
    with service_of(runner("v1")) as service:
        with pytest.raises(ContractError, match="version v2 has another contract: its action is"):
            service.assign(role, FakeRunner(wide, version="v2"))
        assert roles(service) == [(CURRENT, "v1")]


class Offset(FakeRunner):
    """Acts like a FakeRunner, with 0.5 more in the first dimension."""

    def act(self, observation, seeds, steps, carry=None):
        chunk = super().act(observation, seeds, steps, carry)
        return ActionChunk(chunk.action + np.array([0.5, 0.0], np.float32), self.version)


def test_a_shadow_is_asked_the_same_and_told_apart_and_its_actions_are_given_to_nobody():
    async def run():
        with service_of(runner("v1")) as service:
            service.assign(SHADOW, Offset(SMALL_CONTRACT, version="v2"))
            answers = [await service.act(ActRequest(STATE, seed=s), read=time.perf_counter()) for s in range(6)]
            await service.shadow.finish()
            assert {answer.version for answer in answers} == {"v1"}
            told = service.status()["shadow"]
            assert (told["version"], told["compared"], told["skipped"], told["failed"]) == ("v2", 6, 0, 0)
            assert told["action"]["0"] == pytest.approx({"rms_difference": 0.5, "std": np.std(np.arange(4))})
            assert told["action"]["1"] == pytest.approx({"rms_difference": 0.0, "std": np.std(np.arange(6))})
            text = service.metrics.render().decode()
            assert (
                'rlsvc_shadow_requests_total{outcome="compared",policy="fake",replica="local",version="v2"} 6.0' in text
            )

    asyncio.run(run())


def test_a_shadow_that_fails_or_is_behind_is_counted_and_nobody_waits_for_it():
    async def run():
        with service_of(runner("v1")) as service:
            slow = runner("v2")
            service.assign(SHADOW, slow)
            slow.open.clear()
            for _ in range(20):
                assert await ask(service) == "v1"
            slow.act = None  # from now on it raises
            slow.open.set()
            await service.shadow.finish()
            told = service.shadow.to_json()
            assert (told["compared"] + told["failed"], told["skipped"]) == (8, 12)
            assert told["failed"] >= 7  # the first may have been under way

    asyncio.run(run())


class Alias:
    """A source that means what it is told, or raises it."""

    def __init__(self, meant):
        self.meant, self.loads, self.fails = meant, 0, None

    def find(self):
        if isinstance(self.meant, Exception):
            raise self.meant
        return self.meant

    def load(self, like=None):
        self.loads += 1
        if self.fails is not None:
            raise self.fails
        return runner(self.meant)


def watched(service, **sources) -> Watcher:
    return Watcher(service, sources, 0.01)


def test_the_watch_takes_what_the_alias_means_and_what_it_means_again():
    async def run():
        with service_of(runner("v1")) as service:
            alias = Alias("v1")
            watcher = watched(service, current=alias)
            await watcher.look()
            assert (alias.loads, roles(service)) == (0, [(CURRENT, "v1")])
            task = asyncio.create_task(watcher.run())
            alias.meant = "v2"
            async with asyncio.timeout(5):
                while service.version != "v2":
                    await asyncio.sleep(0.01)
            alias.meant = "v1"  # rolled back
            async with asyncio.timeout(5):
                while service.version != "v1":
                    await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(run())


def test_a_version_that_does_not_fit_is_refused_once_logged_and_counted(lines):
    async def run():
        with service_of(runner("v1")) as service:
            alias = Alias("v2")
            alias.fails = ContractError("its action is wider")
            watcher = watched(service, current=alias)
            for _ in range(3):
                await watcher.look()
            assert (alias.loads, service.version) == (1, "v1")
            (line,) = [line for line in lines() if line["event"] == "version_refused"]
            assert (line["refused"], line["because"], line["role"]) == ("v2", "its action is wider", CURRENT)
            assert 'rlsvc_refused_versions_total{policy="fake",replica="local",role="current"} 1.0' in (
                service.metrics.render().decode()
            )
            alias.meant, alias.fails = "v3", None
            await watcher.look()
            assert service.version == "v3"

    asyncio.run(run())


def test_a_version_that_fails_for_no_fault_of_its_own_is_tried_again_a_few_times(lines):
    async def run():
        with service_of(runner("v1")) as service:
            alias = Alias("v2")
            alias.fails = MemoryError("no room")
            watcher = watched(service, current=alias)
            for _ in range(TRIES + 3):
                await watcher.look()
            assert (alias.loads, service.version) == (TRIES, "v1")
            assert [line["tries_left"] for line in lines() if line["event"] == "version_refused"] == [2, 1, 0]

    asyncio.run(run())


def test_a_registry_that_is_away_is_told_once_and_the_versions_stay(lines):
    async def run():
        with service_of(runner("v1"), canary_share=1.0) as service:
            current, canary = Alias("v1"), Alias("v2")
            watcher = watched(service, current=current, canary=canary)
            await watcher.look()
            current.meant = canary.meant = ConnectionError("refused")
            for _ in range(3):
                await watcher.look()
            assert roles(service) == [(CURRENT, "v1"), (CANARY, "v2")]
            assert len([line for line in lines() if line["event"] == "registry_away"]) == 2

    asyncio.run(run())


def test_a_canary_ends_where_its_alias_is_deleted_or_means_the_current_version():
    async def run():
        with service_of(runner("v1"), canary_share=1.0) as service:
            alias = Alias("v2")
            watcher = watched(service, canary=alias)
            for meant in (NotFoundError("no such alias"), "v1"):
                alias.meant = "v2"
                await watcher.look()
                assert roles(service) == [(CURRENT, "v1"), (CANARY, "v2")]
                alias.meant = meant
                await watcher.look()
                assert roles(service) == [(CURRENT, "v1")]

    asyncio.run(run())


def test_an_episode_that_was_moved_to_another_version_is_not_gone_on_with():
    async def run():
        with service_of(runner("v1"), drain_s=0.0) as service:
            session = service.open()
            assert [await ask(service, session, step=step, session=True) for step in (0, 1)] == ["v1", "v1"]
            service.assign(CURRENT, runner("v2"))
            with pytest.raises(RequestError, match="step 2 of an episode that is not kept here") as refused:
                await ask(service, session, step=2, session=True)
            assert (refused.value.status, refused.value.reason) == (409, "session")
            assert await ask(service, session, step=0, session=True) == "v2"

    asyncio.run(run())
