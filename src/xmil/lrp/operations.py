"""The rule of each operation and custom autograd function, and the settings of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from xmil.core.errors import InputError, bad_parameter, check_choice
from xmil.core.registry import Registry

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

Operation = Callable[..., Any]
Function = Callable[..., Tensor]  # an operation that returns one tensor
Rule = Callable[..., Any]
T = TypeVar("T")

RULES: Registry[Rule] = Registry("LRP rule", group="xmil.rules")


def register_rule(*operations: str) -> Callable[[Rule], Rule]:
    """Decorator that makes a function the rule of the named operations.

    The engine calls `rule(engine, function, *args, **kwargs)`, which returns what `function` would. Your rule
    replaces one of ours.
    """
    return _register_all(RULES, operations)


def _register_all(registry: Registry[T], names: Iterable[str]) -> Callable[[T], T]:
    def add(entry: T) -> T:
        for name in names:
            replaces_ours = _is_ours(registry._entries.get(name)) and not _is_ours(entry)
            registry.add(name, entry, replace=replaces_ours)
        return entry

    return add


def _is_ours(entry: Any) -> bool:
    return str(getattr(entry, "__module__", "")).startswith("xmil.")


# Operations f with f(x) = J x for their Jacobian J: linear ones, selections, and those homogeneous of degree
# one, such as ReLU and the maximum. Autograd's gradient conserves relevance through them (Euler).
_HOMOGENEOUS = """
T mT alias as_strided broadcast_tensors broadcast_to chunk clone contiguous expand expand_as flatten movedim
moveaxis narrow permute ravel reshape reshape_as select split split_with_sizes squeeze squeeze_ swapaxes
swapdims t tensor_split tile transpose unbind unflatten unfold fold unsqueeze unsqueeze_ view view_as vsplit
hsplit __getitem__ index_select gather take take_along_dim diagonal diag diag_embed flip fliplr flipud roll
rot90 repeat repeat_interleave masked_select pixel_shuffle pixel_unshuffle channel_shuffle triu tril
to float double half bfloat16 type type_as cpu cuda requires_grad_ atleast_1d atleast_2d atleast_3d
sum mean nansum nanmean cumsum neg negative positive __pos__ trace nan_to_num diff
relu relu_ leaky_relu leaky_relu_ prelu rrelu abs absolute __abs__
amax amin aminmax topk sort kthvalue median nanmedian mode quantile nanquantile cummax cummin msort
std std_mean sum_to_size linalg_diagonal diagflat dsplit trapezoid trapz cumulative_trapezoid
deg2rad rad2deg unsafe_chunk unsafe_split ldexp stft istft
max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
interpolate upsample dropout dropout1d dropout2d dropout3d
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfft2 fft_ihfft2 fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift
view_as_real view_as_complex real imag conj resolve_conj resolve_neg conj_physical H mH adjoint
sparse_coo_tensor to_dense to_sparse coalesce
"""
GRADIENT_IS_RULE = frozenset(_HOMOGENEOUS.split())


# Rules through which a gate stays a gate.
_TRANSPARENT = """
add sub rsub mul div pow square sqrt float_power cat stack hstack vstack dstack column_stack where max min
maximum minimum fmax fmin masked_fill pad copy_ scatter index_put index_copy index_add scatter_add
clamp clamp_min clamp_max clip hardtanh relu6 lerp scatter_reduce index_reduce index_fill fill_diagonal
prod addcmul addcdiv linalg_solve norm vector_norm linalg_norm linalg_vector_norm threshold
select_scatter slice_scatter diagonal_scatter masked_scatter
"""
# The same, unless a factor is a parameter: then it is a linear layer.
_PRODUCTS = """
matmul rmatmul bmm mm mv dot inner outer vdot kron chain_matmul einsum tensordot cross linalg_cross
linalg_vecdot _sparse_mm
"""
PRODUCTS = frozenset(_PRODUCTS.split())
CARRIES_GATES = GRADIENT_IS_RULE | PRODUCTS | frozenset(_TRANSPARENT.split())

READS_NUMBERS = frozenset({"item", "tolist", "__float__"})
LEAVES_TORCH = frozenset({"numpy", "__array__", "__dlpack__"})
VALUES_FROM_FIRST = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})  # arguments

KEEP_IN_PLACE = frozenset(
    {"copy_", "requires_grad_", "detach_", "squeeze_", "unsqueeze_", "transpose_", "t_"}
)


def name_of(function: Operation) -> str:
    """The name under which an operation is registered: `add` for `x + y`, `torch.add` and `Tensor.add`.

    >>> import torch
    >>> name_of(torch.add), name_of(torch.Tensor.mT.__get__)
    ('add', 'mT')
    """
    name = getattr(function, "__name__", str(function)).partition(".")[0]  # mul.Tensor of torch.ops
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return _ALIASES.get(name, name)


_ALIASES = {
    "__radd__": "add",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__rmul__": "mul",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
    "__rsub__": "rsub",
    "__matmul__": "matmul",
    "__rmatmul__": "rmatmul",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "__pow__": "pow",
    "log_sigmoid": "logsigmoid",
}


def out_of_place(function: Operation, name: str, options: dict[str, Any]) -> Operation | None:
    """The operation that returns what an in-place one writes; None for operations that are not in place.

    >>> import torch
    >>> out_of_place(torch.Tensor.add_, "add_", {}) is torch.Tensor.add
    True
    """
    if options.get("inplace"):
        return function
    if name.endswith("_") and not name.startswith("__") and name not in KEEP_IN_PLACE:
        plain: Operation | None = _NOT_IN_PLACE.get(name, getattr(Tensor, name[:-1], None))
        return plain
    return None


def fill_diagonal(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """What `fill_diagonal_` writes."""
    return input.clone().fill_diagonal_(fill_value, wrap)


def zero(input: Tensor) -> Tensor:
    """What `zero_` writes."""
    return torch.zeros_like(input)


def fill(input: Tensor, value: Any) -> Tensor:
    """What `fill_` writes."""
    out: Tensor = torch.zeros_like(input) + value
    return out


_NOT_IN_PLACE: dict[str, Operation] = {"fill_diagonal_": fill_diagonal, "zero_": zero, "fill_": fill}


def positional(
    name: str, args: Sequence[Any], options: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call, with torch's first one by position even if it was passed by keyword.

    >>> positional("mean", (), {"input": 1, "dim": 0})
    ((1,), {'dim': 0})
    """
    if not args and "input" in options and name != "where":
        return (options.pop("input"),), options
    return args, options


