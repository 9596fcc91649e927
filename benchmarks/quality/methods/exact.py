"""Dense and noise: what every method is measured against, and what no method can be told apart from."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.quality.chains import Chain, Held, Reading
from benchmarks.quality.methods.base import Method, Used, reusable


class Dense(Method):
    """Everything is computed."""

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        return Used(reading.dense.cut(0, reading.prompt.body), reusable(self.model, reading.prompt), 0)


class Rechunked(Method):
    """Everything is computed again from position 0 on, in chunks of ``chunk`` tokens: rounding alone differs."""

    note = "fp32 like every row; noise_bf16 is the same between two bf16 runs"

    def __init__(self, name: str, chunk: int = 96) -> None:
        super().__init__(name)
        self._chunk = chunk

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        tokens, kv = reading.prompt.tokens[: reading.prompt.body], None
        for start in range(0, len(tokens), self._chunk):
            kv = self.model.extend(tokens[start : start + self._chunk], kv)[1]
        assert kv is not None
        return Used(kv, reusable(self.model, reading.prompt), 0)
