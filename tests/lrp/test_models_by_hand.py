"""LRP of each model, written out by hand from the formulas, against the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xmil
from tests.lrp import by_hand
from xmil.lrp import Composite, trace
from xmil.network import frozen

CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def random_model(name: str, **params: object) -> xmil.models.MILModel:
    """A small model in double precision, with biases and batch statistics that matter."""
    model = xmil.create_model(name, in_dim=5, n_classes=3, seed=1, **params).double()
    generator = torch.Generator().manual_seed(2)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.1
    return model


def engine_relevance(
    model: xmil.models.MILModel, x: Tensor, c: int, composite: Composite | None = None
) -> Tensor:
    with frozen(model):
        traced = trace(model, x[None], module=model, composite=composite)
        return traced.relevance(lambda logits: logits[:, c]).input.features[0]


def one_logit(logits: Tensor, c: int) -> Tensor:
    return F.one_hot(torch.tensor(c), len(logits)) * logits


def stack_of(R: Tensor, activations: list[Tensor], layers: list[torch.nn.Linear]) -> Tensor:
    """Back through Linear + ReLU layers; ReLU passes relevance on unchanged."""
    for a, layer in zip(reversed(activations), reversed(layers), strict=True):
        R = by_hand.rows(R, a, layer.weight, layer.bias)
    return R


def through(x: Tensor, layers: list[torch.nn.Linear]) -> tuple[list[Tensor], Tensor]:
    activations = []
    for layer in layers:
        activations.append(x)
        x = torch.relu(layer(x))
    return activations, x


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_attnmil(gated: bool) -> None:
    model = random_model("attnmil", dim=6, attention_dim=4, gated=gated, n_layers=2, n_out_layers=1)
    x = torch.randn(7, 5, dtype=torch.float64)
    instance, out = [b[0] for b in model.instance], [b[0] for b in model.out]
    hidden, h = through(x, instance)
    p = torch.softmax(model.attention(h), dim=0).T  # (1, n)
    z = p @ h
    tops, top = through(z, out)
    logits = model.classifier(top)[0]
    R = by_hand.rows(one_logit(logits, 2)[None], top, model.classifier.weight, model.classifier.bias)
    R = by_hand.attention(stack_of(R, tops, out), h, p)
    torch.testing.assert_close(engine_relevance(model, x, 2), stack_of(R, hidden, instance), **CLOSE)


@pytest.mark.parametrize("name", ["clam_sb", "clam_mb"])
@torch.no_grad()
def test_clam(name: str) -> None:
    model = random_model(name, dim=6, attention_dim=4)
    x, c = torch.randn(7, 5, dtype=torch.float64), 1
    instance = [b[0] for b in model.instance]
    hidden, h = through(x, instance)
    p = torch.softmax(model.attention(h), dim=0).T
    branch = c if name == "clam_mb" else 0
    classifier = model.classifiers[c] if name == "clam_mb" else model.classifier
    z = p[branch : branch + 1] @ h
    logits = classifier(z)[0]
    R = by_hand.rows(
        one_logit(logits, 0 if name == "clam_mb" else c)[None], z, classifier.weight, classifier.bias
    )
    R = by_hand.attention(R, h, p[branch : branch + 1])
    torch.testing.assert_close(engine_relevance(model, x, c), stack_of(R, hidden, instance), **CLOSE)


@pytest.mark.parametrize("name", ["meanpool", "maxpool"])
@torch.no_grad()
def test_pooling(name: str) -> None:
    model = random_model(name, dim=6)
    x = torch.randn(7, 5, dtype=torch.float64)
    instance = [b[0] for b in model.instance]
    hidden, h = through(x, instance)
    mean = torch.full((1, 7), 1 / 7, dtype=torch.float64)
    z = mean @ h if name == "meanpool" else h.amax(dim=0, keepdim=True)
    R = by_hand.rows(
        one_logit(model.classifier(z)[0], 0)[None], z, model.classifier.weight, model.classifier.bias
    )
    if name == "meanpool":
        R = by_hand.attention(R, h, mean)
    else:  # the winner takes all
        R = torch.zeros_like(h).scatter(0, h.argmax(dim=0, keepdim=True), R)
    torch.testing.assert_close(engine_relevance(model, x, 0), stack_of(R, hidden, instance), **CLOSE)


@torch.no_grad()
def test_addmil() -> None:
    model = random_model("addmil", hidden=6)
    x = torch.randn(7, 5, dtype=torch.float64)
    p = torch.softmax(model.attention(x), dim=0)
    first, second, last = (model.classifier[i] for i in (0, 2, 4))
    (a0, a1), a2 = through(p * x, [first, second])
    R = torch.zeros(7, 3, dtype=torch.float64)
    R[:, 1] = last(a2)[:, 1]
    R = stack_of(by_hand.rows(R, a2, last.weight, last.bias), [a0, a1], [first, second])
    torch.testing.assert_close(engine_relevance(model, x, 1), R, **CLOSE)


@torch.no_grad()
def test_dsmil() -> None:
    model = random_model("dsmil", query_dim=4)
    x, c = torch.randn(7, 5, dtype=torch.float64), 2
    scores = model.instance_classifier(x)
    queries = model.query(x)
    p = torch.softmax(queries @ queries[scores.argmax(dim=0)].T / 2, dim=0).T  # (c, n), query_dim 4
    z = p @ x  # (c, d)
    kernel, bias = model.bag_classifier.weight[c], model.bag_classifier.bias[c : c + 1]
    bag = (kernel * z).sum() + bias
    best = scores[:, c].argmax()
    R = torch.zeros_like(x)
    R[best] = by_hand.dense(
        scores[best, c].reshape(1) / 2,
        (x[best] * model.instance_classifier.weight[c]).unsqueeze(1),
        model.instance_classifier.bias[c],
    )
    R_z = by_hand.dense(bag / 2, (kernel * z).reshape(-1, 1), bias).reshape(z.shape)
    for i in range(3):
        R = R + by_hand.attention(R_z[i : i + 1], x, p[i : i + 1])
    torch.testing.assert_close(engine_relevance(model, x, c), R, **CLOSE)


def dense_nystrom(attn: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The attention matrix of each head, written out over real tokens (n, n)."""
    n, m = len(x), attn.n_landmarks
    pad = -n % m
    padded = F.pad(x, (0, 0, pad, 0))
    q, k, _ = (t.reshape(n + pad, attn.heads, -1).transpose(0, 1) for t in attn.to_qkv(padded).chunk(3, -1))
    q = q / q.shape[-1] ** 0.5
    q_l, k_l = (t.reshape(attn.heads, m, -1, t.shape[-1]).mean(dim=2) for t in (q, k))
    a1, a2, a3 = (torch.softmax(a @ b.mT, dim=-1) for a, b in ((q, k_l), (q_l, k_l), (q_l, k)))
    z = a2.mT / (a2.sum(-1).max() * a2.sum(-2).max())
    eye = torch.eye(m, dtype=x.dtype)
    for _ in range(attn.pinv_iterations):
        z = 0.25 * z @ (13 * eye - a2 @ z @ (15 * eye - a2 @ z @ (7 * eye - a2 @ z)))
    return list((a1 @ z @ a3)[:, pad:, pad:])


