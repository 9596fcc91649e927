"""First principles of every method, on a tiny random Llama: limits in which it must be exact, and its accounting."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvcmas_sgl.radix_ext.estimators import AffineEstimator, AnchorsEstimator, MeanEstimator, NoneEstimator

from benchmarks.quality.agents import AGENTS, Agent
from benchmarks.quality.chains import Chain, ChainRunner, Held, Reading
from benchmarks.quality.claims import coverage
from benchmarks.quality.measure import DenseScores, compare, measure_chain
from benchmarks.quality.methods import make_methods
from benchmarks.quality.methods.base import Method, Used, glue_mask, reusable
from benchmarks.quality.methods.cacheblend import CacheBlend
from benchmarks.quality.methods.deltas import DeltaMethod, OwnDelta
from benchmarks.quality.methods.epic import Epic
from benchmarks.quality.methods.fullshared import FullShared
from benchmarks.quality.methods.layers import DroidSpeak, LayerProfile, RelayCaching, last_readings, rotated
from benchmarks.quality.methods.published import Published
from benchmarks.quality.probes import make_probe
from benchmarks.quality.prompts import PromptMaker, Task
from benchmarks.quality.reference import KV, ReferenceModel
from benchmarks.quality.summary import cells, mean_kl, summarize

Readings = list[tuple[Reading, dict[str, Held]]]

LAYERS, HEADS, DIM = 6, 2, 8
SIZE = (LAYERS, HEADS, DIM)


class ToyPrompts(PromptMaker):
    """Words as tokens, and a frame in place of the chat template."""

    def __init__(self) -> None:
        self.bos, self.special = 0, [0]

    def tokens(self, text: str) -> list[int]:
        return [1 + zlib.crc32(word.encode()) % 96 for word in text.split()]

    def _frame(self, agent: Agent) -> tuple[str, str]:
        return f"system {agent.system[:200]} user ", " end assistant"


@pytest.fixture(scope="module", autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        initializer_range=0.25,
    )
    path: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return ReferenceModel(path)


@pytest.fixture(scope="module")
def runner(model: ReferenceModel) -> ChainRunner:
    return ChainRunner(model, ToyPrompts(), answer_tokens=6)


@pytest.fixture(scope="module")
def chain(runner: ChainRunner) -> Chain:
    documents, _ = make_probe(3)
    return runner.run(Task("toy", "probe", documents, ()))


@pytest.fixture(scope="module")
def readings(chain: Chain) -> Readings:
    return list(last_readings(chain))


def started(method: Method, model: ReferenceModel, runner: ChainRunner) -> Method:
    method.start(model, runner)
    return method


def body(reading: Reading) -> KV:
    return reading.dense.cut(0, reading.prompt.body)


def assert_same(used: Used, want: KV) -> None:
    torch.testing.assert_close(used.kv.k, want.k, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(used.kv.v, want.v, rtol=1e-3, atol=1e-4)


def span_tokens(reading: Reading) -> int:
    return sum(len(span) for span in reading.prompt.spans)


def glue_tokens(reading: Reading) -> int:
    return int(glue_mask(reading.prompt).sum())


def test_a_chain_is_what_one_pass_over_each_prompt_gives(model: ReferenceModel, chain: Chain) -> None:
    assert [reading.agent for reading in chain.readings] == [agent.name for agent in AGENTS]
    for number, reading in enumerate(chain.readings):
        prompt = reading.prompt
        assert [span.place for span in prompt.spans] == ["first", "later", *["answer"] * number]
        tokens = torch.cat([prompt.tokens, reading.answer])
        logits, kv = model.extend(tokens, last=len(reading.after_spans) + 1)
        assert_same(Used(kv, 0, 0), reading.dense)
        torch.testing.assert_close(logits[:-1], reading.logits, rtol=1e-3, atol=1e-3)
        greedy = logits[-len(reading.answer) - 1 : -1].clone()
        greedy[:, 0] = -torch.inf
        assert torch.equal(greedy.argmax(-1), reading.answer)


def test_the_source_of_a_span_is_its_last_reader_or_its_writer(chain: Chain) -> None:
    sources = {(reading.agent, span.content): held for reading, span, held in chain.pairs()}
    assert sources["analyst", "toy/document-0"].agent == "solver@first"
    assert sources["decider", "toy/document-1"].agent == "critic@later"
    assert sources["analyst", "toy/solver"].agent == "solver@written"
    assert sources["critic", "toy/solver"].agent == "analyst@answer"
    critic = chain.readings[2]
    span = critic.prompt.spans[1]
    held = sources["decider", "toy/document-1"]
    torch.testing.assert_close(held.kv.k, critic.dense.k[:, span.start : span.stop], rtol=0, atol=0)
    assert {held.agent for _, _, held in chain.pairs(context_free=True)} == {"alone"}


@pytest.mark.parametrize("own", [True, False])
def test_identical_context_needs_no_correction(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, own: bool
) -> None:
    reading = chain.readings[2]
    sources = {span.content: reading.held(span) for span in reading.prompt.spans}
    method: Method = OwnDelta("own", 2) if own else FullShared("rotate")
    used = started(method, model, runner).read(chain, reading, sources)
    assert_same(used, body(reading))
    assert used.computed == LAYERS * glue_tokens(reading)


def exact_methods() -> list[Method]:
    """Each method at the setting at which nothing is approximated."""
    return [
        CacheBlend("cacheblend", 1.0),
        OwnDelta("own", None),
        OwnDelta("own, context-free", None, context_free=True),
        DeltaMethod("head", NoneEstimator(*SIZE), head=10_000),
        DeltaMethod("tail", NoneEstimator(*SIZE), tail=10_000),
        DeltaMethod("unknown edges", AffineEstimator(*SIZE, 8)),
        Epic("epic", 10_000),
    ]


@pytest.mark.parametrize("number", range(len(exact_methods())))
def test_the_exact_limit_of_a_method_is_dense(
    model: ReferenceModel,
    runner: ChainRunner,
    chain: Chain,
    readings: Readings,
    number: int,
) -> None:
    method = started(exact_methods()[number], model, runner)
    for reading, sources in readings:
        used = method.read(chain, reading, chain.alone if method.context_free else sources)
        assert_same(used, body(reading))
        if not isinstance(method, OwnDelta):
            assert (used.computed, used.reused) == (reusable(model, reading.prompt), 0)


def test_droidspeak_with_all_layers_is_dense(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    method = started(DroidSpeak("droidspeak", 1.0, LayerProfile()), model, runner)
    method.learn(chain)
    method.finish_learning()
    for reading, sources in readings:
        used = method.read(chain, reading, sources)
        assert_same(used, body(reading))
        assert used.computed == reusable(model, reading.prompt)


def test_anchors_of_the_very_span_give_the_dense_run_glue_included(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    """Two equal anchors weigh one half each, so KVComm's sums must be the true deltas of spans and of glue."""
    kvcomm = Published("kvcomm", AnchorsEstimator(*SIZE, rank=None), tau=1.01, context_free=True, correct_glue=True)
    kvcmas = Published("kvcmas", AnchorsEstimator(*SIZE, rank=None), tau=1.01, context_free=False, correct_glue=False)
    for method in (kvcomm, kvcmas):
        started(method, model, runner)
        method.learn(chain)
        method.learn(chain)
    # Later readers read several answers over one edge: their pools hold other answers, too.
    reading, sources = readings[0]
    used = kvcomm.read(chain, reading, chain.alone)
    assert_same(used, body(reading))
    assert (used.computed, used.reused) == (0, reusable(model, reading.prompt))
    rotated_glue = kvcmas.read(chain, reading, sources)
    mask = glue_mask(reading.prompt)
    spans = ~mask
    spans[: reading.prompt.prefix] = False
    torch.testing.assert_close(rotated_glue.kv.v[:, spans], body(reading).v[:, spans], rtol=1e-3, atol=1e-4)
    assert float((rotated_glue.kv.v[1:, mask] - body(reading).v[1:, mask]).abs().max()) > 0.01


