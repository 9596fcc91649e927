"""The state machine for long: ``python -m tests.tree --steps 100000``."""

from __future__ import annotations

# Before SGLang is imported: where it runs is chosen there.
import tests.conftest  # noqa: F401
from tests.tree.machine import main

main()
