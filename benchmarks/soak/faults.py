"""Faults inside a running server of ours: exceptions and NaN at the places that `radix_ext` has to survive.

Nothing of this is in the package: `benchmarks.soak.server` wraps a cache right after it was built, in its own process.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvcmas_sgl.triton_kernels import AffineDelta, LowRankDelta
from torch import Tensor


class Fault(Exception):
    """What an injected failure raises."""


class Injector:
    """Makes functions fail now and then.

    Args:
        rate: share of the calls that fail, from 0 to 1.
        seed: the same calls in the same order fail alike.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        self._rate = rate
        self._random = random.Random(seed)
        self.injected: Counter[str] = Counter()
        """Faults by place."""

    def due(self, place: str) -> bool:
        """Whether a fault is to happen here and now; counts it."""
        due = self._random.random() < self._rate
        self.injected[place] += due
        return due

    def breaks(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which now and then raises `Fault` instead."""

        def broken(*args: Any, **kwargs: Any) -> Any:
            if self.due(place):
                raise Fault(f"injected at {place}")
            return function(*args, **kwargs)

        return broken

    def poisons(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose delta now and then holds NaN (in a copy: what is stored stays as it is)."""

        def poisoned(*args: Any, **kwargs: Any) -> Any:
            delta = function(*args, **kwargs)
            name = {LowRankDelta: "left_v", AffineDelta: "bias"}.get(type(delta))
            return replace(delta, **{name: _with_nan(getattr(delta, name))}) if name and self.due(place) else delta

        return poisoned


def _with_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt[1:] = float("nan")
    return spoilt


def install(cache: Any, injector: Injector) -> None:
    """Wrap what one cache (`DeltaRadixCache`) calls in a match, a correction, a checkpoint and a lesson.

    Its totals get ``faults``: how many were injected, by place.
    """
    from kvcmas_sgl.seams.forward import RowForward

    estimator = cache.estimators[cache.config.estimator]
    view = type(cache.view)
    places: dict[str, tuple[Any, str]] = {
        "search": (cache.sources, "find"),
        "plan": (cache.planner, "plan"),
        "expect": (cache.gate, "expect"),
        "own_rows": (cache.planner, "own_rows"),
        "correct": (view, "correct"),
        "slots": (cache._placer, "_slots_of"),
        "replace_corrected": (cache._publisher, "replace_corrected"),
        "mark_placed": (cache._publisher, "mark_placed"),
        "publish_prompt": (cache._publisher, "publish_prompt"),
        "publish_answer": (cache._publisher, "publish_answer"),
        "predict": (estimator, "predict"),
        "observe": (estimator, "observe"),
        "solve": (estimator, "finish"),
        "record": (cache.gate, "record"),
        "sample": (view, "sample"),
        "left_factors": (view, "left_factors"),
        "attach": (cache.lessons._harvester, "attach"),
        "budget": (cache.learner, "_keep_budget"),
        "audited_pass": (RowForward, "__call__"),
    }
    for place, (owner, name) in places.items():
        setattr(owner, name, injector.breaks(place, getattr(owner, name)))
    cache.planner.delta = injector.poisons("nan", cache.planner.delta)
    cache.statistics.listeners.append(_Listener(injector))
    totals = cache.state
    cache.state = lambda: {**totals(), "faults": dict(injector.injected)}


class _Listener:
    """Listens to the statistics, and fails at it now and then."""

    def __init__(self, injector: Injector) -> None:
        self._listen = injector.breaks("listener", lambda *args: None)

    def on_report(self, report: Any) -> None:
        self._listen()

    def on_held_out(self, error: str, kl: float | None, audit: str | None) -> None:
        self._listen()

    def on_check(self, kl: float, over_budget: bool) -> None:
        self._listen()

    def on_change(self) -> None:
        self._listen()
