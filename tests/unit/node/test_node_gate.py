"""Who may ask the agent for what: the API server is asked who somebody is and what they may do."""

import json

import pytest
from aiohttp.test_utils import make_mocked_request

from moorage.kube.config import ApiConfig
from moorage.kube.errors import Unavailable
from moorage.node.serve import auth
from moorage.node.serve.auth import Gate


class Judge:
    """An API server that knows one token, and which subresources of nodes its owner may use."""

    def __init__(self, *allowed):
        self.allowed, self.asked, self.is_there = set(allowed), [], True

    async def request(self, method, path, body):
        assert method == "POST"
        if not self.is_there:
            raise Unavailable(503, "Unreachable", "scripted")
        if path.endswith("tokenreviews"):
            is_known = body["spec"]["token"] == "prometheus"
            user = {"username": "system:serviceaccount:monitoring:prometheus", "groups": ["system:authenticated"]}
            return json.dumps({"status": {"authenticated": is_known, "user": user if is_known else {}}}).encode()
        wanted = body["spec"]["resourceAttributes"]
        assert (wanted["resource"], wanted["name"]) == ("nodes", "n1")
        assert body["spec"]["groups"] == ["system:authenticated"]
        self.asked.append((wanted["verb"], wanted["subresource"]))
        return json.dumps({"status": {"allowed": self.asked[-1] in self.allowed}}).encode()


async def status(judge, path, token="prometheus", method="GET", gate=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    gate = gate or Gate(ApiConfig("https://127.0.0.1:1"), judge, "n1")
    refusal = await gate.refusal(make_mocked_request(method, path, headers=headers))
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("path", "method", "right"),
    [
        ("/metrics", "GET", ("get", "metrics")),
        ("/stats/summary", "GET", ("get", "stats")),
        ("/pods", "GET", ("get", "pods")),
        ("/pods", "GET", ("get", "proxy")),
        ("/containerLogs/ns/pod/main", "GET", ("get", "proxy")),
        ("/exec/ns/pod/main", "GET", ("get", "proxy")),
        ("/exec/ns/pod/main", "POST", ("create", "proxy")),
    ],
)
async def test_each_path_needs_its_own_right_and_no_other(path, method, right):
    everything = {(verb, sub) for verb in ("get", "create") for sub in ("metrics", "stats", "pods", "proxy", "log")}
    assert await status(Judge(right), path, method=method) == 200
    others = everything - {right} - ({("get", "pods"), ("get", "proxy")} if path == "/pods" else set())
    assert await status(Judge(*others), path, method=method) == 403


async def test_nobody_is_let_in_whom_nobody_vouches_for(monkeypatch):
    judge = Judge(("get", "proxy"), ("get", "metrics"))
    assert await status(judge, "/metrics", token="stolen") == 401
    assert await status(judge, "/metrics", token="") == 401
    judge.is_there = False
    assert await status(judge, "/metrics") == 401
    monkeypatch.setattr(auth, "owner_of_peer", lambda _request: 0)
    assert await status(judge, "/metrics", token="") == 200  # root of this machine
    assert await status(judge, "/metrics", token="stolen") == 401  # but not with a token that is not good


async def test_a_right_is_remembered_for_what_it_is_and_not_for_another():
    judge = Judge(("get", "metrics"))
    gate = Gate(ApiConfig("https://127.0.0.1:1"), judge, "n1")
    assert [await status(judge, "/metrics", gate=gate) for _ in range(3)] == [200] * 3
    assert judge.asked == [("get", "metrics")]
    assert await status(judge, "/exec/ns/pod/main", gate=gate) == 403
