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
from pathlib import Path

import torch

# Scripts use the functions of these modules through this one.
from dynashift.arguments import (  # noqa: F401
    IGNORE,
    UNNAMED,
    Expectile,
    Flat,
    NotNegative,
    Positive,
    RunArgs,
    Share,
    averaging_rate,
    budget,
    check_args,
    compose,
    flatten,
    import_wandb,
    note_guidance,
    plain,
    read_args,
    replace,
    short_run_rates,
    task_words,
)
from dynashift.checkpoints import load_checkpoint, read_checkpoint, save_checkpoint  # noqa: F401
from dynashift.devices import pick_device, reuse_memory, seed_everything  # noqa: F401
from dynashift.errors import UserError
from dynashift.evaluation import play, scored, simulators  # noqa: F401
from dynashift.files import read_json, say, slug  # noqa: F401
from dynashift.folders import is_done, reading, run_dir, session, signals  # noqa: F401
from dynashift.offline import value_of  # noqa: F401
from dynashift.progress import stopwatch  # noqa: F401
from dynashift.results import read_result
from dynashift.run_record import Run
from dynashift.run_texts import final_score, show_beginning


def finished(folder: Path, *data) -> dict | None:
    """The result of a run if it is done, otherwise None. data: the datasets it must have used."""
    if not is_done(folder):
        return None
    result = read_result(folder / "result.json")
    if sorted(x["sha256"] for x in result["data"].values()) != sorted(x.sha256 for x in data):
        raise UserError(f"{folder} was run with other data; start it again with --no-resume")
    print(f"{folder} is done: score {final_score(result)}; --no-resume starts it again")
    return result


@contextlib.contextmanager
def open_run(method: str, args, plain_args, ignore=IGNORE, **data):
    """Own the folder of these arguments for the duration of the block, and yield a Run.

    plain_args: what `plain` gives for this task. data: the datasets by role, including `target`. A
    dataset in both roles is recorded once.
    """
    if data.get("source") is data["target"]:
        del data["source"]
    kinds = sorted({x.kind for x in data.values()})
    if kinds == ["published"]:
        kinds = []
    task = slug("-".join([*task_words(args.task), *kinds]))
    plain_values = flatten(plain_args)
    plain_values |= {k: v for k, v in UNNAMED.items() if k in plain_values}
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
            show_beginning(run)
            if args.run.track:
                options = {"project": "taf-dt", "name": str(folder), "dir": str(folder)}
                import_wandb().init(config=flatten(args), sync_tensorboard=True, **options)
        try:
            yield run
        finally:
            torch.set_num_threads(run.threads)
            if run.bar is not None:
                run.bar.close()  # an exception left it open
