"""Every test process runs SGLang on the CPU where there is no GPU; that is chosen before sglang is imported."""

from __future__ import annotations

import os
import pkgutil
from importlib.util import find_spec
from pathlib import Path

from kvcmas_sgl.cpu.environment import has_gpu, prepare_environment

if not has_gpu():
    prepare_environment()


# SmolLM2's, and that of the model which reads pictures.
_USED = ("llama", "llava")


def _skip_unused_models() -> None:
    """Importing all of SGLang's models takes longer than loading ours."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    names = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(name for name in names if name not in _USED))


_skip_unused_models()
