"""`xmil embed`: features of the patches of slides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from xmil.cli._workers import Address, Cpus, Gpus, Kind, WorkerCount
from xmil.core.errors import InputError
from xmil.core.names import counted

Colours = Annotated[str, typer.Option(help="Three numbers, in place of the encoder's own.")]


def embed(
    tiles: Annotated[Path, typer.Option(help="Folder of patches: of xmil tile, TRIDENT or CLAM.")],
    slides: Annotated[Path, typer.Option(help="Folder of slides.")],
    encoder: Annotated[
        str,
        typer.Option(
            help="resnet18, resnet50, ctranspath, uni, ..., a timm name, hf-hub:OWNER/NAME, FILE.onnx, a "
            "TorchScript file, or module:function. The last two run code: use those you trust."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for features; TILES/features_ENCODER without it.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="State dict in place of the published one.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N; auto takes a GPU if there is one.")
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="float32, float16, bfloat16; auto is float16 on a GPU.")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Patches encoded at once.")] = 64,
    threads: Annotated[
        int, typer.Option(help="Threads that read and decode; 0: one a core, at most 16.")
    ] = 0,
    stain_norm: Annotated[
        bool, typer.Option("--stain-norm", help="Bring each slide's stains to a reference (Macenko).")
    ] = False,
    input_size: Annotated[
        int | None, typer.Option(help="Pixels the encoder sees, in place of its own.")
    ] = None,
    mean: Colours = "",
    std: Colours = "",
    patch_px: Annotated[
        int | None, typer.Option(help="Pixels of a patch, where the file does not say.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="An untrained encoder, for trials.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew.")] = False,
    engine: Kind = "local",
    workers: WorkerCount = 0,
    address: Address = "",
    cpus: Cpus = 1.0,
    gpus: Gpus = 0.0,
) -> int:
    """Encode the patches of slides; features in TRIDENT's layout, one file per slide."""
    from xmil.cli._cohort import progress_bar
    from xmil.cli._slide import report_run
    from xmil.cli._workers import workers_of
    from xmil.encoders.load import short_name
    from xmil.runs.embed import EmbedSettings, embed_slides

    settings = EmbedSettings(
        encoder=encoder,
        weights=None if weights is None else str(weights),
        device=_device(device),
        precision=precision,
        input_size=input_size,
        mean=_numbers(mean, "--mean"),
        std=_numbers(std, "--std"),
        random=random,
        stain_norm=stain_norm,
        patch_px=patch_px,
        batch=batch,
        threads=threads or min(16, max(2, os.cpu_count() or 2)),
    )
    pairs, missing, twice = _pairs(tiles, slides)
    where = workers_of(engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=settings.device)
    folder = out or tiles / f"features_{short_name(encoder)}"
    with progress_bar("slides", len(pairs)) as advance:
        results = embed_slides(
            pairs, folder, settings, engine=where, restart=restart, on_slide=advance, refused=twice
        )
    for name in missing:
        print(f"{name}: no slide of this name in {slides}; left out.")
    patches = sum(done["patches"] for done in results.done.values())
    code = report_run(
        results, f"{counted(patches, 'patch')} of {counted(len(results.done), 'slide')}", folder
    )
    return 1 if missing else code


def _pairs(tiles: Path, slides: Path) -> tuple[dict[str, tuple[Path, Path]], list[str], dict[str, str]]:
    """Slide id to (slide, patches), the patches whose slide is not there, and slides that cannot be told."""
    from xmil.cli._slide import named_slides
    from xmil.data.siblings import slide_name

    folder = tiles / "patches" if (tiles / "patches").is_dir() else tiles
    if not folder.is_dir():
        raise InputError(f"{tiles}: no such folder.")
    files = {slide_name(path): path for path in sorted(folder.glob("*.h5")) if not path.name.startswith(".")}
    if not files:
        raise InputError(f"{tiles}: no patches here; run xmil tile first.")
    found = named_slides([slides])
    known, twice = found.slides, {name: why for name, why in found.twice.items() if name in files}
    pairs = {name: (known[name], path) for name, path in files.items() if name in known}
    if not pairs and not twice:
        raise InputError(f"{slides}: no slide has the name of a file in {folder}.")
    return pairs, [name for name in files if name not in known and name not in twice], twice


def _device(name: str) -> str:
    from xmil.cli._cohort import checked_device

    if name != "auto":
        return checked_device(name)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _numbers(text: str, option: str) -> tuple[float, ...] | None:
    if not text:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise InputError(f"{option} takes three numbers with commas between them. Got {text!r} instead.")
    return numbers
