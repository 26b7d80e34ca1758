"""What the manifests allow an account, beside what it asked for."""

from collections.abc import Iterable

from real_stage import Request

Right = tuple[str, str, str, str]  # verb, group, resource (with its subresource), where: a namespace, or "" for all


def rights_of(objects: list[dict], account: str) -> set[Right]:
    """Every single right that the objects give to an account `system:serviceaccount:NAMESPACE:NAME`."""
    _, _, namespace, name = account.split(":")
    rights: set[Right] = set()
    for binding in objects:
        subjects = binding.get("subjects", []) if binding["kind"] in ("ClusterRoleBinding", "RoleBinding") else []
        if not any((s["namespace"], s["name"]) == (namespace, name) for s in subjects):
            continue
        where = binding["metadata"].get("namespace", "")
        for rule in _rules(objects, binding["roleRef"], where):
            assert "*" not in [*rule["verbs"], *rule["apiGroups"], *rule["resources"]], f"{account}: {rule}"
            rights |= {(v, g, r, where) for v in rule["verbs"] for g in rule["apiGroups"] for r in rule["resources"]}
    return rights


def _rules(objects: list[dict], ref: dict, namespace: str) -> list[dict]:
    wanted = (ref["kind"], ref["name"], namespace if ref["kind"] == "Role" else "")
    (role,) = [o for o in objects if (o["kind"], o["metadata"]["name"], o["metadata"].get("namespace", "")) == wanted]
    return role["rules"]


def check_rights(objects: list[dict], account: str, requests: Iterable[Request]) -> None:
    """Every right was used."""
    idle = unused(rights_of(objects, account), requests)
    assert not idle, f"{account} has rights that nothing uses: {sorted(idle)}"


def unused(rights: set[Right], requests: Iterable[Request]) -> set[Right]:
    """Rights that none of the requests needed."""
    return rights - {right for request in requests for right in _needs(request)}


def _needs(request: Request) -> list[Right]:
    verb, group, resource, subresource, namespace, _ = request
    full = f"{resource}/{subresource}" if subresource else resource
    verbs = (
        [verb, "list"] if verb == "watch" else [verb]
    )  # servers that cannot begin a watch with a list are asked for one
    return [(v, group, full, where) for v in verbs for where in (namespace, "")]
