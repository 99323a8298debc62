"""Read bags from files in every layout of the field; cohorts, splits, datasets.

Datasets need torch and live in `xmil.data.dataset`; nothing here imports it.
"""

from __future__ import annotations

from xmil.data.bags import Case, group_cases, join_bags, open_bag, read_bag, read_case, write_bag
from xmil.data.cohort import Cohort, read_cohort
from xmil.data.files import JoinReport, background, feature_files, join_features
from xmil.data.header import Ask, Header
from xmil.data.readers import list_formats, reader
from xmil.data.splits import split_folds, split_fractions

__all__ = [
    "Ask",
    "Case",
    "Cohort",
    "Header",
    "JoinReport",
    "background",
    "feature_files",
    "group_cases",
    "join_bags",
    "join_features",
    "list_formats",
    "open_bag",
    "read_bag",
    "read_case",
    "read_cohort",
    "reader",
    "split_folds",
    "split_fractions",
    "write_bag",
]