def dense_softmax(attn: torch.nn.Module, x: Tensor) -> list[Tensor]:
    q, k, _ = (t.reshape(len(x), attn.heads, -1).transpose(0, 1) for t in attn.to_qkv(x).chunk(3, -1))
    return list(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1))


def convolution_matrix(conv: torch.nn.Conv2d, n: int, head: int) -> Tensor:
    """The residual convolution of a head along the sequence as an (n, n) matrix."""
    kernel = conv.weight[head, 0, :, 0]
    half = len(kernel) // 2
    matrix = torch.zeros(n, n, dtype=kernel.dtype)
    for i in range(n):
        for t in range(len(kernel)):
            if 0 <= i + t - half < n:
                matrix[i, i + t - half] = kernel[t]
    return matrix


def layer_by_hand(layer: torch.nn.Module, x: Tensor, attention: object) -> tuple[Tensor, object]:
    """Forward of x + attn(norm(x)), and the function that takes relevance back through it."""
    attn, n = layer.attn, len(x)
    normed = layer.norm(x)
    v = attn.to_qkv(normed).chunk(3, -1)[2]
    width = v.shape[1] // attn.heads
    mixers = [
        a + (convolution_matrix(attn.res_conv, n, h) if attn.res_conv is not None else 0)
        for h, a in enumerate(attention(attn, normed))
    ]
    parts = [v[:, h * width : (h + 1) * width] for h in range(attn.heads)]
    mixed = torch.cat([m @ part for m, part in zip(mixers, parts, strict=True)], dim=1)
    projected = attn.to_out(mixed)
    out = x + projected

    def back(R: Tensor) -> Tensor:
        safe = torch.where(out == 0, torch.ones_like(out), out)
        R_skip, R_attn = R * x / safe, R * projected / safe
        R_mixed = by_hand.rows(R_attn, mixed, attn.to_out[0].weight, attn.to_out[0].bias)
        R_v = torch.cat(
            [
                by_hand.attention(R_mixed[:, h * width : (h + 1) * width], parts[h], mixers[h])
                for h in range(attn.heads)
            ],
            dim=1,
        )
        w_v = attn.to_qkv.weight.chunk(3)[2]
        R_norm = by_hand.rows(R_v, normed, w_v)
        return R_skip + by_hand.layer_norm(R_norm, x, layer.norm.weight, layer.norm.bias, layer.norm.eps)

    return out, back


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (7, {}),
        (1, {}),
        (12, {"residual_kernel": None}),
        (6, {"attention": "dot_product"}),
        (5, {"landmarks": 64}),
        (9, {"n_layers": 3, "bias": False}),
    ],
)
@torch.no_grad()
def test_transmil(n: int, options: dict[str, object]) -> None:
    model = random_model("transmil", dim=8, heads=2, **{"landmarks": 4, **options})
    attention = dense_softmax if options.get("attention") else dense_nystrom
    x, c = torch.randn(n, 5, dtype=torch.float64), 1
    fc = model.instance[0][0]
    h = torch.relu(fc(x))
    edge = int(n**0.5 + 0.999999)
    extra = edge * edge - n
    tokens = torch.cat([model.class_token[0], h, h[:extra]])
    backs = []
    tokens, back = layer_by_hand(model.layers[0], tokens, attention)
    backs.append(back)
    grid = tokens[1:].T.reshape(1, 8, edge, edge)
    convs = [model.ppeg.proj, model.ppeg.proj1, model.ppeg.proj2]
    encoded = grid + sum(conv(grid) for conv in convs)
    after = torch.cat([tokens[:1], encoded.flatten(2)[0].T])
    before_ppeg, tokens = tokens, after
    for layer in model.layers[1:]:
        tokens, back = layer_by_hand(layer, tokens, attention)
        backs.append(back)
    normed = model.norm(tokens)
    logits = model.classifier(normed[:1])[0]
    torch.testing.assert_close(logits, model(x[None])[0], **CLOSE)

    R_cls = by_hand.rows(
        one_logit(logits, c)[None], normed[:1], model.classifier.weight, model.classifier.bias
    )
    R = torch.zeros_like(tokens)
    R[:1] = by_hand.layer_norm(R_cls, tokens[:1], model.norm.weight, model.norm.bias, model.norm.eps)
    for back in reversed(backs[1:]):
        R = back(R)
    basis = torch.eye(grid.numel(), dtype=torch.float64).reshape(-1, 8, edge, edge)
    matrix = basis + sum(F.conv2d(basis, conv.weight, padding=conv.padding, groups=8) for conv in convs)
    bias = sum(conv.bias for conv in convs).reshape(8, 1, 1).expand(8, edge, edge).flatten()
    R_grid = by_hand.dense(R[1:].T.flatten(), matrix.flatten(1) * grid.flatten().unsqueeze(1), bias)
    R = torch.cat([R[:1], R_grid.reshape(8, -1).T])
    assert before_ppeg.shape == R.shape
    R = backs[0](R)
    R_h = R[1 : n + 1].clone()
    R_h[:extra] += R[n + 1 :]
    torch.testing.assert_close(
        engine_relevance(model, x, c), by_hand.rows(R_h, x, fc.weight, fc.bias), **CLOSE
    )
