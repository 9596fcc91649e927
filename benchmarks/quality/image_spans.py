"""`python -m benchmarks.quality.image_spans`: what reuse does to spans of pictures, in an fp32 reference of the model.

Four roles read the same four generated pictures between a caption and a question. Per pair of roles: the rank that
holds 90 % of the delta's energy, the KL of the question's tokens to the dense run for each way to reuse the span, and
which share of the KV error lies on the tokens that a rule would recompute. The model is SmolLM2-135M behind a random
vision tower (`kvcmas_sgl.prepare_image_model`): it was never taught to read pictures.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvcmas_sgl.radix_ext.estimators import Edge, Observation, make_estimator
from kvcmas_sgl.radix_ext.lowrank import compress
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from benchmarks.quality.methods.deltas import corrected
from benchmarks.quality.recompute import Pass
from benchmarks.quality.reference import KV, ReferenceModel, divergence
from kvcmas_sgl.demo.pictures import picture
from kvcmas_sgl.demo.roles import ROLES, Role
from kvcmas_sgl.prepare_image_model import default_image_model

PER_SET, SHARE = 4, 0.2
RANK, OWN_RANK = 16, 32
PAIRS = ((0, 2), (0, 1), (2, 3))
"""Of `ROLES`: who holds the pictures, and who reads them."""


class PictureModel(ReferenceModel):
    """The language model, with tokens of pictures numbered from the vocabulary's end on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPVisionModel

        config = json.loads((folder / "config.json").read_text())
        self._tower = CLIPVisionModel.from_pretrained(config["mm_vision_tower"]).eval()
        self._projector = {name: part.float() for name, part in load_file(folder / "projector.safetensors").items()}
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._rows = self.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        return self._rows[tokens]

    @torch.inference_mode()
    def add_picture(self, file: bytes) -> Tensor:
        """Tokens, int64 [n], that stand for a picture from now on."""
        image = Image.open(io.BytesIO(file)).convert("RGB")
        side = max(image.size)
        square = Image.new("RGB", (side, side), tuple(int(255 * mean) for mean in self._processor.image_mean))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        pixels = torch.as_tensor(np.stack(self._processor(square)["pixel_values"]))
        hidden = self._tower(pixels, output_hidden_states=True).hidden_states[-2][0, 1:]
        for number, layer in enumerate(("0", "2")):
            at = f"model.mm_projector.{layer}"
            hidden = hidden @ self._projector[f"{at}.weight"].T + self._projector[f"{at}.bias"]
            hidden = torch.nn.functional.gelu(hidden) if number == 0 else hidden
        first = len(self._rows)
        self._rows = torch.cat([self._rows, hidden])
        return torch.arange(first, len(self._rows))

    def words(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Read:
    """One role's dense run: tokens [n], its span ``[start, stop)``, KV of all, logits of the question's tokens."""

    tokens: Tensor
    start: int
    stop: int
    kv: KV
    logits: Tensor

    @property
    def held(self) -> KV:
        return self.kv.cut(self.start, self.stop)


def read(model: PictureModel, role: Role, caption: Tensor, span: Tensor) -> Read:
    head = model.words(f"<|im_start|>system\n{role.system}<|im_end|>\n<|im_start|>user\n")
    tail = model.words(f"\n{role.question}<|im_end|>\n<|im_start|>assistant\n")
    tokens = torch.cat([head, caption, span, tail])
    logits, kv = model.extend(tokens, last=len(tail))
    return Read(tokens, len(head), len(tokens) - len(tail), kv, logits)


def reuse(
    model: PictureModel,
    true: Read,
    k: Tensor,
    v: Tensor,
    fresh: Tensor | None = None,
    *,
    check_layer: int | None = None,
) -> float:
    """Mean KL, nats, of the question's tokens over canonical ``k``, ``v`` of the span; ``fresh`` [m] of the span's
    tokens are computed, all of them up to ``check_layer``."""
    kv = KV.join([true.kv.cut(0, true.start), model.place(k, v, true.start), true.kv.cut(true.stop, len(true.kv))])
    tail = torch.arange(true.stop, len(true.tokens))
    own = torch.empty(0, dtype=torch.int64) if fresh is None else true.start + fresh
    rows, layer = torch.cat([own, tail]), 0
    if check_layer is None:
        work = Pass(model, true.tokens, kv, rows, in_place=True)
    else:
        work = Pass(model, true.tokens, kv, torch.arange(true.start, len(true.tokens)), in_place=True)
        layer = check_layer + 1
        work.run(0, layer).keep(rows)
    work.run(layer)
    return float(divergence(true.logits, model.logits(work.hidden[-len(tail) :])).mean())


def ranks(delta: Tensor) -> list[int]:
    """Of ``delta`` [L, n, D], layers 1 on: the rank that holds 90 % of the energy."""
    energy = torch.linalg.svdvals(delta[1:]).square()
    return (((energy.cumsum(1) / energy.sum(1, keepdim=True)) < 0.9).sum(1) + 1).tolist()


@torch.inference_mode()
def run(model: PictureModel, teach: int, test: int) -> dict[str, Any]:
    """All figures, by pair of roles."""
    estimator = make_estimator(
        "affine", layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, rank=RANK
    )
    caption = model.words("Pictures of the report:\n")
    newline, found = model.words("\n"), {}
    for number in tqdm(range(teach + test), desc="sets of pictures"):
        parts = [part for n in range(PER_SET) for part in (model.add_picture(picture(PER_SET * number + n)), newline)]
        used = sorted({role for pair in PAIRS for role in pair})
        reads = {role: read(model, ROLES[role], caption, torch.cat(parts)) for role in used}
        for pair in PAIRS:
            held, true = (reads[role] for role in pair)
            edge = Edge("pictures", ROLES[pair[0]].name, ROLES[pair[1]].name)
            base = model.canonical(held.held, held.start)
            own = model.canonical(true.held, true.start)
            if number < teach:
                t = torch.arange(base[0].shape[1])
                estimator.observe(edge, Observation(0, t, *base, own[0] - base[0], own[1] - base[1]))
                estimator.finish(edge)
            else:
                name = f"{edge.source} to {edge.consumer}"
                found.setdefault(name, []).append(
                    _measure(model, estimator.predict(edge), len(caption), base, own, true)
                )
    return {name: _mean(rows) for name, rows in found.items()}


def _measure(
    model: PictureModel, delta: Any, caption: int, base: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], true: Read
) -> dict[str, Any]:
    assert delta is not None
    n = base[0].shape[1]
    off = [x - y for x, y in zip(own, base, strict=True)]
    error = sum(
        part.square().sum(2) / whole.square().sum((1, 2))[:, None] for part, whole in zip(off, own, strict=True)
    )[1:].mean(0)
    count = round(SHARE * n)
    # CacheBlend's rule: the largest deviation of V at layer 1.
    chosen = off[1][1].square().sum(1).topk(count).indices.sort().values
    chance = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count].sort().values
    head = torch.arange(caption)
    factors = [compress(part, OWN_RANK) for part in off]
    measured = [x + left @ right for x, (left, right) in zip(base, factors, strict=True)]
    predicted = corrected(delta, *base)
    return {
        "rank_k": float(np.median(ranks(off[0]))),
        "rank_v": float(np.median(ranks(off[1]))),
        "kl_rotate_only": reuse(model, true, *base),
        "kl_rotate_only_caption_computed": reuse(model, true, *base, head),
        "kl_predicted": reuse(model, true, *predicted),
        "kl_ours": reuse(model, true, *predicted, head),
        "kl_own_delta": reuse(model, true, *measured),
        "kl_cacheblend": reuse(model, true, *base, chosen, check_layer=1),
        "kl_random": reuse(model, true, *base, chance, check_layer=1),
        "covered_by_cacheblend": float(error[chosen].sum() / error.sum()),
        "covered_by_first_tokens": float(error[:count].sum() / error.sum()),
        "covered_in_hindsight": float(error.topk(count).values.sum() / error.sum()),
        "covered_by_caption": float(error[:caption].sum() / error.sum()),
    }


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def main() -> None:
    shape = argparse.ArgumentParser(prog="python -m benchmarks.quality.image_spans", description=__doc__)
    shape.add_argument("--reports", type=Path, default=Path("reports"), help="output (default: reports)")
    shape.add_argument("--teach", type=int, default=8, help="sets of pictures that are learned from (default: 8)")
    shape.add_argument("--test", type=int, default=6, help="sets of pictures that are measured (default: 6)")
    options = shape.parse_args()
    figures = run(PictureModel(default_image_model()), options.teach, options.test)
    options.reports.mkdir(parents=True, exist_ok=True)
    content = {"selected_share": SHARE, "teach": options.teach, "test": options.test, "pairs": figures}
    (options.reports / "image_spans.json").write_text(json.dumps(content, indent=1) + "\n")
    names = list(next(iter(figures.values())))
    print("pair".ljust(34), *figures, sep="  ")
    for name in names:
        print(name.ljust(34), *(f"{row[name]:.4f}".rjust(len(pair)) for pair, row in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
