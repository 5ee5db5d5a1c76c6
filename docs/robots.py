"""The four robots and what changes about them: python docs/robots.py writes docs/robots.png.

Each robot has the same pose everywhere, with the joints that the kinematic shift restricts at bent
as far as BEND, or as their range allows. Halved gravity does not show in a still picture.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import mujoco
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import make
from dynashift.errors import one_line_errors
from dynashift.files import atomic, check_folder

OUT = Path(__file__).with_suffix(".png")
ROWS = ("halfcheetah", "hopper", "walker2d", "ant")
BEND = 0.9  # radians
FROM_ABOVE = {"distance": 3.2, "elevation": -70.0, "azimuth": 90.0, "lookat": [0.0, 0.0, 0.6]}
CAMERAS = {"ant": {"camera_id": -1, "default_cam_config": FROM_ABOVE}}  # the others' is their XML's
COLUMNS = {"none": "source", "kinematic": "joint ranges", "morph": "body shape"}


def picture(robot: str, shift: str) -> np.ndarray:
    camera = {"width": 360, "height": 360, **CAMERAS.get(robot, {})}
    env = make(robot, shift, seed=0, render_mode="rgb_array", **camera)
    model, data = env.unwrapped.model, env.unwrapped.data
    ranges = [make(robot, name).unwrapped.model.jnt_range for name in ("none", "kinematic")]
    data.qpos[:] = model.qpos0
    for joint in np.flatnonzero(model.jnt_limited):
        low, high = model.jnt_range[joint]
        angle = 0.0
        if (ranges[0][joint] != ranges[1][joint]).any():
            angle = BEND if high >= -low else -BEND
        data.qpos[model.jnt_qposadr[joint]] = np.clip(angle, low, high)
    mujoco.mj_forward(model, data)
    frame = env.render()
    env.close()
    return frame


def main() -> None:
    check_folder(OUT.parent, "copy of the project")
    size = (2.15 * len(COLUMNS), 8.6)
    fig, axes = plt.subplots(len(ROWS), len(COLUMNS), figsize=size, layout="constrained")
    for i, robot in enumerate(ROWS):
        for j, (shift, title) in enumerate(COLUMNS.items()):
            axes[i, j].imshow(picture(robot, shift))
            axes[i, j].set(xticks=[], yticks=[])
            if i == 0:
                axes[i, j].set_title(title)
        axes[i, 0].set_ylabel(robot)
    with atomic(OUT) as temporary:
        fig.savefig(temporary, dpi=75, format="png")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
