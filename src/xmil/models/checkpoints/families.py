"""Checkpoint families of the field, recognised by their keys and converted to our models.

A family lists the keys it requires and turns a state dict into a model's name, parameters and state. Most
parameters follow from shapes; settings files give the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from xmil.core.errors import CheckpointError
from xmil.core.registry import Registry
from xmil.models.checkpoints.files import HYPER_PARAMETERS

State = Mapping[str, Tensor]
PREFIXES = ("model.", "module.", "net.", "model.model.", "vision_transformer.")  # of wrappers


@dataclass(frozen=True)
class Converted:
    """A model to build and its state.

    `spec` holds fields of a `ModelSpec` that the checkpoint or its code determines, such as the task.
    """

    model: str
    in_dim: int
    n_classes: int
    params: dict[str, Any]
    state: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)


Convert = Callable[[State, Mapping[str, Any]], Converted]


@dataclass(frozen=True)
class Family:
    """One convention of naming weights: the required keys (regular expressions) and the conversion."""

    name: str
    needs: tuple[str, ...]
    convert: Convert

    def missing(self, state: State) -> list[str]:
        """The required patterns that no key matches."""
        return [need for need in self.needs if not any(re.fullmatch(need, key) for key in state)]


FAMILIES: Registry[Family] = Registry("checkpoint family", group="xmil.checkpoints")


def family(name: str, *needs: str) -> Callable[[Convert], Convert]:
    """Decorator that registers a conversion under a family's name."""

    def add(convert: Convert) -> Convert:
        FAMILIES.add(name, Family(name, needs, convert))
        return convert

    return add


def under_prefix(state: State, prefix: str) -> tuple[dict[str, Tensor], list[str]]:
    """Keys under a prefix, stripped of it and of wrappers (Lightning, DataParallel), and the other keys."""
    keys = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    for wrapper in ("module.", "model.", "module."):
        if keys and all(key.startswith(wrapper) for key in keys):
            keys = {key.removeprefix(wrapper): value for key, value in keys.items()}
    return keys, [key for key in state if not key.startswith(prefix)]


def rename(state: State, *rules: tuple[str, str]) -> dict[str, Tensor]:
    """Rewrite keys by the first rule (regular expression, replacement) that matches their start."""
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            new, hits = re.subn(f"^{pattern}", replacement, key)
            if hits:
                key = new
                break
        renamed[key] = value
    return renamed


def drop(state: State, *patterns: str, note: str) -> tuple[dict[str, Tensor], list[str]]:
    """Drop the keys that match a pattern; if there are any, add a note with their {names} or {count}."""
    dropped = [key for key in state if any(re.match(pattern, key) for pattern in patterns)]
    notes = [note.format(names=", ".join(dropped), count=len(dropped))] if dropped else []
    return {key: value for key, value in state.items() if key not in dropped}, notes


def count(state: State, pattern: str) -> int:
    """Count the different numbers in the first group of a key pattern."""
    return len(ordered(state, pattern))


def ordered(state: State, pattern: str) -> list[str]:
    """The numbers in the first group of a key pattern, ascending, as text."""
    numbers = {match[1] for key in state if (match := re.match(pattern, key))}
    return sorted(numbers, key=int)


