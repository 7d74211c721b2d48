"""Operator settings: names from the fields, every problem at once, Kubernetes' own variables not taken for ours."""

from __future__ import annotations

import pytest

from kvpilot_operator.errors import SettingsError
from kvpilot_operator.settings import OperatorSettings


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = OperatorSettings.load({"PATH": "/bin", "KVPILOT_OTHER": "x"})
    assert settings == OperatorSettings()
    assert settings.tick_seconds == 5.0
    assert settings.effective_lease_namespace == "default"


def test_values_are_read_by_the_names_of_the_fields() -> None:
    settings = OperatorSettings.load(
        {
            "KVPILOT_OPERATOR_NAMESPACES": " team-a, team-b,team-a,",
            "KVPILOT_OPERATOR_WORKERS": "3",
            "KVPILOT_OPERATOR_TICK_SECONDS": "2.5",
            "KVPILOT_OPERATOR_DEFAULT_ENGINE_IMAGE": "engine:1",
        }
    )
    assert settings.namespaces == ("team-a", "team-b")
    assert (settings.workers, settings.tick_seconds, settings.default_engine_image) == (3, 2.5, "engine:1")
    assert settings.effective_lease_namespace == "team-a"


def test_every_problem_is_told_at_once_with_its_variable() -> None:
    with pytest.raises(SettingsError) as caught:
        OperatorSettings.load(
            {
                "KVPILOT_OPERATOR_WORKERS": "many",
                "KVPILOT_OPERATOR_TICK_SECONDS": "0",
                "KVPILOT_OPERATOR_RESYNC_SECONDS": "nan",
                "KVPILOT_OPERATOR_NAMESPACES": "Team_A",
                "KVPILOT_OPERATOR_LOG_FORMAT": "xml",
                "KVPILOT_OPERATOR_METRICS_BIND_PORT": "8080",
                "KVPILOT_OPERATOR_TIK_SECONDS": "5",
            }
        )
    told = "\n".join(caught.value.problems)
    for name in ("WORKERS='many'", "TICK_SECONDS", "RESYNC_SECONDS='nan'", "NAMESPACES", "LOG_FORMAT",
                 "METRICS_BIND_PORT", "TIK_SECONDS: unknown"):  # fmt: skip
        assert f"KVPILOT_OPERATOR_{name}" in told


def test_variables_that_kubernetes_makes_from_a_service_are_not_ours() -> None:
    OperatorSettings.load(
        {
            "KVPILOT_OPERATOR_SERVICE_HOST": "10.0.0.1",
            "KVPILOT_OPERATOR_SERVICE_PORT": "9090",
            "KVPILOT_OPERATOR_SERVICE_PORT_METRICS": "9090",
            "KVPILOT_OPERATOR_PORT": "tcp://10.0.0.1:9090",
            "KVPILOT_OPERATOR_PORT_9090_TCP": "tcp://10.0.0.1:9090",
            "KVPILOT_OPERATOR_PORT_9090_TCP_ADDR": "10.0.0.1",
            "KVPILOT_OPERATOR_METRICS_PORT": "tcp://10.0.0.2:9090",
        }
    )
