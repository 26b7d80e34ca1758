"""Whether each role of a process works, for `/healthz/ROLE`.

Owns: the last failure of every role. The liveness probe reports whether the driver answers.
Start reading at: `RoleHealth.check`.
"""

from collections.abc import Iterable

from moorage.sidecars.roles import Role


class RoleHealth:
    """Which roles work or wait for their lease, and why the others do not."""

    def __init__(self) -> None:
        self._trouble: dict[Role, str] | None = None  # by role that is to run; empty when it is well

    def expect(self, roles: Iterable[Role]) -> None:
        """Expect these roles to run from now on, and no others."""
        known = self._trouble or {}
        self._trouble = {role: known.get(role, "") for role in roles}

    def expect_nothing(self) -> None:
        """Expect no role: the driver is gone, and what it can do is unknown until it is asked again."""
        self._trouble = None

    def note(self, roles: Iterable[Role], trouble: str = "") -> None:
        """Record that roles have started, or why they have ended."""
        for role in roles:
            if self._trouble is not None and role in self._trouble:
                self._trouble[role] = trouble

    def check(self, role: Role) -> tuple[int, str]:
        """Return 200 and `ok`, 500 and why the role does not work, or 404 if it is not run here."""
        if self._trouble is None:
            return 500, "the driver has not said what it can do"
        if role not in self._trouble:
            return 404, f"role {role} is not run here"
        trouble = self._trouble[role]
        return (500, trouble) if trouble else (200, "ok")
