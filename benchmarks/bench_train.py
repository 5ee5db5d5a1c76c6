"""Speed of training: updates/s of every stage, and the policy's update beside two references.

    python benchmarks/bench_train.py [--robots hopper ant] [--K 5 20] [--seconds 20]

For each robot and K, at the paper's configuration (4 layers, 4 heads, width 256, 64 + 128 windows),
interleaved in one run so that a busy machine slows all of them:

    update      sampling, update_critics, update_policy, update_target_policy of taf_dt.py
    products    only the matrix products of that update, recorded from it and replayed on random
                matrices
    plain       a plain transcription of the published update: GPT-2 blocks in their usual modules,
                every token through every layer, three full forward passes, two critic modules,
                windows cut and padded in Python

Then it shows the parts of the update, and its rate of operations as a share of the machine's peak,
which is measured by one large product.
"""

import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import taf_dt
from dynashift import runs
from dynashift.envs import ROBOTS


def synthetic(d_s: int, d_a: int, rows: int = 200_000, target: int = 5_000) -> taf_dt.Data:
    """Data of the right shapes: episodes of 1000 steps of noise."""
    n, step = rows + target, torch.arange(rows + target) % 1000
    weight, kept = torch.rand(n) + 0.5, torch.arange(0, rows, 2)
    return taf_dt.Data(
        states=torch.randn(n, d_s),
        actions=torch.rand(n, d_a) * 2 - 1,
        rewards=torch.randn(n),
        next_states=torch.randn(n, d_s),
        terminal=torch.zeros(n, dtype=torch.bool),
        steps=step,
        left=1000 - step,
        weight=weight,
        reg_weight=weight,
        tokens=torch.randn(n),
        source_rows=kept,
        source_cdf=torch.linspace(0, 1, len(kept) + 1, dtype=torch.float64)[1:],
        source_starts=kept,
        target_rows=torch.arange(rows, n),
    )


def policy_stage(nets: dict, data: taf_dt.Data, args: taf_dt.Args, step: int) -> None:
    """Lines 8 to 11 of Algorithm 1, as in the loop of `taf_dt.train`."""
    batch = taf_dt.sample_windows(data, args)
    taf_dt.update_critics(nets, batch, args)
    taf_dt.update_policy(nets, batch, args)
    taf_dt.update_target_policy(nets, args, step)


# ----------------------------------------------------------------- the matrix products of an update


