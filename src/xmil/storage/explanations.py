"""Explanations as Parquet: boxes and one column per method and target, the audit in the metadata.

Interactions are tables of pairs; the concept maps of a slide are arrays with a few facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import FloatArray, IntArray, Patches
from xmil.core.budget import check_regular, read_arrays, read_parquet
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, InputError, StrPath, XmilError, absent, unknown_name
from xmil.core.explanation import Audit, Explanation
from xmil.core.interactions import CORNERS, Interactions
from xmil.core.services import register_service
from xmil.core.task import Target
from xmil.core.text import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

LAYOUT = 1  # files of later layouts are refused, earlier ones still load
KEY = b"xmil"
RELEVANCE = "relevance|"
SPREAD = "~spread"  # suffix of a column: the standard deviation over the models of an ensemble
STDERR = "~stderr"  # the standard error of sampled scores
STABLE = "~stable"  # whether the sign is sure
BAG_FIELDS = ("bag", "model")
PLACE_FIELDS = ("patch_size", "mpp", "unit", "raw_edge", "slide_size")  # the last three are optional
RAW = ("raw_x", "raw_y")  # coordinates that need the slide's mpp
_COLUMN_FIELDS = ("method", "signed", "output", "params")
_TARGET_FIELDS = ("cls", "against", "name", "against_name")


@register_service
def write_explanations(
    explanations: Sequence[Explanation], path: StrPath, *, provenance: Mapping[str, Any] | None = None
) -> None:
    """Write the explanations of one bag into one Parquet file, whole or not at all."""
    import pyarrow.parquet as pq

    table = _to_table(explanations, dict(provenance or {}))
    write_atomically(
        path, lambda temporary: pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
    )


def read_explanations(path: StrPath) -> list[Explanation]:
    """Read every explanation in a file, in the file's order."""
    header, table = _open(path)
    return [_from_table(header, table, column, path) for column in header["columns"]]


@register_service
def read_explanation(path: StrPath, *, method: str | None = None, target: Any = None) -> Explanation:
    """Read the one explanation of a method and target; refuse if several fit."""
    header, table = _open(path)
    try:
        columns = [name for name, meta in header["columns"].items() if _fits(meta, method, target)]
    except (KeyError, TypeError, AttributeError):
        raise FileError(f"{path}: the explanation's metadata is damaged; explain the slide again.") from None
    if len(columns) != 1:
        names = ", ".join(columns or header["columns"])
        fault = "several explanations fit" if columns else "no explanation fits"
        raise InputError(f"{path}: {fault}; name the method and target. Found: {names}.")
    return _from_table(header, table, columns[0], path)


def pick_explanation(path: StrPath, method: str, target: str | None = None) -> Explanation:
    """Read the explanation of a method and target, a name or class; by default the method's last one."""
    every = read_explanations(path)
    own = [e for e in every if e.method == method]
    name = Path(path).name
    if not own:
        raise unknown_name(f"method of {name}", method, dict.fromkeys(e.method for e in every))
    if target is None:
        return own[-1]
    fitting = [e for e in own if target in (str(e.target), str(e.target.cls))]
    if not fitting:
        raise unknown_name(f"target of {name}", target, [str(e.target) for e in own])
    return fitting[0]


def is_as_written(path: StrPath) -> bool:
    """Whether a file's header and columns match its stored digest; True without a digest."""
    header, table = _open(path)
    stored = header.pop("digest", None)
    try:
        return stored is None or stored == content_digest(header, table)
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # a column of another type
        return False


def read_header(path: StrPath) -> dict[str, Any]:
    """Read the header of a file, without its scores."""
    return _open(path, columns=[])[0]


