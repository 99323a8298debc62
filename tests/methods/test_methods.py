"""Methods against the plain way of computing them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xmil
from xmil.core.errors import XmilError
from xmil.models import TransMIL


def double_model(name: str, **params: object) -> xmil.models.MILModel:
    return xmil.create_model(name, in_dim=6, n_classes=3, seed=5, **params).double()


def probability(model: torch.nn.Module, x: torch.Tensor, c: int) -> float:
    with torch.no_grad():
        return float(model(x[None]).softmax(-1)[0, c])


@pytest.mark.parametrize("name", xmil.list_models())
@pytest.mark.parametrize("small", [True, False])
def test_removals_equal_the_loop(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmil.subsets.engine.SMALL", 200 if small else 0)
    model = double_model(name, **({"dim": 16} if name == "transmil" else {}))
    x = torch.randn(11, 6, dtype=torch.float64)
    whole = probability(model, x, 1)
    removed = [whole - probability(model, torch.cat([x[:k], x[k + 1 :]]), 1) for k in range(11)]
    alone = [probability(model, x[k : k + 1], 1) for k in range(11)]
    for method, expected in (
        ("one_removed", removed),
        ("single", alone),
        ("combined", np.add(removed, alone) / 2),
    ):
        e = xmil.explain(model, x, method=method, target=1)
        np.testing.assert_allclose(e.scores, expected, rtol=1e-5, atol=1e-7)
        assert e.output == pytest.approx(whole)


def test_a_dominant_instance_is_removed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmil.subsets.engine.SMALL", 0)
    model = double_model("attnmil", dim=8)
    x = torch.randn(11, 6, dtype=torch.float64)
    x[3] *= 1e4
    model.attention.V.weight.data = model.attention.V.weight.data.abs()
    model.attention.w.weight.data = model.attention.w.weight.data.abs() * 100
    e = xmil.explain(model, x, method="one_removed", target=1, output="logit")
    with torch.no_grad():
        expected = model(x[None])[0, 1] - model(torch.cat([x[:3], x[4:]])[None])[0, 1]
    assert e.scores[3] == pytest.approx(float(expected), rel=1e-5)


def test_singles_of_transmil_match_a_loop_in_float32() -> None:
    model = xmil.create_model("transmil", in_dim=6, n_classes=2, dim=64, seed=0)
    x = torch.randn(50, 6)
    e = xmil.explain(model, x, method="single", target=1)
    np.testing.assert_allclose(e.scores, [probability(model, x[k : k + 1], 1) for k in range(50)], atol=1e-5)


def test_gradients_equal_finite_differences() -> None:
    model, x = double_model("attnmil", dim=8), torch.randn(4, 6, dtype=torch.float64)
    gradient = torch.zeros_like(x)
    for k in range(4):
        for d in range(6):
            step = torch.zeros_like(x)
            step[k, d] = 1e-6
            with torch.no_grad():
                gradient[k, d] = (model((x + step)[None]) - model((x - step)[None]))[0, 2] / 2e-6
    for method, expected in (("gxi", gradient * x), ("grad2", gradient**2)):
        e = xmil.explain(model, x, method=method, target=2)
        np.testing.assert_allclose(e.scores, expected.sum(1), rtol=1e-4, atol=1e-7)


def test_integrated_gradients_close_with_steps() -> None:
    model, x = double_model("attnmil", dim=8), torch.randn(9, 6)
    gaps = [abs(xmil.explain(model, x, method="ig", target=0, steps=s).audit.other) for s in (2, 100)]  # type: ignore[union-attr]
    assert gaps[1] < gaps[0] / 10
    e = xmil.explain(model, x, method="ig", target=0)
    with torch.no_grad():
        assert e.audit is not None
        assert e.audit.bias == pytest.approx(float(model(torch.zeros(1, 9, 6).double())[0, 0]), abs=1e-6)


def dense_attention(model: TransMIL, x: torch.Tensor) -> list[torch.Tensor]:
    """Each layer's attention over the padded sequence (heads, N, N), written out."""
    found: list[tuple[torch.nn.Module, torch.Tensor]] = []
    keep = lambda attn, args: found.append((attn, args[0][0]))  # noqa: E731
    handles = [layer.attn.register_forward_pre_hook(keep) for layer in model.layers]
    with torch.no_grad():
        model(x[None])
        matrices = []
        for attn, tokens in found:
            m = getattr(attn, "n_landmarks", 1)
            padded = F.pad(tokens, (0, 0, -len(tokens) % m, 0))
            q, k, _ = (
                t.reshape(len(padded), attn.heads, -1).transpose(0, 1)
                for t in attn.to_qkv(padded).chunk(3, -1)
            )
            q = q / q.shape[-1] ** 0.5
            if not hasattr(attn, "n_landmarks"):
                matrices.append(torch.softmax(q @ k.mT, -1))
                continue
            q_l, k_l = (t.reshape(attn.heads, m, -1, t.shape[-1]).mean(2) for t in (q, k))
            a1, a2, a3 = (torch.softmax(a @ b.mT, -1) for a, b in ((q, k_l), (q_l, k_l), (q_l, k)))
            z = a2.mT / (a2.sum(-1).max() * a2.sum(-2).max())
            eye = torch.eye(m, dtype=x.dtype)
            for _ in range(attn.pinv_iterations):
                z = 0.25 * z @ (13 * eye - a2 @ z @ (15 * eye - a2 @ z @ (7 * eye - a2 @ z)))
            matrices.append(a1 @ z @ a3)
    for handle in handles:
        handle.remove()
    return matrices


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize("kind", [{}, {"landmarks": 64}, {"attention": "dot_product"}, {"n_layers": 3}])
@pytest.mark.parametrize("normalise", [False, True])
def test_rollout_equals_the_dense_product(heads: str, kind: dict[str, object], normalise: bool) -> None:
    model = double_model("transmil", dim=16, **kind)
    x = torch.randn(14, 6, dtype=torch.float64)
    fuse = {"mean": lambda a: a.mean(0), "max": lambda a: a.amax(0), "min": lambda a: a.amin(0)}[heads]
    fused = [fuse(a) for a in dense_attention(model, x)]
    n_tokens = 17  # the class token and a square of 16
    skip = len(fused[0]) - n_tokens
    product = torch.eye(len(fused[0]), dtype=torch.float64)
    for a in fused:  # later layers on the left
        step = 0.5 * a + 0.5 * torch.eye(len(a), dtype=torch.float64)
        product = (step / step.sum(-1, keepdim=True) if normalise else step) @ product

    def instances(row: torch.Tensor) -> torch.Tensor:
        scores = row[skip + 1 : skip + 15].clone()
        scores[:2] += row[skip + 15 :]
        return scores

    e = xmil.explain(model, x, method="attention", heads=heads, normalise=normalise)
    np.testing.assert_allclose(e.scores, instances(product[skip]), rtol=1e-4, atol=1e-7)
    for layer in (0, -1):
        last = fused[layer][skip] / (fused[layer][skip].sum() if normalise else 1)
        e = xmil.explain(model, x, method="attention", layer=layer, heads=heads, normalise=normalise)
        np.testing.assert_allclose(e.scores, instances(last), rtol=1e-4, atol=1e-7)


