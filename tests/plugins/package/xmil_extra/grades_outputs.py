"""The explained outputs of the task: the log odds of all steps that lead to a grade."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods import TASK_OUTPUTS, Output, OutputRequest


@TASK_OUTPUTS.register("grades")
def grades(asked: OutputRequest) -> Output:
    """Steps up to the grade speak for it, the step beyond it against it."""
    kind, c = asked.kind_among(("logit", "probability")), asked.cls

    def value(logits: Tensor) -> Tensor:
        signs = torch.cat([torch.ones(c), -torch.ones(1), torch.zeros(logits.shape[1])])[: logits.shape[1]]
        steps = logits * signs.to(logits)
        if kind == "logit":
            return steps.sum(dim=1)
        return torch.nn.functional.logsigmoid(steps[:, : c + 1]).sum(dim=1).exp()

    return Output(asked.target, kind, value)
