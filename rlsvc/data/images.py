"""Images on the host: their size, for datasets, simulators and requests alike. Letters: H W height and width."""

from __future__ import annotations

import numpy as np


def resize_with_pad(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An image brought to a size, its shape kept, in the middle of black bars; the same pixels as openpi's clients.

    Args:
        image: [H, W, 3] uint8.
        size: height and width.

    Returns:
        [*size, 3] uint8; the image itself where it has that size already.
    """
    if image.shape[:2] == tuple(size):
        return image
    from PIL import Image

    ratio = max(image.shape[0] / size[0], image.shape[1] / size[1])
    height, width = (max(1, int(side / ratio)) for side in image.shape[:2])
    small = Image.fromarray(np.ascontiguousarray(image)).resize((width, height), Image.Resampling.BILINEAR)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    out = np.zeros((*size, image.shape[2]), np.uint8)
    out[top : top + height, left : left + width] = np.asarray(small)
    return out


def resize_images(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`resize_with_pad` of [..., H, W, 3] uint8, one after the other."""
    if images.shape[-3:-1] == tuple(size):
        return images
    out = np.empty((*images.shape[:-3], *size, 3), np.uint8)
    for index in np.ndindex(images.shape[:-3]):
        out[index] = resize_with_pad(images[index], size)
    return out
