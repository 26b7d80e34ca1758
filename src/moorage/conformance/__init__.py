"""The checks that `moorage check` runs against any CSI driver, in any language.

Owns: what a driver must answer and do, call by call, and the engine that tries it; deadlines, crashes, clean-up and
reports.
May not touch: Kubernetes, and any driver other than through its socket and the paths that it was asked to mount at.
Start reading at: `engine.run_checks`; the rules are in `checks`, one module for each subject.
"""
