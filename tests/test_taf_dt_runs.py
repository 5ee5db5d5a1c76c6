"""Whole runs of taf_dt.py, small ones: what they leave behind, every flag, kills and resumes, divergence."""

import ast
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import taf_dt as taf
import taf_preprocess
from dynashift import checkpoints, faster, gate_report, make_batch, results, run_record, runs
from dynashift.checksums import write_hdf5
from dynashift.datasets import load
from dynashift.errors import UserError
from dynashift.recipe import RECOMMENDED, SHORT_RUNS
from dynashift.tasks import QUALITIES, ROBOTS

ROOT = Path(__file__).parents[1]
PAPER_K = {  # "Transformer context length", by shift, for halfcheetah, hopper, walker2d and ant
    "morph": (20, 5, 5, 5),
    "kinematic": (20, 5, 5, 5),
    "gravity": (10, 20, 20, 5),
}
TASKS = list(itertools.product(itertools.product(PAPER_K, ROBOTS), QUALITIES["source"], QUALITIES["target"]))
NETS = {"V", "V_bar", "Q", "command", "cvae", "policy", "policy_bar", "critics", "critics_bar"}
TINY = dict(layers=1, heads=1, width=8, hidden=8, cvae_hidden=8, K=3, M=2, target_batch=8, label_batch=8, cvae_batch=8)
TINY |= dict(label_updates=4, command_updates=3, cvae_updates=3, updates=6, ema_start=2, ema_every=2, eval_episodes=2)
TINY |= dict(log_every=1, save_every=2, eval_every=3)


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch):
    """A run changes how torch computes, and draws from global generators."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic, states = torch.get_deterministic_debug_mode(), (random.getstate(), torch.get_rng_state())
    yield
    torch.set_deterministic_debug_mode(deterministic)
    random.setstate(states[0])
    torch.set_rng_state(states[1])


def save_time(patch):
    """The figure is half of the time of such a small run, and has its own tests. No test cuts the power."""
    patch.setattr(gate_report, "draw", lambda *_: None)
    patch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True)
def _save_time(monkeypatch):
    save_time(monkeypatch)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Source and target of hopper, from random actions: 16 episodes of about 20 steps each."""
    folder, paths = tmp_path_factory.mktemp("data"), []
    for shift in ("none", "morph"):
        batch, rng, episodes = (
            make_batch("hopper", shift, 16, workers=1),
            np.random.default_rng(0),
            [[] for _ in range(16)],
        )
        obs = batch.reset(0)
        while not batch.done.all():
            ended, actions = batch.done, rng.uniform(-1, 1, (16, 3))
            after, reward, terminated, _ = batch.step(actions)
            for i in np.flatnonzero(~ended):
                episodes[i].append((obs[i], actions[i], reward[i], after[i], terminated[i]))
            obs = after
        names = ("observations", "actions", "rewards", "next_observations", "terminals")
        columns = zip(*itertools.chain(*episodes), strict=True)
        data = dict(zip(names, (np.asarray(x) for x in columns), strict=True))
        data["timeouts"] = np.zeros(len(data["rewards"]), bool)
        paths.append(folder / f"{shift}.hdf5")
        write_hdf5(paths[-1], data, "embedded", {})
    return {"source": str(paths[0]), "target": str(paths[1])}


def settings(files, out, **changes) -> taf.Args:
    base = runs.compose(taf.Args, device="cpu", out=Path(out), **files)
    return runs.replace(runs.plain(taf.Args, taf.defaults, base), **{**TINY, **changes})


def folder_of(out) -> Path:
    (folder,) = (path.parent for path in Path(out).glob("taf_dt/*/*/args.json"))
    return folder


def flags(**values):
    """Command line of these values."""
    line = []
    for name, value in values.items():
        name = name.replace("_", "-")
        line += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return line


@pytest.fixture
def cli(in_this_process):
    """taf_dt.py with these flags, in this process: (status, stdout, stderr)."""

    def run(*line):
        done = in_this_process(taf, *line)
        return done.returncode, done.stdout, done.stderr

    return run


