"""The table of tasks: every robot, every shift, and what a script has to know about the two.

A new shift is a row of `SHIFTS`, and a new robot a row of `ROBOTS`. The flags --env and --shift,
the environments, the scores, the defaults of the scripts, the grid of run_all.sh and the report all
read them from here. A task of your own, --env with a Gymnasium id, gets a row of `OWN` at run time.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from dynashift.errors import UserError

TIME_LIMIT = 1000  # steps of an episode
ANT_PADDING = 84  # D4RL's ant observations end in 84 contact forces, all exactly zero in the data
QUALITIES = {  # of the datasets of every task
    "source": ("medium", "medium-replay", "medium-expert"),
    "target": ("medium", "medium-expert", "expert"),
}


class UnknownTask(UserError, ValueError):
    """A robot or a shift that is not in the table."""


@dataclass(frozen=True, kw_only=True)
class Spaces:
    """What a script has to know of any robot."""

    obs_dim: int
    act_dim: int
    time_limit: int = TIME_LIMIT
    bounds: tuple[list[float], list[float]] | None = None  # of the actions; None: -1 and 1


@dataclass(frozen=True, kw_only=True)
class Robot(Spaces):
    gym_name: str  # in environment ids: dynashift/HalfCheetah-morph-v0
    xml: str  # gymnasium's model
    frame_skip: int
    root: int = 1  # leading entries of qpos (x, and y for ant) that are not observed
    clip: float = math.inf  # velocities are observed clipped to +-clip
    ctrl_cost: float  # reward = dx/dt + healthy_reward - ctrl_cost |a|^2
    healthy_reward: float  # paid on the terminal step too (gymnasium v5 does not)
    noise: float  # reset noise: uniform on qpos, and on qvel unless gaussian_qvel
    gaussian_qvel: bool = False
    total_mass: float | None = None  # the XML's settotalmass
    return_target: float  # the return that the official code of return-conditioned methods asks for
    replay_size: int  # transitions of the published medium-replay file


ROBOTS = {
    "halfcheetah": Robot(
        gym_name="HalfCheetah",
        xml="half_cheetah.xml",
        frame_skip=5,
        act_dim=6,
        obs_dim=17,
        ctrl_cost=0.1,
        healthy_reward=0.0,
        noise=0.1,
        gaussian_qvel=True,
        total_mass=14.0,
        return_target=12000,
        replay_size=202_000,
    ),
    "hopper": Robot(
        gym_name="Hopper",
        xml="hopper.xml",
        frame_skip=4,
        act_dim=3,
        obs_dim=11,
        clip=10.0,
        ctrl_cost=0.001,
        healthy_reward=1.0,
        noise=0.005,
        return_target=3600,
        replay_size=402_000,
    ),
    "walker2d": Robot(
        gym_name="Walker2d",
        # Not walker2d_v5.xml: in the data, foot friction is 0.9 on the right and 1.9 on the left.
        xml="walker2d.xml",
        frame_skip=4,
        act_dim=6,
        obs_dim=17,
        clip=10.0,
        ctrl_cost=0.001,
        healthy_reward=1.0,
        noise=0.005,
        return_target=5000,
        replay_size=302_000,
    ),
    "ant": Robot(
        gym_name="Ant",
        xml="ant.xml",
        frame_skip=5,
        root=2,
        act_dim=8,
        obs_dim=27,
        ctrl_cost=0.5,
        healthy_reward=1.0,
        noise=0.1,
        gaussian_qvel=True,
        return_target=5000,  # of the TAF-DT release; Decision Transformer has no ant
        replay_size=302_000,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One robot under one shift.

    The edits are everything that the shift changes in gymnasium's model, as (kind of element, its
    name, attribute, value). Attributes are those of MuJoCo's specification, with lengths in metres
    in the body's own frame, or one of five that need some arithmetic: see `models.apply_edit`.

    The reference returns of the shifted robots are those of the target datasets' paper (OTDF, Lyu
    et al., ICLR 2025), those of the unshifted ones are D4RL's. Beware: the random reference of
    hopper and walker2d differs between the two, and the expert reference of hopper-gravity is the
    unshifted expert's, so that its expert data score 125.
    """

    random: float  # return of a random policy: normalised score 0
    expert: float  # return of an expert: normalised score 100
    K: int  # context and fragment length: paper, "Transformer context length"
    eta_reg: float  # weight of L_reg, for which the paper gives the set {0.3, ..., 0.6}
    edits: list[tuple] = field(default_factory=list)
    env_kwargs: dict = field(default_factory=dict)  # of a task of your own: for gymnasium.make
    # Whether `random` and `expert` are known. If not, 0 and 100 leave a return as it is.
    normalised: bool = True


HALF_GRAVITY = [("option", "", "gravity_z", -4.905)]

