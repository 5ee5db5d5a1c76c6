"""A model of a behaviour policy, and how likely an action is under it.

The paper asks for a "similarity penalty" to the target's behaviour policy pi_tar and gives no model
of it. As in OTDF and in the authors' code, it is a conditional variational autoencoder.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynashift.optimise import gradient_step
from dynashift.windows import uniform


class CVAE(nn.Module):
    """The target's behaviour policy pi_tar: a = decoder(s, z) with a latent z ~ N(0, 1)."""

    def __init__(self, d_s: int, d_a: int, hidden: int):
        super().__init__()
        Linear, ReLU = nn.Linear, nn.ReLU(inplace=True)
        e = [Linear(d_s + d_a, hidden), ReLU, Linear(hidden, hidden), ReLU, Linear(hidden, 4 * d_a)]
        d = [Linear(d_s + 2 * d_a, hidden), ReLU, Linear(hidden, hidden), ReLU, Linear(hidden, d_a)]
        self.encoder = nn.Sequential(*e)
        self.decoder = nn.Sequential(*d)

    def encode(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(torch.cat([s, a], -1)).chunk(2, -1)
        return mean, log_std.clamp(-4, 15).exp()  # [..., 2 d_a] each

    def decode(self, s: Tensor, z: Tensor) -> Tensor:
        return self.decoder(torch.cat([s, z], -1)).tanh()  # [..., d_a]


def cvae_loss(a: Tensor, a_hat: Tensor, mean: Tensor, std: Tensor, kl_weight: float) -> Tensor:
    """Squared error plus KL(N(mean, std^2) || N(0, 1)), each averaged over all of its entries."""
    kl = 0.5 * (mean.square() + std.square() - 1) - std.log()
    return F.mse_loss(a_hat, a) + kl_weight * kl.mean()


def behaviour_log_density(cvae: CVAE, s, a, noise, variance: float, latents: str) -> Tensor:
    """log sum_m N(a; decoder(s, z_m), variance): s [B, d_s], a [B, d_a], noise [M, B, 2 d_a] -> [B]

    With latents of the prior, this is the behaviour model's density up to the constant log M.
    """
    # DIFF 27: the paper only says "a similarity penalty". OTDF and the released code encode z_m
    # from the policy's own action. A decoder that uses its latents then rebuilds whatever action
    # the policy proposes, and the penalty sees no difference.
    if latents == "prior":
        z = noise
    else:
        mean, std = cvae.encode(s, a)
        z = mean + std * noise
    a_m = cvae.decode(s.expand(len(noise), *s.shape), z).to(s.dtype)  # [M, B, d_a]
    log_normal = -0.5 * ((a - a_m).square() / variance + math.log(2 * math.pi * variance))
    return log_normal.sum(-1).logsumexp(0)


def update_behaviour(nets: dict, data, args) -> dict:
    """One step of the behaviour model pi_tar, on target data alone."""
    rows = uniform(data.target_rows, args.cvae_batch)  # [B]
    s, a = data.states[rows], data.actions[rows]
    mean, std = nets["cvae"].encode(s, a)
    a_hat = nets["cvae"].decode(s, mean + std * torch.randn_like(std))
    loss = cvae_loss(a, a_hat, mean, std, args.cvae_kl)
    gradient_step(nets["adam_cvae"], loss)
    return {"losses/cvae": loss, "charts/reconstruction": F.mse_loss(a_hat, a)}
