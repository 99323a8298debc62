"""Features of slides that have none: tiled and encoded into the folder of the run that explains them.

tiles/       as `xmil tile` writes them
features/    as `xmil embed` writes them

The model's checkpoint says how, as far as it knows: our training records the encoder, the patches and the
stain normalisation. The request says the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError
from xmil.core.request import Verb
from xmil.core.text import bare_name
from xmil.data import read_cohort
from xmil.encoders import WIDTHS, check_encoder, known_encoder
from xmil.models.base import ModelSpec
from xmil.runs import Listener
from xmil.runs.embed import embed_slides
from xmil.runs.inputs import named_slides
from xmil.runs.requests import EmbedRequest, ExplainRequest, TileRequest
from xmil.runs.tile import tile_slides
from xmil.slides.open import SlideListing
from xmil.storage import Run, check_folder

TILES, FEATURES = "tiles", "features"
MARK = f"{TILES}/run.json"  # of a folder whose slides are tiled, and not explained yet


@dataclass(frozen=True)
class Recipe:
    """How features are made of slides; `assumed` is what neither the model nor the request says."""

    encoder: str
    weights: Path | None
    random: bool
    mpp: float
    size: int
    stain_norm: bool
    precision: str
    assumed: str | None = None


@dataclass(frozen=True)
class Made:
    """A request with its features, the slides that have them (None: all), and those that failed, and why."""

    request: ExplainRequest
    slides: frozenset[str] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def file(self, slide: str) -> Path | None:
        """The feature file of a slide."""
        return None if self.request.features is None else self.request.features / f"{slide}.h5"


class Stage(Listener):
    """A part of a command: what it says goes to the command's listener, its failures wait for the end."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.failed = listener, dict[str, str]()
        self.say, self.warn, self.counting = listener.say, listener.warn, listener.counting  # type: ignore[method-assign]

    def failures(self, failed: Mapping[str, str]) -> None:
        """Kept for the run that explains, which reports them with its own."""
        self.failed = dict(failed)

    def run(self, verb: Verb[Run], request: TileRequest | EmbedRequest) -> Run:
        """Do the part; where nothing comes of it, say of each slide why."""
        try:
            return verb.run(request, listener=self)
        except InputError:
            self.listener.failures(self.failed)
            raise


def make_features(request: ExplainRequest, specs: Sequence[ModelSpec], out: Path, listener: Listener) -> Made:
    """Tile and encode the slides of a request into `out`, as far as that is not done."""
    check_folder(out, "explain", marks=(MARK,))
    recipe = choose_recipe(request, specs)
    listing = listed_slides(request, listener)
    if recipe.assumed is not None:
        listener.warn(recipe.assumed)
    slides = tuple(listing.slides.values())
    shared: dict[str, Any] = {
        name: getattr(request, name) for name in ("engine", "workers", "restart", "follow_links")
    }
    tiles, features = out / TILES, out / FEATURES
    tiling = TileRequest(
        slides=slides, out=tiles, size=recipe.size, mpp=recipe.mpp, slide_mpp=request.mpp, **shared
    )
    tiled = Stage(listener).run(tile_slides, tiling)
    encoding = EmbedRequest(
        tiles=tiles, slides=slides, out=features, encoder=recipe.encoder, weights=recipe.weights,
        random=recipe.random, stain_norm=recipe.stain_norm, precision=recipe.precision,
        device=request.device, **shared,
    )  # fmt: skip
    encoded = Stage(listener).run(embed_slides, encoding)
    failed = {**tiled.failed, **encoded.failed}
    refused = {name: why for name, why in failed.items() if name in listing.slides}
    names = frozenset(listing.slides) - refused.keys()
    return Made(replace(request, features=features), names, {**listing.twice, **refused})


