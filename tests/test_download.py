"""Where data come from: the folders, the mirrors, the project's own policies; load and load_pair."""

import errno
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from test_datasets import PATIENCE, columns, hdf5, in_children, refused, same, tiny_policy

from dynashift import checksums, datasets, download, files, generated, policies, tasks
from dynashift.datasets import Dataset, load, load_pair, read_hdf5
from dynashift.download import Unavailable, find
from dynashift.errors import UserError
from dynashift.transitions import COLUMNS

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
SOURCE, TARGET = "hopper_medium-v2.hdf5", "hopper_morph_medium.hdf5"  # small synthetic files here
SHIPPED = policies.for_quality


@pytest.fixture
def content(tmp_path, monkeypatch):
    """{name: bytes} of what counts as published in this test."""
    content = {}
    for seed, name in enumerate((SOURCE, TARGET)):
        content[name] = hdf5(tmp_path / "original.hdf5", columns(seed=seed)).read_bytes()
        entry = {"bytes": len(content[name]), "sha256": hashlib.sha256(content[name]).hexdigest()}
        monkeypatch.setitem(download.PUBLISHED, name, entry)
    (tmp_path / "original.hdf5").unlink()
    return content


class Mirror(BaseHTTPRequestHandler):
    """GET /MODE/NAME: the file NAME, sent in the way that MODE names."""

    def do_GET(self):
        _, mode, name = self.path.split("/")
        asked, server = self.headers.get("Range"), self.server
        server.log.append((mode, asked))
        first = [m for m, _ in server.log].count(mode) == 1
        if mode == "missing":
            return self.send_error(404)
        body = server.content[name]
        body = {"wrong": body[::-1], "page": b"<html>sign in first</html>"}.get(mode, body)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and mode != "norange" else 0
        if asked and start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if mode != "nolength":
            self.send_header("Content-Length", "many" if mode == "oddlength" else str(len(body) - start))
        self.end_headers()
        stop = (start + len(body)) // 2 if mode == "leaky" or (mode in ("cut", "norange") and first) else len(body)
        self.wfile.write(body[start : stop - 1])
        self.wfile.flush()
        if mode == "slow":
            server.gate.wait(PATIENCE)
        server.finals += server.folder.glob("[!.]*") if server.folder.exists() else ()
        self.wfile.write(body[stop - 1 : stop])  # only now can the file be complete

    def log_message(self, *_):
        pass


