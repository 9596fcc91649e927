"""`benchmarks/workload` without a server: graphs, text, workflows, arrivals, traces, figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.workload.arrivals import poisson
from benchmarks.workload.build import Builder, Shape, trajectory
from benchmarks.workload.endpoint import Reply
from benchmarks.workload.figures import Slo, percentiles, run_figures
from benchmarks.workload.graphs import GRAPHS, Graph, HopShape, make_graph
from benchmarks.workload.runner import HopResult, Run
from benchmarks.workload.text import Library, TextSupply
from benchmarks.workload.trace import TraceError, load_trace, save_trace
from benchmarks.workload.workflow import Hop, Part, Workflow, prompt_digest
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.prepare_model import default_model


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(str(default_model()))


def _supply(seed: int = 0) -> TextSupply:
    text = " ".join(f"Sentence {number} has {'very ' * (number % 7)}few words." for number in range(40))
    return TextSupply([text], lambda part: [ord(letter) for letter in part], seed)


def _reads(name: str, agents: int) -> dict[str, tuple[str, ...]]:
    return {hop.name: hop.reads for hop in make_graph(name, agents).hops}


def test_graphs_read_what_their_names_say():
    assert _reads("chain", 3) == {"hop-0": (), "hop-1": ("hop-0",), "hop-2": ("hop-1",)}
    assert _reads("full", 3) == {"hop-0": (), "hop-1": ("hop-0",), "hop-2": ("hop-0", "hop-1")}
    assert _reads("star", 3) == {"worker-0": (), "worker-1": (), "hub": ("worker-0", "worker-1")}
    debate = _reads("debate", 4)
    assert debate["round-1-0"] == ("round-0-1", "round-0-2")
    assert debate["judge"] == ("round-1-0", "round-1-1", "round-1-2")


def test_every_part_of_a_map_reduce_has_several_readers_of_different_roles():
    graph = make_graph("map-reduce", 4)
    readers: dict[int, list[int]] = {}
    for hop in graph.hops[:-1]:
        for number in hop.documents:
            readers.setdefault(number, []).append(hop.role)
    assert {part: len(set(roles)) for part, roles in readers.items()} == {0: 2, 1: 2}
    assert set(graph.hops[-1].reads) == {hop.name for hop in graph.hops[:-1]}


def test_a_graph_refuses_a_hop_that_reads_a_later_one():
    with pytest.raises(ValueError, match="read earlier hops"):
        Graph("odd", (HopShape("a", 0, (0,), ("b",)), HopShape("b", 1, (0,))))


@pytest.mark.parametrize("name, agents", [("ring", 3), ("star", 2), ("chain", 0)])
def test_unknown_graphs_and_too_few_agents_are_refused(name: str, agents: int):
    with pytest.raises(ValueError, match=r"(graph|agents) is"):
        make_graph(name, agents)


def test_documents_have_lengths_in_the_range_and_only_fresh_ones_without_a_pool():
    library = Library(_supply(), (50, 90), (), 1.0, 0.0, 0)
    drawn = [library.draw() for _ in range(60)]
    assert {50 <= len(document) <= 90 for document in drawn} == {True}
    assert len({len(document) for document in drawn}) > 10
    assert len(set(drawn)) == 60


def test_a_pool_is_drawn_from_by_zipf_and_the_unseen_share_is_fresh():
    pool = [(rank,) for rank in range(4)]
    seen = Library(_supply(), (9, 9), pool, 1.0, 0.0, 1)
    counts = Counter(seen.draw() for _ in range(12_000))
    # Weights 1, 1/2, 1/3, 1/4 of their sum 25/12: expected 5,760, 2,880, 1,920 and 1,440; four standard deviations.
    for rank, expected in enumerate((5760, 2880, 1920, 1440)):
        assert abs(counts[(rank,)] - expected) < 4 * (expected * (1 - expected / 12_000)) ** 0.5
    half = Library(_supply(), (9, 9), pool, 0.0, 0.5, 1)
    fresh = sum(half.draw() not in pool for _ in range(4000))
    assert abs(fresh - 2000) < 4 * 1000**0.5


@pytest.mark.parametrize("graph", tuple(GRAPHS))
def test_prompts_hold_what_the_graph_reads_at_the_marks(prompts: PromptMaker, graph: str):
    shape = Shape(graph=graph, agents=4, document_tokens=(70, 90), answer_tokens=5, private_tokens=7)
    builder = Builder(prompts, shape, 1)
    (workflow,) = builder.workflows(1)
    answers = workflow.scripted()
    for hop, drawn in zip(workflow.hops, builder.graph.hops, strict=True):
        prompt = hop.prompt(answers)
        shared = [prompt.ids[start:stop] for start, stop in prompt.spans]
        documents = shared[: len(drawn.documents)]
        assert {70 <= len(document) <= 90 for document in documents} <= {True}
        assert shared[len(drawn.documents) :] == [answers[name] for name in drawn.reads]
        assert {len(answers[name]) for name in drawn.reads} <= {5}
        assert prompt.ids[: prompt.spans[0][0]][:1] == builder.agents[drawn.role].head[:1]


def test_agents_have_distinct_heads_of_the_asked_lengths(prompts: PromptMaker):
    builder = Builder(prompts, Shape(agents=5, system_tokens=200, system_spread=(0.5, 1.5)), 1)
    heads = [agent.head for agent in builder.agents]
    assert [len(head) for head in heads] == [100, 167, 233, 300, 100]
    texts = [prompts.text(head) for head in heads]
    assert len({text.split(".")[0] for text in texts}) == 5
    # The rules are inside the system message, which the user's follows.
    assert all(text.rstrip().endswith("user") for text in texts)


def test_a_head_that_is_too_short_is_refused(prompts: PromptMaker):
    with pytest.raises(ValueError, match="system_tokens is 12"):
        Builder(prompts, Shape(system_tokens=12, system_spread=(1.0, 1.0)))


def test_the_same_seed_gives_the_same_workflows_and_another_series_other_text(prompts: PromptMaker):
    shape = Shape(document_tokens=(80, 80), pool=2, unseen=0.5)
    one, again = Builder(prompts, shape, 4).workflows(3, "a"), Builder(prompts, shape, 4).workflows(3, "a")
    other = Builder(prompts, shape, 4).workflows(3, "b")
    assert one == again
    assert _prompts(one) != _prompts(other)
    assert Builder(prompts, shape, 5).workflows(3, "a") != one


def test_private_text_is_each_agents_own(prompts: PromptMaker):
    (workflow,) = Builder(prompts, Shape(document_tokens=(80, 80), private_tokens=40), 2).workflows(1)
    private = [hop.parts[2].ids for hop in workflow.hops]
    assert {len(ids) for ids in private} == {40}
    assert len(set(private)) == 4


def test_the_published_trajectory_has_its_lengths(prompts: PromptMaker):
    (workflow,) = Builder(prompts, trajectory(2048), 0).workflows(1)
    lengths = [len(hop.prompt(workflow.scripted()).ids) for hop in workflow.hops]
    tail = lengths[0] - (1024 + 2048 + 512)
    assert 0 < tail < 16
    assert lengths == [1024 + 2048 + 512 + i * (16 + 128) + tail for i in range(4)]


def test_spans_count_as_read_before_only_where_a_hop_that_must_be_done_has_read_them():
    document = Part("document", (1, 2, 3))
    first = Hop("a", "r", (Part("own", (9,)), document), 1, (7,))
    second = Hop("b", "s", (Part("own", (9,)), document, Part("answer", hop="a")), 1, (8,))
    third = Hop("c", "t", (document, Part("answer", hop="a"), Part("answer", hop="b")), 1)
    beside = Hop("d", "u", (document,), 1)
    workflow = Workflow("w", (first, second, third, beside))
    assert workflow.span_sources() == {"a": (False,), "b": (True, False), "c": (True, True, False), "d": (False,)}


def test_poisson_gaps_are_exponential_with_the_asked_mean():
    workflows = [Workflow(str(number), ()) for number in range(4000)]
    times = [workflow.arrival_s for workflow in poisson(workflows, 2.0, 7)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    # Mean 1/2, and as an exponential's a standard deviation of 1/2; P(gap > 1) = exp(-2).
    assert abs(mean - 0.5) < 4 * 0.5 / 4000**0.5
    assert abs(sum(gap > 1 for gap in gaps) / 4000 - 0.1353) < 4 * (0.1353 * 0.8647 / 4000) ** 0.5
    with pytest.raises(ValueError, match="rate is 0"):
        poisson(workflows, 0, 7)


def test_a_saved_trace_is_read_back_in_the_order_of_arrival(prompts: PromptMaker, tmp_path: Path):
    workflows = poisson(Builder(prompts, Shape(document_tokens=(600, 600)), 1).workflows(3), 2.0, 1)
    rounded = [Workflow(w.name, w.hops, round(w.arrival_s * 1000) / 1000) for w in workflows]
    save_trace(tmp_path / "trace.jsonl", tuple(reversed(workflows)))
    assert list(load_trace(tmp_path / "trace.jsonl")) == rounded


def test_hash_ids_name_blocks_that_an_exact_prefix_cache_shares(tmp_path: Path):
    text = tuple(range(1100))
    other = (5000, *text[1:])
    hops = [Hop("a", "r", (Part("own", text),), 1), Hop("b", "r", (Part("own", (*text[:1024], 1, 2)),), 1)]
    hops.append(Hop("c", "r", (Part("own", other),), 1))
    save_trace(tmp_path / "t.jsonl", [Workflow("w", tuple(hops))])
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    first, second, third = (line["hash_ids"] for line in lines if "hash_ids" in line)
    assert len(first) == len(second) == len(third) == 3
    assert first[:2] == second[:2] and first[2] != second[2]
    # The second block holds the same tokens after other ones.
    assert not set(first) & set(third)


def test_a_mooncake_trace_gives_requests_that_share_text_as_its_hash_ids_do(tmp_path: Path):
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [4, 5, 6]},
        {"timestamp": 2500, "input_length": 700, "output_length": 7, "hash_ids": [4, 9]},
        {"timestamp": 3000, "input_length": 9000, "output_length": 7, "hash_ids": list(range(20, 38))},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, long = load_trace(path, lambda name, tokens: [name] * tokens, max_tokens=1500)
    assert first.hops[0].prompt({}).ids == (4,) * 512 + (5,) * 512 + (6,) * 6
    assert second.hops[0].prompt({}).ids == (4,) * 512 + (9,) * 188
    assert (second.arrival_s, second.hops[0].output_tokens) == (2.5, 7)
    assert long.hops[0].prompt({}).ids == (20,) * 512 + (21,) * 512 + (37,) * 476


@pytest.mark.parametrize(
    "line, message",
    [
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"parts": [], "workflow": "w"}', "has no 'answer'"),
        ('{"timestamp": 0}', "needs a text"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, line: str, message: str):
    path = tmp_path / "broken.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_percentiles_of_known_values():
    found = percentiles([float(value) for value in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "mean": 50.0}
    assert percentiles([]) is None


def _hop(name: str, ttft: float, seconds: float, error: str | None = None, reuses: bool = False) -> HopResult:
    reply = Reply(ttft, seconds, 5, exact=10, corrected=20 if reuses else 0, reasons=("reused",), error=error)
    return HopResult("w", name, "r", 0.0, 100, ((10, 90),), (reuses,), 10, reply)


def test_goodput_counts_requests_inside_both_limits_and_failures_count_as_none():
    hops = (
        _hop("good", 1.0, 1.4, reuses=True),
        _hop("late", 3.0, 3.4),
        _hop("slow", 1.0, 5.0),
        _hop("failed", 0.1, 0.1, error="HTTP 500"),
    )
    figures = run_figures(Run(hops, {"w": 4.0}, 10.0, "", ()), Slo(2.0, 0.2))
    assert figures["goodput_per_s"] == pytest.approx(0.1)
    assert figures["slo_attainment"] == pytest.approx(0.25)
    assert (figures["failed"], figures["requests_per_s"]) == (1, pytest.approx(0.3))
    assert figures["ttft_reuse_s"]["p50"] == 1.0 and figures["ttft_first_s"]["mean"] == 2.0
    assert figures["tpot_s"]["p50"] == pytest.approx(0.1)
    assert figures["tokens"] == {
        "prompt": 300,
        "exact": 30,
        "corrected": 20,
        "computed": 250,
        "reuse_share": 1 - 250 / 300,
    }


def test_digests_differ_where_tokens_move_between_prompts():
    assert prompt_digest([(1, 2), (3,)]) != prompt_digest([(1,), (2, 3)])
    assert prompt_digest([(1, 2), (3,)]) == prompt_digest([[1, 2], [3]])


def _prompts(workflows: tuple[Workflow, ...]) -> list[tuple[int, ...]]:
    return [hop.prompt(workflow.scripted()).ids for workflow in workflows for hop in workflow.hops]
