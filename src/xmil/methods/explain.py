"""`explain`: any model, any bag, any method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.core.bag import Bag, as_features
from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.core.explanation import Explanation
from xmil.methods.network import ForwardFunction, Network
from xmil.methods.outputs import OWN_OUTPUTS, Question
from xmil.methods.registry import METHODS, Attribution, Method
from xmil.nn.frozen import frozen
from xmil.nn.memory import reused_memory

# how torch words a bag of the wrong width
WIDTH_ERRORS = ("cannot be multiplied", "normalized_shape", "size mismatch", "must match the size", "to have")


def explain(
    model: nn.Module,
    bag: Bag | Tensor | np.ndarray[Any, Any],
    *,
    method: str = "lrp",
    target: Any = None,
    output: str | None = None,
    forward: ForwardFunction | None = None,
    **params: Any,
) -> Explanation:
    """One score per instance for one target.

    `target` is a class index or name, a Target, or None for the predicted class; for models without classes
    None is the value or the risk. `output` is the explained number: "logit", "contrastive", "log_odds" or
    "probability" of a class, "value" (minus its reference) of a regression, "risk" of a survival model; each
    method has its own default. `forward` calls a module that does not simply map (1, n, d) to logits.
    `params` are the method's own.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> e = explain(net, torch.ones(3, 4), method="lrp", target=1)
    >>> len(e.scores), e.method, e.target == 1
    (3, 'lrp', True)
    """
    return _explain(model, bag, [target], method=method, output=output, forward=forward, params=params)[0]


def explain_classes(
    model: nn.Module,
    bag: Bag | Tensor | np.ndarray[Any, Any],
    *,
    method: str = "lrp",
    output: str | None = None,
    forward: ForwardFunction | None = None,
    **params: Any,
) -> list[Explanation]:
    """An explanation for each class, from one forward pass where the method allows it.

    A survival model has its time bins for classes, and its risk after them.
    """
    return _explain(model, bag, None, method=method, output=output, forward=forward, params=params)


def explain_targets(
    model: nn.Module,
    bag: Bag | Tensor | np.ndarray[Any, Any],
    targets: Sequence[Any],
    *,
    method: str = "lrp",
    output: str | None = None,
    forward: ForwardFunction | None = None,
    **params: Any,
) -> list[Explanation]:
    """An explanation for each of the targets, from one forward pass where the method allows it."""
    return _explain(model, bag, targets, method=method, output=output, forward=forward, params=params)


def list_methods(model: nn.Module | None = None) -> list[str]:
    """Names of the methods, or of those that can explain the model.

    >>> list_methods()
    ['attention', 'combined', 'grad2', 'gxi', 'ig', 'logits', 'lrp', 'milli', 'one_removed', 'random',
     'single']
    """
    if model is None:
        return list(METHODS)
    network = Network(model)
    return [name for name in METHODS if METHODS[name].supports(network) is None]


def _explain(
    model: nn.Module,
    bag: Any,
    targets: Sequence[Any] | None,
    *,
    method: str,
    output: str | None,
    forward: ForwardFunction | None,
    params: dict[str, Any],
) -> list[Explanation]:
    network = Network(model, forward)
    chosen = METHODS[method]
    chosen.check_parameters(params)
    _check_support(chosen, network)
    _check_output(chosen, output)
    question = Question(targets, output, network, default=chosen.outputs[0])
    x = as_tensor(bag, network)
    size = x.numel() * x.element_size() if x.device.type == "cpu" else 0
    with reused_memory(size), frozen(model), torch.inference_mode(False), torch.enable_grad():
        x = x.clone() if x.is_inference() else x
        result = _run(chosen, network, x, question, params)
    logits = result.logits.detach()[0].float().cpu().numpy()
    return [_explanation(a, chosen, bag, logits, network, params) for a in result.of]


def _run(method: Method, network: Network, x: Tensor, question: Question, params: dict[str, Any]) -> Any:
    try:
        return method.run(network, x, question, **params)
    except RuntimeError as error:
        if any(sign in str(error) for sign in WIDTH_ERRORS):
            line = str(error).splitlines()[0]
            raise InputError(
                f"{network.name} could not take a bag of shape {tuple(x.shape)}: {line}"
            ) from error
        raise


def _check_support(method: Method, network: Network) -> None:
    reason = method.supports(network)
    if reason is not None:
        able = [name for name in METHODS if METHODS[name].supports(network) is None]
        raise UnsupportedError(
            f"The method {method.name!r} cannot explain {network.name}: {reason}. "
            f"Those that can: {', '.join(able)}."
        )


def _check_output(method: Method, output: str | None) -> None:
    known = (*method.outputs, *OWN_OUTPUTS)
    if output is not None and output not in known:
        raise unknown_name(f"output of {method.name}", output, known)


def as_tensor(bag: Any, network: Network) -> Tensor:
    """The bag as a checked (1, n, d) tensor in the model's dtype; tensors stay on their device."""
    name = f"bag {bag.slide_id!r}" if isinstance(bag, Bag) and bag.slide_id else "the bag"
    like = next(iter(network.module.parameters()), torch.zeros(0))
    if isinstance(bag, Tensor):
        x = _checked_tensor(bag, like, name)
    else:
        x = torch.from_numpy(bag.features if isinstance(bag, Bag) else as_features(bag, name=name)).to(
            like.device
        )
    x = x.to(like.dtype) if like.is_floating_point() else x.float()
    if x.shape[0] == 0:
        raise InputError(f"{name[0].upper()}{name[1:]} has no instances; there is nothing to explain.")
    width = getattr(network.model, "in_dim", None)
    if width is not None and x.shape[1] != width:
        raise InputError(
            f"{network.name} takes features of width {width}, but {name} has width {x.shape[1]}; "
            "use the features of the encoder the model was trained on."
        )
    _check_finite(x, name)
    return x.detach().unsqueeze(0)


def _checked_tensor(bag: Tensor, like: Tensor, name: str) -> Tensor:
    x = bag[0] if bag.ndim == 3 and bag.shape[0] == 1 else bag
    if x.ndim != 2 or x.is_complex():
        raise InputError(
            f"Features of {name} must be real, of shape (instances, width). Got {tuple(bag.shape)}."
        )
    if x.device != like.device and like.numel():
        raise InputError(
            f"{name[0].upper()}{name[1:]} is on {x.device} but the model on {like.device}; move one of them."
        )
    return x


def _check_finite(x: Tensor, name: str) -> None:
    if bool(torch.isfinite(x.sum())):
        return
    rows = (~torch.isfinite(x)).any(dim=1).nonzero().squeeze(1)
    if len(rows):
        raise InputError(
            f"Features of {name} are not finite (NaN or inf) in {len(rows)} of {len(x)} rows, "
            f"the first is row {int(rows[0])}; extract the features again or drop those rows."
        )


def _explanation(
    a: Attribution, method: Method, bag: Any, logits: Any, network: Network, params: dict[str, Any]
) -> Explanation:
    known = bag if isinstance(bag, Bag) else Bag(np.zeros((0, 1), dtype=np.float32))
    where = f"bag {known.slide_id!r}" if known.slide_id else "the bag"
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
        coords=known.coords,
        patch_size=known.patch_size,
        raw_coords=known.raw_coords,
        unit=known.unit,
        raw_edge=known.raw_edge,
        mpp=known.mpp,
        slide_size=known.slide_size,
        model=network.name,
        params={"output": a.output.kind, **params},
        relevance=None if a.relevance is None else a.relevance.detach().float().cpu().numpy(),
        warnings=(*network.warnings, *a.warnings),
    )
