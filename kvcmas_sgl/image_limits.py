"""How many pictures an agent's prompt may hold, and how large their files may be. This module imports no SGLang."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from kvcmas_sgl.wire import HintError

MAX_IMAGES = 16
"""LLaVA's own limit too: SGLang pads a prompt with more of them to other lengths than their features have."""

MAX_IMAGE_BYTES = 20 << 20
"""Of one picture's file, before it is decoded."""


def check_images(sources: Sequence[Any]) -> None:
    """Raise `HintError` for too many pictures or too large ones.

    sources: data URLs, base64, paths, ``file://`` URLs, bytes, or objects with such a thing in ``url``. What has to be
    fetched is left to SGLang's ``--media-url-max-file-size-mb``.
    """
    if len(sources) > MAX_IMAGES:
        raise HintError(f"image_data holds {len(sources)} pictures, but an agent's prompt may hold {MAX_IMAGES}.")
    for number, source in enumerate(sources):
        size = _size(getattr(source, "url", source))
        if size > MAX_IMAGE_BYTES:
            raise HintError(f"picture {number} has {size} bytes, but at most {MAX_IMAGE_BYTES} are allowed.")


def data_url(picture: bytes, kind: str = "png") -> str:
    """A picture's file as a ``data:`` URL."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _size(source: Any) -> int:
    if isinstance(source, bytes):
        return len(source)
    if not isinstance(source, str) or source.startswith(("http://", "https://")):
        return 0
    if not source.startswith("data:"):
        path = Path(unquote(urlparse(source).path) if source.startswith("file://") else source[:4096])
        try:
            return path.stat().st_size
        except (OSError, ValueError):
            # Base64, or a file that is not there, of which SGLang says so.
            pass
    return len(source) * 3 // 4
