"""Nothing at run time needs the official Kubernetes client: such logins work, or are refused clearly."""

import subprocess
import sys

import pytest
import yaml

from moorage.errors import UsageError
from moorage.kube.api import config

PLUGIN = """
import json
status = {"token": "from-plugin"}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


@pytest.fixture
def kubeconfig(tmp_path):
    """Write a kubeconfig for a user."""

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


def test_a_credential_plugin_works_where_the_package_is_missing(kubeconfig):
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", PLUGIN]}
    code = (
        "import asyncio, sys; sys.modules['kubernetes'] = None\n"
        "from moorage.kube.api import config\n"
        f"print(asyncio.run(config.load({str(kubeconfig({'exec': command}))!r}).token()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "from-plugin"


def test_an_auth_provider_is_refused_with_what_to_do(kubeconfig):
    with pytest.raises(UsageError, match=r"auth provider 'oidc'.*credential plugins .exec., tokens and certificates"):
        config.load(str(kubeconfig({"auth-provider": {"name": "oidc"}})))


async def test_a_token_needs_nothing(kubeconfig):
    loaded = config.load(str(kubeconfig({"token": "abc"})))
    assert loaded.token is not None
    assert await loaded.token() == "abc"
