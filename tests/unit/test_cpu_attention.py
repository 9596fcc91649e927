"""`kvcmas_cpu` against SGLang's own `torch_native` and against attention written out in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas_sgl.cpu.environment import has_gpu, prepare_environment

if not has_gpu():
    prepare_environment()

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from kvcmas_sgl.cpu import attention

Layout = str
LAYOUTS: tuple[Layout, ...] = ("one run", "scattered", "runs")


@dataclass(frozen=True)
class Case:
    """A batch on a real KV pool: per request its slots and its queries, and SGLang's objects around them."""

    lengths: list[tuple[int, int]]
    queries: torch.Tensor
    slots: list[torch.Tensor]
    layer: RadixAttention
    batch: ForwardBatch
    runner: SimpleNamespace

    @property
    def pool(self) -> MHATokenToKVPool:
        return self.runner.token_to_kv_pool

    def run(self, backend_class: type[TorchNativeAttnBackend]) -> torch.Tensor:
        """[query rows, heads, head dim]. The new tokens' K and V are in the pool already."""
        backend = backend_class(self.runner)
        backend.init_forward_metadata(self.batch)
        step = backend.forward_decode if self.batch.forward_mode.is_decode() else backend.forward_extend
        out = step(self.queries.flatten(1), None, None, self.layer, self.batch, save_kv_cache=False)
        return out.view(self.queries.shape)

    def oracle(self) -> torch.Tensor:
        """softmax(q k^T * scale + causal mask) v in float64, one head at a time."""
        keys, values = self.pool.get_key_buffer(0).double(), self.pool.get_value_buffer(0).double()
        group = self.queries.shape[1] // keys.shape[1]
        out = torch.empty_like(self.queries, dtype=torch.float64)
        first = 0
        for (prefix, new), slots in zip(self.lengths, self.slots, strict=True):
            visible = torch.arange(prefix + new)[None, :] <= torch.arange(prefix, prefix + new)[:, None]
            for head in range(self.queries.shape[1]):
                q = self.queries[first : first + new, head].double()
                scores = q @ keys[slots, head // group].T * self.layer.scaling
                weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
                out[first : first + new, head] = weights @ values[slots, head // group]
            first += new
        return out


def build(
    lengths: list[tuple[int, int]],
    *,
    decode: bool = False,
    kv_heads: int = 3,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "one run",
    seed: int = 0,
    pool_dtype: torch.dtype | None = None,
    **layer_options: Any,
) -> Case:
    """Requests of (prefix, new) tokens; slots in one run each, at random, or in runs of at most a third."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(prefix + new for prefix, new in lengths)
    size = total + 8
    pool = MHATokenToKVPool(size, 1, pool_dtype or dtype, kv_heads, dim, 1, "cpu", False, enable_alt_stream=False)
    for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0)):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    req_to_token_pool = ReqToTokenPool(len(lengths) + 1, max(map(sum, lengths)) + 4, "cpu", False)

    free = torch.arange(1, total + 1)
    if layout == "scattered":
        free = free[torch.randperm(total, generator=generator)]
    slots = list(free.split([prefix + new for prefix, new in lengths]))
    if layout == "runs":
        slots = [torch.cat(one.split(one.shape[0] // 3 + 1)[::-1]) for one in slots]
    # Pool rows differ from batch positions, as they do once requests come and go.
    rows = torch.arange(len(lengths), 0, -1)
    for row, one in zip(rows.tolist(), slots, strict=True):
        req_to_token_pool.req_to_token[row, : one.shape[0]] = one

    news = torch.tensor([new for _, new in lengths])
    prefixes = torch.tensor([prefix for prefix, _ in lengths])
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(int(news.sum()), dtype=torch.int64),
        req_pool_indices=rows,
        seq_lens=prefixes + news,
        seq_lens_cpu=prefixes + news,
        seq_lens_sum=total,
        out_cache_loc=torch.cat([one[prefix:] for one, (prefix, _) in zip(slots, lengths, strict=True)]),
    )
    if not decode:
        batch.extend_seq_lens, batch.extend_prefix_lens = news, prefixes
        batch.extend_num_tokens = int(news.sum())
    heads = kv_heads * group
    layer = RadixAttention(heads, dim, dim**-0.5, kv_heads, layer_id=0, **layer_options)
    queries = torch.randn(int(news.sum()), heads, dim, generator=generator).to(dtype)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=req_to_token_pool, token_to_kv_pool=pool)
    return Case(lengths, queries, slots, layer, batch, runner)


def assert_close(case: Case) -> None:
    """Ours within rounding of the oracle and of torch_native; attention averages values, so they set the scale."""
    ours, native, oracle = case.run(attention.CpuAttnBackend), case.run(TorchNativeAttnBackend), case.oracle()
    scale = case.pool.get_value_buffer(0).abs().max().item()
    # Probabilities, each partial result and the output are rounded to the dtype: four half ulps at most.
    tolerance = scale * (1e-5 if case.queries.dtype == torch.float32 else 4 * 2**-9)
    assert ours.dtype == native.dtype and ours.shape == native.shape
    torch.testing.assert_close(ours.double(), oracle, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours.double(), native.double(), rtol=0, atol=2 * tolerance)


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Long prefixes are cut to occupy all threads, so a machine with one core would not reach that path."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
SLOTS = pytest.mark.parametrize("layout", LAYOUTS)


@DTYPES
@SLOTS
@pytest.mark.parametrize("group", [1, 3], ids=["mha", "gqa"])
def test_extend_of_a_ragged_batch(dtype: torch.dtype, layout: Layout, group: int) -> None:
    # Dense, cached, chunked (long block after a prefix), one new token after a prefix, one token in all.
    lengths = [(0, 70), (90, 12), (64, 300), (33, 1), (0, 1)]
    assert_close(build(lengths, group=group, dtype=dtype, layout=layout))


@DTYPES
@SLOTS
@pytest.mark.parametrize("group", [1, 3], ids=["mha", "gqa"])
@pytest.mark.parametrize("news", [(1, 1, 1, 1), (16, 1, 3, 2), (1, 17, 1, 20)])
def test_short_rows_of_one_sequence_see_what_is_before_them(
    dtype: torch.dtype, layout: Layout, group: int, news: tuple[int, ...]
) -> None:
    """Rows of one pool row, as the forward seam makes them: some tokens of a sequence, between others' rows."""
    lengths = [(40, 5), *zip((90, 12, 200, 33), news, strict=True), (70, 9)]
    case = build(lengths, group=group, dtype=dtype, layout=layout)
    # The four rows in the middle are now of the third of them, which is the longest.
    rows = case.batch.req_pool_indices
    rows[1:5] = rows[3].clone()
    middle = [case.slots[3][: prefix + new] for prefix, new in lengths[1:5]]
    assert_close(replace(case, slots=[case.slots[0], *middle, case.slots[5]]))


@DTYPES
@SLOTS
@pytest.mark.parametrize("group", [1, 3], ids=["mha", "gqa"])
def test_decode_of_a_ragged_batch(dtype: torch.dtype, layout: Layout, group: int) -> None:
    assert_close(build([(0, 1), (17, 1), (600, 1)], decode=True, group=group, dtype=dtype, layout=layout))


@DTYPES
@SLOTS
@pytest.mark.parametrize(("new", "decode"), [(20, False), (200, False), (1, False), (1, True)])
@pytest.mark.usefixtures("many_threads")
def test_long_prefix_in_parts(dtype: torch.dtype, layout: Layout, new: int, decode: bool) -> None:
    # A third of 7001 tokens is a run long enough to be read in place, the rest is copied; 7001 is no multiple.
    case = build([(7001, new), (50, 1)], decode=decode, kv_heads=1, group=2, dim=32, dtype=dtype, layout=layout)
    assert_close(case)


@pytest.mark.usefixtures("many_threads")
def test_merge_survives_scores_of_very_different_size() -> None:
    case = build([(7000, 5)], kv_heads=1, group=2, dim=32, dtype=torch.float32, layout="runs")
    keys = case.pool.get_key_buffer(0)
    # exp() of these scores overflows float32 in one part and vanishes in another.
    keys[case.slots[0][:2400]] *= 60
    keys[case.slots[0][2400:]] *= 0.01
    assert_close(case)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    decode = data.draw(st.booleans(), label="decode")
    new = st.just(1) if decode else st.integers(1, 80)
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 150), new), min_size=1, max_size=4), label="lengths")
    case = build(
        lengths,
        decode=decode,
        kv_heads=data.draw(st.integers(1, 4), label="kv_heads"),
        group=data.draw(st.integers(1, 5), label="group"),
        dim=data.draw(st.sampled_from([8, 32, 40, 64, 128]), label="dim"),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32]), label="dtype"),
        layout=data.draw(st.sampled_from(LAYOUTS), label="layout"),
        seed=data.draw(st.integers(0, 100), label="seed"),
    )
    assert_close(case)


