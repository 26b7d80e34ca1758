"""The public test kit: an embedded API server and a scripted CSI driver. No product module imports it."""
