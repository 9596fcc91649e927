"""The backend that sends what `agent` and `shared` mark."""

from __future__ import annotations

from typing import Any

from kvcmas_sgl.frontend.marks import Prompt
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor


class AgentRuntimeEndpoint(RuntimeEndpoint):
    """SGLang's `RuntimeEndpoint` whose requests carry `kv_hints`: the agent's role and the shared spans.

    Same arguments, same requests otherwise; a program without `agent` sends none. What the server did with
    them is in `state.get_meta_info(name)["kvcmas"]`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The base class joins forks by a request that SGLang's server no longer has; as text, marks survive.
        self.support_concate_and_append = False

    def cache_prefix(self, prefix_str: str) -> None:
        # The base class sends this prefix without the executor, hence past `_add_images`.
        data: dict[str, Any] = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._generate_http_request(_NO_IMAGES, data)

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        # Every request body of a program (generate, stream, select, commit) passes here on its way out.
        if len(s.images_) > 1:
            # The base class sends one picture at most.
            pictures = [encoded for _, encoded in s.images_]
            if isinstance(data.get("text"), list):
                data["image_data"] = [pictures] * len(data["text"])
            else:
                data |= {"image_data": pictures, "modalities": ["multi-images"]}
        else:
            super()._add_images(s, data)
        hints = kv_hints_of(data.get("text"))
        if hints is not None:
            data["kv_hints"] = hints


class _NoImages:
    images_: tuple[()] = ()


_NO_IMAGES: Any = _NoImages()


def kv_hints_of(text: str | list[str] | None) -> dict[str, Any] | list[dict[str, Any]] | None:
    """The `kv_hints` of a request's `text`: one envelope (per text of a batch), or None without an agent."""
    if isinstance(text, list):
        envelopes = [kv_hints_of(one) for one in text]
        return envelopes if all(envelopes) else None  # type: ignore[return-value]
    if not isinstance(text, Prompt) or text.agent is None:
        return None
    # At call time: the wire format belongs to the server's room, and only programs with agents need it.
    from kvcmas_sgl.wire import MAX_SPANS, agent_hint

    agent = text.agent
    spans = [(span.start, span.end) for span in text.spans]
    # Variables become spans without being asked for, so more than the wire allows is no error: the longest count.
    spans = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:MAX_SPANS])
    return agent_hint(agent.role, spans, unit="char", workflow=agent.workflow, reuse=agent.reuse)
