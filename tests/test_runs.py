"""The record of a run. The training loop under test is the example in the docstring of dynashift.runs."""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import math
import mmap
import multiprocessing
import os
import pickle
import random
import re
import signal
import stat
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

from dynashift import checkpoints, devices, folders, make_batch, progress, results, run_record, run_texts, runs
from dynashift.datasets import TaskArgs
from dynashift.errors import UserError
from dynashift.files import only_one, progress_bar, say, slug
from dynashift.scores import normalized_score

ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds until a child process counts as hung; no test takes them


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic, states = torch.get_deterministic_debug_mode(), (random.getstate(), torch.get_rng_state())
    yield
    torch.set_deterministic_debug_mode(deterministic)
    random.setstate(states[0])
    torch.set_rng_state(states[1])


# ------------------------------------------------------------------------ the example, made into a training script


@dataclasses.dataclass(frozen=True)
class Args:
    task: runs.Flat[TaskArgs] = TaskArgs()
    run: runs.Flat[runs.RunArgs] = runs.RunArgs(seed=3, device="cpu", log_every=2, eval_every=6, save_every=4)
    updates: runs.Positive[int] = 24
    lr: runs.Positive[float] = 1e-2
    widths: tuple[int, ...] = (16, 16)


@dataclasses.dataclass
class Data:
    """The parts of a dataset that a run uses."""

    kind: str = "published"
    sha256: str = "00"
    score: float = 50.0

    @property
    def provenance(self):
        return {"sha256": self.sha256}

    def __len__(self):
        return 7


def build(args):
    policy = torch.nn.Sequential(
        torch.nn.Linear(5, args.widths[0]), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(args.widths[1], 2)
    )
    adam, rng = torch.optim.Adam(policy.parameters(), args.lr), np.random.default_rng(args.run.seed)
    return {"policy": policy, "adam": adam, "rng": rng}


def update(nets):
    """One that draws from every source of random numbers."""
    policy, adam, rng = nets.values()
    x = torch.as_tensor(rng.normal(size=(8, 5)) * random.random() + np.random.random(), dtype=torch.float32)  # noqa: NPY002
    loss = (policy(x) - x[:, :2] + 0.1 * torch.randn(8, 2)).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
    return {"losses/action": loss, "charts/learning_rate": adam.param_groups[0]["lr"]}


def evaluate(nets):
    returns = [nets["policy"][0].weight.double().sum().item(), random.random()]
    return {"returns": returns, "score": sum(returns) / 2}


def train(args, update=update, data=("00", "11"), evaluate=evaluate):
    example = runs.__doc__[runs.__doc__.index("    source, target = ") :]
    scope = {**globals(), "update": update, "evaluate": evaluate, "defaults": lambda args: {}}
    scope["load_task"] = lambda task: [Data(sha256=x) for x in data]
    exec("def example(args):\n" + textwrap.indent(textwrap.dedent(example), "  "), scope)
    return scope["example"](args)


def folder_of(args):
    return next(args.run.out.glob("bc/*/seed*"))


def weights(args):
    """All that training produced, as bytes, but for the time it took."""
    saved = torch.load(folder_of(args) / "ckpt.pt", weights_only=True)
    saved["parts"]["record"].pop("stages")
    return {k: flat(saved[k]) for k in ("parts", "python", "numpy", "torch")}


def checkpoint(args):
    return torch.load(folder_of(args) / "ckpt.pt", weights_only=True)["parts"]


def done_in_checkpoint(args):
    return checkpoint(args)["record"]["done"]["policy"]


