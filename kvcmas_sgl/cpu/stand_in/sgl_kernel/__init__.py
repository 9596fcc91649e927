"""Stand-in for the package `sgl_kernel` on a machine without a GPU.

SGLang's CPU path imports names from `sgl_kernel` at module level, and the wheel of that name loads libcuda on
import. None of these functions is called for the Llama-type models that we serve on the CPU, so importing any
name has to work and calling it has to say which one was needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this machine runs without a GPU and the CPU stand-in has no "
            "such kernel; use a Llama-type model in bfloat16 or a machine with a GPU"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