def flat(x):
    """x with tensors as bytes, so that == compares bits."""
    if isinstance(x, torch.Tensor):
        return (str(x.dtype), tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(x, dict):
        return [(flat(k), flat(v)) for k, v in x.items()]
    if isinstance(x, list | tuple):
        return [flat(v) for v in x]
    return x.hex() if isinstance(x, float) else x


def outcome(folder):
    """All that training produced, as bytes, but for the time it took."""
    saved = torch.load(folder / "ckpt.pt", weights_only=True)
    saved["parts"]["record"].pop("stages")
    return {k: flat(saved[k]) for k in ("parts", "python", "numpy", "torch")}


def events(folder):
    reader = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


# ------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    args = settings(files, out, diagnostics=True, updates=100, eval_every=40, save_every=50, log_every=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(out))
        save_time(patch)
        result = taf.train(args)
    return args, result, folder_of(out)


def test_a_run_leaves_a_complete_record(finished, files):
    args, result, folder = finished
    assert result == runs.read_result(folder / "result.json")
    assert folder.parent.name == "hopper-morph-none-morph-own"
    assert [e["step"] for e in result["evaluations"]] == [40, 80, 98, 99, 100]
    for e in result["evaluations"]:
        assert len(e["returns"]) == len(e["lengths"]) == 2
        assert e["score"] == pytest.approx(100 * (np.mean(e["returns"]) + 26.3360015) / (3152.75 + 26.3360015))
    assert set(result["summaries"]) == {"final", "mean_of_last_three", "best"}
    assert result["summaries"]["mean_of_last_three"]["steps"] == [98, 99, 100]
    assert result["summaries"] == results.summaries(result["evaluations"])
    stages = {"preprocess mmd", "preprocess ot", "values", "command", "cvae", "policy", "evaluation"}
    assert set(result["stages"]) == stages
    assert all(stage["seconds"] > 0 and stage["peak_memory_mb"] > 10 for stage in result["stages"].values())
    for role in ("source", "target"):
        data = load("hopper", "morph", role, files[role])
        assert result["data"][role]["kind"] == "own"
        assert result["data"][role]["sha256"] == data.sha256
        assert result["data"][role]["transitions"] == len(data)
    assert result["versions"] == json.loads(json.dumps(checkpoints.versions()))
    assert result["method"] == "taf_dt"
    given = runs.flatten(args)
    wanted = {k: given[k] for k in TINY if k not in runs.IGNORE}  # diagnostics change no result
    wanted |= {"tau": 0.005, "ema_decay": 0.995}  # by default, averages are faster in so short a run
    assert result["changed"] == wanted
    assert result["args"] == runs.read_json(folder / "args.json")
    assert result["args"]["K"] == 3
    assert 0.4 < result["report"]["fragments"] / result["data"]["source"]["transitions"] <= 0.5
    assert result["report"]["retained"] > result["report"]["fragments"]
    assert Path(result["preprocess"]).exists()
    assert "threads" in result["device"]


def test_every_network_has_learnt_and_losses_are_finite(finished):
    args, _, folder = finished
    saved = torch.load(folder / "ckpt.pt", weights_only=True)["parts"]
    runs.seed_everything(args.run.seed)
    fresh = taf.build(args, 11, 3, "cpu")
    assert {name for name in fresh if not name.startswith("adam")} == NETS
    for name in NETS:
        for key, value in fresh[name].state_dict().items():
            assert torch.isfinite(saved[name][key]).all()
            assert not torch.equal(saved[name][key], value) or key == "embed_t.weight", (name, key)
    used = (saved["policy"]["embed_t.weight"] != fresh["policy"].state_dict()["embed_t.weight"]).any(1)
    assert used[:10].all()
    wanted = {"values": "losses/v losses/q charts/v_largest", "cvae": "losses/cvae"}
    wanted["command"] = "losses/command charts/command_mean charts/token_min charts/token_max"
    wanted["policy"] = (
        "losses/critic losses/policy losses/dt losses/reg charts/q_policy charts/q_largest charts/grad_norm"
    )
    for stage, tags in wanted.items():
        found = events(folder / stage)
        for tag in (*tags.split(), "charts/learning_rate"):
            assert all(math.isfinite(x) for x in found[tag].values())
    assert list(events(folder / "values")["losses/v"]) == [4]
    assert list(found["losses/policy"]) == [*range(10, 91, 10), 98, 99, 100]  # and wherever it is evaluated
    assert list(found["eval/normalized_score"]) == [40, 80, 98, 99, 100]


def test_diagnostics_are_recorded_on_stitched_and_unstitched_windows(finished):
    _, result, folder = finished
    assert [d["step"] for d in result["diagnostics"]] == list(range(5, 101, 5))
    logged = events(folder / "policy")
    for d in result["diagnostics"]:
        for pool in ("stitched", "unstitched"):
            assert set(d[pool]) == {"J_a", "J_Q", "J_Q_own", "TD"}
            for metric, value in d[pool].items():
                assert value > 0
                assert logged[f"charts/{metric}_{pool}"][d["step"]] == pytest.approx(value, rel=1e-5)
    assert result["diagnostics"][-1]["stitched"] != result["diagnostics"][-1]["unstitched"]


def test_a_finished_run_is_not_run_again(finished, monkeypatch, capsys):
    args, result, _ = finished
    for name in ("update_values", "update_policy", "evaluate"):
        monkeypatch.setattr(taf, name, None)
    assert taf.train(args) == result
    assert "is done: score" in capsys.readouterr().out


def test_eval_only_prints_the_final_score_again(finished, capsys, monkeypatch):
    args, result, folder = finished
    before = (folder / "ckpt.pt").read_bytes(), (folder / "result.json").read_bytes()
    monkeypatch.setattr(taf, "update_policy", None)
    found = taf.train(runs.replace(args, eval_only=True))
    final = result["evaluations"][-1]
    assert found == {"score": final["score"], "returns": final["returns"]}
    assert f"normalised score {final['score']:.1f}" in capsys.readouterr().out
    assert before == ((folder / "ckpt.pt").read_bytes(), (folder / "result.json").read_bytes())


def test_eval_only_needs_a_run_and_spares_it(files, tmp_path, monkeypatch):
    args = settings(files, tmp_path, updates=1, label_updates=1, command_updates=1, cvae_updates=1)
    with monkeypatch.context() as patch:
        patch.setattr(taf, "load_task", None)  # data are not loaded for nothing
        with pytest.raises(UserError, match="no checkpoint of this task with seed 1 in"):
            taf.train(runs.replace(args, eval_only=True))
    taf.train(args)
    with pytest.raises(UserError, match=r"no checkpoint in .* folder of exactly these arguments"):
        taf.train(runs.replace(args, eval_only=True, updates=2))
    result = (folder_of(tmp_path) / "result.json").read_bytes()
    with contextlib.suppress(UserError):
        taf.train(runs.replace(args, eval_only=True, resume=False))
    assert (folder_of(tmp_path) / "result.json").read_bytes() == result


def test_watching_a_run_does_not_change_it(files, tmp_path):
    """Evaluations, diagnostics and logs draw no random numbers from training, and leave dropout on."""
    options = dict(updates=6, label_updates=2, command_updates=2, cvae_updates=2)
    taf.train(settings(files, tmp_path / "a", **options))
    more = dict(diagnostics=True, eval_every=1, eval_episodes=3, log_every=4, save_every=5)
    taf.train(settings(files, tmp_path / "b", **options, **more))
    saved = [torch.load(folder_of(tmp_path / x) / "ckpt.pt", weights_only=True) for x in "ab"]
    assert flat({k: saved[0]["parts"][k] for k in NETS}) == flat({k: saved[1]["parts"][k] for k in NETS})
    assert flat(saved[0]["torch"]) == flat(saved[1]["torch"])


def test_returns_as_tokens_skip_values_and_command(files, tmp_path, monkeypatch):
    """The first token of an episode is what is asked for, in thousands; the next ones are less by what came in."""
    seen, choose = [], taf.Agent.choose
    monkeypatch.setattr(taf.Agent, "choose", lambda self, b: seen.append(b.tokens) or choose(self, b))
    result = taf.train(settings(files, tmp_path, token="rtg", updates=2))
    assert not {"values", "command"} & set(result["stages"])
    assert result["changed"]["token"] == "rtg"
    assert seen[0].tolist() == [[0, 0, pytest.approx(3.6)]] * 2
    assert seen[1][:, :2].tolist() == seen[0][:, 1:].tolist()
    longest = max(result["evaluations"][0]["lengths"])
    last = seen[longest - 1]  # of the first evaluation: what is left of 3600 before the last step
    assert 3.6 - max(result["evaluations"][0]["returns"]) / 1000 <= last[0, -1].item() < 3.6


def test_a_broken_renderer_costs_no_result(files, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no screen")

    monkeypatch.setattr(run_record, "record_video", fails)
    with pytest.raises(RuntimeError, match="no screen"):
        taf.train(settings(files, tmp_path, updates=2, capture_video=True))
    assert json.loads((folder_of(tmp_path) / "result.json").read_text())["evaluations"][-1]["step"] == 2


@pytest.mark.parametrize("option", [{"precision": "bf16"}, {"compile": True}])
def test_the_flags_of_speed_reach_the_training(files, tmp_path, monkeypatch, option):
    compiled = []
    monkeypatch.setattr(faster, "compiled", lambda update, *_: compiled.append(update) or update)
    plain = taf.train(settings(files, tmp_path / "plain", updates=3, precision="fp32"))
    fast = taf.train(settings(files, tmp_path / "fast", updates=3, **{"precision": "fp32"} | option))
    assert option.items() <= fast["changed"].items()
    assert (plain["precision"], fast["precision"]) == ("fp32", option.get("precision", "fp32"))
    stages = [taf.update_values, taf.update_command, taf.update_behaviour, taf.update_actor_critic]
    assert compiled == stages[:3] * ("compile" in option)  # on a CPU the policy's update is slower compiled
    weights = [torch.load(next((tmp_path / x).rglob("ckpt.pt")), weights_only=True)["parts"] for x in ("plain", "fast")]
    assert (flat(weights[0]["policy"]) == flat(weights[1]["policy"])) == ("compile" in option)
    assert math.isfinite(plain["summaries"]["final"]["score"] - fast["summaries"]["final"]["score"])


def test_a_resumed_run_keeps_its_precision_and_threads(files, tmp_path, monkeypatch):
    """What was measured when the run began counts, not what would be measured now."""
    used = []

    def interrupted(*_):
        raise KeyboardInterrupt

    def measured(precision, threads):
        monkeypatch.setattr(faster, "pick_precision", lambda *_: precision)
        monkeypatch.setattr(faster, "pick_threads", lambda *given: used.append(given[-1].tools.precision) or threads)

    def weights(out):
        return torch.load(next(out.rglob("ckpt.pt")), weights_only=True)["parts"]

    measured("bf16", 1)
    whole = taf.train(settings(files, tmp_path / "whole"))
    assert used == ["auto", "auto", "auto", "bf16"]  # threads are measured at the precision that the stage has
    evaluate = taf.evaluate
    monkeypatch.setattr(taf, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taf.train(settings(files, tmp_path / "parts"))
    monkeypatch.setattr(taf, "evaluate", evaluate)
    measured("fp32", 2)
    used.clear()
    resumed = taf.train(settings(files, tmp_path / "parts"))
    assert used == []
    for result in (whole, resumed):
        assert result["precision"] == "bf16"
        assert result["threads"] == dict.fromkeys(("values", "command", "cvae", "policy"), 1)
        assert "precision" not in result["changed"]
    assert flat(weights(tmp_path / "whole")["policy"]) == flat(weights(tmp_path / "parts")["policy"])


def test_a_stage_without_updates_is_not_measured(files, tmp_path):
    result = taf.train(settings(files, tmp_path, updates=2, cvae_updates=0))
    assert list(result["threads"]) == ["values", "command", "policy"]


def test_target_only_uses_no_gate(files, tmp_path):
    result = taf.train(settings(files, tmp_path, beta=0.0, updates=2))
    assert result["changed"]["beta"] == 0
    assert result["args"]["filter"] == "both"
    assert not [stage for stage in result["stages"] if stage.startswith("preprocess")]


def test_real_target_data(files, tmp_path, real_data):
    args = settings({**files, "target": "medium"}, tmp_path, data="d4rl", data_dir=real_data, updates=2, K=5)
    result = taf.train(args)
    assert result["data"]["target"]["kind"] == "published"
    assert result["data"]["target"]["transitions"] == 5000
    assert folder_of(tmp_path).parent.name == "hopper-morph-none-medium-own-published"


# ------------------------------------------------------------------------------------ every flag


SWITCHES = [dict(filter="mmd"), dict(filter="ot"), dict(filter="none"), dict(token="rtg"), dict(alpha=0.0)]
SWITCHES += [
    dict(time_embedding=False),
    dict(zeta=0.7),
    dict(ot_reward=False),
    dict(ot_cost="euclidean"),
    dict(xi=0.3),
    dict(beta=0.0),
]


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda x: "-".join(map(str, *x.items())))
def test_an_ablation_changes_one_factor(switch, files, tmp_path, cli):
    least = dict(label_updates=1, command_updates=1, cvae_updates=1, updates=1, eval_every=9)
    least = {**TINY, **least}
    status, stdout, _ = cli(*flags(out=tmp_path, device="cpu", **files, **{**least, **switch}))
    assert status == 0
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    base = {k: v for k, v in least.items() if k not in runs.IGNORE}
    assert result["changed"] == {**base, **switch}
    assert ", ".join(f"{k}={v}" for k, v in switch.items()) in stdout  # the resolved values are printed
    assert "normalised score" in stdout
    assert "the target data's own mean" in stdout


def test_flags_reach_the_task_s_defaults(monkeypatch):
    def resolved(*line):
        monkeypatch.setattr(sys, "argv", ["taf_dt.py", *line])
        monkeypatch.setattr(taf, "train", lambda args: seen.append(args))
        seen = []
        taf.main()
        return seen[0]

    assert resolved() == runs.plain(taf.Args, taf.defaults, taf.Args())
    args = resolved("--env", "walker2d", "--shift", "gravity")
    assert (args.gate.K, args.eta_reg, args.zeta, args.alpha, args.return_target) == (20, 0.6, 0.98, 3.5, 5000)
    args = resolved("--env", "halfcheetah", "--shift", "gravity", "--zeta", "0.8", "--K", "7")
    assert (args.gate.K, args.zeta, args.return_target) == (7, 0.8, 12000)
    args = resolved("--quick", "--updates", "7", "--mmd-gamma", "0.5")
    assert (args.updates, args.width, args.run.quick, args.gate.mmd_gamma) == (7, taf.QUICK["width"], True, 0.5)
    assert resolved("--target", "none").beta == 0


def test_the_folder_is_plain_for_defaults_and_keeps_quick_runs_apart(files, tmp_path, monkeypatch):
    seen = []

    def stop_here(folder, *_):
        seen.append(folder)
        raise UserError("enough")

    monkeypatch.setattr(runs, "session", stop_here)
    plain = runs.compose(taf.Args, device="cpu", out=tmp_path, seed=3, **files)
    watched = {"log_every": 7, "capture_video": True}
    for quick, changes in ((False, {}), (False, watched), (True, {}), (False, {"alpha": 0.0})):
        args = runs.plain(taf.Args, taf.defaults, runs.replace(plain, quick=quick))
        with pytest.raises(UserError, match="enough"):
            taf.train(runs.replace(args, **changes))
    names = [folder.relative_to(tmp_path).as_posix() for folder in seen]
    assert names[0] == names[1] == "taf_dt/hopper-morph-none-morph-own/seed3"
    assert len({*names[1:]}) == 3
    assert not [name for name in names[2:] if name == names[0]]


def test_help_and_every_flag_has_a_line(cli):
    status, stdout, _ = cli("--help")
    assert status == 0
    text = " ".join(stdout.replace("│", " ").split())
    for name in runs.flatten(taf.Args()):
        assert f"--{name.replace('_', '-')}" in text, name
    for symbol in ("Eq. (28)", "Table tab:q_ablation", "critic guidance alpha", "eta_exp", "zeta"):
        assert symbol in text


def test_every_field_is_read():
    read = set()
    shared = [f"dynashift/{name}.py" for name in ("runs", "run_record", "datasets", "faster", "stages", "behaviour")]
    for name in ("taf_dt.py", "taf_preprocess.py", *shared):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            itself = "|self" if name.endswith("datasets.py") else ""  # TaskArgs
            if re.fullmatch(r"(self\.)?args(\.\w+)?|task|gate" + itself, owner):
                read.add(node.attr)
    assert runs.flatten(taf.Args()).keys() - read == set()


BAD = (
    "--xi 0, --K 0, --zeta 1.0, --beta 1, --gamma 1, --dropout 1.5, --lr nan, --lr -1, --heads 3, --updates 0, --M 0, "
)
BAD += "--variance 0, --cvae-batch 0, --ot-reg -1, --eval-episodes 0, --source bad, --source no.hdf5, --device cuda:99"
BAD = [pair.split() for pair in BAD.split(", ")]
BAD += [["--K", "1"], ["--K", "None"], ["--eta-reg", "None"], ["--seed", "5000000000"], ["--label-updates", "-5"]]
BAD += [["--tau", "5"], ["--clip-grad", "0"], ["--beta", "0.003"], ["--command-decay", "-1"], ["--eta-w", "-1"]]


@pytest.mark.parametrize(("flag", "value"), BAD)
def test_a_value_that_cannot_be_is_one_line(flag, value, files, tmp_path, cli):
    least = {**TINY, "updates": 1, "label_updates": 1, "command_updates": 1, "cvae_updates": 1}
    line = flags(out=tmp_path, device="cpu", data="embedded", **{**files, **least})
    status, _, stderr = cli(*line, flag, value)
    assert status == 1
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert (value if flag in ("--source", "--device") else flag) in last
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("taf_dt/*/*/result.json"))


@pytest.mark.parametrize("line", [["--token", "x"], ["--lr", "x"]])
def test_an_unknown_choice_or_no_number_is_refused(line, cli):
    status, _, stderr = cli(*line)
    assert status == 2
    assert "Traceback" not in stderr
    assert line[0] in stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--sorce medium", "there is no flag --sorce; did you mean --source?"),
        ("--quick --source_sise=-3", "there is no flag --source_sise; did you mean --source-size?"),
        ("--no-resum", "there is no flag --no-resum; did you mean --no-resume?"),
        ("--nothing-like-it 3", "there is no flag --nothing-like-it; --help lists the flags"),
        ("hopper", "there is no flag hopper; --help lists the flags"),
        ("--bf16", "there is no --bf16 any more; use --precision bf16"),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_nearest_one(line, said, cli):
    status, stdout, stderr = cli(*line.split())
    assert (status, stdout, stderr.strip()) == (1, "", f"error: {said}")


@pytest.mark.parametrize("given", [["--preset", "released"], ["--preset=released"]])
def test_the_former_preset_is_answered_with_its_script(given, cli):
    status, _, stderr = cli("--env", "ant", *given, "--seed", "3")
    assert status == 1
    (line,) = stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "python baselines/taf_dt_released.py --env ant --seed 3" in line


def test_the_recommended_preset_changes_its_choices_alone(tmp_path):
    def values(*words):
        return runs.flatten(runs.read_args(taf.Args, taf.defaults, "", ["--env", "walker2d", *words]))

    paper, recommended = values(), values("--preset", "recommended")
    changed = {name for name in paper if paper[name] != recommended[name]}
    assert changed == {"preset", *RECOMMENDED}
    assert recommended.items() >= RECOMMENDED.items()
    assert values("--preset", "recommended", "--zeta", "0.7")["zeta"] == 0.7  # what is typed wins
    # --quick implies most of it, because so few updates with the paper's own choices teach nothing; but a behaviour
    # model that is trained so briefly needs the paper's guidance.
    quick = values("--quick")
    wanted = {"preset": "recommended", "alpha": 1.0}
    assert quick["alpha"] == paper["alpha"] == 3.5
    assert quick | wanted == values("--quick", "--preset", "recommended")
    assert quick.items() >= (taf.QUICK | SHORT_RUNS).items()
    assert RECOMMENDED == SHORT_RUNS | {"alpha": 1.0}
    # Nothing of it is implied where the paper's choices are asked for.
    asked = values("--quick", "--preset", "paper")
    assert {name for name in quick if quick[name] != asked[name]} == {"preset", *SHORT_RUNS}
    assert all(asked[name] == paper[name] for name in RECOMMENDED)
    assert values("--preset", "paper") == paper | {"preset": "paper"}


def test_the_run_folder_and_its_result_name_the_preset(files, tmp_path):
    result = taf.train(settings(files, tmp_path, updates=2, preset="recommended", zeta=0.7))
    assert result["args"]["preset"] == "recommended"
    assert "preset" not in result["changed"]  # it chooses defaults, of which zeta is changed
    assert result["changed"]["zeta"] == 0.7
    other = settings(files, tmp_path, updates=2, preset="paper", zeta=0.7)
    first = folder_of(tmp_path)
    taf.train(other)
    assert len({first, *tmp_path.glob("taf_dt/*/*")}) == 2


# ------------------------------------------------------------------------------- defaults of all tasks


def test_every_task_has_values():
    assert len(TASKS) == 108
    optional = {"data_dir", "source_size", "score_range", "preset", "ot_chunk", "ess", "export"}
    for (shift, env), source, target in TASKS:
        task = dict(env=env, shift=shift, source=source, target=target)
        args = runs.plain(taf.Args, taf.defaults, runs.compose(taf.Args, **task))
        assert not [k for k, v in runs.flatten(args).items() if v is None and k not in optional]
        taf.check(args)
        alone = runs.compose(taf_preprocess.Args, **task)
        assert runs.plain(taf_preprocess.Args, taf_preprocess.defaults, alone).gate == args.gate
        assert (args.alpha, args.zeta, args.gate.xi, args.beta, args.gamma) == (3.5, 0.98, 0.5, 1 / 3, 0.99)
        assert args.eta_reg in (0.3, 0.4, 0.5, 0.6)
        assert dict(zip(ROBOTS, PAPER_K[shift], strict=True))[env] == args.gate.K
        sizes = (args.layers, args.heads, args.width, args.dropout, args.lr, args.tau)
        assert sizes == (4, 4, 256, 0.1, 3e-4, 5e-3)
        assert (args.hidden, args.M, args.variance, args.target_batch) == (256, 10, 0.1, 128)
        assert taf.source_batch(args.target_batch, args.beta) == 64


# ------------------------------------------------------------------------------------ video


SCRIPT = """
import runpy, sys, dynashift
try:
    dynashift.make("hopper", "morph", seed=0, render_mode="rgb_array").render()
except Exception as error:
    sys.exit(f"cannot draw: {error}")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_video_shows_the_robot(files, tmp_path):
    """In a process of its own, which chooses its own OpenGL library, and as a script is started."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM"):
        environ.pop(name, None)
    least = {**TINY, "updates": 1, "label_updates": 1, "command_updates": 1, "cvae_updates": 1}
    line = flags(out=tmp_path, device="cpu", **files, **least, capture_video=True)
    command = [sys.executable, "-c", SCRIPT, ROOT / "taf_dt.py", *line]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    if "cannot draw" in run.stderr:
        pytest.skip("no OpenGL library can be loaded; on Debian or Ubuntu install libegl1 or libosmesa6")
    assert run.returncode == 0, run.stderr
    folder = folder_of(tmp_path)
    steps = json.loads((folder / "result.json").read_text())["evaluations"][-1]["lengths"][0]
    assert f"video of {steps} steps: {folder / 'video.gif'}" in run.stdout
    import imageio.v3

    frames = imageio.v3.imread(folder / "video.gif", index=None)  # [frames, height, width, 3]
    assert frames.shape == (math.ceil(steps / 3), 320, 320, 3)
    assert 20 < frames.mean() < 235
    assert min(frame.std() for frame in frames) > 10
    assert all((a != b).any() for a, b in itertools.pairwise(frames))


