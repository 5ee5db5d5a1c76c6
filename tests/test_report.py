"""The report: numbers computed another way, cells that stay empty, settings that never mix, the page in a browser."""

import csv
import html.parser
import io
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from standins import write_run

from dynashift.errors import UserError
from dynashift.files import read_json, write_json
from experiments import runner
from experiments.grid import ABLATIONS, QUICK_EPISODES, QUICK_UPDATES, grid
from experiments.methods import METHODS, label_of
from experiments.paper import MAIN as PAPER_MAIN
from experiments.paper import PAPER, PAPER_METHODS, SHIFTS, SOURCES
from experiments.report import figures
from experiments.report.__main__ import Args
from experiments.report.__main__ import make as make_report
from experiments.report.formats import comma_separated, html_table, latex, markdown, ours_text, paper_text
from experiments.report.page import page
from experiments.report.parts import FigurePart, NotRun, Table
from experiments.report.reading import Archive, Run, by_cell, read_archives, read_runs
from experiments.report.settings import settings_of
from experiments.report.statistics import beats, interval, iqm, profile, resample, smooth

ROOT = Path(__file__).parents[1]
SPEC = ROOT.parent / "shared" / "spec" / "paper_tables.json"
HOPPER, GRAVITY = "hopper morph medium medium", "hopper gravity medium medium"
MAIN = {" ".join(task): row for task, row in PAPER_MAIN.items()}


def change(path, function) -> None:
    """Write a result once more with something changed, as a run would have written it."""
    result = read_json(path)
    function(result)
    write_json(path, result)


def make(root) -> dict:
    """(setting's slug, name of the part) -> part, with the files written."""
    runs, problems = read_runs(root)
    archives, more = read_archives(runs, root)
    settings = settings_of(runs, archives)
    return {(s.slug, part.name): part for s in settings for part in s.parts} | {"problems": problems + more}


def row_at(table, name):
    return next(row for row in table.rows if row.label == name)


def cell_at(table, row, column):
    return row_at(table, row).cells[table.columns.index(column)]


