"""The tables of docs/equations.md and docs/differences.md, from the tags in the code: python docs/tables.py [--check]

`# Eq. (16) [mmd_cost]` (likewise Algorithm, Prop., Theorem, Lemma, Corollary, Definition, Assumption) names an item of
docs/equations.json, `# DIFF 3` a row of docs/differences.json. tests/test_docs.py checks both directions.
"""

import ast
import json
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TAGGED = ["taf_preprocess.py", "taf_dt.py", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("dynashift/*.py"))]
TAGGED += ["baselines/taf_dt_released.py", "tests/test_theory.py"]
KINDS = r"Algorithm \d|(?:Eq\. \(\d+\))|Prop\.|Theorem|Lemma|Corollary|Definition|Assumption"
ITEM, DIFF = re.compile(rf"({KINDS}) \[([^\]]+)\]"), re.compile(r"# DIFF (\d+(?:, \d+)*)")


class Place(NamedTuple):
    file: str
    function: str
    first: int
    last: int


def read(name: str):
    return json.loads((ROOT / "docs" / name).read_text())


def place(file: str, line: int, lines: list[str], nodes: list[ast.AST]) -> Place:
    """What a tag on this line speaks of: the statement below it, that on its own line, or all of the function."""
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    outer = [n for n in functions if n.lineno <= line <= n.end_lineno]
    if lines[line - 1].lstrip().startswith("#"):
        below = min((n for n in nodes if n.lineno > line), key=lambda n: (n.lineno, -n.end_lineno), default=None)
        if below in functions and not lines[line - 1].startswith("    "):
            return Place(file, below.name, below.lineno, below.end_lineno)
        if below is None or (outer and below.lineno > outer[-1].end_lineno):
            below = ast.Pass(lineno=line, end_lineno=line)
        # all that stands at this depth or deeper, up to a blank line or the next comment
        first = last = below.lineno
        depth = len(lines[first - 1]) - len(lines[first - 1].lstrip())
        while last < len(lines) and re.match(rf" {{{depth}}} *[^\s#]", lines[last]):
            last += 1
    elif outer and lines[line - 1].lstrip().startswith(('"', "'")):
        first, last = outer[-1].lineno, outer[-1].end_lineno
    else:
        first = last = line
    return Place(file, ".".join(n.name for n in outer), first, max(first, last))


@cache
def tags() -> tuple[dict, dict]:
    """(item, label) -> places, and number of a row of differences -> places."""
    items, rows = defaultdict(list), defaultdict(list)
    for file in TAGGED:
        text = (ROOT / file).read_text()
        lines = text.splitlines()
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt | ast.expr | ast.keyword)]
        for i, line in enumerate(lines, 1):
            for key in ITEM.findall(line):
                items[key].append(place(file, i, lines, nodes))
            for numbers in DIFF.findall(line):
                for n in numbers.split(", "):
                    rows[int(n)].append(place(file, i, lines, nodes))
    return items, rows


def link(p: Place, text: str) -> str:
    return f"[{text}](../{p.file}#L{p.first}-L{p.last})"


def code(places: list[Place]) -> str:
    return "<br>".join(link(p, f"`{p.function}`" if p.function else p.file) for p in dict.fromkeys(places)) or "none"


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines)


def equations() -> str:
    rows, found = [], tags()[0]
    for item in read("equations.json"):
        by_file = defaultdict(list)
        for p in dict.fromkeys(found.get((item["item"], item["label"]), [])):
            by_file[p.file].append(p)
        label = item["label"] if item["label"].startswith("unlabelled") else f"`{item['label']}`"
        for i, (file, places) in enumerate(by_file.items()):
            names = [f"`{p.function}`" for p in places]
            lines = [link(p, f"{p.first}-{p.last}" if p.last > p.first else p.first) for p in places]
            head = [f"{item['item']} {label}", item["what"]] if i == 0 else ["", ""]
            rows.append([*head, f"[{file}](../{file})", "<br>".join(names), "<br>".join(lines)])
    return table(["paper", "what it is", "file", "function", "lines"], rows)


def differences() -> tuple[str, str]:
    data, found = read("differences.json"), tags()[1]
    shown = {"rows": "n point paper released here reason measured", "theory": "n item printed true example"}
    heads = {
        "rows": ["", "point", "paper", "released code", "here", "reason", "measured effect", "code"],
        "theory": ["", "item", "as printed", "what is true", "smallest counterexample", "test"],
    }
    for part, keys in shown.items():
        rows = [[r[k] for k in keys.split()] + [code(found.get(r["n"], []))] for r in data[part]]
        yield table(heads[part], rows)


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    rows, theory = differences()
    parts = {"equations.md": {"equations": equations()}, "differences.md": {"differences": rows, "theory": theory}}
    texts = {}
    for name, tables in parts.items():
        text = (ROOT / "docs" / name).read_text()
        for mark, new in tables.items():
            begin, end = f"<!-- {mark} -->\n", f"\n<!-- end {mark} -->"
            before, rest = text.split(begin)
            text = before + begin + new + end + rest.split(end)[1]
        texts[ROOT / "docs" / name] = text
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path.name} is stale: run python docs/tables.py")
