"""What learned state depends on: on another model, pool or definition its numbers would mean something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcmas_sgl.radix_ext import heavy
from kvcmas_sgl.radix_ext.estimators import LastingEstimator, make_estimator
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.sources import digest
from kvcmas_sgl.radix_ext.state_file import StateError
from kvcmas_sgl.triton_kernels import RotaryTable


def fingerprint(
    weights: str, view: KVView, estimators: Mapping[str, LastingEstimator], *, rank: int, head: int
) -> dict[str, Any]:
    """Names and values, JSON-compatible, that have to be equal for saved state to be used.

    weights: digest of the weights as they are loaded. rank: of predicted deltas. head: tokens of every span that are
    computed; the gate's pairs say nothing of what lies before them.
    """
    return {
        "weights": weights,
        "dtype": str(view.dtype).removeprefix("torch."),
        "rope": rope_digest(view.table),
        "layers": view.layers,
        "kv_heads": view.kv_heads,
        "head_dim": view.head_dim,
        "rank": rank,
        "head": head,
        "heavy": heavy.DEFINITION,
        "estimators": {name: estimator.definition for name, estimator in estimators.items()},
    }


def rope_digest(table: RotaryTable) -> str:
    """Name of a rotation: every row of the table, and which channels it pairs."""
    layout = f"{table.rotary_dim} {table.is_neox}".encode()
    return digest(layout, table.cos.cpu().numpy().tobytes(), table.sin.cpu().numpy().tobytes())


def estimators_of(saved: Mapping[str, Any]) -> dict[str, LastingEstimator]:
    """Fresh estimators that read the state of a server with this fingerprint.

    Raises `StateError` when this version has no such estimators.
    """
    try:
        sizes = {name: saved[name] for name in ("layers", "kv_heads", "head_dim", "rank")}
        made = {name: make_estimator(name, **sizes) for name in saved["estimators"]}
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the fingerprint cannot be read: {error!r}.") from error
    for name, estimator in made.items():
        if estimator.definition != saved["estimators"][name]:
            raise StateError(
                f"the state is of estimator {saved['estimators'][name]!r}, but this version has "
                f"{estimator.definition!r}."
            )
    return made
