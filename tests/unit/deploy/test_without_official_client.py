"""The image leaves the official Kubernetes client out: who would need it is told so, and nobody else notices."""

import importlib.util

import pytest
import yaml

from moorage.errors import UsageError
from moorage.kube.api import config


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    """Write a kubeconfig for a user, on a machine without the package."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "kubernetes" else found(name, *rest)
    )

    def write(user: dict):
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.dump(document))
        return path

    return write


@pytest.mark.parametrize(
    ("user", "what"),
    [
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "get-token"}}, "runs 'get-token' to"),
        ({"auth-provider": {"name": "oidc"}}, "logs in through 'oidc'"),
    ],
)
def test_a_login_that_needs_it_is_told_what_is_missing_and_what_to_do(kubeconfig, user, what):
    with pytest.raises(UsageError, match=f"{what}.*package `kubernetes`.*use a kubeconfig with a token") as told:
        config.load(str(kubeconfig(user)))
    assert "kubeconfig" in str(told.value)


async def test_a_token_needs_nothing(kubeconfig):
    loaded = config.load(str(kubeconfig({"token": "abc"})))
    assert loaded.token is not None
    assert await loaded.token() == "abc"
