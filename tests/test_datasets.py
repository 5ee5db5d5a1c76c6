"""Datasets: every published file row by row, foreign and damaged files, writing, listing, Minari.

Where data come from (folders, downloads, generating, load and load_pair) is in test_download.py.
"""

import ast
import functools
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import dynashift.columns
from dynashift import checksums, datasets, download, episodes, minari_io, policies, transitions
from dynashift.checksums import write_hdf5
from dynashift.datasets import Dataset, read_hdf5
from dynashift.download import task_of
from dynashift.envs import make, make_batch
from dynashift.errors import UserError
from dynashift.listing import listing
from dynashift.scores import normalized_score
from dynashift.tasks import ROBOTS
from dynashift.transitions import COLUMNS

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # an error of one line is not two lines
ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds until a child process counts as hung; no test takes them
settings.register_profile("datasets", deadline=None, derandomize=True, database=None)
few = functools.partial(settings, settings.get_profile("datasets"))

# file, rows, failures, score of the complete episodes | episode lengths (* cut by the end of the file) | returns
TARGETS = """
halfcheetah_gravity_0.5_medium 5000 0 46.79 | 5x1000 | 4346 4391 4318 4266 4181
halfcheetah_gravity_0.5_medium_expert 4997 0 69.99 | 1000 999 1000 1000 998 | 4346 4386 8256 7857 8013
halfcheetah_gravity_0.5_expert 5000 0 86.02 | 5x1000 | 8256 7857 8032 8345 8211
halfcheetah_kinematic_medium 5000 0 41.37 | 5x1000 | 2767 2712 2782 2745 2786
halfcheetah_kinematic_medium_expert 4997 0 75.99 | 1000 999 1000 1000 998 | 2767 2710 7014 7072 6944
halfcheetah_kinematic_expert 5000 0 99.2 | 5x1000 | 7014 7072 6958 6969 7019
halfcheetah_morph_medium 5000 0 44.43 | 5x1000 | 4220 4073 4205 4133 4171
halfcheetah_morph_medium_expert 4997 0 77.64 | 1000 999 1000 1000 998 | 4220 4069 9730 9719 9659
halfcheetah_morph_expert 5000 0 99.1 | 5x1000 | 9730 9719 9680 9482 9509
hopper_gravity_0.5_medium 5000 7 73.42 | 660 815 667 633 670 642 505 408* | 2417 2885 2397 2286 2433 2371 1785 1308
hopper_gravity_0.5_medium_expert 4333 5 106.59 | 660 815 992 896 970 | 2417 2885 4144 3746 4054
hopper_gravity_0.5_expert 5000 5 125.05 | 992 896 970 999 988 155* | 4144 3746 4054 4186 4126 372
hopper_kinematic_medium 5000 0 66.17 | 5x1000 | 1870 1873 1877 1851 1889
hopper_kinematic_medium_expert 4997 0 86.45 | 1000 999 1000 1000 998 | 1870 1871 2844 2845 2839
hopper_kinematic_expert 5000 0 100.07 | 5x1000 | 2844 2845 2845 2844 2846
hopper_morph_medium 5000 7 63.12 | 652 668 643 655 647 646 653 436* | 1980 2040 1947 1994 1961 1957 1984 1180
hopper_morph_medium_expert 4318 2 85.61 | 652 668 1000 1000 998 | 1980 2040 3152 3155 3149
hopper_morph_expert 5000 0 100.07 | 5x1000 | 3152 3155 3156 3155 3156
walker2d_gravity_0.5_medium 5000 6 55.7 | 886 899 773 797 739 806 100* | 3445 3144 2649 2806 2422 2921 126
walker2d_gravity_0.5_medium_expert 4783 2 84.99 | 886 899 1000 1000 998 | 3445 3144 5166 5172 5154
walker2d_gravity_0.5_expert 5000 0 99.72 | 5x1000 | 5166 5172 5166 5225 5171
walker2d_kinematic_medium 5000 1 62.14 | 1000 522 1000 1000 1000 478* | 2226 1413 2207 2086 2208 1084
walker2d_kinematic_medium_expert 4483 2 78.44 | 1000 522 963 1000 998 | 2226 1413 2875 3260 3012
walker2d_kinematic_expert 5000 1 94.57 | 963 1000 1000 1000 1000 37* | 2875 3260 3020 3238 3014 34
walker2d_morph_medium 5000 4 45.66 | 327 263 668 1000 467 1000 1000 275* | 1002 773 2246 2804 1602 2878 2790 766
walker2d_morph_medium_expert 3588 2 67.28 | 327 263 1000 1000 998 | 1002 773 4347 4353 4338
walker2d_morph_expert 5000 0 99.09 | 5x1000 | 4347 4353 4348 4403 4343
ant_gravity_0.5_medium 5000 2 56.92 | 612 144 1000 1000 1000 1000 244* | 1943 377 3251 3180 1983 3167 709
ant_gravity_0.5_medium_expert 3151 3 63.43 | 612 144 1000 396 999 | 1943 377 4516 1691 4570
ant_gravity_0.5_expert 5000 2 79.53 | 1000 396 1000 90 1000 1000 514* | 4516 1691 4574 331 4588 4501 2211
ant_kinematic_medium 5000 0 61.43 | 5x1000 | 3115 2830 3036 3092 3032
ant_kinematic_medium_expert 4997 0 83.86 | 1000 999 1000 1000 998 | 3115 2826 5083 5074 5117
ant_kinematic_expert 5000 0 99.19 | 5x1000 | 5083 5074 5128 5015 5092
ant_morph_medium 5000 0 41.41 | 5x1000 | 2151 2199 2207 2177 2158
ant_morph_medium_expert 4997 0 74.87 | 1000 999 1000 1000 998 | 2151 2196 5662 5544 5458
ant_morph_expert 5000 0 97.86 | 5x1000 | 5662 5544 5470 5557 5730
"""
TARGETS = {line.split()[0]: [part.split() for part in line.split("|")] for line in TARGETS.strip().splitlines()}
MIXED = [name for name in TARGETS if name.endswith("medium_expert")]
SLICES = {"halfcheetah": [1000, 1000], "hopper": [470, 441], "walker2d": [1000, 1000], "ant": [1000, 1000]}