@pytest.fixture(autouse=True)
def _figures_cost_time(request, monkeypatch):
    """They are drawn only where a test asks for `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "svg", lambda draw, *size: '<svg width="1pt"></svg>')


@pytest.fixture
def drawn():
    pass


@pytest.fixture
def some(tmp_path):
    """A handful of runs, as there usually are."""
    root = tmp_path / "runs"
    for seed, score in ((1, 40.0), (2, 46.0), (3, 55.5)):
        diagnostics = [{"step": s, "stitched": {"J_a": s, "J_Q": 1.0, "TD": 2.0}, "unstitched": {}} for s in (1, 2, 3)]
        write_run(root, "taf_dt", HOPPER, seed, [10.0, 20.0, 30.0, score], diagnostics=diagnostics)
    for seed, score in ((1, 13.0), (2, 14.0)):
        write_run(root, "iql", HOPPER, seed, [score])
        write_run(root, "bc", HOPPER, seed, [20.0 + score])
    write_run(root, "qt", "hopper morph medium-replay expert", 1, [7.0])
    write_run(root, "taf_dt", GRAVITY, 2, [1.0, 2.0, 60.0])
    write_run(root, "taf_dt", GRAVITY, 2, [9.0, 50.0, 70.0, 90.0], {"alpha": 0.0})
    return root


# ------------------------------------------------------------------------------------------ the paper's data


def test_the_paper_s_numbers_agree_with_themselves():
    """Totals, wins and improvements as printed, from the rows."""
    assert len(MAIN) == 108
    for shift, printed in PAPER["summary"].items():
        rows = [row["scores"] for task, row in MAIN.items() if task.split()[1] == shift]
        np.testing.assert_allclose(np.sum(rows, 0), printed["totals"], atol=0.051)
        best_other = np.max(np.array(rows)[:, :-1], 1)
        assert sum(np.array(rows)[:, -1] > best_other) == printed["wins"]
        totals = dict(zip(PAPER_METHODS, printed["totals"], strict=True))
        second = max((m for m in totals if m != "taf_dt"), key=totals.get)
        assert second == printed["runner_up"]
        assert 100 * (totals["taf_dt"] / totals[second] - 1) == pytest.approx(printed["improvement"], abs=0.051)


@pytest.mark.skipif(not SPEC.exists(), reason=f"the transcription of the paper is not in {SPEC.parent}")
def test_the_paper_s_numbers_are_those_of_the_transcription():
    spec = json.loads(SPEC.read_bytes())
    names = {method.label: name for name, method in METHODS.items()}
    for shift, table in spec["main"].items():
        for row in table["rows"]:
            ours = MAIN[f"{row['env']} {shift} {row['source']} {row['target']}"]
            scores = {names[m]: score for m, score in row["scores"].items()}
            assert ours == {"scores": [scores[m] for m in PAPER_METHODS], "std": row["taf_dt_std"]}
    tables = dict(filtering="fragment_filtering", advantage="advantage_tokens", ot_reward="ot_reward_channel")
    tables |= dict(alpha="alpha", expectile="expectile", ot_cost="ot_cost_function")
    for name, theirs in tables.items():
        columns, rows = spec["ablations"][theirs]["columns"], spec["ablations"][theirs]["rows"]
        expected = {
            f"{r['env']} {r['shift']} {r['source']} {r['target']}": [[r["mean"][c], r["std"][c]] for c in columns]
            for r in rows
        }
        assert PAPER["ablations"][name]["rows"] == expected
    for ours, theirs in zip(PAPER["times"]["rows"].values(), spec["training_times"]["rows"], strict=True):
        assert ours == [v for v in theirs.values() if not isinstance(v, str)]


def test_every_note_has_a_cell_that_exists():
    """A note whose key is misspelt would never be shown."""
    keys = {"junction", "times", *PAPER["ablations"], *SHIFTS}
    for task in MAIN:
        keys |= {f"{task.split()[1]}/{task}/{m}" for m in PAPER_METHODS}
    keys |= {f"{shift}/wins/taf_dt" for shift in SHIFTS} | {f"summary/{shift}/wins" for shift in SHIFTS}
    for name, ablation in PAPER["ablations"].items():
        for task in ablation["rows"]:
            keys |= {f"{name}/{task}"} | {f"{name}/{task}/{json.dumps(v).strip(chr(34))}" for v in ablation["values"]}
    used = {key for note in PAPER["notes"] for key in note["cells"]}
    assert used <= keys
    # part E of the specification: eight main cells equal to an alpha cell, thirteen settings with several numbers
    assert sum("several numbers" in note["text"] for note in PAPER["notes"]) == 13
    pairs = [n["cells"] for n in PAPER["notes"] if any(c.startswith("alpha/") for c in n["cells"])]
    equal = [c for cells in pairs for c in cells if not c.startswith("alpha") and "several" not in str(cells)]
    assert len([c for c in equal if c.endswith("taf_dt")]) >= 8


# --------------------------------------------------------------------------------------------- main tables


def test_main_cells_are_mean_and_sample_std_of_the_final_scores(some):
    table = make(some)["published-full", "morph"]
    ours = cell_at(table, "hopper: medium → medium", "TAF-DT")
    finals = [40.0, 46.0, 55.5]
    assert ours.mean == pytest.approx(statistics.mean(finals))
    assert ours.std == pytest.approx(statistics.stdev(finals))
    assert (ours.n, ours.paper, ours.paper_std, ours.best) == (3, 44.7, 16.5, True)
    assert ours_text(ours) == "47.2 ± 7.8 (3)"
    assert paper_text(ours) == "paper 44.7 ± 16.5"
    one_seed = cell_at(table, "hopper: medium-replay → expert", "QT")
    assert ours_text(one_seed) == "7.0 (1)"
    assert ours_text(cell_at(table, "hopper: medium → medium", "target data")) == "30.0"
    assert "10 episodes per run" in table.caption
    assert "ddof 1" in table.caption
    assert "final checkpoint" in table.caption


def guide(path, score):
    """What a result says if its last evaluation was with the official inference as well."""
    change(path, lambda result: result["evaluations"][-1].update(guided_score=score))


@pytest.mark.parametrize("kind", ["published", "embedded"])
def test_the_official_inference_is_beside_the_policy_alone_and_wins_nothing(kind, tmp_path):
    for seed, score, guided in ((1, 50.0, 80.0), (2, 60.0, 90.0), (3, 70.0, None)):
        guide(write_run(tmp_path, "qt", HOPPER, seed, [0.0, score], kind=kind), guided)
    write_run(tmp_path, "iql", HOPPER, 1, [65.0], kind=kind)
    table = make(tmp_path)[f"{kind}-full", "morph"]
    place = table.columns.index("QT")
    assert table.columns[place + 1] == "QT, guided"
    assert [name for name in table.columns if "guided" in name] == ["QT, guided"]
    assert 'A column "guided"' in table.caption

    task, total = "hopper: medium → medium", "hopper, sum"
    greedy, guided = (cell_at(table, task, name) for name in ("QT", "QT, guided"))
    assert (greedy.mean, greedy.n) == (60, 3)
    assert (guided.mean, guided.n, guided.paper) == (85, 2, None)
    assert guided.std == pytest.approx(statistics.stdev([80, 90]))
    assert [cell_at(table, total, name).mean for name in ("QT", "QT, guided", "IQL")] == [60, 85, 65]
    for row in (task, total):
        assert [name for name, c in zip(table.columns, row_at(table, row).cells, strict=True) if c.best] == ["IQL"]
    assert [cell_at(table, "wins", name).mean for name in ("QT", "QT, guided", "IQL")] == [0, None, 1]
    for form in (markdown, latex, comma_separated, html_table):
        assert "QT, guided" in form(table)
        assert "85.0" in form(table)


def test_without_the_official_inference_there_is_no_column_for_it(tmp_path):
    guide(write_run(tmp_path, "qt", HOPPER, 1, [50.0]), None)
    guide(write_run(tmp_path, "qt", GRAVITY, 1, [50.0]), 60.0)
    parts = make(tmp_path)
    assert "QT, guided" not in parts["published-full", "morph"].columns
    assert "guided" not in parts["published-full", "morph"].caption
    assert "QT, guided" in parts["published-full", "gravity"].columns


def test_cells_that_were_not_run_are_visibly_empty(some):
    parts = make(some)
    table = parts["published-full", "morph"]
    empty = cell_at(table, "ant: medium → medium", "TAF-DT")
    assert (empty.mean, empty.n, empty.paper) == (None, None, 42.6)
    assert ours_text(empty) == "—"
    methods = len(table.columns) - 1
    own = [c for row in table.rows if not row.is_sum for c in row.cells[:methods] if not c.served]
    assert sum(c.mean is not None for c in own) == 4
    assert re.search(r'<td class="empty" data-v="">—<span class=paper>paper 42.6', html_table(table))
    assert isinstance(parts["published-full", "kinematic"], NotRun)  # one line on the page, no table
    text = page(settings_of(read_runs(some)[0], {}), [])
    assert "<code>bash run_all.sh --table kinematic --data d4rl</code>" in text
    assert "<code>bash run_all.sh --table expectile --data d4rl</code>" in text


def test_run_all_accepts_every_command_that_the_report_prints(tmp_path):
    """With its own parser, and each names runs, of the setting in which it stands; where nothing that run_all.sh knows
    fits a setting, none is printed."""
    quick = {"quick": True, "updates": QUICK_UPDATES, "eval_episodes": QUICK_EPISODES}
    bc = "hopper kinematic medium medium"
    write_run(tmp_path, "bc", bc, 1, [1.0])
    write_run(tmp_path, "bc", bc, 1, [1.0], kind="embedded")
    write_run(tmp_path, "bc", bc, 1, [1.0], quick)
    write_run(tmp_path, "bc", bc, 1, [1.0], quick, kind="embedded")
    write_run(tmp_path, "bc", bc, 1, [1.0], quick | {"updates": 40})
    write_run(tmp_path, "bc", bc, 1, [1.0], {"hidden": 3})
    write_run(tmp_path, "bc", bc, 1, [1.0], kind="own")
    settings = settings_of(read_runs(tmp_path)[0], {})
    text = page(settings, [])
    commands = re.findall("<code>(bash run_all.sh [^<]*)</code>", text)
    budget = {"--updates": str(QUICK_UPDATES), "--eval-episodes": str(QUICK_EPISODES)}
    missing = {*ABLATIONS, *SHIFTS, "junction", "times"} - {"kinematic"}
    assert len(settings) == 7
    assert len(commands) == len(set(commands)) == 4 * len(missing)
    for command in commands:
        args = tyro.cli(runner.Args, args=shlex.split(command)[2:])
        assert grid(args.runs).runs, command
        given = budget if "--quick" in command else dict.fromkeys(budget)
        assert all({flag: run.flags.get(flag) for flag in budget} == given for run in grid(args.runs).runs), command
    error = subprocess.run([sys.executable, "report.py", "--runs", tmp_path / "no"], cwd=ROOT, capture_output=True)
    (hint,) = re.findall(r"\(bash run_all.sh (.*)\)", error.stderr.decode())
    assert tyro.cli(runner.Args, args=shlex.split(hint)).runs.quick


def test_bc_serves_every_source(some):
    table = make(some)["published-full", "morph"]
    for source in SOURCES:
        c = cell_at(table, f"hopper: {source} → medium", "BC")
        assert (c.mean, c.n, c.paper, c.served) == (33.5, 2, None, source != "medium")
        assert ("same runs" in ours_text(c)) == (source != "medium")
    write_run(some, "bc", "hopper morph medium-expert medium", 1, [99.0])
    table = make(some)["published-full", "morph"]
    assert cell_at(table, "hopper: medium-expert → medium", "BC").mean == (99 + 34) / 2  # its own source first
    assert cell_at(table, "hopper: medium → medium", "BC").mean == 33.5


def test_sums_and_wins(tmp_path):
    """Eight methods on four tasks, BC for one of three sources, DT on three tasks: against sums in a plain loop."""
    rng, scores = np.random.default_rng(0), {}
    tasks = [*[t for t in MAIN if t.startswith("hopper morph")][:4], "ant morph medium medium"]
    for task in tasks:
        for m in [*PAPER_METHODS, "bc"]:
            if (m != "dt" or task != tasks[1]) and (m != "bc" or " medium " in task):
                scores[task, m] = rng.uniform(0, 100, 2).round(2)
                for seed, score in enumerate(scores[task, m], 1):
                    write_run(tmp_path, m, task, seed, [score])
    served = tasks[3].split()
    assert served[2:] == ["medium-replay", "medium"]  # BC's runs of hopper medium -> medium are shown here, too
    table = make(tmp_path)["published-full", "morph"]
    assert cell_at(table, "hopper: medium-replay → medium", "BC").served

    def expected(methods, part):
        common = [t for t in tasks if t.startswith(part) and all((t, m) in scores for m in methods)]
        means = {m: [scores[t, m].mean() for t in common] for m in methods}
        won = {m: sum(max(means, key=lambda k: means[k][i]) == m for i in range(len(common))) for m in methods}
        return common, {m: sum(x) for m, x in means.items()}, won

    everything = [*PAPER_METHODS, "bc"]
    rows = [("hopper, sum", everything, "hopper", 9), ("all robots, sum", everything, "", 36)]
    rows += [("all robots, sum without BC", PAPER_METHODS, "", 36)]
    assert [len(expected(m, part)[0]) for _, m, part, _ in rows] == [2, 3, 4]
    for name, methods, part, of in rows:
        common, sums, _ = expected(methods, part)
        for m in everything:
            c = cell_at(table, name, label_of(m))
            if m not in methods:
                assert c.mean is None
                continue
            assert c.mean == pytest.approx(sums[m])
            assert (c.n, c.of) == (len(common), of)
            assert c.best == (sums[m] == max(sums.values()))
            if m != "bc":
                printed = [MAIN[t]["scores"][PAPER_METHODS.index(m)] for t in common]
                assert c.paper == pytest.approx(sum(printed))
    for name, methods in (("wins", everything), ("wins without BC", PAPER_METHODS)):
        common, _, won = expected(methods, "")
        assert sum(won.values()) == len(common)
        for m in methods:
            c = cell_at(table, name, label_of(m))
            assert (c.mean, c.n) == (won[m], len(common))
    assert cell_at(table, "wins", "TAF-DT").paper == 31
    assert cell_at(table, "wins", "OTDF").paper == 4
    nothing = cell_at(table, "walker2d, sum", "IQL")  # the paper's sum is then over all nine
    assert (nothing.mean, nothing.n, nothing.paper) == (None, None, pytest.approx(162.9))
    summary = make(tmp_path)["published-full", "summary"]
    for name, methods in (("morph", PAPER_METHODS), ("morph, with BC", everything)):
        common, sums, won = expected(methods, "")
        row = dict(zip(summary.columns, row_at(summary, name).cells, strict=True))
        other = max((m for m in methods if m != "taf_dt"), key=sums.get)
        assert (row["tasks"].mean, row["methods"].mean) == (len(common), len(methods))
        assert row["best other"].text == label_of(other)
        assert row["TAF-DT, total"].mean == pytest.approx(sums["taf_dt"])
        assert row["improvement, %"].mean == pytest.approx(100 * (sums["taf_dt"] / sums[other] - 1))
        assert row["wins"].mean == won["taf_dt"]
        assert row["wins"].paper == (31 if name == "morph" else None)
    assert [c.mean for c in row_at(summary, "gravity").cells] == [None, None, None, None, None, 0, 0]
    assert "gravity, with BC" not in [row.label for row in summary.rows]


def test_bc_can_be_the_best_of_its_row(tmp_path):
    for m, score in (("taf_dt", 5.0), ("dt", 4.0), ("bc", 6.0)):
        write_run(tmp_path, m, HOPPER, 1, [score])
    table = make(tmp_path)["published-full", "morph"]
    cells = {m: cell_at(table, "hopper: medium → medium", m) for m in ("TAF-DT", "DT", "BC")}
    assert [c.best for c in cells.values()] == [False, False, True]
    assert [cell_at(table, "wins", m).mean for m in cells] == [0, 0, 1]
    assert table.columns[:2] == ["TAF-DT", "BC"]


def test_a_sum_of_one_method_is_none(tmp_path):
    write_run(tmp_path, "bc", HOPPER, 1, [6.0])
    table = make(tmp_path)["published-full", "morph"]
    assert cell_at(table, "hopper, sum", "BC").mean is None
    assert cell_at(table, "wins", "BC").mean is None


def test_footnotes_stand_at_their_cells(some):
    parts = make(some)
    table = parts["published-full", "morph"]
    marks = cell_at(table, "walker2d: medium → medium-expert", "OTDF").marks
    assert [table.notes[i - 1] for i in marks] == ["Printed as the best of its row, although OTDF's 44.3 is higher."]
    assert not cell_at(table, "walker2d: medium → medium-expert", "IQL").marks
    marks = cell_at(table, "hopper: medium-expert → medium", "TAF-DT").marks
    assert any("56.5 ± 25.7" in table.notes[i - 1] for i in marks)
    assert len(cell_at(table, "wins", "TAF-DT").marks) == 2
    assert table.about[1:] == [n["text"] for n in PAPER["notes"] if "morph" in n["cells"]]
    text = markdown(table)
    line = next(line for line in text.splitlines() if line.startswith("| walker2d: medium → medium-expert |"))
    assert re.search(r"paper 44.3<sup>\d+</sup>", line)
    first = [int(i) for i in re.findall(r"<sup>(\d+)", text)]
    seen = list(dict.fromkeys(first))
    assert seen == sorted(seen)  # numbered in the order of reading
    assert set(range(1, len(table.notes) + 1)) >= set(seen)
    for i, note in enumerate(table.notes, 1):
        assert f"\n{i}. {note}" in text
        assert f"$^{{{i}}}$ " in latex(table)


def test_notes_on_what_is_hidden_are_hidden_and_the_others_keep_their_numbers(tmp_path):
    for method in ("taf_dt", "dt"):
        write_run(tmp_path, method, HOPPER, 1, [5.0])
    table = make(tmp_path)["published-full", "morph"]
    text = html_table(table)
    rows = [row for names, row in re.findall(r'<tr class="([^"]*)">(.*?)</tr>', text) if "unrun" not in names]
    cells = [cell for row in rows for cell in re.findall(r"<t[dh].*?</t[dh]>", row) if "unrun" not in cell]
    seen = {int(i) for cell in cells for marks in re.findall("<sup>(.*?)</sup>", cell) for i in marks.split(",")}
    assert 0 < len(seen) < len(table.notes)
    assert {int(i) for i in re.findall(r"<li value=(\d+)>", text)} == seen
    hidden = {int(i) for i in re.findall(r"<li value=(\d+) class=unrun>", text)}
    assert hidden == set(range(1, len(table.notes) + 1)) - seen


def test_data_of_one_s_own_get_a_row_of_their_own(tmp_path):
    path = write_run(tmp_path, "taf_dt", HOPPER, 1, [5.0], kind="own")
    change(path, lambda r: r["args"].update(source="/data/of mine/big.hdf5"))
    table = make(tmp_path)["own-full", "morph"]
    assert cell_at(table, "hopper: big → medium", "TAF-DT").mean == 5
    assert cell_at(table, "all robots, sum", "TAF-DT").mean is None  # the paper's 36 only


def test_no_name_breaks_a_figure_or_a_table(tmp_path, drawn, capsys, monkeypatch):
    name = r"a$b_{$|*x*[l](u)<b>`\n"
    for seed in (1, 2):
        path = write_run(tmp_path / "runs", "taf_dt", HOPPER, seed, [5.0, 6.0], kind="own")
        change(path, lambda r: r["args"].update(source=f"/data/{name}.hdf5"))
    make_report(Args(tmp_path / "runs", tmp_path / "out"))
    assert "left out" not in capsys.readouterr().err
    assert any("a$b_{$" in path.read_text() for path in (tmp_path / "out" / "figures").iterdir())
    table = (tmp_path / "out" / "tables" / "morph-own-full.md").read_text()
    assert r"a$b_{$\|\*x\*\[l\](u)\<b\>\`\\n" in table
    monkeypatch.setattr(figures, "_svg", lambda *_: 1 / 0)
    make_report(Args(tmp_path / "runs", tmp_path / "other"))
    assert "left out: a figure (ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "other" / "tables" / "morph-own-full.md").read_text() == table
    assert not (tmp_path / "other" / "figures").exists()


# ------------------------------------------------------------------------------------------------ ablations


def test_ablations_use_the_last_three_checkpoints_of_the_lowest_seed(some):
    parts = make(some)
    table = parts["published-full", "alpha"]
    row = "hopper gravity: medium → medium"
    c = cell_at(table, row, "alpha = 0.0")
    assert c.mean == pytest.approx(statistics.mean([50, 70, 90]))
    assert c.std == pytest.approx(statistics.stdev([50, 70, 90]))
    assert ours_text(c) == "70.0 ± 20.0 (3, seed 2)"
    assert (c.paper, c.paper_std, c.best) == (82.4, 7.5, True)
    default = cell_at(table, row, "alpha = 3.5")  # the main run
    assert default.mean == pytest.approx(21)
    assert paper_text(default) == "paper 60.0 ± 22.3"
    assert "last three checkpoints" in table.caption
    assert isinstance(parts["published-full", "xi"], NotRun)  # its default column alone makes no table
    write_run(some, "taf_dt", "ant gravity medium expert", 1, [3.0], {"alpha": 2})  # neither is in the paper
    table = make(some)["published-full", "alpha"]
    assert table.columns == [f"alpha = {v}" for v in ("0.0", "1.0", "2", "3.5", "5.0")]
    assert cell_at(table, "ant gravity: medium → expert", "alpha = 2").n == 1


def test_the_three_seed_ablation_is_over_means_of_seeds(tmp_path):
    scores = {1: [0.0, 1, 2, 3], 2: [0.0, 4, 5, 9], 3: [0.0, 7, 7, 7], 4: [1000.0] * 4}
    for seed, values in scores.items():
        write_run(tmp_path, "taf_dt", HOPPER, seed, values, {"ot_reward": False})
    table = make(tmp_path)["published-full", "ot_reward"]
    c = cell_at(table, "hopper morph: medium → medium", "without reward")
    means = [statistics.mean(scores[seed][-3:]) for seed in (1, 2, 3)]
    assert (c.mean, c.n) == (pytest.approx(statistics.mean(means)), 3)
    assert c.std == pytest.approx(statistics.stdev(means))
    assert cell_at(table, "hopper morph: medium → medium", "with reward").mean is None
    assert "3 seeds" in table.caption


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_finds_its_runs(tmp_path, name):
    ablation = ABLATIONS[name]
    task = ablation.rows[0]
    for i, v in enumerate(ablation.values):
        changed = {} if v == ablation.default else {ablation.factor: v}
        write_run(tmp_path, "taf_dt", " ".join(task), 1, [float(i)], changed)
    row = make(tmp_path)["published-full", name].rows[0]
    assert [c.mean for c in row.cells] == list(range(len(ablation.values)))
    printed = (
        PAPER["ablations"][name]["rows"][" ".join(task)] if name in PAPER["ablations"] else [None] * len(row.cells)
    )
    assert [[c.paper, c.paper_std] for c in row.cells] == [p or [None, None] for p in printed]


# ------------------------------------------------------------------------------------------ no mixing, reading


def test_kinds_of_data_and_budgets_never_mix(tmp_path):
    runs = [
        ("published-full", 1.0, dict()),
        ("published-full", 2.0, dict(kind="published", seed=2)),
        ("embedded-full", 3.0, dict(kind="embedded")),
        ("embedded-quick", 4.0, dict(kind="embedded", changed={"quick": True})),
        ("published-quick", 5.0, dict(changed={"quick": True})),
        ("custom", 6.0, dict(changed={"updates": 1000})),
        ("custom", 7.0, dict(changed={"alpha": 5.0, "xi": 0.1})),
        ("custom", 8.0, dict(changed={"quick": True, "updates": 10})),
        ("published-full alpha", 9.0, dict(changed={"alpha": 5.0})),
        ("published-quick alpha", 10.0, dict(changed={"quick": True, "alpha": 5.0})),
        ("custom", 11.0, dict(args={"preset": "released", "alpha": 2.5})),  # a preset's values count as its defaults
        ("custom alpha", 12.0, dict(args={"preset": "released", "alpha": 0.0}, changed={"alpha": 0.0})),
        ("published-full", 3.0, dict(changed={"diagnostics": True, "guided": "always"}, seed=3)),
    ]
    for i, (_, score, options) in enumerate(runs):
        write_run(tmp_path, "taf_dt", HOPPER, options.pop("seed", 1), [score], **options, name=f"seed1-{i:08x}")
    read, problems = read_runs(tmp_path)
    assert not problems
    settings = settings_of(read, {})
    found = {s.name: s for s in settings}
    assert [s.slug for s in settings][:2] == ["published-full", "published-custom-" + settings[1].slug[-8:]]
    assert len(found) == 8
    means = {}
    for s in settings:
        table = next(p for p in s.parts if p.name == "morph")
        means[s.name] = cell_at(table, "hopper: medium → medium", "TAF-DT").mean
    assert means == {
        "Published data, budget: full": 2,
        "Embedded data, budget: full": 3,
        "Embedded data, budget: quick": 4,
        "Published data, budget: quick": 5,
        "Published data, budget: custom: updates=1000": 6,
        "Published data, budget: custom: alpha=5.0, xi=0.1": 7,
        "Published data, budget: quick, custom: updates=10": 8,
        "Published data, budget: preset released": 11,
    }
    table = next(p for p in found["Published data, budget: preset released"].parts if p.name == "alpha")
    c = {v: cell_at(table, "hopper morph: medium → medium", f"alpha = {v}") for v in (0.0, 2.5, 3.5)}
    assert [c[v].mean for v in c] == [12, 11, None]
    assert next(s.flags for s in settings if s.slug == "embedded-quick") == ["--data", "embedded", "--quick"]


def test_the_paper_s_numbers_are_shown_beside_published_data_only(some):
    """Its data are the published ones."""
    for path in some.rglob("result.json"):
        change(path, lambda r: [d.update(kind="embedded") for d in r["data"].values()])
    parts = make(some)
    names = set()
    for (slug, name), part in parts.items() if not parts.pop("problems") else ():
        assert slug == "embedded-full"
        if isinstance(part, Table):
            names.add(name)
            assert not part.notes
            assert all(not paper_text(c) and not c.marks for row in part.rows for c in row.cells)
            text = markdown(part) + comma_separated(part) + latex(part) + html_table(part)
            assert "sup>" not in text
            assert ("not shown here" in text) == (name not in ("iqm", "improvement", "gains"))
    assert names >= {"morph", "summary", "alpha", "times"}
    table = parts["embedded-full", "morph"]
    assert ours_text(cell_at(table, "hopper: medium → medium", "TAF-DT")) == "47.2 ± 7.8 (3)"


def test_source_and_target_of_different_kinds_are_a_setting_of_their_own(tmp_path):
    data = {"source": {"kind": "published"}, "target": {"kind": "own"}}
    write_run(tmp_path, "dt", HOPPER, 1, [1.0], data=data)
    write_run(tmp_path, "dt", GRAVITY, 1, [1.0], data=None)
    names = [s.name for s in settings_of(read_runs(tmp_path)[0], {})]
    assert names == ["Published and own data, budget: full", "Unknown data, budget: full"]


def test_regenerated_sources_have_the_paper_beside_them_and_bc_with_them(tmp_path):
    """Published targets, sources rolled out from the policies of D4RL; bc has no source at all."""
    data = {"source": {"kind": "regenerated-d4rl"}, "target": {"kind": "published"}}
    more, size = {"quick": True}, {"source_size": 1_000_000}
    write_run(tmp_path, "dt", HOPPER, 1, [1.0], size, args=more | {"source": "data/hopper/medium.hdf5"}, data=data)
    write_run(tmp_path, "bc", HOPPER, 1, [7.0], args=more)
    write_run(tmp_path, "bc", HOPPER, 2, [8.0])  # no other run has its budget
    settings = settings_of(read_runs(tmp_path)[0], {})
    assert [s.name for s in settings] == [
        "Published data, budget: full",
        "Regenerated-d4rl and published data, budget: quick, custom: source_size=1000000",
    ]
    table = next(p for p in settings[1].parts if p.name == "morph")
    cells = {name: cell_at(table, "hopper: medium → medium", name) for name in ("DT", "BC")}
    assert [c.mean for c in cells.values()] == [1, 7]
    assert cells["DT"].paper == MAIN[HOPPER]["scores"][PAPER_METHODS.index("dt")]


def test_methods_with_budgets_of_their_own_meet_on_request(tmp_path):
    write_run(tmp_path, "taf_dt", HOPPER, 1, [5.0], {"updates": 2500, "width": 128})
    write_run(tmp_path, "taf_dt", HOPPER, 2, [6.0], {"updates": 2500, "width": 128})
    write_run(tmp_path, "taf_dt", HOPPER, 1, [4.0], {"updates": 2500, "width": 128, "beta": 0.0})
    write_run(tmp_path, "taf_dt", "walker2d morph medium medium", 1, [9.0], {"updates": 9000, "width": 128})
    write_run(tmp_path, "iql", HOPPER, 1, [3.0])
    assert len(settings_of(read_runs(tmp_path)[0], {})) == 4
    runs, problems = read_runs(tmp_path, own_budgets=True)
    # one method, one budget: a table says of a mean what it is a mean of; the order is that of the paths
    (problem,) = problems
    assert "its updates differ from those of" in problem
    settings = {s.name: s for s in settings_of(runs, {})}
    full = settings["Published data, budget: full"]
    assert set(settings) == {"Published data, budget: full", "Published data, budget: custom: beta=0.0"}
    assert "TAF-DT: updates=2500, width=128." in full.about
    assert "IQL:" not in full.about
    table = next(p for p in full.parts if p.name == "morph")
    cells = {name: cell_at(table, "hopper: medium → medium", name) for name in ("TAF-DT", "IQL")}
    assert [c.mean for c in cells.values()] == [5.5, 3]


def test_seeds_of_different_budgets_never_share_a_cell(tmp_path):
    """Defaults change between versions of the code: what counts is what a run was made with."""
    write_run(tmp_path, "iql", HOPPER, 1, [3.0], args={"lr": 3e-4})
    write_run(tmp_path, "iql", HOPPER, 2, [5.0], args={"lr": 1e-3})
    write_run(tmp_path, "iql", HOPPER, 3, [7.0], args={"lr": 3e-4})
    runs, problems = read_runs(tmp_path)
    assert [r.final for r in runs] == [3, 7]
    assert len(problems) == 1
    assert "its lr differ" in problems[0]
    # and the other way round: the same values, named by one and the default of the other
    write_run(tmp_path, "dt", HOPPER, 1, [3.0], {"lr": 1e-3})
    write_run(tmp_path, "dt", HOPPER, 2, [4.0], args={"lr": 1e-3})
    assert [r.final for r in read_runs(tmp_path, own_budgets=True)[0] if r.method == "dt"] == [3, 4]


def test_a_baseline_s_own_alpha_is_no_ablation(tmp_path):
    """Nor is IQL's beta, an inverse temperature, the source share that TAF-DT calls so: a table for each."""
    write_run(tmp_path, "qt", HOPPER, 1, [1.0], {"alpha": 5.0})
    write_run(tmp_path, "iql", HOPPER, 1, [1.0], {"beta": 0.0})
    write_run(tmp_path, "taf_dt", HOPPER, 1, [1.0], {"beta": 0.0})
    assert {s.name for s in settings_of(read_runs(tmp_path)[0], {})} == {
        "Published data, budget: custom: QT alpha=5.0",
        "Published data, budget: custom: IQL beta=0.0",
        "Published data, budget: custom: beta=0.0",
    }


