"""Make a small model that reads pictures, from SmolLM2-135M-Instruct and a random CLIP tower of two layers.

Its language model is SmolLM2's, weight by weight, with plain one-dimensional RoPE; tower and projector are random,
scaled so that a picture's tokens are about as large as a word's. It does not understand what it sees, but its KV
depends on every pixel, and SGLang serves it as the LLaVA model that its folder says it is (`LlavaLlamaForCausalLM`).
The unused token ``<reponame>`` of the vocabulary becomes ``<image>``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcmas_sgl.prepare_model import ModelError, cache_folder, default_model

if TYPE_CHECKING:
    import torch
    from transformers import CLIPVisionModel

IMAGE_SIZE, PATCH_SIZE = 168, 14
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Tokens of one picture."""

IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", 4
_REPLACED = "<reponame>"
_WIDTH, _SEED = 128, 20
_TOWER = "clip-vision-tower"
_VERSION = 1

_TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>\n' }}{% endif %}\
{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def default_image_model() -> Path:
    """The model's folder, made in the user's cache on first use (a few seconds). Raises `ModelError`."""
    return prepare_image_model(cache_folder().parent / "SmolLM2-135M-Instruct-pictures")


def prepare_image_model(folder: Path) -> Path:
    """Make the model in ``folder`` unless it is there; the folder names its tower by an absolute path, so it must stay.

    Raises `ModelError` where ``folder`` holds something else.
    """
    mark = folder / "kvcmas.json"
    content = json.dumps({"version": _VERSION, "place": str(folder)})
    if mark.is_file() and mark.read_text() == content:
        return folder
    if folder.exists() and not mark.is_file():
        raise ModelError(f"{folder} exists and is no model with pictures; name an empty or a new folder with --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _make(work, folder)
        (work / "kvcmas.json").write_text(content)
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    except OSError:
        # Another process may have made the same folder meanwhile.
        if not mark.is_file():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _make(work: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    language = default_model()
    config = json.loads((language / "config.json").read_text())
    torch.manual_seed(_SEED)
    vision = CLIPVisionConfig(
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    tower = CLIPVisionModel(vision).eval()
    tower.save_pretrained(work / _TOWER)
    save_file(_projector(tower, language, config["hidden_size"]), work / "projector.safetensors", {"format": "pt"})
    shutil.copyfile(language / "model.safetensors", work / "model.safetensors")
    config |= {
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN_ID,
        "mm_hidden_size": _WIDTH,
        "mm_vision_tower": str(folder / _TOWER),
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_patch_merge_type": "flat",
        "image_aspect_ratio": "pad",
        "projector_hidden_act": "gelu",
        "vision_config": vision.to_dict(),
    }
    (work / "config.json").write_text(json.dumps(config, indent=2))
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=side).save_pretrained(work)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (work / name).write_text((language / name).read_text().replace(_REPLACED, IMAGE_TOKEN))
    (work / "chat_template.jinja").write_text(_TEMPLATE)


def _projector(tower: CLIPVisionModel, language: Path, size: int) -> dict[str, torch.Tensor]:
    """Two random layers, under LLaVA's names: over noise, their output has mean 0 and the size of word embeddings."""
    import torch
    from safetensors import safe_open

    first, second = torch.nn.Linear(_WIDTH, size), torch.nn.Linear(size, size)
    with safe_open(language / "model.safetensors", "pt") as weights:
        words = weights.get_tensor("model.embed_tokens.weight").float()
    with torch.no_grad():
        hidden = tower(torch.randn(8, 3, IMAGE_SIZE, IMAGE_SIZE), output_hidden_states=True).hidden_states[-2][:, 1:]
        out = second(torch.nn.functional.gelu(first(hidden)))
        scale = float(words.std() / (out - out.mean((0, 1))).std())
        second.weight.mul_(scale)
        second.bias.sub_(out.mean((0, 1))).mul_(scale)
    layers: dict[str, Any] = {"0": first, "2": second}
    return {
        f"model.mm_projector.{number}.{name}": value.detach().to(torch.bfloat16).clone()
        for number, layer in layers.items()
        for name, value in layer.named_parameters()
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the model and print its folder; 1 with one sentence on stderr if it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m kvcmas_sgl.prepare_image_model", description=__doc__)
    parser.add_argument("--output", type=Path, help="model folder (default: one in the user's cache)")
    options = parser.parse_args(arguments)
    try:
        print(prepare_image_model(Path(os.path.abspath(options.output))) if options.output else default_image_model())
    except (ModelError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
