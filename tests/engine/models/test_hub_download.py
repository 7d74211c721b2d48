"""Downloads from a local server that speaks the hub's protocol: whole, interrupted, resumed, refused, offline."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

COMMIT = {"main": "a" * 40, "v1": "b" * 40}
WEIGHTS = bytes(range(256)) * 60_000
"""15 MB: the library writes what arrives in pieces of 10 MiB."""
LARGE = (".safetensors", ".gguf")
"""The hub keeps these by the hash of their content, others by git's."""
WRITTEN_AT_ONCE = 10 * 2**20


@dataclass
class HubState:
    """What the server holds and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_at: int | None = None
    """Close the connection after so many bytes of the weights, once."""
    stall_at: int | None = None
    """Send nothing more after so many bytes of the weights, once, until stalled is answered by resumed."""
    stalled: threading.Event = field(default_factory=threading.Event)
    resumed: threading.Event = field(default_factory=threading.Event)
    announced_size: int | None = None
    """What the file list says about the weights' size, when it is not true."""
    token: str | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubState

    def do_GET(self) -> None:
        state, path = self.state, urlsplit(self.path).path
        state.requests.append((self.command, path, self.headers["Range"]))
        if state.token and self.headers["Authorization"] != f"Bearer {state.token}":
            self._answer(401, b"", {})
        elif path == "/api/models/o/m":
            self._answer_api(f"{path}/revision/main")
        elif path.startswith("/api/models/o/m/"):
            self._answer_api(path)
        elif path.startswith("/o/m/resolve/"):
            self._answer_file(path.removeprefix("/o/m/resolve/"))
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the server looks for this name

    def _answer_api(self, path: str) -> None:
        kind, _, revision = path.removeprefix("/api/models/o/m/").partition("/")
        commit = COMMIT.get(revision, revision)
        if commit not in COMMIT.values():
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            files = [{"type": "file", "path": n, "size": self._size(n), "oid": _oid(n)} for n in self.state.files]
            self._answer(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        else:
            siblings = [self._describe(name) for name in self.state.files]
            info = {"id": "o/m", "sha": commit, "private": False, "disabled": False, "siblings": siblings}
            self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _describe(self, name: str) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": self._size(name), "blobId": _oid(name)}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": self._etag(name), "size": self._size(name), "pointerSize": 134}
        return entry

    def _etag(self, name: str) -> str:
        content = self.state.files[name]
        return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else _oid(name)

    def _size(self, name: str) -> int:
        is_lied_about = name == "model.safetensors" and self.state.announced_size is not None
        return self.state.announced_size or 0 if is_lied_about else len(self.state.files[name])

    def _answer_file(self, path: str) -> None:
        commit, _, name = path.partition("/")
        body = self.state.files[name]
        headers = {"ETag": f'"{self._etag(name)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._answer(status, body[start:], headers, cuttable=name == "model.safetensors")

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, cuttable: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cuttable and self.state.cut_at is not None:
            body, self.state.cut_at = body[: self.state.cut_at], None
            self.close_connection = True
        if cuttable and self.state.stall_at is not None:
            body, self.state.stall_at = body[: self.state.stall_at], None
            self.close_connection = True
            self.wfile.write(body)
            self.state.stalled.set()
            self.state.resumed.wait(60)
            return
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()  # noqa: S324 - git's way to name files


@pytest.fixture
def state() -> HubState:
    return HubState(files={"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"unwanted"})


@pytest.fixture
def endpoint(state: HubState) -> Iterator[str]:
    handler = type("Handler", (HubHandler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


SCRIPT = """
import json, logging, sys
from pathlib import Path
from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.source import resolve_model
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
try:
    print(json.dumps({"path": str(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])))}))
except ModelNotFoundError as error:
    print(json.dumps({"reason": error.reason, "message": str(error)}))
"""


def environment(cache: Path, endpoint: str, environ: dict[str, str]) -> dict[str, str]:
    return os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)} | environ


def resolve(source: str, cache: Path, endpoint: str, **environ: str) -> tuple[dict[str, str], str]:
    """The outcome and the whole output, from a process of its own: the library reads its environment at import."""
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, str(cache)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(cache, endpoint, environ),
        timeout=120,
    )
    outcome: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return outcome, answer.stdout + answer.stderr


def test_a_model_is_downloaded_once_and_then_found_without_the_network(
    endpoint: str, state: HubState, tmp_path: Path
) -> None:  # C24
    outcome, output = resolve("hf://o/m", tmp_path, endpoint)
    folder = Path(outcome["path"])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "downloading o/m: 15 MB in 2 files" in output
    assert {path.split("/")[2] for _, path, _ in state.requests} <= {"models", "m"}, "somebody else was told"

    state.requests.clear()
    again, output = resolve("hf://o/m", tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert again == outcome
    assert state.requests == []
    assert "comes from the cache" in output
    unreachable, _ = resolve("hf://o/m", tmp_path, "http://127.0.0.1:9")
    assert unreachable == outcome


def test_a_cut_connection_goes_on_where_it_broke_off(endpoint: str, state: HubState, tmp_path: Path) -> None:
    state.cut_at = 14_000_000
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert (Path(outcome["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [wanted for method, path, wanted in state.requests if method == "GET" and path.endswith("tensors")]
    assert ranges == [None, f"bytes={WRITTEN_AT_ONCE}-"]


def test_a_killed_download_goes_on_where_the_next_start_finds_it(
    endpoint: str, state: HubState, tmp_path: Path
) -> None:
    """As when a pod is killed while it loads, and its cache outlives it."""
    state.stall_at = 12_000_000
    first = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "hf://o/m", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(tmp_path, endpoint, {}),
    )
    try:
        assert state.stalled.wait(60)
        await_size(tmp_path, WRITTEN_AT_ONCE)
    finally:
        first.kill()
        first.wait()
        state.resumed.set()
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert (Path(outcome["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [wanted for method, path, wanted in state.requests if method == "GET" and path.endswith("tensors")]
    assert ranges == [None, f"bytes={WRITTEN_AT_ONCE}-"]


def test_an_unfinished_file_of_other_content_is_removed(endpoint: str, tmp_path: Path) -> None:
    blobs = tmp_path / "models--o--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.partial").write_bytes(b"x" * 1000)
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert outcome["reason"] == "ModelNotFound"
    assert "model.safetensors arrived with SHA-256" in outcome["message"]
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert (Path(outcome["path"]) / "model.safetensors").read_bytes() == WEIGHTS


def await_size(folder: Path, size: int) -> None:
    """Until some file below the folder has reached this size."""
    limit = time.monotonic() + 60
    while not any(file.stat().st_size >= size for file in folder.rglob("*") if file.is_file()):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_revision_is_pinned(endpoint: str, tmp_path: Path) -> None:
    outcome, _ = resolve("hf://o/m@v1", tmp_path, endpoint)
    assert Path(outcome["path"]).name == COMMIT["v1"]
    outcome, _ = resolve("hf://o/m@v2", tmp_path, endpoint)
    assert outcome == {"reason": "ModelNotFound", "message": "o/m has no revision v2"}


def test_of_a_gguf_repository_only_the_named_variant_is_downloaded(
    endpoint: str, state: HubState, tmp_path: Path
) -> None:
    state.files = {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"}
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert "several .gguf files (m-Q4_K_M, m-Q8_0)" in outcome["message"]
    outcome, _ = resolve("hf://o/m:Q8_0", tmp_path, endpoint)
    assert Path(outcome["path"]).name == "m-Q8_0.gguf"
    assert not any("Q4_K_M" in path for _, path, _ in state.requests)
    offline, _ = resolve("hf://o/m:Q8_0", tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert offline == outcome


def test_the_token_is_sent_and_never_shown(endpoint: str, state: HubState, tmp_path: Path) -> None:  # C24
    state.token = "hf_right"
    for token, reason in (("hf_wrong", "ModelAccessDenied"), ("hf_right", None)):
        outcome, output = resolve("hf://o/m", tmp_path, endpoint, HF_TOKEN=token)
        assert outcome.get("reason") == reason
        assert token not in output


def test_a_file_of_another_size_than_announced_is_refused(endpoint: str, state: HubState, tmp_path: Path) -> None:
    state.announced_size = len(WEIGHTS) + 1
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert outcome["reason"] == "ModelNotFound"
    assert "o/m" in outcome["message"]
    assert "size" in outcome["message"]


def test_a_download_larger_than_the_disk_is_refused_before_it_begins(
    endpoint: str, state: HubState, tmp_path: Path
) -> None:
    state.announced_size = 10**18
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint)
    assert "o/m needs 1000000000.0 GB" in outcome["message"]
    assert "are free" in outcome["message"]


def test_offline_without_a_cached_copy_says_so(endpoint: str, tmp_path: Path) -> None:
    outcome, _ = resolve("hf://o/m", tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert outcome == {
        "reason": "ModelNotFound",
        "message": "o/m is not in the cache, and HF_HUB_OFFLINE forbids to download it",
    }
