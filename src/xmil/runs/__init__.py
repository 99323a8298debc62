"""Cohort runs: the same function over many slides, in process, in worker processes or on a Ray cluster."""

from xmil.runs.requests import Listener

__all__ = ["Listener"]
