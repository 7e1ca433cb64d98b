"""Rollouts from robots' computers that are no part of the cluster: they ask a served learner, and send episodes.

Such a computer runs `rlsvc collect` with `policy.send_episodes`. It needs no Ray, and records on its own disk whatever
happens to the network; what the learner lacks is sent once there is one again.

Letters: n steps of an episode.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import DatasetError
from rlsvc.core.http_server import ThreadServer
from rlsvc.core.types import CLASSIFIER, COMMANDED, INTERVENTION, REWARD_SOURCE, REWARD_SOURCES, ActionChunk, Chunk
from rlsvc.data.journal import Journal
from rlsvc.data.load import open_source, select_episodes
from rlsvc.data.mixture import table_contract
from rlsvc.data.repack import load_features
from rlsvc.data.replay_table import rows_of_episode
from rlsvc.data.texts import encode_texts
from rlsvc.runner import PolicyRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.episodes import EpisodeInbox, Received, add_episode_routes
from rlsvc.serve.keys import Keys
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.rollout import ClientsSpec
from rlsvc.spec.run import RunSpec
from rlsvc.train.rollout import Arrived
from rlsvc.train.rollout_worker import Acting

CLIENTS = "clients"
"""In a run's folder: the episodes that were sent, as datasets."""
RECORDED = ("action", COMMANDED, INTERVENTION, "actor", "reward", "reward_source", "next.done", "next.success")


def far_contract(spec: RunSpec) -> Contract | None:
    """What the policy of a run whose robots are far away sees and does.

    It has the features and the rate of the demonstrations, and acts in the range of their actions. None for an
    algorithm whose learner says that of its windows.

    Raises:
        DatasetError: the demonstrations cannot be read.
    """
    assert spec.data is not None
    if ALGORITHMS[spec.algo.name].episodes is not None:
        return None
    table = load_features(next(iter(spec.data.datasets)), (*spec.data.observation, spec.data.action))
    return table_contract(table, spec.data, spec.policy.n_obs_steps)


class EpisodeReader:
    """Makes rows of the run out of episodes that `rlsvc collect` recorded."""

    def __init__(self, spec: RunSpec, acting: Acting) -> None:
        """Look at the run's demonstrations, whose features episodes must have. Raises DatasetError."""
        assert spec.data is not None
        self._dataset, self._names = next(iter(spec.data.datasets)), tuple(acting.contract.observation)
        self._action, self._texts = spec.data.action, _texts(acting)
        episode = select_episodes(open_source(self._dataset.path, self._dataset.format), self._dataset)[0]
        self._first = load_features(self._dataset.replace(episodes=(episode,)), self._features)

    @property
    def _features(self) -> tuple[str, ...]:
        return (*self._names, self._action)

    def __call__(self, folder: Path) -> tuple[dict[str, np.ndarray], bool]:
        """Columns of a chunk, and whether the episode succeeded. Raises DatasetError: it does not go with this run."""
        keys = {name: own for name, own in self._dataset.keys.items() if name in self._features}
        dataset = DatasetSpec(path=str(folder), keys=keys)
        extra = tuple(name for name in RECORDED if name != self._action)
        table = load_features(dataset, (*self._features, *extra))
        if table.num_episodes != 1 or table.num_steps < 2:
            raise DatasetError(f"{folder}: {table.num_steps} steps, expected two of one episode or more")
        first, columns = self._first, dict(table.columns)
        if table.fps != first.fps:
            raise DatasetError(f"{folder}: {table.fps:g} steps a second, the run's demonstrations have {first.fps:g}")
        for name in self._features:
            for what, got, expected in (
                ("shape", list(columns[name].shape[1:]), list(first.columns[name].shape[1:])),
                ("names", table.names.get(name), first.names.get(name)),
                ("unit", table.units.get(name), first.units.get(name)),
            ):
                # An .npz knows neither names nor units.
                if got != expected and None not in (got, expected):
                    raise DatasetError(f"{folder}: '{name}' has {what} {got}, the run's demonstrations have {expected}")
        for name in self._texts:
            columns[name] = encode_texts(columns[name], name)
        done = columns["next.done"].reshape(-1)
        carried = (*self._names, COMMANDED)
        rows = rows_of_episode({**columns, "over": done}, 0, carried, self._action, "reward", "over")
        step = rows["step"].clip(max=len(done) - 1)
        rows[INTERVENTION] = columns[INTERVENTION].reshape(-1)[step] & ~rows["is_last"]
        rows["version"] = np.array([_version(actor) for actor in columns["actor"].reshape(-1)], np.int32)[step]
        rows[REWARD_SOURCE] = np.array([_source(source) for source in columns["reward_source"].reshape(-1)])[step]
        return rows, bool(columns["next.success"].reshape(-1)[-1])


