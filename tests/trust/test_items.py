"""Every way to be silently wrong that is known has a test which carries its number."""

from __future__ import annotations

import re
from pathlib import Path

KNOWN = range(1, 25)
TESTS = Path(__file__).parents[1]


def test_every_item_has_a_test_with_its_number() -> None:
    names = [
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def test_item_(\d\d)_", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert {int(name) for name in names} == set(KNOWN)
