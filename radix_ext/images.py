"""Pictures and video frames inside a prompt: where their tokens stand, and what each token is called.

SGLang gives all tokens of a picture the same few ids, made of a hash of its pixels. For an exact prefix that is
enough. A span is found wherever it stands, so here every token of a picture has a name of its own, made of the digest
of the picture and of the token's place in it: other pixels never match, and neither does the same picture, shifted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvcmas_sgl.radix_ext.blocks import Tokens
from numpy.typing import NDArray

FIRST_NAME = 1 << 62
"""Names of pictures' tokens start here, above all token ids."""

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Image:
    """One picture, or the frames of one video.

    Attributes
    ----------
    ranges
        Its tokens ``[start, stop)`` in the prompt, ascending.
    digest
        Of all that decides what its tokens are: pixels as the vision tower gets them, and their kind.
    nbytes
        Size of these pixels.
    """

    ranges: tuple[Range, ...]
    digest: bytes
    nbytes: int

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def names(self) -> Tokens:
        """A name for each of its tokens, int64 [tokens]; other names for other pictures and other numbers of tokens."""
        count = self.tokens
        stream = hashlib.shake_128(self.digest + count.to_bytes(8, "little")).digest(8 * count)
        return (np.frombuffer(stream, np.int64) & (FIRST_NAME - 1)) | FIRST_NAME


@dataclass(frozen=True, eq=False)
class Images:
    """The pictures of one prompt, ascending.

    ``ids``: the prompt as the model's pass takes it, int64 [n]. ``inputs``: what such a pass needs to compute the
    pictures; never looked at here.
    """

    images: tuple[Image, ...] = ()
    ids: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    inputs: Any = None

    def __bool__(self) -> bool:
        return bool(self.images)

    def __iter__(self) -> Iterator[Image]:
        return iter(self.images)

    @property
    def nbytes(self) -> int:
        return sum(image.nbytes for image in self.images)

    def named(self) -> Tokens:
        """The prompt with a name in the place of every token of a picture, int64 [n]."""
        tokens = self.ids.copy()
        for image in self.images:
            names, at = image.names(), 0
            for start, stop in image.ranges:
                tokens[start:stop] = names[at : at + stop - start]
                at += stop - start
        return tokens

    def model_tokens(self, tokens: Tokens) -> Tokens:
        """``named`` tokens, and what follows the prompt, as the model's pass takes them."""
        return np.concatenate([self.ids[: len(tokens)], tokens[len(self.ids) :]])

    def border(self, position: int) -> int:
        """``position``, or the start of the picture that it cuts in two."""
        return next(
            (start for image in self.images for start, stop in image.ranges if start < position < stop), position
        )

    def covered(self, ranges: list[Range]) -> int:
        """How many pictures lie wholly in ``ranges`` of the prompt."""
        return sum(
            all(any(low <= start and stop <= high for low, high in ranges) for start, stop in image.ranges)
            for image in self.images
        )


NO_IMAGES = Images()


def of_images(tokens: Tokens) -> NDArray[np.bool_]:
    """Which of some tokens are a picture's, bool [n]."""
    return tokens >= FIRST_NAME
