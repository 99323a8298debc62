"""The package is never imported here: it must be found from outside, by a process that has it installed."""

collect_ignore = ["package"]
