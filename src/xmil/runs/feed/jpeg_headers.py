"""Headers of JPEG files written anew, for decoders that take every picture of three components for YCbCr."""

from __future__ import annotations

from collections.abc import Iterator

FRAMES = (0xC0, 0xC1, 0xC2)
SCAN = 0xDA
RGB = b"RGB"


def with_rgb_names(data: bytes) -> bytes:
    """The file with its components called R, G and B, which says that they are no YCbCr."""
    out = bytearray(data)
    for marker, start in _segments(data):
        first, step = (start + 8, 3) if marker in FRAMES else (start + 3, 2)
        for i, name in enumerate(RGB):
            out[first + i * step] = name
    return bytes(out)


def component_first(data: bytes, which: int) -> bytes:
    """The file with one of its three components listed first in the frame, so that it passes for the grey."""
    out = bytearray(data)
    for marker, start in _segments(data):
        if marker in FRAMES:
            entries = [data[start + 8 + 3 * i : start + 11 + 3 * i] for i in range(3)]
            out[start + 8 : start + 17] = b"".join([entries[which], *entries[:which], *entries[which + 1 :]])
    return bytes(out)


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Frame and scan of three components: the marker, and where its length stands."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, start = data[at + 1], at + 2
        count = data[start + 7] if marker in FRAMES else data[start + 2]
        if marker in (*FRAMES, SCAN) and count == len(RGB):
            yield marker, start
        if marker == SCAN:
            return
        at = start + int.from_bytes(data[start : start + 2], "big")
