"""Files of your own: HDF5, .npz and Minari, how their episodes are told, and `python -m dynashift.datasets check`."""

import sys

import gymnasium
import h5py
import numpy as np
import pytest

from dynashift import check_data, own_data
from dynashift.columns import mark_ends, read_episodes
from dynashift.datasets import TaskArgs, load_task
from dynashift.errors import UserError
from dynashift.tasks import Spaces
from dynashift.transitions import COLUMNS

SPACES = Spaces(obs_dim=3, act_dim=2)


def walk(lengths, seed, fails=(), offset=0.0):
    """Columns of a random walk with these episodes."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    obs = rng.normal(size=(n, 3)).cumsum(0).astype("f") * 0.1 + offset
    end = np.zeros(n, bool)
    end[np.cumsum(lengths) - 1] = True
    fail = np.zeros(n, bool)
    fail[[np.cumsum(lengths)[i] - 1 for i in fails]] = True
    columns = {"observations": obs, "actions": rng.uniform(-1, 1, (n, 2)).astype("f"), "rewards": rng.normal(size=n)}
    following = obs + rng.normal(size=obs.shape).astype("f") * 0.01
    return columns | {"next_observations": following, "terminals": fail, "timeouts": end & ~fail}


def same(one, other):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def write(path, columns):
    if path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        with h5py.File(path, "w") as file:
            for key, value in columns.items():
                file[key] = value
    return str(path)


@pytest.fixture
def pair(tmp_path):
    source = write(tmp_path / "old.npz", walk([30, 20, 25], 0, fails=(1,)))
    return {"source": source, "target": write(tmp_path / "new.h5", walk([12, 9, 14], 1))}


# ---------------------------------------------------------------------------------------------------------- episodes


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".h5"])
@pytest.mark.parametrize("how", ["ids", "flags", "ends", "column"])
def test_episodes_are_told_in_several_ways(how, suffix, tmp_path):
    """All mean the same, in every kind of file; a failure stays one."""
    lengths = [5, 3, 7]
    columns = walk(lengths, 0, fails=(1,))
    wanted = own_data.read_own(write(tmp_path / f"a{suffix}", columns), "logs", "own", SPACES)
    assert wanted.lengths.tolist() == lengths
    assert np.flatnonzero(wanted.terminals).tolist() == [7]
    end = columns["terminals"] | columns["timeouts"]
    told = {
        "ids": {"episode_ids": np.repeat([4, 1, 4], lengths)},
        "flags": {"episode_ends": end.astype(int)},
        "ends": {"episode_ends": np.array([5, 8, 15])},
        "column": {"episode_ids": np.repeat([0.0, 1.0, 2.0], lengths)[:, None]},
    }[how]
    rest = {key: x for key, x in columns.items() if key != "timeouts"}
    same(own_data.read_own(write(tmp_path / f"b{suffix}", rest | told), "logs", "own", SPACES), wanted)


def test_without_terminals_every_end_is_a_time_limit(tmp_path):
    columns = walk([4, 6], 0)
    bare = {key: columns[key] for key in ("observations", "actions", "rewards", "next_observations")}
    data = own_data.read_own(write(tmp_path / "x.npz", bare | {"episode_ends": [4, 10]}), "logs", "own", SPACES)
    assert data.lengths.tolist() == [4, 6]
    assert not data.terminals.any()


def test_without_next_observations_the_last_step_before_a_time_limit_is_dropped(tmp_path):
    """And a failure is kept: nothing of value follows it."""
    columns = walk([40, 60], 0, fails=(0,))
    del columns["next_observations"]
    data = own_data.read_own(write(tmp_path / "x.npz", columns), "logs", "own", SPACES)
    assert data.lengths.tolist() == [40, 59]
    np.testing.assert_array_equal(data.next_observations[:39], columns["observations"][1:40])
    np.testing.assert_array_equal(data.next_observations[39], columns["observations"][39])
    assert np.flatnonzero(data.terminals).tolist() == [39]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"episode_ids": np.zeros(9)}, r"episode_ids has shape \(9,\), expected \(10,\)"),
        ({"episode_ends": np.array([4, 9])}, "episode_ends must be 0 or 1 for each of 10 rows, or increasing"),
        ({"episode_ends": np.array([6, 4, 10])}, "episode_ends must be"),
        ({"terminals": None, "timeouts": None}, "none of terminals, timeouts, episode_ids, episode_ends"),
        ({"rewards": None}, "has no rewards"),
        ({"rewards": np.array(["a"] * 10)}, "rewards is no table of numbers"),
        ({"rewards": np.array([None] * 10)}, "not a readable .npz file"),
        ({"timeouts": None, "next_observations": None}, "no end of an episode can be seen"),
        ({"timeouts": np.zeros(3), "episode_ends": np.array([4, 10]), "terminals": np.zeros(4)}, "terminals has shape"),
    ],
)
def test_bad_files_are_one_line(change, message, tmp_path):
    columns = {key: x for key, x in (walk([4, 6], 0) | change).items() if x is not None}
    with pytest.raises(UserError, match=message) as error:
        own_data.read_own(write(tmp_path / "x.npz", columns), "logs", "own", SPACES)
    assert "\n" not in str(error.value)


def test_an_npz_that_is_cut_short_or_forged(tmp_path):
    path = tmp_path / "x.npz"
    write(path, walk([4, 6], 0))
    whole = path.read_bytes()
    for bad in (whole[: len(whole) // 2], b"nothing", b""):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"not a readable \.npz file"):
            read_episodes(path)
    np.savez_compressed(path, observations=np.zeros((3_000_000, 3)))
    with pytest.raises(UserError, match="damaged or forged"):
        read_episodes(path)


def test_marks_of_episodes_do_not_take_each_other_away():
    """Where several columns tell ends, an episode ends wherever one of them says so."""
    raw = walk([4, 6], 0) | {"episode_ids": np.repeat([0, 1], [7, 3])}
    found = mark_ends("x", raw)
    assert np.flatnonzero(found["timeouts"]).tolist() == [3, 6, 9]


def test_a_file_that_changed_is_read_again(pair, tmp_path):
    """What --env logs keeps in memory is only used as long as the file is the same."""
    task = TaskArgs(env="logs", **pair)
    before = load_task(task)[1]
    write(tmp_path / "new.h5", walk([12, 9, 14, 13], 5))
    after = load_task(task)[1]
    assert (len(before), len(after)) == (26, 34)  # the second of three, the third of four is held out
    assert len(own_data.held_out(task)) == 14


def test_minari(pair, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    columns, episodes = walk([12, 9, 14], 1), []
    for k, (i, n) in enumerate(((0, 12), (12, 9), (21, 14))):
        obs = np.concatenate([columns["observations"][i : i + n], columns["next_observations"][i + n - 1][None]])
        flags = {"terminations": columns["terminals"][i : i + n], "truncations": columns["timeouts"][i : i + n]}
        numbers = {"actions": columns["actions"][i : i + n], "rewards": columns["rewards"][i : i + n]}
        episodes.append(minari.data_collector.EpisodeBuffer(id=k, observations=obs, infos={}, **flags, **numbers))
    box = gymnasium.spaces.Box
    spaces = {"observation_space": box(-np.inf, np.inf, (3,)), "action_space": box(-1, 1, (2,))}
    minari.create_dataset_from_buffers("own/new-v0", episodes, **spaces)
    read = load_task(TaskArgs(env="logs", source=pair["source"], target="minari:own/new-v0"))[1]
    wanted = load_task(TaskArgs(env="logs", **pair))[1]
    assert read.kind == "minari"
    for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
        np.testing.assert_array_equal(getattr(read, name), getattr(wanted, name))


# ------------------------------------------------------------------------------------------------------------- check


def check(tmp_path, *files, **options):
    return check_data.main(tuple(map(str, files)), figure=tmp_path / "check.png", **options)


def test_a_pair_that_works(pair, tmp_path, capsys):
    assert check(tmp_path, *pair.values()) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:7] == ["old.npz", "75", "3", "20", "to", "30", "1"]
    assert "this pair will work with --env logs" in out
    assert "new.h5: only 3 episodes" in out
    assert "old.npz: no failure" not in out
    assert (tmp_path / "check.png").read_bytes()[:4] == b"\x89PNG"


def test_overlap_of_source_and_target(tmp_path, capsys):
    """All of it where both come from one place, nothing where they lie apart."""

    def data(name, seed, offset=0.0):
        rng, columns = np.random.default_rng(seed), walk([50] * 20, seed)
        columns["observations"] = (rng.normal(size=(1000, 3)) + offset).astype("f")
        return own_data.read_own(write(tmp_path / f"{name}.npz", columns), "logs", "own", SPACES)

    target = data("target", 1)
    assert check_data.overlap(data("near", 0), target) == pytest.approx(0.95, abs=0.03)
    assert check_data.overlap(data("far", 0, 20.0), target) == 0
    half = check_data.overlap(data("half", 0, np.repeat([0.0, 20.0], 500)[:, None]), target)
    assert half == pytest.approx(0.475, abs=0.03)
    assert check(tmp_path, tmp_path / "far.npz", tmp_path / "target.npz") == 0
    out = capsys.readouterr().out
    assert "0% of the source states" in out
    assert "hardly overlap" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": np.zeros((35, 4), "f")}, "observations have 4 entries, not 3"),
        ({"rewards": np.full(35, np.nan)}, "rewards holds NaN"),
        ({"timeouts": np.zeros(35)}, "one episode; at least two are needed"),
        ({"timeouts": np.ones(35)}, "every episode is shorter than K = 5"),
        ({"actions": np.zeros(35, int)}, "discrete actions are not supported"),
    ],
)
def test_a_pair_that_does_not_work(change, message, pair, tmp_path, capsys):
    bad = write(tmp_path / "bad.npz", walk([12, 9, 14], 1) | change)
    assert check(tmp_path, pair["source"], bad) == 1
    out = capsys.readouterr().out
    assert message in next(line for line in out.splitlines() if line.startswith("wrong:"))
    assert "this pair will not work with --env logs" in out


def test_doubts(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_data, "draw", lambda *_: None)
    columns = walk([12, 9, 14], 1)
    columns["observations"][:, 1] = 3
    columns["actions"] *= 1.5
    odd = write(tmp_path / "odd.npz", columns | {"rewards": np.ones(35)})
    assert check(tmp_path, odd, odd) == 0
    out = capsys.readouterr().out
    assert "observation entries [1] never change" in out
    assert "all rewards are 1" in out
    assert "will be scaled to [-1, 1]" in out
    assert "the same file" in out
    assert check(tmp_path, pair["target"], pair["source"]) == 0
    assert "are they swapped?" in capsys.readouterr().out
    assert check(tmp_path, pair["target"]) == 0
    assert "this file will work" in capsys.readouterr().out
    switched = columns | {"actions": (columns["actions"] > 0).astype(int)}
    found = check_data.read_all([write(tmp_path / "switched.npz", switched)], "logs", "own")[1]
    assert "switched.npz: actions take only 2 values; discrete actions are not supported" in found.doubtful


def test_a_check_against_an_environment(tmp_path, capsys):
    columns = walk([12, 9, 14], 1)
    columns["actions"] = columns["actions"][:, :1]
    file = write(tmp_path / "x.npz", columns)
    assert check(tmp_path, file, env="Pendulum-v1") == 0
    assert "use 50% of that range; are they scaled already?" in capsys.readouterr().out
    assert check(tmp_path, file, env="hopper") == 1
    assert "expected (35, 11) for hopper" in capsys.readouterr().out
    with pytest.raises(UserError, match="not 3"):
        check(tmp_path, file, file, file)


def test_entries_in_the_figure_are_whole_numbers(tmp_path, monkeypatch):
    """Also where there is only one."""
    import matplotlib.pyplot as plt

    columns = walk([12, 9, 14], 1)
    columns["actions"] = columns["actions"][:, :1]
    monkeypatch.setattr(plt, "close", lambda _: None)
    assert check(tmp_path, write(tmp_path / "x.npz", columns)) == 0
    ticks = []
    for ax in plt.gcf().axes[:2]:
        low, high = ax.get_xlim()
        ticks.append([x for x in ax.get_xticks() if low < x < high])
    monkeypatch.undo()
    plt.close()
    assert ticks == [[0, 1, 2], [0]]


def test_the_command(pair, tmp_path, monkeypatch, capsys):
    import runpy

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["datasets", "check", *pair.values()])
    monkeypatch.delitem(sys.modules, "dynashift.datasets")
    with pytest.raises(SystemExit) as status:
        runpy.run_module("dynashift.datasets", run_name="__main__")
    assert status.value.code == 0
    assert "will work" in capsys.readouterr().out
    assert (tmp_path / "check.png").exists()


def test_nothing_is_read_for_a_figure_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(check_data, "read_all", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file: Not a directory; choose another --figure"):
        check_data.main(("x.hdf5",), figure=tmp_path / "file" / "x.png")
