"""What SGLang loads through its entry points, in every process."""

from __future__ import annotations

import sys


def activate() -> None:
    """Entry point ``sglang.srt.plugins``: register our flags and backends.

    With settings that a parent process published, the server is extended too.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookType

    from kvcmas_sgl.config import RADIX_CACHE_BACKEND, published_config
    from kvcmas_sgl.cpu import attention
    from kvcmas_sgl.seams import arguments, cache_factory, hooks

    if RADIX_CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(RADIX_CACHE_BACKEND, cache_factory.create)
    attention.register()
    server_args = "sglang.srt.server_args.ServerArgs"
    hooks.register(f"{server_args}.add_cli_args", arguments.after_add_cli_args, HookType.AFTER)
    hooks.register(f"{server_args}.from_cli_args", arguments.before_from_cli_args, HookType.BEFORE)
    hooks.register(f"{server_args}.check_server_args", arguments.after_check_server_args, HookType.AFTER)
    if published_config() is not None:
        hooks.extend_server()


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
