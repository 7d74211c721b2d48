"""Compiles all kernels into a folder that goes along with an installation, so that no start has to.

    python -m kvpilot_engine.kernels.prebuilt [FOLDER]        by default where starts look for it

For this machine's level of processor (compile_target.py): pods on other levels compile at their first start.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from kvpilot_engine.kernels.compile_cache import (
    CACHE_VARIABLE,
    DEFAULT_PREBUILT,
    NUMBA_VARIABLE,
    PREBUILT_VARIABLE,
    prepare_compile_cache,
)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_PREBUILT)
    folder = parser.parse_args().folder.resolve()
    os.environ.pop(NUMBA_VARIABLE, None)
    os.environ[CACHE_VARIABLE] = os.environ[PREBUILT_VARIABLE] = str(folder)
    started = time.perf_counter()
    made = prepare_compile_cache(os.environ)
    if not made.is_relative_to(folder):
        raise SystemExit(f"{folder} can't be written, or others could write it")
    compile_everything()
    files = [path for path in made.rglob("*") if path.is_file()]
    _let_everybody_read(folder, made, files)
    print(f"{made}: {len(files)} files in {time.perf_counter() - started:.0f} s")  # noqa: T201 - its one line of output


def compile_everything() -> None:
    """Every kernel for every format, or what of it is not in the cache."""
    import numpy as np

    from kvpilot_engine.kernels import gated_activation
    from kvpilot_engine.kernels.compile_ahead import compile_decoder_parts
    from kvpilot_engine.kernels.compile_attention import compile_attention
    from kvpilot_engine.kernels.compile_sampling import compile_sampling
    from kvpilot_engine.kernels.cpu_features import multiplies_tiles
    from kvpilot_engine.kernels.packed_matrix import layouts_in_use

    compile_decoder_parts(layouts_in_use(in_tiles=multiplies_tiles()), gated_activation.BY_NAME)
    for kind in (np.uint16, np.float32, *([np.int16] if multiplies_tiles() else [])):
        compile_attention(kind)
    compile_sampling()


def _let_everybody_read(folder: Path, made: Path, files: list[Path]) -> None:
    """The installation's owner makes them, other users start engines."""
    for file in files:
        file.chmod(0o644)
    for place in {made, *made.parents, *(file.parent for file in files)}:
        if place.is_relative_to(folder):
            place.chmod(0o755)


if __name__ == "__main__":
    main()