def test_diagnostics_of_returns_as_tokens_have_a_trained_reference(files, tmp_path):
    """J_Q and TD are measured with V and Q, which the tokens themselves do not need here."""
    args = settings(files, tmp_path, token="rtg", diagnostics=True, updates=20, label_updates=3)
    taf.train(args)
    saved = torch.load(folder_of(tmp_path) / "ckpt.pt", weights_only=True)["parts"]
    runs.seed_everything(args.run.seed)
    fresh = taf.build(args, 11, 3, "cpu")
    assert flat(saved["V"]) != flat(fresh["V"].state_dict())


# -------------------------------------------------------------------------------------- other data, divergence


def test_a_run_folder_keeps_to_its_data(files, tmp_path):
    args = settings(files, tmp_path, updates=2, label_updates=1, command_updates=1, cvae_updates=1)
    taf.train(args)
    (folder_of(tmp_path) / "result.json").unlink()
    other = tmp_path / "other" / "morph.hdf5"
    data = load("hopper", "morph", "target", files["target"])
    columns = ("observations", "actions", "next_observations", "terminals", "timeouts")
    write_hdf5(other, {**{k: getattr(data, k) for k in columns}, "rewards": data.rewards + 1}, "embedded", {})
    with pytest.raises(UserError, match="other data"):
        taf.train(runs.replace(args, target=str(other)))


