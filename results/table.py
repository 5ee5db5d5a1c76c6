"""Tables of results/README.md, from the runs beside it: python results/table.py"""

import json
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import report  # noqa: E402
from dynashift.files import atomic  # noqa: E402

COLUMNS = {  # heading -> method, preset, beta 0
    "TAF-DT": ("taf_dt", "paper", False),
    "TAF-DT, target only": ("taf_dt", "paper", True),
    "TAF-DT, released": ("taf_dt", "released", False),
    "BC": ("bc", None, False),
    "IQL": ("iql", None, False),
    "OTDF": ("otdf", None, False),
    "QT": ("qt", None, False),
    "DT": ("dt", None, False),
}


def column(raw: dict) -> str | None:
    args = raw["args"]
    key = (raw["method"], args.get("preset"), raw["method"] == "taf_dt" and args["beta"] == 0)
    return next((name for name, value in COLUMNS.items() if value == key), None)


def scores(runs: list[dict]) -> str:
    """A row a task, a column a method: final / mean of the last three, for every seed, and the paper's cell."""
    found, own = defaultdict(dict), {}  # (task, column) -> seed -> scores; task -> the target data's score
    for raw in runs:
        args = raw["args"]
        task, seed, name = (args["env"], args["shift"]), args["seed"], column(raw)
        assert name, f"{raw['method']} with this preset and beta has no column"
        assert Path(args["source"]).stem == Path(args["target"]).stem == "medium"
        assert seed not in found[task, name], f"{name} on {' '.join(task)} has two runs of seed {seed}"
        final, three = (raw["summaries"][rule]["score"] for rule in ("final", "mean_of_last_three"))
        found[task, name][seed] = f"{final:.1f} / {three:.1f}"
        own[task] = raw["data"]["target"]["score"]
    lines = [f"| medium to medium | target data | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for task in sorted(own):
        paper = dict(zip(report.METHODS, report.MAIN[(*task, "medium", "medium")]["scores"], strict=True))
        cells = []
        for name, (method, _, target_only) in COLUMNS.items():
            ours = ", ".join(score for _, score in sorted(found[task, name].items()))
            cells.append(ours + (f" (*{paper[method]:.1f}*)" if method in paper and not target_only else ""))
        lines.append(f"| {' '.join(task)} | {own[task]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def checks(runs: list[dict]) -> str:
    """What gate, weights, command and episodes of the runs of TAF-DT look like."""
    head = ["task", "TAF-DT", "seed", "k(S, T)", "corr(d, k(S, S))", "clipped", "effective share", "command"]
    head += ["episode length", "best", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for raw in runs:
        if raw["method"] != "taf_dt":
            continue
        args, gate, last, summaries = raw["args"], raw["report"], raw["evaluations"][-1], raw["summaries"]
        cells = [f"{args['env']} {args['shift']}", column(raw).removeprefix("TAF-DT, "), str(args["seed"])]
        if "mean_cross_kernel" in gate:
            cells += [f"{gate['mean_cross_kernel']:.4f}", f"{gate['corr_score_self_term']:.2f}"]
            cells += [f"{gate['clipped']:.1%}", f"{gate['effective_sample_size'] / gate['retained']:.2f}"]
        else:  # target only: nothing to gate
            cells += [""] * 4
        cells += [f"{last['command']:.2f}", f"{sum(last['lengths']) / len(last['lengths']):.0f}"]
        cells += [f"{summaries['best']['score']:.1f}"]
        cells += [f"{sum(stage['seconds'] for stage in raw['stages'].values()) / 60:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def trials(runs: list[dict], others: list[dict]) -> str:
    """Runs with something changed, each beside the run of the table above that it differs from."""
    lines = ["| task | seed | changed | score | unchanged |", "|---" * 5 + "|"]
    for raw in others:
        key = [raw["args"][name] for name in ("env", "shift", "seed")]
        (base,) = (x for x in runs if column(x) == "TAF-DT" and [x["args"][k] for k in ("env", "shift", "seed")] == key)
        changed = {k.replace("_", "-"): v for k, v in raw["changed"].items() if base["changed"].get(k) != v}
        flags = [f"`--no-{name}`" if value is False else f"`--{name} {value}`" for name, value in changed.items()]
        score = [f"{x['summaries'][r]['score']:.1f}" for x in (raw, base) for r in ("final", "mean_of_last_three")]
        cells = [f"{key[0]} {key[1]}", str(key[2]), ", ".join(flags), " / ".join(score[:2]), " / ".join(score[2:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: python results/table.py -->\n", f"\n<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def results(folder: str) -> list[dict]:
    return [json.loads(path.read_bytes()) for path in sorted((HERE / "published" / folder).rglob("result.json"))]


def filled(page: str) -> str:
    runs = results("runs")
    tables = {"scores": scores(runs), "trials": trials(runs, results("checks")), "checks": checks(runs)}
    for name, table in tables.items():
        page = fill(page, name, table)
    return page


if __name__ == "__main__":
    page = HERE / "README.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))
