"""Makes tests/serve's serving_fakes importable, in whatever way pytest imports test modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
