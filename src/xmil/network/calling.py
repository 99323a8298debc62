"""Calling a foreign module, and the companions that travel with the instances of a bag into it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.core.bag import Bag, joins_instances
from xmil.core.errors import InputError

FEATURES = ("x", "X", "features", "feats", "patch_features", "feature", "data", "bag", "bags", "input", "h")
COMPANIONS = {
    "coords": ("coords", "coord", "coordinates", "patch_coords", "pos", "positions", "xy"),
    "adjacency": ("adjacency", "adj", "adj_mat", "adj_matrix", "edge_index"),
    "index": ("index",),
}
MASKS = ("mask", "attention_mask", "attn_mask", "padding_mask", "key_padding_mask")
TRAINING = ("train", "is_train", "training", "is_training", "train_mode")
INDEX = "index"
_ALIASES = {alias: name for name, aliases in COMPANIONS.items() for alias in aliases}

Call = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Any]
MakeMask = Callable[[Tensor], Tensor]  # a mask (1, n) for a bag (1, n, d)
FULL_MASKS: dict[str, MakeMask] = {  # masks that show the full bag if True keeps, or hides, an instance
    "ones": lambda x: torch.ones(x.shape[:2], dtype=torch.bool, device=x.device),
    "zeros": lambda x: torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device),
}


@dataclass(frozen=True)
class CallStyle:
    """One way to call a module with a bag (1, n, d); `text` is how a user would write it.

    `names` has the companions it passes, and whether each is required.
    """

    text: str
    call: Call
    names: Mapping[str, bool] = field(default_factory=dict)
    batch: bool = True  # whether the module gets (1, n, d), else (n, d)
    with_mask: Callable[..., CallStyle] | None = None  # the same with another mask: make=, word=
    full_mask: Callable[[str, str], CallStyle] | None = None  # the same with a full mask: parameter, word
    passes_none: bool = False  # whether it passes None for a required mask


PLAIN = CallStyle(
    "net(x)",
    lambda module, x, _: module(x),
    full_mask=lambda name, word: _with_companions(
        {name: None}, batch=True, mask=name, make=FULL_MASKS.get(word, FULL_MASKS["ones"]), word=word
    ),
)


def list_call_styles(module: nn.Module, companions: Sequence[str]) -> list[CallStyle]:
    """List the styles that fit the module's signature and the bag's companions, most usual first."""
    parameters, required = _parameters(module) or {}, _required_parameters(module)
    shapes = (True, False)  # (1, n, d), then (n, d)
    mask = takes_mask(module)
    named: dict[str, str | None] = {}
    if required is not None and len(required) > 1:
        named = {name: companion_of(name, companions) for name in required[1:]}
        styles = [
            _with_companions(named, batch=batch, real=real) for real in (False, True) for batch in shapes
        ]
    elif [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]:
        styles = [
            _with_companions({}, batch=batch, features=name)
            for name in ("data", "x", "x_path")
            for batch in shapes
        ]
    else:
        styles = [PLAIN, _with_companions({}, batch=False)]
    if optional := optional_companions(module, companions):  # the body may need them anyway
        with_them = {**named, **optional}
        styles += [
            _with_companions(with_them, batch=batch, real=real) for real in (False, True) for batch in shapes
        ]
    if mask is not None:
        masked = partial(_with_companions, {**named, mask: None}, mask=mask)
        styles += [
            masked(batch=batch, make=make, word=word) for word, make in FULL_MASKS.items() for batch in shapes
        ]
    if required is not None and len(required) <= 1:
        styles += [_by_names(batch=batch, mask=mask) for mask in (False, True) for batch in shapes]
    return styles


def _required_parameters(module: nn.Module) -> list[str] | None:
    """List parameters of `forward` without a default, features first; None if its signature is unknown."""
    parameters = _parameters(module)
    if parameters is None:
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.values() if p.default is p.empty and p.kind not in variadic]


def optional_companions(module: nn.Module, companions: Sequence[str]) -> dict[str, str]:
    """Find parameters with a default that could take a companion of the bag, and its name."""
    parameters = _parameters(module) or {}
    names = {p.name: companion_of(p.name, companions) for p in parameters.values() if p.default is None}
    return {name: to for name, to in names.items() if to in companions and to is not None}


def training_flag(module: nn.Module) -> str | None:
    """Find the parameter of `forward` for training mode, if its default is True."""
    parameters = (_parameters(module) or {}).values()
    return next((p.name for p in parameters if p.name in TRAINING and p.default is True), None)


def takes_mask(module: nn.Module) -> str | None:
    """Find the parameter of `forward` for a mask, if it has one."""
    return next((name for name in _parameters(module) or {} if name in MASKS), None)


def companion_of(parameter: str, companions: Sequence[str]) -> str | None:
    """Find the companion for a parameter's name; None for a mask, which a single bag does not need.

    >>> companion_of("patch_coords", []), companion_of("stain", ["stain"]), companion_of("mask", [])
    ('coords', 'stain', None)
    """
    if parameter in companions:
        return parameter
    return None if parameter in MASKS else _ALIASES.get(parameter, parameter)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a module, or of a chain's encoder; None if unknown, as for traced modules."""
    signature = getattr(module, "call_signature", None)
    try:
        if not isinstance(signature, inspect.Signature):
            signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None
    return signature.parameters


