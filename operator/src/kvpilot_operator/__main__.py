"""`python -m kvpilot_operator`: the same operator without kopf's command line, all of it set by the environment."""

from __future__ import annotations

import os
import sys

import kopf

from kvpilot_operator import main as operator_main
from kvpilot_operator.errors import SettingsError
from kvpilot_operator.observability.logging_setup import set_up_logging
from kvpilot_operator.settings import OperatorSettings


def main() -> int:
    """Run until SIGTERM. Exit code 64: the settings are wrong, each problem on its own line."""
    try:
        settings = OperatorSettings.load(os.environ)
    except SettingsError as error:
        sys.stderr.writelines(f"{problem}\n" for problem in error.problems)
        return 64
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    kopf.run(
        registry=kopf.get_default_registry() if operator_main else None,
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=f"http://0.0.0.0:{settings.health_bind_port}/healthz" if settings.health_bind_port else None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
