"""The attributes by which a request is authorized, as Kubernetes derives them from method, path and query.

Owns: `Attributes` and which verb a request counts as.
Start reading at: `resource_attributes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moorage.apiserver.errors import method_not_allowed
from moorage.apiserver.request.options import flag
from moorage.apiserver.request.routes import Route
from moorage.errors import InvalidRequest
from moorage.kube.selectors import FieldMatch

_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Attributes:
    """One action that a user asks for: a verb on a resource, or on a path that is no resource."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""


def resource_attributes(method: str, route: Route, query: Mapping[str, str]) -> Attributes:
    """Return the attributes of a request on a resource.

    Raises 405 if the method is not GET on a path of the old `/watch/` form: such a path must never stand for a write.
    """
    if route.is_watch and method != "GET":
        raise method_not_allowed()
    verb, name = _VERBS.get(method, ""), route.name
    if not name and verb == "get":
        verb = "watch" if flag(query, "watch") else "list"
        name = _selected_name(query.get("fieldSelector", ""))
    elif not name and verb == "delete":
        verb = "deletecollection"  # its selectors do not narrow what is authorized
    if route.is_watch:
        verb = "watch"
    namespace = route.namespace
    if (route.group, route.plural) == ("", "namespaces"):
        namespace = route.name  # a Role within a namespace may grant access to the Namespace object itself
    return Attributes(verb, route.group, route.plural, route.subresource, namespace, name)


def path_attributes(method: str, path: str) -> Attributes:
    """Return the attributes of a request on a path that is no resource, such as `/metrics`."""
    return Attributes(method.lower(), path=path)


def _selected_name(selector: str) -> str:
    """Return the name that a field selector requires; an empty string if it requires none."""
    if "metadata.name" not in selector:
        return ""
    try:
        terms = FieldMatch.parse(selector).terms
    except InvalidRequest:
        return ""
    return next((value for path, value, is_equal in terms if path == "metadata.name" and is_equal), "")
