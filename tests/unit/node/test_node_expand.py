"""Growing on the node: what the claim's status allows, what the driver answers, what users are told."""

from dataclasses import replace

import pytest
from msgspec import convert

from moorage.csi.errors import CsiError
from moorage.kube.api.client import PatchType
from moorage.kube.errors import ApiError
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.kube.volumes import csi_volume_name
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.volumes import rules
from moorage.node.volumes.expand import Grower
from moorage.node.volumes.plan import wants_growth
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import (
    ActualPod,
    ActualVolume,
    CsiSource,
    Expand,
    MountState,
    MountVolume,
    PodRef,
    StepFailure,
    StepOutcome,
    VolumeState,
    VolumeUse,
    settle,
)

GI = 1 << 30
SOURCE = CsiSource("d", "h", "pv", claim="ns/c", access_modes=("ReadWriteOnce",), fs_type="ext4")
NAME = csi_volume_name("d", "h")
ONE = PodUid("uid-p")
PENDING = {"allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}


def use(**fields):
    sizes = {"size_bytes": 2 * GI, "claim_size_bytes": GI}
    return VolumeUse(NAME, PodRef(ONE, "ns", "p"), fields.pop("source", SOURCE), ("data",), **{**sizes, **fields})


def merged(document, patch):
    if not isinstance(patch, dict):
        return patch
    found = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class Api:
    """One claim, patched as an API server does it."""

    def __init__(self, status, request="2Gi", modes=("ReadWriteOnce",), annotations=None):
        self.document = {
            "metadata": {"name": "c", "namespace": "ns", "annotations": annotations or {}, "resourceVersion": "1"},
            "spec": {"accessModes": list(modes), "resources": {"requests": {"storage": request}}},
            "status": {"capacity": {"storage": "1Gi"}, **status},
        }
        self.patches, self.fails = [], False

    @property
    def status(self):
        return self.document["status"]

    @property
    def conditions(self):
        return [one["type"] for one in self.status.get("conditions", [])]

    async def find(self, kind, name, namespace):
        if self.fails:
            raise ApiError(500, "InternalError", "no answer")
        return convert(self.document, PersistentVolumeClaim)

    async def patch(self, kind, name, body, namespace, *, how=PatchType.MERGE, subresource, version=""):
        assert (subresource, version in ("", "1")) == ("status", True)
        self.patches.append((body["status"], bool(version)))
        if how is PatchType.STRATEGIC and "conditions" in body["status"]:  # a list of them is merged by type
            by_type = {one["type"]: one for one in (*self.status.get("conditions", []), *body["status"]["conditions"])}
            body = {"status": {**body["status"], "conditions": list(by_type.values())}}
        self.document = merged(self.document, body)
        return convert(self.document, PersistentVolumeClaim)


class Driver:
    """Grows, or answers with an error code."""

    def __init__(self, *codes, capabilities=(rules.STAGE, rules.EXPAND)):
        self.codes, self.asked, self._capabilities = list(codes), [], frozenset(capabilities)
        self.client = self
        self.meanwhile = lambda: None

    async def capabilities(self):
        return self._capabilities

    async def NodeExpandVolume(self, request):
        self.asked.append(request)
        self.meanwhile()
        if self.codes:
            raise CsiError("NodeExpandVolume", self.codes.pop(0), "scripted")

    def get(self, name):
        return self

    async def secret(self, reference):
        if reference == "missing":
            raise StepFailed(StepFailure.TRANSIENT, "device", "secret cannot be used")
        return {"key": reference} if reference else {}

    def remember(self, claim):
        """As an informer does."""


class Events(list):
    """(about, type, reason) of each."""

    def normal(self, about, reason, message):
        self.append((type(about).__name__, "Normal", reason))

    def warning(self, about, reason, message):
        self.append((type(about).__name__, "Warning", reason))


class Bench:
    def __init__(self, tmp_path, api, driver):
        self.api, self.driver, self.events = api, driver, Events()
        self.layout = NodeLayout(tmp_path)
        self.grower = Grower(self.layout, api, driver, driver, driver, self.events)
        self.world = VolumeState()
        self.volume = self.world.actual[NAME] = ActualVolume(NAME, SOURCE, device=MountState.MOUNTED)
        self.volume.pods[ONE] = ActualPod(MountState.MOUNTED)

    async def grow(self, **fields):
        one = use(**fields)
        outcome = await self.grower.grow(one, self.volume)
        settle(self.world, Expand(one), outcome, now=0.0)
        return outcome

    async def at_mount(self, state=MountState.ABSENT, **fields):
        one = use(**fields)
        self.volume.pods[ONE] = ActualPod(state)
        grown = await self.grower.grow_at_mount(one, self.volume)
        outcome = StepOutcome(
            staged=True, published=True, size_bytes=grown.size_bytes, growth_refused=grown.growth_refused
        )
        settle(self.world, MountVolume(one), outcome, now=0.0)
        return grown


@pytest.fixture
def bench(tmp_path):
    def make(status=PENDING, *codes, capabilities=(rules.STAGE, rules.EXPAND), **claim):
        return Bench(tmp_path, Api(status, **claim), Driver(*codes, capabilities=capabilities))

    return make


async def test_success_is_written_into_the_claim_step_by_step(bench):
    errors = [{"type": kind, "status": "True"} for kind in ("FileSystemResizePending", "NodeResizeError", "Other")]
    one = bench({**PENDING, "conditions": errors})
    assert (await one.grow()).failure is None
    (started, is_checked), (ended, also_checked) = one.api.patches
    assert started == {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}
    assert is_checked
    assert also_checked
    assert one.api.status["capacity"] == {"storage": "2Gi"}
    assert one.api.status["allocatedResourceStatuses"] == {}
    assert one.api.status["allocatedResources"] == {"storage": "2Gi"}  # stays
    assert one.api.conditions == ["Other"]
    assert ended["conditions"] == [{"type": "Other", "status": "True"}]
    assert one.volume.size_bytes == 2 * GI
    reason = "FileSystemResizeSuccessful"
    assert one.events == [("ObjectReference", "Normal", reason), ("PersistentVolumeClaim", "Normal", reason)]


async def test_the_driver_is_asked_with_all_that_it_needs(bench):
    one = bench()
    await one.grow(source=replace(SOURCE, expand_secret="s"))
    (request,) = one.driver.asked
    assert request.volume_path == str(one.layout.publish_target(ONE, "pv"))
    assert request.staging_target_path == str(one.layout.staging_target("d", "h"))
    assert request.capacity_range.required_bytes == 2 * GI
    assert request.volume_capability.mount.fs_type == "ext4"
    assert dict(request.secrets) == {"key": "s"}
    block = bench()
    await block.grow(source=replace(SOURCE, is_block=True))
    assert block.driver.asked[0].volume_path == str(one.layout.block_map("pv", ONE))
    assert block.driver.asked[0].staging_target_path == str(one.layout.block_staging("pv"))


async def test_the_target_is_what_was_allocated_not_what_the_volume_or_the_user_says(bench):
    one = bench(request="5Gi")
    await one.grow(size_bytes=3 * GI)
    assert one.driver.asked[0].capacity_range.required_bytes == 2 * GI
    assert one.api.status["capacity"] == {"storage": "2Gi"}


async def test_a_resizer_that_keeps_no_state_gets_none_and_a_crash_leaves_no_size_of_zero(bench):
    one = bench({})
    await one.grow()
    ((written, _),) = one.api.patches
    assert written["capacity"] == {"storage": "2Gi"}
    assert one.driver.asked[0].capacity_range.required_bytes == 2 * GI
    cut = bench({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}})
    await cut.grow()
    assert cut.driver.asked[0].capacity_range.required_bytes == 2 * GI


