"""What the gRPC services have in common.

Owns: UNIMPLEMENTED for what is not served, the lock of each object, and handing a call to its operation.
Start reading at: `Service`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

from moorage.csi.errors import NotServed
from moorage.csi.inflight import InFlight
from moorage.sdk.model import Secrets
from moorage.sdk.operations import Answer, BlockingCalls, ControllerOperations, NodeOperations, secrets_of_call

O = TypeVar("O", ControllerOperations, NodeOperations)  # noqa: E741  # operations
P = ParamSpec("P")
T = TypeVar("T")


class Service(Generic[O]):
    """CSI messages in, operations out."""

    def __init__(self, operations: O, in_flight: InFlight, work: BlockingCalls) -> None:
        self._operations: O = operations
        self._in_flight = in_flight
        self._work = work

    def _need(self, *operations: str) -> None:
        """Raise UNIMPLEMENTED unless these are served."""
        if not self._operations.serves(*operations):
            raise NotServed(self._operations.why_not_served)

    def _claim(self, request: Any, key: str) -> AbstractContextManager[None]:
        """Hold an object for the length of the block. Raises OperationPending if another call has it."""
        return self._in_flight.claim(type(request).__name__.removesuffix("Request"), key)

    async def _run(self, request: Any, call: Callable[P, Answer[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        secrets_of_call.set(Secrets(getattr(request, "secrets", {})))
        return await self._work.run(call, *args, **kwargs)