@pytest.fixture
def server(content, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.content, server.log, server.finals, server.gate = content, [], [], threading.Event()
    server.folder = tmp_path / "new" / "data"
    server.url = lambda mode: f"http://127.0.0.1:{server.server_port}/{mode}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def nowhere():
    """The address of a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it; not listening, so refused
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/"


def fetch(server, *modes):
    urls = [server.url(mode) if "/" not in mode else mode for mode in modes]
    path = download.fetch(TARGET, "target", server.folder, urls)
    assert path == server.folder / TARGET
    assert path.read_bytes() == server.content[TARGET]
    assert sorted(os.listdir(server.folder)) == [f".{TARGET}.lock", TARGET]
    assert server.finals == []  # nothing had the final name before it was complete
    return server.log


# --------------------------------------------------------------------------------------------------------- downloads


def test_download(server, capsys):
    assert fetch(server, "good") == [("good", None)]
    err = capsys.readouterr().err
    assert TARGET in err
    assert "100%" in err
    assert fetch(server, "good") == [("good", None)]  # it is there: no second request
    assert read_hdf5(server.folder / TARGET, "hopper", "morph").kind == "published"


@pytest.mark.parametrize("mode", ["wrong", "page", "missing"])
def test_second_mirror(mode, server):
    assert [mode for mode, _ in fetch(server, mode, "good")] == [mode, mode, "good"]
    assert server.log[-1] == ("good", None)  # no byte of the wrong one is kept


def test_first_mirror_is_down(server, nowhere):
    assert fetch(server, nowhere, "good") == [("good", None)]


@pytest.mark.parametrize("mode", ["nolength", "oddlength"])
def test_unknown_length(mode, server):
    assert fetch(server, mode) == [(mode, None)]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("wrong", "wrong content, sha256"), ("page", "wrong content"), ("missing", "Not Found"), ("leaky", "cut after")],
)
def test_no_mirror_has_it(mode, reason, server):
    with pytest.raises(Unavailable) as caught:
        fetch(server, mode)
    message = str(caught.value)
    assert "\n" not in message
    for word in (server.url(mode) + TARGET, reason, str(server.folder), "by hand", "--data embedded"):
        assert word in message
    left = [f".{TARGET}.lock"] + [f".{TARGET}.part"] * (mode == "leaky")
    assert sorted(os.listdir(server.folder)) == left


def test_no_mirror_answers(server, nowhere):
    message = refused(lambda: fetch(server, nowhere), nowhere + TARGET, "refused", "--data embedded")
    assert message.count(nowhere) == 1  # reported once, though tried twice


def test_cut_connection_is_resumed(server, capsys):
    half = len(server.content[TARGET]) // 2
    assert fetch(server, "cut") == [("cut", None), ("cut", f"bytes={half}-")]
    assert capsys.readouterr().err.count("100%") == 1


def test_resumed_at_another_mirror_and_in_another_run(server):
    size = len(server.content[TARGET])
    with pytest.raises(Unavailable):
        fetch(server, "leaky")
    have = (size // 2 + size) // 2
    assert (server.folder / f".{TARGET}.part").stat().st_size == have
    assert fetch(server, "good")[-1] == ("good", f"bytes={have}-")


def test_server_that_ignores_range(server):
    half = len(server.content[TARGET]) // 2
    assert fetch(server, "norange") == [("norange", None), ("norange", f"bytes={half}-")]


@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_part_that_is_too_long(extra, server):
    server.folder.mkdir(parents=True)
    (server.folder / f".{TARGET}.part").write_bytes(server.content[TARGET] + b"x" * extra)
    size = len(server.content[TARGET]) + extra
    assert fetch(server, "good") == [("good", f"bytes={size}-"), ("good", None)]


def test_part_of_something_else(server):
    server.folder.mkdir(parents=True)
    (server.folder / f".{TARGET}.part").write_bytes(b"x" * 100)
    assert fetch(server, "good") == [("good", "bytes=100-"), ("good", None)]


def test_interrupted_by_the_user(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(download, "progress_bar", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch(server, "good")
    assert fetch(server, "good")[-1] == ("good", None)


def download_in_child(connection, entry, url, folder):
    download.PUBLISHED[TARGET] = entry
    connection.send("ready")
    connection.send(download.fetch(TARGET, "target", folder, [url]).read_bytes())


def test_two_processes_download_at_once(server):
    """The server holds the first request back until both have started."""
    entry, url = download.PUBLISHED[TARGET], server.url("slow")
    results = in_children(download_in_child, entry, url, server.folder, n=2, then=server.gate.set)
    assert [code for _, code in results] == [0, 0]
    assert [messages[-1] == server.content[TARGET] for messages, _ in results] == [True, True]
    assert server.log == [("slow", None)]


@pytest.mark.parametrize("call", ["download", "load", "embedded"])
def test_folder_that_is_none(call, tmp_path, content, nowhere, monkeypatch, tiny):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "data"
    monkeypatch.setitem(download.MIRRORS, "target", (nowhere,))
    monkeypatch.setenv("DYNASHIFT_DATA", str(folder))
    calls = {
        "download": lambda: download.fetch(TARGET, "target", folder, [nowhere]),
        "load": lambda: load("hopper", "morph", "target", "medium", "d4rl", data_dir=folder),
        "embedded": lambda: generated.embedded("hopper", "morph", "target", "medium", 20),
    }
    refused(calls[call], folder, "Not a directory")


# -------------------------------------------------------------------------------------------------------- generating


def generate(connection, files, barrier=None, die_in=None):
    generated.for_quality = lambda *task: files
    if die_in:
        module, name = {"rollout": (generated, "rollout"), "fsync": (os, "fsync"), "replace": (os, "replace")}[die_in]
        original, calls = getattr(module, name), []

        def dying(*args, **kwargs):
            calls.append(1)
            if len(calls) == (2 if die_in == "rollout" else 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, dying)
    if barrier:
        barrier.wait(PATIENCE)
    dataset = generated.embedded("hopper", "morph", "target", "medium", 120)
    connection.send((dataset.path, dataset.sha256))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Two tiny policies in place of the shipped ones."""
    files = [tiny_policy(tmp_path / f"tiny{seed}.npz", seed) for seed in range(2)]
    monkeypatch.setattr(generated, "for_quality", lambda *task: files)
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "data"))
    return files


