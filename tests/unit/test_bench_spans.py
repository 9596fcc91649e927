"""The pure parts of `benchmarks/spans.py`: text, prompts, rounds, and figures from raw results."""

from __future__ import annotations

import pytest

from benchmarks.span_figures import (
    OURS,
    STAGED,
    STOCK,
    RequestResult,
    Round,
    Single,
    count_tokens,
    draw,
    summarize,
    table,
)
from benchmarks.span_workload import Agent, Shape, make_agents, plan_round, plan_single, stages
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.prepare_model import default_model


def _supply(seed: int = 0) -> TextSupply:
    text = " ".join(f"Sentence {number} has {'very ' * (number % 7)}few words." for number in range(40))
    return TextSupply([text], lambda part: [ord(letter) for letter in part], seed)


def _agents(count: int) -> list[Agent]:
    return [Agent(f"a{n}", (1000 + n,), ((2000 + n,), (3000 + n,), (4000 + n,)), (5000 + n,)) for n in range(count)]


def test_spans_have_the_asked_length_and_are_fresh_each_time_but_the_same_for_a_seed():
    supply, again, other = _supply(), _supply(), _supply(1)
    spans = [supply.span(200) for _ in range(50)]
    assert {len(span) for span in spans} == {200}
    assert len(set(spans)) == 50
    assert spans == [again.span(200) for _ in range(50)]
    assert spans[0] != other.span(200)


def test_a_prompt_is_head_span_glue_span_tail_with_the_spans_marked():
    content = [(1, 2), (3, 4, 5), (6,), (7, 8)]
    prompt = _agents(1)[0].prompt(content)
    assert prompt.ids == (1000, 1, 2, 2000, 3, 4, 5, 3000, 6, 4000, 7, 8, 5000)
    assert [prompt.ids[start:stop] for start, stop in prompt.spans] == content


def test_one_span_instead_of_several_leaves_the_agents_own_text_as_long():
    agent = _agents(1)[0]
    prompt = agent.prompt([(1, 2, 3)])
    assert prompt.ids == (1000, 1, 2, 3, 2000, 3000, 4000, 5000)
    assert prompt.spans == ((1, 4),)


def test_stages_end_where_each_later_span_starts():
    prompt = _agents(1)[0].prompt([(1, 2), (3, 4, 5), (6,)])
    first, second = stages(prompt)
    assert first == TokenPrompt((1000, 1, 2, 2000), ((1, 3),))
    assert second == TokenPrompt((1000, 1, 2, 2000, 3, 4, 5, 3000), ((1, 3), (4, 7)))


def _shared(prompt: TokenPrompt) -> tuple[tuple[int, ...], ...]:
    return tuple(prompt.ids[start:stop] for start, stop in prompt.spans)


def test_a_rounds_requests_read_what_exactly_one_other_agent_holds():
    agents, supply = _agents(4), _supply()
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for number in range(5):
        plan = plan_round(agents, supply, Shape(spans=4, span_tokens=50, concurrency=8), number)
        assert len(plan.requests) == 8
        holders = {_shared(held.prompt): held.agent.name for held in plan.held}
        assert len(holders) == len(plan.held) == 3
        assert len({(request.agent.name, _shared(request.prompt)) for request in plan.requests}) == 8
        for request in plan.requests:
            assert holders[_shared(request.prompt)] != request.agent.name
        assert not seen & set(holders)
        seen |= set(holders)


def test_single_readings_have_equally_many_shared_and_own_tokens():
    plan = plan_single(_agents(3), _supply(), Shape(spans=4, span_tokens=50, concurrency=8), 2)
    assert len(plan.several.prompt.spans) == 4 and len(plan.one.prompt.spans) == 1
    assert plan.several.prompt.shared_tokens == plan.one.prompt.shared_tokens == 200
    assert len(plan.several.prompt.ids) == len(plan.one.prompt.ids)
    for held, asked in zip(plan.held, (plan.several, plan.one), strict=True):
        assert _shared(held.prompt) == _shared(asked.prompt) and held.agent != asked.agent


def test_agents_of_the_real_template_differ_before_the_first_span_and_say_little_between_two():
    prompts = PromptMaker(str(default_model()))
    agents = make_agents(prompts, 6, 4)
    assert len({agent.head for agent in agents}) == len({agent.name for agent in agents}) == 6
    for agent in agents:
        assert len(agent.glue) == 3
        assert all(12 <= len(glue) <= 32 for glue in agent.glue)
        assert agent.name in prompts.text(agent.head) and "assistant" in prompts.text(agent.tail)


def _request(seconds: float, ttft: float = 1.0, staging: float = 0.0, corrected: int = 0) -> RequestResult:
    reasons = ("reused", "edge_unknown") if corrected else ()
    return RequestResult("a", seconds, ttft, staging, 10, corrected, 100 - corrected, reasons)


def test_figures_are_medians_of_ratios_inside_a_round(tmp_path):
    rounds = []
    for number, (stock, ours, staged) in enumerate([(8.0, 2.0, 4.0), (80.0, 10.0, 40.0), (9.0, 1.0, 3.0)]):
        rounds += [
            Round(STOCK, number, stock, (_request(stock),) * 8),
            Round(OURS, number, ours, (_request(ours, corrected=60),) * 8),
            Round(STAGED, number, staged, (_request(staged, staging=staged / 4, corrected=60),) * 8),
        ]
    singles = [
        Single(0, _request(4, ttft=3.0), _request(1.0, ttft=0.5), _request(0.8)),
        Single(1, _request(4, ttft=4.0), _request(1.0, ttft=0.5), _request(0.9)),
    ]
    summary = summarize(rounds, singles)
    assert summary["throughput_ratio"] == pytest.approx(8.0)
    assert summary["throughput_ratio_staged"] == pytest.approx(2.0)
    assert summary["requests_per_s"] == pytest.approx({STOCK: 8 / 9, OURS: 4.0, STAGED: 2.0})
    assert summary["staging_share"] == pytest.approx(0.25)
    assert summary["single_pass_share"] == pytest.approx(0.15)
    assert summary["ttft_ratio_last_agent"] == pytest.approx(7.0)
    assert summary["tokens"][OURS] == {"exact": 240, "corrected": 1440, "computed": 960}
    assert summary["spans"][STAGED] == {"reused": 24, "edge_unknown": 24}
    assert "8.00x" in table(summary) and "25.0%" in table(summary)
    draw(rounds, summary, tmp_path / "spans.png")
    assert (tmp_path / "spans.png").stat().st_size > 1000


def _report(exact: int, corrected: int, computed: int) -> dict[str, int]:
    return {"exact_tokens": exact, "corrected_tokens": corrected, "computed_tokens": computed}


def test_tokens_of_a_staged_prompt_are_counted_once():
    # Head 30, spans of 100, glue 10 twice, tail 20: the first span is corrected, the second computed, the third
    # corrected. What the passes did before is a hit of each later one.
    passes = [_report(30, 100, 10), _report(30, 110, 110), _report(30, 320, 20)]
    counts = count_tokens(passes, 370)
    assert (counts.exact, counts.corrected, counts.computed) == (30, 200, 140)
    single = count_tokens([_report(30, 300, 40)], 370)
    assert (single.exact, single.corrected, single.computed) == (30, 300, 40)


def test_nothing_measured_gives_no_figures_instead_of_wrong_ones():
    summary = summarize([], [])
    assert summary["throughput_ratio"] is None and summary["staging_share"] is None
    assert summary["single_pass_share"] is None and "-" in table(summary)
