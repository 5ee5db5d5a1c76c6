"""The record of a run, for all training scripts: folder, seeds, checkpoints, logs and result.

A script is a plain function with a plain loop for each stage:

    source, target = load_task(args.task)
    plain = runs.plain(Args, defaults, args)
    with runs.open_run("bc", args, plain, source=source, target=target) as run:
        if run.result:  # it is done already
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        nets = build(args)  # all that has a state
        run.begin(nets)  # right before the loop: it restores the random states
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets))
        for step in run.steps("policy", args.updates):  # saves after the body when a save is due
            run.log(step, update(nets))  # right after the update: a diverged run ends unsaved
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets))
        return run.finish()
"""

import contextlib
import ctypes
import math
import os
import platform
import random
import re
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynashift.any_env import LOGS, find_spaces, is_own, unscale

# Scripts use the functions of these modules through this one.
from dynashift.arguments import (  # noqa: F401
    IGNORE,
    Flat,
    RunArgs,
    averaging_rate,
    budget_share,
    check_args,
    compose,
    flatten,
    import_wandb,
    note_guidance,
    plain,
    read_args,
    refuse_preset,
    replace,
)
from dynashift.checkpoints import (  # noqa: F401
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    versions,
    write_json,
)
from dynashift.envs import make, make_batch
from dynashift.errors import UserError
from dynashift.events import Events
from dynashift.files import progress_bar, read_json, say, slug  # noqa: F401
from dynashift.folders import Stop, is_done, reading, run_dir, session, signals, writing  # noqa: F401
from dynashift.offline import LogBatch, describe, value_of  # noqa: F401
from dynashift.own_data import held_out
from dynashift.results import read_result, summaries  # noqa: F401
from dynashift.scores import normalized_score, score_name

try:
    import resource
except ImportError:  # Windows: memory is not measured
    resource = None

# -------------------------------------------------------------------------------- seeds and devices


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Seed Python, NumPy, and torch on all devices.

    deterministic: an operation whose result could differ between two runs raises an error.
    """
    if deterministic:
        # cuBLAS needs this to be deterministic, and reads it once, at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  some libraries draw from it
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False  # it chooses algorithms by timing them


def pick_device(name: str) -> torch.device:
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try cpu"
        ) from None


def device_name(device) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def reuse_memory() -> None:
    """Keep freed memory in the process (with glibc; elsewhere this does nothing).

    By default, the memory of large tensors goes back to the system, which zeroes its pages when the
    next tensor needs them. That can take up to half of an update's time on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


# ---------------------------------------------------------------------------- logs, progress, costs


def open_writer(folder: Path, step: int):
    """TensorBoard writer of a run that has done `step` updates.

    Whatever a killed run logged after these updates is purged, regardless of its tag. Since every
    stage counts from 1, each needs a folder of its own.
    """
    # TensorBoard reads the files in the order of their names, which contain the second and the
    # process id. These do not order two files that were started within one second or on two
    # machines, so the earlier files are numbered.
    with writing(folder):
        for i, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
            file.rename(folder / f"events.out.tfevents.{i:010d}")
    return Events(folder, step + 1 if step else 0)


def on_host(values: dict) -> dict:
    """Turn one-element tensors into numbers, with one transfer per device; keep the rest."""
    tensors = {k: v.detach() for k, v in values.items() if isinstance(v, torch.Tensor)}
    for device in {v.device for v in tensors.values()}:
        keys = [k for k, v in tensors.items() if v.device == device]
        host = torch.stack([tensors[k].float().reshape(()) for k in keys]).tolist()
        values = values | dict(zip(keys, host, strict=True))
    return values


def log(writer, step: int, values: dict, bar=None) -> None:
    """Log numbers and one-element tensors; show the first loss in the bar too."""
    if unknown := [k for k in values if not k.startswith(("losses/", "charts/", "eval/"))]:
        raise ValueError(f"log keys begin with losses/, charts/ or eval/: {unknown}")
    values = on_host(values)
    for key, value in values.items():
        writer.add_scalar(key, value, step)
    if bar is not None:  # it shows this at its next refresh
        losses = [(k[7:], float(v)) for k, v in values.items() if k.startswith("losses/")]
        bar.set_postfix(dict(losses[:1]), refresh=False)


