"""Ablations, what the paper does not have (interquartile means, probabilities, gains), and
times."""

import json
from collections import defaultdict

import numpy as np

from experiments.grid import ABLATIONS, Ablation
from experiments.methods import CLONING, METHODS, OURS, label_of
from experiments.paper import PAPER, SHIFTS, as_task
from experiments.report.parts import Cell, Row, Table, bold_best, cell, footnotes, task_label
from experiments.report.reading import (
    Archive,
    Cells,
    Run,
    common_tasks,
    finals,
    is_number,
    tasks_of,
)
from experiments.report.statistics import beats, interval, iqm, resample


def last_three(runs: list[Run], seeds: int, paper) -> Cell:
    """Over the last three checkpoints of the lowest seed; or their means, over the lowest seeds."""
    mean, std = paper or (None, None)
    scores = [[e["score"] for e in run.evaluations][-3:] or [run.final] for run in runs[:seeds]]
    if seeds > 1:
        return cell([np.mean(s) for s in scores], mean, std)
    remark = f"seed {runs[0].seed}" if runs and runs[0].seed != 1 else ""
    return cell(scores[0] if scores else (), mean, std, remark=remark)


def ablation_caption(ablation: Ablation) -> str:
    one = (
        "Mean ± sample standard deviation (ddof 1) over the last three checkpoints of one seed, "
        "the lowest that was run (1 if none is named), with the number of checkpoints in "
        "brackets. This ± says nothing about other seeds."
    )
    many = (
        "Mean over the last three checkpoints of a seed, then mean ± sample standard deviation "
        f"(ddof 1) over the lowest {ablation.seeds} seeds, with the number of seeds in brackets."
    )
    default = ablation.label(ablation.default)
    caption = f"TAF-DT, with everything else at its default. {many if ablation.seeds > 1 else one}"
    return f"{caption} Runs of the main tables are under their own value, by default {default}."


def ablation_table(cells: Cells, name: str) -> Table:
    ablation = ABLATIONS[name]
    factor, found = ablation.factor, defaultdict(list)  # (value, task) -> runs
    for (method, varied, task), runs in cells.items():
        if method == OURS and (varied is None or varied[0] == factor):
            value = runs[0].values[factor] if varied is None else varied[1]
            found[value, task] += runs
    # Values and tasks that the paper does not have get columns and rows, too.
    own = {task for _, varied, task in cells if varied and varied[0] == factor}
    tasks = [*ablation.rows, *sorted(own - set(ablation.rows))]
    values = list(dict.fromkeys([*ablation.values, *(v for v, t in found if t in tasks)]))
    values = sorted(values) if all(map(is_number, values)) else values
    rows = []
    for task in tasks:
        paper = ablation.paper(task)
        row = [last_three(found.get((v, task), []), ablation.seeds, paper.get(v)) for v in values]
        bold_best(row)
        rows.append(Row(task_label(task, True), row, " ".join(task)))
    return footnotes(
        Table(
            name=name,
            title=ablation.title,
            caption=ablation_caption(ablation),
            head="task",
            columns=[ablation.label(value) for value in values],
            rows=rows,
            column_keys=[json.dumps(value).strip('"') for value in values],
            values=values,
        )
    )


# ------------------------------------------------------------------------------------- aggregates

ENDS = (
    "with the 95 % percentile interval of a stratified bootstrap (2,000 draws of runs within "
    "tasks; a task with one seed adds no spread), and the number of tasks in brackets."
)


def methods_run(cells: Cells) -> list[str]:
    return [method for method in METHODS if tasks_of(cells, method)]


def shifts_run(cells: Cells) -> list[str]:
    """The shifts that were run, and "all" where there are several."""
    found = [s for s in SHIFTS if any(tasks_of(cells, m, s) for m in methods_run(cells))]
    return [*found, "all"] if len(found) > 1 else found


def iqm_table(cells: Cells) -> Table:
    methods, shifts = methods_run(cells), shifts_run(cells)

    def one(method: str, shift: str) -> Cell:
        run = [m for m in methods if tasks_of(cells, m, shift)]
        tasks = common_tasks(cells, run, tasks_of(cells, method, shift))
        groups = [finals(cells, method, task) for task in tasks]
        if not groups:
            return cell()
        low, high = interval(iqm(np.concatenate(resample(groups), 1)), groups)
        return cell([iqm(np.concatenate(groups))], n=len(groups), low=low, high=high)

    text = (
        "Mean of the middle half of all final scores on the tasks that all methods have which were "
        f"run, {ENDS}"
    )
    rows = [Row(label_of(m), [one(m, s) for s in shifts]) for m in methods]
    return Table("iqm", "Interquartile mean", text, head="method", columns=shifts, rows=rows)