def test_malformed_files_are_left_out_with_a_reason(some, capsys):
    def spoil(name, how):
        path = write_run(some, "iql", HOPPER, 7, [1.0], name=name)
        change(path, how)
        return path

    flipped = spoil("flipped", lambda r: None)
    flipped.write_text(flipped.read_text().replace('"score": 1.0', '"score": 2.0'))
    unsealed = spoil("unsealed", lambda r: None)
    unsealed.write_text(json.dumps(read_json(unsealed)))

    expected = {
        spoil("a", lambda r: r["args"].pop("seed")): "lacks a seed",
        spoil("b", lambda r: r.update(method="sac")): "the method is 'sac'",
        spoil("seed7", lambda r: r.pop("method")): "the method is None",  # the folder's name says nothing
        spoil("seed8", lambda r: r.pop("changed")): "'changed'",
        spoil("c", lambda r: r["args"].update(shift="none")): "shift 'none'",
        spoil("d", lambda r: r["evaluations"][-1].update(score=None)): "no final score",
        spoil("e", lambda r: r["evaluations"].clear()): "no final score",
        flipped: "changed or damaged",
        unsealed: "no sha256",
        spoil("f", lambda r: r.pop("changed")): "'changed'",
        spoil("g", lambda r: r.pop("args")): "no table has env None",
        spoil("h", lambda r: r.update(method="taf_dt", changed={"alpha": "x"})): "alpha is 'x'",
    }
    for name, text in (("i", "{half"), ("j", "[]"), ("k", ""), ("l", "[" * 100_000)):
        path = some / name / "result.json"
        path.parent.mkdir()
        path.write_text(text)
        expected[path] = ""
    measured = [{"step": 1, "stitched": {"J_a": 1.0}}]
    twin = write_run(some, "iql", HOPPER, 1, [5.0], {"diagnostics": True}, name="twin", diagnostics=measured)
    expected[twin] = "the same run as"
    out = make_report(Args(some, some.parent / "results"))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(expected)
    page = out.read_text()
    for path, reason in expected.items():
        (line,) = [e for e in errors if str(path) in e and e.startswith(f"left out: {path}")]
        assert reason in line
        assert str(path) in page
    assert cell_at(make(some)["published-full", "morph"], "hopper: medium → medium", "IQL").mean == 13.5
    assert [r.diagnostics for r in read_runs(some)[0] if r.method == "iql"] == [measured, []]


