"""The image that holds a pod's namespaces open: one static binary in an archive that containerd imports.

Made here, since no registry is needed for a cluster of our own. Invariant: the same binary gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

REFERENCE = "localhost/kvpilot-pause:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_archive(binary: Path, target: Path) -> None:
    """Write the docker archive of an image that holds just this binary."""
    layer = _tar({"pause": (binary.read_bytes(), 0o755)})
    machine = platform.machine()
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [REFERENCE], "Layers": ["layer.tar"]}]).encode()
    files = {config_name: (config, 0o644), "layer.tar": (layer, 0o644), "manifest.json": (manifest, 0o644)}
    target.write_bytes(_tar(files))


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
