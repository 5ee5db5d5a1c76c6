"""python -m dynashift.policies: bring the table in README.md up to date."""

from dynashift.errors import one_line_errors
from dynashift.policies import FOLDER, meta
from dynashift.tasks import ROBOTS, SHIFTS


def table() -> str:
    """The shipped policies as Markdown; README.md in this folder shows them."""
    head = "robot | shift | level | return, mean | std | normalised score | training steps"
    lines = [f"| {head} | seed | noise |", "|---" * 9 + "|"]
    order = {"env": list(ROBOTS), "shift": list(SHIFTS), "level": ["expert", "medium"]}

    def rank(known: list, word: str):
        return (known.index(word), "") if word in known else (len(known), word)

    about = [meta(path) for path in FOLDER.glob("*.npz")]
    about.sort(key=lambda m: [rank(known, m[key]) for key, known in order.items()])
    for m in about:
        score = f"{m['score']:.1f}" + " (below 85)" * (m["level"] == "expert" and m["score"] < 85)
        cells = [m["env"], m["shift"], m["level"]]
        cells += [f"{m['return_mean']:.0f}", f"{m['return_std']:.0f}", score]
        cells += [m["training_steps"], m["seed"], m["noise"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        readme = FOLDER / "README.md"
        text, mark = readme.read_text(), "<!-- table -->\n"
        readme.write_text(text[: text.index(mark)] + mark + table() + "\n")
