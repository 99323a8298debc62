"""Whether features were made as those a model was trained on, as far as files and model say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from xmil.core.bag import Bag
from xmil.data.header import Header

Facts = Mapping[str, Any]
CLOSE = 0.05  # resolutions that differ by less are the same: scanners differ, and patches are whole pixels
_DIGEST = re.compile(r"sha256 ([0-9a-f]{8,64})")
_SAID = {
    "encoder": "{!r}",
    "weights": "an encoder with the weights {}",
    "patch_px": "patches of {} px",
    "mpp": "patches at {} µm/px",
    "stain_norm": "stain normalisation {}",
    "precision": "the precision {}",
}


def same_encoder(model: str | None, features: str | None) -> bool:
    """Whether two names mean one encoder; a name that is not known contradicts none.

    >>> same_encoder("UNI_v2", "uni-v2"), same_encoder("uni_v2", "conch_v15"), same_encoder(None, "uni")
    (True, False, True)
    """
    return model is None or features is None or _plain(model) == _plain(features)


def feature_facts(source: Bag | Header) -> dict[str, Any]:
    """How a file's features were made, as far as it says: encoder, weights, patch, mpp, stains, precision."""
    made = source.extra.get("encoder")
    made = made if isinstance(made, dict) else {}
    px, edge, mpp = source.extra.get("patch_size"), source.patch_size, source.mpp
    px = int(px) if isinstance(px, int | float) and px >= 1 else None
    known = {
        "encoder": source.encoder,
        "weights": _weights(made.get("weights")),
        "patch_px": px,
        "mpp": round(edge * mpp / px, 4) if edge and mpp and px else None,
        "stain_norm": made.get("stain_norm"),
        "precision": made.get("precision"),
    }
    return {name: value for name, value in known.items() if value is not None}


def differing(trained: Facts, given: Facts) -> list[str]:
    """The facts that both know and that differ; equal weights are one encoder, whatever its name.

    >>> differing({"encoder": "uni", "weights": "a1"}, {"encoder": "mine", "weights": "a1"})
    []
    >>> differing({"encoder": "uni", "weights": "a1"}, {"encoder": "uni", "weights": "b2"})
    ['weights']
    """
    both = [name for name in _SAID if trained.get(name) is not None and given.get(name) is not None]
    found = [name for name in both if not _same(name, trained[name], given[name])]
    if "weights" in both:
        found = [name for name in found if name != "encoder"]
    return found


def features_warning(trained: Facts, given: Iterable[Facts]) -> str | None:
    """One sentence where slides have features made otherwise than the model's, else None.

    >>> print(features_warning({"encoder": "uni_v2"}, [{"encoder": "conch_v15"}, {"encoder": "UNI-v2"}]))
    The model was trained on features of 'uni_v2', but 1 slide has those of 'conch_v15': its outputs and
    explanations do not hold for them. Use features made as in the training.
    """
    others = Counter((name, each[name]) for each in given for name in differing(trained, each))
    if not others:
        return None
    parts = [
        f"of {_words(name, trained[name])}, but {n} slide{'s have' if n > 1 else ' has'} those of "
        f"{_words(name, value)}"
        for (name, value), n in others.items()
    ]
    slightly = all(name == "precision" for name, _ in others)
    so = "may differ a little" if slightly else "do not hold"
    return (
        f"The model was trained on features {'; and '.join(parts)}: its outputs and explanations {so} for "
        "them. Use features made as in the training."
    )


def _same(name: str, one: Any, two: Any) -> bool:
    if name == "encoder":
        return same_encoder(str(one), str(two))
    if name == "mpp":
        return bool(abs(float(one) - float(two)) <= CLOSE * max(float(one), float(two)))
    return bool(one == two)


def _words(name: str, value: Any) -> str:
    shown = {True: "on", False: "off"}.get(value, value) if name == "stain_norm" else value
    return _SAID[name].format(shown)


def _weights(told: Any) -> str | None:
    """The digest in what an encoder says of its weights, or "random"; None where it is silent."""
    if told == "random":
        return "random"
    found = _DIGEST.search(told) if isinstance(told, str) else None
    return found[1][:16] if found else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
