"""The file that keeps what a server has learned: one safetensors file, always replaced as a whole.

Tensors lie in it as they are, named ``part/name``; the rest is JSON in the file's metadata:

==============  ====================================================================================
``format``      number of this layout
``fingerprint`` what the state was learned on; a server with another one does not use it
``data``        of each part, what is no tensor
``digest``      BLAKE2b over the three above and over name, type, shape and bytes of every tensor
==============  ====================================================================================

Reading takes in the whole file and compares the digest before it returns anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
FILE_NAME = "kvcmas-state.safetensors"
_UNFINISHED = ".kvcmas-unfinished"


class StateError(ValueError):
    """Saved state cannot be used, or not be saved; the message is one sentence."""


@dataclass(frozen=True)
class State:
    """What one part would lose with the process: tensors by name, and JSON-compatible data.

    Whoever hands one out leaves its tensors alone from then on: they are written while learning goes on.
    """

    tensors: Mapping[str, Tensor]
    data: Any

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The fp32 tensor of that name; raises `StateError` unless it is there, has that shape and is finite."""
        part = self.tensors.get(name)
        if part is None:
            raise StateError(f"tensor {name!r} is missing")
        if part.dtype != torch.float32 or tuple(part.shape) != shape:
            raise StateError(f"tensor {name!r} is {part.dtype} {list(part.shape)}: it must be fp32 {list(shape)}")
        if not torch.isfinite(part).all():
            raise StateError(f"tensor {name!r} holds NaN or Inf")
        return part


class Lasting(Protocol):
    """What can outlive the process."""

    def state(self) -> State:
        """All of it."""
        ...

    def load(self, state: State) -> None:
        """Be what ``state`` says. Raises `StateError`, and then nothing changes."""
        ...


def number(value: object, low: float = -math.inf) -> float:
    """``value`` if it is a finite number from ``low`` on; raises `StateError` otherwise."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < low:
        raise StateError(f"{value!r} stands where a finite number from {low} on must be")
    return value


def count(value: object, low: int = 0) -> int:
    """``value`` if it is an integer from ``low`` on; raises `StateError` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise StateError(f"{value!r} stands where an integer from {low} on must be")
    return value


def write(path: Path, fingerprint: Mapping[str, Any], parts: Mapping[str, State]) -> None:
    """Put ``parts`` where ``path`` says: the old file or the new one is there at any time, and only its owner reads it.

    Raises `StateError` when that fails, and then leaves nothing behind but the old file.
    """
    tensors = {f"{part}/{name}": t for part, state in parts.items() for name, t in state.tensors.items()}
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    words = {
        "format": str(FORMAT),
        "fingerprint": json.dumps(dict(fingerprint), allow_nan=False),
        "data": json.dumps({part: state.data for part, state in parts.items()}, allow_nan=False),
    }
    words["digest"] = _digest(words, tensors)
    # safetensors writes through a file with a name of its own: whatever a killed process left of it is in here.
    unfinished = path.parent / _UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        fresh = unfinished / path.name
        save_file(tensors, fresh, words)
        fresh.chmod(0o600)
        _sync(fresh)
        os.replace(fresh, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, State]]:
    """Fingerprint and parts of a file, tensors on ``device``. Raises `StateError` unless every byte is as written."""
    try:
        # Not mapped into memory: the tensors are to outlive the file.
        with safe_open(path, framework="pt", backend="pread") as file:
            words = file.metadata() or {}
            if words.get("format") not in (None, str(FORMAT)):
                raise StateError(f"{path} has format {words['format']}, but this version reads format {FORMAT}.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StateError(f"{path} does not exist.") from None
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} is damaged or no state file: {error}.") from error
    digest = words.pop("digest", None)
    if digest is None or digest != _digest(words, tensors):
        raise StateError(f"{path} is damaged: its digest is not that of its contents.")
    try:
        fingerprint, data = (dict(json.loads(words[word])) for word in ("fingerprint", "data"))
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in data}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor.to(device)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} is no state file of kvcmas: {error!r}.") from error
    return fingerprint, {part: State(parts[part], data[part]) for part in parts}


def check_fingerprint(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `StateError` that names the first difference between a file's fingerprint and a server's."""
    for name in [*own, *saved]:
        if saved.get(name) != own.get(name):
            raise StateError(f"{path} was saved with {name} {saved.get(name)}, but this server has {own.get(name)}.")


def _digest(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=32)
    hasher.update(json.dumps(sorted(words.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
