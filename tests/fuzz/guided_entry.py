"""One entry under libFuzzer, in this process: `python -m tests.fuzz.guided_entry NAME FOLDER SECONDS`.

Everything of xmil is imported here under instruments, so nothing of it may be imported before.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(name: str, folder: Path, seconds: str) -> None:
    """Breed inputs from the sound one until the time is up or a fault is found."""
    import atheris

    with atheris.instrument_imports(include=["xmil"]):
        from tests.fuzz.__main__ import PEAK, SECONDS, judged
        from tests.fuzz.entries import ENTRIES

    golden = ENTRIES[name].make(folder)
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "golden").write_bytes(golden.read_bytes())
    most = 2 * golden.stat().st_size + 64

    def read(content: bytes) -> None:
        golden.write_bytes(content)
        verdict, why = judged(name, golden)
        if verdict == "fault":
            raise RuntimeError(why)

    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={PEAK // 2**20}", f"-timeout={SECONDS}"]
    kept = [f"-max_len={most}", "-print_final_stats=1", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *kept], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
