"""The golden runs: each fills a record, through `import xmil` and the command line alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from tests.golden.cohort import (
    MODELS,
    WIDTH,
    draw_bag,
    make_cohort,
    make_model,
    own_model,
    redraw,
    small_model,
)  # fmt: skip
from tests.golden.records import RELATIVE, SQUARED, TRAINED, Record, checksum, flatten, record_folder

FEATURES = ("--features", "features", "--cohort", "cohort.csv")
SOME = ("--split", "train")  # four slides of two cases
FEW = {  # parameters that keep a method short, and sampling from stopping by a rounding
    "ig": {"steps": 10},
    "milli": {},
    "shapley": {"precision": None, "permutations": 8},
}


@dataclass(frozen=True)
class GoldenRun:
    """A run by its name, what it records, and how near its numbers must come."""

    name: str
    record: Callable[[Workspace], Record]
    relative: float = RELATIVE


RUNS: dict[str, GoldenRun] = {}


def golden_run(
    name: str, *, relative: float = RELATIVE
) -> Callable[[Callable[[Workspace], Record]], Callable[[Workspace], Record]]:
    """Enrol a function as the golden run of a name."""

    def enrol(function: Callable[[Workspace], Record]) -> Callable[[Workspace], Record]:
        RUNS[name] = GoldenRun(name, function, relative)
        return function

    return enrol


class Workspace:
    """A folder with the cohort and what several runs build on, each made when it is first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @cached_property
    def cohort(self) -> Path:
        return make_cohort(self.root / "cohort")

    @cached_property
    def explained(self) -> str:
        """The folder of a run of `xmil explain` for all classes."""
        self.command(
            "explain", "--model", "models/attnmil.safetensors", *FEATURES, "--methods", "lrp,attention,ig",
            "--target", "all", "--split", "test", "--out", "explained",
        )  # fmt: skip
        return "explained"

    def command(self, *arguments: str) -> None:
        """Run a command in the cohort's folder."""
        from xmil.cli import main

        err, left = io.StringIO(), 0
        with chdir(self.cohort), redirect_stdout(io.StringIO()), redirect_stderr(err):
            try:
                main([*arguments])
            except SystemExit as leaving:
                left = leaving.code
        assert not left, f"xmil {' '.join(arguments)}: exit code {left}\n{err.getvalue()}"

    def folder(self, name: str, **options: Any) -> Record:
        """The record of a folder in the cohort's folder."""
        return record_folder(self.cohort / name, root=self.cohort, **options)


def within(record: Record, name: str) -> Record:
    """The record under a name of its own."""
    return {f"{name} > {place}": value for place, value in record.items()}


def of_explanation(e: xmil.Explanation) -> dict[str, Any]:
    """Every number of an explanation."""
    numbers = {"output": e.output, "audit": e.audit, "stderr": e.stderr, "stable": e.stable}
    return {
        "scores": e.scores,
        "target": str(e.target),
        "signed": e.signed,
        **{key: value for key, value in numbers.items() if value is not None},
    }


@golden_run("methods", relative=SQUARED)
def every_method(workspace: Workspace) -> Record:
    """Every registered method on every registered model, and on a network of one's own."""
    bag = draw_bag(1)
    record: Record = {"models": xmil.list_models(), "methods": xmil.list_methods()}
    models = {name: redraw(small_model(name, n_classes=3), 7) for name in xmil.list_models()}
    for name, model in {**models, "own": own_model()}.items():
        fitting = xmil.list_methods(model)
        record[f"{name} | methods"] = fitting
        for method in fitting:
            e = xmil.explain(model, bag, method=method, target=1, **FEW.get(method, {}))
            record |= flatten(of_explanation(e), f"{name} | {method}")
        record |= flatten(e.logits, f"{name} | logits")
    return record


