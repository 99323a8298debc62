"""Whether features come from the encoder a model was trained on, as far as both names are written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def same_encoder(model: str | None, features: str | None) -> bool:
    """Whether two names mean one encoder; a name that is not known contradicts none.

    >>> same_encoder("UNI_v2", "uni-v2"), same_encoder("uni_v2", "conch_v15"), same_encoder(None, "uni")
    (True, False, True)
    """
    return model is None or features is None or _plain(model) == _plain(features)


def encoder_warning(model: str | None, features: Iterable[str | None]) -> str | None:
    """One sentence where slides have features of another encoder than the model's, else None.

    >>> print(encoder_warning("uni_v2", ["conch_v15", "uni_v2", "conch_v15"]))
    The model was trained on features of 'uni_v2', but 2 slides have those of 'conch_v15': its outputs and
    their explanations mean nothing there; use features of 'uni_v2'.
    """
    others = Counter(name for name in features if name is not None and not same_encoder(model, name))
    if not others:
        return None
    found = " and ".join(
        f"{n} slide{'s have' if n > 1 else ' has'} those of {name!r}" for name, n in others.items()
    )
    return (
        f"The model was trained on features of {model!r}, but {found}: its outputs and their explanations "
        f"mean nothing there; use features of {model!r}."
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
