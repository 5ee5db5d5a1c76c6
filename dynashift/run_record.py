"""An open run: its updates, logs, checkpoints, evaluations and result."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynashift.any_env import LOGS
from dynashift.arguments import flatten
from dynashift.checkpoints import load_checkpoint, save_checkpoint, versions, write_json
from dynashift.devices import device_name
from dynashift.errors import UserError
from dynashift.evaluation import record_video
from dynashift.files import progress_bar, say
from dynashift.folders import Stop
from dynashift.offline import describe
from dynashift.progress import clock, log, on_host, open_writer, stopwatch
from dynashift.results import read_result
from dynashift.run_texts import show_end
from dynashift.scores import score_name


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

    def changed(self, ignore: set[str]) -> dict:
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

    def finish(self, pre: dict | None = None, film=None) -> dict:
        """Write the result and print the score.

        pre: the output of `taf_preprocess.preprocess`. film: an agent that acts for one robot, for
        --capture-video.
        """
        stages = self.record["stages"]
        # The arguments left out here either show in the values of others or have no effect.
        more = {"changed": self.changed({"quick", "preset", "diagnostics"})}
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
        show_end(self, result, pre)
        # Last, because it fails where there is no graphics driver.
        if film and self.args.tools.capture_video:
            film.nets["policy"].eval()
            record_video(self.folder / "video.gif", self.args, film.act)
        return result
