"""The state file: everything comes back bit for bit, or nothing does and one sentence says why."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.fingerprint import rope_digest
from kvcmas_sgl.radix_ext.state_file import FILE_NAME, State, StateError
from safetensors.torch import save_file

from tests.unit.learned import OPEN, TENANT, Pupil, own_fingerprint, table


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Pupil().learned().write(tmp_path_factory.mktemp("state") / FILE_NAME)


def sentence(error: BaseException) -> str:
    text = str(error)
    assert text.endswith(".") and "\n" not in text
    return text


def test_a_round_trip_is_exact(saved: Path) -> None:
    pupil, later = Pupil().learned(), Pupil()
    fingerprint, parts = state_file.read(saved)
    assert fingerprint == own_fingerprint(pupil.estimators)
    later.learner.load(parts)
    assert later.learner.state_bytes == pupil.learner.state_bytes > 0
    before, after = pupil.learner.state(), later.learner.state()
    assert {name: part.data for name, part in before.items()} == {name: part.data for name, part in after.items()}
    for name, part in before.items():
        assert set(part.tensors) == set(after[name].tensors)
        assert all(torch.equal(tensor, after[name].tensors[key]) for key, tensor in part.tensors.items())
    for on in (OPEN, TENANT):
        assert later.gate.expect(on, "affine", 50) == pupil.gate.expect(on, "affine", 50) is not None
        assert later.estimators["none"].spans_seen(on) == 3


def test_estimators_predict_the_same_bits_and_go_on_learning_to_the_same_bits(saved: Path) -> None:
    pupil, later = Pupil().learned(), Pupil()
    later.learner.load(state_file.read(saved)[1])
    for on in (OPEN, TENANT):
        assert torch.equal(pupil.rows(on), later.rows(on))
    for one in (pupil, later):
        one.read(OPEN, 50)
    assert torch.equal(pupil.rows(), later.rows())


def test_an_empty_state_comes_back_empty(tmp_path: Path) -> None:
    later = Pupil()
    later.learner.load(state_file.read(Pupil().write(tmp_path / FILE_NAME))[1])
    assert later.empty


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_or_a_lost_end_is_noticed(saved: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    broken = saved.with_name("broken.safetensors")
    broken.write_bytes(content)
    with pytest.raises(StateError) as caught:
        state_file.read(broken)
    assert sentence(caught.value).startswith(str(broken))


def test_what_is_no_state_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="does not exist"):
        state_file.read(tmp_path / FILE_NAME)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StateError, match="its digest is not"):
        state_file.read(tmp_path / "model.safetensors")


def test_another_format_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "FORMAT", 7)
    path = Pupil().write(tmp_path / FILE_NAME)
    monkeypatch.undo()
    with pytest.raises(StateError) as caught:
        state_file.read(path)
    assert "has format 7, but this version reads format 1" in sentence(caught.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"weights": "other"}, "weights w, but this server has other"),
        ({"theta": 500000.0}, "rope "),
        ({"dtype": torch.bfloat16}, "dtype float32, but this server has bfloat16"),
        ({"rank": 8}, "rank 4, but this server has 8"),
        ({"head": 0}, "head 16, but this server has 0"),
    ],
)
def test_another_fingerprint_is_named(saved: Path, changed: dict, named: str) -> None:
    fingerprint, _ = state_file.read(saved)
    own = own_fingerprint(Pupil().estimators, **changed)
    with pytest.raises(StateError) as caught:
        state_file.check_fingerprint(saved, fingerprint, own)
    assert f"was saved with {named}" in sentence(caught.value)
    state_file.check_fingerprint(saved, fingerprint, own_fingerprint(Pupil().estimators))


def test_another_rank_of_the_estimator_is_another_fingerprint() -> None:
    assert own_fingerprint(Pupil(rank=2).estimators) != own_fingerprint(Pupil(rank=4).estimators)


def test_the_rope_digest_sees_each_value_and_the_pairing() -> None:
    known = table()
    bumped = known.sin.clone()
    bumped[-1, -1] += 1e-3
    other = [dataclasses.replace(known, is_neox=False), dataclasses.replace(known, sin=bumped)]
    assert len({rope_digest(one) for one in (known, table(), *other)}) == 3


def without(name: str) -> Callable[[State], State]:
    return lambda state: State({key: t for key, t in state.tensors.items() if key != name}, state.data)


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: State({**state.tensors, name: change(state.tensors[name].clone())}, state.data)


def with_data(data: object) -> Callable[[State], State]:
    return lambda state: State(state.tensors, data)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("affine", without("edge.1.cross"), "tensor 'edge.1.cross' is missing"),
        ("affine", without("basis.1.shift"), "tensor 'basis.1.shift' is missing"),
        ("affine", with_tensor("edge.0.weight", lambda t: t.index_fill_(0, torch.tensor(1), torch.nan)), "NaN or Inf"),
        ("affine", with_tensor("edge.0.gram", lambda t: t[:, 1:]), "it must be fp32"),
        ("affine", with_tensor("edge.0.gram", lambda t: t.double()), "it must be fp32"),
        ("affine", with_data({"bases": [], "edges": [[["s", "a", "b"], 1, True]]}), "the basis of edge 0 is missing"),
        ("affine", with_data({"bases": [["s", [99]]], "edges": []}), "layers [99] are said to be fitted, of 3"),
        ("affine", with_data({"edges": []}), "cannot be read: KeyError"),
        ("none", with_data([[["s", "a"], 1]]), "stands where an edge must be"),
        ("none", with_data([[["s", "a", "b"], -1]]), "-1 stands where an integer from 0 on must be"),
        ("gate", with_data([[["s", "a", "b"], "affine", [[-0.5, 10, None]]]]), "-0.5 stands where a finite number"),
        ("gate", with_data([[["s", "a", "b"], "affine", [[0.5, 0, None]]]]), "0 stands where an integer from 1 on"),
        ("gate", with_data([[["s", "a", "b"], "affine", [[0.5, 10]]]]), "cannot be read: ValueError"),
        ("prefixes", with_data([["s", 3]]), "cannot be read: ValueError"),
        ("prefixes", with_data(None), "cannot be read: TypeError"),
    ],
)
def test_a_part_that_does_not_fit_loads_nothing(
    saved: Path, part: str, change: Callable[[State], State], words: str
) -> None:
    _, parts = state_file.read(saved)
    parts[part] = change(parts[part])
    later = Pupil()
    with pytest.raises(StateError) as caught:
        later.learner.load(parts)
    assert words in sentence(caught.value) and later.empty


def test_a_part_that_is_missing_loads_nothing(saved: Path) -> None:
    _, parts = state_file.read(saved)
    later = Pupil()
    with pytest.raises(StateError, match="'gate' cannot be read"):
        later.learner.load({name: part for name, part in parts.items() if name != "gate"})
    assert later.empty


def test_numbers_that_are_none_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        state_file.write(tmp_path / FILE_NAME, {}, {"gate": State({}, [float("nan")])})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def little_room() -> Iterator[None]:
    """The system refuses to write files beyond 4 KiB, in the middle of one: what a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = Pupil().write(tmp_path / FILE_NAME)
    old = path.read_bytes()
    assert len(old) < 4096
    pupil = Pupil().learned()
    request.getfixturevalue("little_room")
    with pytest.raises(StateError) as caught:
        pupil.write(path)
    assert "cannot be written" in sentence(caught.value)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(StateError) as caught:
            Pupil().write(folder / FILE_NAME)
        assert "cannot be written" in sentence(caught.value)


def test_only_the_owner_reads_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / ".kvcmas-unfinished").mkdir()
    (tmp_path / ".kvcmas-unfinished" / ".tmpOfAKilledProcess").write_text("half")
    mask = os.umask(0)
    try:
        path = Pupil().learned().write(tmp_path / FILE_NAME)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_handed_out_stays_while_learning_goes_on() -> None:
    pupil = Pupil().learned()
    parts = pupil.learner.state()
    copies = {name: tensor.clone() for name, tensor in parts["affine"].tensors.items()}
    pupil.read(OPEN, 60)
    pupil.read(TENANT, 61)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in parts["affine"].tensors.items())
    assert not torch.equal(pupil.learner.state()["affine"].tensors["edge.0.gram"], copies["edge.0.gram"])


def test_the_byte_budget_holds_after_loading(saved: Path) -> None:
    whole = Pupil().learned().learner.state_bytes
    later = Pupil(state_bytes=whole - 1)
    later.learner.load(state_file.read(saved)[1])
    assert 0 < later.learner.state_bytes <= whole - 1
    # The edge that learned first went, and with it what the gate knew of it.
    assert OPEN not in later.estimators["affine"].edges() and OPEN not in later.gate.edges()
    assert TENANT in later.gate.edges()
