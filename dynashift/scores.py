"""Normalised scores: 0 is the return of a random policy, 100 that of an expert.

Where neither is known, as for a Gymnasium id without --score-range, the score is the return itself.
"""

from dynashift.tasks import find_task


def normalized_score(env: str, shift: str, returns):
    """100 (J - J_random) / (J_expert - J_random), for one return or an array of them."""
    task = find_task(env, shift)
    # Eq. (36) [normalized-score], Eq. (42) [unlabelled, "Normalized score"]
    return 100 * (returns - task.random) / (task.expert - task.random)


def score_name(env: str, shift: str) -> str:
    return "normalised score" if find_task(env, shift).normalised else "mean return"
