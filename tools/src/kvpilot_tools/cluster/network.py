"""The machine's network: its address, our few packet-filter rules, and taking away everything that a node made.

Chains belong to us when their names begin with one of OWN_PREFIXES: `KVPILOT-` is ours alone, and `KUBE-` is ours
because `up` refuses a machine that has such chains from somebody else. Invariant: no rule of anybody else is changed,
only jumps into our chains are taken out.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvpilot_tools.cluster.control_plane import POD_RANGE
from kvpilot_tools.cluster.errors import CleanupError, RequirementError, StartError
from kvpilot_tools.cluster.requirements import find_program, require_program

BRIDGE = "kvpilot0"
OWN_PREFIXES = ("KVPILOT-", "KUBE-")
FAMILIES = ("iptables", "ip6tables")

# What the kubelet, kube-proxy and the bridge plugin write; a name that this kernel lacks is passed over.
CHANGED_SETTINGS = (
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv6/conf/all/forwarding",
    "net/bridge/bridge-nf-call-iptables",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)

_SETTINGS = Path("/proc/sys")
_JUMP = re.compile(r" -[jg] (\S+)")

# Pods reach the world under the machine's address, and a firewall that forwards nothing by default lets them through.
_OWN_RULES = f"""\
*nat
:KVPILOT-MASQUERADE - [0:0]
-A KVPILOT-MASQUERADE -s {POD_RANGE} ! -d {POD_RANGE} ! -o {BRIDGE} -j MASQUERADE
-A POSTROUTING -j KVPILOT-MASQUERADE
COMMIT
*filter
:KVPILOT-FORWARD - [0:0]
-A KVPILOT-FORWARD -i {BRIDGE} -j ACCEPT
-A KVPILOT-FORWARD -o {BRIDGE} -j ACCEPT
-I FORWARD -j KVPILOT-FORWARD
COMMIT
"""


def first_global_address(links: Iterable[Mapping[str, Any]]) -> str:
    """Return the first IPv4 address of `ip -j -4 addr show scope global` that is not our own bridge's."""
    for link in links:
        if link.get("ifname") == BRIDGE:
            continue
        for address in link.get("addr_info", ()):
            if address.get("scope") == "global" and address.get("local"):
                return str(address["local"])
    raise RequirementError(
        "this machine has no IPv4 address besides the loopback one; the kubelet needs one for the node"
    )


def node_address() -> str:
    """Return the address that the node is known by."""
    printed = _run("ip", "-j", "-4", "addr", "show", "scope", "global")
    return first_global_address(json.loads(printed or "[]"))


def read_settings() -> dict[str, str]:
    """Return the kernel settings that a node changes, as they are now."""
    return {name: (_SETTINGS / name).read_text().strip() for name in CHANGED_SETTINGS if (_SETTINGS / name).exists()}


def restore_settings(before: Mapping[str, str]) -> None:
    """Write back what `read_settings` returned, where it differs."""
    for name, value in before.items():
        file = _SETTINGS / name
        if name in CHANGED_SETTINGS and file.exists() and file.read_text().strip() != value:
            file.write_text(value)


def save_rules(family: str) -> str:
    """Return the rules of one family (`iptables` or `ip6tables`)."""
    return _run(f"{family}-save")


def tables_of(saved: str) -> list[str]:
    """Return the names of the tables that a saved rule set shows."""
    return [line[1:] for line in saved.splitlines() if line.startswith("*")]


def own_chains(saved: str) -> dict[str, list[str]]:
    """Return our chains by table."""
    chains: dict[str, list[str]] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(tuple(f":{prefix}" for prefix in OWN_PREFIXES)):
            chains.setdefault(table, []).append(line[1:].split()[0])
    return chains


def build_removal(saved: str) -> str:
    """Return the script for `iptables-restore --noflush` that takes our chains out; empty: there are none."""
    chains = own_chains(saved)
    script: list[str] = []
    table = ""
    jumps: dict[str, list[str]] = {}
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith("-A ") and (jump := _JUMP.search(line)):
            own = chains.get(table, ())
            if jump.group(1) in own and line.split()[1] not in own:
                jumps.setdefault(table, []).append(f"-D{line[2:]}")
    for table, names in chains.items():
        # All are emptied before any is deleted, since they jump to each other.
        script += [f"*{table}", *jumps.get(table, ()), *(f"-F {name}" for name in names)]
        script += [*(f"-X {name}" for name in names), "COMMIT"]
    return "\n".join([*script, ""]) if script else ""


def empty_tables(saved: str) -> list[str]:
    """Return the tables that hold nothing but built-in chains that accept everything."""
    tables: dict[str, bool] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
            tables[table] = True
        elif line.startswith("-A ") or (line.startswith(":") and line.split()[1] != "ACCEPT"):
            tables[table] = False
    return [name for name, is_empty in tables.items() if is_empty]


def refuse_foreign_chains() -> None:
    """Raise when another Kubernetes works on this machine; call only when none of ours left anything."""
    for family in FAMILIES:
        found = [name for names in own_chains(save_rules(family)).values() for name in names]
        if found:
            raise RequirementError(
                f"another Kubernetes uses this machine: {family} has {found[0]} and {len(found) - 1} more such chains."
                " If they are left from one that is gone, `kube-proxy --cleanup` removes them."
            )


def has_own_rules() -> bool:
    """Tell whether the rules hold a chain that nobody but us makes."""
    return ":KVPILOT-" in save_rules("iptables")


def add_own_rules() -> None:
    """Let pods out and their answers in."""
    _restore("iptables", _OWN_RULES)


def remove_rules(tables_before: Mapping[str, list[str]]) -> None:
    """Take our chains out of both families, and tables that exist only because somebody looked into them for us."""
    for family in FAMILIES:
        removal = build_removal(save_rules(family))
        if removal:
            _restore(family, removal)
        if family in tables_before:
            new = [name for name in empty_tables(save_rules(family)) if name not in tables_before[family]]
            for table in new:
                _remove_empty_table(family, table)


def _remove_empty_table(family: str, table: str) -> None:
    """Take away a table that came into being by its first use; only iptables over nftables makes such tables."""
    nft = find_program("nft")
    if nft is None or "nf_tables" not in _run(family, "--version"):
        return
    _run(family, "-t", table, "-X")  # takes the empty built-in chains away
    protocol = "ip" if family == "iptables" else "ip6"
    if "chain" not in _run("nft", "list", "table", protocol, table, is_optional=True):
        _run("nft", "delete", "table", protocol, table, is_optional=True)


def remove_links() -> None:
    """Delete the bridge and what is plugged into it; the other ends are in pods that are gone or going."""
    printed = _run("ip", "-j", "link", "show", "master", BRIDGE, is_optional=True)
    for link in json.loads(printed or "[]"):
        _run("ip", "link", "delete", str(link["ifname"]), is_optional=True)
    _run("ip", "link", "delete", BRIDGE, is_optional=True)
    if Path("/sys/class/net", BRIDGE).exists():
        raise CleanupError(f"the bridge {BRIDGE} can't be deleted")


def _restore(family: str, script: str) -> None:
    program = require_program(f"{family}-restore")
    done = subprocess.run(
        [str(program), "--noflush", "--wait=5"], input=script, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StartError(f"{family}-restore refused our rules: {done.stderr.strip()}")


def _run(program: str, *arguments: str, is_optional: bool = False) -> str:
    done = subprocess.run([str(require_program(program)), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 and not is_optional:
        raise StartError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
