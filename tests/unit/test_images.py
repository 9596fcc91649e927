"""Pictures among a prompt's tokens: names, borders, and which pictures a row needs. SGLang's own classes hold them."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from kvcmas_sgl.radix_ext.decision import Base, SpanReport
from kvcmas_sgl.radix_ext.heavy import EFFORTS, heavy_offsets, heavy_tokens
from kvcmas_sgl.radix_ext.images import FIRST_NAME, Image, Images, of_images
from kvcmas_sgl.radix_ext.learner import MAX_JOB_BYTES
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Agent, Content, Source, SourceIndex
from kvcmas_sgl.radix_ext.statistics import Statistics
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.models.llava import LlavaLlamaForCausalLM

from kvcmas_sgl.image_limits import MAX_IMAGE_BYTES, MAX_IMAGES, check_images, data_url
from kvcmas_sgl.seams.forward import fold, fresh_rows
from kvcmas_sgl.seams.images import count_encoded, expanded, find_places, idle_pass, read_images, select
from kvcmas_sgl.wire import AgentHint, HintError
from tests.unit.test_forward import NoTranslation, batch
from tests.unit.test_learner import learner

PLACEHOLDER, EACH = 4, 9
EFFORT = EFFORTS[1]


class Llava(LlavaLlamaForCausalLM):
    """SGLang's LLaVA, of which only the padding of prompts is used: nine tokens a picture."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.image_feature_len, self.image_size, self.patch_size = EACH, 3, 1
        self.config = type("Config", (), {"image_token_index": PLACEHOLDER})()


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((1, 3, 4, 4)).astype(np.float16)


def items(*features: np.ndarray, modality: Modality = Modality.IMAGE) -> list[MultimodalDataItem]:
    made = []
    for feature in features:
        data: dict[str, Any] = {"image_sizes": [(4, 4)], "image_aspect_ratio": "pad"}
        made.append(MultimodalDataItem(modality=modality, feature=feature, model_specific_data=data))
        made[-1].set_pad_value()
    return made


def llava(ids: list[int], *features: np.ndarray) -> tuple[MultimodalInputs, array]:
    """A prompt with placeholders as SGLang pads it."""
    inputs = MultimodalInputs(mm_items=items(*features))
    return inputs, Llava().pad_input_ids(array("q", ids), inputs)


def with_offsets(*ranges: tuple[int, int]) -> MultimodalInputs:
    """Inputs of the other kind of model: each picture's place is known from the start."""
    inputs = MultimodalInputs(mm_items=items(*(pixels(n) for n in range(len(ranges)))))
    for item, (start, stop) in zip(inputs.mm_items, ranges, strict=True):
        item.offsets = [(start, stop - 1)]
    return inputs


SENT = [10, 11, PLACEHOLDER, 12, PLACEHOLDER, PLACEHOLDER, 13, 14]


def test_every_token_of_a_picture_has_a_name_and_other_pixels_have_others() -> None:
    inputs, padded = llava(SENT, pixels(0), pixels(1), pixels(0))
    images = read_images(inputs, padded)
    assert [image.ranges for image in images] == [((2, 11),), ((12, 21),), ((21, 30),)]
    named = images.named()
    assert named[[0, 1, 11, 30, 31]].tolist() == [10, 11, 12, 13, 14]
    first, second, third = named[2:11], named[12:21], named[21:30]
    assert (first == third).all() and len({*first.tolist(), *second.tolist()}) == 18
    assert of_images(named).sum() == 27 and named.min() >= 0 and first.min() >= FIRST_NAME
    assert (images.model_tokens(np.append(named, 99)) == [*padded, 99]).all()


def test_one_bit_of_one_pixel_and_the_kind_of_a_picture_change_all_its_names() -> None:
    changed = pixels(0)
    changed.view(np.uint16)[0, 2, 3, 3] ^= 1
    prompts = [llava([1, PLACEHOLDER], one) for one in (pixels(0), changed)]
    video = MultimodalInputs(mm_items=items(pixels(0), modality=Modality.VIDEO))
    prompts.append((video, Llava().pad_input_ids(array("q", [1, PLACEHOLDER]), video)))
    names = [read_images(*one).named()[1:] for one in prompts]
    assert len(set(np.concatenate(names).tolist())) == 3 * EACH


