"""The attacher: VolumeAttachments become published volumes, and back. Start reading at: `run.Attacher`."""
