"""What a run left behind as flat records of places and values, and how two records differ.

A record maps a place ("slides/s00.parquet | lrp:pos") to a value: a number, a text, a list or nothing.
Numbers that are not whole are compared within a tolerance, everything else exactly; the numbers within a
text are compared by their last printed digit. Sentences for people are not recorded: words may change.
"""

from __future__ import annotations

import base64
import csv
import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.ledger import LEDGER  # digests of files, and so the machine's; its own tests check it

Record = dict[str, Any]

RELATIVE = 1e-5  # of the largest number in a list, of the number itself where it stands alone
SQUARED = 1e-4  # for squared gradients in float32: 2e-5 between processors with and without AVX
TRAINED = 1e-2  # for what follows a training, which carries roundings from step to step
LEAST = 1e-8  # differences this small in a list are rounding (float32 has 6e-8 of one)
LEAST_ALONE = 1e-5  # likewise of a number alone, such as a term of an account
LEFT_OVER = ("unexplained",)  # columns of what accounts leave over, which is rounding: likewise
COLOUR = 2  # of 255, in the mean colour of a block
LONGEST = 120  # values of a list that are all kept
GRID = 16  # blocks of a picture in each direction

# Keys whose values differ between machines, moments or checkouts, wherever they stand, each with its reason.
IGNORED = {
    "commit": "the checkout",
    "forward": "the clock",
    "forward_passes": "a ratio of two times",
    "manifest": "whether there is one, which its own tests check",
    "python": "the machine",
    "seconds": "the clock",
    "seconds_per_bag": "the clock",
    "system": "the machine",
    "version": "the package",
    "versions": "the packages",
}
# Texts that differ between machines are replaced in any value: folders by "<root>", digests of files, whose
# bytes depend on the libraries that write them, by "<digest>"; so are identifiers made from digests.
DIGEST = re.compile(
    r"\b(?:[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"
    r"|(?:(?<=SHA-256 )|(?<=commit ))[0-9a-f]{12}"
)
UNREAD = (  # files that are only listed
    ".lock", ".pdf", ".svg", ".ckpt", ".groovy", ".html", "card.md", "summary.md", "summary.txt",
)  # fmt: skip
CAPTIONED = ("certificates", "overlay", "panel", "patches", "side")  # folders of pictures that hold words
# Places that hold sentences, titles or captions, by their ends.
WORDS = (
    "| warnings",
    "| sentence",
    "| notes",
    "| title",
    "| what",
    "| detail",
    "] | means",  # of the measures of a benchmark
    "threshold | below",
    "slides.csv | measured",
    "table | measured",
    "run.json | best",
    "card.json | model",
    "card.json | data",
    "card.json | verdict",
    "card.json | dictionary",
    "card.json | faithfulness",
    "card.json | sanity",
    "card.json | concept_stability",
    "card.json | limits",
)


def record_folder(folder: Path, *, root: Path, skip: Iterable[str] = ()) -> Record:
    """The files of a folder: their list, and every value of those that hold values."""
    every = (path for path in folder.rglob("*") if path.is_file() and path.name != LEDGER)
    paths = sorted(path for path in every if not _in(path, folder, skip))
    names = [path.relative_to(folder).as_posix() for path in paths]
    record: Record = {"files": names}
    for path, name in zip(paths, names, strict=True):
        content = read_file(path)
        if content is not None:
            record |= flatten(content, name, root=root)
    return record


def _in(path: Path, folder: Path, skip: Iterable[str]) -> bool:
    return any(path.is_relative_to(folder / name) for name in skip)


