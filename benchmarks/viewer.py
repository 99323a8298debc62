"""The viewer under load and on large slides.

    python -m benchmarks.viewer [--clients 50 --seconds 30]

Tiles for many clients at once from one server on loopback, with its memory; facts and scores of a slide of
25,000 patches; what-if for every model on such a slide; the list of a large cohort.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.make_run import make_bag, write_slide

import xmil
from xmil.core.bag import Bag
from xmil.core.explanation import Explanation
from xmil.core.task import Target
from xmil.models import save_model
from xmil.storage import write_explanations
from xmil.viewer.app import Site
from xmil.viewer.cache import to_json
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import tile_numbers

COLUMNS, ROWS, EDGE, DIM = 200, 125, 64, 512


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--models", nargs="+", default=xmil.list_models())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make(folder)
        load(folder, clients=args.clients, seconds=args.seconds)
        facts(folder)
        whatif(folder, args.models)
        cohort(folder)


def load(folder: Path, *, clients: int, seconds: float) -> None:
    """Clients that fetch tiles in random order for a while."""
    command = [sys.executable, "-m", "xmil.cli", "view", str(folder / "run")]
    command += ["--slides", str(folder / "slides"), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # ourselves
    try:
        port = _port(server)
        tiles = [t for key in range(3) for t in _tiles(port, key)]
        memory, stop, times = [_resident(server.pid)], threading.Event(), []
        faults: list[str] = []
        jobs = [
            threading.Thread(target=_client, args=(port, tiles, seed, stop, times, faults))
            for seed in range(clients)
        ]
        for job in jobs:
            job.start()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(0.25)
            memory.append(_resident(server.pid))
        stop.set()
        for job in jobs:
            job.join()
        memory.append(_resident(server.pid))
        _print_load(len(tiles), clients, seconds, times, faults, memory)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def facts(folder: Path) -> None:
    """slide.json and scores of 25,000 patches, nothing kept from before."""
    times = []
    for _ in range(10):
        collection = Collection([folder / "run"])
        started = time.perf_counter()
        sizes = [len(to_json(collection.describe(0))), len(collection.scores(0, 0))]
        times.append(1000 * (time.perf_counter() - started))
    print(
        f"\nslide.json and scores of {COLUMNS * ROWS} patches, 6 columns, {sum(sizes) / 1e6:.2f} MB: ", end=""
    )
    print(
        f"median {statistics.median(times):.0f} ms of 10 (each with nothing kept), worst {max(times):.0f} ms"
    )


def whatif(folder: Path, models: list[str]) -> None:
    """The first and the next answers for a slide of 25,000 patches."""
    print(f"\n| what-if, {COLUMNS * ROWS} patches x {DIM} | first (ms) | next, median of 5 (ms) |")
    print("|---|---|---|")
    for name in models:
        path = folder / f"{name}.safetensors"
        save_model(xmil.create_model(name, in_dim=DIM, n_classes=2, seed=0), path)
        site = Site(Collection([folder / "run"], features=[folder / "features"]), [path])
        assert site.whatif is not None
        site.whatif.warm()
        site.bags.get(0, 0)
        times = []
        for i in range(6):
            started = time.perf_counter()
            site.whatif.ask(0, {"run": 0, "remove": [[1000 * i, 1000 * i + 4000]]})
            times.append(1000 * (time.perf_counter() - started))
        print(f"| {name} | {times[0]:.0f} | {statistics.median(times[1:]):.0f} |", flush=True)


def cohort(folder: Path, slides: int = 1000) -> None:
    """The list of many slides, the first and the second time."""
    for i in range(slides):
        os.link(folder / "run" / "slides" / "s1.parquet", folder / "run" / "slides" / f"copy-{i}.parquet")
    collection, times = Collection([folder / "run"], slides=folder / "slides"), []
    for _ in range(2):
        started = time.perf_counter()
        collection.overview()
        times.append(1000 * (time.perf_counter() - started))
    print(f"\nlist of {slides} slides: {times[0]:.0f} ms, again {times[1]:.0f} ms")


def _make(folder: Path) -> None:
    for name in ("run/slides", "slides", "features"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for key in range(3):
        bag = make_bag(f"s{key}", columns=COLUMNS, rows=ROWS, edge=EDGE, seed=key)
        colours = rng.integers(0, 255, size=(ROWS * 4, COLUMNS * 4, 3)).astype(np.uint8)
        write_slide(folder / "slides" / f"s{key}.tif", colours, edge=EDGE // 4)
        write_explanations(_scores(bag, rng), folder / "run" / "slides" / f"s{key}.parquet")
    features = rng.normal(size=(COLUMNS * ROWS, DIM)).astype(np.float32)
    xmil.write_bag(Bag(features, slide_id="s0"), folder / "features" / "s0.h5")


def _scores(bag: Bag, rng: np.random.Generator) -> list[Explanation]:
    shared: dict[str, Any] = {"coords": bag.coords, "patch_size": EDGE, "bag": bag.slide_id, "mpp": 0.5}
    shared |= {"logits": np.zeros(2, dtype=np.float32), "output": 0.0, "signed": True}
    return [
        Explanation(rng.normal(size=len(bag)).astype(np.float32), method=m, target=Target(c), **shared)
        for m in ("lrp", "ig", "gxi")
        for c in (0, 1)
    ]


def _client(
    port: int, tiles: list[str], seed: int, stop: threading.Event, times: list[float], faults: list[str]
) -> None:
    draw = random.Random(seed)  # noqa: S311
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not stop.is_set():
        target, started = draw.choice(tiles), time.perf_counter()
        try:
            connection.request("GET", target)
            answer = connection.getresponse()
            content = answer.read()
        except OSError as error:
            faults.append(f"{target}: {error!r}")
            continue
        times.append(1000 * (time.perf_counter() - started))
        if answer.status != 200 or content[:2] != b"\xff\xd8":
            faults.append(f"{target}: {answer.status}")
    connection.close()


def _print_load(
    tiles: int, clients: int, seconds: float, times: list[float], faults: list[str], memory: list[float]
) -> None:
    cuts = statistics.quantiles(times, n=100)
    print("| clients | tiles there are | requests | errors | a second | median (ms) | 99 % (ms) |")
    print("|---|---|---|---|---|---|---|")
    rate = len(times) / seconds
    row = (clients, tiles, len(times), len(faults), f"{rate:.0f}", f"{cuts[49]:.0f}", f"{cuts[98]:.0f}")
    print("| " + " | ".join(map(str, row)) + " |")
    half = max(memory[: len(memory) // 2])
    print(
        f"server's memory: {memory[0]:.0f} MB before, at most {half:.0f} MB in the first half, "
        f"{max(memory):.0f} MB in all, {memory[-1]:.0f} MB at the end"
    )
    for fault in faults[:5]:
        print(fault)


def _tiles(port: int, key: int) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/api/slides/{key}/slide.json")
    image = json.load(connection.getresponse())["image"]
    connection.close()
    return [f"/tiles/{key}/{z}/{x}_{y}.jpeg" for z, x, y in tile_numbers(image)]


def _port(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://[^/]+:(\d+)/", line):
            return int(found[1])
    raise SystemExit("the server did not start")


def _resident(pid: int) -> float:
    """Resident memory in MB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024


if __name__ == "__main__":
    main()
