"""What a check is, what came of it, and the ways in which a driver breaks a promise.

Owns: the registry of checks and the types of results. They know neither gRPC nor a terminal.
Start reading at: `Check`, `check`, `CheckResult`.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moorage.csi.errors import CsiError
from moorage.errors import UsageError

if TYPE_CHECKING:
    from moorage.conformance.bench import Bench

CheckBody = Callable[["Bench"], Awaitable[None]]

MIB = 1024 * 1024


class Stage(StrEnum):
    """When a check runs. Inside `QUICK` and `PARALLEL` the order is shuffled."""

    BASIC = "basic"  # first and in order: other checks rely on what these promise
    QUICK = "quick"  # one at a time, because it takes no time and a crash is then blamed on the right call
    PARALLEL = "parallel"
    ALONE = "alone"  # nothing else runs, because the check counts, or kills the driver
    LAST = "last"  # looks at what the run has left, and at all answers


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the driver does not claim what the check is about
    NOT_RUN = "not run"  # what the check relies on has failed; that failure is reported once
    FOLLOW_UP = "follow-up"  # it failed as well, and that follows from a failure that is reported


class FailureKind(StrEnum):
    """How a promise was broken."""

    WRONG_ANSWER = "wrong answer"
    CRASH = "crash"
    HANG = "hang"
    LEFTOVER = "leftover"


class CheckFailed(Exception):
    """The driver did not keep the rule: what came, and what was expected if the rule alone does not say it."""

    kind = FailureKind.WRONG_ANSWER

    def __init__(self, got: str, expected: str = "") -> None:
        super().__init__(got)
        self.got = got
        self.expected = expected


class DriverHung(CheckFailed):
    """A call did not return within its deadline."""

    kind = FailureKind.HANG

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} did not return within {timeout_s:g} s")
        self.what = what


class DriverCrashed(CheckFailed):
    """The connection to the driver was lost during a call."""

    kind = FailureKind.CRASH

    def __init__(self, method: str) -> None:
        super().__init__(f"the driver crashed during {method}: the connection was lost before an answer came")
        self.method = method


class LeftBehind(CheckFailed):
    """The driver left something where the check had it work."""

    kind = FailureKind.LEFTOVER


class CheckSkipped(Exception):
    """The check does not apply to this driver. The message tells why."""


class NotMet(Exception):
    """A step that the check relies on failed. The check `owner` is about that step."""

    def __init__(self, owner: str, cause: CheckFailed | CsiError) -> None:
        super().__init__(f"{owner} failed")
        self.owner = owner
        self.cause = cause


@dataclass(frozen=True)
class Check:
    """One rule of the contract. `needs` are capabilities, or conditions of the run such as `run:restart`."""

    id: str
    rule: str
    body: CheckBody
    needs: tuple[str, ...] = ()
    stage: Stage = Stage.PARALLEL


@dataclass(frozen=True)
class Exchange:
    """One call: what was sent, what came back, and the command that repeats it. No secret is in it."""

    method: str
    request: str
    command: str
    code: str = ""
    answer: str = ""
    seconds: float = 0.0
    is_cleanup: bool = False


@dataclass(frozen=True)
class CheckResult:
    """How one check went."""

    id: str
    rule: str
    result: Outcome
    kind: FailureKind | None = None
    expected: str = ""
    detail: str = ""
    because: str = ""  # id of the failed check that this one relies on, or follows from
    seconds: float = 0.0
    calls: tuple[Exchange, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckConfig:
    """What a person may set: sizes, parameters, and where the driver may mount."""

    endpoint: str
    workdir: Path
    size_bytes: int = 64 * MIB
    grown_bytes: int = 128 * MIB
    parameters: dict[str, str] = field(default_factory=dict)
    snapshot_parameters: dict[str, str] = field(default_factory=dict)
    mutable_parameters: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    fs_type: str = ""
    block: bool = False
    timeout_s: float = 60.0
    jobs: int = 6
    seed: int = 0
    restart_command: str = ""


REGISTRY: dict[str, Check] = {}


def check(id: str, rule: str, *needs: str, stage: Stage = Stage.PARALLEL) -> Callable[[CheckBody], CheckBody]:
    """Register a check under a stable id, `Method.rule` or `Subject.rule`."""

    def register(body: CheckBody) -> CheckBody:
        add(Check(id, rule, body, needs, stage))
        return body

    return register


def add(one: Check) -> None:
    """Register a check. An id is used once."""
    if one.id in REGISTRY:
        raise ValueError(f"two checks are called {one.id}")
    REGISTRY[one.id] = one


def selected(only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[Check]:
    """Return the checks whose id matches a pattern of `only` (all, if there is none) and none of `skip`.

    Raises UsageError for a pattern that matches nothing.
    """
    from moorage.conformance import checks  # fills REGISTRY

    checks.load()
    only, skip = list(only), list(skip)
    for pattern in (*only, *skip):
        if not any(_matches(one.id, pattern) for one in REGISTRY.values()):
            raise UsageError(f"no check matches {pattern!r}; `moorage check --list` shows them all")
    return [
        one
        for one in REGISTRY.values()
        if (not only or any(_matches(one.id, pattern) for pattern in only))
        and not any(_matches(one.id, pattern) for pattern in skip)
    ]


def _matches(id: str, pattern: str) -> bool:
    return fnmatchcase(id.lower(), pattern.lower())


def require(holds: bool, got: str, expected: str = "") -> None:
    """Fail the check with a sentence unless the condition holds."""
    if not holds:
        fail(got, expected)


def fail(got: str, expected: str = "") -> NoReturn:
    raise CheckFailed(got, expected)
