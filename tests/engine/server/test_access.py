"""Who may ask, from where, for how long, and what the log keeps of it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.observability.logging_setup import LoggingSettings, configure_logging
from kvpilot_engine.server.api_keys import read_key_file
from kvpilot_engine.server.cors import CorsSettings
from kvpilot_engine.service.testing import FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
SITE = "https://chat.example"
PREFLIGHT = {
    "Origin": SITE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    """The log of this process as JSON lines; the test runner's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging(LoggingSettings(log_format="json"), "server", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def finished(stream: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "request finished"]


async def test_each_of_several_keys_opens_v1(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team b\nthird \n\n")
    kit = await start(api_keys=("first", "sécond"), api_key_file=file)

    async def status(authorization: str, path: str = "/v1/models") -> int:
        headers = {"Authorization": authorization} if authorization else {}
        return int((await kit.client.get(path, headers=headers)).status)

    for key in ("first", "sécond", "third"):
        assert await status(f"Bearer {key}") == 200
        assert await status(f"bearer {key}") == 200
    for given in ("", "Bearer", "Bearer ", "Bearer firs", "Bearer first,third", "Basic first", "Bearer # team b"):
        assert await status(given) == 401, given
    # Neither another spelling of the path nor an unknown route goes round the key.
    for path in ("/v1", "/v1/", "/v1/nothing", "/v1/../v1/models", "/%76%31/models"):
        assert await status("", path) == 401, path
    for path in ("/livez", "/readyz", "/metrics", "/version", "/tokenize"):
        assert await status("", path) != 401


async def test_key_file_without_keys_is_a_bad_setting(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n\n")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(SettingsError, match="--api-key-file"):
            read_key_file(path)


async def test_browsers_get_nothing_unless_origins_are_set(kit: Kit) -> None:
    response = await kit.client.get("/v1/models", headers={"Origin": SITE})
    assert not [name for name in response.headers if name.startswith("Access-Control")]
    assert (await kit.client.options("/v1/models", headers=PREFLIGHT)).status == 405


async def test_allowed_site_may_call_stream_and_read_errors(start: Start) -> None:
    kit = await start(api_keys=("k",), cors=CorsSettings(allowed_origins=(SITE,)))
    preflight = await kit.client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == SITE
    assert preflight.headers["Access-Control-Allow-Methods"] == "POST"
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert preflight.headers["Vary"] == "Origin"
    body = {"messages": [{"role": "user", "content": "@"}], "max_tokens": 1, "stream": True}
    for headers, status in (({"Authorization": "Bearer k"}, 200), ({}, 401)):
        response = await kit.client.post("/v1/chat/completions", json=body, headers={"Origin": SITE, **headers})
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, SITE)
        assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]


async def test_other_sites_and_methods_are_refused(start: Start) -> None:
    kit = await start(cors=CorsSettings(allowed_origins=(SITE,), allowed_methods=("GET",), allowed_headers=("x-a",)))
    other = await kit.client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert other.status == 200  # the browser, not the server, keeps the answer from the page
    assert "Access-Control-Allow-Origin" not in other.headers
    assert (await kit.client.options("/v1/models", headers={**PREFLIGHT, "Origin": "https://e.example"})).status == 400
    assert (await kit.client.options("/v1/models", headers=PREFLIGHT)).status == 400
    get = await kit.client.options("/v1/models", headers={**PREFLIGHT, "Access-Control-Request-Method": "GET"})
    assert get.headers["Access-Control-Allow-Headers"] == "x-a"


@pytest.mark.parametrize(("credentials", "allowed"), [(False, "*"), (True, SITE)])
async def test_every_site_is_a_star_unless_credentials_are_sent(start: Start, credentials: bool, allowed: str) -> None:
    kit = await start(cors=CorsSettings(allowed_origins=("*",), allow_credentials=credentials))
    response = await kit.client.get("/v1/models", headers={"Origin": SITE})
    assert response.headers["Access-Control-Allow-Origin"] == allowed
    assert ("Access-Control-Allow-Credentials" in response.headers) is credentials


async def test_salt_is_taken_from_the_trusted_header_only(start: Start) -> None:  # A12
    kit = await start(FakeModelLoader(block_size=4), cache_salt_header="x-tenant")
    prompt = "0123456789@"

    async def cached(tenant: str, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        response = await kit.client.post("/v1/completions", json=body, headers={"x-tenant": tenant} if tenant else {})
        answer = await response.json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] if response.status == 200 else answer["error"]

    assert await cached("a") == 0
    assert await cached("a") == 8
    assert await cached("b") == 0
    assert await cached("") == 0
    refused = await cached("b", cache_salt="a")
    assert refused["param"] == "cache_salt"
    assert "cache-salt-header" in refused["message"]
    assert (await cached("x" * 257))["param"] == "x-tenant"  # cut, it might be another's


