"""What a process tree needs before `import sglang` so that SGLang serves without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

STAND_IN = Path(__file__).resolve().parent / "stand_in"
"""Folder that holds our `sgl_kernel`; it must come before site-packages on the import path."""

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"

_DEFAULT_FLAGS: tuple[tuple[str, str | None], ...] = (
    ("--device", "cpu"),
    ("--attention-backend", "kvcmas_cpu"),
    ("--dtype", "bfloat16"),
    # An idle scheduler otherwise spins on one of the few cores that serve the model.
    ("--sleep-on-idle", None),
    # SGLang sizes the pool as a share of the memory: tens of GiB on a machine that others use too.
    ("--max-total-tokens", "40000"),
)


def has_gpu() -> bool:
    """True if torch could use a CUDA or ROCm device here, `CUDA_VISIBLE_DEVICES` considered.

    torch asks NVML / AMD SMI first and creates no context, so children of this process can still use the GPU.
    """
    import torch

    return torch.cuda.device_count() > 0


def cpu_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` (name -> value) in which a Python process can import and run SGLang on the CPU.

    Sets `SGLANG_USE_CPU_ENGINE=1`, puts our stand-in for `sgl_kernel` first on `PYTHONPATH`, and defaults
    `HF_HUB_OFFLINE` to 1 (models are local folders; set it to 0 to let SGLang ask the hub) and NCCL to none.
    Idempotent.
    """
    changed = dict(env)
    changed[CPU_ENGINE] = "1"
    changed.setdefault("HF_HUB_OFFLINE", "1")
    # With several ranks SGLang starts NCCL wherever its library can be loaded, and goes without where it cannot.
    changed.setdefault("SGLANG_NCCL_SO_PATH", "there-is-no-gpu")
    rest = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(STAND_IN)]
    changed["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *rest])
    return changed


def prepare_environment() -> None:
    """Make this process and every child it starts ready for SGLang on the CPU; idempotent.

    Raises:
        RuntimeError: SGLang was imported before without the CPU engine: its modules have already chosen a device.
    """
    if os.environ.get(CPU_ENGINE) != "1" and "sglang.srt.utils.common" in sys.modules:
        raise RuntimeError(
            f"prepare_environment() must run before sglang is imported, or {CPU_ENGINE}=1 must be set "
            "when Python starts"
        )
    os.environ.update(cpu_environment(os.environ))
    stand_in = str(STAND_IN)
    if sys.path[:1] != [stand_in]:
        sys.path[:] = [stand_in, *(entry for entry in sys.path if entry != stand_in)]


def default_cpu_args(given: tuple[str, ...] | list[str] = ()) -> list[str]:
    """SGLang's command-line flags for serving on the CPU that `given` does not set itself.

    Args:
        given: the user's own flags, as on a command line (`--flag value` or `--flag=value`).

    Returns:
        Flags and values to append to `given`.
    """
    chosen = {argument.split("=", 1)[0] for argument in given if argument.startswith("--")}
    flags: list[str] = []
    for flag, value in _DEFAULT_FLAGS:
        if flag not in chosen:
            flags += [flag] if value is None else [flag, value]
    return flags
