"""`python -m kvcmas_sgl.demo`: a pipeline of agents works through documents, on stock SGLang and on ours."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import requests
from tqdm import tqdm

from kvcmas_sgl.config import add_flags
from kvcmas_sgl.demo import picture_demo
from kvcmas_sgl.demo.client import Client
from kvcmas_sgl.demo.measure import Measurement, Settings
from kvcmas_sgl.demo.picture import draw
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.report import summary_lines, table, write_html, write_json
from kvcmas_sgl.demo.roles import ROLES, Document, InputError, Role, load_documents, load_roles
from kvcmas_sgl.demo.rows import Row
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command, stock_command
from kvcmas_sgl.demo.summary import summarize
from kvcmas_sgl.prepare_image_model import default_image_model
from kvcmas_sgl.prepare_model import ModelError, default_model

# Both arms keep all readings of the largest document: four roles, twice, with room for their answers.
_SERVER_FLAGS = ("--max-total-tokens", "64000")
_QUICK_DOCUMENTS = 5


def parser() -> argparse.ArgumentParser:
    shape = argparse.ArgumentParser(
        prog="python -m kvcmas_sgl.demo",
        description="Agents with different system prompts work through documents one after another: each reads the "
        "document and what the agents before it wrote, and answers a question of its own. The pipeline runs on our "
        "server; the same prompts run on stock SGLang, taking turns. Prints a table and writes demo.png, demo.html "
        "and demo.json.",
    )
    shape.add_argument("--model", help="model folder or hub name (default: SmolLM2-135M-Instruct, made on first use)")
    shape.add_argument(
        "--documents", nargs="+", type=Path, default=[], metavar="FILE",
        help="UTF-8 text files, read in this order (default: the texts in kvcmas_sgl/demo/documents)",
    )  # fmt: skip
    shape.add_argument(
        "--roles", type=Path, metavar="JSON",
        help='JSON list of {"name", "system", "question"}, in reading order (default: four roles)',
    )  # fmt: skip
    shape.add_argument(
        "--answer-tokens", type=int, default=12,
        help="greedy tokens per answer, over which KL and top-1 agreement are taken (default: 12 tokens)",
    )  # fmt: skip
    shape.add_argument(
        "--pass-tokens", type=int, default=64,
        help="tokens of each answer that the next agents read; our server reuses none below its --kvcmas-min-span "
        "(default: 64 tokens)",
    )  # fmt: skip
    shape.add_argument(
        "--kl-top", type=int, default=128,
        help="likeliest tokens that a KL is summed over one by one; the rest counts as one (default: 128 tokens)",
    )  # fmt: skip
    shape.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)")
    shape.add_argument(
        "--stock-attention", metavar="BACKEND",
        help="attention backend of stock SGLang (default: kvcmas_cpu without a GPU, else SGLang's choice)",
    )  # fmt: skip
    shape.add_argument(
        "--server-flags", default="", metavar="FLAGS", help='SGLang flags for both servers, quoted, as in "--tp-size 2"'
    )
    shape.add_argument(
        "--kvcmas-flags", default="", metavar="FLAGS", help='flags for our server, quoted, as in "--kvcmas-max-kl 0.01"'
    )
    shape.add_argument(
        "--images", action="store_true",
        help="four generated pictures in the place of each document, on a small model that reads pictures; writes "
        "demo-images.html and demo-images.json",
    )  # fmt: skip
    shape.add_argument("--quick", action="store_true", help=f"only the first {_QUICK_DOCUMENTS} documents")
    return shape


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    start = time.monotonic()
    try:
        _check(options)
        if options.images:
            _run_pictures(options)
            return 0
        documents = load_documents(options.documents)
        roles = load_roles(options.roles)
        rows = _run(options, documents[:_QUICK_DOCUMENTS] if options.quick else documents, roles)
        _report(options, rows, roles, start)
    except (InputError, ModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; both servers are down.", file=sys.stderr)
        return 130
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, value, high in (
        ("--answer-tokens", options.answer_tokens, 1024),
        ("--pass-tokens", options.pass_tokens, 1024),
        ("--kl-top", options.kl_top, 1024),
    ):
        if not 1 <= value <= high:
            raise InputError(f"{name} is {value}, but must be from 1 to {high} tokens.")


def _run(options: argparse.Namespace, documents: Sequence[Document], roles: Sequence[Role]) -> list[Row]:
    options.model = options.model or str(default_model())
    with _servers(options) as servers:
        stock, ours = (Client(server.url) for server in servers)
        prompts = PromptMaker(options.model)
        settings = Settings(options.answer_tokens, options.pass_tokens, options.kl_top)
        rows = []
        try:
            readings = Measurement(stock, ours, prompts, roles, settings).run(documents)
            for row in tqdm(readings, total=len(documents) * len(roles), unit="reading", file=sys.stderr):
                rows.append(row)
        except requests.RequestException:
            for server in servers:
                server.check_alive()
            raise
        return rows


def _run_pictures(options: argparse.Namespace) -> None:
    options.model = options.model or str(default_image_model())
    sets = picture_demo.QUICK_SETS if options.quick else picture_demo.SETS
    budget = _max_kl(options.kvcmas_flags)
    with _servers(options) as (stock, ours):
        demo = picture_demo.PictureDemo(stock.url, ours.url, options.model, options.answer_tokens, options.kl_top)
        readings = list(tqdm(demo.run(sets), total=sets * len(ROLES), unit="reading", file=sys.stderr))
    picture_demo.write(
        options.reports, readings, budget, {"model": options.model, "kvcmas_flags": options.kvcmas_flags}
    )
    print(picture_demo.table(readings))
    print("\n" + "\n".join(picture_demo.sentences(picture_demo.summary(readings), budget)))
    print(f"see {options.reports}/demo-images.html and demo-images.json.")


@contextmanager
def _servers(options: argparse.Namespace) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Stock SGLang and our server, both ready; stopped whatever happens: a failed request, Ctrl-C, SIGTERM."""
    both = [*shlex.split(options.server_flags), *_SERVER_FLAGS]
    ours_only = [*both, "--kvcmas-allow-overrides", *shlex.split(options.kvcmas_flags)]
    servers = (
        ServerProcess(
            "stock SGLang",
            stock_command(options.model, options.stock_attention, both),
            options.reports / "demo-stock.log",
        ),
        ServerProcess("our server", kvcmas_command(options.model, ours_only), options.reports / "demo-ours.log"),
    )
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        _say(f"starting two servers (logs: {servers[0].log}, {servers[1].log})")
        begin = time.monotonic()
        for server in servers:
            server.wait_ready()
        _say(f"both ready after {time.monotonic() - begin:.0f} s")
        yield servers


