"""Foreign modules as the field writes them run without `forward=`: patterns of calls and returns."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, XmilError

N, D = 9, 6
Result = namedtuple("Result", "attention logits")


class Base(nn.Module):
    """Gated attention over (n, d) or (1, n, d); logits (1, 2) and attention (1, n)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.head = nn.Linear(D, 1), nn.Linear(D, 2)

    def pool(self, h: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.score(h).softmax(dim=-2).mT
        return self.head(weights @ h).reshape(1, 2), weights.reshape(1, -1)


def flat(h: Tensor) -> Tensor:
    if h.ndim != 2:
        raise ValueError("patches by features, please")
    return h


class Clam(Base):
    def forward(self, h, label=None, instance_eval=False):
        logits, weights = self.pool(flat(h))
        return logits, logits.softmax(dim=1), logits.topk(1, dim=1)[1], weights, {}


class TransMilStyle(Base):
    def forward(self, **kwargs):
        logits, _ = self.pool(kwargs["data"].float())
        return {"logits": logits, "Y_prob": logits.softmax(dim=1), "Y_hat": logits.argmax(dim=1)}


class MilLab(Base):
    def forward(self, h, loss_fn=None, label=None, return_attention=False):
        logits, weights = self.pool(h)
        return {"logits": logits, "loss": torch.tensor(0.5)}, {"attention": weights}


class TakesDict(Base):
    def forward(self, data):
        x, mask = data["features"], data.get("mask")
        assert mask is None
        return SimpleNamespace(bag_logits=self.pool(x)[0])


class TakesGraph(Base):
    def forward(self, data):
        x, edges = flat(data.x), data.edge_index
        near = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return self.pool(x + near + 0 * data.batch.unsqueeze(1))[0]


class NeedsCoords(Base):
    def forward(self, bags, *, coords, mask):
        assert mask is None
        assert coords.dtype == torch.int64
        return self.pool(bags + coords.sum(dim=-1, keepdim=True) / 1000)[0]


class NeedsGraph(Base):
    def forward(self, X, adj, mask=None):
        return self.pool(X + adj @ X)[0].squeeze(0)


class Named(Base):
    def forward(self, x):
        logits, weights = self.pool(x)
        return Result(weights, logits)


class Dsmil(Base):
    def forward(self, x):
        x = flat(x)
        return self.head(x), self.pool(x)[0], self.score(x), x.unsqueeze(0)


class Scalar(Base):
    def forward(self, x):
        return self.pool(x)[0][0, 1] - self.pool(x)[0][0, 0]


CALLS = {
    Clam: "net(x[0])[0]",
    TransMilStyle: "net(data=x)['logits']",
    MilLab: "net(x)[0]['logits']",
    TakesDict: "net(data) with data['x'] or data.x of shape (1, n, d).bag_logits",
    TakesGraph: "net(data) with data['x'] or data.x of shape (n, d)",
    NeedsCoords: "net(x, coords=coords, mask=None)",
    NeedsGraph: "net(x, adj=adjacency)",
    Named: "net(x).logits",
    Dsmil: "net(x[0])[1]",
    Scalar: None,
}


def bag() -> xmil.Bag:
    rng = np.random.default_rng(0)
    joined = (rng.random((N, N)) < 0.3).astype(np.float32)
    coords = rng.integers(0, 4000, size=(N, 2))
    return xmil.Bag(rng.normal(size=(N, D)), coords=coords, extras={"adjacency": joined})


def by_hand(net: nn.Module, rows: np.ndarray) -> np.ndarray:
    part = bag().select(rows)
    x = torch.from_numpy(part.features)
    if isinstance(net, TakesGraph | NeedsGraph):
        joined = torch.from_numpy(part.extras["adjacency"])
        x = x + (joined.T @ x if isinstance(net, TakesGraph) else joined @ x)
    if isinstance(net, NeedsCoords):
        x = x + torch.from_numpy(part.coords).sum(dim=-1, keepdim=True) / 1000
    with torch.no_grad():
        logits = net.pool(x)[0][0].numpy()
    return logits[1:] - logits[:1] if isinstance(net, Scalar) else logits


@pytest.mark.parametrize("kind", CALLS)
def test_called_and_read_without_a_word_from_the_user(kind: type[Base]) -> None:
    net, rows = kind().eval(), np.arange(N)
    column = 0 if kind is Scalar else 1
    e = xmil.explain(net, bag(), method="one_removed", target=1, output="logit")
    np.testing.assert_allclose(e.logits, by_hand(net, rows), atol=1e-5)
    assert e.params.get("call") == CALLS[kind]
    full = by_hand(net, rows)[column]
    expected = [full - by_hand(net, np.delete(rows, k))[column] for k in rows]
    np.testing.assert_allclose(e.scores, expected, atol=1e-5)
    for method in ("lrp", "single", "gxi"):
        assert np.isfinite(xmil.explain(net, bag(), method=method, target=1).scores).all()
    curve = xmil.flip(net, bag(), e)
    logits = torch.from_numpy(by_hand(net, rows))
    first = torch.sigmoid(logits[0]) if kind is Scalar else logits.softmax(dim=0)[1]
    assert curve.values[0] == pytest.approx(float(first), abs=1e-6)


class RealCoords(Base):
    """Wants real coordinates, as type-checked code does."""

    def forward(self, bags, *, coords, mask):
        assert coords.is_floating_point()
        return self.pool(bags + coords.sum(dim=-1, keepdim=True) / 1000)[0]


class WantsMask(Base):
    """True marks real instances; None is not allowed."""

    def forward(self, X, mask=None):
        return self.pool(X.masked_fill(~mask.unsqueeze(-1), 0.0))[0]


class MaskInDict(Base):
    def forward(self, data):
        return {"logits": self.pool(data["X"] * data["mask"].unsqueeze(-1))[0]}


class PaddingMask(Base):
    """True marks padding: a mask of ones hides the bag."""

    def forward(self, X, mask):
        return self.pool(X.masked_fill(mask.unsqueeze(-1), 0.0))[0]


class Ambiguous(Base):
    def forward(self, x):
        return self.pool(x)[0], x.mean(dim=1)


class MaybeCoords(Base):
    def forward(self, x, coords=None):
        return self.pool(x if coords is None else x + coords / 1e3)[0]


class PerInstance(Base):
    def forward(self, x):
        return self.score(x).squeeze(-1)


class WantsLabel(Base):
    def forward(self, x, label):
        return self.pool(x)[0]


class Nothing(Base):
    def forward(self, x):
        return {"attention": self.score(x), "count": 3}


class Broken(Base):
    def forward(self, x):
        raise LookupError("no luck\nat all")


def test_a_mask_of_padding_hides_nothing() -> None:
    e = xmil.explain(PaddingMask(), bag(), method="gxi")
    assert e.params["call"] == "net(x, mask=zeros)"
    assert np.abs(e.scores).max() > 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Ambiguous,
            r"several tensors may be the logits: \[0\] of shape \(1, 2\), \[1\] of .*net\(x\)\[0\]",
        ),
        (MaybeCoords, r"depends on 'coords', which is optional.*forward=lambda net, x, \*, coords: net"),
        (PerInstance, "PerInstance returned a number for each patch"),
        (WantsLabel, r"WantsLabel.forward asks for 'label' .*net\(x, label=\.\.\.\)"),
        (Nothing, r"returned a dict without a tensor of logits.*forward=lambda net, x: net\(x\)\['logits'\]"),
        (
            Broken,
            r"could not take a bag of shape \(1, 9, 6\): net\(x\) raised LookupError: no luck; .*forward=",
        ),
    ],
)
def test_what_is_not_clear_is_refused_in_one_line(kind: type[Base], words: str) -> None:
    given = xmil.Bag(bag().features, extras={"coords": np.ones((N, 1))}) if kind is MaybeCoords else bag()
    with pytest.raises(XmilError, match=words) as caught:
        xmil.explain(kind(), given)
    assert "\n" not in str(caught.value)


