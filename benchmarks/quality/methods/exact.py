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
    """Everything after the agent's prefix is computed again, in chunks of ``chunk`` tokens: rounding alone differs."""

    note = "fp32 like every row; noise_bf16 is the same between two bf16 runs"

    def __init__(self, name: str, chunk: int = 96) -> None:
        super().__init__(name)
        self._chunk = chunk

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        prompt = reading.prompt
        kv = reading.dense.cut(0, prompt.prefix)
        for start in range(prompt.prefix, prompt.body, self._chunk):
            kv = self.model.extend(prompt.tokens[start : min(start + self._chunk, prompt.body)], kv)[1]
        return Used(kv, reusable(self.model, reading.prompt), 0)
