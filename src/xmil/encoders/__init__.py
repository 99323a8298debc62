"""Encoders: patches to feature vectors, by name, from a file, or by a user's function."""

from __future__ import annotations

from xmil.encoders.encoder import IMAGENET, Encoder, Transform
from xmil.encoders.load import (
    ENCODERS,
    WIDTHS,
    check_encoder,
    known_encoder,
    list_encoders,
    load_encoder,
)

__all__ = [
    "ENCODERS",
    "IMAGENET",
    "WIDTHS",
    "Encoder",
    "Transform",
    "check_encoder",
    "known_encoder",
    "list_encoders",
    "load_encoder",
]