def test_the_least_that_a_result_can_have(tmp_path, drawn):
    """Optional parts missing, null or of another type: cells stay empty, panels are left out."""
    robot, shift, source, target = HOPPER.split()
    least = {"args": dict(env=robot, shift=shift, source=source, target=target, seed=3)}
    least |= {"evaluations": [{"step": 5, "returns": [1.0], "score": 12}], "method": "iql", "changed": {}}
    folder = tmp_path / "runs" / "any" / "name"
    odd = {"stages": {"a": 3}, "data": [], "diagnostics": {"step": 1}}
    for name, more in (("seed3", {}), ("seed4", odd | {"preprocess": 7, "device": None, "versions": None})):
        (folder / name).mkdir(parents=True)
        result = json.loads(json.dumps(least | more)) | {"args": least["args"] | {"seed": int(name[-1])}}
        write_json(folder / name / "result.json", result)
    assert make_report(Args(tmp_path / "runs", tmp_path / "out")).exists()
    parts = make(tmp_path / "runs")
    assert cell_at(parts["unknown-full", "morph"], "hopper: medium → medium", "IQL").n == 2
    drawn = {part.name for part in parts.values() if isinstance(part, FigurePart)}
    assert drawn == {"profiles", "curves-morph"}
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert names == {"profiles-unknown-full.svg", "curves-morph-unknown-full.svg"}


