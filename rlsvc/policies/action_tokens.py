"""What every policy that learns FAST tokens does with a dataset's actions: fit a tokenizer on them, cut them in chunks.

Letters: N rows, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlsvc.data.fast_tokenizer import FastTokenizer
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows
from rlsvc.spec.tokenizer import FastFitSpec

BLOCK = 4096
"""Chunks that are cut from a dataset at a time."""


def fit_action_tokenizer(fit: FastFitSpec, chunks: Windows, normalizer: Normalizer) -> FastTokenizer:
    """A tokenizer of a dataset's own actions.

    Args:
        fit: how.
        chunks: of the training data, raw.
        normalizer: of the run.

    Raises:
        UserError: as FastTokenizer.fit.
    """
    count = min(chunks.num_windows, fit.max_chunks)
    rows = np.arange(count) * chunks.num_windows // count
    normal = (chunk for _, block in normal_chunks(chunks, rows, normalizer) for chunk in block)
    return FastTokenizer.fit(normal, fit.vocab_size, fit.scale)


def normal_chunks(chunks: Windows, rows: np.ndarray, normalizer: Normalizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Windows by block: their numbers [N], and their normalised chunks [N, H, A]."""
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        batch = chunks.gather(block)
        yield block, normalizer.normalize("action", batch["action"], batch["group"])
