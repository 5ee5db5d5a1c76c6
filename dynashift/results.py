"""The result of a run as it is read: its hash is checked, and the summaries follow from the evaluations."""

import math
from pathlib import Path

import numpy as np

from dynashift.errors import UserError
from dynashift.files import read_json


def read_result(path: str | Path) -> dict:
    """What result.json holds, and under "summaries" what follows from its evaluations."""
    result = read_json(path)
    try:
        return result | {"summaries": summaries(result["evaluations"])}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not the result of a run ({type(error).__name__}: {error})"
        ) from error


def summaries(evaluations: list[dict]) -> dict:
    """Of evaluations {step, returns, score} in the order of their steps. Three answers to three questions, not to be
    mixed: `best` is chosen by the very score it reports. {} if there are no evaluations. A mean over something that is
    no number is None, as in JSON."""

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
        if "offline" in chosen[-1]:  # of --env logs, where no score exists: the last of them
            found["offline"] = chosen[-1]["offline"]
        return found | ({} if None in guided else {"guided_score": average(guided)})

    def rank(e) -> float:
        return e["score"] if math.isfinite(number(e["score"])) else -math.inf

    if not evaluations:
        return {}
    best = max(evaluations, key=rank)
    return {
        "final": of(evaluations[-1:]),
        "mean_of_last_three": of(evaluations[-3:]),
        "best": of([best]),
    }
