"""A reward classifier beside a session's control loop: it ends episodes that succeeded.

It judges from a thread, the newest observation whenever it has time, so that a slow classifier judges fewer
observations and delays no command.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.types import CLASSIFIER
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.store.registry import resolve
from rlsvc.train.reward import RewardRunner


class Judge:
    """Judges one episode after the other.

    Attributes:
        source: of its rewards, as the recorder keeps it.
    """

    def __init__(self, spec: RewardSourceSpec, robot: Contract) -> None:
        """Load, check, compile.

        Args:
            spec: of the classifier.
            robot: what is observed.

        Raises:
            BundleError: not the bundle of a reward classifier.
            ContractError: the robot does not give what it sees; names it.
        """
        path = resolve(spec.classifier)
        self._runner = RewardRunner(path, device="cpu")
        self._runner.check(robot, "reward")
        self.source = f"{CLASSIFIER}{self._runner.version[:12]}"
        self._threshold = self._runner.calibration.threshold if spec.threshold is None else spec.threshold
        self._consecutive = spec.consecutive
        example = robot.example_observation(1)
        self._runner.probabilities({name: x[:, -1] for name, x in example.items()})
        self._newest: dict[str, np.ndarray] | None = None
        self._episode, self._in_a_row, self._done, self._ended = 0, 0, False, False
        self._error: Exception | None = None
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """An episode begins."""
        with self._more:
            self._episode += 1
            self._newest, self._in_a_row, self._done = None, 0, False

    def look(self, observation: Mapping[str, np.ndarray]) -> bool:
        """Whether the task is done, as far as was judged yet.

        Args:
            observation: the newest one, by name; it may be judged later, and others be passed over meanwhile.

        Raises:
            Exception: whatever the classifier raised.
        """
        with self._more:
            if self._error is not None:
                raise self._error
            self._newest = {name: np.array(observation[name]) for name in self._runner.contract.observation}
            self._more.notify()
            return self._done

    def close(self) -> None:
        """End the thread."""
        with self._more:
            self._ended = True
            self._more.notify()
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            with self._more:
                while self._newest is None and not self._ended:
                    self._more.wait()
                if self._ended or self._newest is None:
                    return
                observation, self._newest, episode = self._newest, None, self._episode
            try:
                p = float(self._runner.probabilities({name: x[None] for name, x in observation.items()})[0, -1])
            except Exception as error:  # the session's thread is told, with the next look
                with self._more:
                    self._error = error
                return
            with self._more:
                if episode == self._episode:
                    self._in_a_row = self._in_a_row + 1 if p >= self._threshold else 0
                    self._done = self._done or self._in_a_row >= self._consecutive