async def test_salt_of_the_body_separates_without_such_a_header(start: Start) -> None:  # A12
    kit = await start(FakeModelLoader(block_size=4))

    async def cached(**fields: Any) -> Any:
        answer = await (await kit.complete("0123456789@", max_tokens=1, **fields)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [await cached(cache_salt=salt) for salt in ("a", "a", "b")] == [0, 8, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_client_s_deadline_is_kept(start: Start, stream: bool) -> None:
    kit = await start(FakeModelLoader(step_s=0.02, max_model_len=340))
    body = {"prompt": "@", "max_tokens": 300, "ignore_eos": True, "stream": stream}
    response = await kit.client.post("/v1/completions", json=body, headers={"x-request-timeout": "0.2"})
    text = await response.text()
    assert response.status == (200 if stream else 504)
    assert "deadline_exceeded" in text
    assert "0.2 s" in text
    assert "[DONE]" not in text
    await kit.until(lambda: kit.gauges() == (0, 0, 0))


async def test_client_can_t_lengthen_the_server_s_deadline(start: Start) -> None:
    kit = await start(FakeModelLoader(step_s=0.02, max_model_len=340), request_timeout_s=0.2)
    body = {"prompt": "@", "max_tokens": 300, "ignore_eos": True}
    response = await kit.client.post("/v1/completions", json=body, headers={"x-request-timeout": "900"})
    assert response.status == 504


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", ""])
async def test_bad_deadline_is_refused(kit: Kit, value: str) -> None:
    body = {"prompt": "@", "max_tokens": 1}
    response = await kit.client.post("/v1/completions", json=body, headers={"x-request-timeout": value})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "x-request-timeout")


async def test_models_tell_their_length_and_permission(start: Start) -> None:
    kit = await start(model_root="hf://some/model")
    card = (await (await kit.client.get("/v1/models")).json())["data"][1]
    assert (card["id"], card["root"], card["max_model_len"]) == ("alias", "hf://some/model", 128)
    assert card["permission"][0]["object"] == "model_permission"
    assert card["permission"][0]["allow_sampling"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_one_line_for_each_call_without_its_text(kit: Kit, log_lines: io.StringIO, stream: bool) -> None:
    body = {"prompt": "secret@", "max_tokens": 3, "n": 2, "stream": stream, "user": "someone"}
    response = await kit.client.post("/v1/completions", json=body, headers={"x-request-id": "abc"})
    await response.read()
    await kit.until(lambda: finished(log_lines))
    (line,) = finished(log_lines)
    assert line["call_id"].startswith("cmpl-")
    assert (line["request_id"], line["path"], line["status"]) == ("abc", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["output_tokens"], line["num_choices"]) == (7, 6, 2)
    assert line["finish_reasons"] == ["length", "length"]
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert "error" not in line
    assert "secret" not in log_lines.getvalue()
    assert "ABC" not in log_lines.getvalue()


async def test_refused_calls_are_logged_with_their_code(kit: Kit, log_lines: io.StringIO) -> None:
    await kit.complete(temperature=9)
    (line,) = finished(log_lines)
    assert (line["status"], line["error"]) == (400, "invalid_value")
    assert "call_id" not in line


async def test_broken_streams_and_clients_that_left_are_logged_as_such(
    start: Start, log_lines: io.StringIO, tmp_path: Path
) -> None:  # B2, B21
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script, step_s=0.01))
    response = await kit.chat(max_tokens=100, ignore_eos=True, stream=True)
    await response.content.readany()
    response.close()
    await kit.until(lambda: finished(log_lines))
    assert finished(log_lines)[0]["status"] == 499
    response = await kit.chat(max_tokens=100, ignore_eos=True, stream=True)
    await response.content.readany()
    script.write_text("fault")
    await response.read()
    await kit.until(lambda: len(finished(log_lines)) == 2)
    line = finished(log_lines)[1]
    assert (line["status"], line["error"]) == (200, "engine_error")
    assert "finish_reasons" not in line
    assert "Traceback" not in log_lines.getvalue()


async def test_log_for_people_has_the_same_fields(kit: Kit, log_lines: io.StringIO) -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(), "server", stream)
    await kit.complete(max_tokens=1)
    assert 'message="request finished" path=/v1/completions status=200' in stream.getvalue()
    assert "finish_reasons=length" in stream.getvalue()
