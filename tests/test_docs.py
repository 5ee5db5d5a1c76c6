"""The documents agree with the code: tables and tags in both directions, links, commands, pages and the walkthrough."""

import importlib
import inspect
import itertools
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tyro
from PIL import Image

import taf_dt
from dynashift import gate_report, runs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import tables  # noqa: E402

ITEMS = {(i["item"], i["label"]): i for i in tables.read("equations.json")}
NUMBERED = [row for part in tables.read("differences.json").values() for row in part]
ROWS = {row["n"]: row for row in NUMBERED}
PAGES = [page for folder in ("*", "docs/*", "results/*", "dynashift/**/*") for page in ROOT.glob(f"{folder}.md")]


@pytest.mark.parametrize("path", tables.pages(), ids=lambda p: p.name)
def test_tables_are_fresh(path):
    assert path.read_text() == tables.pages()[path], "run python docs/tables.py"


def test_a_comment_in_the_code_changes_no_table(tmp_path, monkeypatch):
    """A copy of taf_dt.py with a comment above every line, in the place of the original."""
    before = {path.name: text for path, text in tables.pages().items()}
    pages = [f"docs/{name}.{kind}" for name in ("equations", "differences") for kind in ("json", "md")]
    for file in tables.TAGGED + pages:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    lines = (ROOT / "taf_dt.py").read_text().splitlines()
    indent = [re.match(" *", line)[0] for line in lines]
    longer = [text for pair in zip(indent, lines, strict=True) for text in (f"{pair[0]}# A comment.", pair[1])]
    (tmp_path / "taf_dt.py").write_text("\n".join(longer))
    with monkeypatch.context() as patch:
        patch.setattr(tables, "ROOT", tmp_path)
        tables.tags.cache_clear()
        after = {path.name: text for path, text in tables.pages().items()}
        (tmp_path / "taf_dt.py").write_text("\n".join(longer).replace("def relabel(", "def other_name("))
        tables.tags.cache_clear()
        renamed = {path.name: text for path, text in tables.pages().items()}
    tables.tags.cache_clear()
    assert after == before
    assert renamed != before  # the copy is what is read
    assert not [text for text in before.values() if re.search(r"\.py#L\d", text)]


@pytest.mark.parametrize("key", ITEMS, ids=str)
def test_every_item_of_the_paper_has_a_tag(key):
    assert tables.tags()[0].get(key), f"no tag # {key[0]} [{key[1]}] in {tables.TAGGED}"


def test_every_tag_has_an_item():
    """With the right number: (number, label) is looked up as a pair."""
    unknown = set(tables.tags()[0]) - set(ITEMS)
    assert not unknown


def test_equations_are_complete():
    numbers = [int(n[0]) for i, _ in ITEMS if (n := re.findall(r"Eq\. \((\d+)\)", i))]
    assert numbers == list(range(1, 44))
    assert all(item["latex"] for key, item in ITEMS.items() if key[0].startswith("Eq."))


@pytest.mark.parametrize("n", [n for n, row in ROWS.items() if row["code"]], ids=str)
def test_every_difference_in_code_has_a_tag(n):
    assert tables.tags()[1].get(n), f"no tag # DIFF {n} in {tables.TAGGED}"


def test_no_two_differences_have_one_number():
    assert len(ROWS) == len(NUMBERED)


def test_every_difference_tag_has_a_row():
    assert sorted(ROWS) == list(range(1, len(ROWS) + 1))
    assert {n for n in tables.tags()[1] if not ROWS.get(n, {}).get("code")} == set()


def test_every_row_of_the_differences_leads_to_its_section():
    page = (ROOT / "docs" / "differences.md").read_text()
    table, sections = page.split("<!-- reasons -->")
    rows = [str(row["n"]) for row in tables.read("differences.json")["rows"]]
    assert re.findall(r"^\| \[(\d+)\]\(#\1\) \|", table, re.M) == rows
    assert re.findall(r"^### (\d+)$", sections, re.M) == rows
    lines = sections.split("<!-- end reasons -->")[0].splitlines()
    assert max(map(len, lines)) <= 140
    # A wrapped line that began like this would be an item of a list, or a heading.
    assert [x for x in lines if re.match(r"([-+>]|\*|\d+[.)]|#+) ", x) and not x.startswith("### ")] == []


def test_long_cells_are_shortened_between_words():
    assert tables.shortened("short, `a b`") == "short, `a b`"
    assert tables.shortened("word, " * 30) == "word, " * 19 + "word ..."
    code = "x " * 50 + "`" + "y " * 50 + "`"
    assert tables.shortened(code) == ("x " * 50).strip() + " ..."


def test_every_tagged_function_has_a_name():
    """A tag at the top of a file belongs to no function, and adds no empty line to a cell."""
    assert not re.search(r"\| <br>|<br><br>|<br> \|", (ROOT / "docs" / "equations.md").read_text())


