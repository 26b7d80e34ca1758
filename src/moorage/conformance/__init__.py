"""The checks that moorage check runs against any CSI driver.

Owns: what a driver must answer, call by call, and the order in which a volume is walked through its life.
May not touch: Kubernetes, and any driver other than through its socket.
Start reading at: `suite.run_checks`; the checks are in `identity`, `controller`, `snapshots`, `node`, `groups`.
"""
