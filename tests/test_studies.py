"""The published runs and the studies of them: every run has its command, and the tables of results/ are theirs."""

import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from dynashift import checkpoints, make, runs
from dynashift.errors import UserError
from dynashift.results import read_result, summaries
from studies import (
    anchors,
    behaviour,
    clone,
    confirm,
    gate,
    law,
    modes,
    precision,
    reach,
    recipe,
    recompute,
    seal,
    source,
    table,
)
from studies.recompute import command_of, given

ROOT = Path(__file__).parents[1]
RUNS = sorted((ROOT / "results" / "published").rglob("result.json"))


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, dict]]:
    return [given(line) for line in (ROOT / "results" / "published" / "commands.txt").read_text().splitlines()]


def test_there_are_runs():
    assert RUNS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parts[-4]}-{path.parts[-3]}-{path.parts[-2]}")
def test_run_has_its_command_and_is_whole(path, commands):
    raw = read_result(path)
    i = command_of(raw, commands)
    assert i is not None
    assert raw["changed"].keys() <= commands[i][1].keys(), "the run had arguments that its command does not name"
    assert raw["versions"]["commit"]
    assert raw["evaluations"][-1]["step"] == raw["args"]["updates"]
    assert len(raw["evaluations"][-1]["returns"]) == raw["args"]["eval_episodes"]
    if raw["args"]["shift"] == "none":  # an anchor, on data of the unshifted robot
        largest = max(raw["data"].values(), key=lambda x: x["transitions"])
        assert largest["kind"] == "regenerated-d4rl"
        assert largest["transitions"] == (raw["args"]["source_size"] or 1_000_000)
        return
    assert raw["data"]["target"]["kind"] == "published"
    if "source" in raw["data"]:
        assert raw["data"]["source"]["kind"] == "regenerated-d4rl"
        assert raw["data"]["source"]["transitions"] == 1_000_000


def test_every_command_was_run(commands):
    found = {command_of(read_result(path), commands) for path in RUNS}
    assert found == set(range(len(commands)))


@pytest.mark.skipif(not os.environ.get("TEST_RESULTS"), reason="takes minutes: set TEST_RESULTS=1")
def test_two_results_at_random_are_those_of_their_commands(real_data):
    for published, found in recompute.main(real_data):
        hashes = [{role: x["sha256"] for role, x in raw["data"].items()} for raw in (published, found)]
        if hashes[0] != hashes[1]:
            pytest.skip("rollouts of the source policy have other checksums on this machine")
        if published["device"] != found["device"]:
            pytest.skip(
                f"{published['device']} was the device, and this is {found['device']}, which may round differently"
            )
        returns = [[e["returns"] for e in raw["evaluations"]] for raw in (published, found)]
        assert returns[0] == returns[1]


def test_tables_are_those_of_the_runs():
    page = (ROOT / "results" / "notes" / "first_runs.md").read_text()
    assert table.filled(page) == page


def test_page_of_the_law_is_that_of_its_runs():
    page = (ROOT / "results" / "law.md").read_text()
    assert law.filled(page) == page
    found = law.scores(law.all_runs())
    drawn = [y for panel in law.figure(found).axes for line in panel.lines for y in line.get_ydata()]
    assert sorted(drawn) == sorted(score for by_seed in found.values() for score in by_seed.values())
    folder = ROOT / "results" / "published" / "law"
    files = [path for path in folder.rglob("result.json") if path.parents[2].name != "latents"]
    assert sum(map(len, found.values())) == len(files) > 0, "a run that the page does not show"
    tried = table.results("law/latents")
    rows = law.latents(tried, table.results("recipe/confirmation")).splitlines()[2:]
    last = [row.strip("| ").split(" | ")[-1].split(", ") for row in rows]
    assert sum(map(len, last)) == len(tried), "a run that the page does not show"


