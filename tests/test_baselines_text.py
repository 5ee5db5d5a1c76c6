"""What the scripts of baselines/ have in common: the same text, the same signatures, one way to ask for errors.

Each script is read on its own; where they say the same, they say it in the same words. Each refuses the same values.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import typing
from pathlib import Path

import pytest

import taf_dt
from baselines import bc, dadt, dara, dt, igdf, iql, otdf, qt
from baselines import taf_dt_released as released
from dynashift import runs
from dynashift.errors import UserError

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "baselines").glob("*.py"))
SCRIPTS = {name: importlib.import_module(f"baselines.{name}") for name in NAMES}
OURS = ("baselines.", "dynashift.", "taf_")  # beginnings of the project's modules


def of(names, *scripts):
    """For each of these names, what it means in each of the scripts; "Policy.forward" is a method."""
    for name in names.split():
        found = scripts
        for part in name.split("."):
            found = [getattr(x, part) for x in found]
        yield found


def lines(function):
    return inspect.getsource(function).splitlines()


def same(functions, first=None, last=None):
    """One text, or one from the only line that contains `first` to the only one that contains `last`."""
    texts = set()
    for function in functions:
        text = lines(function)
        if first:
            (begin,), (end,) = ([i for i, line in enumerate(text) if x in line] for x in (first, last))
            assert begin < end, function
            text = text[begin : end + 1]
        texts.add("\n".join(text))
    assert len(texts) == 1, functions


def contains(more, less, but=()):
    """All lines of `less` are in `more`, in this order, except for those that begin with one of `but`."""
    text, rest = lines(more), iter(lines(more))
    for start in but:
        found = [line for line in lines(less) if line.strip().startswith(start)]
        assert found, f"{start} is no exception any more"
        assert not set(found) <= set(text), f"{start} is no exception any more"
    for line in lines(less):
        assert line.strip().startswith(tuple(but)) or line in rest, (more, line)


def test_the_shared_core_is_the_same_text():
    for functions in of("EnsembleMLP mlp gradient_step polyak_update v_loss learning_rate", iql, dara, igdf, otdf):
        same(functions)
    for functions in of("sample normalise state_moments reward_scale main", iql, dara, igdf, otdf):
        same(functions)
    for functions in of("evaluate Data Batch on_device defaults", iql, dara, igdf):
        same(functions)
    for functions in of("q_loss resolve", iql, dara):
        same(functions)
    same([igdf.q_loss, otdf.q_loss])
    same([dara.policy_loss, igdf.policy_loss])
    for functions in of("mlp main", iql, bc):
        same(functions)


def test_where_one_script_of_the_core_has_more_the_rest_is_the_same_text():
    # An official error in a loss is a parameter of its own, and so are weights.
    contains(iql.policy_loss, dara.policy_loss, but=["def policy_loss("])
    contains(otdf.policy_loss, iql.policy_loss, but=["error = ", "return weight.mean()"])
    contains(igdf.q_loss, iql.q_loss, but=["def q_loss(", '"""Eq. (6)', "return "])
    contains(iql.iql_losses, dara.iql_losses, but=['"losses/policy": ', "return sum("])
    contains(igdf.iql_losses, dara.iql_losses, but=["def iql_losses(", '"""The sum', '"losses/q": '])
    same([iql.iql_losses, otdf.otdf_losses], "with torch.no_grad", 'q = nets["Q"]')

    for functions in of("build", iql, dara, igdf, otdf):
        same(functions, '"V": ', '"Q": ')
        same(functions, 'nets["Q_bar"].load_state_dict', 'nets["adam"] = ')
    for functions in of("update", iql, dara, igdf, otdf):
        same(functions, 'nets["adam"].param_groups[1]', 'polyak_update(nets["Q_bar"]')
    for functions in of("train", iql, dara, igdf, otdf):
        same(functions, 'logs["charts/learning_rate"]', "run.evaluated(step")
    # Data that all of it needs; stages before; a larger largest reward; costs, which an evaluation does not need.
    but = ["source, target = load_task(", "with runs.open_run(", "for step in run.steps("]
    contains(igdf.train, iql.train, but=but)
    contains(dara.train, iql.train, but=[*but, "run.limit = "])
    costs = ["data = on_device(", "nets = build(", "if args.run.eval_only:", "return run.finish()"]
    contains(otdf.train, iql.train, but=[*but, *costs])
    same([igdf.update, otdf.update], "One update of V, Q and policy", "batch = sample(")
    same([igdf.update, otdf.update], "target_rows = ", "batch = Batch(")
    for m in (igdf, otdf):
        contains(m.resolve, iql.resolve)
    for more, less in of("Data Batch defaults", otdf, iql):
        contains(more, less)
    contains(otdf.on_device, iql.on_device, but=["def on_device("])
    contains(otdf.evaluate, iql.evaluate, but=["return nets["])
    contains(iql.evaluate, bc.evaluate, but=["return runs.play("])


