"""Sends workflows: each hop as soon as its workflow has come and its inputs are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.workload.arrivals import Arrivals, ClosedLoop
from benchmarks.workload.endpoint import Endpoint, Reply
from benchmarks.workload.workflow import Hop, Ids, Workflow, prompt_digest


@dataclass(frozen=True)
class HopResult:
    """One request that was sent, or could not be.

    `ready_s`: when its inputs were done, seconds from the run's start; the reply's times count from there.
    `reusable`: for each span, whether a hop that had to be done before has read it.
    """

    workflow: str
    hop: str
    role: str
    ready_s: float
    prompt_tokens: int
    spans: tuple[tuple[int, int], ...]
    reusable: tuple[bool, ...]
    head_tokens: int
    reply: Reply

    @property
    def reuses(self) -> bool:
        """Whether most of what is shared in its prompt was read before in the same workflow."""
        lengths = [stop - start for start, stop in self.spans]
        known = sum(length for length, seen in zip(lengths, self.reusable, strict=True) if seen)
        return 2 * known > sum(lengths) > 0


@dataclass(frozen=True)
class Run:
    """All results of one run. Times in seconds from its start.

    `prompts` is a digest of all prompts in the order of workflows and hops: the same in all runs that sent the same.
    `done` are the workflows with the answers that were passed on.
    """

    hops: tuple[HopResult, ...]
    workflow_s: dict[str, float]
    seconds: float
    prompts: str
    done: tuple[Workflow, ...]

    def as_json(self) -> dict[str, Any]:
        """All but `done`, without the generated tokens."""
        hops = [{**asdict(hop), "reuses": hop.reuses} for hop in self.hops]
        for hop in hops:
            del hop["reply"]["tokens"], hop["reply"]["text"]
        return {"hops": hops, "workflow_s": self.workflow_s, "seconds": self.seconds, "prompts": self.prompts}


async def run_workflows(
    endpoint: Endpoint,
    workflows: Sequence[Workflow],
    arrivals: Arrivals,
    encode: Callable[[str], Sequence[int]] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Run:
    """Send all workflows and wait for their ends.

    Args:
        endpoint: entered.
        arrivals: when workflows start.
        encode: text to token ids, for answers that an OpenAI endpoint generates and a later hop reads.
        progress: called after each request.
    """
    start = time.perf_counter()
    gate = asyncio.Semaphore(arrivals.concurrency) if isinstance(arrivals, ClosedLoop) else None

    async def one(workflow: Workflow) -> _Done:
        if gate is None:
            await asyncio.sleep(max(0.0, start + workflow.arrival_s - time.perf_counter()))
            return await _run_one(endpoint, workflow, start, encode, progress)
        async with gate:
            return await _run_one(endpoint, workflow, start, encode, progress)

    finished = await asyncio.gather(*(one(workflow) for workflow in workflows))
    seconds = time.perf_counter() - start
    prompts = [ids for done in finished for ids in done.prompts]
    return Run(
        hops=tuple(hop for done in finished for hop in done.hops),
        workflow_s={done.workflow.name: done.seconds for done in finished if done.complete},
        seconds=seconds,
        prompts=prompt_digest(prompts),
        done=tuple(done.workflow for done in finished),
    )


@dataclass(frozen=True)
class _Done:
    workflow: Workflow
    hops: tuple[HopResult, ...]
    prompts: tuple[Ids, ...]
    seconds: float
    complete: bool


async def _run_one(
    endpoint: Endpoint,
    workflow: Workflow,
    start: float,
    encode: Callable[[str], Sequence[int]] | None,
    progress: Callable[[], object],
) -> _Done:
    begin = time.perf_counter()
    answers = workflow.scripted()
    reusable = workflow.span_sources()
    done = {hop.name: asyncio.Event() for hop in workflow.hops}
    results: dict[str, HopResult] = {}
    prompts: dict[str, Ids] = {}

    async def send(hop: Hop) -> None:
        for name in hop.after:
            await done[name].wait()
        missing = [name for name in hop.after if name not in answers or results[name].reply.error]
        if missing:
            reply, ids, spans = Reply(0.0, 0.0, 0, error=f"its input {missing[0]} failed"), (), ()
            ready = time.perf_counter()
        else:
            prompt = hop.prompt(answers)
            ids, spans = prompt.ids, prompt.spans
            ready = time.perf_counter()
            reply = await endpoint.send(hop.role, prompt, hop.output_tokens)
            if not hop.answer and not reply.error:
                generated = reply.tokens or tuple(encode(reply.text) if encode is not None else ())
                if generated:
                    answers[hop.name] = generated
        prompts[hop.name] = ids
        results[hop.name] = HopResult(
            workflow=workflow.name,
            hop=hop.name,
            role=hop.role,
            ready_s=ready - start,
            prompt_tokens=len(ids),
            spans=spans,
            reusable=reusable[hop.name] if spans else (),
            head_tokens=spans[0][0] if spans else len(ids),
            reply=reply,
        )
        done[hop.name].set()
        progress()

    await asyncio.gather(*(send(hop) for hop in workflow.hops))
    ordered = tuple(results[hop.name] for hop in workflow.hops)
    return _Done(
        workflow=workflow.with_answers(answers),
        hops=ordered,
        prompts=tuple(prompts[hop.name] for hop in workflow.hops),
        seconds=time.perf_counter() - begin,
        complete=all(hop.reply.error is None for hop in ordered),
    )
