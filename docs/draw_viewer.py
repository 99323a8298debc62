"""Draw docs/images/viewer*.png: the viewer's page over drawn tissue, in Chromium.

PYTHONPATH=. python docs/draw_viewer.py [--look FOLDER]

`--look` writes each state of the page at 1440, 1024 and 390 px, light and dark, to look at.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from scipy import ndimage
from tests.viewer.browser import chromium, open_slide, served, settle
from tests.viewer.make_run import Made
from tests.viewer.tissue import SIZE, draw_tissue, make_tissue_run, write_tiff

from xmil.viewer.collection import Collection

IMAGES = Path(__file__).parent / "images"
WIDTHS = {1440: 860, 1024: 720, 390: 800}
TURN, SMALLER = np.deg2rad(18), 0.8  # how the section of another stain lies
NEST = [[1950, 760], [2750, 680], [3050, 1500], [2850, 2050], [2150, 2250], [1900, 1400], [1950, 760]]
ANNOTATE = """ring => {
  const view = window.xmil.view;
  view.region([[ring]], null);
  view.show("notes");
  view.notes.add();
}"""


def stained_again(slides: Path, seed: int, name: str) -> None:
    """The next section, stained brown where there is tumour, turned and scanned more coarsely."""
    _, tissue, nests = draw_tissue(seed, tumour=True)
    rng = np.random.default_rng(seed)
    grain = ndimage.gaussian_filter(rng.normal(size=SIZE), 2) * 30
    blue, brown, ground = np.array([206.0, 208, 226]), np.array([150.0, 96, 56]), np.array([236.0, 241, 240])
    stain = blue + (brown - blue) * nests[..., None] + grain[..., None]
    picture = np.clip(ground + (stain - ground) * tissue[..., None], 0, 255)
    matrix = np.array([[np.cos(TURN), -np.sin(TURN)], [np.sin(TURN), np.cos(TURN)]]) / SMALLER
    middle = np.array(SIZE) / 2
    about = {"offset": middle - matrix @ middle, "order": 1}
    turned = [ndimage.affine_transform(picture[..., c], matrix, cval=ground[c], **about) for c in range(3)]
    write_tiff(slides / f"{name}.tif", np.stack(turned, axis=-1).astype(np.uint8), mpp=0.5 / SMALLER)


def on_the_other(place: tuple[float, float]) -> list[float]:
    """Where a place of the first section lies on the second."""
    middle = np.array(SIZE[::-1]) / 2
    turn = np.array([[np.cos(TURN), -np.sin(TURN)], [np.sin(TURN), np.cos(TURN)]])
    return [float(v) for v in middle + SMALLER * turn @ (np.array(place) - middle)]


@contextmanager
def page_of(browser: Any, url: str, width: int, scheme: str = "light") -> Iterator[Any]:
    """A page of a width; its height goes with it."""
    size = {"width": width, "height": WIDTHS.get(width, 760)}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def shot(page: Any, path: Path) -> None:
    """What the page shows when it has come to rest."""
    page.evaluate("() => document.activeElement.matches('.stage') && document.activeElement.blur()")
    page.wait_for_timeout(1200)
    settle(page)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    ImageOps.posterize(picture, 6).save(path, optimize=True)  # smaller, and colour bars stay smooth
    print(path)


def show_list(page: Any, _: str) -> None:
    """The list of slides."""
    page.locator("table.slides td a").first.wait_for()


def show_slide(page: Any, url: str) -> None:
    """A slide with its evidence."""
    open_slide(page, url, 3)


def show_patch(page: Any, url: str) -> None:
    """The patch that says most."""
    open_slide(page, url, 3)
    page.locator(".patch-button").first.click()


def show_certificate(page: Any, url: str) -> None:
    """The certificate's panel."""
    open_slide(page, url, 3)
    page.locator("[data-panel=certificate]").click()