def dim_of(args: Sequence[Any], options: dict[str, Any], *, place: int = 0, default: Any = None) -> Any:
    """The dimension an operation works along: by name, or by its place after the tensor.

    >>> dim_of((3, 1), {}, place=1), dim_of((3,), {"dim": 0}, place=1), dim_of((3,), {}, place=1, default=-1)
    (1, 0, -1)
    """
    by_place = args[place] if len(args) > place else default
    return options.get("dim", options.get("axis", by_place))


def no_values(name: str) -> bool:
    """Whether an operation takes only shape and type from its arguments."""
    return name.endswith("_like") or name.startswith("new_") or name in ("fill", "zero")


def is_live(value: Any) -> bool:
    """Whether a value is a tensor that depends on the input."""
    return isinstance(value, Tensor) and value.requires_grad


def live_tensors(values: Any) -> list[Tensor]:
    """The live tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        return [values] if values.requires_grad else []
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple) or (
        hasattr(values, "__iter__") and not isinstance(values, str | bytes)
    ):
        return [tensor for value in values for tensor in live_tensors(value)]
    return []


# Custom autograd functions, which no mode sees: their rules correct the gradients of their backward.

Gradients = Sequence[Tensor | None]
FunctionRule = Callable[["Engine", Any, Gradients, Gradients], Gradients]
AutogradFunction = TypeVar("AutogradFunction", bound=type[torch.autograd.Function])

FUNCTION_RULES: Registry[FunctionRule] = Registry("rule of an autograd function", group="xmil.functions")
_RULES_THEMSELVES: set[type] = set()


def register_function(*names: str) -> Callable[[FunctionRule], FunctionRule]:
    """Decorator that makes a function the rule of custom autograd functions, named `module.Class`.

    The backward pass calls `rule(engine, node, gradients, upstream)`: the node of the graph (with its
    `saved_tensors`), the gradients of the function's inputs, and the gradients of its outputs. It returns the
    gradients to pass on; None stops one.
    """
    return _register_all(FUNCTION_RULES, names)


def backward_is_rule(function: AutogradFunction) -> AutogradFunction:
    """Class decorator: declare that the backward of an autograd function is an LRP rule.

    Use it for rules you write as autograd functions; the engine refuses unknown functions.
    """
    _RULES_THEMSELVES.add(function)
    return function


def is_rule(function: type) -> bool:
    """Whether the function's backward is a rule."""
    return function in _RULES_THEMSELVES or function.__module__.startswith("xmil.lrp.")


