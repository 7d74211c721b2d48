"""The chart through helm: render, lint, and the README table that is generated from values.yaml.

`python -m kvpilot_tools.chart lint` checks every scenario in ci/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from kvpilot_tools.cluster.assets import HELM, AssetStore
from kvpilot_tools.repository import CHART, ROOT

KUBE_VERSION = "1.34.4"
"""helm renders for an ancient Kubernetes unless told; our chart refuses that one."""
RELEASE, NAMESPACE = "k", "kvpilot-system"


def helm_binary() -> Path | None:
    """helm from PATH, KVPILOT_ASSETS or the cache; None where there is none yet."""
    return AssetStore.from_environ(os.environ).find(HELM)


def render(helm: Path, values: Path, *extra: str) -> str:
    """The manifests of one scenario as YAML text; raises CalledProcessError with helm's words."""
    command = [str(helm), "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", KUBE_VERSION, "-f", str(values), *extra]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lint() -> int:
    """Lint and render every scenario; 0 when all are clean, 3 when there is no helm."""
    helm = helm_binary()
    if helm is None:
        print("chart lint: no helm binary; `make setup-all` builds one", file=sys.stderr)
        return 3
    failures = 0
    for values in sorted((CHART / "ci").glob("*-values.yaml")):
        command = [
            str(helm),
            "lint",
            "--strict",
            "--quiet",
            "--kube-version",
            KUBE_VERSION,
            str(CHART),
            "-f",
            str(values),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failures += 1
            print(f"chart lint: {values.name}\n{done.stdout}{done.stderr}", file=sys.stderr)
    print(f"chart lint: {'clean' if not failures else f'{failures} scenarios fail'}")
    return 1 if failures else 0


def values_table(text: str) -> list[tuple[str, str, str]]:
    """(key, default as YAML flow, description) of every value that carries a `# --` comment, in file order."""
    rows: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    data: Any = yaml.safe_load(text)
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped[5:]]
        elif stripped.startswith("#"):
            if comment:
                comment.append(stripped[1:].strip())
        elif match := re.match(r"^( *)([A-Za-z][\w]*):", line):
            indent = len(match[1])
            path = [(i, k) for i, k in path if i < indent] + [(indent, match[2])]
            if comment:
                value = data
                for _, key in path:
                    value = value[key]
                default = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
                rows.append((".".join(k for _, k in path), default, " ".join(comment)))
            comment = []
        else:
            comment = []
    return rows


def readme() -> str:
    """The chart's README; written by `make generate`, compared in lint."""
    rows = values_table((CHART / "values.yaml").read_text())
    table = "\n".join(f"| `{key}` | `{default}` | {text} |" for key, default, text in rows)
    return (
        "# kvpilot\n\nInstalls the kvpilot operator and the `LLMDeployment` CRD.\n\n"
        "```sh\nhelm install kvpilot charts/kvpilot --namespace kvpilot-system --create-namespace\n"
        "kubectl apply -f examples/llmdeployment.yaml\n```\n\n"
        "The CRD is part of the release's templates, so that an upgrade updates it, and is kept on uninstall.\n"
        "Uninstalling the operator leaves running models serving; deleting an `LLMDeployment` then still removes its\n"
        "children, since they are tied by owner references and not by finalizers.\n\n"
        f"## Values\n\n| key | default | description |\n|---|---|---|\n{table}\n"
    )


def crd_copies() -> dict[Path, Path]:
    """Source → copy inside the chart."""
    return {source: CHART / "files" / "crds" / source.name for source in sorted((ROOT / "crds").glob("*.yaml"))}


if __name__ == "__main__":
    if sys.argv[1:] != ["lint"]:
        print("usage: python -m kvpilot_tools.chart lint", file=sys.stderr)
        sys.exit(2)
    sys.exit(lint())
