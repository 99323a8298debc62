"""A QuPath script beside the tiles, AnnData for scanpy and LazySlide, and plain words on figures."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.heatmaps.tiles import read_tiles
from xmil.core.bag import Patches
from xmil.core.task import Target
from xmil.heatmaps import Scale, why_one_colour, write_geojson
from xmil.heatmaps.exports import EXPORTS, Exported, write_style
from xmil.heatmaps.words import NOTE, figure_notes


def explained(scores: np.ndarray, method: str = "lrp", **more: object) -> xmil.Explanation:
    coords = 256 * np.stack(np.divmod(np.arange(len(scores)), 4), axis=1)
    target = Target(1, name="tumour's")
    patches = Patches(coords=coords, patch_size=256, mpp=0.5)
    e = xmil.Explanation(scores, np.array([0.0, 1.0]), 1.0, method, target, True, bag="s1", patches=patches)
    return replace(e, **more)


def test_the_script_has_the_limits_and_colours_of_the_legend(tmp_path: Path) -> None:
    e = explained(np.linspace(-1, 2, 12).astype("float32"))
    scale = Scale.of(e.scores, signed=True)
    write_style(tmp_path / "s1.groovy", [e], {e.column: scale})
    text = (tmp_path / "s1.groovy").read_text()
    assert r"def measurement = 'lrp:tumour\'s'" in text
    low, high = (float(re.search(rf"{end}: ([-\d.e]+)d", text)[1]) for end in ("low", "high"))
    assert (low, high) == (scale.low, scale.high)
    table = [list(bytes.fromhex(colour)) for colour in re.search(r"colours: '([\da-f ]+)'", text)[1].split()]
    np.testing.assert_array_equal(table[0], scale.paint([scale.low])[0, :3])
    np.testing.assert_array_equal(table[-1], scale.paint([scale.high])[0, :3])
    np.testing.assert_allclose(table[16], scale.paint([0.0])[0, :3], atol=1)


def test_the_name_of_a_slide_stays_in_the_comment_of_the_script(tmp_path: Path) -> None:
    e = explained(np.linspace(-1, 2, 12).astype("float32"))
    names = ["s1", "a\rprintln(7*7)\rx", "a\u2028\x85\nprintln(7*7)", r"a\u000dprintln(7*7)"]
    scripts = []
    for i, name in enumerate(names):
        path = tmp_path / f"{i}.groovy"
        write_style(path, [replace(e, bag=name)], {e.column: Scale.of(e.scores, signed=True)})
        scripts.append(path.read_bytes().decode().splitlines())
    for lines in scripts:
        assert lines[0].startswith("// ")
        assert lines[1:] == scripts[0][1:]
    assert r"a\\u000dprintln" in scripts[3][0]  # Groovy 2 reads escapes before comments


def test_columns_of_a_csv_file_are_no_formulas(tmp_path: Path) -> None:
    e = explained(np.linspace(-1, 2, 12).astype("float32"), method="=1+1|lrp")
    EXPORTS["csv"].write(tmp_path / "s1.csv", Exported((e,), (0, 0, 1024, 768), "classification", {}))
    with (tmp_path / "s1.csv").open(newline="") as stream:
        assert next(csv.reader(stream)) == ["x0", "y0", "x1", "y1", "'=1+1|lrp:tumour's"]


def test_the_script_is_groovy_and_names_the_measurements_of_the_tiles(tmp_path: Path) -> None:
    lexer = pytest.importorskip("pygments.lexers.jvm", reason="pygments comes with the docs").GroovyLexer()
    names = ["tumour's", "a \\ b", "$cost"]
    several = [explained(np.linspace(-1, 2, 12).astype("float32"), target=Target(1, name=n)) for n in names]
    write_geojson(tmp_path / "s1.geojson", several)
    write_style(tmp_path / "s1.groovy", several, {e.column: Scale.of(e.scores, signed=True) for e in several})
    tokens = list(lexer.get_tokens((tmp_path / "s1.groovy").read_text()))
    assert [text for kind, text in tokens if "Error" in str(kind)] == []
    code = "".join(text for kind, text in tokens if "String" not in str(kind) and "Comment" not in str(kind))
    for pair in ("()", "[]", "{}"):
        assert code.count(pair[0]) == code.count(pair[1])
    texts = re.findall(r"'((?:[^'\\]|\\.)*)': \[low", (tmp_path / "s1.groovy").read_text())
    measured = read_tiles(tmp_path / "s1.geojson").measurements
    assert [re.sub(r"\\(.)", r"\1", text) for text in texts] == list(measured)


def test_anndata_has_scores_places_and_accounts(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata is an extra")
    e = explained(np.linspace(-1, 2, 12).astype("float32"))
    table = e.to_anndata()
    assert (table.shape, table.var_names.tolist()) == ((12, 1), ["lrp:tumour's"])
    np.testing.assert_array_equal(table.X[:, 0], e.scores)
    np.testing.assert_array_equal(table.obsm["spatial"], e.coords + 128)
    table.write_h5ad(tmp_path / "s1.h5ad")
    back = anndata.read_h5ad(tmp_path / "s1.h5ad")
    assert back.uns["xmil"]["explanations"]["lrp:tumour's"]["output"] == 1.0


def test_without_anndata_the_extra_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "anndata", None)
        with pytest.raises(xmil.XmilError, match=r"xmil\[anndata\]"):
            explained(np.ones(3, "float32")).to_anndata()


def test_figures_speak_plainly() -> None:
    words = "The attention is softmax 0 of 1 over instances, in net.attention, of shape (1, 1, 45)."
    plain = "Half of the patches have an uncertain sign."
    e = explained(np.linspace(-1, 2, 12).astype("float32"), warnings=[words, plain])
    assert figure_notes([e]) == [plain, NOTE]
    assert e.warnings == [words, plain]


def test_a_map_of_one_colour_says_why() -> None:
    assert "supports tumour's" in str(why_one_colour(explained(np.full(12, 0.1, "float32"))))
    assert "against" in str(why_one_colour(explained(np.full(12, -0.1, "float32"))))
    assert why_one_colour(explained(np.linspace(-1, 2, 12).astype("float32"))) is None
    assert why_one_colour(explained(np.r_[np.full(11, 0.01), 5.0].astype("float32"))) is None
    assert why_one_colour(replace(explained(np.full(12, 0.1, "float32")), signed=False)) is None
