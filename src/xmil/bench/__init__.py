"""The referee: problems with known evidence (digits, tissue, confounders), entries, measures, Table 1."""

from xmil.bench.digits import (
    BAG_SIZE,
    CONFOUNDERS,
    DIGITS,
    FLIPPING,
    PAIRS,
    TASKS,
    Codes,
    contains,
    draw_digits,
)
from xmil.bench.entries import Exam, code_digest, method_entry
from xmil.bench.histology import (
    CELLS,
    EPITHELIAL,
    camelyon_problem,
    colon_problems,
    cut,
    evidence_of,
    folds,
    label_of,
    lesions_of,
    nuclei,
    read_asap,
)
from xmil.bench.instances import (
    STRENGTH,
    VARIANTS,
    WEAK,
    BagSet,
    Instances,
    Table,
    draw_bags,
    draw_splits,
    load_instances,
    read_idx,
    sklearn_images,
    stack_sets,
    with_variants,
)
from xmil.bench.measures import (
    TRUTH,
    Measure,
    bag_auroc,
    grade_faithfulness,
    grade_lesions,
    keep_correct,
    probabilities,
)
from xmil.bench.models import PAPER_MODELS, SETUPS, Setup, model_entry
from xmil.bench.plots import COLUMNS, clearest_bag, colour_tiles, colours, draw_all
from xmil.bench.problems import SPLITS, Block
from xmil.bench.protocol import (
    PAPER_METHODS,
    PAPER_TASKS,
    QUICK,
    TABLE1_METHODS,
    Configuration,
    DigitProblem,
    Protocol,
    background,
    paper_figure,
    train_stacked,
)
from xmil.bench.referee import Contest, export, make_contests, measure, measure_contests, read_settings
from xmil.bench.report import PAGE, compare_runs, measured_on, page_of, write_report
from xmil.bench.scoring import MethodSpec, project, score_bags
from xmil.bench.suites import QUICK_PLAN, SUITES, Plan, Suite, settings_of
from xmil.bench.tables import (
    FORMATS,
    as_csv,
    as_latex,
    as_markdown,
    as_records,
    as_text,
    notes,
    rows_of,
    summarise,
    write_rows,
)
from xmil.bench.tissue import Tissue, read_tissue, statistics, tissue_problems
from xmil.bench.trained import BUFFER, FLAT, Trained, load_stack, read_stack, save_stack
from xmil.bench.training import Adam, Lap, Stacked, Training, fit
from xmil.bench.units import Unit, read_units
from xmil.bench.verdicts import (
    NOT_LEARNED,
    Column,
    checks,
    column_of,
    draws_of,
    kendall,
    places,
    verdict_of,
    weak_spots,
)

__all__ = [
    "BAG_SIZE", "BUFFER", "CELLS", "COLUMNS", "CONFOUNDERS", "DIGITS", "EPITHELIAL", "FLAT", "FLIPPING",
    "FORMATS", "NOT_LEARNED", "PAGE", "PAIRS", "PAPER_METHODS", "PAPER_MODELS", "PAPER_TASKS", "QUICK",
    "QUICK_PLAN", "SETUPS", "SPLITS", "STRENGTH", "SUITES", "TABLE1_METHODS", "TASKS", "TRUTH",
    "VARIANTS", "WEAK", "Adam", "BagSet", "Block", "Codes", "Column", "Configuration", "Contest",
    "DigitProblem", "Exam", "Instances", "Lap", "Measure", "MethodSpec", "Plan", "Protocol", "Setup",
    "Stacked", "Suite", "Table", "Tissue", "Trained", "Training", "Unit", "as_csv", "as_latex",
    "as_markdown", "as_records", "as_text", "background", "bag_auroc", "camelyon_problem", "checks",
    "clearest_bag", "code_digest", "colon_problems", "colour_tiles", "colours", "column_of",
    "compare_runs", "contains", "cut", "draw_all", "draw_bags", "draw_digits", "draw_splits",
    "draws_of", "evidence_of", "export", "fit", "folds", "grade_faithfulness", "grade_lesions",
    "keep_correct", "kendall", "label_of", "lesions_of", "load_instances", "load_stack",
    "make_contests", "measure", "measure_contests", "measured_on", "method_entry", "model_entry",
    "notes", "nuclei", "page_of", "paper_figure", "places", "probabilities", "project", "read_asap",
    "read_idx", "read_settings", "read_stack", "read_tissue", "read_units", "rows_of", "save_stack",
    "score_bags", "settings_of", "sklearn_images", "stack_sets", "statistics", "summarise",
    "tissue_problems", "train_stacked", "verdict_of", "weak_spots", "with_variants", "write_report",
    "write_rows",
]  # fmt: skip
