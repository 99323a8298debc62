"""`explain`: any model, any bag, any method."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.bag import Bag
from xmil.core.errors import UnsupportedError, XmilError, unknown_name
from xmil.core.explanation import Explanation
from xmil.methods.contexts import run_method
from xmil.methods.faults import first_line
from xmil.methods.network import ForwardFunction, Network
from xmil.methods.opening import Calling, as_bag, as_model, open_network
from xmil.methods.opening import as_tensor as as_tensor
from xmil.methods.outputs import Question, own_outputs
from xmil.methods.registry import METHODS, Attribution, Method
from xmil.nn.frozen import frozen
from xmil.nn.memory import reused_memory

PLAIN_METHODS = ("ig", "gxi", "grad2", "single", "one_removed")  # need nothing but outputs or gradients
Bags = Bag | Tensor | np.ndarray[Any, Any] | str | PathLike[str]


def explain(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    *,
    method: str = "lrp",
    target: Any = None,
    output: str | None = None,
    forward: ForwardFunction | None = None,
    returns: str | None = None,
    average: int | None = None,
    **params: Any,
) -> Explanation:
    """One score per instance for one target.

    `target` is a class index or name, a Target, or None for the predicted class; for models without classes
    None is the value or the risk. `output` is the explained number: "logit", "contrastive", "log_odds" or
    "probability" of a class, "value" (minus its reference) of a regression, "risk" of a survival model; each
    method has its own default. `params` are the method's own.

    Model and bag may be paths. How a module of your own is called is found out by a trial call and told in
    `e.params["call"]`; where that fails or is wrong, `forward` calls it: `forward(net, x)` gets x (1, n, d)
    and gives logits (1, c), and whatever its signature names after a star (`*, coords, adjacency, index`)
    travels with the instances. `returns="probability"` for a module that returns probabilities; `average=K`
    takes the mean of K seeded draws of one that is random in eval mode.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> e = explain(net, torch.ones(3, 4), method="lrp", target=1)
    >>> len(e.scores), e.method, e.target == 1
    (3, 'lrp', True)
    """
    how = Calling(forward=forward, returns=returns, average=average)
    return _explain(model, bag, [target], method=method, output=output, how=how, params=params)[0]


def explain_classes(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    *,
    method: str = "lrp",
    output: str | None = None,
    forward: ForwardFunction | None = None,
    returns: str | None = None,
    average: int | None = None,
    **params: Any,
) -> list[Explanation]:
    """An explanation for each class, from one forward pass where the method allows it.

    A survival model has its time bins for classes, and its risk after them.
    """
    how = Calling(forward=forward, returns=returns, average=average)
    return _explain(model, bag, None, method=method, output=output, how=how, params=params)


def explain_targets(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    targets: Sequence[Any],
    *,
    method: str = "lrp",
    output: str | None = None,
    forward: ForwardFunction | None = None,
    returns: str | None = None,
    average: int | None = None,
    **params: Any,
) -> list[Explanation]:
    """An explanation for each of the targets, from one forward pass where the method allows it."""
    how = Calling(forward=forward, returns=returns, average=average)
    return _explain(model, bag, targets, method=method, output=output, how=how, params=params)


def list_methods(model: nn.Module | str | PathLike[str] | None = None) -> list[str]:
    """Names of the methods, or of those that can explain the model, which may be a path.

    >>> list_methods()
    ['attention', 'combined', 'grad2', 'gxi', 'ig', 'logits', 'lrp', 'milli', 'one_removed', 'random',
     'shapley', 'single']
    """
    if model is None:
        return list(METHODS)
    network = Network(as_model(model))
    return [name for name in METHODS if METHODS[name].supports(network) is None]


def _explain(
    model: nn.Module | str | PathLike[str],
    bag: Any,
    targets: Sequence[Any] | None,
    *,
    method: str,
    output: str | None,
    how: Calling,
    params: dict[str, Any],
) -> list[Explanation]:
    chosen = METHODS[method]
    chosen.check_parameters(params)
    _check_output(chosen, output)
    bag = as_bag(bag)
    network, x = open_network(model, bag, **how)
    _check_support(chosen, network)
    question = Question(targets, output, network, default=chosen.outputs[0])
    size = x.numel() * x.element_size() if x.device.type == "cpu" else 0
    with reused_memory(size), frozen(network.module), torch.inference_mode(False), torch.enable_grad():
        x = x.clone() if x.is_inference() else x
        result = _run(chosen, network, x, question, params)
    logits = result.logits.detach()[0].float().cpu().numpy()
    return [_explanation(a, chosen, bag, logits, network, params) for a in result.of]


def _run(method: Method, network: Network, x: Tensor, question: Question, params: dict[str, Any]) -> Any:
    try:
        return run_method(method, network, x, question, params)
    except (XmilError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a foreign module may raise anything
        if network.model is not None:
            raise
        others = ", ".join(name for name in PLAIN_METHODS if name != method.name)
        raise UnsupportedError(
            f"{network.name} runs on this bag, but the method {method.name!r} failed on it with "
            f"{first_line(error)}; try another: {others}."
        ) from error


def _check_support(method: Method, network: Network) -> None:
    reason = method.supports(network)
    if reason is not None:
        able = [name for name in METHODS if METHODS[name].supports(network) is None]
        raise UnsupportedError(
            f"The method {method.name!r} cannot explain {network.name}: {reason}. "
            f"Those that can: {', '.join(able)}."
        )


def _check_output(method: Method, output: str | None) -> None:
    known = (*method.outputs, *own_outputs())
    if output is not None and output not in known:
        raise unknown_name(f"output of {method.name}", output, known)


def _explanation(
    a: Attribution, method: Method, bag: Any, logits: Any, network: Network, params: dict[str, Any]
) -> Explanation:
    known = bag if isinstance(bag, Bag) else Bag(np.zeros((0, 1), dtype=np.float32))
    where = known.called
    scores = a.scores.detach().float().cpu().numpy()
    if not np.isfinite(logits).all():
        raise UnsupportedError(f"The outputs of {network.name} are not finite for {where}; check the model.")
    if not np.isfinite(scores).all():
        raise UnsupportedError(
            f"The method {method.name!r} gave scores that are not finite for {where}, first at instance "
            f"{int(np.flatnonzero(~np.isfinite(scores))[0])}; another preset or a larger epsilon may help."
        )
    return Explanation(
        scores=scores,
        logits=logits,
        output=float(a.value),
        method=method.name,
        target=a.output.target,
        signed=method.signed,
        audit=a.audit,
        bag=known.slide_id,
        patches=known.patches,
        model=network.name,
        params={
            "output": a.output.kind,
            **network.params,
            **{k: v for k, v in params.items() if not callable(v)},
            **a.params,
        },
        relevance=_array(a.relevance),
        stderr=_array(a.stderr),
        stable=None if a.stable is None else a.stable.cpu().numpy(),
        warnings=(*network.warnings, *a.warnings),
    )


def _array(values: Tensor | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else values.detach().float().cpu().numpy()
