"""Bags from files: readers for every layout the field writes, cohorts, splits, datasets."""

from __future__ import annotations

from xmil.data.bags import open_bag, read_bag, write_bag
from xmil.data.header import Ask, Header
from xmil.data.readers import list_formats, reader

__all__ = ["Ask", "Header", "list_formats", "open_bag", "read_bag", "reader", "write_bag"]
