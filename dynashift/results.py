"""Reads the result of a run: checks its hash and derives the summaries from the evaluations."""

import math
from pathlib import Path

import numpy as np

from dynashift.errors import UserError
from dynashift.files import read_json


def read_result(path: str | Path) -> dict:
    """The content of result.json, with the summaries of its evaluations under "summaries"."""
    if not Path(path).exists():
        folder = Path(path).parent
        raise UserError(
            f"no finished run in {folder} (no {Path(path).name}); "
            "name a folder such as runs/taf_dt/TASK/seed1"
        )
    result = read_json(path)
    try:
        return result | {"summaries": summaries(result["evaluations"])}
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not the result of a run ({reason})") from error


def summaries(evaluations: list[dict]) -> dict:
    """The summaries of evaluations {step, returns, score}, which are in the order of steps.

    Never mix them: `best`, for example, is chosen by the very score that it reports, and
    `best_guided` by that of the critics' choice of actions. Without evaluations this is {}. As in
    JSON, a mean that is not finite is None.
    """

    def number(x) -> float:
        return math.nan if x is None else x

    def average(values) -> float | None:
        values = list(values) or [None]  # without a simulator there is no return
        mean = float(np.mean([number(x) for x in values]))
        return mean if math.isfinite(mean) else None

    def of(chosen):
        returns = [average(e["returns"]) for e in chosen]
        found = {"steps": [e["step"] for e in chosen], "score": average(e["score"] for e in chosen)}
        found["return_mean"] = average(returns)
        guided = [e.get("guided_score") for e in chosen]  # None where that was not asked for
        if "offline" in chosen[-1]:  # --env logs has no score; the last evaluation is shown
            found["offline"] = chosen[-1]["offline"]
        return found | ({} if None in guided else {"guided_score": average(guided)})

    def rank(e) -> float:
        return e["score"] if math.isfinite(number(e["score"])) else -math.inf

    if not evaluations:
        return {}
    found = {
        "final": of(evaluations[-1:]),
        "mean_of_last_three": of(evaluations[-3:]),
        "best": of([max(evaluations, key=rank)]),
    }
    guided = [e for e in evaluations if e.get("guided_score") is not None]
    if guided:
        found["best_guided"] = of([max(guided, key=lambda e: e["guided_score"])])
    return found