def is_what_the_policies_do(data: Dataset, files) -> bool:
    parts = [
        policies.rollout(policies.load_policy(file, "hopper"), "hopper", "morph", 60, seed, progress=False)
        for seed, file in enumerate(files)
    ]
    return all(np.array_equal(getattr(data, key), np.concatenate([part[key] for part in parts])) for key in COLUMNS)


def test_two_processes_generate_at_once(tiny, tmp_path):
    try:
        files = SHIPPED("hopper", "morph", "medium-expert")
    except UserError:
        files = tiny
    barrier = multiprocessing.get_context("spawn").Barrier(2)
    results = in_children(generate, files, barrier, n=2)
    assert [code for _, code in results] == [0, 0]
    assert results[0] == results[1]
    [(path, sha256)] = results[0][0]
    assert [str(file) for file in (tmp_path / "data").glob("[!.]*")] == [path]
    data = read_hdf5(path, "hopper", "morph")
    assert (data.kind, data.sha256, data.lengths.sum()) == ("own", sha256, 120)
    assert is_what_the_policies_do(data, files)


def test_a_cached_file_is_what_its_name_promises_or_is_made_again(tiny, tmp_path, capsys):
    good = generated.embedded("hopper", "morph", "target", "medium", 120)
    path, content = Path(good.path), Path(good.path).read_bytes()
    other = generated.embedded("hopper", "morph", "target", "medium", 60)
    wrong = [b"", b"x" + content[1:], content[:20] + b"x" + content[21:], bytes(512) + content[512:], content[:-1]]
    wrong += [content[512:], Path(other.path).read_bytes()]
    for damaged in wrong:
        path.write_bytes(damaged)
        capsys.readouterr()
        again = generated.embedded("hopper", "morph", "target", "medium", 120)
        assert "made again" in capsys.readouterr().err
        assert (again.kind, again.sha256) == ("embedded", good.sha256)
        assert same(again, good)


def test_a_filled_cache_need_not_be_written_to(tiny, tmp_path, monkeypatch):
    good = generated.embedded("hopper", "morph", "target", "medium", 120)
    for lock in (tmp_path / "data").glob(".*.lock"):
        lock.unlink()
    read_only = mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(files, "open_lock", read_only)
    assert same(generated.embedded("hopper", "morph", "target", "medium", 120), good)
    refused(lambda: generated.embedded("hopper", "morph", "target", "medium", 60), "Read-only file system")


@pytest.mark.parametrize("where", ["rollout", "fsync", "replace"])
def test_killed_while_generating(where, tiny, tmp_path):
    assert in_children(generate, tiny, None, where) == [([], -signal.SIGKILL)]
    assert list((tmp_path / "data").glob("[!.]*")) == []
    data = generated.embedded("hopper", "morph", "target", "medium", 120)
    assert list((tmp_path / "data").glob("[!.]*")) == [Path(data.path)]
    assert is_what_the_policies_do(data, tiny)
    with mock.patch.object(generated, "rollout", side_effect=AssertionError("generated twice")):
        assert same(generated.embedded("hopper", "morph", "target", "medium", 120), data)


def test_what_decides_the_embedded_file(tiny):
    def path(*change):
        values = {"shift": "morph", "role": "target", "quality": "medium", **dict(change)}
        return generated.embedded("hopper", *values.values())

    made = [path(), path(("size", 30)), path(("size", 30), ("seed", 1)), path(("shift", "gravity"), ("size", 30))]
    assert [len(data) for data in made] == [generated.TARGET_SIZE, 30, 30, 30]
    assert len({data.path for data in made}) == len({data.sha256 for data in made}) == 4
    shorter = generated.embedded("hopper", "morph", "target", "medium", 30).first(15)
    assert np.array_equal(shorter.observations, made[0].observations[:15])
    tiny_policy(tiny[0], seed=7)  # another policy under the same name makes another file
    assert generated.embedded("hopper", "morph", "target", "medium", 30).path != made[1].path


