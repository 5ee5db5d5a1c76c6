"""The page: one HTML file that needs nothing from outside."""

import base64
import html
import re

from experiments.report.formats import html_table
from experiments.report.parts import FigurePart, Part, Table
from experiments.report.settings import Setting

CSS = """
:root{color-scheme:light dark;--ink:#1d1f21;--soft:#666b70;--page:#fff;--line:#d5d8db;
--band:#f4f5f6;--accent:#0b63c5}
@media(prefers-color-scheme:dark){:root{
--ink:#e4e6e8;--soft:#9aa0a6;--page:#15171a;--line:#3a3e43;--band:#1f2226;--accent:#7db5ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:1rem;color:var(--ink);background:var(--page)}
body{font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;margin:.5rem 0}
h3{font-size:1.05rem;margin:2rem 0 .5rem}
h2{font-size:1.3rem;margin:2.5rem 0 .5rem;border-bottom:2px solid var(--line)}
a{color:var(--accent)}
code{font-size:.9em;overflow-wrap:anywhere}
.box{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;font-size:13px;line-height:1.35;font-variant-numeric:tabular-nums;
width:100%}
th,td{padding:.3rem .32rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);
vertical-align:top}
tr>:first-child{text-align:left;font-weight:500;position:sticky;left:0;background:var(--page)}
thead th,tr.sum>*{background:var(--band)!important}tr.sum th{font-weight:600}
thead th{vertical-align:bottom}
tr>:first-child{border-right:1px solid var(--line)}
th[scope=row]{min-width:8rem}th{white-space:normal!important}
button{all:unset;cursor:pointer;font-weight:600}
button:focus-visible,.box:focus-visible{outline:2px solid var(--accent)}
button::after{content:" ↕";color:var(--soft);font-weight:400}
[aria-sort=descending] button::after{content:" ↓"}
[aria-sort=ascending] button::after{content:" ↑"}body:not(:has(#show:checked)) .unrun{display:none}
.paper{display:block;color:var(--soft);font-size:12px;font-weight:400}
small{color:var(--soft);font-weight:400}
td.served{font-style:italic;color:var(--soft)}td.served small{display:block}
td.empty{color:var(--soft);
background:repeating-linear-gradient(135deg,transparent 0 6px,var(--band) 6px 9px)}
.caption,.notes,figcaption,.none{color:var(--soft);font-size:14px;max-width:80ch}
.notes{padding-left:1.5rem;max-width:none;columns:2 24rem;column-gap:3rem}
sup{font-size:10px;line-height:0;font-weight:400;color:var(--accent);margin-left:2px}
figure{margin:0}figcaption{margin-top:.4rem}
figure .box{padding:.3rem;width:fit-content;max-width:100%}
img{display:block;max-width:100%;min-width:calc(.75*var(--w));height:auto}
@media(max-width:600px){body{padding:.6rem;font-size:15px}}
"""

JS = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((th, i) => th.firstChild.addEventListener("click", () => {
    const then = {descending: "ascending", ascending: "none"};
    const next = then[th.getAttribute("aria-sort")] || "descending";
    heads.forEach(h => h.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", next);
    const sums = original.filter(r => r.classList.contains("sum"));
    const rows = original.filter(r => !sums.includes(r));
    rows.sort((a, b) => {  // empty cells last, whatever the direction
      const [x, y] = [a, b].map(r => r.cells[i].dataset.v);
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return next === "ascending" ? order : -order;
    });
    body.append(...(next === "none" ? original : [...rows, ...sums]));
  }));
}
"""


def html_figure(figure: FigurePart) -> str:
    width, title = re.search(r'width="([\d.]+)pt"', figure.svg)[1], html.escape(figure.title)
    data = base64.b64encode(figure.svg.encode()).decode()
    image = f'<img alt="{title}" style="--w:{width}pt" src="data:image/svg+xml;base64,{data}">'
    return (
        f"<h3>{title}</h3><figure><div class=box tabindex=0>{image}</div>"
        f"<figcaption>{html.escape(figure.caption)} "
        f"<code>figures/{figure.file}.svg</code></figcaption></figure>"
    )


def html_part(part: Part, flags: list[str] | None) -> str:
    """flags: the flags with which run_all.sh runs what is missing, if it can."""
    if isinstance(part, Table):
        return html_table(part)
    if isinstance(part, FigurePart):
        return html_figure(part)
    command = ""
    if flags:
        words = ["bash", "run_all.sh", "--table", part.name.replace("_", "-"), *flags]
        command = f" <code>{' '.join(words)}</code>"
    return f"<p class=none><b>{html.escape(part.title)}</b>: not run.{command}</p>"


INTRODUCTION = (
    "Each cell shows our score, and the paper's where the data are the same. Every kind of data "
    "and every budget has a section of its own. Click the head of a column to sort by it."
)


def page(settings: list[Setting], problems: list[str]) -> str:
    esc, body, links = html.escape, [], []
    for s in settings:
        links.append(f"<li><a href=#{s.slug}>{esc(s.name)}</a></li>")
        about = f"<p class=caption>{esc(s.about)}</p>"
        body.append(f"<section><h2 id={s.slug}>{esc(s.name)}</h2>{about}")
        body += [html_part(part, s.flags) for part in s.parts]
        body.append("</section>")
    if problems:
        links.append("<li><a href=#left-out>Left out</a></li>")
        lines = "".join(f"<li><code>{esc(problem)}</code></li>" for problem in problems)
        body.append(f"<section><h2 id=left-out>Left out</h2><ul>{lines}</ul></section>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>TAF-DT: results</title><style>{CSS}</style></head><body>"
        f"<h1>TAF-DT: results</h1><p>{INTRODUCTION}</p><ul>{''.join(links)}</ul>"
        "<label><input type=checkbox id=show> show rows and columns that were not run</label>"
        f"{''.join(body)}<script>{JS}</script></body></html>\n"
    )
