"""Reports of a run: `results.json`, `bags.parquet` and the page; comparison of two runs.

The page is one self-contained HTML file, for a browser or a frame in the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from xmil.bench.units import Unit, read_units
from xmil.bench.verdicts import OURS, draws_of, learned_repetitions, row_title, summary_of
from xmil.core.durable import write_atomically, write_text
from xmil.core.errors import FileError, InputError
from xmil.core.explanation import CARDS
from xmil.core.quoting import script_json
from xmil.evaluate.statistics import FEWEST, SMALLEST, Interval
from xmil.heatmaps import Html, bullets, join, method_colour, page, table, tag
from xmil.storage import provenance

RESULTS, BAGS, PAGE = "results.json", "bags.parquet", "index.html"
FEW = 8  # most columns with open plots
DRAWN = ("tools", "table", "plot", "agreement", "cost")  # elements that the page's script fills
FILES = (
    ', <a href="results.json" download>results.json</a> with all settings, '
    '<a href="bags.parquet" download>bags.parquet</a> with every measure of every bag'
)

STYLE = """
body { font-size: 15px; max-width: 1500px; } p, li, summary { max-width: 110ch; } ul { margin: .3rem 0; }
h3 { margin: 1.3rem 0 .3rem; } details { margin: .15rem 0; } summary { cursor: pointer; }
.table, .agreement, .cost { overflow-x: auto; }
table { font-size: .86rem; } th, td { padding: .28rem .6rem; white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
thead th, thead th:first-child { background: var(--soft); cursor: pointer; user-select: none; }
th small, td small { display: block; color: var(--dim); font-weight: normal; }
td.best { background: #2e8b5730; font-weight: 600; }
tr.control td, tr.oracle td { color: var(--dim); font-style: italic; } td.none { color: var(--dim); }
.tools { margin: .6rem 0; display: flex; gap: .8rem; align-items: center; flex-wrap: wrap; }
select, .tools a { font: inherit; padding: .2rem .6rem; border: 1px solid var(--line); border-radius: 4px;
  background: Canvas; color: inherit; text-decoration: none; cursor: pointer; }
.plot { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; margin-top: .8rem; } .plot figure { margin: 0; }
.plot text { font-size: 10px; fill: currentColor; } li.failed { color: var(--mind); font-weight: 600; }
"""


def write_report(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Summarise a folder, write the files, and return the content of `results.json`."""
    units = read_units(out)
    about = {"command": "bench", "settings": settings, "measured": measured_on(units), **provenance()}
    summary = json.loads(json.dumps(summary_of(units, about), default=str))
    if not summary["suites"]:
        raise InputError(f"{out}: has no measurements yet.")
    write_text(out / RESULTS, json.dumps(summary, indent=1) + "\n")
    write_bags(units, out / BAGS)
    write_text(out / PAGE, page_of(summary))
    return dict(summary)


def measured_on(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """List the distinct sets of versions, machine and commit of all rows, in order."""
    rows = [row.get("measured") for unit in units for row in unit.rows.values()]
    return [
        json.loads(text) for text in dict.fromkeys(json.dumps(row, sort_keys=True) for row in rows if row)
    ]


def write_bags(units: Sequence[Unit], path: Path) -> None:
    """Write one row per bag and method, with every measure, to one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for unit in (unit for unit in units if unit.rows):
        rows = [
            (unit.suite, unit.problem, unit.model, r, method, bag)
            for r, method in unit.values
            for bag in unit.facts[r]["bags"]
        ]
        names = ("suite", "problem", "model", "repetition", "method", "bag")
        fields = {
            name: pa.array(cells, pa.int32()) if name == "repetition" else pa.array(cells).dictionary_encode()
            for name, cells in zip(names, zip(*rows, strict=True), strict=True)
        }
        grid = np.concatenate(list(unit.values.values())).astype(np.float32)
        tables.append(pa.table({**fields, **dict(zip(unit.measures, grid.T, strict=True))}))
    table = pa.concat_tables(tables, promote_options="default")
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def page_of(summary: dict[str, Any], *, beside: bool = True) -> str:
    """Make the page of a run's summary; with `beside`, it links the files of the run's folder."""
    script = files("xmil.bench").joinpath("page.js").read_text(encoding="utf-8")
    intro = Html(
        "Means with 95 % intervals, bags and repetitions drawn with replacement; on tissue whole patients. "
        f"Fewer than {FEWEST} units have none. Green: the highest mean of a column, which may be no better "
        f"than the next: differences below {SMALLEST:g} count as none. The oracle and the rows that are "
        "wrong on purpose (Random, constant, lrp_flipped) cannot win. Click a heading to sort. Download: "
        '<a id="save" href="#" download="results.json">these '
        f"figures</a>{FILES if beside else ''}."
    )
    return page(
        "xmil bench",
        tag("h1", "Explanations of multiple instance learning, measured"),
        tag("p", _about(summary)),
        tag("p", intro),
        tag("noscript", "The tables and plots need JavaScript; the sentences below do not."),
        *map(_suite, summary["suites"]),
        _across(summary["across"]) if summary["across"] else "",
        _json({name: method_colour(name) for name in CARDS}, "colours"),
        _json({name: row_title(name) for name in _rows(summary)}, "names"),
        _json(slim(summary), "data"),
        tag("script", Html(script)),
        style=STYLE,
    )


def _rows(summary: dict[str, Any]) -> list[str]:
    """The methods of all columns."""
    columns = [column for suite in summary["suites"] for column in suite["columns"]]
    return list(dict.fromkeys(row["method"] for column in columns for row in column["rows"]))


def slim(value: Any) -> Any:
    """Reduce the summary for the page: five digits, no settings."""
    if isinstance(value, dict):
        return {key: slim(part) for key, part in value.items() if key != "settings"}
    if isinstance(value, list):
        return [slim(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _json(value: Any, name: str) -> Html:
    return tag("script", Html(script_json(value)), type="application/json", id=name)


def _about(summary: dict[str, Any]) -> str:
    """Describe the machines, the protocol, and which models count."""
    sentences = []
    for machine in summary.get("measured") or [summary]:  # older runs only name the machine of the report
        versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
        commit = f", commit {machine['commit'][:12]}" if machine.get("commit") else ""
        device = f" on {machine['device']}" if machine.get("device") else ""
        sentences.append(f"{versions}{commit}{device}, Python {machine['python']}, {machine['system']}.")
    columns = [column for suite in summary["suites"] for column in suite["columns"]]
    seeds = ", ".join(str(n) for n in sorted({n for column in columns for n in column["seeds"].values()}))
    protocol = summary["settings"].get("protocol_name", "").capitalize()
    sentences += [
        f"{protocol} protocol; seeds of the models: {seeds}.",
        f"Only models with a bag AUROC of {summary['threshold']['auroc']} or more count.",
    ]
    return " ".join(sentences)


def _suite(suite: dict[str, Any]) -> Html:
    drawn = {key: tag("div", kind=key) for key in DRAWN}
    means = [
        join((tag("b", m["title"]), f" ({'more' if m['better'] > 0 else 'less'} is better): {m['means']}"))
        for m in suite["measures"]
    ]
    checks = sorted(suite["controls"], key=lambda check: bool(check["passed"]))  # failed ones first
    failed = sum(not check["passed"] for check in checks)
    state = f"{len(checks) - failed} of {len(checks)} checks hold."
    lines = [
        tag(
            "li",
            f"{'holds' if check['passed'] else 'fails'}: {check['what']} ({check['detail']})",
            kind="" if check["passed"] else "failed",
        )
        for check in checks
    ]
    return tag(
        "section",
        tag("h2", suite["title"]),
        _details("What is measured", bullets(means)),
        drawn["tools"],
        drawn["table"],
        _details("Plots", drawn["plot"], is_open=len(suite["columns"]) <= FEW),
        tag("h3", "Who leads"),
        *_verdicts(suite),
        tag("h3", f"Where {row_title(OURS)}, the default, is behind"),
        bullets(suite["weak_spots"]) or tag("p", "In no column of this suite."),
        tag("h3", "The suite tested on itself"),
        _details(state, tag("ul", *lines), is_open=failed > 0),
        tag("h3", "Do the measures agree?"),
        drawn["agreement"],
        tag("h3", "Cost"),
        drawn["cost"],
        id=suite["name"],
        **{"data-suite": suite["name"]},
    )


def _verdicts(suite: dict[str, Any]) -> list[Html]:
    titles = {m["name"]: m["title"] for m in suite["measures"]}
    parts = []
    for column in suite["columns"]:
        title = tag("b", f"{column['problem']}, {column['model']}")
        if not column["verdicts"]:
            parts.append(_details(join((title, f": {column['status']}")), is_open=True))
            continue
        lead, *others = [f"{titles[v['measure']]}: {v['sentence']}" for v in column["verdicts"]]
        parts.append(_details(join((title, f", {lead}")), bullets(others)))
    return parts


def _details(summary: str, *parts: object, is_open: bool = False) -> Html:
    return tag("details", tag("summary", summary), *parts, open="open" if is_open else "")


def _across(pairs: list[dict[str, Any]]) -> Html:
    words = "Rankings of all rows but the oracle, by the leading measure of each suite, on the same models."
    taus = ["none" if p["tau"] is None else f"{p['tau']:.2f}" for p in pairs]
    rows = [
        [p["problem"], p["model"], " / ".join(p["measures"]), tau, p["rows"]]
        for p, tau in zip(pairs, taus, strict=True)
    ]
    return tag(
        "section",
        tag("h2", "Do truth and faithfulness agree?"),
        tag("p", words),
        table(rows, head=["problem", "model", "measures", "Kendall's tau", "rows"]),
    )


@dataclass(frozen=True)
class Change:
    """A row in two runs: the second minus the first, or the reason why they cannot be paired."""

    suite: str
    problem: str
    model: str
    method: str
    measure: str
    first: float
    second: float
    difference: Interval | None
    reason: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval excludes zero and the difference is large enough to matter."""
        d = self.difference
        return d is not None and abs(d.estimate) >= SMALLEST and bool(d.low > 0 or d.high < 0)


def compare_runs(first: Path, second: Path) -> list[Change]:
    """Compare every row that both runs have, by every measure."""
    units = []
    for path in (first, second):
        units.append({(u.suite, u.problem, u.model): u for u in read_units(path) if u.rows})
        if not units[-1]:
            raise FileError(f"{path}: has no results of 'xmil bench'.")
    a, b = units
    return [change for key in a if key in b for change in _changes(a[key], b[key])]


def _changes(a: Unit, b: Unit) -> list[Change]:
    counted = [r for r in learned_repetitions(a) if r in learned_repetitions(b)]
    # faithfulness uses the bags that a model classifies correctly, which differ between models
    same = [r for r in counted if all(a.facts[r][key] == b.facts[r][key] for key in ("checksum", "bags"))]
    methods = [m for m in a.methods if m in b.methods]
    if not counted or not methods:
        return []
    if len(same) == len(counted):
        return _paired(a, b, same, methods)
    reason = "the bags differ" if not same else "some repetitions have other bags"
    means = [draws_of(u, counted, draws=2) for u in (a, b)]
    return [
        Change(a.suite, a.problem, a.model, m, k, means[0].mean(m, k), means[1].mean(m, k), None, reason)
        for m in methods
        for k in a.measures
        if k in b.measures
    ]


def _paired(a: Unit, b: Unit, repetitions: list[int], methods: list[str]) -> list[Change]:
    """Compare both runs' rows as rows of one column, so that they share their draws."""
    joined = Unit(a.path, a.settings, a.measures, a.facts)
    for run, unit in (("A", a), ("B", b)):
        for r, m in ((r, m) for r in repetitions for m in methods if (r, m) in unit.values):
            joined.values[r, f"{run} {m}"] = unit.values[r, m]
            joined.rows[r, f"{run} {m}"] = unit.rows[r, m]
    draws = draws_of(joined, repetitions)
    column = (a.suite, a.problem, a.model)
    return [
        Change(*column, m, k, draws.mean(f"A {m}", k), draws.mean(f"B {m}", k), gap)
        for m in methods
        if f"A {m}" in draws.methods and f"B {m}" in draws.methods
        for k in a.measures
        if np.isfinite((gap := draws.difference(f"B {m}", f"A {m}", k)).estimate)
    ]
