"""Requests that no client would send: every verb, path and content type with bodies that almost fit.

Owns: `RandomRequests`, for the fuzz test of the API server.
Start reading at: `RandomRequests.next`.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from moorage.apiserver.kinds.registry import Kind, builtin_kinds
from moorage.apiserver.kinds.schema import ANY, Type

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    2**70,
    1.5,
    1e308,
    -0.0,
    "",
    "a",
    "A b",
    "é\u202e\x00\x1b[2J",
    "\ud800",
    "..",
    "../../x",
    "1Gi",
    "1e999999999",
    "-5",
    "9" * 300,
    "x" * 300,
    "2024-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:60Z",
    "2024-13-45T99:99:99Z",
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"a": {}},
    {"$patch": "delete"},
    {"$patch": 1},
    {"$retainKeys": 1},
    {"$setElementOrder/containers": 1},
    {"$deleteFromPrimitiveList/finalizers": [1, {}]},
    "${pvc.name}",
    "%s",
    "*",
    "system:masters",
    "default",
    "In",
    "Exists",
    "Always",
    "Delete",
    "c1",
)
MEDIA = (
    "application/json",
    "application/json",
    "application/yaml",
    "application/merge-patch+json",
    "application/json-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
    "application/vnd.kubernetes.protobuf",
    "text/plain",
    "",
    "a/b; c=d;;",
    "application/cbor",
)
ACCEPTS = (
    "",
    "*/*",
    "application/json",
    "application/yaml",
    "application/json;as=Table;v=v1;g=meta.k8s.io",
    "text/html",
    ";;,=,",
    "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
    "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
    "application/vnd.kubernetes.protobuf",
    "application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io",
)
QUERIES = (
    "limit",
    "continue",
    "resourceVersion",
    "resourceVersionMatch",
    "labelSelector",
    "fieldSelector",
    "watch",
    "timeoutSeconds",
    "sendInitialEvents",
    "allowWatchBookmarks",
    "dryRun",
    "fieldManager",
    "fieldValidation",
    "force",
    "pretty",
    "includeObject",
    "gracePeriodSeconds",
    "propagationPolicy",
    "orphanDependents",
    "container",
    "follow",
    "command",
    "stdin",
    "tailLines",
)
QUERY_VALUES = (
    "",
    "1",
    "0",
    "-1",
    "true",
    "x",
    "All",
    "Strict",
    "Exact",
    "NotOlderThan",
    "99999999999999999999",
    "1.5",
    "a=b",
    "a in (b,c)",
    "a!=b,!c",
    "a in (",
    "metadata.name=c1",
    "spec.nodeName!=x",
    "status.phase=\\",
    "é",
    "\x00",
    "me",
    "a>5",
    "eyJydiI6MSwic3RhcnQiOlsiYSIsImIiXX0",
    "eyJydiI6LTUsInN0YXJ0IjpbXX0",
    "Foreground",
    "Orphan",
    "Background",
    "None",
    "Object",
)
VERBS = ("GET",) * 5 + ("POST",) * 8 + ("PUT",) * 5 + ("PATCH",) * 8 + ("DELETE", "DELETE", "HEAD", "OPTIONS", "BREW")
SUBRESOURCES = (
    "status",
    "status",
    "scale",
    "binding",
    "eviction",
    "log",
    "exec",
    "attach",
    "portforward",
    "proxy",
    "resize",
    "ephemeralcontainers",
    "finalize",
    "token",
    "approval",
    "..",
    "a/b",
)
HEADERS = (
    ("Impersonate-User", "bob"),
    ("Impersonate-Group", "g"),
    ("Impersonate-Uid", ""),
    ("Impersonate-Extra-%zz", "x"),
    ("Content-Encoding", "gzip"),
    ("Upgrade", "websocket"),
    ("Connection", "Upgrade"),
    ("If-Match", "x"),
    ("Range", "bytes=0-"),
    ("Expect", "nonsense"),
    ("Sec-WebSocket-Protocol", "v5.channel.k8s.io"),
    ("User-Agent", "é\x7f/1"),
)
_CONTAINER = {
    "name": "c1",
    "image": "x",
    "env": [{"name": "A", "value": "b"}],
    "resources": {"requests": {"cpu": "1"}},
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "ports": [{"containerPort": 80}],
}
_TERM = {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
_SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "default": "b", "maxLength": 3},
                "l": {"type": "array", "items": {"type": "integer"}},
                "m": {"type": "object", "additionalProperties": {"type": "string"}},
                "n": {"x-kubernetes-int-or-string": True},
            },
        }
    },
}
BASES: dict[str, dict[str, Any]] = {
    "pods": {
        "spec": {
            "containers": [_CONTAINER],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}
            },
        },
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": []},
    },
    "persistentvolumeclaims": {
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "selector": {"matchLabels": {"a": "b"}},
            "storageClassName": "c1",
        },
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "conditions": []},
    },
    "persistentvolumes": {
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"},
            "csi": {"driver": "x.example.org", "volumeHandle": "h", "volumeAttributes": {"a": "b"}},
            "claimRef": {"name": "c1", "namespace": "default"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [_TERM]}},
        }
    },
    "storageclasses": {
        "provisioner": "x.example.org",
        "parameters": {"a": "b"},
        "allowedTopologies": [{"matchLabelExpressions": [{"key": "a", "values": ["b"]}]}],
        "allowVolumeExpansion": True,
    },
    "volumeattachments": {
        "spec": {"attacher": "x.example.org", "nodeName": "n", "source": {"persistentVolumeName": "c1"}}
    },
    "csinodes": {
        "spec": {
            "drivers": [{"name": "x.example.org", "nodeID": "n", "topologyKeys": ["a"], "allocatable": {"count": 3}}]
        }
    },
    "csidrivers": {"spec": {"attachRequired": False, "tokenRequests": [{"audience": "a"}]}},
    "csistoragecapacities": {"storageClassName": "c1", "capacity": "1Gi", "nodeTopology": {"matchLabels": {"a": "b"}}},
    "volumeattributesclasses": {"driverName": "x.example.org", "parameters": {"a": "b"}},
    "nodes": {
        "spec": {"taints": [{"key": "a", "effect": "NoExecute"}]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 1}},
        },
    },
    "roles": {"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]},
    "clusterroles": {
        "rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}],
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]},
    },
    "rolebindings": {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "c1"},
        "subjects": [{"kind": "ServiceAccount", "name": "c1", "namespace": "default"}],
    },
    "configmaps": {"data": {"a": "b"}, "binaryData": {"b": "aGVsbG8="}},
    "secrets": {"data": {"a": "aGVsbG8="}, "stringData": {"c": "d"}, "type": "Opaque"},
    "events": {"involvedObject": {"kind": "Pod", "name": "c1", "namespace": "default"}, "message": "m", "count": 1},
    "leases": {"spec": {"holderIdentity": "a", "leaseDurationSeconds": 5, "renewTime": "2024-01-01T00:00:00.000000Z"}},
    "resourcequotas": {"spec": {"hard": {"requests.storage": "5Gi", "persistentvolumeclaims": "3"}}},
    "services": {"spec": {"ports": [{"port": 80}], "selector": {"a": "b"}}},
    "poddisruptionbudgets": {"spec": {"minAvailable": 1, "selector": {"matchLabels": {"a": "b"}}}},
    "deployments": {
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [_CONTAINER]}},
        }
    },
    "customresourcedefinitions": {
        "metadata": {"name": "c1s.example.org"},
        "spec": {
            "group": "example.org",
            "scope": "Namespaced",
            "names": {"plural": "c1s", "kind": "C1"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {"specReplicasPath": ".spec.r", "statusReplicasPath": ".status.r"},
                    },
                    "additionalPrinterColumns": [{"name": "A", "type": "string", "jsonPath": ".spec.a"}],
                    "schema": {"openAPIV3Schema": _SCHEMA},
                }
            ],
        },
    },
}
C1 = Kind("example.org", "v1", "C1", "c1s", ANY, is_namespaced=True)
BASES["c1s"] = {"spec": {"a": "x", "l": [1], "m": {"k": "v"}, "n": 1, "r": 2}}
OTHER_PATHS = (
    "/",
    "/api",
    "/apis",
    "/apis/apps",
    "/api/v1",
    "/api/v2/pods",
    "/openapi/v2",
    "/openapi/v3",
    "/openapi/v3/api/v1",
    "/metrics",
    "/version",
    "/healthz/x",
    "/livez",
    "//",
    "/api//v1",
    "/%2e%2e/",
    "/apis/x/v1/y",
    "/openapi/v3/apis/a",
)
REVIEWS = (
    "authorization.k8s.io/v1/selfsubjectaccessreviews",
    "authorization.k8s.io/v1/subjectaccessreviews",
    "authentication.k8s.io/v1/tokenreviews",
    "authorization.k8s.io/v1/selfsubjectrulesreviews",
    "authentication.k8s.io/v1/selfsubjectreviews",
)
NAMES = ("c1", "c2", "c3", "", "UPPER", "..", "%2f", "a" * 300, "é", "system:x", "moorage")


class RandomRequests:
    """An endless sequence of requests that depends on its seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds = [*builtin_kinds(), C1]
        self._known = sorted((k for k in self._kinds if k.plural in BASES), key=lambda k: k.plural == C1.plural)

    def first(self) -> Iterator[tuple[str, Any]]:
        """Yield paths and objects that are valid, for the others to be mistaken about."""
        for kind in self._known:
            place = "/namespaces/default" if kind.is_namespaced else ""
            document = {"metadata": {"name": NAMES[0]}, **BASES[kind.plural]}
            yield f"{kind.root}{place}/{kind.plural}", document | {"apiVersion": kind.api_version, "kind": kind.name}

    def next(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Return method, path with query, body and headers."""
        choice, chance = self._random.choice, self._random.random
        kind = choice(self._known) if chance() < 0.8 else choice(self._kinds)
        method = choice(VERBS)
        path = self._path(kind, method)
        if chance() < 0.15:
            pairs = [(choice(QUERIES), choice(QUERY_VALUES)) for _ in range(self._random.randint(1, 3))]
            if method == "GET":
                pairs = [(name, value) for name, value in pairs if name not in ("watch", "follow")]
            path += "?" + "&".join(f"{name}={quote(value)}" for name, value in pairs)
        media = choice(MEDIA) if chance() < 0.1 else choice(MEDIA[3:7]) if method == "PATCH" else MEDIA[0]
        if media.endswith("apply-patch+yaml") and "?" not in path:
            path += "?fieldManager=me"
        body = b"" if method in ("GET", "HEAD") and chance() < 0.95 else self._body(kind, media)
        headers = {"Content-Type": media, "Accept": choice(ACCEPTS) if chance() < 0.15 else ""}
        if chance() < 0.08:
            headers.update([choice(HEADERS)])
        return method, path, body, headers

    def _path(self, kind: Kind, method: str) -> str:
        choice, chance = self._random.choice, self._random.random
        if chance() < 0.04:
            return choice(OTHER_PATHS)
        if chance() < 0.06:
            return "/apis/" + choice(REVIEWS)
        path = kind.root + ("/watch" if chance() < 0.03 and method != "GET" else "")
        if kind.is_namespaced and chance() < 0.95:
            path += "/namespaces/" + quote("default" if chance() < 0.95 else choice(("none", "kube-system", "é")))
        path += "/" + kind.plural
        if (method != "POST" and chance() < 0.85) or chance() < 0.2:
            own = "c1s.example.org" if kind.plural.startswith("customresource") else choice(NAMES[:3])
            path += "/" + (quote(choice(NAMES)) if chance() < 0.1 else own)
            if chance() < 0.12:
                path += "/" + choice(SUBRESOURCES)
        return path

    def _body(self, kind: Kind, media: str) -> bytes:
        chance = self._random.random
        if chance() < 0.04:
            return self._random.randbytes(self._random.randint(0, 60))
        if media == "application/json-patch+json":
            document: Any = [self._operation() for _ in range(self._random.randint(0, 4))]
        else:
            if kind.plural in BASES and chance() < 0.9:
                document = copy.deepcopy(BASES[kind.plural])
                for _ in range(self._random.choice((0, 1, 1, 2, 5))):
                    self._spoil(document)
            else:
                document = self._value(kind.type, 0)
            if isinstance(document, dict) and chance() < 0.9:
                document |= {"apiVersion": kind.api_version, "kind": kind.name}
                self._name(document)
        if chance() < 0.02:
            document = self._random.choice(VALUES)
        text = json.dumps(document)
        if chance() < 0.03:
            at = self._random.randrange(len(text))
            text = text[:at] + self._random.choice('{}[]",:\\\x00') + text[at + 1 :]
        prefix = b"k8s\x00" if media.endswith("protobuf") else b""
        return prefix + text.encode()

    def _name(self, document: dict[str, Any]) -> None:
        if "versions" in str(document.get("spec"))[:2000]:
            return  # a definition of a kind has the one name that fits
        meta = document.get("metadata")
        if isinstance(meta, dict) and self._random.random() < 0.95:
            kept = {key: value for key, value in meta.items() if key not in ("resourceVersion", "uid", "namespace")}
            document["metadata"] = {**kept, "name": self._random.choice(NAMES[:3])}
        elif meta is None:
            document["metadata"] = {"name": self._random.choice(NAMES[:3])}

    def _spoil(self, document: Any) -> None:
        """Replace, add or take away something within a document."""
        choice, chance = self._random.choice, self._random.random
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                return
            key = choice(keys)
            if isinstance(node[key], dict | list) and node[key] and chance() < 0.75:
                node = node[key]
                continue
            break
        if chance() < 0.1:
            del node[key]
        elif isinstance(node, list) and chance() < 0.3:
            node.append(copy.deepcopy(choice((*VALUES, node[key]))))
        else:
            node[key] = copy.deepcopy(choice(VALUES))

    def _operation(self) -> Any:
        choice = self._random.choice
        paths = (
            "",
            "/",
            "/metadata",
            "/metadata/labels",
            "/metadata/labels/a~1b",
            "/spec",
            "/spec/x/-",
            "/spec/containers/0",
            "/status",
            "/metadata/name",
            "/spec/containers/-1",
            "/data/a",
            "a",
            "/metadata/finalizers/-",
            "/rules/0",
            "/spec/containers/-",
        )
        step: dict[str, Any] = {
            "op": choice(("add", "remove", "replace", "move", "copy", "test", "x")),
            "path": choice(paths),
        }
        if self._random.random() < 0.8:
            step["value"] = choice(VALUES)
        if self._random.random() < 0.5:
            step["from"] = choice(paths)
        return step if self._random.random() < 0.97 else choice(VALUES)

    def _value(self, node: Type, depth: int) -> Any:
        """A value of a type, with some places where it is of another."""
        choice, chance = self._random.choice, self._random.random
        if depth > 9 or chance() < 0.03:
            return choice(VALUES)
        match node.shape:
            case "struct":
                share = 1.0 if depth < 1 else 0.6 if depth < 3 else 0.25
                found = {
                    name: self._value(field.type, depth + 1)
                    for name, field in node.fields.items()
                    if name not in ("status",) and (field.is_required or chance() < share)
                }
                if chance() < 0.02:
                    found[choice(("x", "", "$patch"))] = choice(VALUES)
                return found
            case "list":
                return [self._value(node.item or ANY, depth + 1) for _ in range(choice((0, 1, 1, 2)))]
            case "map":
                keys = ("a", "storage", "cpu", "x/y", "", "é", "metadata.name")
                return {choice(keys): self._value(node.item or ANY, depth + 1) for _ in range(choice((0, 1, 2)))}
            case "bool":
                return choice((True, False))
            case "int32" | "int64" | "byte" | "number":
                return choice((0, 1, 5, -1, 100000))
            case "quantity":
                return choice(("1Gi", "5", "0", "-1", "1.5", "1e3", 7))
            case "time" | "microtime":
                return choice(("2024-01-01T00:00:00Z", "2024-01-01T00:00:00.000000Z", None))
            case "bytes":
                return choice(("aGVsbG8=", "", "%%%"))
            case "any":
                return choice(VALUES)
        return choice(
            (
                "a",
                "c1",
                "default",
                "ReadWriteOnce",
                "Filesystem",
                "Retain",
                "x.example.org",
                "IfNotPresent",
                "NoExecute",
                "v1",
                "Pod",
            )
        )
