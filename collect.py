"""Make data: train a behaviour policy, and roll a stored one out into a dataset.

    python collect.py train --env hopper --shift morph
    python collect.py rollout --policy dynashift/policies/hopper-none-medium.npz --env hopper --steps 9000 --out x.hdf5

`train` (pip install -r requirements-data.txt) runs CrossQ (Bhatt et al., ICLR 2024) from SBX: soft actor-critic whose
critics are batch-normalised and need no target networks, of all algorithms tried the fastest on a CPU core. It ends by
storing the policies of each level in dynashift/policies, from which `dynashift.datasets` generates embedded data.

`rollout` takes an .npz of this project, or a D4RL file, which holds the policy that made it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import tyro

from dynashift import make
from dynashift.datasets import PUBLISHED, read_hdf5, write_hdf5
from dynashift.errors import UserError, one_line_errors
from dynashift.files import check_folder, progress_bar, read_npz, write_npz
from dynashift.policies import FOLDER, Policy, evaluate, load_policy, meta, save_policy
from dynashift.policies import rollout as roll_out
from dynashift.scores import normalized_score
from dynashift.tasks import Env, Shift

LEARNING_STARTS = 5_000  # nothing is learnt in so many first steps, which are random or, with --start, its policy's
EXPERT, MEDIUM = 85, (30, 60)  # normalised scores


def rollout(
    policy: Path,
    env: Env,
    out: Path,
    shift: Shift = "none",
    steps: int = 5000,
    seed: int = 0,
    deterministic: bool = False,
    workers: int | None = None,
) -> None:
    """Roll out a stored policy into a file in D4RL's HDF5 layout.

    Args:
        policy: an .npz of this project, or a D4RL file with metadata/policy.
        env: robot.
        out: HDF5 file to write.
        shift: dynamics to roll out in.
        steps: transitions.
        seed: the same seed gives the same data, whatever the number of workers.
        deterministic: take the mean action instead of a sampled one.
        workers: processes; all cores unless told.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    if out.name in PUBLISHED:
        raise UserError(f"{out.name} is the name of a published file; choose another --out")
    if out.exists():
        raise UserError(f"{out} exists already; delete it or choose another --out")
    check_folder(out.parent)
    data = roll_out(load_policy(policy, env), env, shift, steps, seed, not deterministic, workers)
    about = {"env": env, "shift": shift, "seed": seed, "policy": policy.name, "deterministic": deterministic}
    # What D4RL's own policy does here is D4RL's data again, but for the noise.
    write_hdf5(out, data, "regenerated-d4rl" if policy.suffix == ".hdf5" else "own", about)
    made = read_hdf5(out, env, shift)
    returns, lengths = made.returns[made.complete], made.lengths[made.complete]
    print(f"{out}: {len(made)} transitions, {len(returns)} complete episodes", end="")
    if len(returns) > 1:
        error = returns.std(ddof=1) / np.sqrt(len(returns))
        print(f", return {returns.mean():.0f} +- {error:.0f} (standard error), ", end="")
        print(f"length {lengths.mean():.0f}, normalised score {made.score:.1f}", end="")
    print()