def _report(options: argparse.Namespace, rows: Sequence[Row], roles: Sequence[Role], start: float) -> None:
    summary = summarize(rows, _max_kl(options.kvcmas_flags))
    settings: dict[str, Any] = {
        "model": options.model,
        "roles": [role.name for role in roles],
        "answer_tokens": options.answer_tokens,
        "pass_tokens": options.pass_tokens,
        "kl_top": options.kl_top,
        "kl_reference": "stock SGLang's hit on its own dense prefill, teacher-forced along its greedy answer",
        "kl_noise": "the same prompt prefilled densely once more on stock SGLang, one reading in six",
        "stock_attention": options.stock_attention or "default",
        "server_flags": options.server_flags,
        "kvcmas_flags": options.kvcmas_flags,
    }
    picture = options.reports / "demo.png"
    draw(rows, summary, picture)
    write_html(options.reports / "demo.html", rows, summary, settings, picture)
    total = time.monotonic() - start
    write_json(options.reports / "demo.json", rows, summary, settings, total)
    print(table(rows))
    print()
    print("\n".join(summary_lines(summary)))
    print(f"{total:.0f} s in all; see {options.reports}/demo.html, demo.png and demo.json.")


def _max_kl(kvcmas_flags: str) -> float:
    """The quality budget that our server was started with, nats."""
    flags = argparse.ArgumentParser()
    add_flags(flags)
    return float(flags.parse_known_args(shlex.split(kvcmas_flags))[0].kvcmas_max_kl)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    # As an exception, so that the servers are stopped on the way out.
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
