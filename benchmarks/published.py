"""The published training step, transcribed: what the authors' released trainer computes in one
update of policy and critics, with the same modules and in the same order. bench_train.py and
bench_eval.py measure against it.

Windows are cut and padded one by one in Python, 128 of each dataset, and the 64 cheapest source
windows are kept. GPT-2 blocks see every token in every layer. The target policy runs in training
mode and records a graph that is never used; the policy runs once. The critics are two modules. One
backward pass fills the gradients of the policy, and those of critics and behaviour model besides.
Optimisers and averages go through the parameters one by one. Losses are read by the host after
every step.
"""

import copy
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import taf_dt


class Conv1D(nn.Module):
    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class PlainBlock(nn.Module):
    def __init__(self, W: int, heads: int, p: float, length: int):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(W), nn.LayerNorm(W), heads
        self.c_attn, self.c_proj = Conv1D(W, 3 * W), Conv1D(W, W)
        self.c_fc, self.m_proj = Conv1D(W, 4 * W), Conv1D(4 * W, W)
        self.attn_drop, self.drop1, self.drop2 = nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)
        self.register_buffer("causal", torch.ones(length, length).tril()[None, None])

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(W, 2)
        q, k, v = (u.view(B, T, self.heads, W // self.heads).permute(0, 2, 1, 3) for u in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (W // self.heads) ** 0.5
        masked = torch.tensor(-1e4, device=x.device)
        scores = torch.where(self.causal[:, :, :T, :T].bool(), scores, masked) + padding
        h = self.attn_drop(F.softmax(scores, dim=-1)) @ v
        x = x + self.drop1(self.c_proj(h.permute(0, 2, 1, 3).contiguous().view(B, T, W)))
        return x + self.drop2(self.m_proj(F.relu(self.c_fc(self.ln_2(x)))))


class PlainPolicy(nn.Module):
    def __init__(self, d_s: int, d_a: int, args: taf_dt.Args):
        super().__init__()
        W, T = args.width, 3 * args.gate.K
        self.c, self.s, self.a = nn.Linear(1, W), nn.Linear(d_s, W), nn.Linear(d_a, W)
        self.t, self.r = nn.Embedding(1000, W), nn.Linear(1, W)
        self.ln, self.ln_f, self.drop = nn.LayerNorm(W), nn.LayerNorm(W), nn.Dropout(args.dropout)
        blocks = (PlainBlock(W, args.heads, args.dropout, T) for _ in range(args.layers))
        self.blocks = nn.ModuleList(blocks)
        self.next_state, self.action = nn.Linear(W, d_s), nn.Linear(W, d_a)

    def forward(self, c, s, a, r, t, valid) -> tuple[Tensor, Tensor]:
        """Predicted next states [B, K, d_s] and actions [B, K, d_a]."""
        B, K = t.shape
        time = self.t(t)
        parts = self.c(c) + time, self.s(s) + time, self.a(a) + time
        self.r(r) + time  # embedded, and then used by no token
        x = torch.stack(parts, 1).permute(0, 2, 1, 3).reshape(B, 3 * K, -1)
        mask = torch.stack((valid, valid, valid), 1).permute(0, 2, 1).reshape(B, 3 * K).float()
        padding = (1.0 - mask)[:, None, None, :] * -1e4
        x = self.drop(self.ln(x))
        for block in self.blocks:
            x = block(x, padding)
        x = self.ln_f(x).reshape(B, K, 3, -1).permute(0, 2, 1, 3)
        return self.next_state(x[:, 2]), self.action(x[:, 1]).tanh()


class PlainCritics(nn.Module):
    def __init__(self, d_in: int, hidden: int):
        super().__init__()

        def mlp():
            sizes = [(d_in, hidden), (hidden, hidden), (hidden, hidden)]
            layers = (m for i, o in sizes for m in (nn.Linear(i, o), nn.Mish()))
            return nn.Sequential(*layers, nn.Linear(hidden, 1))

        self.q1, self.q2 = mlp(), mlp()

    def forward(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([s, a], -1)
        return self.q1(x), self.q2(x)


def window_sampler(data: taf_dt.Data, args: taf_dt.Args, kept: int):
    """A function that draws a batch: of as many source windows as target windows the best ones."""
    names = ("states", "actions", "rewards", "tokens", "steps", "weight", "terminal")
    arrays = {name: getattr(data, name).cpu().numpy() for name in names}
    left, rng, K = data.left.cpu().numpy(), np.random.default_rng(0), args.gate.K
    device = data.states.device

    def cut(starts, size: int) -> dict:
        rows = defaultdict(list)
        for start in rng.choice(starts, size):
            length = min(K, left[start])
            for name, x in arrays.items():
                piece = x[start : start + length]
                pad = np.zeros((K - length, *piece.shape[1:]), piece.dtype)
                rows[name].append(np.concatenate([pad, piece])[None])
            rows["valid"].append(np.concatenate([np.zeros(K - length), np.ones(length)])[None])
        return {name: torch.from_numpy(np.concatenate(x)).to(device) for name, x in rows.items()}

    def sample() -> dict:
        source = cut(data.source_starts.cpu().numpy(), args.target_batch)
        target = cut(data.target_rows.cpu().numpy(), args.target_batch)
        best = source["weight"].mean(1).topk(kept).indices
        return {name: torch.cat([source[name][best], target[name]]) for name in source}

    return sample


def published_update(data: taf_dt.Data, cvae: nn.Module, args: taf_dt.Args, step: int = 2000):
    """The step as a function without arguments, on the device of the data."""
    d_s, d_a = data.states.shape[1], data.actions.shape[1]
    K = args.gate.K
    device = data.states.device
    policy, policy_bar = (PlainPolicy(d_s, d_a, args).to(device) for _ in range(2))
    critics, critics_bar = (PlainCritics(d_s + d_a, args.hidden).to(device) for _ in range(2))
    cvae = copy.deepcopy(cvae).requires_grad_(True)
    adam_policy = torch.optim.Adam(policy.parameters(), lr=args.lr, weight_decay=args.decay)
    adam_critics = torch.optim.Adam(critics.parameters(), lr=args.lr)
    sample = window_sampler(data, args, taf_dt.source_batch(args.target_batch, args.beta))
    rng = np.random.default_rng(0)

    def k_step_target(r: Tensor, lengths: Tensor, q_last: Tensor) -> Tensor:
        """Built from one small tensor for each window, on the host."""
        r[:, -1] = 0.0
        powers = [n - 1 - torch.arange(n) for n in lengths.cpu().long().tolist()]
        powers = torch.stack([torch.cat([torch.zeros(K - len(p)), p]) for p in powers])
        to_last = (args.gamma**powers).to(device)  # [B, K]: gamma^(t - i)
        sums = (r * (1 / to_last)).flip(1).cumsum(1).flip(1) * to_last
        return sums + to_last * q_last

    def update() -> None:
        nonlocal step
        b = sample()
        s, a, weight, valid = b["states"], b["actions"], b["weight"], b["valid"]
        inputs = b["tokens"][..., None], s, a, b["rewards"][..., None], b["steps"], valid
        inside = valid > 0  # [B, K]
        q1, q2 = critics(s, a)
        a_hat = policy_bar(*inputs)[1][:, -1]
        q_last = torch.min(*critics_bar(s[:, -1], a_hat)) * ~b["terminal"][:, -1:]
        q_hat = k_step_target(b["rewards"], valid.sum(1), q_last).detach()
        error = [(q[..., 0] - q_hat)[:, :-1][inside[:, :-1]] ** 2 for q in (q1, q2)]
        critic_loss = (weight[:, :-1][inside[:, :-1]] * sum(error)).mean()
        minimise(adam_critics, critics, critic_loss, args.clip_grad)

        next_states, pi = policy(*inputs)
        imitation = (weight[inside][:, None] * (pi[inside] - a[inside]) ** 2).mean()
        state = ((next_states[:, :-1] - s[:, 1:]) ** 2)[inside[:, :-1]].mean()
        mine, other = critics(s[inside], pi[inside])
        if rng.uniform() > 0.5:
            mine, other = other, mine
        guidance = -mine.mean() / other.abs().mean().detach()
        reg = -behaviour(cvae, s, pi, args)[inside].mean()
        loss = imitation + state + args.alpha * guidance + args.eta_reg * reg
        minimise(adam_policy, policy, loss, args.clip_grad)

        if step > args.ema_start and step % args.ema_every == 0:
            average(policy_bar, policy, 1 - args.ema_decay)
        average(critics_bar, critics, args.tau)
        step += 1
        for value in (critic_loss, loss, imitation, guidance, q_hat.mean()):
            value.item()

    return update


def minimise(adam, net: nn.Module, loss: Tensor, clip: float) -> None:
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), clip)
    adam.step()


def average(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for p, new in zip(slow.parameters(), fast.parameters(), strict=True):
        p.data.copy_(rate * new.data + (1 - rate) * p.data)


def behaviour(cvae: nn.Module, s: Tensor, a: Tensor, args: taf_dt.Args) -> Tensor:
    """The density of L_reg [B, K], with latents encoded from the action itself."""
    mean, std = cvae.encode(s, a)  # [B, K, 2 d_a]
    many = (*s.shape[:2], args.M, -1)
    mean, std, s, a = (x[:, :, None].expand(many) for x in (mean, std, s, a))
    z = mean + std * torch.randn_like(std)
    normal = torch.distributions.Normal
    normal(mean, std).log_prob(z), normal(0.0, 1.0).log_prob(z)  # computed there, and not used
    decoded = normal(cvae.decode(s, z), args.variance**0.5)
    return decoded.log_prob(a).sum(-1).logsumexp(-1)
