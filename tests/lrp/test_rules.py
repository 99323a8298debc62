"""Each rule against a slow version written from its formula, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lrp import by_hand
from xmil.lrp import AffineRule, Composite, Relevance, trace

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


class Calls(nn.Module):
    """A module that is one function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def relevance_of(
    function: Callable[[Tensor], Tensor], x: Tensor, *, seed: Tensor, composite: Composite | None = None
) -> Relevance:
    """Relevance of sum(seed * function(x)); the flattened output stands for the logits."""
    module = Calls(function)
    traced = trace(lambda v: module(v).reshape(1, -1), x, module=module, composite=composite)
    assert torch.equal(traced.logits, function(x).reshape(1, -1)), "the rule changed a forward value"
    return traced.relevance(lambda logits: (logits * seed.reshape(1, -1)).sum(dim=-1))


def closes(found: Relevance) -> bool:
    total = found.input.features.sum() + sum(found.shares.values())
    return bool(torch.isclose(total, found.output.sum(), rtol=1e-9, atol=1e-9))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    eps=st.sampled_from([0.0, 1e-8, 1e-3, 0.5]),
    gamma=st.sampled_from([0.0, 0.1, 2.0]),
    absorb=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_linear(eps: float, gamma: float, absorb: bool, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    if not absorb and eps == 0:
        eps = 1e-6
    a, w, b = normal(5), normal(3, 5), normal(3) if biased else None
    g = normal(3)
    rule = AffineRule(eps, gamma, "absorb" if absorb else "redistribute")
    found = relevance_of(lambda x: F.linear(x, w, b), a[None], seed=g, composite=Composite(default=rule))
    R = g * F.linear(a, w, b)
    expected = by_hand.linear(R, a, w, b, eps=eps, gamma=gamma, absorb=absorb)
    torch.testing.assert_close(found.input.features[0], expected, rtol=1e-8, atol=1e-10)
    assert closes(found)


@pytest.mark.parametrize(
    "rule", [AffineRule(), AffineRule(1e-3), AffineRule(1e-3, 0.2), AffineRule(1e-3, 0.0, "redistribute")]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_is_a_linear_layer(rule: AffineRule, dims: int) -> None:
    size = (4,) * dims
    x, w, b = normal(1, 2, *size), normal(4, 1, *(3,) * dims), normal(4)
    conv = getattr(F, f"conv{dims}d")
    g = normal(*conv(x, w, b, padding=1, groups=2).shape)
    found = relevance_of(
        lambda v: conv(v, w, b, padding=1, groups=2), x, seed=g, composite=Composite(default=rule)
    )
    basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape[1:])
    matrix = conv(basis, w, padding=1, groups=2).flatten(1).T  # (outputs, inputs)
    bias = b.reshape(-1, *[1] * dims).expand(g.shape[1:]).flatten()
    R = (g * conv(x, w, b, padding=1, groups=2)).flatten()
    expected = by_hand.linear(
        R, x.flatten(), matrix, bias, eps=rule.epsilon, gamma=rule.gamma, absorb=rule.bias == "absorb"
    )
    torch.testing.assert_close(found.input.features.flatten(), expected, **TIGHT)
    assert closes(found)


@pytest.mark.parametrize(
    "rule", [AffineRule(), AffineRule(1e-3), AffineRule(1e-3, 0.2), AffineRule(1e-3, 0.0, "redistribute")]
)
def test_batch_norm_in_eval_is_affine(rule: AffineRule) -> None:
    x, mean, var, w, b = normal(4, 3), normal(3), normal(3).abs() + 0.1, normal(3), normal(3)
    g = normal(4, 3)
    found = relevance_of(
        lambda v: F.batch_norm(v, mean, var, w, b), x, seed=g, composite=Composite(default=rule)
    )
    scale = w / torch.sqrt(var + 1e-5)
    shift = b - mean * scale
    R = g * (x * scale + shift)
    expected = torch.stack(
        [
            by_hand.linear(
                R[k], x[k], torch.diag(scale), shift, eps=rule.epsilon, absorb=rule.bias == "absorb"
            )
            for k in range(4)
        ]
    )
    torch.testing.assert_close(found.input.features, expected, rtol=1e-7, atol=1e-9)
    assert closes(found)


def test_layer_norm() -> None:
    x, w, b, g = normal(4, 6), normal(6), normal(6), normal(4, 6)
    found = relevance_of(lambda v: F.layer_norm(v, (6,), w, b), x, seed=g)
    R = g * F.layer_norm(x, (6,), w, b)
    torch.testing.assert_close(found.input.features, by_hand.layer_norm(R, x, w, b, 1e-5), **TIGHT)
    assert closes(found)


def test_group_norm_is_layer_norm_over_groups() -> None:
    x, w, b, g = normal(2, 4, 3), normal(4), normal(4), normal(2, 4, 3)
    found = relevance_of(lambda v: F.group_norm(v, 2, w, b), x, seed=g)
    wide = lambda t: t.unsqueeze(-1).expand(-1, 3).reshape(2, 6)  # noqa: E731  # per group
    R = (g * F.group_norm(x, 2, w, b)).reshape(2, 2, 6)
    expected = torch.stack(
        [
            torch.cat(
                [
                    by_hand.layer_norm(
                        R[k, i : i + 1], x.reshape(2, 2, 6)[k, i : i + 1], wide(w)[i], wide(b)[i], 1e-5
                    )
                    for i in (0, 1)
                ]
            )
            for k in (0, 1)
        ]
    )
    torch.testing.assert_close(found.input.features.reshape(2, 2, 6), expected, **TIGHT)
    assert closes(found)


def test_instance_norm_is_group_norm_of_single_channels() -> None:
    x, w, b, g = normal(2, 4, 5), normal(4), normal(4), normal(2, 4, 5)
    one = relevance_of(lambda v: F.instance_norm(v, weight=w, bias=b), x, seed=g)
    other = relevance_of(lambda v: F.group_norm(v, 4, w, b), x, seed=g)
    torch.testing.assert_close(one.input.features, other.input.features, **TIGHT)
    assert closes(one)


def test_rms_norm_passes_relevance_unchanged() -> None:
    x, w, g = normal(4, 6), normal(6), normal(4, 6)
    found = relevance_of(lambda v: F.rms_norm(v, (6,), w), x, seed=g)
    torch.testing.assert_close(found.input.features, g * F.rms_norm(x, (6,), w), **TIGHT)


def test_hand_written_norms_are_the_same_rule() -> None:
    x, g = normal(4, 6), normal(4, 6)
    one = relevance_of(lambda v: F.layer_norm(v, (6,)), x, seed=g)

    def by_the_book(v: Tensor) -> Tensor:
        centred = v - v.mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(v.var(dim=-1, unbiased=False, keepdim=True) + 1e-5)

    other = relevance_of(by_the_book, x, seed=g)
    torch.testing.assert_close(one.input.features, other.input.features, **TIGHT)
    rms = relevance_of(lambda v: v / torch.sqrt(v.pow(2).mean(-1, keepdim=True)), x, seed=g)
    torch.testing.assert_close(
        rms.input.features, g * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True)), **TIGHT
    )
    unit = relevance_of(lambda v: F.normalize(v, dim=-1), x, seed=g)
    torch.testing.assert_close(unit.input.features, g * F.normalize(x, dim=-1), **TIGHT)


