"""Where the API server is and who we are: from the pod's service account, else from a kubeconfig file.

One loader for both users of it (kopf and our own client), so that they can't disagree. Reads files, sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from kvpilot_operator.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerLogin:
    """What a plain HTTP client needs to reach the API server. Never logged."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


async def load_configuration() -> Configuration:
    """In-cluster when there is a service account, else `$KUBECONFIG`. SettingsError when there is neither."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        try:
            await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise SettingsError(
                [f"no way to the API server: not in a pod, and no usable kubeconfig ({error})"]
            ) from error
    return configuration


async def load_login() -> ApiServerLogin:
    """The same, as plain values. Called again when a token has expired: it reads the files anew."""
    configuration = await load_configuration()
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    return ApiServerLogin(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        token=header.split(" ", 1)[-1] if header else None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
