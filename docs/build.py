"""Builds annotated pages: python docs/build.py [folder] (pip install -r requirements-docs.txt)

Each script becomes one page, with its comments and docstrings on the left and its code on the
right. For each tag `# Eq. (n) [label]` it shows the paper's equation as MathML, which comes from
docs/equations.json. The pages work offline and without JavaScript.
"""

import ast
import html
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import tables
import tyro
from blocks import Block, blocks

try:
    from latex2mathml.converter import convert
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
except ImportError:
    sys.exit("error: docs/build.py needs: pip install -r requirements-docs.txt")

ROOT = tables.ROOT
sys.path.insert(0, str(ROOT))
from dynashift.errors import one_line_errors  # noqa: E402
from dynashift.files import check_folder  # noqa: E402

SCRIPTS = ["taf_preprocess.py", "taf_dt.py"]
SCRIPTS += sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("baselines/*.py"))
BASELINES = [Path(file).stem for file in SCRIPTS if file.startswith("baselines")]
CSS = (ROOT / "docs" / "page.css").read_text()
TESTS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/test_*.py"))


class Site:
    def __init__(self):
        self.items = {(i["item"], i["label"]): i for i in tables.read("equations.json")}
        self.places, self.differences = tables.tags()
        tagged = {"dynashift/runs.py", "dynashift/run_record.py", "dynashift/windows.py"}
        for places in [*self.places.values(), *self.differences.values()]:
            tagged |= {place.file for place in places}
        self.files = list(dict.fromkeys([*SCRIPTS, *sorted(tagged - set(SCRIPTS)), *TESTS]))
        self.tests = self.mentions()

    def mentions(self) -> dict:
        """(module, function) -> (test file, test, line) of every test that calls it by name."""
        found = defaultdict(list)
        for file in TESTS:
            tree, aliases = ast.parse((ROOT / file).read_text()), {}
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for a in node.names:
                        aliases[a.asname or a.name] = a.name.rpartition(".")[2]
            functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
            for test in (n for n in functions if n.name.startswith("test_")):
                keys = set()
                for used in (n for n in ast.walk(test) if isinstance(n, ast.Attribute)):
                    owner = getattr(used.value, "id", "")
                    if owner in aliases:
                        keys.add((aliases[owner], used.attr))
                    # SCRIPTS["iql"].v_loss, or script.v_loss where script is an argument of the
                    # test, may be a function of any baseline.
                    elif isinstance(used.value, ast.Subscript) or owner == "script":
                        keys |= {(name, used.attr) for name in BASELINES if "value" in file}
                for key in sorted(keys):
                    found[key].append((file, test.name, test.lineno))
        return found

    def prose(self, text: str, ours: bool) -> str:
        out = []
        text = textwrap.dedent(indent_first(text)).strip("\n")
        text = re.sub(rf"\n(?=DIFF \d|(?:{tables.KINDS}) \[)", "\n\n", text)
        numbered = re.compile(r"\d+  \S(?!.*\S  )|   +\S(?!.*\S  )")  # a list without columns
        for part in re.split(r"\n\s*\n", text):
            lines = textwrap.dedent(part).split("\n")
            if all(numbered.match(line) for line in lines):
                entries = re.split(r"^\d+ +", "\n".join(lines), flags=re.M)[1:]
                items = [f"<li>{self.inline(entry, ours)}</li>" for entry in entries]
                out.append(f"<ol>{''.join(items)}</ol>")
            elif re.search(r"^ |\S  +\S", part, re.M):
                out.append(f"<pre>{self.inline(textwrap.dedent(part), ours)}</pre>")
            elif part.strip():
                out.append(f"<p>{self.inline(part, ours)}</p>")
        return "".join(out)

    def inline(self, text: str, ours: bool) -> str:
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
        text = re.sub(r"(https?://[^\s,;)]+)", r'<a href="\1">\1</a>', text)
        text = re.sub(r"(?:# )?DIFF (\d+)", r'<a href="differences.html#d\1">DIFF \1</a>', text)
        if ours:  # the baselines' equations are those of their own papers
            text = re.sub(r"Eq\. \((\d+)\)", r'<a href="index.html#eq-\1">Eq. (\1)</a>', text)
        return text

    def equation(self, key: tuple, here: str = "") -> str:
        item = self.items[key]
        places = [p for p in dict.fromkeys(self.places.get(key, [])) if p.file != here]
        links = ", ".join(map(place_link, places))
        math = ""
        if item["latex"]:
            math = f'<div class="math">{convert(item["latex"], display="block")}</div>'
        head = f'<a href="index.html#{anchor(key)}">{key[0]}</a> {html.escape(item["what"])}'
        head += f" · {links}" if links else ""
        return f'<div class="eq"><div class="head">{head}</div>{math}</div>'

    def side(self, block: Block, file: str) -> str:
        ours = not file.startswith("baselines")
        out = f'<div class="name"><code>{block.name}</code></div>' if block.name else ""
        out += self.prose(block.prose, ours)
        for key in dict.fromkeys(tables.ITEM.findall(block.prose + block.marks)):
            out += self.equation(key, file)
        tagged = tables.DIFF.findall(block.marks.replace(" DIFF", "# DIFF"))
        rows = [n for numbers in tagged for n in numbers.split(", ")]
        links = [f'<a href="differences.html#d{n}">DIFF {n}</a>' for n in rows]
        out += f"<p>{', '.join(links)}</p>" if links else ""
        if tests := self.tests.get((Path(file).stem, block.name)):
            links = [f'<a href="{page(f)}#L{line}">{name}</a>' for f, name, line in tests]
            items = "".join(f"<li>{link}</li>" for link in links)
            summary = f"<summary>tests ({len(tests)})</summary>"
            out += f'<details class="tests">{summary}<ul>{items}</ul></details>'
        return out

    def render(self, file: str) -> str:
        text = (ROOT / file).read_text()
        colored = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        code = dict(enumerate(colored.split("\n"), 1))
        intro, *rest = blocks(text)
        names = {b.name for b in rest if b.name}
        call = r'<span class="n">(\w+)</span>(?=<span class="p">\()'
        link = lambda m: f'<a href="#{m[1]}">{m[1]}</a>' if m[1] in names else m[0]  # noqa: E731
        body, toc = [], [["", "", []]]
        for block in rest:
            if block.section:
                toc.append([f"s{len(toc)}", block.section.split(", Eq.")[0], []])
                body.append(f'<h2 id="{toc[-1][0]}">{self.inline(block.section, True)}</h2>')
            if block.name:
                toc[-1][2].append(block.name)
            rows = []
            for i in block.lines:
                line = re.sub(call, link, code[i]) or " "
                rows.append(f'<div id="L{i}"><i>{i}</i><span class="t">{line}</span></div>')
            if rows or block.prose:
                at = f' id="{block.name}"' if block.name else ""
                left = f'<div class="prose">{self.side(block, file)}</div>'
                right = f'<div class="code">{"".join(rows)}</div>' if rows else "<div></div>"
                body.append(f'<div class="row"{at}>{left}{right}</div>')
        entries = []
        for at, title, functions in toc:
            inner = "".join(f'<li><a href="#{f}"><code>{f}</code></a></li>' for f in functions)
            head = f'<a href="#{at}">{html.escape(title)}</a>' if at else ""
            entries.append(f"<li>{head}<ul>{inner}</ul></li>" if head else inner)
        contents = '<details class="toc" open><summary>contents</summary>'
        contents += f"<ul>{''.join(entries)}</ul></details>"
        ours = not file.startswith("baselines")
        top = f'<h1>{file}</h1><div class="intro">{self.prose(intro.prose, ours)}</div>{contents}'
        return self.page(file, top + "".join(body))

    def page(self, title: str, body: str) -> str:
        light, dark = (
            re.sub(r"background[^;}]*;?", "", HtmlFormatter(style=s).get_style_defs(".code"))
            for s in STYLES
        )
        css = f"{CSS}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
        nav = {"all pages": "index.html"}
        nav |= {Path(file).stem: page(file) for file in SCRIPTS}
        nav |= {"differences": "differences.html"}
        here = Path(title).stem
        links = [f"<b>{t}</b>" if t == here else f'<a href="{h}">{t}</a>' for t, h in nav.items()]
        head = '<meta charset="utf-8">'
        head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
        head += f'<link rel="icon" href="data:,"><title>{title}</title><style>{css}</style>'
        body = f"<header>{''.join(links)}</header><main>{body}</main>"
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'

    def index(self) -> str:
        out = ["<h1>TAF-DT, annotated</h1>"]
        out.append("<p>Comments and typeset equations beside the code that they describe.</p>")
        others = [file for file in self.files if file not in SCRIPTS]
        for title, files in {"Scripts": SCRIPTS, "Others": others}.items():
            out.append(f"<h2>{title}</h2>")
            for file in files:
                about = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
                about = self.inline(about.split("\n\n")[0], False)
                out.append(f'<p><a href="{page(file)}">{file}</a> {about}</p>')
        what = "Where the paper, the released code and this code differ."
        out.append(f'<p><a href="differences.html">differences</a> {what}</p>')
        out.append("<h2>Items of the paper</h2>")
        out += [f'<div id="{anchor(key)}">{self.equation(key)}</div>' for key in self.items]
        return self.page("all pages", "".join(out))

    def differences_page(self) -> str:
        heads = {"paper": "paper", "released": "released code", "here": "here"}
        heads |= {"reason": "reason", "measured": "measured effect", "printed": "as printed"}
        heads |= {"true": "what is true", "example": "smallest counterexample"}
        theory = "Theory: statements that need more assumptions than they state"
        out = ["<h1>Differences</h1>"]
        for part, title in {"rows": "Choices", "theory": theory}.items():
            out.append(f"<h2>{title}</h2>")
            for row in tables.read("differences.json")[part]:
                places = dict.fromkeys(self.differences.get(row["n"], []))
                shown = [key for key in heads if row.get(key)]
                cells = {heads[key]: self.inline(row[key], True) for key in shown}
                cells["code"] = ", ".join(map(place_link, places)) or "none"
                dl = "".join(f"<dt>{name}</dt><dd>{cell}</dd>" for name, cell in cells.items())
                head = f"{row['n']}. {html.escape(row.get('point') or row['item'])}"
                card = f"<h3>{head}</h3><dl>{dl}</dl>"
                out.append(f'<div class="card" id="d{row["n"]}">{card}</div>')
        return self.page("differences", "".join(out))

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        pages = {page(file): self.render(file) for file in self.files}
        pages |= {"index.html": self.index(), "differences.html": self.differences_page()}
        for name, text in pages.items():
            (folder / name).write_text(text)
        return [folder / name for name in pages]


STYLES = ("friendly", "github-dark")


def place_link(p: tables.Place) -> str:
    """The page of a file, at the function or class in which the tag is."""
    at = f"#{p.function.partition('.')[0]}" if p.function else ""
    return f'<a href="{page(p.file)}{at}">{p.function or p.file}</a>'


def page(file: str) -> str:
    return f"{Path(file).stem}.html"


def anchor(key: tuple) -> str:
    number = re.search(r"\d+", key[0])
    return f"{key[0][:2].lower()}-{number[0]}" if number else re.sub(r"\W+", "-", key[1])


def indent_first(text: str) -> str:
    """Indent the first line of a docstring like the others, so that `dedent` works."""
    first, _, rest = text.partition("\n")
    margin = min((len(x) - len(x.lstrip()) for x in rest.splitlines() if x.strip()), default=0)
    return first if not rest else " " * margin * (not first.startswith(" ")) + first + "\n" + rest


def main(folder: tyro.conf.Positional[Path] = ROOT / "docs") -> None:
    check_folder(folder, "folder")
    written = Site().write(folder)
    size = sum(path.stat().st_size for path in written) / 1e6
    print(f"{len(written)} pages, {size:.1f} MB: {written[0].parent / 'index.html'}")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
