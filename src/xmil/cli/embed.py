"""`xmil embed`: features of the patches of slides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli._options import FollowLinks, FullDigests, Json
from xmil.cli._screen import Screen, command, finished
from xmil.cli._workers import Address, Cpus, Gpus, Kind, WorkerCount, workers_of
from xmil.core.errors import InputError

Colours = Annotated[str, typer.Option(help="Three numbers that replace the encoder's own.")]


def embed(
    tiles: Annotated[Path, typer.Option(help="Folder of patches written by xmil tile, TRIDENT or CLAM.")],
    slides: Annotated[Path, typer.Option(help="Folder of slides.")],
    encoder: Annotated[
        str,
        typer.Option(
            help="resnet18, resnet50, resnet50_trunc (CLAM's), ctranspath, uni, ..., a timm name, "
            "hf-hub:OWNER/NAME, FILE.onnx, a TorchScript file, or module:function. The last two run code: "
            "use those you trust."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for features; TILES/features_ENCODER by default.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Weights (a state dict) to use instead of the published ones.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N; auto takes a GPU if there is one.")
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="float32, float16, bfloat16; auto is float16 on a GPU.")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Patches encoded at once.")] = 64,
    threads: Annotated[
        int, typer.Option(help="Threads that read and decode; 0 means one per core, at most 16.")
    ] = 0,
    readers: Annotated[
        int,
        typer.Option(
            help="Processes that read and decode; 0 means threads instead, -1 one per core for a GPU and "
            "threads for a CPU."
        ),
    ] = -1,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the network: quicker on a GPU; the last digits of features differ."
        ),
    ] = False,
    decode: Annotated[
        str,
        typer.Option(
            help="cpu, or gpu: JPEG tiles are decoded by the GPU where its pixels are the CPU's within one "
            "grey level."
        ),
    ] = "cpu",
    stain_norm: Annotated[
        bool, typer.Option("--stain-norm", help="Normalise each slide's stains to a reference (Macenko).")
    ] = False,
    input_size: Annotated[
        int | None, typer.Option(help="Input size of the encoder in pixels, instead of its own.")
    ] = None,
    mean: Colours = "",
    std: Colours = "",
    patch_px: Annotated[
        int | None, typer.Option(help="Patch size in pixels, if the file does not store it.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Use an untrained encoder, for testing.")] = False,
    as_json: Json = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the earlier run in --out and start over.")
    ] = False,
    follow_links: FollowLinks = True,
    full_digests: FullDigests = False,
    engine: Kind = "local",
    workers: WorkerCount = 0,
    address: Address = "",
    cpus: Cpus = 1.0,
    gpus: Gpus = 0.0,
) -> int:
    """Encode the patches of slides; features in TRIDENT's layout, one file per slide."""
    from xmil.runs.embed import embed_slides, found_device

    device = found_device(device)
    screen = Screen(as_json)
    run = embed_slides(
        tiles,
        slides,
        encoder=encoder,
        out=out,
        weights=weights,
        device=device,
        precision=precision,
        batch=batch,
        threads=threads,
        readers=None if readers < 0 else readers,
        compile=compile_,
        decode=decode,
        stain_norm=stain_norm,
        input_size=input_size,
        mean=_numbers(mean, "--mean"),
        std=_numbers(std, "--std"),
        patch_px=patch_px,
        random=random,
        restart=restart,
        workers=workers_of(engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device),
        follow_links=follow_links,
        full_digests=full_digests,
        listener=screen,
    )
    model = ("--model", "MODEL", "--features", run.path)
    return finished(run, screen, then=command("xmil", "explain", *model, "--out", "run", "--slides", slides))


def _numbers(text: str, option: str) -> tuple[float, ...] | None:
    if not text:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise InputError(f"{option} takes three numbers separated by commas. Got {text!r} instead.")
    return numbers
