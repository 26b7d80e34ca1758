"""The agent as other programs meet it: tokens for drivers, the official Python client, kubectl."""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from moorage.kube.errors import AlreadyExists
from moorage.kube.objects.core import ConfigMap, Secret, ServiceAccount
from moorage.kube.objects.pods import Pod

pytestmark = pytest.mark.root
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


async def ensure_account(lab):
    with contextlib.suppress(AlreadyExists):  # the server makes it, too, a moment after its start
        await lab.client.create(ServiceAccount, {"metadata": {"name": "default"}}, "default")


def claims_in(token):
    body = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


@pytest.mark.parametrize("in_secrets", [False, True])
async def test_a_driver_gets_tokens_of_the_pods_account_bound_to_the_pod(lab, in_secrets):
    await lab.driver_object(
        tokenRequests=[{"audience": "vault", "expirationSeconds": 1200}, {"audience": "other"}],
        podInfoOnMount=True,
        serviceAccountTokenInSecrets=in_secrets,
    )
    await lab.volume()
    if await lab.client.find(ServiceAccount, "worker", "default") is None:
        await lab.client.create(ServiceAccount, {"metadata": {"name": "worker"}}, "default")
    async with lab.driver() as driver:
        await lab.start_agent()
        pod = await lab.pod(serviceAccountName="worker")
        await lab.phase("p1", "Running")
        (request,) = driver.requests("NodePublishVolume")
        (staged,) = driver.requests("NodeStageVolume")
        place, empty = (
            (request.secrets, request.volume_context) if in_secrets else (request.volume_context, request.secrets)
        )
        assert TOKENS not in empty
        assert TOKENS not in staged.volume_context
        assert TOKENS not in staged.secrets
        tokens = json.loads(place[TOKENS])
        assert set(tokens) == {"vault", "other"}
        claims = claims_in(tokens["vault"]["token"])
        assert claims["sub"] == "system:serviceaccount:default:worker"
        assert "vault" in claims["aud"]
        assert claims["kubernetes.io"]["pod"] == {"name": "p1", "uid": pod.uid}
        assert tokens["vault"]["expirationTimestamp"]
        assert request.volume_context["csi.storage.k8s.io/serviceAccount.name"] == "worker"
        await lab.end("p1")


async def test_a_driver_is_not_asked_while_there_is_no_token(lab):
    await lab.driver_object(tokenRequests=[{"audience": "vault"}])
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        await lab.pod()
        await lab.until(lambda: driver.requests("NodeStageVolume"))
        name = "kubernetes.io/csi/scripted.dev^vol-c1"
        volumes = lab.agent.volumes.world.actual
        if await lab.client.find(ServiceAccount, "default", "default") is None:
            await lab.until(lambda: volumes[name].backoffs, what="no token, no publish")
            assert driver.requests("NodePublishVolume") == []
            await ensure_account(lab)
        await lab.phase("p1", "Running")
        assert TOKENS in driver.requests("NodePublishVolume")[-1].volume_context
        await lab.end("p1")


