"""The executor of an agent's own prompt inside a program, and how its variables reach the program.

SGLang's worker dies of an error: a variable that is submitted later is never answered, and who reads it waits
for ever. An agent's worker outlives an error instead. It answers everything that follows by failing, so whoever
reads, syncs or joins gets the error.

Agents refer to their program weakly. SGLang ends a program's worker in `__del__`, which takes a lock of
`threading`; in a reference cycle the garbage collector would call it at any time, also under that lock.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import suppress
from typing import Any

from kvcmas_sgl.frontend.language import written
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import (
    SglCommitLazy,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglGen,
    SglSelect,
    SglSeparateReasoning,
    SglVarScopeBegin,
    SglVarScopeEnd,
)

_NAMED = SglGen | SglSelect | SglSeparateReasoning | SglVarScopeBegin


class AgentError(RuntimeError):
    """An agent of a program failed; `__cause__` is what went wrong, and nothing after it was computed."""


class AgentExecutor(StreamExecutor):
    """Runs one agent's prompt on the backend, chat template and sampling parameters of `base`.

    Args:
        base: the executor to take settings from (a program's, or an agent's that forks).
        role, instance: whose prompt it is; see `Agent`.
        program: the executor whose readers see this agent's variables, or None for a fork.
        reports: where `meta_info["kvcmas"]` of each generation is appended.
    """

    variables: dict[str, Any]
    error_: BaseException | None

    def __init__(
        self,
        base: StreamExecutor,
        role: str,
        instance: str,
        program: StreamExecutor | None,
        reports: list[dict[str, Any]],
    ) -> None:
        self.role = role
        self.instance = instance
        self.program = None if program is None else weakref.ref(program)
        self.reports = reports
        self.forks: list[AgentExecutor] = []
        self.published: set[str] = set()
        self.unanswered: set[str | None] = set()
        self.ended = False
        super().__init__(
            base.backend,
            base.arguments,
            base.default_sampling_para,
            base.chat_template,
            base.stream,
            base.num_api_spec_tokens,
            base.use_thread,
        )
        if self.stream and program is not None:
            # Whoever streams a variable of the program reads its dictionaries while they grow.
            self.variables = _Mirrored(program.variables)
            self.meta_info = _Mirrored(program.meta_info)

    def submit(self, expr: SglExpr) -> None:
        if self.ended:
            raise RuntimeError(f"Agent {self.role!r} has ended; text is added inside its `with` block only.")
        super().submit(expr)
        if not self.use_thread and self.error_ is not None:
            raise self.failure()

    def sync(self) -> None:
        super().sync()
        if self.error_ is not None:
            raise self.failure()

    def error(self) -> BaseException | None:
        super().sync()
        return self.error_

    def get_var(self, name: str) -> Any:
        """The variable as one shared span of this agent (text only); waits for it. Raises `AgentError`, `KeyError`."""
        event = self.variable_event.get(name)
        if event is not None:
            event.wait()
        if name in self.unanswered or (self.error_ is not None and name not in self.variables):
            raise self.failure(name)
        return written(self.variables[name], name, self.instance)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        info = super().get_meta_info(name, timeout)
        if name in self.unanswered:
            raise self.failure(name)
        return info

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> list[AgentExecutor]:
        # As the base class, with executors of this class: the base class names its own.
        if size > 1 and self.text_:
            self.submit(SglCommitLazy())
        self.sync()
        forks = [AgentExecutor(self, self.role, self.instance, None, self.reports) for _ in range(int(size))]
        for fork in forks:
            fork.variables = dict(self.variables)
            fork.text_ = self.text_
            fork.messages_ = list(self.messages_)
            fork.cur_role = self.cur_role
            fork.cur_role_begin_pos = self.cur_role_begin_pos
            fork.fork_start_text_pos = len(self.text_)
            fork.images_ = list(self.images_)
        self.forks += forks
        return forks

    def end(self) -> None:
        # Once only: a second end of the queue would be left in it, and `sync` would wait for it.
        if not self.ended:
            self.ended = True
            super().end()

    def leave(self) -> None:
        """End of the agent's block: all its variables belong to the program, which waits for them in its turn."""
        # What was submitted is published since; what was set by hand, or came from forks and agents of its own, is not.
        for name in {*self.variable_event, *self.variables} - self.published:
            self._publish(name)
        program = None if self.program is None else self.program()
        if program is not None and not program.is_finished:
            program.submit(_Join(self, program))
        self._end_all()

    def failure(self, name: str | None = None) -> AgentError:
        """What to raise for `error_`, or for the variable `name` that has no value."""
        cause = self.error_
        if isinstance(cause, AgentError):
            # A fork, or an agent that this one opened: it has said who failed.
            error, cause = AgentError(str(cause)), cause.__cause__
        elif cause is None:
            error = AgentError(f"Agent {self.role!r} failed: variable {name!r} was never written.")
        else:
            error = AgentError(f"Agent {self.role!r} failed: {str(cause) or type(cause).__name__}")
        error.__cause__ = cause
        return error

    def settle(self) -> None:
        """Wait for all that was submitted.

        A variable that has no value then (an open `var_scope`) gets none; a fork's error is the agent's.
        """
        super().sync()
        for name in list(self.variable_event):
            self._give_up(name)
        for fork in self.forks:
            fork.settle()
            self.error_ = self.error_ or fork.error_

    def texts(self) -> list[str]:
        """The agent's prompt as it is now, and those of its forks."""
        return [self.text_, *(text for fork in self.forks for text in fork.texts())]

    def _end_all(self) -> None:
        # A fork that nobody joined would keep its thread, and with it the process.
        for fork in self.forks:
            fork._end_all()
        self.end()

    def _init_var_event(self, expr: SglExpr) -> None:
        super()._init_var_event(expr)
        if isinstance(expr, _NAMED):
            self._publish(expr.name)

    def _publish(self, name: str | None) -> None:
        program = None if self.program is None else self.program()
        if program is None or name is None:
            return
        self.published.add(name)
        program.variable_event[name] = Published(self, program, name, self.variable_event.get(name))
        if self.stream and name in self.stream_var_event:
            program.stream_var_event[name] = self.stream_var_event[name]

    def _execute(self, other: SglExpr) -> None:
        if self.error_ is None:
            try:
                super()._execute(other)
                return
            except Exception as error:
                self.error_ = error
        self._release(other)

    def _execute_gen(self, expr: SglGen) -> None:
        super()._execute_gen(expr)
        info = self.meta_info.get(expr.name)
        if isinstance(info, dict) and "kvcmas" in info:
            self.reports.append(info["kvcmas"])

    def _release(self, expr: SglExpr) -> None:
        """Let nobody wait for what the expression would have written."""
        if isinstance(expr, SglExprList):
            for part in expr.expr_list:
                self._release(part)
        elif isinstance(expr, _NAMED | SglVarScopeEnd):
            self._give_up(expr.name)

    def _give_up(self, name: str | None) -> None:
        event = self.variable_event.get(name)
        if event is None or event.is_set():
            return
        self.unanswered.add(name)
        if self.stream:
            text = self.variables.get(name)  # type: ignore[arg-type]
            self.variables[name] = text if isinstance(text, str) else ""  # type: ignore[index]
        event.set()
        if self.stream:
            self.stream_var_event[name].set()