class Record(TorchDispatchMode):
    """Shapes and strides of all matrix products that run under it."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::mm", "aten::bmm"):
            self.products.append(args[:2])
        elif name in ("aten::addmm", "aten::baddbmm"):
            self.products.append(args[1:3])
        elif "scaled_dot_product" in name:  # two products per head: the scores, and the output
            q, k, v = (x.flatten(0, 1) for x in args[:3])
            self.products += [(q, k.mT), (q @ k.mT, v)]
        return func(*args, **(kwargs or {}))


def products_of(update) -> tuple[list, float]:
    """Random matrices laid out as in one update, and the number of operations in their products."""
    with Record() as record:
        update()
    pairs, flop = [], 0.0
    for pair in record.products:
        strides = [None if 0 in x.stride() else x.stride() for x in pair]
        fresh = [
            torch.empty_strided(x.shape, stride) if stride else torch.empty(x.shape)
            for x, stride in zip(pair, strides, strict=True)
        ]
        fresh = [x.normal_() for x in fresh]
        pairs.append(tuple(fresh))
        flop += 2.0 * fresh[0].numel() * fresh[1].shape[-1]
    return pairs, flop


def replay(pairs: list) -> None:
    for a, b in pairs:
        torch.matmul(a, b)


# ---------------------------------------------------- a plain transcription of the published update


class Conv1D(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], -1)


class PlainBlock(nn.Module):
    def __init__(self, W, heads, p, length):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(W), nn.LayerNorm(W), heads
        self.c_attn, self.c_proj = Conv1D(W, 3 * W), Conv1D(W, W)
        self.c_fc, self.m_proj = Conv1D(W, 4 * W), Conv1D(4 * W, W)
        self.attn_drop, self.drop1, self.drop2 = nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)
        self.register_buffer("causal", torch.ones(length, length).tril()[None, None])

    def forward(self, x, padding):
        B, T, W = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(W, 2)
        q, k, v = (u.view(B, T, self.heads, W // self.heads).permute(0, 2, 1, 3) for u in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (W // self.heads) ** 0.5
        scores = torch.where(self.causal[:, :, :T, :T].bool(), scores, torch.tensor(-1e4)) + padding
        h = self.attn_drop(F.softmax(scores, dim=-1)) @ v
        x = x + self.drop1(self.c_proj(h.permute(0, 2, 1, 3).contiguous().view(B, T, W)))
        return x + self.drop2(self.m_proj(F.relu(self.c_fc(self.ln_2(x)))))


class PlainPolicy(nn.Module):
    def __init__(self, d_s, d_a, args):
        super().__init__()
        W = args.width
        self.c, self.s, self.a = nn.Linear(1, W), nn.Linear(d_s, W), nn.Linear(d_a, W)
        self.t = nn.Embedding(1000, W)
        self.ln, self.ln_f, self.drop = nn.LayerNorm(W), nn.LayerNorm(W), nn.Dropout(args.dropout)
        T = 3 * args.gate.K
        self.blocks = nn.ModuleList(
            PlainBlock(W, args.heads, args.dropout, T) for _ in range(args.layers)
        )
        self.action = nn.Sequential(nn.Linear(W, d_a), nn.Tanh())

    def forward(self, c, s, a, t, valid):
        B, K = t.shape
        time = self.t(t)
        x = torch.stack((self.c(c) + time, self.s(s) + time, self.a(a) + time), 1)
        x = x.permute(0, 2, 1, 3).reshape(B, 3 * K, -1)
        mask = torch.stack((valid, valid, valid), 1).permute(0, 2, 1).reshape(B, 3 * K).float()
        padding = (1.0 - mask)[:, None, None, :] * -1e4
        x = self.drop(self.ln(x))
        for block in self.blocks:
            x = block(x, padding)
        return self.action(self.ln_f(x).reshape(B, K, 3, -1).permute(0, 2, 1, 3)[:, 1])


class PlainCritics(nn.Module):
    def __init__(self, d_in, hidden):
        super().__init__()

        def mlp():
            sizes = [(d_in, hidden), (hidden, hidden), (hidden, hidden)]
            return nn.Sequential(
                *(m for i, o in sizes for m in (nn.Linear(i, o), nn.Mish())), nn.Linear(hidden, 1)
            )

        self.q1, self.q2 = mlp(), mlp()

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        return self.q1(x), self.q2(x)


def plain_update(data: taf_dt.Data, cvae: nn.Module, args: taf_dt.Args, d_s: int, d_a: int):
    policy, policy_bar = PlainPolicy(d_s, d_a, args), PlainPolicy(d_s, d_a, args).eval()
    critics, critics_bar = (PlainCritics(d_s + d_a, args.hidden) for _ in range(2))
    adam_policy = torch.optim.Adam(policy.parameters(), lr=args.lr, weight_decay=args.decay)
    adam_critics = torch.optim.Adam(critics.parameters(), lr=args.lr)
    numpy = {
        name: getattr(data, name).numpy()
        for name in ("states", "actions", "rewards", "tokens", "steps", "weight")
    }
    left, rng, K = data.left.numpy(), np.random.default_rng(0), args.gate.K
    starts = {"s": data.source_starts.numpy(), "t": data.target_rows.numpy()}

    def sample():
        rows = defaultdict(list)
        for domain, size in (("s", 64), ("t", 128)):
            for start in rng.choice(starts[domain], size):
                length = min(K, left[start])
                for name, x in numpy.items():
                    piece = x[start : start + length]
                    pad = np.zeros((K - length, *piece.shape[1:]), piece.dtype)
                    rows[name].append(np.concatenate([pad, piece])[None])
                rows["valid"].append(np.concatenate([np.zeros(K - length), np.ones(length)])[None])
        return {name: torch.from_numpy(np.concatenate(x)) for name, x in rows.items()}

    def update():
        b = sample()
        s, a, t, valid, weight = b["states"], b["actions"], b["steps"], b["valid"], b["weight"]
        c = b["tokens"][..., None]
        q1, q2 = critics(s, a)
        with torch.no_grad():
            a_hat = policy_bar(c, s, a, t, valid)[:, -1]
            q_last = torch.min(*critics_bar(s[:, -1], a_hat))[:, 0]
            q_hat = torch.zeros_like(b["rewards"])
            q_hat[:, -1] = q_last
            for i in range(K - 2, -1, -1):
                q_hat[:, i] = b["rewards"][:, i] + args.gamma * q_hat[:, i + 1]
        loss = sum((weight * (q[..., 0] - q_hat) ** 2)[:, :-1].mean() for q in (q1, q2))
        adam_critics.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(critics.parameters(), args.clip_grad)
        adam_critics.step()
        dt = (weight[..., None] * (policy(c, s, a, t, valid) - a) ** 2).mean()
        pi = policy(c, s, a, t, valid)
        q = torch.min(*critics(s, pi))
        flat_s, flat_a = s.reshape(-1, d_s), pi.reshape(-1, d_a)
        noise = torch.randn(args.M, len(flat_s), 2 * d_a)
        reg = -taf_dt.behaviour_log_density(
            cvae, flat_s, flat_a, noise, args.variance, "posterior"
        ).mean()
        adam_policy.zero_grad()
        (dt - args.alpha * q.mean() / q.abs().mean().detach() + args.eta_reg * reg).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), args.clip_grad)
        adam_policy.step()
        for slow, fast in ((policy_bar, policy), (critics_bar, critics)):
            for p, new in zip(slow.parameters(), fast.parameters(), strict=True):
                p.data.copy_(args.tau * new.data + (1 - args.tau) * p.data)

    return update


# -------------------------------------------------------------------------------------- measurement


def interleaved(functions: dict, seconds: float) -> dict[str, float]:
    """Median seconds of each, run in turn."""
    took = {name: [] for name in functions}
    for f in functions.values():
        f()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(took.values()))) < 3:
        for name, f in functions.items():
            start = time.perf_counter()
            f()
            took[name].append(time.perf_counter() - start)
    return {name: float(np.median(x)) for name, x in took.items()}


def breakdown(nets, data, args, seconds: float) -> dict[str, float]:
    """Seconds of the parts of an update."""
    b = taf_dt.sample_windows(data, args)
    noise = torch.randn(args.M, b.valid.numel(), 2 * b.actions.shape[-1])

    def critics():
        with torch.no_grad():
            q_last = nets["critics_bar"](b.states[:, -1], b.actions[:, -1]).amin(0)
            q_hat = taf_dt.k_step_target(b.rewards, b.terminal, q_last, args.gamma)
        q = nets["critics"](b.states, b.actions)
        taf_dt.gradient_step(
            nets["adam_critics"], taf_dt.critic_loss(q, q_hat, b.weight), args.clip_grad
        )

    @torch.no_grad()
    def target_policy():
        nets["policy_bar"](b, only_last=True)

    def forward():
        state["loss"] = taf_dt.policy_loss(nets, b, noise, args)[0]

    def backward():
        params = list(nets["policy"].parameters())
        for p, g in zip(params, torch.autograd.grad(state["loss"], params), strict=True):
            p.grad = g

    def optimiser():
        nn.utils.clip_grad_norm_(nets["policy"].parameters(), args.clip_grad)
        nets["adam_policy"].step()
        taf_dt.polyak_update(nets["policy_bar"], nets["policy"], 0.005)
        taf_dt.polyak_update(nets["critics_bar"], nets["critics"], 0.005)

    state = {}
    parts = {"sampling": lambda: taf_dt.sample_windows(data, args), "critics": critics}
    parts |= {"target policy": target_policy, "policy forward": forward, "backward": backward}
    return interleaved(parts | {"optimiser, averages": optimiser}, seconds)


def peak() -> float:
    """Operations per second in one large product."""
    a = torch.randn(2048, 2048)
    took = interleaved({"x": lambda: a @ a}, 2)["x"]
    return 2 * 2048**3 / took


def main(
    robots: tuple[str, ...] = ("hopper", "ant"), K: tuple[int, ...] = (5, 20), seconds: float = 20
) -> None:
    runs.reuse_memory()  # as the script does; it helps all three
    print(f"{torch.get_num_threads()} threads, peak of a large product {peak() / 1e9:.0f} GFLOP/s")
    for robot in robots:
        d_s, d_a = ROBOTS[robot].obs_dim, ROBOTS[robot].act_dim
        data = synthetic(d_s, d_a)
        for k in K:
            args = runs.compose(taf_dt.Args, env=robot, K=k, eta_reg=0.5, return_target=0.0)
            torch.manual_seed(0)
            nets = taf_dt.build(args, d_s, d_a, "cpu")

            def update(nets=nets, data=data, args=args):
                policy_stage(nets, data, args, 2000)

            pairs, flop = products_of(update)
            plain = plain_update(data, nets["cvae"], args, d_s, d_a)
            t = interleaved(
                {"update": update, "products": lambda p=pairs: replay(p), "plain": plain}, seconds
            )
            print(f"\n{robot}, K = {k}: {flop / 1e9:.1f} GFLOP in {len(pairs)} products")
            for name, took in t.items():
                print(f"  {name:22} {took * 1e3:8.1f} ms  {1 / took:8.2f} /s")
            print(f"  update / products      {t['update'] / t['products']:8.2f}   (bar: at most 2)")
            print(f"  plain / update         {t['plain'] / t['update']:8.2f}   (bar: at least 1.7)")
            print(f"  share of the peak      {flop / t['update'] / peak():8.1%}")
            for name, took in breakdown(nets, data, args, seconds / 2).items():
                print(f"    {name:20} {took * 1e3:8.1f} ms")
        stages = {"V and Q": lambda n=nets, d=data, a=args: taf_dt.update_values(n, d, a)}
        stages |= {"command": lambda n=nets, d=data, a=args: taf_dt.update_command(n, d, a)}
        stages |= {"CVAE": lambda n=nets, d=data, a=args: taf_dt.update_behaviour(n, d, a)}
        print(f"\n{robot}, other stages")
        for name, took in interleaved(stages, seconds / 4).items():
            print(f"  {name:22} {took * 1e3:8.1f} ms  {1 / took:8.1f} /s")


if __name__ == "__main__":
    tyro.cli(main)
