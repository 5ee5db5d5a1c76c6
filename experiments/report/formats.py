"""A table as Markdown, LaTeX, comma-separated values and HTML."""

import csv
import html
import io
import re

from experiments.report.parts import Cell, Table


def ours_text(c: Cell) -> str:
    if c.is_empty or c.text:
        return c.text or "—"
    number = f"{{:.{c.digits}f}}".format
    text = number(c.mean)
    if c.std is not None:
        text += f" ± {number(c.std)}"
    if c.low is not None:
        text += f" [{number(c.low)}, {number(c.high)}]"
    if not c.n:
        return text
    count = f"{c.n} of {c.of}" if c.of else str(c.n)
    return f"{text} ({count}, {c.remark})" if c.remark else f"{text} ({count})"


def paper_text(c: Cell) -> str:
    if c.paper is None or isinstance(c.paper, str):
        return f"paper {c.paper}" if c.paper else ""
    number = f"{{:.{c.digits}f}}".format
    std = f" ± {number(c.paper_std)}" if c.paper_std is not None else ""
    return f"paper {number(c.paper)}{std}"


def raised(marks: list[int], form: str = "<sup>{}</sup>") -> str:
    return form.format(",".join(map(str, marks))) if marks else ""


def markdown_text(text: str) -> str:
    """A name as plain text, without links, tags, emphasis or the end of a cell or line."""
    return re.sub(r"([\\`*\[\]<>|~])", r"\\\1", " ".join(text.split()))


def markdown(table: Table) -> str:
    def text(c: Cell) -> str:
        ours = f"**{ours_text(c)}**" if c.best else ours_text(c)
        return "; ".join(filter(None, [ours, paper_text(c)])) + raised(c.marks)

    lines = [[markdown_text(name) for name in (table.head, *table.columns)]]
    lines.append(["---"] * (1 + len(table.columns)))
    for row in table.rows:
        lines.append([markdown_text(row.label) + raised(row.marks), *map(text, row.cells)])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [f"{i}. {note}" for i, note in enumerate(table.notes, 1)]
    notes += [f"- {note}" for note in table.about]
    parts = [
        f"# {table.title}",
        f"Setting: {markdown_text(table.setting)}.",
        body,
        table.caption,
        "\n".join(notes),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


SIGNS = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "—": "---",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "→": "$\\to$",
    "<": "$<$",
    ">": "$>$",
}


def tex(text: str) -> str:
    return "".join(SIGNS.get(c, c) for c in text)


def latex(table: Table) -> str:
    def text(c: Cell) -> str:
        ours = f"\\textbf{{{tex(ours_text(c))}}}" if c.best else tex(ours_text(c))
        marks, paper = raised(c.marks, "$^{{{}}}$"), tex(paper_text(c))
        if not paper:
            return ours + marks
        return f"\\shortstack{{{ours}\\\\{{\\scriptsize {paper}{marks}}}}}"

    lines = [" & ".join(map(tex, [table.head, *table.columns])) + " \\\\ \\hline"]
    for row in table.rows:
        cells = [tex(row.label) + raised(row.marks, "$^{{{}}}$"), *map(text, row.cells)]
        lines.append(("\\hline " if row.is_sum else "") + " & ".join(cells) + " \\\\")
    notes = [f"$^{{{i}}}$ {tex(note)}" for i, note in enumerate(table.notes, 1)]
    caption = tex(f"{table.title}. Setting: {table.setting}. {table.caption}")
    caption = " ".join([caption, *notes, *map(tex, table.about)])
    columns = "l" + "r" * len(table.columns)
    head = f"\\begin{{table*}}\\tiny\\centering\n\\begin{{tabular}}{{{columns}}}\n"
    tail = f"\n\\end{{tabular}}\n\\caption{{{caption}}}\n\\end{{table*}}\n"
    return head + "\n".join(lines) + tail


KINDS = ("text", "mean", "std", "low", "high", "n", "of", "paper", "paper_std", "marks")


def comma_separated(table: Table) -> str:
    """A column for every kind of number that occurs in a column of the table. Notes are numbered as
    in the other formats."""
    columns = []
    for i, name in enumerate(table.columns):
        rows = [row.cells[i] for row in table.rows]
        used = [kind for kind in KINDS if any(getattr(c, kind) not in (None, []) for c in rows)]
        if not {"text", "mean"} & set(used):  # a column that was not run is there, too
            used = ["mean", *used]
        for kind in used:
            is_first = kind in ("text", "mean")
            columns.append((i, kind, name if is_first else f"{name}, {kind.replace('_', ' ')}"))

    def value(x):
        if isinstance(x, list):
            return " ".join(map(str, x))
        return round(x, 4) if isinstance(x, float) else x

    writer = csv.writer(out := io.StringIO(), lineterminator="\n")
    writer.writerow([table.head, *(name for _, _, name in columns), "notes"])
    for row in table.rows:
        values = [value(getattr(row.cells[i], kind)) for i, kind, _ in columns]
        writer.writerow([row.label, *values, value(row.marks)])
    return out.getvalue()


def html_cell(c: Cell, hidden: bool) -> str:
    esc = html.escape
    value = c.text or ("" if c.is_empty else f"{c.mean:.6g}")
    ours = re.sub(r"(\([^)]*\)|\[[^]]*\])", r"<small>\1</small>", esc(ours_text(c)))
    ours = f"<b>{ours}</b>" if c.best else ours
    paper = f"<span class=paper>{esc(paper_text(c))}{raised(c.marks)}</span>"
    classes = {"empty": c.is_empty, "served": c.served, "unrun": hidden}
    names = " ".join(name for name, is_set in classes.items() if is_set)
    return f'<td class="{names}" data-v="{esc(value)}">{ours}{paper}</td>'


def html_table(table: Table) -> str:
    """Rows and columns that were not run, and notes on nothing else, have the class "unrun", which
    the page hides at first."""
    esc, columns = html.escape, range(len(table.columns))
    hidden = {i for i in columns if not any(row.cells[i].is_run for row in table.rows)}
    hidden = hidden if len(hidden) < len(columns) else set()
    head = f"<th scope=col><button>{esc(table.head)}</button></th>"
    for i, name in enumerate(table.columns):
        unrun = " class=unrun" if i in hidden else ""
        head += f"<th scope=col{unrun}><button>{esc(name)}</button></th>"
    body = []
    for row in table.rows:
        classes = {"sum": row.is_sum, "unrun": not row.is_run}
        names = " ".join(name for name, is_set in classes.items() if is_set)
        label = esc(row.label)
        first = f'<th scope=row data-v="{label}">{label}{raised(row.marks)}</th>'
        cells = "".join(html_cell(c, i in hidden) for i, c in enumerate(row.cells))
        body.append(f'<tr class="{names}">{first}{cells}</tr>\n')
    seen = set()  # notes at what is not hidden
    for row in (row for row in table.rows if row.is_run):
        cells = (c for i, c in enumerate(row.cells) if i not in hidden)
        seen |= {*row.marks, *(mark for c in cells for mark in c.marks)}
    notes = ""
    for i, note in enumerate(table.notes, 1):
        notes += f"<li value={i}{'' if i in seen else ' class=unrun'}>{esc(note)}</li>"
    return (
        f"<h3>{esc(table.title)}</h3><div class=box tabindex=0><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        f"<p class=caption>{esc(' '.join([table.caption, *table.about]))} "
        f"<code>tables/{table.file}.{{md,csv,tex}}</code></p>"
        + (f"<ol class=notes>{notes}</ol>" if notes else "")
    )