class Published:
    """An agent's variable among a program's events: whoever waits for it there has it, or gets `AgentError`."""

    def __init__(
        self, writer: AgentExecutor, program: StreamExecutor, name: str, event: threading.Event | None
    ) -> None:
        self.writer = writer
        self.program = weakref.ref(program)
        self.name = name
        self.event = event

    def wait(self, timeout: float | None = None) -> bool:
        if self.event is not None and not self.event.wait(timeout):
            return False
        value = self.writer.get_var(self.name)
        # Another agent, or the program itself, may have taken the name over since.
        program = self.program()
        if program is not None and program.variable_event.get(self.name) is self:
            program.variables[self.name] = value
            program.meta_info[self.name] = self.writer.meta_info.get(self.name)
        return True

    def is_set(self) -> bool:
        return self.event is None or self.event.is_set()

    def set(self) -> None:
        """Nothing: a program that fails sets its events, but this one is the agent's."""


class _Join(SglConstantText):
    """Empty text that the program's executor reaches once the agent is done and its variables are there.

    A failed agent becomes the program's error (`state.error()`), with a warning as SGLang gives it; the program
    itself goes on, since only what reads the agent's variables depends on it.
    """

    def __init__(self, agent: AgentExecutor, program: StreamExecutor) -> None:
        SglExpr.__init__(self)
        self.agent = agent
        self.program = program

    @property
    def value(self) -> str:
        self.agent.settle()
        for event in list(self.program.variable_event.values()):
            if isinstance(event, Published) and event.writer is self.agent:
                # A variable without a value raises where it is read.
                with suppress(AgentError):
                    event.wait()
        if self.agent.error_ is not None and self.program.error_ is None:
            self.program.error_ = self.agent.failure()
            warnings.warn(f"Error in stream_executor: {self.program.error_}", stacklevel=2)
        return ""

    def __repr__(self) -> str:
        return f"Join({self.agent.role!r})"


class _Mirrored(dict[str, Any]):
    """A dictionary that repeats what is set in it in another one."""

    def __init__(self, onto: dict[str, Any]) -> None:
        super().__init__()
        self.onto = onto

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.onto[key] = value
