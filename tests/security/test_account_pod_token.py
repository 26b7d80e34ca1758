"""A process in a pod of `moorage up` takes its token and asks the API server for more than it was granted."""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.accounts import RBAC

from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.kube.objects import Pod

pytestmark = pytest.mark.root

NS = "/api/v1/namespaces/default"
_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


@pytest.fixture
async def cluster():
    path = Path(tempfile.mkdtemp(prefix="moo-"))  # a short path: sockets end at 107 characters
    stack = Cluster(UpSettings(data_dir=path, nodes=1, pool_size_bytes=1 << 30).checked())
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
        shutil.rmtree(path)


async def token_in_pod(client):
    """What a process in a pod reads from its token volume."""
    container = {"name": "c", "image": "host", "command": ["sh", "-c", f"cat {_TOKEN}; echo; sleep 300"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    await client.create(Pod, {"metadata": {"name": "p"}, "spec": spec}, "default")
    async with asyncio.timeout(60):
        while True:
            pod = await client.get(Pod, "p", "default")
            if pod.status.phase == "Running":
                text = (await client.request("GET", Pod.resource.path("default", "p", "log"))).decode()
                if text:
                    return text.strip()
            await asyncio.sleep(0.05)


async def test_the_token_of_a_pod_may_do_what_it_is_granted_and_no_more(cluster):
    async with cluster.client() as client:
        token = await token_in_pod(client)
        connector = aiohttp.UnixConnector(str(cluster.layout.api_socket))
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession("http://api", connector=connector, headers=headers) as session:

            async def status(method, path, body=None):
                async with session.request(method, path, json=body) as response:
                    return response.status

            evil = {"metadata": {"name": "evil"}, "roleRef": {"kind": "ClusterRole", "name": "cluster-admin"},
                    "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}]}  # fmt: skip
            attempts: tuple[tuple[str, str, Any], ...] = (
                ("GET", "/api/v1/secrets", None), ("GET", "/api/v1/nodes", None), ("GET", f"{NS}/pods", None),
                ("DELETE", f"{NS}/pods/p", None), ("POST", f"{RBAC}/clusterrolebindings", evil),
                ("POST", f"{NS}/serviceaccounts/default/token", {"spec": {}}), ("GET", "/metrics", None),
                ("GET", f"{NS}/pods/p/exec?command=id", None), ("GET", "/api/v1/persistentvolumes", None),
            )  # fmt: skip
            for method, path, body in attempts:
                assert await status(method, path, body) == 403, (method, path)
            assert await status("GET", "/api/v1") == 200
            role = {"metadata": {"name": "r"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]}
            where = f"{RBAC}/namespaces/default"
            await client.request("POST", f"{where}/roles", role)
            bound = {**evil, "metadata": {"name": "b"}, "roleRef": {"kind": "Role", "name": "r"}}
            await client.request("POST", f"{where}/rolebindings", bound)
            assert await status("GET", f"{NS}/pods") == 200
            assert await status("GET", f"{NS}/secrets") == 403


async def test_the_kubeconfig_of_the_user_stays_the_administrators(cluster):
    config = json.loads(cluster.layout.kubeconfig.read_text())
    token = config["users"][0]["user"]["token"]
    connector = aiohttp.UnixConnector(str(cluster.layout.api_socket))
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession("http://api", connector=connector, headers=headers) as session,
        session.get("/api/v1/secrets") as response,
    ):
        assert response.status == 200