# ----------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", mock.Mock(side_effect=AssertionError("network access")))


@pytest.fixture
def unreachable(monkeypatch, nowhere):
    monkeypatch.setenv("no_proxy", "*")
    for role in ("source", "target"):
        monkeypatch.setitem(download.MIRRORS, role, (nowhere + "a/", nowhere + "b/"))


def put(folder: Path, content, *names) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content[name])
    return folder


def announced(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("==>")]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("data", ["d4rl", "auto"])
def test_present_files_need_no_network(data, content, tmp_path, capsys):
    folder = put(tmp_path / "here", content, SOURCE, TARGET)
    source, target = load_pair("hopper", "morph", "medium", "medium", data, folder)
    assert (source.kind, source.shift, source.path) == ("published", "none", str(folder / SOURCE))
    assert (target.kind, target.shift, target.path) == ("published", "morph", str(folder / TARGET))
    assert np.array_equal(source.observations, columns(seed=0)["observations"])
    assert np.array_equal(target.observations, columns(seed=1)["observations"])
    assert same(load("hopper", "morph", "target", "medium", data, folder), target)
    lines = announced(capsys)
    assert len(lines) == (3 if data == "auto" else 0)
    assert all("PUBLISHED (real data, as published)" in line for line in lines)
    assert target.provenance == {
        **{"env": "hopper", "shift": "morph", "quality": "medium", "kind": "published", "path": str(folder / TARGET)},
        **{"sha256": hashlib.sha256(content[TARGET]).hexdigest(), "transitions": 12, "score": round(target.score, 2)},
    }
    json.dumps(target.provenance)


def test_missing_files_are_fetched(server, monkeypatch, tmp_path):
    for role in ("source", "target"):
        monkeypatch.setitem(download.MIRRORS, role, (server.url(role),))
    source, target = load_pair("hopper", "morph", "medium", "medium", "d4rl", server.folder)
    assert (source.path, target.path) == (str(server.folder / SOURCE), str(server.folder / TARGET))
    assert sorted(server.log) == [("source", None), ("target", None)]


@pytest.mark.usefixtures("unreachable", "tiny")
@pytest.mark.parametrize("present", [(), (SOURCE,), (TARGET,)])
def test_auto_is_all_or_nothing(present, content, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generated, "TARGET_SIZE", 30)
    folder = put(tmp_path / "here", content, *present)
    pair = load_pair("hopper", "morph", "medium", "medium", "auto", folder, source_size=40)
    assert [data.kind for data in pair] == ["embedded", "embedded"]
    assert [data.shift for data in pair] == ["none", "morph"]
    assert [len(data) for data in pair] == [40, 30]
    missing = TARGET if present == (SOURCE,) else SOURCE
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("==>")]
    assert len(lines) == 2
    for data in pair:  # it is announced before it is generated
        note = f"generating {len(data)} transitions of hopper {data.shift} medium by the project's policies"
        assert said.index(lines[1]) < said.index(note) < said.index(f"hopper-{data.shift} tiny0")
    for line, role in zip(lines, ("SOURCE", "TARGET"), strict=True):
        for word in (f"{role} DATA: EMBEDDED", f"could not download {missing}", "refused"):
            assert word in line


@pytest.mark.usefixtures("unreachable", "tiny")
def test_auto_for_one(content, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generated, "TARGET_SIZE", 30)
    assert load("hopper", "morph", "target", "medium").kind == "embedded"
    [line] = announced(capsys)
    assert f"EMBEDDED (generated by this project's own policies, because it could not download {TARGET}" in line
    for call in (
        lambda: load("hopper", "morph", "target", "medium", "d4rl"),
        lambda: load_pair("hopper", "morph", "medium", "medium", "d4rl"),
    ):
        refused(call, "could not download", "--data embedded")