def test_page_of_the_anchors_is_that_of_its_runs():
    page = anchors.PAGE.read_text()
    assert anchors.filled(page) == page, "run python -m studies.anchors"
    found = table.results("anchors")
    panels = anchors.figure(found).axes
    lines = [line for panel in panels for line in panel.lines if line.get_linestyle() not in ("--", ":")]
    drawn = [y for line in lines for y in line.get_ydata()]
    guided = [e["guided_score"] for raw in found for e in raw["evaluations"] if e.get("guided_score") is not None]
    assert sorted(drawn) == sorted([e["score"] for raw in found for e in raw["evaluations"]] + guided)
    published = page[: page.index("## Measured")]
    for (name, _), score in anchors.PUBLISHED.items():
        row = next(line for line in published.splitlines() if line.startswith(f"| {anchors.label_of(name)} |"))
        assert f"{score:g}" in row, row


@pytest.mark.parametrize(
    ("raw", "cells"),
    [
        (
            {"method": "iql", "args": dict(updates=20_000, source_batch=64, target_batch=32, hidden=128, lr=1e-3)},
            "20,000 of 1,000,000 updates; 64 + 32 transitions; width 128; rate 0.001; tau 0.05; 7 transitions of data",
        ),
        (
            {"method": "qt", "args": dict(updates=5, batch=64, K=5, layers=2, width=16, lr=3e-4)},
            "5 of 101,000 updates; 64 windows of 5; 2 layers of width 16; rate 0.0003; tau 0.05; 7 transitions of data",
        ),
    ],
)
def test_budget_of_an_anchor_in_words(raw, cells):
    raw["args"]["tau"] = 0.05
    assert anchors.budget(raw | {"data": {"target": {"transitions": 7}}}) == cells


def anchor(method: str, seed: int, score: float, updates: int = 5, **changed) -> dict:
    """A run of a method on its anchor."""
    where = dict(env="hopper", shift="none", source="medium", target="none", seed=seed, updates=updates)
    args = where | dict(batch=7, target_batch=9, K=5, layers=2, width=16, lr=3e-4) | changed
    evaluations = [{"step": n, "score": score - n, "returns": [1.0], "guided_score": n} for n in range(3, -1, -1)]
    one = {"method": method, "args": args, "changed": changed, "evaluations": evaluations}
    return one | {"data": {"target": {"transitions": 7, "score": 1.0}}, "summaries": summaries(evaluations)}


def test_seeds_of_an_anchor_are_one_row_and_budgets_are_not():
    found = [anchor("qt", 1, 50.0), anchor("qt", 2, 60.0), anchor("qt", 1, 70.0, 9), anchor("qt", 1, 9.0, 99, K=6)]
    found += [anchor("taf_dt", 1, 5.0), anchor("taf_dt_released", 1, 6.0)]
    rows = [line.split(" | ") for line in anchors.table(found).splitlines()[2:]]
    assert [row[4] for row in rows] == ["2", "1", "1", "1", "1"]
    two = next(row for row in rows if row[4] == "2")
    assert two[5:7] == ["54.0 ± 7.1", "55.0 ± 7.1"]  # the last three lose 2, 1 and 0
    assert two[9] == "3.0 ± 0.0"  # the best guided is the first; the best, the last
    words = anchors.names(anchors.groups(found[:4]))
    assert len(set(words)) == 3
    assert words[0] == "default, 5 of 101,000 updates, 7 windows of 5"
    assert anchors.names([found[:2]]) == ["default"]
    assert anchors.ours(found) == {"QT": ("69.0 after 9 updates", "1")}
    table = (
        "| method | anchor task | ours | runs | left |\n|---|---|---|---|---|\n| QT | x | | | y |\n| DT | x | | | y |\n"
    )
    page = anchors.with_ours(f"text\n\n{table}\nmore\n", found)
    assert "| QT | x | 69.0 after 9 updates | 1 | y |\n| DT | x |  |  | y |\n\nmore\n" in page


def test_page_of_the_search_is_that_of_its_runs():
    page = (ROOT / "results" / "recipe" / "search.md").read_text()
    assert recipe.filled(page) == page
    found = recipe.scores(table.results("recipe/search"))
    files = list((ROOT / "results" / "published" / "recipe" / "search").rglob("result.json"))
    assert sum(map(len, found.values())) == len(files) > 0, "a run that the page does not show"