@pytest.mark.parametrize("state", ["ControllerResizeInProgress", "ControllerResizeInfeasible", "NodeResizeInfeasible"])
async def test_any_other_state_means_not_now(bench, state):
    one = bench({**PENDING, "allocatedResourceStatuses": {"storage": state}})
    assert (await one.grow()).failure is StepFailure.TRANSIENT
    assert (one.driver.asked, one.api.patches) == ([], [])
    assert (await one.at_mount()).failure is None  # and does not keep the pod from starting
    assert one.volume.size_bytes == GI


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND"])
async def test_what_can_never_be_done_is_infeasible(bench, code):
    one = bench(PENDING, code)
    assert (await one.grow()).failure is not None
    assert one.api.status["allocatedResourceStatuses"] == {"storage": "NodeResizeInfeasible"}
    assert one.api.conditions == ["NodeResizeError"]
    assert not one.api.patches[-1][1]  # told whatever else has been written meanwhile


@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "UNKNOWN"])
async def test_any_other_error_is_told_and_tried_again(bench, code):
    one = bench(PENDING, code)
    outcome = await one.grow()
    assert (outcome.failure, outcome.growth_refused) == (StepFailure.TRANSIENT, False)
    assert one.api.status["allocatedResourceStatuses"] == {"storage": "NodeResizeInProgress"}
    assert one.api.conditions == ["NodeResizeError"]
    assert [reason for _, _, reason in one.events] == ["VolumeResizeFailed"]
    assert wants_growth(one.volume, use())
    assert one.volume.backoffs["expand", ""].until == 0.5
    assert (await one.grow()).failure is None
    assert one.api.conditions == []