def test_shared_helpers_are_the_same_text():
    for functions in of("normalise sample_windows windows Block masked_mse junctions append main", dt, qt, dadt):
        same(functions)
    for functions in of("defaults resolve build learning_rate", dt, dadt):
        same(functions)
    same([m.masked_mean for m in (dt, qt, dadt, released)])
    same([m.polyak_update for m in (qt, iql, taf_dt)])
    same([m.gradient_step for m in (qt, iql)])


def test_where_one_transformer_has_more_the_rest_is_the_same_text():
    for m in (qt, dadt):
        for more, less in of("Data Batch merge gather Policy.__init__", m, dt):  # more columns, another head
            contains(more, less)
    for functions in of("Policy.forward", dt, qt, dadt):
        same(functions, "t = self.embed_t(steps)", "a = self.embed_a(actions)")
        same(functions, "# A token attends to itself", "x = block(x, mask)")
    same([dt.Policy.forward, qt.Policy.forward], "t = self.embed_t(steps)", "x = block(x, mask)")
    same([qt.Policy.forward, dadt.Policy.forward], "# A token attends to itself", "actions = self.action(")
    for functions in of("build", dt, qt, dadt):
        for start in ("policy = Policy(", "fused = "):
            assert len({line for x in functions for line in lines(x) if line.strip().startswith(start)}) == 1, start
    same([qt.Policy.__init__, dadt.Policy.__init__])
    contains(qt.junction_metrics, dadt.junction_metrics, but=['"""Jump'])
    contains(dadt.train, dt.train, but=["with runs.open_run("])
    # QT has guided actions as well, which are another evaluation, and critics, whose values have a limit.
    guided = ["return run.only_evaluated(", "found = evaluate(", "run.evaluated("]
    contains(qt.train, dt.train, but=["with runs.open_run(", *guided])
    # It asks for one return where DT asks for two, and it always knows the step before.
    two = ["n = ", "N = 2 * n", "simulators = ", "obs = simulators.reset(", "asked = ", "tokens = append("]
    two += ["parts = ", "first, second = ", "return first"]
    step = ["a = policy(", "if K > 1:", "actions = torch.cat("]
    contains(qt.rollout, dt.evaluate, but=["def evaluate(", '"""Run the same', *two, *step])
    contains(qt.resolve, dt.resolve, but=["if args.diagnostics ", 'raise UserError("--diagnostics'])
    for more, less in of("evaluate junction_metrics", dadt, dt):  # two outputs, of which these need the first
        assert inspect.getsource(more).replace(", _ =", " =") == inspect.getsource(less)


