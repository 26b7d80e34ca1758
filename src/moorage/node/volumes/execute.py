"""Carrying out one action on one volume.

Owns: choosing who does it (CSI filesystem, CSI block, plain), and turning every way to fail into an Outcome.
May not touch: the world; the caller settles the outcome.
Start reading at: `Executor.execute`.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from moorage.errors import MoorageError
from moorage.log import get_logger
from moorage.node.layout import PodUid
from moorage.node.volumes.expand import Grower
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import (
    ActualVolume,
    CsiSource,
    Expand,
    MountState,
    MountVolume,
    PlainSource,
    StepFailure,
    StepOutcome,
    UnmountDevice,
    UnmountVolume,
    VolumeAction,
    VolumeUse,
)

log = get_logger(__name__)


class Mounter(Protocol):
    """One kind of volume: each method ends in the state it names, or raises."""

    async def stage(self, use: VolumeUse, is_staged: bool, is_reconstructed: bool) -> None: ...

    async def publish(self, use: VolumeUse, state: MountState, may_be_used: bool) -> None: ...

    async def unpublish(self, volume: ActualVolume, uid: PodUid) -> None: ...

    async def unstage(self, volume: ActualVolume) -> None: ...


class VolumeExecutor:
    """Acts on drivers and on the disk."""

    def __init__(
        self,
        filesystem: Mounter,
        block: Mounter,
        plain: Mounter,
        grower: Grower,
        concern: Callable[[VolumeAction], AbstractContextManager[None]] = lambda action: nullcontext(),
    ) -> None:
        """`concern` is entered around each action; see `moorage.csi.pending.on_behalf_of`."""
        self._concern = concern
        self._filesystem = filesystem
        self._block = block
        self._plain = plain
        self._grower = grower

    async def execute(self, action: VolumeAction, volume: ActualVolume) -> StepOutcome:
        """The action's outcome; only cancellation of the caller is raised."""
        with self._concern(action):
            return await self._execute(action, volume)

    async def _execute(self, action: VolumeAction, volume: ActualVolume) -> StepOutcome:
        reached = StepOutcome()
        try:
            match action:
                case MountVolume(use):
                    return await self._mount(use, volume)
                case Expand(use):
                    return await self._grower.grow(use, volume)
                case UnmountVolume(_, uid):
                    await self._for(volume.source_of(uid)).unpublish(volume, uid)
                case UnmountDevice():
                    for mounter in self._all_for(volume.source):
                        await mounter.unstage(volume)
                    self._grower.forget(volume.name)
            return reached
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The driver's connection was closed under the call (it was replaced): nothing is known.
            return StepOutcome(StepFailure.UNCERTAIN, "device", "the driver went away during the call")
        except StepFailed as error:
            return StepOutcome(error.failure, error.step, str(error))
        except (MoorageError, OSError) as error:
            return StepOutcome(StepFailure.TRANSIENT, "device", str(error))
        except Exception as error:  # a volume with a step that never ends would stay for ever
            log.exception("volume step failed unexpectedly", action=action.kind, volume=volume.name)
            return StepOutcome(StepFailure.UNCERTAIN, "device", repr(error))

    async def _mount(self, use: VolumeUse, volume: ActualVolume) -> StepOutcome:
        mounter = self._for(use.source)
        reached = StepOutcome()
        step = "device"
        try:
            is_staged = volume.device is MountState.MOUNTED and mounter is self._for(volume.source)
            await mounter.stage(use, is_staged, volume.device_is_reconstructed)
            reached = replace(reached, staged=True)
            step = "pod"
            known = volume.pods.get(use.pod.uid)
            may_be_used = known is not None and known.may_be_used
            await mounter.publish(use, volume.state_of(use.pod.uid), may_be_used)
            reached = replace(reached, published=True)
            step = "expand"
            grown = await self._grower.grow_at_mount(use, volume)
            return replace(reached, size_bytes=grown.size_bytes, growth_refused=grown.growth_refused)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return replace(
                reached, failure=StepFailure.UNCERTAIN, step=step, message="the driver went away during the call"
            )
        except (MoorageError, OSError) as error:
            failure = error.failure if isinstance(error, StepFailed) else StepFailure.TRANSIENT
            failed = replace(reached, failure=failure, step=step, message=str(error))
            if step == "expand":  # the pod waits until the volume has its size
                return replace(failed, published=False, failure=StepFailure.UNCERTAIN)
            return failed
        except Exception as error:  # a driver's answer must not end the agent
            log.exception("mounting failed unexpectedly", volume=use.volume, pod=use.pod.uid)
            return replace(reached, failure=StepFailure.UNCERTAIN, step=step, message=repr(error))

    def _for(self, source: CsiSource | PlainSource) -> Mounter:
        if isinstance(source, PlainSource):
            return self._plain
        return self._block if source.is_block else self._filesystem

    def _all_for(self, source: CsiSource | PlainSource) -> tuple[Mounter, ...]:
        """Everyone who may have staged it: two PersistentVolumes of different modes may name one volume of a driver."""
        if isinstance(source, PlainSource) or source.is_ephemeral:
            return (self._for(source),)
        return (self._filesystem, self._block)
