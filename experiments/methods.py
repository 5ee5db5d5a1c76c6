"""One row per method. The runner, the report, the estimate and the tests all read this table.

A new method needs two things: its script and its row here. The name is what the script passes to
`runs.open_run`, and so what its result.json says.
"""

from dataclasses import dataclass
from typing import Literal

Dashes = str | tuple[int, tuple[int, ...]]  # a line style of matplotlib


@dataclass(frozen=True)
class Method:
    name: str
    label: str
    # cloning: learns from the target data alone, so that one run serves every source
    family: Literal["value", "sequence", "cloning"]
    script: str
    color: str  # readable on white and on black
    dashes: Dashes = "-"  # for readers who cannot tell the colors apart
    junctions: bool = False  # whether the script can measure stitch junctions (--diagnostics)


# fmt: off
ROWS = (
    Method("iql",    "IQL",    "value",    "baselines/iql.py",  "#4c8fe0", "--"),
    Method("dara",   "DARA",   "value",    "baselines/dara.py", "#18a497", "-."),
    Method("igdf",   "IGDF",   "value",    "baselines/igdf.py", "#8f9a20", ":"),
    Method("otdf",   "OTDF",   "value",    "baselines/otdf.py", "#b06ad8", (0, (5, 1))),
    Method("dt",     "DT",     "sequence", "baselines/dt.py",   "#a5784a", (0, (3, 1, 1, 1)), True),
    Method("qt",     "QT",     "sequence", "baselines/qt.py",   "#cf8f12", (0, (1, 1)),       True),
    Method("dadt",   "DADT",   "sequence", "baselines/dadt.py", "#35a853", (0, (7, 3)),       True),
    Method("taf_dt", "TAF-DT", "sequence", "taf_dt.py",         "#e5502a", "-",               True),
    Method("taf_dt_released", "TAF-DT released", "sequence", "baselines/taf_dt_released.py",
           "#d96a9c", (0, (4, 2))),
    Method("bc",     "BC",     "cloning",  "baselines/bc.py",   "#8a8a8a", "-"),
)
# fmt: on

METHODS = {method.name: method for method in ROWS}
OURS = "taf_dt"
CLONING = tuple(method.name for method in ROWS if method.family == "cloning")


def label_of(name: str) -> str:
    return METHODS[name].label
