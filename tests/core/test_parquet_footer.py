"""The counts of a Parquet footer, against Arrow's own reading of sound files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xmil.core.budget import column_chunks

TYPES = ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"]


def write(path: Path) -> Path:
    texts = ["x" * i for i in range(50)] * 4
    held = {"a": np.arange(200, dtype="f4"), "s": texts, "list": [[1.0] * 3] * 200, "deep": [["q"]] * 200}
    held["flag"] = [True] * 200
    options = {"use_dictionary": False, "column_encoding": {"s": "DELTA_BYTE_ARRAY", "a": "PLAIN"}}
    pq.write_table(pa.table(held), path, row_group_size=60, **options)
    return path


def test_the_counts_are_arrows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    footer, ours = pq.read_metadata(path), iter(column_chunks(path))
    for group in range(footer.num_row_groups):
        for i in range(footer.num_columns):
            theirs, chunk = footer.row_group(group).column(i), next(ours)
            assert chunk.values == theirs.num_values
            assert chunk.unpacked == theirs.total_uncompressed_size
            assert ".".join(chunk.path) == theirs.path_in_schema
            assert TYPES[chunk.physical] == theirs.physical_type
            assert (7 in chunk.encodings) == ("DELTA_BYTE_ARRAY" in theirs.encodings)
    assert next(ours, None) is None


def test_damaged_footers_raise_one_error(tmp_path: Path) -> None:
    content = write(tmp_path / "t.parquet").read_bytes()
    rng, told = np.random.default_rng(0), list[str]()
    length = int.from_bytes(content[-8:-4], "little")
    for _ in range(300):
        spoilt = bytearray(content)
        for at in rng.integers(len(content) - 8 - length, len(content), size=3):
            spoilt[at] = rng.integers(256)
        (tmp_path / "spoilt").write_bytes(spoilt)
        try:
            column_chunks(tmp_path / "spoilt")
        except ValueError as error:
            told.append(str(error))
    assert told
    assert not any("\n" in line for line in told)
    for short in (b"", b"PAR1", content[:-9]):
        (tmp_path / "short").write_bytes(short)
        with pytest.raises(ValueError, match=r"not a Parquet file|damaged"):
            column_chunks(tmp_path / "short")
