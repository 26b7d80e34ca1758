"""The CSI contract: protocol files, generated stubs, client, server, errors, redaction."""
