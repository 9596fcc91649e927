"""`benchmarks/workload` over HTTP, against small aiohttp servers that stream as SGLang's two APIs do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from benchmarks.workload.arrivals import ClosedLoop, OpenLoop
from benchmarks.workload.endpoint import Endpoint
from benchmarks.workload.runner import Run, run_workflows
from benchmarks.workload.workflow import Hop, Part, Workflow
from kvcmas_sgl.demo.prompts import TokenPrompt

Seen = list[dict[str, Any]]


def _chain(name: str, answer: tuple[int, ...] = (7, 7), arrival_s: float = 0.0) -> Workflow:
    document = Part("document", (1, 2, 3, 4))
    first = Hop("a", "planner", (Part("own", (9,)), document), 3, answer)
    second = Hop("b", "critic", (Part("own", (8,)), document, Part("answer", hop="a")), 2)
    return Workflow(name, (first, second), arrival_s)


async def _serve(app: web.Application, use: Callable[[str], Any]) -> Any:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return await use(f"http://{host}:{port}")
    finally:
        await runner.cleanup()


async def _stream(request: web.Request, events: list[Any], gap_s: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await asyncio.sleep(gap_s)
        # Cut in two: an event may arrive in pieces.
        data = f"data: {json.dumps(event)}\n\n".encode()
        await response.write(data[:9])
        await response.write(data[9:])
    await response.write(b"data: [DONE]\n\n")
    return response


def _sglang(seen: Seen, gap_s: float = 0.0, fail_for: int | None = None) -> web.Application:
    """Generates 100, 101, ... token by token; says that 1 prompt token was a hit, and 3 corrected where a hint came."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append({**body, "at": time.perf_counter()})
        if fail_for is not None and body["input_ids"][0] == fail_for:
            return web.Response(status=400, text="role is 5, but must be text.")
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"completion_tokens": count, "cached_tokens": 1}
        if "kv_hints" in body:
            spans = [{"reason": "reused"}, {"reason": "over_budget"}]
            meta["kvcmas"] = {"exact_tokens": 1, "corrected_tokens": 3, "spans": spans, "predicted_kl": 0.5}
        events = [{"output_ids": list(range(100, 101 + n)), "text": "", "meta_info": meta} for n in range(count)]
        return await _stream(request, events, gap_s)

    app = web.Application()
    app.router.add_post("/generate", generate)
    return app


def _openai(seen: Seen) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4, "corrected_tokens": 3}}
        events = [{"choices": [{"text": "x"}]}, {"choices": [{"text": "y"}]}, {"choices": [], "usage": usage}]
        return await _stream(request, events, 0.0)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return app


def _run(app: web.Application, workflows: list[Workflow], arrivals: Any = None, **options: Any) -> Run:
    async def use(url: str) -> Run:
        async with Endpoint(url, **options) as endpoint:
            return await run_workflows(
                endpoint, workflows, arrivals or OpenLoop(), lambda text: [ord(letter) for letter in text]
            )

    return asyncio.run(_serve(app, use))


def test_a_hop_is_sent_when_its_input_is_done_and_reads_the_fixed_answer():
    seen: Seen = []
    run = _run(_sglang(seen, gap_s=0.02), [_chain("w")])
    assert [body["input_ids"] for body in seen] == [[9, 1, 2, 3, 4], [8, 1, 2, 3, 4, 7, 7]]
    # Three tokens at 20 ms each come before the second request.
    assert seen[1]["at"] - seen[0]["at"] >= 0.06
    assert "kv_hints" not in seen[0]
    first, second = run.hops
    assert first.reply.tokens == (100, 101, 102) and second.reply.output_tokens == 2
    assert 0.02 <= first.reply.ttft_s < first.reply.seconds and first.reply.seconds >= 0.06
    assert (first.reply.exact, first.reply.corrected, first.reply.computed) == (1, 0, 4)
    assert (first.reuses, second.reuses, second.reusable) == (False, True, (True, False))
    assert run.workflow_s["w"] >= first.reply.seconds + second.reply.seconds


def test_an_answer_that_is_not_fixed_is_passed_on_as_it_was_generated():
    seen: Seen = []
    run = _run(_sglang(seen), [_chain("w", answer=())])
    assert seen[1]["input_ids"] == [8, 1, 2, 3, 4, 100, 101, 102]
    # What was passed on is kept: the same prompts can be sent to another server.
    seen.clear()
    again = _run(_sglang(seen), list(run.done))
    assert again.prompts == run.prompts
    assert _run(_sglang([]), [_chain("w")]).prompts != run.prompts


def test_hints_say_who_asks_and_what_is_shared():
    seen: Seen = []
    run = _run(_sglang(seen), [_chain("w")], hints=True, overrides={"policy": "always"})
    (action,) = seen[1]["kv_hints"]["actions"]
    assert action["payload"] | {"role": "critic", "spans": [[1, 5], [5, 7]], "policy": "always"} == action["payload"]
    reply = run.hops[1].reply
    assert (reply.exact, reply.corrected, reply.computed) == (1, 3, 3)
    assert reply.reasons == ("reused", "over_budget")


def test_an_openai_endpoint_gets_the_same_prompts_and_marks():
    seen: Seen = []
    run = _run(_openai(seen), [_chain("w", answer=())], api="openai", hints=True, model="m")
    assert [body["prompt"] for body in seen] == [[9, 1, 2, 3, 4], [8, 1, 2, 3, 4, ord("x"), ord("y")]]
    assert seen[0]["kvcmas"] == {"role": "planner", "spans": [[1, 5]]}
    assert (seen[0]["model"], seen[0]["max_tokens"], seen[0]["stream"]) == ("m", 3, True)
    reply = run.hops[0].reply
    assert (reply.text, reply.output_tokens, reply.exact, reply.corrected, reply.computed) == ("xy", 2, 1, 3, 1)


def test_open_loop_keeps_to_the_arrival_times_and_closed_loop_to_its_number():
    seen: Seen = []
    flows = [_chain("first"), _chain("second", arrival_s=0.15)]
    run = _run(_sglang(seen), flows)
    assert [hop.workflow for hop in run.hops] == ["first", "first", "second", "second"]
    assert run.hops[2].ready_s >= 0.15 > run.hops[1].ready_s
    seen.clear()
    _run(_sglang(seen, gap_s=0.005), [_chain("first"), _chain("second")], ClosedLoop(1))
    assert [body["input_ids"][0] for body in seen] == [9, 8, 9, 8]


def test_a_refused_request_fails_its_readers_and_no_other_workflow():
    seen: Seen = []
    run = _run(_sglang(seen, fail_for=9), [_chain("w")])
    assert run.hops[0].reply.error == "HTTP 400: role is 5, but must be text."
    assert run.hops[1].reply.error == "its input a failed"
    assert len(seen) == 1 and run.workflow_s == {}


def test_a_server_that_is_not_there_is_an_error_of_the_request():
    async def use() -> Any:
        async with Endpoint("http://127.0.0.1:9") as endpoint:
            return await endpoint.send("r", TokenPrompt((1,), ()), 1)

    reply = asyncio.run(use())
    assert reply.error is not None and "Connect" in reply.error
