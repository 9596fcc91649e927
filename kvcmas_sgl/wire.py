"""Wire format of the agent hint: which role asks, and which part of its prompt is shared.

The hint is one action in SGLang's ``kv_hints`` envelope (``/generate`` and ``Engine.generate``)::

    {"protocol_version": "1", "message_id": "...", "actions": [
        {"action_id": "...", "action_type": "kvcmas.agent", "action_version": "1",
         "payload": {"role": "critic", "unit": "token", "spans": [[31, 2080]], "workflow": "w-7"}}]}

Payload fields:

``role``      name of the agent, 1 to 256 characters.
``spans``     ``[start, end)`` marks of shared text in the prompt: ascending, not empty, not overlapping.
``unit``      ``token`` (offsets into ``input_ids``; default) or ``char`` (offsets into ``text``).
``workflow``  optional name of the run that this request belongs to.
``reuse``     ``auto`` (default) or ``never``: prefill this request densely, and let it replace corrected KV.
``policy``, ``estimator``, ``head``, ``max_kl``  overrides of the server's settings, where it allows them
             (``--kvcmas-allow-overrides``).
``auto``      alone and false: this request is no agent's; spans are not looked for in it (``--kvcmas-auto``).

Other actions in the envelope are ignored, as SGLang's contract says. This module imports no SGLang.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvcmas_sgl.config import MAX_KL, EstimatorName, Policy

ACTION_TYPE = "kvcmas.agent"
ACTION_VERSION = "1"
PROTOCOL_VERSION = "1"
MAX_SPANS = 64
MAX_NAME_CHARS = 256

Unit = Literal["token", "char"]
Reuse = Literal["auto", "never"]
Span = tuple[int, int]

OVERRIDES = ("policy", "estimator", "head", "max_kl")
"""Fields that only a server with ``--kvcmas-allow-overrides`` accepts."""

MAX_HEAD = 1 << 20
_FIELDS = ("role", "spans", "unit", "workflow", "reuse", *OVERRIDES)


class HintError(ValueError):
    """A malformed agent hint; the message is one sentence that names field, value and what is allowed."""


@dataclass(frozen=True)
class AgentHint:
    """A validated hint. ``spans`` are ascending, disjoint and non-empty ``[start, end)`` pairs in ``unit``s.

    The hint of a request that opts out of automatic mode is `OPT_OUT`: it has no role.
    """

    role: str
    spans: tuple[Span, ...]
    unit: Unit = "token"
    workflow: str | None = None
    reuse: Reuse = "auto"
    policy: Policy | None = None
    estimator: EstimatorName | None = None
    head: int | None = None
    max_kl: float | None = None

    def payload(self) -> dict[str, Any]:
        """The JSON form; optional fields that are not set are left out."""
        if self == OPT_OUT:
            return {"auto": False}
        values: dict[str, Any] = {
            "role": self.role,
            "unit": self.unit,
            "spans": [list(span) for span in self.spans],
            "reuse": self.reuse,
        }
        for name in ("workflow", *OVERRIDES):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        return values


OPT_OUT = AgentHint(role="", spans=())


def agent_hint(
    role: str,
    spans: Iterable[Sequence[int]],
    unit: Unit = "token",
    workflow: str | None = None,
    reuse: Reuse | None = None,
    policy: Policy | None = None,
    estimator: EstimatorName | None = None,
    head: int | None = None,
    max_kl: float | None = None,
) -> dict[str, Any]:
    """Build the ``kv_hints`` envelope for one request.

    Parameters are the payload fields of the module's docstring. Raises `HintError` on bad values.
    """
    values = {
        "role": role,
        "spans": [list(span) for span in spans],
        "unit": unit,
        "workflow": workflow,
        "reuse": reuse,
        "policy": policy,
        "estimator": estimator,
        "head": head,
        "max_kl": max_kl,
    }
    return hint_envelope(parse_payload({name: value for name, value in values.items() if value is not None}))


def hint_envelope(hint: AgentHint) -> dict[str, Any]:
    """Wrap a validated hint in SGLang's envelope."""
    action = {
        "action_id": uuid.uuid4().hex,
        "action_type": ACTION_TYPE,
        "action_version": ACTION_VERSION,
        "payload": hint.payload(),
    }
    return {"protocol_version": PROTOCOL_VERSION, "message_id": uuid.uuid4().hex, "actions": [action]}


def find_hint(envelope: Any) -> AgentHint | None:
    """The agent hint in a typed ``KvHintsEnvelope``, or None when it holds none.

    Raises `HintError` for an unknown version, a malformed payload or more than one agent action.
    """
    actions = [action for action in getattr(envelope, "actions", ()) if action.action_type == ACTION_TYPE]
    if not actions:
        return None
    if len(actions) > 1:
        raise HintError(f"kv_hints holds {len(actions)} {ACTION_TYPE} actions, but one request has one agent.")
    version = actions[0].action_version
    if version != ACTION_VERSION:
        raise HintError(f"{ACTION_TYPE} action_version is {version!r}, but must be {ACTION_VERSION!r}.")
    return parse_payload(actions[0].payload)


