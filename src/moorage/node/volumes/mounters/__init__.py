"""One module for each way to mount a volume: CSI filesystem, CSI block, built-in."""
