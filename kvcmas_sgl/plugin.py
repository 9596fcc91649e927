"""What SGLang loads through its entry point ``sglang.srt.plugins``, once in every process."""

from __future__ import annotations


def activate() -> None:
    """Register our flags and backends; with settings published by a parent process, extend the server too."""
    from kvcmas_sgl.config import published_config
    from kvcmas_sgl.seams import install

    install.extend_arguments()
    if published_config() is not None:
        install.extend_server()
