"""A server that holds accounts to their Roles, and clients that act as such accounts.

Owns: `Accounts`, for tests that attack the API server with weak credentials.
Start reading at: `serve_accounts`.
"""

import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from moorage.apiserver.run import ApiServer
from moorage.testing import serve

RBAC = "/apis/rbac.authorization.k8s.io/v1"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Caller:
    """Requests as one user; each returns the status and the decoded answer."""

    def __init__(self, session: aiohttp.ClientSession, name: str, token: str) -> None:
        self.session = session
        self.name = name
        self.token = token

    async def __call__(
        self, method: str, path: str, body: Any = None, media: str = "application/json", **headers: str
    ) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, str | bytes | io.IOBase) else json.dumps(body)
        sent = {"Content-Type": media, **{key.replace("_", "-"): value for key, value in headers.items()}}
        async with self.session.request(method, path, data=data, headers=sent) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text

    async def make(self, path: str, body: Any) -> Any:
        status, answer = await self("POST", path, body)
        assert status == 201, answer
        return answer


class Accounts:
    """One server; `admin` may do everything, `account` makes callers that may do what their rules say."""

    def __init__(self, server: ApiServer, stack: AsyncExitStack) -> None:
        self.server = server
        self.admin: Caller  # set by serve_accounts
        self._stack = stack

    async def caller(self, name: str, token: str) -> Caller:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        session = aiohttp.ClientSession(self.server.insecure_url, headers=headers)
        return Caller(await self._stack.enter_async_context(session), name, token)

    async def account(
        self, name: str, *rules: dict[str, Any], cluster: bool = False, namespace: str = "default"
    ) -> Caller:
        """Make a ServiceAccount with these rules, in its namespace or in the whole cluster, and return its caller."""
        await self.admin.make(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        where = f"{RBAC}/cluster" if cluster else f"{RBAC}/namespaces/{namespace}/"
        kind, roles, bindings = "ClusterRole" if cluster else "Role", f"{where}roles", f"{where}rolebindings"
        if rules:
            await self.admin.make(roles, {"metadata": {"name": name}, "rules": list(rules)})
            ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
            subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
            await self.admin.make(bindings, {"metadata": {"name": name}, "roleRef": ref, "subjects": [subject]})
        return await self.caller(f"system:serviceaccount:{namespace}:{name}", await self.token(name, namespace))

    async def token(self, name: str, namespace: str = "default", **spec: Any) -> str:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str((await self.admin.make(path, {"spec": spec}))["status"]["token"])


def rule(verbs: str, resources: str, group: str = "", names: str = "") -> dict[str, Any]:
    """A rule; words are separated by spaces."""
    found: dict[str, Any] = {"verbs": verbs.split(), "apiGroups": [group], "resources": resources.split()}
    return {**found, "resourceNames": names.split()} if names else found


@asynccontextmanager
async def serve_accounts(directory: Path, **settings: Any) -> AsyncIterator[Accounts]:
    async with serve(directory, **settings) as server, AsyncExitStack() as stack:
        accounts = Accounts(server, stack)
        accounts.admin = await accounts.caller("admin", server.token)
        yield accounts