def show_whatif(page: Any, url: str) -> None:
    """What is left when a region is taken out."""
    open_slide(page, url, 3)
    page.evaluate("ring => window.xmil.view.region([[ring]], null)", NEST)
    page.locator(".selection-bar button", has_text="Remove").click()
    page.locator(".whatif-result").wait_for(timeout=60_000)


def show_annotation(page: Any, url: str) -> None:
    """A region with its name, and the scores inside it."""
    open_slide(page, url, 3)
    page.evaluate("() => localStorage.setItem('xmil:reader', JSON.stringify('anna'))")
    page.evaluate(ANNOTATE, NEST)
    page.keyboard.press("n")
    page.keyboard.type("Nest 1")


def show_panes(page: Any, url: str) -> None:
    """Two methods side by side."""
    open_slide(page, url, 3)
    page.keyboard.press("s")
    page.wait_for_timeout(400)


def show_beside(page: Any, url: str) -> None:
    """Two sections, linked by two places."""
    marks = [(1300.0, 900.0), (2900.0, 1900.0)]
    points = [",".join(f"{v:.1f}" for xy in each for v in xy) for each in (marks, map(on_the_other, marks))]
    page.goto(f"{url}#/compare/biopsy-04/biopsy-04-ihc?points={';'.join(points)}&area=700,400,2600,1900")
    page.wait_for_function("() => window.xmil.compare?.ready")
    box = page.locator(".stage").first.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.45 * box["height"])


def show_wall(page: Any, url: str) -> None:
    """The strongest patches over all slides."""
    page.goto(f"{url}#/wall")
    page.locator(".wall-patch").first.wait_for()


STATES = {
    "list": show_list,
    "slide": show_slide,
    "patch": show_patch,
    "certificate": show_certificate,
    "whatif": show_whatif,
    "annotation": show_annotation,
    "panes": show_panes,
    "beside": show_beside,
    "wall": show_wall,
}
KEPT = {
    "viewer.png": ("slide", 1440, "light"),
    "viewer-list.png": ("list", 1024, "dark"),
    "viewer-phone.png": ("slide", 390, "dark"),
    "viewer-annotation.png": ("annotation", 1180, "light"),
    "viewer-beside.png": ("beside", 1280, "light"),
}


def main() -> None:
    """Draw the docs' pictures, or all states to look at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--look", type=Path)
    parser.add_argument("--state", choices=STATES, nargs="+", default=list(STATES), help="only these")
    parser.add_argument("--made", type=Path, help="a folder of an earlier call, or for the next")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        made = tissue(given.made or Path(name), again="beside" in given.state)
        shown = Collection(made.runs, slides=made.slides, features=[made.features])
        with served(shown, made.models) as url, chromium() as browser:
            draw(browser, url, made, given)


def tissue(folder: Path, *, again: bool) -> Made:
    """The run of drawn tissue, made once; `again` where a section of another stain is wanted too."""
    made = Made(
        [folder / "biopsies"],
        [folder / "models" / "attnmil.safetensors"],
        folder / "slides",
        folder / "features",
        [],
    )
    if not made.runs[0].exists():
        make_tissue_run(folder).runs[0].rename(made.runs[0])
    if again and not (made.slides / "biopsy-04-ihc.tif").exists():
        stained_again(made.slides, 3, "biopsy-04-ihc")
    return replace(made, names=[path.stem for path in sorted(made.features.iterdir())])


def draw(browser: Any, url: str, made: Made, given: argparse.Namespace) -> None:
    """Each picture on a page of its own."""
    wanted = {name: each for name, each in KEPT.items() if each[0] in given.state}
    if given.look:
        given.look.mkdir(parents=True, exist_ok=True)
        wanted = {
            f"{s}-{w}-{c}.png": (s, w, c) for s in given.state for w in WIDTHS for c in ("light", "dark")
        }
    for name, (state, width, scheme) in wanted.items():
        with page_of(browser, url, width, scheme) as page:
            STATES[state](page, url)
            shot(page, (given.look or IMAGES) / name)
        for note in made.runs[0].glob("annotations/*/*"):
            note.unlink()


if __name__ == "__main__":
    main()