def test_a_picture_whose_hash_the_client_chose_is_not_believed() -> None:
    inputs, padded = llava([1, PLACEHOLDER], pixels(0))
    inputs.mm_items[0].set_hash(int.from_bytes(hashlib.sha256(pixels(1).tobytes()).digest()[:8], "big"))
    assert read_images(inputs, padded) is None


def test_the_pixels_are_kept_when_sglang_lets_go_of_them() -> None:
    inputs, padded = llava([1, PLACEHOLDER], pixels(0))
    images = read_images(inputs, padded)
    inputs.release_features()
    assert inputs.mm_items[0].feature is None
    assert (images.inputs.mm_items[0].feature == pixels(0)).all() and images.nbytes == pixels(0).nbytes


@pytest.mark.parametrize(
    "inputs", [llava(SENT, pixels(0), pixels(1), pixels(2))[0], with_offsets((2, 11), (12, 21), (21, 30))]
)
def test_a_row_gets_the_pictures_that_it_holds_tokens_of(inputs: MultimodalInputs) -> None:
    def chosen(start: int, stop: int) -> list[int]:
        part = select(inputs, start, stop)
        kept = [] if part is None else part.mm_items
        return [next(n for n, item in enumerate(inputs.mm_items) if item is one) for one in kept]

    assert chosen(0, 2) == chosen(11, 12) == chosen(30, 32) == []
    assert chosen(0, 3) == chosen(10, 12) == [0] and chosen(10, 13) == [0, 1]
    assert chosen(20, 22) == [1, 2] and chosen(0, 32) == [0, 1, 2] and len(inputs.mm_items) == 3
    part = select(inputs, 12, 13)
    if hasattr(inputs, "image_offsets"):
        assert (part.image_offsets, part.image_pad_len) == ([12], [EACH])


def test_a_row_of_a_folded_pass_is_told_of_its_own_pictures() -> None:
    inputs = with_offsets((2, 11), (12, 21), (21, 30))
    whole = batch([0, 0, 0], [32, 32, 4])
    whole.mm_inputs = [inputs, inputs, None]
    rows = fresh_rows([0, 0, 0], [32, 32, 4], [[(2, 12), (21, 31)], [], []])
    first, second, third, uncut, text = fold(whole, rows, NoTranslation(), [False, False, True, True, True]).mm_inputs
    assert first is third is text is None and uncut is inputs
    assert [item is inputs.mm_items[1] for item in second.mm_items] == [True]


def test_marks_move_with_the_tokens_of_the_pictures_before_them() -> None:
    inputs, padded = llava(SENT, pixels(0), pixels(1), pixels(2))
    images = read_images(inputs, padded)
    spans = [(0, 2), (2, 3), (3, 5), (5, 7), (7, 8)]
    assert expanded(spans, len(SENT), images) == ((0, 2), (2, 11), (11, 21), (21, 31), (31, 32))
    assert expanded([(3, 20)], len(padded), images) == ((3, 20),)
    with pytest.raises(ValueError, match="a prompt of 9 tokens and its pictures make 33, not 32"):
        expanded(spans, 9, images)


def test_a_picture_that_replaced_a_word_is_noticed() -> None:
    # SGLang puts a picture without a placeholder in the place of the first token.
    inputs, padded = llava([10, 11, PLACEHOLDER, 12], pixels(0), pixels(1))
    assert inputs.image_offsets == [2, 0]
    with pytest.raises(ValueError, match=r"pictures lie at \[0, 9, 2, 11\]"):
        read_images(inputs, padded)


def test_places_are_found_by_the_text_between_placeholders() -> None:
    p, text = PLACEHOLDER, [1, 2, PLACEHOLDER, 3, 5, PLACEHOLDER, 6]
    assert find_places(text, [1, 2, p, p, p, 3, 5, 8, p, p, 9, 6], p) == [(2, 5), (7, 11)]
    assert find_places(text, text, p) == [(2, 3), (5, 6)]
    assert find_places(text, [1, 2, p, p, 3, 7, p, 6], p) is None
    assert find_places([1, p, p, 2], [1, p, p, p, p, 2], p) is None
    assert find_places([1, 2], [1, 2, 3], p) is None


