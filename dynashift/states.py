"""What the data call a state, and what follows from it: observation, failure and reward.

A state is qpos and qvel in one vector: [nq + nv], or a batch of them [n, nq + nv].
"""

import math

import mujoco
import numpy as np

from dynashift.tasks import ANT_PADDING, ROBOTS


def observe(env: str, state: np.ndarray, nv: int, padding: int = 0) -> np.ndarray:
    robot = ROBOTS[env]
    obs = state[..., robot.root :].copy()
    if robot.clip < math.inf:
        velocity = obs[..., -nv:]
        np.minimum(np.maximum(velocity, -robot.clip), robot.clip, out=velocity)
    if padding:
        obs = np.concatenate((obs, np.zeros((*obs.shape[:-1], padding))), -1)
    return obs


def is_healthy(env: str, state: np.ndarray) -> np.ndarray:
    if env == "halfcheetah":
        return np.ones(state.shape[:-1], bool)
    if env == "ant":
        return np.isfinite(state).all(-1) & (state[..., 2] >= 0.2) & (state[..., 2] <= 1.0)
    z, pitch = state[..., 1], state[..., 2]
    if env == "walker2d":
        return (z > 0.8) & (z < 2.0) & (np.abs(pitch) < 1.0)
    bounded = (np.abs(state[..., 2:]) < 100).all(-1)  # false for NaN as well
    return (z > 0.7) & (np.abs(pitch) < 0.2) & bounded


def reset_state(env: str, qpos0: np.ndarray, nv: int, rng: np.random.Generator) -> np.ndarray:
    """Start state, drawn in the same order as gymnasium does, so that seeds agree with it."""
    robot = ROBOTS[env]
    qpos = qpos0 + rng.uniform(-robot.noise, robot.noise, qpos0.size)
    if robot.gaussian_qvel:
        qvel = robot.noise * rng.standard_normal(nv)
    else:
        qvel = rng.uniform(-robot.noise, robot.noise, nv)
    if env == "ant":
        # In the data the quaternion has unit length; MuJoCo no longer normalises it in place.
        qpos[3:7] /= np.linalg.norm(qpos[3:7])
    return np.concatenate((qpos, qvel))


def state_of(env: str, obs: np.ndarray, nv: int, allow_clipped: bool) -> np.ndarray:
    """State of one recorded observation, root x (and y) := 0."""
    robot = ROBOTS[env]
    obs = np.asarray(obs, np.float64)
    wanted = [robot.obs_dim] + [robot.obs_dim + ANT_PADDING] * (env == "ant")
    if obs.ndim != 1 or obs.size not in wanted:
        sizes = " or ".join(map(str, wanted))
        raise ValueError(f"an observation of {env} has {sizes} numbers, not shape {obs.shape}")
    if not np.isfinite(obs).all():
        raise ValueError("the observation holds NaN or infinite values")
    state = np.concatenate([np.zeros(robot.root), obs[: robot.obs_dim]])
    if not allow_clipped and np.abs(state[-nv:]).max() >= robot.clip:
        raise ValueError(
            f"a velocity of this observation was clipped at {robot.clip:g}, so the state cannot be "
            "recovered; allow_clipped=True takes the clipped value for the true one"
        )
    if env == "ant":
        length = np.linalg.norm(state[3:7])
        if length == 0:
            raise ValueError("the quaternion of this observation (its numbers 1 to 4) is zero")
        state[3:7] /= length
    return state


def reward_x(env: str, data: mujoco.MjData) -> np.ndarray:
    """View of the x from which rewards are computed.

    For ant it is the torso's xpos, which lags one integrator stage behind the state after a step.
    """
    return data.xpos[1, :1] if env == "ant" else data.qpos[:1]