def read_provenance(path: StrPath) -> tuple[dict[str, Any], int]:
    """Read a file's header and number of instances from its footer only, which is fast for many files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular(path)
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise FileError(
            f"{path}: not a readable Parquet file ({why}); copy it or explain it again."
        ) from None
    return _checked_header(footer.metadata, path), int(footer.num_rows)


def _to_table(explanations: Sequence[Explanation], provenance: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    if not explanations:
        raise InputError("There is no explanation to write.")
    first = explanations[0]
    _check_same_bag(explanations)
    empty = pa.nulls(len(first), pa.int64())
    xy0 = (empty, empty) if first.coords is None else map(pa.array, first.coords.T)
    arrays: dict[str, Any] = dict(zip(("x0", "y0"), xy0, strict=True))
    if first.raw_coords is not None:
        arrays |= {name: pa.array(first.raw_coords[:, i]) for i, name in enumerate(RAW)}
    for e in explanations:
        arrays[e.column] = pa.array(e.scores, type=pa.float32())
        columns = {SPREAD: e.spread, STDERR: e.stderr, STABLE: e.stable}
        for suffix, values in columns.items():
            if values is not None:
                kind = pa.bool_() if suffix == STABLE else pa.float32()
                arrays[e.column + suffix] = pa.array(values, type=kind)
        if e.relevance is not None:
            flat = pa.array(e.relevance.ravel(), type=pa.float32())
            arrays[RELEVANCE + e.column] = pa.FixedSizeListArray.from_arrays(flat, e.relevance.shape[1])
    header = {
        "layout": LAYOUT,
        "version": __version__,
        "columns": {
            e.column: {
                **{key: getattr(e, key) for key in _COLUMN_FIELDS},
                "target": {key: getattr(e.target, key) for key in _TARGET_FIELDS},
                "audit": None if e.audit is None else e.audit.as_dict(),
                "logits": [float(value) for value in e.logits],
                "warnings": list(e.warnings),
            }
            for e in explanations
        },
        "provenance": provenance,
        **{key: getattr(first, key) for key in (*BAG_FIELDS, *PLACE_FIELDS)},
    }
    if first.patches.edge_guess is not None:
        header["edge_guess"] = first.patches.edge_guess
        header["edge_note"] = first.patches.edge_note
    table = pa.table(arrays)
    header = json.loads(json.dumps(header, default=_plain))
    header["digest"] = content_digest(header, table)
    return table.replace_schema_metadata({KEY: json.dumps(header)})


def content_digest(header: Mapping[str, Any], table: pa.Table) -> str:
    """Digest the content of a file, independent of its compression, to detect any later change."""
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in table.column_names:
        column = table[name].combine_chunks()
        flat = column.flatten() if name.startswith(RELEVANCE) else column
        values = flat.to_numpy(zero_copy_only=False)
        digest.update(f"|{name}|{values.dtype}|".encode())
        digest.update(values.tobytes() if values.dtype.kind in "biuf" else repr(values.tolist()).encode())
    return digest.hexdigest()


def _check_same_bag(explanations: Sequence[Explanation]) -> None:
    first = explanations[0]
    columns = [e.column for e in explanations]
    if len(set(columns)) != len(columns):
        raise InputError(
            f"Two explanations share a column; each method and target once. Got: {', '.join(columns)}."
        )
    for e in explanations[1:]:
        if len(e) != len(first) or not _same(e.coords, first.coords) or e.bag != first.bag:
            raise InputError(
                "Explanations of different bags cannot share a file; write one file for each bag."
            )


def _same(a: IntArray | None, b: IntArray | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))


def _open(path: StrPath, columns: list[str] | None = None) -> tuple[dict[str, Any], pa.Table]:
    table = _read_table(path, columns, checksums=True)
    return _checked_header(table.schema.metadata, path), table


def _read_table(path: StrPath, columns: list[str] | None = None, *, checksums: bool = False) -> pa.Table:
    import pyarrow as pa

    try:
        return read_parquet(path, columns, checksums=checksums)
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except XmilError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise FileError(f"{path}: not a readable Parquet file ({why}); copy or make it again.") from None


def _checked_header(metadata: Mapping[bytes, bytes] | None, path: StrPath) -> dict[str, Any]:
    raw = (metadata or {}).get(KEY)
    if raw is None:
        raise FileError(
            f"{path}: a Parquet file, but not an explanation (no xmil metadata); give one of `xmil explain`."
        )
    try:
        header = parse_json(raw)
        layout, columns = int(header["layout"]), header["columns"]
        if not isinstance(columns, dict) or not all(map(_is_column, columns.values())):
            raise TypeError
    except (ValueError, TypeError, LookupError, ArithmeticError):
        raise FileError(f"{path}: the explanation's metadata is damaged; explain the slide again.") from None
    if layout > LAYOUT:
        raise FileError(
            f"{path}: written by a later xmil (layout {layout} > {LAYOUT}); upgrade xmil to read it."
        )
    return dict(header)


def _is_column(about: object) -> bool:
    """Whether a header describes a valid column: a method, its parameters, an audit of numbers."""
    if not isinstance(about, dict) or not isinstance(about.get("method"), str):
        return False
    params, audit = about.get("params"), about.get("audit")
    is_audit = audit is None or (
        isinstance(audit, dict) and all(isinstance(share, int | float) for share in audit.values())
    )
    return is_audit and isinstance(params, dict | None)


def _from_table(header: Mapping[str, Any], table: pa.Table, column: str, path: StrPath) -> Explanation:
    try:
        meta = header["columns"][column]
        return Explanation(
            scores=table[column].to_numpy().astype(np.float32),
            logits=np.asarray(meta["logits"], dtype=np.float32),
            target=Target(**meta["target"]),
            audit=None if meta["audit"] is None else Audit(**meta["audit"]),
            patches=patches_in(header, table),
            relevance=_relevance(table, column),
            spread=_optional(table, column + SPREAD),
            stderr=_optional(table, column + STDERR),
            stable=_optional(table, column + STABLE, np.bool_),
            warnings=tuple(str(line) for line in meta.get("warnings", ())),
            **{key: meta[key] for key in _COLUMN_FIELDS},
            **{key: header[key] for key in BAG_FIELDS},
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FileError(
            f"{path}: the explanation {column!r} is damaged ({error}); explain it again."
        ) from None


def patches_in(header: Mapping[str, Any], table: pa.Table) -> Patches:
    """Read the places of the instances in a file from its header and table."""
    size = header.get("slide_size")
    return Patches(
        coords=None if table["x0"].null_count else _stack(table, ("x0", "y0")).astype(np.int64),
        patch_size=_number(header["patch_size"], int),
        mpp=_number(header["mpp"], float),
        raw_coords=_stack(table, RAW).astype(np.float64) if set(RAW) <= set(table.column_names) else None,
        unit=header.get("unit"),
        raw_edge=_number(header.get("raw_edge"), float),
        slide_size=None if size is None else (int(size[0]), int(size[1])),
        edge_guess=None if header.get("edge_guess") is None else str(header["edge_guess"]),
    )


def _stack(table: pa.Table, names: tuple[str, ...]) -> npt.NDArray[Any]:
    return np.stack([table[name].to_numpy() for name in names], axis=1)


def _number(value: Any, kind: type) -> Any:
    return None if value is None else kind(value)


def _optional(table: pa.Table, name: str, kind: type[Any] = np.float32) -> npt.NDArray[Any] | None:
    return table[name].to_numpy().astype(kind) if name in table.column_names else None


def _relevance(table: pa.Table, column: str) -> FloatArray | None:
    name = RELEVANCE + column
    if name not in table.column_names:
        return None
    lists = table[name].combine_chunks()
    return np.asarray(lists.flatten().to_numpy(), dtype=np.float32).reshape(len(lists), -1)


def _fits(meta: Mapping[str, Any], method: str | None, target: Any) -> bool:
    if method is not None and meta["method"] != method:
        return False
    if target is None:
        return True
    stored = Target(**meta["target"])
    return stored == Target.of(target) or str(stored) == str(target)


def _plain(value: Any) -> Any:
    """Convert parameters for JSON: NumPy numbers and arrays to plain ones, anything else to text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