@contextlib.contextmanager
def official(lab):
    """The official client, its connections closed at the end."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(str(lab.server.kubeconfig), client_configuration=settings)
    with client.ApiClient(settings) as connections:
        yield client.CoreV1Api(connections)
        connections.rest_client.pool_manager.clear()


@pytest.fixture
def api(lab):
    with official(lab) as client:
        yield client


async def test_the_official_client_runs_commands_through_the_api_server(lab, api):
    from kubernetes.stream import stream

    await lab.start_agent()
    await lab.pod(claim="")
    await lab.phase("p1", "Running")

    def at_once():
        command = ["sh", "-c", "echo out; echo err >&2; hostname"]
        session = stream(
            api.connect_get_namespaced_pod_exec, "p1", "default", command=command,
            stdout=True, stderr=True, _preload_content=False,
        )  # fmt: skip
        session.run_forever(timeout=30)
        said = session.read_all()
        session.sock.shutdown()  # after the farewell of the server, close() would leave the connection open
        return said

    def in_dialogue():
        session = stream(
            api.connect_get_namespaced_pod_exec, "p1", "default", command=["sh"],
            stdin=True, stdout=True, stderr=True, _preload_content=False,
        )  # fmt: skip
        session.write_stdin("echo $((6 * 7)); exit 5\n")
        session.run_forever(timeout=30)
        said = session.read_stdout(), session.returncode
        session.sock.shutdown()
        return said

    text = await asyncio.to_thread(at_once)
    assert sorted(text.split()) == ["err", "out", "p1"]
    assert await asyncio.to_thread(in_dialogue) == ("42\n", 5)
    await lab.end("p1")


async def test_the_official_client_follows_a_log_and_reads_the_one_before(lab, api):
    await lab.start_agent()
    release = lab.base / "host"
    release.mkdir()
    volumes = [{"name": "h", "hostPath": {"path": str(release)}}]
    command = "echo begun; while [ ! -e /h/go ]; do sleep 0.05; done; rm /h/go; echo over; exit 1"
    await lab.pod(claim="", command=command, volumes=volumes, mounts=[{"name": "h", "mountPath": "/h"}])
    await lab.phase("p1", "Running")
    seen, first = [], threading.Event()

    def follow():
        answer = api.read_namespaced_pod_log("p1", "default", follow=True, _preload_content=False)
        for line in answer:
            seen.append(line.decode())
            first.set()
        answer.release_conn()

    reading = asyncio.create_task(asyncio.to_thread(follow))
    await lab.until(first.is_set, what="first line followed")
    (release / "go").touch()
    await asyncio.wait_for(reading, 60)
    assert "".join(seen) == "begun\nover\n"

    async def restarted():
        pod = await lab.client.get(Pod, "p1", "default")
        return pod.status.container_statuses[0].restart_count == 1

    await lab.until(restarted, what="restarted")
    before = await asyncio.to_thread(api.read_namespaced_pod_log, "p1", "default", previous=True)
    assert before == "begun\nover\n"
    await lab.end("p1")


async def test_the_official_client_reads_parts_of_a_log_and_is_told_what_cannot_be_read(lab, api):
    from kubernetes.client import ApiException

    await lab.start_agent()
    await lab.pod(claim="", command="for i in 1 2 3; do echo line $i; done; echo bad >&2; sleep 1000")

    def read(**options):
        return api.read_namespaced_pod_log("p1", "default", **options)

    async def written():
        pod = await lab.client.get(Pod, "p1", "default")
        return pod.status.phase == "Running" and (await asyncio.to_thread(read)).count("\n") == 4

    await lab.until(written, what="log")
    assert await asyncio.to_thread(read, tail_lines=2, since_seconds=3600) == "line 3\nbad\n"
    assert await asyncio.to_thread(read, stream="Stderr") == "bad\n"
    assert await asyncio.to_thread(read, follow=True, limit_bytes=9) == "line 1\nli"
    stamped = await asyncio.to_thread(read, timestamps=True, tail_lines=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z bad\n", stamped)
    for options, status, words in (
        ({"previous": True}, 400, "previous terminated container"),
        ({"tail_lines": -1}, 422, "tailLines: Invalid value: -1"),
        ({"limit_bytes": 0}, 422, "limitBytes"),
        ({"since_seconds": -5}, 422, "sinceSeconds"),
        ({"container": "other"}, 400, "other"),
    ):
        with pytest.raises(ApiException) as refused:
            await asyncio.to_thread(read, **options)
        assert (refused.value.status, words in refused.value.body) == (status, True)
    await lab.end("p1")


async def test_the_official_client_has_a_terminal(lab, api):
    from kubernetes.stream import stream

    await lab.start_agent()
    await lab.pod(claim="", container={"securityContext": {"runAsUser": 65534}})
    await lab.phase("p1", "Running")

    def in_terminal():
        session = stream(
            api.connect_get_namespaced_pod_exec, "p1", "default", command=["sh"],
            stdin=True, stdout=True, stderr=True, tty=True, _preload_content=False,
        )  # fmt: skip
        session.write_channel(4, '{"Width":99,"Height":33}')
        session.write_stdin("stty size; test -t 0 && echo yes-it-is; stat -c %u $(tty)\nexit 4\n")
        session.run_forever(timeout=60)
        said = session.read_stdout(), session.returncode
        session.sock.shutdown()
        return said

    text, code = await asyncio.to_thread(in_terminal)
    assert "33 99\r\nyes-it-is\r\n65534\r\n" in text  # found under its name, and the program's own
    assert code == 4
    await lab.end("p1")


async def test_a_reader_of_a_silent_container_that_goes_away_is_forgotten(lab):
    await lab.start_agent()
    await lab.pod(claim="")
    await lab.phase("p1", "Running")

    def watchers():
        count = 0
        for one in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += "inotify" in os.readlink(one)
        return count

    before = watchers()
    path = "/api/v1/namespaces/default/pods/p1/log?follow=true"
    reading = asyncio.create_task(lab.client.request("GET", path))
    await lab.until(lambda: watchers() == before + 1, what="log followed")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await lab.until(lambda: watchers() == before, what="reader forgotten")
    pod = await lab.client.get(Pod, "p1", "default")
    assert pod.status.container_statuses[0].restart_count == 0, "the container heard nothing of it"
    await lab.end("p1")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_shows_logs_and_runs_commands(lab):
    await lab.start_agent()
    await lab.pod(claim="", command="echo one; echo two; sleep 1000")
    await lab.phase("p1", "Running")

    async def kubectl(*words):
        command = ["kubectl", f"--kubeconfig={lab.server.kubeconfig}", *words]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)

    async def logged():
        return (await kubectl("logs", "p1")).stdout == "one\ntwo\n"

    await lab.until(logged, what="log")
    assert (await kubectl("logs", "p1", "--tail=1")).stdout == "two\n"
    assert "previous terminated container" in (await kubectl("logs", "p1", "--previous")).stderr
    done = await kubectl("exec", "p1", "--", "sh", "-c", "echo inside; exit 7")
    assert (done.stdout, done.returncode) == ("inside\n", 7)
    await lab.end("p1")


async def test_a_pod_finds_the_token_of_its_account_where_programs_look_for_it(lab):
    await ensure_account(lab)
    await lab.start_agent()
    named = {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}
    sources = [{"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}, {"downwardAPI": named}]
    place = "/var/run/secrets/kubernetes.io/serviceaccount"
    volumes = [{"name": "access", "projected": {"sources": sources}}]
    mounts = [{"name": "access", "mountPath": place, "readOnly": True}]
    await lab.pod(claim="", command=f"cat {place}/namespace; echo; cat {place}/token", restartPolicy="Never",
                  volumes=volumes, mounts=mounts)  # fmt: skip
    pod = await lab.phase("p1", "Succeeded")
    text = (await lab.client.request("GET", "/api/v1/namespaces/default/pods/p1/log")).decode()
    namespace, token = text.split()
    assert namespace == "default"
    claims = claims_in(token)
    assert claims["sub"] == "system:serviceaccount:default:default"
    assert claims["kubernetes.io"]["pod"] == {"name": "p1", "uid": pod.uid}
    await lab.end("p1")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_a_client_in_a_pod_finds_the_api_server_and_its_account_as_in_any_cluster(lab):
    await ensure_account(lab)
    await lab.until(lambda: lab.client.find(ConfigMap, "kube-root-ca.crt", "default"), what="certificate authority")
    await lab.start_agent()
    review = '{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}'
    ask = f"echo '{review}' | kubectl create --raw /apis/authentication.k8s.io/v1/selfsubjectreviews -f -"
    await lab.pod(claim="", command=f"HOME=/none; {ask}", restartPolicy="Never", automountServiceAccountToken=True)
    await lab.phase("p1", "Succeeded")
    answer = await lab.client.request("GET", "/api/v1/namespaces/default/pods/p1/log")
    assert json.loads(answer)["status"]["userInfo"]["username"] == "system:serviceaccount:default:default"
    await lab.end("p1")


async def test_secrets_of_a_volume_reach_the_driver_and_a_missing_one_holds_the_call_back(lab):
    await lab.driver_object()
    references = {f"node{step}SecretRef": {"name": step.lower(), "namespace": "kube-system"}
                  for step in ("Stage", "Publish")}  # fmt: skip
    await lab.volume(csi=references)
    async with lab.driver() as driver:
        agent = await lab.start_agent()
        await lab.client.create(Secret, {"metadata": {"name": "stage"}, "data": {"k": "c3RhZ2U="}}, "kube-system")
        pod = await lab.pod()
        await lab.until(lambda: any("publish" in one for one in agent.volumes.unmounted(pod)), what="secret missed")
        assert driver.requests("NodePublishVolume") == []
        await lab.client.create(Secret, {"metadata": {"name": "publish"}, "data": {"k": "cHVibGlzaA=="}}, "kube-system")
        await lab.phase("p1", "Running")
        assert dict(driver.requests("NodeStageVolume")[-1].secrets) == {"k": "stage"}
        assert dict(driver.requests("NodePublishVolume")[-1].secrets) == {"k": "publish"}
        await lab.end("p1")