def test_settings_of_the_search_are_compared_on_whole_sets_of_tasks():
    def run(task, seed, score, **changed):
        args = dict(zip(("env", "shift", "target"), task, strict=True), seed=seed)
        summaries = {"mean_of_last_three": {"score": score}}
        return {"method": "taf_dt", "args": args, "changed": recipe.BASE | changed, "summaries": summaries}

    tasks = list(recipe.TASKS)
    runs = [run(task, 1, 10.0 * i) for i, task in enumerate(tasks)]  # mean 25
    runs += [run(task, 1, 30.0, alpha=1.0) for task in tasks]
    runs += [run(task, 1, 99.0, beta=0.0) for task in tasks[1:]]  # higher, but one task is missing
    found = recipe.scores(runs)
    rows = [line.split(" | ")[:2] for line in recipe.table(found, [1]).splitlines()[2:]]
    assert rows == [["| `--alpha 1`", "30.0"], ["| base", "25.0"], ["| `--beta 0`", ""]]
    assert recipe.table(found, [1, 2]).count("\n") == 1  # nobody has seed 2
    back = run(tasks[0], 2, 1.0)
    back["args"] |= {"dropout": 0.1, "time_embedding": True}
    assert recipe.setting(back) == "`--dropout 0.1`, `--time-embedding`"
    assert recipe.setting({"method": "bc", "args": {"source_share": 0.5, "batch": 128}}) == "*cloning both*"
    with pytest.raises(AssertionError, match="not one of the development tasks"):
        recipe.scores([run(("ant", "morph", "expert"), 1, 1.0)])


def confirmed(task, seed, score, method="taf_dt", **args):
    """A result of the confirmation, as far as its study reads it."""
    env, shift, source, target = task
    args = {"env": env, "shift": shift, "source": f"data/{source}.hdf5", "target": target, "seed": seed} | args
    if method == "bc":
        args = {"batch": 128} | args
    else:
        args = {"beta": 1 / 3, "filter": "both", "eta_reg": 0.5} | args
    return {"method": method, "args": args, "changed": {}, "summaries": {"mean_of_last_three": {"score": score}}}


def test_page_of_the_confirmation_is_that_of_its_runs():
    assert confirm.filled() == {page: page.read_text() for page in confirm.PAGES.values()}, "run studies.confirm"
    found = confirm.scores(confirm.all_runs())
    assert set(found) <= set(confirm.ENTRANTS)
    first, second, *_ = confirm.TASKS
    assert len(confirm.TASKS) == 36
    assert set(confirm.TASKS) > confirm.DEVELOPMENT
    assert {first[2], second[2]} == {"medium"}


def test_a_run_belongs_to_one_entrant_or_none():
    task, recipe_now = confirm.TASKS[0], confirm.RECIPES["recommended"]
    nothing_else = {"beta": 0, "alpha": 0, "eta_reg": 0}
    for args, wanted in (
        (recipe_now, "recommended"),
        (recipe_now | {"updates": 1000, "alpha": 3.5}, "first"),
        (recipe_now | {"zeta": 0.98}, "paper"),
        (recipe_now | {"beta": 0.1}, None),  # how much of the source is a question of its own
        (recipe_now | {"filter": "ot"}, None),
        (recipe_now | nothing_else, "clone"),
    ):
        assert confirm.entrant(confirmed(task, 1, 0.0, **args)) == wanted, args
    for args, wanted in (
        ({"quick": True}, "bc"),
        ({"quick": True, "batch": 256}, "long"),
        ({"quick": True, "source_share": 0.5}, "both"),
        ({"quick": True, "source_share": 0.3}, None),
        ({"quick": False}, None),
    ):
        assert confirm.entrant(confirmed(task, 1, 0.0, "bc", **args)) == wanted, args


def test_an_entrant_that_lacks_a_task_is_not_compared():
    a, b, *_ = confirm.TASKS
    recommended, first = (confirm.RECIPES[name] for name in ("recommended", "first"))
    runs = [confirmed(task, 1, 1.0, **recommended) for task in (a, b)]
    runs += [confirmed(task, 1, 1.0, "bc", quick=True) for task in (a, b)]
    runs += [confirmed(a, 1, 1.0, **first)]
    assert confirm.compared(confirm.scores(runs)) == ([a, b], ["recommended", "bc"])
    runs += [confirmed(b, 1, 1.0, **first)]
    assert confirm.compared(confirm.scores(runs)) == ([a, b], ["recommended", "first", "bc"])