def test_runs_on_different_target_files_are_named(some):
    path = write_run(some, "dt", HOPPER, 1, [1.0])
    change(path, lambda r: r["data"]["target"].update(sha256="u"))
    (setting,) = settings_of(read_runs(some)[0], {})
    assert "different target files: hopper morph: medium → medium." in setting.about


# ----------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 20, 180])
def test_iqm_against_a_plain_loop(n):
    x = np.random.default_rng(n).normal(size=n)
    ordered, cut = sorted(x.tolist()), n // 4
    middle = ordered[cut : n - cut]
    assert iqm(x) == pytest.approx(sum(middle) / len(middle))
    from scipy.stats import trim_mean  # what rliable calls; it comes with POT

    assert iqm(np.stack([x, 2 * x]))[1] == pytest.approx(trim_mean(2 * x, 0.25))


def test_probability_of_improvement_and_profile_against_plain_loops(tmp_path):
    rng = np.random.default_rng(1)
    x, y = ([rng.integers(0, 6, n).astype(float) for n in sizes] for sizes in ((3, 5, 1), (4, 2, 2)))
    for a, b in zip(x, y, strict=True):
        slow = [1.0 if p > q else 0.5 if p == q else 0.0 for p in a for q in b]
        assert beats(a, b) == pytest.approx(statistics.mean(slow))
    taus = np.array([-1.0, 0.0, 2.5, 3.0, 9.0])
    slow = [statistics.mean(sum(p > tau for p in a) / len(a) for a in x) for tau in taus]
    np.testing.assert_allclose(profile(x, taus), slow)
    drawn = profile(resample(x, 7), taus)
    assert drawn.shape == (7, 5)
    tasks = [t for t in MAIN if t.startswith("hopper morph")][:3]
    for task, a, b in zip(tasks, x, y, strict=True):
        for m, scores in (("taf_dt", a), ("otdf", b)):
            for seed, score in enumerate(scores, 1):
                write_run(tmp_path, m, task, seed, [score])
    write_run(tmp_path, "otdf", tasks[0].replace("morph", "gravity"), 1, [1.0])  # TAF-DT was not run on it
    table = make(tmp_path)["published-full", "improvement"]
    c = cell_at(table, "OTDF", "all")
    assert c.mean == pytest.approx(np.mean([beats(a, b) for a, b in zip(x, y, strict=True)]))
    assert (c.n, cell_at(table, "OTDF", "gravity").mean) == (3, None)
    # an independent stratified bootstrap: other generator, plain loops
    import random

    source, means = random.Random(5), []
    for _ in range(1500):
        total = 0.0
        for a, b in zip(x, y, strict=True):
            one, two = source.choices(a.tolist(), k=len(a)), source.choices(b.tolist(), k=len(b))
            total += statistics.fmean(1.0 if p > q else 0.5 if p == q else 0.0 for p in one for q in two)
        means.append(total / 3)
    assert c.low == pytest.approx(np.percentile(means, 2.5), abs=0.03)
    assert c.high == pytest.approx(np.percentile(means, 97.5), abs=0.03)


