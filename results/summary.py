"""The table of results/README.md: python results/summary.py, after the runs of results/commands.txt.

Final score of every run (mean of the last three evaluations in brackets), one row a task and seed, beside the paper's
cell for TAF-DT and the target data's own mean.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import report  # noqa: E402
from dynashift.files import atomic  # noqa: E402

COLUMNS = {  # name -> method, preset, what else was changed
    "TAF-DT, paper": ("taf_dt", "paper", {}),
    "TAF-DT, released": ("taf_dt", "released", {}),
    "TAF-DT, target only": ("taf_dt", "paper", {"beta": 0.0}),
    "BC": ("bc", "paper", {}),
    "IQL": ("iql", "paper", {}),
    "OTDF": ("otdf", "paper", {}),
    "QT": ("qt", "paper", {}),
    "DT": ("dt", "paper", {}),
}
BUDGET = ("source_size", "updates", "label_updates")  # what is the same for all tasks, and said on the page
MARK = "<!-- table -->"


def table(root: Path) -> str:
    cells, data = {}, {}
    for path in sorted(root.rglob("result.json")):
        raw = json.loads(path.read_bytes())
        args = raw["args"]
        changed = {k: v for k, v in raw["changed"].items() if k not in BUDGET}
        key = (raw["method"], args.get("preset", "paper"), changed)
        name = next((name for name, column in COLUMNS.items() if column == key), None)
        if name:
            task = (args["env"], args["shift"])
            cells[task, args["seed"], name] = raw["summaries"]
            data[task] = raw["data"]["target"]["score"]
    head = ["medium to medium", "seed", "paper", "target data", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, seed in dict.fromkeys((task, seed) for task, seed, _ in sorted(cells, key=lambda c: (c[1], c[0]))):
        paper = report.MAIN[(*task, "medium", "medium")]
        row = [" ".join(task), str(seed), f"{paper['scores'][report.METHODS.index('taf_dt')]:.1f}", f"{data[task]:.1f}"]
        for name in COLUMNS:
            found = cells.get((task, seed, name))
            final = found and f"{found['final']['score']:.1f} ({found['mean_of_last_three']['score']:.1f})"
            row.append(final or "")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(MARK)
    after = rest[rest.index("\n\n", 1) :] if "\n\n" in rest[1:] else "\n"
    with atomic(page) as temporary:
        temporary.write_text(f"{before}{MARK}\n{table(HERE / 'runs')}{after}")