def test_confirmation_compares_on_common_tasks():
    """Means, gains and probabilities of three tasks, of which one entrant has two."""
    a, b, c, *_ = confirm.TASKS
    runs = []
    for task, ours, theirs in ((a, (10, 20, 30), (5, 15, 25)), (b, (50, 50, 50), (60, 60, 40)), (c, (0, 0, 0), None)):
        for seed in (1, 2, 3):
            runs.append(confirmed(task, seed, ours[seed - 1], **confirm.RECIPES["recommended"]))
            if theirs:
                runs.append(confirmed(task, seed, theirs[seed - 1], "bc", quick=True))
    runs.append(confirmed(a, 4, 99.0, "bc", quick=True))  # a further seed of cloning is not compared
    runs.append(confirmed(a, 1, 99.0, "bc", quick=False))
    found = confirm.scores(runs)
    assert confirm.compared(found) == ([a, b], ["recommended", "bc"])
    head, _, recommended, cloning, *paper = confirm.means(found).splitlines()
    assert "mean of 2 tasks" in head
    cells = [cell.strip() for cell in recommended.split("|")[1:-1]]
    assert cells[:2] == ["recommended", "6"]
    # 35 against 34.2; 6 of 9 pairs of the first task are won, 3 of 9 of the second.
    assert cells[-2].startswith("0.8 [")
    assert cells[-1].startswith("0.50 [")
    # One draw of three in 27 takes the lowest score three times, which is more than 2.5 %.
    assert cells[2] == "35.0 [30.0, 40.0]"
    assert cloning.split("|")[3].strip().startswith("34.2 [")
    mean = np.mean([confirm.paper_scores(task)["taf_dt"] for task in (a, b)])
    assert f"*{mean:.1f}*" in paper[0]
    bars = confirm.figure(found).axes[1].patches
    assert sorted(bar.get_height() for bar in bars) == pytest.approx([50 - 160 / 3, 20 - 15])
    with pytest.raises(AssertionError, match="two runs of recommended"):
        confirm.scores(runs + runs[:1])


def test_figure_shows_every_run_and_cell():
    """Of the tasks on which anything but cloning was run; the table has the others."""
    raw_runs = table.results(*table.FOLDERS)
    panels = table.figure(raw_runs).axes
    tasks = [tuple(panel.get_title().split()) for panel in panels]
    drawn = [(line.get_marker(), y) for panel in panels for line in panel.lines for y in line.get_ydata() if y == y]
    by_task = [((raw["args"]["env"], raw["args"]["shift"]), raw) for raw in raw_runs]
    assert {task for task, raw in by_task if raw["method"] != "bc"} == set(tasks)
    runs = [raw["summaries"]["mean_of_last_three"]["score"] for task, raw in by_task if task in tasks]
    assert sorted(y for marker, y in drawn if marker == "o") == sorted(runs)
    cells = [score for task in tasks for score in table.paper_cells(task).values()]
    assert sorted(y for marker, y in drawn if marker == "D") == sorted(cells)
    assert len(cells) == 8 * len(panels)  # TAF-DT twice, for both presets, IQL and OTDF in two forms, QT, DT


def test_cells_of_few_and_many_seeds():
    assert [table.cell(x) for x in ([], [1.25], [3, 2.04])] == ["", "1.2", "3.0, 2.0"]
    assert table.cell([1, 2, 6]) == "3.0 ± 2.6 (3)"  # deviations -2, -1, 3: sqrt(14 / 2)


def test_trials_are_shown_beside_the_run_they_differ_from():
    """One flag changed, one of the same method and seed unchanged; runs of other methods and seeds are not taken."""

    def run(method, seed, score, **changed):
        args = dict(env="hopper", shift="morph", seed=seed, preset="paper", beta=0.3) | changed
        summaries = {"final": {"score": score}, "mean_of_last_three": {"score": score + 1}}
        return dict(method=method, args=args, changed={"width": 9, **changed}, summaries=summaries)

    runs = [run("taf_dt", 1, 10), run("taf_dt", 2, 20), run("iql", 2, 30), run("iql", 2, 40, beta=0.0)]
    others = [run("taf_dt", 2, 21, eta_w=5.0, time_embedding=False), run("iql", 2, 31, updates=100_000)]
    others += [run("iql", 2, 41, beta=0.0, source_batch=0)]
    two, three, one = (line.strip("| ").split(" | ") for line in table.trials(runs, others).splitlines()[2:])
    assert one == ["hopper morph", "TAF-DT", "2", "`--eta-w 5`, `--no-time-embedding`", "22.0 / 21.0", "21.0 / 20.0"]
    assert two == ["hopper morph", "IQL", "2", "`--updates 100000`", "32.0 / 31.0", "31.0 / 30.0"]
    assert three == ["hopper morph", "IQL, unweighted", "2", "`--source-batch 0`", "42.0 / 41.0", "41.0 / 40.0"]