@pytest.mark.parametrize(
    "function", [torch.tanh, torch.sigmoid, F.gelu, F.silu, F.elu, F.softplus, F.hardswish, F.mish]
)
def test_smooth_activations(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([normal(1, 8), torch.zeros(1, 1, dtype=torch.float64)], dim=1)
    g = normal(1, 9)
    found = relevance_of(function, x, seed=g)
    at_zero = function(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(found.input.features, g * (function(x) - at_zero), **TIGHT)
    assert found.shares["bias"] == pytest.approx(float((at_zero * g).sum()))
    assert closes(found)


@pytest.mark.parametrize(
    ("function", "zero", "slope"),
    [
        (torch.log, 1.0, 1.0),
        (torch.log2, 1.0, 1 / math.log(2)),
        (torch.log10, 1.0, 1 / math.log(10)),
        (torch.logit, 0.5, 4.0),
        (lambda p: torch.special.logit(p, eps=1e-6), 0.5, 4.0),
    ],
)
def test_logarithms_are_measured_from_where_they_are_zero(
    function: Callable[[Tensor], Tensor], zero: float, slope: float
) -> None:
    """R(x) = x f(x) / (x - a) R, and the constant a keeps the rest."""
    x = torch.cat([torch.rand(1, 8, dtype=torch.float64) * 0.9 + 0.05, torch.full((1, 1), zero)], dim=1)
    g = normal(1, 9)
    found = relevance_of(function, x, seed=g)
    expected = torch.empty(9, dtype=torch.float64)
    for i, value in enumerate(x[0].tolist()):
        f = float(function(x[:, i]))
        expected[i] = g[0, i] * value * (slope if value == zero else f / (value - zero))
    torch.testing.assert_close(found.input.features[0], expected, **TIGHT)
    assert found.shares["cut"] == 0
    assert closes(found)


def test_log_undoes_exp_and_logit_the_sigmoid() -> None:
    x, g = normal(3, 5), normal(3, 5)
    for function in (lambda v: v.exp().log(), lambda v: torch.logit(torch.sigmoid(v))):
        found = relevance_of(function, x, seed=g)
        torch.testing.assert_close(found.input.features, g * x, **TIGHT)
        assert sum(found.shares.values()) == pytest.approx(0, abs=1e-12)


def softmax_by_hand(x: list[float]) -> list[float]:
    top = max(x)
    total = sum(math.exp(value - top) for value in x)
    return [math.exp(value - top) / total for value in x]


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0])
def test_logsumexp_is_a_weighted_sum(scale: float, shift: float) -> None:
    """sum(p x) + H(p): the values get their softmax weights, and the entropy is cut."""
    x, g = normal(3, 5) * scale + shift, normal(3)
    found = relevance_of(lambda v: torch.logsumexp(v, dim=-1), x, seed=g)
    entropy = 0.0
    for i, row in enumerate(x.tolist()):
        weights = softmax_by_hand(row)
        expected = torch.tensor([float(g[i]) * p * v for p, v in zip(weights, row, strict=True)])
        torch.testing.assert_close(found.input.features[i], expected.double(), rtol=1e-6, atol=1e-6)
        entropy += float(g[i]) * -sum(p * math.log(p) for p in weights if p > 0)
    assert found.shares["cut"] == pytest.approx(entropy, abs=1e-9)
    assert found.shares["bias"] == 0
    assert closes(found)