@golden_run("options")
def every_option(workspace: Workspace) -> Record:
    """Presets, baselines, contexts, outputs, targets and the ways a module can be called."""
    bag, record = draw_bag(2, 9), {}
    models = {name: make_model(name) for name in MODELS}
    networks = {**{name: models[name] for name in ("attnmil", "transmil", "addmil")}, "own": own_model()}

    def put(name: str, *explanations: xmil.Explanation) -> None:
        for i, e in enumerate(explanations):
            record.update(flatten(of_explanation(e), name if len(explanations) == 1 else f"{name} [{i}]"))

    for (name, model), preset in product(
        networks.items(), ("default", "exact", "centred", "paper", "released")
    ):
        if preset != "released" or name in ("attnmil", "transmil"):
            put(f"{name} | preset {preset}", xmil.explain(model, bag, target=1, preset=preset))
    for name, model in networks.items():
        put(f"{name} | classes", *xmil.explain_classes(model, bag))
        put(f"{name} | contexts", xmil.explain(model, bag, target=0, contexts=6, keep=0.6, seed=3))
        for baseline in ("bag", bag.features[:3].mean(axis=0)):
            kind = baseline if isinstance(baseline, str) else "array"
            put(
                f"{name} | baseline {kind}",
                xmil.explain(model, bag, target=1, baseline=baseline, strength=0.5),
            )
        for output in ("contrastive", "log_odds", "probability"):
            put(f"{name} | {output}", xmil.explain(model, bag, method="gxi", target=0, output=output))
        put(f"{name} | contrast", xmil.explain(model, bag, target=xmil.Target(0, against=1)))
        sampled = {"exact": False, "precision": None, "permutations": 6, "seed": 4}
        put(f"{name} | shapley sampled", xmil.explain(model, bag, method="shapley", target=1, **sampled))
    for name in ("labels", "value", "survival", "cox"):
        put(f"{name} | lrp", xmil.explain(models[name], bag))
        put(f"{name} | single", *xmil.explain_classes(models[name], bag, method="single"))
    net = own_model()
    put("own | forward", xmil.explain(net, bag, target=1, forward=_with_places))
    put(
        "own | probability",
        xmil.explain(_Probabilities(net), bag, method="gxi", target=1, returns="probability"),
    )
    put("own | average", xmil.explain(_Dropping(net), bag, method="gxi", target=1, average=3))
    background = xmil.background([draw_bag(seed).features for seed in (4, 5)])
    put("attnmil | background", xmil.explain(models["attnmil"], bag, target=1, baseline=background))
    return record


def _with_places(net: Any, x: Any, *, coords: Any, index: Any) -> Any:
    return net(x + 0.001 * coords.sum(dim=-1, keepdim=True) + 0.01 * index.unsqueeze(-1))


