"""Compile kernels for GPUs that are not here, from the very arguments of a launch.

A fake driver names a target; ``kernel.warmup`` then specialises and compiles as the real launch would, and launches
nothing. What comes back is read from the binary: registers and spills by the vendor's own tool.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory that a block may ask for, bytes (CUDA C++ programming guide, table of compute capabilities; CDNA3 ISA).
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
MATRIX = {
    "sm_80": r"mma\.sync\.aligned\S*",
    "sm_90": r"(?:wgmma\.mma_async|mma\.sync\.aligned)\S*",
    "sm_100": r"(?:tcgen05\.mma|mma\.sync\.aligned)\S*",
    "gfx942": r"v_mfma_\S+",
}
WIDE_LOAD = {"cuda": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", "hip": r"(?:global|buffer)_load_dwordx4"}
WIDE_STORE = {"cuda": r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", "hip": r"(?:global|buffer)_store_dwordx4"}
_TOOL = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Loader:
    """The part of a driver that loads a binary: tells what the binary needs, as a real one does."""

    def __init__(self, shared: int) -> None:
        self.shared = shared

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, spills = usage(kernel)
        return object(), 0, registers, spills, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""


class FakeDriver:
    """A driver that knows its target and no device."""

    def __init__(self, target: GPUTarget, shared: int = 0) -> None:
        self.target = target
        self.utils = Loader(shared)

    def launcher_cls(self, source: object, metadata: object) -> None:
        """Nothing is ever launched."""

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "int"


@dataclass(frozen=True)
class Binary:
    """What a compiled kernel needs and holds. ``spills``: bytes of stack (cuda) or registers (hip)."""

    target: str
    registers: int
    spills: int
    shared: int
    text: str
    signature: dict[str, str]

    def count(self, pattern: dict[str, str]) -> int:
        key = self.target if self.target in pattern else TARGETS[self.target].backend
        return len(re.findall(pattern[key], self.text))


def build(kernel: Any, made: tuple[Any, ...], options: dict[str, int], target: str) -> Binary:
    """``kernel`` compiled for ``target`` from (grid, arguments, constants) of a launch."""
    grid, arguments, constants = made
    driver.set_active(FakeDriver(TARGETS[target]))
    kernel.device_caches.clear()
    compiled = kernel.warmup(*arguments, grid=grid, **constants, **options)
    if "cubin" in compiled.asm:
        registers, spills = usage(compiled.asm["cubin"])
        text = compiled.asm["ptx"]
    else:
        text = compiled.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{x}:\s+(\d+)", text)[0]) for x in ("count", "spill_count"))
    return Binary(target, registers, spills, compiled.metadata.shared, text, dict(compiled.src.signature))


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack) of a binary; kernels here have no stack unless they spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])
