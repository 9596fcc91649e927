"""How much is measured: the full run and the quick one differ in these numbers only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PHASES = ("plain", "load_client", "saturation", "poisson70", "sweeps", "scaling", "second_model", "peers")
"""In the order in which they run. Poisson arrivals and sweeps need the limit that `saturation` finds."""

AGENTS, SPREAD_DOCUMENT = 4, 1024
POOL_TOKENS = 64_000
SLO_FACTOR = 1.5
"""A request is good if its first token comes within so many times what stock's median idle hop takes."""


@dataclass(frozen=True)
class Plan:
    """Counts and lengths of one profile.

    Attributes
    ----------
    document_tokens, answer_tokens, last_tokens, private_tokens
        The main shape: four agents of which each reads the document and all answers so far.
    learned
        Workflows that ours learns from before anything is timed.
    levels, saturation_workflows, saturation_repeats
        Closed loops: workflows under way, how many a level and repeat.
    poisson_workflows, poisson_repeats
        Arrivals at 70 % of stock's saturation.
    extra_workflows
        How many of the first repeat's workflows the other ways to correct get.
    plain_rounds
        Prompts of each kind that every arm of the overhead comparison gets.
    load_prompts, load_repeats
        SGLang's own load client; no repeat leaves it out.
    scale_documents, scale_roles
        Largest counts of the comparison that has to stay flat.
    sweep_workflows, rate_workflows, rates, spans, agents, unseen
        Sweeps; empty ones are left out.
    budget_s
        Seconds after which nothing that can be left out is begun.
    reserve_s
        Seconds of these that sweeps leave to what follows them.
    """

    document_tokens: int = 2048
    answer_tokens: int = 16
    last_tokens: int = 16
    private_tokens: int = 32
    learned: int = 9
    levels: tuple[int, ...] = (2, 4)
    saturation_workflows: int = 4
    saturation_repeats: int = 2
    poisson_workflows: int = 6
    poisson_repeats: int = 2
    extra_workflows: int = 4
    plain_rounds: int = 100
    load_prompts: int = 24
    load_repeats: int = 2
    scale_documents: int = 1000
    scale_roles: int = 32
    sweep_workflows: int = 2
    rate_workflows: int = 4
    rates: tuple[float, ...] = (0.95, 0.45)
    spans: tuple[int, ...] = (256, 1024, 4096)
    agents: tuple[int, ...] = (2, 8)
    unseen: tuple[float, ...] = (0.0, 0.5, 1.0)
    extras: bool = True
    second_document: int = 768
    budget_s: float = 5000.0
    reserve_s: float = 950.0
    seed: int = 0
    phases: tuple[str, ...] = PHASES


FULL = Plan()
QUICK = Plan(
    levels=(4,),
    saturation_repeats=1,
    poisson_workflows=4,
    poisson_repeats=1,
    plain_rounds=12,
    load_prompts=8,
    load_repeats=0,
    scale_documents=60,
    scale_roles=8,
    rates=(),
    spans=(),
    agents=(),
    unseen=(),
    second_document=0,
    budget_s=820.0,
    reserve_s=0.0,
)


@dataclass
class Clock:
    """Seconds since the start, and what was left out because they were over."""

    budget_s: float
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def keeping(self, seconds: float) -> Clock:
        """The same clock for what has to leave so many seconds to others."""
        return Clock(self.budget_s - seconds, self.left_out, self.started)

    def has(self, seconds: float, what: str) -> bool:
        """Whether `what` still fits, if it takes `seconds`; otherwise it is noted as left out."""
        if self.seconds + seconds <= self.budget_s:
            return True
        self.left_out.append(f"{what}: {self.seconds:.0f} s of {self.budget_s:.0f} s were over")
        return False
