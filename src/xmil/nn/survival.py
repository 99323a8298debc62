"""Discrete-time survival: hazards of time bins, the survival function and the risk they give.

A model's outputs z (b, t) are logits of hazards: sigmoid(z_t) is the chance of the event in bin t for a
patient who has reached it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NODES = 64  # of the path integral; exact to rounding for logits up to about 100


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
    x, w = np.polynomial.legendre.leggauss(NODES)
    z = logits.detach().double()
    at = torch.from_numpy(0.5 * (x + 1)).to(z.device)[:, None, None]  # (m, 1, 1)
    weights = torch.from_numpy(0.5 * w).to(z.device)[:, None, None]
    return (weights * risk_gradient(at * z)).sum(dim=0).to(logits.dtype)


def risk_gradient(logits: Tensor) -> Tensor:
    """The gradient of the risk: the hazard of a bin times the sum of S over it and the later bins."""
    later = survival_function(logits).flip(-1).cumsum(dim=-1).flip(-1)
    return torch.sigmoid(logits) * later