def test_bootstrap_draws_within_tasks_and_covers():
    drawn = resample([np.array([1.0, 2.0]), np.array([30.0, 40.0, 50.0])], 400)
    assert set(drawn[0].ravel()) == {1, 2}
    assert set(drawn[1].ravel()) == {30, 40, 50}
    assert drawn[1].shape == (400, 3)
    assert interval(np.arange(9.0), [np.ones(1), np.ones(1)]) == (None, None)  # one seed each: no interval
    rng, inside, trials = np.random.default_rng(2), 0, 200
    centers = np.linspace(0, 100, 12)
    truth = iqm((centers[:, None] + rng.normal(0, 5, (12, 20_000))).ravel())
    for trial in range(trials):
        groups = [c + rng.normal(0, 5, 10) for c in centers]
        draws = iqm(np.concatenate(resample(groups, 400, seed=trial), 1))
        low, high = interval(draws, groups)
        inside += low <= truth <= high
    assert 0.86 <= inside / trials <= 0.99  # nominally 0.95; percentile intervals of ten runs are a little narrow


def test_cloning_serves_every_source_unless_it_has_one(tmp_path):
    """bc.py sees the target alone; with --source-share it sees one source, and its score is of that one only."""
    write_run(tmp_path / "alone", "bc", HOPPER, 1, [6.0])
    kinds = {"source": {"kind": "published"}, "target": {"kind": "published"}}
    write_run(tmp_path / "both", "bc", HOPPER, 1, [7.0], {"source_share": 0.5}, data=kinds)
    alone, both = (read_runs(tmp_path / name)[0] for name in ("alone", "both"))
    assert {task[2] for _, _, task in by_cell(alone)} == set(SOURCES)
    assert {task[2] for _, _, task in by_cell(both)} == {"medium"}
    assert alone[0].setting != both[0].setting  # they never meet in a table


def test_gains_over_the_data_and_over_bc_are_over_common_tasks(some):
    assert row_at(make(some)["published-full", "gains"], "QT").cells[0].mean is None  # no task has all methods
    write_run(some, "qt", HOPPER, 1, [7.0])
    table = make(some)["published-full", "gains"]
    ours, iql, bc = (row_at(table, m).cells for m in ("TAF-DT", "IQL", "BC"))
    column = table.columns.index
    mean = statistics.mean([40.0, 46.0, 55.5])
    assert ours[column("over data, morph")].mean == pytest.approx(mean - 30)
    assert ours[column("over data, gravity")].mean == pytest.approx(60 - 30)  # only TAF-DT was run there
    assert ours[column("over data, all")].mean == pytest.approx(mean - 30)  # gravity is not common to all
    assert ours[column("over data, all")].n == 1
    assert ours[column("over BC, all")].mean == pytest.approx(mean - 33.5)
    assert ours[column("over BC, gravity")].mean is None  # bc was not run there
    assert iql[column("over BC, morph")].mean == pytest.approx(13.5 - 33.5)
    assert bc[column("over BC, all")].mean is None


