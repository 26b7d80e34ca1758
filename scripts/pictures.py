"""Take the screenshots that README and docs show, of a cluster made for them. Needs root, kubectl and Chromium.

    python scripts/pictures.py [FOLDER]    (default: docs/images)

Start reading at: `main`.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SHOTS = (  # name, path, width, colours
    ("live-page", "/", 1280, "light"),
    ("live-page-volume", "/o/pvc/default/restored", 1280, "light"),
    ("live-page-phone", "/", 400, "dark"),
)
OBJECTS = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: reports}
spec: {accessModes: [ReadWriteOnce], storageClassName: fast-ssd, resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: archive}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 50Ti}}}
---
apiVersion: v1
kind: Pod
metadata: {name: archiver}
spec:
  containers: [{name: c, image: host, command: [sleep, "1000"], volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: archive}}]
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: before-upgrade}
spec: {source: {persistentVolumeClaimName: data}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: restored}
spec:
  accessModes: [ReadWriteOnce]
  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: before-upgrade}
  resources: {requests: {storage: 256Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: reader}
spec:
  containers: [{name: c, image: host, command: [sleep, "1000"], volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: restored}}]
"""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster() as (link, kubeconfig), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(link)
        fill(page, kubeconfig)
        for name, path, width, colours in SHOTS:
            page.set_viewport_size({"width": width, "height": 700})
            page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
            page.goto(link.partition("/?")[0] + path)
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"{name}.png", full_page=True)
            print(folder / f"{name}.png")
        browser.close()


@contextmanager
def cluster() -> Iterator[tuple[str, Path]]:
    """Run a cluster; yields the link to its page and its kubeconfig."""
    with tempfile.TemporaryDirectory(prefix="moorage-pictures-") as text:
        data = Path(text)
        command = [sys.executable, "-m", "moorage.cli.main", "up", "--data-dir", str(data), "--pool-size", "10Gi"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert running.stdout is not None
            link = next(line.split()[-1] for line in running.stdout if "token=" in line)
            time.sleep(2)  # the page is a process of its own
            yield link, data / "kubeconfig"
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait()


def fill(page: Page, kubeconfig: Path) -> None:
    """Create what the pictures show, and wait until it is shown."""
    kubectl = ["kubectl", "--kubeconfig", str(kubeconfig)]
    subprocess.run([*kubectl, "apply", "-f", str(ROOT / "examples" / "claim-and-pod.yaml")], check=True)
    page.locator(".recent .card").first.wait_for()
    subprocess.run([*kubectl, "apply", "-f", "-"], input=OBJECTS, text=True, check=True)
    page.locator(".recent .card").nth(1).wait_for()
    page.locator(".troubles li").nth(1).wait_for()


if __name__ == "__main__":
    main()