# Settings of the affine rule, by parameter name.

BIAS_POLICIES = ("absorb", "redistribute")
GATE_RULES = ("signal", "uniform")


@dataclass(frozen=True)
class AffineRule:
    """Settings of the epsilon and gamma rules for linear layers, convolutions and batch norm.

    `bias="absorb"`: the bias keeps its share. `bias="redistribute"`: the denominator leaves the bias out, so
    that the inputs receive everything; this needs an epsilon. `constant`: the result is a constant, and what
    it receives is cut. `signed`: gamma strengthens the terms that agree with the sign of
    the result (inputs below zero and results below zero included), so that no denominator is smaller than
    the result itself.
    """

    epsilon: float = 0.0
    gamma: float = 0.0
    bias: str = "absorb"
    constant: bool = False
    signed: bool = False

    def __post_init__(self) -> None:
        check_choice("bias", self.bias, BIAS_POLICIES, owner="AffineRule")
        for name in ("epsilon", "gamma"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise bad_parameter(name, "AffineRule", "a float in the range [0, inf)", getattr(self, name))
        if self.bias == "redistribute" and self.epsilon == 0:
            raise bad_parameter("epsilon", "AffineRule with bias='redistribute'", "above zero", self.epsilon)

    @property
    def is_gradient(self) -> bool:
        """Whether the rule is autograd's own gradient."""
        return self.epsilon == 0 and self.gamma == 0 and self.bias == "absorb"


PLAIN = AffineRule()


@dataclass(frozen=True)
class Composite:
    """The affine rule of every parameter: that of the first pattern that matches its name, else `default`.

    `attention` is the rule of sums weighted by constants (AH-rule). `gates`: the relevance of a product of
    two live tensors goes to both in halves ("uniform"), or, if one of them comes from a sigmoid, to the
    other alone ("signal").

    >>> Composite({"head.*": AffineRule(gamma=0.1)}).rule_for("head.weight").gamma
    0.1
    """

    overrides: dict[str, AffineRule] = field(default_factory=dict)
    default: AffineRule = PLAIN
    attention: AffineRule = PLAIN
    gates: str = "signal"

    def __post_init__(self) -> None:
        check_choice("gates", self.gates, GATE_RULES, owner="Composite")

    def check_names(self, parameters: Iterable[str]) -> None:
        """Refuse a pattern that matches no parameter: it is likely a typo."""
        names = list(parameters)
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"The composite's pattern {pattern!r} matches none of the parameters: {', '.join(names)}."
                )

    def rule_for(self, parameter: str | None) -> AffineRule:
        """The rule of a parameter by its dotted name; None stands for a weight that is not a parameter."""
        for pattern, rule in self.overrides.items():
            if parameter is not None and fnmatchcase(parameter, pattern):
                return rule
        return self.default
