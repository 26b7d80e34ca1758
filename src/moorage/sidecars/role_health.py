"""How each role of a process is doing, for `/healthz/ROLE`.

Owns: the last word on every role. Whether the driver answers is the liveness probe's to say, not a role's.
Start reading at: `RoleHealth.check`.
"""

from collections.abc import Iterable

from moorage.sidecars.roles import Role


class RoleHealth:
    """Which roles are at work (or wait for their lease), and why the others are not."""

    def __init__(self) -> None:
        self._trouble: dict[Role, str] | None = None  # by role that is to run; empty when it is well

    def expect(self, roles: Iterable[Role]) -> None:
        """These roles run from now on, and no others."""
        known = self._trouble or {}
        self._trouble = {role: known.get(role, "") for role in roles}

    def expect_nothing(self) -> None:
        """The driver is gone: which roles it calls for is not known until it has been asked again."""
        self._trouble = None

    def note(self, roles: Iterable[Role], trouble: str = "") -> None:
        """The roles have begun to work, or ended with some trouble."""
        for role in roles:
            if self._trouble is not None and role in self._trouble:
                self._trouble[role] = trouble

    def check(self, role: Role) -> tuple[int, str]:
        """200 and `ok`; 500 and why the role does not work; 404 when it is not run here."""
        if self._trouble is None:
            return 500, "the driver has not said what it can do"
        if role not in self._trouble:
            return 404, f"role {role} is not run here"
        trouble = self._trouble[role]
        return (500, trouble) if trouble else (200, "ok")
