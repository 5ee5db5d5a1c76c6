"""The sixteen environments: four MuJoCo robots, each unshifted and under three dynamics shifts.

Their models are built in models.py from the table in tasks.py. Every recorded transition of the 36
target files is reproduced to float32 rounding, as `python -m dynashift.replay DIR` shows.

    env = dynashift.make("hopper", "morph", seed=0)         one gymnasium.Env, at most 1000 steps
    batch = dynashift.make_batch("hopper", "morph", n=10)   ten simulators in lockstep, on arrays
"""

import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from ctypes.util import find_library
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import gymnasium
import mujoco
import numpy as np
from gymnasium.utils import seeding

from dynashift.any_env import GymBatch, is_own, make_own
from dynashift.errors import NotFinite
from dynashift.models import build_model, new_data, stepper
from dynashift.tasks import ANT_PADDING, ROBOTS, TIME_LIMIT, all_tasks, find_task

# ----------------------------------------------------------------------- what the data call a state
# A state is qpos and qvel in one vector: [nq + nv], or a batch of them [n, nq + nv].


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


def _reset_state(env: str, qpos0: np.ndarray, nv: int, rng: np.random.Generator) -> np.ndarray:
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


def _state_of(env: str, obs: np.ndarray, nv: int, allow_clipped: bool) -> np.ndarray:
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


# ------------------------------------------------------------------------------------- environments


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
        self._x = _reward_x(env, self.data)
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
        obs = self._begin(_reset_state(self.env, self.model.qpos0, self.model.nv, self.np_random))
        if self.render_mode == "human":
            self.render()
        return obs, {}

    def set_observation(self, obs, allow_clipped=False):
        """Put the simulator into the state of a recorded observation, root x (and y) := 0."""
        return self._begin(_state_of(self.env, obs, self.model.nv, allow_clipped))

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


def _reward_x(env: str, data: mujoco.MjData) -> np.ndarray:
    """View of the x from which rewards are computed.

    For ant it is the torso's xpos, which lags one integrator stage behind the state after a step.
    """
    return data.xpos[1, :1] if env == "ant" else data.qpos[:1]


class _Simulators:
    """The share of a batch that one process steps."""

    def __init__(self, env, shift, n, physics):
        self.model = build_model(env, shift, physics)
        self.data = [new_data(self.model) for _ in range(n)]
        self._mj_step = stepper(env, physics)
        self._frame_skip = ROBOTS[env].frame_skip
        self._ctrl = [d.ctrl for d in self.data]
        self._views = [view for d in self.data for view in (d.qpos, d.qvel, _reward_x(env, d))]

    def begin(self, states):  # [n, nq + nv]; a row of NaN leaves its simulator alone
        for i in np.flatnonzero(~np.isnan(states[:, 0])).tolist():
            d = self.data[i]
            state = states[i]
            mujoco.mj_resetData(self.model, d)
            d.qpos[:], d.qvel[:] = np.split(state, [self.model.nq])
            mujoco.mj_forward(self.model, d)
        return self._read()

    def advance(self, actions):  # [n, act_dim]; likewise
        for i in np.flatnonzero(~np.isnan(actions[:, 0])).tolist():
            self._ctrl[i][:] = actions[i]
            self._mj_step(self.model, self.data[i], self._frame_skip)
        return self._read()

    def _read(self):  # state and the reward's x, [n, nq + nv + 1]
        return np.concatenate(self._views).reshape(len(self.data), -1)


