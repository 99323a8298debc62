"""Describe a feature file, folder, cohort or run in facts and sentences, for `xmil inspect`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import CONVENTIONS
from xmil.core.errors import FileError, XmilError
from xmil.core.explanation import measured_columns
from xmil.core.text import counted, shorten
from xmil.data.bags import open_bag
from xmil.data.cohort import SPLIT, read_cohort
from xmil.data.files import CLOSE, SHOWN, feature_facts, feature_files, folders_below, only_folder
from xmil.data.header import Header
from xmil.storage import Run, read_header

_BLOCK = 1 << 25  # bytes of features per block


@dataclass(frozen=True)
class Report:
    """Facts by name; what was inferred; what is missing; problems with their remedies."""

    path: str
    kind: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)
    inferred: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)


def inspect_features(path: Path, **options: Any) -> Report:
    """Describe a feature file: shapes, ranges, NaN, coordinate convention, what drawing still needs."""
    header = open_bag(path, **options)
    stats, lacks = _statistics(header), header.patches.missing
    what = "features" if header.features is not None else "coordinates without features"
    zeros, coords = stats.get("all-zero rows"), header.coords
    problems = {
        "the bag is empty; leave the slide out": not len(header),
        "some features are not finite, so nothing can be explained; extract them again": stats.get("NaN")
        or stats.get("infinite"),
        f"{zeros} rows are all zeros; was the extraction interrupted?": zeros,
        "some patches have the same coordinates; were slides or augmented copies merged?": coords is not None
        and len(np.unique(coords, axis=0)) < len(coords),
    }
    return Report(
        str(path),
        "features",
        f"{header.format} {what}",
        _facts(header, stats),
        inferred=header.inferred,
        missing=(f"for drawing: {lacks}",) if lacks else (),
        problems=tuple(problem for problem, is_there in problems.items() if is_there),
    )


def _facts(header: Header, stats: dict[str, Any]) -> dict[str, Any]:
    random = feature_facts(header).get("weights") == "random"
    stored = header.coords is not None or header.raw_coords is not None
    extent = {}
    if header.coords is not None and len(header.coords):
        low, high = header.coords.min(axis=0), header.coords.max(axis=0) + (header.patch_size or 0)
        extent = {"level-0 extent": [*map(int, low), *map(int, high)]}
    return {
        "format": header.format,
        "version": header.version,
        "slide": header.slide_id,
        "encoder": f"{header.encoder} (random weights)" if random else header.encoder,
        "instances": len(header),
        "width": header.dim,
        "stored as": header.features.dtype.name if header.features is not None else None,
        "columns": sorted(header.columns) or None,
        **stats,
        "coordinates": CONVENTIONS[header.unit or "px"] if stored else None,
        **extent,
        "patch edge": header.patch_size,
        "mpp": header.mpp,
    }


def _statistics(header: Header) -> dict[str, Any]:
    """Range and faults of the features, block by block."""
    if header.features is None or not header.nbytes:
        return {}
    step = max(1, _BLOCK // (4 * header.dim))
    low, high, nan, infinite, zero = np.inf, -np.inf, 0, 0, 0
    for start in range(0, len(header), step):
        block = header.read(np.arange(start, min(start + step, len(header)))).features
        finite = block[np.isfinite(block)]
        low, high = min(low, finite.min(initial=np.inf)), max(high, finite.max(initial=-np.inf))
        nan += int(np.isnan(block).sum())
        infinite += int(np.isinf(block).sum())
        zero += int((~block.any(axis=1)).sum())
    span = [float(low), float(high)] if low <= high else None
    return {"range": span, "NaN": nan, "infinite": infinite, "all-zero rows": zero}


def inspect_folder(path: Path, **options: Any) -> Report:
    """Describe a folder of feature files by their headers: one row each, and how they differ."""
    files, links = feature_files(path)
    if not files and not links:
        return _folder_above(path)
    rows = tuple(_row(file, options) for file in files)
    readable = [row for row in rows if "error" not in row]
    broken = len(rows) - len(readable)
    problems = [f"{broken} files cannot be read"] if broken else []
    separate = "in one folder cannot form one dataset; separate them"
    advice = dict.fromkeys(("width", "encoder"), f"features of several encoders {separate}")
    advice |= {"patch edge": f"patches of several sizes {separate}"}
    advice |= {"format": "check that one encoder made all of them"}
    for name, remedy in advice.items():
        counts = _counts([row for row in readable if row["width"]] if name == "width" else readable, name)
        if len(counts) > 1 and not (name == "patch edge" and _one_size(readable)):
            listing = ", ".join(f"{count} with {value}" for value, count in counts.items())
            problems.append(f"mixed {name}: {listing}; {remedy}")
    problems += [f"{link.name} is a link out of the folder" for link in links]
    facts = {"files": len(rows), "instances": sum(row["instances"] for row in readable)}
    facts |= {name: _counts(readable, name) for name in ("format", "encoder", "width", "patch edge")}
    what, guesses = "a folder of feature files", _counts(readable, "edge guess")
    inferred = tuple(
        f"the patch edge of {count} of {len(readable)} files is a guess from {guess}; `patch_size=` sets it"
        for guess, count in guesses.items()
    )
    return Report(str(path), "folder", what, facts, inferred=inferred, problems=tuple(problems), rows=rows)


def _folder_above(path: Path) -> Report:
    """Describe a folder whose subfolders hold the feature files."""
    listing = [
        f"{folder.path.relative_to(path).as_posix()} ({folder.files} files)" for folder in folders_below(path)
    ]
    if not listing:
        raise FileError(
            f"{path}: has no feature files, checkpoints or slides; name the folder that holds them."
        )
    problem = f"the folder itself holds no feature files; try {shorten(listing, SHOWN)}"
    what = "a folder with feature files in subfolders"
    features = only_folder(path)
    facts = {"folders": len(listing), "features in": None if features is None else str(features)}
    return Report(str(path), "folder", what, facts, problems=(problem,))


def _row(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    try:
        header = open_bag(path, **options)
    except XmilError as error:
        return {"file": path.name, "error": str(error)}
    names = ("format", "instances", "width", "stored as", "encoder", "patch edge", "mpp")
    facts = _facts(header, {})
    facts["edge guess"] = header.patches.edge_guess
    shown = {name: facts[name] for name in (*names, "edge guess")}
    return {"file": path.name, **shown, "inferred": list(header.inferred)}


def _counts(rows: list[dict[str, Any]], name: str) -> dict[str, int]:
    return dict(Counter(str(row[name]) for row in rows if row[name] is not None).most_common())


def _one_size(rows: list[dict[str, Any]]) -> bool:
    """Whether all patches have one size in microns: level-0 edges differ between 20x and 40x scans."""
    placed = [row for row in rows if row["patch edge"] is not None]
    if not placed or any(row["mpp"] is None for row in placed):
        return not placed
    sizes = [row["patch edge"] * row["mpp"] for row in placed]
    return bool(max(sizes) - min(sizes) <= CLOSE * max(sizes))


def inspect_cohort(path: Path, *, slide_column: str | None = None) -> Report:
    """Describe a cohort table: slides, cases, columns with their values, splits that leak."""
    cohort = read_cohort(path, slide_column=slide_column)
    facts: dict[str, Any] = {"slides": len(cohort), "cases": len(set(cohort.cases))}
    for name, cells in cohort.columns.items():
        counts = Counter("(empty)" if cell is None else cell for cell in cells)
        empty = counts.pop("(empty)", 0)
        if name in ("slide_id", "case_id", "path"):
            continue
        facts[name] = f"{len(counts)} values, {empty} empty"
        if len(counts) <= 12:
            facts[name] = dict(sorted(counts.items())) | ({"(empty)": empty} if empty else {})
    parts = [name for name in (SPLIT, "fold") if name in cohort.columns]
    problems = tuple(
        f"{len(leaks)} cases are in two parts of {name!r}: {', '.join(leaks[:5])}; split by case"
        for name in parts
        if (leaks := cohort.leaking_cases(name))
    )
    return Report(str(path), "cohort", "a cohort table", facts, inferred=cohort.inferred, problems=problems)


def inspect_explanation(path: Path) -> Report:
    """Describe a stored explanation without its scores: methods, targets, outputs and audits."""
    header = read_header(path)
    facts = {
        "slide": header.get("bag"),
        "model": header.get("model"),
        "written by": f"xmil {header.get('version')}",
        "layout": header.get("layout"),
        "patch edge": header.get("patch_size"),
        "mpp": header.get("mpp"),
    }
    for name, column in header["columns"].items():
        audit = column.get("audit")
        audited = isinstance(audit, dict) and "other" in audit
        unexplained = f"{audit['other']:.2g} unexplained" if audited else "not audited"
        facts[name] = ", ".join(
            [f"output {float(column.get('output', np.nan)):.4g}", unexplained, *measured_columns([column])]
        )
    return Report(str(path), "explanation", f"explanations ({len(header['columns'])})", facts)


def inspect_run(path: Path) -> Report:
    """Describe a run folder: how many slides are explained, by what, and which failed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = Run(path)
    files = list(run.files.values())
    facts: dict[str, Any] = {"slides explained": len(files)}
    problems = []
    try:
        settings = run.about
    except XmilError:
        settings = {}
    if not settings:
        problems.append("run.json is missing or damaged; the settings of this run are unknown")
    else:
        if run.kind == "predict":
            facts = {"predictions": 0}
            with suppress(OSError, ValueError, pa.ArrowException):
                facts["predictions"] = int(pq.read_metadata(path / "predictions.parquet").num_rows)
        if run.verdict is not None:
            facts["verdict"] = run.verdict.sentence
        facts |= {key: value for key, value in settings.items() if isinstance(value, str | int | float)}
        problems += [f"warning of the run: {text}" for text in run.warnings]
    for file in files:  # the columns of the first readable explanation
        try:
            columns = read_header(file)["columns"]
            facts["columns"] = sorted(columns)
            facts["measured"] = measured_columns(columns.values())
            break
        except FileError:
            facts["columns"] = []
            if file == files[0]:
                problems.append(
                    f"{file.name} is damaged; explain again to rewrite it; `xmil verify` checks all files"
                )
    with suppress(XmilError):
        if not run.is_finished:
            problems.append("the command did not finish; repeat it to resume")
    if run.failed:
        reason = "failed; see failures.csv, and repeat the command to retry them"
        problems.append(f"{counted(len(run.failed), 'slide')} {reason}")
    return Report(str(path), "run", "a run folder", facts, problems=tuple(problems))
