"""`xmil explain`: methods x targets x slides, over a cohort."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _options, _workers
from xmil.cli._report import as_options
from xmil.cli._screen import Screen, command, costs_said, finished
from xmil.core.errors import InputError, XmilError
from xmil.core.parsing import parse_json

if TYPE_CHECKING:
    from xmil.core.run import Run


def explain(
    model: _options.Models,
    features: _options.Features,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results; an interrupted run continues where it stopped. Optional for one slide."
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "lrp",
    target: Annotated[
        str,
        typer.Option(
            help="predicted, label, all, a class by name or number, a contrast A:B; several with commas."
        ),
    ] = "predicted",
    cohort: _options.CohortTable = None,
    label: _options.Labels = "",
    time: _options.Time = "time",
    event: _options.Event = "event",
    split: _options.Splits = "",
    by: _options.By = "slide",
    output: Annotated[
        str,
        typer.Option(help="The number to explain: logit, contrastive, log_odds, probability, value, risk."),
    ] = "",
    preset: Annotated[str, typer.Option(help="Rules of lrp: default, exact, paper, released.")] = "",
    param: Annotated[
        list[str] | None,
        typer.Option(help="A parameter of one method, such as ig.steps=100; may be repeated."),
    ] = None,
    contexts: Annotated[
        int, typer.Option(help="Mean scores of lrp, ig and gxi over so many random sub-bags, with errors.")
    ] = 0,
    keep: Annotated[float, typer.Option(help="Share of patches kept in each sub-bag.")] = 0.5,
    interactions: Annotated[
        int, typer.Option(help="Pairs that act together, among so many of the strongest patches.")
    ] = 0,
    save_vectors: Annotated[
        bool, typer.Option("--save-vectors", help="Save lrp's relevance of each feature, (n, d) per slide.")
    ] = False,
    mpp: _options.Mpp = None,
    patch_size: _options.PatchSize = None,
    format: _options.Layout = "auto",  # noqa: A002 - the word users know
    class_names: _options.ClassNames = "",
    slide: Annotated[
        Path | None, typer.Option(help="Without --out: the slide to draw the picture over.")
    ] = None,
    slides: Annotated[
        Path | None, typer.Option(help="Folder of slides: draw heatmaps as well, into OUT/heatmaps.")
    ] = None,
    as_json: _options.Json = False,
    device: _options.Device = "cpu",
    memory: Annotated[
        str, typer.Option(help="Memory limit for a method's temporary arrays, such as 500MB or 4GB.")
    ] = "1GB",
    seed: Annotated[int, typer.Option(help="Seed for methods that sample.")] = 0,
    background: _options.Background = "auto",
    restart: _options.Restart = False,
    follow_links: _options.FollowLinks = True,
    full_digests: _options.FullDigests = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Explain every slide: which instances speak for a class, and which against it.

    Without --out one feature file is explained: verdict, account and strongest patches are printed, and a
    picture is left in the current folder.
    """
    from xmil.runs.explain import explain_slides

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    asked: dict[str, Any] = {
        "methods": methods,
        "target": target,
        "cohort": cohort,
        "label": label,
        "time": time,
        "event": event,
        "split": split,
        "by": by,
        "output": output or None,
        "params": _params(param or [], preset),
        "contexts": contexts,
        "keep": keep,
        "interactions": interactions,
        "save_vectors": save_vectors,
        "mpp": mpp,
        "patch_size": patch_size,
        "format": format,
        "class_names": class_names,
        "device": device,
        "memory": memory_bytes(memory),
        "seed": seed,
        "background": background,
        "restart": restart,
        "workers": chosen,
        "follow_links": follow_links,
        "full_digests": full_digests,
    }
    if out is None:
        from xmil.cli._one_slide import check_one, explain_one

        if slides is not None:
            raise InputError("--slides goes with --out; for one slide without it, use --slide.")
        check_one(features)
        with costs_said():
            return explain_one(model, features, slide=slide, as_json=as_json, **asked)
    if slide is not None:
        raise InputError("--slide is for one slide without --out; with it, `xmil heatmap --slides` draws.")
    screen = Screen(as_json)
    with costs_said():
        run = explain_slides(model, features, out=out, listener=screen, **asked)
    if slides is None:
        return finished(run, screen, then=f"{command('xmil', 'heatmap', out)} --slides SLIDES")
    failed = _drawn(run, slides, screen, mpp=mpp, patch_size=patch_size, follow_links=follow_links)
    return max(failed, finished(run, screen, then=command("xmil", "view", out, "--slides", slides)))


def _drawn(run: Run, slides: Path, screen: Screen, **how: Any) -> int:
    """Draw the run's slides as `xmil heatmap` would; 1 where some failed, or all: they are explained."""
    from xmil.runs.heatmap import draw_slides

    try:
        return int(bool(draw_slides(run, slides=slides, listener=screen, **how).failed))
    except XmilError as error:
        print(f"xmil: error: explained, but not drawn: {as_options(str(error))}", file=sys.stderr)
        return 1


def memory_bytes(text: str) -> int:
    """A size in bytes from 500MB, 4GB, 2GiB or a plain number.

    >>> memory_bytes("500MB"), memory_bytes("2 GiB"), memory_bytes("1.5G")
    (500000000, 2147483648, 1500000000)
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    number = text.strip().rstrip("BbKMGTikmgt ").strip()
    unit = text.strip()[len(number) :].strip().removesuffix("B").removesuffix("b")
    try:
        size = int(float(number) * units[unit[:1].upper() + unit[1:]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"--memory must be a size such as 500MB or 4GB. Got {text!r} instead.")
    return size


def _params(given: list[str], preset: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"lrp": {"preset": preset}} if preset else {}
    for text in given:
        place, _, value = text.partition("=")
        method, _, name = place.partition(".")
        if not (method and name and value):
            raise InputError(
                f"--param must read METHOD.NAME=VALUE, such as ig.steps=100. Got {text!r} instead."
            )
        try:
            found.setdefault(method, {})[name] = parse_json(value)
        except ValueError:
            found.setdefault(method, {})[name] = value
    return found
