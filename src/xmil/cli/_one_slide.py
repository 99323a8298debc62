"""One slide explained without a run's folder: the verdict, the account, the strongest patches, a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from xmil.cli._report import as_options
from xmil.cli._screen import Screen, command
from xmil.core.errors import InputError, XmilError
from xmil.core.names import counted
from xmil.runs.listener import Listener

if TYPE_CHECKING:
    from xmil.core.explanation import Explanation
    from xmil.core.interactions import Interactions
    from xmil.core.run import Run

SHOWN = 5  # patches of each sign
PAIRS = 3
APART = {  # what a report holds beside the model's numbers
    *("slide", "n", "picture", "beyond_scale", "explanations", "interactions", "warnings", "predicted"),
}
PASSING = ("workers", "restart")  # options that say nothing of the results


def check_one(features: Path) -> None:
    """Refuse a folder of several files where no folder for results is given."""
    from xmil.data import feature_files
    from xmil.data.whereabouts import folder_advice

    files = feature_files(features)[0]
    if not files:
        raise InputError(f"{features}: no feature files in this folder; {folder_advice(features)}.")
    if files != [features]:
        raise InputError(
            f"{features}: holds {len(files)} feature files; give --out, the folder for their results, or one "
            f"file: --features {files[0]}."
        )


def explain_one(
    models: Sequence[Path], features: Path, *, slide: Path | None, as_json: bool, **options: Any
) -> int:
    """Explain one file, print what was found, and leave a picture in the current folder."""
    from xmil.core.interactions import Interactions
    from xmil.core.run import pairs_files
    from xmil.core.storage import read_explanations
    from xmil.heatmaps.picture import Look
    from xmil.heatmaps.words import beyond_scale
    from xmil.runs.explain import explain_slides

    screen = Quiet(as_json)
    with TemporaryDirectory() as folder:
        run = explain_slides(models, features, out=Path(folder) / "run", listener=screen, **options)
        (name,) = run.slides
        found = read_explanations(run.file(name))
        together = [Interactions.load(path) for path in pairs_files(run.path, name)]
        picture = Path(f"{'_'.join(name.split())}.heatmap.png")
        fault = _draw(found, slide, picture, run, pairs=together)
        report = {"slide": name, **_row(run), "picture": str(picture) if fault is None else None}
        report |= {"explanations": [_facts(e) for e in found], "warnings": _warnings(run, found)}
        report["beyond_scale"] = max(Look().scale(e).share_beyond(e.scores) for e in found)
        report |= {"interactions": [_pairs(each) for each in together]}
    if as_json:
        report["warnings"] += [] if fault is None else [fault]
        print(json.dumps(report, indent=2, default=str))
    else:
        _print(report, found)
        print(f"\nPicture: {fault or picture}")
        if fault is None and (said := beyond_scale(report["beyond_scale"])):
            print(f"  {said}: keep the scores as below, then xmil heatmap --clip none")
        kept = [kept_command(models, features, name, options)]
        kept += [command("--slides", slide.parent)] if slide is not None and slide.stem == name else []
        print(f"Next: {' '.join(kept)}  # keeps the scores, for xmil heatmap, view and export")
    return 0 if fault is None else 1


def kept_command(models: Sequence[Path], features: Path, name: str, options: Mapping[str, Any]) -> str:
    """The command that explains the slide with the same options, into a folder of its own."""
    from inspect import signature

    from xmil.runs.explain import explain_slides

    known = signature(explain_slides).parameters
    words = [word for model in models for word in ("--model", model)] + ["--features", features]
    for key, value in options.items():
        plain = known[key].default
        if key not in PASSING and value and value not in (plain, *([""] if plain == () else [])):
            words += _option(key, value)
        elif plain is True and value is False:
            words.append(f"--no-{key.replace('_', '-')}")
    return command("xmil", "explain", *words, "--out", f"run-{'_'.join(name.split())}")


def _option(key: str, value: Any) -> list[Any]:
    """An option as the command line has it; methods' own parameters one by one."""
    if key == "params":
        every = [(f"{method}.{name}", v) for method, own in value.items() for name, v in own.items()]
        texts = [f"{place}={v if isinstance(v, str) else json.dumps(v)}" for place, v in every]
        return [word for text in texts for word in ("--param", text)]
    return [f"--{key.replace('_', '-')}", *([] if value is True else [value])]


class Quiet(Screen):
    """A screen for one slide: its numbers are printed at the end."""

    def say(self, sentence: str) -> None:
        """Kept back: it speaks of a folder that is not kept."""

    def warn(self, sentence: str) -> None:
        """Kept back: warnings stand in the report."""

    def failures(self, failed: Mapping[str, str]) -> None:
        """There is one slide: its failure is the command's."""
        for reason in failed.values():
            raise InputError(reason)

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """No bar for one slide."""
        return Listener().counting(what, total)


