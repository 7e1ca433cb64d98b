"""Texts as bytes, since chunks and the journal hold numbers alone.

Letters: R rows.
"""

from __future__ import annotations

import numpy as np

from rlsvc.core.errors import DatasetError

TEXT_BYTES = 256


def encode_texts(texts: np.ndarray, name: str = "text") -> np.ndarray:
    """Texts [R] as [R, 256] uint8: UTF-8, filled up with zeros.

    Raises:
        DatasetError: one that is longer; names the column.
    """
    out = np.zeros((len(texts), TEXT_BYTES), np.uint8)
    known: dict[str, np.ndarray] = {}
    for i, text in enumerate(texts):
        text = str(text)
        if text not in known:
            data = text.encode()
            if len(data) > TEXT_BYTES:
                raise DatasetError(f"'{name}': a text of {len(data)} bytes, at most {TEXT_BYTES} are kept: {text[:60]}")
            known[text] = np.frombuffer(data, np.uint8)
        out[i, : len(known[text])] = known[text]
    return out


def decode_texts(rows: np.ndarray) -> np.ndarray:
    """Inverse of `encode_texts`; [R] object."""
    return np.array([bytes(row).rstrip(b"\0").decode() for row in rows], object)