def listed_slides(request: ExplainRequest, listener: Listener) -> SlideListing:
    """The slides to explain: all of the folder, or those that the cohort names, of the chosen splits."""
    if request.slides is None:
        raise InputError(
            "There is nothing to explain: give features=, a folder of feature files, or slides=, which are "
            "tiled and encoded first."
        )
    listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
    if request.cohort is None:
        return listing
    table = read_cohort(request.cohort)
    table = table.subset(*request.split) if request.split else table
    names = {bare_name(slide) for slide in table.slides}
    slides = {name: path for name, path in listing.slides.items() if name in names}
    twice = {name: why for name, why in listing.twice.items() if name in names}
    if not slides and not twice:
        raise InputError(f"{request.slides}: no slide has the name of one in {request.cohort}.")
    return replace(listing, slides=slides, twice=twice)


def choose_recipe(request: ExplainRequest, specs: Sequence[ModelSpec]) -> Recipe:
    """How the features are to be made: as the request says, else as those the model was trained on."""
    facts: dict[str, Any] = {}
    for spec in specs:
        facts |= {"encoder": spec.encoder, **(spec.features or {})} if not facts else {}
    asked = facts.get("asked") or facts.get("encoder")
    encoder = request.encoder or (known_encoder(str(asked)) if asked else None)
    width = specs[0].in_dim if specs else None
    if encoder is None:
        raise InputError(_without_encoder(request, asked, width))
    random = request.random or (request.encoder is None and facts.get("weights") == "random")
    check_encoder(encoder, weights=request.weights, random=random)
    if width is not None and WIDTHS.get(encoder, width) != width:
        raise InputError(
            f"The encoder {encoder!r} gives {WIDTHS[encoder]} numbers per patch, but the model reads "
            f"{width}; give the encoder it was trained on{_of_width(width)} as encoder=."
        )
    digest = facts.get("weights") if request.encoder is None else None
    if digest not in (None, "random") and request.weights is None:
        raise InputError(
            f"The model was trained on features of {encoder!r} with weights of its own (sha256 {digest}...); "
            "give their file as weights=."
        )
    unsaid = [
        words
        for name, words, value in (
            ("patch_px", "256 px", request.tile_size),
            ("mpp", "0.5 µm/px", request.tile_mpp),
        )
        if value is None and facts.get(name) is None
    ]
    assumed = (
        f"The model does not say how its patches were cut; they are taken as {' at '.join(unsaid)}: if its "
        "training had others, give tile_size= and tile_mpp=."
    )
    return Recipe(
        encoder,
        request.weights,
        random,
        request.tile_mpp or float(facts.get("mpp") or 0.5),
        request.tile_size or int(facts.get("patch_px") or 256),
        bool(facts.get("stain_norm")),
        "float32" if facts.get("precision") == "float32" else "auto",
        assumed if unsaid else None,
    )


def _without_encoder(request: ExplainRequest, asked: Any, width: int | None) -> str:
    """The sentence for an encoder that nobody names, with the command that does."""
    words = ["xmil", "explain", *(word for model in request.model for word in ("--model", str(model)))]
    fitting = [name for name, wide in WIDTHS.items() if wide == width]
    encoder = asked or (fitting[0] if len(fitting) == 1 else "ENCODER")
    words += ["--slides", str(request.slides), "--encoder", str(encoder)]
    words += ["--out", str(request.out)] if request.out is not None else []
    model = request.model[0] if isinstance(request.model[0], str | Path) else "The model"
    which = (
        f"its features came from {asked!r}, which is not among the encoders that a file may choose"
        if asked
        else "does not say which encoder made its features"
    )
    return (
        f"{model}: {which}. Name the one it was trained on{_of_width(width)}: {shlex.join(words)}; or give "
        "its features as features=."
    )


def _of_width(width: int | None) -> str:
    """The encoders whose features are so wide, in brackets."""
    fitting = [name for name, wide in WIDTHS.items() if wide == width]
    some = f", such as {' or '.join(fitting)}" if fitting else ""
    return "" if width is None else f" ({width} numbers per patch{some})"
