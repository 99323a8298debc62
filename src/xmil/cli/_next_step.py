"""Whether the things that were inspected go together, and the command to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmil.core.errors import XmilError
from xmil.core.names import bare_name, is_plain
from xmil.data.siblings import slide_name

Result = dict[str, Any]
Options = dict[str, Any]


def compared(results: list[Result]) -> list[Result]:
    """The results, with problems added where features fit no model, or slides no features."""
    models = [result for result in results if result["kind"] == "checkpoint"]
    features = [result for result in results if _features_in(result) is not None]
    told = []
    for result in results:
        fault = _misfit(result, models) or _nameless(result, features)
        told.append({**result, "problems": (*result["problems"], fault)} if fault else result)
    return told


def next_command(results: list[Result], options: Options) -> str:
    """The command to go on with, once it is known where features are; what was not named is in capitals."""
    from xmil.cli._screen import command

    models = [result for result in results if result["kind"] == "checkpoint"]
    slides = [result for result in results if _holds_slides(result)]
    features = [result for result in results if _features_in(result) is not None]
    for result in features:
        fitting = [model for model in models if not _misfit(result, [model])]
        if _finite(result) and (fitting or not models):
            return command(*_explain(result, fitting, slides), *_given(options))
    if features or any("features in" in result.get("facts", {}) for result in results):
        return ""  # they do not fit, or which of several is meant is for the user to say
    if patches := [result for result in results if _holds_patches(result)]:
        return embedding(Path(patches[0]["path"]), slides[0]["path"] if slides else None)
    return command("xmil", "tile", slides[0]["path"], "--out", "tiles") if slides else ""


def embedding(tiles: Path, slides: object = None) -> str:
    """The command that makes features of patches; which encoder, only the user knows."""
    from xmil.cli._screen import command

    folder = tiles.parent if tiles.name == "patches" else tiles
    words = command(
        "xmil", "embed", "--tiles", folder, "--slides", slides or "SLIDES", "--encoder", "ENCODER"
    )
    return f"{words}  # the encoder that the model was trained on: resnet50, ctranspath, uni, ..."


def _explain(result: Result, models: list[Result], slides: list[Result]) -> list[str]:
    model = models[0]["path"] if models else "MODEL"
    shown = next((each["path"] for each in slides if not _nameless(each, [result])), None)
    out = ["--out", "run"] if shown or result["kind"] != "features" else []
    out += ["--slides", shown] if shown else []
    return ["xmil", "explain", "--model", model, "--features", str(_features_in(result)), *out]


def _misfit(result: Result, models: list[Result]) -> str | None:
    """A sentence where none of the models reads features of this width."""
    reads = {int(model["facts"]["in_dim"]): model["path"] for model in models}
    found = _widths(result)
    if not found or not reads or found & set(reads):
        return None
    wide = " and ".join(map(str, sorted(found)))
    wanted = ", ".join(f"{path} reads {width}" for width, path in reads.items())
    return f"the features are {wide} wide, and {wanted}; give features of the model's encoder"


def _nameless(result: Result, features: list[Result]) -> str | None:
    """A sentence where no slide of a folder has the name of a feature file."""
    slides = {_bare(row["file"]) for row in result.get("rows", ())} if _holds_slides(result) else set()
    named = {name for each in features for name in _names(each)}
    if not slides or not named or slides & named:
        return None
    pair = f"{min(slides)} is a slide, {min(named)} has features"
    return f"no slide has the name of a feature file ({pair}); name the files alike"


def _names(result: Result) -> set[str]:
    files = [row["file"] for row in result["rows"]] or [Path(str(_features_in(result))).name]
    below = "features in" in result["facts"]  # its files are not looked at
    return set() if below else {_bare(slide_name(Path(file))) for file in files}


def _bare(name: str) -> str:
    return bare_name(name) if is_plain(name) else name


def _widths(result: Result) -> set[int]:
    where, facts = _features_in(result), result.get("facts", {})
    if where is None:
        return set()
    if "features in" in facts:
        return _width_below(Path(where))
    return _wide(facts["width"])


def _wide(width: Any) -> set[int]:
    """The widths of one file or of several; patches without features have none."""
    return {int(key) for key in (width if isinstance(width, dict) else [width or 0])} - {0}


def _width_below(folder: Path) -> set[int]:
    """The width of a folder's first file; none where it cannot be read."""
    from xmil.data import feature_files, open_bag

    try:
        return {open_bag(path).dim for path in feature_files(folder)[0][:1]} - {0}
    except XmilError:
        return set()


def _finite(result: Result) -> bool:
    facts = result["facts"]
    return not facts.get("NaN") and not facts.get("infinite")


def _holds_slides(result: Result) -> bool:
    return result["kind"] == "folder" and {"slides", "read by"} <= set(result.get("facts", {}))


def _given(options: Options) -> list[str]:
    """What this command was told of the files, for the next."""
    told = {name: value for name, value in options.items() if value not in (None, "auto")}
    return [word for name, value in told.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _features_in(result: Result) -> str | None:
    """Where an inspected path holds features to explain."""
    facts = result.get("facts", {})
    if "features in" in facts:
        return str(facts["features in"]) if facts["features in"] else None
    holds = result["kind"] in ("features", "folder") and _wide(facts.get("width"))
    return str(result["path"]) if holds and facts.get("instances") else None


def _holds_patches(result: Result) -> bool:
    """Whether it is a folder of patches that have no features yet."""
    facts = result.get("facts", {})
    return bool(result["kind"] == "folder" and facts.get("instances") and _features_in(result) is None)