@functools.cache
def read(folder: Path, name: str) -> Dataset:
    return read_hdf5(folder / f"{name}.hdf5", *task_of(f"{name}.hdf5"))


def same(one: Dataset, other: Dataset, rows=slice(None), but=()) -> bool:
    return all(np.array_equal(getattr(one, key), getattr(other, key)[rows]) for key in COLUMNS if key not in but)


def refused(call, *words) -> str:
    """The one-line UserError that names all these words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if str(word) not in message], message
    return message


def columns(n=12, env="hopper", seed=0, failures=(3, 7)) -> dict[str, np.ndarray]:
    """A small valid dataset: two failures, the end of the file cuts the third episode."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n + 1, ROBOTS[env].obs_dim)).astype("f")
    data = {
        "observations": obs[:-1],
        "actions": rng.uniform(-1, 1, (n, ROBOTS[env].act_dim)).astype("f"),
        "rewards": rng.normal(size=n).astype("f"),
        "next_observations": obs[1:].copy(),
        "terminals": np.isin(np.arange(n), failures),
        "timeouts": np.arange(n) == n - 1,
    }
    data["next_observations"][data["terminals"]] += 1  # not the next episode's first state
    return data


def hdf5(path: Path, data: dict, without=(), **changes) -> Path:
    """Any HDF5 file; a callable makes its entry itself."""
    with h5py.File(path, "w") as file:
        for key, value in {**data, **changes}.items():
            if key in without:
                continue
            if callable(value):
                value(file, key)
            else:
                file[key] = value
    return path


def in_children(function, *arguments, n=1, then=lambda: None) -> list:
    """Start n processes of function(connection, *arguments), call then() when each has sent something, and return
    [(messages, exit code)] of each."""
    context = multiprocessing.get_context("spawn")
    children = []
    for _ in range(n):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        child.start()
        theirs.close()
        children.append((ours, child))
    for ours, _ in children:
        ours.poll(PATIENCE)
    then()
    results = []
    for ours, child in children:
        messages = []
        while ours.poll(PATIENCE):
            try:
                messages.append(ours.recv())
            except EOFError:
                break
        child.join(PATIENCE)
        child.kill()  # if it hangs
        results.append((messages, child.exitcode))
    return results


# ------------------------------------------------------------------------------------------ the published files


@pytest.mark.parametrize("name", TARGETS)
def test_published_target_file(name, real_data):
    (_, rows, failures, score), lengths, returns = TARGETS[name]
    lengths = ["1000"] * 5 if lengths == ["5x1000"] else lengths
    data = read(real_data / "target", name)
    ends = data.starts + data.lengths - 1
    assert (data.kind, len(data), data.terminals.sum()) == ("published", int(rows), int(failures))
    assert data.sha256 == download.PUBLISHED[f"{name}.hdf5"]["sha256"]
    assert data.lengths.tolist() == [int(length.strip("*")) for length in lengths]
    assert data.complete.tolist() == [not length.endswith("*") for length in lengths]
    np.testing.assert_allclose(data.returns, np.array(returns, float), atol=0.51)
    assert data.score == pytest.approx(float(score), abs=0.06)
    assert data.observations.shape == data.next_observations.shape == (len(data), ROBOTS[data.env].obs_dim)
    assert data.actions.shape == (len(data), ROBOTS[data.env].act_dim)
    assert [getattr(data, key).dtype for key in COLUMNS] == [np.float32] * 4 + [bool] * 2

    # steps, starts and lengths agree
    assert np.array_equal(np.flatnonzero(data.steps == 0), data.starts)
    assert np.array_equal(data.steps[ends] + 1, data.lengths)
    assert np.array_equal(np.flatnonzero(data.terminals | data.timeouts), ends)
    assert not (data.terminals & data.timeouts).any()

    # no transition crosses the end of an episode
    follows = (data.next_observations[:-1] == data.observations[1:]).all(1)
    assert np.array_equal(follows, ~np.isin(np.arange(len(data) - 1), ends))


