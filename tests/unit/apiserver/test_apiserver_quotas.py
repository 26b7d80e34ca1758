"""Resource quotas for claims: counted in the same write, freed after a deletion."""

import asyncio

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
CLASS = "fast.storageclass.storage.k8s.io"


async def limit(api, **hard):
    body = {"metadata": {"name": "q"}, "spec": {"hard": {key.replace("__", "."): value for key, value in hard.items()}}}
    return await api.make(QUOTAS, body)


async def used(api, expected):
    async with asyncio.timeout(20):
        while (found := ((await api("GET", f"{QUOTAS}/q"))["status"].get("used"))) != expected:
            await asyncio.sleep(0.02)
    return found


async def test_claims_beyond_the_requested_storage_are_refused(api, claim):
    await limit(api, requests__storage="2Gi")
    await api.make(CLAIMS, claim("a"))
    await api.make(CLAIMS, claim("b"))
    refusal = await api("POST", CLAIMS, claim("c"), expect=403)
    assert refusal["message"] == (
        'persistentvolumeclaims "c" is forbidden: exceeded quota: q, requested: requests.storage=1Gi,'
        " used: requests.storage=2Gi, limited: requests.storage=2Gi"
    )
    assert await used(api, {"requests.storage": "2Gi"})


async def test_claims_written_together_cannot_pass_a_quota(api, claim):
    await limit(api, persistentvolumeclaims="5")
    answers = await asyncio.gather(*(api("POST", CLAIMS, claim(f"c{number}")) for number in range(20)))
    assert sum(answer["kind"] == "PersistentVolumeClaim" for answer in answers) == 5
    assert len((await api("GET", CLAIMS))["items"]) == 5


async def test_a_class_has_limits_of_its_own(api, claim):
    body = {
        "metadata": {"name": "q"},
        "spec": {"hard": {f"{CLASS}/requests.storage": "1Gi", f"{CLASS}/persistentvolumeclaims": "9"}},
    }
    await api.make(QUOTAS, body)
    await api.make(CLAIMS, claim("a", storageClassName="fast"))
    await api("POST", CLAIMS, claim("b", storageClassName="fast"), expect=403)
    await api.make(CLAIMS, claim("c", storageClassName="slow"))
    assert await used(api, {f"{CLASS}/requests.storage": "1Gi", f"{CLASS}/persistentvolumeclaims": "1"})


async def test_deleted_claims_free_their_share(api, claim):
    await limit(api, persistentvolumeclaims="1")
    await api.make(CLAIMS, claim("a"))
    await api("POST", CLAIMS, claim("b"), expect=403)
    await api.merge(f"{CLAIMS}/a", {"metadata": {"finalizers": None}})
    await api("DELETE", f"{CLAIMS}/a", expect=200)
    await used(api, {"persistentvolumeclaims": "0"})
    await api.make(CLAIMS, claim("b"))


async def test_a_quota_counts_what_is_there_before_it(api, claim):
    await api.make(CLAIMS, claim("a"))
    await limit(api, requests__storage="1536Mi")
    await api("POST", CLAIMS, claim("b"), expect=403)
    await used(api, {"requests.storage": "1Gi"})


async def test_growth_counts_and_a_dry_run_does_not(api, claim):
    body = {"metadata": {"name": "fast"}, "provisioner": "x", "allowVolumeExpansion": True}
    await api.make("/apis/storage.k8s.io/v1/storageclasses", body)
    await limit(api, requests__storage="3Gi")
    await api.make(CLAIMS, claim("a", storageClassName="fast", volumeName="v"))
    await api.merge(f"{CLAIMS}/a/status", {"status": {"phase": "Bound"}})
    await api("POST", f"{CLAIMS}?dryRun=All", claim("b"), expect=201)
    await used(api, {"requests.storage": "1Gi"})
    grown = {"spec": {"resources": {"requests": {"storage": "4Gi"}}}}
    assert "exceeded quota: q" in (await api.merge(f"{CLAIMS}/a", grown, expect=403))["message"]
    grown["spec"]["resources"]["requests"]["storage"] = "3Gi"
    await api.merge(f"{CLAIMS}/a", grown)
    assert await used(api, {"requests.storage": "3Gi"})


async def test_quotas_of_pods_do_not_count_claims(api, claim):
    await api.make(
        QUOTAS, {"metadata": {"name": "q"}, "spec": {"hard": {"requests.storage": "0"}, "scopes": ["BestEffort"]}}
    )
    await api.make(CLAIMS, claim("a"))


async def test_a_request_lowered_after_a_failed_expansion_counts_until_its_allocation_falls(api, claim):
    body = {"metadata": {"name": "fast"}, "provisioner": "x", "allowVolumeExpansion": True}
    await api.make("/apis/storage.k8s.io/v1/storageclasses", body)
    await limit(api, requests__storage="4Gi")
    await api.make(CLAIMS, claim("a", storageClassName="fast", volumeName="v"))
    bound = {"phase": "Bound", "capacity": {"storage": "1Gi"}}
    await api.merge(f"{CLAIMS}/a/status", {"status": bound})
    await api.merge(f"{CLAIMS}/a", {"spec": {"resources": {"requests": {"storage": "4Gi"}}}})
    allocated = {"allocatedResources": {"storage": "4Gi"}}
    await api.merge(f"{CLAIMS}/a/status", {"status": allocated})
    await api.merge(f"{CLAIMS}/a", {"spec": {"resources": {"requests": {"storage": "2Gi"}}}})
    await api.merge(f"{QUOTAS}/q", {"spec": {"hard": {"requests.storage": "4500Mi"}}})  # is counted again
    async with asyncio.timeout(20):
        while (await api("GET", f"{QUOTAS}/q"))["status"]["hard"] != {"requests.storage": "4500Mi"}:
            await asyncio.sleep(0.02)
    await api("POST", CLAIMS, claim("b"), expect=403)
    await api.merge(f"{CLAIMS}/a/status", {"status": {"allocatedResources": {"storage": "2Gi"}}})
    assert await used(api, {"requests.storage": "2Gi"})
    await api.make(CLAIMS, claim("b"))


async def test_a_negative_limit_is_refused(api):
    body = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.storage": "-5"}}}
    refusal = await api("POST", QUOTAS, body, expect=422)
    assert "spec.hard[requests.storage]: Invalid value: " in refusal["message"]
    assert refusal["message"].endswith("must be greater than or equal to 0")
