"""Normalised scores: 0 is the return of a random policy, 100 that of an expert.

The references of the shifted robots are those of the target datasets' paper (OTDF, Lyu et al., ICLR 2025), those of the
unshifted ones D4RL's. Beware: the random reference of hopper and walker2d differs between the two, and the maximum of
hopper-gravity is the unshifted expert's, so that its expert data score 125.
"""

REFERENCES = {  # (robot, shift): (random, expert)
    ("halfcheetah", "none"): (-280.178953, 12135.0),
    ("halfcheetah", "gravity"): (-280.178953, 9509.15),
    ("halfcheetah", "kinematic"): (-280.178953, 7065.03),
    ("halfcheetah", "morph"): (-280.178953, 9713.59),
    ("hopper", "none"): (-20.272305, 3234.3),
    ("hopper", "gravity"): (-26.3360015397715, 3234.3),
    ("hopper", "kinematic"): (-26.3360015397715, 2842.73),
    ("hopper", "morph"): (-26.3360015397715, 3152.75),
    ("walker2d", "none"): (1.629008, 4592.3),
    ("walker2d", "gravity"): (10.079455055289959, 5194.713),
    ("walker2d", "kinematic"): (10.079455055289959, 3257.51),
    ("walker2d", "morph"): (10.079455055289959, 4398.43),
    ("ant", "none"): (-325.6, 3879.7),
    ("ant", "gravity"): (-325.6, 4317.065),
    ("ant", "kinematic"): (-325.6, 5122.57),
    ("ant", "morph"): (-325.6, 5722.01),
}


def normalized_score(env: str, shift: str, returns):
    """100 (J - J_random) / (J_expert - J_random), for one return or an array of them."""
    random, expert = REFERENCES[env, shift]
    # Eq. (36) [normalized-score], Eq. (42) [unlabelled, "Normalized score"]
    return 100 * (returns - random) / (expert - random)