@SLOTS
def test_result_does_not_depend_on_the_batch(layout: Layout) -> None:
    together = build([(40, 9), (0, 33), (300, 1)], layout=layout)
    backend = attention.CpuAttnBackend
    out, first = together.run(backend), 0
    for position, (prefix, new) in enumerate(together.lengths):
        alone = Case(
            lengths=[(prefix, new)],
            queries=together.queries[first : first + new],
            slots=[together.slots[position]],
            layer=together.layer,
            batch=ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                batch_size=1,
                input_ids=together.batch.input_ids[first : first + new],
                req_pool_indices=together.batch.req_pool_indices[position : position + 1],
                seq_lens=torch.tensor([prefix + new]),
                seq_lens_sum=prefix + new,
                out_cache_loc=together.slots[position][prefix:],
                extend_seq_lens=torch.tensor([new]),
                extend_prefix_lens=torch.tensor([prefix]),
            ),
            runner=together.runner,
        )
        assert torch.equal(alone.run(backend), out[first : first + new])
        first += new


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window_size": 16}, id="sliding window"),
        pytest.param({"attn_type": AttentionType.ENCODER_ONLY}, id="encoder only"),
        pytest.param({"pool_dtype": torch.float32}, id="another KV dtype"),
    ],
)
def test_what_is_not_covered_is_the_parents(options: dict[str, Any], decode: bool) -> None:
    case = build([(40, 1)] if decode else [(40, 9), (0, 12)], decode=decode, **options)
    assert torch.equal(case.run(attention.CpuAttnBackend), case.run(TorchNativeAttnBackend))