@pytest.mark.parametrize(
    ("first", "second", "request_size", "state"),
    [
        ("INTERNAL", "INTERNAL", "3Gi", "NodeResizeInfeasible"),
        ("INTERNAL", "UNAVAILABLE", "3Gi", "NodeResizeInfeasible"),
        ("INTERNAL", "INTERNAL", "2Gi", "NodeResizeInProgress"),
        ("UNAVAILABLE", "INTERNAL", "3Gi", "NodeResizeInProgress"),
    ],
)
async def test_a_target_that_nobody_wants_any_more_is_given_up_after_a_final_error(
    bench, first, second, request_size, state
):
    one = bench(PENDING, first, second, request=request_size)
    await one.grow()
    assert one.api.status["allocatedResourceStatuses"] == {"storage": "NodeResizeInProgress"}
    await one.grow()
    assert one.api.status["allocatedResourceStatuses"] == {"storage": state}


@pytest.mark.parametrize("ends", ["the volume goes", "it has grown elsewhere", "it has grown here"])
async def test_a_final_error_is_forgotten_when_what_it_was_about_is_over(bench, ends):
    one = bench(PENDING, "INTERNAL", request="3Gi")
    await one.grow()
    before = one.api.document["status"]
    if ends == "the volume goes":
        one.grower.forget(NAME)
    elif ends == "it has grown elsewhere":
        one.api.document["status"] = DONE
        assert (await one.grow()).failure is None
    else:
        assert (await one.grow()).failure is None
    one.api.document["status"] = before
    one.driver.codes = ["INTERNAL"]
    await one.grow()
    assert one.api.status["allocatedResourceStatuses"] == {"storage": "NodeResizeInProgress"}  # as after a first error


async def test_a_refusal_leaves_the_conditions_that_others_wrote_during_the_call(bench):
    one = bench({**PENDING, "conditions": [{"type": "FileSystemResizePending", "status": "True"}]}, "INTERNAL")

    def write():
        one.api.status["conditions"] = [{"type": "ModifyingVolume", "status": "True"}]

    one.driver.meanwhile = write
    await one.grow()
    assert one.api.conditions == ["ModifyingVolume", "NodeResizeError"]


async def test_a_volume_that_cannot_grow_in_use_is_left_alone_here_and_the_pod_starts(bench):
    one = bench(PENDING, "FAILED_PRECONDITION")
    grown = await one.at_mount()  # does not raise: the pod starts
    assert grown.growth_refused
    assert one.volume.growth_refused
    assert one.volume.state_of(ONE) is MountState.MOUNTED
    assert one.api.conditions == ["NodeResizeError"]
    assert one.api.status["allocatedResourceStatuses"] == {"storage": "NodeResizeInProgress"}
    assert not wants_growth(one.volume, use())


