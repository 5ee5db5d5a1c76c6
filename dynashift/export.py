"""A trained policy as a folder that needs this project no more: `python taf_dt.py --export FOLDER`.

policy.safetensors   the weights of the policy and of the command network
policy.json          shapes, statistics of the states, and what the graph takes and gives
policy.onnx          one step: observation and memory -> action and memory
example.py           runs the graph with NumPy and onnxruntime alone
"""

import contextlib
import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dynashift import files
from dynashift.any_env import unscale
from dynashift.arguments import compose
from dynashift.checkpoints import read_checkpoint, versions, write_json
from dynashift.errors import UserError

EXAMPLE = Path(__file__).with_name("example_policy.py")
PACKAGES = ("onnx", "onnxscript")  # what makes the graph


def robots_first(observations, n: int, d_s: int) -> np.ndarray:
    """Observations as [n, d_s]; that of a single robot may be [d_s]."""
    shape = np.shape(observations)
    if shape != (n, d_s) and (n, *shape) != (1, d_s):
        raise UserError(f"observations have shape {shape}, not ({n}, {d_s}), robots first")
    return np.reshape(observations, (n, d_s))


def read_run(folder: str | Path, Args) -> tuple:
    """Arguments of a run folder, and the parts of its checkpoint. Args: of its script."""
    folder = files.at_home(folder)
    if not (folder / "ckpt.pt").exists():
        raise UserError(
            f"there is no checkpoint in {folder}; name a run folder, such as runs/taf_dt/TASK/seed1"
        )
    values = files.read_json(folder / "args.json")
    paths = ("out", "data_dir", "export")  # a policy acts without them
    try:
        args = compose(Args, **{k: v for k, v in values.items() if k not in paths})
    except TypeError as error:
        raise UserError(f"{folder} was run by another script or version ({error})") from None
    try:
        saved = read_checkpoint(folder / "ckpt.pt")["parts"]
    except Exception as error:  # zipfile and torch have many for a file that is damaged or not ours
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"cannot read {folder / 'ckpt.pt'} ({reason})") from None
    if not saved["record"]["done"].get("policy"):
        raise UserError(f"{folder}: the policy has not been trained yet; go on with the run first")
    if "mu" not in saved["record"]:
        raise UserError(
            f"{folder} is of an earlier version and lacks the statistics of the states; "
            "start it again with --no-resume"
        )
    return args, saved


def load_agent(Args, build, Agent, folder: str | Path, n: int = 1, device: str = "cpu"):
    """The policy of a run folder, for n robots that start together: reset() it, then act().

    Its actions have the units of the robot, as in the files that it was trained on. Args, build
    and Agent are those of taf_dt.py.
    """
    args, saved = read_run(folder, Args)
    pre = {name: saved["record"][name].numpy() for name in ("mu", "sd")}
    nets = build(args, len(pre["mu"]), len(saved["policy"]["action.bias"]), device)
    for name in ("policy", "command"):
        nets[name].load_state_dict(saved[name])
    nets["policy"].eval()
    return in_own_units(Agent, saved["record"]["bounds"])(nets, pre, args, n)


def in_own_units(Agent, action_bounds: tuple | None):
    """The class of an agent whose actions have the robot's units; None: -1 and 1, as in training.

    The observation of a single robot may be [d_s], and its action is [d_a] then. Rewards are needed
    with --token rtg alone.
    """

    class Own(Agent):
        bounds = action_bounds

        def act(self, observations, rewards=0.0, alive=True) -> np.ndarray:
            shape = np.shape(observations)
            rows = robots_first(observations, self.n, len(self.pre["mu"]))
            actions = super().act(rows, rewards, alive)
            return unscale(actions, self.bounds).reshape(*shape[:-1], -1)

    return Own


def check(folder: Path | None) -> None:
    """Refuse a folder that is there already or cannot be written, before anything is trained."""
    if folder is not None:
        if os.path.lexists(files.at_home(folder)):
            raise UserError(f"--export {folder} is there already; name another, or delete it first")
        files.check_folder(folder, "--export")


@contextlib.contextmanager
def at_the_end(folder: Path | None, run_folder: Path, load_agent):
    """Where the block ends well, export the policy of the run folder, unless folder is None."""
    yield
    if folder is not None:
        write(load_agent(run_folder), folder)


def write(agent, folder: str | Path) -> None:
    """The policy of taf_dt.Agent as a folder, which is there whole or not at all."""
    folder = files.at_home(folder)
    check(folder)
    state = agent_state(agent)
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".export.") as name:
            part = Path(name, folder.name)
            part.mkdir()
            files.write_bytes(part / "policy.safetensors", weights(state))
            write_json(part / "policy.json", description(agent, state))
            if missing := [x for x in PACKAGES if importlib.util.find_spec(x) is None]:
                files.say(
                    f"no policy.onnx without {' and '.join(missing)}: "
                    "pip install -r requirements-export.txt"
                )
            else:
                files.write_bytes(part / "policy.onnx", graph(agent))
                shutil.copyfile(EXAMPLE, part / "example.py")
            os.rename(part, folder)
    except OSError as error:
        raise UserError(f"cannot write --export {folder}: {error.strerror or error}") from None
    files.say(f"policy exported to {folder}")


