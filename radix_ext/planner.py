"""Chooses the source and the correction for a span, or says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvcmas_sgl.radix_ext.decision import Plan, Reason, Refusal
from kvcmas_sgl.radix_ext.delta_store import Rows, join
from kvcmas_sgl.radix_ext.estimators import Estimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.sources import Agent, Source, edge
from kvcmas_sgl.triton_kernels import Delta

IDENTICAL = "identical"
OWN = "own"
NONE = "none"


class Planner:
    """Weighs every resident source of a span by the accumulated error that a correction from it would have.

    Parameters
    ----------
    own_rows
        The own delta that a source's nodes hold for a consumer: its rows in order, or () when incomplete.
    """

    def __init__(
        self,
        estimators: Mapping[str, Estimator],
        default: str,
        gate: Gate,
        own_rows: Callable[[Source, str], Sequence[Rows]],
    ) -> None:
        self.estimators = estimators
        self.default = default
        self.gate = gate
        self.own_rows = own_rows

    def plan(self, agent: Agent, sources: Sequence[Source], *, estimator: str | None, always: bool) -> Plan | Refusal:
        """The best plan over ``sources`` (newest first, not the agent's own), or the reason for none.

        ``estimator`` restricts the choice to one; ``always`` skips the quality budget.
        """
        if not sources:
            return Refusal(Reason.NO_SOURCE)
        candidates = [c for source in sources for c in self._candidates(agent, source, estimator)]
        if not candidates:
            if not always:
                return Refusal(Reason.EDGE_UNKNOWN)
            source = sources[0]
            return Plan(source, NONE, source.error, self.gate.kl(source.error))
        best = min(candidates, key=lambda plan: plan.error)
        if always or best.exact or self.gate.admits(best.kl):
            return best
        return Refusal(Reason.OVER_BUDGET, best.error, best.kl)

    def delta(self, plan: Plan, agent: Agent) -> Delta | None:
        """The delta that a plan applies; None when its base is only moved.

        Raises LookupError when the delta has been dropped since the plan was made.
        """
        if plan.estimator in (IDENTICAL, NONE):
            return None
        if plan.estimator == OWN:
            delta: Delta | None = join(self.own_rows(plan.source, agent.key))
        else:
            delta = self.estimators[plan.estimator].predict(edge(plan.source.agent, agent))
        if delta is None:
            raise LookupError(f"the {plan.estimator} delta from {plan.source.agent.role!r} is gone")
        return delta

    def _candidates(self, agent: Agent, source: Source, estimator: str | None) -> list[Plan]:
        if estimator is None and source.agent.prefix == agent.prefix:
            # The same tokens stand before the span: its KV is the same, whatever the role is called.
            return [Plan(source, IDENTICAL, source.error, self.gate.kl(source.error), exact=source.exact)]
        errors: dict[str, float] = {}
        if estimator is None and (rows := self.own_rows(source, agent.key)):
            errors[OWN] = rows[0].factors.error
        name = estimator or self.default
        predicted = self.gate.predict(edge(source.agent, agent), name, source.length)
        if predicted is not None:
            errors[name] = predicted
        plans = []
        for name, error in errors.items():
            total = source.error + error
            plans.append(Plan(source, name, total, self.gate.kl(total)))
        return plans