def test_flags_in_the_differences_exist():
    """A flag in "here" is one of ours: a row must not name one that has been removed."""
    modules = [importlib.import_module(name) for name in ("taf_dt", "taf_preprocess", "baselines.taf_dt_released")]
    flags = {name.replace("_", "-") for module in modules for name in runs.flatten(module.Args())}
    named = [(row["n"], flag) for row in NUMBERED for flag in re.findall(r"--([a-zA-Z][\w-]*)", row.get("here", ""))]
    assert len(named) > 10
    assert [(n, flag) for n, flag in named if flag not in flags and flag.removeprefix("no-") not in flags] == []


def test_malformed_tags():
    """A tag that the table would not see: a number without its label, or a label without its brackets."""
    item = re.compile(r"^\s*# (Eq\. ?\(|Prop\b|Theorem\b|Lemma\b|Corollary\b|Definition\b|Assumption\b)")
    for file in tables.TAGGED:
        for i, line in enumerate((ROOT / file).read_text().splitlines(), 1):
            assert not item.match(line) or tables.ITEM.search(line), f"{file}:{i}: {line.strip()}"
            assert ("# DIFF" in line and "`# DIFF" not in line) == bool(tables.DIFF.search(line)), f"{file}:{i}"


# ------------------------------------------------------------------------------------------ links and commands


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:href|src)="([^"]+)"', text)
    for link in links:
        path, _, at = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {link}"
        assert not at or file.suffix != ".py", f"{page.name}: {link} would be stale after the next edit"


# Scripts that only call another one.
FORWARDED = {"collect.py": "experiments/collect.py", "report.py": "experiments/report/__main__.py"}


def commands():
    """Every call of one of our scripts in the shell blocks of these pages."""
    for name in ("README.md", "CONTRIBUTING.md", "docs/anchors.md"):
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", (ROOT / name).read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for call in re.split(r"&&|;|\|", line.partition(" #")[0]):
                    words = [w for w in shlex.split(call) if not re.fullmatch(r"\w+=\S*", w)]
                    if words[:2] == ["bash", "run_all.sh"]:  # it passes its words on; those after -- are for sbatch
                        words = shlex.split(" ".join(words[2:]).partition(" -- ")[0])
                        yield pytest.param("experiments/runner.py", words, id=call)
                    elif len(words) > 1 and re.fullmatch(r"(\S*/)?python3?", words[0]) and words[1].endswith(".py"):
                        yield pytest.param(words[1], words[2:], id=" ".join([name, *words[1:]]))


@pytest.mark.parametrize(("script", "words"), list(commands()))
def test_commands_parse(script, words, monkeypatch):
    """By the script's own parser; nothing is run."""
    assert (ROOT / script).is_file()
    words = ["morph" if word == "friction" else word for word in words]  # the example that test_new_shift.py adds
    script = FORWARDED.get(script, script)
    source = (ROOT / script).read_text()
    if not re.search(r"\btyro\b|\bread_args\b", source):
        assert not words or "sys.argv" in source
        return
    if script == "docs/build.py":
        pytest.importorskip("latex2mathml", reason="pip install -r requirements-docs.txt")
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if script == "experiments/collect.py":
        command = getattr(module, words[0].replace("-", "_"))
        tyro.cli(inert(command), args=words[1:])
    else:
        main = getattr(module, "Args", None) or inert(module.main)
        tyro.cli(main, args=words)


ANCHORS = [p for p in commands() if p.id.startswith("docs/anchors.md") and p.values[0] != "collect.py"]


