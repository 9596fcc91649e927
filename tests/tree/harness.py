"""A request's way through DeltaRadixCache, on SGLang's Python tree core and a small CPU pool.

The model is a formula: the canonical K and V of a token are its embedding plus, for layers >= 1, an affine
function of it that depends on the agent prefix. So every value in the pool can be told without the cache, and the
delta between two agents is exactly affine in the source's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from unittest import mock

import numpy as np
import torch
from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.node_marks import DeltaFullComponent
from kvcmas_sgl.radix_ext.placement import Pass
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Source, digest
from kvcmas_sgl.triton_kernels import RotaryTable, rotate
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.mem_cache_utils import finish_req

from kvcmas_sgl.config import KvcmasConfig
from kvcmas_sgl.wire import agent_hint, parse_payload

LAYERS, HEADS, DIM, VOCAB = 3, 2, 8, 512
WIDTH = HEADS * DIM


class FormulaModel:
    """K and V of a token in an agent's context, fp32."""

    def __init__(self, table: RotaryTable) -> None:
        self.table = table
        generator = torch.Generator().manual_seed(0)
        # Six directions: a few short documents are then enough to learn from.
        directions = torch.randn(6, 2 * WIDTH, generator=generator)
        self.embedding = torch.randn(VOCAB, 6, generator=generator) @ directions

    def kv(self, prefix: Sequence[int], tokens: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K after RoPE and V ``[L, n, H, d]`` of ``tokens`` at positions from ``start`` on."""
        generator = torch.Generator().manual_seed(hash(tuple(prefix)) % (1 << 31))
        x = self.embedding[torch.tensor(tokens)]
        rows = []
        for layer in range(LAYERS):
            # Mostly a shift: a few short documents teach the estimator little about how tokens differ.
            turn = 0.004 * torch.randn(2 * WIDTH, 2 * WIDTH, generator=generator)
            shift = 0.4 * torch.randn(2 * WIDTH, generator=generator)
            rows.append(x if layer == 0 else x + x @ turn + shift)
        both = torch.stack(rows).unflatten(-1, (2, HEADS, DIM))
        positions = torch.arange(start, start + len(tokens))
        return rotate(both[:, :, 0], positions, self.table), both[:, :, 1]


class Tree:
    """One cache over one pool, and the steps that the scheduler takes with a request."""

    def __init__(self, slots: int = 1024, **settings: object) -> None:
        self.table = RotaryTable.from_theta(10000.0, DIM, 2048)
        self.model = FormulaModel(self.table)
        config = KvcmasConfig.from_mapping(
            {"min_span": 4, "head": 0, "rank": 2 * WIDTH, "own_energy": 1.0, "max_kl": 0.05, **settings}
        )
        cache_config = CacheConfig(
            kv_size=slots,
            num_layers=LAYERS,
            head_num=HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            max_context_len=1024,
        )

        def build(params: object) -> DeltaRadixCache:
            pool = params.token_to_kv_pool_allocator.get_kvcache()  # type: ignore[attr-defined]
            view = KVView(pool.k_buffer, pool.v_buffer, self.table)
            return DeltaRadixCache(params, config=config, view=view)  # type: ignore[arg-type]

        with mock.patch.object(fixtures, "UnifiedRadixCache", build):
            built = partial(fixtures.build_fixture, cache_config)(
                component_registry_override={ComponentType.FULL: DeltaFullComponent}
            )
        self.cache: DeltaRadixCache = built[0]
        self.allocator, self.rows = built[1], built[2]
        self.served = 0

    def request(
        self,
        prompt: Sequence[int],
        hint: dict[str, object] | None = None,
        *,
        salt: str | None = None,
        auto: Sequence[int] | None = None,
    ) -> Req:
        """A request as the scheduler's seam would make it.

        ``hint`` is an agent payload; ``auto``, in automatic mode, the agent prefix that the formula model goes by.
        """
        self.served += 1
        req = Req(
            rid=f"r{self.served}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
            cache_salt=salt,
        )
        if hint is not None or auto is not None:
            parsed = parse_payload(hint) if hint is not None else None
            req.kvcmas = AgentRequest.of(parsed, array("q", prompt), digest((salt or "").encode()))
            req.extra_key = f"secret:{parsed.role if parsed else 'auto'}"
            req.formula_prefix = prompt[: req.kvcmas.prefix[0]] if auto is None else auto
        req.full_untruncated_fill_ids = array("q", prompt)
        return req

    def admit(self, req: Req, upto: int | None = None) -> None:
        """Match and take the request into a pass; afterwards it holds its lock and its row.

        ``upto`` ends the first chunk of a chunked prefill; `chunk` goes on.
        """
        cache, prompt = self.cache, req.origin_input_ids
        match_kv_cache(req, cache, prompt, max_prefix_len=len(prompt) - 1)
        req.lock = cache.lock(req.last_node)
        cache.hold(req)
        self.rows.alloc([req])
        req.kv.cache_protected_len = req.prefix_len
        self.rows.write(
            (req.kv.req_pool_idx, slice(0, req.prefix_len)), cache.prefix_device_indices(req).to(torch.int32)
        )
        self.run(req, len(prompt) if upto is None else upto)

    def run(self, req: Req, upto: int) -> None:
        """One pass over ``[prefix, upto)``: allocate, place what is planned, "compute" the rest."""
        cache, start = self.cache, req.prefix_len
        evict_from_tree_cache(cache, upto - start)
        fresh = self.allocator.alloc(upto - start)
        assert fresh is not None
        self.rows.write((req.kv.req_pool_idx, slice(start, upto)), fresh.to(torch.int32))
        req.extend_end = req.kv.kv_committed_len = req.kv.kv_allocated_len = upto
        (placed,) = cache.place([Pass(req, start, upto, fresh.long())])
        assert all(start <= first < last < upto for first, last in placed)
        self.computed = [i for i in range(start, upto) if not any(a <= i < b for a, b in placed)]
        k, v = self.expected(req)
        at = torch.tensor(self.computed)
        slots = fresh.long()[at - start]
        for layer in range(LAYERS):
            cache.view.k_buffers[layer][slots] = k[layer, at]
            cache.view.v_buffers[layer][slots] = v[layer, at]

    def chunk(self, req: Req, upto: int) -> None:
        """Checkpoint the chunk that was run, and run the next one up to ``upto``."""
        self.cache.checkpoint(req, up_to=req.extend_end)
        req.prefix_len = req.extend_end
        self.cache.continue_plan(req)
        self.cache.hold(req)
        self.run(req, upto)

    def expected(self, req: Req, answer: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """What a dense run gives for the whole prompt and an answer, ``[L, n, H, d]``."""
        return self.model.kv(getattr(req, "formula_prefix", ()), [*req.origin_input_ids, *answer], 0)

    def held(self, req: Req) -> tuple[torch.Tensor, torch.Tensor]:
        """What the pool holds for the request's row, ``[L, n, H, d]``."""
        slots = self.rows.req_to_token[req.kv.req_pool_idx, : len(req.origin_input_ids)].long()
        view = self.cache.view
        return torch.stack([b[slots] for b in view.k_buffers]), torch.stack([b[slots] for b in view.v_buffers])

    def finish(self, req: Req, answer: Sequence[int] = ()) -> None:
        """Checkpoint as after the prefill, "generate" an answer, then finish and give the row back."""
        self.cache.checkpoint(req, up_to=req.extend_end)
        stop = req.extend_end + len(answer)
        if answer:
            slots = self.allocator.alloc(len(answer))
            assert slots is not None
            self.rows.write((req.kv.req_pool_idx, slice(req.extend_end, stop)), slots.to(torch.int32))
            # The last token that is generated never gets KV.
            req.output_ids.extend([*answer, 7])
            k, v = self.expected(req, answer)
            for layer in range(LAYERS):
                self.cache.view.k_buffers[layer][slots] = k[layer, req.extend_end :]
                self.cache.view.v_buffers[layer][slots] = v[layer, req.extend_end :]
            req.kv.kv_committed_len = req.kv.kv_allocated_len = stop
        req.finished_reason = FINISH_LENGTH(length=0)
        finish_req(self.cache, req, stop)
        self.rows.free(req)

    def serve(
        self,
        prompt: Sequence[int],
        hint: dict[str, object] | None = None,
        *,
        salt: str | None = None,
        settle: bool = True,
        answer: Sequence[int] = (),
        auto: Sequence[int] | None = None,
    ) -> dict[str, object]:
        """A whole request; returns its report (empty without a hint).

        ``settle`` also takes the learning steps that follow and checks the tree, which no request may hold then.
        """
        req = self.request(prompt, hint, salt=salt, auto=auto)
        self.admit(req)
        self.finish(req, answer)
        if settle:
            self.learn()
            self.check()
        return req.kvcmas.report.as_dict() if hint is not None or auto is not None else {}

    def learn(self) -> None:
        while self.cache.learner.step():
            pass

    def check(self) -> None:
        """SGLang's own tree check, and: every slot is free or in the tree, once."""
        self.cache.sanity_check()
        in_tree = self.cache.all_values_flatten()
        assert in_tree.unique().numel() == in_tree.numel()
        assert self.allocator.available_size() + in_tree.numel() == self.allocator.size
        assert self.cache.learner.state_bytes == self.cache.deltas.nbytes + sum(
            estimator.state_bytes for estimator in self.cache.estimators.values()
        )


class Role:
    """A named agent prefix, and prompts around a document."""

    def __init__(self, name: str, prefix: Sequence[int]) -> None:
        self.name, self.prefix = name, list(prefix)

    def prompt(self, document: Sequence[int], question: Sequence[int] = (7, 7)) -> list[int]:
        return [*self.prefix, *document, *question]

    def several(
        self, spans: Sequence[Sequence[int]], glue: Sequence[int] = (5, 6, 5), question: Sequence[int] = (7, 7)
    ) -> tuple[list[int], dict[str, object]]:
        """A prompt with glue between its spans, and its payload."""
        prompt, marks = list(self.prefix), []
        for number, span in enumerate(spans):
            prompt += glue if number else []
            marks.append((len(prompt), len(prompt) + len(span)))
            prompt += span
        return [*prompt, *question], agent_hint(self.name, marks)["actions"][0]["payload"]

    def hint(self, document: Sequence[int], **fields: object) -> dict[str, object]:
        start = len(self.prefix)
        envelope = agent_hint(self.name, [(start, start + len(document))])
        return {**envelope["actions"][0]["payload"], **fields}

    def read(
        self, tree: Tree, document: Sequence[int], *, salt: str | None = None, settle: bool = True, **fields: object
    ) -> dict:
        return tree.serve(self.prompt(document), self.hint(document, **fields), salt=salt, settle=settle)


def document(seed: int, length: int = 48) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(20, VOCAB, (length,), generator=generator).tolist()


def sources_of(tree: Tree, text: Sequence[int]) -> list[Source]:
    """Who holds a content, newest first."""
    return tree.cache.sources.content(digest(b""), np.array(text)).sources


PLANNER = Role("planner", [1, 2, 3, 4, 5])
CRITIC = Role("critic", [1, 9, 8, 10, 11, 12, 13])
CODER = Role("coder", [1, 14, 15])


def learned(tree: Tree) -> None:
    """Planner, then critic, read five documents: the edge is learned."""
    for seed in range(5):
        PLANNER.read(tree, document(seed))
        CRITIC.read(tree, document(seed))