def flat(x):
    """x with tensors as bytes, so that == compares bits; NaN equal to itself."""
    if isinstance(x, torch.Tensor):
        return (x.dtype, tuple(x.shape), x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    if isinstance(x, dict):
        return ("dict", [(flat(k), flat(v)) for k, v in x.items()])
    if isinstance(x, list | tuple):
        return (type(x).__name__, [flat(v) for v in x])
    return (type(x).__name__, x.hex() if isinstance(x, float) else x)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    args = runs.compose(Args, out=tmp_path_factory.mktemp("uninterrupted"))
    return train(args), weights(args)


def test_the_example_trains_and_leaves_a_complete_record(tmp_path):
    args = runs.compose(Args, out=tmp_path)
    result = train(args)
    folder = folder_of(args)
    assert folder == tmp_path / "bc" / "hopper-morph-medium-medium" / "seed3"
    assert runs.is_done(folder)
    assert result == runs.read_result(folder / "result.json")
    wanted = {**runs.flatten(args), "out": str(tmp_path), "widths": [16, 16]}
    assert result["args"] == runs.read_json(folder / "args.json") == wanted
    assert [e["step"] for e in result["evaluations"]] == [6, 12, 18, 24]
    assert result["summaries"] == results.summaries(result["evaluations"])
    assert result["data"] == {"source": {"sha256": "00"}, "target": {"sha256": "11"}}
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["numpy"] == np.__version__
    assert result["stages"]["policy"]["seconds"] > 0
    assert result["stages"]["policy"]["peak_memory_mb"] > 10
    assert "threads" in result["device"]
    assert [e.step for e in events(folder / "policy", "losses/action")] == list(range(2, 25, 2))
    assert not list(folder.glob(".*.tmp"))

    def never(*_):
        raise AssertionError("a finished run was trained again")

    assert train(runs.replace(args, device="cuda"), update=never) == result
    assert runs.read_json(folder / "args.json")["device"] == "cpu"
    with pytest.raises(AssertionError, match="trained again"):
        train(runs.replace(args, resume=False), update=never)
    assert not runs.is_done(folder)  # a run that starts again is not done
    assert len(list(folder.glob("policy/events*"))) == 1


# ------------------------------------------------------------------------------------------------------ resume


class Interruption(Exception):
    pass


@pytest.mark.parametrize("case", range(4))
def test_resume_is_exact_to_the_bit(tmp_path, uninterrupted, case):
    args, draw, done = runs.compose(Args, out=tmp_path), random.Random(case), 0
    for _ in range(3):
        last = draw.randint(done + 5, done + 8)  # the update during which this life ends
        count = itertools.count(done + 1)

        def interrupted(nets, count=count, last=last):
            losses = update(nets)
            if next(count) == last:
                raise Interruption
            return losses

        with pytest.raises(Interruption):
            train(args, update=interrupted)
        # saved every four updates, and before those that are evaluated
        done = max(i for i in range(last) if i % args.run.save_every == 0 or (i + 1) % args.run.eval_every == 0)
        assert done_in_checkpoint(args) == done > 0
        torch.randn(case), random.random(), np.random.random()  # noqa: NPY002  must not matter
    result = train(args)
    assert weights(args) == uninterrupted[1]
    assert result["evaluations"] == uninterrupted[0]["evaluations"]


def test_divergence_at_a_checkpoint_is_not_saved(tmp_path, uninterrupted):
    args, count = runs.compose(Args, out=tmp_path, log_every=1000), itertools.count(1)

    def diverging(nets):
        values = update(nets)
        return values | {"losses/action": torch.tensor(math.nan)} if next(count) >= 7 else values

    with pytest.raises(UserError, match=r"policy diverged at update 8: losses/action; .* try a lower --lr") as error:
        train(args, update=diverging)  # 8 is a multiple of save_every, and the first that is looked at
    assert "\n" not in str(error.value)
    assert done_in_checkpoint(args) == 5  # before the evaluation at 6
    train(args)
    assert weights(args) == uninterrupted[1]


@contextlib.contextmanager
def an_open_run(args, **nets):
    with runs.open_run("bc", args, Args(), target=Data()) as run:
        run.begin(nets)
        yield run


def test_values_beyond_the_bound_have_diverged(tmp_path):
    with an_open_run(runs.compose(Args, out=tmp_path)) as run:
        run.limit, run.remedy = 30.0, "--lr or --alpha"
        steps = run.steps("values", 24)
        run.log(next(steps), {"charts/q_largest": torch.tensor(1e9)})  # not looked at: no entry, no checkpoint
        for name in ("charts/q_largest", "charts/v_largest"):
            run.log(2, {name: torch.tensor(29.0), "charts/q_mean": 31.0})
            with pytest.raises(UserError, match=rf"{name} = 31 \(bound 30\); .* lower --lr or --alpha, or"):
                run.log(2, {name: torch.tensor(31.0)})
    assert not list(tmp_path.rglob("ckpt.pt"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("moment", ["update", "evaluation"])
def test_a_signal_abandons_an_evaluation_which_is_done_again(tmp_path, uninterrupted, send, capsys, number, moment):
    """In the update before it, or during it: the state before both is already saved."""
    args, calls = runs.compose(Args, out=tmp_path, save_every=1000), {"update": 0, "evaluation": 0}

    def disturbed(here, last, function):
        def one(nets):
            calls[here] += 1
            if here == moment and calls[here] == last:
                send(number)
            return function(nets)

        return one

    with pytest.raises(SystemExit) as status:
        train(args, disturbed("update", 12, update), evaluate=disturbed("evaluation", 2, evaluate))
    assert status.value.code == 128 + number
    assert calls == {"update": 12, "evaluation": 1 + (moment == "evaluation")}
    assert done_in_checkpoint(args) == 11
    assert [e["step"] for e in checkpoint(args)["record"]["evaluations"]] == [6]
    assert capsys.readouterr().out.splitlines()[-1] == "saved; the same command continues"
    result = train(args)
    assert "\nresumed at update 11 of stage policy\n" in capsys.readouterr().out
    assert weights(args) == uninterrupted[1]
    assert result["evaluations"] == uninterrupted[0]["evaluations"]


def test_what_was_begun_without_resuming_says_how_it_continues(tmp_path, send, capsys):
    def signalled(nets):
        send(signal.SIGINT)
        return update(nets)

    with pytest.raises(SystemExit, match="130"):
        train(runs.compose(Args, out=tmp_path, resume=False), signalled)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "saved; the same command without --no-resume continues"


def test_a_signal_before_the_first_stage_stops_at_once(tmp_path, send, capsys):
    """As during gate and weights, which come before it."""
    with (
        pytest.raises(SystemExit, match="130"),
        runs.open_run("bc", runs.compose(Args, out=tmp_path), Args(), target=Data()),
    ):
        send(signal.SIGINT)  # and what would follow is not done
    assert capsys.readouterr().out.splitlines()[-1] == "stopped; the same command starts again"


def test_a_stage_goes_on_where_it_was(tmp_path):
    args = runs.compose(Args, out=tmp_path)
    with an_open_run(args) as run:
        for stage, end, wanted in (("values", 5, [1, 2, 3, 4, 5]), ("policy", 24, list(range(1, 12)))):
            seen = []
            for step in run.steps(stage, end):
                run.log(step, {"losses/v": 1.0})
                seen.append(step)
                if step == 11:
                    break  # and nothing more is saved
            assert seen == wanted
    with an_open_run(args) as run:
        assert run.record["done"] == {"values": 5, "policy": 8}
        assert list(run.steps("values", 5)) == []
        steps = run.steps("policy", 24)
        assert next(steps) == 9
        with pytest.raises(AssertionError, match="every update is logged"):
            next(steps)
    with an_open_run(runs.replace(args, resume=False)) as run:
        assert run.record["done"] == {}
    assert not list(run.folder.glob("*.pt"))


def test_evaluations_are_due_at_intervals_and_three_times_at_the_end(tmp_path):
    for updates, every, wanted in (
        (24, 6, [6, 12, 18, 24]),
        (200, 150, [150, 196, 198, 200]),
        (1010, 200, [200, 400, 600, 800, 990, 1000, 1010]),
        (1030, 512, [512, 1009, 1020, 1030]),  # 1024 would come between the last three
    ):
        args = runs.compose(Args, out=tmp_path, updates=updates, eval_every=every)
        with an_open_run(args) as run:
            due = [step for step in run.steps("policy", updates) if run.log(step, {}) or run.evaluation_due(step)]
            assert due == wanted
            assert run.last == [round(updates * x) for x in (0.98, 0.99, 1)]


def test_an_evaluation_is_recorded_logged_and_printed(tmp_path, capsys):
    with an_open_run(runs.compose(Args, out=tmp_path)) as run:
        for step in run.steps("bc", 1):
            run.log(step, {})
            run.evaluated(step, {"returns": [1.0, 3.0], "score": 2.5, "own": 7}, other=4.0, nothing=None)
            run.evaluated(step, {"returns": [1.0], "score": 2.5})  # whose spread is 0, not 0 / 0
    first = {"step": 1, "returns": [1.0, 3.0], "score": 2.5, "own": 7}
    assert checkpoint(run.args)["record"]["evaluations"][0] == first
    found = EventAccumulator(str(run.folder / "bc"), {"scalars": 0}).Reload()
    tags = {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]}
    wanted = {"return_mean": 2.0, "return_std": math.sqrt(2), "normalized_score": 2.5, "other": 4.0}
    assert tags == pytest.approx({f"eval/{name}": value for name, value in wanted.items()})
    assert found.Scalars("eval/return_std")[1].value == 0
    assert "\n1 updates: score 2.5 (target data 50.0)\n" in capsys.readouterr().out
    assert set(run.record["stages"]) == {"policy", "evaluation"}  # a stage of the method's name is the policy's


def test_only_a_checkpoint_of_the_same_data_can_be_evaluated(tmp_path, capsys):
    args = runs.compose(Args, out=tmp_path)
    only = runs.replace(args, eval_only=True, resume=False)
    with pytest.raises(UserError, match=r"no checkpoint in .* without --eval-only first"):
        train(only)
    result = train(args)
    with pytest.raises(UserError, match="was run with other data"):
        train(args, data=("00", "22"))
    with pytest.raises(UserError, match="was begun with other data"):
        train(only, data=("00", "22"))
    capsys.readouterr()
    assert train(only)["returns"][0] == result["evaluations"][-1]["returns"][0]
    assert "normalised score" in capsys.readouterr().out
    assert runs.read_result(folder_of(args) / "result.json") == result


def test_a_run_says_what_it_was_changed_in_and_from_which_data(tmp_path, capsys):
    args = runs.compose(Args, out=tmp_path, lr=0.5, device="cpu", log_every=3, quick=True)
    for kinds, name in ((("own", "published"), "-own-published"), (("published",) * 2, ""), (("own",) * 2, "-own")):
        data = {role: Data(kind) for role, kind in zip(("source", "target"), kinds, strict=True)}
        args = runs.replace(args, out=tmp_path / f"data{name}")  # where no other run says what it took
        with runs.open_run("bc", args, runs.replace(Args(), quick=True), **data) as run:
            run.begin({}, diagnostics=[])
            for step in run.steps("policy", 1):
                run.log(step, {})
                run.diagnosed(step, {"stitched": {"J_a": 1.5}})
                run.evaluated(step, {"returns": [1.0], "score": 2.0})
            pre = {"path": "p.npz", "meta": {"report": {"retained": 3}, "stages": {"ot": {"seconds": 1.0}}}}
            result = run.finish(pre)
        assert run.folder.parent.name == f"hopper-morph-medium-medium{name}"
        assert result["changed"] == {"lr": 0.5}
        assert result["diagnostics"] == [{"step": 1, "stitched": {"J_a": 1.5}}]
        assert (result["preprocess"], result["report"]) == ("p.npz", {"retained": 3})
        assert set(result["stages"]) == {"preprocess ot", "policy", "evaluation"}
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == ["bc on hopper morph, seed 3", "  changed  quick=True, lr=0.5"]
        kind = dict(zip(("source", "target"), kinds, strict=True))
        assert said[2] == f"  source   medium, {kind['source']}, 7 transitions"
        assert said[3] == f"  target   medium, {kind['target']}, 7 transitions, normalised score 50.0"
        assert said[4].startswith("  device   cpu: ")
        assert said[5] == f"  results  {run.folder}"
        assert said[6].startswith("  time     not known yet; a stage longer than a minute says it")
        assert said[7:9] == ["policy: 1 updates", "1 updates: score 2.0 (target data 50.0)"]
        assert said[9].startswith("policy: 1 updates done in ")
        assert max(map(len, said[:5] + said[6:10])) <= 80
        assert said[10:] == [
            *("normalised score 2.0", "the target data's own mean 50.0", str(run.folder / "result.json")),
            f"tensorboard --logdir {run.folder}",
        ]
        assert events(run.folder / "policy", "charts/J_a_stitched")[0].value == 1.5


def test_many_changed_arguments_fit_into_a_terminal(tmp_path, capsys):
    changed = {
        "lr": 0.125,
        "eval_every": 1234567,
        "eval_episodes": 12,
        "updates": 7654321,
        "torch_deterministic": False,
    }
    args = runs.compose(Args, out=tmp_path, device="cpu", **changed)
    with runs.open_run("bc", args, Args(), target=Data()):
        pass
    said = capsys.readouterr().out.split("  target ")[0].splitlines()
    assert max(map(len, said)) <= 80
    assert len(said) == 3
    words = " ".join(said[1:]).replace("  changed", "").split()
    assert sorted(word.strip(",") for word in words) == sorted(f"{k}={v}" for k, v in changed.items())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "model name\t: Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz\ncpu family\t: 6\nmodel\t\t: 106\n\nx",
            "(6.106, ",
        ),
        (
            "processor\t: 0\nmodel name : AMD Ryzen Threadripper PRO 5995WX 64-Cores\ncpu family : 25\nmodel : 8",
            "(25.8, ",
        ),
        (None, "("),
    ],
)
def test_the_name_of_the_processor_is_short_and_tells_kinds_apart(text, name, monkeypatch):
    def read(self):
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(devices.Path, "read_text", read)
    found = devices.cpu_name()
    assert name in found
    assert "(R)" not in found
    assert "@" not in found
    assert found.endswith(f"{torch.backends.cpu.get_cpu_capability()})")
    assert len(f"  device   cpu: {found}, 64 threads") <= 80