def test_interquartile_means_and_profiles_are_over_common_tasks(some):
    for seed, score in enumerate((5.0, 6.0, 70.0, 80.0), 1):
        write_run(some, "qt", HOPPER, seed, [score])
    iqm = make(some)["published-full", "iqm"]
    assert cell_at(iqm, "QT", "morph").mean == pytest.approx((6 + 70) / 2)  # not its other task
    assert cell_at(iqm, "BC", "morph").n == 1  # where it was run, not where it serves
    assert cell_at(iqm, "TAF-DT", "all").mean == pytest.approx(statistics.mean([40.0, 46.0, 55.5]))
    assert cell_at(iqm, "TAF-DT", "gravity").mean == 60
    groups = figures.profile_groups(by_cell(read_runs(some)[0]))
    assert {m: [list(x) for x in g] for m, g in groups.items()} == {
        "iql": [[13, 14]],
        "qt": [[5, 6, 70, 80]],
        "taf_dt": [[40, 46, 55.5]],
        "bc": [[33, 34]],
    }
    assert "number of tasks: 1" in make(some)["published-full", "profiles"].caption
    write_run(some, "dt", GRAVITY, 1, [1.0])  # now no task has all of them
    assert figures.profile_groups(by_cell(read_runs(some)[0])) == {}
    assert ("published-full", "profiles") not in make(some)


def test_curves_of_different_budgets_are_over_their_share(tmp_path, drawn, monkeypatch):
    """TAF-DT with 10,000 updates, DT with 40,000: half way is half way."""
    write_run(tmp_path, "taf_dt", HOPPER, 1, [10.0, 20.0], args={"updates": 10_000})
    other = write_run(tmp_path, "dt", HOPPER, 1, [1.0, 2.0], args={"updates": 40_000})

    def axes():
        found, real = [], figures.svg

        def spy(draw, *size):
            return real(lambda axes: found.append(axes[0, 0]) or draw(axes), *size)

        monkeypatch.setattr(figures, "svg", spy)
        figures.curves_figure(by_cell(read_runs(tmp_path)[0]), "morph")
        monkeypatch.setattr(figures, "svg", real)
        lines = {tuple(line.get_ydata()): list(line.get_xdata()) for line in found[0].lines}
        return found[0].get_xlabel(), lines[10.0, 20.0], lines[1.0, 2.0]

    assert axes() == ("share of the method's updates, %", [50, 100], [12.5, 25])
    change(other, lambda r: r["args"].update(updates=10_000))
    assert axes() == ("updates / 1000", [5, 10], [5, 10])


def test_moving_mean():
    np.testing.assert_allclose(smooth([1, 2, 3, 4, 5, 16]), [1, 1.5, 2, 2.5, 3, 6])


# ------------------------------------------------------------------------------------------- time and archives


def save_archive(path, n=500):
    rng = np.random.default_rng(0)
    d_m = rng.random(n).astype(np.float32)
    d_m[::50] = np.nan  # no fragment begins at the end of an episode
    gate = d_m < 0.4
    retained = gate | np.roll(gate, 1)
    w = np.where(retained, 1 / retained.sum(), np.nan).astype(np.float32)
    stages = {"mmd": {"seconds": 7.0, "peak_memory_mb": 300.0}, "ot": {"seconds": 5.0, "peak_memory_mb": 200.0}}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, gate=gate, retained=retained, d_m=d_m, w=w, meta=np.array(json.dumps({"stages": stages})))
    return int(gate.sum()), int(retained.sum())


def test_gate_histograms_and_times(tmp_path, drawn):
    path = "elsewhere/runs/preprocess/any-name.npz"  # where it was written; runs may be moved with it
    kept, retained = save_archive(tmp_path / "preprocess" / "any-name.npz")
    damaged = tmp_path / "preprocess" / "damaged.npz"
    damaged.write_bytes(b"PK\x03\x04 and no more")
    stages = {"command": {"seconds": 10.0, "peak_memory_mb": 90.0}, "cvae": {"seconds": 4.0, "peak_memory_mb": 95.0}}
    for seed in (1, 2):
        stages = stages | {"policy": {"seconds": 100.0 * seed, "peak_memory_mb": 80.0, "peak_cuda_memory_mb": 99.0}}
        write_run(tmp_path, "taf_dt", GRAVITY, seed, [1.0], stages=stages, preprocess=path)
    write_run(tmp_path, "taf_dt", HOPPER, 1, [1.0], preprocess=str(damaged))
    write_run(tmp_path, "taf_dt", HOPPER, 2, [1.0], preprocess="gone.npz")
    parts = make(tmp_path)
    (problem,) = parts["problems"]
    assert problem.startswith(str(damaged))
    (archive,) = read_archives(read_runs(tmp_path)[0], tmp_path)[0].values()
    assert archive.kept[0].sum() == kept
    assert archive.scores[0].sum() == 490
    assert archive.weights[0].sum() == retained > kept
    gate = parts["published-full", "gate"].svg
    assert ">dropped<" in gate  # what the colours are
    assert ">retained<" in gate
    table = parts["published-full", "times"]
    row = table.rows[0].cells
    assert [c.mean for c in row] == [300, 12, 99, 10, 4, statistics.mean([114, 214])]
    assert row[5].std == pytest.approx(statistics.stdev([114, 214]))
    assert [c.paper for c in row] == PAPER["times"]["rows"][GRAVITY]
    assert [c.mean for c in table.rows[1].cells] == [None] * 6


# --------------------------------------------------------------------------------------------------- formats