class _Probabilities(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        return torch.softmax(self.net(x), dim=-1)


class _Dropping(_Probabilities):
    def forward(self, x: Any) -> Any:
        return self.net(x * (1 + 0.1 * torch.rand(x.shape[:-1]).unsqueeze(-1)))


@golden_run("curves")
def every_curve(workspace: Workspace) -> Record:
    """Flip curves in every order, action and mode, and the measures made of them."""
    bag, record = draw_bag(3, 11), {}
    for name, model in {
        "attnmil": make_model("attnmil"),
        "transmil": make_model("transmil"),
        "own": own_model(),
    }.items():
        e = xmil.explain(model, bag, target=1)
        choices = product(("morf", "lerf", "abs"), ("drop", "add"), ("remove", "mask"))
        for order, action, mode in choices:
            curve = xmil.flip(model, bag, e, order=order, action=action, mode=mode, steps=8)
            record |= flatten(of_curve(curve), f"{name} | {order} {action} {mode}")
        band = xmil.random_band(xmil.Flips(model, bag, target=1), orders=4, steps=5, seed=1)
        record |= flatten(band, f"{name} | band")
        for mode in ("remove", "mask"):
            measures = {
                "srg": xmil.srg(model, bag, e, mode=mode, steps=7),
                "sufficiency": xmil.sufficiency(model, bag, e, mode=mode, top=0.3),
                "necessity": xmil.necessity(model, bag, e, mode=mode, top=0.3),
            }
            record |= flatten(measures, f"{name} | {mode}")
    for name in ("labels", "value", "survival", "cox"):
        model = make_model(name)
        curve = xmil.flip(model, bag, xmil.explain(model, bag, method="single"), steps="each")
        record |= flatten(of_curve(curve), f"{name} | each")
    evidence, scores = np.sign(bag.features[:, 0]), bag.features[:, 1]
    record |= flatten(xmil.auprc2(np.where(np.abs(evidence) > 0, evidence, 0), scores), "auprc2")
    return record


def of_curve(curve: Any) -> dict[str, Any]:
    """A curve's fields and areas."""
    names = ("values", "counts", "flipped", "at_zero", "flipped_at_zero", "decides", "scale", "aupc", "aopc")
    return {**{name: getattr(curve, name) for name in names}, "target": str(curve.target)}


@golden_run("sets")
def minimal_sets_and_interactions(workspace: Workspace) -> Record:
    """The smallest sets that decide, and pairs that act together: enumerated, sampled, of groups."""
    bag, record = draw_bag(5, 9), {}
    names = ("attnmil", "attnmil_b", "transmil", "addmil", "labels")
    for name, model in {**{name: make_model(name) for name in names}, "own": own_model()}.items():
        for kind in ("flip", "keep"):
            smallest = xmil.minimal_set(model, bag, kind=kind)
            keys = ("instances", "lower", "upper", "exact", "decided", "n", "tried")
            record |= flatten({key: getattr(smallest, key) for key in keys}, f"{name} | {kind}")
        ways = {
            "exact": {"top": 4},
            "sampled": {"top": 4, "exact": False, "precision": None, "draws": 32, "seed": 2},
            "groups": {"groups": np.arange(len(bag)) // 3},
        }
        for way, options in ways.items():
            pairs = xmil.interactions(model, bag, target=0, **options)
            keys = ("pairs", "values", "stderr", "alone", "output", "corners")
            record |= flatten({key: getattr(pairs, key) for key in keys}, f"{name} | {way}")
    return record


@golden_run("explain")
def explain(workspace: Workspace) -> Record:
    """`xmil explain`: all classes; contexts and pairs; an ensemble over cases; a network of one's own."""
    w = workspace
    record = within(w.folder(w.explained), "all")
    runs = {
        "contexts": ("models/transmil.safetensors", "--methods", "lrp,single", "--param", "lrp.contexts=4",
        *SOME),
        "pairs": (
            "models/attnmil.safetensors", "--config", "interactions=4", "--param",
            "lrp.feature_level=true", *SOME,
        ),
        "cases": (
            "models/attnmil.safetensors", "--model", "models/attnmil_b.safetensors", "--config", "by=case",
            "--target", "label",
        ),
        "own": ("own.py:build", "--class-names", "neg,pos", "--methods", "lrp,gxi", *SOME),
        "survival": ("models/survival.safetensors", *SOME),
    }  # fmt: skip
    for name, (model, *more) in runs.items():
        w.command("explain", "--model", model, *FEATURES, *more, "--out", name)
        record |= within(w.folder(name), name)
    return record


@golden_run("evaluate")
def evaluate(workspace: Workspace) -> Record:
    """`xmil evaluate` over slides with annotated truth, and over cases by a transformer."""
    w = workspace
    common = (*FEATURES, "--split", "test", "--steps", "8", "--orders", "4")
    w.command(
        "evaluate", "--model", "models/attnmil.safetensors", *common, "--truth", "truth", "--config",
        "truth_class=pos", "--methods", "lrp,attention,random", "--out", "evaluated",
    )  # fmt: skip
    record = within(w.folder("evaluated"), "slides")
    w.command(
        "evaluate", "--model", "models/transmil.safetensors", *common, "--config", "by=case", "--modes",
        "mask",
        "--methods", "lrp,attention", "--out", "evaluated_cases",
    )  # fmt: skip
    return record | within(w.folder("evaluated_cases"), "cases")


@golden_run("heatmap")
def heatmap(workspace: Workspace) -> Record:
    """`xmil heatmap` over slides with every picture and export, without slides, and `xmil export`."""
    w = workspace
    w.command(
        "heatmap", w.explained, "--slides", "slides", "--names", "s01", "--target", "predicted", "--methods",
        "lrp,attention", "--pictures", "panel,overlay,side,patches,map", "--size", "300", "--config", "top=3",
        "--to", "png,geojson,scores,colours,csv,parquet", "--out", "drawn",
    )  # fmt: skip
    record = within(w.folder("drawn"), "slides")
    w.command(
        "heatmap", w.explained, "--names", "s00,s02", "--target", "pos", "--methods", "lrp", "--pictures",
        "map", "--scale", "cohort", "--to", "png", "--out", "maps",
    )  # fmt: skip
    record |= within(w.folder("maps"), "maps")
    w.command(
        "export", f"{w.explained}/slides/s01.parquet", "--slides", "slides", "--to", "qupath,asap,csv",
        "--methods", "lrp", "--target", "predicted", "--out", "exported",
    )  # fmt: skip
    return record | within(w.folder("exported"), "export")


@golden_run("predict")
def predict(workspace: Workspace) -> Record:
    """`xmil predict` for each task, with measures; an ensemble over sampled patches."""
    w, record = workspace, {}
    runs = {
        "classes": ("attnmil",),
        "transmil": ("transmil", "--config", "by=case"),
        "labels": ("labels",),
        "value": ("value", "--label", "value"),
        "survival": ("survival",),
        "cox": ("cox",),
        "ensemble": (
            "attnmil", "--model", "models/attnmil_b.safetensors", "--config", "instances=9",
            "--config", "repetitions=2",
        ),
    }  # fmt: skip
    for name, (model, *more) in runs.items():
        w.command(
            "predict", "--model", f"models/{model}.safetensors", *FEATURES, "--config", "draws=40", *more,
            "--out", f"predicted_{name}",
        )  # fmt: skip
        record |= within(w.folder(f"predicted_{name}"), name)
    return record


@golden_run("insight")
def insight(workspace: Workspace) -> Record:
    """`xmil insight` over a run: concepts, strategies, shortcuts, biomarkers, survival, stability, sanity."""
    w = workspace
    for name in ("attnmil", "attnmil_b"):
        model = f"models/{name}.safetensors"
        w.command("explain", "--model", model, *FEATURES, "--target", "pos", "--out", f"looked_{name}")
    w.command(
        "insight", "looked_attnmil", *FEATURES, "--slides", "slides", "--model", "models/attnmil.safetensors",
        "--config", "concepts=3", "--config", "sanity=2", "--beside", "looked_attnmil_b", "--regions",
        "truth", "--config", "within=Tumor", "--out", "insight",
    )  # fmt: skip
    return w.folder("insight")


@golden_run("slides")
def python_doors(workspace: Workspace) -> Record:
    """The verbs over slides from Python, and what a `Run` says of what they left."""
    w, record = workspace, {}
    models, features = w.cohort / "models", w.cohort / "features"
    common = {"cohort": w.cohort / "cohort.csv", "split": "test"}
    run = xmil.explain_slides(
        models / "attnmil.safetensors", features, out=w.root / "e", methods=["lrp", "single"], **common
    )
    record |= flatten(of_run(run), "explain", root=w.root)
    for slide in list(run)[:2]:
        e = run.explanation(slide, method="lrp")
        again = xmil.Explanation.load(run.file(slide), method="lrp")
        about = {"top": e.top(3), "table": e.to_pandas(), "equal": bool((e.scores == again.scores).all())}
        record |= flatten({**of_explanation(e), **about}, f"explain | {slide}")
    options = {"methods": ["lrp", "random"], "steps": 4, "orders": 3, "modes": ["remove"]}
    run = xmil.evaluate_slides(
        models / "attnmil.safetensors", features, out=w.root / "v", **options, **common
    )
    record |= flatten(of_run(run), "evaluate", root=w.root)
    run = xmil.predict_slides(models / "transmil.safetensors", features, out=w.root / "p", draws=20, **common)
    record |= flatten(of_run(run), "predict", root=w.root)
    run = xmil.draw_slides(w.root / "e", out=w.root / "h", pictures=["map"], to=["png", "csv"], names=["s00"])
    record |= flatten(of_run(run), "heatmap", root=w.root) | within(
        record_folder(w.root / "h", root=w.root), "heatmap"
    )
    run = xmil.open_run(w.root / "e")
    return record | flatten(
        {"slides": list(run), "spec": run.spec, "settings": run.settings}, "opened", root=w.root
    )


def of_run(run: xmil.Run) -> dict[str, Any]:
    """What a run is; its table by columns."""
    return {
        "kind": run.kind,
        "task": run.task,
        "class_names": run.class_names,
        "slides": list(run),
        "failed": run.failed,
        "table": run.table(),
    }


@golden_run("tiles")
def tile_and_embed(workspace: Workspace) -> Record:
    """`xmil tile` and `xmil embed` with the demonstration's encoder."""
    w = workspace
    (w.cohort / "few").mkdir()
    for name in ("s00", "s03"):
        (w.cohort / "few" / f"{name}.tif").symlink_to(w.cohort / "slides" / f"{name}.tif")
    w.command("tile", "few", "--size", "32", "--drop", "none", "--out", "tiles")
    record = within(w.folder("tiles"), "tile")
    w.command(
        "embed",
        "--tiles",
        "tiles",
        "--slides",
        "few",
        "--encoder",
        "tissue",
        "--device",
        "cpu",
        "--out",
        "embedded",
    )
    return record | within(w.folder("embedded"), "embed")


TRAINING = """
out = "trained"

[data]
features = "features"
cohort = "cohort.csv"
instances = 6
folds = 2

[model]
name = "attnmil"
dim = 8
attention_dim = 4

[optim]
name = "sgd"
lr = 0.05

[train]
epochs = 3
batch = 2
monitor = "loss"
tensorboard = false
device = "cpu"
"""


@golden_run("train", relative=TRAINED)
def train(workspace: Workspace) -> Record:
    """`xmil train` over two folds, and `xmil split`."""
    w = workspace
    (w.cohort / "train.toml").write_text(TRAINING)
    w.command("train", "train.toml")
    record = within(w.folder("trained"), "train")
    w.command("split", "cohort.csv", "--folds", "3", "--stratify", "label", "--out", "split.csv")
    (w.cohort / "split").mkdir()
    (w.cohort / "split.csv").rename(w.cohort / "split" / "split.csv")
    return record | within(w.folder("split"), "split")


@golden_run("bench", relative=TRAINED)
def bench(workspace: Workspace) -> Record:
    """`xmil bench --quick` on one task of the evidence and the faithfulness suites."""
    w = workspace
    common = (
        "--quick",
        "--task",
        "pos_neg_count",
        "--repetitions",
        "1",
        "--data",
        "onehot",
        "--out",
        "bench",
    )
    suites = ("--suite", "evidence", "--suite", "faithfulness")
    w.command("bench", *suites, *common, "--only", "--methods", "lrp,attention")
    return w.folder("bench", skip=("units",))


@golden_run("toy", relative=TRAINED)
def toy(workspace: Workspace) -> Record:
    """`xmil bench --suite paper`, small: on a model that learns, and on three that have just begun."""
    w, record = workspace, {}
    methods = "random,attention,single,logits,gxi,ig,lrp,attention:unfolded,lrp:paper"
    runs = {
        "learned": ("--quick", "--task", "standard", "--model", "attnmil", "--config", "bags=160,40,20"),
        "begun": ("--task", "four_bags", "--model", "addmil,mambamil,transmil", "--config", "bags=32,16,12"),
    }
    for name, options in runs.items():
        epochs = "15" if name == "learned" else "2"
        w.command(
            "bench", "--suite", "paper", *options, "--data", "onehot", "--config", f"epochs={epochs}",
            "--repetitions", "2", "--methods", methods, "--config", "plots=false", "--out", f"toy_{name}",
        )  # fmt: skip
        record |= within(w.folder(f"toy_{name}", skip=("units",)), name)
    return record


RECORDER = '''
import torch
from torch import nn

TRAINING = {"lr": 0.01, "epochs": 1}


class Recorder(nn.Module):
    """A linear network that sums what it is fed, weighted by place: in training, and in validation."""

    def __init__(self, width, classes):
        super().__init__()
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("fed", torch.zeros(2, 2, dtype=torch.float64))

    def forward(self, x):
        sums = self.fed[int(self.training)]
        places = torch.arange(x.numel(), dtype=torch.float64) + sums[1]
        sums[0] += (torch.sin(1.0 + places) * x.detach().double().flatten()).sum()
        sums[1] += x.numel()
        return self.head(x.mean(dim=1))


def build(width, classes):
    return Recorder(width, classes)
'''


def drawn_bags(workspace: Workspace, data: str, *more: str) -> Record:
    """The bags of the tasks as Table 1's protocol draws them, seen by a network that is trained on them."""
    from safetensors.numpy import load_file

    w, record = workspace, {}
    (w.cohort / "recorder.py").write_text(RECORDER)
    name = f"bags_{Path(data).name}"
    w.command(
        "bench", "--suite", "evidence", "--only", "--model", "recorder.py:build", "--data", data, *more,
        "--export", name, "--out", f"{name}_bench",
    )  # fmt: skip
    for path in sorted((w.cohort / name).glob("*.npz")):
        with np.load(path) as file:
            bags = np.stack([file[f"bag|{one}"] for one in file["names"]])
        state = load_file(path.with_suffix(".safetensors"))
        sums, counts = state["fed"].T
        content = {"test": checksum(bags), "fed": sums, "counts": counts, "head": state["head.weight"]}
        record |= flatten(content, path.stem)
    return record


def mnist_bags(workspace: Workspace, folder: Path) -> Record:
    """The bags of one task on real digits."""
    return drawn_bags(workspace, str(folder), "--quick", "--task", "four_bags", "--repetitions", "1")


@golden_run("streams")
def streams(workspace: Workspace) -> Record:
    """Random streams behind Table 1: the weights that models begin with, and the bags of every task."""
    record = drawn_bags(workspace, "onehot", "--repetitions", "2")
    for name in xmil.list_models():
        for seed in (0, 1000):
            model = xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=seed)
            state = {key: checksum(value.numpy()) for key, value in model.state_dict().items()}
            sums = {key: value["sums"] for key, value in state.items()}
            record |= flatten(sums, f"{name} | seed {seed}")
    return record
