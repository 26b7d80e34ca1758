"""What it costs to have the Kubernetes layer in a process: time to import it, and resident memory, part by part.

Run: python benchmarks/kube_import.py
Each row is a fresh interpreter, the best of five. The last row is what the official package would cost instead.
"""

import subprocess
import sys

_ROWS = {
    "nothing": "pass",
    "aiohttp, msgspec (libraries)": "import aiohttp, msgspec, yaml, prometheus_client",
    "moorage.kube.quantity, selectors": "import moorage.kube.quantity, moorage.kube.selectors",
    "moorage.kube.objects": "import moorage.kube.objects",
    "moorage.kube.api.client": "import moorage.kube.api.client",
    "the whole layer": "import moorage.kube.cache.informer, moorage.kube.control.queue; "
    "import moorage.kube.control.events, moorage.kube.control.election",
    "kubernetes (official package)": "import kubernetes.client, kubernetes.config",
}
_PROBE = """
import os, sys, time
began = time.perf_counter()
{code}
took = time.perf_counter() - began
pages = int(open("/proc/self/statm").read().split()[1])
print(took, pages * os.sysconf("SC_PAGE_SIZE"), "kubernetes" in sys.modules)
"""


def probe(code: str) -> tuple[float, int, bool]:
    runs = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _PROBE.format(code=code)], capture_output=True, text=True, check=True
        )
        took, resident, official = done.stdout.split()
        runs.append((float(took), int(resident), official == "True"))
    return min(runs)


def main() -> None:
    results = {name: probe(code) for name, code in _ROWS.items()}
    for name, (took, resident, official) in results.items():
        print(f"{name:36} {took * 1000:7.0f} ms {resident / 2**20:7.1f} MiB   official package imported: {official}")
    ours, theirs = results["the whole layer"], results["kubernetes (official package)"]
    print(f"official over ours: {theirs[0] / ours[0]:.1f} in time, {theirs[1] / ours[1]:.1f} in memory")


if __name__ == "__main__":
    main()
