"""The sixteen robots side by side: python docs/robots.py writes docs/robots.png.

Gravity does not show in a still picture, so each robot moves for a moment under its own policy
before its picture is taken.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import make
from dynashift.errors import one_line_errors
from dynashift.files import atomic, check_folder
from dynashift.policies import FOLDER, act, load_policy

OUT = Path(__file__).with_suffix(".png")
ROWS = ("halfcheetah", "hopper", "walker2d", "ant")
COLUMNS = {
    "none": "source",
    "gravity": "gravity halved",
    "kinematic": "joint ranges",
    "morph": "body shape",
}


def main(steps: int = 45) -> None:
    check_folder(OUT.parent, "copy of the project")
    fig, axes = plt.subplots(4, 4, figsize=(8.6, 8.6), layout="constrained")
    for i, robot in enumerate(ROWS):
        for j, (shift, title) in enumerate(COLUMNS.items()):
            env = make(robot, shift, render_mode="rgb_array", width=360, height=360)
            policy = load_policy(FOLDER / f"{robot}-{shift}-expert.npz", robot)
            obs, _ = env.reset(seed=3)
            for _ in range(steps):
                obs, *_ = env.step(act(policy, obs[None])[0])
            axes[i, j].imshow(env.render())
            env.close()
            axes[i, j].set(xticks=[], yticks=[])
            if i == 0:
                axes[i, j].set_title(title)
        axes[i, 0].set_ylabel(robot)
    with atomic(OUT) as temporary:
        fig.savefig(temporary, dpi=75, format="png")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