@pytest.mark.usefixtures("offline", "tiny")
def test_embedded_asks_nobody(content, tmp_path, capsys):
    folder = put(tmp_path / "here", content, SOURCE, TARGET)
    data = load("hopper", "morph", "source", "medium", "embedded", folder, source_size=30)
    assert (data.kind, data.shift, len(data)) == ("embedded", "none", 30)
    assert announced(capsys) == []


@pytest.mark.usefixtures("offline")
def test_damaged_file_is_not_passed_over(content, tmp_path):
    folder = put(tmp_path / "here", content, SOURCE, TARGET)
    (folder / TARGET).write_bytes(content[TARGET][:-1])
    for data in ("auto", "d4rl"):
        refused(lambda data=data: load_pair("hopper", "morph", "medium", "medium", data, folder), folder / TARGET)


@pytest.mark.usefixtures("offline")
def test_generated_file_is_not_passed_off_as_published(content, tmp_path):
    checksums.write_hdf5(tmp_path / TARGET, columns(), "embedded", {})
    call = functools.partial(load, "hopper", "morph", "target", "medium", "d4rl", tmp_path)
    refused(call, tmp_path / TARGET, "not the published file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": "humanoid"}, ["humanoid", "halfcheetah, hopper, walker2d, ant", "none, gravity, kinematic, morph"]),
        ({"shift": "friction"}, ["friction", "none, gravity, kinematic, morph"]),
        ({"shift": "none"}, ["no target data of the unshifted robot", "--target none", "--data embedded"]),
        ({"target": "medium-replay"}, ["target", "medium, medium-expert, expert", "FILE.hdf5", "medium-replay"]),
        ({"target": "best"}, ["best", "medium, medium-expert, expert"]),
        ({"source": "expert"}, ["source", "medium, medium-replay, medium-expert", "'expert'"]),
        ({"data": "real"}, ["auto", "d4rl", "embedded", "real"]),
        ({"source_size": 0}, ["source_size", "0"]),
        ({"source_size": -3}, ["source_size", "-3"]),
    ],
)
@pytest.mark.usefixtures("offline")
def test_unknown_choices(change, words, content, tmp_path):
    put(tmp_path / "here", content, SOURCE, TARGET)
    task = {"env": "hopper", "shift": "morph", "source": "medium", "target": "medium", "data_dir": tmp_path / "here"}
    for data in ("auto", "d4rl"):
        refused(lambda data=data: load_pair(**{**task, "data": data, **change}), *words)
    if "source_size" in change:
        return
    role = "source" if "source" in change else "target"
    one = {key: value for key, value in {**task, **change}.items() if key not in ("source", "target")}
    quality = change.get(role, "medium")
    refused(lambda: load(**one, role=role, quality=quality), *words)


def test_unknown_role():
    refused(lambda: load("hopper", "morph", "both", "medium"), "source", "target", "both")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("kind", [str, Path])
def test_own_file(kind, content, tmp_path, capsys):
    folder = put(tmp_path / "here", content, SOURCE)
    hdf5(tmp_path / "mine.hdf5", columns(seed=5))  # conftest.py makes tmp_path the home
    source, target = load_pair("hopper", "morph", "medium", kind("~/mine.hdf5"), "auto", folder)
    assert (source.kind, target.kind, target.quality) == ("published", "own", "mine")
    assert (target.path, target.shift) == (str(tmp_path / "mine.hdf5"), "morph")
    assert np.array_equal(target.observations, columns(seed=5)["observations"])
    lines = announced(capsys)
    assert ["PUBLISHED" in lines[0], "OWN (your own)" in lines[1]] == [True, True]
    assert load("hopper", "morph", "source", kind(tmp_path / "mine.hdf5"), source_size=5).shift == "none"
    refused(lambda: load("hopper", "morph", "target", kind(tmp_path / "not.hdf5")), tmp_path / "not.hdf5", "no such")


