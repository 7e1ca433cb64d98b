"""Rollouts from robots' computers that are no part of the cluster: they ask a served learner, and send episodes.

Such a computer runs `rlsvc collect` with `policy.send_episodes`. It needs no Ray, and records on its own disk whatever
happens to the network; what the learner lacks is sent once there is one again.

Letters: n steps of an episode.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT
from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.core.types import COMMANDED, INTERVENTION, REWARD_SOURCE, REWARD_SOURCES, ActionChunk, Chunk
from rlsvc.data.journal import Journal
from rlsvc.data.repack import load_features
from rlsvc.data.replay_table import rows_of_episode
from rlsvc.data.texts import encode_texts
from rlsvc.runner import PolicyRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.episodes import EpisodeInbox, Received, add_episode_routes
from rlsvc.serve.keys import Keys
from rlsvc.serve.service import PolicyService, ServeSettings
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.rollout import ClientsSpec
from rlsvc.spec.run import RunSpec
from rlsvc.train.rollout import Arrived
from rlsvc.train.rollout_worker import Acting

CLIENTS = "clients"
"""In a run's folder: the episodes that were sent, as datasets."""
RECORDED = ("action", COMMANDED, INTERVENTION, "actor", "reward", "reward_source", "next.done", "next.success")


class EpisodeReader:
    """Makes rows of the run out of episodes that `rlsvc collect` recorded."""

    def __init__(self, spec: RunSpec, acting: Acting) -> None:
        """Look at the run's demonstrations, whose features episodes must have. Raises DatasetError."""
        assert spec.data is not None
        self._dataset, self._names = next(iter(spec.data.datasets)), tuple(acting.contract.observation)
        self._action, self._texts = spec.data.action, _texts(acting)
        first = load_features(self._dataset.replace(episodes=(_first_episode(self._dataset),)), self._features)
        self._shapes = {name: first.columns[name].shape[1:] for name in self._features}
        self._fps = first.fps

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
        if table.fps != self._fps:
            raise DatasetError(f"{folder}: {table.fps:g} steps a second, the run's demonstrations have {self._fps:g}")
        columns = dict(table.columns)
        for name, shape in self._shapes.items():
            if columns[name].shape[1:] != shape:
                raise DatasetError(
                    f"{folder}: '{name}' has shape {list(columns[name].shape[1:])}, the run's demonstrations have "
                    f"{list(shape)}"
                )
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
        self._known = set(journal.ids())
        self._inbox = EpisodeInbox(run_dir / CLIENTS, EpisodeReader(spec, acting), self._clients.max_episode_mb * 2**20)
        self._policy: _Policy | None = None
        self._server: _Server | None = None
        self._held = 0

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        assert self._server is not None
        return self._server.address

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """Refused by the specification: robots far away step when they want."""
        raise AssertionError("rollout.clients goes with rollout.mode: async")

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """See Rollouts; robots are not asked."""

    def poll(self, timeout_s: float) -> list[Arrived]:
        """See Rollouts."""
        chunks = [self._chunk(received) for received in self._inbox.take(timeout_s)]
        self._held += len(chunks)
        return [Arrived(chunk) for chunk in chunks if chunk.id not in self._known]

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
        self._server = _Server(app, service, self._clients.host, self._clients.port)

    def metrics(self) -> dict[str, float]:
        """See Rollouts."""
        return {"episodes_received": float(self._held)}

    def close(self) -> None:
        """See Rollouts."""
        if self._server is not None:
            self._server.close()

    def _chunk(self, received: Received) -> Chunk:
        rows, success = received.content
        # The same for an episode that is read again after a restart; two datasets share a number once in 2^43 pairs.
        identity = hashlib.sha256(f"{received.client}/{received.dataset}".encode()).digest()
        incarnation = int.from_bytes(identity[:8], "big") >> 21
        episode = (incarnation << 20) | (received.number & (2**20 - 1))
        columns = {**rows, "episode": np.full(len(rows["step"]), episode, np.int64)}
        steps = int((~rows["is_last"]).sum())
        ended = {
            "return": np.array([rows["reward"].sum()], np.float64),
            "length": np.array([steps], np.int64),
            "success": np.array([success]),
        }
        offsets = np.array([0, len(rows["step"])], np.int64)
        return Chunk(0, incarnation, received.number, np.zeros(1, np.int32), offsets, columns, ended)


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

    def warm_up(self) -> None:
        with self._lock:
            self._runner.warm_up()


class _Server:
    """An application, served from a thread of this process."""

    def __init__(self, app: Any, service: PolicyService, host: str, port: int) -> None:
        import uvicorn

        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise BusyError(
                f"rollout.clients: {host}:{port} cannot be listened on ({error.strerror}); choose another port"
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._service = service
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="clients", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(5)
        self._service.close()


def _texts(acting: Acting) -> tuple[str, ...]:
    return tuple(name for name, feature in acting.contract.observation.items() if feature.dtype == TEXT)


def _first_episode(dataset: DatasetSpec) -> int:
    if dataset.episodes:
        return dataset.episodes[0]
    from rlsvc.data.load import open_source

    return open_source(dataset.path, dataset.format).episode_ids[0]


def _version(actor: object) -> int:
    """Of the weights that acted: served learners number them; people have none."""
    text = str(actor)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def _source(text: object) -> np.int32:
    """Where a reward comes from: a classifier, a person's name, or nothing, for a step that nobody rewarded."""
    if str(text).startswith("classifier "):
        return np.int32(REWARD_SOURCES.index("classifier"))
    return np.int32(REWARD_SOURCES.index("person" if str(text) not in ("", "environment") else "environment"))
