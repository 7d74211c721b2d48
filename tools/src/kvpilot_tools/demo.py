"""`make demo`, `make demo-load`, `make demo-down`: the path that a user of the project takes, shown step by step."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot_tools import images
from kvpilot_tools.cluster.layout import DEFAULT_NAME, layout_for
from kvpilot_tools.kubectl import Kubectl, KubectlError
from kvpilot_tools.manifests import condition, example, is_ready
from kvpilot_tools.release import HelmError, Release
from kvpilot_tools.repository import EXAMPLE, ROOT
from kvpilot_tools.traffic import Outcomes, ask, drive, wait_routed

READY_LIMIT_S = 300.0
QUESTION = "What is the capital of Japan? Answer in one sentence."
console = Console(highlight=False)


def cluster_command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "kvpilot_tools.cluster", *arguments], check=True, cwd=ROOT)


def kubectl() -> Kubectl:
    return Kubectl.for_kubeconfig(layout_for(DEFAULT_NAME).kubeconfig)


def timed(title: str, work: Callable[[], object]) -> None:
    started = time.monotonic()
    console.print(f"[bold]▸ {title}[/bold]")
    work()
    console.print(f"  done in {time.monotonic() - started:.1f} s")


def wait_ready(client: Kubectl, name: str) -> dict[str, Any]:
    """Wait for Ready of the current generation and print each change on the way."""
    deadline = time.monotonic() + READY_LIMIT_S
    started, shown = time.monotonic(), ""
    while True:
        item = client.get("llmdeployment", name) or {}
        ready = condition(item, "Ready")
        status = item.get("status", {})
        line = f"{status.get('phase', 'Pending')}: {ready['reason']} {ready['message']}".strip()
        if line != shown:
            console.print(f"  [{time.monotonic() - started:5.1f} s] {line}")
            shown = line
        if is_ready(item):
            return item
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} was not Ready within {READY_LIMIT_S:g} s: {line}")
        time.sleep(0.5)


def service_url(client: Kubectl, name: str) -> str:
    service = client.get("service", name)
    if service is None:
        raise KubectlError(f"there is no Service {name}")
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"


def show(item: dict[str, Any]) -> None:
    status = item["status"]
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("phase", status.get("phase", ""))
    table.add_row("replicas", f"{status.get('readyReplicas', 0)} ready, {status.get('desiredReplicas', 0)} wanted")
    for kind in ("Ready", "ScalingActive", "MemoryTuned", "Degraded"):
        found = condition(item, kind)
        table.add_row(kind, f"{found['status']} {found['reason']}: {found['message']}")
    for decision in status.get("decisions", [])[-5:]:
        change = f"{decision.get('from')} → {decision.get('to')}"
        table.add_row(
            f"{decision['loop']} {decision['action']}", f"{change} {decision['reason']}: {decision['message']}"
        )
    console.print(table)


def up() -> None:
    started = time.monotonic()
    timed("Kubernetes on this machine", lambda: cluster_command("up", "--engine-env", str(ROOT / ".venv")))
    client = kubectl()
    reference: list[str] = []
    timed("base image", lambda: cluster_command("base-image", "--load"))
    timed("operator image", lambda: reference.append(images.build(images.OPERATOR, load=True)))
    release = Release(kubeconfig=client.kubeconfig)
    timed("helm install kvpilot charts/kvpilot", lambda: release.install(reference[0]))
    manifest = example()
    name = manifest["metadata"]["name"]
    timed(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}", lambda: client.run("apply", "-f", str(EXAMPLE)))
    timed("wait for Ready", lambda: wait_ready(client, name))
    url = service_url(client, name)
    wait_routed(url)
    console.print(f"[bold]▸ POST {url}/v1/chat/completions[/bold]\n  {QUESTION}")
    answer = asyncio.run(ask(url, name, QUESTION))
    console.print(f"  [green]{answer.strip()}[/green]")
    console.print(client.run("get", "llmdeployment", name).rstrip(), soft_wrap=True)
    show(client.get("llmdeployment", name) or {})
    console.print(
        "Try next: make demo-load · "
        f"KUBECONFIG={client.kubeconfig} kubectl describe llmd {name} · curl {url}/metrics · make demo-down"
    )
    console.print(f"make demo: answered after {time.monotonic() - started:.0f} s")


def load(*, streams: int, seconds: float) -> None:
    client = kubectl()
    name = example()["metadata"]["name"]
    url = service_url(client, name)
    seen = Outcomes()

    async def watch() -> None:
        shown: dict[str, Any] = {}
        while True:
            item = await asyncio.to_thread(client.get, "llmdeployment", name)
            status = (item or {}).get("status", {})
            view = {
                "replicas": f"{status.get('readyReplicas', 0)}/{status.get('desiredReplicas', 0)}",
                "cap": status.get("memory", {}).get("utilization"),
                "decision": (status.get("decisions") or [{}])[-1].get("message", ""),
            }
            if view != shown:
                console.print(f"  {view['replicas']} replicas, cap {view['cap']}: {view['decision']}")
                shown = view
            await asyncio.sleep(1.0)

    async def run() -> None:
        watcher = asyncio.create_task(watch())
        await drive(url, name, streams=streams, seconds=seconds, prompt_words=40, max_tokens=160, seen=seen)
        watcher.cancel()

    console.print(f"[bold]▸ {streams} streams for {seconds:g} s[/bold]")
    asyncio.run(run())
    show(client.get("llmdeployment", name) or {})
    console.print(
        f"make demo-load: {seen.started} requests, finished {dict(seen.finished)}, refused {dict(seen.refused)}, "
        f"lost {len(seen.lost)}, {seen.tokens} tokens"
    )


def down() -> None:
    cluster_command("down")
    console.print("make demo-down: nothing is left")


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvpilot-demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="from nothing to a chat answer")
    load_parser = commands.add_parser("load", help="drive load at the demo and watch the loops")
    load_parser.add_argument("--streams", type=int, default=24, help="requests in flight (default 24)")
    load_parser.add_argument("--seconds", type=float, default=90.0, help="how long (default 90)")
    commands.add_parser("down", help="leave nothing behind")
    options = parser.parse_args()
    try:
        if options.command == "up":
            up()
        elif options.command == "load":
            load(streams=options.streams, seconds=options.seconds)
        else:
            down()
    except (KubectlError, HelmError, TimeoutError, subprocess.CalledProcessError) as error:
        console.print(f"[red]demo: {error}[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