def improvement_table(cells: Cells) -> Table | None:
    others = [m for m in methods_run(cells) if m != OURS] if tasks_of(cells, OURS) else []
    if not others:
        return None

    def one(method: str, shift: str) -> Cell:
        tasks = common_tasks(cells, [OURS, method], tasks_of(cells, OURS, shift))
        if not tasks:
            return cell()
        x, y = ([finals(cells, m, task) for task in tasks] for m in (OURS, method))
        pairs = zip(resample(x), resample(y, seed=1), strict=True)
        low, high = interval(np.mean([beats(a, b) for a, b in pairs], 0), x + y)
        mean = np.mean([beats(a, b) for a, b in zip(x, y, strict=True)])
        return cell([mean], n=len(tasks), digits=2, low=low, high=high)

    shifts = shifts_run(cells)
    text = (
        "Probability that a run of TAF-DT scores higher than a run of the other method on the same "
        f"task, where ties count half, averaged over the tasks that both have, {ENDS}"
    )
    rows = [Row(label_of(m), [one(m, s) for s in shifts]) for m in others]
    title = "Probability that TAF-DT improves"
    return Table("improvement", title, text, head="over", columns=shifts, rows=rows)


def gains_table(cells: Cells) -> Table:
    """Over the target data's own score, and over each method that clones the target data."""

    def baseline(method: str, task, over: str):
        if over in CLONING:
            return finals(cells, over, task)
        scores = [run.target_score for run in cells[method, None, task]]
        return [score for score in scores if score is not None][:1]

    def one(method: str, shift: str, over: str) -> Cell:
        run = [m for m in methods_run(cells) if tasks_of(cells, m, shift)]
        gains = []
        for task in common_tasks(cells, run, tasks_of(cells, method, shift)):
            known = baseline(method, task, over)
            if len(known):
                gains.append(finals(cells, method, task).mean() - np.mean(known))
        return cell([np.mean(gains)], n=len(gains)) if gains and method != over else cell()

    text = (
        "Mean final score minus the mean score of the target data's own episodes, and minus that "
        "of behaviour cloning on the target data alone (whose runs serve every source), averaged "
        "over the tasks that all methods have which were run, with their number in brackets."
    )
    kinds = [(over, shift) for over in ("data", *CLONING) for shift in shifts_run(cells)]
    names = {"data": "data"} | {m: label_of(m) for m in CLONING}
    columns = [f"over {names[over]}, {shift}" for over, shift in kinds]
    rows = [Row(label_of(m), [one(m, s, over) for over, s in kinds]) for m in methods_run(cells)]
    title = "Gain over the target data and over behaviour cloning"
    return Table("gains", title, text, head="method", columns=columns, rows=rows)


# ------------------------------------------------------------------------------------------ times


def peak(stage: dict[str, float]) -> float:
    return stage.get("peak_cuda_memory_mb") or stage.get("peak_memory_mb") or 0.0


def times_of(run: Run, archives: dict[str, Archive]) -> list[float | None]:
    """The paper's columns: memory and seconds of the preprocessing, memory of the training, seconds
    of the command network, of the CVAE, and of the whole training."""

    def is_before(name: str) -> bool:
        return name in ("mmd", "ot") or name.startswith("preprocess")

    before = {name: stage for name, stage in run.stages.items() if is_before(name)}
    after = {name: stage for name, stage in run.stages.items() if not is_before(name)}
    if not before and run.preprocess in archives:
        before = archives[run.preprocess].stages

    def memory(stages) -> float | None:
        return max(map(peak, stages.values()), default=None)

    def seconds(stages, word: str = "") -> float | None:
        found = [stage["seconds"] for name, stage in stages.items() if word in name]
        return sum(found) if found else None

    training = [seconds(after, "command"), seconds(after, "vae"), seconds(after)]
    return [memory(before), seconds(before), memory(after), *training]


def times_table(cells: Cells, archives: dict[str, Archive]) -> Table:
    paper, rows, devices = PAPER["times"], [], set()
    for key, printed in paper["rows"].items():
        runs = cells.get((OURS, None, as_task(key)), ())
        devices |= {run.device for run in runs}
        found = [times_of(run, archives) for run in runs]
        columns = [
            [times[i] for times in found if times[i] is not None] for i in range(len(printed))
        ]
        row = [cell(c, p, digits=0) for c, p in zip(columns, printed, strict=True)]
        rows.append(Row(task_label(as_task(key), True), row))
    caption = (
        f"TAF-DT on {'; '.join(sorted(devices))}: mean ± sample standard deviation (ddof 1) over "
        "seeds, with their number in brackets. Memory is that of the card on a GPU, otherwise "
        "that of the process."
    )
    theirs = [f"The paper's numbers are from {paper['hardware']}."]
    return footnotes(
        Table(
            name="times",
            title="Training time",
            caption=caption,
            head="task",
            columns=paper["columns"],
            rows=rows,
            about=theirs,
        )
    )
