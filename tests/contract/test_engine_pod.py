"""The pod that the operator builds fits the engine: command line, environment, ports, probes, files."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvpilot_engine.flags import HONOURED
from kvpilot_engine.server import ops_routes
from kvpilot_engine.settings import EngineSettings
from kvpilot_operator.core import naming
from kvpilot_operator.core.api_types import parse_spec
from kvpilot_operator.core.engine_args import OWNED_FLAGS
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.pod_template import PRE_STOP_S, build_pod_template
from kvpilot_tools.repository import EXAMPLE

OWNER = naming.Owner(NamespacedName("ns", "llama"), "uid-1")
SPECS: dict[str, dict[str, Any]] = {
    "only a model": {"engine": {"device": "cpu"}},
    "everything a CPU can do": {
        "model": {"source": "hf://a/b@v1", "servedNames": ["x", "y"]},
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "quantization": "none",
            "blockSize": 32,
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 256,
            "prefixCaching": False,
            "apiKeySecret": {"name": "api", "key": "key"},
            "extraArgs": ["--num-threads", "2"],
        },
        "drain": {"timeoutSeconds": 7},
    },
    "the example": yaml.safe_load(EXAMPLE.read_text())["spec"],
}


def build_engine(spec: dict[str, Any]) -> dict[str, Any]:
    template = build_pod_template(parse_spec({"spec": {"model": {"source": "file:///m"}, **spec}}), OWNER, "engine:1")
    (engine,) = template["spec"]["containers"]
    found: dict[str, Any] = engine
    return found


def load(spec: dict[str, Any]) -> EngineSettings:
    """The engine's settings in a pod of that spec; what comes from the cluster is any text."""
    engine = build_engine(spec)
    return EngineSettings.load(engine["args"], {v["name"]: v.get("value", "from-the-cluster") for v in engine["env"]})


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_engine_takes_the_command_line_without_a_warning(spec: dict[str, Any]) -> None:
    assert load(spec).warnings == ()


def test_the_engine_reads_what_the_operator_wrote() -> None:
    settings = load(SPECS["everything a CPU can do"])
    assert settings.model == "hf://a/b@v1"
    assert settings.server.served_names == ("x", "y")
    assert settings.server.port == naming.PORT
    assert settings.server.api_keys == ("from-the-cluster",)
    assert settings.server.drain_timeout_s == 7
    assert settings.cache.block_size == 32
    assert settings.cache.enable_prefix_caching is False
    assert settings.scheduler.max_num_seqs == 8
    assert settings.scheduler.max_num_batched_tokens == 256
    assert settings.service.pod_uid == "from-the-cluster"
    assert str(settings.service.tuning_file) == naming.TUNING_FILE
    assert str(settings.service.state_dir) == naming.STATE_DIR


def test_pre_stop_and_drain_add_up_to_less_than_the_grace() -> None:
    """# C18"""
    spec = parse_spec({"spec": {"model": {"source": "file:///m"}, "drain": {"timeoutSeconds": 90}}})
    grace = build_pod_template(spec, OWNER, "engine:1")["spec"]["terminationGracePeriodSeconds"]
    assert (
        grace > PRE_STOP_S + load({"engine": {"device": "cpu"}, "drain": {"timeoutSeconds": 90}}).server.drain_timeout_s
    )


def test_the_engine_knows_every_flag_that_the_operator_owns_and_owns_its_other_spellings() -> None:
    by_option = {flag.option: flag for flag in HONOURED}
    long_forms = [option for option in OWNED_FLAGS if option.startswith("--") and not option.startswith("--no-")]
    assert set(long_forms) <= set(by_option)
    for option in long_forms:
        assert set(by_option[option].aliases) <= set(OWNED_FLAGS)


def test_probes_ask_for_paths_that_the_engine_serves() -> None:
    engine = build_engine(SPECS["only a model"])
    served = {route.path for route in ops_routes.routes}  # type: ignore[attr-defined] # all are plain routes
    (port,) = engine["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert engine[probe]["httpGet"]["path"] in served
        assert engine[probe]["httpGet"]["port"] == port["name"]
    assert port["containerPort"] == load(SPECS["only a model"]).server.port
