"""The connection to a Kubernetes API server: configuration, transport, client, metrics."""
