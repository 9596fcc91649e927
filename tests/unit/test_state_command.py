"""``python -m kvcmas_sgl.state``: what it shows, what it lets out, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.sources import scope_digest
from kvcmas_sgl.radix_ext.state_file import FILE_NAME

from kvcmas_sgl.state import main
from tests.unit.learned import OPEN, TENANT, Pupil, edge_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder: three edges, one of them a tenant's."""
    (tmp_path / "server").mkdir()
    Pupil().learned().write(tmp_path / "server" / FILE_NAME)
    return tmp_path / "server"


def run(*argv: object) -> None:
    main([str(part) for part in argv])


def refusal(*argv: object) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    text = caught.value.code
    assert isinstance(text, str) and "\n" not in text
    return text


def restored(path: Path) -> Pupil:
    pupil = Pupil()
    pupil.learner.load(state_file.read(path)[1])
    return pupil


def test_show_tells_the_model_the_edges_and_what_the_gate_expects(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("show", folder)
    text = capsys.readouterr().out
    assert "3 edges" in text and "weights: w" in text and "dtype: float32" in text and "rank: 4" in text
    rows = [line.split() for line in text.splitlines() if "planner" in line]
    expected = Pupil().learned().gate.expect(OPEN, "affine", 1000)
    assert expected is not None
    kl = f"{expected.kl:.5f}"
    agents = ["planner", "pppppppp", "first", "critic", "cccccccc", "first"]
    # Spans, pairs and audits (odd seeds of 0, 1, 2 and of 10, 11, 12); the judge's edge is not solved yet.
    assert ["-", *agents, "3", "3", "1", kl] in rows
    assert ["-", "planner", "pppppppp", "first", "judge", "cccccccc", "first", "0", "1", "0", "unknown"] in rows
    assert any(row[:7] == [TENANT.namespace[:8], *agents] and row[7:10] == ["3", "3", "1"] for row in rows)


def test_a_role_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pupil = Pupil()
    pupil.read(edge_in(OPEN.namespace, "\x1b[2J\nb"), 0)
    run("show", pupil.write(tmp_path / FILE_NAME))
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\\u001b[2J" in text


def test_check_agrees_with_a_sound_file_and_names_a_broken_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / FILE_NAME
    run("check", path)
    assert "sound, 3 edges" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-5])
    assert str(path) in refusal("check", folder) and refusal("show", folder) == refusal("check", folder)
    assert "does not exist" in refusal("check", folder / "none")


def test_state_of_another_version_is_refused(folder: Path) -> None:
    fingerprint, parts = state_file.read(folder / FILE_NAME)
    fingerprint["estimators"]["affine"] = "affine: something new"
    state_file.write(folder / FILE_NAME, fingerprint, parts)
    assert "is of estimator 'affine: something new', but this version has" in refusal("check", folder)
    del fingerprint["layers"]
    state_file.write(folder / FILE_NAME, fingerprint, parts)
    assert "the fingerprint cannot be read" in refusal("check", folder)


def test_an_export_leaves_the_tenants_out_unless_told_otherwise(folder: Path, tmp_path: Path) -> None:
    run("export", folder, tmp_path / "open.safetensors")
    pupil = restored(tmp_path / "open.safetensors")
    assert TENANT.namespace.encode() not in (tmp_path / "open.safetensors").read_bytes()
    assert {edge.namespace for edge in pupil.estimators["affine"].edges()} == {scope_digest()}
    assert pupil.gate.edges() == set(pupil.estimators["affine"].edges()) and pupil.prefixes.scopes() == {scope_digest()}
    assert torch.equal(pupil.rows(), Pupil().learned().rows())
    run("export", folder, tmp_path / "all.safetensors", "--all-scopes")
    assert torch.equal(restored(tmp_path / "all.safetensors").rows(TENANT), Pupil().learned().rows(TENANT))
    assert (tmp_path / "all.safetensors").stat().st_mode & 0o777 == 0o600


def test_an_import_becomes_the_state_of_a_folder_and_replaces_nothing_unasked(folder: Path, tmp_path: Path) -> None:
    run("export", folder, tmp_path / "open.safetensors")
    run("import", tmp_path / "open.safetensors", tmp_path / "new" / "server")
    target = tmp_path / "new" / "server" / FILE_NAME
    assert torch.equal(restored(target).rows(), Pupil().learned().rows())
    assert target.parent.stat().st_mode & 0o777 == 0o700 and target.stat().st_mode & 0o777 == 0o600
    before = (folder / FILE_NAME).read_bytes()
    assert "--replace" in refusal("import", tmp_path / "open.safetensors", folder)
    assert (folder / FILE_NAME).read_bytes() == before
    run("import", tmp_path / "open.safetensors", folder, "--replace")
    assert TENANT not in restored(folder / FILE_NAME).gate.edges()


def test_a_broken_file_is_not_imported(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((folder / FILE_NAME).read_bytes()[:-1])
    assert str(broken) in refusal("import", broken, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_written_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    assert "cannot be written" in refusal("export", folder, tmp_path / "missing" / "file")
    assert "cannot be made" in refusal("import", folder, folder / FILE_NAME / "below")


@pytest.mark.parametrize("command", [[], ["show"], ["check"], ["export"], ["import"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0 and "state" in capsys.readouterr().out


def test_it_runs_as_a_module(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcmas_sgl.state", "check", str(folder)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "") and "sound" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "kvcmas_sgl.state", "check", str(folder / "none")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
