"""`xmil doctor`: is everything there, and does it compute what it should?"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    check: Annotated[
        bool, typer.Option(help="Explain tiny models and compare the scores with stored values.")
    ] = True,
) -> int:
    """Say what is installed, which devices there are, what to install for what, and check the results.

    The exit code is 0 when all is well, and 1 when a required package is missing or broken or the self-check
    fails. Optional packages may be missing.
    """
    from xmil.cli._diagnosis import diagnosis

    report = diagnosis(check=check)
    if json_:
        import json

        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _print(report: dict[str, Any]) -> None:
    about, machine = report["xmil"], report["machine"]
    commit = f", commit {about['commit'][:10]}" if about["commit"] else ""
    print(f"xmil {about['version']}{commit}, Python {about['python']}")
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']} GiB memory"
    print(f"{machine['system']}, {machine['cores']} cores{memory}, {machine['free_disk_gib']} GiB disk free")
    print("\nDevices")
    for device in report["devices"]:
        size = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
        print(f"  {device['device']:<10} {device['name']}{size}")
    print("\nRequired packages")
    print("  " + ", ".join(f"{name} {_state(found)}" for name, found in report["packages"].items()))
    print("\nOptional packages")
    for name, extra in report["extras"].items():
        _print_extra(name, extra)
    library = report["openslide"]
    print(f"  OpenSlide library: {library['version'] or library['error']}")
    _print_check(report["self_check"])
    for problem in report["problems"]:
        print(f"  mend: {problem}")


def _print_extra(name: str, extra: dict[str, Any]) -> None:
    print(f"  {name:<9} {extra['state']:<8} {extra['for']}")
    if extra["state"] == "missing":
        absent = [package for package, found in extra["packages"].items() if found["version"] is None]
        print(f"  {'':<18} without {', '.join(absent)}: {extra['install']}")
    for package, found in extra["packages"].items():
        if found["version"] and found["error"]:
            print(f"  {'':<18} {package} {found['version']} does not import: {found['error']}{_hint(found)}")


def _hint(found: dict[str, Any]) -> str:
    matched = "torchvision::" in found["error"]
    return "; install builds of torch and torchvision that match (both CPU, or both CUDA)" if matched else ""


def _print_check(check: dict[str, Any] | None) -> None:
    if check is None:
        print("\nSelf-check: not requested")
    elif check["error"]:
        print("\nSelf-check: failed")
    else:
        share = f"{check['largest_difference']:.1e} (limit {check['tolerance']:.0e})"
        print(f"\nSelf-check: passed, {check['pairs']} pairs of model and method in {check['seconds']} s,")
        print(f"  largest difference from the stored scores {share}")


def _state(found: dict[str, Any]) -> str:
    return "missing" if found["version"] is None else str(found["version"]) + " broken" * bool(found["error"])