def read_file(path: Path) -> Any:
    """What a file holds, by its ending; None where only its presence counts."""
    name = path.name.lower()
    if name.startswith(".") or name.endswith(UNREAD):
        return None
    if name.endswith(".png") and path.parent.name in CAPTIONED:
        return None
    for ending, read in READERS.items():
        if name.endswith(ending):
            return read(path)
    raise ValueError(f"{path}: no reader for such files; add one to READERS, or the ending to UNREAD")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_packed_json(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def _read_csv(path: Path) -> Any:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    head, *rows = rows or [[]]
    return {"columns": head, **{name: [_cell(row[i]) for row in rows] for i, name in enumerate(head)}}


def _cell(text: str) -> Any:
    """A cell of a table: a number where it looks like one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    about = {
        key.decode(): _json_or_text(value.decode())
        for key, value in (table.schema.metadata or {}).items()
        if key not in (b"pandas", b"ARROW:schema")
    }
    types = {field.name: str(field.type) for field in table.schema}
    return {"types": types, **table.to_pydict(), "metadata": about}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_npz(path: Path) -> Any:
    """Arrays by name; bytes that hold JSON as what they say."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in sorted(file.files)}
    bytes_of = {name: a.tobytes() for name, a in arrays.items() if a.dtype == np.uint8 and a.ndim == 1}
    return arrays | {name: _json_or_text(content.decode()) for name, content in bytes_of.items()}


def _read_safetensors(path: Path) -> Any:
    """Tensors by their shape and two checksums."""
    from safetensors.numpy import load_file

    return {name: checksum(value) for name, value in sorted(load_file(path).items())}


def _read_h5(path: Path) -> Any:
    import h5py

    found: dict[str, Any] = {}

    def keep(name: str, item: Any) -> None:
        about = {f"{name} @{key}": value for key, value in sorted(item.attrs.items())}
        found.update(about)
        if isinstance(item, h5py.Dataset):
            found[name] = checksum(item[()]) if item.dtype.kind in "fiu" else item[()]

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


def checksum(values: Any) -> dict[str, Any]:
    """A shape, a type, the mean size of the values, and a sum with a weight of its own for each place."""
    array = np.asarray(values)
    flat = array.astype(np.float64).ravel()
    weights = np.sin(1.0 + np.arange(flat.size))
    size = float(np.abs(flat).mean()) if flat.size else 0.0
    weighted = float((flat * weights).sum() / max(1.0, math.sqrt(flat.size)))
    return {"shape": list(array.shape), "type": str(array.dtype), "sums": [size, weighted]}


def _read_picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return picture(image)


def picture(image: Any, *, grid: int = GRID) -> dict[str, Any]:
    """A picture's size and the mean colours of its blocks."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    height, width = pixels.shape[:2]
    rows, columns = (np.linspace(0, n, min(n, grid) + 1).astype(int) for n in (height, width))
    sums = np.add.reduceat(np.add.reduceat(pixels, rows[:-1], axis=0), columns[:-1], axis=1)
    means = sums / (np.diff(rows)[:, None, None] * np.diff(columns)[None, :, None])
    blocks = base64.b64encode(np.rint(means).astype(np.uint8).tobytes()).decode()
    return {"size": [width, height], "blocks": Blocks(blocks)}


class Blocks(str):
    """Mean colours of a picture's blocks, as text."""

    __slots__ = ()
    MARK = "blocks:"

    def __new__(cls, text: str) -> Blocks:
        return super().__new__(cls, text if text.startswith(cls.MARK) else cls.MARK + text)

    @classmethod
    def colours(cls, text: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(text.removeprefix(cls.MARK)), dtype=np.uint8).astype(int)


def _read_tiff(path: Path) -> Any:
    """Channels of an OME-TIFF: sizes of its levels, its values by blocks, and where there are none."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        levels = [list(level.shape) for level in file.series[0].levels]
        array, names = (
            file.series[0].asarray(),
            re.findall(r'<Channel [^>]*Name="([^"]*)"', file.ome_metadata),
        )
    if array.dtype == np.uint8:
        from PIL import Image

        return {"levels": levels, "channels": names, **picture(Image.fromarray(array))}
    planes = array.reshape(-1, *array.shape[-2:]).astype(np.float64)
    rows, columns = (np.linspace(0, n, 9).astype(int)[:-1] for n in planes.shape[-2:])
    sums = np.add.reduceat(np.add.reduceat(np.nan_to_num(planes), rows, axis=1), columns, axis=2)
    return {"levels": levels, "channels": names, "type": str(array.dtype), "blocks": sums,
            "empty": np.isnan(planes).sum(axis=(1, 2))}  # fmt: skip


def _read_text(path: Path) -> Any:
    return path.read_text(encoding="utf-8").splitlines()


NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")

READERS: dict[str, Callable[[Path], Any]] = {
    ".ome.tif": _read_tiff,
    ".geojson": _read_json,
    ".geojson.gz": _read_packed_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".h5": _read_h5,
    ".png": _read_picture,
    ".jpg": _read_picture,
    ".txt": _read_text,
    ".md": _read_text,
    ".tex": _read_text,
    ".toml": _read_text,
    ".xml": _read_text,
}


def flatten(content: Any, place: str, *, root: Path | None = None) -> Record:
    """Places and values of something nested; rows of one kind become columns, ignored keys are left out."""
    if place.replace("[] ", "").endswith(WORDS):
        return {}
    content = plain(content, root=root)
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        keys = list(content[0])
        if all(list(row) == keys for row in content):
            content = {f"[] {key}": [row[key] for row in content] for key in keys}
        else:
            content = {f"[{i}]": row for i, row in enumerate(content)}
        return flatten(content, place)
    if isinstance(content, dict):
        found: Record = {} if content else {place: {}}
        for key, value in content.items():
            if key.removeprefix("[] ") not in IGNORED:
                found |= flatten(value, f"{place} | {key}")
        return found
    if isinstance(content, list) and any(isinstance(row, dict) or _mixed(row) for row in content):
        return flatten({f"[{i}]": row for i, row in enumerate(content)}, place)
    return {place: shortened(content) if isinstance(content, list) else content}


def shortened(values: list[Any]) -> list[Any]:
    """A list, or what tells a long one apart: its length, its first members, sums or counts."""
    leaves = list(_leaves(values))
    if len(leaves) <= LONGEST:
        return values
    kept: list[Any] = [f"{len(values)} with {len(leaves)} values", *leaves[: LONGEST // 8]]
    numbers = [None if value in ("nan", "inf", "-inf") else value for value in leaves]
    if all(value is None or _is_number(value) for value in numbers):
        missing = sum(value is None for value in numbers)
        sums = checksum([value or 0 for value in numbers])["sums"]
        return [*kept, f"{missing} missing", *plain(sums)]
    counts = Counter(str(value) for value in leaves)
    crc = zlib.crc32("\n".join(str(value) for value in leaves).encode())
    return [*kept, *(f"{number} times {value}" for value, number in counts.most_common(8)), crc]


def _mixed(row: Any) -> bool:
    return isinstance(row, list) and any(isinstance(value, dict) or _mixed(value) for value in row)


def plain(value: Any, *, root: Path | None = None) -> Any:
    """The value in JSON's types: numbers as float32 tells them apart, paths from the root."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a table of pandas
        value = {name: value[name].tolist() for name in value.columns}
    if isinstance(value, Mapping):
        return {str(key): plain(one, root=root) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one, root=root) for one in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, Blocks) or value is None or isinstance(value, bool | int):
        return value
    text = DIGEST.sub("<digest>", str(value))
    return text if root is None else text.replace(str(root), "<root>")


