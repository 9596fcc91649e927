"""Seam: how learned state outlives the process. It is read once the cache is built, and saved while and after it runs.

SGLang ends a scheduler in three ways. A server's SIGTERM becomes a ``ShutdownReq``, on which the event loop returns;
`around_run_event_loop` then saves. A service manager may send the signal to every process of the service: the loop
is told to return then, and the process dies by the signal afterwards, as it does without us. ``Engine.shutdown`` kills
its schedulers at once; `around_engine_shutdown` sends the ``ShutdownReq`` first.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvcmas_sgl.config import RADIX_CACHE_BACKEND

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache

logger = logging.getLogger(__name__)

EXIT_S = 15.0
"""How long a scheduler gets to save and leave: what SGLang itself grants after a ``ShutdownReq``."""


def restore(cache: DeltaRadixCache, model: Any) -> None:
    """Give the cache a keeper, if the operator wants one, and let it load what an earlier process has learned."""
    if cache.config.state_dir is None:
        return
    import torch

    from kvcmas_sgl.radix_ext.fingerprint import fingerprint
    from kvcmas_sgl.radix_ext.state_keeper import StateKeeper

    config, device = cache.config, cache.view.k_buffers[0].device
    made = fingerprint(weights_digest(model), cache.view, cache.estimators, rank=config.rank, head=config.head)
    cache.keeper = StateKeeper(
        Path(cache.config.state_dir),
        made,
        cache.learner,
        cache.statistics,
        device=device,
        synchronize=(lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize,
    )
    cache.keeper.restore()


def weights_digest(model: Any) -> str:
    """Name of a model's parameters as they are loaded: their names, types, shapes and every byte."""
    from sglang.srt.managers.mm_utils import tensor_hash

    from kvcmas_sgl.radix_ext.sources import digest

    return digest(
        *(
            f"{name} {parameter.dtype} {list(parameter.shape)} {tensor_hash(parameter):016x}".encode()
            for name, parameter in sorted(model.named_parameters())
        )
    )


def around_run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:
    """Around ``Scheduler.run_event_loop``, which returns when the scheduler is to leave."""
    keeper = getattr(scheduler.tree_cache, "keeper", None)
    if keeper is None:
        original(scheduler)
        return
    signals: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            _leave_on(number, scheduler, signals)
    original(scheduler)
    keeper.close()
    if signals:
        os.kill(os.getpid(), signals[0])


def _leave_on(number: int, scheduler: Any, signals: list[int]) -> None:
    before = signal.getsignal(number)

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        scheduler.gracefully_exit = True
        # Another one does what it did without us.
        signal.signal(number, before)

    signal.signal(number, leave)


def before_weight_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Before what changes weights in ``SchedulerWeightUpdaterManager``: what was learned is of the old ones."""
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache

    cache = updater.scheduler.tree_cache
    if isinstance(cache, DeltaRadixCache):
        cache.forget()
        if cache.keeper is not None:
            cache.keeper.stop()


def around_engine_shutdown(original: Callable[[Any], None], engine: Any) -> None:
    """Around ``Engine.shutdown``: let the scheduler save before it is killed."""
    ours = getattr(engine.server_args, "radix_cache_backend", None) == RADIX_CACHE_BACKEND
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if ours and watchdog is not None:
        try:
            _let_leave(engine.tokenizer_manager, watchdog)
        except Exception:
            logger.exception("kvcmas: the scheduler could not be asked to save its state.")
    original(engine)


def _let_leave(manager: Any, watchdog: Any) -> None:
    from sglang.srt.managers.io_struct import ShutdownReq

    watchdog.stop()
    schedulers = [
        process
        for process, name in zip(watchdog._processes, watchdog._names, strict=True)
        if name.startswith("scheduler") and process.is_alive()
    ]
    if not schedulers:
        return
    manager._dispatch_to_scheduler(ShutdownReq())
    deadline = time.monotonic() + EXIT_S
    for process in schedulers:
        process.join(max(0.0, deadline - time.monotonic()))
