"""The clients are tested against the servers of tests/serve."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
