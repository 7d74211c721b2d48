"""Doubles of the operator's ports and builders of its values, for tests and simulations: nothing that runs knows it."""

from kvpilot_operator.testing.builders import (
    make_engine_memory,
    make_engine_state,
    make_load,
    make_object,
    make_observation,
    make_pod,
    make_replica,
    make_termination,
)
from kvpilot_operator.testing.fake_engine_client import FakeEngineClient
from kvpilot_operator.testing.fake_kube_api import Crash, FakeKubeApi
from kvpilot_operator.testing.manual_clock import START, ManualClock

__all__ = [
    "START",
    "Crash",
    "FakeEngineClient",
    "FakeKubeApi",
    "ManualClock",
    "make_engine_memory",
    "make_engine_state",
    "make_load",
    "make_object",
    "make_observation",
    "make_pod",
    "make_replica",
    "make_termination",
]