def convert_transmil(
    state: State, params: dict[str, Any], notes: list[str] | None = None, *, default_heads: int
) -> Converted:
    """Convert a TransMIL: its sizes from shapes, its keys to our names."""
    state = rename(
        state,
        (r"_fc1\.", "instance.0."),
        (r"_fc2\.", "classifier."),
        (r"pos_layer\.", "ppeg."),
        (r"cls_token", "class_token"),
    )
    if params.get("pool") == "sum":
        state.pop("class_token", None)
    dim, in_dim = state["instance.0.0.weight"].shape
    convolution = state.get("layers.0.attn.res_conv.weight")
    heads = default_heads if convolution is None else int(convolution.shape[0])
    sizes = {
        "dim": dim,
        "heads": heads,
        "head_dim": state["layers.0.attn.to_qkv.weight"].shape[0] // (3 * heads),
        "n_layers": count(state, r"layers\.(\d+)\."),
        "landmarks": max(1, dim // 2),
        "residual_kernel": None if convolution is None else int(convolution.shape[2]),
        "ppeg": "ppeg.proj.weight" in state,
        "bias": "classifier.bias" in state,
    }
    outputs = n_outputs(state, "classifier.weight")
    return Converted("transmil", in_dim, outputs, {**params, **sizes}, state, notes or [])


def n_outputs(state: State, key: str) -> int:
    """Count the outputs: rows of the last layer."""
    if key not in state:
        raise CheckpointError(f"has no classifier ({key}); a checkpoint without a head cannot be explained.")
    return int(state[key].shape[0])


RESULTS = "net(x)[0]['logits']"  # the logits of MIL-Lab's models


@dataclass(frozen=True)
class Foreign:
    """A network that we do not rebuild: the keys it has, the class to build, and how to get its logits."""

    owner: str
    build: str
    needs: tuple[str, ...]
    logits: str = "net(x)"
    takes: str = "net, x"

    def fits(self, state: State) -> bool:
        """Whether each required pattern matches the end of a key."""
        return all(any(re.search(f"(^|\\.){need}$", key) for key in state) for need in self.needs)

    def advice(self) -> str:
        """How to build the network and explain it."""
        return (
            f"of {self.owner}'s {self.build.rpartition('.')[2]}, which xmil does not rebuild. Build "
            f"net = {self.build}(...), fill it with net.load_state_dict(...), and explain it directly: "
            f"xmil.explain(net.eval(), bag, forward=lambda {self.takes}: {self.logits})."
        )


KNOWN = (  # networks that we recognise but do not rebuild
    Foreign("MIL-Lab", "src.models.ilra.ILRAModel", (r"gab_blocks\.0\.latent", r"pooling\.S"), RESULTS),
    Foreign("MIL-Lab", "src.models.wikg.WIKGMILModel", (r"W_head\.weight", r"W_tail\.weight"), RESULTS),
    Foreign("MIL-Lab", "src.models.dftd.DFTDModel", (r"attCls\..*weight", r"patch_embed\.fc1.*"), RESULTS),
    Foreign(
        "MIL-Lab", "src.models.rrt.RRTMILModel", (r"patch_embed.*weight", r"attn\.attn\.qkv\.weight"), RESULTS
    ),
    Foreign(
        "MIL-Lab",
        "src.models.transformer.TransformerModel",
        (r"blocks\.0\.attention\.in_proj_weight", r"blocks\.0\.mlp\.0\.weight"),
        RESULTS,
    ),
    Foreign(
        "torchmil",
        "torchmil.models.TransformerABMIL",
        (r"transformer_encoder\.layers\.0\.norm1\.weight", r"pool\.fc1\.weight"),
        "net(x).reshape(1, 1)",
    ),
    Foreign(
        "torchmil",
        "torchmil.models.TransMIL",
        (r"layers\.0\.att_module\.qkv_nn\.weight", r"pos_layer\.proj\.weight"),
        "net(x).reshape(1, 1)",
    ),
    Foreign(
        "GigaPath",
        "gigapath.slide_encoder.create_model",
        (r"patch_embed\.proj\.weight", r"encoder\.layers\.0\.self_attn\.q_proj\.weight"),
        "probe(net(x, coords)[-1])",
        "net, x, *, coords",
    ),
    Foreign(
        "MambaMIL",
        "models.MambaMIL.MambaMIL",
        (r"_fc1\.0\.weight", r"layers\.0\.1\.A_log", r"attention\.2\.weight"),
        "net(x)[0]",
    ),
)


def stamp_advice(settings: Mapping[str, Any]) -> str | None:
    """How to explain a STAMP model that fits no family."""
    hyper = settings.get(HYPER_PARAMETERS, {})
    if "stamp_version" not in hyper or not isinstance(hyper.get("model_name"), str):
        return None
    return (
        f"of STAMP's model {hyper['model_name']!r}, which xmil does not rebuild. Build "
        "net = stamp.modeling.deploy.load_model_from_ckpt(path).model and explain it directly: "
        "xmil.explain(net.eval(), bag, forward=lambda net, x: net(x))."
    )
