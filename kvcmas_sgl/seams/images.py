"""Seam: SGLang's multimodal inputs. Which tokens of a prompt are pictures, and which pictures a row of a pass needs.

SGLang has two kinds of models with plain one-dimensional RoPE that read pictures. LLaVA's own (``models/llava.py``) get
one placeholder a picture, which ``pad_input_ids`` makes many of in the scheduler, and run the vision tower for all
pictures of a row that does not start behind the last picture's end. The others (``general_mm_embed_routine``) get the
prompt at its full length, with each picture's place in ``offsets``.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvcmas_sgl.radix_ext.images import Image, Images, Range
from kvcmas_sgl.radix_ext.sources import as_tokens
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.wire import Span

# Under these names SGLang's models keep what encodes pictures.
_TOWERS = ("vision_tower", "vision_model", "visual", "vision_encoder")
_counted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def read_images(inputs: Any, ids: Any) -> Images | None:
    """The pictures of a request; None where a hash is not that of the pixels. Raises ValueError on places unknown.

    A client may name its pictures itself (``mm_hashes``): SGLang believes it, but others must not have to.
    ``inputs``: SGLang's ``MultimodalInputs`` after padding; ids: the prompt, likewise.
    """
    from sglang.srt.managers.mm_utils import hash_feature

    images = []
    for item, ranges in zip(inputs.mm_items, _ranges(inputs), strict=True):
        if item.feature is None or hash_feature(item.feature) != item.hash:
            return None
        images.append(Image(tuple(ranges), _digest(item), _nbytes(item.feature)))
    images.sort(key=lambda image: image.ranges)
    borders = [mark for image in images for pair in image.ranges for mark in pair]
    if borders != sorted(borders) or (borders and borders[-1] > len(ids)):
        raise ValueError(f"pictures lie at {borders}, which are no ascending ranges of {len(ids)} tokens")
    # SGLang takes the pixels off its own items once the request is finished.
    kept = copy.copy(inputs)
    kept.mm_items = [copy.copy(item) for item in inputs.mm_items]
    return Images(tuple(images), as_tokens(ids), kept)


def select(inputs: Any, start: int, stop: int) -> Any:
    """A copy of ``MultimodalInputs`` with the pictures that have tokens in ``[start, stop)``; None without any."""
    if inputs is None:
        return None
    kept = [number for number, ranges in enumerate(_ranges(inputs)) if _overlap(ranges, start, stop)]
    if not kept:
        return None
    part = copy.copy(inputs)
    for name in ("mm_items", "image_offsets", "image_pad_len"):
        values = getattr(inputs, name, None)
        if values is not None:
            setattr(part, name, [values[number] for number in kept])
    return part


def expanded(spans: Sequence[Span], sent: int, images: Images) -> tuple[Span, ...]:
    """Spans of a prompt with one token a picture, in the prompt where each has all its tokens.

    sent: tokens of the prompt as it was sent; it may have its full length already. Raises ValueError where the two
    prompts do not fit.
    """
    places = [place for image in images for place in image.ranges]
    total = sent + sum(stop - start - 1 for start, stop in places)
    if sent == len(images.ids):
        return tuple(spans)
    if total != len(images.ids):
        raise ValueError(f"a prompt of {sent} tokens and its pictures make {total}, not {len(images.ids)}")
    return grown(spans, places)


def grown(spans: Sequence[Span], places: Sequence[Range]) -> tuple[Span, ...]:
    """Spans of a prompt with one token a picture, where each picture has the tokens ``places``, ascending."""

    def at(mark: int) -> int:
        for start, stop in places:
            if start < mark:
                mark += stop - start - 1
        return mark

    return tuple((at(start), at(stop)) for start, stop in spans)


def find_places(sent: Sequence[int], full: Sequence[int], placeholder: int) -> list[Range] | None:
    """Where in ``full`` the tokens are that a processor put in the place of each ``placeholder`` of ``sent``.

    Told by the text between them; None where it does not tell.
    """
    marks = [number for number, token in enumerate(sent) if token == placeholder]
    borders = [-1, *marks, len(sent)]
    texts = [list(sent[before + 1 : after]) for before, after in pairwise(borders)]
    last = len(full) - len(texts[-1])
    if not marks or not all(texts[1:-1]) or list(full[: len(texts[0])]) != texts[0] or list(full[last:]) != texts[-1]:
        return None
    places, at = [], len(texts[0])
    for text in texts[1:-1]:
        found = (n for n in range(at + 1, last) if list(full[n : n + len(text)]) == text)
        stop = next(found, last)
        places.append((at, stop))
        at = stop + len(text)
    return [*places, (at, last)] if at < last else None


def count_encoded(model: Any, statistics: Statistics) -> None:
    """Count what the model's vision tower is given from now on. Does nothing twice, or without a tower."""
    towers = (getattr(model, name, None) for name in _TOWERS)
    tower = next((found for found in towers if isinstance(found, torch.nn.Module)), None)
    if tower is None or tower in _counted:
        return

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        statistics.images_encoded += int(args[0].shape[0]) if args and torch.is_tensor(args[0]) else 1

    tower.register_forward_pre_hook(count)
    _counted.add(tower)


@contextmanager
def idle_pass(statistics: Statistics) -> Iterator[None]:
    """Around a pass that no request waits for: what the vision tower is given counts apart."""
    before = statistics.images_encoded
    try:
        yield
    finally:
        statistics.images_encoded_idle += statistics.images_encoded - before
        statistics.images_encoded = before


def _ranges(inputs: Any) -> list[list[Range]]:
    """Tokens of every item, [start, stop)."""
    offsets = getattr(inputs, "image_offsets", None)
    if offsets is not None:
        return [[(start, start + length)] for start, length in zip(offsets, inputs.image_pad_len, strict=True)]
    if any(not item.offsets for item in inputs.mm_items):
        raise ValueError("the model does not say where its pictures are")
    return [[(first, last + 1) for first, last in item.offsets] for item in inputs.mm_items]


def _overlap(ranges: Sequence[Range], start: int, stop: int) -> bool:
    return any(first < stop and last > start for first, last in ranges)


def _digest(item: Any) -> bytes:
    """Of an item's kind, pixels and whatever else the model is told of it."""
    hasher = hashlib.sha256(item.modality.name.encode())
    for name, value in (("feature", item.feature), *sorted(item.model_specific_data.items())):
        hasher.update(f"|{name}|".encode())
        _hash(hasher, value)
    return hasher.digest()


def _hash(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).data)
    elif isinstance(value, list | tuple):
        hasher.update(f"[{len(value)}]".encode())
        for part in value:
            _hash(hasher, part)
    else:
        hasher.update(repr(value).encode())


def _nbytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_nbytes(part) for part in value)
    return int(getattr(value, "nbytes", 0))