# DIFF 29: The paper gives no rule for eta_reg by task; these are the released values, capped at
# the paper's largest, 0.6.
# DIFF 50: The paper says "v2"; the released code has gym's v3 classes and a v2 wrapper for the
# kinematic shift. These models reproduce the published data.
SHIFTS = {
    "none": {  # not a task of the paper: K and eta_reg are those of the morph shift
        "halfcheetah": Task(random=-280.178953, expert=12135.0, K=20, eta_reg=0.4),
        "hopper": Task(random=-20.272305, expert=3234.3, K=5, eta_reg=0.4),
        "walker2d": Task(random=1.629008, expert=4592.3, K=5, eta_reg=0.6),
        "ant": Task(random=-325.6, expert=3879.7, K=5, eta_reg=0.6),
    },
    "gravity": {
        "halfcheetah": Task(
            random=-280.178953, expert=9509.15, K=10, eta_reg=0.6, edits=HALF_GRAVITY
        ),
        "hopper": Task(
            random=-26.3360015397715, expert=3234.3, K=20, eta_reg=0.5, edits=HALF_GRAVITY
        ),
        "walker2d": Task(
            random=10.079455055289959, expert=5194.713, K=20, eta_reg=0.6, edits=HALF_GRAVITY
        ),
        "ant": Task(random=-325.6, expert=4317.065, K=5, eta_reg=0.4, edits=HALF_GRAVITY),
    },
    "kinematic": {
        "halfcheetah": Task(
            random=-280.178953,
            expert=7065.03,
            K=20,
            eta_reg=0.5,
            edits=[("joint", "bthigh", "range_factors", (0.01, 0.01))],
        ),
        "hopper": Task(
            random=-26.3360015397715,
            expert=2842.73,
            K=5,
            eta_reg=0.6,
            edits=[
                ("joint", "thigh_joint", "range_factors", (0.001, 1)),
                ("joint", "foot_joint", "range_factors", (0.4, 0.4)),
            ],
        ),
        "walker2d": Task(  # the right leg only
            random=10.079455055289959,
            expert=3257.51,
            K=5,
            eta_reg=0.4,
            edits=[("joint", "foot_joint", "range_factors", (0.01, 0.01))],
        ),
        "ant": Task(  # the two front legs
            random=-325.6,
            expert=5122.57,
            K=5,
            eta_reg=0.6,
            edits=[
                ("joint", "hip_1", "range_factors", (0.01, 0.01)),
                ("joint", "hip_2", "range_factors", (0.01, 0.01)),
            ],
        ),
    },
    "morph": {
        "halfcheetah": Task(
            random=-280.178953,
            expert=9713.59,
            K=20,
            eta_reg=0.4,
            edits=[
                ("geom", "bthigh", "fromto", (0, 0, 0, -1e-4, 0, -1e-4)),
                ("body", "bshin", "pos", (-1e-4, 0, -1e-4)),
                ("geom", "bshin", "fromto", (0, 0, 0, -0.13, 0, -0.15)),
                ("body", "bfoot", "pos", (-0.13, 0, -0.15)),
                ("geom", "bfoot", "half_length", 0.07),
                ("geom", "fthigh", "fromto", (0, 0, 0, 1e-4, 0, 1e-4)),
                ("body", "fshin", "pos", (1e-4, 0, 1e-4)),
                ("geom", "fshin", "fromto", (0, 0, 0, 0.01, 0, -0.16)),
                ("body", "ffoot", "pos", (0.01, 0, -0.16)),
            ],
        ),
        "hopper": Task(
            random=-26.3360015397715,
            expert=3152.75,
            K=5,
            eta_reg=0.4,
            edits=[
                ("geom", "torso_geom", "radius", 0.125),
                ("geom", "thigh_geom", "radius", 0.04),
            ],
        ),
        "walker2d": Task(  # the right leg only
            random=10.079455055289959,
            expert=4398.43,
            K=5,
            eta_reg=0.6,
            edits=[
                ("geom", "thigh_geom", "pos", (0, 0, -0.0025)),
                ("geom", "thigh_geom", "half_length", 0.0025),
                ("joint", "leg_joint", "pos", (0, 0, 0.695)),
                ("geom", "leg_geom", "pos", (0, 0, 0.3225)),
                ("geom", "leg_geom", "half_length", 0.3725),
                ("joint", "foot_joint", "pos", (-0.2, 0, 0.3)),
                ("geom", "foot_geom", "pos", (-0.1, 0, 0.3)),
            ],
        ),
        "ant": Task(  # the two front legs
            random=-325.6,
            expert=5722.01,
            K=5,
            eta_reg=0.6,
            edits=[
                ("geom", "left_ankle_geom", "fromto", (0, 0, 0, 0.1, 0.1, 0)),
                ("geom", "right_ankle_geom", "fromto", (0, 0, 0, -0.1, 0.1, 0)),
            ],
        ),
    },
}

OWN: dict[tuple[str, str], Task] = {}  # tasks of your own by (env, shift): see any_env.py

Env = Literal[tuple(ROBOTS)]
Shift = Literal[tuple(SHIFTS)]


def find_task(env: str, shift: str) -> Task:
    """The row of a robot and a shift, or an error that lists what there is."""
    if (env, shift) in OWN:
        return OWN[env, shift]
    if env not in SHIFTS.get(shift, ()):
        if env not in ROBOTS:
            raise UnknownTask(f"--env {env} is unknown; give {one_of(ROBOTS)}")
        shifts = [name for name in SHIFTS if env in SHIFTS[name]]
        wrong = f"does not exist for {env}" if shift in SHIFTS else "is unknown"
        raise UnknownTask(f"--shift {shift} {wrong}; give {one_of(shifts)}")
    return SHIFTS[shift][env]


def one_of(names) -> str:
    """a, b or c"""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def all_tasks() -> list[tuple[str, str]]:
    """(robot, shift) of every row, robot by robot."""
    return [(env, shift) for env in ROBOTS for shift in SHIFTS if env in SHIFTS[shift]]
