"""The line that explains a request."""

from __future__ import annotations

import math

from kvcmas_sgl.radix_ext.decision import Reason, Report, SpanReport
from kvcmas_sgl.radix_ext.decision_log import decision_line


def test_every_span_says_what_it_got_and_why() -> None:
    reused = SpanReport(25, 2073, 0, 2032, Reason.REUSED, "planner", "affine", 0.0461, 0.00212)
    refused = SpanReport(2090, 2190, 0, 0, Reason.OVER_BUDGET, "planner", "affine+heavy", 0.3, 0.0512)
    unknown = SpanReport(2200, 2300, 0, 0, Reason.EDGE_UNKNOWN)
    report = Report("critic", 2310, False, 25, 2032, 0.00212, [reused, refused, unknown])
    assert decision_line("id-7", report, 0.02) == (
        'request "id-7" role="critic" reason=reused exact=25 corrected=2032 computed=253 kl=0.00212 budget=0.02; '
        'span=[25,2073) reason=reused source="planner" estimator=affine error=0.0461 kl=0.00212 '
        "exact=0 corrected=2032 computed=16; "
        'span=[2090,2190) reason=over_budget source="planner" estimator=affine+heavy error=0.3 kl=0.0512 '
        "exact=0 corrected=0 computed=100; "
        "span=[2200,2300) reason=edge_unknown source=- estimator=- error=- kl=- exact=0 corrected=0 computed=100"
    )


def test_no_name_of_a_client_breaks_the_line() -> None:
    line = decision_line("a\nkvcmas: request b", Report('x" reason=exact\r\x1b[2J\u2028', 3), math.inf)
    assert line.isprintable() and line.isascii() and "budget=inf" in line
    assert line.count(" reason=") == 2 and '"x\\" reason=exact' in line
