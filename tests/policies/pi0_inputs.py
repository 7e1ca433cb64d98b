"""What the tests of pi0 share: contracts and random observations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.spec.pi0 import Pi0Spec

CAMERAS = ("observation.images.base", "observation.images.left_wrist", "observation.images.right_wrist")


def contract_of(spec: Pi0Spec, width: int) -> Contract:
    """Three cameras with masks, a state and an action of one width, and a prompt."""
    image = Feature((*spec.image_size, 3), "uint8")
    observation = dict.fromkeys(CAMERAS, image) | {f"{name}_mask": Feature((), "bool") for name in CAMERAS}
    observation |= {"observation.state": Feature((width,), "float32"), "task": Feature((), "str")}
    return Contract(observation, Feature((width,), "float32"), 20.0, 1, spec.n_action_steps)


def random_observation(rng: np.random.Generator, spec: Pi0Spec, width: int) -> dict[str, jnp.ndarray]:
    """Two rows, normalised; the last camera of the second row is not there, and the prompts are of two lengths."""
    out = {name: jnp.asarray(rng.uniform(-1, 1, (2, *spec.image_size, 3)), jnp.float32) for name in CAMERAS}
    out |= {f"{name}_mask": jnp.ones(2) for name in CAMERAS}
    out[f"{CAMERAS[-1]}_mask"] = jnp.asarray([1.0, 0.0])
    out["observation.state"] = jnp.asarray(rng.normal(size=(2, width)), jnp.float32)
    out["prompt_tokens"] = jnp.asarray(rng.integers(0, 64, (2, spec.prompt_tokens)), jnp.int32)
    out["prompt_mask"] = jnp.arange(spec.prompt_tokens)[None] < jnp.asarray([[spec.prompt_tokens - 1], [4]])
    return out