def test_the_header_says_what_the_same_run_took(tmp_path, capsys, monkeypatch):
    """With another seed or on another task, but with the same method, robot, arguments and device."""

    def time_of(seed, finish=False, **changed):
        args = runs.compose(Args, out=tmp_path, seed=seed, **changed)
        with runs.open_run("bc", args, Args(), target=Data("published")) as run:
            run.begin({})
            if finish:
                run.record["stages"] = {"values": {"seconds": 200.0}, "policy": {"seconds": 400.0}}
                run.finish()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  time ")]
        return line.removeprefix("  time     ")

    assert time_of(1, finish=True).startswith("not known yet")
    assert time_of(12) == "about 10 min, as morph with seed 1"
    assert time_of(2, shift="gravity") == "about 10 min, as morph with seed 1"
    assert time_of(2, env="ant").startswith("not known yet")
    assert time_of(2, lr=0.5).startswith("not known yet")
    with monkeypatch.context() as patch:
        patch.setattr(run_texts, "device_name", lambda device: "another machine")
        assert time_of(3).startswith("not known yet")
    (tmp_path / "bc" / "hopper-morph-medium-medium" / "seed1" / "result.json").write_text("{")
    assert time_of(2).startswith("not known yet")


@pytest.mark.parametrize(
    ("chosen", "device", "known"),
    [({"policy": 1}, "a processor", True), ({}, "a processor", False), ({"policy": 1}, "another", False)],
)
def test_the_time_is_known_although_stages_chose_their_threads(chosen, device, known, tmp_path, capsys, monkeypatch):
    """A result names the threads of its last stage, and the header those of the beginning."""
    monkeypatch.setattr(run_record, "device_name", lambda _: "a processor, 1 threads")
    monkeypatch.setattr(run_texts, "device_name", lambda _: f"{device}, 2 threads")
    for seed in (1, 2):
        args = runs.compose(Args, out=tmp_path, seed=seed)
        with runs.open_run("bc", args, Args(), target=Data("published")) as run:
            run.begin({}, threads=chosen)
            run.record["stages"] = {"policy": {"seconds": 600.0}}
            run.finish()
    times = re.findall("^  time     (.*)", capsys.readouterr().out, re.M)
    assert [time.startswith("about 10 min") for time in times] == [False, known]


def test_the_end_compares_with_cloning(tmp_path, capsys):
    """Of finished runs of bc.py on the same target data, with the same --quick and seed if there are such."""

    def end_of(method, seed, quick=False, target="11", score=2.0):
        args = runs.compose(Args, out=tmp_path, seed=seed, quick=quick)
        with runs.open_run(method, args, Args(), source=Data(), target=Data(sha256=target)) as run:
            run.begin({})
            for step in run.steps("policy", 1):
                run.log(step, {})
                run.evaluated(step, {"returns": [1.0], "score": score})
            capsys.readouterr()
            run.finish()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("cloning")], run.folder

    assert end_of("iql", 1)[0] == []
    other = tmp_path / "bc" / "hopper-morph-medium-medium" / "seed9"
    other.mkdir(parents=True)
    (other / "result.json").write_text("{")  # damaged, and none of ours
    lines, second = end_of("bc", 2, score=20.0)
    assert lines == []
    assert end_of("iql", 3)[0] == [f"cloning 20.0 ({second})"]
    third = end_of("bc", 4, score=40.0)[1]
    quick = end_of("bc", 4, quick=True, score=4.0)[1]
    assert end_of("iql", 4)[0] == [f"cloning 40.0 ({third})"]
    assert end_of("iql", 4, quick=True)[0] == [f"cloning 4.0 ({quick})"]
    assert end_of("iql", 5, target="22")[0] == []


@pytest.mark.parametrize(
    ("speed", "wanted"), [(0.1, []), (1.0, ["policy: about 5 min"]), (60, ["policy: about 5.0 hours"])]
)
def test_the_time_of_a_stage_is_said_when_it_is_known_and_worth_it(tmp_path, capsys, monkeypatch, speed, wanted):
    class Bar(list):
        format_dict = {"elapsed": 100 * speed, "rate": 1 / speed}  # noqa: RUF012
        set_postfix = close = __exit__ = lambda *_, **__: None
        __enter__ = __iter__ = list.__iter__

    monkeypatch.setattr(run_record, "progress_bar", lambda steps, **_: Bar(steps))
    with an_open_run(runs.compose(Args, out=tmp_path, updates=300, save_every=1000)) as run:
        for step in run.steps("policy", 300):
            run.log(step, {"losses/v": 1.0})
    assert [line for line in capsys.readouterr().out.splitlines() if "about" in line] == wanted


@pytest.mark.parametrize(
    ("change", "text"), [({"updates": 0}, "--updates must be positive"), ({"lr": math.nan}, "--lr must be a number"),
                         ({"seed": -1}, "--seed must not be negative"), ({"eval_every": -2}, "--eval-every must be"),
                         ({"lr": None}, "--lr must be positive"), ({"seed": 10**10}, "too large")],
)  # fmt: skip
def test_signs_that_cannot_be_are_refused(change, text):
    runs.check_args(Args())
    with pytest.raises(UserError, match=text):
        runs.check_args(runs.compose(Args, **change))


