"""etcd, the API server, the controller manager and the scheduler: command lines, certificates, starting in order.

Not for the node. Invariant: every command line holds a path below the cluster's root, by which a stray daemon is
recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.api_client import ApiClient
from kvpilot_tools.cluster.certificates import CertificateAuthority, KeyPair, generate_signing_keys
from kvpilot_tools.cluster.kubeconfig import build_kubeconfig, write_kubeconfig
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.processes import Daemon
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.record import ClusterRecord

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
POD_RANGE = "10.244.0.0/24"
NODE_NAME = "node1"
START_LIMIT_S = 120.0
"""Far above what a start takes (8 s): only a component that hangs should meet it."""

_API_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The control plane of one cluster."""

    layout: ClusterLayout
    record: ClusterRecord
    binaries: Mapping[str, Path]

    def client(self) -> ApiClient:
        """Return a client with the administrator's certificate."""
        pki = self.layout.pki
        return ApiClient(self.record.ports.api, pki / "ca.crt", pki / "admin.crt", pki / "admin.key")

    def write_identities(self) -> None:
        """Make all certificates and the kubeconfigs that hold them."""
        pki, record = self.layout.pki, self.record
        authority, etcd_authority = CertificateAuthority("kvpilot-local"), CertificateAuthority("kvpilot-local-etcd")
        (pki / "ca.crt").write_bytes(authority.certificate)
        (pki / "etcd-ca.crt").write_bytes(etcd_authority.certificate)
        etcd_authority.issue("etcd", dns=("localhost",), ips=("127.0.0.1",)).write(pki, "etcd")
        etcd_authority.issue("kube-apiserver").write(pki, "etcd-client")
        addresses = sorted({"127.0.0.1", SERVICE_ADDRESS, record.node_ip})
        authority.issue("kube-apiserver", dns=_API_NAMES, ips=addresses).write(pki, "apiserver")
        generate_signing_keys().write(pki, "service-account")
        admin = authority.issue("kvpilot-admin", organization="system:masters")
        admin.write(pki, "admin")
        self._write_kubeconfig(self.layout.kubeconfig, authority, "kvpilot-admin", admin)
        for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            user = f"system:{component}"
            self._write_kubeconfig(self._config(component), authority, user, authority.issue(user))
        if record.has_node:
            node = f"system:node:{NODE_NAME}"
            keys = authority.issue(node, organization="system:nodes", dns=(NODE_NAME,), ips=(record.node_ip,))
            keys.write(pki, "kubelet")
            self._write_kubeconfig(self._config("kubelet"), authority, node, keys)

    def etcd(self) -> Daemon:
        """The database; durability is given up for speed, since nobody wants this cluster back after a crash."""
        ports, pki = self.record.ports, self.layout.pki
        client, peer = f"https://127.0.0.1:{ports.etcd_client}", f"https://127.0.0.1:{ports.etcd_peer}"
        return self.daemon(
            "etcd",
            "--name=kvpilot",
            f"--data-dir={self.layout.etcd_data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=kvpilot={peer}",
            *(f"--{prefix}cert-file={pki}/etcd.crt" for prefix in ("", "peer-")),
            *(f"--{prefix}key-file={pki}/etcd.key" for prefix in ("", "peer-")),
            *(f"--{prefix}trusted-ca-file={pki}/etcd-ca.crt" for prefix in ("", "peer-")),
            "--client-cert-auth",
            "--peer-client-cert-auth",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def api_server(self) -> Daemon:
        """The API server; reachable from pods only when there is a node."""
        ports, pki, record = self.record.ports, self.layout.pki, self.record
        if record.has_node:
            reach = [
                "--bind-address=0.0.0.0",
                f"--advertise-address={record.node_ip}",
                f"--kubelet-client-certificate={pki}/admin.crt",
                f"--kubelet-client-key={pki}/admin.key",
                # Else logs and exec would look the node's name up in DNS.
                "--kubelet-preferred-address-types=InternalIP",
            ]
        else:
            reach = ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"]
        if not record.has_controllers:
            # The accounts that this plugin demands are made by the controller manager.
            reach.append("--disable-admission-plugins=ServiceAccount")
        return self.daemon(
            "kube-apiserver",
            *reach,
            f"--secure-port={ports.api}",
            f"--etcd-servers=https://127.0.0.1:{ports.etcd_client}",
            f"--etcd-cafile={pki}/etcd-ca.crt",
            f"--etcd-certfile={pki}/etcd-client.crt",
            f"--etcd-keyfile={pki}/etcd-client.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--cert-dir={pki}",
            # The other components look for this even where nothing is aggregated; no certificate has such a name.
            f"--requestheader-client-ca-file={pki}/ca.crt",
            "--requestheader-allowed-names=kvpilot-front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki}/service-account.crt",
            f"--service-account-signing-key-file={pki}/service-account.key",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged",
            "--profiling=false",
        )

    def controller_manager(self) -> Daemon:
        """The controllers: deployments, garbage collection, autoscaling, service accounts."""
        pki = self.layout.pki
        config = self._config("kube-controller-manager")
        return self.daemon(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.record.ports.controller_manager}",
            f"--cert-dir={pki}/controller-manager",
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/service-account.key",
            "--use-service-account-credentials",
            "--leader-elect=false",
            # A person or a test looks at an autoscaler; the default of 15 s is meant for thousands of them.
            "--horizontal-pod-autoscaler-sync-period=2s",
        )

    def scheduler(self) -> Daemon:
        """The scheduler."""
        config = self._config("kube-scheduler")
        return self.daemon(
            "kube-scheduler",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.record.ports.scheduler}",
            f"--cert-dir={self.layout.pki}/scheduler",
            "--leader-elect=false",
        )

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the database and the API server, which waits for it; `wait_ready` must follow."""
        self.etcd().start(environ)
        self.api_server().start(environ)

    def wait_ready(self, environ: Mapping[str, str], progress: Progress) -> None:
        """Return when the API server is ready; the controllers are started, but may not be ready then."""
        etcd, api_server, client = self.etcd(), self.api_server(), self.client()
        api_server.wait_ready(
            lambda: etcd.process() is not None and client.is_ready(), limit_s=START_LIMIT_S, beat=progress.beat
        )
        if self.record.has_controllers:
            self.controller_manager().start(environ)
        if self.record.has_node:
            self.scheduler().start(environ)

    def daemons(self) -> list[Daemon]:
        """Every component that this cluster should be running."""
        daemons = [self.etcd(), self.api_server()]
        if self.record.has_controllers:
            daemons.append(self.controller_manager())
        if self.record.has_node:
            daemons.append(self.scheduler())
        return daemons

    def daemon(self, name: str, *arguments: str) -> Daemon:
        """Build a component of this cluster from its binary's name and its arguments."""
        return Daemon(
            name=name,
            argv=(str(self.binaries[name]), *arguments),
            log=self.layout.logs / f"{name}.log",
            pidfile=self.layout.pids / f"{name}.json",
        )

    def _config(self, component: str) -> Path:
        return self.layout.config / f"{component}.kubeconfig"

    def _write_kubeconfig(self, file: Path, authority: CertificateAuthority, user: str, keys: KeyPair) -> None:
        server = f"https://127.0.0.1:{self.record.ports.api}"
        write_kubeconfig(file, build_kubeconfig(server, authority.certificate, user, keys))
