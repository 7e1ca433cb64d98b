"""Trained weights to begin with (rlsvc/store/weights.py)."""

from __future__ import annotations

from rlsvc.spec.base import Spec


class WeightsSpec(Spec):
    """Trained weights to begin with. A weight that is missing or not known is an error, unless it is named here."""

    path: str
    """A bundle; for pi0, pi0_fast and value_vlm also a folder of an openpi checkpoint (its `params`), PaliGemma's .npz,
    or a .safetensors file of LeRobot."""
    only: tuple[str, ...] = (".*",)
    """Regular expressions of the weights to take; the others begin fresh."""
    may_lack: tuple[str, ...] = ()
    """Regular expressions of weights that may be missing there, and then begin fresh ("expert.*" for PaliGemma's); of
    cameras that a bundle did not have, too."""
    may_ignore: tuple[str, ...] = ()
    """Regular expressions of weights there that this policy has no use for, by their own names; of a bundle's cameras,
    too."""
