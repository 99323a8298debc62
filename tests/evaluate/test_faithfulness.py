"""Verdicts: scores that order, that do not, that order backwards, and outputs no order can move."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import xmil
from xmil.core.explanation import Audit, Explanation
from xmil.evaluate import Certificate, Flips, Judge, random_band


class Mean(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * x[..., 0].mean(dim=1, keepdim=True)


X = torch.linspace(-3, 4, 60).unsqueeze(1)


def certify(scores, scale=1.0, audit=None):
    flips = Flips(Mean(scale), X)
    e = Explanation(
        scores=np.asarray(scores, dtype=np.float32),
        logits=flips.logits,
        output=1.0,
        method="test",
        target=xmil.Target(1),
        signed=True,
        audit=audit,
    )
    morf, lerf = (flips.curve(e.scores, order=order) for order in ("morf", "lerf"))
    (verdict,) = Judge(flips).verdicts([("test", e)])
    return Certificate(e, morf, lerf, random_band(flips, orders=20), verdict)


@pytest.mark.parametrize(
    ("scores", "scale", "verdict"),
    [
        (X[:, 0].numpy(), 1.0, "better"),
        (-X[:, 0].numpy(), 1.0, "worse"),
        (np.random.default_rng(5).normal(size=60), 1.0, "no better"),
        (X[:, 0].numpy(), 1e-4, "cannot tell"),
    ],
)
def test_verdicts(scores, scale, verdict):
    certificate = certify(scores, scale)
    assert certificate.verdict.kind == verdict
    assert json.loads(json.dumps(certificate.as_dict()))["verdict"] == verdict


def test_sentences():
    good = certify(X[:, 0].numpy(), audit=Audit.close(output=2.0, instances=2.0))
    assert good.sentence.startswith("Better than random: test has SRG")
    assert "changes the prediction" in good.sentence
    assert ") add up to the output (" in good.sentence
    assert good.srg > 0
    leaky = certify(X[:, 0].numpy(), audit=Audit.close(output=2.0, instances=1.0))
    assert "50.0 % is unexplained" in leaky.sentence
    assert "do not add up" in certify(X[:, 0].numpy()).sentence
