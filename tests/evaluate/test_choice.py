"""`choose_method` and `method="auto"`: what wins, what stays, and what is recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnsupportedError, XmilError
from xmil.evaluate import choose

D = 6


class OffSwitch(nn.Module):
    """Evidence switches a unit off, so that LRP sees the leak alone."""

    def __init__(self, leak: float = 0.05) -> None:
        super().__init__()
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        off = 4 * torch.relu(1 - x[..., :1].relu().mean(dim=1))
        return 2 - off + self.leak * x[..., 1:2].mean(dim=1)


def switching_bag(seed: int) -> Tensor:
    x = torch.randn(20, D, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = -1.0
    x[:4, 0] = 6.0
    return x


def bags(n: int = 6) -> list[Tensor]:
    return [torch.randn(20, D, generator=torch.Generator().manual_seed(i)) for i in range(n)]


def test_lrp_stays_where_it_is_right() -> None:
    model = xmil.create_model("attnmil", in_dim=D, n_classes=1, dim=8, seed=0)
    choice = xmil.choose_method(model, bags())
    assert (choice.method, choice.bags) == ("lrp", [str(i) for i in range(6)])
    assert choice.table.index[0] == "lrp"
    assert {"srg", "interval", "p"} <= set(choice.table.columns)
    assert choice.table["srg"]["lrp"] > 0.02


def test_a_method_that_the_model_confirms_wins_where_lrp_fails() -> None:
    like = [switching_bag(i) for i in range(6)]
    choice = xmil.choose_method(OffSwitch(), like)
    assert choice.method == "one_added"
    assert choice.table["p"]["one_added"] <= 0.05
    assert choice.table["srg"]["one_added"] > choice.table["srg"]["lrp"] + 0.2
    e = xmil.explain(OffSwitch(), switching_bag(9), method="auto", target=1, like=like)
    assert (e.method, e.params["chosen_by"], e.params["chosen_on"]) == ("one_added", "auto", 6)
    assert set(np.argsort(-e.scores)[:4]) == {0, 1, 2, 3}
    alone = xmil.explain(OffSwitch(), switching_bag(9), method="one_added", target=1)
    np.testing.assert_array_equal(e.scores, alone.scores)
    assert choice.verdict is not None
    assert (e.params["verdict"], choice.verdict.kind) == ("cannot tell", "cannot tell")  # 6 of 8 cases
    again = xmil.explain(OffSwitch(), switching_bag(9), method=e.method, target=1, **e.params)
    np.testing.assert_array_equal(again.scores, e.scores)


def test_every_class_can_be_explained_by_auto() -> None:
    net, like = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=0), bags()
    every = xmil.explain_classes(net, like[0], method="auto", like=like)
    assert [(int(e.target), e.params["chosen_by"]) for e in every] == [(0, "auto"), (1, "auto")]
    method = xmil.choose_method(net, like).method
    for e, plain in zip(every, xmil.explain_classes(net, like[0], method=method), strict=True):
        assert e.method == method
        np.testing.assert_array_equal(e.scores, plain.scores)


def test_what_is_refused_is_not_chosen() -> None:
    """LRP cannot follow a net that detaches its input; five bags are too few for the test to say so."""

    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :1].detach().relu().mean(dim=1) - 1

    choice = xmil.choose_method(Detached(), bags(5))
    assert choice.method == "one_added"
    assert choice.table["refused"].to_dict() == {"lrp": 5, "lrp over sub-bags": 5, "one_added": 0}
    assert "lrp refused, " in choice.sentence


def test_one_bag_is_little_to_choose_by() -> None:
    e = xmil.explain(OffSwitch(), switching_bag(0), method="auto", target=1)
    assert (e.method, e.params["verdict"]) == ("one_added", None)
    assert any("one bag is little" in line for line in e.warnings)


def test_noise_changes_nothing() -> None:
    """Gains without a trend, or smaller than 0.01, leave the first candidate; cases count once."""
    rng, tried = np.random.default_rng(0), {"lrp": ("lrp", {}), "one_added": ("one_added", {})}
    base = rng.uniform(0.2, 0.6, 12)

    def chosen(gain: np.ndarray, cases: object = range(12)) -> str:
        srgs = {"lrp": base, "one_added": base + gain}
        return choose(srgs, tried, names=list(map(str, range(12))), cases=list(cases)).method

    assert chosen(rng.normal(0, 0.1, 12)) == "lrp"
    assert chosen(np.full(12, 0.005)) == "lrp"
    assert chosen(rng.normal(0.1, 0.02, 12)) == "one_added"
    assert chosen(rng.normal(0.04, 0.001, 12), cases=["a"] * 6 + ["b"] * 6) == "lrp"


def test_bad_arguments() -> None:
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=0)
    with pytest.raises(XmilError, match="bags"):
        xmil.choose_method(model, [])
    with pytest.raises(InputError, match="lpr"):
        xmil.choose_method(model, bags(), candidates=["lrp", "lpr"])
    with pytest.raises(InputError, match="like="):
        xmil.explain(model, bags()[0], like=bags())


def test_bags_that_say_nothing_of_any_order_do_not_count() -> None:
    """Single patches dilute no mean and no test; if there are no others, the first candidate stays."""
    small = [torch.ones(1, D)] * 6
    like = [switching_bag(i) for i in range(6)]
    alone, both = xmil.choose_method(OffSwitch(), like), xmil.choose_method(OffSwitch(), [*small, *like])
    assert len(both.bags) == 6
    assert both.table["srg"].tolist() == pytest.approx(alone.table["srg"].tolist())
    kept = xmil.choose_method(OffSwitch(), small)
    assert (kept.method, kept.bags, kept.verdict) == ("lrp", [], None)
    e = xmil.explain(xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=0), small[0], method="auto")
    assert (e.method, e.params["chosen_on"]) == ("lrp", 0)


def test_what_every_bag_refuses_is_no_choice() -> None:
    with pytest.raises(UnsupportedError, match="candidates"):
        xmil.choose_method(OffSwitch(), bags(), candidates=["attention"])
    for names in ("lrp", []):
        with pytest.raises(InputError, match="candidates"):
            xmil.choose_method(OffSwitch(), bags(), candidates=names)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 8])
def test_a_clear_gain_wins_whatever_the_number_of_cases(n: int) -> None:
    """Five cases have no p below 0.05 for two rivals after Holm's correction, however clear the gain."""
    tried = {name: (name, {}) for name in ("lrp", "gxi", "one_added")}
    base = np.linspace(0.2, 0.4, n)
    srgs = {"lrp": base, "gxi": base - 0.1, "one_added": base + 0.3}
    names = list(map(str, range(n)))
    assert choose(srgs, tried, names=names, cases=names).method == "one_added"


def test_candidates_are_compared_with_the_parameters_they_will_have() -> None:
    """Another company, other figures; what a candidate does not have is for the others."""
    like = [switching_bag(i) for i in range(6)]
    far, near = ({"one_added": {"company": 1, "draws": 1, "background": like[0][4:]}}, {})
    srgs = [xmil.choose_method(OffSwitch(), like, params=p).table["srg"] for p in (far, near)]
    assert srgs[0]["one_added"] != srgs[1]["one_added"]
    assert srgs[0]["lrp"] == srgs[1]["lrp"]
    e = xmil.explain(OffSwitch(), like[0], method="auto", target=1, like=like, company=2, epsilon=1e-5)
    assert (e.method, e.params["company"], "epsilon" in e.params) == ("one_added", 2, False)
    with pytest.raises(XmilError, match="compony"):
        xmil.explain(OffSwitch(), like[0], method="auto", target=1, like=like, compony=2)