def differences(expected: Record, actual: Record, *, relative: float = RELATIVE) -> list[str]:
    """A line for each place that is new, gone or different."""
    lines = [f"{place}: gone (was {_short(expected[place])})" for place in expected if place not in actual]
    lines += [f"{place}: new ({_short(actual[place])})" for place in actual if place not in expected]
    for place in expected:
        if place in actual:
            least = LEAST_ALONE if place.endswith(LEFT_OVER) else LEAST
            told = difference(expected[place], actual[place], relative=relative, least=least)
            lines += [] if told is None else [f"{place}: {told}"]
    return lines


def difference(expected: Any, actual: Any, *, relative: float = RELATIVE, least: float = LEAST) -> str | None:
    """How two values differ, None where they agree within the tolerance."""
    if isinstance(expected, list) and isinstance(actual, list):
        return _of_lists(expected, actual, relative, least)
    if _is_number(expected) and _is_number(actual):
        return _of_numbers([expected], [actual], relative, LEAST_ALONE)
    if isinstance(expected, str) and isinstance(actual, str):
        return _of_texts(expected, actual, relative)
    same = type(expected) is type(actual) and expected == actual
    return None if same else f"was {_short(expected)}, is {_short(actual)}"


def _of_lists(expected: list[Any], actual: list[Any], relative: float, least: float) -> str | None:
    if _shape(expected) != _shape(actual):
        return f"was of shape {_shape(expected)}, is of {_shape(actual)}: {_short(actual)}"
    before, after = list(_leaves(expected)), list(_leaves(actual))
    numbers = [i for i in range(len(before)) if _is_number(before[i]) and _is_number(after[i])]
    told = _of_numbers([before[i] for i in numbers], [after[i] for i in numbers], relative, least)
    if told is not None:
        return told
    for i in sorted(set(range(len(before))) - set(numbers)):
        told = difference(before[i], after[i], relative=relative)
        if told is not None:
            return f"[{i}] {told}"
    return None


