"""Who may ask the agent for what: the API server is asked who somebody is and what they may do."""

import asyncio
import json
import threading

import pytest
from aiohttp.test_utils import make_mocked_request

from moorage.kube.api.config import ApiConfig, fixed_token
from moorage.kube.errors import Unavailable
from moorage.node.serve import auth
from moorage.node.serve.auth import Gate, authority_of, server_context
from moorage.testing import until


class Judge:
    """An API server that knows one token, and which subresources of nodes its owner may use."""

    groups = ()

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
        assert body["spec"]["groups"] == [*self.groups, "system:authenticated"]
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
    monkeypatch.setattr(auth, "roots_outside_of_pods", lambda connections: [True] * len(connections))
    assert await status(judge, "/metrics", token="") == 200  # root of this machine
    assert await status(judge, "/metrics", token="stolen") == 401  # but not with a token that is not good


async def test_a_right_is_remembered_for_what_it_is_and_not_for_another():
    judge = Judge(("get", "metrics"))
    gate = Gate(ApiConfig("https://127.0.0.1:1"), judge, "n1")
    assert [await status(judge, "/metrics", gate=gate) for _ in range(3)] == [200] * 3
    assert judge.asked == [("get", "metrics")]
    assert await status(judge, "/exec/ns/pod/main", gate=gate) == 403


class Certified:
    """A connection whose client has shown a certificate with this subject."""

    def __init__(self, common_name, *organizations):
        names = [("organizationName", one) for one in organizations]
        self._certificate = {"subject": tuple((pair,) for pair in [*names, ("commonName", common_name)])}

    def get_extra_info(self, name, default=None):
        return self._certificate if name == "peercert" else default


async def answer_to(gate, transport, path="/metrics"):
    request = make_mocked_request("GET", path)
    request._protocol.transport = transport
    return await gate.refusal(request)


@pytest.mark.parametrize("organizations", [("monitors",), ("monitors", "system:authenticated")])
async def test_who_has_a_certificate_is_one_of_the_authenticated(organizations):
    judge = Judge(("get", "metrics"))
    judge.groups = ("monitors",)  # checked when it is asked
    assert await answer_to(Gate(ApiConfig("https://127.0.0.1:1"), judge, "n1"), Certified("m", *organizations)) is None
    assert judge.asked == [("get", "metrics")]


async def test_an_answer_is_remembered_and_silence_is_not():
    judge = Judge(("get", "metrics"))
    gate = Gate(ApiConfig("https://127.0.0.1:1"), judge, "n1")
    judge.is_there = False
    refusal = await answer_to(gate, Certified("m"))
    assert (refusal.status, "try again" in refusal.text) == (503, True)
    judge.is_there = True
    assert await answer_to(gate, Certified("m")) is None
    judge.is_there = False
    assert await answer_to(gate, Certified("m")) is None


async def test_a_token_in_any_script_is_just_not_ours():
    judge = Judge(("get", "metrics"))
    gate = Gate(ApiConfig("https://127.0.0.1:1", token=fixed_token("ours")), judge, "n1")
    assert await status(judge, "/metrics", token="clé", gate=gate) == 401
    request = make_mocked_request("GET", "/metrics")
    request._headers = {"Authorization": "Bearer \udce9"}  # a byte that is no UTF-8, as aiohttp reads it
    assert (await gate.refusal(request)).status == 401
    assert await status(judge, "/exec/ns/pod/main", token="ours", gate=gate) == 200


async def test_who_is_refused_is_told_who_would_not_be():
    refusal = await Gate(ApiConfig("https://127.0.0.1:1"), Judge(), "n1").refusal(make_mocked_request("GET", "/pods"))
    assert refusal.status == 401
    for word in ("certificate", "token", "root of this machine outside of pods"):
        assert word in refusal.text


async def test_who_is_refused_loses_the_connection():
    refusal = await Gate(ApiConfig("https://127.0.0.1:1"), Judge(), "n1").refusal(make_mocked_request("GET", "/pods"))
    assert refusal.keep_alive is False


