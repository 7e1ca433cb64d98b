"""What other libraries' learners and policies need to run here: the only place that imports Torch models."""

import os

# diffusers tells of its Flax classes whenever it is imported, which LeRobot does.
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
