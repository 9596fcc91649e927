"""Pictures in shared spans, on SGLang's own LLaVA path: processor, padding, vision tower, projector."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import sglang as sgl
from kvcmas_sgl.frontend import AgentRuntimeEndpoint, shared
from PIL import Image

from kvcmas_sgl.demo.pictures import picture
from kvcmas_sgl.image_limits import MAX_IMAGE_BYTES, data_url
from kvcmas_sgl.prepare_image_model import IMAGE_TOKENS
from tests.engine.measure import TOP, kl
from tests.images.conftest import BUDGET, CRITIC, JUDGE, PLANNER, READERS, Prompt, Server, prompt, words
from tests.prompts import HEAD

CAPTION = len(words("Four pictures of the report:\n"))
REST = 4 * (IMAGE_TOKENS + 1)
"""Tokens of four pictures, each with the end of its line."""


def encoded(totals: dict[str, int]) -> tuple[int, int]:
    """Pictures that the vision tower ran for, for requests; pictures of prompts that were corrected instead."""
    return totals["images_encoded"], totals["images_corrected"]


def distributions(server: Server, asked: Prompt, answer: list[int], hint: dict | None) -> list[dict[int, float]]:
    forced = Prompt(asked.role, asked.ids + answer, asked.span, asked.pictures)
    wanted = {"return_logprob": True, "logprob_start_len": asked.length - 1, "top_logprobs_num": TOP}
    rows = server.ask(forced, 1, hint, **wanted)["meta_info"]["input_top_logprobs"]
    found = [{int(token): float(value) for value, token, *_ in row} for row in rows if row]
    assert len(found) == len(answer)
    return found


@pytest.fixture(scope="module")
def taught(server: Server) -> Server:
    """The server after three roles have read sixteen pictures, four at a time."""
    for number in range(0, 16, 4):
        for reader in READERS:
            server.read(prompt(reader, range(number, number + 4)))
            server.settle()
    return server


def test_three_roles_read_four_pictures_and_the_tower_runs_once_for_each(
    taught: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server, asked = taught, [prompt(reader, range(40, 44)) for reader in READERS]
    assert HEAD > CAPTION, "the head ends inside the first picture"
    before, saved = encoded(server.settle())
    first = server.read(asked[0])
    assert (first["reason"], first["exact_tokens"] + first["computed_tokens"]) == ("no_source", asked[0].length)
    assert encoded(server.settle()) == (before + 4, saved)
    answer = words("They show what the plan says")
    for number, reading in enumerate(asked[1:], 1):
        report = server.read(reading)
        (span,) = report["spans"]
        assert (span["reason"], span["stop"] - span["start"]) == ("reused", CAPTION + REST)
        # A head of 16 tokens would end inside the first picture: it ends before it, with the caption, which is an
        # exact hit in part, since the role has begun other prompts with it.
        assert (span["corrected_tokens"], span["exact_tokens"] + span["computed_tokens"]) == (REST, CAPTION)
        assert 0 < report["predicted_kl"] <= BUDGET
        totals = server.settle()
        assert encoded(totals) == (before + 4, saved + 4 * number)
        served = distributions(server, reading, answer, {})
        dense = distributions(server, reading, answer, None)
        with capsys.disabled():
            print(f"\n  {reading.role}: KL {kl(dense, served):.4f} nats, predicted {report['predicted_kl']:.4f}")
        assert kl(dense, served) <= BUDGET
        # The plain request has no KV to start from.
        before = encoded(server.settle())[0] - 4


def test_one_changed_dot_costs_its_picture_and_nothing_else(taught: Server) -> None:
    dotted = Image.open(io.BytesIO(picture(62)))
    dotted.paste("black", (100, 100, 112, 112))
    file = io.BytesIO()
    dotted.save(file, "PNG")
    taught.read(prompt(PLANNER, [60, 61, 62, 63]))
    before, saved = encoded(taught.settle())
    report = taught.read(prompt(CRITIC, [60, 61, file.getvalue(), 63]))
    (span,) = report["spans"]
    # The picture with the dot is computed; the two before it and the one behind it are not.
    assert span["reason"] == "reused" and IMAGE_TOKENS <= span["computed_tokens"] <= IMAGE_TOKENS + CAPTION + 2
    assert encoded(taught.settle()) == (before + 1, saved + 3)


def test_the_same_picture_is_found_among_other_text_and_other_pictures(taught: Server) -> None:
    taught.read(prompt(PLANNER, [70, 71], caption="Two figures, and what they have in common, are below.\n"))
    before, saved = encoded(taught.settle())
    report = taught.read(prompt(JUDGE, [72, 71, 73], caption="Evidence:\n"))
    (span,) = report["spans"]
    assert span["reason"] == "reused" and IMAGE_TOKENS <= span["corrected_tokens"] <= IMAGE_TOKENS + 2
    assert encoded(taught.settle()) == (before + 2, saved + 1)


def test_other_pictures_never_match(taught: Server) -> None:
    taught.read(prompt(PLANNER, range(80, 84), caption="A:\n"))
    before, saved = encoded(taught.settle())
    report = taught.read(prompt(CRITIC, range(84, 88), caption="A:\n"))
    assert (report["reason"], report["corrected_tokens"]) == ("no_source", 0)
    assert encoded(taught.settle()) == (before + 4, saved)


def test_frames_of_a_video_are_shared_and_are_no_pictures(taught: Server) -> None:
    video = {"modalities": ["video"]}
    first = taught.ask(prompt(PLANNER, range(90, 94)), 9, {}, **video)["meta_info"]["kvcmas"]
    before, saved = encoded(taught.settle())
    again = taught.ask(prompt(CRITIC, range(90, 94)), 9, {}, **video)["meta_info"]["kvcmas"]
    assert (first["corrected_tokens"], again["corrected_tokens"]) == (0, REST)
    assert encoded(taught.settle()) == (before, saved + 4)
    as_pictures = taught.read(prompt(JUDGE, range(90, 94)))
    assert as_pictures["corrected_tokens"] == 0


def test_a_role_that_declines_gets_its_pictures_computed(taught: Server) -> None:
    taught.read(prompt(PLANNER, range(100, 104)))
    before, saved = encoded(taught.settle())
    report = taught.read(prompt(CRITIC, range(100, 104)), reuse="never")
    assert (report["reason"], report["corrected_tokens"]) == ("declined", 0)
    assert encoded(taught.settle()) == (before + 4, saved)


def test_checks_and_audits_read_the_pictures_again_in_idle_time(taught: Server) -> None:
    totals = taught.settle()
    assert totals["checks"] > 0 and totals["audits"] > 0
    # A check computes a whole prompt.
    assert totals["images_encoded_idle"] >= totals["checks"]
    assert totals["checked_kl"] / totals["checks"] <= BUDGET


def test_an_agent_program_shares_pictures(taught: Server, tmp_path: Path) -> None:
    for number in (110, 111):
        (tmp_path / f"{number}.png").write_bytes(picture(number))

    @sgl.function
    def look(s: Any) -> None:
        figures = sgl.image(str(tmp_path / "110.png")) + "Figure one.\n" + sgl.image(str(tmp_path / "111.png"))
        for reader in (PLANNER, CRITIC):
            with s.agent(reader.role, system=reader.system) as one:
                one += sgl.user(shared(figures) + "\nWhat do they show?")
                one += sgl.assistant(sgl.gen("seen", max_tokens=2, temperature=0))
            one.sync()
            taught.settle()

    before, saved = encoded(taught.settle())
    state = look.run(backend=AgentRuntimeEndpoint(taught.url, chat_template_name="chatml"))
    (first,), (second,) = state.reuse[PLANNER.role], state.reuse[CRITIC.role]
    assert first["corrected_tokens"] == 0 and second["corrected_tokens"] == 2 * IMAGE_TOKENS + len(
        words("Figure one.\n")
    )
    assert encoded(taught.settle()) == (before + 2, saved + 2)


def chat(reader: Any, pictures: list[bytes], words_before: str = "") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": words_before}] if words_before else []
    parts += [
        {"type": "image_url", "image_url": {"url": data_url(one)}, "modalities": "multi-images"} for one in pictures
    ]
    return [
        {"role": "system", "content": reader.system},
        {"role": "user", "content": parts},
        {"role": "user", "content": "What do they show?"},
    ]


@pytest.fixture
def client(taught: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=taught.url + "/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, messages: list[Any], role: str, **mark: Any) -> Any:
    extra = {"kvcmas": {"role": role, "spans": [{"message": 1, **mark}]}}
    return client.chat.completions.create(model="any", messages=messages, max_tokens=2, temperature=0, extra_body=extra)


@pytest.mark.parametrize("caption", ["", "Two figures:\n"])
def test_openai_messages_with_pictures_are_shared(client: openai.OpenAI, taught: Server, caption: str) -> None:
    files = [picture(120 + len(caption)), picture(121 + len(caption))]
    first = complete(client, chat(PLANNER, files, caption), PLANNER.role).kvcmas
    before, saved = encoded(taught.settle())
    second = complete(client, chat(CRITIC, files, caption), CRITIC.role)
    (span,) = second.kvcmas["spans"]
    assert span["stop"] - span["start"] == 2 * (IMAGE_TOKENS + 1) + len(words(caption))
    assert (first["corrected_tokens"], span["corrected_tokens"]) == (0, 2 * (IMAGE_TOKENS + 1))
    assert second.usage.prompt_tokens_details.corrected_tokens == span["corrected_tokens"]
    assert encoded(taught.settle()) == (before, saved + 2)


def test_bad_pictures_get_http_400(client: openai.OpenAI, taught: Server, tmp_path: Path) -> None:
    tiny, large = picture(130), tmp_path / "large.png"
    large.write_bytes(tiny + bytes(MAX_IMAGE_BYTES))
    for files, said in (([tiny] * 17, "image_data holds 17 pictures"), ([large.read_bytes()], "picture 0 has")):
        with pytest.raises(openai.BadRequestError, match=said):
            complete(client, chat(PLANNER, files), PLANNER.role)
    with pytest.raises(openai.BadRequestError, match="holds a part of type 'audio_url'"):
        audio = [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}]
        complete(client, [{"role": "user", "content": "?"}, {"role": "user", "content": audio}], PLANNER.role)
    asked = prompt(PLANNER, [130, 131])
    bodies = {
        "the prompt has 2 placeholders for pictures, but image_data holds 1": {"image_data": [data_url(tiny)]},
        "this model reads only the first unless modalities is": {"modalities": None},
        "mm_hashes is not supported with kvcmas.agent": {"mm_hashes": ["1", "2"]},
        "unknown field `format`": {"image_data": [{"format": "processor_output", "feature": [[0.0]]}] * 2},
        "picture 0 has 20[0-9]+ bytes": {"image_data": [f"file://{large}", data_url(tiny)]},
        "Error while processing image": {"image_data": [data_url(b"no picture"), data_url(tiny)]},
    }
    for said, fields in bodies.items():
        response = taught.post(asked.body(2, {}, **fields))
        assert response.status_code == 400 and re.search(said, response.text), response.text
    assert taught.read(asked)["reason"] == "no_source"