def train(
    env: Env,
    shift: Shift = "none",
    steps: int = 1_000_000,
    stop: float = 90.0,
    seed: int = 0,
    start: Path | None = None,
    explore: float = 1.0,
    out: Path = Path("runs/collect"),
    store: Path = FOLDER,
) -> None:
    """Train a behaviour policy, keep snapshots on the way, store the levels at the end. Resumes where it stopped.

    Args:
        env: robot.
        shift: dynamics.
        steps: environment steps at most.
        stop: end when 50 sampled episodes have this normalised score; below 85, no expert is stored.
        seed: of networks, exploration and environments.
        start: folder of another run of this robot; begin with its networks.
        explore: the exploration noise of the last of the eight simulators, evenly up from 1, the policy's own.
        out: folder of the runs.
        store: folder for the finished policies.
    """
    if explore < 1:
        raise UserError(f"--explore must be at least 1, the policy's own noise, not {explore}")
    if start and not (start / "checkpoint.npz").exists():
        raise UserError(f"--start {start}: no run of collect.py train, it has no checkpoint.npz")
    run = out / f"{env}-{shift}"
    check_folder(run)
    check_folder(store, "--store")
    try:
        import jax
        from flax import serialization
        from sbx import CrossQ
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}); pip install -r requirements-data.txt") from None

    run.mkdir(parents=True, exist_ok=True)
    model = CrossQ(
        "MlpPolicy",
        DummyVecEnv([lambda: make(env, shift)] * 8),
        # The actor stays a plain network, so that NumPy can run it; small ones, because compute is the limit.
        policy_kwargs={"net_arch": [128, 128], "batch_norm_actor": False},
        train_freq=15,  # of all simulators
        learning_starts=0 if start else LEARNING_STARTS,
        seed=seed,
    )

    @jax.jit
    def sample(actor, observations, key):
        variables = {"params": actor.params, "batch_stats": actor.batch_stats}
        normal = actor.apply_fn(variables, observations, train=False).distribution
        noise = jax.random.normal(key, normal.mean().shape) * jax.numpy.linspace(1, explore, 8)[:, None]
        return jax.numpy.tanh(normal.mean() + normal.stddev() * noise)

    model.policy.sample_action = sample

    columns = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")

    def networks() -> dict:
        parts = model.policy.actor_state, model.policy.qf_state, model.ent_coef_state
        return dict(zip(("actor_state", "qf_state", "ent_coef_state"), parts, strict=True))

    def restore(checkpoint: Path) -> dict[str, np.ndarray]:
        try:
            stored = read_npz(checkpoint, "networks", "counters", "key", *columns)
        except ValueError as error:
            raise UserError(f"{checkpoint}: damaged ({error}); delete it to start again") from None
        new = serialization.from_bytes(networks(), stored["networks"].tobytes())
        model.policy.actor_state, model.policy.qf_state, model.ent_coef_state = new.values()
        return stored

    checkpoint, scores = run / "checkpoint.npz", run / "progress.jsonl"
    buffer = model.replay_buffer
    if checkpoint.exists():
        stored = restore(checkpoint)
        buffer.pos, buffer.full, model.num_timesteps, model._n_updates = map(int, stored["counters"])
        model.key = jax.numpy.asarray(stored["key"])
        for column in columns:
            getattr(buffer, column)[: len(stored[column])] = stored[column]
    elif start:
        restore(start / "checkpoint.npz")

    bar = progress_bar(total=steps, initial=model.num_timesteps, unit="step", unit_scale=True, desc=run.name)
    while True:
        done = model.num_timesteps
        policy = _actor(model.policy.actor_state.params)
        save_policy(policy, run / f"{done:08d}.npz", {})
        returns = evaluate(policy, env, shift, 10, seed=done)
        score = float(normalized_score(env, shift, returns.mean()))
        if score >= stop:  # ten episodes may have been lucky
            returns = evaluate(policy, env, shift, 50, seed=done)
            score = float(normalized_score(env, shift, returns.mean()))
        with scores.open("a") as file:
            row = {"steps": done, "score": score, "return_std": returns.std(ddof=1), "seed": seed}
            file.write(json.dumps(row) + "\n")
        bar.set_postfix(score=f"{score:.1f}")
        if score >= stop or done >= steps:
            break
        # 120 steps, then 60 updates in one compiled loop: simulation is cheap next to updates, and so is Python then.
        model.gradient_steps = 60 if done else 0
        # Snapshots are dense at first: the medium level, and the ladder up to it, are picked from the way up.
        more = LEARNING_STARTS if not done else 2_000 if done < 30_000 else 5_000
        model.learn(more, reset_num_timesteps=False)
        bar.update(model.num_timesteps - done)
        filled = {c: getattr(buffer, c)[: len(buffer.rewards) if buffer.full else buffer.pos] for c in columns}
        counters = np.array([buffer.pos, buffer.full, model.num_timesteps, model._n_updates])
        state = np.frombuffer(serialization.to_bytes(networks()), np.uint8)
        write_npz(checkpoint, networks=state, counters=counters, key=np.asarray(model.key), **filled)
    bar.close()
    for path in store_levels(run, env, shift, store, expert=stop >= EXPERT):
        print(f"{path}: score {meta(path)['score']}")