@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE", "OUT_OF_RANGE"])
async def test_any_other_failure_at_mount_keeps_the_pod_waiting(bench, code):
    one = bench(PENDING, code)
    with pytest.raises(StepFailed) as caught:
        await one.at_mount()
    assert caught.value.failure is StepFailure.UNCERTAIN


async def test_an_api_server_that_does_not_answer_keeps_the_pod_waiting_too(bench):
    one = bench()
    one.api.fails = True
    with pytest.raises(StepFailed, match="cannot be served") as caught:
        await one.at_mount()
    assert caught.value.failure is StepFailure.UNCERTAIN


async def test_a_driver_without_the_capability_is_an_error_that_users_see(bench):
    one = bench(capabilities=(rules.STAGE,))
    assert (await one.grow()).failure is not None
    assert one.driver.asked == []
    assert one.api.conditions == ["NodeResizeError"]
    assert [reason for _, _, reason in one.events] == ["VolumeResizeFailed"]
    with pytest.raises(StepFailed, match="cannot grow volumes"):
        await one.at_mount()


async def test_a_missing_secret_is_told_of(bench):
    one = bench()
    with pytest.raises(StepFailed):
        await one.grower.grow(use(source=replace(SOURCE, expand_secret="missing")), one.volume)
    assert [reason for _, _, reason in one.events] == ["VolumeResizeFailed"]
    assert one.driver.asked == []


DONE = {"capacity": {"storage": "2Gi"}, "allocatedResources": {"storage": "2Gi"}}


async def test_a_shared_volume_grows_on_every_node_although_the_claim_is_done(bench):
    one = bench(DONE, modes=("ReadWriteMany",))
    one.volume.size_bytes = GI
    assert wants_growth(one.volume, use(claim_size_bytes=2 * GI))
    await one.grow(claim_size_bytes=2 * GI)
    assert len(one.driver.asked) == 1
    assert one.api.patches == []
    assert [reason for _, _, reason in one.events] == ["FileSystemResizeSuccessful"] * 2
    assert not wants_growth(one.volume, use(claim_size_bytes=2 * GI))


async def test_publishing_again_does_not_make_the_node_forget_that_it_has_yet_to_grow(bench):
    """Another node was first: the claim says 2Gi, but this node has done nothing yet."""
    one = bench(DONE, modes=("ReadWriteMany",))
    one.volume.size_bytes = GI
    await one.at_mount(state=MountState.MOUNTED, claim_size_bytes=2 * GI)
    assert one.volume.size_bytes == GI
    assert wants_growth(one.volume, use(claim_size_bytes=2 * GI))


@pytest.mark.parametrize(
    "claim",
    [
        {"modes": ("ReadWriteOnce",)},
        {"modes": ("ReadWriteMany",), "annotations": {"volume.kubernetes.io/node-expansion-not-required": "yes"}},
    ],
)
async def test_what_is_done_elsewhere_is_only_noted(bench, claim):
    one = bench(DONE, **claim)
    await one.grow()
    assert (one.driver.asked, one.api.patches, one.events) == ([], [], [])
    assert one.volume.size_bytes == 2 * GI


async def test_a_shared_volume_of_a_driver_that_grows_nothing_on_nodes_is_done(bench):
    one = bench(DONE, modes=("ReadWriteMany",), capabilities=(rules.STAGE,))
    assert (await one.grow()).failure is None
    assert (one.api.patches, one.volume.size_bytes) == ([], 2 * GI)


async def test_a_reader_is_told_once_that_nothing_grows_and_hides_the_growth_from_nobody(bench):
    one = bench()
    await one.at_mount(read_only=True)
    assert one.driver.asked == []
    assert [(kind, reason) for _, kind, reason in one.events] == [("Warning", "FileSystemResizeFailed")] * 2
    await one.at_mount(state=MountState.MOUNTED, read_only=True)  # published again
    assert len(one.events) == 2
    assert wants_growth(one.volume, use())  # for a pod that writes
    assert not wants_growth(one.volume, use(read_only=True))
