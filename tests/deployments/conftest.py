"""Makes workplaces and tests/serve's serving_fakes importable, in whatever way pytest imports test modules."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "serve")]