def test_logsumexp_forms_agree() -> None:
    x, g = normal(3, 5), normal(3)
    plain = relevance_of(lambda v: torch.logsumexp(v, dim=1), x, seed=g)
    for function in (
        lambda v: v.logsumexp(1, keepdim=True),
        lambda v: torch.special.logsumexp(v, (1,)),
        lambda v: torch.logsumexp(F.pad(v, (0, 2), value=-math.inf), 1),
    ):
        other = relevance_of(function, x, seed=g)
        torch.testing.assert_close(other.input.features, plain.input.features, **TIGHT)
        assert closes(other)
    two = relevance_of(lambda v: torch.logaddexp(v[:, 0], v[:, 1]), x[:, :2], seed=g)
    same = relevance_of(lambda v: torch.logsumexp(v, dim=1), x[:, :2], seed=g)
    torch.testing.assert_close(two.input.features, same.input.features, **TIGHT)


@pytest.mark.parametrize(
    "function", [lambda v: F.log_softmax(v, dim=-1), lambda v: torch.special.log_softmax(v, -1)]
)
def test_log_softmax_is_a_value_less_a_weighted_sum(function: Callable[[Tensor], Tensor]) -> None:
    x, g = normal(2, 4), normal(2, 4)
    found = relevance_of(function, x, seed=g)
    for i, row in enumerate(x.tolist()):
        weights, total = softmax_by_hand(row), float(g[i].sum())
        expected = [
            v * (float(g[i, j]) - p * total) for j, (v, p) in enumerate(zip(row, weights, strict=True))
        ]
        torch.testing.assert_close(
            found.input.features[i], torch.tensor(expected).double(), rtol=1e-6, atol=1e-6
        )
    assert closes(found)


def test_a_running_product_shares_alike() -> None:
    """As the survival curve of hazards: y_k goes in k equal parts to its factors."""
    x, g = normal(2, 5), normal(2, 5)
    found = relevance_of(lambda v: torch.cumprod(v, dim=1), x, seed=g)
    y = x.cumprod(dim=1)
    expected = torch.zeros_like(x)
    for k in range(5):
        expected[:, : k + 1] += (g[:, k] * y[:, k] / (k + 1)).unsqueeze(1)
    torch.testing.assert_close(found.input.features, expected, **TIGHT)