@pytest.mark.parametrize(
    ("method", "changed", "heading"),
    [
        ("otdf", {"official_bug": True}, "OTDF, unweighted"),
        ("iql", {"official_bug": True, "beta": 3}, "IQL, unweighted"),
        ("otdf", {"official_bug": False}, "OTDF"),
        ("igdf", {"official_bug": True}, "IGDF, official bug"),  # it still weighs by the advantage
        ("dara", {"official_bug": True}, "DARA, official bug"),
        ("iql", {"beta": 0.0}, "IQL, unweighted"),
        ("iql", {"beta": 3.0}, "IQL"),
        ("taf_dt", {"beta": 0.0, "preset": "released"}, "TAF-DT, target only"),
        ("taf_dt", {"beta": 0.3, "preset": "released"}, "TAF-DT, released"),
        ("qt", {}, "QT"),
    ],
)
def test_a_run_is_labelled_by_what_its_flags_do(method, changed, heading):
    assert table.heading({"method": method, "args": changed}) == heading


def test_what_the_gate_measures(real_data, tmp_path, capsys, monkeypatch):
    """On slices of D4RL's own data: on hopper the score is the self term at the median rule, the distance at ours."""
    monkeypatch.setattr(gate, "ROBOTS", ("ant", "hopper"))
    for robot in gate.ROBOTS:
        (tmp_path / robot).mkdir()
        (tmp_path / robot / "medium.hdf5").symlink_to(real_data / "d4rl_medium" / f"{robot}_medium-v2.slice.hdf5")
    gate.main(tmp_path, real_data / "target", size=400)
    kernels, retained = capsys.readouterr().out.strip().split("\n\n")
    head, _, *rows = [line.strip("| ").split(" | ") for line in kernels.splitlines()]
    rules = dict(enumerate(head))
    cells = [(row[0], rules[i], cell) for row in rows for i, cell in enumerate(row) if "/" in cell]
    found = {(task, rule): list(map(float, re.findall(r"-?[\d.]+", cell))) for task, rule, cell in cells}
    assert len(rows) == 6
    # On ant kinematic, the target's spread makes two locked joints all that counts; whitening does not.
    own, near, *_ = found["ant kinematic", "wide"]
    assert near < 0.2
    own, near, mean, *normalised = found["ant kinematic", "wide, whitened"]
    assert len(normalised) == 2
    assert own < 0.5
    assert near > 0.5
    own, near, mean = found["hopper kinematic", "median"]
    assert own > 0.9
    assert near < 0.4
    own, near, mean = found["hopper kinematic", "wide"]
    assert own < 0.5
    assert near > 0.7
    assert mean > 0.7
    tasks = [line.strip("| ").split(" | ") for line in retained.splitlines()[2:]]
    assert all(0.5 <= float(task[1]) < 1 for task in tasks)
    assert all(0 < float(task[4]) <= 1 for task in tasks)


