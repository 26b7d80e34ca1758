"""The provisioner: claims become volumes, and released volumes are deleted. Start reading at: `run.Provisioner`."""