def test_a_learned_power_is_one() -> None:
    """The generalised mean, whose exponent is a parameter, has the rule of the same number."""
    x, g, p = normal(6, 3).abs() + 0.1, normal(3), torch.tensor(2.5, dtype=torch.float64)
    learned = relevance_of(lambda v: v.pow(p).mean(0).pow(1 / p), x, seed=g)
    number = relevance_of(lambda v: v.pow(2.5).mean(0).pow(0.4), x, seed=g)
    torch.testing.assert_close(learned.input.features, number.input.features, **TIGHT)
    each = relevance_of(lambda v: v ** torch.tensor([1.0, 2.0, 0.5]).double(), x, seed=normal(6, 3))
    assert closes(each)
    normal_of = relevance_of(lambda v: v * (v + 1) ** -p, x, seed=normal(6, 3))
    assert closes(normal_of)


@pytest.mark.parametrize(
    "function",
    [
        lambda v: torch.cov(v),
        lambda v: torch.corrcoef(v),
        lambda v: F.grid_sample(v.reshape(1, 1, 3, 5), torch.zeros(1, 2, 2, 2).double(), align_corners=False),
        lambda v: torch.acos(v.tanh()),
        lambda v: torch.div(v, 0.3, rounding_mode="floor") + v,
    ],
)
def test_more_operations_of_the_field_close(function: Callable[[Tensor], Tensor]) -> None:
    x = normal(3, 5)
    assert closes(relevance_of(function, x, seed=normal(*function(x).shape)))


@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        lambda x: F.leaky_relu(x, 0.2),
        torch.abs,
        lambda x: x.amax(-1),
        lambda x: x.topk(2).values,
        lambda x: x.norm(dim=-1),
    ],
)
def test_homogeneous_operations_conserve(function: Callable[[Tensor], Tensor]) -> None:
    x = normal(3, 5)
    found = relevance_of(function, x, seed=normal(*function(x).shape))
    assert closes(found)
    assert all(share == 0 for share in found.shares.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: F.relu6(x * 5),
        lambda x: torch.maximum(x, torch.full_like(x, 0.3)),
        lambda x: torch.max(torch.full_like(x, 0.3), x),
        lambda x: torch.where(x > 0.3, x, torch.tensor(0.3, dtype=x.dtype)),
        lambda x: x.masked_fill(x > 0.3, 2.0),
        lambda x: F.pad(x, (1, 1), value=3.0),
        lambda x: 2.0 - x,
        lambda x: x - 2.0,
        lambda x: torch.sub(x, torch.ones_like(x), alpha=3),
        lambda x: x.square() + x.sqrt().nan_to_num() + x**3,
        lambda x: torch.stack([x, torch.ones_like(x)]),
        lambda x: torch.addmm(torch.ones(5, dtype=x.dtype), x, torch.eye(5, dtype=x.dtype)),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x.clone().add_(1.5).mul_(2.0).relu_(),
    ],
)
def test_constants_are_booked(function: Callable[[Tensor], Tensor]) -> None:
    x = normal(3, 5).abs() + 0.01
    assert closes(relevance_of(function, x, seed=normal(*function(x).shape)))


def test_writing_into_a_buffer() -> None:
    def fill(x: Tensor) -> Tensor:
        buffer = torch.full((3, 6), 7.0, dtype=x.dtype)
        buffer[:, 1:] = x
        buffer[:, 2] = 4.0
        return buffer

    x, g = normal(3, 5), normal(3, 6)
    found = relevance_of(fill, x, seed=g)
    kept = torch.cat(
        [torch.full((3, 1), 7.0), torch.zeros(3, 1), torch.full((3, 1), 4.0), torch.zeros(3, 3)], 1
    )
    assert found.shares["bias"] == pytest.approx(float((kept * g).sum()))
    assert closes(found)


def test_gates() -> None:
    x, g = normal(1, 6), normal(1, 3)

    def gated(v: Tensor) -> Tensor:
        return v[:, :3] * torch.sigmoid(v[:, 3:])

    signal = relevance_of(gated, x, seed=g)
    R = g * gated(x)
    torch.testing.assert_close(signal.input.features, torch.cat([R, torch.zeros_like(R)], dim=1), **TIGHT)
    shared = relevance_of(gated, x, seed=g, composite=Composite(gates="uniform"))
    gate = torch.sigmoid(x[:, 3:])
    expected = torch.cat([R / 2, R / 2 * (gate - 0.5) / gate], dim=1)
    torch.testing.assert_close(shared.input.features, expected, **TIGHT)
    assert closes(signal)
    assert closes(shared)


