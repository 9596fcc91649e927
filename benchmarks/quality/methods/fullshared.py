"""FullShared: the last reader's KV, moved. The control that every correction has to beat."""

from __future__ import annotations

from benchmarks.quality.methods.deltas import DeltaMethod


class FullShared(DeltaMethod):
    """Rotate only, from the last reader or, as a control, from a context-free encoding.

    ``head``: first tokens of every span that are computed all the same; what a head gives without any correction.
    """

    def __init__(self, name: str, context_free: bool = False, head: int = 0) -> None:
        super().__init__(
            name,
            None,
            context_free=context_free,
            head=head,
            rotate_unknown=True,
            family="fullshared, context-free" if context_free else "fullshared",
            parameter=head,
            note=f"control: rotate only with {head} exact head tokens" if head else "",
        )

    def delta(self, *_: object) -> None:
        return None
