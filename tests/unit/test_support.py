"""Refusals of unsupported set-ups, against SGLang's own argument and model classes."""

from __future__ import annotations

import pytest
from sglang.srt.server_args import ServerArgs

from kvcmas_sgl.support import _RULES, UnsupportedSetupError, check_arguments


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
    "tp_size": 2,
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
