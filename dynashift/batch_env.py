"""Many simulators of one robot in lockstep, on all cores."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import mujoco
import numpy as np
from gymnasium.utils import seeding

from dynashift.errors import NotFinite
from dynashift.models import build_model, new_data, stepper
from dynashift.states import is_healthy, observe, reset_state, reward_x, state_of
from dynashift.tasks import ANT_PADDING, ROBOTS, TIME_LIMIT


class _Simulators:
    """The share of a batch that one process steps."""

    def __init__(self, env, shift, n, physics):
        self.model = build_model(env, shift, physics)
        self.data = [new_data(self.model) for _ in range(n)]
        self._mj_step = stepper(env, physics)
        self._frame_skip = ROBOTS[env].frame_skip
        self._ctrl = [d.ctrl for d in self.data]
        self._views = [view for d in self.data for view in (d.qpos, d.qvel, reward_x(env, d))]

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
        states = [reset_state(self.env, model.qpos0, model.nv, rng) for rng in rngs]
        return self._begin(states, only)

    def set_observations(self, obs, allow_clipped=False) -> np.ndarray:
        """Put simulator i into the state of obs[i]; see ShiftedEnv.set_observation."""
        if len(obs) != self.n:
            raise ValueError(f"{self.n} simulators need {self.n} observations, not {len(obs)}")
        states = [state_of(self.env, o, self.model.nv, allow_clipped) for o in obs]
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
    code = f"from dynashift.batch_env import _serve; _serve(*{arguments!r})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], env=environ
    )
    theirs.close()
    return ours, process
