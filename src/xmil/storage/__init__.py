"""Explanations as Parquet, and the folders of runs with their ledgers: all reading and writing of them."""

from xmil.storage.about import LAYOUT, command_of, git_commit, provenance, read_run, write_run
from xmil.storage.explanations import (
    KEY,
    RAW,
    SPREAD,
    STABLE,
    STDERR,
    ConceptMaps,
    content_digest,
    is_as_written,
    load_arrays,
    patches_in,
    pick_explanation,
    read_explanation,
    read_explanations,
    read_header,
    read_interactions,
    read_provenance,
    save_arrays,
    write_arrays,
    write_explanations,
    write_interactions,
)
from xmil.storage.folder import (
    FAILURES,
    RUN,
    SLIDES,
    WHOLE_RUN,
    Item,
    RunWriter,
    check_folder,
    claim_folder,
    fingerprint,
    lock_folder,
    make_folder,
    open_folder,
    other_settings,
    sweep_folder,
)
from xmil.storage.ledger import (
    Ledger,
    Record,
    compare_files,
    file_fault,
    list_files,
    list_runs,
    read_ledger,
    seal_folder,
    start_ledger,
)
from xmil.storage.run import (
    Run,
    check_explained,
    check_run,
    explained_run,
    interactions_file,
    list_interactions,
    open_explanations,
    open_run,
)
from xmil.storage.tables import (
    Row,
    check_inside,
    read_curves,
    read_json,
    read_rows,
    write_json,
    write_table,
)

__all__ = [
    "FAILURES", "KEY", "LAYOUT", "RAW", "RUN", "SLIDES", "SPREAD", "STABLE", "STDERR", "WHOLE_RUN",
    "ConceptMaps", "Item", "Ledger", "Record", "Row", "Run", "RunWriter", "check_explained", "check_folder",
    "check_inside", "check_run", "claim_folder", "command_of", "compare_files", "content_digest",
    "explained_run", "file_fault", "fingerprint",
    "git_commit", "interactions_file", "is_as_written", "list_files", "list_interactions",
    "list_runs", "load_arrays", "lock_folder", "make_folder", "open_explanations", "open_folder", "open_run",
    "other_settings", "patches_in", "pick_explanation", "provenance", "read_curves", "read_explanation",
    "read_explanations", "read_header", "read_interactions", "read_json", "read_ledger", "read_provenance",
    "read_rows", "read_run", "save_arrays", "seal_folder", "start_ledger", "sweep_folder", "write_arrays",
    "write_explanations", "write_interactions", "write_json", "write_run", "write_table",
]  # fmt: skip