def _shape(value: Any) -> list[Any]:
    """The lengths of a list and of the lists within it."""
    return [len(value), *(_shape(one) for one in value if isinstance(one, list))]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_numbers(expected: list[Any], actual: list[Any], relative: float, least: float) -> str | None:
    """Whole numbers exactly, others by the largest of them."""
    whole = [isinstance(a, int) and isinstance(b, int) for a, b in zip(expected, actual, strict=True)]
    scale = max((abs(value) for value, exact in zip(expected, whole, strict=True) if not exact), default=0.0)
    allowed = max(relative * scale, least)
    worst, where = 0.0, None
    for i, (before, after) in enumerate(zip(expected, actual, strict=True)):
        off = abs(before - after)
        if off > (0 if whole[i] else allowed) and off > worst:
            worst, where = off, i
    if where is None:
        return None
    at = f"[{where}] " if len(expected) > 1 else ""
    return (
        f"{at}was {expected[where]!r}, is {actual[where]!r} (allowed: {0 if whole[where] else allowed:.2g})"
    )


def _of_texts(expected: str, actual: str, relative: float) -> str | None:
    """Blocks of colours by their distance; other texts by their words, and numbers by the last digit."""
    if expected.startswith(Blocks.MARK) and actual.startswith(Blocks.MARK):
        before, after = Blocks.colours(expected), Blocks.colours(actual)
        worst = int(np.abs(before - after).max()) if before.shape == after.shape else 255
        return None if worst <= COLOUR else f"colours of blocks differ by up to {worst} of 255"
    told = f"was {_short(expected)}, is {_short(actual)}"
    if _words(expected) != _words(actual):
        return told
    for before, after in zip(NUMBER.findall(expected), NUMBER.findall(actual), strict=True):
        step = _last_digit(before)
        allowed = max(1.01 * step, relative * abs(_value(before)), LEAST_ALONE) if step else 0.0
        if before != after and abs(_value(before) - _value(after)) > allowed:
            return told
    return None


def _words(text: str) -> list[str]:
    """What stands between the numbers of a text, whatever its columns are padded to."""
    return [re.sub(r"\s+", " ", part) for part in NUMBER.split(text)]


def _value(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def _last_digit(text: str) -> float:
    """What one more in the last printed digit is worth; nothing for whole numbers."""
    mantissa, _, exponent = text.lower().partition("e")
    _, dot, decimals = mantissa.partition(".")
    return float(f"1e{int(exponent or 0) - len(decimals)}") if dot or exponent else 0.0


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


ID = re.compile(r"\b[sc]\d\d?\b")  # a slide or a case of the cohort, in a place
ANY = "*"


def read_record(path: Path) -> Record:
    """The expectations of one run."""
    record: Record = {}
    for place, value in json.loads(path.read_text(encoding="utf-8")).items():
        if ANY in place:
            for names, one in value.items():
                record |= {place.replace(ANY, name, 1): one for name in names.split()}
        else:
            record[place] = value
    return record


def write_record(record: Record, path: Path) -> None:
    """A line for each place; what many slides have, each in a file of its own, shares a line."""
    packed: dict[str, Any] = {}
    for place, value in record.items():
        name = ID.search(place)
        if name is None:
            packed[place] = value
            continue
        of_names = packed.setdefault(ID.sub(ANY, place, count=1), {})
        same = next((names for names, one in of_names.items() if _same(one, value)), None)
        if same is not None:
            del of_names[same]
        of_names[name[0] if same is None else f"{same} {name[0]}"] = value
    lines = (
        f"{json.dumps(place)}: {json.dumps(value, ensure_ascii=False)}" for place, value in packed.items()
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)