def agent_state(agent) -> dict[str, Tensor]:
    """All tensors that acting needs, by name, on the CPU."""
    nets = nn.ModuleDict({name: agent.nets[name] for name in ("policy", "command")})
    return {name: x.detach().cpu().contiguous() for name, x in nets.state_dict().items()}


def weights(state: dict[str, Tensor]) -> bytes:
    import safetensors.torch  # here, because only an export needs it

    return safetensors.torch.save(state)


def description(agent, state: dict[str, Tensor]) -> dict:
    args = agent.args
    inputs, memory = interface(agent)
    return {
        "method": "taf_dt",
        "env": args.task.env,
        "shift": args.task.shift,
        "inputs": {name: _shape(x) for name, x in inputs.items()},
        "memory": {name: _shape(x) for name, x in memory.items()},
        "state_mean": agent.pre["mu"],
        "state_std": agent.pre["sd"],
        "state_clip": agent.clip,
        "action_bounds": agent.bounds,
        "token": args.token,
        "return_target": args.return_target,
        "K": args.gate.K,
        "layers": args.layers,
        "heads": args.heads,
        "width": args.width,
        "hidden": args.hidden,
        "weights": {name: list(x.shape) for name, x in state.items()},
        "versions": versions(),
    }


def _shape(x: Tensor) -> dict:
    return {"shape": ["n", *x.shape[1:]], "dtype": str(x.dtype).removeprefix("torch.")}


def interface(agent, n: int = 2) -> tuple[dict, dict]:
    """What a step of n robots takes from outside, and what it remembers: zeros before the first."""
    c = agent.context
    inputs = {"observation": torch.zeros(n, c.states.shape[-1], dtype=torch.float64)}
    if agent.args.token == "rtg":
        inputs["reward"] = torch.zeros(n, dtype=torch.float64)
    memory = {"t": torch.zeros(n, dtype=torch.int64)}
    columns = {"tokens": c.tokens, "states": c.states, "actions": c.actions}
    memory |= {name: torch.zeros(n, *x.shape[1:]) for name, x in columns.items()}
    return inputs, memory


class Step(nn.Module):
    """`taf_dt.Agent.act` as a function of tensors alone; each robot has its own step count t."""

    def __init__(self, agent):
        super().__init__()
        self.policy, self.command = agent.nets["policy"], agent.nets["command"]
        self.mu, self.sd = torch.as_tensor(agent.pre["mu"]), torch.as_tensor(agent.pre["sd"])
        self.clip = agent.clip
        self.asked = agent.args.return_target / 1000
        self.Batch = type(agent.context)
        self.bounds = agent.bounds and [torch.tensor(x, dtype=torch.float64) for x in agent.bounds]

    def forward(
        self,
        observation: Tensor,  # [n, d_s]
        t: Tensor,  # [n]
        tokens: Tensor,  # [n, K]
        states: Tensor,  # [n, K, d_s]
        actions: Tensor,  # [n, K, d_a]
        reward: Tensor | None = None,  # [n], of the last step, where tokens are returns
    ) -> tuple[Tensor, ...]:
        s = ((observation - self.mu) / (self.sd + 1e-8)).clamp(-self.clip, self.clip).float()
        if reward is None:
            c = self.command(s)[0]
        else:
            to_go = torch.where(t == 0, self.asked, tokens[:, -1])
            c = to_go - reward.float() / 1000
        a = torch.zeros_like(actions[:, 0])
        pairs = ((tokens, c), (states, s), (actions, a))
        tokens, states, actions = (torch.cat([old[:, 1:], x[:, None]], 1) for old, x in pairs)
        # The steps of the window follow from its last one. Those before the first are padding.
        steps = t[:, None] + torch.arange(1 - tokens.shape[1], 1)  # [n, K]
        last = self.policy.embed_t.num_embeddings - 1 if self.policy.embed_t is not None else 0
        context = self.Batch(tokens, states, actions, steps.clamp(0, last), steps >= 0)
        a = self.policy(context, only_last=True)  # [n, 1, d_a]
        after = t + 1, tokens, states, torch.cat([actions[:, :-1], a], 1)
        a = a[:, 0]  # [n, d_a]
        if self.bounds:
            low, high = self.bounds
            a = (low + (a.clamp(-1, 1) + 1) / 2 * (high - low)).float()
        return a, *after


def graph(agent) -> bytes:
    """`Step` as ONNX, for any number of robots."""
    inputs, memory = interface(agent)
    tensors = {"observation": inputs["observation"], **memory, **inputs}  # in the order of forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter speaks of packages that are not used here
        loggers = logging.getLogger("torch.onnx"), logging.getLogger("onnxscript")
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                Step(agent).eval(),
                tuple(tensors.values()),
                input_names=list(tensors),
                output_names=["action", *(f"next_{name}" for name in memory)],
                dynamic_shapes=[{0: torch.export.Dim("n")} for _ in tensors],
                dynamo=True,
                verbose=False,
            )
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    return program.model_proto.SerializeToString()
