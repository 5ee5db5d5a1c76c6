"""Behaviour policies: read one, act with it, roll it out into a dataset.

A policy is a small tanh-Gaussian network. It comes from a D4RL file, which holds its own behaviour
policy under `metadata/policy`, or from one of the `.npz` files in this folder, which
`collect.py train` makes (see README.md beside them).
"""

import json
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from threadpoolctl import threadpool_limits

from dynashift.batch_env import BatchEnv
from dynashift.columns import inside, open_hdf5, stamp
from dynashift.envs import make_batch
from dynashift.errors import UserError
from dynashift.files import progress_bar, read_npz, write_npz
from dynashift.tasks import ANT_PADDING, ROBOTS, TIME_LIMIT

FOLDER = Path(__file__).parent
# Every forward pass has this many rows, padded if necessary, so that an action never depends on how
# many episodes run at once.
WIDTH = 64


class Policy(NamedTuple):
    hidden: list  # of (weight [out, in], bias [out]), each followed by a ReLU
    mean: tuple
    log_std: tuple
    path: Path


def load_policy(path: str | Path, env: str | None = None) -> Policy:
    path = Path(path)
    try:
        if path.suffix == ".npz":
            arrays = read_npz(path).items()
            tree = {key: np.asarray(x, np.float32) for key, x in arrays if key != "meta"}
            names = ("fc{}.{}", "mean.{}", "log_std.{}")
        else:
            stamp(path)
            with open_hdf5(path) as file:
                group = inside(file, "metadata/policy")
                kind = group["nonlinearity"][()], group["output_distribution"][()]
                if kind != (b"relu", b"tanh_gaussian"):
                    raise UserError(
                        f"{path}: a policy with {kind}, only relu and tanh_gaussian can be read"
                    )
                tree = {}

                def visit(key, item):
                    if isinstance(item, h5py.Dataset):
                        tree[key] = inside(group, key)[()]

                group.visititems(visit)
            names = ("fc{}/{}", "last_fc/{}", "last_fc_log_std/{}")

        def layer(name, *i):
            return tuple(tree[name.format(*i, part)] for part in ("weight", "bias"))

        # A layer of which only a part is there counts, and is then missed below.
        parts = [(names[0].format(i, "weight"), names[0].format(i, "bias")) for i in range(9)]
        depth = sum(weight in tree or bias in tree for weight, bias in parts)
        hidden = [layer(names[0], i) for i in range(depth)]
        policy = Policy(hidden, layer(names[1]), layer(names[2]), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except KeyError as error:
        raise UserError(f"{path}: holds no behaviour policy ({error.args[0]})") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable policy ({str(error).splitlines()[0]})") from None
    _check_shapes(policy)
    sizes = [w.shape[1] for w, _ in policy.hidden] + [policy.mean[0].shape[0]]
    if env and (sizes[0] not in _input_sizes(env) or sizes[-1] != ROBOTS[env].act_dim):
        raise UserError(
            f"{path}: maps {sizes[0]} numbers to {sizes[-1]} actions, "
            f"so it is not a policy for {env}"
        )
    return policy


def _check_shapes(policy: Policy) -> None:
    """Each layer takes the output of the layer before it, and all numbers are finite."""
    layers = [*policy.hidden, policy.mean, policy.log_std]
    # The last hidden layer comes before both mean and log_std.
    before = [None, *policy.hidden, *policy.hidden[-1:]]
    fits = len(policy.hidden) > 0 and policy.mean[1].shape == policy.log_std[1].shape
    for (weight, bias), last in zip(layers, before, strict=True) if fits else ():
        fits &= weight.ndim == 2 and bias.shape == weight.shape[:1]
        fits &= last is None or weight.shape[1:] == last[1].shape
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise UserError(f"{policy.path}: this policy has weights that are NaN or infinite")
    if not fits:
        shapes = ", ".join(f"{weight.shape} {bias.shape}" for weight, bias in layers)
        raise UserError(
            f"{policy.path}: the layers of this policy do not fit each other ({shapes})"
        )


def _input_sizes(env: str):
    size = ROBOTS[env].obs_dim
    return (size, size + ANT_PADDING) if env == "ant" else (size,)


def for_quality(env: str, shift: str, quality: str) -> list[Path]:
    """The shipped policies whose data, in equal shares, make up a dataset of this quality."""
    levels = ["medium", "expert"] if quality == "medium-expert" else [quality]
    files = [FOLDER / f"{env}-{shift}-{level}.npz" for level in levels]
    if quality == "medium-replay":  # snapshots from untrained to medium
        files = sorted(FOLDER.glob(f"{env}-{shift}-replay*.npz"))
        files.append(FOLDER / f"{env}-{shift}-medium.npz")
    missing = [file.stem for file in files if not file.exists()]
    if missing or (quality == "medium-replay" and len(files) < 6):
        raise UserError(
            f"no embedded {quality} data for {env}-{shift}: the project ships no policy "
            f"{', '.join(missing)}; train it with collect.py train, or use --data d4rl"
        )
    return files


def meta(path: str | Path) -> dict:
    """What is known about a stored policy: robot, shift, level, score, training steps, seed."""
    return json.loads(str(read_npz(path, "meta")["meta"]))


def act(policy: Policy, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
    """Actions [n, act_dim] for observations [n, obs_dim], with n <= WIDTH.

    noise: standard normal numbers [n, act_dim]; without them, the mean action is taken.
    """
    # The last bits of a matrix product depend on a row's place in it, yet the same observation must
    # give the same action in every row. So this computes in float64 and rounds to float32.
    inputs = policy.hidden[0][0].shape[1]
    x = np.zeros((WIDTH, inputs))  # D4RL's ant policy reads 111 numbers, of which 84 are zero
    x[: len(obs), : min(inputs, obs.shape[1])] = obs[:, :inputs]
    for weight, bias in policy.hidden:
        x = np.maximum(x @ weight.T + bias, 0)
    action = (x @ policy.mean[0].T + policy.mean[1])[: len(obs)].astype(np.float32)
    if noise is not None:
        log_std = np.clip(x @ policy.log_std[0].T + policy.log_std[1], -20, 2)[: len(obs)]
        action = action + np.exp(log_std.astype(np.float32)) * noise
    return np.tanh(action)


def evaluate(policy, env, shift, episodes, seed=0, stochastic=True) -> np.ndarray:
    """Returns of this many whole episodes."""
    rng = np.random.default_rng(seed)
    returns = np.zeros(episodes)
    for first in range(0, episodes, WIDTH):
        block = slice(first, min(first + WIDTH, episodes))
        batch = make_batch(env, shift, block.stop - first)
        obs = batch.reset(seed + first)
        with threadpool_limits(1):
            while not batch.done.all():
                noise = None
                if stochastic:
                    noise = rng.standard_normal((batch.n, batch.act_dim), np.float32)
                obs, reward, _, _ = batch.step(act(policy, obs.astype(np.float32), noise))
                returns[block] += reward
        batch.close()
    return returns


def save_policy(policy: Policy, path: Path, about: dict) -> None:
    """Store it as float16; `load_policy` and `meta` read it back."""
    layers = {f"fc{i}": layer for i, layer in enumerate(policy.hidden)}
    layers |= {"mean": policy.mean, "log_std": policy.log_std}
    arrays = {}
    for name, (weight, bias) in layers.items():
        arrays[f"{name}.weight"] = np.asarray(weight, np.float16)
        arrays[f"{name}.bias"] = np.asarray(bias, np.float16)
    write_npz(path, meta=json.dumps(about), **arrays)


def empty_columns(batch: BatchEnv) -> dict[str, np.ndarray]:
    """Room for one episode in each of n simulators, [TIME_LIMIT, n, ...]."""
    shape = (TIME_LIMIT, batch.n)
    return {
        "observations": np.zeros((*shape, batch.obs_dim), np.float32),
        "actions": np.zeros((*shape, batch.act_dim), np.float32),
        "rewards": np.zeros(shape, np.float32),
        "next_observations": np.zeros((*shape, batch.obs_dim), np.float32),
        "terminals": np.zeros(shape, bool),
        "timeouts": np.zeros(shape, bool),
    }


def rollout(
    policy, env, shift, steps, seed=0, stochastic=True, workers=None, progress=True
) -> dict[str, np.ndarray]:
    """The first `steps` transitions of episodes 0, 1, 2, ...

    Episode k depends on (policy, seed, k) alone: neither the number of workers nor `steps` changes
    it, and no episode is left out because it is long.
    """
    # No more than a policy that never falls needs: of further episodes, nothing would be kept.
    width = int(np.clip(steps // TIME_LIMIT, 4, WIDTH))
    batch = make_batch(env, shift, width, workers=workers)
    columns = empty_columns(batch)
    noise = np.zeros((TIME_LIMIT, width, batch.act_dim), np.float32)
    everyone = idle = np.arange(width)
    episode = np.arange(width)  # the number of the episode that each simulator runs
    finished = {}  # episodes by number
    taken = 0  # transitions made, in finished episodes and in those under way
    in_order = recorded = 0  # number of the first episodes that are all finished; their transitions
    name = f"{env}-{shift} {policy.path.stem}"
    bar = progress_bar(total=steps, unit="step", unit_scale=True, desc=name, disable=not progress)
    # The network is small and the other cores are busy simulating, so more threads only get in the
    # way.
    with bar, threadpool_limits(1):
        while recorded < steps:
            if len(idle) and taken < steps:  # otherwise the episodes under way are enough
                sequences = [np.random.SeedSequence([seed, k]) for k in episode[idle]]
                for i, sequence in zip(idle, sequences, strict=True):
                    rng = np.random.default_rng(sequence)
                    noise[:, i] = rng.standard_normal(noise[:, i].shape, np.float32)
                seeds = [sequence.generate_state(1)[0] for sequence in sequences]
                obs = batch.reset(seeds, only=idle).astype(np.float32)
            alive = everyone[~batch.done]
            now = batch.steps[alive], alive
            action = np.zeros((width, batch.act_dim), np.float32)
            action[alive] = act(policy, obs[alive], noise[now] if stochastic else None)
            next_obs, reward, terminated, truncated = batch.step(action)
            next_obs = next_obs.astype(np.float32)
            new = obs, action, reward, next_obs, terminated, truncated & ~terminated
            for column, value in zip(columns.values(), new, strict=True):
                column[now] = value[alive]
            obs = next_obs
            taken += len(alive)
            idle = alive[batch.done[alive]]
            for i in idle:
                end = batch.steps[i]
                finished[episode[i]] = {key: x[:end, i].copy() for key, x in columns.items()}
            episode[idle] = episode.max() + 1 + np.arange(len(idle))
            while recorded < steps and in_order in finished:
                recorded += len(finished[in_order]["rewards"])
                in_order += 1
            bar.update(min(taken, steps) - bar.n)
    batch.close()
    episodes = [finished[k] for k in range(in_order)]
    data = {key: np.concatenate([e[key] for e in episodes])[:steps] for key in columns}
    # The number of steps may cut the last episode off.
    data["timeouts"][-1] = not data["terminals"][-1]
    return data


# ----------------------------------------------------------------------------------------- datasets
