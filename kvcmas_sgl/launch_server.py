"""``python -m kvcmas_sgl.launch_server``: ``sglang serve --enable-kvcmas``, with or without a GPU.

Takes SGLang's own flags and the ``--kvcmas-*`` ones. Without a GPU it first sets up the CPU engine for this
process and its children, and fills in flags that serve best there; flags that are given win.
"""

from __future__ import annotations

import sys

from kvcmas_sgl.cpu import environment


def main(argv: list[str]) -> None:
    """Serve until stopped. Ends with one sentence and a non-zero status on a bad set-up."""
    if not environment.has_gpu():
        environment.prepare_environment()
        argv = [*argv, *environment.default_cpu_args(argv)]
    if "--enable-kvcmas" not in argv:
        argv = [*argv, "--enable-kvcmas"]

    from sglang.cli.serve import serve

    sys.argv = ["sglang serve", *argv]
    serve(None, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
