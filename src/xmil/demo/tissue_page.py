"""The report of `xmil demo --tissue`, for someone who reads slides rather than papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.errors import FileError
from xmil.core.explanation import Explanation
from xmil.core.names import counted
from xmil.core.runfiles import read_rows
from xmil.core.storage import read_explanations, write_text
from xmil.demo.pipeline import Timing
from xmil.demo.results_page import figure, page, program
from xmil.demo.tissue_pipeline import TissueDemo, has_pen

TOP = 10  # patches that a reader would look at first


@dataclass(frozen=True)
class SectionResult:
    """One test section: what it is, what the model says, and which patches hold tumour.

    `found` counts the patches with tumour among the ten highest scores of each method.
    """

    name: str
    kind: str  # of nuclei asked for
    tumour: bool
    probability: float
    held: npt.NDArray[np.bool_]
    explanations: dict[str, Explanation]

    @property
    def right(self) -> bool:
        """Whether the model's answer is the true one."""
        return (self.probability >= 0.5) == self.tumour

    def found(self, method: str) -> int:
        """Patches with tumour among the highest scores."""
        first = np.argsort(-self.explanations[method].scores, kind="stable")[:TOP]
        return int(self.held[first].sum())


def read_sections(demo: TissueDemo) -> list[SectionResult]:
    """Every test section that was explained."""
    rows = read_rows(demo.out / "explain" / "slides.csv")
    return [_section(demo, name, rows[name]) for name in demo.names["test"] if name in rows]


def _section(demo: TissueDemo, name: str, row: dict[str, str]) -> SectionResult:
    found = {e.method: e for e in read_explanations(demo.out / "explain" / "slides" / f"{name}.parquet")}
    corners = found["lrp"].coords
    if corners is None:
        raise FileError(f"{name}: its patches have no places; remove {demo.out}.")
    chance = float(row[f"p:{demo.classes[1]}"])
    return SectionResult(name, demo.asked, demo.labels[name], chance, demo.marked(name, corners), found)


def tissue_verdict(sections: Sequence[SectionResult]) -> str:
    """What was found in one sentence: answers, and where the evidence lies."""
    right = sum(s.right for s in sections)
    said = f"{right} of {len(sections)} test sections answered rightly"
    telling = [s for s in sections if s.tumour and s.right and s.held.sum() >= TOP]
    if not telling:
        return f"{said}."
    found = sum(s.found("lrp") for s in telling)
    of = TOP * len(telling)
    return f"{said}; {found} of the {of} patches that LRP ranks highest hold {telling[0].kind} nuclei."


def shown_section(sections: Sequence[SectionResult]) -> SectionResult:
    """A section with tumour that was answered rightly, with the most patches of its rarer kind."""
    wanted = (
        [s for s in sections if s.tumour and s.right] or [s for s in sections if s.tumour] or list(sections)
    )
    return max(wanted, key=lambda s: min(int(s.held.sum()), int((~s.held).sum())))


def write_tissue_report(demo: TissueDemo, timings: Sequence[Timing]) -> Path:
    """Draw the pictures, write the page, and give its path."""
    (demo.out / "pictures").mkdir(exist_ok=True)
    sections = read_sections(demo)
    shown = shown_section(sections)
    parts = [
        _opening(demo, sections),
        _one_section(demo, shown),
        _patches(demo, shown),
        _table(demo, sections),
        _pen(demo),
        _trust(demo),
        _ending(demo, timings),
    ]
    path = demo.out / "report.html"
    write_text(path, page("\n".join(parts), title="xmil demo on tissue"))
    return path


def _opening(demo: TissueDemo, sections: Sequence[SectionResult]) -> str:
    source = (
        "drawn: every nucleus is known, so that anyone can check the answer"
        if demo.images is None
        else f"the pictures of {escape(demo.images.name)}, whose nuclei experts marked"
    )
    n = len(demo.names["train"])
    return f"""<h1>Where does the model see {escape(demo.asked)} nuclei?</h1>
<p>A model was given {counted(n, "section")} of tissue and, for each, one word: <i>{demo.classes[1]}</i> or
<i>{demo.classes[0]}</i>. Nobody showed it where to look. The sections are {source}.
A section counts as <i>{demo.classes[1]}</i> if it holds such nuclei.</p>
<p><b>{escape(tissue_verdict(sections))}</b></p>
<p class="small">Sections that the model learned from are not among those below. Seed {demo.seed}, xmil
{__version__}. A demonstration, not a diagnostic device.</p>"""


def _one_section(demo: TissueDemo, shown: SectionResult) -> str:
    path = demo.out / "pictures" / "section.png"
    draw_section_sheet(demo, shown, path)
    held = int(shown.held.sum())
    caption = (
        f"Section {shown.name}, probability of {shown.kind} {shown.probability:.2f}. Left: the tissue; "
        f"frames mark the {held} patches that hold such nuclei. Middle: what speaks for the answer (red) and "
        "against it (blue) by LRP; the scores add up to the model's answer. Right: attention (yellow: high), "
        "which says where the model looked, not what it took from there."
    )
    return f"<h2>One section, patch by patch</h2>{figure(path, caption)}"