def test_a_closed_gate_computes_everything(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    method = Published("kvcmas", AnchorsEstimator(*SIZE), tau=-1.0, context_free=False, correct_glue=False)
    started(method, model, runner)
    method.learn(chain)
    method.learn(chain)
    reading, sources = readings[-1]
    used = method.read(chain, reading, sources)
    assert_same(used, body(reading))
    assert used.reused == 0
    assert len(method.entropies) == len(reading.prompt.spans)


def test_none_is_fullshared(model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings) -> None:
    none = started(DeltaMethod("none", NoneEstimator(*SIZE)), model, runner)
    full = started(FullShared("fullshared"), model, runner)
    none.learn(chain)
    for reading, sources in readings:
        a, b = none.read(chain, reading, sources), full.read(chain, reading, sources)
        torch.testing.assert_close(a.kv.k, b.kv.k, rtol=0, atol=0)
        torch.testing.assert_close(a.kv.v, b.kv.v, rtol=0, atol=0)


def test_counts_of_token_layers(model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings) -> None:
    droid = DroidSpeak("droidspeak", 0.5, LayerProfile())
    methods = [
        FullShared("fullshared"),
        CacheBlend("cacheblend", 0.25),
        Epic("epic", 5),
        droid,
        DeltaMethod("ends", NoneEstimator(*SIZE), head=3, tail=4),
    ]
    for method in methods:
        started(method, model, runner)
        method.learn(chain)
        method.finish_learning()
    assert len(droid.groups) == 1
    for reading, sources in readings:
        glue, spans = glue_tokens(reading), span_tokens(reading)
        lengths = [len(span) for span in reading.prompt.spans]
        want = {
            "fullshared": LAYERS * glue,
            "cacheblend": 2 * (glue + spans) + (LAYERS - 2) * (glue + round(0.25 * spans)),
            "epic": LAYERS * (glue + sum(min(5, n) for n in lengths)),
            "droidspeak": LAYERS * glue + 3 * spans,
            "ends": LAYERS * (glue + sum(min(7, n) for n in lengths)),
        }
        for method in methods:
            used = method.read(chain, reading, chain.alone if method.context_free else sources)
            assert used.computed == want[method.name], method.name
            assert used.computed + used.reused == LAYERS * (glue + spans)


def test_encoding_without_context_is_charged_once_a_content(
    model: ReferenceModel, runner: ChainRunner, chain: Chain
) -> None:
    """The shares of the readers that reuse add up to one encoding, but for the first reader's of the documents."""
    method = started(FullShared("alone", context_free=True), model, runner)
    charged = sum(method.encoded(chain, reading.prompt) for reading in chain.readings)
    assert charged == pytest.approx(LAYERS * sum(len(held) for held in chain.alone.values()))


def test_relaycaching_leaves_the_layers_outside_of_its_range(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    method = RelayCaching("relay")
    started(method, model, runner)
    method.range = (3, 5)
    for reading, sources in readings:
        used = method.read(chain, reading, sources)
        cached = rotated(method, reading, sources)
        spans = torch.cat([torch.arange(span.start, span.stop) for span in reading.prompt.spans])
        for layer in (0, 1, 2, 5):
            torch.testing.assert_close(used.kv.v[layer, spans], cached.v[layer, spans], rtol=0, atol=0)
        assert used.computed == LAYERS * glue_tokens(reading) + 2 * span_tokens(reading)
        assert used.selected is not None and 0 < int(used.selected.sum()) < span_tokens(reading)


def test_dense_measures_as_dense_and_same_answer_is_the_greedy_answer(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    full = started(FullShared("fullshared", context_free=True), model, runner)
    agreements = []
    for reading, _ in readings:
        dense = DenseScores(model, reading)
        exact, _ = compare(model, "dense", chain, reading, dense, Used(body(reading), 0, 0), 0.0)
        assert float(exact.kl.abs().max()) < 1e-9 and exact.same_answer and float(exact.error_v.max()) < 1e-6
        used = full.read(chain, reading, chain.alone)
        result, _ = compare(model, "fullshared", chain, reading, dense, used, 0.0)
        kv, tokens, written = used.kv, reading.prompt.tokens[reading.prompt.body :], []
        for _ in range(len(reading.answer)):
            logits, kv = model.extend(tokens, kv)
            tokens = logits[0].argmax()[None]
            written.append(int(tokens))
        # Token 0 is special here: it is never written by the dense run, but may be the likeliest.
        assert result.same_answer == (written == reading.answer.tolist())
        agreements.append(result.same_answer)
        assert float(result.kl.mean()) > 1e-6
    assert not all(agreements)


def test_errors_of_layers_and_tokens_are_one_sum(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    full = started(FullShared("fullshared"), model, runner)
    reading, sources = readings[0]
    used = full.read(chain, reading, sources)
    result, _ = compare(model, "fullshared", chain, reading, DenseScores(model, reading), used, 0.0)
    squares = (result.error_k[1:].double().square().mean() + result.error_v[1:].double().square().mean()) / 2
    assert float(result.token_error.sum()) == pytest.approx(float(squares), rel=1e-4)
    assert float(result.error_k[0]) < 1e-5 and float(result.error_v[0]) < 1e-6


def test_every_method_of_the_report_runs_and_adds_up(model: ReferenceModel, runner: ChainRunner, chain: Chain) -> None:
    documents, _ = make_probe(4)
    other = runner.run(Task("other", "probe", documents, ()))
    methods = make_methods(model)
    for method in methods:
        started(method, model, runner)
        method.learn(other)
    for method in methods:
        method.finish_learning()
    results = measure_chain(model, methods, chain)
    assert len(results) == 3 * len(methods)
    total = {r.agent: r.computed + r.reused for r in results if r.method == "dense"}
    for result in results:
        assert result.computed + result.reused == total[result.agent], result.method
        assert torch.isfinite(result.kl).all() and float(result.kl.min()) > -1e-9
    counted = cells(results, None)
    rows = summarize(results, counted, {})
    assert rows["none"].kl_mean == rows["fullshared"].kl_mean and rows["fullshared"].kl_ratio == 1
    assert rows["dense"].kl_mean < 1e-12 and rows["dense"].recomputed_share == 1 and rows["dense"].reused_share == 0
    assert rows["dense"].span_recomputed_share == 1 and rows["fullshared"].span_recomputed_share == 0
    assert rows["noise"].kl_mean < 1e-8
    assert rows["fullshared"].kl_mean == mean_kl([r for r in results if r.method == "fullshared"])
    covered = coverage(results)
    share, error = covered["hindsight"]
    assert share == pytest.approx(covered["cacheblend"][0])
    assert error >= max(covered["cacheblend"][1], covered["first tokens"][1]) and error > share


def test_graphflow_keeps_the_largest_entries_of_the_mean(
    model: ReferenceModel, runner: ChainRunner, chain: Chain
) -> None:
    from benchmarks.quality.methods.graphflow import GraphFlow

    method = GraphFlow("graphflow", MeanEstimator(*SIZE))
    started(method, model, runner)
    method.learn(chain)
    reading = chain.readings[1]
    method.read(chain, reading, chain.alone)
    span = reading.prompt.spans[0]
    held = chain.alone[span.content]
    true_v = reading.dense.v[:, span.start : span.stop].flatten(2) - held.kv.v.flatten(2)
    residual = next(r for edge, r in method._residuals.items() if r is not None and edge.consumer == "analyst@first")
    kept = residual.left_v != 0
    assert float(kept[1:].float().sum() / true_v.numel()) == pytest.approx(0.30, abs=0.01)
    torch.testing.assert_close(residual.left_v[kept], true_v[kept], rtol=1e-4, atol=1e-5)
    assert float(residual.left_v[kept].abs().min()) >= float(true_v[1:][~kept[1:]].abs().max()) - 1e-5
