"""Speed of the evidence benchmark, as ratios within one run.

    python benchmarks/toy.py [--data FEATURES] [--device cuda] [--many 8]

Many repetitions at once against one; explaining 1,000 test bags for all classes against one forward pass over
them; and, as a check, a repetition trained with others against the same seed trained alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from xmil.bench import (
    PAPER_MODELS,
    SETUPS,
    TASKS,
    Configuration,
    Lap,
    MethodSpec,
    Protocol,
    load_instances,
    score_bags,
    stack_sets,
    train_stacked,
)
from xmil.models import MILModel

Step = Callable[[], object]


def seconds(steps: dict[str, Step], *, rounds: int, device: str) -> dict[str, float]:
    """The fastest of several rounds of each, taken in turns, so that a busy machine slows all alike."""
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            wait(device)
            started = time.perf_counter()
            step()
            wait(device)
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.no_grad()
def forward(model: MILModel, x: torch.Tensor) -> torch.Tensor:
    """Outputs (b, c) of many bags."""
    step = max(1, (1 << 24) // (x.shape[1] * x.shape[2]))
    return torch.cat([model(bags) for bags in x.split(step)])


def configuration(
    model: str, arguments: argparse.Namespace, repetitions: int, **changes: object
) -> Configuration:
    protocol = Protocol(repetitions=repetitions, **changes)  # type: ignore[arg-type]
    return Configuration(TASKS["four_bags"], SETUPS[model], arguments.instances, protocol, arguments.device)


def epoch_of(c: Configuration) -> Step:
    """One epoch of training of all repetitions, validation included."""
    splits = [c.splits(r) for r in range(c.protocol.repetitions)]
    sets = stack_sets([s.train for s in splits]), stack_sets([s.validation for s in splits])
    lap = Lap(c.fresh_models(), *sets, c.table(), c.protocol.training_of(c.setup))

    def epoch() -> None:
        lap.train_epoch()
        lap.validation_losses()

    return epoch


def training_ratio(model: str, arguments: argparse.Namespace) -> None:
    sizes = (320, 80, 16)
    steps = {str(r): epoch_of(configuration(model, arguments, r, sizes=sizes)) for r in (1, arguments.many)}
    found = seconds(steps, rounds=arguments.rounds, device=arguments.device)
    one, many = found["1"], found[str(arguments.many)]
    print(
        f"{model}: {arguments.many} repetitions at once cost {many / one:.2f} x one "
        f"({1e3 * many:.1f} and {1e3 * one:.1f} ms an epoch of {sizes[0]} bags)"
    )


def scoring_ratio(model: str, arguments: argparse.Namespace) -> None:
    c = configuration(model, arguments, 1)
    net, table = c.fresh_models().model(0), c.table()
    assert isinstance(net, MILModel)
    x = table.bags(table.to_rows(c.splits(0).test.rows))
    steps: dict[str, Step] = {
        "forward": lambda: forward(net, x),
        "lrp": lambda: score_bags(net, x, MethodSpec("lrp")),
    }
    found = seconds(steps, rounds=arguments.rounds, device=arguments.device)
    print(
        f"{model}: lrp for {len(x)} bags x {c.task.n_classes} classes costs "
        f"{found['lrp'] / found['forward']:.2f} x a forward pass "
        f"({1e3 * found['lrp']:.1f} and {1e3 * found['forward']:.1f} ms)"
    )


def alone_check(model: str, arguments: argparse.Namespace) -> None:
    changes = {"sizes": (160, 48, 32), "training": {"epochs": 12, "warmup": 2}}
    together = train_stacked(configuration(model, arguments, 3, **changes))
    alone = train_stacked(configuration(model, arguments, 1, **changes))
    gap = (together.models.flat[0] - alone.models.flat[0]).abs().max()
    loss = abs(together.best_loss[0] - alone.best_loss[0])
    print(
        f"{model}: trained with others and alone, parameters differ by {gap:.1e}, "
        f"validation loss by {loss:.1e}"
    )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--many", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(given)
    arguments.instances = load_instances(arguments.data)
    for model in PAPER_MODELS:
        alone_check(model, arguments)
        training_ratio(model, arguments)
        scoring_ratio(model, arguments)


if __name__ == "__main__":
    main()