def test_clones_from_states_of_the_data(real_data, tmp_path):
    """A hopper clone that does nothing gets the reward of doing nothing; the data's own reward is that of its rows."""
    task = dict(env="hopper", shift="kinematic", data="d4rl", data_dir=real_data / "target")
    args = runs.compose(clone.bc.Args, **task, hidden=8)
    target = clone.load_target(args.task)
    policy = clone.bc.mlp(target.observations.shape[1], target.actions.shape[1], 8)
    for weight in policy.parameters():
        torch.nn.init.zeros_(weight)
    torch.save({"parts": {"policy": policy.state_dict()}}, tmp_path / "ckpt.pt")
    checkpoints.write_json(tmp_path / "args.json", runs.flatten(args))
    task, seed, reset, first, *_ = clone.line(tmp_path, steps=(0,), n=3).strip("| ").split(" | ")
    assert (task, seed) == ("hopper kinematic", "1")
    env = make("hopper", "kinematic")
    totals = []
    for row in clone.begins(target, 0, 3):
        env.reset(seed=0)
        env.unwrapped.set_observation(target.observations[row])
        total, ended = 0.0, False
        while not ended:  # it falls long before 500 steps
            _, reward, ended, _, _ = env.step(np.zeros(3))
            total += reward
        totals.append(total / clone.LENGTH)
    assert first.split(" ")[0] == f"{np.mean(totals):.2f}"
    assert float(reset) < 0.5
    rows = clone.begins(target, 100, 7)
    assert len(rows) == 7
    episode = np.searchsorted(target.starts, rows, "right") - 1
    assert ((rows - target.starts[episode] >= 100) & (rows - target.starts[episode] < 150)).all()
    assert (target.starts[episode] + target.lengths[episode] - rows >= clone.LENGTH).all()


def test_behaviour_model_alone(real_data, capsys, monkeypatch):
    """Longer training, a smaller error; a penalty that outweighs all else leaves a constant at best."""
    # The likelihood has a test of its own; here it is only a cell of the table.
    monkeypatch.setattr(behaviour, "log_likelihood", functools.partial(behaviour.log_likelihood, M=10))
    file = real_data / "target" / "hopper_kinematic_medium.hdf5"
    behaviour.main((file,), kl=(0.1,), penalties=(10.0, 0.0), updates=(10, 150), seeds=2)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    models = regression, strong, free = "regression", "KL 0.1, L2 10", "KL 0.1, L2 0"
    assert [row[:3] for row in rows] == [[file.stem, name, n] for n in ("10", "150") for name in models]
    found = {(row[1], row[2]): [list(map(float, cell.split(", "))) for cell in row[4:]] for row in rows}
    assert all(len(column) == 2 for columns in found.values() for column in columns)
    error = {key: columns[0] for key, columns in found.items()}
    for name in (regression, free):
        assert max(error[name, "150"]) < min(error[name, "10"]) / 2
    assert min(error[strong, "150"]) > 0.5 > max(error[free, "150"])
    *_, others, random = found[free, "150"]
    assert min(others + random) > 1  # L_reg is higher off the data
    assert error[regression, "150"][0] != error[regression, "150"][1]  # two seeds


@pytest.mark.parametrize("apart", [True, False])
def test_a_state_tells_the_policy_only_where_the_two_do_not_meet(apart):
    """Two policies with opposite actions, in different states or in the same ones."""
    rng = torch.Generator().manual_seed(0)
    expert, held = torch.arange(2000) >= 1000, torch.arange(2000) % 4 == 0
    s = torch.randn(2000, 3, generator=rng) + 4.0 * (apart * expert.float()[:, None])
    a = torch.where(expert, 0.5, -0.5)[:, None]
    right, error, told = modes.measure(s, a, expert, held, 300, seed=1)
    assert told < 0.02
    assert (right > 0.98, error < 0.05) == (apart, apart)
    assert apart or (right < 0.6 and error > 0.9)


def test_modes_of_real_data(real_data, capsys):
    file = real_data / "target" / "hopper_morph_medium_expert.hdf5"
    modes.main((file,), updates=200, seeds=1)
    name, right, error, told = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert (name, float(right) > 0.95) == (file.stem, True)
    assert 0.2 > float(error) > float(told) / 2 > 0
    with pytest.raises(UserError, match="not target data of two policies"):
        modes.main((real_data / "target" / "hopper_morph_medium.hdf5",))


def test_episodes_are_held_out_whole(real_data):
    path = real_data / "target" / "hopper_morph_medium_expert.hdf5"
    target = behaviour.read_hdf5(path, "hopper", "morph")
    s, a, held = behaviour.split(target)
    episodes = np.split(held.numpy(), np.cumsum(target.lengths)[:-1])
    assert [set(x.tolist()) for x in episodes] == [{i in (1, 4)} for i in range(5)]
    assert len(s) == len(a) == len(held) == len(target)


