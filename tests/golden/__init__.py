"""Golden runs: every verb on a seeded cohort, compared value by value with `expected/`.

`python -m tests.golden --write` makes the expectations again and prints what changed.
"""
