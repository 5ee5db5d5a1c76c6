"""One page about a GPU: every stage plain, compiled and in bfloat16, memory, time of a full run.

    python benchmarks/bench_gpu.py [--robot hopper] [--K 5] [--seconds 5] [--table docs/gpu.md]

Appends a row for the device to a table. Updates a second are those of the paper's configuration on
synthetic data; the time of a full run is that of its four stages, without data and evaluation.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import torch
import tyro

import taf_dt
from benchmarks.bench_train import synthetic
from benchmarks.published import published_update
from dynashift import faster, runs
from dynashift.errors import UserError, one_line_errors
from dynashift.files import check_folder
from dynashift.tasks import ROBOTS

STAGES = {
    "values": (taf_dt.update_values, "label_updates"),
    "command": (taf_dt.update_command, "command_updates"),
    "cvae": (taf_dt.update_behaviour, "cvae_updates"),
    "policy": (taf_dt.update_actor_critic, "updates"),
}
FORMS = {
    "plain": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "compiled": {"precision": "fp32", "compile": True},
    "compiled, bf16": {"precision": "bf16", "compile": True},
}
COLUMNS = "device, torch, task, form, values /s, command /s, cvae /s, policy /s, GB, full run"
HEAD = f"| {COLUMNS.replace(', ', ' | ')} |"
RULE = "|---" * 10 + "|"


def rate(update, seconds: float, device: torch.device) -> float:
    """Updates a second, after ten that do not count."""
    for _ in range(10):
        update()
    finish(device)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            update()
        finish(device)
        count += 5
    return count / (time.perf_counter() - start)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(form: str, args: taf_dt.Args, data, seconds: float, device: torch.device) -> dict:
    """Updates a second of each stage, largest memory in GB, and hours of a full run."""
    args = runs.replace(args, **FORMS[form])
    d_s, d_a = data.states.shape[1], data.actions.shape[1]
    found = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for stage, (update, _) in STAGES.items():
        torch.manual_seed(0)
        nets = taf_dt.build(args, d_s, d_a, device)
        nets["cvae"].requires_grad_(stage == "cvae")
        one = faster.compiled(update, nets, data, device) if args.tools.compile else update
        found[stage] = rate(lambda f=one, n=nets: f(n, data, args), seconds, device)
    found["hours"] = sum(getattr(args, n) / found[s] for s, (_, n) in STAGES.items()) / 3600
    cuda = device.type == "cuda"
    found["GB"] = torch.cuda.max_memory_allocated(device) / 1e9 if cuda else float("nan")
    return found


def row(device: str, task: str, form: str, found: dict) -> str:
    speeds = " | ".join(f"{found[stage]:.0f}" for stage in STAGES)
    ends = f"{found['GB']:.2f} | {found['hours']:.1f} h"
    return f"| {device} | {torch.__version__} | {task} | {form} | {speeds} | {ends} |"


def append(table: Path, rows: list[str]) -> None:
    """Rows at the end of the table, which is begun if it is not there."""
    begun = f"# GPUs\n\n`benchmarks/bench_gpu.py` appends to this table.\n\n{HEAD}\n{RULE}\n"
    text = table.read_text() if table.exists() else begun
    table.write_text(text + "".join(f"{line}\n" for line in rows))


def main(
    robot: str = "hopper", K: int = 5, seconds: float = 5, table: Path = Path("docs/gpu.md")
) -> None:
    check_folder(table.parent, "--table")
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; bench_train.py measures a CPU")
    device = torch.device("cuda")
    runs.seed_everything(1)  # deterministic, as a run is
    args = runs.compose(taf_dt.Args, env=robot, K=K, eta_reg=0.5, return_target=0.0, device="cuda")
    data = synthetic(ROBOTS[robot].obs_dim, ROBOTS[robot].act_dim)
    data = taf_dt.Data(*(x.to(device) for x in data))
    name, task, rows = torch.cuda.get_device_name(device), f"{robot}, K = {K}", []
    print(f"{name}, torch {torch.__version__}, {task}\n\n{HEAD}\n{RULE}")
    for form in FORMS:
        rows.append(row(name, task, form, measure(form, args, data, seconds, device)))
        print(rows[-1], flush=True)
    append(table, rows)
    torch.use_deterministic_algorithms(False)  # the published step asks for no such thing
    cvae = taf_dt.build(args, data.states.shape[1], data.actions.shape[1], device)["cvae"]
    published = rate(published_update(data, cvae, args), seconds, device)
    print(f"\npublished step: {published:.1f} policy updates/s\nrows appended to {table}")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
