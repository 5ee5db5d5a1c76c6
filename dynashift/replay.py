"""Proof that these environments recorded the published data:  python -m dynashift.replay FOLDER

Every recorded state is put into the simulator, the recorded action is taken, and the outcome is
compared with the record. Only rows with a velocity at the observation's limit are left out, because
their true state was not recorded. As a contrast, 500 rows of each target file are also replayed in
the unshifted environment.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from dynashift.download import task_of
from dynashift.envs import make
from dynashift.episodes import read_hdf5
from dynashift.errors import UserError, one_line_errors
from dynashift.files import progress_bar
from dynashift.tasks import QUALITIES, ROBOTS, SHIFTS
from dynashift.transitions import Dataset


class Errors(NamedTuple):
    state: np.ndarray  # largest error over the next observation's entries, [rows]
    reward: np.ndarray  # [rows]
    terminal: np.ndarray  # bool, the flags differ, [rows]

    def falls_short(self) -> bool:
        exact = np.median(self.state) <= 1e-6 and np.mean(self.state < 1e-3) >= 0.997
        return not exact or self.terminal.any() or np.median(self.reward) > 1e-6


def replay(data: Dataset, shift: str, rows: np.ndarray) -> Errors:
    env = make(data.env, shift).unwrapped
    out = []
    for i in rows:
        lag = 0.0
        if data.env == "ant" and data.steps[i] > 0:
            # Ant's reward is computed from the torso's xpos, which lags one integrator stage behind
            # the state. The previous transition shows by how much.
            env.set_observation(data.observations[i - 1])
            env.step(data.actions[i - 1])
            lag = env.x_before - env.data.qpos[0]
        env.set_observation(data.observations[i])
        env.x_before += lag
        obs, reward, terminated, _, _ = env.step(data.actions[i])
        difference = np.abs(obs - data.next_observations[i]).max()
        reward_error = abs(reward - float(data.rewards[i]))
        out.append((difference, reward_error, terminated != data.terminals[i]))
    state, reward, terminal = np.array(out).T
    return Errors(state, reward, terminal.astype(bool))


def usable_rows(data: Dataset) -> np.ndarray:
    limit = ROBOTS[data.env].clip
    if not np.isfinite(limit):
        return np.arange(len(data))
    velocities = data.observations[:, -len(data.observations[0]) // 2 :]  # half, rounded up
    return np.flatnonzero((np.abs(velocities) < limit).all(1))


def replay_file(path: Path) -> tuple[str, bool]:
    """One row of the table, and whether the file falls short."""
    env, shift, quality = task_of(path)
    data = read_hdf5(path, env, shift, quality)
    rows = usable_rows(data)
    found = replay(data, shift, rows)
    cells = [
        f"{len(rows)}",
        f"{np.median(found.state):.1e}",
        f"{np.quantile(found.state, 0.95):.1e}",
        f"{found.state.max():.1e}",
        f"{np.mean(found.state < 1e-3):.4f}",
        f"{np.median(found.reward):.1e}",
        f"{found.terminal.sum()}",
    ]
    if shift == "none":
        cells += ["", ""]
    else:
        some = np.linspace(0, len(rows) - 1, min(500, len(rows))).astype(int)
        contrast = replay(data, "none", rows[some])
        cells += [f"{np.median(contrast.state):.1e}", f"{np.mean(contrast.state < 1e-3):.3f}"]
    return f"| {path.name.removesuffix('.hdf5')} | {' | '.join(cells)} |", found.falls_short()


HEADER = (
    "| file | rows | median | 95 % | max | < 1e-3 | reward, median | terminal mismatches "
    "| unshifted: median | < 1e-3 |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main(folder: tyro.conf.Positional[Path], workers: int | None = None) -> int:
    """Replay every dataset of a folder; the exit status is the number of files that fall short.

    Args:
        folder: with published files, such as hopper_morph_medium.hdf5
        workers: processes to use; default: all cores
    """
    order = list(ROBOTS), list(SHIFTS), list(QUALITIES["target"])

    def place(path: Path) -> list[int]:
        words = zip(order, task_of(path), strict=True)
        return [known.index(word) if word in known else 9 for known, word in words]

    paths = sorted((path for path in folder.rglob("*.hdf5") if task_of(path)), key=place)
    if not paths:
        raise UserError(f"{folder}: no dataset here with a name like hopper_morph_medium.hdf5")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        results = progress_bar(pool.map(replay_file, paths), total=len(paths), unit="file")
        table, short = zip(*results, strict=True)
    print("\n".join([HEADER, *table]))
    print(f"\n{len(paths)} files, {sum(short)} fall short")
    for path, falls_short in zip(paths, short, strict=True):
        if falls_short:
            print(f"  {path}")
    return int(sum(short))


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(tyro.cli(main))
