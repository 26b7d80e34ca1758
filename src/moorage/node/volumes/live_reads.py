"""What the API server must be asked before a driver is called: attachments, secrets, tokens.

Owns: those live reads and the errors they end in: all of them mean that the driver was not asked yet.
May not touch: drivers, the disk.
Start reading at: `Fetch.for_stage`, `Fetch.for_publish`.
"""

import asyncio
import base64
import json
import math
import time
from collections.abc import Callable
from typing import Any

from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import ApiError
from moorage.kube.objects.core import Node, Secret, ServiceAccount
from moorage.kube.objects.meta import SecretReference, seconds_of
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, CsiDriverSpec, VolumeAttachment
from moorage.kube.volumes import attachment_name
from moorage.node.layout import PodUid
from moorage.node.volumes import wire
from moorage.node.volumes.claims import LiveClaims
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.shared_reads import Reads, not_long_ago
from moorage.node.volumes.state import CsiSource, PodRef, StepFailure, VolumeUse

_DEFAULT_TOKEN_S = 3600
_TOKEN_KEPT_S = 24 * 3600.0  # at most, however long a token lives
_LOOK_AGAIN_S = 10.0  # whether pods have gone whose tokens are kept
_FRESH_S = 2.0  # filling a volume again later reads again


class Fetch:
    """Reads for one node."""

    def __init__(
        self,
        client: Client,
        node: str,
        drivers: Informer[CSIDriver],
        claims: LiveClaims,
        seen_at: Callable[[PodUid], float] | None = None,
    ) -> None:
        self._client = client
        self._node = node
        self._drivers = drivers
        self._claims = claims
        self._pod_seen_at = seen_at  # when, of the monotonic clock, a pod was first heard of; never, once it has gone
        self._tokens: dict[tuple[PodUid, str], tuple[float, str, str]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._shared = Reads(self._find)

    def driver_spec(self, name: str) -> CsiDriverSpec | None:
        found = self._drivers.get(name)
        return found.spec if found else None

    def is_attachable(self, driver: str) -> bool:
        """A driver without an object must be assumed to need attaching."""
        spec = self.driver_spec(driver)
        return spec is None or spec.attach_required is not False

    async def for_stage(self, use: VolumeUse, source: CsiSource) -> wire.Extras:
        """Everything that a NodeStageVolume carries beside the volume's own fields."""
        return wire.Extras(
            publish_context=await self.publish_context(use, source),
            secrets=await self.secret(source.stage_secret),
            se_linux_context=use.se_linux_label,
        )

    async def for_publish(self, use: VolumeUse, source: CsiSource) -> wire.Extras:
        """Everything that a NodePublishVolume carries beside the volume's own fields."""
        spec = self.driver_spec(source.driver)
        secrets = await self.secret(source.publish_secret)
        context = wire.pod_info(use) if spec is not None and spec.pod_info_on_mount else {}
        if spec is not None and spec.token_requests and not source.is_block:
            tokens = await self._driver_tokens(use.pod, spec)
            if spec.service_account_token_in_secrets:
                secrets = {**secrets, wire.TOKENS_KEY: tokens}
            else:
                context = {**context, wire.TOKENS_KEY: tokens}
        return wire.Extras(
            publish_context=await self.publish_context(use, source),
            secrets=secrets,
            context=context,
            se_linux_context=use.se_linux_label,
        )

    async def publish_context(self, use: VolumeUse, source: CsiSource) -> dict[str, str]:
        """The attachment's metadata. The volume must really be attached here: the answer of a cache will not do."""
        if not use.is_attachable:
            return {}
        name = attachment_name(source.driver, source.handle, self._node)
        try:
            found = await self._client.find(VolumeAttachment, name)
        except ApiError as error:
            raise _not_asked(f"volume attachment {name} cannot be read: {error}") from error
        if found is None:
            raise _not_asked(f"volume attachment {name} does not exist; waiting for the volume to be attached")
        if found.is_deleting:
            raise _not_asked(f"volume attachment {name} is being deleted")
        if not found.status.attached:
            refused = found.status.attach_error.message if found.status.attach_error else "the attacher is not done"
            raise _not_asked(f"volume {source.spec_name} is not attached to node {self._node} yet: {refused}")
        return dict(found.status.attachment_metadata)

    async def confirm_attached(self, use: VolumeUse) -> None:
        """The node object itself lists the volume as in use and as attached: no controller is about to detach it."""
        if not use.is_attachable:
            return
        try:
            node = await self._client.get(Node, self._node)
        except ApiError as error:
            raise _not_asked(f"node {self._node} cannot be read: {error}") from error
        if all(one.name != use.volume for one in node.status.volumes_attached):
            raise _not_asked(f"node {self._node} does not list volume {use.volume} as attached")
        if use.volume not in node.status.volumes_in_use:
            raise _not_asked(f"node {self._node} does not list volume {use.volume} as in use")

    async def confirm_claim(self, pod: PodRef, source: CsiSource) -> None:
        """The claim is still the one that led to this volume: what was heard of it may be older than the pod, and a
        claim recreated under the same name is bound to another volume, perhaps of another user."""
        if not source.claim:
            return
        namespace, _, name = source.claim.partition("/")
        try:
            claim = await self._claims.read(namespace, name, self._seen_at(pod.uid))
        except ApiError as error:
            raise _not_asked(f"persistentvolumeclaim {source.claim} cannot be read: {error}", "pod") from error
        if claim is not None and (claim.uid, claim.spec.volume_name) == (source.claim_uid, source.spec_name):
            return
        if claim is not None:
            self._claims.remember(claim)
        message = f"persistentvolumeclaim {source.claim} is not, or no longer, bound to volume {source.spec_name}"
        raise _not_asked(message, "pod")

    async def secret(self, reference: SecretReference | None) -> dict[str, str]:
        """A secret's data as text."""
        if reference is None or not reference.name:
            return {}
        try:
            found = await self._client.get(Secret, reference.name, reference.namespace)
            return {key: base64.b64decode(value).decode() for key, value in found.data.items()}
        except (ApiError, ValueError) as error:
            shown = f"{reference.namespace}/{reference.name}"
            raise _not_asked(f"secret {shown} cannot be used: {error}") from error

    async def shared(self, kind: type[Any], name: str, pod: Pod) -> Any:
        """A secret or configMap of the pod's namespace, or None, as it was after the pod was first seen: who changes
        one and then makes a pod counts on that. Pods that start together share a read."""
        since = not_long_ago(self._seen_at(PodUid(pod.uid)), _FRESH_S)
        return await self._shared.since((kind, pod.namespace, name), since)

    async def _find(self, key: tuple[type[Any], str, str]) -> Any:
        kind, namespace, name = key
        return await self._client.find(kind, name, namespace)

    async def token(self, pod: PodRef, audience: str, expiration_s: int | None) -> tuple[str, str]:
        """A token of the pod's account bound to the pod, and when it ends; kept until 80 % of its life is over."""
        key = (pod.uid, f"{audience}\0{expiration_s}")
        known = self._tokens.get(key)
        now = time.time()
        if known is not None and now < known[0]:
            return known[1], known[2]
        body: dict[str, Any] = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid},
                **({"expirationSeconds": expiration_s} if expiration_s else {}),
            },
        }
        path = ServiceAccount.resource.path(pod.namespace, pod.service_account, "token")
        try:
            status = json.loads(await self._client.request("POST", path, body)).get("status") or {}
        except ApiError as error:
            raise _not_asked(f"no token for service account {pod.service_account}: {error}") from error
        token, ends = str(status.get("token") or ""), str(status.get("expirationTimestamp") or "")
        life_s = (seconds_of(ends) or now + (expiration_s or _DEFAULT_TOKEN_S)) - now
        if not token:
            raise _not_asked(f"the API server answered without a token for service account {pod.service_account}")
        self._tokens[key] = (now + min(life_s * 0.8, _TOKEN_KEPT_S), token, ends)
        self._look_again_later()
        return token, ends

    def forget_pod(self, uid: str) -> None:
        for key in [key for key in self._tokens if key[0] == uid]:
            del self._tokens[key]

    def forget_gone(self) -> None:
        """Forget tokens that are used no more, and those of pods that have gone: whose volume was refused has nothing
        to be unpublished, so it is not reported."""
        now = time.time()
        self._tokens = {
            (uid, wanted): kept for (uid, wanted), kept in self._tokens.items() if now < kept[0] and self._is_here(uid)
        }

    def _look_again_later(self) -> None:
        if self._next_look is None and self._tokens:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self.forget_gone()
        self._look_again_later()

    def _seen_at(self, uid: PodUid) -> float:
        return math.inf if self._pod_seen_at is None else self._pod_seen_at(uid)

    def _is_here(self, uid: PodUid) -> bool:
        return self._pod_seen_at is None or self._pod_seen_at(uid) < math.inf

    async def _driver_tokens(self, pod: PodRef, spec: CsiDriverSpec) -> str:
        tokens = {}
        for wanted in spec.token_requests:
            token, ends = await self.token(pod, wanted.audience, wanted.expiration_seconds)
            tokens[wanted.audience] = {"token": token, "expirationTimestamp": ends}
        return json.dumps(tokens)


def _not_asked(message: str, step: str = "device") -> MoorageError:
    return StepFailed(StepFailure.TRANSIENT, step, message)