def test_real_coordinates_and_masks_are_tried() -> None:
    x = torch.from_numpy(bag().features)
    e = xmil.explain(RealCoords(), bag(), method="gxi")
    assert e.params["call"] == "net(x, coords=coords.float(), mask=None)"
    at = torch.from_numpy(bag().coords).sum(dim=-1, keepdim=True) / 1000
    np.testing.assert_allclose(e.logits, RealCoords().pool(x + at)[0][0].detach().numpy(), atol=1e-5)
    assert "level-0 coordinates, here up to 3" in e.warnings[0]
    masked = xmil.explain(WantsMask(), bag(), method="one_removed")
    assert masked.params["call"] == "net(x, mask=ones)"
    np.testing.assert_allclose(masked.logits, WantsMask().pool(x)[0][0].detach().numpy(), atol=1e-6)
    within = xmil.explain(MaskInDict(), bag(), method="one_removed")
    assert "and a mask of ones['logits']" in within.params["call"]
    np.testing.assert_allclose(within.scores, masked.scores, atol=1e-6)


def test_coordinates_that_do_not_matter_are_not_remarked() -> None:
    class Unmoved(Base):
        def forward(self, x, coords):
            return self.pool(x)[0]

    assert xmil.explain(Unmoved(), bag(), method="gxi").warnings == []


def test_optional_companions_that_change_nothing_are_left_out() -> None:
    class Ignores(Base):
        def forward(self, x, coords=None):
            return self.pool(x)[0]

    assert "call" not in xmil.explain(Ignores(), bag()).params


def test_a_graph_without_edges_names_what_it_lacks() -> None:
    plain = xmil.Bag(bag().features)
    with pytest.raises(InputError, match=r"TakesGraph asks for 'adjacency', which the bag does not have"):
        xmil.explain(TakesGraph(), plain)
    with pytest.raises(InputError, match=r"NeedsCoords asks for 'coords', which the bag does not have"):
        xmil.explain(NeedsCoords(), plain)
