"""Checks of the Identity service."""

import re

from moorage.conformance.suite import Bench, check, require
from moorage.csi import csi_pb2 as pb

SERVICE = "Identity"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@check(SERVICE, "GetPluginInfo gives a well-formed name and a version")
async def plugin_info(bench: Bench) -> None:
    info = await bench.client.GetPluginInfo(pb.GetPluginInfoRequest())
    good = 2 <= len(info.name) <= 63 and _NAME.fullmatch(info.name) is not None
    require(good, f"name {info.name!r} is not a domain-style name of at most 63 characters")
    require(bool(info.vendor_version), "vendor_version is empty")


@check(SERVICE, "GetPluginCapabilities lists only known capabilities")
async def plugin_capabilities(bench: Bench) -> None:
    answer = await bench.client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest())
    for entry in answer.capabilities:
        kind = entry.WhichOneof("type")
        require(kind is not None, "an entry has no type")
        number = entry.service.type if kind == "service" else entry.volume_expansion.type
        require(number != 0, f"an entry of kind {kind} is UNKNOWN")
    strange = sorted(name for name in bench.capabilities if "unknown value" in name)
    require(not strange, f"capabilities outside CSI v1.13: {', '.join(strange)}")


@check(SERVICE, "Probe answers, and does not say that it is still starting")
async def probe(bench: Bench) -> None:
    answer = await bench.client.Probe(pb.ProbeRequest())
    require(not answer.HasField("ready") or answer.ready.value, "ready is false")
