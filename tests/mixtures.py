"""Mixtures of experts in float64: every expert on every token, weighted, mostly by zero."""

import numpy as np
from scipy.special import erf

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def choice(logits, settings, bias=0.0):
    """The weight of each expert for each token, float64 [T, experts]."""
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    score, groups = settings.get("score", "softmax"), settings.get("num_groups", 1)
    scores = exp / exp.sum(-1, keepdims=True) if score == "softmax" else 1 / (1 + np.exp(-logits))
    weights = np.zeros_like(scores)
    for token, own in enumerate(scores):
        parts = (own + bias).reshape(groups, -1)
        best = np.sort(parts, 1)[:, ::-1][:, : 1 if score == "softmax" else 2].sum(1)
        worst = np.argsort(-best)[settings.get("top_groups", 1) :]
        parts[worst] = -np.inf
        chosen = np.argsort(-parts.reshape(-1))[: settings["top_k"]]
        total = own[chosen].sum() if settings.get("renormalize", True) else 1.0
        weights[token, chosen] = own[chosen] / total * settings.get("scale", 1.0)
    return weights


def network(x, up, down, settings, biases=(0.0, 0.0)):
    activation = ACTIVATIONS[settings.get("activation", "silu")]
    h = x @ up + biases[0]
    if not settings.get("gated", True):
        return activation(h) @ down + biases[1]
    gate, up = np.split(h, 2, -1)
    return (activation(gate) * up) @ down + biases[1]


def dense(params, x, settings):
    """The output for tokens [T, D], from parameters by name."""
    p = {name: np.asarray(w, np.float64) for name, w in params.items()}
    x = np.asarray(x, np.float64)
    logits = x @ p["router"] + p.get("router_bias", 0.0)
    weights = choice(logits, settings, p.get("selection_bias", 0.0))
    none = np.zeros((len(p["up"]), 1))
    y = 0.0
    for number, weight in enumerate(weights.T):
        biases = (p.get("up_bias", none)[number], p.get("down_bias", none)[number])
        y = y + weight[:, None] * network(x, p["up"][number], p["down"][number], settings, biases)
    if "shared_up" not in p:
        return y
    shared = network(x, p["shared_up"], p["shared_down"], settings)
    gate = 1 / (1 + np.exp(-x @ p["shared_gate"])) if "shared_gate" in p else 1.0
    return y + gate * shared