# Where a name has other parameters, or other types of them: the scripts in which it does, and why. The scripts of a
# row have the same ones, and so have all scripts that no row names.
DIFFERENT = [
    ("q_loss", "igdf otdf", "weights of transitions"),
    ("iql_losses", "igdf", "weights of transitions"),
    ("policy_loss", "iql otdf", "an official error"),
    ("policy_loss", "taf_dt_released", "the whole L_pi of TAF-DT, not IQL's Eq. (7)"),
    ("on_device", "otdf", "transport costs"),
    ("on_device", "bc", "one dataset at a time, of two that it may need"),
    ("state_moments", "bc", "two datasets, of which it may need one alone, and their shares"),
    ("sample", "bc", "one dataset at a time, of two that it may need"),
    ("update", "bc", "two datasets, of which it may need one alone"),
    ("evaluate", "qt", "guided actions as well"),
    ("evaluate", "taf_dt_released", "guided actions as well, and moments of states that come with the gate"),
    ("guided_action", "taf_dt_released", "one context in place of its parts"),
    ("critic_loss", "taf_dt_released", "weights of steps"),
    ("update_critics", "taf_dt_released", "a batch is b, as in taf_dt.py"),
    # These are taf_dt.py's, from elsewhere in the project.
    ("normalise", "taf_dt_released", "it clips"),
    ("gradient_step", "taf_dt_released", "a norm only where it clips"),
    ("behaviour_log_density", "taf_dt_released", "latents from the prior or from the posterior"),
]


def signature(function):
    """Parameters with types and defaults, and what is returned; Args is any script's Args."""
    return re.sub(r"\b[A-Za-z_][\w.]*\.", "", str(inspect.signature(function)))


def agree(shared, exceptions):
    """name -> script -> what it means there: one thing in all scripts, and one in those of each exception."""
    for name, found in shared.items():
        rows = [row[1].split() for row in exceptions if row[0] == name]
        others = [script for script in found if not any(script in scripts for scripts in rows)]
        groups = [{found[script] for script in scripts} for scripts in (others, *rows) if scripts]
        assert all(len(group) == 1 for group in groups), (name, found)
        assert len(set.union(*groups)) == len(groups), f"{name}: a row is no exception any more"
    assert {row[0] for row in exceptions} <= set(shared)


def test_a_name_means_the_same_in_every_script():
    """Same name, same call, also if a script has the function from elsewhere in the project."""
    known = {}
    for name, m in SCRIPTS.items():
        for function, x in inspect.getmembers(m, inspect.isfunction):
            if x.__module__.startswith(OURS):
                known.setdefault(function, {})[name] = signature(x)
    shared = {function: found for function, found in known.items() if len(found) > 1}
    assert {"build", "update", "evaluate", "gradient_step", "normalise", "learning_rate", "masked_mean"} <= set(shared)
    agree(shared, DIFFERENT)


# The same for flags, whose type and help are the same in all scripts of a family.
DIFFERENT_FLAGS = [
    ("source_batch", "iql", "the target alone as well"),
    ("source_batch", "dara", "classifiers"),
    ("target_batch", "dara", "classifiers"),
    ("updates", "igdf otdf", "other networks have a number of their own"),
    ("lr", "otdf", "the CVAE has its own"),
    ("hidden", "otdf", "the CVAE has its own"),
    ("normalise_states", "igdf", "its authors do that, not only CORL"),
    *(("official_bug", name, "an error of its own") for name in ("iql", "dara", "igdf", "otdf")),
    ("K", "qt", "by robot and source data"),
    ("clip_grad", "qt", "by robot, and of critics too"),
    ("lr", "qt", "of critics too"),
    ("updates", "qt", "of critics too"),
    ("decay", "qt", "a penalty, not AdamW's decay"),
]


def flags(m):
    """Type and help of the flags of the script's own; DT and DADT also say in which table a value stands."""
    body = ast.parse(inspect.getsource(m.Args)).body[0].body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = ast.unparse(field.annotation), text.value.value.removesuffix(", Gym table")
    return found


@pytest.mark.parametrize("family", ["iql dara igdf otdf", "dt dadt qt"])
def test_a_flag_means_the_same_in_every_script_of_a_family(family):
    known = {}
    for name in family.split():
        for flag, x in flags(SCRIPTS[name]).items():
            known.setdefault(flag, {})[name] = x
    shared = {flag: found for flag, found in known.items() if len(found) > 1}
    assert len(shared) > 10
    agree(shared, [row for row in DIFFERENT_FLAGS if set(row[1].split()) <= set(family.split())])


