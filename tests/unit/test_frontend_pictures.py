"""Pictures inside shared text: their borders, and the offsets of the text beside them."""

from __future__ import annotations

import base64

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import AgentRuntimeEndpoint, MarkedText, Span, shared
from kvcmas_sgl.frontend.marks import Border

from tests.unit.test_frontend import DOC, endpoint, marked, payload, server
from tests.unit.test_frontend_agents import spans_in

__all__ = ["endpoint", "server"]

# A failed agent warns from its program's thread, maybe after the test that wanted it has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")


def test_an_image_beside_shared_text_leaves_the_offsets_right(server, tmp_path):
    (tmp_path / "fox.png").write_bytes(b"fox")

    @sgl.function
    def look(s, doc):
        with s.agent("looker", system="You look.") as looker:
            looker += sgl.user(sgl.image(str(tmp_path / "fox.png")) + shared(doc)) + sgl.assistant(sgl.gen("seen"))

    look.run(doc=DOC, backend=AgentRuntimeEndpoint(server.url, chat_template_name="chatml-llava")).sync()
    (body,) = server.bodies
    assert body["image_data"] and "<image>" in body["text"] and payload(body)["spans"] == spans_in(body, DOC)


def test_pictures_are_shared_with_the_text_around_them(server, tmp_path):
    for name in ("fox", "hen"):
        (tmp_path / name).write_bytes(name.encode())

    @sgl.function
    def look(s, doc):
        with s.agent("looker", system="You look.") as looker:
            figures = sgl.image(str(tmp_path / "fox")) + "A fox. " + sgl.image(str(tmp_path / "hen"))
            looker += sgl.user(shared(doc) + " Own. " + shared(figures, "figures") + "Which?")
            looker += sgl.assistant(sgl.gen("seen"))
        s["seen"] = looker["seen"]

    look.run(doc=DOC, backend=AgentRuntimeEndpoint(server.url, chat_template_name="chatml-llava")).sync()
    (body,) = server.bodies
    assert marked(body) == [DOC, "<image>\nA fox. <image>\n"]
    assert [base64.b64decode(picture) for picture in body["image_data"]] == [b"fox", b"hen"]
    assert body["modalities"] == ["multi-images"]


def test_a_span_with_pictures_of_which_one_border_is_cut_off_is_none():
    first, last = (Border(0, 0, "k", opens) for opens in (True, False))
    text = MarkedText("", (first,)) + "<image>\n" + MarkedText("", (last,)) + "?"
    assert text.spans == (Span(0, 8),) and ("ab" + text).spans == (Span(2, 10),)
    assert text[:8].spans == (Span(0, 8),)
    assert text[1:].spans == () and text[:7].spans == ()
