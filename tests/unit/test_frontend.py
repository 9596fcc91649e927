"""The frontend is a client: what it sends is recorded by a real HTTP server and compared with the program."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import Agent, AgentRuntimeEndpoint, Prompt, Span, agent, shared
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.ir import SglExprList

DOC = "Café Zürich 🦊👩‍👩‍👧 serves 東京 ramen. " * 6
SYSTEM = "You are a harsh critic 🔥."
ANSWER = " Too salty 🧂."


class Recorder(ThreadingHTTPServer):
    """Answers /generate in SGLang's form with `reply(body)`, None being an error, and keeps every body it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[dict[str, Any]], str | None] = lambda body: ANSWER
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sent(self, *, generated: bool = True) -> list[dict[str, Any]]:
        """Bodies that asked for tokens (or, with generated=False, those that only filled the cache)."""
        return [b for b in self.bodies if (b["sampling_params"]["max_new_tokens"] > 0) is generated]


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._send(json.dumps({"model_path": "smollm2-chatml"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
        answer = self.server.reply(body)
        if answer is None:
            self._send(json.dumps({"error": {"message": "out of memory"}}), status=500)
        elif body.get("stream"):
            parts = [answer[:4], answer]
            chunks = [json.dumps({"text": part, "meta_info": self._meta(body)}) for part in parts]
            self._send("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))
        elif isinstance(body.get("text"), list):
            self._send(json.dumps([self._answer(body, text, answer) for text in body["text"]]))
        else:
            self._send(json.dumps(self._answer(body, body["text"], answer)))

    def _answer(self, body: dict[str, Any], text: str, answer: str) -> dict[str, Any]:
        meta = self._meta(body)
        # The last choice is the likeliest: three tokens of log probability minus their length in characters.
        meta["input_token_logprobs"] = [[-1.0, 1, "x"], [-float(len(text)), 2, "y"], [-1.0, 3, "z"]]
        meta["output_token_logprobs"] = []
        return {"text": answer, "meta_info": meta}

    def _meta(self, body: dict[str, Any]) -> dict[str, Any]:
        hints = body.get("kv_hints")
        first = hints[0] if isinstance(hints, list) else hints
        role = first["actions"][0]["payload"]["role"] if first else None
        return {"prompt_tokens": 10, **({"kvcmas": {"role": role}} if role else {})}

    def _send(self, text: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Recorder]:
    recorder = Recorder()
    thread = threading.Thread(target=recorder.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield recorder
    recorder.shutdown()
    thread.join()
    recorder.server_close()


@pytest.fixture
def endpoint(server: Recorder) -> AgentRuntimeEndpoint:
    return AgentRuntimeEndpoint(server.url, chat_template_name="chatml")


def payload(body: dict[str, Any]) -> dict[str, Any]:
    envelope = body["kv_hints"]
    assert envelope["protocol_version"] == "1" and envelope["message_id"]
    (action,) = envelope["actions"]
    assert (action["action_type"], action["action_version"]) == ("kvcmas.agent", "1") and action["action_id"]
    assert action["payload"]["unit"] == "char"
    return action["payload"]


def marked(body: dict[str, Any]) -> list[str]:
    return [body["text"][start:end] for start, end in payload(body)["spans"]]


@sgl.function
def critic(s, doc):
    s += agent("critic", system=SYSTEM)
    s += sgl.user(shared(doc) + "\nWhat is wrong with it?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=64))


def test_run_sends_the_role_and_the_span_through_the_chat_template(server, endpoint):
    state = critic.run(doc=DOC, backend=endpoint)
    assert state["answer"] == ANSWER
    assert state.get_meta_info("answer")["kvcmas"] == {"role": "critic"}
    (body,) = server.bodies
    assert body["text"] == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{DOC}\nWhat is wrong with it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert payload(body)["role"] == "critic"
    assert marked(body) == [DOC]
    assert "workflow" not in payload(body) and payload(body).get("reuse", "auto") == "auto"


@pytest.mark.parametrize("template", ["default", "claude", "llama-2-chat", "llama-3-instruct", "gemma-it", "qwen"])
def test_offsets_hold_under_every_kind_of_chat_template(server, template):
    backend = AgentRuntimeEndpoint(server.url, chat_template_name=template)
    critic.run(doc=DOC, backend=backend).sync()
    (body,) = server.bodies
    assert marked(body) == [DOC]
    assert SYSTEM in body["text"][: payload(body)["spans"][0][0]]


@pytest.mark.parametrize("options", [{"use_thread": True}, {"use_thread": False}])
def test_the_program_sends_the_same_requests_to_a_plain_endpoint_without_hints(server, endpoint, options):
    critic.run(doc=DOC, backend=endpoint, **options).sync()
    plain = critic.run(doc=DOC, backend=RuntimeEndpoint(server.url, chat_template_name="chatml"), **options)
    assert plain["answer"] == ANSWER
    ours, theirs = server.bodies
    assert "kv_hints" not in theirs
    assert {key: value for key, value in ours.items() if key != "kv_hints"} == theirs


def test_a_program_without_an_agent_sends_no_hints(server, endpoint):
    @sgl.function
    def plain(s, doc):
        s += sgl.user(shared(doc) + "?") + sgl.assistant(sgl.gen("answer", max_tokens=4))

    assert plain.run(doc=DOC, backend=endpoint)["answer"] == ANSWER
    assert "kv_hints" not in server.bodies[0]


def test_a_second_generation_keeps_the_offsets_and_its_text_holds_the_first_answer(server, endpoint):
    @sgl.function
    def twice(s, first, second):
        s += agent("critic", system=SYSTEM, workflow="w-1", reuse="never")
        s += sgl.user("Read this: " + shared(first) + " Well?")
        s += sgl.assistant(sgl.gen("one", max_tokens=8))
        s += sgl.user(shared(second, name="rebuttal"))
        s += sgl.assistant(sgl.gen("two", max_tokens=8))

    state = twice.run(first=DOC, second="No, 👩‍👩‍👧 it is fine.", backend=endpoint)
    assert state["two"] == ANSWER
    one, two = server.bodies
    assert marked(one) == [DOC]
    assert marked(two) == [DOC, "No, 👩‍👩‍👧 it is fine."]
    assert ANSWER in two["text"]
    assert payload(two)["workflow"] == "w-1" and payload(two)["reuse"] == "never"
    names = [span.name for span in state.text().spans]
    assert names == [None, "rebuttal"]


def test_run_batch_keeps_each_programs_marks_apart_and_its_common_prefix_has_the_role(server, endpoint):
    documents = [f"{n} 🦊 " * (n + 3) for n in range(8)]
    system = "You are a critic who reads every line twice before a word is said. " * 2

    @sgl.function
    def reader(s, doc):
        s += agent("reader", system=system)
        s += sgl.user(shared(doc) + "\nWhat is wrong with it?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    states = reader.run_batch([{"doc": doc} for doc in documents], backend=endpoint, num_threads=4)
    assert [state["answer"] for state in states] == [ANSWER] * 8
    bodies = server.sent()
    assert sorted(marked(body)[0] for body in bodies) == sorted(documents)
    assert len({body["kv_hints"]["message_id"] for body in bodies}) == 8
    (prefix,) = server.sent(generated=False)
    assert prefix["text"].endswith("<|im_start|>user\n")
    assert payload(prefix)["role"] == "reader" and payload(prefix)["spans"] == []


def test_stream_sends_hints(server, endpoint):
    state = critic.run(doc=DOC, backend=endpoint, stream=True)
    assert "".join(state.text_iter("answer")) == ANSWER
    assert server.bodies[0]["stream"] is True and marked(server.bodies[0]) == [DOC]


def test_forks_inherit_agent_and_spans_and_add_their_own(server, endpoint):
    @sgl.function
    def forked(s, doc):
        s += agent("critic", system=SYSTEM)
        s += sgl.user(shared(doc) + "\nWhat is wrong with it?")
        s.sync()  # SGLang commits the common prefix only if it is there already when it forks
        forks = s.fork(2)
        forks[0] += sgl.assistant(sgl.gen("answer", max_tokens=4))
        forks[1] += sgl.user(shared("tip 🧂")) + sgl.assistant(sgl.gen("answer", max_tokens=4))
        forks.join()
        s += sgl.assistant("Both: " + sgl.gen("last", max_tokens=4))

    state = forked.run(doc=DOC, backend=endpoint)
    assert state["last"] == ANSWER and state["answer"] == [ANSWER, ANSWER]
    by_spans = sorted(server.sent(), key=lambda body: (len(marked(body)), "Both" in body["text"]))
    assert [marked(body) for body in by_spans] == [[DOC], [DOC], [DOC, "tip 🧂"]]
    assert {payload(body)["role"] for body in server.bodies} == {"critic"}
    (commit,) = server.sent(generated=False)
    assert marked(commit) == [DOC]


def test_select_marks_every_choice(server, endpoint):
    @sgl.function
    def judge(s, doc):
        s += agent("judge", system=SYSTEM)
        s += sgl.user(shared(doc) + "\nGood?")
        s += sgl.assistant(sgl.select("verdict", choices=["a long no", "yes"]))

    assert judge.run(doc=DOC, backend=endpoint)["verdict"] == "yes"
    filled, scored = server.bodies
    assert marked(filled) == [DOC]
    assert [text.endswith(choice) for text, choice in zip(scored["text"], ["a long no", "yes"], strict=True)]
    for text, hints in zip(scored["text"], scored["kv_hints"], strict=True):
        assert marked({"text": text, "kv_hints": hints}) == [DOC]


def test_another_prompts_text_is_content_and_does_not_bring_its_agent(server, endpoint):
    before = critic.run(doc=DOC, backend=endpoint)

    @sgl.function
    def editor(s, history):
        s += agent("editor", system="You edit.")
        s += sgl.user(history + "\nShorten it.")
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    editor.run(history=before.text(), backend=endpoint).sync()
    editor.run(history=shared(before.text()), backend=endpoint).sync()
    _, plain, whole = server.bodies
    assert payload(plain)["role"] == payload(whole)["role"] == "editor"
    assert marked(plain) == []
    assert marked(whole) == [before.text()]


def test_trace_sees_a_system_message_and_text(endpoint):
    traced = critic.trace(doc=DOC, backend=endpoint)
    assert [str(node) for node in traced.flatten_nodes()] == [
        "Constant('<|im_start|>system\\n')",
        f"Constant({SYSTEM!r})",
        "Constant('<|im_end|>\\n')",
        "Constant('<|im_start|>user\\n')",
        f"Constant({DOC!r})",
        "Constant('\\nWhat is wrong with it?')",
        "Constant('<|im_end|>\\n')",
        "Constant('<|im_start|>assistant\\n')",
        "Gen('answer')",
        "Constant('<|im_end|>\\n')",
    ]


def test_trace_without_values_passes_its_placeholders_through():
    @sgl.function
    def team(s, role, system, doc):
        s += agent(role, system)
        s += sgl.user(shared(doc) + "?")

    nodes = [str(node) for node in team.trace(backend=BaseBackend()).flatten_nodes()]
    assert nodes[1] == "Argument(name=system, value=None)"
    assert nodes[4] == "Argument(name=doc, value=None)"


def test_videos_and_unknown_text_in_a_shared_span_are_refused():
    with pytest.raises(TypeError, match=r"^shared\(text\) holds a video; only text and images can be shared"):
        shared(sgl.video("fox.mp4", 4))
    with pytest.raises(TypeError, match=r"holds a video"):
        shared(SglExprList([sgl.image("fox.png"), sgl.video("fox.mp4", 4)]))
    with pytest.raises(TypeError, match=r"holds Gen\('x'\); it takes text that is known"):
        shared(sgl.image("fox.png") + sgl.gen("x"))
    with pytest.raises(ValueError, match="marked already"):
        shared(sgl.image("fox.png") + shared(DOC))
    with pytest.raises(TypeError, match=r"^shared\(text\) holds Gen\('x'\); it takes text that is known"):
        shared("Answer: " + sgl.gen("x"))
    with pytest.raises(ValueError, match="marked already"):
        shared("Twice: " + shared(DOC))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: agent("", SYSTEM), ValueError, "agent(role=...) is ''; it must be a non-empty string."),
        (lambda: agent(" ", SYSTEM), ValueError, "agent(role=...) is ' '; it must be a non-empty string."),
        (lambda: agent(3, SYSTEM), TypeError, "agent(role=...) is int 3; it must be a non-empty string."),
        (lambda: agent("critic", ""), ValueError, "agent(system=...) is ''; it must be a non-empty string."),
        (
            lambda: agent("c", "s", workflow=""),
            ValueError,
            "agent(workflow=...) is ''; it must be a non-empty string.",
        ),
        (
            lambda: agent("c", "s", reuse="often"),
            ValueError,
            'agent(reuse=\'often\') is unknown; allowed are "auto", "never" and None.',
        ),
        (lambda: shared(""), ValueError, "shared(text) is ''; it must be a non-empty string."),
        (lambda: shared(None), TypeError, "shared(text) is NoneType None; it must be a non-empty string."),
    ],
)
def test_bad_arguments_get_one_sentence(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_a_prompt_is_its_text_to_everyone_else(server, endpoint):
    text = critic.run(doc=DOC, backend=endpoint).text()
    plain = "".join(list(text))
    assert isinstance(text, Prompt) and type(plain) is str
    assert text == plain and hash(text) == hash(plain) and json.loads(json.dumps(text)) == plain
    start = plain.index(DOC)
    assert text.spans == (Span(start, start + len(DOC)),)
    begin = plain.index(SYSTEM)
    assert text.agent == Agent(begin, begin + len(SYSTEM), "critic")
    for twin in (copy.deepcopy(text), pickle.loads(pickle.dumps(text)), text[:], str(text)):
        assert twin == text and twin.marks == text.marks
    assert text[: start + 3].spans == () and text[: start + 3].agent == text.agent
    for part in (text[::2], "x" + text, f"{text}!"):
        assert type(part) is str
    for part in (text[1:], text[1:-1], text.lstrip("<")):
        at = part.index(DOC)
        assert not isinstance(part, Prompt) and part.marks == (Span(at, at + len(DOC)),)
    assert text[start + 1 :].spans == () and text[-3:].marks == ()