def _with_companions(
    companions: Mapping[str, str | None],
    *,
    batch: bool,
    real: bool = False,
    features: str | None = None,
    mask: str | None = None,
    make: MakeMask = FULL_MASKS["ones"],
    word: str = "ones",
) -> CallStyle:
    """Make the style with companions by keyword: with or without a batch, as real numbers, with a mask.

    `features` is the keyword of the bag itself, if it is not positional.
    """
    end = f"{'' if batch else '[0]'}{'.float()' if real else ''}"
    keywords = [
        f"{name}={word if name == mask else None if to is None else to + end}"
        for name, to in companions.items()
    ]

    def call(module: nn.Module, x: Tensor, values: Mapping[str, Tensor]) -> Any:
        arguments = {name: None if to is None else values[to] for name, to in companions.items()}
        if mask is not None:
            arguments[mask] = make(x)
        for name, value in arguments.items():
            if value is not None:
                value = value if batch else value[0]
                arguments[name] = value.to(x.dtype) if real and name != mask else value
        bag = x if batch else x[0]
        return module(bag, **arguments) if features is None else module(**{features: bag}, **arguments)

    names = {to: True for to in companions.values() if to}
    start = "" if features is None else f"{features}="
    text = ", ".join([f"{start}{'x' if batch else 'x[0]'}", *keywords])
    again = partial(_with_companions, companions, batch=batch, real=real, mask=mask)
    if mask is not None:
        return CallStyle(f"net({text})", call, names, batch, again)

    def full_mask(name: str, word: str) -> CallStyle:
        return _with_companions(
            {**companions, name: None}, batch=batch, real=real, features=features, mask=name,
            make=FULL_MASKS.get(word, FULL_MASKS["ones"]), word=word,
        )  # fmt: skip

    return CallStyle(
        f"net({text})", call, names, batch, None, full_mask, passes_none=None in companions.values()
    )


def _by_names(
    *, batch: bool, mask: bool, make: MakeMask = FULL_MASKS["ones"], word: str = "ones"
) -> CallStyle:
    """Make the style with one object that has features and companions as items and attributes."""

    def call(module: nn.Module, x: Tensor, values: Mapping[str, Tensor]) -> Any:
        if batch:
            return module(NamedInputs(x, values, make(x) if mask else None))
        first = {name: value[0] for name, value in values.items()}
        return module(NamedInputs(x[0], first, make(x)[0] if mask else None))

    shape = f"{'(1, n, d)' if batch else '(n, d)'}{f' and a mask of {word}' if mask else ''}"
    text = f"net(data) with data['x'] or data.x of shape {shape}"
    again = partial(_by_names, batch=batch, mask=mask) if mask else None
    return CallStyle(text, call, dict.fromkeys(COMPANIONS, False), batch, again)


