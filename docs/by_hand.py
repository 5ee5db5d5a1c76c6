"""The equations of the paper in plain NumPy, for docs/walkthrough.py to compare with."""

import numpy as np


def array(x) -> np.ndarray:
    return x.detach().double().numpy()


def mish(x):
    return x * np.tanh(np.logaddexp(0, x))


def heads(net, *inputs):
    """H networks (d_in) -> hidden x 3 -> 1 on one input: [H]"""
    x, out = np.concatenate(inputs), []
    for k in range(len(net.W[0])):
        h = x
        for i, (W, b) in enumerate(zip(net.W, net.b, strict=True)):
            h = (mish(h) if i else h) @ array(W[k]) + array(b[k, 0])
        out.append(h[0])
    return np.array(out)


def linear(layer, x):
    return x @ array(layer.weight).T + array(layer.bias)


def layer_norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
    return x * array(layer.weight) + array(layer.bias)


def transformer(net, tokens, states, actions, steps, n_heads):
    """Actions [K, d_a] and the embedded sequence [3K, W] of one window without padding."""
    t = array(net.embed_t.weight)[steps]
    parts = (
        linear(net.embed_c, tokens[:, None]) + t,
        linear(net.embed_s, states) + t,
        linear(net.embed_a, actions) + t,
    )
    embedded = np.stack(parts, 1).reshape(-1, t.shape[1])  # (c_1, s_1, a_1, c_2, ...)
    x = layer_norm(net.norm_in, embedded)
    T, W = x.shape
    for block in net.blocks:
        h = layer_norm(block.norm1, x)
        q, (k, v) = linear(block.query, h), np.split(linear(block.key_value, h), 2, 1)
        q, k, v = (u.reshape(T, n_heads, -1).swapaxes(0, 1) for u in (q, k, v))
        score = q @ k.swapaxes(1, 2) / np.sqrt(W // n_heads)
        score[:, ~np.tri(T, dtype=bool)] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        h = (p / p.sum(-1, keepdims=True)) @ v
        x = x + linear(block.out, h.swapaxes(0, 1).reshape(T, W))
        x = x + linear(block.down, np.maximum(linear(block.up, layer_norm(block.norm2, x)), 0))
    return np.tanh(linear(net.action, layer_norm(net.norm_out, x)[1::3])), embedded


def kernel(x, y, g):
    return np.exp(-g * ((x[:, None] - y) ** 2).sum(-1))


def mmd(x, y, g):
    within = kernel(x, x, g).mean() + kernel(y, y, g).mean()
    return np.sqrt(max(within - 2 * kernel(x, y, g).mean(), 0))


def fragments(lengths, K):
    """First row and length of every fragment."""
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        for t in range(max(1, length - K + 1)):
            yield start + t, min(K, length)


def behaviour(cvae, s, a, z, variance):
    """log sum_m N(a; decoder(s, z_m), variance), for latents z [M, 2 d_a] of the prior"""
    x = np.concatenate([np.tile(s, (len(z), 1)), z], 1)
    first, _, second, _, last = cvae.decoder
    a_m = np.tanh(linear(last, np.maximum(linear(second, np.maximum(linear(first, x), 0)), 0)))
    log = -0.5 * ((a - a_m) ** 2 / variance + np.log(2 * np.pi * variance)).sum(1)
    return log.max() + np.log(np.exp(log - log.max()).sum())
