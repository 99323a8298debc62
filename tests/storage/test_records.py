"""What a ledger knows of an item after its files were written again."""

from __future__ import annotations

from xmil.core.durable import write_text
from xmil.core.ledger import writing_for
from xmil.storage import Record, open_folder, read_ledger


def test_files_written_after_the_record_put_the_item_in_doubt(tmp_path):
    """As a kill leaves it: the record may be of the files before."""
    with open_folder(tmp_path, "bench") as folder:
        for item in ("a", "b"):
            with writing_for(item):
                write_text(tmp_path / f"{item}.txt", "before")
            folder.record(item, Record(parts=["one"]))
        with writing_for("a"):
            write_text(tmp_path / "a.txt", "after")
        assert list(read_ledger(tmp_path).records) == ["b"]
        folder.record("a", Record(parts=["one", "two"]))
    ledger = read_ledger(tmp_path)
    assert ledger.records["a"].parts == ["one", "two"]
    assert ledger.files["a.txt"]["of"] == "a"
