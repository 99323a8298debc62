"""A model and a bag as the methods take them: checked, on one device, with what travels beside them."""

from __future__ import annotations

from contextlib import nullcontext
from os import PathLike
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from xmil.core.bag import Bag, as_features
from xmil.core.errors import InputError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.stored_bag import StoredBag
from xmil.methods.companions import Companions
from xmil.methods.network import ForwardFunction, Network
from xmil.methods.trial import try_out
from xmil.nn.frozen import frozen

LEAVE = ", or move the file away to leave the slide out"


class Calling(TypedDict, total=False):
    """How a user's module is called: see `explain`."""

    forward: ForwardFunction | None
    returns: str | None
    average: int | None


def open_network(model: Any, bag: Any, **how: Unpack[Calling]) -> tuple[Network, Tensor]:
    """The network for one bag, with its companions, and the bag as a checked (1, n, d) tensor.

    A foreign module is tried out on the bag: how it is called, what it returns, whether it is random.
    """
    for name in how:
        if name not in Calling.__annotations__:
            raise unknown_name("parameter", name, Calling.__annotations__)
    network = Network(as_model(model), how.get("forward"))
    bag = as_bag(bag)
    x = as_tensor(bag, network)
    network.companions = Companions.of(bag, x.shape[1])
    with frozen(network.module) if network.model is None else nullcontext():
        try_out(network, x, returns=how.get("returns"), average=how.get("average"))
    return network, x


def as_model(model: Any) -> Any:
    """A model, read where its path is given."""
    if not isinstance(model, str | PathLike):
        return model
    from xmil.models import load_model

    return load_model(model)


def as_bag(bag: Any) -> Any:
    """A bag, tensor or array; a bag is read where its path is given."""
    if not isinstance(bag, str | PathLike):
        return bag
    from xmil.data import read_bag

    return read_bag(bag)


def check_same_bag(e: Explanation, name: str | None) -> None:
    """Refuse the explanation of another bag, where both are known by name."""
    if e.bag is not None and name is not None and e.bag != name:
        raise InputError(
            f"The explanation is of the bag {e.bag!r}, but the bag here is {name!r}; explain that one, or "
            "pass the explanation's scores where the two are the same."
        )


def as_tensor(bag: Any, network: Network) -> Tensor:
    """The bag as a checked (1, n, d) tensor in the model's dtype; tensors stay on their device."""
    name, leave = (bag.called, LEAVE if bag.source else "") if isinstance(bag, Bag) else ("the bag", "")
    like = next(iter(network.module.parameters()), torch.zeros(0))
    if isinstance(bag, Tensor):
        x = _checked_tensor(bag, like, name)
    elif isinstance(bag, StoredBag):  # copied as it is stored, widened where it is used
        x = torch.from_numpy(bag.stored).to(like.device, non_blocking=True)
    else:
        x = torch.from_numpy(bag.features if isinstance(bag, Bag) else as_features(bag, name=name)).to(
            like.device
        )
    x = x.to(like.dtype) if like.is_floating_point() else x.float()
    if x.shape[0] == 0:
        nothing = f"{_begin(name)} has no instances; there is nothing to explain"
        raise InputError(f"{nothing}: extract its features again{leave}." if leave else f"{nothing}.")
    width = getattr(network.model, "in_dim", None)
    if width is not None and x.shape[1] != width:
        raise InputError(
            f"{network.name} takes features of width {width}, but {name} has width {x.shape[1]}; "
            f"use the features of the encoder the model was trained on{leave}."
        )
    _check_finite(x, name, leave)
    return x.detach().unsqueeze(0)


def _checked_tensor(bag: Tensor, like: Tensor, name: str) -> Tensor:
    if bag.layout != torch.strided:
        raise InputError(f"{name[0].upper()}{name[1:]} is a sparse tensor; pass it as tensor.to_dense().")
    x = bag[0] if bag.ndim == 3 and bag.shape[0] == 1 else bag
    if x.ndim != 2 or x.is_complex():
        raise InputError(
            f"Features of {name} must be real, of shape (instances, width). Got {tuple(bag.shape)}."
        )
    if x.device != like.device and like.numel():
        raise InputError(f"{_begin(name)} is on {x.device} but the model on {like.device}; move one of them.")
    return x


def _begin(name: str) -> str:
    """The name as a sentence begins with it; a file's stays as it is."""
    return f"{name[0].upper()}{name[1:]}" if name.startswith(("bag ", "the bag")) else name


def _check_finite(x: Tensor, name: str, leave: str) -> None:
    if bool(torch.isfinite(x.sum())):
        return
    rows = (~torch.isfinite(x)).any(dim=1).nonzero().squeeze(1)
    if len(rows):
        raise InputError(
            f"Features of {name} are not finite (NaN or inf) in {len(rows)} of {len(x)} rows, "
            f"the first is row {int(rows[0])}; extract the features again or drop those rows{leave}."
        )
