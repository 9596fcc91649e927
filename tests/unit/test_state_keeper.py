"""When learned state is saved, what a failure does, and what is never saved."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.state_file import FILE_NAME
from kvcmas_sgl.radix_ext.state_keeper import INTERVAL_S, LOG_EVERY_S, StateKeeper

from tests.unit.learned import OPEN, TENANT, Pupil, own_fingerprint


class Server:
    """A pupil with a keeper, and a clock of its own."""

    def __init__(self, folder: Path, pupil: Pupil | None = None, **changed: object) -> None:
        self.now = 0.0
        self.pupil = pupil or Pupil()
        made = own_fingerprint(self.pupil.estimators, **changed)
        self.keeper = StateKeeper(folder, made, self.pupil.learner, self.pupil.statistics, clock=lambda: self.now)
        self.keeper.restore()

    def idle(self, seconds: float = INTERVAL_S) -> None:
        """Time passes, and a save that comes of it ends."""
        self.now += seconds
        self.keeper.tick()
        if self.keeper._writing is not None:
            self.keeper._writing[0].exception()
        self.keeper.tick()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Saves, failures, refusals."""
        held = self.pupil.statistics
        return held.state_saves, held.state_failures, held.state_refused


def restarted(folder: Path, **changed: object) -> Server:
    return Server(folder, **changed)


def test_it_saves_what_has_changed_once_an_interval_and_a_restart_knows_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.idle()
    assert server.counts == (0, 0, 0) and list(tmp_path.iterdir()) == []
    server.pupil.learned()
    server.idle()
    assert server.counts == (1, 0, 0)
    server.pupil.read(OPEN, 40)
    server.idle(INTERVAL_S / 2)
    assert server.counts == (1, 0, 0)
    server.idle()
    server.idle()
    assert server.counts == (2, 0, 0)
    later = restarted(tmp_path)
    assert torch.equal(later.pupil.rows(), server.pupil.rows())
    # What was just read needs no writing.
    later.idle()
    assert later.counts == (0, 0, 0)


def test_leaving_saves_what_the_interval_has_not(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.pupil.learned()
    server.keeper.close()
    assert server.counts == (1, 0, 0)
    assert torch.equal(restarted(tmp_path).pupil.rows(TENANT), server.pupil.rows(TENANT))


def test_the_disk_is_waited_for_elsewhere_and_gets_what_was_known_then(tmp_path: Path) -> None:
    server, disk = Server(tmp_path), threading.Event()
    server.pupil.learned()
    before = server.pupil.rows()
    server.keeper._writer.submit(disk.wait)
    server.now += INTERVAL_S
    for seed in range(40, 43):
        server.keeper.tick()
        server.pupil.read(OPEN, seed)
    assert server.counts == (0, 0, 0) and list(tmp_path.iterdir()) == []
    disk.set()
    server.idle(0.0)
    assert server.counts == (1, 0, 0)
    assert torch.equal(restarted(tmp_path).pupil.rows(), before)
    server.keeper.close()
    assert torch.equal(restarted(tmp_path).pupil.rows(), server.pupil.rows())


def test_a_failing_disk_is_counted_logged_rarely_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    folder.write_text("no folder")
    server = Server(folder)
    server.pupil.learned()
    caplog.set_level(logging.WARNING)
    rounds = int(LOG_EVERY_S / INTERVAL_S)
    for _ in range(rounds):
        server.idle()
    assert server.counts == (0, rounds, 0)
    assert len(caplog.records) == 1 and "is not saved" in caplog.text
    server.idle()
    assert len(caplog.records) == 2
    folder.unlink()
    folder.mkdir()
    server.idle()
    assert server.counts == (1, rounds + 1, 0)
    assert not restarted(folder).pupil.empty


@pytest.mark.parametrize("damage", ["fingerprint", "bytes"])
def test_a_refused_file_is_one_line_and_is_kept(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    server.pupil.learned()
    server.keeper.close()
    path = tmp_path / FILE_NAME
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:-1])
    old = path.read_bytes()
    changed = {"weights": "retrained"} if damage == "fingerprint" else {}
    caplog.set_level(logging.WARNING)
    later = restarted(tmp_path, **changed)
    assert later.pupil.empty and later.counts == (0, 0, 1)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert path.read_bytes() == old
    later.pupil.read(OPEN, 7)
    later.keeper.close()
    assert path.with_suffix(".refused").read_bytes() == old
    assert torch.equal(restarted(tmp_path, **changed).pupil.rows(), later.pupil.rows())


def test_after_new_weights_nothing_is_saved_any_more(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.pupil.learned()
    server.idle()
    old = (tmp_path / FILE_NAME).read_bytes()
    server.pupil.learner.clear()
    server.keeper.stop()
    server.pupil.read(OPEN, 70)
    server.idle()
    server.keeper.close()
    assert server.counts == (1, 0, 0)
    # It is of the weights that the next start loads.
    assert (tmp_path / FILE_NAME).read_bytes() == old
    assert not restarted(tmp_path).pupil.empty


def test_what_a_flush_forgets_does_not_come_back(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.pupil.learned()
    server.idle()
    server.pupil.learner.clear()
    server.keeper.close()
    assert server.counts == (2, 0, 0)
    assert restarted(tmp_path).pupil.empty


def test_an_internal_failure_reaches_nobody(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.pupil.learned()
    del server.pupil.estimators["affine"]._bases  # type: ignore[attr-defined]
    server.idle()
    server.keeper.close()
    assert server.counts == (0, 2, 0) and list(tmp_path.iterdir()) == []


def test_a_restart_reads_the_file_of_the_folder(tmp_path: Path) -> None:
    server = Server(tmp_path, Pupil().learned())
    server.pupil.read(OPEN, 44)
    server.keeper.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert state_file.read(tmp_path / FILE_NAME)[0] == own_fingerprint(server.pupil.estimators)
