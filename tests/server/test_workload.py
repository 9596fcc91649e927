"""`benchmarks/workload` against a real server: both APIs, with hints and without; what the driver reads of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.serving.session import peak_slots, server_state
from benchmarks.workload.arrivals import ClosedLoop
from benchmarks.workload.build import Builder, Shape
from benchmarks.workload.endpoint import Endpoint
from benchmarks.workload.runner import Run, run_workflows
from benchmarks.workload.workflow import Workflow
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.prepare_model import default_model

_SHAPE = Shape(graph="full", agents=3, document_tokens=(80, 80), system_tokens=80, private_tokens=8, answer_tokens=4,
               last_tokens=3, system_spread=(1.0, 1.2))  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(str(default_model()))


def _send(server: ServerProcess, prompts: PromptMaker, workflows: tuple[Workflow, ...], **options: Any) -> Run:
    async def work() -> Run:
        async with Endpoint(server.url, **options) as endpoint:
            return await run_workflows(endpoint, workflows, ClosedLoop(1), prompts.tokens)

    return asyncio.run(work())


@pytest.mark.parametrize("api", ["sglang", "openai"])
@pytest.mark.parametrize("hints", [False, True])
def test_both_apis_take_the_same_prompts_and_tell_how_their_tokens_got_their_kv(
    server: ServerProcess, prompts: PromptMaker, api: str, hints: bool
):
    workflows = Builder(prompts, _SHAPE, f"{api}-{hints}").workflows(1)
    run = _send(server, prompts, workflows, api=api, hints=hints)
    assert [hop.reply.error for hop in run.hops] == [None] * 3
    assert [hop.reply.output_tokens for hop in run.hops] == [4, 4, 3]
    assert [len(hop.reply.reasons) for hop in run.hops] == ([1, 2, 3] if hints else [0, 0, 0])
    for hop in run.hops:
        reply = hop.reply
        if reply.exact is not None:
            assert reply.exact + reply.corrected + reply.computed == hop.prompt_tokens
    again = _send(server, prompts, workflows, api="sglang", hints=False)
    assert again.prompts == run.prompts
    if not hints and api == "sglang":
        # All but the last token of a prompt that was sent before is a hit.
        assert [hop.reply.computed for hop in again.hops] == [1, 1, 1]


def test_an_answer_that_is_passed_on_is_the_one_that_was_generated(server: ServerProcess, prompts: PromptMaker):
    (workflow,) = Builder(prompts, _SHAPE, "generated").workflows(1)
    open_end = workflow.with_answers({hop.name: () for hop in workflow.hops})
    run = _send(server, prompts, (open_end,))
    first, second, _ = run.hops
    (done,) = run.done
    assert done.hops[0].answer == first.reply.tokens and len(first.reply.tokens) == 4
    start, stop = second.spans[1]
    assert done.hops[1].prompt(done.scripted()).ids[start:stop] == first.reply.tokens


def test_a_refused_hint_is_the_hops_error(server: ServerProcess, prompts: PromptMaker):
    workflows = Builder(prompts, _SHAPE, "refused").workflows(1)
    run = _send(server, prompts, workflows, hints=True, overrides={"policy": "always"})
    assert "HTTP 400" in str(run.hops[0].reply.error) and "policy" in str(run.hops[0].reply.error)
    assert run.workflow_s == {}


def test_the_driver_reads_slots_and_state(server: ServerProcess):
    async def work() -> tuple[Any, Any]:
        async with Endpoint(server.url) as endpoint:
            poll = asyncio.create_task(peak_slots(endpoint))
            await asyncio.sleep(1.0)
            poll.cancel()
            return await poll, await server_state(endpoint)

    slots, state = asyncio.run(work())
    assert slots is not None and 0 <= slots <= 12_000
    assert {"learning", "match_seconds", "audit_seconds", "state_bytes", "edges", "fallbacks"} <= set(state)
