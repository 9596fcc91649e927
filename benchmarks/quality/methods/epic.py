"""EPIC / LegoLink (arXiv 2410.15332), re-implemented from a description: context-free chunks, their first k tokens
computed again so that no chunk's beginning acts as an attention sink."""

from __future__ import annotations

from benchmarks.quality.methods.deltas import DeltaMethod


class Epic(DeltaMethod):
    """``first``: tokens at the start of every span that are computed, 32 at most in the paper."""

    def __init__(self, name: str, first: int) -> None:
        super().__init__(
            name,
            None,
            context_free=True,
            head=first,
            rotate_unknown=True,
            family="epic",
            parameter=first,
            note="context-free base, rotated",
        )

    def delta(self, *_: object) -> None:
        return None
