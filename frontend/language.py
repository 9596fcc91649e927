"""`agent` and `shared`: the two primitives, built from nodes that SGLang's interpreter and tracer know.

Both dispatch on node classes that they own, so a node class of our own would need a patch in each. A constant
text whose value is a `MarkedPiece` needs none.
"""

from __future__ import annotations

from reprlib import repr
from typing import Any, Literal

from kvcmas_sgl.frontend.marks import Agent, Mark, MarkedPiece, Span
from sglang.lang.api import system as system_message
from sglang.lang.ir import (
    SglArgument,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglImage,
    SglVariable,
    SglVideo,
)

# What `trace` passes in place of values that only a run knows.
_PLACEHOLDERS = (SglArgument, SglVariable)
_REUSE = ("auto", "never")


def agent(
    role: str, system: str, workflow: str | None = None, reuse: Literal["auto", "never"] | None = None
) -> SglExpr:
    """The system message of an agent, and the name of its role for the whole prompt.

    Args:
        role: name of the agent; agents with the same name must have the same `system` to share their prefix.
        system: its system prompt, put into the chat template as SGLang's `sgl.system` does.
        workflow: optional id that groups the requests of one multi-agent run.
        reuse: None or "auto" lets the server decide per span; "never" has everything computed.

    Raises:
        TypeError, ValueError: one sentence that names the argument, its value and what is allowed.
    """
    if isinstance(role, _PLACEHOLDERS) or isinstance(system, _PLACEHOLDERS):
        return system_message(system)
    _require_text("agent(role=...)", role)
    _require_text("agent(system=...)", system)
    if workflow is not None:
        _require_text("agent(workflow=...)", workflow)
    if reuse is not None and reuse not in _REUSE:
        raise ValueError(f'agent(reuse={reuse!r}) is unknown; allowed are "auto", "never" and None.')
    mark = Agent(0, len(system), role, workflow, reuse)
    return system_message(_marked(system, mark))


def shared(text: str | SglExpr, name: str | None = None) -> SglExpr:
    """Text that other agents read too (a document, a question, a tool's or another agent's result).

    Use it wherever SGLang takes text: `sgl.user(shared(doc) + "What is wrong?")`. A prompt without `agent`
    sends no marks. Mark the whole of what is shared in one call; the text around it is the agent's own.

    Args:
        text: the shared text, known before the call: a string, or SGLang's constant text.
        name: optional name of the span, for your own use (`Span.name`); it is not sent.

    Raises:
        TypeError, ValueError: one sentence that names the argument, its value and what is allowed.
    """
    if isinstance(text, _PLACEHOLDERS):
        return text
    value = _constant(text)
    _require_text("shared(text)", value)
    return _marked(value, Span(0, len(value), name))


def _marked(text: str, mark: Mark) -> SglConstantText:
    return SglConstantText(MarkedPiece(text, mark))


def _constant(text: Any) -> Any:
    """The string that a constant expression stands for; anything else is returned as it is."""
    if isinstance(text, SglConstantText):
        if isinstance(text.value, MarkedPiece):
            raise ValueError(
                f"shared(text) holds {repr(text)}, which is marked already; marks must not lie in each other."
            )
        return text.value
    if isinstance(text, SglExprList):
        whole = ""
        for part in text.expr_list:
            value = _constant(part)
            if not isinstance(value, str):
                raise TypeError(f"shared(text) holds {repr(part)}; it takes text that is known before the call.")
            whole += value
        return whole
    if isinstance(text, SglImage | SglVideo):
        kind = "an image" if isinstance(text, SglImage) else "a video"
        raise TypeError(f"shared(text) holds {kind}; only text can be shared, so put it outside of shared().")
    return text


def _require_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {type(value).__name__} {repr(value)}; it must be a non-empty string.")
    if not value.strip():
        raise ValueError(f"{what} is {value!r}; it must be a non-empty string.")