class Looks:
    """Looks through all processes that take until they are let go."""

    def __init__(self):
        self.seen, self._may_end = [], threading.Semaphore(0)

    def __call__(self, connections):
        self.seen.append([peer for peer, _ in connections])
        self._may_end.acquire(timeout=60)
        return [peer.startswith("root") for peer, _ in connections]

    def let_go(self, count=1):
        self._may_end.release(count)


class Named:
    """A connection of a client without credentials."""

    def __init__(self, name):
        self._name = name

    def get_extra_info(self, name, default=None):
        return self._name if name == "peername" else default


async def test_however_many_ask_nobody_waits_for_more_than_two_looks(monkeypatch):
    looks = Looks()
    monkeypatch.setattr(auth, "roots_outside_of_pods", looks)
    gate = Gate(ApiConfig("https://127.0.0.1:1"), Judge(), "n1")
    first = asyncio.create_task(answer_to(gate, Named("pod")))
    await until(lambda: looks.seen, what="first look")
    names = [*(f"pod-{number}" for number in range(50)), "root"]
    others = [asyncio.create_task(answer_to(gate, Named(name))) for name in names]
    await asyncio.sleep(0)  # all of them have asked, while the first look goes on: it cannot tell of them
    looks.let_go(2)
    assert (await first).status == 401
    *refused, let_in = await asyncio.gather(*others)
    assert {one.status for one in refused} == {401}
    assert let_in is None
    assert looks.seen == [["pod"], names]


async def test_a_client_that_goes_away_during_its_look_takes_nobodys_answer_along(monkeypatch):
    looks = Looks()
    monkeypatch.setattr(auth, "roots_outside_of_pods", looks)
    gate = Gate(ApiConfig("https://127.0.0.1:1"), Judge(), "n1")
    gone, stays = (asyncio.create_task(answer_to(gate, Named(name))) for name in ("pod", "root"))
    await until(lambda: looks.seen, what="look")
    gone.cancel()
    looks.let_go(2)
    assert await stays is None
    assert await asyncio.gather(gone, return_exceptions=True) != [None]


class WebTrust:
    """What is trusted for the API server when a kubeconfig names no authority: those of web sites."""

    def get_ca_certs(self, binary_form=False):
        return [b"an authority of web sites"]


def test_authorities_of_web_sites_vouch_for_nobody():
    assert authority_of(ApiConfig("https://api.example.com", WebTrust()), None) is None
    named = ApiConfig("https://api.example.com", WebTrust(), authority=b"the cluster's")
    assert authority_of(named, None) == b"the cluster's"


@pytest.mark.parametrize("name", ["kubelet.crt", "kubelet.key"])
@pytest.mark.parametrize("damage", ["empty", "short", "zeros", "of another"])
def test_a_certificate_that_was_not_wholly_written_is_made_anew(tmp_path, name, damage):
    server_context(tmp_path, "n1", "127.0.0.1", None)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / "other").mkdir()
    server_context(tmp_path / "other", "n1", "127.0.0.1", None)
    another = (tmp_path / "other" / name).read_bytes()
    broken = {"empty": b"", "short": whole[:50], "zeros": bytes(len(whole)), "of another": another}
    (tmp_path / name).write_bytes(broken[damage])
    server_context(tmp_path, "n1", "127.0.0.1", None)
    made = (tmp_path / "kubelet.crt").read_bytes()
    server_context(tmp_path, "n1", "127.0.0.1", None)
    assert (tmp_path / "kubelet.crt").read_bytes() == made  # and only then
    assert (tmp_path / "kubelet.key").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_no_half_of_a_certificate(tmp_path, monkeypatch):
    def full(_fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(auth.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            server_context(tmp_path, "n1", "127.0.0.1", None)
        assert list(tmp_path.iterdir()) == []
    server_context(tmp_path, "n1", "127.0.0.1", None)
