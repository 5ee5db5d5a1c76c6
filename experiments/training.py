"""Behaviour policies: train one with CrossQ, and pick each level's policy from its snapshots."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dynashift import make
from dynashift.errors import UserError
from dynashift.files import check_folder, progress_bar, read_npz, write_npz
from dynashift.folders import writing
from dynashift.policies import FOLDER, Policy, evaluate, load_policy, meta, save_policy
from dynashift.scores import normalized_score
from dynashift.tasks import Env, Shift

# Nothing is learned in the first steps, which are random or, with --start, those of its policy.
LEARNING_STARTS = 5_000
EXPERT, MEDIUM = 85, (30, 60)  # normalised scores
SIMULATORS = 8

COLUMNS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
PARTS = ("actor_state", "qf_state", "ent_coef_state")


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
    """Train a behaviour policy, keep snapshots on the way, and store the levels at the end.

    The same command resumes where it stopped.

    Args:
        env: robot.
        shift: dynamics.
        steps: environment steps at most.
        stop: end when 50 sampled episodes have this normalised score; no expert is stored if it
            is below 85.
        seed: of networks, exploration and environments.
        start: folder of another run of this robot; begin with its networks.
        explore: exploration noise of the last of the eight simulators, as a multiple of the
            policy's own noise, which the first one has.
        out: folder of the runs.
        store: folder for the finished policies.
    """
    if explore < 1:
        raise UserError(f"--explore must be at least 1, the policy's own noise, not {explore}")
    if start and not (start / "checkpoint.npz").exists():
        raise UserError(
            f"--start {start}: no run of collect.py train, because it has no checkpoint.npz"
        )
    run = out / f"{env}-{shift}"
    check_folder(run)
    check_folder(store, "--store")
    model = build(env, shift, seed, explore, learning_starts=0 if start else LEARNING_STARTS)
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoint.npz"
    if checkpoint.exists():
        restore_all(model, checkpoint)
    elif start:
        restore_networks(model, start / "checkpoint.npz")
    options = dict(initial=model.num_timesteps, unit="step", unit_scale=True, desc=run.name)
    with progress_bar(total=steps, **options) as bar:
        while True:
            done = model.num_timesteps
            score = snapshot(model, run, env, shift, seed, stop)
            bar.set_postfix(score=f"{score:.1f}")
            if score >= stop or done >= steps:
                break
            learn_some(model)
            bar.update(model.num_timesteps - done)
            save(model, checkpoint)
    for path in store_levels(run, env, shift, store, expert=stop >= EXPERT):
        print(f"{path}: score {meta(path)['score']}")


def build(env: str, shift: str, seed: int, explore: float, learning_starts: int):
    """A CrossQ model whose simulators explore with more and more noise."""
    try:
        import jax
        from sbx import CrossQ
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError as error:
        raise UserError(
            f"training needs more packages ({error}); pip install -r requirements-data.txt"
        ) from None
    model = CrossQ(
        "MlpPolicy",
        DummyVecEnv([lambda: make(env, shift)] * SIMULATORS),
        # The actor is a plain network, so that NumPy can run it, and small, so that it is cheap.
        policy_kwargs={"net_arch": [128, 128], "batch_norm_actor": False},
        train_freq=15,  # steps of all simulators
        learning_starts=learning_starts,
        seed=seed,
    )

    @jax.jit
    def sample(actor, observations, key):
        variables = {"params": actor.params, "batch_stats": actor.batch_stats}
        normal = actor.apply_fn(variables, observations, train=False).distribution
        factors = jax.numpy.linspace(1, explore, SIMULATORS)[:, None]
        noise = jax.random.normal(key, normal.mean().shape) * factors
        return jax.numpy.tanh(normal.mean() + normal.stddev() * noise)

    model.policy.sample_action = sample
    return model


def learn_some(model) -> None:
    """Learn until the next snapshot."""
    done = model.num_timesteps
    # 120 steps, then 60 updates in one compiled loop: a step is cheap next to an update, and Python
    # costs little then.
    model.gradient_steps = 60 if done else 0
    # Snapshots are dense at first: the medium level, and the ladder up to it, are picked from them.
    more = LEARNING_STARTS if not done else 2_000 if done < 30_000 else 5_000
    model.learn(more, reset_num_timesteps=False)


def snapshot(model, run: Path, env: str, shift: str, seed: int, stop: float) -> float:
    """Store the current policy; returns its score, and appends it to progress.jsonl."""
    done, policy = model.num_timesteps, actor(model.policy.actor_state.params)
    save_policy(policy, run / f"{done:08d}.npz", {})
    returns = evaluate(policy, env, shift, 10, seed=done)
    score = float(normalized_score(env, shift, returns.mean()))
    if score >= stop:  # ten episodes may have been lucky
        returns = evaluate(policy, env, shift, 50, seed=done)
        score = float(normalized_score(env, shift, returns.mean()))
    row = {"steps": done, "score": score, "return_std": returns.std(ddof=1), "seed": seed}
    path = run / "progress.jsonl"
    with writing(path), path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return score


# ------------------------------------------------------------------------------------- checkpoints


def networks(model) -> dict:
    states = model.policy.actor_state, model.policy.qf_state, model.ent_coef_state
    return dict(zip(PARTS, states, strict=True))


def restore_networks(model, checkpoint: Path) -> dict[str, np.ndarray]:
    from flax import serialization

    try:
        stored = read_npz(checkpoint, "networks", "counters", "key", *COLUMNS)
    except ValueError as error:
        raise UserError(f"{checkpoint}: damaged ({error}); delete it to start again") from None
    new = serialization.from_bytes(networks(model), stored["networks"].tobytes())
    model.policy.actor_state, model.policy.qf_state, model.ent_coef_state = new.values()
    return stored


def restore_all(model, checkpoint: Path) -> None:
    import jax

    stored, buffer = restore_networks(model, checkpoint), model.replay_buffer
    counters = map(int, stored["counters"])
    buffer.pos, buffer.full, model.num_timesteps, model._n_updates = counters
    model.key = jax.numpy.asarray(stored["key"])
    for column in COLUMNS:
        getattr(buffer, column)[: len(stored[column])] = stored[column]


def save(model, checkpoint: Path) -> None:
    from flax import serialization

    buffer = model.replay_buffer
    filled = len(buffer.rewards) if buffer.full else buffer.pos
    counters = [buffer.pos, buffer.full, model.num_timesteps, model._n_updates]
    arrays = {
        "networks": np.frombuffer(serialization.to_bytes(networks(model)), np.uint8),
        "counters": np.array(counters),
        "key": np.asarray(model.key),
    }
    arrays |= {column: getattr(buffer, column)[:filled] for column in COLUMNS}
    write_npz(checkpoint, **arrays)


def actor(params: dict) -> Policy:
    """The actor of SBX as a policy of this project."""
    dense = [params[f"Dense_{i}"] for i in range(4)]
    layers = [(np.asarray(layer["kernel"]).T, np.asarray(layer["bias"])) for layer in dense]
    return Policy(layers[:2], layers[2], layers[3], Path("training"))


# ------------------------------------------------------------------------------------------ levels


def store_levels(run: Path, env: str, shift: str, store: Path, expert: bool = True) -> list[Path]:
    """Pick each level's policy from a run's snapshots and store it with its score."""
    rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]

    def keep(level: str, row: dict) -> Path:
        about = {"env": env, "shift": shift, "level": level}
        about |= {"training_steps": row["steps"], "seed": row["seed"]}
        return store_measured(load_policy(run / f"{row['steps']:08d}.npz", env), about, store)

    def pick(level: str, rows: list, unfit: Callable) -> dict:
        """Ten episodes may be lucky, so the four best snapshots are compared over 50."""
        some = sorted(rows, key=unfit)[:4]
        return min(some, key=lambda row: unfit(meta(keep(level, row))))

    def spread(row: dict) -> float:
        """Spread in points. Half of it counts: a robot that does not move is the steadiest."""
        zero = normalized_score(env, shift, 0)
        return (normalized_score(env, shift, row["return_std"]) - zero) / 2

    def unfit_expert(row: dict) -> tuple:
        """Sort first by how far it is below the level, then by how low and unsteady it is."""
        return max(EXPERT - row["score"], 0), spread(row) - row["score"]

    def unfit_medium(row: dict) -> tuple:
        """Sort first by the distance to the range, then to its middle, and by its spread."""
        low, high = MEDIUM
        outside = max(low - row["score"], row["score"] - high, 0)
        return outside, np.hypot(row["score"] - (low + high) / 2, spread(row))

    if expert:
        best = pick("expert", rows, unfit_expert)
    else:
        best = max(rows, key=lambda row: row["score"])
    way_up = [row for row in rows if row["steps"] <= best["steps"]]
    medium = pick("medium", way_up, unfit_medium)
    paths = ([keep("expert", best)] if expert else []) + [keep("medium", medium)]
    if shift == "none":
        paths += [keep(f"replay{i}", row) for i, row in enumerate(ladder(rows, way_up, medium))]
        # An earlier run with a longer ladder may have left policies behind.
        for left_over in set(store.glob(f"{env}-none-replay*.npz")) - set(paths):
            left_over.unlink()
    return paths


def ladder(rows: list[dict], way_up: list[dict], medium: dict) -> list[dict]:
    """Policies for medium-replay: an untrained one, then evenly spaced scores up to medium."""
    learning = [row for row in way_up if LEARNING_STARTS < row["steps"] < medium["steps"]]
    found = rows[:1] + [row for row in learning if row["score"] < medium["score"]]
    rungs = np.unique(np.linspace(0, len(found) - 1, 7).astype(int))
    return [found[rung] for rung in rungs]


def store_measured(policy: Policy, about: dict, store: Path) -> Path:
    """Store a policy with its return over 50 sampled episodes. An expert whose noise costs it its
    level gets less noise."""
    env, shift, level = about["env"], about["shift"], about["level"]
    path = store / f"{env}-{shift}-{level}.npz"
    weight, bias = policy.log_std
    for noise in (1.0, 0.5, 0.25, 0.1) if level == "expert" else (1.0,):
        quieter = policy._replace(log_std=(weight, bias + np.log(noise)))
        save_policy(quieter, path, about)
        returns = evaluate(load_policy(path), env, shift, 50, seed=1)
        score = normalized_score(env, shift, returns.mean())
        if score >= EXPERT:
            break
    measured = {"noise": noise, "return_mean": returns.mean()}
    measured |= {"return_std": returns.std(ddof=1), "score": score}
    measured = {key: round(float(value), 2) for key, value in measured.items()}
    save_policy(quieter, path, about | measured)
    return path