@pytest.mark.parametrize("name", MIXED)
def test_medium_expert_is_mended_from_its_parents(name, real_data):
    data, rows = read(real_data / "target", name), {}
    for level in ("medium", "expert"):
        parent = read(real_data / "target", name.replace("medium_expert", level))
        keys = np.hstack([parent.observations, parent.actions])
        rows |= {key.tobytes(): (parent, i) for i, key in enumerate(keys)}
    for i, key in enumerate(np.hstack([data.observations, data.actions])):
        parent, j = rows[key.tobytes()]
        for column in COLUMNS[:-1]:
            assert np.array_equal(getattr(data, column)[i], getattr(parent, column)[j]), (i, column)


def test_medium_expert_without_its_parents(real_data, tmp_path):
    """Failures are kept, with a simulated next state; rows at the time limit, whose next state is lost, are not."""
    failures = compared = 0
    for name in MIXED:
        shutil.copy(real_data / "target" / f"{name}.hdf5", tmp_path)
        whole, alone = read(real_data / "target", name), read(tmp_path, name)
        assert alone.kind == "published"
        assert alone.lengths.tolist() == [n - (n == 1000) for n in whole.lengths]  # 998, 999: true next states remain
        lost = np.zeros(len(whole), bool)
        lost[(whole.starts + whole.lengths - 1)[whole.lengths == 1000]] = True
        assert same(alone, whole, ~lost, but=("next_observations", "timeouts"))
        before = np.append(lost[1:], False)
        assert np.array_equal(alone.timeouts, (whole.timeouts | before)[~lost])
        failed, true = alone.terminals, whole.next_observations[~lost]
        assert np.array_equal(alone.next_observations[~failed], true[~failed])
        failures += failed.sum()
        exact = failed & (np.abs(alone.observations) < ROBOTS[alone.env].clip).all(1)  # no speed was cut off
        compared += exact.sum()
        np.testing.assert_allclose(alone.next_observations[exact], true[exact], atol=1e-3)
        assert not same(alone, whole, ~lost) or not failed.any()  # from the simulator, so only almost equal
    assert (failures, compared) == (16, 13)


@pytest.mark.parametrize("env", SLICES)
def test_d4rl_slice(env, real_data, tmp_path):
    path = real_data / "d4rl_medium" / f"{env}_medium-v2.slice.hdf5"
    data = read_hdf5(path, env)
    assert data.kind == "own"
    assert data.lengths.tolist() == SLICES[env]
    with h5py.File(path) as file:
        stored = {key: file[key][()] for key in COLUMNS}
    if env == "ant":  # 84 contact forces, all zero
        assert stored["observations"].shape[1] == 111
        assert not stored["observations"][:, 27:].any()
    for key in COLUMNS:
        wanted = stored[key][:, :27] if env == "ant" and "observations" in key else stored[key]
        assert np.array_equal(getattr(data, key), wanted), key

    # the upload of 2021
    old = read_hdf5(hdf5(tmp_path / "old.hdf5", stored, without=("next_observations",)), env)
    kept = ~data.timeouts
    assert len(old) == len(data) - data.timeouts.sum() == sum(SLICES[env]) - (0 if env == "hopper" else 2)
    assert same(old, data, kept, but=("next_observations", "timeouts"))
    assert np.array_equal(old.timeouts, np.append(data.timeouts[1:], False)[kept])
    failed, true = old.terminals, data.next_observations[kept]
    assert failed.sum() == (2 if env == "hopper" else 0)
    assert np.array_equal(old.next_observations[~failed], true[~failed])
    np.testing.assert_allclose(old.next_observations[failed], true[failed], atol=1e-5)


def test_many_failures_are_simulated_one_by_one(tmp_path):
    data = columns(150, failures=range(150))
    data["observations"] = make_batch("hopper", "morph", 150, workers=1).reset(0).astype("f")
    path = hdf5(tmp_path / "mine.hdf5", data, without=("next_observations",))
    found = read_hdf5(path, "hopper", "morph").next_observations
    single = make("hopper", "morph", seed=0)
    for i in range(150):
        single.reset()
        single.unwrapped.set_observation(data["observations"][i])
        assert np.array_equal(found[i], single.step(data["actions"][i])[0].astype("f")), i


