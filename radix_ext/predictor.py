"""What an estimator predicts for a stretch: asked with the source's KV where it has to see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from kvcmas_sgl.radix_ext.decision import Base
from kvcmas_sgl.radix_ext.estimators import Estimator, SpanBase
from kvcmas_sgl.radix_ext.estimators.pool import WeightedDelta
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.sources import Agent, Source, edge
from kvcmas_sgl.triton_kernels import Delta
from torch import Tensor


class Predictor:
    """Asks ``estimators`` by name.

    Parameters
    ----------
    slots_of
        Slots (int64 [n]) of a source's content, or None when it has left the tree.
    """

    def __init__(
        self, estimators: Mapping[str, Estimator], view: KVView, slots_of: Callable[[Source], Tensor | None]
    ) -> None:
        self.estimators = estimators
        self._view = view
        self._slots_of = slots_of

    def delta(self, name: str, base: Base, consumer: Agent, length: int) -> Delta | None:
        """The delta of ``length`` tokens from ``base`` on, in a form that the correction op takes.

        None: the edge is unknown, the source has gone, or the estimator declines this content.
        """
        estimator, on = self.estimators[name], edge(base.agent, consumer)
        if not estimator.whole_spans:
            found = estimator.predict(on)
        elif not estimator.spans_seen(on) or (slots := self._slots_of(base.source)) is None:
            return None
        else:
            # From the content's start on, whatever of it is corrected: anchors are compared index by index.
            t = torch.arange(base.offset + length, device=slots.device)
            rows = self._view.sample(slots, base.source.start, t)
            found = estimator.predict(on, SpanBase(*self._view.canonical(rows, slice(0, self._view.layers))))
        return found.factored() if isinstance(found, WeightedDelta) else found

    def knows(self, name: str, base: Base, consumer: Agent) -> bool:
        """Whether an estimator has learned the edge and the source is there."""
        known = self.estimators[name].spans_seen(edge(base.agent, consumer)) > 0
        return known and self._slots_of(base.source) is not None
