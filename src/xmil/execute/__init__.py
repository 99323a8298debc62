"""Work on many items: a `Step` says what to do, `execute` does it with workers and keeps the ledger."""

from xmil.execute.step import (
    Listener,
    Step,
    TableRow,
    Tally,
    complete_record,
    every_column,
    execute,
    identify_inputs,
    work_in_turn,
    work_on,
)
from xmil.execute.workers import (
    MakeWorker,
    Outcome,
    Stages,
    Worker,
    Workers,
    error_line,
    process,
    stop_of,
)

__all__ = [
    "Listener", "MakeWorker", "Outcome", "Stages", "Step", "TableRow", "Tally", "Worker", "Workers",
    "complete_record", "error_line", "every_column", "execute", "identify_inputs",
    "process", "stop_of", "work_in_turn", "work_on",
]  # fmt: skip
