"""Seam: SGLang's server arguments. Our flags, and the refusal of what is not supported."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kvcmas_sgl.config import (
    RADIX_CACHE_BACKEND,
    KvcmasConfig,
    add_flags,
    config_from_arguments,
    published_config,
)
from kvcmas_sgl.seams import control, hooks
from kvcmas_sgl.support import UnsupportedSetupError, check_arguments, check_model, check_ranks, check_state_dir

_on_command_line = False


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    add_flags(parser)


def before_from_cli_args(cls: type, args: argparse.Namespace) -> None:
    """Before ``ServerArgs.from_cli_args``: publish our settings, and select our cache backend."""
    global _on_command_line
    config = config_from_arguments(args)
    if config is not None:
        _on_command_line = True
        config.publish()
        hooks.extend_server()


def after_check_server_args(result: None, server_args: Any) -> None:
    """After ``ServerArgs.check_server_args``: the arguments are resolved, no child process runs yet."""
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = resolving_view(server_args)
    if arguments.radix_cache_backend != RADIX_CACHE_BACKEND:
        return
    config = published_config() or KvcmasConfig()
    config.publish()
    # Settings may have been published after this process loaded its plugins.
    hooks.extend_server()
    hooks.check_complete()
    control.add_routes()
    # Its ragged prefill reads the pool before the pass has written to it (see seams/forward.py); children inherit this.
    os.environ.setdefault("SGLANG_FLASHINFER_USE_PAGED", "1")
    try:
        check_arguments(arguments)
        check_ranks(config.estimator, arguments)
        check_state_dir(config.state_dir, arguments)
        from sglang.srt.configs.model_config import ModelConfig

        check_model(ModelConfig.from_server_args(server_args))
    except UnsupportedSetupError as error:
        if _on_command_line:
            sys.exit(str(error))
        raise
