"""Tile and encode slides without features, into the folder of the run that explains them.

tiles/       as `xmil tile` writes them
features/    as `xmil embed` writes them

The recipe comes from the model's checkpoint: our training records the encoder, the patches and the
stain normalisation. The request fills the gaps.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from xmil.core.errors import InputError, name_parameters
from xmil.core.request import Verb
from xmil.core.text import bare_name
from xmil.data import read_cohort
from xmil.encoders import WIDTHS, check_encoder, known_encoder
from xmil.execute import Listener
from xmil.models.base import ModelSpec
from xmil.runs.embed import embed_slides
from xmil.runs.inputs import named_slides
from xmil.runs.requests import EmbedRequest, ExplainRequest, TileRequest
from xmil.runs.tile import tile_slides
from xmil.slides.open import SlideListing
from xmil.storage import Run


@dataclass(frozen=True)
class SlideFeatures:
    """A request with its features, the slides that have them, and failed slides with the reason."""

    request: ExplainRequest
    slides: frozenset[str]
    refused: Mapping[str, str]


class Stage(Listener):
    """A step of a command: passes messages to the command's listener, and collects failures."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.failed = listener, dict[str, str]()
        self.warn, self.counting = listener.warn, listener.counting  # type: ignore[method-assign]

    def say(self, sentence: str) -> None:
        """Pass the message on, with the parameters of `xmil explain`."""
        self.listener.say(for_explain(sentence))

    def failures(self, failed: Mapping[str, str]) -> None:
        """Collect failures, which the run that explains reports with its own."""
        self.failed = {name: for_explain(why) for name, why in failed.items()}

    def run(self, verb: Verb[Run], request: TileRequest | EmbedRequest) -> Run:
        """Run the step; if every slide fails, report each reason."""
        try:
            return verb.run(request, listener=self)
        except InputError as error:
            self.listener.failures(self.failed)
            raise InputError(for_explain(str(error)), parameter=error.parameter) from None


NAMES_IN_EXPLAIN = {"slide_mpp": "mpp", "mpp": "tile_mpp", "size": "tile_size"}  # of options of tiling


def for_explain(sentence: str) -> str:
    """Name the options of tiling and encoding as `explain` does.

    >>> for_explain("a.svs: stores no microns per pixel; pass `slide_mpp=`.")
    'a.svs: stores no microns per pixel; pass `mpp=`.'
    """

    def say(name: str, value: str | None) -> str:
        if name == "drop":  # an option of tiling alone
            return f"xmil tile and its drop={value}"
        name = NAMES_IN_EXPLAIN.get(name, name)
        return f"The {name!r} parameter of explain" if value is None else f"`{name}={value}`"

    return name_parameters(sentence, say)


def make_features(
    request: ExplainRequest, spec: ModelSpec | None, out: Path, listener: Listener
) -> SlideFeatures:
    """Tile and encode the slides of a request into `out`, unless they already are."""
    tiling, encoding = choose_recipe(request, spec)
    listing = listed_slides(request, listener)
    shared: dict[str, Any] = {
        name: getattr(request, name) for name in ("engine", "workers", "restart", "follow_links")
    }
    shared["slides"] = tuple(listing.slides.values())
    tiles, features = out / "tiles", out / "features"
    tiled = Stage(listener).run(
        tile_slides, TileRequest(out=tiles, slide_mpp=request.mpp, **tiling, **shared)
    )
    encoded = Stage(listener).run(
        embed_slides, EmbedRequest(tiles=tiles, out=features, device=request.device, **encoding, **shared)
    )
    failed = {**tiled.failed, **encoded.failed}
    refused = {name: for_explain(why) for name, why in failed.items() if name in listing.slides}
    names = frozenset(listing.slides) - refused.keys()
    request = request.replace(features=features, mpp=None)  # the features store it
    return SlideFeatures(request, names, {**listing.twice, **refused})


def listed_slides(request: ExplainRequest, listener: Listener) -> SlideListing:
    """List the slides to explain: all of the folder, or those of the cohort in the chosen splits."""
    if request.slides is None:
        raise InputError(
            "There is nothing to explain: pass `features=`, a folder of feature files, or `slides=`, which "
            "are tiled and encoded first."
        )
    listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
    if request.cohort is None:
        return listing
    table = read_cohort(request.cohort, slide_column=request.slide_column)
    table = table.subset(*request.split) if request.split else table
    names = {bare_name(slide) for slide in table.slides}
    slides = {name: path for name, path in listing.slides.items() if name in names}
    twice = {name: why for name, why in listing.twice.items() if name in names}
    if not slides and not twice:
        raise InputError(f"{request.slides}: has no slide of {request.cohort}; names must match.")
    return replace(listing, slides=slides, twice=twice)


