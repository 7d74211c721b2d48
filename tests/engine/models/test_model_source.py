"""Model sources: local spellings, and what the answers of the hub (a local server) become."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.hub import HubReference
from kvpilot_engine.models.source import parse_source, resolve_model

ANSWERS = {
    "gated": (403, "GatedRepo"),
    "absent": (404, "RepoNotFound"),
    "private": (401, ""),
    "forbidden": (403, ""),
    "revision": (404, "RevisionNotFound"),
}


class Hub(BaseHTTPRequestHandler):
    """Refuses every repository in the way that its name says."""

    def do_GET(self) -> None:
        name = urlsplit(self.path).path.split("/")[4]
        status, code = ANSWERS[name]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the server looks for this name

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


SCRIPT = """
import json, sys
from pathlib import Path
from urllib.parse import urlsplit
from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.source import resolve_model
answers = {}
for source in sys.argv[2:]:
    try:
        resolve_model(source, cache_dir=Path(sys.argv[1]))
    except ModelNotFoundError as error:
        answers[source] = [error.reason, str(error)]
print(json.dumps(answers))
"""


def ask(endpoint: str, cache: Path, *sources: str) -> dict[str, tuple[str, str]]:
    """In a process of its own: the hub's library reads its environment once, at import."""
    environ = os.environ | {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environ |= {"HF_HOME": str(cache)}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cache), *sources], capture_output=True, text=True, check=True, env=environ
    )
    assert "hf_secret" not in answer.stdout
    parsed: dict[str, tuple[str, str]] = json.loads(answer.stdout)
    return parsed


def test_refused_access_and_missing_models_have_their_own_reasons(hub: str, tmp_path: Path) -> None:  # C24
    answers = ask(hub, tmp_path, *(f"hf://o/{name}" for name in ANSWERS))
    reasons = {source.removeprefix("hf://o/"): reason for source, (reason, _) in answers.items()}
    assert reasons == {
        "gated": "ModelAccessDenied",
        "absent": "ModelAccessDenied",
        "private": "ModelAccessDenied",
        "forbidden": "ModelAccessDenied",
        "revision": "ModelNotFound",
    }
    assert all(source.removeprefix("hf://") in message for source, (_, message) in answers.items())


def test_an_unreachable_hub_is_named_as_such(tmp_path: Path) -> None:
    (reason, message) = ask("http://127.0.0.1:9", tmp_path, "hf://o/model")["hf://o/model"]
    assert reason == "ModelNotFound"
    assert "could not be downloaded" in message


def test_local_paths_come_back_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(f"file://{tmp_path}") == tmp_path


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == resolve_model(str(file)) == file
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"several \.gguf files \(a, b\)"):
        resolve_model(str(tmp_path))


def test_a_name_is_a_local_folder_where_one_exists_else_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source("owner/name") == HubReference("owner/name")
    (tmp_path / "owner/name").mkdir(parents=True)
    assert parse_source("owner/name") == Path("owner/name")
    assert parse_source("hf://owner/name@v1.2") == HubReference("owner/name", "v1.2")


@pytest.mark.parametrize("source", ["hf://name", "hf://a/b/c", "/nowhere/at/all", "file:///nowhere", "nowhere"])
def test_what_names_nothing_is_refused(source: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(source)