@pytest.mark.parametrize(("script", "words"), [pytest.param(*p.values, id=p.id) for p in ANCHORS])
def test_anchors_are_not_refused(script, words, monkeypatch, tmp_path):
    """Their commands get as far as the run: no flag is refused, and the data suit the method."""
    datasets = importlib.import_module("dynashift.datasets")
    download = importlib.import_module("dynashift.download")
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    begun = []

    def open_run(method, args, *_, source=None, target):
        begun.append((method, source and source.path, target.path))
        raise Begun

    monkeypatch.setattr(datasets, "load", lambda *args, **_: SimpleNamespace(kind="own", path=args[3]))
    monkeypatch.setattr(download, "published", lambda *_: None)
    monkeypatch.setattr(module.runs, "open_run", open_run)
    monkeypatch.setattr(sys, "argv", [script, *words, "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(Begun):
        module.main()
    given = dict(zip(words[::2], words[1::2], strict=False))
    alone = given["--target"] == "none"
    [(method, source, target)] = begun
    assert method == Path(script).stem
    assert target == (given["--source"] if alone else given["--target"])
    cloned = method == "bc" and "--source-share" not in words
    assert source == (None if cloned else given["--source"])


class Begun(Exception):
    pass


def test_every_method_has_an_anchor_or_says_that_it_has_none():
    lines = (ROOT / "docs/anchors.md").read_text().splitlines()
    first = itertools.takewhile(lambda line: line.startswith("|"), itertools.dropwhile(lambda x: x[:2] != "| ", lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first if line.startswith("| ")]
    head, *rows = rows
    assert head == ["method", "anchor task", "published", "source of the number", "ours", "runs", "what remains"]
    names = {row[0].lower().replace("-", "_") for row in rows}
    assert names == {"taf_dt", *(path.stem for path in (ROOT / "baselines").glob("*.py"))}
    assert len(rows) == len(names)
    assert {Path(p.values[0]).stem for p in ANCHORS} == names  # each has a command
    for row in rows:
        assert len(row) == len(head), row
        assert row[4] or "not run" in row[6] or "no anchor" in row[6], f"{row[0]}: no number, and no word of that"


def inert(function):
    """The same command line without an effect."""

    def nothing(*args, **kwargs):
        return None

    nothing.__signature__, nothing.__doc__ = inspect.signature(function, eval_str=True), function.__doc__
    nothing.__annotations__ = inspect.get_annotations(function, eval_str=True)
    return nothing


def test_a_wrong_command_would_be_seen():
    taf_dt = importlib.import_module("taf_dt")
    with pytest.raises(SystemExit):
        tyro.cli(taf_dt.Args, args=["--no-such-flag"])


# ---------------------------------------------------------------------------------------- pages and walkthrough


def test_annotated_page_has_all_lines_once():
    """Every line of the file is on the page: as code, or as prose."""
    pytest.importorskip("latex2mathml", reason="the pages need pip install -r requirements-docs.txt")
    build = importlib.import_module("build")
    for file in ("taf_preprocess.py", "baselines/bc.py"):
        text = (ROOT / file).read_text()
        lines, found = text.splitlines(), build.blocks(text)
        shown = [i for block in found for i in block.lines]
        assert shown == sorted(set(shown))
        prose = re.sub(r"\W", "", "".join(block.prose + block.section for block in found))
        for i in set(range(1, len(lines) + 1)) - set(shown):
            assert re.sub(r"\W", "", lines[i - 1]) in prose, f"{file}:{i}"


def test_annotated_pages():
    pytest.importorskip("latex2mathml", reason="the pages need pip install -r requirements-docs.txt")
    build = importlib.import_module("build")
    site = build.Site()
    pages = {build.page(f): None for f in site.files}
    html = site.render("taf_preprocess.py")
    for equation in ("mmd_dist", "ot-cos-cost", "gibbs-weights"):
        assert f"[{equation}]" in html
    bound = site.render("dynashift/gate_report.py")  # the terms of the bound are there
    assert "[variational-surrogate]" in bound
    assert html.count("<math") + bound.count("<math") >= 15
    assert "<script" not in html
    ids, index = set(re.findall(r' id="([^"]+)"', html)), site.index()
    for link in re.findall(r'href="([^"]+)"', html):
        path, _, at = link.partition("#")
        known = {**pages, "index.html": index, "differences.html": None, "": html}
        assert re.match(r"(https?|data):", link) or path in known, link
        assert path or not at or at in ids, link
        assert path != "index.html" or not at or f'id="{at}"' in index, link
    for p in {p for found in tables.tags() for places in found.values() for p in places if p.function}:
        names = {block.name for block in build.blocks((ROOT / p.file).read_text())}
        assert build.place_link(p).partition("#")[2].partition('"')[0] in names, p


def test_walkthrough(monkeypatch):
    """Very small: it runs to its end, and every number is the same when computed by hand, which it checks itself."""
    walkthrough = importlib.import_module("walkthrough")
    monkeypatch.setattr(gate_report, "draw", lambda *_: None)
    page = walkthrough.walk(size=1500, updates=2, width=8, target_size=300)
    assert page.worst < 2e-4
    for what in ("d_m", "c_hat", "omega", "loss weight", "A~", "Q_hat", "L_reg", "action a_1"):
        assert what in page.text


class Countdown:
    """An environment that ends after 12 steps with reward 2 each; its picture shows the step."""

    t = 0

    def reset(self, seed):
        return None, {}

    def render(self):
        return np.full((240, 240, 3), self.t, np.uint8)

    def step(self, action):
        self.t += 1
        return None, 2.0, self.t == 12, False, {}

    def close(self):
        pass


def test_film_of_policies(monkeypatch, tmp_path):
    """Every fifth step and the last one; and the committed film, which README.md shows, is small enough."""
    film = importlib.import_module("policies_gif")
    monkeypatch.setattr(film, "make", lambda *_, **__: Countdown())
    frames, total, length = film.film(lambda obs, reward: None, taf_dt.Args())
    assert [frame[0, 0, 0] for frame in frames] == [0, 5, 10, 12]
    assert (total, length) == (24.0, 12)
    film.save(tmp_path / "x.gif", [film.caption(frame * 20, ["a line"]) for frame in frames], 40)
    with Image.open(tmp_path / "x.gif") as made:
        assert (made.size, made.n_frames, made.info["duration"]) == ((240, 276), 4, 40)
    assert "docs/policies.gif" in (ROOT / "README.md").read_text()
    assert film.OUT.stat().st_size <= 1.5e6