def _actor(params: dict) -> Policy:
    layers = [
        (np.asarray(params[f"Dense_{i}"]["kernel"]).T, np.asarray(params[f"Dense_{i}"]["bias"])) for i in range(4)
    ]
    return Policy(layers[:2], layers[2], layers[3], Path("training"))


def store_levels(run: Path, env: str, shift: str, store: Path, expert: bool = True) -> list[Path]:
    """Pick each level's policy from a run's snapshots and store it with its score."""
    rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]

    def keep(level: str, row: dict) -> Path:
        about = {"env": env, "shift": shift, "level": level, "training_steps": row["steps"], "seed": row["seed"]}
        return store_measured(load_policy(run / f"{row['steps']:08d}.npz", env), about, store)

    def pick(level: str, rows: list, unfit: Callable) -> dict:
        """Ten episodes may deceive: of the four snapshots that look fittest, the one that is after 50."""
        return min(sorted(rows, key=unfit)[:4], key=lambda row: unfit(meta(keep(level, row))))

    def spread(row: dict) -> float:  # in points; half of it counts: the steadiest of all robots stands still
        return (normalized_score(env, shift, row["return_std"]) - normalized_score(env, shift, 0)) / 2

    def unfit_expert(row: dict) -> tuple:  # first how far below the level
        return max(EXPERT - row["score"], 0), spread(row) - row["score"]

    def unfit_medium(row: dict) -> tuple:  # first how far outside the range, then how far from its middle or unsteady
        low, high = MEDIUM
        return max(low - row["score"], row["score"] - high, 0), np.hypot(row["score"] - (low + high) / 2, spread(row))

    best = pick("expert", rows, unfit_expert) if expert else max(rows, key=lambda row: row["score"])
    way_up = [row for row in rows if row["steps"] <= best["steps"]]
    medium = pick("medium", way_up, unfit_medium)
    paths = ([keep("expert", best)] if expert else []) + [keep("medium", medium)]
    if shift == "none":  # the ladder for medium-replay: untrained, then evenly up to medium
        learning = [row for row in way_up if LEARNING_STARTS < row["steps"] < medium["steps"]]
        ladder = rows[:1] + [row for row in learning if row["score"] < medium["score"]]
        rungs = np.unique(np.linspace(0, len(ladder) - 1, 7).astype(int))
        paths += [keep(f"replay{i}", ladder[rung]) for i, rung in enumerate(rungs)]
        for left_over in set(store.glob(f"{env}-none-replay*.npz")) - set(paths):  # of an older, longer ladder
            left_over.unlink()
    return paths


def store_measured(policy: Policy, about: dict, store: Path) -> Path:
    """Store a policy with its return over 50 sampled episodes. An expert whose noise costs it its level gets less."""
    path = store / f"{about['env']}-{about['shift']}-{about['level']}.npz"
    weight, bias = policy.log_std
    for noise in (1.0, 0.5, 0.25, 0.1) if about["level"] == "expert" else (1.0,):
        quieter = policy._replace(log_std=(weight, bias + np.log(noise)))
        save_policy(quieter, path, about)
        returns = evaluate(load_policy(path), about["env"], about["shift"], 50, seed=1)
        score = normalized_score(about["env"], about["shift"], returns.mean())
        if score >= EXPERT:
            break
    measured = {"noise": noise, "return_mean": returns.mean(), "return_std": returns.std(ddof=1), "score": score}
    save_policy(quieter, path, about | {key: round(float(value), 2) for key, value in measured.items()})
    return path


if __name__ == "__main__":
    commands = tyro.extras.SubcommandApp()
    commands.command(train)
    commands.command(rollout)
    with one_line_errors():
        commands.cli()
