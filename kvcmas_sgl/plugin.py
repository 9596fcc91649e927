"""What SGLang loads through its entry points, in every process."""

from __future__ import annotations

import sys


def activate() -> None:
    """Entry point ``sglang.srt.plugins``: register our flags and backends.

    With settings that a parent process published, the server is extended too.
    """
    from kvcmas_sgl.config import published_config
    from kvcmas_sgl.seams import install

    install.extend_arguments()
    if published_config() is not None:
        install.extend_server()


def show_flags_in_help() -> None:
    """Entry point ``sglang.srt.platforms``: names no platform, and lets ``sglang serve --help`` show our flags.

    SGLang's CLI prints its help before it loads plugins. Platforms are asked for as soon as SGLang is imported, so
    this is the one place from which the plugins can be loaded before the help is made.
    """
    if sys.argv[1:2] != ["serve"] or not {"-h", "--help"} & set(sys.argv):
        return
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def load_first(*args: object, **kwargs: object) -> None:
        load_plugins()

    HookRegistry.register("sglang.cli.serve_backends.ServeBackendRegistry.__init__", load_first, HookType.BEFORE)
    HookRegistry.apply_hooks()