def test_attention_of_the_class_branch() -> None:
    model, x = double_model("clam_mb", dim=8), torch.randn(9, 6, dtype=torch.float64)
    with torch.no_grad():
        weights = torch.softmax(model.attend(model.embed(x[None])), dim=1)[0]
    for c in range(3):
        np.testing.assert_allclose(
            xmil.explain(model, x, method="attention", target=c).scores, weights[:, c], rtol=1e-5
        )


def test_milli_recovers_an_additive_model() -> None:
    """Where the output is a constant plus a sum over present instances, the fit is exact."""

    class Additive(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[..., 0].sum(1), x[..., 1].sum(1)], dim=-1)

    x = torch.randn(8, 6)
    e = xmil.explain(Additive(), x, method="milli", target=1, output="logit", samples=300, seed=3)
    np.testing.assert_allclose(e.scores, x[:, 1], rtol=1e-3, atol=1e-4)


def test_milli_takes_a_seed() -> None:
    model, x = double_model("meanpool"), torch.randn(8, 6)
    one, same, other = (
        xmil.explain(model, x, method="milli", target=1, samples=20, seed=s).scores for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_random_takes_a_seed() -> None:
    model, x = double_model("meanpool"), torch.randn(200, 6)
    one, same, other = (xmil.explain(model, x, method="random", seed=s).scores for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert abs(one.mean()) < 0.3
    assert 0.8 < one.std() < 1.2


def test_outputs() -> None:
    model, x = double_model("attnmil", dim=8), torch.randn(9, 6)
    logits = xmil.explain(model, x, target=0).logits.astype(float)
    z = logits[0] - logits[1:]
    p = np.exp(-z) / np.exp(-z).sum()
    expected = {
        "logit": logits[0],
        "contrastive": (z * p).sum(),
        "log_odds": -np.log(np.exp(-z).sum()),
        "probability": np.exp(logits[0]) / np.exp(logits).sum(),
    }
    for output, value in expected.items():
        e = xmil.explain(model, x, target=0, output=output)
        assert e.output == pytest.approx(value, rel=1e-5)
        assert e.audit is not None
        assert abs(e.audit.other) < 1e-5
    pair = xmil.explain(model, x, target=xmil.Target(0, against=2))
    assert pair.output == pytest.approx(logits[0] - logits[2], rel=1e-5)
    one = xmil.explain(model, x, target=xmil.Target(0, against=2), output="contrastive")
    assert one.output == pytest.approx(z[1] * p[1], rel=1e-5)
    zero, two = (xmil.explain(model, x, target=c).scores for c in (0, 2))
    np.testing.assert_allclose(pair.scores, zero - two, rtol=1e-4, atol=1e-6)


def test_single_logit_means_sigmoid() -> None:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=1, seed=0, class_names=["no", "yes"])
    x = torch.randn(9, 6)
    yes, no = xmil.explain_classes(model, x)[::-1]
    assert (str(no.target), str(yes.target)) == ("no", "yes")
    np.testing.assert_allclose(yes.scores, -no.scores)
    assert yes.output == pytest.approx(float(yes.logits[0]))
    for output in ("log_odds", "contrastive"):
        assert xmil.explain(model, x, target="yes", output=output).output == pytest.approx(
            yes.output, rel=1e-5
        )
    p = xmil.explain(model, x, method="gxi", target="yes", output="probability").output
    assert p == pytest.approx(1 / (1 + np.exp(-yes.output)), rel=1e-5)


def test_multi_label_means_a_sigmoid_per_class() -> None:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=3, seed=0, task="multilabel")
    x = torch.randn(9, 6)
    e = xmil.explain(model, x, method="single", target=2)
    assert e.output == pytest.approx(1 / (1 + np.exp(-float(e.logits[2]))), rel=1e-5)
    with pytest.raises(XmilError, match="multilabel"):
        xmil.explain(model, x, target=2, output="contrastive")


