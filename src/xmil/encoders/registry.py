"""Encoders by name; packages add theirs through the entry-point group `xmil.encoders`.

A builder takes the path of a weights file, or None for the published ones, and `random` for an untrained
network, and gives a network with its transform.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from xmil.core.registry import Registry
from xmil.encoders.encoder import Transform
from xmil.encoders.foreign import download_state, read_state
from xmil.nn.resnet import ResNet, load_resnet
from xmil.nn.swin import CTransPath

Built = tuple[Any, Transform]
Builder = Callable[[Path | None, bool], Built]

ENCODERS: Registry[Builder] = Registry("encoder", group="xmil.encoders")

TORCHVISION = {  # ImageNet weights, first version: the file's name ends with its hash
    "resnet18": "https://download.pytorch.org/models/resnet18-f37072fd.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
    "resnet50_trunc": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
}


def _resnet(name: str) -> Builder:
    def build(weights: Path | None, random: bool) -> Built:
        if random:
            return ResNet(name), Transform()
        state = download_state(name, TORCHVISION[name]) if weights is None else read_state(weights)
        return load_resnet(state, name), Transform()

    return build


for _name in TORCHVISION:
    ENCODERS.add(_name, _resnet(_name))


@ENCODERS.register("ctranspath")
def _ctranspath(weights: Path | None, random: bool) -> Built:
    """CTransPath: the authors hand out `ctranspath.pth`; it cannot be downloaded by a program."""
    return load_ctranspath(weights, random=random), Transform(size=CTransPath.size)


def load_ctranspath(weights: Path | None, *, random: bool = False) -> nn.Module:
    """The network with the published state dict, or untrained."""
    from xmil.core.errors import CheckpointError, InputError

    net = CTransPath()
    if random:
        return net
    if weights is None:
        raise InputError("CTransPath's weights are handed out by its authors; pass --weights ctranspath.pth.")
    state = {key: value for key, value in read_state(weights).items() if not key.startswith("head.")}
    try:
        missing, unexpected = net.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{weights}: not the weights of CTransPath: {reason}") from None
    fixed = ("num_batches_tracked", "relative_position_index", "attn_mask")
    lost = [key for key in missing if not key.endswith(fixed)]
    if lost or unexpected:
        raise CheckpointError(
            f"{weights}: not the weights of CTransPath: missing {lost[:3]}, unexpected {unexpected[:3]}."
        )
    return net
