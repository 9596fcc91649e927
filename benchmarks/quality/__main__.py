"""Quality of every way to reuse spans, on the same multi-agent prompts.

    python -m benchmarks.quality

Chains of four agents read GSM8K problems, MMLU passages, generated probes and code. Methods learn from dense chains of
a learning set; then each runs the chains of a test set with other content, in an fp32 torch reference of the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.quality.chains import Chain, ChainRunner
from benchmarks.quality.claims import RankMeter, make_claims
from benchmarks.quality.measure import Result, bf16_noise, measure_chain
from benchmarks.quality.methods import QUICK, make_methods
from benchmarks.quality.methods.published import Published
from benchmarks.quality.prompts import KINDS, PromptMaker, make_tasks
from benchmarks.quality.reference import ReferenceModel
from benchmarks.quality.report import Report, table, write
from benchmarks.quality.summary import cells, scored_hops, summarize
from kvcmas_sgl.prepare_model import ModelError, default_model

_QUICK = {"learn": 8, "test": 4, "answer_tokens": 24, "noise_chains": 1}


def parser() -> argparse.ArgumentParser:
    shape = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n\n")[2], allow_abbrev=False
    )
    for name, default, text in (
        ("learn", 16, f"chains that methods learn from, an even mixture of {', '.join(KINDS)}"),
        ("test", 12, "chains with other content that methods are measured on"),
        ("answer-tokens", 32, "tokens of every agent's greedy answer"),
        ("noise-chains", 3, "test chains on which bf16 noise is measured, 0 for none"),
    ):
        shape.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    shape.add_argument("--methods", nargs="+", metavar="NAME", help="only these, beside the controls (default: all)")
    shape.add_argument("--model", help="folder of a Llama-like model (default: SmolLM2-135M-Instruct)")
    shape.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)")
    quick = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _QUICK.items())
    shape.add_argument("--quick", action="store_true", help=f"minutes instead of an hour: {quick}, fewer points")
    return shape


_CONTROLS = (
    "dense", "noise", "fullshared", "fullshared_context_free", "kvcmas", "kvcmas_unchained", "ours", "anchors",
)  # fmt: skip
"""What the report compares with; kvcmas and ours are those of their family that learn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the report; returns the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if options.quick:
        vars(options).update(_QUICK)
    for name, low in (("learn", len(KINDS)), ("test", len(KINDS)), ("answer_tokens", 1), ("noise_chains", 0)):
        if getattr(options, name) < low:
            command.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least {low}.")
    begin = time.perf_counter()
    try:
        folder = options.model or str(default_model())
        with torch.inference_mode():
            report = run(options, folder, begin)
    except (ModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(report, options.reports)
    print(table(report.rows))
    for claim in report.claims:
        print(f"{claim.claim}: {claim.verdict}. Published: {claim.published}. Ours: {claim.ours}.")
    print(f"written to {options.reports}/quality.json, quality.md, quality.html")
    return 0


def run(options: argparse.Namespace, folder: str, begin: float) -> Report:
    """Learn, then measure. Raises ValueError on unknown methods or more chains than the data holds."""
    model, prompts = ReferenceModel(folder), PromptMaker(folder)
    runner = ChainRunner(model, prompts, options.answer_tokens)
    methods = make_methods(model)
    if options.methods:
        unknown = set(options.methods) - {method.name for method in methods}
        if unknown:
            raise ValueError(f"--methods names {', '.join(sorted(unknown))}: known are {[m.name for m in methods]}")
        methods = [method for method in methods if method.name in (*_CONTROLS, *options.methods)]
    elif options.quick:
        methods = [method for method in methods if method.name in QUICK]
    learn, test = make_tasks(options.learn, options.test)
    for method in methods:
        method.start(model, runner)
    for task in tqdm(learn, desc="learning", unit="chain"):
        chain = runner.run(task)
        for method in methods:
            method.learn(chain)
    for method in methods:
        method.finish_learning()
    results: list[Result] = []
    ranks = RankMeter()
    noise_chains: list[Chain] = []
    for number, task in enumerate(tqdm(test, desc="measuring", unit="chain")):
        chain = runner.run(task)
        results.extend(measure_chain(model, methods, chain))
        ranks.add(model, chain)
        if number < options.noise_chains:
            noise_chains.append(chain)
    noise = bf16_noise(folder, noise_chains)
    noise_bf16 = sum(noise) / len(noise) if noise else None
    counted = cells(results, noise_bf16)
    rows = summarize(results, counted, {method.name: method.state_bytes for method in methods})
    kvcmas = next(method for method in methods if method.name == "kvcmas" and isinstance(method, Published))
    return Report(
        rows=rows,
        methods=methods,
        cells=counted,
        scores=scored_hops(results),
        claims=make_claims(rows, results, ranks, kvcmas.entropies),
        noise_bf16=noise_bf16,
        settings={name: str(value) for name, value in vars(options).items()},
        total_seconds=time.perf_counter() - begin,
    )


if __name__ == "__main__":
    sys.exit(main())
