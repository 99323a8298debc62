"""The published models written out slowly from their formulas, on the keys of their own state dicts.

Each takes a state dict as the original code stores it and one bag (n, d), in float64 NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
State = Mapping[str, torch.Tensor]


def arrays(state: State) -> dict[str, Array]:
    return {key: value.double().numpy() for key, value in state.items()}


def linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array, axis: int = 0) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def layer_norm(w: Mapping[str, Array], name: str, x: Array) -> Array:
    mean, var = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def hippo(state: State, x: Array) -> Array:
    w = arrays(state)
    h = relu(linear(w, "encoder.0", x))
    if "attention_weights.attention_V.0.weight" in w:
        gate = sigmoid(linear(w, "attention_weights.attention_U.0", h))
        hidden = np.tanh(linear(w, "attention_weights.attention_V.0", h)) * gate
        scores = linear(w, "attention_weights.attention_weights", hidden)
    else:
        scores = linear(w, "attention_weights.2", np.tanh(linear(w, "attention_weights.0", h)))
    return linear(w, "head", softmax(scores).T @ h)[0]


def clam_sb(state: State, x: Array) -> Array:
    """CLAM with one branch, and CHIEF's slide model, which has its keys."""
    w = arrays(state)
    h = relu(linear(w, "attention_net.0", x))
    gate = sigmoid(linear(w, "attention_net.3.attention_b.0", h))
    scores = linear(
        w, "attention_net.3.attention_c", np.tanh(linear(w, "attention_net.3.attention_a.0", h)) * gate
    )
    return linear(w, "classifiers", softmax(scores).T @ h)[0]


def dsmil_wsi(state: State, x: Array) -> Array:
    """The bag stream, of which the published code takes the sigmoid."""
    w = arrays(state)

    def query(h: Array) -> Array:
        if "b_classifier.q.weight" in w:
            return linear(w, "b_classifier.q", h)
        return np.tanh(linear(w, "b_classifier.q.2", relu(linear(w, "b_classifier.q.0", h))))

    values = relu(linear(w, "b_classifier.v.1", x)) if "b_classifier.v.1.weight" in w else x
    critical = x[linear(w, "i_classifier.fc.0", x).argmax(axis=0)]  # (c, d)
    q = query(x)
    weights = softmax(q @ query(critical).T / np.sqrt(q.shape[1]))  # (n, c)
    pooled = weights.T @ values  # (c, d)
    kernel = w["b_classifier.fcc.weight"]  # (c, c, d)
    return np.asarray([np.sum(k * pooled) for k in kernel]) + w["b_classifier.fcc.bias"]


def mil_lab_dsmil(state: State, x: Array) -> Array:
    w = arrays(state)
    h = relu(linear(w, "patch_embed.0", x))
    scores = linear(w, "i_classifier.inst_classifier", h)
    q = linear(w, "b_classifier.q", h)
    critical = linear(w, "b_classifier.q", h[scores.argmax(axis=0)])
    weights = softmax(q @ critical.T / np.sqrt(q.shape[1]))
    pooled = layer_norm(w, "b_classifier.norm", weights.T @ linear(w, "b_classifier.v.1", h))
    bag = np.asarray([np.sum(k * pooled) for k in w["classifier.weight"]]) + w["classifier.bias"]
    return 0.5 * (bag + scores.max(axis=0))


def mil_lab_clam(state: State, x: Array) -> Array:
    w = arrays(state)
    h = relu(linear(w, "patch_embed.0", x))
    gate = sigmoid(linear(w, "global_attn.attention_b.0", h))
    scores = linear(w, "global_attn.attention_c", np.tanh(linear(w, "global_attn.attention_a.0", h)) * gate)
    return linear(w, "classifier", softmax(scores).T @ h)[0]


def mil_lab_transformer(state: State, x: Array) -> Array:
    """Eight heads of one number each, where the embedding has eight."""
    w = arrays(state)
    h = np.concatenate([w["cls_token"][0], relu(linear(w, "patch_embed.0", x))])
    for i in range(2):
        block = f"blocks.{i}"
        normed = layer_norm(w, f"{block}.norm", h)
        weight, bias = w[f"{block}.attention.in_proj_weight"], w[f"{block}.attention.in_proj_bias"]
        q, k, v = np.split(normed @ weight.T + bias, 3, axis=1)
        heads = [softmax(np.outer(q[:, j], k[:, j]), axis=1) @ v[:, j] for j in range(8)]
        h = h + linear(w, f"{block}.attention.out_proj", np.stack(heads, axis=1))
    return linear(w, "classifier", layer_norm(w, "norm", h)[0])


def torchmil_abmil(state: State, x: Array) -> Array:
    w = arrays(state)
    hidden = np.tanh(linear(w, "pool.fc1", x))
    if "pool.fc_gated.weight" in w:
        hidden = hidden * sigmoid(linear(w, "pool.fc_gated", x))
    return linear(w, "classifier", softmax(linear(w, "pool.fc2", hidden)).T @ x)[0]


def torchmil_dsmil(state: State, x: Array) -> Array:
    """What its `predict` gives."""
    w = arrays(state)
    if "q_nn.weight" in w:
        q = linear(w, "q_nn", x)
    else:
        q = np.tanh(linear(w, "q_nn.2", relu(linear(w, "q_nn.0", x))))
    values = relu(linear(w, "v_nn.1", x)) if "v_nn.1.weight" in w else x
    scores = linear(w, "inst_classifier", x)  # (n, 1)
    weights = softmax(q @ q[scores[:, 0].argmax()][:, None] / np.sqrt(q.shape[1]))
    return 0.5 * (linear(w, "bag_classifier", weights.T @ values)[0] + scores.max(axis=0))


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the given names."""
    generator = torch.Generator().manual_seed(seed)
    return {key: 0.5 * torch.randn(*shape, generator=generator) for key, shape in shapes.items()}


def layers(**sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of linear layers: their weight and their bias; `__` in a name stands for a dot."""
    found: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        found[f"{name.replace('__', '.')}.weight"] = size
        found[f"{name.replace('__', '.')}.bias"] = size[:1]
    return found


def shapes_of(*parts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: size for part in parts for key, size in part.items()}
