"""Typed Kubernetes objects: small frozen structs that hold only what Moorage reads."""

from moorage.kube.objects.core import *  # noqa: F403
from moorage.kube.objects.meta import *  # noqa: F403
from moorage.kube.objects.pods import *  # noqa: F403
from moorage.kube.objects.snapshots import *  # noqa: F403
from moorage.kube.objects.storage import *  # noqa: F403
from moorage.kube.objects.volumes import *  # noqa: F403