class MissingInputError(KeyError, AttributeError):
    """A companion that a module looks up among its named inputs, but the bag does not have."""


class NamedInputs(dict[str, Any]):
    """Features and companions under the names that modules use, as items or attributes of one object.

    There is no mask by default: a single bag has no padding, and modules differ in what True means.

    >>> NamedInputs(torch.zeros(3, 2), {})["feats"].shape, NamedInputs(torch.zeros(3, 2), {}).batch.tolist()
    (torch.Size([3, 2]), [0, 0, 0])
    """

    def __init__(self, x: Tensor, companions: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
        super().__init__()
        self._x, self._companions, self._mask = x, companions, mask

    def __missing__(self, name: str) -> Any:
        if name in FEATURES:
            return self._x
        if name in MASKS and self._mask is not None:
            return self._mask
        if name in ("batch", "num_nodes"):
            nodes = self._x.shape[-2]
            graph = torch.zeros(nodes, dtype=torch.long, device=self._x.device)  # a single graph
            return nodes if name == "num_nodes" else graph
        companion = companion_of(name, list(self._companions))
        if companion is None or companion not in self._companions:
            raise MissingInputError(companion or name)
        value = self._companions[companion]
        if name == "edge_index":
            dense = value.to_dense() if value.is_sparse else value
            return dense.nonzero().T.contiguous()
        return value.to(self._x.dtype) if name == "pos" else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in FEATURES or companion_of(name, list(self._companions)) in self._companions
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the item, or the default if the bag does not have it."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get

    def to(self, *_: Any, **__: Any) -> NamedInputs:
        """Return itself: everything is already on the features' device."""
        return self


def check_parameters(module: nn.Module, companions: Sequence[str]) -> None:
    """Refuse a module whose `forward` requires a parameter that no bag has."""
    fillable = {*companions, *COMPANIONS, None}
    required = (_required_parameters(module) or [])[1:]
    unknown = [name for name in required if companion_of(name, companions) not in fillable]
    if not unknown:
        return
    name, first = type(module).__name__, unknown[0]
    raise InputError(
        f"{name}.forward asks for {' and '.join(map(repr, unknown))} besides the features, which no bag has; "
        f"pass forward=lambda net, x: net(x, {first}=...), or a Bag with extras={{{first!r}: ...}} if it "
        "has a row for each patch."
    )


# What travels with the instances.


class MissingCompanionError(InputError):
    """A companion that a bag does not have."""


class Companions:
    """Values for each instance of one bag, by name, or for each pair if they join instances.

    `select` returns `coords` (b, n, 2), `adjacency` (b, n, n) and anything else in `Bag.extras` for any
    rows; `index` (b, n) is the rows themselves. Rows of -1 are padding: zeros, joined to nothing.
    """

    def __init__(
        self, values: Mapping[str, Any], *, n: int | None, name: str = "the bag", hint: str = ""
    ) -> None:
        self.n, self.name, self._values, self._hint = n, name, dict(values), hint
        self._tensors: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @classmethod
    def of(cls, bag: Any, n: int) -> Companions:
        """Collect the companions of a bag; a bare array of features only has its row numbers."""
        if not isinstance(bag, Bag):
            return cls({}, n=n)
        microns: Any = bag.raw_coords if bag.unit == "um" else None
        if microns is None and bag.coords is not None and bag.mpp is not None:
            microns = bag.coords * float(bag.mpp)
        values = {**bag.columns, "coords": bag.coords, "raw_coords": bag.raw_coords, "microns": microns}
        values |= bag.extras
        hint = f" Its coordinates are in {bag.unit}; bag.placed(mpp=...) makes them level-0." * bool(bag.unit)
        return cls({key: v for key, v in values.items() if v is not None}, n=n, name=bag.called, hint=hint)

    @property
    def names(self) -> list[str]:
        """The companions of the bag, except `index`, which every bag has."""
        return list(self._values)

    def __contains__(self, name: object) -> bool:
        return name == INDEX or name in self._values

    def replaced(self, values: Mapping[str, Any]) -> Companions:
        """Copy the companions and replace some of them."""
        return Companions({**self._values, **values}, n=self.n, name=self.name, hint=self._hint)

    def select(self, name: str, rows: Tensor, like: Tensor) -> Tensor:
        """Select a companion for rows (b, m) of the bag: (b, m, ...), or (b, m, m) if it joins instances.

        Real numbers get the dtype of the features, and all companions their device.
        """
        if name == INDEX:
            return rows
        value = self._values[name]
        if hasattr(value, "tocsr"):
            return _sparse(value.tocsr(), rows, like)
        key = (name, like.device, like.dtype)
        if key not in self._tensors:
            self._tensors[key] = as_companion(value, like, name)
        full = self._tensors[key]
        real, at = rows >= 0, rows.clamp_min(0)
        if joins_instances(name, value):
            joined = full[at.unsqueeze(2), at.unsqueeze(1)]
            return joined.masked_fill(~(real.unsqueeze(2) & real.unsqueeze(1)), 0)
        values = full[at]
        return values.masked_fill(~real.reshape(*real.shape, *[1] * (values.ndim - 2)), 0)

    def missing_error(self, names: Iterable[str], asker: str) -> MissingCompanionError | None:
        """Make the error for companions that the bag does not have, or None."""
        missing = [name for name in names if name not in self]
        if not missing:
            return None
        advice = "coords=..." if missing == ["coords"] else f"extras={{{missing[0]!r}: ...}}"
        return MissingCompanionError(
            f"{asker} asks for {' and '.join(map(repr, missing))}, which {self.name} does not have (it has "
            f"{', '.join(sorted([INDEX, *self._values]))}); pass a Bag with {advice}."
            f"{self._hint if 'coords' in missing else ''}"
        )


def as_companion(value: Any, like: Tensor, name: str) -> Tensor:
    """Convert an array of numbers to a tensor: whole numbers to int64, real ones to the features' dtype."""
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise InputError(f"The companion {name!r} must hold numbers. Got dtype {array.dtype} instead.")
        array = array.astype(np.int64) if array.dtype.kind in "iu" else array
        value = torch.from_numpy(np.ascontiguousarray(array))
    tensor: Tensor = value.detach().to(like.device)
    if tensor.is_floating_point():
        return tensor.to(like.dtype)
    return tensor if tensor.dtype == torch.bool else tensor.long()


def named_companions(function: Callable[..., Any]) -> dict[str, bool]:
    """List the keyword-only parameters of a function, and whether each is required.

    >>> named_companions(lambda net, x, *, coords, index=None: 0)
    {'coords': True, 'index': False}
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def _sparse(matrix: Any, rows: Tensor, like: Tensor) -> Tensor:
    """Select a sparse matrix between the rows (b, m), as a sparse tensor (b, m, m)."""
    b, m = rows.shape
    places, values = [], []
    for i, row in enumerate(rows.cpu().numpy()):
        real = np.flatnonzero(row >= 0)
        part = matrix[row[real]][:, row[real]].tocoo()
        places.append(np.stack([np.full(part.nnz, i), real[part.row], real[part.col]]))
        values.append(part.data)
    data = as_companion(np.concatenate(values), like, "adjacency")
    indices = torch.from_numpy(np.concatenate(places, axis=1)).to(like.device)
    return torch.sparse_coo_tensor(indices, data, (b, m, m), check_invariants=True).coalesce()


# What does not travel: values with a row per instance that a function or module stores.

DEPTH = 3  # of nested dicts, lists and objects
LONGEST_LIST = 16  # a longer list holds numbers, or a row per instance itself
LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "xmil.")
ARRAYS = (Tensor, np.ndarray, Mapping, list, tuple)  # and containers of arrays


def find_values_per_instance(
    function: Callable[..., Any] | None, module: nn.Module, n: int
) -> dict[str, tuple[int, str]]:
    """Find values with a row for each of n instances in a function and its module: identity and shape."""
    values = [] if function is None else list(_outside_values(function))
    for path, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if not k.startswith("_") and k != "caller"}
        data = {k: v for k, v in own.items() if isinstance(v, ARRAYS) or hasattr(v, "tocsr")}
        values += ((f"{path}.{k}".lstrip("."), v) for k, v in _with_contents(data, 0))
    for part in module.modules():
        if not type(part).__module__.startswith(LIBRARIES):
            values += _outside_values(part.forward)
    caller = getattr(module, "caller", None)  # the function of a chain
    values += [] if caller is None else _outside_values(caller)
    shapes = [(name, id(value), _shape_per_instance(value, n)) for name, value in values]
    return {name: (key, shape) for name, key, shape in shapes if shape is not None}


def fixed_value_error(name: str, shape: str, n: int, *, owner: str) -> InputError:
    """Make the error for a value that would stay complete while instances leave the bag."""
    last = name.split(".")[-1]
    word = last if last.isidentifier() and "coord" not in last.lower() else "coords"
    advice = "coords=..." if word == "coords" else f"extras={{{word!r}: ...}}"
    return InputError(
        f"{owner} holds {name!r} {shape}, one row for each of the {n} patches, which would stay "
        "complete while patches leave the bag; name it in forward's signature, "
        f"forward=lambda net, x, *, {word}: ..., and pass a Bag with {advice}."
    )


def _outside_values(function: Callable[..., Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield values that a function reads from outside, by name: closure, globals, defaults, bound objects."""
    if isinstance(function, partial):
        arguments = {**{f"argument {i}": v for i, v in enumerate(function.args)}, **function.keywords}
        yield from _with_contents(arguments, depth)
        yield from _outside_values(function.func, depth)
    elif isinstance(function, MethodType):
        yield from _with_contents({"self": function.__self__}, depth)
        yield from _outside_values(function.__func__, depth)
    elif isinstance(function, FunctionType):
        values = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                values[name] = cell.cell_contents
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                values.setdefault(name, function.__globals__[name])
        values |= {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
        yield from _with_contents(values | (function.__kwdefaults__ or {}), depth)
    elif not isinstance(function, type) and hasattr(function, "__dict__"):
        yield from _with_contents(vars(function), depth)


def _global_names(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _with_contents(values: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values, and those inside their dicts, lists, plain objects and functions."""
    for name, value in values.items():
        yield name, value
        contents: Mapping[Any, Any] = {}
        if depth >= DEPTH or isinstance(value, Tensor | np.ndarray | Bag | str):
            continue
        if isinstance(value, list | tuple):
            contents = dict(enumerate(value)) if len(value) <= LONGEST_LIST else {}
        elif isinstance(value, Mapping):
            contents = value
        elif isinstance(value, FunctionType | MethodType | partial):
            if not str(getattr(value, "__module__", "")).startswith(LIBRARIES):
                yield from _outside_values(value, depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | nn.Module):
            contents = vars(value)
        yield from ((f"{name}.{key}", inner) for key, inner in _with_contents(contents, depth + 1))


def _shape_per_instance(value: Any, n: int) -> str | None:
    """Describe the shape of a value with a row per instance; None for any other."""
    if isinstance(value, Bag):
        return f"(a bag of {n} patches)" if len(value) == n else None
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor | np.ndarray) or hasattr(value, "tocsr"):
        shape = tuple(value.shape)
        return f"of shape {shape}" if n in shape[:1] or (shape[:1] == (1,) and n in shape[1:2]) else None
    if isinstance(value, list | tuple) and len(value) == n and n > 1:
        numeric = all(isinstance(v, int | float | list | tuple | np.ndarray | Tensor) for v in value)
        return f"(a {type(value).__name__} of {n})" if numeric else None
    return None