INTERACTIONS_KEY, INTERACTIONS_LAYOUT = b"xmil-interactions", 1


@register_service
def write_interactions(interactions: Interactions, path: StrPath) -> None:
    """Write the pairs of one bag as a Parquet table, with target and provenance in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs, corners, groups = interactions.pairs, interactions.corners, interactions.groups
    columns: dict[str, Any] = {"first": pairs[:, 0], "second": pairs[:, 1], "value": interactions.values}
    columns |= {"stderr": interactions.stderr, "alone": interactions.alone}
    columns |= {} if corners is None else dict(zip(CORNERS, corners.T, strict=True))
    header = {
        "layout": INTERACTIONS_LAYOUT,
        "version": __version__,
        "target": asdict(interactions.target),
        "groups": None if groups is None else groups.tolist(),
        **{key: getattr(interactions, key) for key in ("output", "bag", "model", "patch_size", "names")},
        "params": dict(interactions.params),
        "warnings": list(interactions.warnings),
    }
    metadata = {INTERACTIONS_KEY: json.dumps(header, default=str)}
    table = pa.table(columns).replace_schema_metadata(metadata)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


@register_service
def read_interactions(path: StrPath) -> Interactions:
    """Read a file written by `write_interactions`."""
    table = _read_table(path)
    raw = (table.schema.metadata or {}).get(INTERACTIONS_KEY)
    if raw is None:
        raise FileError(f"{path}: a Parquet file, but it holds no interactions.")
    try:
        header = parse_json(raw)
        if header["layout"] > INTERACTIONS_LAYOUT:
            raise ValueError(f"layout {header['layout']} of a later xmil")
        groups, names = header["groups"], header["names"]
        has_corners = set(CORNERS) <= set(table.column_names)
        return Interactions(
            pairs=_stack(table, ("first", "second")).astype(np.int64),
            values=table["value"].to_numpy(),
            stderr=table["stderr"].to_numpy(),
            alone=table["alone"].to_numpy(),
            target=Target(**header["target"]),
            names=None if names is None else tuple(names),
            groups=None if groups is None else np.array(groups, dtype=np.int64),
            corners=_stack(table, CORNERS) if has_corners else None,
            warnings=tuple(header["warnings"]),
            **{key: header[key] for key in ("output", "bag", "model", "patch_size", "params")},
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FileError(f"{path}: the interactions are damaged ({error}); compute them again.") from None


CONCEPTS_LAYOUT = 1
Stored = TypeVar("Stored")


@register_service
def save_arrays(path: StrPath, arrays: dict[str, Any], about: dict[str, Any]) -> None:
    """Write arrays and facts about them as one compressed NumPy file, whole or not at all."""
    write_arrays(path, {**arrays, "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)})


def write_arrays(path: StrPath, arrays: Mapping[str, Any]) -> None:
    """Write arrays as one compressed NumPy file, whole or not at all."""

    def write(part: str) -> None:
        with Path(part).open("wb") as stream:
            np.savez_compressed(stream, **arrays)

    write_atomically(path, write)


@register_service
def load_arrays(
    path: StrPath, build: Callable[[dict[str, Any], Any], Stored], what: str, way_out: str
) -> Stored:
    """Build an object from a file of `save_arrays`; `what` and `way_out` are for the error."""
    try:
        arrays = read_arrays(path)
        return build(arrays, parse_json(bytes(arrays.pop("about")).decode()))
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except FileError:
        raise
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise FileError(f"{path}: not a {what} ({error}); {way_out}.") from None


@dataclass(frozen=True, eq=False)
class ConceptMaps:
    """Values (n, k): the share of each patch's score, one of `scores` (n,), through each concept."""

    values: FloatArray
    scores: FloatArray
    method: str
    target: str

    def __len__(self) -> int:
        return len(self.values)

    def save(self, path: StrPath) -> None:
        """Write one compressed NumPy file, whole or not at all."""
        about = {"layout": CONCEPTS_LAYOUT, "method": self.method, "target": self.target}
        save_arrays(path, {"values": self.values, "scores": self.scores}, about)

    @classmethod
    def load(cls, path: StrPath) -> ConceptMaps:
        """Read a file written by `save`."""

        def build(arrays: dict[str, Any], about: Any) -> ConceptMaps:
            values, scores = (np.asarray(arrays[name], dtype=np.float32) for name in ("values", "scores"))
            if values.ndim != 2 or scores.shape != values.shape[:1]:
                raise ValueError("values and scores do not fit")
            return cls(values, scores, str(about["method"]), str(about["target"]))

        return load_arrays(path, build, "file of concepts", "run `xmil insight` again")
