"""Where rlsvc keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder of rlsvc's caches: RLSVC_CACHE, or ~/.cache/rlsvc."""
    return Path(os.environ.get("RLSVC_CACHE") or Path.home() / ".cache" / "rlsvc")
