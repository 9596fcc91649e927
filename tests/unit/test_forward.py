"""A pass is cut into rows of fresh tokens; what they hold is what the whole pass held there."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcmas_sgl.seams.forward import Row, around_forward, fold, fresh_rows, join, unfold


class NoTranslation:
    """Stands in for SGLang's KV index translator, which here has nothing to translate."""

    def own_plan(self, batch: object) -> NoTranslation:
        return self

    def bind(self, batch: object, translator: object) -> None:
        pass


def batch(starts: list[int], lengths: list[int], logprob: list[int] | None = None) -> SimpleNamespace:
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    count = len(starts)
    return SimpleNamespace(
        batch_size=count,
        input_ids=positions + 1000,
        positions=positions,
        out_cache_loc=positions + 5000,
        req_pool_indices=torch.arange(count) + 70,
        req_pool_indices_cpu=torch.arange(count) + 70,
        seq_lens=torch.tensor([s + n for s, n in zip(starts, lengths, strict=True)]),
        orig_seq_lens=torch.tensor([s + n for s, n in zip(starts, lengths, strict=True)], dtype=torch.int32),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=starts,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(starts, dtype=torch.int32),
        extend_start_loc=torch.zeros(count, dtype=torch.int32),
        extend_logprob_start_lens_cpu=logprob,
        lora_ids=None,
        rids=[f"r{i}" for i in range(count)],
        mm_inputs=None,
        top_logprobs_nums=[5] * count,
        token_ids_logprobs=[[1]] * count,
        global_num_token_non_padded=None,
        global_num_token_non_padded_cpu=None,
    )


def test_rows_are_what_placed_ranges_leave_over() -> None:
    rows = fresh_rows([0, 7, 100], [20, 5, 4], [[(3, 8), (8, 10), (12, 19)], [], [(100, 103)]])
    assert rows == [Row(0, 0, 3), Row(0, 10, 12), Row(0, 19, 20), Row(1, 7, 12), Row(2, 103, 104)]


@given(st.data())
def test_a_folded_pass_holds_every_fresh_token_once_with_its_own_slot_and_position(data: st.DataObject) -> None:
    starts, lengths, placed, fresh = [], [], [], []
    for number in range(data.draw(st.integers(1, 3))):
        start, length = data.draw(st.integers(0, 5)) + 100 * number, data.draw(st.integers(1, 12))
        flags = [data.draw(st.booleans()) for _ in range(length - 1)] + [False]
        starts.append(start)
        lengths.append(length)
        placed.append([(start + i, start + i + 1) for i, flag in enumerate(flags) if flag])
        fresh += [start + i for i, flag in enumerate(flags) if not flag]
    whole = batch(starts, lengths)
    rows = fresh_rows(starts, lengths, placed)
    folded = fold(whole, rows, NoTranslation(), [True] * len(rows))
    assert folded.positions.tolist() == fresh
    assert (folded.input_ids - 1000).tolist() == fresh and (folded.out_cache_loc - 5000).tolist() == fresh
    assert folded.batch_size == len(rows) == len(folded.rids)
    assert folded.extend_num_tokens == len(fresh) == sum(folded.extend_seq_lens_cpu)
    assert folded.seq_lens_sum == int(folded.seq_lens.sum())
    at = 0
    for i, row in enumerate(rows):
        assert folded.extend_start_loc[i] == at
        assert folded.extend_prefix_lens[i] == row.start and folded.seq_lens[i] == row.stop
        assert folded.req_pool_indices[i] == 70 + row.request
        assert folded.positions[at : at + row.stop - row.start].tolist() == list(range(row.start, row.stop))
        at += row.stop - row.start
    # The original is left as sampling needs it.
    assert whole.batch_size == len(starts) and whole.positions.numel() == sum(lengths)


def test_logprobs_are_asked_of_the_last_row_only() -> None:
    # Two requests of 10 tokens from position 4 on; one asks for logprobs from token 8 of its pass, the other for none.
    rows = fresh_rows([4, 4], [10, 10], [[(6, 10)], [(5, 12)]])
    folded = fold(batch([4, 4], [10, 10], [8, 10]), rows, NoTranslation(), [False, True, False, True])
    assert rows == [Row(0, 4, 6), Row(0, 10, 14), Row(1, 4, 5), Row(1, 12, 14)]
    assert folded.extend_logprob_start_lens_cpu == [2, 2, 1, 2]
    assert folded.top_logprobs_nums == [0, 5, 0, 5] and folded.token_ids_logprobs == [None, [1], None, [1]]


def test_of_every_rows_outputs_the_last_rows_are_left() -> None:
    logits = SimpleNamespace(
        next_token_logits=torch.arange(5)[:, None],
        input_top_logprobs_val=[[], ["a"], ["b"], [], ["c"]],
        input_top_logprobs_idx=None,
        input_token_ids_logprobs_val=[[], [1], [2], [], [3]],
        input_token_ids_logprobs_idx=None,
    )
    unfold(logits, [False, True, True, False, True])
    assert logits.next_token_logits.flatten().tolist() == [1, 2, 4]
    assert logits.input_top_logprobs_val == [["a"], ["b"], ["c"]]
    assert logits.input_token_ids_logprobs_val == [[1], [2], [3]] and logits.input_top_logprobs_idx is None


def part(logits: list[int], values: list[object] | None, flat: list[float] | None) -> SimpleNamespace:
    return SimpleNamespace(
        next_token_logits=torch.tensor(logits, dtype=torch.float).reshape(-1, 1),
        input_top_logprobs_val=values,
        input_top_logprobs_idx=None,
        input_token_ids_logprobs_val=None,
        input_token_ids_logprobs_idx=None,
        input_token_logprobs=None if flat is None else torch.tensor(flat),
    )


def test_a_pass_with_more_rows_than_fit_is_joined_from_its_parts() -> None:
    # The second part holds no request's last row.
    parts = [part([1, 2], [["a"], ["b"]], [0.5, 0.25]), part([], [], []), part([3], [["c"]], [0.125])]
    join(parts)
    whole = parts[-1]
    assert whole.next_token_logits.flatten().tolist() == [1, 2, 3]
    assert whole.input_top_logprobs_val == [["a"], ["b"], ["c"]] and whole.input_top_logprobs_idx is None
    assert whole.input_token_logprobs.tolist() == [0.5, 0.25, 0.125]


def test_no_part_of_a_pass_has_more_rows_than_the_server_runs_requests() -> None:
    whole = batch([0, 100], [20, 6])
    whole.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    placed = [[(3, 8), (12, 19)], [(101, 103)]]
    cache = SimpleNamespace(
        admitted={"r0": object(), "r1": object()}, lessons=SimpleNamespace(forward=None), place=lambda passes: placed
    )
    runner = SimpleNamespace(
        kvcmas_cache=cache,
        max_running_requests=2,
        req_to_token_pool=SimpleNamespace(size=5),
        kv_index_translator=NoTranslation(),
    )
    rows, computed = [], []

    def forward(runner: object, folded: SimpleNamespace) -> SimpleNamespace:
        rows.append(folded.batch_size)
        computed.extend(folded.positions.tolist())
        return SimpleNamespace(logits_output=part(folded.seq_lens.tolist(), None, None))

    output = around_forward(forward, runner, whole)
    assert rows == [2, 2, 1]
    assert computed == [0, 1, 2, 8, 9, 10, 11, 19, 100, 103, 104, 105]
    # The logits of each request are those of its last token.
    assert output.logits_output.next_token_logits.flatten().tolist() == [20, 106]