def parse_payload(payload: Mapping[str, Any]) -> AgentHint:
    """Validate a payload (see the module's docstring). Raises `HintError`."""
    if not isinstance(payload, Mapping):
        raise HintError(f"the payload of {ACTION_TYPE} is {shown(payload)}, but must be an object.")
    if "auto" in payload:
        if payload["auto"] is not False or len(payload) > 1:
            raise HintError(f"auto is {shown(payload['auto'])}, but may only be false, and only stand alone.")
        return OPT_OUT
    for name in payload:
        if name not in _FIELDS:
            raise HintError(f"unknown field {shown(name)} in {ACTION_TYPE}; known are {', '.join(_FIELDS)}.")
    return AgentHint(
        role=_name(payload, "role"),
        spans=_spans(payload.get("spans", [])),
        unit=_choice(payload, "unit", get_args(Unit)) or "token",
        workflow=_name(payload, "workflow") if payload.get("workflow") is not None else None,
        reuse=_choice(payload, "reuse", get_args(Reuse)) or "auto",
        policy=_choice(payload, "policy", get_args(Policy)),
        estimator=_choice(payload, "estimator", get_args(EstimatorName)),
        head=_head(payload.get("head")),
        max_kl=_max_kl(payload.get("max_kl")),
    )


def check_range(hint: AgentHint, length: int, what: str) -> None:
    """Raise `HintError` when a span ends after ``length`` (the prompt's size in the hint's unit)."""
    if hint.spans and hint.spans[-1][1] > length:
        start, end = hint.spans[-1]
        raise HintError(f"span [{start}, {end}) ends after the prompt, which has {length} {what}.")


def to_token_spans(spans: Sequence[Span], offsets: Sequence[Span]) -> tuple[Span, ...]:
    """Turn character spans into token spans: the tokens that lie wholly inside.

    ``offsets`` are each token's ``[start, end)`` characters as a fast tokenizer reports them. A token that
    straddles a border belongs to the agent's own text; a span without a whole token is dropped.
    """
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    result = []
    for start, end in spans:
        # Special tokens have empty offsets (0, 0), before every border.
        first = bisect_left(starts, start)
        last = bisect_right(ends, end)
        if first < last:
            result.append((first, last))
    return tuple(result)


def _head(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_HEAD):
        return value
    raise HintError(f"head is {shown(value)}, but must be an integer from 0 to {MAX_HEAD} (tokens).")


def _max_kl(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or (number and 0 <= value <= MAX_KL):
        return value
    raise HintError(f"max_kl is {shown(value)}, but must be a number from 0 to {MAX_KL} (nats).")


def _spans(value: Any) -> tuple[Span, ...]:
    if not isinstance(value, (list, tuple)):
        raise HintError(f"spans is {shown(value)}, but must be a list of [start, end) pairs.")
    if len(value) > MAX_SPANS:
        raise HintError(f"spans holds {len(value)} spans, but at most {MAX_SPANS} are allowed.")
    spans: list[Span] = []
    for item in value:
        pair = isinstance(item, (list, tuple)) and len(item) == 2
        if not pair or not all(isinstance(mark, int) and not isinstance(mark, bool) for mark in item):
            raise HintError(f"span {shown(item)} must be a pair of integers [start, end).")
        start, end = item
        if not 0 <= start < end:
            raise HintError(f"span [{shown(start)}, {shown(end)}) must satisfy 0 <= start < end.")
        if end >= 1 << 31:
            raise HintError(f"span [{shown(start)}, {shown(end)}) ends beyond {1 << 31}, the largest mark allowed.")
        if spans and start < spans[-1][1]:
            raise HintError(
                f"span [{start}, {end}) overlaps or precedes [{spans[-1][0]}, {spans[-1][1]}): spans must ascend."
            )
        spans.append((start, end))
    return tuple(spans)


def _name(payload: Mapping[str, Any], field: str) -> str:
    value = payload.get(field)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME_CHARS:
        raise HintError(f"{field} is {shown(value)}, but must be a text of 1 to {MAX_NAME_CHARS} characters.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise HintError(f"{field} is {shown(value)}, but must be text that UTF-8 can hold.")
    return value


def _choice(payload: Mapping[str, Any], field: str, allowed: tuple[str, ...]) -> Any:
    value = payload.get(field)
    if value is not None and value not in allowed:
        raise HintError(f"{field} is {shown(value)}, but must be one of {', '.join(allowed)}.")
    return value


def shown(value: Any) -> str:
    """A value of the client's in an error message: short, and never an error itself."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python refuses to print an integer of more than 4,300 digits, and what is nested too deep.
        text = f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= 60 else text[:57] + "..."
