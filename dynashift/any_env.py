"""Tasks of your own: any Gymnasium environment with Box spaces, beside the rows of tasks.py.

    --env Pendulum-v1 --source old.hdf5 --target new.hdf5       a registered id
    --env my_package:MyRobot-v0 --env-kwargs '{"gravity": -5}'  a module to import, and arguments

The simulator is the target's. Source and target are your files, so --shift does not apply: `shift`
becomes "own", with a few digits of a hash where --env-kwargs or --score-range are given. The pair
(env, shift) then names the task everywhere, as it does for the four robots.
"""

import difflib
import functools
import hashlib
import json
import math
import os
import sys

import gymnasium
import numpy as np

from dynashift.errors import NotFinite, UserError
from dynashift.tasks import OWN, ROBOTS, TIME_LIMIT, Spaces, Task, UnknownTask

LOGS = "logs"  # --env logs: there is no simulator
# Where the paper has no row: the median of its K, and the middle of its eta_reg, 0.4 to 0.6. Both
# are flags of the scripts.
K, ETA_REG = 5, 0.5


def is_own(env: str) -> bool:
    return env not in ROBOTS


def own_shift(env: str, env_kwargs: str, score_range: tuple[float, float] | None) -> str:
    """Add the task to the table, and return the name of its shift."""
    try:
        kwargs = json.loads(env_kwargs)
    except ValueError as error:
        raise UserError(f"--env-kwargs {env_kwargs!r} is not JSON ({error})") from None
    if not isinstance(kwargs, dict):
        raise UserError(f"--env-kwargs {env_kwargs!r} must be an object like '{{\"gravity\": -5}}'")
    if kwargs and env == LOGS:
        raise UserError("--env logs has no simulator; leave out --env-kwargs")
    low, high = score_range or (0.0, 100.0)
    if not -math.inf < low < high < math.inf:
        raise UserError(
            f"--score-range LOW HIGH needs a lower and a higher return, not {low} {high}"
        )
    shift = "own"
    if kwargs or score_range:
        text = json.dumps([kwargs, score_range], sort_keys=True)
        shift += f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    OWN[env, shift] = Task(
        random=low,
        expert=high,
        K=K,
        eta_reg=ETA_REG,
        env_kwargs=kwargs,
        normalised=score_range is not None,
    )
    return shift


def make_own(env: str, shift: str, **options) -> gymnasium.Env:
    """The environment of a task of your own, with a time limit; actions are in its own units."""
    if env == LOGS:
        raise UserError("--env logs has no simulator")
    if os.getcwd() not in sys.path:  # the module of `module:Id-v0` may be in the current folder
        sys.path.append(os.getcwd())
    kwargs = OWN[env, shift].env_kwargs | options
    try:
        made = gymnasium.make(env, disable_env_checker=True, **kwargs)
    except Exception as error:  # whatever the environment's own code raises
        if isinstance(error, gymnasium.error.NameNotFound):
            refuse_misspelt(env)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"--env {env} cannot be made ({reason}); give {', '.join(ROBOTS)}, logs, "
            "a Gymnasium id, or MODULE:ID with a module that can be imported"
        ) from None
    if made.spec is None or made.spec.max_episode_steps is None:
        made = gymnasium.wrappers.TimeLimit(made, TIME_LIMIT)
    return made


def refuse_misspelt(env: str) -> None:
    """Name the robot that was probably meant; Gymnasium would suggest an id of its own."""
    near = difflib.get_close_matches(env.lower(), ROBOTS, n=1, cutoff=0.75)
    if near and "-v" not in env:
        raise UnknownTask(f"--env {env} is unknown; did you mean {near[0]}?")


@functools.cache
def find_spaces(env: str, shift: str) -> Spaces:
    """Sizes, time limit and action bounds of a robot, one of the four or your own."""
    if env in ROBOTS:
        return ROBOTS[env]
    made = make_own(env, shift)
    states, actions = made.observation_space, made.action_space
    limit = made.spec.max_episode_steps or TIME_LIMIT
    made.close()
    for name, space, remedy in (
        ("observations", states, "wrap it in gymnasium.wrappers.FlattenObservation"),
        ("actions", actions, "discrete actions are not supported"),
    ):
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise UserError(
                f"--env {env}: {name} must be a Box of one dimension, not {space}; {remedy}"
            )
    if not actions.is_bounded():
        raise UserError(
            f"--env {env}: its actions have no bounds; wrap it in gymnasium.wrappers.ClipAction "
            "or give its action space finite bounds"
        )
    low, high = (x.astype(float).tolist() for x in (actions.low, actions.high))
    if not all(a < b for a, b in zip(low, high, strict=True)):
        raise UserError(f"--env {env}: an action's lower bound is not below its upper one")
    unit = set(low) == {-1.0} and set(high) == {1.0}
    bounds = None if unit else (low, high)
    sizes = {"obs_dim": states.shape[0], "act_dim": actions.shape[0]}
    return Spaces(**sizes, time_limit=limit, bounds=bounds)


