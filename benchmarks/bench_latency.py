"""Latency of one step of one robot, on one thread: the agent, its ONNX graph, and the MLP of bc.py.

    python benchmarks/bench_latency.py [--env hopper] [--K 5] [--steps 200] [--rounds 5]

Measures the paper's configuration, untrained, from a NumPy observation to a NumPy action. The three
take turns. What counts is the CPU time of the thread, so that other load has little effect, and
only ratios carry over. Without onnxruntime (requirements-export.txt) the graph is left
out.
"""

import importlib.util
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import tyro

import taf_dt
from baselines import bc
from dynashift import export, runs
from dynashift.errors import one_line_errors
from dynashift.tasks import ROBOTS


def graph_step(agent):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(export.graph(agent), options)
    memory = {name: x.numpy() for name, x in export.interface(agent, n=1)[1].items()}

    def act(observation: np.ndarray) -> np.ndarray:
        action, *after = session.run(None, {"observation": observation[None], **memory})
        memory.update(zip(memory, after, strict=True))
        return action[0]

    return act


def mlp_step(mu: np.ndarray, sd: np.ndarray, d_a: int):
    """As `bc.evaluate` has it."""
    policy = bc.mlp(len(mu), d_a, bc.Args.hidden)

    @torch.inference_mode()
    def act(observation: np.ndarray) -> np.ndarray:
        states = torch.as_tensor(bc.normalise(observation[None], mu, sd))
        return policy(states).tanh().numpy()[0]

    return act


def main(env: str = "hopper", K: int = 5, steps: int = 200, rounds: int = 5) -> None:
    torch.set_num_threads(1)
    args = runs.compose(taf_dt.Args, env=env, K=K, return_target=0.0, eta_reg=0.5)
    d_s, d_a = ROBOTS[env].obs_dim, ROBOTS[env].act_dim
    nets = taf_dt.build(args, d_s, d_a, "cpu")
    nets["policy"].eval()
    pre = {"mu": np.zeros(d_s), "sd": np.ones(d_s)}
    agent = taf_dt.Agent(nets, pre, args, 1)
    acts = {"MLP": mlp_step(**pre, d_a=d_a), "agent": agent.act}
    if importlib.util.find_spec("onnxruntime"):
        acts["ONNX"] = graph_step(agent)
    observations = np.random.default_rng(0).normal(size=(steps, d_s))
    times = {name: [] for name in acts}
    for _ in range(rounds + 1):  # the first round warms up
        for name, act in acts.items():
            start = time.thread_time()
            for observation in observations:
                act(observation)
            times[name].append((time.thread_time() - start) / steps)
    median = {name: float(np.median(seconds[1:])) for name, seconds in times.items()}
    print(f"{env}, K = {K}, one robot, one thread, {rounds} rounds of {steps} steps")
    for name, seconds in median.items():
        print(f"  {name:5} {1e3 * seconds:8.3f} ms   {seconds / median['MLP']:6.1f} x MLP")
    if "ONNX" in median:
        print(
            f"  the agent takes {median['agent'] / median['ONNX']:.1f} times as long as its graph"
        )


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