def test_a_policy_without_memory_plays_whole_episodes():
    args, seen, total, going = runs.compose(Args, eval_episodes=3), [], np.zeros(3), np.zeros(3, int)

    def act(obs, rewards, alive):
        nonlocal total, going
        assert not torch.is_grad_enabled()
        seen.append(obs)
        total = total + rewards
        going = going + alive
        return np.zeros((len(obs), 3))

    found = runs.play(args, act)
    assert all(len(found[key]) == 3 for key in ("returns", "lengths"))
    assert max(found["lengths"]) == len(seen)
    assert going.tolist() == found["lengths"]
    assert total.sum() < sum(found["returns"])  # the last step's reward comes after the last action
    np.testing.assert_allclose(np.sort(found["returns"] - total)[:-1], 0, atol=1e-9)  # for all but the longest
    assert found["score"] == pytest.approx(normalized_score("hopper", "morph", np.mean(found["returns"])))
    assert found == runs.play(args, act)
    assert found != runs.play(runs.replace(args, seed=4), act)
    batch = make_batch("hopper", "morph", 3)
    np.testing.assert_array_equal(seen[0], batch.reset(30_000))
    batch.close()


def test_another_seed_gives_other_weights(tmp_path, uninterrupted):
    args = runs.compose(Args, out=tmp_path, seed=4)
    train(args)
    assert weights(args) != uninterrupted[1]


