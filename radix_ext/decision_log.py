"""The log line that explains what one request got, and why."""

from __future__ import annotations

import json

from kvcmas_sgl.radix_ext.decision import Report, SpanReport


def decision_line(rid: str, report: Report, budget: float) -> str:
    """One line of ``key=value`` pairs: the request, then each of its spans after a semicolon.

    ``kl`` is the predicted KL of all corrected KV in the prompt, ``budget`` what it is held against (nats). A span's
    ``error`` and ``kl`` are predictions too, of what was placed or of what was refused. Names that clients chose are
    in JSON, so that no line break of theirs gets into the log.
    """
    head = (
        f"request {_name(rid)} role={_name(report.role)} reason={report.reason} exact={report.exact_tokens} "
        f"corrected={report.corrected_tokens} computed={report.computed_tokens} kl={_number(report.predicted_kl)} "
        f"budget={budget:.4g}"
    )
    return "; ".join([head, *(_span(span) for span in report.spans)])


def _span(span: SpanReport) -> str:
    return (
        f"span=[{span.start},{span.stop}) reason={span.reason} source={_name(span.source)} "
        f"estimator={span.estimator or '-'} error={_number(span.predicted_error)} kl={_number(span.predicted_kl)} "
        f"exact={span.exact_tokens} corrected={span.corrected_tokens} computed={span.computed_tokens}"
    )


def _name(name: str | None) -> str:
    return "-" if name is None else json.dumps(name)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
