"""Images as arrays of bytes and as PNG files, from tensors, arrays, PIL images, files, or a figure of matplotlib."""

from __future__ import annotations

import io
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np

# The type of a PNG image by its number of channels: gray, gray with alpha, RGB, RGBA.
_PNG_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pictures(images: Any) -> list[Any]:
    """Return images as arrays of uint8 with the channels last, or as the bytes of PNG files.

    Args:
        images: an image, a list of images, or a tensor with shape (images, channels, height, width). An image is a
            tensor with shape (channels, height, width) or (height, width), an array with shape (height, width,
            channels) or (height, width), a PIL image, or the path of an image file. Floating-point values are from 0
            to 1, integers from 0 to 255.

    Raises:
        ConfigurationError: an image has another type or shape.
    """
    if isinstance(images, Tensor) and images.dim() == 4:
        images = list(images)
    return [_picture(each) for each in (images if isinstance(images, list | tuple) else [images])]


def _picture(image: Any) -> Any:
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        return _pixels(image.permute(1, 2, 0) if image.dim() == 3 else image)
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        return _pixels(torch.as_tensor(image))
    if isinstance(image, str | os.PathLike):
        # Loggers need no images in most programs.
        from PIL import Image

        with Image.open(image) as opened:
            return _saved(opened)
    if callable(getattr(image, "save", None)):
        return _saved(image)
    raise ConfigurationError(
        f"{type(image).__name__} is not an image: give a tensor with shape (channels, height, width), an array with "
        "shape (height, width, channels), a PIL image, or the path of a file."
    )


def _saved(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _pixels(image: Tensor) -> np.ndarray[Any, Any]:
    """Return the values from 0 to 255 of an image with the channels last."""
    if image.dim() not in (2, 3) or (image.dim() == 3 and image.shape[2] not in _PNG_TYPES) or image.numel() == 0:
        shape = tuple(image.shape)
        raise ConfigurationError(
            f"an image has shape {shape} with the channels last: give 1 to 4 channels, as a tensor with shape "
            "(channels, height, width) or an array with shape (height, width, channels)."
        )
    if image.is_floating_point():
        image = (torch.nan_to_num(image.float()).clamp(0, 1) * 255).round()
    elif image.dtype == torch.bool:
        image = image.to(torch.uint8) * 255
    # A copy in any case, made by clamp.
    array: np.ndarray[Any, Any] = image.clamp(0, 255).to(torch.uint8).contiguous().numpy()
    return array


def figure_png(figure: Any) -> bytes:
    """Return a matplotlib figure as a PNG file.

    Raises:
        ConfigurationError: it is not a figure.
    """
    if not callable(getattr(figure, "savefig", None)):
        raise ConfigurationError(f"{type(figure).__name__} is not a figure: give a matplotlib Figure.")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return the PNG file of an array of uint8 with shape (height, width) or (height, width, channels)."""
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    rows = pixels.tobytes()
    length = width * channels
    # The first byte of each row is the number of its filter; 0 leaves the row as it is.
    unfiltered = b"".join(b"\0" + rows[start : start + length] for start in range(0, height * length, length))
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered, 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_size(content: bytes) -> tuple[int, int]:
    """Return the width and the height of a PNG file."""
    width, height = struct.unpack(">II", content[len(_SIGNATURE) + 8 : len(_SIGNATURE) + 16])
    return width, height
