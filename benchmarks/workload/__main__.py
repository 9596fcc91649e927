"""Command line: make a trace of workflows, or send one to any server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.workload.arrivals import Arrivals, ClosedLoop, OpenLoop, poisson
from benchmarks.workload.build import Builder, Shape, real_text, trajectory
from benchmarks.workload.endpoint import Endpoint
from benchmarks.workload.figures import Slo, run_figures, text_table
from benchmarks.workload.graphs import GRAPHS
from benchmarks.workload.runner import Run, run_workflows
from benchmarks.workload.trace import TraceError, load_trace, save_trace
from benchmarks.workload.workflow import Workflow
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.prepare_model import ModelError, default_model


def parser() -> argparse.ArgumentParser:
    shape = Shape()
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.workload",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--model", help="model folder or hub name, for its tokenizer (None: SmolLM2-135M-Instruct)")
    todo = command.add_subparsers(dest="command", required=True)
    make = todo.add_parser("make", help="write a trace", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    make.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    make.add_argument("--graph", choices=tuple(GRAPHS), default=shape.graph)
    make.add_argument("--agents", type=int, default=shape.agents)
    make.add_argument("--workflows", type=int, default=8)
    make.add_argument("--rate", type=float, help="workflows per second of a Poisson process (None: all at once)")
    make.add_argument("--document-tokens", type=int, nargs=2, default=shape.document_tokens, metavar=("MIN", "MAX"))
    for name in ("system_tokens", "private_tokens", "answer_tokens", "pool"):
        make.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(shape, name))
    make.add_argument("--zipf", type=float, default=shape.zipf, help="exponent of the pool's popularity")
    make.add_argument("--unseen", type=float, default=shape.unseen, help="share of fresh documents")
    make.add_argument(
        "--trajectory", type=int, metavar="SHARED", help="the published shape with so many shared tokens, instead"
    )
    make.add_argument("--generated", action="store_true", help="pass on what is generated instead of a fixed text")
    make.add_argument("--seed", type=int, default=0)
    run = todo.add_parser("run", help="send a trace", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    run.add_argument("--trace", type=Path, required=True, help="ours, or a Mooncake trace")
    run.add_argument("--url", required=True)
    run.add_argument("--api", choices=("sglang", "openai"), default="sglang")
    run.add_argument("--model-name", default="default", help="what an OpenAI endpoint calls the model")
    run.add_argument("--hints", action="store_true", help="tell the server who asks and what is shared")
    run.add_argument("--concurrency", type=int, help="closed loop of so many workflows (None: the trace's times)")
    run.add_argument("--limit", type=int, help="only the first workflows")
    run.add_argument("--max-tokens", type=int, default=4096, help="longest prompt made of a Mooncake line")
    run.add_argument("--slo-ttft", type=float, default=2.0, help="seconds to the first token of a good request")
    run.add_argument("--slo-tpot", type=float, default=0.2, help="seconds per later token of a good request")
    run.add_argument("--out", type=Path, help="figures and all results as JSON")
    run.add_argument("--save-trace", type=Path, help="the trace with the answers that were passed on")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        prompts = PromptMaker(options.model or str(default_model()))
        return _make(options, prompts) if options.command == "make" else _run(options, prompts)
    except (ModelError, TraceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _make(options: argparse.Namespace, prompts: PromptMaker) -> int:
    if options.trajectory is not None:
        shape = trajectory(options.trajectory)
    else:
        names = ("graph", "agents", "system_tokens", "private_tokens", "answer_tokens", "pool", "zipf", "unseen")
        given = {name: getattr(options, name) for name in names}
        shape = Shape(document_tokens=tuple(options.document_tokens), **given)
    workflows = Builder(prompts, shape, options.seed).workflows(options.workflows)
    if options.generated:
        workflows = tuple(workflow.with_answers({hop.name: () for hop in workflow.hops}) for workflow in workflows)
    if options.rate is not None:
        workflows = poisson(workflows, options.rate, options.seed)
    save_trace(options.out, workflows)
    print(f"{len(workflows)} workflows, {sum(len(w.hops) for w in workflows)} requests: {options.out}")
    return 0


def _run(options: argparse.Namespace, prompts: PromptMaker) -> int:
    text = real_text(prompts)
    workflows = load_trace(options.trace, lambda name, tokens: text.reseeded(name).span(tokens), options.max_tokens)
    workflows = workflows[: options.limit]
    arrivals: Arrivals = OpenLoop() if options.concurrency is None else ClosedLoop(options.concurrency)
    run = asyncio.run(_send(options, prompts, workflows, arrivals))
    figures = run_figures(run, Slo(options.slo_ttft, options.slo_tpot))
    print(text_table(figures))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        content = {"figures": figures, "settings": shown, "arrivals": asdict(arrivals), "run": run.as_json()}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.save_trace is not None:
        save_trace(options.save_trace, run.done)
    return 1 if figures["failed"] else 0


async def _send(
    options: argparse.Namespace, prompts: PromptMaker, workflows: Sequence[Workflow], arrivals: Arrivals
) -> Run:
    requests = sum(len(workflow.hops) for workflow in workflows)
    endpoint = Endpoint(options.url, options.api, options.hints, model=options.model_name)
    with tqdm(total=requests, unit="request", file=sys.stderr) as progress:
        async with endpoint:
            return await run_workflows(endpoint, workflows, arrivals, prompts.tokens, progress.update)


if __name__ == "__main__":
    sys.exit(main())