# ---------------------------------------------------------------------------------------- foreign and damaged files


def change(key, value):
    return lambda path: hdf5(path, columns(), **{key: value})


def edited(key, index, value, dtype="d"):
    array = columns()[key].astype(dtype)
    array[index] = value
    return change(key, array)


def cut_short(path):
    hdf5(path, columns())
    path.write_bytes(path.read_bytes()[:-700])


def virtual(file, key):
    layout = h5py.VirtualLayout((12,), "f4")
    layout[:] = h5py.VirtualSource("other.hdf5", "rewards", (12,))
    file.create_virtual_dataset(key, layout)


def outside(file, key):
    file.create_dataset(key, (12,), "f4", external=[("other.raw", 0, h5py.h5f.UNLIMITED)])


def half_written(file, key):
    file.create_dataset(key, (12,), "f4", chunks=(6,))[:6] = 1


def bomb(file, key):
    """100 MB of zeros in a few kilobytes."""
    rows = file.create_dataset(key, (25_000_000,), "f4", chunks=(25_000_000,), compression="gzip", compression_opts=9)
    rows[:] = 0


def all_timeouts(path):
    data = columns(failures=())
    return hdf5(path, data | {"timeouts": np.ones(12, bool)}, without=("next_observations",))


BAD = {
    "missing keys": (lambda path: hdf5(path, columns(), without=("rewards", "actions")), "has no actions, rewards"),
    "no ends": (lambda path: hdf5(path, columns(), without=("timeouts", "next_observations")), "has neither timeouts"),
    "group, not dataset": (change("rewards", lambda file, key: file.create_group(key)), "rewards is no table"),
    "optional group": (change("timeouts", lambda file, key: file.create_group(key)), "timeouts is no table"),
    "dangling link": (change("rewards", h5py.SoftLink("/nowhere")), "rewards is a link"),
    "link in the file": (change("rewards", h5py.SoftLink("/terminals")), "rewards is a link"),
    "link to a file": (change("rewards", h5py.ExternalLink("other.hdf5", "/rewards")), "rewards is a link"),
    "virtual": (change("rewards", lambda file, key: virtual(file, key)), "rewards lie in another file"),
    "external storage": (change("rewards", lambda file, key: outside(file, key)), "rewards lie in another file"),
    "never written": (change("rewards", lambda file, key: file.create_dataset(key, (12,), "f4")), "never written"),
    "half written": (change("rewards", lambda file, key: half_written(file, key)), "never written"),
    "a bomb": (change("rewards", lambda file, key: bomb(file, key)), "forged"),
    "actions of 254": (edited("actions", 4, 254.0), "1 of 12 actions leave [-1, 1]", "up to 254"),
    "all timeouts": (lambda path: all_timeouts(path), "12 of 12 transitions"),
    "a fifo": (lambda path: os.mkfifo(path), "not a regular file"),
    "another robot": (lambda path: hdf5(path, columns(env="walker2d")), "observations has shape (12, 17)", "hopper"),
    "wrong actions": (change("actions", np.zeros((12, 2))), "actions has shape (12, 2), expected (12, 3)"),
    "narrow next": (change("next_observations", np.zeros((12, 10))), "next_observations has shape (12, 10)"),
    "flat": (change("observations", np.zeros(12 * 11)), "observations has shape (132,)"),
    "ragged actions": (change("actions", np.zeros((11, 3))), "actions has shape (11, 3)"),
    "ragged rewards": (change("rewards", np.zeros(13)), "rewards has shape (13,), expected (12,)"),
    "ragged timeouts": (change("timeouts", np.zeros((12, 2))), "timeouts has shape (12, 2)"),
    "NaN": (edited("observations", (5, 3), np.nan), "observations holds NaN", "row 5"),
    "infinite": (edited("rewards", 11, -np.inf, "f"), "rewards holds NaN or infinite values", "row 11"),
    "NaN in half precision": (edited("actions", (0, 2), np.nan, np.float16), "actions", "row 0"),
    "NaN next": (edited("next_observations", (7, 0), np.nan, "f"), "next_observations", "row 7"),
    "too large": (edited("next_observations", (2, 0), 1e39), "next_observations holds values too large for float32"),
    "text": (change("rewards", ["one"] * 12), "rewards is no table of numbers"),
    "complex": (change("rewards", np.zeros(12, complex)), "rewards is no table of numbers"),
    "records": (change("rewards", np.zeros(12, [("a", "f")])), "rewards is no table of numbers"),
    "empty": (lambda path: hdf5(path, {key: value[:0] for key, value in columns().items()}), "holds no transitions"),
    "null": (change("rewards", h5py.Empty("f")), "rewards is no table of numbers"),
    "scalar observations": (change("observations", 3.0), "holds no transitions"),
    "scalar rewards": (change("rewards", 3.0), "rewards has shape ()"),
    "terminals of 2": (edited("terminals", 4, 2), "terminals holds values other than 0 and 1"),
    "timeouts of 0.5": (edited("timeouts", 4, 0.5), "timeouts holds values other than 0 and 1"),
    "nothing known": (
        lambda path: hdf5(path, columns(1, failures=()), without=("next_observations",)),
        "1 of 1 transitions end an episode",
    ),
    "zero rows on paper": (change("rewards", lambda file, key: file.create_dataset(key, (0, 1), "f")), "shape (0, 1)"),
    "cut short": (cut_short, "cut short or damaged"),
    "nothing at all": (lambda path: path.write_bytes(b""), "cut short or damaged"),
    "text file": (lambda path: path.write_text("observations, actions\n1, 2\n"), "not a readable HDF5 file"),
    "web page": (lambda path: path.write_text("\n<!DOCTYPE html><title>404</title>"), "a web page"),
    "directory": (lambda path: path.mkdir(), "not a regular file"),
    "no such file": (lambda path: None, "no such file"),
    "no such folder": (lambda path: path.parent.rmdir() or path.parent.write_text(""), "cannot be read (Not a dir"),
    "a loop of links": (lambda path: path.symlink_to(path), "cannot be read (Too many levels"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case, tmp_path):
    make, *words = BAD[case]
    path = tmp_path / "folder" / "mine.hdf5"
    path.parent.mkdir()
    make(path)
    refused(lambda: read_hdf5(path, "hopper"), path, *words)


def test_what_was_dropped_is_said(tmp_path, capsys):
    data = columns(40, failures=())
    ends = np.zeros(40, bool)
    ends[[9, 19, 29]] = True
    path = hdf5(tmp_path / "mine.hdf5", data | {"timeouts": ends}, without=("next_observations",))
    assert len(read_hdf5(path, "hopper")) == 36
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: 4 of 40 transitions" in line


def test_more_than_the_machine_has_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = hdf5(tmp_path / "mine.hdf5", columns(5000))
    monkeypatch.setattr(dynashift.columns, "SMALL", 2**10)
    assert len(read_hdf5(path, "hopper")) == 5000
    monkeypatch.setattr(dynashift.columns, "memory_left", lambda: 1e6)
    monkeypatch.setattr(h5py.Dataset, "__array__", mock.Mock(side_effect=AssertionError("read")))
    refused(lambda: read_hdf5(path, "hopper"), path, "of memory", "are left")


def test_memory_left_knows_the_machine_and_a_limit_of_the_process():
    machine = dynashift.columns.memory_left()
    assert 1e7 < machine < 1e14
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, before[1]))
    try:
        assert 0 < dynashift.columns.memory_left() <= 2**30
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", ["published", "embedded", "regenerated-d4rl", "../../../escape/x"])
def test_what_a_file_says_of_its_kind_is_not_believed(kind, tmp_path):
    write_hdf5(tmp_path / "made.hdf5", columns(), kind, {})
    assert read_hdf5(tmp_path / "made.hdf5", "hopper").kind == "own"


