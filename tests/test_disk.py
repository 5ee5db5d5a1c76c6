"""Disks that are full, read-only, out of inodes or over quota: one-line errors, and the same result afterwards."""

import errno
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dynashift import checksums, events, files, folders, progress, run_record, runs
from dynashift.errors import UserError

STEPS = 12


def everything(folder: Path):
    """All that scripts write, on a small scale: data, a gate, and a run with arguments, events, checkpoints, result."""
    rows, rng = np.arange(3000, dtype="f"), np.random.default_rng(0)
    if not (folder / "data.hdf5").exists():
        checksums.write_hdf5(folder / "data.hdf5", {"rewards": rows}, "own", {})
    with files.only_one(folder / "gate.npz"):
        if not (folder / "gate.npz").exists():
            files.write_npz(folder / "gate.npz", gate=rows > 7)
    with runs.session(folder / "run", {"lr": 1.0}):
        if runs.is_done(folder / "run"):
            return runs.read_result(folder / "run" / "result.json")["evaluations"]
        saved = runs.load_checkpoint(folder / "run" / "ckpt.pt", {"rng": rng}) or {"step": 0, "found": []}
        found, writer = list(saved["found"]), progress.open_writer(folder / "run" / "policy", saved["step"])
        for step in range(saved["step"] + 1, STEPS + 1):
            found.append({"step": step, "returns": [rng.normal()], "score": rng.normal()})
            progress.log(writer, step, {"losses/x": found[-1]["score"]})
            if step % 4 == 0:
                parts = {"rng": rng, "step": step, "found": found, "weights": list(range(4000))}
                runs.save_checkpoint(folder / "run" / "ckpt.pt", parts)
        writer.close()
        return run_record.write_result(folder / "run", {}, found, {}, {})["evaluations"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("undisturbed"))


def one_line(folder: Path, reason: str) -> None:
    with pytest.raises(UserError) as error:
        everything(folder)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def check(folder: Path, undisturbed) -> None:
    """Every file is complete, nothing is left over, and the same command ends as if nothing had happened."""
    assert everything(folder) == undisturbed
    assert list(folder.rglob(".*.tmp")) == []
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["data.hdf5", "gate.npz", "run"]
    assert files.read_npz(folder / "gate.npz")["gate"].sum() == 2992
    assert checksums.identify(folder / "data.hdf5")[0] == "generated"


# ---------------------------------------------------------------------------------------- a call that fails

SITES = {
    "mkdir": (Path, "mkdir", [1, 3]),
    "lock": (files, "open_lock", [1]),
    "mkstemp": (tempfile, "mkstemp", [1, 2, 3, 5]),
    "write": (Path, "write_bytes", [1, 3, 5]),
    "fsync": (os, "fsync", [1, 2, 4, 9]),
    "replace": (os, "replace", [1, 3, 6]),
    "truncate": (os, "ftruncate", [1]),
}
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
CASES = [(site, n, ERRORS[(i + n) % 3]) for i, site in enumerate(SITES) for n in SITES[site][2]]


@pytest.mark.parametrize(("site", "n", "number"), CASES, ids=[f"{s}-{n}-{errno.errorcode[e]}" for s, n, e in CASES])
def test_a_call_that_fails(site, n, number, tmp_path, monkeypatch, undisturbed):
    """The n-th call of this kind fails, and so do all after it, until there is room again."""
    module, name, _ = SITES[site]
    real, calls = getattr(module, name), []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) >= n:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing)
        if module is files:
            patch.setattr(folders, name, failing)
        one_line(tmp_path, os.strerror(number))
        assert len(calls) >= n
    check(tmp_path, undisturbed)


@pytest.mark.parametrize("number", ERRORS)
def test_events_that_cannot_be_written(number, tmp_path, monkeypatch, undisturbed):
    """Half of an event is on the disk when it is full. TensorBoard reads the file all the same."""
    real = events.Events.write

    def failing(self, record):
        if self.size > 300:
            self.file = SimpleFile(self.file, number)
        real(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(events.Events, "write", failing)
        one_line(tmp_path, os.strerror(number))
    check(tmp_path, undisturbed)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run" / "policy"), {"scalars": 0}).Reload().Scalars("losses/x")
    assert [e.step for e in found] == list(range(1, STEPS + 1))


class SimpleFile:
    """Writes ten bytes, then nothing more."""

    def __init__(self, file, number):
        self.file, self.number, self.first = file, number, True

    def write(self, data):
        if not self.first:
            raise OSError(self.number, os.strerror(self.number))
        self.first = False
        return self.file.write(data[:10])

    def __getattr__(self, name):
        return getattr(self.file, name)


# ------------------------------------------------------------------------------------------------ real disks


@pytest.fixture
def disk(tmp_path):
    """Mount a small disk with these options, and again with others."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options: str):
        options = f"remount,{options}" if mounted else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a small disk")
        mounted.append(options)
        return folder / "work"

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("size", ["4k", "16k", "28k", "48k"])
def test_a_small_disk(size, disk, undisturbed):
    one_line(disk(f"size={size}"), "No space left on device")
    check(disk("size=8m"), undisturbed)


@pytest.mark.parametrize("inodes", [3, 5, 8, 10])
def test_a_disk_without_inodes(inodes, disk, undisturbed):
    one_line(disk(f"size=8m,nr_inodes={inodes}"), "No space left on device")
    check(disk("size=8m,nr_inodes=1000"), undisturbed)


@pytest.mark.parametrize("begun", [False, True])
def test_a_disk_that_is_read_only(begun, disk, monkeypatch, undisturbed):
    folder = disk("size=8m")
    folder.mkdir()
    if begun:  # and stopped after a checkpoint
        with monkeypatch.context() as patch:
            patch.setattr(run_record, "write_result", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                everything(folder)
    disk("ro")
    one_line(folder, "Read-only file system")
    disk("rw")
    check(folder, undisturbed)


@pytest.mark.parametrize("limit", [0, 100, 600, 5000, 20_000])
def test_files_may_not_be_larger(limit, tmp_path, undisturbed):
    """As with a quota, or ulimit -f."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        one_line(tmp_path, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check(tmp_path, undisturbed)
