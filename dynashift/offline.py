"""What can be known about a policy without a simulator (--env logs), from held-out target episodes.

The policy sees the recorded states, whatever it does, and its actions are compared with the
recorded ones. This shows how close the policy is to the data and how the critics value it. It does
not show how well the robot would do.
"""

import numpy as np
import torch

from dynashift.transitions import Dataset


class LogBatch:
    """n held-out episodes in place of n simulators, with the methods of BatchEnv.

    judge maps observations [m, d_s] and actions [m, d_a] to their values q [m], and more by name.
    """

    def __init__(self, data: Dataset, n: int, judge=None):
        self.data, self.n, self.judge = data, n, judge
        self.obs_dim, self.act_dim = data.observations.shape[1], data.actions.shape[1]

    def reset(self, seeds) -> np.ndarray:
        """Equal seeds give equal episodes. Some repeat if there are too few."""
        seeds = np.arange(self.n) if np.ndim(seeds) == 0 else np.asarray(seeds)
        self.episodes = (seeds - seeds.min()) % len(self.data.starts)
        self.t = 0
        self.sums: dict[str, np.ndarray] = {}
        self.obs = self.data.observations[self.data.starts[self.episodes]].astype(float)
        return self.obs.copy()

    def step(self, actions):
        """actions [n, d_a] -> obs [n, d_s], reward [n], terminated [n], truncated [n]"""
        data, alive = self.data, self.t < self.data.lengths[self.episodes]
        rows = data.starts[self.episodes[alive]] + self.t  # [m]
        self._compare(np.asarray(actions)[alive], rows, alive)
        rewards = np.zeros(self.n)
        rewards[alive] = data.rewards[rows]
        self.obs[alive] = data.next_observations[rows]
        self.t += 1
        ended = self.t >= data.lengths[self.episodes]
        last = data.starts[self.episodes] + data.lengths[self.episodes] - 1
        failed = data.terminals[last]
        return self.obs.copy(), rewards, ended & failed, ended & ~failed

    def _compare(self, actions: np.ndarray, rows: np.ndarray, alive: np.ndarray) -> None:
        recorded = self.data.actions[rows]
        found = {"action_mse": ((actions - recorded) ** 2).mean(1)}
        if self.judge:
            obs = self.data.observations[rows]
            found |= self.judge(obs, actions)
            found["q_policy"], found["q_data"] = found.pop("q"), self.judge(obs, recorded)["q"]
        for name, values in found.items():
            self.sums.setdefault(name, np.zeros(self.n))[alive] += np.asarray(values, float)

    def found(self, part: slice = slice(None)) -> dict:
        """Means over the transitions of these simulators' episodes, each episode counted once."""
        chosen = np.arange(self.n)[part]
        chosen = chosen[np.unique(self.episodes[chosen], return_index=True)[1]]
        lengths = self.data.lengths[self.episodes[chosen]]
        means = {key: float(x[chosen].sum() / lengths.sum()) for key, x in self.sums.items()}
        episode = np.repeat(np.arange(len(self.data.starts)), self.data.lengths)  # of every row
        inside = np.isin(episode, self.episodes[chosen])
        spread = float(self.data.actions[inside].var(0, dtype=np.float64).mean())
        counts = {"episodes": len(chosen), "transitions": int(lengths.sum())}
        return means | {"action_variance": spread} | counts

    def close(self) -> None:
        pass


def value_of(critics, normalised, device):
    """A `judge` for LogBatch: the smaller value of twin critics (s, a) -> [2, m]."""

    @torch.no_grad()
    def judge(observations, actions) -> dict:
        pair = (normalised(observations), actions)
        s, a = (torch.as_tensor(x, dtype=torch.float32, device=device) for x in pair)
        return {"q": critics(s, a).amin(0).cpu()}

    return judge


def judge_of(agent):
    """The same for an agent of taf_dt.py, with whether its commands lie among the tokens."""
    value = value_of(agent.nets["critics"], agent.normalised, agent.args.run.device)

    @torch.no_grad()
    def judge(observations, actions) -> dict:
        found = value(observations, actions)
        if "token_min" in agent.record:
            c = agent.nets["command"](agent.normalised(observations))[0]
            inside = (agent.record["token_min"] <= c) & (c <= agent.record["token_max"])
            found["commands_in_range"] = inside.cpu()
        return found

    return judge


def describe(found: dict) -> str:
    """One line on what was found."""
    text = f"action error {found['action_mse']:.4f} on held-out target data, where actions vary by "
    text += f"{found['action_variance']:.4f}"
    if "q_policy" in found:
        text += f"; value {found['q_policy']:.1f}, of the recorded actions {found['q_data']:.1f}"
    if "commands_in_range" in found:
        text += f"; commands in range {found['commands_in_range']:.0%}"
    return text