@pytest.mark.usefixtures("offline")
def test_order_of_the_folders(content, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "second"))
    folders = [tmp_path / "first", tmp_path / "second", tmp_path / ".d4rl" / "datasets"]
    for folder in folders:
        put(folder / "below", content, TARGET)
        put(folder, content, TARGET)
    for folder in folders:
        for place in (folder, folder / "below"):
            data = load("hopper", "morph", "target", "medium", "d4rl", tmp_path / "first")
            assert data.path == str(place / TARGET) == str(find(TARGET, tmp_path / "first"))
            (place / TARGET).unlink()
            (place / TARGET).mkdir()  # a folder of that name does not count
    assert find(TARGET, tmp_path / "first") is None


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 11, 12, 13])
def test_source_size(size, content, tmp_path):
    folder = put(tmp_path / "here", content, SOURCE, TARGET)
    source, target = load_pair("hopper", "morph", "medium", "medium", "d4rl", folder, source_size=size)
    whole, n = columns(seed=0), min(size, 12)
    assert (len(source), len(target)) == (n, 12)
    for key in COLUMNS[:-1]:
        assert np.array_equal(getattr(source, key), whole[key][:n])
    last = [i == n - 1 and i not in (3, 7) for i in range(n)]  # failures stay failures
    assert source.timeouts.tolist() == last
    assert source.lengths.sum() == n


def test_names_of_the_published_files():
    """Every task has its file, and every file its task."""
    files = [
        (env, shift, role, quality)
        for env in tasks.ROBOTS
        for role, qualities in tasks.QUALITIES.items()
        for quality in qualities
        for shift in (["none"] if role == "source" else [shift for shift in tasks.SHIFTS if shift != "none"])
    ]
    names = [download.file_name(*file) for file in files]
    assert len(names) == 48
    assert set(names) == set(download.PUBLISHED)
    for (env, shift, _, quality), name in zip(files, names, strict=True):
        assert download.task_of(name) == (env, shift, quality)
        entry = download.PUBLISHED[name]
        assert len(bytes.fromhex(entry["sha256"])) == 32
        assert entry["bytes"] > 4e5


@pytest.mark.usefixtures("offline")
def test_medium_expert_is_loaded_with_its_parents(real_data, tmp_path):
    for name in ("medium", "expert", "medium_expert"):
        shutil.copy(real_data / "target" / f"walker2d_morph_{name}.hdf5", tmp_path)
    assert len(load("walker2d", "morph", "target", "medium-expert", "d4rl", tmp_path)) == 3588
    expert = tmp_path / "walker2d_morph_expert.hdf5"  # readable, but not the published one
    expert.unlink()
    shutil.copy(real_data / "target" / "walker2d_morph_medium.hdf5", expert)
    call = functools.partial(load, "walker2d", "morph", "target", "medium-expert", "d4rl", tmp_path)
    refused(call, expert, "not the published file")


def test_parents_are_fetched_with_medium_expert(server, monkeypatch):
    names = [f"hopper_morph_{level}.hdf5" for level in ("medium", "expert", "medium_expert")]
    for name in names:
        server.content[name] = server.content[TARGET]
        monkeypatch.setitem(download.PUBLISHED, name, download.PUBLISHED[TARGET])
    monkeypatch.setitem(download.MIRRORS, "target", (server.url("good"),))
    assert len(load("hopper", "morph", "target", "medium-expert", "d4rl", server.folder)) == 12
    assert sorted(path.name for path in server.folder.glob("[!.]*")) == sorted(names)


def test_the_control_sees_the_kind_of_data_that_the_others_see(monkeypatch, capsys):
    """Cloning needs no source, but if it is not available the other methods learn from generated target data."""
    asked = []

    def published(env, shift, role, quality, data_dir):
        if role == "source":
            raise download.Unavailable("hopper medium: not here", "not here")

    def load(env, shift, role, quality, data="auto", data_dir=None):
        asked.append((role, data))
        return SimpleNamespace(kind=data, path="x")

    monkeypatch.setattr(download, "published", published)
    monkeypatch.setattr(datasets, "load", load)
    for args in (datasets.TaskArgs(), datasets.TaskArgs(source="mine.hdf5"), datasets.TaskArgs(data="d4rl")):
        datasets.load_target(args)
    assert asked == [("target", "embedded"), ("target", "d4rl"), ("target", "d4rl")]
    assert capsys.readouterr().err.count("TARGET DATA") == 2


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with files.only_one(tmp_path / "x.npz"):
        pass
    assert "has no locks (No locks available)" in capsys.readouterr().err