def draw_section_sheet(demo: TissueDemo, shown: SectionResult, path: Path) -> None:
    """The section, its evidence by LRP, and attention, side by side."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from xmil.heatmaps.canvas import View, whole_box
    from xmil.heatmaps.scale import Scale
    from xmil.slides import open_slide

    sheet = Figure(figsize=(13, 4.4), dpi=130)
    sheet.set_layout_engine("constrained")
    axes = sheet.subplots(1, 3)
    lrp, attention = shown.explanations["lrp"], shown.explanations["attention"]
    boxes = lrp.boxes()
    with open_slide(_file(demo, shown.name)) as slide:
        view = View.of(boxes, whole_box(boxes, slide), slide=slide, longest=900, enlarge=2.0)
    assert view.background is not None  # noqa: S101  # there is a slide
    scales = [Scale.of(e.scores, signed=e.signed) for e in (lrp, attention)]
    pictures = [
        view.background,
        *(view.overlay(e, s, alpha=0.6) for e, s in zip((lrp, attention), scales, strict=True)),
    ]
    titles = (f"the section; frames: {shown.kind} nuclei", "LRP: red for it, blue against it", "attention")
    for axis, picture, title in zip(axes, pictures, titles, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=10)
        axis.axis("off")
        for x0, y0, x1, y1 in view.canvas.pixels(boxes[shown.held]).tolist():
            axis.add_patch(
                Rectangle(
                    (x0 + 1, y0 + 1), x1 - x0 - 2, y1 - y0 - 2, fill=False, edgecolor="black", linewidth=1.2
                )
            )
    sheet.savefig(path)


def _file(demo: TissueDemo, name: str) -> Path:
    return next(p for p in sorted(demo.slides.glob(f"{name}.*")) if p.suffix != ".csv")


def _patches(demo: TissueDemo, shown: SectionResult) -> str:
    (path,) = sorted((demo.out / "heatmap" / "patches").glob(f"{shown.name}.lrp.*.png"))
    e = shown.explanations["lrp"]
    order = np.argsort(-e.scores, kind="stable")
    counts = demo.patch_counts(shown.name, e.boxes()[:, :2])
    words = [
        f"{side} hold {_nuclei(counts, rows)}"
        for side, rows in (("The eight most red", order[:8]), ("the eight most blue", order[::-1][:8]))
    ]
    return f"""<h2>The patches that count most</h2>{figure(path, "; ".join(words) + ".")}"""


def _nuclei(counts: dict[str, npt.NDArray[np.int64]], rows: npt.NDArray[np.intp]) -> str:
    return ", ".join(f"{int(n[rows].sum())} {kind}" for kind, n in counts.items()) + " nuclei"


def _table(demo: TissueDemo, sections: Sequence[SectionResult]) -> str:
    rows = "".join(
        f"<tr><td>{escape(s.name)}</td><td>{demo.classes[int(s.tumour)]}</td><td>{s.probability:.2f}"
        f"{'' if s.right else ' (wrong)'}</td><td>{int(s.held.sum())} of {len(s.held)}</td>"
        + "".join(f"<td>{s.found(m) if s.tumour else '-'}</td>" for m in ("lrp", "attention"))
        + "</tr>"
        for s in sections
    )
    return f"""<h2>Every test section</h2>
<table><tr><th>section</th><th>truth</th><th>probability of {escape(demo.asked)}</th><th>patches with it</th>
<th>of the {TOP} highest by LRP</th><th>by attention</th></tr>{rows}</table>
<p class="small">A patch holds it if at least two {escape(demo.asked)} nuclei lie in it; it is
{demo.edge} pixels wide.</p>"""


def _pen(demo: TissueDemo) -> str:
    """Pen marks that the tiling found, on a section of the drawn ones."""
    if demo.images is not None:
        return ""
    inked = [name for name in demo.names["test"] if has_pen(name)]
    path = demo.out / "tiles" / "visualization" / f"{inked[0]}.png"
    if not path.is_file():  # ink on every patch of it
        return ""
    caption = (
        f"Section {inked[0]} as `xmil tile` saw it. Only sections with tumour carry ink here, as where a "
        "pathologist marked it: a model that saw ink could answer by the ink. Patches with ink are left out "
        "before the model sees anything; --pen would keep them."
    )
    return f"<h2>A pen mark is not tissue</h2>{figure(path, caption)}"


def _trust(demo: TissueDemo) -> str:
    path = demo.out / "evaluate" / "faithfulness.png"
    if not path.is_file():
        return ""
    caption = (
        "Patches are taken out in the order of their scores, highest first, and the model is asked again. "
        "The faster its answer falls, the more it rested on those patches; grey is a random order."
    )
    return f"<h2>Does the model really rest on them?</h2>{figure(path, caption)}"


def _ending(demo: TissueDemo, timings: Sequence[Timing]) -> str:
    rows = "".join(f"<tr><td>{escape(t.title)}</td><td>{t.seconds:.1f} s</td></tr>" for t in timings)
    commands = "\n".join(escape(line) for t in timings for line in t.commands)
    total = sum(t.seconds for t in timings)
    return f"""<h2>How this was made</h2>
<table>{rows}<tr><td>all</td><td>{total:.0f} s</td></tr></table>
<pre>{commands}</pre>
<h2>Look for yourself</h2><pre>{escape(tissue_viewer(demo))}</pre>"""


def tissue_viewer(demo: TissueDemo) -> str:
    """The command that opens the viewer on the test sections."""
    runs = " ".join(str(demo.out / kind) for kind in ("explain", "evaluate"))
    where = f"--slides {demo.slides} --model {demo.model} --features {demo.out / 'features'}"
    return f"{program()} view {runs} {where}"
