"""What `kopf run -m kvpilot_operator.main` loads: importing it registers the handlers, and does nothing else."""

from kvpilot_operator import handlers

__all__ = ["handlers"]