def test_cross_attention_is_the_parents() -> None:
    case = build([(40, 9), (0, 12)], is_cross_attention=True)
    case.batch.encoder_lens = torch.tensor([20, 7])
    assert torch.equal(case.run(attention.CpuAttnBackend), case.run(TorchNativeAttnBackend))


def test_new_tokens_are_written_to_the_pool_before_they_are_read() -> None:
    case = build([(30, 6)], dtype=torch.float32)
    slots = case.slots[0][30:]
    keys, values = case.pool.get_key_buffer(0), case.pool.get_value_buffer(0)
    new_keys, new_values = keys[slots].clone(), values[slots].clone()
    keys[slots], values[slots] = 0, 0
    backend = attention.CpuAttnBackend(case.runner)
    backend.init_forward_metadata(case.batch)
    out = backend.forward_extend(case.queries.flatten(1), new_keys, new_values, case.layer, case.batch)
    assert torch.equal(keys[slots], new_keys) and torch.equal(values[slots], new_values)
    torch.testing.assert_close(out.view(case.queries.shape).double(), case.oracle(), rtol=0, atol=1e-5)


def test_an_empty_batch_gives_no_rows() -> None:
    case = build([(3, 2)])
    empty = torch.zeros(0, dtype=torch.int64)
    idle = ForwardBatch(ForwardMode.IDLE, 0, empty, empty, empty, empty, 0)
    backend = attention.CpuAttnBackend(case.runner)
    backend.init_forward_metadata(idle)
    assert backend.forward_decode(case.queries[:0].flatten(1), None, None, case.layer, idle).shape[0] == 0


def test_register_is_idempotent() -> None:
    attention.register()
    attention.register()
    assert ATTENTION_BACKEND_CHOICES.count("kvcmas_cpu") == 1
    assert ATTENTION_BACKENDS["kvcmas_cpu"] is attention._create