def test_a_published_file_is_known_under_any_name(real_data, tmp_path):
    name = "hopper_morph_medium.hdf5"
    (tmp_path / "mine.hdf5").write_bytes((real_data / "target" / name).read_bytes())
    assert read_hdf5(tmp_path / "mine.hdf5", "hopper", "morph").kind == "published"


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path, real = hdf5(tmp_path / "mine.hdf5", columns()), checksums.identify

    def changes(path):
        found = real(path)
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(episodes, "identify", changes)
    refused(lambda: read_hdf5(path, "hopper"), path, "changed while it was read")


def test_unreadable_file(tmp_path, monkeypatch):
    path = hdf5(tmp_path / "mine.hdf5", columns())
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        monkeypatch.setattr(Path, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    refused(lambda: read_hdf5(path, "hopper"), path, "Permission denied")


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2"])
def test_good_foreign_file(dtype, tmp_path):
    """Any precision and byte order, flags as numbers, columns as [N, 1], other things in the file."""
    data = {key: value.astype(np.float16).astype(dtype) for key, value in columns().items()}
    path = hdf5(tmp_path / "mine.hdf5", data, rewards=data["rewards"][:, None], notes="hello")
    read = read_hdf5(path, "hopper")
    assert (read.kind, read.lengths.tolist()) == ("own", [4, 4, 4])
    for key in COLUMNS:
        assert np.array_equal(getattr(read, key), data[key]), key


def test_a_lost_block_is_not_read_as_zeros(tmp_path):
    data = columns()
    blocks = {"chunks": (4, 11), "compression": "gzip"}

    def half(file, key):
        file.create_dataset(key, (12, 11), "f", **blocks)[:8] = data[key][:8]

    whole = hdf5(tmp_path / "whole.hdf5", data, observations=lambda f, k: f.create_dataset(k, data=data[k], **blocks))
    assert np.array_equal(read_hdf5(whole, "hopper").observations, data["observations"])
    path = hdf5(tmp_path / "mine.hdf5", data, observations=half)
    refused(lambda: read_hdf5(path, "hopper"), path, "damaged")


def damage(good: bytes, seed: int, front: int) -> bytes:
    """A quarter of the files is cut short, the others have 1 to 8 bits flipped, half of them in the first bytes."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 0:
        return good[: rng.integers(len(good))]
    bad = bytearray(good)
    for bit in rng.integers(8 * (front if seed % 2 else len(good)), size=rng.choice([1, 1, 1, 2, 8])):
        bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def verdict(path: Path, good: Dataset) -> str:
    try:
        return "equal" if same(read_hdf5(path, good.env, good.shift), good) else "WRONG"
    except UserError as error:
        return "refused" if str(path) in str(error) and "\n" not in str(error) else f"MESSAGE {error}"
    except Exception as error:
        return f"ESCAPED {error!r}"


def test_damaged_published_file(real_data, tmp_path):
    path = tmp_path / "hopper_morph_medium.hdf5"
    content, good = (real_data / "target" / path.name).read_bytes(), read(real_data / "target", path.stem)
    for seed in range(200):
        path.write_bytes(damage(content, seed, 4096))
        assert verdict(path, good) == "refused", seed


def judge_own(connection, content: Path, path: Path, cases: int):
    """In a process of its own: damaged HDF5 may crash the HDF5 library itself."""
    content = content.read_bytes()
    path.write_bytes(content)
    good = read_hdf5(path, "hopper", "morph")
    for seed in range(cases):
        path.write_bytes(damage(content, seed, 4096))
        connection.send((seed, "started"))
        connection.send((seed, verdict(path, good)))


def test_damaged_own_file(real_data, tmp_path):
    """Only its compression, which has checksums, and plausibility checks protect the content of a user's file."""
    content = real_data / "target" / "hopper_morph_medium.hdf5"
    [(messages, code)] = in_children(judge_own, content, tmp_path / "mine.hdf5", 250)
    assert code == 0, f"died (exit code {code}) in case {messages[-1] if messages else None}"
    results = dict(messages)
    assert len(results) == 250
    assert {seed: result for seed, result in results.items() if result not in ("refused", "equal")} == {}
    assert list(results.values()).count("refused") > 125


def test_damaged_generated_file(tmp_path):
    path = tmp_path / "made.hdf5"
    write_hdf5(path, columns(), "embedded", {"seed": 1})
    content, good = path.read_bytes(), read_hdf5(path, "hopper")
    results = []
    for seed in range(400):
        path.write_bytes(damage(content, seed, 600))
        results.append(verdict(path, good))
    assert set(results) == {"refused", "equal"}  # equal: where the header has room to spare
    assert results.count("refused") > 200


# ----------------------------------------------------------------------------------------------------- no pickle


def test_nothing_unpickles():
    files = [*ROOT.glob("*.py"), *(ROOT / "dynashift").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    calls = 0
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names.append(getattr(node, "module", None) or "")
            bad = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
            assert not bad & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load", "torch.load"):
                wanted = ("allow_pickle", False) if "torch" not in ast.unparse(node.func) else ("weights_only", True)
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert given.get(*wanted) is wanted[1], f"{path}:{node.lineno}"  # both are the default
                calls += 1
    assert calls >= 2


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("key", ["fc0.weight", "meta"])
def test_policy_with_a_pickle_is_refused(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tiny_policy(tmp_path / "bomb.npz", **{key: np.array([Bomb()], object)})
    if key == "meta":  # never looked at by load_policy
        with pytest.raises((UserError, ValueError), match="pickle"):
            policies.meta(path)
    else:
        refused(lambda: policies.load_policy(path), path, "not a readable policy")
    assert not Path("exploded").exists()


# ----------------------------------------------------------------------------------------------------------- writing


def tiny_policy(path: Path, seed=0, **changes) -> Path:
    rng = np.random.default_rng(seed)
    shapes = {"fc0.weight": (8, 11), "fc0.bias": 8, "mean.weight": (3, 8), "mean.bias": 3}
    shapes |= {"log_std.weight": (3, 8), "log_std.bias": 3}
    np.savez(path, **{key: rng.normal(0, 0.3, shape).astype("f") for key, shape in shapes.items()} | changes)
    return path


@st.composite
def small_data(draw):
    n = draw(st.integers(1, 8))
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    data = {key: draw(arrays(np.float32, (n, width), elements=number)) for key, width in WIDTHS.items()}
    data["rewards"] = data["rewards"][:, 0]
    data["actions"] = np.clip(data["actions"], -1, 1)
    data["terminals"] = draw(arrays(bool, n))
    data["timeouts"] = draw(arrays(bool, n)) & ~data["terminals"]
    data["timeouts"][-1] = not data["terminals"][-1]
    data["observations"][:, 0] = np.arange(n)  # no row continues past its episode's end, which would be repaired
    data["next_observations"][:, 0] = np.arange(n) + 1 - 0.5 * (data["terminals"] | data["timeouts"])
    return data


WIDTHS = {"observations": 11, "actions": 3, "rewards": 1, "next_observations": 11}


@few(max_examples=40)
@given(small_data())
def test_round_trip(data):
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "a" / "one.hdf5", Path(folder) / "two.hdf5"
        for path in (one, two):
            write_hdf5(path, data, "embedded", {"env": "hopper", "seed": 3, "policies": ["a", "b"]})
        assert one.read_bytes() == two.read_bytes()
        read = read_hdf5(one, "hopper", "morph", "medium")
        assert (read.kind, read.path, read.shift, read.quality) == ("own", str(one), "morph", "medium")
        for key in COLUMNS:
            assert getattr(read, key).dtype == data[key].dtype
            assert np.array_equal(getattr(read, key), data[key]), key
        assert sorted(os.listdir(folder)) == ["a", "two.hdf5"]
        with h5py.File(one) as file:  # any other tool reads it, too
            assert np.array_equal(file["actions"][()], data["actions"])
            assert file.attrs["seed"] == 3


@pytest.mark.parametrize("what", ["os.replace", "os.fsync", "h5py.File.create_dataset"])
def test_a_crash_while_writing_leaves_nothing(what, tmp_path, monkeypatch):
    monkeypatch.setattr(what, mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_hdf5(tmp_path / "new" / "made.hdf5", columns(), "embedded", {})
    assert list((tmp_path / "new").glob("*")) == []


# ------------------------------------------------------------------------------------------- properties of a dataset


@few(max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(-9, 9)), min_size=1, max_size=30))
def test_properties_by_a_plain_loop(rows):
    rows[-1] = (rows[-1][0], not rows[-1][0], rows[-1][2])
    terminals, timeouts, rewards = (np.array(column) for column in zip(*rows, strict=True))
    n, zeros = len(rows), np.zeros((len(rows), 1), "f")
    tell = ("hopper", "morph", "medium", "own", "x", "y", zeros, zeros, rewards.astype("f"), zeros)
    data = Dataset(*tell, terminals, timeouts)
    starts, lengths, steps, returns, complete = [], [], [], [], []
    step, total, before = 0, 0.0, timeouts.tolist()
    for i, (failed, timed_out, reward) in enumerate(rows):
        if step == 0:
            starts.append(i)
        steps.append(step)
        step, total = step + 1, total + reward
        if failed or timed_out:
            lengths.append(step)
            returns.append(total)
            complete.append(failed or step >= 5 - 2)
            step, total = 0, 0.0
    with mock.patch.object(transitions, "TIME_LIMIT", 5):
        assert data.complete.tolist() == complete
        best = [value for value, whole in zip(returns, complete, strict=True) if whole] or returns
        assert data.score == pytest.approx(normalized_score("hopper", "morph", sum(best) / len(best)))
    assert (data.starts.tolist(), data.lengths.tolist()) == (starts, lengths)
    assert (data.steps.tolist(), data.returns.tolist()) == (steps, returns)
    for size in range(1, n + 3):
        first = data.first(size)
        assert len(first) == min(n, size)
        assert first.terminals.tolist() == terminals[:size].tolist()
        wanted = before[:size]
        if size < n:
            wanted[-1] = not terminals[size - 1]
        assert first.timeouts.tolist() == wanted
    assert data.timeouts.tolist() == before  # the original is unchanged


# ----------------------------------------------------------------------------------------------------------- listing


def test_listing_of_the_published_files(real_data, capfd):
    lines = {line.split()[0]: line.split() for line in listing(real_data).splitlines()}
    assert len(lines) == 1 + 36 + 4
    for name, ((_, rows, _, score), _, returns) in TARGETS.items():
        row = lines[f"{name}.hdf5"]
        assert (row[1], int(row[2])) == (rows, len(returns))
        assert float(row[6]) == pytest.approx(float(score), abs=0.06)
        assert row[7:] == [download.PUBLISHED[f"{name}.hdf5"]["sha256"][:12], "as", "published"]
    assert lines["ant_medium-v2.slice.hdf5"][-2:] == ["unknown", "file"]
    assert capfd.readouterr().out == ""


def test_listing_as_a_command(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "generated"))
    made = tmp_path / "generated" / "embedded_hopper_morph_medium-expert_12_seed0_x.hdf5"
    write_hdf5(made, columns(), "embedded", {})
    (tmp_path / "below").mkdir()
    hdf5(tmp_path / "below" / "hopper_morph_mine.hdf5", columns())
    hdf5(tmp_path / "hopper_medium-v2.hdf5", columns())
    hdf5(tmp_path / "ant_mine.hdf5", columns())
    hdf5(tmp_path / "nobody.hdf5", columns())
    cut_short(tmp_path / "hopper_cut.hdf5")
    command = [sys.executable, "-m", "dynashift.datasets", "--data-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert len(lines) == len(done.stdout.splitlines()) == 7
    assert lines[made.name].endswith("as generated")
    assert lines["hopper_morph_mine.hdf5"].split()[1:3] == ["12", "3"]
    assert lines["hopper_morph_mine.hdf5"].endswith("unknown file")
    assert "not the published file of that name" in lines["hopper_medium-v2.hdf5"]
    assert "observations has shape (12, 11)" in lines["ant_mine.hdf5"]
    assert "not a name like" in lines["nobody.hdf5"]
    assert "cut short or damaged" in lines["hopper_cut.hdf5"]


def test_listing_of_nothing(tmp_path):
    assert str(tmp_path / "none") in listing(tmp_path / "none").splitlines()[1]


# ------------------------------------------------------------------------------------------------------------ Minari


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    (tmp_path / "minari").mkdir()
    return pytest.importorskip("minari", reason='the optional Minari is not installed; pip install "minari[hdf5,hf]"')


def as_dataset(tmp_path, env="hopper", **options) -> Dataset:
    return read_hdf5(hdf5(tmp_path / "mine.hdf5", columns(env=env, **options)), env, "morph", "mine")


@pytest.mark.filterwarnings("ignore")  # of Minari's, for missing e-mail addresses
@pytest.mark.parametrize("env", ROBOTS)
def test_minari_round_trip(env, minari, tmp_path, monkeypatch):
    data = as_dataset(tmp_path, env)
    name = f"{env}/morph-mine-v0"
    minari_io.write_minari(data, name)
    stored = minari.load_dataset(name)
    assert (stored.total_episodes, stored.total_steps) == (3, 12)
    monkeypatch.setattr(minari, "download_dataset", mock.Mock(side_effect=AssertionError("network")))
    read = datasets.load(env, "morph", "target", f"minari:{name}")
    assert (read.kind, read.path, read.env, read.shift) == ("minari", name, env, "morph")
    assert same(read, data)
    again = minari_io.read_minari(name, env, "morph")
    assert len(read.sha256) == 64
    assert again.sha256 == read.sha256
    refused(lambda: minari_io.write_minari(data, name), name, "exists")
    refused(lambda: minari_io.write_minari(data, "no name"), "no name")
    other = "ant" if env == "hopper" else "hopper"
    refused(lambda: minari_io.read_minari(name, other), name, "observations has shape", other)


@pytest.mark.filterwarnings("ignore")
def test_minari_of_another_kind(minari):
    from gymnasium.spaces import Box, Dict

    episode = minari.data_collector.EpisodeBuffer(
        id=0,
        observations={"a": np.zeros((4, 3), "f")},
        actions=np.zeros((3, 2), "f"),
        rewards=np.zeros(3),
        terminations=np.zeros(3, bool),
        truncations=np.array([False, False, True]),
        infos={},
    )
    spaces = {"observation_space": Dict(a=Box(-1, 1, (3,))), "action_space": Box(-1, 1, (2,))}
    minari.create_dataset_from_buffers("dictionary-v0", [episode], **spaces)
    refused(lambda: minari_io.read_minari("dictionary-v0", "hopper"), "dictionary-v0", "observations")


def test_minari_that_is_not_there(minari, monkeypatch):
    monkeypatch.setattr(minari, "download_dataset", mock.Mock(side_effect=ConnectionError("no route\nto host")))
    monkeypatch.setattr("minari.storage.hosting.download_dataset", minari.download_dataset)
    refused(lambda: minari_io.read_minari("hopper/none-v0", "hopper"), "hopper/none-v0: no route")


def test_without_minari(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "minari", None)
    refused(lambda: datasets.load("hopper", "morph", "target", "minari:some-v0"), "pip install")
    refused(lambda: minari_io.write_minari(as_dataset(tmp_path), "some-v0"), "pip install")


def test_data_are_read_where_the_system_has_no_locks(tmp_path, monkeypatch):
    """By default HDF5 locks what it opens, and fails on a file system without locks."""
    path, opened, real = hdf5(tmp_path / "mine.hdf5", columns()), [], h5py.File

    def spy(*args, **options):
        opened.append(options.get("locking"))
        return real(*args, **options)

    monkeypatch.setattr(h5py, "File", spy)
    assert len(read_hdf5(path, "hopper")) == 12
    assert opened == [False]