@pytest.fixture(scope="module")
def fork():
    """Starts a function in a process of its own, forked from one that has torch loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["test_runs", "torch.utils.tensorboard", "torch._dynamo"])
        processes = []

        def start(function, *arguments):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=function, args=(theirs, *arguments), daemon=True))
            processes[-1].start()
            theirs.close()
            return ours, processes[-1]

        yield start
        for process in processes:
            process.kill()
            process.join()


def hear(connection):
    assert connection.poll(PATIENCE), "the child process hangs"
    return connection.recv()


def set_trap(connection, moment, n):
    """At the n-th such moment, tell the parent and wait for death ("running": do not wait). Returns an update."""
    count = itertools.count(1)

    def trap(here):
        if moment == here and next(count) == n:
            connection.send(here)
            if here != "running":
                connection.recv()

    class HalfWritten(io.FileIO):
        def write(self, data):
            done = super().write(data[: len(data) // 2])
            trap("half written")
            return done + super().write(data[done:])

    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):  # and not the folder after the rename
            trap("written")
        real_fsync(fd)

    def replace(a, b):
        trap("before replace")
        real_replace(a, b)
        trap("after replace")

    def trapped_update(nets):
        trap("running")
        losses = update(nets)
        trap("updated")
        return losses

    def write_bytes(path, data):
        with HalfWritten(path, "wb") as file:
            return file.write(data)

    os.fsync, os.replace, Path.write_bytes = fsync, replace, write_bytes
    return trapped_update


def child_trains(connection, args, moment, n):
    train(args, update=set_trap(connection, moment, n))


def test_resume_is_exact_after_sigkill_at_any_moment(tmp_path, fork):
    args = runs.compose(Args, out=tmp_path / "killed", updates=60)
    draw = random.Random(0)
    moments = ["half written", "written", "before replace", "after replace", "updated", "updated", "running", "running"]
    draw.shuffle(moments)
    for moment in moments:
        # A child writes args.json first, then a checkpoint every four updates.
        n = draw.randint(1, 7) if moment in ("updated", "running") else draw.randint(2, 3)
        connection, process = fork(child_trains, args, moment, n)
        assert hear(connection) == moment
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert done_in_checkpoint(args) > 4  # some of them resumed
    assert list(folder_of(args).glob(".*.tmp")) or moments[-1] not in ("half written", "written", "before replace")
    result = train(args)
    assert not list(folder_of(args).glob(".*.tmp"))
    reference = runs.compose(Args, out=tmp_path / "uninterrupted", updates=60)
    assert result["evaluations"] == train(reference)["evaluations"]
    assert weights(args) == weights(reference)
    wanted = sorted({*range(2, 61, 2), 59})  # and where it is evaluated
    assert [e.step for e in events(folder_of(args) / "policy", "losses/action")] == wanted


def child_is_preempted(connection, args, step):
    count = itertools.count(1)

    def preempted(nets):
        if next(count) == step:
            signal.raise_signal(signal.SIGTERM)
        return update(nets)

    train(args, update=preempted)


def test_sigterm_finishes_the_update_saves_and_exits_143(tmp_path, fork, uninterrupted):
    args = runs.compose(Args, out=tmp_path, save_every=1000)
    _, process = fork(child_is_preempted, args, 7)
    process.join(PATIENCE)
    assert process.exitcode == 143
    assert done_in_checkpoint(args) == 7
    assert not runs.is_done(folder_of(args))
    train(args)
    assert weights(args) == uninterrupted[1]


def test_a_second_signal_acts_at_once_and_handlers_are_put_back(tmp_path, send):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with folders.session(tmp_path, {}) as stop:
        assert stop.status == 0
        stop.now = False
        send(signal.SIGINT)
        assert stop.status == 130
        with pytest.raises(AssertionError, match="not handled"):
            send(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ignored_signal_stays_ignored(tmp_path, send):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `send` puts it back
    with folders.session(tmp_path, {}) as stop:
        send(signal.SIGINT)
        assert stop.status == 0


# ------------------------------------------------------------------------------------------------- checkpoints

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
numbers = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats()
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)) * 0.7 - 1).to(dtype).reshape(shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
nested = st.recursive(
    numbers | text | tensors,
    lambda x: st.lists(x, max_size=4) | st.tuples(x, x) | st.dictionaries(text | st.integers(0, 300), x, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=40, deadline=None)
@given(state=nested)
def test_nested_states_come_back_as_they_were(scratch, state):
    runs.save_checkpoint(scratch / "nested.pt", {"state": state})
    assert flat(runs.load_checkpoint(scratch / "nested.pt", {})) == flat({"state": state})


BIT_GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(BIT_GENERATORS), warm_up=st.integers(0, 700))
def test_every_random_state_comes_back(scratch, seed, kind, warm_up):
    runs.seed_everything(seed)
    parts = {
        "rng": np.random.Generator(getattr(np.random, kind)(seed)),
        "noise": torch.Generator().manual_seed(seed),
    }

    def draw(n):
        rng, noise = parts["rng"], parts["noise"]
        return [
            [random.random() for _ in range(n)],
            random.gauss(0, 1),  # gauss keeps every second number for later
            np.random.normal(size=n).tolist(),  # noqa: NPY002  and so does this
            rng.integers(0, 99, n, dtype=np.int32).tolist(),  # half a word is kept for later
            rng.random(n).tolist(),
            torch.randn(n).tolist(),
            torch.randn(n, generator=noise).tolist(),
        ]

    draw(warm_up)
    runs.save_checkpoint(scratch / "random.pt", parts)
    wanted = draw(5)
    assert draw(5) != wanted
    parts["rng"] = np.random.Generator(getattr(np.random, kind)(seed + 1))
    parts["noise"].manual_seed(seed + 1)
    runs.load_checkpoint(scratch / "random.pt", parts)
    assert draw(5) == wanted


def test_parts_are_restored_and_unnamed_ones_left_alone(tmp_path):
    policy, adam, _ = build(Args()).values()
    rate = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    update({"policy": policy, "adam": adam, "rng": np.random.default_rng(0)})
    rate.step()
    runs.save_checkpoint(tmp_path / "c.pt", {"policy": policy, "adam": adam, "rate": rate, "mean": torch.ones(2)})
    other, other_adam, _ = build(runs.compose(Args, seed=9)).values()
    saved = runs.load_checkpoint(tmp_path / "c.pt", {"policy": other})  # as an evaluation would
    assert flat(other.state_dict()) == flat(policy.state_dict())
    assert not other_adam.state_dict()["state"]
    assert torch.equal(saved["mean"], torch.ones(2))
    other_rate = torch.optim.lr_scheduler.StepLR(other_adam, 1, 0.5)
    runs.load_checkpoint(tmp_path / "c.pt", {"adam": other_adam, "rate": other_rate})
    assert flat(other_adam.state_dict()) == flat(adam.state_dict())
    assert other_rate.last_epoch == 1


def test_no_checkpoint_is_none(tmp_path):
    assert runs.load_checkpoint(tmp_path / "ckpt.pt", {}) is None


def one_line_about(path, error):
    message = str(error.value)
    assert str(path) in message
    assert "delete it" in message
    assert "--no-resume" in message
    assert "\n" not in message


@pytest.fixture(scope="module")
def good_checkpoint(scratch):
    torch.manual_seed(0)
    runs.save_checkpoint(scratch / "good.pt", {"a": torch.randn(300), "b": [torch.arange(9), {"c": 1.5}, "text"]})
    return (scratch / "good.pt").read_bytes(), flat(runs.load_checkpoint(scratch / "good.pt", {}))


def load_damaged(scratch, data):
    """The flat content, or None for a UserError."""
    path = scratch / "damaged.pt"
    path.write_bytes(data)
    try:
        return flat(runs.load_checkpoint(path, {}))
    except UserError:
        return None


@settings(max_examples=40, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_truncated_checkpoint_is_refused(scratch, good_checkpoint, where):
    data, _ = good_checkpoint
    assert load_damaged(scratch, data[: int(where * len(data))]) is None


@settings(max_examples=200, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=3))
def test_flipped_bits_are_refused_or_harmless(scratch, good_checkpoint, flips):
    data, content = good_checkpoint
    damaged = bytearray(data)
    for where, bit in flips:
        damaged[int(where * len(data))] ^= 1 << bit
    assert load_damaged(scratch, bytes(damaged)) in (None, content)


def test_flipped_bits_in_weights_are_refused(scratch, good_checkpoint):
    data, _ = good_checkpoint
    torch.manual_seed(0)
    start = data.index(torch.randn(300).numpy().tobytes())
    for i in range(0, 1200, 37):
        damaged = bytearray(data)
        damaged[start + i] ^= 1 << i % 8
        assert load_damaged(scratch, bytes(damaged)) is None


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("form", ["pickle", "torch", "torch_legacy", "in_our_layout"])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path, form):
    marker, path = tmp_path / "executed", tmp_path / "ckpt.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Malicious(marker)))
    elif form == "in_our_layout":
        runs.save_checkpoint(path, {})
        torch.save({**torch.load(path, weights_only=True), "parts": Malicious(marker)}, path)
    else:
        torch.save(Malicious(marker), path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(UserError) as error:
        runs.load_checkpoint(path, {})
    one_line_about(path, error)
    assert not marker.exists()
    if form == "pickle":  # read in any other way, it would be executed
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "ckpt.pt"
    policy = build(Args())["policy"]
    for saved in ({"model": policy.state_dict()}, policy.state_dict(), [1, 2], {"parts": {}, "python": 1}):
        torch.save(saved, path)
        with pytest.raises(UserError) as error:
            runs.load_checkpoint(path, {})
        one_line_about(path, error)
    runs.save_checkpoint(path, {"policy": policy})
    for parts in ({"policy": torch.nn.Linear(3, 2)}, {"value": policy}):  # other shapes, another part
        with pytest.raises(UserError) as error:
            runs.load_checkpoint(path, parts)
        one_line_about(path, error)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError):
        runs.load_checkpoint(tmp_path / "folder", {})


@pytest.mark.parametrize("value", [np.float64(1), np.ones(2), Path("x"), Args()])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value):
    path = tmp_path / "ckpt.pt"
    runs.save_checkpoint(path, {"record": {"score": 1.0}})
    with pytest.raises(TypeError, match=r"ckpt\.pt"):
        runs.save_checkpoint(path, {"record": {"score": value}})
    assert runs.load_checkpoint(path, {}) == {"record": {"score": 1.0}}


def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    runs.save_checkpoint(tmp_path / "ckpt.pt", {"n": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"ckpt\.pt: No space left"):
        runs.save_checkpoint(tmp_path / "ckpt.pt", {"n": 2})
    assert runs.load_checkpoint(tmp_path / "ckpt.pt", {}) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt.pt"]


def test_other_library_versions_are_mentioned(tmp_path, capsys, monkeypatch):
    runs.save_checkpoint(tmp_path / "ckpt.pt", {})
    runs.load_checkpoint(tmp_path / "ckpt.pt", {})
    assert capsys.readouterr().err == ""
    now = checkpoints.versions()
    monkeypatch.setattr(checkpoints, "versions", lambda: {**now, "numpy": "9.9"})
    runs.load_checkpoint(tmp_path / "ckpt.pt", {})
    assert f"numpy {np.__version__} (now 9.9)" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- JSON


def test_json_takes_what_scripts_have_and_turns_nan_into_null(tmp_path):
    x = {"a": np.float32(0.5), "b": np.arange(3), "c": Path("x") / "y", "d": torch.tensor([1.5]), "e": (1, np.int64(2))}
    x |= {"f": [math.nan, np.float64("inf"), np.array([np.nan, 1]), torch.tensor(-math.inf)], "g": np.bool_(True)}
    checkpoints.write_json(tmp_path / "x.json", {**x, "args": Args()})
    wanted = {"a": 0.5, "b": [0, 1, 2], "c": "x/y", "d": [1.5], "e": [1, 2], "f": [None, None, [None, 1.0], None]}
    wanted |= {"g": True, "args": {**runs.flatten(Args()), "out": "runs", "widths": [16, 16]}}
    assert runs.read_json(tmp_path / "x.json") == wanted
    with pytest.raises(TypeError):
        checkpoints.write_json(tmp_path / "x.json", {"rng": random.Random()})
    assert runs.read_json(tmp_path / "x.json") == wanted


@settings(max_examples=50, deadline=None)
@given(x=st.recursive(numbers | text, lambda x: st.lists(x, max_size=4) | st.dictionaries(text, x), max_leaves=12))
def test_json_round_trip(scratch, x):
    checkpoints.write_json(scratch / "x.json", {"x": x})
    wanted = json.loads(json.dumps(x), parse_constant=lambda nan_or_infinity: None)
    assert flat(runs.read_json(scratch / "x.json")) == flat({"x": wanted})


def test_json_has_the_permissions_of_any_other_file(tmp_path):
    (tmp_path / "plain").write_text("")
    checkpoints.write_json(tmp_path / "x.json", {})
    assert (tmp_path / "x.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_unreadable_json_is_one_line(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1')
    with pytest.raises(UserError, match=r"x\.json"):
        runs.read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff\x00")
    with pytest.raises(UserError, match=r"x\.json"):
        runs.read_json(tmp_path / "x.json")


def test_one_changed_digit_is_noticed_and_another_layout_is_not(tmp_path):
    record = {"args": {"lr": 0.5}, "evaluations": [{"step": 1, "score": 9.797, "returns": [1.0, None]}], "sha": "1"}
    checkpoints.write_json(tmp_path / "x.json", record)
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "x.json").write_text(json.dumps(json.loads(text), sort_keys=True))
    assert runs.read_json(tmp_path / "x.json") == record
    for old, new in (("9.797", "8.797"), ("null", "true"), ('"lr"', '"lR"'), ("0.5", "5"), ('"sha": "1"', '"sha": 1')):
        (tmp_path / "x.json").write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match=r"x\.json.*changed or damaged"):
            runs.read_json(tmp_path / "x.json")
    for other in ("[]", "{}", json.dumps(record), "[" * 100_000):
        (tmp_path / "x.json").write_text(other)
        with pytest.raises(UserError, match=r"x\.json"):
            runs.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["../../../../../escape/x", "a/b", "a\0b", "..", "x" * 300, "a b\nc", "\udcff", "m:n"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    """Whatever a dataset or a file says it is called."""
    args = runs.compose(Args, out=tmp_path / "out", source=f"{name}.hdf5")
    with runs.open_run("bc", args, Args(), target=Data(kind=name)) as run:
        assert run.folder.parents[2] == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (task,) = (tmp_path / "out" / "bc").iterdir()
    assert re.fullmatch("hopper-morph-[A-Za-z0-9._+-]+", task.name)


def test_names_that_are_plain_stay_as_they_are():
    for name in ("hopper-morph-medium-medium", "a.b_c+d-1", "x" * 100):
        assert slug(name) == name
    assert slug("minari:hopper") == "minari_hopper"
    assert slug(".hidden") == "hidden"
    assert slug("") == slug("..") == "_"
    long = [slug("x" * 200 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert {len(name) for name in long} == {100}


def test_a_damaged_result_is_neither_believed_nor_shown(tmp_path):
    args = runs.compose(Args, out=tmp_path)
    result = train(args)
    path = folder_of(args) / "result.json"
    stored = json.loads(path.read_bytes())
    assert "summaries" not in stored
    assert result["summaries"] == results.summaries(stored["evaluations"])
    stored["evaluations"][-1]["score"] += 1
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"changed or damaged.*--no-resume"):
        train(args)
    assert train(runs.replace(args, resume=False))["evaluations"] == result["evaluations"]


def test_a_folder_without_a_result_is_no_finished_run(tmp_path):
    with pytest.raises(UserError, match=r"^no finished run in .*none \(no result.json\); name a folder such as runs/"):
        runs.read_result(tmp_path / "none" / "result.json")


def child_writes_json(connection, path, moment, n):
    set_trap(connection, moment, n)
    for i in itertools.count():
        checkpoints.write_json(path, {"x": [i] * 1000})


@pytest.mark.parametrize("moment", ["half written", "written", "before replace", "after replace"])
def test_json_is_old_or_new_after_a_kill(tmp_path, fork, moment):
    connection, process = fork(child_writes_json, tmp_path / "x.json", moment, 4)
    assert hear(connection) == moment
    process.kill()
    process.join()
    assert runs.read_json(tmp_path / "x.json") == {"x": [3 if moment == "after replace" else 2] * 1000}
    assert len(list(tmp_path.glob(".*.tmp"))) == (moment != "after replace")
    with folders.session(tmp_path, {}):
        assert not list(tmp_path.glob(".*.tmp"))


# ---------------------------------------------------------------------------------------------------- arguments


def test_arguments_are_composed_and_flattened_by_the_names_of_their_flags():
    args = runs.compose(Args, env="ant", seed=5, lr=0.5)
    assert (args.task.env, args.run.seed, args.lr) == ("ant", 5, 0.5)
    values = runs.flatten(args)
    assert values["env"] == "ant"
    assert not {"task", "run"} & values.keys()
    assert runs.compose(Args, **values) == args
    assert runs.replace(args, seed=6) == runs.compose(Args, **values | {"seed": 6})
    assert runs.flatten(Args())["seed"] == 3  # nothing was changed in place


@pytest.mark.parametrize("name", ["sead", "task", "run"])
def test_an_unknown_argument_is_a_type_error(name):
    with pytest.raises(TypeError, match=f"Args has no {name}"):
        runs.compose(Args, **{name: 1})


QUICK = {"quick": True, "lr": 0.125, "save_every": 9}


def example_defaults(args):
    values = {"lr": 0.25 if args.task.env == "ant" else 0.5}
    return values | (QUICK if args.run.quick else {})


@pytest.mark.parametrize(
    ("line", "wanted", "plain"),
    [
        ("", {"lr": 0.5}, {"lr": 0.5}),
        ("--env ant", {"env": "ant", "lr": 0.25}, {"env": "ant", "lr": 0.25}),
        ("--quick --seed 8", QUICK | {"seed": 8}, QUICK | {"seed": 8}),
        ("--lr 2 --quick", QUICK | {"lr": 2.0}, QUICK),  # whichever comes first, the flag wins
        ("--quick --lr 2 --save-every 4", QUICK | {"lr": 2.0, "save_every": 4}, QUICK),
    ],
)
def test_defaults_hold_where_the_command_line_says_nothing(line, wanted, plain):
    args = runs.read_args(Args, example_defaults, "", line.split())
    assert args == runs.compose(Args, **wanted)
    assert runs.plain(Args, example_defaults, args) == runs.compose(Args, **plain)


# ------------------------------------------------------------------------------------------------ folder and lock


def test_the_default_folder_is_plain_and_the_other_is_the_same_everywhere():
    def folder(**changed):
        return folders.run_dir(
            "runs", "taf_dt", "ant-morph-medium-expert", 3, runs.compose(Args, **changed), Args(), runs.IGNORE
        )

    assert folder() == Path("runs/taf_dt/ant-morph-medium-expert/seed3")
    assert folder(device="cuda", resume=False, seed=3) == folder()
    assert folder(lr=0.1).name == "seed3-lr0.1"
    assert folder(lr=0.1, device="cuda").name == folder(lr=0.1).name
    assert folder(updates=7, quick=True, torch_deterministic=False, source_size=5).name == (
        "seed3-quick-source_size5-no_torch_deterministic-updates7"
    )
    assert folder(widths=(1, 2)).name == "seed3-a1969a4d"  # printf '{"widths": [1, 2]}' | sha256sum
    long = folder(updates=7, quick=True, torch_deterministic=False, source_size=5, eval_every=12)
    assert re.fullmatch("seed3-quick-eval_every12-source_size5-[0-9a-f]{8}", long.name)


OTHERS = {"a": 0, "a_b": False, "no_a": False, "a1": False, "b": "x", "c": True, "no": None, "d": [1]}
values = st.none() | st.booleans() | st.integers(-3, 20) | st.floats(-1, 1e6) | st.text("x1b-_+.", max_size=4)
changes = st.fixed_dictionaries(dict.fromkeys(OTHERS, values | st.lists(values, max_size=2)))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_two_sets_of_arguments_share_a_folder(data):
    """Whatever the names and values: "a" = "b" is not "a_b" = True."""
    one = OTHERS | data.draw(changes)
    other = one | {data.draw(st.sampled_from(sorted(OTHERS))): data.draw(values)}
    names = [folders.run_dir("runs", "bc", "task", 1, args, OTHERS).name for args in (one, other)]
    assert names[0] != names[1] or one == other
    assert names[0] == names[1] or json.dumps(one) != json.dumps(other)
    assert max(map(len, names)) <= folders.LONGEST


def test_the_word_of_a_value_does_not_depend_on_its_neighbours():
    words = {"K": 5, "token": "rtg", "reg_positions": "last", "label_weighting": "q-only", "lr": 1e-5, "ot_chunk": None}
    words |= {"ot_reward": False, "beta": 0.0, "alpha": 2.0}
    wanted = "K5 token_rtg reg_positions_last label_weighting_q+only lr0.00001 no_ot_chunk no_ot_reward beta0 alpha2"
    plain = {"K": 20, "token": "advantage", "reg_positions": "all", "label_weighting": "sample", "lr": 3e-4}
    plain |= {"ot_chunk": 10, "ot_reward": True, "beta": 0.3, "alpha": 3.5}
    for (name, value), word in zip(words.items(), wanted.split(), strict=True):
        assert folders.run_dir("runs", "bc", "task", 1, plain | {name: value}, plain).name == f"seed1-{word}"


arguments = st.fixed_dictionaries(
    {"lr": st.floats(1e-6, 1), "updates": st.integers(1, 99), "widths": st.tuples(st.integers(1, 9), st.integers(1, 9))}
)
excluded = st.fixed_dictionaries({"device": st.sampled_from(["cpu", "cuda"]), "resume": st.booleans()})


@settings(max_examples=100, deadline=None)
@given(a=arguments, b=arguments, x=excluded, y=excluded)
def test_folders_differ_as_algorithm_arguments_do(a, b, x, y):
    def folder(changed, other):
        args = runs.compose(Args, **changed, **other)
        return folders.run_dir("runs", "taf_dt", "task", 0, args, Args(), runs.IGNORE)

    assert folder(a, x) == folder(a, y)
    assert (folder(a, x) == folder(b, x)) == (a == b)
    assert folder({**a, "widths": list(a["widths"])}, x) == folder(a, x)
    reordered = dict(
        reversed(runs.flatten(runs.compose(Args, **a)).items())
    )  # as when someone sorts the fields of Args
    assert folders.run_dir("runs", "taf_dt", "task", 0, reordered, Args(), runs.IGNORE) == folder(a, x)


def test_a_default_that_changed_in_the_code_is_noticed(tmp_path):
    with folders.session(tmp_path, {"lr": 1, "device": "cpu"}, {"device"}):
        pass
    with folders.session(tmp_path, {"lr": 2, "device": "cpu"}, {"device"}):  # nothing to lose yet
        runs.save_checkpoint(tmp_path / "ckpt.pt", {})
    with folders.session(tmp_path, {"lr": 2, "device": "cuda", "new": 1}, {"device"}):
        pass
    with (
        pytest.raises(UserError, match=r"lr=2 \(now 3\).*--no-resume"),
        folders.session(tmp_path, {"lr": 3, "device": "cpu"}, {"device"}),
    ):
        pass
    assert runs.read_json(tmp_path / "args.json")["lr"] == 2
    with folders.session(tmp_path, {"lr": 3, "device": "cpu"}, {"device"}, resume=False):
        assert not (tmp_path / "ckpt.pt").exists()


def child_holds_the_folder(connection, folder):
    with folders.session(folder, {}):
        connection.send("locked")
        connection.recv()


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, fork):
    connection, process = fork(child_holds_the_folder, tmp_path)
    assert hear(connection) == "locked"
    with pytest.raises(UserError, match=rf"in use by process {process.pid} ") as error, folders.session(tmp_path, {}):
        pass
    assert "\n" not in str(error.value)
    process.kill()
    process.join()
    with folders.session(tmp_path, {}):
        pass
    with folders.session(tmp_path, {}):  # and a session that ended lets go
        pass


def test_a_system_without_locks_still_runs(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", unsupported)
    with folders.session(tmp_path, {}):
        assert "cannot be locked" in capsys.readouterr().err
    monkeypatch.setattr(folders, "fcntl", None)
    with folders.session(tmp_path, {}):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(UserError, match="cannot write to"), folders.session(tmp_path, {}):
        pass
    (tmp_path / ".x.npz.lock").symlink_to("precious")
    with pytest.raises(UserError, match="cannot be written to"), only_one(tmp_path / "x.npz"):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_leftovers_of_killed_writers_are_removed_under_the_lock(tmp_path):
    for name in (".x.npz.abc.tmp", ".y.npz.abc.tmp"):
        (tmp_path / name).write_text("half")
    with only_one(tmp_path / "x.npz"):
        assert [path.name for path in tmp_path.glob("*.tmp")] == [".y.npz.abc.tmp"]


def test_eval_only_writes_nothing(tmp_path, monkeypatch):
    args = runs.compose(Args, out=tmp_path)
    result = train(args)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("mkdir", "unlink", "rename", "touch", "write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, lambda *_, **__: 1 / 0)
    monkeypatch.setattr(folders, "open_lock", lambda *_: 1 / 0)
    again = train(runs.replace(args, eval_only=True))
    assert again["returns"][0] == result["evaluations"][-1]["returns"][0]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


def test_divergence_before_the_first_checkpoint_does_not_speak_of_one(tmp_path):
    with pytest.raises(UserError, match="nothing was saved yet; try a lower --lr"):
        train(
            runs.compose(Args, out=tmp_path, save_every=1000, eval_every=1000), lambda nets: {"losses/action": math.nan}
        )


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"), folders.session(tmp_path / "file" / "seed0", {}):
        pass


# ------------------------------------------------------------------------------------------ logs, progress, costs


def events(folder, tag):
    return EventAccumulator(str(folder), {"scalars": 0}).Reload().Scalars(tag)


def test_events_after_the_checkpoint_are_purged(tmp_path, monkeypatch):
    def write(start, steps, value, clock):
        monkeypatch.setattr("time.time", lambda: clock)  # it is part of the files' names
        writer = progress.open_writer(tmp_path, start)
        for step in steps:
            progress.log(writer, step, {"losses/v": value})
        writer.close()

    write(0, range(9), 1.0, clock=1_800_000_000)
    file = next(tmp_path.glob("events*"))
    file.write_bytes(file.read_bytes()[:-5])  # killed during its last event
    write(4, range(5, 8), 2.0, clock=1_700_000_000)  # on a machine whose clock is slow
    wanted = [(step, 1.0 if step <= 4 else 2.0) for step in range(8)]
    assert [(e.step, e.value) for e in events(tmp_path, "losses/v")] == wanted
    write(0, [0, 1], 3.0, clock=1_700_000_000)  # killed before its first checkpoint, and so started again
    assert [(e.step, e.value) for e in events(tmp_path, "losses/v")] == [(0, 3.0), (1, 3.0)]


class CountTransfers(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_tensors_are_logged_without_a_transfer_each(tmp_path):
    writer = progress.open_writer(tmp_path, 0)
    values = {f"losses/{i}": torch.tensor([i / 2], requires_grad=True) for i in range(5)}
    values |= {"charts/n": torch.tensor(7), "eval/return_mean": np.float64(1.5), "eval/normalized_score": 2}
    with CountTransfers() as transfers:
        progress.log(writer, 3, values)
    assert transfers.count == 0
    with transfers:
        float(values["losses/1"].detach())
    assert transfers.count == 1  # the count can count
    writer.close()
    wanted = {**{f"losses/{i}": i / 2 for i in range(5)}, "charts/n": 7, "eval/return_mean": 1.5}
    for tag, value in {**wanted, "eval/normalized_score": 2}.items():
        assert [(e.step, e.value) for e in events(tmp_path, tag)] == [(3, value)]
    assert all(isinstance(values[f"losses/{i}"], torch.Tensor) for i in range(5))  # the caller's dict is untouched


def test_a_key_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train_loss"):
        progress.log(None, 1, {"losses/v": 1, "train_loss": 2})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_file_and_a_bar_in_a_terminal(tmp_path, monkeypatch):
    def output(stream, seconds):
        monkeypatch.setattr(sys, "stderr", stream)
        writer = progress.open_writer(tmp_path, 0)
        steps = []
        options = dict(desc="values", initial=40, total=50, unit=" updates", miniters=1, seconds=seconds)
        for step in (bar := progress_bar(range(41, 51), **options)):
            progress.log(writer, step, {"losses/v": torch.tensor(0.25)}, bar)
            steps.append(step)
        assert steps == list(range(41, 51))
        writer.close()
        return stream.getvalue()

    quiet = output(io.StringIO(), 1000)
    assert "\r" not in quiet
    first, last = quiet.splitlines()  # nothing in between, because the time is not up
    assert first.startswith("values: 80% 40/50 [")
    assert last.startswith("values: 100% 50/50 [")
    assert "updates/s" in last
    assert ", v=0.25]" in last
    chatty = output(io.StringIO(), 0).splitlines()
    assert [line.split()[2] for line in chatty][1:-1] == [f"{i}/50" for i in range(41, 51)]
    terminal = output(Terminal(), 1000)
    assert terminal.count("\n") == 1
    assert "\rvalues: 100%|" in terminal
    assert max(map(len, re.split("[\r\n]", terminal))) <= 80


def test_a_line_does_not_collide_with_a_bar(monkeypatch):
    """What a terminal shows: a line is written where the bar was, which is drawn again below."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    for i in progress_bar(range(3), desc="policy", mininterval=0):
        say(f"line {i}")
    shown = [line.split("\r")[-1] for line in terminal.getvalue().split("\n")]
    assert shown[:3] == ["line 0", "line 1", "line 2"]
    assert shown[3].startswith("policy: 100%|")


