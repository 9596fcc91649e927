"""`kvcmas_sgl.launch_server` with faults: ``SOAK_FAULT_RATE=0.01 python -m benchmarks.soak.server --model-path M``.

SGLang starts its scheduler as a fresh process, which imports the program's main module, this one, before anything
else. The variable means nothing to a server that was started any other way.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from benchmarks.soak.faults import Injector, install
from kvcmas_sgl.seams import cache_factory

RATE = "SOAK_FAULT_RATE"

_create = cache_factory.create


def create(ctx: Any) -> Any:
    """Our cache, as SGLang's registry asks for it, with faults in it."""
    cache = _create(ctx)
    install(cache, Injector(float(os.environ.get(RATE, "0.01"))))
    totals = cache.state

    def state() -> dict[str, Any]:
        # What glibc has free is nobody's: only what is held then counts as resident when the soak looks.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return totals()

    cache.state = state
    return cache


cache_factory.create = create

if __name__ == "__main__":
    from kvcmas_sgl.launch_server import main

    main(sys.argv[1:])
