"""Films a source policy and a trained one on the target robot: python docs/policies_gif.py FOLDER

Writes docs/policies.gif. FOLDER is a finished run of taf_dt.py, whose policy is on the right. On
the left, the policy that made the source data acts on the same robot. Both start from the same
state and take their mean actions. A robot that has fallen stays in its last frame. Start it in the
folder in which the run was started.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dynashift import quick_help  # noqa: E402, F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

import taf_dt  # noqa: E402
from dynashift import make, policies, runs  # noqa: E402
from dynashift.errors import one_line_errors  # noqa: E402
from dynashift.files import atomic, check_folder, read_npz  # noqa: E402
from dynashift.scores import normalized_score  # noqa: E402
from experiments import scripts  # noqa: E402

OUT = ROOT / "docs" / "policies.gif"
SIZE = 240  # pixels of each picture, without the caption
CAPTION = 36  # pixels of the caption
STEPS = 500  # steps of each episode to show
EVERY = 5  # steps per frame; a GIF's clock only has hundredths of a second
COLORS = 48  # more colors make a larger file
INK, PAPER = (40, 40, 40), (255, 255, 255)


def trained_agent(folder: Path) -> tuple[taf_dt.Args, taf_dt.Agent]:
    """Arguments and policy of a finished run."""
    raw = runs.read_result(folder / "result.json")
    args = runs.compose(taf_dt.Args, **scripts.from_json(raw["args"]))
    saved = runs.read_checkpoint(folder / "ckpt.pt")["parts"]
    pre = read_npz(raw["preprocess"])
    d_a = saved["policy"]["action.weight"].shape[0]
    nets = taf_dt.build(args, len(pre["mu"]), d_a, torch.device("cpu"))
    for name in ("policy", "command"):
        nets[name].load_state_dict(saved[name])
    nets["policy"].eval()
    return args, taf_dt.Agent(nets, pre, args, 1)


def film(act, args: taf_dt.Args) -> tuple[list[np.ndarray], float, int]:
    """Frames of the first steps of an episode, the whole episode's return, and its length."""
    camera = {"render_mode": "rgb_array", "width": SIZE, "height": SIZE}
    env = make(args.task.env, args.task.shift, **camera)
    obs, _ = env.reset(seed=10_000 * args.run.seed)  # the first episode of the run's evaluations
    frames = []
    total = reward = 0.0
    t = 0
    ended = False
    while not ended:
        if t < STEPS and t % EVERY == 0:
            frames.append(env.render())
        obs, reward, terminated, truncated, _ = env.step(act(obs, reward))
        ended = terminated or truncated
        total += reward
        t += 1
    if t < STEPS:
        frames.append(env.render())
    env.close()
    return frames, total, t


def caption(picture: np.ndarray, lines: list[str]) -> Image.Image:
    """The picture below these lines."""
    image = Image.new("RGB", (SIZE, SIZE + CAPTION), PAPER)
    image.paste(Image.fromarray(picture), (0, CAPTION))
    font = ImageFont.load_default(13)
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((6, 2 + 16 * i), line, INK, font)
    return image


def save(path: Path, movie: list[Image.Image], milliseconds: int) -> None:
    # With one palette for all frames, the background does not flicker.
    palette = movie[len(movie) // 2].quantize(COLORS)
    movie = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in movie]
    options = {"append_images": movie[1:], "duration": milliseconds, "loop": 0}
    with atomic(path) as temporary:
        movie[0].save(temporary, "GIF", save_all=True, optimize=True, **options)


def main(folder: tyro.conf.Positional[Path], source_policy: Path | None = None) -> None:
    """Film both policies.

    Args:
        folder: a finished run of taf_dt.py.
        source_policy: what made its source data, an .npz of this project or a D4RL file, which
            contains its policy; default: the policy of the embedded data.
    """
    check_folder(OUT.parent, "copy of the project")
    args, agent = trained_agent(folder)
    env, shift = args.task.env, args.task.shift
    embedded = policies.FOLDER / f"{env}-none-{args.task.source}.npz"
    source = policies.load_policy(source_policy or embedded, env)

    def source_acts(obs, _):
        return policies.act(source, obs[None].astype(np.float32))[0]

    def agent_acts(obs, reward):
        return agent.act(obs[None], np.array([reward]), np.ones(1, bool))[0]

    sides = []
    for name, act in {"source policy": source_acts, "TAF-DT": agent_acts}.items():
        frames, total, length = film(act, args)
        score = normalized_score(env, shift, total)
        print(f"{name}: return {total:.0f}, score {score:.1f}, {length} steps")
        text = [f"{name} on the target robot", f"score of this episode: {score:.0f}"]
        sides.append([caption(frame, text) for frame in frames])
    movie = []
    for i in range(max(map(len, sides))):
        halves = [np.asarray(frames[min(i, len(frames) - 1)]) for frames in sides]
        movie.append(Image.fromarray(np.concatenate(halves, 1)))
    save(OUT, movie, round(1000 * EVERY * make(env, shift).unwrapped.dt))
    print(f"{OUT}: {len(movie)} frames, {OUT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