def test_likelihood_of_a_behaviour_model_against_a_sum_over_latents():
    torch.manual_seed(0)
    net, s, a = behaviour.taf_dt.CVAE(3, 1, 8), torch.randn(4, 3), torch.rand(4, 1) - 0.5
    wanted = []
    with torch.no_grad():
        net.decoder[0].weight.mul_(4)  # so that the latents matter
        grid = torch.linspace(-6, 6, 241)
        z = torch.cartesian_prod(grid, grid)[:, None].expand(-1, 4, -1)  # [n, 4, 2]
        prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1) + 2 * torch.log(grid[1] - grid[0])
        means = net.decode(s.expand(len(z), 4, 3), z)
        assert means.std(0).min() > 0.05
        for variance in (0.1, 0.02):
            density = torch.distributions.Normal(means, variance**0.5).log_prob(a).sum(-1)
            wanted.append((density + prior).logsumexp(0).mean().item())
    assert behaviour.log_likelihood(net, s, a, (0.1, 0.02), M=20_000) == pytest.approx(wanted, abs=0.02)


def test_regulariser_and_likelihood_of_a_model_without_latents():
    """A decoder that is always 0: a Gaussian, whose squared distance is all that differs."""
    net, s = behaviour.taf_dt.CVAE(3, 2, 8), torch.randn(5, 3)
    for parameter in [*net.decoder[-1].parameters(), *net.encoder[-1].parameters()]:
        parameter.data.zero_()
    args = runs.compose(behaviour.taf_dt.Args, variance=0.1)
    zero, one = behaviour.regularisers(net, s, [torch.zeros(5, 2), torch.ones(5, 2)], args)
    assert zero == pytest.approx(np.log(2 * np.pi * 0.1), abs=1e-5)
    assert one - zero == pytest.approx(2 / (2 * 0.1), abs=1e-4)
    assert behaviour.log_likelihood(net, s, torch.ones(5, 2), (0.1,)) == pytest.approx([-one], abs=1e-4)
    assert behaviour.gaussian(1.0, 2, 0.1) == pytest.approx(-one, abs=1e-4)


def test_reach_compares_runs_that_differ_in_one_thing():
    rng = np.random.default_rng(0)
    actions, advantages = rng.standard_normal((30, 2)), rng.standard_normal(30)

    def run(seed, filter, task="a", off=0.0, sign=1.0):
        settings = {"seed": seed, "filter": filter, "source": bool(filter)}
        return reach.Learnt(task, settings, sign * advantages, actions + off, 0.5)

    found = reach.compare(
        [
            run(1, "both"),
            run(2, "both", off=0.1),  # another seed: 0.1 / 0.5 apart
            run(1, "none", off=0.3, sign=-1.0),  # another filter: the opposite advantages
            run(1, "", off=1.0),  # no source: compared with both filters, and with no other
            run(1, "both", task="b"),
        ]
    )
    assert found.keys() == {("a", "seed"), ("a", "filter"), ("a", "source")}
    np.testing.assert_allclose(found["a", "seed"], [[1.0, 0.2]])
    np.testing.assert_allclose(found["a", "filter"], [[-1.0, 0.6]])
    np.testing.assert_allclose(found["a", "source"], [[1.0, 2.0]])
    assert "| a | 1.00 | -1.00 | 1.00 | 0.20 | 0.60 | 2.00 |" in reach.table(found)


def test_an_older_result_gets_its_hash_if_it_is_consistent(tmp_path):
    new = read_result(RUNS[0])
    (tmp_path / "result.json").write_text(json.dumps(new))  # the older form: with summaries, and without a hash
    assert (seal.seal(tmp_path), seal.seal(tmp_path)) == (1, 0)
    assert (tmp_path / "result.json").read_bytes() == RUNS[0].read_bytes()
    new["summaries"]["final"]["score"] += 1
    (tmp_path / "result.json").write_text(json.dumps(new))
    with pytest.raises(UserError, match="not those of its evaluations"):
        seal.seal(tmp_path)


