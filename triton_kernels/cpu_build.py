"""Compile the CPU kernel with the system's C compiler, once a machine, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_FILES = ("cpu_source.c", "cpu_rows.c", "cpu_common.h")
SOURCES = tuple(Path(__file__).with_name(name) for name in _FILES)
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-pthread")
_NATIVE = {"x86_64": ("-march=native",), "AMD64": ("-march=native",), "aarch64": ("-mcpu=native",)}
_TIMEOUT = 120


class BuildError(RuntimeError):
    """The kernel cannot be compiled or loaded; the message says why in one sentence."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME` (or ~/.cache)/kvcmas_sgl/kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvcmas_sgl" / "kernels"


def build(*, native: bool = True, folder: Path | None = None) -> Path:
    """Compile the C files into ``folder`` unless it is there already; returns the library's path.

    The compiler is `$CC`, or cc. ``native`` lets it use all that this machine's processor has; the file's name then
    depends on the processor. Raises BuildError.
    """
    compiler = os.environ.get("CC") or "cc"
    flags = _FLAGS + (_NATIVE.get(platform.machine(), ()) if native else ())
    text = [path.read_text() for path in SOURCES]
    key = "\n".join([compiler, *flags, platform.machine(), _processor() if native else "", *text])
    folder = folder or cache_folder()
    target = folder / f"correct-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    started = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "correct.so"
            files = [str(path) for path in SOURCES if path.suffix == ".c"]
            command = [*compiler.split(), *flags, *files, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise BuildError(f"{' '.join(command[:2])} ended with status {done.returncode}: {lines[0]}")
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CPU kernel cannot be compiled with {compiler!r}: {error}") from error
    logger.info("kvcmas: compiled the CPU kernel in %.1f s: %s", time.perf_counter() - started, target)
    return target


def load(path: Path) -> ctypes.CDLL:
    """The library at ``path``. Raises BuildError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the CPU kernel cannot be loaded: {error}") from error


@functools.cache
def _processor() -> str:
    """What tells processors apart whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
