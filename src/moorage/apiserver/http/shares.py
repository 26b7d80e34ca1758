"""What one account may have at a time: connections, requests and watches.

Owns: counting them, and refusing what is more than an account's share.
Start reading at: `Shares.of`.

The ServiceAccounts of a namespace have one share together, because a user who may create one account may create a
thousand. Administrators have no limit, so that they can always look.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from moorage.apiserver.access.authentication import User, account_of
from moorage.apiserver.errors import too_many
from moorage.apiserver.http.listen import Connection
from moorage.apiserver.limits import ServerLimits


class Shares:
    """The shares of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._requests: Counter[str] = Counter()
        self._watches: Counter[str] = Counter()

    @contextmanager
    def of(self, request: web.BaseRequest, user: User) -> Iterator[None]:
        """Count a request while it lasts. Raises 429 if the user has its share already."""
        if user.is_admin:
            self._seat(request, "", is_bounded=False)
            yield
            return
        share = _share_of(user)
        self._seat(request, share, is_bounded=True)
        is_watch = "watch" in request.rel_url.raw_path or "watch" in request.rel_url.query
        counter = self._watches if is_watch else self._requests
        most = self._limits.watches_of_account if is_watch else self._limits.requests_of_account
        if counter[share] >= most:
            raise too_many("too many requests of this account at a time, please try again later", 1)
        counter[share] += 1
        try:
            yield
        finally:
            counter[share] -= 1
            if not counter[share]:
                del counter[share]

    def _seat(self, request: web.BaseRequest, share: str, is_bounded: bool) -> None:
        connection = request.protocol
        if isinstance(connection, Connection) and not connection.place.give(share, is_bounded):
            connection.close()  # after this answer
            raise too_many("too many connections of this account, please try again later", 5)


def _share_of(user: User) -> str:
    account = account_of(user.name)
    return f"namespace {account[0]}" if account else f"user {user.name}"
