"""One reading of the demo: a role's prompt, how its tokens got their KV, the times and the divergences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Reasons that say that a span's KV was there already (`kvcmas_sgl.radix_ext.decision.Reason`).
_REUSED = frozenset({"reused", "exact", "own_corrected"})


@dataclass(frozen=True)
class SpanRow:
    """One shared text in a prompt. Counts in tokens; `predicted_kl` in nats, None where nothing was predicted."""

    tokens: int
    exact: int
    corrected: int
    reason: str
    source: str | None
    estimator: str | None
    predicted_kl: float | None

    @property
    def reused(self) -> bool:
        return self.reason in _REUSED


@dataclass(frozen=True)
class Row:
    """One role reading one document and the answers before it.

    Counts in tokens, times in seconds, KL in nats per measured answer token; None is not measured. `shared_tokens`
    counts the tokens of all marked spans; `spans` is what our server says of each. `answer` is stock SGLang's, along
    which both are compared; `passed_on` is what the next agents read.
    """

    document: str
    role: str
    prompt_tokens: int
    shared_tokens: int
    marked_spans: int
    spans: tuple[SpanRow, ...]
    answer_tokens: int
    exact: int
    corrected: int
    computed: int
    ttft_stock_s: float
    ttft_ours_s: float
    ttft_ratio: float
    kl: float | None
    agreement: float | None
    kl_rotate_only: float | None
    kl_noise: float | None
    answer: str
    passed_on: str

    @property
    def reasons(self) -> str:
        """What happened to each span, in prompt order, as in `reused,reused,edge_unknown`."""
        return ",".join(span.reason for span in self.spans)

    @property
    def reused_spans(self) -> int:
        return sum(span.reused for span in self.spans)

    @property
    def mostly_reused(self) -> bool:
        """Whether more than half of the shared tokens were reused."""
        return 2 * self.corrected > self.shared_tokens


def span_rows(report: Mapping[str, Any]) -> tuple[SpanRow, ...]:
    """What our server's report says of each span that was marked in a prompt, in order."""
    return tuple(
        SpanRow(
            tokens=entry["stop"] - entry["start"],
            exact=entry["exact_tokens"],
            corrected=entry["corrected_tokens"],
            reason=entry["reason"],
            source=entry["source"],
            estimator=entry["estimator"],
            predicted_kl=entry["predicted_kl"],
        )
        for entry in report["spans"]
    )


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "reasons": row.reasons} for row in rows]