def _row(run: Run) -> dict[str, Any]:
    """What the model says of the slide."""
    row = next(iter(run.rows.values()))
    left_out = ("slide_id", "case_id", "label", "correct", "features", "seconds", "warnings")
    return {key: _typed(key, text) for key, text in row.items() if key not in left_out and text != ""}


def _typed(key: str, text: str) -> Any:
    """A cell of the table: a class stays text, numbers are numbers."""
    if key == "predicted":
        return text
    try:
        return int(text) if key == "n" else float(text)
    except ValueError:
        return text


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


def _pairs(found: Interactions) -> dict[str, Any]:
    """The strongest pairs of patches for a target, and how many are beyond three standard errors."""
    told = {"target": str(found.target), "n": len(found), "sure": int(found.sure.sum())}
    return {**told, "strongest": found.to_pandas().head(PAIRS).to_dict("records")}


def _warnings(run: Run, found: Sequence[Explanation]) -> list[str]:
    return list(dict.fromkeys([*run.warnings, *(text for e in found for text in e.warnings)]))


def _draw(
    found: Sequence[Explanation], slide: Path | None, path: Path, run: Run, *, pairs: Sequence[Interactions]
) -> str | None:
    """The heatmap of the slide with lines for pairs, or scores by rank where patches have no known place.

    Gives the sentence on a picture that could not be written.
    """
    from xmil.heatmaps.inline import plot
    from xmil.heatmaps.picture import heatmap
    from xmil.heatmaps.words import without_repeats

    try:
        several = found[0] if len(found) == 1 else list(found)
        targets = {e.target for e in without_repeats(found)}
        lines = [each for each in pairs if each.target in targets]
        picture = heatmap(several, slide, task=run.task, pairs=lines)
    except XmilError:
        if slide is not None:
            raise
        picture = plot(found[0])
    try:
        picture.savefig(path, dpi=150) if hasattr(picture, "savefig") else picture.save(path)
    except OSError as error:
        why = error.strerror or error
        return f"{path.resolve()} cannot be written ({why}); give --out, a folder for scores and pictures."
    return None


def _print(report: dict[str, Any], found: Sequence[Explanation]) -> None:
    from xmil.heatmaps.words import subtitle, title

    print(f"{report['slide']}: {_verdict(report)}")
    for e, facts in zip(found, report["explanations"], strict=True):
        print(f"\n{title(e)} {subtitle(e)}: output {e.output:.4g}")
        print(f"  account: {_account(facts['audit'])}")
        for heading, rows in (("highest", facts["top"]), ("lowest", facts["bottom"])):
            if rows:
                print(f"  {heading}: " + ", ".join(_patch(row) for row in rows))
    for pairs in report["interactions"]:
        told = ", ".join(_pair(row) for row in pairs["strongest"])
        print(f"\nPairs that act together for {pairs['target']}: {told}")
        print(f"  {pairs['sure']} of {counted(pairs['n'], 'pair')} beyond three standard errors")
    for warning in report["warnings"]:
        print(f"warning: {as_options(warning)}")


def _verdict(report: dict[str, Any]) -> str:
    """What the model says, in a line: the class with its probabilities, values, or the risk."""
    chances = [f"{key[2:]} {value:.3g}" for key, value in report.items() if key.startswith("p:")]
    said = [f"{k} {v}" for k, v in report.items() if k not in APART and not k.startswith("p:")]
    if "predicted" in report:
        told = f" (probabilities: {', '.join(chances)})" if chances else ""
        said = [f"predicted {report['predicted']}{told}", *said]
    return ", ".join([*said, counted(int(report["n"]), "patch")])


def _account(audit: dict[str, float] | None) -> str:
    if audit is None:
        return "this method does not account for the output"
    shares = {key: value for key, value in audit.items() if key != "output" and abs(value) > 5e-7}
    told = " + ".join(f"{value:.4g} {key.replace('_', ' ')}" for key, value in shares.items())
    return f"{audit['output']:.4g} = {told.replace('+ -', '- ') or '0'}"


def _pair(row: dict[str, Any]) -> str:
    return f"patches {row['first']} and {row['second']} ({row['value']:+.3g} +/- {row['stderr']:.2g})"


def _patch(row: dict[str, Any]) -> str:
    where = f" at {row['x0']},{row['y0']}" if "x0" in row else ""
    return f"patch {row['patch']}{where} ({row['score']:+.3g})"