class ClientRollouts:
    """The `Rollouts` of a run whose robots are far away; it opens its port with the first weights.

    Consumes requests for actions, and episodes; produces a chunk for each episode. It waits for nobody: robots come and
    go. When this process dies, robots go on recording, and send what it lacks once it is back.
    """

    def __init__(self, spec: RunSpec, acting: Acting, journal: Journal, run_dir: Path, device: str) -> None:
        """Take in what lies in the run's folder already.

        Raises:
            UserError: the keys, or what lies there, cannot be read.
        """
        assert spec.rollout.clients is not None
        self._clients: ClientsSpec = spec.rollout.clients
        self._name, self._acting, self._device = spec.name, acting, device
        self._keys = None if self._clients.keys is None else Keys.read(Path(self._clients.keys))
        journaled = set(journal.ids())
        self._inbox = EpisodeInbox(
            run_dir / CLIENTS,
            EpisodeReader(spec, acting),
            self._clients.max_episode_mb * 2**20,
            known=lambda *episode: chunk_id(*episode) in journaled,
        )
        self._policy: _Policy | None = None
        self._server: ThreadServer | None = None
        self._received = 0

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """Refused by the specification: robots far away step when they want."""
        raise AssertionError("rollout.clients goes with rollout.mode: async")

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """See Rollouts; robots are not asked."""

    def poll(self, timeout_s: float) -> list[Arrived]:
        """See Rollouts."""
        chunks = [_chunk(received) for received in self._inbox.take(timeout_s)]
        self._received += len(chunks)
        return [Arrived(chunk) for chunk in chunks]

    def set_weights(self, params: Any, version: int) -> None:
        """See Rollouts."""
        if self._policy is not None:
            self._policy.set_weights(params, version)
            return
        self._policy = _Policy(self._acting, self._clients.robots, self._device)
        self._policy.set_weights(params, version)
        self._policy.warm_up()
        service = PolicyService(self._name, self._policy, ServeSettings(max_batch=self._clients.robots))
        app = build_app(service, self._keys)
        add_episode_routes(app, self._inbox)
        self._server = ThreadServer(app, self._clients.host, self._clients.port, "rollout.clients")
        self._service = service

    def metrics(self) -> dict[str, float]:
        """See Rollouts: episodes that this process has handed on."""
        return {"episodes_received": float(self._received)}

    def close(self) -> None:
        """See Rollouts."""
        if self._server is not None:
            self._server.close()
            self._service.close()


def chunk_id(client: str, dataset: str, number: int) -> tuple[int, int, int]:
    """Of the chunk that an episode becomes, the same after a restart; two datasets share one once in 2^43 pairs."""
    identity = hashlib.sha256(f"{client}/{dataset}".encode()).digest()
    return 0, int.from_bytes(identity[:8], "big") >> 21, number


def _chunk(received: Received) -> Chunk:
    rows, success = received.content
    worker, incarnation, number = chunk_id(received.client, received.dataset, received.number)
    episode = (incarnation << 20) | number  # the inbox takes numbers below a million
    columns = {**rows, "episode": np.full(len(rows["step"]), episode, np.int64)}
    ended = {
        "return": np.array([rows["reward"].sum()], np.float64),
        "length": np.array([int((~rows["is_last"]).sum())], np.int64),
        "success": np.array([success]),
    }
    offsets = np.array([0, len(rows["step"])], np.int64)
    return Chunk(worker, incarnation, number, np.zeros(1, np.int32), offsets, columns, ended)


class _Policy:
    """A runner whose weights change while it acts: every chunk is of the version that it says."""

    def __init__(self, acting: Acting, robots: int, device: str) -> None:
        sizes = tuple(sorted({1, robots}))
        self._runner: PolicyRunner = acting.runner(sizes, device)
        self.contract, self.robot, self.version = acting.contract, acting.robot, ""
        self._lock = threading.Lock()

    def set_weights(self, params: Any, version: int) -> None:
        with self._lock:
            self._runner.set_params(params, str(version))
            self.version = str(version)

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        with self._lock:
            return self._runner.act(observation, seeds, steps, carry)

    def initial_carry(self, batch_size: int) -> Any:
        return self._runner.initial_carry(batch_size)

    def warm_up(self) -> None:
        with self._lock:
            self._runner.warm_up()


def _texts(acting: Acting) -> tuple[str, ...]:
    return tuple(name for name, feature in acting.contract.observation.items() if feature.dtype == TEXT)


def _version(actor: object) -> int:
    """Of the weights that acted: served learners number them; people have none."""
    text = str(actor)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def _source(text: object) -> np.int32:
    """Where a reward comes from: a classifier, a person's name, or nothing, for a step that nobody rewarded."""
    if str(text).startswith(CLASSIFIER):
        return np.int32(REWARD_SOURCES.index("classifier"))
    return np.int32(REWARD_SOURCES.index("person" if str(text) not in ("", "environment") else "environment"))
