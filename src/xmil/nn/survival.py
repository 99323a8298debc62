"""Discrete-time survival: hazards of time bins, the survival function and the risk they give.

A model's outputs z (b, t) are logits of hazards: sigmoid(z_t) is the chance of the event in bin t for a
patient who has reached it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

NODES = 32  # of each stretch of the path integral
STRETCHES = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0)  # the risk of large logits moves near the start of the path


def survival_function(logits: Tensor) -> Tensor:
    """S(t), the chance to get through the bins 0..t: the running product of 1 - hazard.

    >>> survival_function(torch.zeros(1, 3))
    tensor([[0.5000, 0.2500, 0.1250]])
    """
    return F.logsigmoid(-logits).cumsum(dim=-1).exp()


def survival_risk(logits: Tensor) -> Tensor:
    """The risk (b,): minus the sum of S(t), from -t (nobody dies) to 0 (all die in the first bin).

    >>> survival_risk(torch.zeros(1, 3))
    tensor([-0.8750])
    """
    return -survival_function(logits).sum(dim=-1)


def risk_slopes(logits: Tensor) -> Tensor:
    """The mean gradient (b, t) of the risk on the straight path from zero logits to the logits.

    Times the logits it shares out risk(z) - risk(0) among the bins: integrated gradients of the risk.

    >>> z = torch.tensor([[2.0, -1.0, 0.5]])
    >>> shared = (risk_slopes(z) * z).sum(dim=-1)
    >>> bool((shared - survival_risk(z) + survival_risk(0 * z)).abs() < 1e-6)
    True
    """
    z = logits.detach().double()
    at, weights = (torch.from_numpy(part).to(z.device)[:, None, None] for part in _nodes())  # (m, 1, 1)
    return (weights * risk_gradient(at * z)).sum(dim=0).to(logits.dtype)


def risk_gradient(logits: Tensor) -> Tensor:
    """The gradient of the risk: the hazard of a bin times the sum of S over it and the later bins."""
    later = survival_function(logits).flip(-1).cumsum(dim=-1).flip(-1)
    return torch.sigmoid(logits) * later


@cache
def _nodes() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Places and weights of Gauss and Legendre on the stretches of [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(NODES)
    starts, lengths = np.array(STRETCHES[:-1]), np.diff(STRETCHES)
    places = starts[:, None] + 0.5 * lengths[:, None] * (x + 1)
    return places.ravel(), (0.5 * lengths[:, None] * w).ravel()
