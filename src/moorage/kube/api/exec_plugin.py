"""Credential plugins: programs that a kubeconfig names and that print an ExecCredential.

Owns: running the program, its environment, and checking what it printed. Caching is `config.RenewableToken`'s.
Start reading at: `ExecPlugin.run`.

The plugin gets no standard input, because a controller has no user to ask. The format is client.authentication.k8s.io
in versions v1 and v1beta1.
"""

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moorage.errors import MoorageError, UsageError
from moorage.kube.objects.meta import seconds_of

_GROUP = "client.authentication.k8s.io"
_VERSIONS = (f"{_GROUP}/v1", f"{_GROUP}/v1beta1")
_CLUSTER_FIELDS = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")
_TIMEOUT_S = 300.0  # a plugin may wait for a login in a browser


class PluginFailed(MoorageError):
    """A credential plugin could not be run, or printed something else than credentials."""

    code = "UNAUTHENTICATED"


@dataclass(frozen=True, slots=True)
class ExecCredentials:
    """What a plugin gave: a token, a client certificate with its key (PEM), or both, and when they expire."""

    token: str
    certificate: str
    key: str
    expires: float


class ExecPlugin:
    """One plugin of one kubeconfig user. Raises UsageError if its configuration cannot work here."""

    def __init__(self, entry: dict[str, Any], cluster: dict[str, Any], folder: Path, where: str) -> None:
        self._entry = entry
        self._folder = folder
        self.command = str(entry.get("command") or "")
        self._version = str(entry.get("apiVersion") or "")
        if not self.command:
            raise UsageError(f"{where}: its exec section names no command")
        if self._version not in _VERSIONS:
            raise UsageError(
                f"{where}: credential plugin {self.command!r} has apiVersion {self._version!r}; "
                f"supported are {' and '.join(_VERSIONS)}"
            )
        if entry.get("interactiveMode") == "Always":
            raise UsageError(
                f"{where}: credential plugin {self.command!r} always needs a terminal (interactiveMode: Always), "
                "which Moorage cannot give it; use a plugin that does not, a token or a certificate"
            )
        try:
            self._environment = {str(one["name"]): str(one.get("value") or "") for one in entry.get("env") or []}
        except (TypeError, KeyError, AttributeError):
            raise UsageError(f"{where}: the env of credential plugin {self.command!r} is no list of names") from None
        spec: dict[str, Any] = {"interactive": False}
        if entry.get("provideClusterInfo"):
            spec["cluster"] = _cluster_info(cluster)
        self._info = json.dumps({"apiVersion": self._version, "kind": "ExecCredential", "spec": spec})

    def run(self) -> ExecCredentials:
        """Run the plugin and return its credentials. Raises PluginFailed, which names the plugin."""
        program = self.command
        if os.sep in program:
            program = str(self._folder / program)  # relative to the kubeconfig
        arguments = [program, *map(str, self._entry.get("args") or [])]
        environment = {**os.environ, **self._environment, "KUBERNETES_EXEC_INFO": self._info}
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=environment,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as error:
            hint = str(self._entry.get("installHint") or "").strip()
            raise self._failed(f"is not installed. {hint}" if hint else "is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"did not end within {_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise self._failed(f"cannot be run: {error}") from error
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise self._failed(f"ended with code {done.returncode}" + (f": {said}" if said else ""))
        return self._parse(done.stdout)

    def _parse(self, output: bytes) -> ExecCredentials:
        """Never put the output into an error: it may hold a token."""
        try:
            printed = json.loads(output)
        except ValueError as error:
            raise self._failed("printed no JSON") from error
        if not isinstance(printed, dict) or printed.get("kind") != "ExecCredential":
            raise self._failed("printed no ExecCredential")
        if printed.get("apiVersion") != self._version:
            raise self._failed(f"printed an ExecCredential of another version than {self._version}")
        status = printed.get("status")
        status = status if isinstance(status, dict) else {}
        token, certificate, key = (str(status.get(name) or "") for name in ("token", *_PAIR))
        if bool(certificate) != bool(key):
            raise self._failed("gave only one of clientCertificateData and clientKeyData")
        if not token and not certificate:
            raise self._failed("gave no credentials")
        expires = seconds_of(status.get("expirationTimestamp"))
        return ExecCredentials(token, certificate, key, float("inf") if expires is None else expires)

    def _failed(self, reason: str) -> PluginFailed:
        return PluginFailed(f"credential plugin {self.command!r} {reason}")


_PAIR = ("clientCertificateData", "clientKeyData")


def _cluster_info(cluster: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster as plugins read it: its authority inline, its extension for plugins as `config`."""
    info = {name: cluster[name] for name in _CLUSTER_FIELDS if cluster.get(name)}
    authority = cluster.get("certificate-authority-data")
    if not authority and cluster.get("certificate-authority"):
        authority = base64.b64encode(Path(str(cluster["certificate-authority"])).read_bytes()).decode()
    if authority:
        info["certificate-authority-data"] = authority
    for one in cluster.get("extensions") or []:
        if isinstance(one, dict) and one.get("name") == f"{_GROUP}/exec":
            info["config"] = one.get("extension")
    return info
