"""`python -m kvpilot_operator`: the same operator without kopf's command line, all of it set by the environment."""

from __future__ import annotations

import logging
import os
import sys

import kopf

from kvpilot_operator import main as _handlers  # noqa: F401 - importing it registers them
from kvpilot_operator.errors import SettingsError
from kvpilot_operator.observability.logging_setup import set_up_logging
from kvpilot_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM. Exit code 64: the settings are wrong, each problem on its own line; 70: see the log.

    A watch that fails for good (HTTP 410 on opening it, say) ends kopf and with it the process: the kubelet starts it
    again, and it lists everything anew. Nothing is lost by that, since nothing is remembered here.
    """
    try:
        settings = OperatorSettings.load(os.environ)
    except SettingsError as error:
        sys.stderr.writelines(f"{problem}\n" for problem in error.problems)
        return 64
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    try:
        kopf.run(
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://0.0.0.0:{settings.health_bind_port}/healthz"
            if settings.health_bind_port
            else None,
        )
    except Exception:
        logger.exception("the operator ends, to be started anew")
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