def _wait(connection: Connection, seconds: float = 5e-4) -> None:
    """Return as soon as there is something to read, or after some time.

    It waits actively, because waking a sleeping process takes longer than a small robot's step.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    give_up = time.perf_counter() + seconds
    while not poll.poll(0) and time.perf_counter() < give_up:
        pass


def _serve(fd: int, env: str, shift: str, n: int, physics: str) -> None:
    """A helper process of BatchEnv, which works on what it is sent until the connection closes."""
    # The parent handles Ctrl-C and a cluster's notice.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    simulators = _Simulators(env, shift, n, physics)
    connection = Connection(fd)
    try:
        while True:
            _wait(connection)
            message = connection.recv_bytes()
            job = {b"begin   ": simulators.begin, b"advance ": simulators.advance}[message[:8]]
            connection.send_bytes(job(np.frombuffer(message, offset=8).reshape(n, -1)).tobytes())
    except (EOFError, ConnectionError):  # the parent is gone or done
        pass


class BatchEnv:
    """n simulators stepped in lockstep, on all cores.

    After the end of an episode, its observation is frozen and its reward is 0 until the next
    `reset`. With any number of workers, a simulator that is reset with seed s behaves bit for bit
    like `make(..., seed=s)`.

    The other cores run helper processes rather than threads: the steps of a small robot are so
    short that threads would lose more time to the interpreter lock than they save.
    """

    def __init__(
        self, env, shift, n, physics="corrected", full_ant_observation=False, workers=None
    ):
        if n < 1:
            raise ValueError(f"a batch has at least one simulator, not {n}")
        workers = max(1, min(workers or _cores(), n // 4))
        shares = [n // workers + (k < n % workers) for k in range(workers)]
        self._own = _Simulators(env, shift, shares[0], physics)
        self._helpers = [_start_helper(env, shift, share, physics) for share in shares[1:]]
        self._shares = np.split(np.arange(n), np.cumsum(shares)[:-1])
        self.env = env
        self.shift = shift
        self.n = n
        self.robot = ROBOTS[env]
        self.model = self._own.model
        self.dt = self.model.opt.timestep * self.robot.frame_skip
        self.padding = ANT_PADDING if env == "ant" and full_ant_observation else 0
        self.obs_dim = self.robot.obs_dim + self.padding
        self.act_dim = self.robot.act_dim
        self.x_before = np.zeros(n)
        self.terminated = np.zeros(n, bool)
        self.truncated = np.zeros(n, bool)
        self.steps = np.zeros(n, int)

    def _all(self, job: str, rows: np.ndarray):
        """Run a job on all simulators; returns states [n, nq + nv] and x [n]."""
        if len(self._helpers) != len(self._shares) - 1:
            raise RuntimeError("this batch is closed; make a new one")
        try:
            for share, (connection, _) in zip(self._shares[1:], self._helpers, strict=True):
                connection.send_bytes(job.ljust(8).encode() + rows[share].tobytes())
            parts = [getattr(self._own, job)(rows[self._shares[0]])]
            for connection, _ in self._helpers:
                _wait(connection)
                parts.append(np.frombuffer(connection.recv_bytes()).reshape(-1, parts[0].shape[1]))
        except BaseException as error:
            # Close after Ctrl-C too: the next job would read the answer that is still in the pipe.
            self.close()
            if isinstance(error, (EOFError, OSError)):
                raise RuntimeError(
                    "a simulator process ended (out of memory?); make a new batch or use workers=1"
                ) from error
            raise
        rows = np.concatenate(parts)
        return rows[:, :-1], rows[:, -1]

    def _begin(self, states, only):
        rows = np.full((self.n, self.model.nq + self.model.nv), np.nan)
        rows[only] = np.reshape(states, (-1, rows.shape[1]))
        state, self.x_before = self._all("begin", rows)
        self.terminated[only] = False
        self.truncated[only] = False
        self.steps[only] = 0
        return observe(self.env, state, self.model.nv, self.padding)

    def reset(self, seeds, only=None) -> np.ndarray:
        """Start an episode in every simulator, or only in those numbered in `only`.

        seeds: one for each new episode, or a single number s for s, s + 1, ... Returns the
        observations of all n simulators.
        """
        only = np.arange(self.n)[slice(None) if only is None else only]
        seeds = range(seeds, seeds + len(only)) if np.ndim(seeds) == 0 else seeds
        if len(seeds) != len(only):
            raise ValueError(f"{len(only)} episodes need {len(only)} seeds, not {len(seeds)}")
        rngs = (seeding.np_random(int(seed))[0] for seed in seeds)
        model = self.model
        states = [_reset_state(self.env, model.qpos0, model.nv, rng) for rng in rngs]
        return self._begin(states, only)

    def set_observations(self, obs, allow_clipped=False) -> np.ndarray:
        """Put simulator i into the state of obs[i]; see ShiftedEnv.set_observation."""
        if len(obs) != self.n:
            raise ValueError(f"{self.n} simulators need {self.n} observations, not {len(obs)}")
        states = [_state_of(self.env, o, self.model.nv, allow_clipped) for o in obs]
        return self._begin(states, np.arange(self.n))

    def step(self, actions):
        """actions [n, act_dim] -> obs [n, obs_dim], reward [n], terminated [n], truncated [n]"""
        actions = np.array(actions, np.float64)
        if actions.shape != (self.n, self.act_dim):
            raise ValueError(f"actions have shape {(self.n, self.act_dim)}, not {actions.shape}")
        ended = self.done
        actions[ended] = 0.0
        if not np.isfinite(actions).all():
            raise NotFinite(
                "an action is NaN or infinite: the policy diverged; train it at a lower rate"
            )
        cost = self.robot.ctrl_cost * np.vecdot(actions, actions)
        actions[ended] = np.nan
        state, x = self._all("advance", actions)
        reward = (x - self.x_before) / self.dt + self.robot.healthy_reward - cost
        reward[ended] = 0.0
        self.x_before = x
        self.steps += ~ended
        self.terminated |= ~is_healthy(self.env, state) & ~ended
        self.truncated |= (self.steps >= TIME_LIMIT) & ~ended
        obs = observe(self.env, state, self.model.nv, self.padding)
        return obs, reward, self.terminated.copy(), self.truncated.copy()

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def close(self):
        for connection, process in self._helpers:
            connection.close()
            process.kill()  # it may not notice: a forked child of ours may hold the connection open
            process.wait()
        self._helpers = []

    def __del__(self):
        if hasattr(self, "_helpers"):
            self.close()


def _cores() -> int:
    if not hasattr(select, "poll"):  # Windows: no helper processes
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_helper(env, shift, n, physics):
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs.fileno(), env, shift, n, physics)
    code = f"from dynashift.envs import _serve; _serve(*{arguments!r})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], env=environ
    )
    theirs.close()
    return ours, process


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
