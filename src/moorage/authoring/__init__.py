"""What a driver author works with: new projects, and the loop of edit, run and check.

Owns: `moorage driver new` (`project`) and `moorage driver run` (`loop`).
Start reading at: `project.files_of`, `loop.DriverLoop`.
"""