def test_generated_pages_are_not_committed():
    """The report and docs/build.py make them; what a README shows is a PNG."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a checkout that git knows")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    assert files
    assert not [name for name in files if Path(name).suffix in (".html", ".svg", ".tex")]
    ignored = ["report.html", "published/report.html", "published/tables/x.md", "figures/x.svg"]
    command = ["git", "check-ignore", *(f"results/{name}" for name in ignored)]
    assert len(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()) == len(ignored)


def test_page_of_the_source_is_that_of_its_runs():
    page = (ROOT / "results" / "recipe" / "source.md").read_text()
    assert source.filled(page) == page, "run python -m studies.source"
    assert len(set(source.TASKS)) == 12
    times = [{kinds.count(kind) for kind in kinds} for kinds in zip(*source.TASKS, strict=True)]
    assert times == [{3}, {4}, {4}]  # robots, shifts, qualities
    assert {(shift, quality) for _, shift, quality in source.TASKS} == set(
        itertools.product(source.SHIFTS, source.TARGETS)
    )


def test_what_the_source_adds_and_what_foretells_it(tmp_path):
    """Three tasks; the gain falls with the gate's radius and rises with the transport cost."""
    runs = []
    for i, (env, shift, target) in enumerate(source.TASKS[:3]):
        for changed, score in (
            ({}, 50.0),
            ({"beta": 0.0}, 40.0 + 5 * i),
            ({"filter": "ot"}, 30.0),
            ({"filter": "mmd"}, 20.0),
        ):
            args = confirm.RECIPES["first"] | changed
            raw = confirmed((env, shift, "medium", target), 1, score, **args)
            runs.append(raw | {"report": {"delta_m": float(i), "delta_w_plan": -float(i)}})
    runs.append(confirmed((*source.TASKS[0][:2], "medium", source.TASKS[0][2]), 1, 9.0, "bc"))  # another method
    found, signs = source.scores(runs)
    assert list(source.gains(found).values()) == [10, 5, 0]
    assert source.correlations(found, signs)["delta_m"][0] == pytest.approx(-1)
    assert source.correlations(found, signs)["delta_w_plan"][0] == pytest.approx(1)
    last = [cell.strip() for cell in source.table(found, signs).splitlines()[-1].split("|")[1:-1]]
    assert last[:5] == ["mean of 3 tasks", "50.0", "45.0", "30.0", "20.0"]
    figure = source.figure(found, signs)
    assert len(figure.axes[0].texts) == 3
    figure.savefig(tmp_path / "source.png")
    with pytest.raises(AssertionError, match="two runs of no source"):
        source.scores(runs + runs[1:2])


def test_page_of_the_precisions_is_that_of_its_runs():
    page = (ROOT / "results" / "precision.md").read_text()
    assert precision.filled(page) == page, "run python -m studies.precision"


def test_precisions_are_compared_on_common_seeds():
    def run(seed, name, score, **changed):
        raw = confirmed(("ant", "kinematic", "medium", "medium"), seed, score, lr=2e-3)
        return raw | {"precision": name, "changed": {"precision": name} | changed}

    runs = [
        run(1, "fp32", 10.0),
        run(2, "fp32", 20.0),
        run(3, "fp32", 90.0),
        run(1, "bf16", 13.0),
        run(2, "bf16", 18.0),
    ]
    runs.append(run(1, "bf16", 99.0, alpha=1.0))  # another setting
    row = precision.table(precision.scores(runs)).splitlines()[-1]
    assert row == "| ant kinematic medium | 10.0, 20.0 | 13.0, 18.0 | +0.5 |"
    with pytest.raises(AssertionError, match="two runs of"):
        precision.scores(runs + runs[:1])


def test_what_a_filter_adds_is_the_difference_of_means_with_welch_s_error():
    task = next(iter(law.TASKS))
    scores = {"both": [3.0, 5.0], "mmd": [4.0, 8.0], "ot": [1.0, 2.0], "none": [0.0, 1.0]}
    found = {(task, kind, True): dict(enumerate(values, 1)) for kind, values in scores.items()}
    gated, free = [3.0, 5.0, 4.0, 8.0], [1.0, 2.0, 0.0, 1.0]
    change, error = law.difference(found, task, True, *law.EFFECTS["gate"])
    assert change == pytest.approx(4.0)
    t, _ = scipy.stats.ttest_ind(gated, free, equal_var=False)
    assert change / error == pytest.approx(t)
    assert math.isnan(law.difference(found, task, False, *law.EFFECTS["gate"])[0])  # not run
    assert "| +4.0 ± 1.2 |" in law.effects(found)
