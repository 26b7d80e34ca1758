"""Background work of the server: namespaces, owner references, old events."""