def test_product_of_live_tensors_in_halves() -> None:
    x, g = normal(1, 6), normal(1, 3)
    found = relevance_of(lambda v: v[:, :3] * torch.tanh(v[:, 3:]), x, seed=g)
    R = g * x[:, :3] * torch.tanh(x[:, 3:])
    torch.testing.assert_close(found.input.features, torch.cat([R / 2, R / 2], dim=1), **TIGHT)


@pytest.mark.parametrize("shape", [(5, 7), (40, 3)])
def test_attention_rule(shape: tuple[int, int]) -> None:
    n_q, n_k = shape
    q, k, v, g = normal(1, 1, n_q, 4), normal(1, 1, n_k, 4), normal(1, 1, n_k, 4), normal(n_q, 4)
    p = torch.softmax(q @ k.mT / 2, dim=-1)[0, 0]
    expected = by_hand.attention(g * (p @ v[0, 0]), v[0, 0], p)
    fused = relevance_of(lambda t: F.scaled_dot_product_attention(q, k, t), v, seed=g)
    plain = relevance_of(lambda t: torch.softmax(q @ k.mT / 2, dim=-1) @ t, v, seed=g)
    torch.testing.assert_close(fused.input.features[0, 0], expected, **TIGHT)
    torch.testing.assert_close(plain.input.features[0, 0], expected, **TIGHT)


def test_attention_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from xmil.lrp.rules import attention as rule

    x = normal(1, 2, 50, 4)
    mask = torch.zeros(1, 1, 1, 50, dtype=torch.float64)
    mask[..., 3] = 0.7
    for q in (x[:, :, :9], x):
        seed = torch.ones(q.shape, dtype=torch.float64)
        attend = partial(F.scaled_dot_product_attention, q, x, attn_mask=mask)
        whole = relevance_of(attend, x, seed=seed)
        monkeypatch.setattr(rule, "BLOCK_ELEMENTS", 40)
        torch.testing.assert_close(
            relevance_of(attend, x, seed=seed).input.features, whole.input.features, **TIGHT
        )
        monkeypatch.undo()


@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}, {"batch_first": True}]
)
def test_multi_head_attention(options: dict[str, bool]) -> None:
    layer = nn.MultiheadAttention(8, 2, **options).double().requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, g = normal(5, 1, 8), normal(5, 1, 8)
    if options.get("batch_first"):
        x, g = x.transpose(0, 1), g.transpose(0, 1)
    found = relevance_of(lambda v: layer(v, v, v, need_weights=False)[0], x, seed=g)
    flat, R = x.reshape(5, 8), (g * layer(x, x, x)[0]).reshape(5, 8)
    _, p = layer(x, x, x, need_weights=True, average_attn_weights=False)
    w_v, b_v = layer.in_proj_weight[16:], None if layer.in_proj_bias is None else layer.in_proj_bias[16:]
    v = F.linear(flat, w_v, b_v)
    extra = [layer.bias_v[0]] if layer.bias_v is not None else []
    extra += [torch.zeros(1, 8).double()] if layer.add_zero_attn else []
    tokens = torch.cat([v, *extra])
    mixed = torch.cat([p[0, h] @ tokens[:, 4 * h : 4 * h + 4] for h in (0, 1)], dim=1)
    R = by_hand.rows(R, mixed, layer.out_proj.weight, layer.out_proj.bias)
    R = torch.cat(
        [by_hand.attention(R[:, 4 * h : 4 * h + 4], tokens[:, 4 * h : 4 * h + 4], p[0, h]) for h in (0, 1)],
        dim=1,
    )
    expected = by_hand.rows(R[:5], flat, w_v, b_v)
    torch.testing.assert_close(found.input.features.reshape(5, 8), expected, rtol=1e-8, atol=1e-10)
    assert closes(found)


def test_masked_attention_conserves() -> None:
    layer = nn.MultiheadAttention(8, 2).double().requires_grad_(False)
    hidden = torch.tensor([[False, False, True, False, False]])
    x = normal(5, 1, 8)
    found = relevance_of(lambda v: layer(v, v, v, key_padding_mask=hidden)[0], x, seed=normal(5, 1, 8))
    assert closes(found)
    assert found.input.features[2].abs().max() == 0
