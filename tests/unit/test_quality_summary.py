"""From cells to figures: what counts, what is paired with what, and which texts are used where."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from benchmarks.quality.agents import AGENTS
from benchmarks.quality.chains import Chain, ChainRunner
from benchmarks.quality.coding import make_coding
from benchmarks.quality.measure import DenseScores, ProbeResult, compare
from benchmarks.quality.methods.fullshared import FullShared
from benchmarks.quality.probes import Question, Step, make_probe
from benchmarks.quality.prompts import KINDS, make_tasks
from benchmarks.quality.reference import ReferenceModel
from benchmarks.quality.summary import Cell, scored_hops, summarize
from tests.unit.test_quality import Readings, ToyPrompts, chain, model, no_gradients, readings, runner, started

__all__ = ["chain", "model", "no_gradients", "readings", "runner"]


def test_a_cell_within_three_times_noise_does_not_count() -> None:
    assert not Cell("gsm8k", "critic", 0.003, 0.0011, None).counts
    cell = Cell("gsm8k", "critic", 0.0034, 0.0011, 0.002)
    assert cell.counts and cell.shows_in_bf16 is False


def test_score_and_interval_are_paired_with_the_dense_run(
    model: ReferenceModel, runner: ChainRunner, chain: Chain, readings: Readings
) -> None:
    """Ten tasks of two questions: dense is right on all, the method wrong on one of two in each: exactly -1/2."""
    reading, _ = readings[0]
    full = started(FullShared("fullshared", context_free=True), model, runner)
    used = full.read(chain, reading, chain.alone)
    result, _ = compare(model, "fullshared", chain, reading, DenseScores(model, reading), used, 0.0)
    right, wrong = ProbeResult(1, 0.25, (1,), (1,), (1,)), ProbeResult(1, 0.25, (1,), (2,), (1,))
    unknown = ProbeResult(2, 0.25, (0,), (1,), (2,))
    results = [
        replace(result, method=name, task=f"task-{task}", probes=(right, second, unknown))
        for task in range(10)
        for name, second in (("dense", right), ("fullshared", wrong), ("noise", right))
    ]
    assert scored_hops(results) == {1: (1.0, 0.25, True), 2: (0.0, 0.25, False)}
    counting = [Cell(result.kind, result.agent, 1.0, 0.0, None)]
    row = summarize(results, counting, {"fullshared": 7})["fullshared"]
    assert (row.score, row.score_low, row.score_high) == (0.5, -0.5, -0.5)
    assert row.answer_agreement == pytest.approx(1 / 3) and row.state_bytes == 7
    assert row.kl_first == pytest.approx(float(result.kl[len(reading.prompt.tokens) - reading.prompt.body - 1]))
    with pytest.raises(KeyError):
        summarize(results, [Cell(result.kind, result.agent, 1.0, 1.0, None)], {})


def test_each_step_of_a_probe_follows_the_right_options_before_it() -> None:
    _, questions = make_probe(5)
    prompts = ToyPrompts()
    two = next(question for question in questions if question.hops == 2)
    small = Question(two.text, tuple(Step(step.lead, (step.options[step.gold],), 0) for step in two.steps), 2)
    probe = prompts.probe(AGENTS[0], small)
    (first, options, _), (last, _, _) = probe.at
    assert int(probe.tokens[first + 1]) == options[0] == prompts.tokens(two.steps[0].options[two.steps[0].gold])[0]
    assert last == len(probe.tokens) - 1
    with pytest.raises(ValueError, match="cannot be told apart"):
        prompts.probe(AGENTS[0], Question("q", (Step("lead", ("same town", "same place"), 0),), 1))


def test_a_two_fact_question_needs_a_line_of_each_document() -> None:
    for seed in range(20):
        documents, questions = make_probe(seed)
        for question in questions:
            names = [step.options[step.gold] for step in question.steps]
            if question.hops == 1:
                assert f"{question.steps[0].lead} {names[0]}." in documents[1]
            else:
                owner, town = names
                assert (
                    f"{question.steps[0].lead} {owner}." in documents[0] and f"{owner} lives in {town}." in documents[1]
                )
                assert town not in documents[0]


def test_learning_and_test_set_share_no_text() -> None:
    learn, test = make_tasks(8, 8)
    assert [task.kind for task in test] == list(KINDS) * 2
    texts = [{document for task in tasks for document in task.documents} for tasks in (learn, test)]
    assert not texts[0] & texts[1] and len(texts[0]) == len(texts[1]) == 16
    with pytest.raises(ValueError, match="has 160 problems"):
        make_tasks(400, 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_module_does_what_its_docstrings_and_tests_say(seed: int) -> None:
    """The generated code is run: its examples, its tests, and the right option against the docstrings."""
    (module, tests), questions = make_coding(seed)
    space: dict[str, object] = {}
    exec(module, space)
    named = {name: part for name, part in space.items() if callable(part) and name != "List"}
    found = doctest.DocTestFinder()
    for name, part in named.items():
        (examples,) = found.find(part, name, globs=space, module=False)
        assert examples.examples and doctest.DocTestRunner(verbose=False).run(examples).failed == 0
    exec(tests.partition("\n")[2], space)
    cases = [part for name, part in space.items() if name.startswith("test_")]
    assert len(cases) == len(named) == 5
    for case in cases:
        case()  # type: ignore[operator]
    for question in questions:
        (step,) = question.steps
        documented = named[step.options[step.gold]].__doc__ or ""
        assert step.lead.removeprefix("The function that ").removesuffix(" is called") in documented
