"""Episodes of a policy in the target's simulator, their score, and a film."""

from pathlib import Path

import numpy as np
import torch

from dynashift.any_env import LOGS, find_spaces, is_own, unscale
from dynashift.envs import make, make_batch
from dynashift.files import say
from dynashift.offline import LogBatch
from dynashift.own_data import held_out
from dynashift.scores import normalized_score


def simulators(args, n: int, workers: int | None = None, judge=None):
    """n simulators of the target in lockstep; with --env logs, n held-out episodes.

    judge: as for `LogBatch`, which the held-out episodes are.
    """
    if args.task.env == LOGS:
        return LogBatch(held_out(args.task), n, judge)
    options = {} if workers is None else {"workers": workers}
    return make_batch(args.task.env, args.task.shift, n, **options)


def scored(args, batch, returns, lengths, part: slice = slice(None)) -> dict:
    """The result of an evaluation in these simulators, or in a part of them.

    returns [n], lengths [n]: of the episodes in that part.
    """
    if args.task.env == LOGS:  # what the recorded episodes returned is not the policy's
        lengths = lengths.tolist()
        return {"returns": [], "lengths": lengths, "score": None, "offline": batch.found(part)}
    score = float(normalized_score(args.task.env, args.task.shift, returns.mean()))
    return {"returns": returns.tolist(), "lengths": lengths.tolist(), "score": score}


@torch.no_grad()
def play(args, act, workers: int | None = None, judge=None) -> dict:
    """Play episodes side by side in the target's simulator, the same ones at every evaluation.

    act maps observations [n, d_s], the rewards [n] of the last step, and a mask [n] of the episodes
    that are still running to actions [n, d_a]. judge: as for `simulators`.
    """
    n = args.run.eval_episodes
    batch = simulators(args, n, workers, judge)
    obs = batch.reset(10_000 * args.run.seed)
    alive = np.ones(n, bool)
    returns = np.zeros(n)
    lengths = np.zeros(n, int)
    rewards = np.zeros(n)
    while alive.any():
        obs, rewards, terminated, truncated = batch.step(act(obs, rewards, alive))
        returns += rewards  # 0 after the end
        lengths += alive
        alive = ~(terminated | truncated)
    batch.close()
    return scored(args, batch, returns, lengths)


def record_video(path: Path, args, act) -> None:
    """Film the first episode of an evaluation. act: as for `play`, for one robot."""
    import imageio

    if args.task.env == LOGS:
        say("no video: --env logs has no simulator")
        return
    seed = 10_000 * args.run.seed
    own = is_own(args.task.env)
    camera = {"render_mode": "rgb_array"} | ({} if own else {"width": 320, "height": 320})
    env = make(args.task.env, args.task.shift, seed=seed, **camera)
    bounds = find_spaces(args.task.env, args.task.shift).bounds
    obs, _ = env.reset(seed=seed)
    frames = []
    steps = 0
    reward = 0.0
    ended = False
    while not ended:
        if steps % 3 == 0:  # a GIF's clock only has hundredths of a second
            frames.append(env.render())
        action = act(obs[None], np.array([reward]), np.ones(1, bool))[0]
        obs, reward, terminated, truncated, _ = env.step(unscale(action, bounds))
        ended = terminated or truncated
        steps += 1
    env.close()
    dt = 1 / env.metadata.get("render_fps", 30) if own else env.unwrapped.dt
    imageio.mimsave(path, frames, duration=3000 * dt, loop=0)
    say(f"video of {steps} steps: {path}")