def test_markdown_csv_latex_and_html_agree(some):
    out = make_report(Args(some, some.parent / "results")).parent
    tables = {key[1]: t for key, t in make(some).items() if isinstance(t, Table)}
    assert set(tables) >= {"morph", "gravity", "summary", "iqm", "improvement", "gains", "alpha", "times"}
    assert {p.stem for p in (out / "tables").iterdir()} == {f"{name}-published-full" for name in tables}
    for name, table in tables.items():
        files = {s: (out / "tables" / f"{name}-published-full.{s}").read_text() for s in ("md", "csv", "tex")}
        lines = [line for line in files["md"].splitlines() if line.startswith("| ")]
        md = [[x.strip() for x in line.strip("|").split(" | ")] for line in [lines[0], *lines[2:]]]
        body = files["tex"].split("\\begin{tabular}")[1].split("\n", 1)[1].split("\\end{tabular}")[0]
        tex = [line.removeprefix("\\hline ").split(" & ") for line in body.strip().splitlines()]
        rows = list(csv.DictReader(io.StringIO(files["csv"])))
        assert len(md) == len(tex) == len(rows) + 1 == len(table.rows) + 1
        assert md[0][1:] == table.columns
        for row, m, t, r in zip(table.rows, md[1:], tex[1:], rows, strict=True):
            assert r[table.head] == row.label
            assert len(m) == len(t) == len(row.cells) + 1
            for column, in_md, in_tex in zip(table.columns, m[1:], t[1:], strict=True):
                plain = in_tex.replace("$\\pm$", "±").replace("---", "—")
                numbers = re.findall(r"-?\d+\.?\d*", re.sub(r"<sup>.*?</sup>", "", in_md))
                assert numbers == re.findall(r"-?\d+\.?\d*", re.sub(r"\$\^\{.*?\}\$", "", plain).rstrip(" \\"))
                if r[column] == "":
                    assert in_md.startswith("—")
                    assert "—" in plain
                elif re.fullmatch(r"-?[\d.]+", r[column]):
                    shown = re.match(r"\**(-?\d+\.?(\d*))", in_md)
                    assert float(shown[1]) == pytest.approx(float(r[column]), abs=0.5001 * 10 ** -len(shown[2]))
        assert files["tex"].count("{") == files["tex"].count("}")
        assert table.caption in files["md"]
    page = out.joinpath("report.html").read_text()
    assert all(html.escape(t.caption) in page for t in tables.values())


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed (Debian: texlive-latex-base)")
def test_latex_compiles(some):
    out = make_report(Args(some, some.parent / "results")).parent
    inputs = "".join(f"\\input{{tables/{p.name}}}\\clearpage\n" for p in sorted((out / "tables").glob("*.tex")))
    (out / "all.tex").write_text(f"\\documentclass{{article}}\n\\begin{{document}}\n{inputs}\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    ran = subprocess.run(command, cwd=out, capture_output=True, text=True, errors="replace", timeout=60)
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_latex_and_html_escape_what_runs_say(tmp_path):
    evil = "<script>alert(1)</script> & 50% #1_{x} |"
    write_run(tmp_path / "runs", "taf_dt", GRAVITY, 1, [1.0], {"note": evil}, device=evil)
    out = make_report(Args(tmp_path / "runs", tmp_path / "out"))
    page = out.read_text()
    assert "<script>alert" not in page
    (tex,) = (tmp_path / "out" / "tables").glob("times-*.tex")
    assert "\\& 50\\% \\#1\\_\\{x\\}" in tex.read_text()
    for path in (tmp_path / "out" / "tables").glob("*.md"):
        rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_the_page_needs_nothing_from_outside_and_is_reproducible(some, drawn):
    write_run(some, "qt", HOPPER, 1, [8.0])  # so that one task has all methods
    first = make_report(Args(some, some.parent / "a")).read_bytes()
    make_report(Args(some, some.parent / "b"))
    for path in sorted((some.parent / "a").rglob("*.*")):
        assert path.read_bytes() == (some.parent / "b" / path.relative_to(some.parent / "a")).read_bytes()
    text, links = first.decode(), []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            links.extend(v for k, v in attrs if k in ("src", "href"))
            assert tag not in ("link", "iframe", "object")

    Reader().feed(text)
    images = [v for v in links if v.startswith("data:image/svg+xml;base64,")]
    assert all(v.startswith("#") for v in links if v not in images)
    files = sorted((some.parent / "a" / "figures").iterdir())
    assert len(images) == len(files) >= 6
    for path in files:
        assert "currentColor" in path.read_text()
        assert figures.INK not in path.read_text()
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[^\"]*", "", text))
    assert not list((some.parent / "a").rglob("*.tmp"))


def run_script(*args):
    command = [sys.executable, ROOT / "report.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_user_errors_are_one_line(tmp_path, some):
    (tmp_path / "file").write_text("")
    nothing = run_script("--runs", tmp_path / "nowhere", "--out", tmp_path / "out")
    # where it takes long, Matplotlib says that it is building its font cache
    (line,) = [line for line in nothing.stderr.splitlines() if not line.startswith("Matplotlib")]
    assert nothing.returncode == 1
    assert "no usable result.json" in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"cannot write .*choose another --out"):
        make_report(Args(some, tmp_path / "file"))


# --------------------------------------------------------------------------------------------------- browser

PROBE = """<script>
const problems = [];
addEventListener("error", e => problems.push(String(e.message || e.target.tagName)), true);
addEventListener("load", () => {
  const table = document.querySelector("table"), button = table.tHead.rows[0].cells[1].firstChild;  // TAF-DT
  const values = () => [...table.tBodies[0].rows].map(r => r.className + "|" + r.cells[1].dataset.v);
  const found = {before: values(), problems};
  for (const name of ["down", "up", "again"]) { button.click(); found[name] = values(); }
  found.images = [...document.images].map(i => i.complete && i.naturalWidth > 0);
  found.width = [document.documentElement.scrollWidth, innerWidth];
  found.wide = [...document.querySelectorAll("table")].some(t => t.scrollWidth > t.parentElement.clientWidth);
  const shown = items => [...items].filter(x => x.offsetHeight).length;
  const count = () => [shown(table.tBodies[0].rows), shown(table.tHead.rows[0].cells)];
  const bc = table.tHead.rows[0].cells[2], box = table.parentElement.getBoundingClientRect();
  found.bc = [bc.textContent, bc.getBoundingClientRect().right <= box.right];
  found.shown = count();
  document.querySelector("#show").click();
  found.all = count();
  found.page = getComputedStyle(document.body).backgroundColor;
  parent.postMessage(JSON.stringify(found), "*");
});
</script>"""
# A frame, because a headless window is never narrower than 500.
FRAME = """<body style="margin:0"><pre></pre><script>
addEventListener("message", e => document.querySelector("pre").textContent = e.data);
</script><iframe width=WIDTH height=900 style="border:0" src=probed.html></iframe>"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_in_chromium(some, tmp_path, drawn, width, scheme):
    """No errors, all images drawn, sorting sorts, nothing wider than the window, light and dark."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    write_run(some, "taf_dt", "ant morph medium medium", 1, [99.0])
    write_run(some, "qt", HOPPER, 1, [8.0])  # so that one task has all methods
    page = make_report(Args(some, tmp_path / "out"))
    page.with_name("probed.html").write_text(page.read_text().replace("<head>", "<head>" + PROBE, 1))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=5000 --dump-dom "
    flags += f"--enable-logging=stderr --blink-settings=preferredColorScheme={int(scheme == 'light')} "
    command = [chromium, *flags.split(), "--window-size=1400,900", f"--user-data-dir={tmp_path / 'browser'}"]
    ran = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=60)
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", ran.stdout, re.DOTALL)[1]))
    assert found["problems"] == []
    assert "CONSOLE" not in ran.stderr
    assert len(found["images"]) >= 6
    assert all(found["images"])
    assert found["width"] == [width, width]
    assert width > 400 or found["wide"]  # tables scroll in their own box
    assert found["page"] == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 23, 26)")
    assert found["shown"] == [3 + 3, 1 + 5]  # tasks that were run, and sums of several methods; methods, and the data
    assert found["all"] == [36 + 6, 1 + len(METHODS) + 1]
    assert found["bc"] == ["BC", True]  # beside TAF-DT, and not clipped

    def cells(name):  # of the tasks; the sums come last
        kinds, values = zip(*(v.split("|") for v in found[name]), strict=True)
        assert ["sum" in kind for kind in kinds] == [False] * 36 + [True] * 6
        return values[:36]

    for name, sign in (("down", -1), ("up", 1)):
        filled = [float(v) for v in cells(name) if v]
        assert filled == sorted(filled, key=lambda v: sign * v)
        assert not any(cells(name)[len(filled) :])  # empty cells last, either way
    assert found["again"] == found["before"] != found["down"]


def test_gate_figure_only_where_there_is_a_gate_or_a_weight():
    """Without a filter no fragment has a score and all weights are equal: nothing to draw."""
    none, some, edges = np.zeros(60), np.arange(60), np.linspace(0, 1, 61)
    one = np.eye(60)[3]
    run = Run(Path(), "taf_dt", ("hopper", "morph", "medium", "medium"), 1, ("own", "full"), 1.0, preprocess="x")
    for scores, weights, drawn in ((none, one, False), (some, one, True), (none, some, True)):
        archive = Archive((scores, edges), (scores, edges), (weights, edges), "1 of 2 retained", {})
        assert (figures.gate_figure([run], {"x": archive}) is not None) == drawn
