"""Flags and environment: all problems at once, foreign flags never in silence, one table for help and reference."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_engine.cli import main
from kvpilot_engine.errors import SettingsError
from kvpilot_engine.flags import FOREIGN, HONOURED, build_help, build_reference
from kvpilot_engine.settings import EngineSettings

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "flags.md"


def load(*argv: str, **environ: str) -> EngineSettings:
    return EngineSettings.load(argv, environ)


def problems_of(*argv: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(*argv, **environ)
    return caught.value.problems


def test_serve_word_and_model_flag_mean_the_same() -> None:
    assert load("serve", "m.gguf", "--port", "1") == load("--model", "m.gguf", "--port=1")
    assert load("serve", "m.gguf").server.served_names == ("m.gguf",)


def test_flag_wins_over_environment_over_default() -> None:
    assert load("serve", "m").scheduler.max_num_seqs == 64
    assert load("serve", "m", KVPILOT_MAX_NUM_SEQS="8").scheduler.max_num_seqs == 8
    settings = load("serve", "m", "--max-num-seqs", "4", KVPILOT_MAX_NUM_SEQS="8")
    assert settings.scheduler.max_num_seqs == 4
    assert settings.service.max_num_seqs == 4


def test_every_flag_reaches_its_part(tmp_path: Path) -> None:
    settings = load(
        *("serve", "m", "--served-model-name", "a", "b", "--host", "::1", "--port", "9", "--api-key", "k"),
        *("--gpu-memory-utilization", "0.5", "--device-memory", "4Gi", "--block-size", "32", "--max-model-len", "2k"),
        *("--no-enable-prefix-caching", "--max-num-batched-tokens", "128", "--max-queue-len", "3"),
        *("--tuning-file", "t", "--state-dir", "s", "--termination-log", "l", "--drain-timeout", "7", "-tp", "1"),
    )
    assert settings.server.served_names == ("a", "b")
    assert (settings.server.host, settings.server.port, settings.server.api_keys) == ("::1", 9, ("k",))
    assert settings.execution.memory_utilization == settings.service.gpu_memory_utilization == 0.5
    assert settings.execution.device_memory_bytes == 4 * 2**30
    assert (settings.cache.block_size, settings.cache.enable_prefix_caching) == (32, False)
    assert (settings.execution.max_model_len, settings.scheduler.max_num_batched_tokens) == (2000, 128)
    assert (settings.scheduler.max_queue_len, settings.service.max_queue_len) == (3, 3)
    assert (settings.service.tuning_file, settings.service.state_dir) == (Path("t"), Path("s"))
    assert (settings.service.termination_log, settings.server.drain_timeout_s) == (Path("l"), 7)


def test_token_budget_is_measured_unless_it_is_given() -> None:
    assert load("serve", "m").execution.step_target_s == 0.15
    assert load("serve", "m", "--max-num-batched-tokens", "512").execution.step_target_s is None


def test_all_problems_are_listed_with_their_names() -> None:
    problems = problems_of(
        "serve", "m", "--port", "99999", "--dtype", "bfloat16", "--max-nun-seqs", "3", KVPILOT_BLOCK_SIZE="x"
    )
    text = "\n".join(problems)
    assert len(problems) == 4
    assert "--port is '99999'" in text
    assert "bfloat16 is not supported yet" in text
    assert "was --max-num-seqs meant?" in text
    assert "KVPILOT_BLOCK_SIZE is 'x'" in text


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("2Gi", 2 * 2**30),
        ("2 GiB", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512Mi", 512 * 2**20),
        ("1.5Gi", 3 * 2**29),
        ("64KiB", 2**16),
        ("64kB", 64_000),
        ("1TiB", 2**40),
        ("1073741824", 2**30),
    ],
)
def test_sizes_are_read_as_people_and_kubernetes_write_them(raw: str, size: int) -> None:
    assert load("serve", "m", "--device-memory", raw).execution.device_memory_bytes == size
    assert load("serve", "m", KVPILOT_KV_CACHE_MEMORY_BYTES=raw).execution.kv_cache_memory_bytes == size


@pytest.mark.parametrize("raw", ["0", "-1", "2GiBB", "2Zi", "512m", "Gi", "0.2", "1e9", "٣Gi", "99999999Ti"])
def test_bad_size_is_named_with_its_flag_and_the_accepted_forms(raw: str) -> None:
    (problem,) = problems_of("serve", "m", f"--device-memory={raw}")
    assert problem.startswith(f"--device-memory is {raw!r}: ")
    assert all(form in problem for form in ("1073741824", "512MiB", "4GiB", "4Gi", "1.5GB"))


def test_missing_model_and_missing_value_are_problems() -> None:
    assert "--model" in problems_of()[0]
    assert problems_of("serve", "m", "--port") == ("--port: a value is needed",)


def test_key_is_never_shown() -> None:
    assert "s3cret" not in "".join(problems_of("serve", "m", "--api-key=", "--port", "x", KVPILOT_API_KEY="s3cret"))


def test_service_link_of_kubernetes_is_not_a_port() -> None:
    assert load("serve", "m", KVPILOT_PORT="tcp://10.0.0.1:8000").server.port == 8000


def test_command_line_of_vllm_works_with_warnings() -> None:
    settings = load(
        *("--model", "m", "--enable-chunked-prefill", "--swap-space", "4", "--enforce-eager", "--disable-log-requests"),
        *("--max_num_seqs", "5", "--kv-cache-dtype", "auto", "--quantization", "auto", "--max-logprobs", "5"),
    )
    assert settings.scheduler.max_num_seqs == 5
    assert [warning.split(":")[0] for warning in settings.warnings] == [
        "--enable-chunked-prefill",
        "--swap-space",
        "--enforce-eager",
        "--disable-log-requests",
    ]
    assert settings.server.max_logprobs == 5


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--chunked-prefill", "--enable-chunked-prefill"),
        ("--max-chunk-list-len", "--max-num-batched-tokens"),
        ("--num-prefill-threads", "--max-num-batched-tokens"),
    ],
)
def test_flags_without_their_effect_are_refused(flag: str, meant: str) -> None:
    problems = problems_of("serve", "m", flag, "4")
    assert meant in problems[0]


def test_a_tool_call_parser_is_a_known_one() -> None:
    assert load("serve", "m").text.tool_call_parser == "auto"
    assert (
        load("serve", "m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes").text.tool_call_parser
        == "hermes"
    )
    (problem,) = problems_of("serve", "m", "--tool-call-parser", "pythonic")
    assert "--tool-call-parser" in problem
    assert "one of auto, hermes, llama3_json, mistral, json is needed" in problem


def test_names_of_flags_are_unique_and_helped() -> None:
    names = [flag.name for flag in HONOURED] + [flag.name for flag in FOREIGN]
    assert len(names) == len(set(names))
    assert all(flag.text in build_help() for flag in HONOURED)


def test_reference_is_the_one_that_the_table_makes() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == build_reference()


def test_bad_settings_end_with_64_and_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    assert main(["serve", "m", "--port", "x", f"--termination-log={log}"]) == 64
    assert "InvalidSettings" in log.read_text()
    assert "--port is 'x'" in capsys.readouterr().err


def test_taken_port_ends_with_64_and_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvpilot_engine", "serve", "m", "--host", "127.0.0.1", "--port", str(port)]
        result = subprocess.run([*command, "--termination-log", str(log)], check=False, timeout=60)
    assert result.returncode == 64
    assert f"--port {port}" in capfd.readouterr().err
    assert "InvalidSettings" in log.read_text()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_need_no_model(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    assert capsys.readouterr().out


def test_several_keys_come_by_flag_file_and_environment() -> None:
    settings = load("serve", "m", "--api-key", "a", "b", "--api-key-file", "/keys").server
    assert (settings.api_keys, settings.api_key_file) == (("a", "b"), Path("/keys"))
    assert EngineSettings.load(["serve", "m"], {"KVPILOT_API_KEY": "a,b"}).server.api_keys == ("a", "b")


def test_empty_key_is_an_error_and_not_an_open_server() -> None:
    with pytest.raises(SettingsError, match="KVPILOT_API_KEY"):
        EngineSettings.load(["serve", "m"], {"KVPILOT_API_KEY": ""})


@pytest.mark.parametrize("words", [("https://a", "https://b"), ('["https://a", "https://b"]',)])
def test_origins_are_words_or_a_json_list_as_in_vllm(words: tuple[str, ...]) -> None:
    cors = load(
        "serve", "m", "--allowed-origins", *words, "--allow-credentials", "--allowed-methods", "GET"
    ).server.cors
    assert (cors.allowed_origins, cors.allowed_methods) == (("https://a", "https://b"), ("GET",))
    assert (cors.allowed_headers, cors.allow_credentials) == (("*",), True)
    environ = {"KVPILOT_ALLOWED_ORIGINS": words[0] if len(words) == 1 else ",".join(words)}
    assert EngineSettings.load(["serve", "m"], environ).server.cors.allowed_origins == cors.allowed_origins


@pytest.mark.parametrize(("flag", "value"), [("--allowed-origins", '["a", 5]'), ("--cache-salt-header", "a b")])
def test_bad_access_settings_are_named(flag: str, value: str) -> None:
    (problem,) = problems_of("serve", "m", flag, value)
    assert problem.startswith(f"{flag} is")
