"""timm beside a CPU build of torch: torchvision's two missing operators are defined first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_library: Any = None


def timm_or_skip() -> Any:
    """timm, or a skip with the reason."""
    global _library
    if _library is None and not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
        import timm.data
    except Exception as error:
        pytest.skip(f"timm cannot be imported: {error}")
    return timm
