"""Set-ups that are not supported yet, each refused at start with one sentence that names the flag."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

# Field of SGLang's resolved arguments, whether its value is fine, the flag, and what is supported.
_RULES: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("disable_radix_cache", (False,), "--disable-radix-cache", "the radix cache is where spans live"),
    ("page_size", (None, 1), "--page-size", "only 1 is supported"),
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16", "float32"), "--kv-cache-dtype", "only auto, bf16 and float32 are"),
    ("speculative_algorithm", (None,), "--speculative-algorithm", "speculative decoding is not supported"),
    ("enable_hierarchical_cache", (False,), "--enable-hierarchical-cache", "HiCache is not supported"),
    ("enable_lmcache", (False,), "--enable-lmcache", "LMCache is not supported"),
    ("enable_flexkv", (False,), "--enable-flexkv", "FlexKV is not supported"),
    ("enable_unified_cache_external_linker", (False,), "--enable-unified-cache-external-linker", "it is not supported"),
    ("enable_unified_memory", (False,), "--enable-unified-memory", "it is not supported"),
    ("enable_hisparse", (False,), "--enable-hisparse", "it is not supported"),
    ("enable_session_radix_cache", (False,), "--enable-session-radix-cache", "it is not supported"),
    ("enable_streaming_session", (False,), "--enable-streaming-session", "it is not supported"),
    ("disaggregation_mode", ("null",), "--disaggregation-mode", "only null is supported"),
    ("dp_size", (1,), "--dp-size", "only 1 is supported"),
    ("pp_size", (1,), "--pp-size", "only 1 is supported"),
    ("dcp_size", (1,), "--dcp-size", "only 1 is supported"),
    ("attn_cp_size", (1,), "--attn-cp-size", "only 1 is supported"),
    ("nnodes", (1,), "--nnodes", "only 1 is supported"),
    ("dllm_algorithm", (None,), "--dllm-algorithm", "diffusion language models are not supported"),
    ("enable_deterministic_inference", (False,), "--enable-deterministic-inference", "corrected KV depends on history"),
    ("tokenizer_worker_num", (1,), "--tokenizer-worker-num", "only 1 is supported"),
)


# Of others, a rank's heads alone say whether they know a content.
_BY_RANK = ("affine", "none")


class UnsupportedSetupError(ValueError):
    """SGLang is set up in a way that kvcmas does not support; the message is one sentence."""


def check_arguments(arguments: Any) -> None:
    """Raise `UnsupportedSetupError` for SGLang's resolved arguments (attributes named as its flags)."""
    for field, allowed, flag, why in _RULES:
        value = getattr(arguments, field)
        if value not in allowed:
            raise UnsupportedSetupError(f"{flag} is {value!r}, which --enable-kvcmas does not allow: {why}.")


def check_ranks(estimator: str, arguments: Any) -> None:
    """Raise `UnsupportedSetupError` for an estimator whose predictions ranks cannot make apart."""
    if arguments.tp_size != 1 and estimator not in _BY_RANK:
        raise UnsupportedSetupError(
            f"--kvcmas-estimator is {estimator!r}, which --tp-size {arguments.tp_size} does not allow: only "
            f"{' and '.join(_BY_RANK)} predict each head by itself."
        )


def check_state_dir(folder: str | None, arguments: Any) -> None:
    """Raise `UnsupportedSetupError` unless learned state can be kept in ``folder``; makes it if it is not there."""
    if folder is None:
        return
    if arguments.tp_size != 1:
        raise UnsupportedSetupError(
            f"--kvcmas-state-dir is {folder!r}, which --tp-size {arguments.tp_size} does not allow: its ranks do not "
            "save at the same moment."
        )
    if arguments.enable_lora:
        raise UnsupportedSetupError(
            f"--kvcmas-state-dir is {folder!r}, which --enable-lora does not allow: an adapter's name does not tell "
            "after a restart what it was trained on."
        )
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnsupportedSetupError(
            f"--kvcmas-state-dir is {folder!r}, but that folder cannot be written to: {error.strerror}."
        ) from error


def check_model(model: Any) -> None:
    """Raise `UnsupportedSetupError` for a model (SGLang's ``ModelConfig``) that cannot be corrected."""
    name = model.model_path
    if model.attention_arch.name != "MHA":
        raise UnsupportedSetupError(
            f"--model-path {name} uses {model.attention_arch.name} attention, which --enable-kvcmas does not support: "
            "it needs separate K and V heads."
        )
    if model.model_is_mrope:
        raise UnsupportedSetupError(
            f"--model-path {name} uses M-RoPE, which --enable-kvcmas does not support: it needs one-dimensional RoPE."
        )
    if model.is_hybrid_swa or (model.sliding_window_size or 0) > 0:
        raise UnsupportedSetupError(
            f"--model-path {name} uses sliding-window attention, which --enable-kvcmas does not support."
        )
    if not model.is_generation:
        raise UnsupportedSetupError(f"--model-path {name} is not a generation model, which --enable-kvcmas needs.")
