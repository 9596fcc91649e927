"""Kernels run in Triton's CPU interpreter here. It is chosen when Triton is imported: `make kernels` asks for it."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import exact_interpreter

    exact_interpreter.install()
else:
    collect_ignore_glob.append("test_*.py")
