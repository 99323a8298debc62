"""Families that are known but not rebuilt: what to build with their own code, and how to explain it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xmil.models.checkpoints.families import State
from xmil.models.checkpoints.files import HYPER_PARAMETERS

RESULTS = "net(x)[0]['logits']"  # what MIL-Lab's models give


@dataclass(frozen=True)
class Foreign:
    """A network of others: the keys that tell it, the class to build, and how it gives logits."""

    owner: str
    build: str
    needs: tuple[str, ...]
    logits: str = "net(x)"
    takes: str = "net, x"

    def fits(self, state: State) -> bool:
        """Whether each of the needed patterns is at the end of a key."""
        return all(any(re.search(f"(^|\\.){need}$", key) for key in state) for need in self.needs)

    def advice(self) -> str:
        """The class and the two lines."""
        return (
            f"of {self.owner}'s {self.build.rpartition('.')[2]}, which is not rebuilt here. Build "
            f"net = {self.build}(...), fill it with net.load_state_dict(...), and explain it as it is: "
            f"xmil.explain(net.eval(), bag, forward=lambda {self.takes}: {self.logits})."
        )


KNOWN = (
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


def advice_for(state: State) -> str | None:
    """What to do with a checkpoint whose keys are those of a network that is known but not rebuilt."""
    return next((known.advice() for known in KNOWN if known.fits(state)), None)


def stamps_advice(settings: Mapping[str, Any]) -> str | None:
    """What to do with a model of STAMP's that no family of ours fits."""
    said = settings.get(HYPER_PARAMETERS, {})
    if "stamp_version" not in said or not isinstance(said.get("model_name"), str):
        return None
    return (
        f"of STAMP's model {said['model_name']!r}, which is not rebuilt here. Build "
        "net = stamp.modeling.deploy.load_model_from_ckpt(path).model and explain it as it is: "
        "xmil.explain(net.eval(), bag, forward=lambda net, x: net(x))."
    )
