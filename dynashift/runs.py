"""The record of a run: folder, seeds, checkpoints, logs, result. Written once here, for all training scripts.

A script is a plain function with a plain loop for each stage:

    source, target = load_task(args.task)
    with runs.open_run("bc", args, runs.plain(Args, defaults, args), source=source, target=target) as run:
        if run.result:  # it is done already
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        nets = build(args)  # all that has a state
        run.begin(nets)  # last before the loop: restores random states
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets))
        for step in run.steps("policy", args.updates):  # saves after the body where that is due
            run.log(step, update(nets))  # first after the update: divergence ends the run before it is saved
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
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Scripts know the functions of these modules as part of this one.
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
    plain,
    read_args,
    refuse_preset,
    replace,
)
from dynashift.checkpoints import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    versions,
    write_json,
)  # noqa: F401
from dynashift.envs import make, make_batch
from dynashift.errors import UserError
from dynashift.events import Events
from dynashift.files import progress_bar, read_json, say, slug  # noqa: F401
from dynashift.folders import Stop, is_done, reading, run_dir, session, signals, writing  # noqa: F401
from dynashift.results import read_result, summaries  # noqa: F401
from dynashift.scores import normalized_score

try:
    import resource
except ImportError:  # Windows: memory is not measured
    resource = None

# -------------------------------------------------------------------------------------- seeds and devices


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Python, NumPy, and torch on all devices. deterministic: an operation that would not repeat itself is an error."""
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS asks for it, before its first use
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  some libraries draw from it
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False  # it chooses algorithms by the clock


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
    """Freed memory stays with the process (glibc; elsewhere nothing happens). By default large tensors are given back
    to the system, and their pages zeroed when the next one asks for them: up to half of an update on a CPU."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


# ------------------------------------------------------------------------------------ logs, progress, costs


def open_writer(folder: Path, step: int):
    """TensorBoard writer of a run that has done `step` updates. What a killed run logged after them is purged, whatever
    its tag: so stages that all count from 1 need a folder each."""
    # Files are read in the order of their names, which hold the second and the process: no order at all for two that
    # were started within a second, or on two machines. So earlier files are numbered.
    with writing(folder):
        for i, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
            file.rename(folder / f"events.out.tfevents.{i:010d}")
    return Events(folder, step + 1 if step else 0)


def on_host(values: dict) -> dict:
    """One-element tensors as numbers, all of a device moved at once; the rest as it is."""
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
    if bar is not None:  # shown when a refresh is due
        losses = [(k[7:], float(v)) for k, v in values.items() if k.startswith("losses/")]
        bar.set_postfix(dict(losses[:1]), refresh=False)


def stopwatch(stages: dict, device="cpu"):
    """lap(name) charges the seconds since the last lap, and the process's peak memory in that time, to a stage.

    stages belongs in the checkpoint, so that a resumed run goes on adding. Work lost to a kill is not counted.
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
    """Largest resident memory in MB since the last call; where the system has no such thing, since the beginning."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: this resets the peak
        return float(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6 if resource else 0.0


# ------------------------------------------------------------------------------------------------- result


def write_result(
    folder: Path, args, evaluations: list[dict], stages: dict, data: dict, device="cpu", **more
) -> dict:
    """result.json, written last: if it is there, the run is done. data: name -> provenance (kind, sha256)."""
    result = {"args": args, "evaluations": evaluations, "stages": stages}
    result |= {"data": data, "versions": versions(), "device": device_name(device), **more}
    write_json(folder / "result.json", result)
    return read_result(folder / "result.json")


def finished(folder: Path, *data) -> dict | None:
    """The result of a run that is done, and says so; None if it is not. data: the datasets that it must be of."""
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


# ---------------------------------------------------------------------------------------------- open runs


@torch.no_grad()
def play(args, act, workers: int | None = None) -> dict:
    """Episodes side by side in the target's simulator, the same ones at every evaluation.

    act: from observations [n, d_s], the rewards [n] of the last step, and which episodes are still
    going on [n], to actions [n, d_a].
    """
    n = args.run.eval_episodes
    options = {} if workers is None else {"workers": workers}
    batch = make_batch(args.task.env, args.task.shift, n, **options)
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
    score = float(normalized_score(args.task.env, args.task.shift, returns.mean()))
    return {"returns": returns.tolist(), "lengths": lengths.tolist(), "score": score}


def record_video(path: Path, args, act) -> None:
    """The first episode of an evaluation again, with a camera. act: as for `play`, for one robot."""
    import imageio

    seed = 10_000 * args.run.seed
    camera = {"render_mode": "rgb_array", "width": 320, "height": 320}
    env = make(args.task.env, args.task.shift, seed=seed, **camera)
    obs, _ = env.reset(seed=seed)
    frames = []
    steps = 0
    reward = 0.0
    ended = False
    while not ended:
        if steps % 3 == 0:  # a GIF's clock has hundredths of a second
            frames.append(env.render())
        action = act(obs[None], np.array([reward]), np.ones(1, bool))[0]
        obs, reward, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        steps += 1
    env.close()
    imageio.mimsave(path, frames, duration=3000 * env.unwrapped.dt, loop=0)
    say(f"video of {steps} steps: {path}")


@dataclass
class Run:
    """A run that is open, and all that its loops need: made by `open_run`."""

    method: str
    args: Any
    plain: dict  # the arguments that this task has if nothing else is given
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

    def head(self) -> None:
        """Print what is going to be done."""
        args = self.args
        say(f"{self.method} on {args.task.env} {args.task.shift}, seed {args.run.seed}")
        if changed := self._changed({"seed"}):
            say(f"  changed  {', '.join(f'{k}={v}' for k, v in changed.items())}")
        for role, data in self.data.items():
            score = f", normalised score {data.score:.1f}" if role == "target" else ""
            name = args.task.source if args.task.target == "none" else getattr(args.task, role)
            say(f"  {role:7}  {name}, {data.kind}, {len(data):,} transitions{score}")
        say(f"  device   {args.run.device}: {device_name(args.run.device)}")
        say(f"  results  {self.folder}")

    def _changed(self, ignore: set[str]) -> dict:
        everything = flatten(self.args)
        return {
            k: v
            for k, v in everything.items()
            if k not in self.ignore | ignore and v != self.plain[k]
        }

    def begin(self, nets: dict, **more) -> None:
        """Go on from the checkpoint, if there is one. nets: all that has a state; more: what the record has besides."""
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
                f"there is no checkpoint in {self.folder}, the folder of exactly these arguments; run the same command "
                "without --eval-only first, or name the arguments of the run that is there"
            )
        if self.args.run.eval_only and not self.record["done"].get(
            "policy", self.record["done"].get(self.method)
        ):
            raise UserError(
                f"{self.folder}: the policy has not been trained yet; go on without --eval-only"
            )
        self.last = [round(self.args.updates * share) for share in (0.98, 0.99, 1)]
        if self.record["done"] and not self.args.run.eval_only:
            stage, update = list(self.record["done"].items())[-1]
            say(f"resumed at update {update} of stage {stage}")

    def steps(self, stage: str, end: int, folder: str | None = None):
        """The updates of a stage that are left, up to `end`, for a loop that calls `log` after each. After its body the
        checkpoint is saved where that is due. folder: of the events, if not that of the stage's name."""
        start = self.record["done"].get(stage, 0)
        if start >= end:
            return
        self.lap = self.lap or stopwatch(self.record["stages"], self.args.run.device)
        self.stage = stage
        self.end = end
        self.logged = start
        self.writer = open_writer(self.folder / (folder or stage), start)
        say(f"{stage}: {end - start:,} updates" + f" of {end:,}" * bool(start))
        options = {
            "desc": stage,
            "initial": start,
            "total": end,
            "unit": " updates",
            "miniters": 1,
            "seconds": 60,
        }
        self.bar = progress_bar(range(start + 1, end + 1), **options)
        with self.bar:
            for step in self.bar:
                self.stop.now = False  # what this update changes is to be saved first
                yield step
                assert self.logged == step, (
                    "every update is logged: where a checkpoint is due, that detects divergence"
                )
                if self.save:
                    self.record["done"][stage] = step
                    self._charge()
                    self.writer.flush()  # a resumed run does not log again what came before the checkpoint
                    save_checkpoint(self.folder / "ckpt.pt", {**self.nets, "record": self.record})
                    if self.stop.status:
                        sys.exit(self.stop.status)
                if (
                    step == start + 100
                    and (expected := (end - start) * self.bar.format_dict["elapsed"] / 100) > 60
                ):
                    say(f"{stage}: about {clock(expected)}")
        self.stop.now = True
        self.writer.close()
        say(
            f"{stage}: {end:,} updates done in {clock(self.record['stages'][self._charged]['seconds'])}"
        )

    @property
    def _charged(self) -> str:
        """The stage's name in the result, where that of the policy is the same for all methods."""
        return "policy" if self.stage == self.method else self.stage

    def _charge(self) -> None:
        self.lap(self._charged)

    def log(self, step: int, values: dict) -> None:
        """Every so many updates, before every checkpoint and evaluation: one transfer, a look at it, and the log."""
        self.logged = step  # a signal that comes after this waits for the next update: what is saved has been looked at
        self.save = (
            step % self.args.run.save_every == 0 or step == self.end or bool(self.stop.status)
        )
        due = self.save or step % self.args.run.log_every == 0 or self._evaluates(step)
        if self._evaluates(step + 1):  # which may be abandoned: then it is done again from here
            self.save = True
        if not due and not self.save:
            return
        values = on_host(values)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        large = [
            name
            for name in ("charts/q_largest", "charts/v_largest")
            if values.get(name, 0) > self.limit
        ]
        bad += [f"{name} = {values[name]:.3g} (bound {self.limit:.3g})" for name in large]
        if bad:
            there = (self.folder / "ckpt.pt").exists()
            kept = (
                f"the last good checkpoint is kept in {self.folder}"
                if there
                else "nothing was saved yet"
            )
            raise UserError(
                f"{self.stage} diverged at update {step}: {', '.join(bad)}; {kept}; "
                f"try a lower {self.remedy}, or another --seed"
            )
        if not due:
            return
        rate = self.bar.format_dict["rate"]  # None in the first moment
        log(
            self.writer, step, values | ({"charts/updates_per_sec": rate} if rate else {}), self.bar
        )

    def evaluation_due(self, step: int) -> bool:
        """Where it is, the time up to now is the stage's, and what follows the evaluation's. A signal abandons that."""
        if due := self._evaluates(step):
            self._charge()
            self.stop.now = True
            if self.stop.status:
                sys.exit(self.stop.status)
        return due

    def _evaluates(self, step: int) -> bool:
        """Nothing comes between the last three, which have a summary of their own."""
        due = step in self.last or (step % self.args.run.eval_every == 0 and step < self.last[0])
        return due and self._charged == "policy"

    def evaluated(self, step: int, e: dict, **more) -> None:
        """Record an evaluation {returns, lengths, score, ...}. more: further numbers to log, None if there is none."""
        self.stop.now = False
        self.record["evaluations"].append({"step": step, **e})
        spread = np.std(e["returns"], ddof=min(1, len(e["returns"]) - 1))
        more |= {
            "return_mean": np.mean(e["returns"]),
            "return_std": spread,
            "normalized_score": e["score"],
        }
        log(self.writer, step, {f"eval/{name}": x for name, x in more.items() if x is not None})
        guided = e.get("guided_score")
        beside = "" if guided is None else f", guided by the critics {guided:.1f}"
        say(
            f"{step} updates: score {e['score']:.1f}{beside} (target data {self.data['target'].score:.1f})"
        )
        self.lap("evaluation")

    def only_evaluated(self, e: dict) -> dict:
        """What --eval-only prints and returns."""
        print(f"normalised score {e['score']:.1f}, returns {np.round(e['returns'], 1).tolist()}")
        if e.get("guided_score") is not None:
            print(f"guided by the critics {e['guided_score']:.1f}")
        return {key: e[key] for key in ("score", "returns", "guided_score") if key in e}

    def diagnosed(self, step: int, found: dict) -> None:
        """Record metrics at stitch junctions, {pool: {metric: value}}."""
        self.record["diagnostics"].append({"step": step, **found})
        log(
            self.writer,
            step,
            {f"charts/{m}_{pool}": x for pool in found for m, x in found[pool].items()},
        )

    def finish(self, pre: dict | None = None) -> dict:
        """Write the result, print the score. pre: what `taf_preprocess.preprocess` found, if that was asked."""
        stages = self.record["stages"]
        more = {
            "changed": self._changed({"quick", "preset", "diagnostics"})
        }  # seen in other values, or of no effect
        for name in ("diagnostics", "precision", "threads"):
            if name in self.record:
                more[name] = self.record[name]
        if pre:
            more |= {"preprocess": pre["path"], "report": pre["meta"]["report"]}
            stages = {f"preprocess {name}": x for name, x in pre["meta"]["stages"].items()} | stages
        more |= {"method": self.method, "device": self.args.run.device}
        seen = {role: x.provenance for role, x in self.data.items()}
        result = write_result(
            self.folder, self.args, self.record["evaluations"], stages, seen, **more
        )
        final = result["summaries"].get("final", {})
        say(f"normalised score {_shown(result)}")
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
    """The folder and final score of a finished run of baselines/bc.py on the same target data and under the same --out;
    of several, one with the same --quick and --seed if there is one."""
    found = []
    for path in sorted(
        args.run.out.glob(f"bc/{args.task.env}-{args.task.shift}-*/seed*/result.json")
    ):
        with contextlib.suppress(UserError, KeyError, TypeError):  # not one of ours, or damaged
            result = read_result(path)
            other = [result["args"][name] != getattr(args.run, name) for name in ("quick", "seed")]
            other.append(result["changed"] != {})
            alone = not result["args"].get(
                "source_share"
            )  # of bc.py: the target data and nothing else
            if alone and result["data"]["target"]["sha256"] == sha256:
                found.append((other, path.parent, float(result["summaries"]["final"]["score"])))
    return min(found)[1:] if found else None


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


@contextlib.contextmanager
def open_run(method: str, args, plain_args, ignore=IGNORE, **data):
    """Own the folder of these arguments for as long as the block lasts: yields a Run.

    plain_args: what `plain` gives for this task. data: the datasets by role, `target` among them. One
    that has both roles is recorded once.
    """
    if data.get("source") is data["target"]:
        del data["source"]
    names = [Path(quality).stem for quality in (args.task.source, args.task.target)]
    kinds = sorted({x.kind for x in data.values()})
    task = slug(
        "-".join(
            [args.task.env, args.task.shift, *names, *(kinds if kinds != ["published"] else [])]
        )
    )
    plain_values = flatten(plain_args) | {"quick": False}
    folder = run_dir(args.run.out, method, task, args.run.seed, args, plain_values, ignore)
    opened = (
        reading(folder, args, ignore)
        if args.run.eval_only
        else session(folder, args, ignore, args.run.resume)
    )
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
