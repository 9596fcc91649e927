"""Refusals of unsupported set-ups, against SGLang's own argument and model classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from transformers import LlavaConfig, PretrainedConfig, Qwen2VLConfig

from kvcmas_sgl.support import (
    _RULES,
    UnsupportedSetupError,
    check_arguments,
    check_model,
    check_ranks,
    check_state_dir,
)


class Arguments:
    """SGLang's defaults, with one field changed."""

    def __init__(self, **changed: object) -> None:
        self._changed = changed
        self._defaults = ServerArgs(model_path="dummy")

    def __getattr__(self, name: str) -> object:
        return self._changed[name] if name in self._changed else getattr(self._defaults, name)


def test_sglangs_defaults_are_supported() -> None:
    check_arguments(Arguments())


BAD: dict[str, object] = {
    "kv_cache_dtype": "fp8_e5m2",
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "page_size": 16,
    "dp_size": 2,
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "nnodes": 2,
    "tokenizer_worker_num": 2,
    "dllm_algorithm": "LowConfidence",
}


@pytest.mark.parametrize(("field", "flag"), [(rule[0], rule[2]) for rule in _RULES])
def test_each_unsupported_value_is_named(field: str, flag: str) -> None:
    value = BAD.get(field, True)
    with pytest.raises(UnsupportedSetupError) as caught:
        check_arguments(Arguments(**{field: value}))
    text = str(caught.value)
    assert text.startswith(f"{flag} is {value!r}, which --enable-kvcmas does not allow: ") and text.endswith(".")


def test_a_folder_for_state_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_state_dir(str(folder), Arguments())
    check_state_dir(str(folder), Arguments())
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []
    check_state_dir(None, Arguments(enable_lora=True))


def test_a_folder_that_cannot_keep_state_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnsupportedSetupError) as caught:
            check_state_dir(str(folder), Arguments())
        assert str(caught.value).startswith(f"--kvcmas-state-dir is '{folder}', but that folder cannot be written to: ")
    with pytest.raises(UnsupportedSetupError, match="which --enable-lora does not allow"):
        check_state_dir(str(tmp_path), Arguments(enable_lora=True))


def test_ranks_predict_apart() -> None:
    check_ranks("affine", Arguments(tp_size=2))
    check_ranks("anchors", Arguments())
    with pytest.raises(
        UnsupportedSetupError, match=r"^--kvcmas-estimator is 'anchors', which --tp-size 4 does not allow"
    ):
        check_ranks("anchors", Arguments(tp_size=4))


def test_ranks_keep_no_state(tmp_path: Path) -> None:
    check_arguments(Arguments(tp_size=2))
    check_state_dir(None, Arguments(tp_size=2))
    with pytest.raises(UnsupportedSetupError, match=r"^--kvcmas-state-dir is '.*', which --tp-size 2 does not allow: "):
        check_state_dir(str(tmp_path), Arguments(tp_size=2))


def model(folder: Path, config: PretrainedConfig) -> ModelConfig:
    config.save_pretrained(folder)
    return ModelConfig(str(folder))


def test_models_with_m_rope_are_refused(tmp_path: Path) -> None:
    config = Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"])
    config.text_config.rope_parameters = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    with pytest.raises(UnsupportedSetupError) as caught:
        check_model(model(tmp_path, config))
    assert str(caught.value) == (
        f"--model-path {tmp_path} uses M-RoPE, which --enable-kvcmas does not support: it needs one-dimensional RoPE."
    )


def test_llava_is_supported(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    check_model(model(tmp_path, LlavaConfig(architectures=["LlavaLlamaForCausalLM"], **shape)))