def test_predicted_class_is_the_default_target() -> None:
    model, x = double_model("attnmil", dim=8), torch.randn(9, 6)
    for method in ("lrp", "gxi", "single", "attention"):
        e = xmil.explain(model, x, method=method)
        assert e.target == int(e.logits.argmax())


def test_positions_as_a_constant() -> None:
    """`detach_pe`: relevance passes PPEG by, as if its convolutions were numbers added to the instances."""
    model = double_model("transmil", dim=16)
    x = torch.randn(7, 6, dtype=torch.float64)
    e = xmil.explain(model, x, method="lrp", target=1, detach_pe=True)
    plain = xmil.explain(model, x, method="lrp", target=1)
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-6
    assert e.audit.cut != 0.0
    assert np.abs(e.scores - plain.scores).max() > 1e-4
    ppeg, forward = type(model.ppeg), type(model.ppeg).forward

    def detached(self, tokens, edge):
        return tokens + (forward(self, tokens, edge) - tokens).detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppeg, "forward", detached)
        by_hand = xmil.explain(model, x, method="lrp", target=1)
    np.testing.assert_allclose(e.scores, by_hand.scores, rtol=1e-5, atol=1e-7)
    with pytest.raises(xmil.XmilError, match=r"detach_pe .* PPEG"):
        xmil.explain(double_model("attnmil"), x, detach_pe=True)
