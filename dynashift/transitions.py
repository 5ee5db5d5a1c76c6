"""A dataset of transitions, whatever file it was read from."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dynashift.scores import normalized_score
from dynashift.tasks import OWN, TIME_LIMIT

COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


@dataclass(frozen=True)
class Dataset:
    env: str
    shift: str
    quality: str
    # "published", "embedded" (made by the project's policies), "regenerated-d4rl" (made by D4RL's
    # policies), "own" or "minari"
    kind: str
    path: str
    sha256: str
    observations: np.ndarray  # float32 [N, obs_dim]
    actions: np.ndarray  # float32 [N, act_dim]
    rewards: np.ndarray  # float32 [N]
    next_observations: np.ndarray  # float32 [N, obs_dim]
    terminals: np.ndarray  # bool [N], the robot failed: nothing follows
    timeouts: np.ndarray  # bool [N], the episode ends here for any other reason
    bounds: tuple | None = None  # of the actions in the file, if they were scaled to [-1, 1]

    def __len__(self) -> int:
        return len(self.rewards)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each episode's first transition, [episodes]."""
        return np.flatnonzero(np.roll(self.terminals | self.timeouts, 1))

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(np.append(self.starts, len(self)))

    @cached_property
    def steps(self) -> np.ndarray:
        """Step within its episode, 0.., of every transition, [N]."""
        return np.arange(len(self)) - np.repeat(self.starts, self.lengths)

    @cached_property
    def left(self) -> np.ndarray:
        """Steps from every transition to the end of its episode, itself included, [N]."""
        return np.repeat(self.lengths, self.lengths) - self.steps

    @cached_property
    def to_go(self) -> np.ndarray:
        """Undiscounted return from every transition to the end of its episode, float32 [N]."""
        episodes = np.split(self.rewards.astype(np.float64), self.starts[1:])
        return np.concatenate([e[::-1].cumsum()[::-1] for e in episodes]).astype(np.float32)

    @cached_property
    def returns(self) -> np.ndarray:
        return np.add.reduceat(self.rewards.astype(np.float64), self.starts)

    @cached_property
    def complete(self) -> np.ndarray:
        """Which episodes are not cut off by the end of the file, [episodes].

        In the published medium-expert files, some episodes that reached the time limit lack their
        last one or two rows. They count as complete.
        """
        if (self.env, self.shift) in OWN:  # such a file says itself where episodes end
            return np.ones(len(self.starts), bool)
        return self.terminals[self.starts + self.lengths - 1] | (self.lengths >= TIME_LIMIT - 2)

    @cached_property
    def score(self) -> float:
        """Mean normalised score of the complete episodes (of all, if none is)."""
        returns = self.returns[self.complete] if self.complete.any() else self.returns
        return float(normalized_score(self.env, self.shift, returns.mean()))

    def first(self, size: int) -> "Dataset":
        """The first `size` transitions; the last episode may be cut."""
        if size >= len(self):
            return self
        columns = {key: getattr(self, key)[:size] for key in COLUMNS}
        columns["timeouts"] = columns["timeouts"].copy()
        columns["timeouts"][-1] = not columns["terminals"][-1]
        return replace(self, **columns)

    @property
    def provenance(self) -> dict:
        """What a result records about its data."""
        keys = ("env", "shift", "quality", "kind", "path", "sha256")
        named = {key: getattr(self, key) for key in keys}
        named |= {"transitions": len(self), "score": round(self.score, 2)}
        return named | ({"bounds": self.bounds} if self.bounds else {})


def join(source: Dataset, target: Dataset, time_limit: int) -> dict[str, np.ndarray]:
    """Columns [N, ...] of the source and then the target, as sequence models need them."""

    def both(column: str) -> np.ndarray:
        return np.concatenate([getattr(source, column), getattr(target, column)])

    return {
        "actions": both("actions"),
        "rewards": both("rewards"),
        "terminal": both("terminals"),
        "steps": np.minimum(both("steps"), time_limit - 1),
        "left": both("left"),
        "tokens": both("to_go") / np.float32(1000),  # returns-to-go in thousands
    }
