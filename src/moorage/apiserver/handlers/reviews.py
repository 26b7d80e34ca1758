"""Questions that are asked by creating an object: may I, who am I, whose token is this; and tokens for accounts.

Owns: the review kinds and serviceaccounts/token.
May not touch: stored objects, except to read an account.
Start reading at: `Reviews.answer`.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from moorage.apiserver.access.attributes import Attributes
from moorage.apiserver.access.authentication import ISSUER, Authenticator, User
from moorage.apiserver.access.authorization import Authorizer
from moorage.apiserver.documents.discovery import REVIEWS
from moorage.apiserver.errors import bad_request, conflict, invalid, invalid_value, method_not_allowed, not_found
from moorage.apiserver.kinds.metadata import now_text
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.request.messages import Answer, Sent
from moorage.apiserver.request.options import Call
from moorage.apiserver.request.routes import Route
from moorage.apiserver.store.store import Store, decode, encode

_PLURALS = {(group, plural): name for group, _, name, plural, _ in REVIEWS if group}


class Reviews:
    """Answers that are not stored."""

    def __init__(self, store: Store, authenticator: Authenticator, authorizer: Authorizer) -> None:
        self._store = store
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._answers: dict[str, Callable[[Object, User, str], Object]] = {
            "TokenReview": self._token_review,
            "SelfSubjectReview": self._who_am_i,
            "SelfSubjectAccessReview": self._may_i,
            "SubjectAccessReview": self._may_they,
            "LocalSubjectAccessReview": self._may_they,
            "SelfSubjectRulesReview": self._rules,
        }

    def answer(self, route: Route, call: Call | None, sent: Sent, user: User) -> Awaitable[Answer] | None:
        if (route.plural, route.subresource) == ("serviceaccounts", "token") and not route.group:
            return self._issue(route, sent)
        name = _PLURALS.get((route.group, route.plural))
        if name is None or route.version != "v1":
            return None
        return self._review(name, route, sent, user)

    async def _review(self, name: str, route: Route, sent: Sent, user: User) -> Answer:
        if sent.method != "POST":
            raise method_not_allowed()
        body = sent.document()
        if not isinstance(body, dict) or not isinstance(body.get("spec") or {}, dict):
            raise bad_request(f"{name} must be an object with a spec")
        spec = body.get("spec") or {}
        status = self._answers[name](spec, user, route.namespace)
        meta = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
        answer = {
            "kind": name,
            "apiVersion": f"{route.group}/v1",
            "metadata": meta or {},
            "spec": spec,
            "status": status,
        }
        return Answer(encode(answer), 201)

    def _token_review(self, spec: Object, _user: User, _namespace: str) -> Object:
        token = spec.get("token")
        audiences = _audiences(spec) or [ISSUER]
        found = self._authenticator.user_of(token, audiences) if isinstance(token, str) else None
        if found is None:
            return {"authenticated": False, "user": {}, "error": "the token is not valid for these audiences"}
        return {"authenticated": True, "user": _user_info(found[0]), "audiences": found[1]}

    def _who_am_i(self, _spec: Object, user: User, _namespace: str) -> Object:
        return {"userInfo": _user_info(user)}

    def _may_i(self, spec: Object, user: User, namespace: str) -> Object:
        return self._verdict(user, spec, namespace)

    def _may_they(self, spec: Object, _user: User, namespace: str) -> Object:
        groups = tuple(str(group) for group in spec.get("groups") or [])
        return self._verdict(User(str(spec.get("user") or ""), groups), spec, namespace)

    def _verdict(self, user: User, spec: Object, namespace: str) -> Object:
        resource, path = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
        if isinstance(resource, dict):
            asked = Attributes(
                verb=str(resource.get("verb") or ""),
                group=str(resource.get("group") or ""),
                resource=str(resource.get("resource") or ""),
                subresource=str(resource.get("subresource") or ""),
                namespace=namespace or str(resource.get("namespace") or ""),
                name=str(resource.get("name") or ""),
            )
        elif isinstance(path, dict):
            asked = Attributes(verb=str(path.get("verb") or ""), path=str(path.get("path") or ""))
        else:
            raise bad_request("spec: exactly one of nonResourceAttributes or resourceAttributes must be specified")
        return {"allowed": self._authorizer.decide(user, asked)}

    def _rules(self, spec: Object, user: User, _namespace: str) -> Object:
        rules = list(self._authorizer.rules_of(user, str(spec.get("namespace") or "")))
        resource = [
            {key: value for key, value in rule.document().items() if key != "nonResourceURLs"}
            for rule in rules
            if rule.resources
        ]
        other = [{"verbs": sorted(rule.verbs), "nonResourceURLs": sorted(rule.urls)} for rule in rules if rule.urls]
        return {"resourceRules": resource, "nonResourceRules": other, "incomplete": False}

    async def _issue(self, route: Route, sent: Sent) -> Answer:
        """A token for a ServiceAccount, bound to an object where that is asked for."""
        if sent.method != "POST":
            raise method_not_allowed()
        record = self._store.get("serviceaccounts", route.namespace, route.name)
        if record is None:
            raise not_found("serviceaccounts", "", route.name)
        body = sent.document()
        spec = (body.get("spec") or {}) if isinstance(body, dict) else None
        if not isinstance(spec, dict):
            raise bad_request("TokenRequest must be an object with a spec")
        seconds = spec.get("expirationSeconds") or 3600
        audiences = _audiences(spec)
        if not isinstance(seconds, int) or isinstance(seconds, bool):
            raise bad_request("TokenRequest.spec.expirationSeconds must be a number")
        if not 600 <= seconds <= _LONGEST_S:
            why = "may not specify a duration less than 10 minutes or larger than 2^32 seconds"
            error = invalid_value("spec.expirationSeconds", seconds, why)
            raise invalid("TokenRequest", "authentication.k8s.io", route.name, [error])
        bound = self._bound(route, spec.get("boundObjectRef"))
        meta = decode(record.body)["metadata"]
        account = {"namespace": route.namespace, "name": route.name, "uid": meta["uid"]}
        token, end = self._authenticator.issue(account, audiences, seconds, bound)
        expires = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": route.name, "namespace": route.namespace, "creationTimestamp": now_text()},
            "spec": {**spec, "audiences": audiences or [ISSUER], "expirationSeconds": seconds},
            "status": {"token": token, "expirationTimestamp": expires},
        }
        return Answer(encode(answer), 201)

    def _bound(self, route: Route, ref: Any) -> Object | None:
        """Return the object that a token shall be bound to, with its uid; None if it is to be bound to none."""
        if ref is None:
            return None
        if not isinstance(ref, dict):
            raise bad_request("TokenRequest.spec.boundObjectRef must be an object")
        stored = {"Pod": ("pods", route.namespace), "Secret": ("secrets", route.namespace), "Node": ("nodes", "")}
        resource, where = stored.get(str(ref.get("kind")), ("", ""))
        if not resource:
            raise bad_request(f"cannot bind token for serviceaccount to object of kind {str(ref.get('kind'))[:60]!r}")
        record = self._store.get(resource, where, str(ref.get("name") or ""))
        if record is None:
            raise not_found(resource, "", str(ref.get("name") or ""))
        obj = decode(record.body)
        uid = obj["metadata"]["uid"]
        if resource == "pods" and obj["spec"].get("serviceAccountName") != route.name:
            what = f'cannot bind token for serviceaccount "{route.name}"'
            raise bad_request(f"{what} to pod running with different serviceaccount name.")
        if ref.get("uid") not in (None, "", uid):
            raise conflict(
                resource,
                "",
                str(ref.get("name")),
                f"the UID in the bound object reference ({ref['uid']}) does not match the UID in record.",
            )
        return {"kind": ref["kind"], "name": obj["metadata"]["name"], "uid": uid}


_LONGEST_S = 1 << 32


def _audiences(spec: Object) -> list[str]:
    audiences = spec.get("audiences") or []
    if not isinstance(audiences, list) or not all(isinstance(one, str) and one for one in audiences):
        raise bad_request("spec.audiences must be a list of strings")
    return audiences


def _user_info(user: User) -> Object:
    info: Object = {"username": user.name, "groups": list(user.groups), **({"uid": user.uid} if user.uid else {})}
    for key, value in user.extra:
        info.setdefault("extra", {}).setdefault(key, []).append(value)
    return info
