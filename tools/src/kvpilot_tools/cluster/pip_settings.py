"""The machine's pip configuration, for builds that must download what the machine itself can download.

Read from pip itself, so that files and environment are merged as pip does it. Invariant: nothing of it is written
anywhere but into a file that lives as long as one build.
"""

from __future__ import annotations

import ast
import configparser
import io
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def read() -> dict[str, dict[str, str]]:
    """Return pip's settings by section; empty without pip. Our own environment may lack it: the system's will do."""
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["python3", "-m", "pip"]):
        try:
            done = subprocess.run([*command, "config", "list"], capture_output=True, text=True, check=False, cwd="/")
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return parse(done.stdout)
    return {}


def parse(printed: str) -> dict[str, dict[str, str]]:
    """Return settings by section from `pip config list`; what the environment says is printed as `:env:` and wins."""
    settings: dict[str, dict[str, str]] = {}
    from_environment: dict[str, str] = {}
    for line in printed.splitlines():
        key, found, quoted = line.partition("=")
        section, dot, name = key.rpartition(".")
        if not found or not dot:
            continue
        value = str(ast.literal_eval(quoted))
        if section == ":env:":
            from_environment[name] = value
        else:
            settings.setdefault(section, {})[name] = value
    if from_environment:
        settings.setdefault("global", {}).update(from_environment)
    return settings


def render(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of a pip.conf."""
    parser = configparser.RawConfigParser()
    for section, values in settings.items():
        parser[section] = {name: value.replace("\n", "\n    ") for name, value in values.items()}
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def local_folders(settings: Mapping[str, Mapping[str, str]]) -> list[Path]:
    """Return the machine's folders that the settings name as places to find packages; a build must see them too."""
    return [folder for text in _find_links(settings) if (folder := Path(text)).is_absolute() and folder.is_dir()]


def _find_links(settings: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    for values in settings.values():
        yield from values.get("find-links", "").split()


def certificate(settings: Mapping[str, Mapping[str, str]]) -> Path | None:
    """Return the file of authorities that the settings name, if any."""
    named = next((values["cert"] for values in settings.values() if values.get("cert")), None)
    return Path(named) if named else None


def proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy settings of an environment."""
    return {name: environ[name] for name in _PROXY_NAMES if environ.get(name)}
