"""The flags that `extraArgs` may not hold are the same in the schema, in the operator and in what it renders."""

from __future__ import annotations

import re

import pytest
import yaml

from kvpilot_operator.core.engine_args import OWNED_FLAGS
from kvpilot_tools.repository import ROOT

_SCHEMA = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())["spec"]["versions"][0]["schema"]
_EXTRA_ARGS = _SCHEMA["openAPIV3Schema"]["properties"]["spec"]["properties"]["engine"]["properties"]["extraArgs"]
(_RULE,) = _EXTRA_ARGS["items"]["x-kubernetes-validations"]
_PATTERN = re.compile(_RULE["rule"].removeprefix("!self.matches('").removesuffix("')"))


@pytest.mark.parametrize("flag", OWNED_FLAGS)
@pytest.mark.parametrize("shape", ["{}", "{}=x", "{}="])
def test_owned_flag_is_refused_in_every_spelling(flag: str, shape: str) -> None:
    assert _PATTERN.search(shape.format(flag))
    dashes = "--" if flag.startswith("--") else "-"
    assert _PATTERN.search(shape.format(dashes + flag.removeprefix(dashes).replace("-", "_")))


@pytest.mark.parametrize(
    "argument", ["--port-range=1", "--seed", "7", "model", "--max-logprobs=5", "-x", "--chat-template"]
)
def test_other_arguments_pass(argument: str) -> None:
    assert not _PATTERN.search(argument)


def test_the_schema_refuses_nothing_that_the_operator_does_not_own() -> None:
    shorts, names = _PATTERN.pattern.removeprefix("^(").removesuffix("))(=.*)?$").split("|--(")
    listed = {f"--{name}" for name in names.replace("[-_]", "-").split("|")} | set(shorts.split("|"))
    listed.discard("--(no-)?enable-prefix-caching")
    assert listed | {"--enable-prefix-caching", "--no-enable-prefix-caching"} == set(OWNED_FLAGS)
