import sys
from dataclasses import dataclass
from pathlib import Path

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import tyro

from dynashift.errors import UserError, one_line_errors
from dynashift.files import atomic, check_folder
from experiments import report
from experiments.report.formats import comma_separated, latex, markdown
from experiments.report.page import page
from experiments.report.parts import FigurePart, Part, Table
from experiments.report.reading import read_archives, read_runs
from experiments.report.settings import settings_of

FORMATS = {"md": markdown, "csv": comma_separated, "tex": latex}


@dataclass(frozen=True)
class Args:
    runs: Path = Path("runs")
    """folder with the runs; every result.json below it is read"""
    out: Path = Path("results")
    """folder for report.html, tables/ and figures/"""
    own_budgets: bool = False
    """put methods into one table that had updates, sizes and rates of their own, one budget each"""


def write(path: Path, text: str) -> None:
    try:
        with atomic(path) as temporary:
            temporary.write_text(
                text, encoding="utf-8", errors="replace"
            )  # paths may hold anything
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room, or choose another --out"
        ) from None


def write_part(part: Part, out: Path) -> None:
    if isinstance(part, FigurePart):
        write(out / "figures" / f"{part.file}.svg", part.svg)
    if isinstance(part, Table):
        for suffix, form in FORMATS.items():
            write(out / "tables" / f"{part.file}.{suffix}", form(part))


def make(args: Args) -> Path:
    """The path of the page."""
    check_folder(args.out)
    runs, problems = read_runs(args.runs, args.own_budgets)
    archives, more = read_archives(runs, args.runs)
    problems += more
    for line in problems:
        print(f"left out: {line}", file=sys.stderr)
    if not runs:
        raise UserError(
            f"no usable result.json under {args.runs};"
            " run something first (bash run_all.sh --quick)"
        )
    settings = settings_of(runs, archives)
    for setting in settings:
        for part in setting.parts:
            write_part(part, args.out)
    path = args.out / "report.html"
    write(path, page(settings, problems))  # last, so that the files it names exist
    counts = f"{len(runs)} runs, {len(settings)} settings, {len(problems)} files left out"
    print(f"{counts}: {path}")
    return path


def main() -> None:
    with one_line_errors():
        make(tyro.cli(Args, description=report.__doc__, prog="python -m experiments.report"))


if __name__ == "__main__":
    main()