def two_pictures() -> Images:
    return Images((Image(((4, 10),), b"a", 1), Image(((12, 18),), b"b", 1)), np.arange(30))


def test_a_head_ends_before_a_picture_that_it_would_cut() -> None:
    request = AgentRequest.of(AgentHint("r", ((2, 20),)), array("q"), "s", two_pictures())
    (span,) = request.report.spans
    stops = [request.head_stop(span, head) for head in range(18)]
    assert stops == [2, 3, 4, *[4] * 5, 10, 11, 12, *[12] * 5, 18, 19]
    assert request.head_stop(SpanReport(4, 20), 3) == 4


def test_heavy_hitters_are_words() -> None:
    tokens = two_pictures().named()
    scores = np.arange(30, dtype=np.float32)
    scores[4:10] += 100
    scores[12:18] += 100
    content = Content("s", tokens, heavy=scores)
    base = Base(Source(content, None, "", 0, 0), Agent("r", "", "s"), 0)
    chosen = heavy_tokens(base, 30, 3, EFFORT)
    words = [n for n in range(3, 30) if not (4 <= n < 10 or 12 <= n < 18)]
    assert chosen is not None and chosen.tolist() == words[-8:]
    assert heavy_tokens(Base(base.source, base.agent, 4), 6, 0, EFFORT) is None
    plain = Content("s", np.arange(30), heavy=scores)
    expected = heavy_offsets(scores, 3, EFFORT).tolist()
    assert heavy_tokens(Base(Source(plain, None, "", 0, 0), base.agent, 0), 30, 3, EFFORT).tolist() == expected


def test_the_same_picture_matches_at_its_own_shift_only() -> None:
    index, agent = SourceIndex(shortest=8), Agent("r", "", "s")
    wide = Images((Image(((6, 46),), b"a", 1),), np.arange(60))
    held = Content("s", wide.named())
    index.add(Source(held, agent, "", 1, 0))
    # The same picture after a longer text, and another one.
    asked = Images((Image(((20, 60),), b"a", 1), Image(((70, 110),), b"b", 1)), np.arange(1000, 1120))
    (match,) = index.find("s", asked.named(), 0, 120)
    assert (match.start, match.stop, match.places) == (20, 60, ((held, 6),))


def test_waiting_jobs_keep_a_bounded_amount_of_pictures() -> None:
    queue, statistics = learner()
    half = MAX_JOB_BYTES // 2
    for _ in range(3):
        queue.add((None for _ in range(3)), needs_model=True, nbytes=half)
        queue.add(None for _ in range(3))
    assert (len(queue), statistics.jobs_dropped) == (5, 1)
    queue.add((None for _ in range(3)), nbytes=MAX_JOB_BYTES + 1)
    assert (len(queue), statistics.jobs_dropped) == (3, 4)


def test_what_the_tower_is_given_is_counted_and_idle_passes_apart() -> None:
    model, statistics = torch.nn.Module(), Statistics()
    model.vision_tower = torch.nn.Identity()
    count_encoded(model, statistics)
    count_encoded(model, statistics)
    model.vision_tower(torch.zeros(3, 2))
    with idle_pass(statistics):
        model.vision_tower(torch.zeros(4, 2))
    assert (statistics.images_encoded, statistics.images_encoded_idle) == (3, 4)
    count_encoded(torch.nn.Linear(1, 1), statistics)


def test_too_many_and_too_large_pictures_get_one_sentence(tmp_path: Any) -> None:
    small = data_url(b"x" * 30)
    check_images([small] * MAX_IMAGES)
    with pytest.raises(HintError, match=r"^image_data holds 17 pictures, but an agent's prompt may hold 16\.$"):
        check_images([small] * 17)
    large = tmp_path / "large.png"
    large.write_bytes(b"x" * (MAX_IMAGE_BYTES + 1))
    for source in (str(large), f"file://{large}", large.read_bytes(), data_url(large.read_bytes())):
        with pytest.raises(HintError, match=r"^picture 1 has \d+ bytes, but at most 20971520 are allowed\.$"):
            check_images([small, source])
    check_images(["https://nowhere.example/large.png", str(tmp_path / "missing.png")])
