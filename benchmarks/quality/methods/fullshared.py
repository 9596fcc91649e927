"""FullShared: the last reader's KV, moved. The control that every correction has to beat."""

from __future__ import annotations

from benchmarks.quality.methods.deltas import DeltaMethod


class FullShared(DeltaMethod):
    """Rotate only, from the last reader or, as a control, from a context-free encoding."""

    def __init__(self, name: str, context_free: bool = False) -> None:
        super().__init__(name, None, context_free=context_free, rotate_unknown=True)

    def delta(self, *_: object) -> None:
        return None
