"""The sixteen environments: four MuJoCo robots, each unshifted and under three dynamics shifts.

Their models are built in models.py from the table in tasks.py. Every recorded transition of the 36
target files is reproduced to float32 rounding, as `python -m dynashift.replay DIR` shows.

    env = dynashift.make("hopper", "morph", seed=0)         one gymnasium.Env, at most 1000 steps
    batch = dynashift.make_batch("hopper", "morph", n=10)   ten simulators in lockstep, on arrays
"""

import math
import os
import sys
from ctypes.util import find_library
from typing import ClassVar

import gymnasium
import mujoco
import numpy as np

from dynashift.any_env import GymBatch, is_own, make_own
from dynashift.batch_env import BatchEnv
from dynashift.errors import NotFinite
from dynashift.models import build_model, new_data, stepper
from dynashift.states import is_healthy, observe, reset_state, reward_x, state_of
from dynashift.tasks import ANT_PADDING, ROBOTS, TIME_LIMIT, all_tasks, find_task


class ShiftedEnv(gymnasium.Env):
    """One robot under one shift. Make it with `dynashift.make`."""

    metadata: ClassVar = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"]}

    def __init__(
        self,
        env,
        shift,
        physics="corrected",
        full_ant_observation=False,
        render_mode=None,
        **render_options,
    ):
        self.model = build_model(env, shift, physics)
        self.data = new_data(self.model)
        self.env = env
        self.shift = shift
        self.robot = ROBOTS[env]
        self.dt = self.model.opt.timestep * self.robot.frame_skip
        self.metadata = {**self.metadata, "render_fps": round(1 / self.dt)}
        self.padding = ANT_PADDING if env == "ant" and full_ant_observation else 0
        obs_shape = (self.robot.obs_dim + self.padding,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, obs_shape, np.float64)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self.robot.act_dim,), np.float32)
        self._mj_step = stepper(env, physics)
        self._qpos, self._qvel = self.data.qpos, self.data.qvel  # views, as is the x of the reward
        self._x = reward_x(env, self.data)
        self.x_before = 0.0
        # The XML's own camera follows the robot.
        camera = {} if "camera_id" in render_options else {"camera_name": "track"}
        self._render_options = {"width": 480, "height": 480, **camera, **render_options}
        self.render_mode = render_mode
        self._renderer = None

    def _begin(self, state):
        mujoco.mj_resetData(self.model, self.data)
        self._qpos[:], self._qvel[:] = np.split(state, [self.model.nq])
        mujoco.mj_forward(self.model, self.data)
        self.x_before = self._x.item()
        return observe(self.env, state, self.model.nv, self.padding)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs = self._begin(reset_state(self.env, self.model.qpos0, self.model.nv, self.np_random))
        if self.render_mode == "human":
            self.render()
        return obs, {}

    def set_observation(self, obs, allow_clipped=False):
        """Put the simulator into the state of a recorded observation, root x (and y) := 0."""
        return self._begin(state_of(self.env, obs, self.model.nv, allow_clipped))

    def step(self, action):
        action = np.asarray(action, np.float64)
        # A scalar would silently be broadcast to all motors.
        if action.shape != self.action_space.shape:
            raise ValueError(
                f"an action of {self.env} has shape {self.action_space.shape}, not {action.shape}"
            )
        cost = self.robot.ctrl_cost * np.vecdot(action, action)
        if not math.isfinite(cost):
            raise NotFinite(
                "an action is NaN or infinite: the policy diverged; train it at a lower rate"
            )
        self.data.ctrl[:] = action
        self._mj_step(self.model, self.data, self.robot.frame_skip)
        x = self._x.item()
        reward = (x - self.x_before) / self.dt + self.robot.healthy_reward - cost
        self.x_before = x
        if self.render_mode == "human":
            self.render()
        state = np.concatenate((self._qpos, self._qvel))
        obs = observe(self.env, state, self.model.nv, self.padding)
        return obs, float(reward), not is_healthy(self.env, state), False, {"x": x}

    def render(self):
        if self._renderer is None:
            from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

            if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
                # Without a screen, gymnasium would still pick GLFW, and fail.
                os.environ.setdefault("MUJOCO_GL", "egl" if find_library("EGL") else "osmesa")
            screen = self.model.vis.global_  # its buffer must hold the picture
            screen.offwidth = self._render_options["width"]
            screen.offheight = self._render_options["height"]
            self._renderer = MujocoRenderer(self.model, self.data, **self._render_options)
        return self._renderer.render(self.render_mode)

    def close(self):
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def env_id(env: str, shift: str) -> str:
    """dynashift/Hopper-morph-v0, ..."""
    return f"dynashift/{ROBOTS[env].gym_name}-{shift}-v0"


def make(env: str, shift: str = "none", seed: int | None = None, **options) -> gymnasium.Env:
    """One environment; with a seed, already reset with it.

    Options: physics, full_ant_observation, render_mode, ...
    """
    find_task(env, shift)  # raises an error that lists the environments there are
    if is_own(env):
        made = make_own(env, shift, **options)
    else:
        made = gymnasium.make(env_id(env, shift), disable_env_checker=True, **options)
    if seed is not None:
        made.reset(seed=seed)
        made.action_space.seed(seed)
    return made


def make_batch(env: str, shift: str = "none", n: int = 10, **options) -> BatchEnv | GymBatch:
    """n simulators in lockstep.

    Options, for the four robots alone: physics, full_ant_observation, workers.
    """
    find_task(env, shift)
    if is_own(env):
        return GymBatch(env, shift, n)
    return BatchEnv(env, shift, n, **options)


for _env, _shift in all_tasks():
    gymnasium.register(
        id=env_id(_env, _shift),
        entry_point="dynashift.envs:ShiftedEnv",
        max_episode_steps=TIME_LIMIT,
        kwargs={"env": _env, "shift": _shift},
    )
