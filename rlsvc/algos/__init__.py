"""How a policy learns, one file each. The table is `rlsvc.spec.algorithms.ALGORITHMS`."""

from __future__ import annotations

import importlib
from typing import Any

from rlsvc.core.errors import unknown_name
from rlsvc.spec.algorithms import ALGORITHMS


def load_algorithm(name: str) -> Any:
    """The class of an algorithm (`rlsvc.algos.api.Algorithm`).

    Raises:
        NotFoundError: an unknown name.
    """
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    module, _, attribute = ALGORITHMS[name].path.partition(":")
    return getattr(importlib.import_module(module), attribute)