def test_a_finished_run_of_other_data_is_not_passed_off_as_done(files, tmp_path):
    args = settings(files, tmp_path, updates=1, label_updates=1, command_updates=1, cvae_updates=1)
    taf.train(args)
    other = tmp_path / "other" / "morph.hdf5"  # the same name, another file
    data = load("hopper", "morph", "target", files["target"])
    columns = ("observations", "actions", "next_observations", "terminals", "timeouts")
    write_hdf5(other, {**{k: getattr(data, k) for k in columns}, "rewards": data.rewards + 1}, "embedded", {})
    with pytest.raises(UserError, match="other data"):
        taf.train(runs.replace(args, target=str(other)))


@pytest.mark.parametrize("how", ["nan", "large Q", "large V"])
def test_divergence_ends_the_run_and_keeps_the_last_good_checkpoint(files, tmp_path, monkeypatch, how):
    name, key, value = {
        "nan": ("update_policy", "losses/policy", math.nan),
        "large Q": ("update_critics", "charts/q_largest", 1e6),
        "large V": ("update_values", "charts/v_largest", 1e6),
    }[how]
    real, count = getattr(taf, name), itertools.count(1)

    def poisoned(*args):
        logs = real(*args)
        return logs | {key: torch.tensor(value)} if next(count) >= 5 else logs

    args = settings(files, tmp_path, updates=8, label_updates=8, save_every=4, log_every=1000, eval_every=100)
    monkeypatch.setattr(taf, name, poisoned)
    last = 8 if how == "large V" else 7  # the policy is looked at before the update that is evaluated
    with pytest.raises(UserError, match=rf"diverged at update {last}: {key}.*last good checkpoint is kept") as error:
        taf.train(args)
    assert "\n" not in str(error.value)
    folder = folder_of(tmp_path)
    assert not runs.is_done(folder)
    saved = torch.load(folder / "ckpt.pt", weights_only=True)["parts"]
    done = saved["record"]["done"]
    assert done == ({"values": 4} if how == "large V" else {"values": 8, "command": 3, "cvae": 3, "policy": 4})
    assert all(torch.isfinite(x).all() for net in NETS for x in saved[net].values())
    monkeypatch.setattr(taf, name, real)
    assert taf.train(args)["summaries"]["final"]["steps"] == [8]


