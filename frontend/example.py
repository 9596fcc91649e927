"""The example program of the documentation, and the command that draws it.

python -m kvcmas_sgl.frontend.example                     # print the flow
python -m kvcmas_sgl.frontend.example docs/flow.svg       # and write it as SVG
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import sglang as sgl
from kvcmas_sgl.frontend import flow, shared


@sgl.function
def solve(s: Any, task: str) -> None:
    """Four agents over one document: a plan, its code, a review of both, a verdict."""
    with s.agent("planner", system="You plan. Give three short steps.") as planner:
        planner += sgl.user(shared(task) + "\nHow would you solve this?")
        planner += sgl.assistant(sgl.gen("plan", max_tokens=96))
    with s.agent("coder", system="You write Python, and nothing else.") as coder:
        coder += sgl.user(shared(task) + "\nFollow this plan:\n" + s["plan"])
        coder += sgl.assistant(sgl.gen("code", max_tokens=256))
    with s.agent("critic", system="You are a harsh critic.") as critic:
        critic += sgl.user(shared(task) + "\nPlan:\n" + s["plan"] + "\nCode:\n" + s["code"] + "\nWhat is wrong?")
        critic += sgl.assistant(sgl.gen("review", max_tokens=96))
    with s.agent("judge", system="You decide whether code is ready.") as judge:
        judge += sgl.user(shared(task) + "\nCode:\n" + s["code"] + "\nReview:\n" + s["review"] + "\nIs it ready?")
        judge += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))


def main(arguments: list[str] | None = None) -> None:
    """Print the flow of `solve`, and write it to a file if one is named."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcmas_sgl.frontend.example", description="Draw the flow of the example program."
    )
    parser.add_argument("svg", nargs="?", type=Path, help="file to write the flow to, as SVG")
    svg = parser.parse_args(arguments).svg
    drawn = flow(solve)
    print(drawn.text(), end="")
    if svg is not None:
        svg.write_text(drawn.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