def stopwatch(stages: dict, device="cpu"):
    """Returns lap(name), which charges the time since the last lap and its peak memory to a stage.

    Save `stages` in the checkpoint, so that a resumed run keeps adding to it. Work that is lost
    when a run is killed does not count.
    """
    last = time.perf_counter()
    cuda = torch.device(device).type == "cuda"

    def lap(name: str) -> None:
        nonlocal last
        if cuda:
            torch.cuda.synchronize(device)
        stage = stages.setdefault(name, {"seconds": 0.0, "peak_memory_mb": 0.0})
        now = time.perf_counter()
        stage["seconds"] += now - last
        last = now
        stage["peak_memory_mb"] = max(stage["peak_memory_mb"], peak_memory())
        if cuda:
            peak = torch.cuda.max_memory_allocated(device) / 1e6
            stage["peak_cuda_memory_mb"] = max(stage.get("peak_cuda_memory_mb", 0.0), peak)
            torch.cuda.reset_peak_memory_stats(device)

    return lap


def peak_memory() -> float:
    """Peak resident memory in MB since the last call, or since the start if it cannot be reset."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: this resets the peak
        return float(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6 if resource else 0.0


# ------------------------------------------------------------------------------------------- result


def write_result(
    folder: Path, args, evaluations: list[dict], stages: dict, data: dict, device="cpu", **more
) -> dict:
    """Write result.json, always last: a run that has one is done.

    data: the provenance (kind, sha256, ...) of each dataset by its role.
    """
    result = {"args": args, "evaluations": evaluations, "stages": stages}
    result |= {"data": data, "versions": versions(), "device": device_name(device), **more}
    write_json(folder / "result.json", result)
    return read_result(folder / "result.json")


def finished(folder: Path, *data) -> dict | None:
    """The result of a run if it is done, otherwise None. data: the datasets it must have used."""
    if not is_done(folder):
        return None
    result = read_result(folder / "result.json")
    if sorted(x["sha256"] for x in result["data"].values()) != sorted(x.sha256 for x in data):
        raise UserError(f"{folder} was run with other data; start it again with --no-resume")
    print(f"{folder} is done: score {_shown(result)}; --no-resume starts it again")
    return result


def _shown(result: dict) -> str:
    """The final score as text; "undefined" if the return of an episode is not a number."""
    score = result["summaries"].get("final", {}).get("score")
    return "undefined" if score is None else f"{score:.1f}"


# ---------------------------------------------------------------------------------------- open runs


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


@dataclass
class Run:
    """An open run and all that its loops need; made by `open_run`."""

    method: str
    args: Any
    plain: dict  # the arguments of this task if the command line gives nothing else
    ignore: set[str]
    data: dict  # role -> Dataset
    folder: Path
    stop: Stop  # of `session`
    result: dict | None  # of a run that is done
    limit: float = math.inf  # values beyond it have diverged
    remedy: str = "--lr"  # what to lower then
    lap: Any = None  # of `stopwatch`, which starts with the first stage
    bar: Any = None  # of the stage
    threads: int = field(default_factory=torch.get_num_threads)  # at the beginning

    @property
    def measure(self) -> str:
        return score_name(self.args.task.env, self.args.task.shift)

    def head(self) -> None:
        """Print what the run is going to do."""
        args = self.args
        kwargs = f" with {args.task.env_kwargs}" * (args.task.env_kwargs != "{}")
        say(f"{self.method} on {args.task.env} {args.task.shift}{kwargs}, seed {args.run.seed}")
        if changed := self._changed({"seed"}):
            words = f"  changed  {', '.join(f'{k}={v}' for k, v in changed.items())}"
            say(textwrap.fill(words, 80, subsequent_indent=" " * 11, break_on_hyphens=False))
        for role, data in self.data.items():
            score = f", {self.measure} {data.score:.1f}" if role == "target" else ""
            name = args.task.source if args.task.target == "none" else getattr(args.task, role)
            say(f"  {role:7}  {name}, {data.kind}, {len(data):,} transitions{score}")
        say(f"  device   {args.run.device}: {device_name(args.run.device)}")
        say(f"  results  {self.folder}")
        say(f"  time     {self._expected()}")

    def _expected(self) -> str:
        """What the same run took with another seed, or when the time will be known."""
        name = self.folder.name.removeprefix(f"seed{self.args.run.seed}")
        for path in sorted(self.folder.parent.glob(f"seed*{name}/result.json")):
            same = re.fullmatch(rf"seed\d+{re.escape(name)}", path.parent.name)
            with contextlib.suppress(UserError, KeyError, TypeError):  # not one of ours, or damaged
                result = read_result(path)
                if same and result["device"] == device_name(self.args.run.device):
                    seconds = sum(stage["seconds"] for stage in result["stages"].values())
                    return f"about {clock(seconds)}, as with seed {result['args']['seed']}"
        return "each stage longer than a minute says it after 100 updates"

    def _changed(self, ignore: set[str]) -> dict:
        ignore = self.ignore | ignore
        everything = flatten(self.args).items()
        return {k: v for k, v in everything if k not in ignore and v != self.plain[k]}

    def begin(self, nets: dict, **more) -> None:
        """Continue from the checkpoint, if there is one.

        nets: everything that has a state; more: further entries of the record.
        """
        self.nets = nets
        hashes = [x.sha256 for x in self.data.values()]
        self.record = {"done": {}, "evaluations": [], "stages": {}, "sha256": hashes, **more}
        if saved := load_checkpoint(self.folder / "ckpt.pt", nets):
            if saved["record"]["sha256"] != hashes:
                raise UserError(
                    f"{self.folder} was begun with other data; start it again with --no-resume"
                )
            self.record |= saved["record"]
        elif self.args.run.eval_only:
            raise UserError(
                f"there is no checkpoint in {self.folder}, the folder of exactly these arguments; "
                "run the same command without --eval-only first, or name the arguments of the run "
                "that is there"
            )
        done = self.record["done"]
        if self.args.run.eval_only and not done.get("policy", done.get(self.method)):
            raise UserError(
                f"{self.folder}: the policy has not been trained yet; go on without --eval-only"
            )
        self.last = [round(self.args.updates * share) for share in (0.98, 0.99, 1)]
        if self.record["done"] and not self.args.run.eval_only:
            stage, update = list(self.record["done"].items())[-1]
            say(f"resumed at update {update} of stage {stage}")

    def steps(self, stage: str, end: int, folder: str | None = None):
        """The remaining updates of a stage, up to `end`, for a loop that calls `log` after each.

        After the loop's body a checkpoint is saved when it is due. folder: where the events go;
        default: the name of the stage.
        """
        start = self.record["done"].get(stage, 0)
        if start >= end:
            return
        self.lap = self.lap or stopwatch(self.record["stages"], self.args.run.device)
        self.stage = stage
        self.end = end
        self.logged = start
        self.writer = open_writer(self.folder / (folder or stage), start)
        say(f"{stage}: {end - start:,} updates" + f" of {end:,}" * bool(start))
        options = {"desc": stage, "initial": start, "total": end, "unit": " updates"}
        self.bar = progress_bar(range(start + 1, end + 1), miniters=1, seconds=60, **options)
        with self.bar:
            for step in self.bar:
                self.stop.now = False  # from here on a signal waits until this update is saved
                yield step
                # Before a checkpoint is saved, `log` checks that the run has not diverged.
                assert self.logged == step, "every update is logged, so call run.log"
                if self.save:
                    self.record["done"][stage] = step
                    self._charge()
                    self.writer.flush()  # a resumed run does not repeat what was logged up to here
                    save_checkpoint(self.folder / "ckpt.pt", {**self.nets, "record": self.record})
                    if self.stop.status:
                        sys.exit(self.stop.status)
                if step == start + 100:
                    expected = (end - start) * self.bar.format_dict["elapsed"] / 100
                    if expected > 60:
                        say(f"{stage}: about {clock(expected)}")
        self.stop.now = True
        self.writer.close()
        seconds = self.record["stages"][self._charged]["seconds"]
        say(f"{stage}: {end:,} updates done in {clock(seconds)}")

    @property
    def _charged(self) -> str:
        """The stage's name in the result, in which all methods call their last stage "policy"."""
        return "policy" if self.stage == self.method else self.stage

    def _charge(self) -> None:
        self.lap(self._charged)

    def log(self, step: int, values: dict) -> None:
        """Check these values for divergence and log them, when a log, save or evaluation is due.

        On the other updates nothing is moved from the device.
        """
        # A signal that arrives after this line waits for the next update, because only values that
        # were checked here are saved.
        self.logged = step
        due_by_count = step % self.args.run.save_every == 0 or step == self.end
        self.save = due_by_count or bool(self.stop.status)
        due = self.save or step % self.args.run.log_every == 0 or self._evaluates(step)
        # A signal abandons an evaluation, which the resumed run then repeats from this checkpoint.
        if self._evaluates(step + 1):
            self.save = True
        if not due and not self.save:
            return
        values = on_host(values)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        for name in ("charts/q_largest", "charts/v_largest"):
            if values.get(name, 0) > self.limit:
                bad.append(f"{name} = {values[name]:.3g} (bound {self.limit:.3g})")
        if bad:
            kept = "nothing was saved yet"
            if (self.folder / "ckpt.pt").exists():
                kept = f"the last good checkpoint is kept in {self.folder}"
            raise UserError(
                f"{self.stage} diverged at update {step}: {', '.join(bad)}; {kept}; "
                f"try a lower {self.remedy}, or another --seed"
            )
        if not due:
            return
        if self.args.task.env == LOGS:  # without a simulator, the losses belong to the result
            losses = {name[7:]: x for name, x in values.items() if name.startswith("losses/")}
            self.record.setdefault("losses", {})[self._charged] = losses
        if rate := self.bar.format_dict["rate"]:  # None in the first moment
            values = values | {"charts/updates_per_sec": rate}
        log(self.writer, step, values, self.bar)

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after this update.

        If so, the time up to now is charged to the stage, and the time from now on to the
        evaluation, which a signal may interrupt.
        """
        if due := self._evaluates(step):
            self._charge()
            self.stop.now = True
            if self.stop.status:
                sys.exit(self.stop.status)
        return due

    def _evaluates(self, step: int) -> bool:
        # The last three evaluations have a summary of their own, so none comes between them.
        due = step in self.last or (step % self.args.run.eval_every == 0 and step < self.last[0])
        return due and self._charged == "policy"

    def evaluated(self, step: int, e: dict, **more) -> None:
        """Record an evaluation {returns, lengths, score, ...}.

        more: further numbers to log; those that are None are left out.
        """
        self.stop.now = False
        self.record["evaluations"].append({"step": step, **e})
        if offline := e.get("offline"):
            more |= offline
        else:
            spread = np.std(e["returns"], ddof=min(1, len(e["returns"]) - 1))
            more |= {"return_mean": np.mean(e["returns"]), "return_std": spread}
            more["normalized_score"] = e["score"]
        log(self.writer, step, {f"eval/{name}": x for name, x in more.items() if x is not None})
        self.lap("evaluation")
        if offline:
            say(f"{step} updates: {describe(offline)}")
            return
        guided = e.get("guided_score")
        beside = "" if guided is None else f", guided by the critics {guided:.1f}"
        data = f"target data {self.data['target'].score:.1f}"
        say(f"{step} updates: score {e['score']:.1f}{beside} ({data})")

    def only_evaluated(self, e: dict) -> dict:
        """What --eval-only prints and returns."""
        if "offline" in e:
            print(describe(e["offline"]))
            return {"offline": e["offline"]}
        print(f"{self.measure} {e['score']:.1f}, returns {np.round(e['returns'], 1).tolist()}")
        if e.get("guided_score") is not None:
            print(f"guided by the critics {e['guided_score']:.1f}")
        return {key: e[key] for key in ("score", "returns", "guided_score") if key in e}

    def diagnosed(self, step: int, found: dict) -> None:
        """Record metrics at stitch junctions, {pool: {metric: value}}."""
        self.record["diagnostics"].append({"step": step, **found})
        values = {f"charts/{m}_{pool}": x for pool in found for m, x in found[pool].items()}
        log(self.writer, step, values)

    def finish(self, pre: dict | None = None) -> dict:
        """Write the result and print the score. pre: the output of `taf_preprocess.preprocess`."""
        stages = self.record["stages"]
        # The arguments left out here either show in the values of others or have no effect.
        more = {"changed": self._changed({"quick", "preset", "diagnostics"})}
        for name in ("diagnostics", "precision", "threads"):
            if name in self.record:
                more[name] = self.record[name]
        if pre:
            more |= {"preprocess": pre["path"], "report": pre["meta"]["report"]}
            stages = {f"preprocess {name}": x for name, x in pre["meta"]["stages"].items()} | stages
        if "losses" in self.record:
            more["losses"] = self.record["losses"]
        more |= {"method": self.method, "device": self.args.run.device}
        data = {role: x.provenance for role, x in self.data.items()}
        evaluations = self.record["evaluations"]
        result = write_result(self.folder, self.args, evaluations, stages, data, **more)
        final = result["summaries"].get("final", {})
        if "offline" in final:
            say(describe(final["offline"]))
        else:
            say(f"{self.measure} {_shown(result)}")
        if final.get("guided_score") is not None:
            say(f"guided by the critics {final['guided_score']:.1f}")
        say(f"the target data's own mean {self.data['target'].score:.1f}")
        if self.method != "bc" and (cloning := find_cloning(self.args, self.data["target"].sha256)):
            say(f"cloning {cloning[1]:.1f} ({cloning[0]})")
        say(f"{self.folder / 'result.json'}")
        if pre and (figure := Path(pre["path"]).with_suffix(".png")).exists():
            say(f"{figure}")
        say(f"tensorboard --logdir {self.folder}")
        return result


def find_cloning(args, sha256: str) -> tuple[Path, float] | None:
    """Folder and final score of a finished run of baselines/bc.py on the same target data.

    It must be under the same --out. If there are several, one with the same --quick and --seed is
    preferred.
    """
    found = []
    task = slug(f"{args.task.env}-{args.task.shift}")
    for path in sorted(args.run.out.glob(f"bc/{task}-*/seed*/result.json")):
        with contextlib.suppress(UserError, KeyError, TypeError):  # not one of ours, or damaged
            result = read_result(path)
            other = [result["args"][name] != getattr(args.run, name) for name in ("quick", "seed")]
            other.append(result["changed"] != {})
            # Without --source-share, bc.py clones the target data and nothing else.
            alone = not result["args"].get("source_share")
            if alone and result["data"]["target"]["sha256"] == sha256:
                found.append((other, path.parent, float(result["summaries"]["final"]["score"])))
    return min(found)[1:] if found else None


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


@contextlib.contextmanager
def open_run(method: str, args, plain_args, ignore=IGNORE, **data):
    """Own the folder of these arguments for the duration of the block, and yield a Run.

    plain_args: what `plain` gives for this task. data: the datasets by role, including `target`. A
    dataset in both roles is recorded once.
    """
    if data.get("source") is data["target"]:
        del data["source"]
    names = [Path(quality).stem for quality in (args.task.source, args.task.target)]
    kinds = sorted({x.kind for x in data.values()})
    if kinds == ["published"]:
        kinds = []
    task = slug("-".join([args.task.env, args.task.shift, *names, *kinds]))
    plain_values = flatten(plain_args) | {"quick": False}
    folder = run_dir(args.run.out, method, task, args.run.seed, args, plain_values, ignore)
    if args.run.eval_only:
        opened = reading(folder, args, ignore)
    else:
        opened = session(folder, args, ignore, args.run.resume)
    with opened as stop:
        reuse_memory()
        result = None if args.run.eval_only else finished(folder, *data.values())
        run = Run(method, args, plain_values, set(ignore), data, folder, stop, result)
        if not result and not args.run.eval_only:
            run.head()
            if args.run.track:
                options = {"project": "taf-dt", "name": str(folder), "dir": str(folder)}
                import_wandb().init(config=flatten(args), sync_tensorboard=True, **options)
        try:
            yield run
        finally:
            torch.set_num_threads(run.threads)
            if run.bar is not None:
                run.bar.close()  # an exception left it open
