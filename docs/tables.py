"""Makes the tables of docs/equations.md and docs/differences.md: python docs/tables.py [--check]

They come from the tags in the code. `# Eq. (16) [mmd_cost]` (likewise Algorithm, Prop., Theorem,
Lemma, Corollary, Definition and Assumption) names an item of docs/equations.json, and `# DIFF 3` a
row of docs/differences.json. tests/test_docs.py checks both directions.
"""

import ast
import json
import re
import sys
import textwrap
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TAGGED = ["taf_preprocess.py", "taf_dt.py"]
for folder in ("dynashift", "studies"):
    TAGGED += sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(f"{folder}/*.py"))
TAGGED += ["baselines/taf_dt_released.py", "tests/test_theory.py"]
KINDS = r"Algorithm \d|(?:Eq\. \(\d+\))|Prop\.|Theorem|Lemma|Corollary|Definition|Assumption"
ITEM, DIFF = re.compile(rf"({KINDS}) \[([^\]]+)\]"), re.compile(r"# DIFF (\d+(?:, \d+)*)")


class Place(NamedTuple):
    """Where a tag is. It has no line number, so that inserting a line elsewhere changes nothing."""

    file: str
    function: str  # qualified, as in Fusion.risk; empty at the top level


def read(name: str):
    return json.loads((ROOT / "docs" / name).read_text())


def owner(line: int, text: str, tree: ast.Module, named: list[ast.AST]) -> str:
    """The function that a tag on this line is about.

    It is the one below a comment that is not indented, otherwise the one that contains the line.
    named: the functions and classes of the tree, those that contain others before those.
    """
    if text.startswith("#"):
        below = next((node for node in tree.body if node.lineno > line), None)
        return below.name if isinstance(below, ast.FunctionDef | ast.ClassDef) else ""
    return ".".join(node.name for node in named if node.lineno <= line <= node.end_lineno)


@cache
def tags() -> tuple[dict, dict]:
    """(item, label) -> places, and number of a row of differences -> places."""
    items, rows = defaultdict(list), defaultdict(list)
    for file in TAGGED:
        text = (ROOT / file).read_text()
        if not (ITEM.search(text) or DIFF.search(text)):
            continue
        tree = ast.parse(text)
        named = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        for i, line in enumerate(text.splitlines(), 1):
            for key in ITEM.findall(line):
                items[key].append(Place(file, owner(i, line, tree, named)))
            for numbers in DIFF.findall(line):
                for n in numbers.split(", "):
                    rows[int(n)].append(Place(file, owner(i, line, tree, named)))
    return items, rows


def code(places: list[Place], between: str = "<br>") -> str:
    names = [f"`{p.function}`" if p.function else p.file for p in dict.fromkeys(places)]
    links = [f"[{n}](../{p.file})" for n, p in zip(names, dict.fromkeys(places), strict=True)]
    return between.join(links) or "none"


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(x).replace("|", "\\|") for x in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def equations() -> str:
    rows, found = [], tags()[0]
    for item in read("equations.json"):
        by_file = defaultdict(list)
        for p in dict.fromkeys(found.get((item["item"], item["label"]), [])):
            by_file[p.file] += [f"`{p.function}`"] * bool(p.function)
        label = item["label"] if item["label"].startswith("unlabelled") else f"`{item['label']}`"
        for i, (file, names) in enumerate(by_file.items()):
            head = [f"{item['item']} {label}", item["what"]] if i == 0 else ["", ""]
            rows.append([*head, f"[{file}](../{file})", "<br>".join(names)])
    return table(["paper", "what it is", "file", "function"], rows)


READINGS = {"paper": "paper", "released": "released code", "here": "here"}
LONGEST = 120  # characters of a cell; the whole text is in the row's section


def shortened(text: str) -> str:
    """The first words of a text, with all of its `code` or none."""
    if len(text) <= LONGEST:
        return text
    kept = text[:LONGEST].rpartition(" ")[0]
    if kept.count("`") % 2:
        kept = kept.rpartition("`")[0]
    return f"{kept.rstrip(' ,;:(')} ..."


def differences() -> str:
    rows = [
        [f"[{r['n']}](#{r['n']})", r["point"], *(shortened(r[key]) for key in READINGS)]
        for r in read("differences.json")["rows"]
    ]
    return table(["", "point", *READINGS.values()], rows)


def reasons() -> str:
    """A section for each row: what its cells leave out, the reason, the measured effect, code."""
    sections = []
    for r in read("differences.json")["rows"]:
        cut = {name: r[key] for key, name in READINGS.items() if shortened(r[key]) != r[key]}
        parts = cut | {"reason": r["reason"], "measured effect": r["measured"]}
        parts["code"] = code(tags()[1].get(r["n"], []), ", ")
        lines = [f"*{name}*: {text}" for name, text in parts.items() if text]
        lines = [f"**{r['point']}**", *lines]
        options = {"break_long_words": False, "break_on_hyphens": False}
        filled = [textwrap.fill(line, 140, **options) for line in lines]
        sections.append("\n\n".join([f"### {r['n']}", *filled]))
    return "\n\n".join(sections)


def theory() -> str:
    rows, keys = read("differences.json")["theory"], ("n", "item", "printed", "true", "example")
    head = ["", "item", "as printed", "what is true", "smallest counterexample", "test"]
    return table(head, [[*(r[k] for k in keys), code(tags()[1].get(r["n"], []))] for r in rows])


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    parts = {
        "equations.md": {"equations": equations()},
        "differences.md": {
            "differences": differences(),
            "reasons": reasons(),
            "theory": theory(),
        },
    }
    texts = {}
    for name, tables in parts.items():
        text = (ROOT / "docs" / name).read_text()
        for mark, new in tables.items():
            begin, end = f"<!-- {mark} -->\n", f"\n<!-- end {mark} -->"
            before, rest = text.split(begin)
            text = before + begin + new + end + rest.split(end)[1]
        texts[ROOT / "docs" / name] = text
    return texts


def main(check: bool = False) -> None:
    """check: change nothing, and fail if a page is stale"""
    for path, text in pages().items():
        if not check:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path.name} is stale: run python docs/tables.py")


if __name__ == "__main__":
    import tyro  # here, because the tests and docs/build.py import this module without it

    sys.path.insert(0, str(ROOT))
    from dynashift.errors import one_line_errors

    with one_line_errors():
        tyro.cli(main, description=__doc__)