def choose_recipe(request: ExplainRequest, spec: ModelSpec | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choose options of tiling and encoding from the request, or else from the model's training."""
    facts: dict[str, Any] = {}
    if spec is not None:
        facts = {"encoder": spec.encoder, **(spec.features or {})}
        facts["encoder"] = facts.get("asked") or facts["encoder"]  # the name that the user typed
    encoder: Any = request.encoder
    width = None if spec is None else spec.in_dim
    random = request.random or (encoder is None and facts.get("weights") == "random")
    digest = facts.get("weights") if encoder is None and not random else None
    encoder = encoder or known_encoder(str(facts.get("encoder", "")))
    size: Any = request.tile_size or facts.get("patch_px")
    mpp: Any = request.tile_mpp or facts.get("mpp")
    missing = list_unrecorded({**facts, "encoder": encoder, "patch_px": size, "mpp": mpp}, width)
    if digest is not None and request.weights is None:
        missing["weights"] = Unrecorded(f"the file of the encoder's weights (sha256 {digest}...)", "WEIGHTS")
    if request.encoder is not None:  # check what the user typed first
        _check_encoder(encoder, width, weights=request.weights, random=random)
    elif encoder is None and facts.get("encoder"):
        what = f"a known encoder (it names {facts['encoder']!r})"
        missing["encoder"] = Unrecorded(what, "ENCODER")
    if missing:
        raise InputError(_missing_error(request, missing))
    _check_encoder(encoder, width, weights=request.weights, random=random)
    encoding = {"encoder": encoder, "weights": request.weights, "random": random}
    encoding["precision"] = "float32" if facts.get("precision") == "float32" else "auto"
    encoding["stain_norm"] = bool(facts.get("stain_norm"))
    return {"size": int(size), "mpp": float(mpp)}, encoding


def _check_encoder(encoder: str, width: int | None, **about: Any) -> None:
    """Refuse an encoder that cannot be loaded, or whose width is not the model's."""
    check_encoder(encoder, **about)
    if width is not None and WIDTHS.get(encoder, width) != width:
        raise InputError(
            f"The encoder {encoder!r} returns {WIDTHS[encoder]} numbers per patch, but the model reads "
            f"{width}; pass the encoder it was trained on{_of_width(width)} as `encoder=`."
        )


class Unrecorded(NamedTuple):
    """A fact that a checkpoint does not record: in words, and an example for the command line."""

    words: str
    example: str


def list_unrecorded(facts: Mapping[str, Any], width: int | None = None) -> dict[str, Unrecorded]:
    """List what a model does not record of its features, by the parameter that sets it."""
    fitting = [name for name, wide in WIDTHS.items() if wide == width]
    required = {
        "encoder": ("encoder", f"the encoder of its features{_of_width(width)}", (*fitting, "ENCODER")[0]),
        "tile_size": ("patch_px", "the size of its patches in pixels", "256"),
        "tile_mpp": ("mpp", "the microns per pixel of its patches", "0.5"),
    }
    return {
        name: Unrecorded(words, example)
        for name, (fact, words, example) in required.items()
        if facts.get(fact) is None
    }


def _missing_error(request: ExplainRequest, missing: Mapping[str, Unrecorded]) -> str:
    """Write the error for facts that neither model nor request has, with a command that adds them."""
    is_named = all(isinstance(model, str | Path) for model in request.model)
    request = request if is_named else request.replace(model=("MODEL",))
    words = ["xmil", "explain", *request.words(*missing)]
    words += [word for name in missing for word in (f"--{name.replace('_', '-')}", missing[name].example)]
    *first, last = [fact.words for fact in missing.values()]
    facts = f"{', '.join(first)} and {last}" if first else last
    return (
        f"{request.model[0] if is_named else 'The model'} does not record {facts}. Pass those of its "
        f"training, such as: {shlex.join(words)}; or its features as `features=`."
    )


def _of_width(width: int | None) -> str:
    """Write a width with the encoders that have it, in brackets."""
    fitting = [name for name, wide in WIDTHS.items() if wide == width]
    examples = f", such as {' or '.join(fitting)}" if fitting else ""
    return "" if width is None else f" ({width} numbers per patch{examples})"
