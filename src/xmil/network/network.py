"""The interface of models to methods: bags in, outputs out, for any module."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xmil.core.bag import Bag, StoredBag, as_features
from xmil.core.errors import (
    InputError,
    UnsupportedError,
    XmilError,
    bad_parameter,
    check_count,
    check_names,
    unknown_name,
)
from xmil.core.explanation import Explanation
from xmil.core.task import TASKS, references
from xmil.core.text import counted
from xmil.lrp import HOOKS, part_of_bag
from xmil.models import MILModel
from xmil.network.calling import (
    PLAIN,
    CallStyle,
    Companions,
    named_companions,
)
from xmil.network.reading import RETURNS, LogitsPath, ProbabilityWatch, to_log_odds
from xmil.network.trust import run_trial, seeded, sub_bag_error

ForwardFunction = Callable[..., Any]  # (net, x, *, companions by name)


class Network:
    """A module and how to call it. Built-in models take batches of bags, foreign modules one bag at a time.

    A bag without some instances of the full one comes with its `rows` (b, n) of the full bag, -1 for padding,
    so that companions (coordinates, adjacency, see `Companions`) stay with their instances; the user's
    `forward` or a model's `aggregate` names them as keyword-only parameters. `part` treats such a bag as the
    full one.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: ForwardFunction | None = None,
        *,
        companions: Companions | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"A model must be a torch.nn.Module. Got {type(module).__name__} instead.")
        module = getattr(module, "_orig_mod", module)  # the module inside torch.compile
        self.module = module
        self.model = module if isinstance(module, MILModel) and forward is None else None
        self.companions = companions or Companions({}, n=None)
        self.forward = forward  # the user's own
        self.call_style = PLAIN
        if forward is not None:
            names = named_companions(forward)
            self.call_style = CallStyle("forward(net, x)", lambda m, x, v: forward(m, x, **v), names)
        self.logits_path = LogitsPath()
        self.link = "none"  # how to convert outputs to logits: "none", their "source", or a "log"
        self.draws = 0  # to average for a module that is random in eval mode
        self.params: dict[str, Any] = {}  # for explanations to record
        self.trial_warnings: tuple[str, ...] = ()
        self.trial_bag: Tensor | None = None
        self.writes_input = False  # whether the module changes its input
        foreign = self.model is None and next(module.buffers(), None) is not None
        self.changes_buffers: bool | None = None if foreign else False  # None: not known yet
        self.changed_buffers: list[str] = []  # changed by a pass of the trial
        self.registers_hooks = False  # whether it registers hooks on tensors without a gradient
        compiled = (
            part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules()
        )
        self._is_compiled = self.model is None and any(compiled)
        self.returns_hazards = False  # whether it returns hazards and their survival function
        self.sub_bag_refusal: XmilError | None = None  # why sub-bags are refused
        self._own_names = {} if self.model is None else named_companions(type(self.model).aggregate)
        self._rows: Tensor | None = None  # of the full bag, if this network is for a part

    @property
    def name(self) -> str:
        """The registered name of a built-in model, or the class of a foreign module."""
        spec = getattr(self.model, "spec", None)
        return spec.name if spec is not None else type(self.module).__name__

    @property
    def task(self) -> str:
        """What the outputs mean: the module's `task` if it is registered, else classification."""
        task = getattr(self.module, "task", None)
        return task if isinstance(task, str) and task in TASKS else "classification"

    def references(self, n_outputs: int) -> list[float]:
        """The reference of each output of a regression."""
        value = None if self._spec("relative") else self._spec("reference")
        return declared_references(value, n_outputs, task=self.task, owner=self.name)

    def target_names(self, n_outputs: int) -> tuple[str, ...] | None:
        """Names of the targets, or None if they have none."""
        if isinstance(self.module, MILModel) and hasattr(self.module, "spec"):  # checked already
            names = self.module.class_names
        else:
            names = getattr(self.module, "class_names", None)
            names = declared_names(names, n_outputs, task=self.task, owner=self.name)
        return TASKS[self.task].target_names(n_outputs, names, self._spec("time_bins"))

    def _spec(self, name: str) -> Any:
        """A setting of a built-in model's spec, or an attribute of a foreign module."""
        return getattr(getattr(self.module, "spec", self.module), name, None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of a built-in model and of the trial, to show with every explanation."""
        own = self.module.warnings if isinstance(self.module, MILModel) else ()
        return (*own, *self.trial_warnings)

    @property
    def is_built_in(self) -> bool:
        """Whether the model is of this package, so that its tensors and settings determine what it does."""
        return self.model is not None and type(self.model).__module__.startswith("xmil.models.")

    @property
    def takes_companions(self) -> bool:
        """Whether a built-in model also uses companions, such as coordinates."""
        return bool(self._own_names)

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute outputs (b, c) of bags (b, n, d); pass `rows` (b, n) if they are not the full bag."""
        if self.model is not None:
            logits: Tensor = self.model(x, **self._companion_values(x, rows))
            return logits
        return self._one_by_one(x, rows)

    def outputs(self, x: Tensor) -> npt.NDArray[np.float64]:
        """Compute outputs (c,) of one bag (1, n, d) in double precision, without gradients; refuse NaN."""
        with frozen(self.module), torch.no_grad():
            outputs = self(x)[0].double().cpu().numpy()
        if not np.isfinite(outputs).all():
            raise UnsupportedError(
                f"The outputs of {self.name} are not finite for {self.companions.name}; check the model."
            )
        return np.asarray(outputs)

    def embed(self, x: Tensor) -> Tensor:
        """Compute what all perturbed bags share: embedded instances, or the instances themselves."""
        return x if self.model is None else self.model.embed(x)

    def aggregate(self, h: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute outputs (b, c) of bags of embedded instances (b, n, e); `rows` as for a call."""
        if self.model is not None:
            return self.model.aggregate(h, **self._companion_values(h, rows))
        return self._one_by_one(h, rows)

    def attention_weights(self, h: Tensor) -> Tensor:
        """Compute the weights (b, n, k) with which a built-in model pools embedded instances of full bags."""
        assert self.model is not None  # noqa: S101  # foreign modules have no such weights
        return self.model.attention_weights(h, **self._companion_values(h, None))

    def part(self, rows: Tensor) -> Network:
        """Make the network for a bag of some rows (m,) of the full one, in that order."""
        twin = copy.copy(self)
        twin._rows = rows if self._rows is None else self._rows[rows]
        return twin

    def _one_by_one(self, x: Tensor, rows: Tensor | None) -> Tensor:
        if len(x) == 1:
            return self._one(x, rows)
        each = [None] * len(x) if rows is None else rows.split(1)
        return torch.cat([self._one(bag, row) for bag, row in zip(x.split(1), each, strict=True)])

    def _companion_values(self, x: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        """Select the companions that the call names, for the instances of bags (b, n, .)."""
        parameters = self.call_style.names if self.model is None else self._own_names
        names = [name for name, must in parameters.items() if must or name in self.companions]
        if not names:
            return {}
        asker = self.name if self.forward is None else "forward"
        if (error := self.companions.missing_error(names, asker)) is not None:
            raise error
        at = self.rows(x, rows)
        return {name: part_of_bag(self.companions.select(name, at, x)) for name in names}

    def rows(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Find the rows (b, m) of the full bag for bags (b, m, .)."""
        n = self.companions.n or x.shape[1]
        full = torch.arange(n, device=x.device) if self._rows is None else self._rows
        at = full.expand(len(x), -1) if rows is None else torch.where(rows < 0, -1, full[rows])
        if at.shape != x.shape[:2]:
            raise InputError(
                f"It is unknown which of the {n} patches of the full bag are in this bag of {x.shape[1]}; "
                "pass their rows."
            )
        return at

    def _one(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Compute logits (1, c) of one bag, for a random module the mean over its draws.

        Errors name the reason why a sub-bag cannot run.
        """
        is_part = rows is not None or self._rows is not None
        if is_part and self.sub_bag_refusal is not None:
            raise self.sub_bag_refusal
        try:
            if not self.draws:
                return self.logits(x, rows)
            draws = []
            for seed in range(self.draws):
                with seeded(seed):
                    draws.append(self.logits(x, rows))
            return torch.stack(draws).mean(dim=0)
        except (XmilError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever a user's module raises
            if not is_part:
                raise
            raise sub_bag_error(self, x.shape[1], error) from error

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute logits (1, c) of one bag in one pass."""
        if self.link != "source":
            out = self.logits_path(self.raw(x, rows))
            return to_log_odds(out, self.task) if self.link == "log" else out
        with ProbabilityWatch() as watch:
            out = self.logits_path(self.raw(x, rows))
        source = watch.source(out)
        return to_log_odds(out, self.task) if source is None else source.reshape(1, -1)

    def raw(self, x: Tensor, rows: Tensor | None = None) -> Any:
        """Run the module on one bag."""
        bag = x.clone() if self.writes_input else x
        values = self._companion_values(x, rows)
        with ExitStack() as stack:
            if self.changes_buffers is not False:
                changed_buffers = stack.enter_context(borrowed_buffers(self.module))
            if self.registers_hooks:
                stack.enter_context(WithoutHooks())
            if self._is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            out = self.call_style.call(self.module, bag, values)
            if self.changes_buffers is None:
                self.changed_buffers = changed_buffers() or self.changed_buffers
            return out


class CallOptions(TypedDict, total=False):
    """How to call a user's module and read its output: see `explain`."""

    forward: ForwardFunction | None
    returns: str | None
    average: int | None


def open_network(model: Any, bag: Any, **options: Unpack[CallOptions]) -> tuple[Network, Tensor]:
    """Make the network for one bag, with its companions, and the bag as a checked (1, n, d) tensor.

    A foreign module is tried out on the bag: how to call it, what it returns, whether it is random.
    """
    check_names("parameter", options, CallOptions.__annotations__)
    network = Network(as_model(model), options.get("forward"))
    bag = as_bag(bag)
    x = as_tensor(bag, network)
    network.companions = Companions.of(bag, x.shape[1])
    returns, average = options.get("returns"), options.get("average")
    if returns is None and network.model is None:
        returns = getattr(network.module, "returns", None)
        returns = returns if isinstance(returns, str) else None
    if returns is not None and returns not in RETURNS:
        raise unknown_name("kind of output for returns", returns, RETURNS)
    if average is not None:
        check_count("average", average, owner="explain")
    if network.model is None:
        with frozen(network.module):
            run_trial(network, x, returns=returns, average=average)
    elif returns == "probability":
        raise bad_parameter("returns", f"explain for {network.name}", "'logit': it returns logits", returns)
    return network, x


def as_model(model: Any) -> Any:
    """Return a model; read it if it is a path."""
    if not isinstance(model, str | PathLike):
        return model
    from xmil.models import load_model

    return load_model(model)


def as_bag(bag: Any) -> Any:
    """Return a bag, tensor or array; read it if it is a path."""
    if not isinstance(bag, str | PathLike):
        return bag
    from xmil.data import read_bag

    return read_bag(bag)


def check_same_bag(e: Explanation, name: str | None) -> None:
    """Refuse the explanation of another bag, if both have a name."""
    if e.bag is not None and name is not None and e.bag != name:
        raise InputError(
            f"The explanation is of the bag {e.bag!r}, but the bag here is {name!r}; explain this bag, or "
            "pass the explanation's scores if both are the same."
        )


def as_tensor(bag: Any, network: Network) -> Tensor:
    """Convert the bag to a checked (1, n, d) tensor in the model's dtype; tensors stay on their device."""
    name = bag.called if isinstance(bag, Bag) else "the bag"
    from_file = isinstance(bag, Bag) and bool(bag.source)
    skip = ", or move the file away to leave the slide out" if from_file else ""
    like = next(iter(network.module.parameters()), torch.zeros(0))
    if isinstance(bag, Tensor):
        if bag.layout != torch.strided:
            raise InputError("The bag is a sparse tensor; pass it as tensor.to_dense().")
        x = bag[0] if bag.ndim == 3 and bag.shape[0] == 1 else bag
        if x.ndim != 2 or x.is_complex():
            raise InputError(
                f"Features of the bag must be real, of shape (patches, width). Got {tuple(bag.shape)}."
            )
        if x.device != like.device and like.numel():
            raise InputError(f"The bag is on {x.device} but the model on {like.device}; move one of them.")
    elif isinstance(bag, StoredBag):  # copied in its stored dtype, converted on the device
        x = torch.from_numpy(bag.stored).to(like.device, non_blocking=True)
    else:
        features = bag.features if isinstance(bag, Bag) else as_features(bag, name=name)
        x = torch.from_numpy(features).to(like.device)
    x = x.to(like.dtype) if like.is_floating_point() else x.float()
    if x.shape[0] == 0:
        start = f"{name[0].upper()}{name[1:]}" if name.startswith(("bag ", "the bag")) else name
        fault = f"{start} has no patches; there is nothing to explain"
        raise InputError(f"{fault}: extract its features again{skip}." if skip else f"{fault}.")
    width = getattr(network.model, "in_dim", None)
    if width is not None and x.shape[1] != width:
        raise InputError(
            f"{network.name} takes features of width {width}, but {name} has width {x.shape[1]}; "
            f"use the features of the encoder the model was trained on{skip}."
        )
    if not bool(torch.isfinite(x.sum())):
        rows = (~torch.isfinite(x)).any(dim=1).nonzero().squeeze(1)
        if len(rows):  # otherwise only the sum is too large
            raise InputError(
                f"Features of {name} are not finite (NaN or inf) in {len(rows)} of {len(x)} rows, "
                f"the first is row {int(rows[0])}; extract the features again or drop these rows{skip}."
            )
    return x.detach().unsqueeze(0)


class WithoutHooks(TorchFunctionMode):
    """Ignore hooks that a module registers on tensors in its forward pass, as there will be no gradient."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        hook = HOOKS.get(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {})) if hook is None or args[0].requires_grad else hook()


_buffers_lock = threading.RLock()


@contextmanager
def borrowed_buffers(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Let a module change copies of its buffers; one thread at a time.

    Yield a function that lists the dotted names of the buffers that a pass has written into or replaced.
    """
    with _buffers_lock:
        parts = [(path, part, dict(part._buffers)) for path, part in module.named_modules() if part._buffers]
        copies = []
        for _, part, own in parts:
            copies.append({key: value.clone() for key, value in own.items() if value is not None})
            part._buffers.update(copies[-1])

        def changed() -> list[str]:
            names = []
            for (path, part, _), own in zip(parts, copies, strict=True):
                for key, value in part._buffers.items():
                    same = value is own.get(key) and (value is None or not value._version)
                    names += [] if same else [f"{path}.{key}".lstrip(".")]
            return names

        try:
            yield changed
        finally:
            for _, part, own in parts:
                part._buffers.clear()
                part._buffers.update(own)


# Eval mode, and restoring everything afterwards.

_lock = threading.Lock()
# Each frozen module and parameter, its flag before, and how many contexts freeze it. They are counted one by
# one, because two models may share a part.
_frozen_parts: dict[int, tuple[Any, bool, int]] = {}


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Keep a module in eval mode without trainable parameters; the last context restores every flag.

    Several threads may freeze the same module, or modules that share a part.
    """
    parts: list[nn.Module | nn.Parameter] = [*module.modules(), *module.parameters()]
    with _lock:
        for part in parts:
            flag = _flag_of(part)
            _, before, holders = _frozen_parts.get(id(part), (part, getattr(part, flag), 0))
            _frozen_parts[id(part)] = (part, before, holders + 1)
            if before:
                setattr(part, flag, False)
    try:
        yield module
    finally:
        with _lock:
            for part in parts:
                _, before, holders = _frozen_parts.pop(id(part))
                if holders > 1:
                    _frozen_parts[id(part)] = (part, before, holders - 1)
                elif before:
                    setattr(part, _flag_of(part), True)


def find_device(name: str) -> str:
    """Check the name of a device, and choose a GPU, if there is one, for "auto"."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"Unknown device {name!r}; use `device='cpu'`, 'cuda' or 'cuda:N'.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"The device {name!r} is not supported; use `device='cpu'`, 'cuda' or 'cuda:N'.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        reason = (
            "torch finds no GPU here" if not gpus else f"torch finds {counted(gpus, 'GPU')}, from cuda:0 on"
        )
        raise InputError(f"The device {name!r} cannot be used: {reason}; use `device='cpu'`, or 'auto'.")
    return name


@contextmanager
def on_device(module: Any, name: str | None) -> Iterator[torch.device | None]:
    """Keep a module on a device within the block; None does not move it."""
    if name is None:
        yield None
        return
    device = torch.device(find_device(str(name)))
    homes = {part.device for part in (*module.parameters(), *module.buffers())}
    if len(homes) > 1:
        listing = ", ".join(sorted(map(str, homes)))
        raise InputError(f"The model is on several devices ({listing}); leave out `device=`.")
    home = next(iter(homes), device)
    try:
        module.to(device)
        yield device
    finally:
        module.to(home)


def _flag_of(part: nn.Module | nn.Parameter) -> str:
    return "training" if isinstance(part, nn.Module) else "requires_grad"


# The attributes by which a module declares its outputs.


def declared_names(value: Any, n_outputs: int, *, task: str, owner: str) -> tuple[str, ...] | None:
    """Check the `class_names` of a module: a list, tuple or array of different names, one for each output.

    >>> declared_names(["benign", "tumour"], 1, task="classification", owner="Net")  # one logit, two classes
    ('benign', 'tumour')
    """
    if value is None:
        return None
    kind = TASKS[task]
    n = kind.count_targets(n_outputs) if kind.decides else n_outputs
    listed = _listed(value)
    names = tuple(map(str, listed or ()))
    if listed is not None and len(names) != n:
        outputs = f"{owner[0].upper()}{owner[1:]} has {counted(n_outputs, 'output')}"
        raise InputError(
            f"{outputs}, but {counted(len(names), 'class name')}; set class_names to {n} different names, or "
            "to None."
        )
    if listed is None or len(set(names)) < n:
        raise bad_parameter("class_names", owner, f"a list of {n} different names, or None", value)
    return names


def declared_references(value: Any, n_outputs: int, *, task: str, owner: str) -> list[float]:
    """Check the `reference` of a regression: a finite number, or one per output; zeros for other tasks."""
    if value is None or not TASKS[task].takes_reference:
        return [0.0] * n_outputs
    listed = _listed(value)
    try:
        numbers = references(value if listed is None else listed, n_outputs)
    except (TypeError, ValueError):
        numbers = [math.nan]
    if len(numbers) != n_outputs or not all(map(math.isfinite, numbers)):
        raise bad_parameter("reference", owner, f"a finite number, or a list of {n_outputs}", value)
    return numbers


def _listed(value: Any) -> list[Any] | None:
    """List the entries of a sequence or an array (NumPy, torch, pandas); None for anything else."""
    items = value.tolist() if callable(getattr(value, "tolist", None)) else value
    return list(items) if isinstance(items, Sequence) and not isinstance(items, str | bytes) else None
