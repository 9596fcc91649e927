"""`python -m examples`: all five programs on stock SGLang, on ours, and on ours with automatic detection of spans.

The two framework programs see no reports; what each agent's prompts cost is taken from the server's own record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

from examples import autogen_team, debate, langgraph_team, pipeline, rag_readers
from examples.command_line import Options, Program, Turn, token_table, tokens_by_role
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command, stock_command
from kvcmas_sgl.prepare_model import default_model

HINTED: dict[str, Program] = {
    "pipeline": pipeline.main,
    "debate": debate.main,
    "rag_readers": rag_readers.main,
}
FRAMEWORKS: dict[str, Program] = {
    "langgraph_team": langgraph_team.main,
    "autogen_team": autogen_team.main,
}
ARMS = ("stock", "plain", "auto")
_AUTO_FLAGS = ("--kvcmas-auto",)
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Result:
    """One program on one server: its answers, seconds, and the server's tokens by role (empty for plain requests)."""

    arm: str
    program: str
    turns: Sequence[Turn]
    seconds: float
    tokens: Mapping[str, Mapping[str, Any]]

    @property
    def answers(self) -> list[list[str]]:
        return [[turn.agent, turn.answer] for turn in self.turns]

    def as_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "program": self.program,
            "seconds": round(self.seconds, 2),
            "agents": self.tokens,
            "answers": self.answers,
        }


def parser() -> argparse.ArgumentParser:
    shape = argparse.ArgumentParser(prog="python -m examples", description=__doc__)
    shape.add_argument("--model", help="model folder or hub name (default: SmolLM2-135M-Instruct)")
    shape.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="servers to run (default: all)")
    names = list(HINTED | FRAMEWORKS)
    shape.add_argument("--programs", nargs="+", choices=names, help="programs to run (default: all)")
    shape.add_argument("--max-tokens", type=int, default=12, help="tokens per answer at most (default: 12)")
    shape.add_argument("--rounds", type=int, default=5, help="documents for each program (default: 5)")
    shape.add_argument(
        "--pause", type=float, default=Options.pause_s,
        help="seconds between documents, in which the server learns (default: %(default)s)",
    )  # fmt: skip
    shape.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)")
    return shape


def run_program(server: ServerProcess, arm: str, name: str, program: Program, options: Options) -> Result:
    """Run one program, and take from the server's record what is new in it."""
    before = {record["rid"] for record in records(server, arm)}
    start = time.monotonic()
    turns = program(server.url, options)
    seconds = time.monotonic() - start
    seen = [record for record in records(server, arm) if record["rid"] not in before]
    if len(seen) == len(turns):
        # One request a turn, in order: an agent that was found by content gets the name that its program gives it.
        seen = [{**record, "role": turn.agent} for record, turn in zip(seen, turns, strict=True)]
    result = Result(arm, name, turns, seconds, tokens_by_role(seen))
    print(f"\n{arm} server, {name}: {len(turns)} answers in {seconds:.1f} s")
    print(token_table(result.tokens) if result.tokens else "no reports: plain requests", flush=True)
    return result


def records(server: ServerProcess, arm: str) -> list[Mapping[str, Any]]:
    """The server's last reports; a stock server has none."""
    if arm == "stock":
        return []
    info = requests.get(server.url + "/server_info", timeout=_TIMEOUT_S).json()
    return list(info["internal_states"][0]["kvcmas"]["recent"])


def findings(results: Sequence[Result]) -> dict[str, Any]:
    """What the runs show: framework answers equal to stock's, and corrected tokens by program and arm."""
    by_key = {(result.arm, result.program): result for result in results}
    equal = {
        name: by_key["plain", name].answers == by_key["stock", name].answers
        for name in FRAMEWORKS
        if ("plain", name) in by_key and ("stock", name) in by_key
    }
    corrected = {
        arm: {
            result.program: sum(row["corrected"] for row in result.tokens.values())
            for result in results
            if result.arm == arm
        }
        for arm in dict.fromkeys(result.arm for result in results)
    }
    return {"framework_answers_equal_stock": equal, "corrected_tokens": corrected}


def problems(found: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that is not as it must be."""
    corrected = found["corrected_tokens"]
    out = [
        f"{name} got other answers than from stock SGLang."
        for name, equal in found["framework_answers_equal_stock"].items()
        if not equal
    ]
    out += [
        f"{name} sends no hints and runs without automatic detection, but {corrected['plain'][name]} tokens of it were "
        "corrected."
        for name in FRAMEWORKS
        if corrected.get("plain", {}).get(name)
    ]
    out += [
        f"{name} had no corrected tokens on the {arm} server."
        for arm, programs in (("plain", HINTED), ("auto", HINTED | FRAMEWORKS))
        for name in programs
        if corrected.get(arm, {}).get(name) == 0
    ]
    return out


def main() -> None:
    """Run the arms one after another, print tables, and write `examples.json` and `examples.txt`."""
    given = parser().parse_args()
    model = given.model or str(default_model())
    options = Options(max_tokens=given.max_tokens, rounds=given.rounds, pause_s=given.pause)
    given.reports.mkdir(parents=True, exist_ok=True)
    commands = {
        "stock": stock_command(model),
        "plain": kvcmas_command(model),
        "auto": kvcmas_command(model, _AUTO_FLAGS),
    }
    results: list[Result] = []
    for arm in given.arms:
        # Stock is what the frameworks' answers are compared with; it knows no hints.
        programs = FRAMEWORKS if arm == "stock" else HINTED | FRAMEWORKS
        with ServerProcess(arm, commands[arm], given.reports / f"examples-{arm}.log") as server:
            server.wait_ready()
            for name in given.programs or programs:
                if name in programs:
                    # Plain requests teach the server nothing: no need to wait for it.
                    plain = arm == "stock" or (arm == "plain" and name in FRAMEWORKS)
                    given_time = replace(options, pause_s=0) if plain else options
                    results.append(run_program(server, arm, name, programs[name], given_time))
    found = findings(results)
    wrong = problems(found)
    content = {**found, "problems": wrong, "runs": [result.as_json() for result in results]}
    (given.reports / "examples.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    text = "\n\n".join(f"{result.arm}: {result.program}\n{token_table(result.tokens)}" for result in results)
    (given.reports / "examples.txt").write_text(text + "\n")
    print("\n" + ("\n".join(wrong) or "All as expected."))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    try:
        main()
    except ServerError as error:
        sys.exit(str(error))
