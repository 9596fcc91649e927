"""Every test process runs SGLang's CPU engine; it must be chosen before sglang is imported."""

from __future__ import annotations

from kvcmas_sgl.cpu.environment import has_gpu, prepare_environment

if not has_gpu():
    prepare_environment()
