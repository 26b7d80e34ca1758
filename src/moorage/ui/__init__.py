"""The live page for volumes: what is where in Provision → Attach → Mount, what is stuck and why.

Owns: `moorage ui`, which reads a cluster through a kubeconfig and serves it as web pages. Every sentence about what is
wrong, and every next step, comes from `moorage.insight`. Only `actions` writes, and only if the user allowed it.
Start reading at: `run.py`, then `board.py` and `pages.py`.
"""
