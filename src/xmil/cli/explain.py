"""`xmil explain`: methods x targets x slides, over a cohort."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from xmil.cli._command import command, with_examples
from xmil.cli._screen import (
    Screen,
    Words,
    announce_costs,
    command_line,
    finish_command,
    view_command,
)
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, InputError, XmilError, absent
from xmil.core.text import counted
from xmil.execute import Listener
from xmil.runs.requests import DrawRequest, ExplainRequest

if TYPE_CHECKING:
    from xmil.core.explanation import Explanation
    from xmil.core.interactions import Interactions
    from xmil.storage import Run


@with_examples(
    "explain --model model.pt --features slide.h5",
    "explain --model model.pt --features features --slides slides --out run",
)
@command(ExplainRequest)
def explain(request: ExplainRequest, screen: Screen) -> int:
    """Explain every slide: which patches speak for a class, and which against it.

    Slides without features are tiled and encoded first. Without --out one feature file or slide is explained:
    its verdict, audit and strongest patches are printed, and a picture is written to the current folder.
    """
    from xmil.runs.explain import draw_run, explain_run

    failed = False
    if request.slides is not None and not request.slides.exists():
        raise InputError(absent(request.slides, "file or folder of slides"))
    if request.out is None:
        with announce_costs():
            return explain_one(request, screen)
    with announce_costs(), screen.together():
        run = explain_run(request, screen)
        if request.slides is not None:
            try:
                failed = bool(draw_run(run, request, screen).failed)
            except XmilError as error:  # the slides are explained nevertheless
                print(f"xmil: error: {screen.words(str(error))}", file=sys.stderr)
                failed = True
    then = f"{command_line('xmil', 'heatmap', run.path)} --slides SLIDES"
    if request.slides is not None:
        then = view_command(run.path, slides=request.slides, mpp=request.mpp)
    elif not _has_places(run):
        inputs = [word for model in request.model for word in ("--model", model)]
        inputs += ["--features", request.features, "--out", f"{run.path}-evaluated"]
        then = command_line("xmil", "evaluate", *inputs)
        then += "  # maps need features with coordinates (CLAM: h5_files)"
    return max(int(failed), finish_command(run, screen, then=then))


def _has_places(run: Run) -> bool:
    """Whether the patches of the first readable slide have coordinates."""
    from xmil.storage import read_explanations

    for path in run.files.values():
        with suppress(XmilError):
            first = read_explanations(path)[0]
            return first.coords is not None or first.raw_coords is not None
    return True


CANNOT_TELL = (
    "One slide cannot show whether to trust this model's maps: the same command with --out over eight cases "
    "or more gives a verdict."
)
SHOWN = 5  # patches of each sign
PAIRS = 3
APART = {  # columns of a row other than the model's outputs
    *("slide", "n", "picture", "beyond_scale", "explanations", "interactions", "warnings", "predicted"),
    *("verdict", "choice", "measured"),
}
WORKERS = ("engine", "workers")  # options without effect on results


def explain_one(options: ExplainRequest, screen: Screen) -> int:
    """Explain one file or slide, print the results, and write a picture to the current folder."""
    from xmil.core.interactions import Interactions
    from xmil.evaluate import Choice
    from xmil.heatmaps import Look, beyond_scale, why_one_colour
    from xmil.runs.explain import explain_run
    from xmil.runs.heatmap import unclipped_command
    from xmil.storage import read_explanations

    request = one_file(options, screen)
    with TemporaryDirectory() as folder:
        one = request.replace(out=Path(folder) / "run", check="none")  # one case is too few for a verdict
        run = explain_run(one, OneSlide())
        (name,) = run.slides
        explanations = read_explanations(run.file(name))
        together = [Interactions.load(path) for path in run.find_interactions(name)]
        made_by = " ".join(run.digests)
        picture = _free_name(Path(f"{'_'.join(name.split())}.heatmap.png"), made_by)
        slide = None if request.slides is None else _slide_of(name, request)
        fault = _draw_picture(explanations, slide, picture, run, pairs=together, mark=made_by)
        notes = [*run.warnings, *(line for e in explanations for line in e.warnings)]
        notes += filter(None, (why_one_colour(e, run.task) for e in explanations))
        chosen = run.about.get("choice")
        report = {
            "slide": name,
            **_row(run),
            "picture": str(picture) if fault is None else None,
            "explanations": [_facts(e) for e in explanations],
            "warnings": list(dict.fromkeys(notes)),
            "choice": None if chosen is None else Choice.from_dict(chosen).sentence,
            "verdict": None if run.verdict is None else run.verdict.as_dict(),
            "beyond_scale": max(
                Look().scale(e.scores, signed=e.signed).share_beyond(e.scores) for e in explanations
            ),
            "interactions": [
                {
                    "target": str(pairs.target),
                    "n": len(pairs),
                    "sure": int(pairs.sure.sum()),  # beyond three standard errors
                    "strongest": pairs.to_pandas().head(PAIRS).to_dict("records"),
                }
                for pairs in together
            ],
        }
    if screen.as_json:
        report["warnings"] += [] if fault is None else [fault]
        print(json.dumps(report, indent=2, default=str))
    else:
        _print(report, explanations, screen.words)
        print(f"\nPicture: {screen.words(fault or str(picture))}")
        has_places = explanations[0].coords is not None or explanations[0].raw_coords is not None
        if fault is None and has_places and (sentence := beyond_scale(report["beyond_scale"])):
            drawing = DrawRequest(
                run=run_folder(name),
                slides=slide,
                mpp=None if options.features is None else options.mpp,  # features made here store it
                patch_size=options.patch_size,
                follow_links=options.follow_links,
            )
            keep = unclipped_command(drawing)
            print(f"  {sentence}. To separate them: the next command, then {keep}")
        same = options.words("out", "slides", "restart", *WORKERS)
        words = [command_line("xmil", "explain", *same, "--out", run_folder(name))]
        if options.features is None:
            words += [command_line("--slides", options.slides)]
            print(f"Patches and features: {run_folder(name)}, for the next command")
        elif slide is not None and slide.stem == name:
            words += [command_line("--slides", slide.parent)]
        print(f"Next: {' '.join(words)}  # saves the scores, for xmil heatmap, view and export")
    return 0 if fault is None else 1


def one_file(request: ExplainRequest, screen: Screen) -> ExplainRequest:
    """Return the request with one feature file; for a slide, make its features in a separate folder."""
    from xmil.data import feature_files
    from xmil.data.files import check_feature_files
    from xmil.runs.explain import check_output, features_of_slides
    from xmil.runs.slide_features import listed_slides

    check_output(request)
    if request.features is None:
        listing = listed_slides(request, screen)
        if len(names := [*listing.slides, *listing.twice]) > 1:
            raise InputError(
                f"{request.slides}: holds {len(names)} slides; pass `out=`, the folder for their results, "
                f"or one slide: `slides={next(iter(listing.slides.values()), request.slides)}`."
            )
        with screen.together():
            made = features_of_slides(request, run_folder(names[0]), OneSlide(screen))
        OneSlide().failures(made.refused)
        return made.request.replace(features=cast(Path, made.request.features) / f"{names[0]}.h5")
    files = feature_files(request.features)[0]
    check_feature_files(files, request.features)
    if files != [request.features]:
        raise InputError(
            f"{request.features}: holds {len(files)} feature files; pass `out=`, the folder for their "
            f"results, or one file: `features={files[0]}`."
        )
    return request


def run_folder(name: str) -> Path:
    return Path(f"run-{'_'.join(name.split())}")


class OneSlide(Listener):
    """Ignores the messages of a run of one slide, whose numbers and warnings are printed at the end.

    If features are made first, a screen shows their progress and warnings.
    """

    def __init__(self, screen: Screen | None = None) -> None:
        if screen is not None:
            self.counting, self.warn = screen.counting, screen.warn  # type: ignore[method-assign]

    def failures(self, failed: Mapping[str, str]) -> None:
        """Raise the failure of the only slide."""
        for reason in failed.values():
            raise InputError(reason)


def _row(run: Run) -> dict[str, Any]:
    """Read the prediction for the slide."""
    row = next(iter(run.rows.values()))
    left_out = ("slide_id", "case_id", "label", "correct", "features", "seconds", "warnings")
    typed: dict[str, Any] = {key: text for key, text in row.items() if key not in left_out and text != ""}
    for key in typed.keys() - {"predicted"}:  # a class stays text, numbers are numbers
        with suppress(ValueError):
            typed[key] = int(typed[key]) if key == "n" else float(typed[key])
    return typed


def _facts(e: Explanation) -> dict[str, Any]:
    top = e.top(SHOWN).reset_index().to_dict("records")
    low = e.to_pandas().sort_values("score", kind="stable").head(SHOWN).reset_index().to_dict("records")
    return {
        "method": e.method,
        "target": str(e.target),
        "output": e.output,
        "audit": None if e.audit is None else e.audit.as_dict(),
        "top": top,
        "bottom": [row for row in low if row["score"] < 0],
    }


def _slide_of(name: str, request: ExplainRequest) -> Path:
    """Find the slide to draw over: the file itself, or the one of this name in a folder."""
    from xmil.runs.inputs import named_slides

    path = cast(Path, request.slides)
    if not path.is_dir():
        return path
    listing = named_slides(path, follow_links=request.follow_links)
    if path in listing.slides.values():  # a folder of DICOM files
        return path
    if name not in listing.slides:
        raise InputError(f"{path}: has no slide named {name}; name the slide's file.")
    return listing.slides[name]


def _draw_picture(
    explanations: Sequence[Explanation],
    slide: Path | None,
    path: Path,
    run: Run,
    *,
    pairs: Sequence[Interactions],
    mark: str,
) -> str | None:
    """Draw the heatmap of the slide with lines for pairs, or scores by rank if positions are unknown.

    Return an error sentence if the picture could not be written.
    """
    from xmil.heatmaps import heatmap, plot, without_repeats
    from xmil.heatmaps.words import NOT_TESTED

    picture: Any  # a matplotlib figure
    try:
        several = explanations[0] if len(explanations) == 1 else list(explanations)
        targets = {e.target for e in without_repeats(explanations)}
        lines = [each for each in pairs if each.target in targets]
        picture = heatmap(several, slide, task=run.task, pairs=lines, verdict=NOT_TESTED)
    except XmilError:
        if slide is not None:
            raise
        picture = plot(explanations[0])
    about = {MARK: mark}
    try:
        write_atomically(
            path.resolve(), lambda part: picture.savefig(part, format="png", dpi=150, metadata=about)
        )
    except FileError as error:
        return f"{str(error).partition(';')[0]}; pass `out=`, a folder for scores and pictures."
    return None


MARK = "xmil"  # key of the picture's text that identifies its model


def _free_name(path: Path, mark: str) -> Path:
    """Choose a file name for a picture: replace one of the same model, but no other file."""
    from PIL import Image

    for number in count(2):
        if not path.is_file():
            return path
        with suppress(OSError, ValueError, SyntaxError), Image.open(path) as picture:
            if picture.info.get(MARK) == mark:
                return path
        path = path.with_name(f"{path.name.partition('.heatmap')[0]}.heatmap-{number}.png")
    raise AssertionError  # unreachable


def _print(report: dict[str, Any], explanations: Sequence[Explanation], words: Words) -> None:
    from xmil.heatmaps import subtitle, title

    print(f"{report['slide']}: {_verdict(report)}")
    if report.get("measured"):
        print(f"  {report['measured']}")
    if report["choice"]:
        print(f"  {report['choice']}")
    for e, facts in zip(explanations, report["explanations"], strict=True):
        print(f"\n{title(e)} {subtitle(e)}: output {e.output:.4g}")
        print(f"  audit: {_audit(facts['audit'])}")
        for heading, rows in (("highest", facts["top"]), ("lowest", facts["bottom"])):
            if rows:
                print(f"  {heading}: " + ", ".join(_patch(row) for row in rows))
    for pairs in report["interactions"]:
        strongest = ", ".join(
            f"patches {row['first']} and {row['second']} ({row['value']:+.3g} +/- {row['stderr']:.2g})"
            for row in pairs["strongest"]
        )
        print(f"\nPairs that interact for {pairs['target']}: {strongest}")
        print(f"  {pairs['sure']} of {counted(pairs['n'], 'pair')} beyond three standard errors")
    print(f"\n{report['verdict']['sentence'] if report['verdict'] else CANNOT_TELL}")
    for warning in report["warnings"]:
        print(f"warning: {words(warning)}")


def _verdict(report: dict[str, Any]) -> str:
    """Write the prediction in a line: the class with its probabilities, values, or the risk."""
    chances = [f"{key[2:]} {value:.3g}" for key, value in report.items() if key.startswith("p:")]
    parts = [f"{k} {v}" for k, v in report.items() if k not in APART and not k.startswith("p:")]
    if "predicted" in report:
        more = f" (probabilities: {', '.join(chances)})" if chances else ""
        parts = [f"predicted {report['predicted']}{more}", *parts]
    return ", ".join([*parts, counted(int(report["n"]), "patch")])


def _audit(audit: dict[str, float] | None) -> str:
    if audit is None:
        return "scores of this method do not add up to the output"
    from xmil.core.explanation import PARTS

    shares = {key: value for key, value in audit.items() if key != "output" and abs(value) > 5e-7}
    total = " + ".join(f"{value:.4g} {PARTS[key].lower()}" for key, value in shares.items())
    return f"{audit['output']:.4g} = {total.replace('+ -', '- ') or '0'}"


def _patch(row: dict[str, Any]) -> str:
    where = f" at {row['x0']},{row['y0']}" if "x0" in row else ""
    return f"patch {row['patch']}{where} ({row['score']:+.3g})"
