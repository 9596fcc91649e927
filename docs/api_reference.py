"""``make docs``: the API reference, as HTML pages that pydoc makes of the docstrings.

Takes the packages of the project from pyproject.toml, since they lie in several folders; pydoc finds only one.
"""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
import pkgutil
import pydoc
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcmas_sgl.cpu import environment

_PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def modules(packages: Sequence[str]) -> Iterator[str]:
    """Names of the packages and of the modules that lie right in them."""
    for package in packages:
        yield package
        paths = importlib.import_module(package).__path__
        # A ``__main__`` is a command: its text is its ``--help``.
        yield from (f"{package}.{found.name}" for found in pkgutil.iter_modules(paths) if found.name != "__main__")


def write(packages: Sequence[str], folder: Path) -> list[str]:
    """Write a page for every module, and an index of them; returns the modules. Errors of an import are not hidden."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(dict.fromkeys(modules(packages)))
    rows = []
    for name in found:
        module = importlib.import_module(name)
        page = pydoc.html.page(pydoc.describe(module), pydoc.html.document(module, name))
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        first = (inspect.getdoc(module) or "").partition("\n")[0]
        rows.append(f'<dt><a href="{name}.html">{name}</a></dt><dd>{html.escape(first)}</dd>')
    body = f"<h1>kvcmas_sgl</h1><dl>{''.join(rows)}</dl>"
    (folder / "index.html").write_text(pydoc.html.page("kvcmas_sgl", body), encoding="utf-8")
    return found


def main() -> None:
    """Write the reference of the whole project."""
    parser = argparse.ArgumentParser(description="Write the API reference as HTML.")
    parser.add_argument("--to", type=Path, default=Path("build/api"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    if not environment.has_gpu():
        environment.prepare_environment()
    packages = tomllib.loads(_PROJECT.read_text())["tool"]["setuptools"]["packages"]
    found = write(packages, arguments.to)
    print(f"{len(found)} modules: {arguments.to / 'index.html'}")


if __name__ == "__main__":
    main()
