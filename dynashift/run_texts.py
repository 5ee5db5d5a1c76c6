"""What a run prints when it begins and when it ends."""

import contextlib
import re
import textwrap
from pathlib import Path

from dynashift.arguments import flatten
from dynashift.devices import device_name
from dynashift.errors import UserError
from dynashift.files import say, slug
from dynashift.offline import describe
from dynashift.progress import clock
from dynashift.results import read_result


def show_beginning(run) -> None:
    """Print what the run is going to do."""
    args = run.args
    kwargs = f" with {args.task.env_kwargs}" * (args.task.env_kwargs != "{}")
    say(f"{run.method} on {args.task.env} {args.task.shift}{kwargs}, seed {args.run.seed}")
    if changed := run.changed({"seed"}):
        words = f"  changed  {', '.join(f'{k}={v}' for k, v in changed.items())}"
        say(textwrap.fill(words, 80, subsequent_indent=" " * 11, break_on_hyphens=False))
    for role, data in run.data.items():
        score = f", {run.measure} {data.score:.1f}" if role == "target" else ""
        name = args.task.source if args.task.target == "none" else getattr(args.task, role)
        say(f"  {role:7}  {name}, {data.kind}, {len(data):,} transitions{score}")
    say(f"  device   {args.run.device}: {device_name(args.run.device)}")
    say(f"  results  {run.folder}")
    say(f"  time     {expected_time(run)}")


def expected_time(run) -> str:
    """What the same run took with another seed or on another task, or when the time will be known.

    The other task must have the same robot, whose steps and networks are of the same size.
    """
    name = run.folder.name.removeprefix(f"seed{run.args.run.seed}")
    tasks = [run.folder.parent, *sorted(run.folder.parents[1].glob(f"{run.args.task.env}-*"))]
    for path in (path for task in tasks for path in sorted(task.glob(f"seed*{name}/result.json"))):
        same = re.fullmatch(rf"seed\d+{re.escape(name)}", path.parent.name)
        with contextlib.suppress(UserError, KeyError, TypeError):  # not one of ours, or damaged
            result = read_result(path)
            sizes = [result["args"].get("K"), machine(result["device"], result)]
            here = machine(device_name(run.args.run.device), result)
            if same and sizes == [flatten(run.args).get("K"), here]:
                seconds = sum(stage["seconds"] for stage in result["stages"].values())
                other = result["args"]
                return f"about {clock(seconds)}, as {other['shift']} with seed {other['seed']}"
    return "not known yet; a stage longer than a minute says it after 100 updates"


def machine(name: str, result: dict) -> str:
    """Without the number of threads if the result's stages chose theirs, as this run's will."""
    return re.sub(r", \d+ threads$", "", name) if result.get("threads") else name


def show_end(run, result: dict, pre: dict | None) -> None:
    """Print the score, what it compares with, and where everything is."""
    final = result["summaries"].get("final", {})
    if "offline" in final:
        say(describe(final["offline"]))
    else:
        say(f"{run.measure} {final_score(result)}")
    if final.get("guided_score") is not None:
        say(f"guided by the critics {final['guided_score']:.1f}")
    say(f"the target data's own mean {run.data['target'].score:.1f}")
    if run.method != "bc" and (cloning := find_cloning(run.args, run.data["target"].sha256)):
        say(f"cloning {cloning[1]:.1f} ({cloning[0]})")
    say(f"{run.folder / 'result.json'}")
    if pre and (figure := Path(pre["path"]).with_suffix(".png")).exists():
        say(f"{figure}")
    say(f"tensorboard --logdir {run.folder}")


def final_score(result: dict) -> str:
    """The final score as text; "undefined" if the return of an episode is not a number."""
    score = result["summaries"].get("final", {}).get("score")
    return "undefined" if score is None else f"{score:.1f}"


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