# Functions and classes that one script alone has: the method's own part. What others have as well has their name.
OWN = {
    "bc": "bc_loss ignore sample_both source_count",
    "dara": "classifier_loss domain_logits reward_correction",
    "igdf": "contrastive_loss score update_encoders",
    "iql": "weight_charts",
    "otdf": "cvae_loss mean_scaled_cost otdf_losses source_weights transport_costs",
    "qt": "Critics check_critics discounted_returns drop_ends qt_loss rollout",
    "taf_dt_released": "GuidedAgent cql_penalty gate_values padded_mean sample_starts",
}


def members(m, modules):
    """Names of the functions and classes of this script that these modules define."""
    found = [*inspect.getmembers(m, inspect.isfunction), *inspect.getmembers(m, inspect.isclass)]
    return {name for name, x in found if x.__module__.startswith(modules)}


def test_one_thing_has_one_name():
    for name, m in SCRIPTS.items():
        others = [members(x, OURS) for x in (*SCRIPTS.values(), taf_dt) if x is not m]
        own = members(m, m.__name__) - set.union(*others)
        assert own == set(OWN.get(name, "").split()), f"{name}: is there another name for it elsewhere?"


def test_official_errors_are_asked_for_in_one_way():
    """By a flag without a value, the same in every script that knows of one, and by no other setting."""
    asked = set()
    for name, m in SCRIPTS.items():
        defaults = [x.default for x in dataclasses.fields(m.Args) if x.name == "official_bug"]
        text = " ".join(m.__doc__.split())
        if defaults:
            asked.add(name)
            assert defaults == [False]
            assert f"python baselines/{name}.py --official-bug " in text
        assert re.findall(r"that is (--[\w-]+)", text) == (["--official-bug"] if defaults else []), name
    assert asked >= {"iql", "dara", "igdf", "otdf"}


# For each flag that is a number, a value outside its range, which is the same in all scripts that have the flag.
OUTSIDE = {
    flag: value
    for value, flags in (
        (-0.1, "adv_scale alpha beta command_decay cql cvae_decay cvae_kl decay eta eta_reg guided_noise noise"),
        (-0.1, "reg_weight state_loss state_weight"),
        (-1, "command_updates cvae_updates ema_start encoder_updates label_updates source_batch warmup"),
        (0, "K M batch candidates cql_actions cvae_batch cvae_hidden ema_every encoder_dim heads hidden iteration"),
        (0, "layers period target_batch updates width"),
        (0.0, "clip clip_grad cvae_lr expectile keep lr max_weight ot_reg ot_tol variance xi zeta zeta_v"),
        (1.0, "dropout ema_decay gamma"),
        (2.0, "source_share tau"),
    )
    for flag in flags.split()
}
ANY_NUMBER = {"return_target", "second_target"}


def numbers(Args):
    """Flags of the script's own that are numbers."""
    hints = typing.get_type_hints(Args)
    kinds = {name: {hint, *typing.get_args(hint)} for name, hint in hints.items()}
    return {name for name, kind in kinds.items() if kind & {int, float}}


def test_the_list_of_values_outside_has_every_number():
    assert set.union(*(numbers(m.Args) for m in SCRIPTS.values())) == OUTSIDE.keys() | ANY_NUMBER


@pytest.mark.parametrize("name", NAMES)
def test_numbers_outside_their_range_are_refused_in_one_line(name, tmp_path):
    m = SCRIPTS[name]
    plain = runs.plain(m.Args, m.defaults, runs.compose(m.Args, out=tmp_path, device="cpu"))
    check = m.check if m is released else m.resolve
    check(plain)
    refused = sorted(numbers(m.Args) - ANY_NUMBER)
    assert refused
    for flag in refused:
        # Where a flag's default follows from the task, None may be asked for, too.
        for value in (OUTSIDE[flag], *([None] if getattr(m.Args, flag) is None else [])):
            with pytest.raises(UserError, match=rf"^--{flag.replace('_', '-')} [^\n]*{value}[^\n]*$"):
                check(runs.replace(plain, **{flag: value}))
