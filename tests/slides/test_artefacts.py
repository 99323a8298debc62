"""Pen, folds, blur and the coverslip's edge: drawn on real slides, found, left out, told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.ink import INKS, colon_patches, level0, measure
from PIL import Image
from scipy import ndimage

import xmil
from tests.cli.test_cli import run
from xmil.core.errors import FileError
from xmil.slides.artefacts import INKED, PatchLook, density, find_artefacts, ink_share
from xmil.slides.tiling import TileSettings, grid, tile_slide

SLIDE = "TCGA-CR-7395-01A-01-TS1.svs"


@pytest.fixture(scope="module")
def tissue(data_dir: Path) -> np.ndarray:
    return level0(data_dir / "slides" / SLIDE)[800:2850, 600:2650]


def cut(picture: np.ndarray) -> list[np.ndarray]:
    corners = grid((0, 0, picture.shape[1], picture.shape[0]), 256, 256).tolist()
    patches = [picture[y : y + 256, x : x + 256] for x, y in corners]
    return [patch for patch in patches if patch.mean() < 215]


@pytest.mark.parametrize("colour", INKS)
def test_ink_is_left_out_and_tissue_is_kept(tissue: np.ndarray, colour: str) -> None:
    found = measure(tissue, colour, seed=7)
    assert found.inked >= 10
    assert found.clean >= 10
    assert found.found >= 0.95 * found.inked
    assert found.lost <= 0.01 * found.clean


def test_clean_tissue_of_other_scanners_is_kept(data_dir: Path) -> None:
    shares = np.array(
        [ink_share(density(patch, 32)) for patch in colon_patches(data_dir / "colon", odd=True)]
    )
    assert np.mean(shares >= INKED) <= 0.01


def test_density_is_that_of_the_mean_light() -> None:
    patch = np.random.default_rng(0).integers(1, 255, (50, 70, 3), dtype=np.uint8)
    cells = density(patch, 7)
    rows, columns = np.linspace(0, 50, 8).astype(int), np.linspace(0, 70, 8).astype(int)
    slow = patch[rows[2] : rows[3], columns[5] : columns[6]].reshape(-1, 3).mean(axis=0)
    assert cells[2, 5] == pytest.approx(-np.log10(slow / 255))


def test_blur_and_folds_on_real_tissue(tissue: np.ndarray) -> None:
    patches = cut(tissue)
    clean = find_artefacts([PatchLook.at(patch) for patch in patches])
    assert clean["blur"].mean() <= 0.05
    assert clean["fold"].mean() <= 0.05
    out_of_focus = [ndimage.gaussian_filter(patch, (4, 4, 0)) for patch in patches]
    assert find_artefacts([PatchLook.at(patch) for patch in out_of_focus])["blur"].mean() >= 0.95
    folded = [
        np.rint((patch / 255) ** 2 * 255).astype(np.uint8) for patch in patches[::5]
    ]  # light passes twice
    looks = [PatchLook.at(patch) for patch in [*patches, *folded]]
    assert find_artefacts(looks)["fold"][len(patches) :].mean() >= 0.7


@pytest.mark.parametrize("angle", [0.0, 0.35, 0.8])
def test_the_edge_of_a_coverslip_is_a_straight_line(tissue: np.ndarray, angle: float) -> None:
    patches = cut(tissue)
    y, x = np.mgrid[:256, :256]
    on_line = np.abs((x - 128) * np.sin(angle) - (y - 128) * np.cos(angle)) < 6
    glass = np.full((256, 256, 3), 240, dtype=np.uint8)
    glass[on_line] = 90
    assert find_artefacts([PatchLook.at(glass)])["coverslip"].all()
    assert not find_artefacts([PatchLook.at(patch) for patch in patches])["coverslip"].any()


def test_the_command_says_what_it_left_out(
    tissue: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tissue[:768, :1024].copy()
    picture[:, :300] = np.rint(picture[:, :300] * np.array(INKS["green"]))
    Image.fromarray(picture).save(tmp_path / "s.png")
    given = ("tile", tmp_path / "s.png", "--slide-mpp", "0.5")
    code, out, _ = run(*given, "--out", tmp_path / "a", capsys=capsys)
    assert code == 0
    assert "6 pen on 1 slide; --drop none" in out
    kept = xmil.read_bag(tmp_path / "a" / "patches" / "s_patches.h5")
    assert kept.coords[:, 0].min() >= 512  # 44 of the second column's 256 px are inked: a sixth
    drawn = np.asarray(Image.open(tmp_path / "a" / "visualization" / "s.png"))
    assert np.any(np.all(drawn == (230, 80, 0), axis=2))
    assert run(*given, "--out", tmp_path / "b", "--drop", "none", capsys=capsys)[0] == 0
    assert len(xmil.read_bag(tmp_path / "b" / "patches" / "s_patches.h5")) == len(kept) + 6


def test_a_slide_of_ink_alone_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ink = np.clip(rng.normal((20, 40, 150), 15, (300, 300, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(np.pad(ink, ((20, 20), (20, 20), (0, 0)), constant_values=240)).save(tmp_path / "s.png")
    with pytest.raises(FileError, match="every patch shows pen; keep them with `drop=none`"):
        tile_slide(xmil.open_slide(tmp_path / "s.png"), TileSettings(slide_mpp=0.5))
