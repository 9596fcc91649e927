"""`agent` and `shared`: the two primitives, built from nodes that SGLang's interpreter and tracer know.

Both dispatch on node classes that they own, so a node class of our own would need a patch in each. A constant
text whose value is a `MarkedText` needs none.
"""

from __future__ import annotations

import uuid
from reprlib import repr
from typing import Any, Literal

from kvcmas_sgl.frontend.marks import Agent, Border, Mark, MarkedText, Span
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
    return agent_message(role, system, workflow, reuse)


def agent_message(role: Any, system: Any, workflow: Any, reuse: Any, instance: str | None = None) -> SglExpr:
    """`agent`, naming also the instance (see `Agent.instance`)."""
    if isinstance(role, _PLACEHOLDERS) or isinstance(system, _PLACEHOLDERS):
        return system_message(system)
    _require_text("agent(role=...)", role)
    _require_text("agent(system=...)", system)
    workflow, reuse = (None if isinstance(value, _PLACEHOLDERS) else value for value in (workflow, reuse))
    if workflow is not None:
        _require_text("agent(workflow=...)", workflow)
    if reuse is not None and reuse not in _REUSE:
        raise ValueError(f'agent(reuse={reuse!r}) is unknown; allowed are "auto", "never" and None.')
    return system_message(_marked(system, Agent(0, len(system), role, workflow, reuse, instance)))


def shared(text: str | SglExpr, name: str | None = None) -> SglExpr:
    """Text that other agents read too (a document, a question, a tool's or another agent's result).

    Use it wherever SGLang takes text: `sgl.user(shared(doc) + "What is wrong?")`. A prompt without `agent`
    sends no marks. Mark the whole of what is shared in one call; the text around it is the agent's own.
    A variable of another agent (`s["plan"]`) is shared already, under its own name; around more text than one
    variable, the outer mark counts.

    Pictures can be shared with the text around them: `shared(sgl.image(path) + "Figure 1")`. The server tells them by
    their pixels.

    Args:
        text: the shared text, known before the call: a string, or SGLang's constant text and images.
        name: optional name of the span (`Span.name`, and its name in `flow`); it is not sent.

    Raises:
        TypeError, ValueError: one sentence that names the argument, its value and what is allowed.
    """
    if _awaits_values(text):
        return _traced(text, name)
    if _holds_pictures(text):
        return _with_pictures(text, name)
    value = _constant(text)
    if isinstance(value, MarkedText) and not value.strip():
        return SglConstantText(value)  # A variable may be empty; there is nothing to share then.
    _require_text("shared(text)", value)
    variable = whole_span(value)
    if variable is None or variable.writer is None:
        return _marked(value, Span(0, len(value), name))
    return _marked(value, variable)


class SharedArgument(SglArgument):
    """In a trace: an argument of the program that is shared; `span_name` as given to `shared`."""

    def __init__(self, argument: SglArgument, span_name: str | None) -> None:
        super().__init__(argument.name, argument.value)
        self.span_name = span_name


def written(value: Any, name: str, writer: str) -> Any:
    """A variable's `value` as others read it: text (or each text of a list) as one span of its `writer`.

    What is one span already keeps its writer; empty text has no span, other values stay as they are.
    """
    if isinstance(value, list):
        return [written(one, name, writer) for one in value]
    if not isinstance(value, str) or whole_span(value) is not None:
        return value
    return MarkedText(value, (Span(0, len(value), name, writer),) if value else ())


def whole_span(text: str) -> Span | None:
    """The span that covers all of `text`, or None."""
    spans = text.spans if isinstance(text, MarkedText) else ()
    return spans[0] if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, len(text)) else None


def _marked(text: str, mark: Mark) -> SglConstantText:
    return SglConstantText(MarkedText(text, (mark,)))


def _awaits_values(text: Any) -> bool:
    if isinstance(text, SglExprList):
        return any(map(_awaits_values, text.expr_list))
    return isinstance(text, _PLACEHOLDERS)


def _traced(text: Any, name: str | None) -> SglExpr:
    if isinstance(text, SglExprList):
        return SglExprList([_traced(part, name) for part in text.expr_list])
    return SharedArgument(text, name) if isinstance(text, SglArgument) else text


def _holds_pictures(text: Any) -> bool:
    if isinstance(text, SglExprList):
        return any(map(_holds_pictures, text.expr_list))
    return isinstance(text, SglImage)


def _with_pictures(text: Any, name: str | None) -> SglExpr:
    key = uuid.uuid4().hex
    first, last = (_marked("", Border(0, 0, key, opens, name)) for opens in (True, False))
    return SglExprList([first, *_plain_parts(text), last])


def _plain_parts(text: Any) -> list[SglExpr]:
    """Pictures and, without the marks of variables, text: the outer mark counts."""
    if isinstance(text, SglExprList):
        return [part for one in text.expr_list for part in _plain_parts(one)]
    if isinstance(text, SglImage):
        return [text]
    value = _constant(text)
    if not isinstance(value, str):
        raise TypeError(f"shared(text) holds {repr(text)}; it takes text that is known before the call.")
    return [SglConstantText("".join(value))]


def _constant(text: Any) -> Any:
    """The string that a constant expression stands for; anything else is returned as it is."""
    if isinstance(text, SglConstantText):
        if isinstance(text.value, MarkedText) and any(mark.writer is None for mark in text.value.spans):
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
    if isinstance(text, SglVideo):
        raise TypeError(
            "shared(text) holds a video; only text and images can be shared, so put it outside of shared()."
        )
    return text


def _require_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {type(value).__name__} {repr(value)}; it must be a non-empty string.")
    if not value.strip():
        raise ValueError(f"{what} is {value!r}; it must be a non-empty string.")