def test_laps_add_up_over_a_resume(monkeypatch):
    clock = iter([10.0, 13.0, 13.5, 100.0, 104.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    stages = {}
    lap = runs.stopwatch(stages)
    lap("values")
    lap("policy")
    stages = json.loads(json.dumps(stages))
    stages["values"]["peak_memory_mb"] = 1e9
    lap = runs.stopwatch(stages)
    lap("policy")
    assert {k: v["seconds"] for k, v in stages.items()} == {"values": 3.0, "policy": 4.5}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    assert resident * 0.9 < stages["policy"]["peak_memory_mb"] < 1e6
    clock = iter([0.0, 1.0])
    runs.stopwatch(stages)("values")
    assert stages["values"]["peak_memory_mb"] == 1e9  # the peak of all processes that worked on the stage


@pytest.mark.parametrize("system", ["this one", "one whose peak cannot be reset"])
def test_each_stage_has_its_own_peak(system, monkeypatch):
    resets = system == "this one" and os.access("/proc/self/clear_refs", os.W_OK)
    if not resets:
        monkeypatch.setattr(progress, "Path", lambda name: Path("/nowhere") / Path(name).name)
    stages = {}
    lap = runs.stopwatch(stages)
    with mmap.mmap(-1, 320_000_000) as large:  # not an array: its memory may stay with the process
        large.write(b"x" * len(large))
        lap("large")
    lap("between")  # it begins with the large array still there
    lap("small")
    peaks = [stages[name]["peak_memory_mb"] for name in ("large", "small")]
    assert peaks[0] > 320
    if resets:
        assert peaks[0] - peaks[1] > 300
    else:  # the process's peak so far
        assert peaks[0] <= peaks[1]


# ------------------------------------------------------------------------------------------------------ result


def test_the_guided_score_is_said_beside_the_score(tmp_path, capsys):
    args = runs.compose(Args, out=tmp_path, device="cpu")
    with runs.open_run("qt", args, Args(), target=Data("own")) as run:
        run.begin({})
        for step in run.steps("policy", 1):
            run.log(step, {})
            run.evaluated(step, {"returns": [1.0], "score": 2.0, "guided_score": 3.25}, guided_score=3.25)
        result = run.finish()
    said = capsys.readouterr().out.splitlines()
    assert "1 updates: score 2.0, guided by the critics 3.2 (target data 50.0)" in said
    assert said[said.index("normalised score 2.0") + 1] == "guided by the critics 3.2"
    assert result["summaries"]["final"]["guided_score"] == 3.25
    assert events(run.folder / "policy", "eval/guided_score")[0].value == 3.25
    assert run.only_evaluated({"score": 2.0, "returns": [1.0], "guided_score": 4.0})["guided_score"] == 4.0
    assert "guided by the critics 4.0" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Budget:
    updates: int = 100_000


@pytest.mark.parametrize(
    ("given", "values", "rate", "slower"),
    [
        (100_000, {}, 0.005, 0.005),  # the official budget: memories of 200 and of 1,000 updates
        (50_000, {}, 0.005, 0.005),  # 1,000 updates are a fiftieth of it
        (10_000, {}, 0.005, 0.025),
        (100_000, {"updates": 5_000}, 0.01, 0.05),  # by --quick: memories of 100 updates
        (2_500, {"updates": 5_000}, 0.02, 0.05),  # a flag beside --quick
        (10, {}, 0.05, 0.05),  # no faster than that
        (0, {}, 0.05, 0.05),  # which is refused later
        (9_000_000, {}, 0.005, 0.005),  # and no slower
    ],
)
def test_slow_copies_follow_the_budget(given, values, rate, slower):
    """slower: of a copy that moves every fifth update."""
    updates = runs.budget(Budget(given), values)
    assert runs.averaging_rate(0.005, updates) == pytest.approx(rate)
    assert runs.averaging_rate(0.005, updates, every=5) == pytest.approx(slower)
    assert runs.averaging_rate(0.2, updates) == 0.2  # a faster rate stays as it is


def test_summaries_by_hand():
    def evaluation(step, returns, score):
        return {"step": step, "returns": returns, "score": score}

    four = [evaluation(10, [8, 4], 60.0), evaluation(20, [1, 3], 20.0), evaluation(30, [5], 50.0)]
    four.append(evaluation(40, [0, 1], 5.0))
    assert results.summaries(four) == {
        "final": {"steps": [40], "score": 5.0, "return_mean": 0.5},
        "mean_of_last_three": {"steps": [20, 30, 40], "score": 25.0, "return_mean": 2.5},
        "best": {"steps": [10], "score": 60.0, "return_mean": 6.0},
    }
    for e, guided in zip(four, (None, 10.0, 30.0, 50.0), strict=True):
        e["guided_score"] = guided
    found = results.summaries(four)
    assert [found[key].get("guided_score") for key in ("final", "mean_of_last_three", "best")] == [50.0, 30.0, None]
    one = results.summaries(four[:1])
    assert one["final"] == one["mean_of_last_three"] == one["best"]
    assert results.summaries([]) == {}
    for order in itertools.permutations([20.0, math.nan, 30.0]):  # NaN is never the best
        some = results.summaries([evaluation(i, [1], score) for i, score in enumerate(order)])
        assert some["best"]["score"] == 30.0
        assert some["mean_of_last_three"]["score"] is None


def test_a_result_with_nan_is_written(tmp_path):
    evaluations = [{"step": 1, "returns": np.array([np.nan, 1.0]), "score": np.float32("nan")}]
    result = run_record.write_result(tmp_path, Args(), evaluations, {}, {}, note="diverged")
    assert result["evaluations"] == [{"step": 1, "returns": [None, 1.0], "score": None}]
    assert result["summaries"]["final"]["score"] is None
    assert result["note"] == "diverged"


def test_a_result_that_cannot_be_written_is_not_done(tmp_path):
    with pytest.raises(TypeError):
        run_record.write_result(tmp_path, {"bad": object()}, [], {}, {})
    assert not runs.is_done(tmp_path)


def test_versions_do_without_git_and_without_a_package(monkeypatch):
    def missing(package):
        raise checkpoints.importlib.metadata.PackageNotFoundError(package)

    assert checkpoints.versions()["mujoco"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(checkpoints.importlib.metadata, "version", missing)
    found = checkpoints.versions.__wrapped__()
    assert found["commit"] is None
    assert found["mujoco"] is None
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_commit_is_not_that_of_a_repository_further_up(tmp_path, monkeypatch):
    git = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
    package = tmp_path / "venv" / "site-packages" / "dynashift"
    package.mkdir(parents=True)
    assert os.system(f"cd {tmp_path} && {git} init -q && {git} commit -q --allow-empty -m x") == 0
    monkeypatch.setattr(checkpoints, "__file__", str(package / "runs.py"))
    assert checkpoints.versions.__wrapped__()["commit"] is None
    (tmp_path / "dynashift").mkdir()
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "dynashift" / "runs.py"))
    assert len(checkpoints.versions.__wrapped__()["commit"]) == 40


# ------------------------------------------------------------------------------------------------------- seeds


def test_seeds_reach_every_source_and_determinism_is_strict(monkeypatch):
    def draw():
        return random.random(), np.random.random(), torch.randn(3).tolist()  # noqa: NPY002

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    runs.seed_everything(5)
    first = draw()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    second = draw()
    runs.seed_everything(5, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert draw() == first
    assert all(a != b for a, b in zip(first, second, strict=True))
    runs.seed_everything(6)
    assert all(a != b for a, b in zip(first, draw(), strict=True))