def test_a_learning_rate_that_is_too_large_is_one_line(files, tmp_path, cli):
    options = {**TINY, "updates": 60, "label_updates": 60, "save_every": 20, "log_every": 5}
    status, _, stderr = cli(*flags(out=tmp_path, device="cpu", **files, **options, lr=1e4))
    assert status == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line == stderr.strip().splitlines()[-1]
    assert "values diverged at update" in line
    assert "--lr" in line


# ------------------------------------------------------------------------------- kills, signals and repetition

LONG = {**TINY, "label_updates": 20, "command_updates": 15, "cvae_updates": 15, "updates": 40}
LONG |= {"save_every": 5, "log_every": 4, "eval_every": 12, "diagnostics": True, "dropout": 0.1}
MOMENTS = ["before an update", "after an update", "half written", "before fsync", "before replace", "after replace"]
MOMENTS += ["evaluation", "flush"]


def life(args, kill=None, terminate=None, done=0):
    """Train, in a process that dies. kill: (update, moment), the first such moment from that update on; updates are
    counted over all stages, `done` of them in earlier lives. terminate: the update at which SIGTERM comes."""
    clock = itertools.count(done + 1)
    now = done

    def moment(here):
        if kill and here == kill[1] and now >= kill[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(real):
        def update(*arguments):
            nonlocal now
            now = next(clock)
            moment("before an update")
            if now == terminate:
                os.kill(os.getpid(), signal.SIGTERM)
            logs = real(*arguments)
            moment("after an update")
            return logs

        return update

    for name in ("update_values", "update_command", "update_behaviour", "update_policy"):
        setattr(taf, name, watched(getattr(taf, name)))
    real_evaluate, real_replace, write_bytes = taf.evaluate, os.replace, Path.write_bytes

    def evaluate(*arguments, **options):
        found = real_evaluate(*arguments, **options)
        moment("evaluation")
        return found

    def half(path, data):
        if kill and kill[1] == "half written" and now >= kill[0]:
            with open(path, "wb") as file:
                file.write(data[: len(data) // 2])
        moment("half written")
        return write_bytes(path, data)

    def replace(a, b):
        moment("before replace")
        real_replace(a, b)
        moment("after replace")

    def flush(writer, real):
        moment("flush")
        real(writer)

    from dynashift.events import Events

    Events.flush = functools.partialmethod(flush, Events.flush)
    taf.evaluate, os.replace, Path.write_bytes = evaluate, replace, half
    os.fsync = lambda fd: moment("before fsync")  # SIGKILL loses nothing that was written
    taf.train(args)


def nursery(*jobs):
    """Run each job (arguments of `life`) in a process forked from this one, which has all libraries loaded and no
    threads; returns how each ended (negative: the signal that ended it). A job without `done` gets it."""
    statuses, gate_report.draw = [], lambda *_: None
    checkpoints.versions()  # remembered
    for job in jobs:
        stored = {k: Path(v) if k in ("out", "data_dir") and v else v for k, v in job.pop("args").items()}
        args = runs.compose(taf.Args, **stored)
        found = list(Path(args.run.out).glob("taf_dt/*/*/ckpt.pt"))
        done = sum(torch.load(found[0], weights_only=True)["parts"]["record"]["done"].values()) if found else 0
        if not (pid := os.fork()):
            status = 1
            try:
                life(args, **job, done=done)
                status = 0
            except SystemExit as end:
                status = end.code
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        left = len(list(Path(args.run.out).glob("taf_dt/*/*/.*.tmp")))
        statuses.append([os.waitstatus_to_exitcode(status), done, left])
    return statuses


def raise_children(tmp_path, jobs):
    """`nursery` in a process of its own."""
    (tmp_path / "jobs.json").write_text(json.dumps([{**job, "args": checkpoints.to_json(job["args"])} for job in jobs]))
    code = "import json, sys, torch; torch.set_num_threads(1); import torch.utils.tensorboard, test_taf_dt_runs as t; "
    code += "print(json.dumps(t.nursery(*json.load(open(sys.argv[1])))))"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "jobs.json")]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stdout + run.stderr


def test_killed_twenty_times_and_resumed_is_the_same_to_the_bit(files, tmp_path):
    draw = random.Random(5)
    args = {name: settings(files, tmp_path / name, **LONG) for name in ("whole", "again", "killed", "stopped")}
    args["other seed"] = runs.replace(args["whole"], out=tmp_path / "other seed", seed=2)
    at = sorted(draw.sample(range(1, 91), 19))
    moments = (MOMENTS * 3)[:18]
    draw.shuffle(moments)
    kills = [
        (n, m if m != "evaluation" or n > 50 else "after an update")
        for n, m in zip(at, [*moments, "evaluation"], strict=True)
    ]
    kills.append((90, "before replace"))  # the last checkpoint, or the result itself
    jobs = [{"args": args[name]} for name in ("whole", "again", "other seed")]
    jobs += [{"args": args["killed"], "kill": kill} for kill in kills] + [{"args": args["killed"]}]
    stopped = runs.replace(args["stopped"], save_every=1000)  # SIGTERM saves, whatever the interval
    jobs += [{"args": stopped, "terminate": 32}, {"args": stopped, "terminate": 71}, {"args": stopped}]
    statuses, said = raise_children(tmp_path, jobs)
    codes = [status for status, _, _ in statuses]
    assert codes == [0] * 3 + [-signal.SIGKILL] * 20 + [0] + [143, 143, 0], said[-2000:]
    assert len({done for _, done, _ in statuses[3:24]}) > 8  # and the lives made progress
    assert sum(left for _, _, left in statuses[3:23]) > 3  # some died inside a checkpoint's write
    assert [done for _, done, _ in statuses[24:]] == [0, 32, 71]
    assert said.count("saved; the same command continues\n") == 2
    assert "resumed at update 12 of stage command\n" in said
    assert "resumed at update 21 of stage policy\n" in said
    folders = {name: folder_of(tmp_path / name) for name in args}
    whole, result = outcome(folders["whole"]), runs.read_result(folders["whole"] / "result.json")
    assert [e["step"] for e in result["evaluations"]] == [12, 24, 36, 39, 40]
    for name in ("again", "killed", "stopped"):
        assert outcome(folders[name]) == whole, name
        found = runs.read_result(folders[name] / "result.json")
        assert found["evaluations"] == result["evaluations"]
        assert found["diagnostics"] == result["diagnostics"]
        assert found["summaries"] == result["summaries"]
        assert not list(folders[name].glob(".*.tmp"))
    for stage in ("values", "command", "cvae", "policy"):
        reference = events(folders["whole"] / stage)
        found = events(folders["killed"] / stage)
        for tag in reference:
            assert reference[tag].items() <= found[tag].items(), (stage, tag)
    assert outcome(folders["other seed"])["parts"] != whole["parts"]
    assert runs.read_result(folders["other seed"] / "result.json")["evaluations"] != result["evaluations"]


def test_page_of_policies(files, tmp_path, capsys):
    """studies/policy.py on a small run: its numbers are those of the run, or follow from what is known."""
    from studies import policy as page

    result = taf.train(settings(files, tmp_path, alpha=0.0))
    folder = folder_of(tmp_path)
    capsys.readouterr()
    page.main([folder, tmp_path / "no-run"])
    with pytest.raises(SystemExit, match="finished"):
        page.main([tmp_path / "no-run"])
    tables = [table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n")]
    cells = [[line.strip("| ").split(" | ") for line in table] for table in tables]
    row = {k: v for head, _, only in cells for k, v in zip(head, only, strict=True)}
    assert row["greedy"] == f"{result['summaries']['final']['score']:.1f}"
    assert row["of L_Q"] == "0.00"  # alpha is 0
    assert min(float(row[name]) for name in ("gradient of L_DT", "of L_reg")) > 0

    args, nets, data, _, target = page.load(folder)
    assert float(row["its KL"]) >= 0
    s, a = data.states[data.target_rows], data.actions[data.target_rows]
    with torch.no_grad():
        for weight in nets["cvae"].parameters():  # a model that knows nothing: action 0, latents as their prior
            weight.zero_()
    error, divergence = page.behaviour(nets["cvae"], s, a)
    assert error == pytest.approx(float(a.square().mean() / a.var(0).mean()))
    assert divergence == 0
    with torch.no_grad():
        nets["cvae"].encoder[-1].bias[: 2 * a.shape[1]] = 2.0  # latents N(2, 1): divergence 2^2 / 2
    assert page.behaviour(nets["cvae"], s, a)[1] == pytest.approx(2.0)
    G, expected = page.discounted(target, args.gamma), np.zeros(len(target))
    for i in range(len(target)):
        end = target.starts[np.searchsorted(target.starts, i, "right") - 1]
        end += target.lengths[np.searchsorted(target.starts, i, "right") - 1]
        expected[i] = sum(args.gamma**k * r for k, r in enumerate(target.rewards[i:end].tolist()))
    np.testing.assert_allclose(G, expected, rtol=1e-9)
    assert row["return"] == f"{expected.mean():.0f}"

    mean = data.actions[data.target_rows].mean(0)
    for answer, share in ((lambda a: a, 0.0), (lambda a: mean.expand_as(a), 1.0)):  # copies, or knows the mean only
        policy = types.SimpleNamespace(eval=lambda f=answer: lambda b: f(b.actions))
        found = page.imitation({"policy": policy}, data, data.target_rows, args.gate.K)
        assert found == pytest.approx(share, abs=0.02)


def test_reach_of_a_finished_run(finished):
    """studies/reach.py asks a run for the actions that its agent would take in the target's own states."""
    from studies import reach
    from studies.policy import load

    args, _, folder = finished
    found = reach.learnt(folder)
    assert found.task == "hopper morph morph"
    assert found.settings == {"seed": args.run.seed, "filter": "both", "source": True}
    _, nets, _, pre, target = load(folder)
    K = args.gate.K
    nets["policy"].eval()
    agent = taf.Agent(nets, pre, args, 1)
    start = int(target.starts[3])  # the beginning of an episode, because the agent counts its steps
    for i in range(start, start + K):  # the robot repeats a window of the data, and acts at its end
        action = agent.act(target.observations[i : i + 1], 0.0, True)[0]
        with torch.inference_mode():
            agent.context.actions[:, -1] = torch.as_tensor(target.actions[i])
    np.testing.assert_allclose(found.actions[(target.left[:start] >= K).sum()], action, atol=1e-6)
    assert found.advantages.shape == (len(target),)
    assert found.spread == pytest.approx(np.sqrt(target.actions.var(0).mean()), rel=1e-5)