def time_limit(task) -> int:
    """Steps after which an episode ends, the size of the time embedding.

    task: a TaskArgs or a Dataset.
    """
    return TIME_LIMIT if task.env == LOGS else find_spaces(task.env, task.shift).time_limit


def scale(actions: np.ndarray, bounds: tuple | None) -> np.ndarray:
    """Actions [..., d_a] from their own units to [-1, 1]."""
    if bounds is None:
        return actions
    low, high = map(np.asarray, bounds)
    return (2 * (actions - low) / (high - low) - 1).astype(np.float32)


def unscale(actions: np.ndarray, bounds: tuple | None) -> np.ndarray:
    """The inverse of `scale`; actions outside of [-1, 1] are clipped."""
    if bounds is None:
        return actions
    low, high = map(np.asarray, bounds)
    return low + (np.clip(actions, -1, 1) + 1) / 2 * (high - low)


def show_bounds(bounds: tuple) -> str:
    """[-2, 2], or one pair for each entry where they differ."""
    pairs = list(dict.fromkeys(zip(*bounds, strict=True)))
    shown = [f"[{low:.4g}, {high:.4g}]" for low, high in pairs[:4]]
    return ", ".join(shown + ["..."] * (len(pairs) > 4))


class GymBatch:
    """n environments side by side, with the methods of dynashift.batch_env.BatchEnv.

    Actions lie in [-1, 1]. An episode that ended stays ended: its observation no longer changes,
    and its rewards are 0.
    """

    def __init__(self, env: str, shift: str, n: int):
        if n < 1:
            raise ValueError(f"a batch has at least one simulator, not {n}")
        self.spaces = find_spaces(env, shift)
        self.obs_dim, self.act_dim = self.spaces.obs_dim, self.spaces.act_dim
        self.n = n
        self.envs = [make_own(env, shift) for _ in range(n)]

    def reset(self, seeds) -> np.ndarray:
        """Start an episode everywhere. seeds: one for each, or one number s for s, s + 1, ..."""
        seeds = range(seeds, seeds + self.n) if np.ndim(seeds) == 0 else seeds
        pairs = zip(self.envs, seeds, strict=True)
        self.obs = np.stack([env.reset(seed=int(seed))[0] for env, seed in pairs]).astype(float)
        self.terminated, self.truncated = np.zeros((2, self.n), bool)
        return self.obs.copy()

    def step(self, actions):
        """actions [n, act_dim] -> obs [n, obs_dim], reward [n], terminated [n], truncated [n]"""
        actions = np.asarray(actions, np.float64)
        if actions.shape != (self.n, self.act_dim):
            raise ValueError(f"actions have shape {(self.n, self.act_dim)}, not {actions.shape}")
        rewards = np.zeros(self.n)
        for i in np.flatnonzero(~self.done).tolist():
            if not np.isfinite(actions[i]).all():
                raise NotFinite(
                    "an action is NaN or infinite: the policy diverged; train it at a lower rate"
                )
            action = unscale(actions[i], self.spaces.bounds)
            action = action.astype(self.envs[i].action_space.dtype)
            obs, rewards[i], self.terminated[i], self.truncated[i], _ = self.envs[i].step(action)
            self.obs[i] = obs
        return self.obs.copy(), rewards, self.terminated.copy(), self.truncated.copy()

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def close(self) -> None:
        for env in self.envs:
            env.close()


def refuse_shift(env: str, words: list[str]) -> None:
    """--shift is an edit of one of the four robots' models; elsewhere it would have no effect."""
    if is_own(env) and any(word.split("=")[0] == "--shift" for word in words):
        refuse_misspelt(env)
        raise UserError(
            f"--shift changes one of {', '.join(ROBOTS)}; with --env {env} leave it out: "
            "--source and --target are your files, and --env-kwargs changes the simulator"
        )
